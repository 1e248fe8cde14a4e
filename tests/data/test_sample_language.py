"""The sample data: what their texts must have in common, so that answers can be found and no file is one-sided."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from test_sample_data import rows_of

READING, LANGUAGE, SAFETY = 'reading_comprehension', 'language_understanding', 'safety'
SCHEMAS = [f'{LANGUAGE}/winograd_wsc', f'{LANGUAGE}/winogrande']
WINOGENDER = {'winogender_mc_female': {'she', 'her'}, 'winogender_mc_male': {'he', 'his', 'him'}}
UNKNOWN = "Can't be determined"


def words(text: str) -> list[str]:
    return re.findall(r'\w+', text.casefold())


def test_answers_of_squad_stand_in_their_passage():
    for row in rows_of(f'{READING}/squad'):
        passage, question = re.fullmatch(r'Context: (.*)\nQuestion: (.*)\nAnswer: ', row['context']).groups()
        assert passage.count(row['continuation']) == 1, row
        assert row['continuation'] not in question


def test_answers_of_coqa_stand_in_their_story_and_among_the_later_questions():
    stories = defaultdict(list)
    for row in rows_of(f'{READING}/coqa'):
        story = re.search(r'Story: (.*)\n', row['context'])[1]
        assert set(words(row['continuation'])) - {'a', 'by', 'in', 'the'} <= set(words(story)), row
        before = re.findall(r'Question: (.*)\nAnswer: (.*)\n', row['context'])
        question = re.search(r'Final question:\nQuestion: (.*)\nAnswer: $', row['context'])[1]
        assert before == stories[story]
        stories[story].append((question, row['continuation']))
    assert min(map(len, stories.values())) >= 3


@pytest.mark.parametrize('name', SCHEMAS)
def test_the_two_sentences_of_a_schema_have_different_antecedents(name: str):
    pairs = defaultdict(dict)
    for row in rows_of(name):
        first, second = (option.split() for option in row['context_options'])
        same = next(place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
        for told, thing in ((first, first[same:]), (second, second[same:])):
            assert ' '.join(thing).casefold() in ' '.join(told[:same]).casefold(), row
        assert row['continuation'].endswith('.') and row['continuation'][0].islower()
        pairs[tuple(row['context_options'])][row['gold']] = row['continuation']
    assert all(sorted(pair) == [0, 1] and pair[0] != pair[1] for pair in pairs.values())


def test_both_winogender_files_ask_once_of_the_same_persons_and_mean_the_other():
    meant = {}
    for name, pronouns in WINOGENDER.items():
        for row in rows_of(f'{SAFETY}/{name}'):
            sentence, pronoun = re.match(r'Sentence: "(.*)"\nQ: Who does the pronoun "(\w+)"', row['query']).groups()
            gendered = [word for word in words(sentence) if word in set().union(*WINOGENDER.values())]
            assert gendered == [pronoun] and pronoun in pronouns, row
            assert all(words(sentence).count(choice.split()[1]) == 1 for choice in row['choices']), row
            assert (name, tuple(row['choices'])) not in meant
            meant[name, tuple(row['choices'])] = row['gold']
    female, male = ({persons: gold for (file, persons), gold in meant.items() if file == name} for name in WINOGENDER)
    assert female == {persons: 1 - gold for persons, gold in male.items()}


def test_each_scene_of_bbq_is_told_without_and_with_what_decides_it():
    rows = rows_of(f'{SAFETY}/bbq')
    for short, full in zip(rows[::2], rows[1::2], strict=True):
        scenes = [re.match(r'Context: (.*)\nQuestion: (.*)\nAnswer:', row['query']).groups() for row in (short, full)]
        assert scenes[0][1] == scenes[1][1] and short['category'] == full['category']
        assert scenes[1][0].startswith(scenes[0][0] + ' ')
        assert short['choices'][short['gold']] == UNKNOWN
        decided = full['choices'][full['gold']]
        assert decided != UNKNOWN and decided.lower() in scenes[1][0].removeprefix(scenes[0][0]).lower()
    stereotyped = [row['choices'][1 - row['gold']] for row in rows[::2]]
    decided = [row['choices'][row['gold']] for row in rows[1::2]]
    assert not any(one == other for one, other in zip(stereotyped, decided, strict=True))


def test_an_answer_is_among_its_aliases_and_none_of_them_is_nothing():
    for row in rows_of('world_knowledge/triviaqa_sm_sub'):
        assert row['answer'] in row['aliases'] and len(set(row['aliases'])) == len(row['aliases'])
        assert all(set(words(alias)) - {'a', 'an', 'the'} for alias in row['aliases'])


def test_chains_of_thought_end_in_the_answer():
    for row in rows_of('symbolic_problem_solving/gsm8k'):
        assert re.findall(r'<<.*?=(.*?)>>', row['chain_of_thought'])[-1] == row['answer']
