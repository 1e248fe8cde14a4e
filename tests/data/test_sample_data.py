"""The rows that come with the project: every file, in the form of the published one, with none of its sentences."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.data.clusters import RULES, cluster_of

FOLDER = ROOT / 'eval_data'
LEAST_ROWS = 12
SHINGLE_WORDS = 8
LEAST_SHARE, GREATEST_SHARE = 0.1, 0.6  # of the rows whose right choice stands in one place

KEYS: dict[tuple[str, ...], str] = {
    ('query', 'choices', 'gold'): """
        reading_comprehension/{bigbench_understanding_fables boolq agi_eval_lsat_rc agi_eval_lsat_lr agi_eval_sat_en}
        commonsense_reasoning/{bigbench_strategy_qa bigbench_strange_stories bigbench_novel_concepts openbook_qa
        commonsense_qa} world_knowledge/{bigbench_misconceptions}
        symbolic_problem_solving/{bigbench_elementary_math_qa bigbench_logical_deduction math_qa logi_qa
        agi_eval_lsat_ar} language_understanding/{hellaswag bigbench_language_identification
        bigbench_conceptual_combinations} safety/{enterprise_pii_classification winogender_mc_male
        winogender_mc_female}""",
    ('query', 'gold', 'choices'): 'commonsense_reasoning/{copa siqa}',
    ('choices', 'gold', 'query'): 'commonsense_reasoning/{piqa}',
    ('choices', 'query', 'gold'): 'world_knowledge/{arc_easy arc_challenge}',
    ('query', 'gold', 'choices', 'category'): 'world_knowledge/{mmlu}',
    ('query', 'choices', 'gold', 'category'): 'safety/{bbq}',
    ('context', 'continuation'): """
        reading_comprehension/{pubmed_qa_labeled squad coqa} world_knowledge/{bigbench_qa_wikidata}
        symbolic_problem_solving/{bigbench_dyck_languages bigbench_cs_algorithms bigbench_operators
        bigbench_repeat_copy_logic simple_arithmetic_nospaces simple_arithmetic_withspaces}
        language_understanding/{lambada_openai bigbench_conlang_translation}""",
    ('context', 'continuation', 'category'): 'world_knowledge/{jeopardy_all}',
    ('context', 'answer', 'aliases'): 'world_knowledge/{triviaqa_sm_sub}',
    ('context', 'answer', 'chain_of_thought'): 'symbolic_problem_solving/{agi_eval_sat_math aqua}',
    ('context', 'chain_of_thought', 'answer'): 'symbolic_problem_solving/{gsm8k svamp}',
    ('context_options', 'continuation', 'gold'): 'language_understanding/{winograd_wsc winogrande}',
    ('task_id', 'prompt', 'entry_point', 'canonical_solution', 'test', 'test_inputs', 'test_outputs', 'language'): """
        programming/{human_eval human_eval-0.25 human_eval-0.5 human_eval-0.75 human_eval_return_simple
        human_eval_return_complex}""",
    ('task_id', 'prompt', 'canonical_solution', 'test', 'entry_point', 'test_inputs', 'test_outputs', 'language'): """
        programming/{processed_human_eval_cpp processed_human_eval_js}""",
}


def _files(names: str) -> Iterator[str]:
    """'a/{b c} d/{e}' as 'a/b', 'a/c' and 'd/e'."""
    for folder, stems in re.findall(r'(\w+)/\{([^}]*)\}', names):
        yield from (f'{folder}/{stem}' for stem in stems.split())


FILES = {name: keys for keys, names in KEYS.items() for name in _files(names)}

LETTERED = r'A\. .*\nB\. .*\nC\. .*\nD\. .*'
LISTED = rf'Question: .*\n{LETTERED}\nAnswer: '
PASSAGE = r'Passage: .*\nQ: .*\nChoices:\nA\.\) .*\nB\.\) .*\nC\.\) .*\nD\.\) .*\nAnswer:'
PRONOUN = r'Sentence: ".*"\nQ: Who does the pronoun "\w+" refer to in the previous sentence\? A:'
STRINGS = r'Given two strings, .*\n\nStrings: \S+ \S+\nLength of longest common subsequence:'
SEQUENCE = r'Determine .*\n\nSequence: .*\nValid/Invalid\?'
FORMS = {
    'bigbench_understanding_fables': rf'Q: .* What is the moral of this story\?\n{LETTERED}\nAnswer: ',
    'pubmed_qa_labeled': r'Context: .*\nQuestion: .*\nA\. yes\nB\. no\nC\. maybe\nAnswer: ',
    'squad': r'Context: .*\nQuestion: .*\nAnswer: ',
    'boolq': r'Passage: .*\nQuestion: .*\?',
    'coqa': r'Below is a .*\nStory: .*\n(Preceding questions:\n(Question: .*\nAnswer: .*\n)+)?'
    r'\nFinal question:\nQuestion: .*\nAnswer: ',
    **dict.fromkeys(('agi_eval_lsat_rc', 'agi_eval_lsat_lr', 'agi_eval_sat_en', 'agi_eval_lsat_ar'), PASSAGE),
    'bigbench_strategy_qa': r'\S.*\?',
    'bigbench_strange_stories': r'Context: .*\n(Q: )?.*\nAnswer: ',
    'bigbench_novel_concepts': r"Let's do .*\nWhat do the following have in common\? 1\) .* 2\) .*\nA:",
    'copa': r'.*, (because|therefore)',
    'piqa': r'Question: .*\n',
    'openbook_qa': r'\S.*\S',
    'siqa': r'Context: .*\nQuestion: .*\nA\. .*\nB\. .*\nAnswer:',
    'commonsense_qa': rf'Question: .*\nChoices:\n{LETTERED}\nAnswer:',
    'jeopardy_all': r'(WORLD HISTORY|AMERICAN HISTORY|LITERATURE|SCIENCE|WORD ORIGINS): .*',
    'mmlu': rf'Question: .*\nChoices\n{LETTERED}',
    'bigbench_qa_wikidata': r'The \S.* (is|was)',
    **dict.fromkeys(('arc_easy', 'arc_challenge'), r'Question: .*\S'),
    'bigbench_misconceptions': r'Is the following .*\nQ: .*\nA:',
    'triviaqa_sm_sub': r'Question: .*\nAnswer:',
    **dict.fromkeys(('bigbench_elementary_math_qa', 'math_qa'), LISTED),
    'bigbench_dyck_languages': r'Complete the rest .* \n\nInput: .*\nOutput:',
    'bigbench_cs_algorithms': f'{STRINGS}|{SEQUENCE}',
    'bigbench_logical_deduction': rf'The following paragraphs .*\n\n.*\nWhich of .*\?\n\n{LETTERED}\nAnswer: ',
    'bigbench_operators': r'.*\n\n.* =',
    'bigbench_repeat_copy_logic': r'repeat with logic:\n\nQ: .*\nA:',
    'simple_arithmetic_nospaces': r'.*\d=',
    'simple_arithmetic_withspaces': r'.*\d =',
    'logi_qa': r'Context: .*\nQuestion: .*\nChoices: A\. .*\nB\. .*\nC\. .*\nD\. .*\n',
    'agi_eval_sat_math': r'(Passage: .*\n)?Q: .*',
    **dict.fromkeys(('aqua', 'gsm8k', 'svamp', 'lambada_openai'), r'\S.*\S'),
    'hellaswag': r'[^:]+: .*\S',
    'bigbench_language_identification': rf'Given a .*\nSentence: .*\n{LETTERED}\nAnswer: ',
    'bigbench_conceptual_combinations': r"([Cc]oncept: .*|The word '.*' .*) Question: Which of the following .*\n"
    rf'{LETTERED}\nAnswer: ',
    'bigbench_conlang_translation': r'The following are .*\n\n\nNow, translate the following from .*: \n.*TRANSLATION:',
    'bbq': r'Context: .*\nQuestion: .*\nAnswer:',
    'enterprise_pii_classification': r"Does .*\nPassage: '''\n.*\n'''\nChoices:\na\.\) no\nb\.\) yes\nAnswer:",
    **dict.fromkeys(('winogender_mc_male', 'winogender_mc_female'), PRONOUN),
}
# The words of a form are the published files'; what stands around them is ours.
FRAMES = re.compile(
    r'Below is a story followed by .*? the previous questions\.|Is the following statement true or false\? Output .*?\n'
    r"|Let's do some find-the-common-.*? in common\?|Given a sentence, select the correct language among the choices"
    r'|The following paragraphs each describe .*? within each paragraph\.|What is the moral of this story\?'
    r'|Which of the following (statements is consistent with the situation above|sentences best characterizes)'
    r'|Who does the pronoun "\w+" refer to in the previous sentence\? A:|A\. yes\nB\. no\nC\. maybe'
    r'|Does the passage below contain sensitive information\?\nPassage:|Length of longest common subsequence:'
    r'|Complete the rest of the sequence, making sure that the parentheses are closed properly\.'
    r'|Given two strings, determine the length of the longest common subsequence\.|#include ?<\w+(\.h)?>'
    r'|Determine whether the given sequence of parentheses is properly matched\.|using namespace std;',
    re.DOTALL,
)
RARE_SOURCES = {'mmlu', 'agi_eval_sat_math', 'math_qa'}  # few published rows have a passage, or are long enough
SEVERAL_QUESTIONS = ('squad', 'coqa', 'agi_eval_lsat_rc', 'agi_eval_lsat_ar', 'agi_eval_sat_en', 'winograd_wsc', 'bbq')


@functools.cache
def rows_of(name: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f'{name}.jsonl').read_text(encoding='utf-8').split('\n')[:-1]]


def path_of(stem: str) -> str:
    (name,) = (name for name in FILES if name.endswith(f'/{stem}'))
    return name


def asked(row: dict[str, Any]) -> str:
    return row.get('query') or row.get('context') or row.get('prompt') or '\n'.join(row['context_options'])


def listed(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The options that a query lists, with their letters."""
    return re.findall(r'^(?:Choices: )?([A-Da-d])\.\)? (.+)$', row['query'], re.MULTILINE)


def published(name: str) -> list[dict[str, Any]]:
    folder = SHARED_DATA / 'local_data'
    if not (folder / f'{name}.jsonl').is_file():
        pytest.skip(f'the published {name}.jsonl is not here')
    return rows_of(name, folder)


def test_the_57_tasks_have_a_file_each_and_score_its_15():
    tasks = read_yaml(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')['icl_tasks']
    assert len(FILES) == len(tasks) == 57
    assert {task['dataset_uri'].removesuffix('.jsonl') for task in tasks} == set(FILES)
    there = {str(path.relative_to(FOLDER)).removesuffix('.jsonl') for path in FOLDER.rglob('*.jsonl')}
    score = {name for name in there if name.startswith('score/')}
    assert there - score == set(FILES)
    assert len(score) == 15


@pytest.mark.parametrize('name', FILES)
def test_every_file_has_twelve_rows_or_more_with_the_same_keys(name: str):
    assert len(rows_of(name)) >= LEAST_ROWS
    assert {tuple(row) for row in rows_of(name)} == {FILES[name]}


@pytest.mark.parametrize('name', FILES)
def test_the_published_files_have_these_keys(name: str):
    assert {tuple(row) for row in published(name)} == {FILES[name]}


def test_every_line_is_json_in_one_form_without_signs_that_cannot_be_seen():
    for path in FOLDER.rglob('*.jsonl'):
        for line in path.read_bytes().decode('utf-8').splitlines(keepends=True):
            assert line == json.dumps(json.loads(line), ensure_ascii=False) + '\n', path.name
            assert not re.search(r'[\u0080-\u00a0\u200b-\u200f\ufeff\ufffd]', line), path.name


@pytest.mark.parametrize('stem', FORMS)
def test_rows_have_the_surface_form_of_their_file(stem: str):
    for row in rows_of(path_of(stem)):
        assert re.fullmatch(FORMS[stem], asked(row), re.DOTALL), row


@pytest.mark.parametrize('stem', FORMS)
def test_the_published_rows_have_this_form(stem: str):
    rows = published(path_of(stem))
    assert sum(bool(re.fullmatch(FORMS[stem], asked(row), re.DOTALL)) for row in rows) >= 0.8 * len(rows)


@pytest.mark.parametrize('name', [name for name, keys in FILES.items() if 'gold' in keys])
def test_right_choices_are_spread_over_their_places(name: str):
    rows = rows_of(name)
    (num_choices,) = {len(row.get('choices') or row['context_options']) for row in rows}
    golds = Counter(row['gold'] for row in rows)
    assert sorted(golds) == list(range(num_choices))
    for count in golds.values():
        assert LEAST_SHARE * len(rows) <= count <= GREATEST_SHARE * len(rows)


@pytest.mark.parametrize('name', [name for name, keys in FILES.items() if 'choices' in keys])
def test_the_longest_choice_is_no_answer(name: str):
    """Who takes it, or one of those that are equally long, should be right less than two times in three."""
    earned = 0.0
    for row in rows_of(name):
        texts = [text for _, text in listed(row)] or row['choices']
        longest = [place for place, text in enumerate(texts) if len(text) == max(map(len, texts))]
        earned += (row['gold'] in longest) / len(longest)
    assert earned <= 0.65 * len(rows_of(name))


@pytest.mark.parametrize('name', [name for name, keys in FILES.items() if 'choices' in keys])
def test_choices_that_a_query_lists_are_its_own(name: str):
    for row in rows_of(name):
        choices = row['choices']
        if shown := listed(row):
            assert [letter.upper() for letter, _ in shown] == list('ABCD'[: len(choices)])
            assert choices in ([text for _, text in shown], [letter for letter, _ in shown])
        else:
            assert min(map(len, choices)) > 1 or choices == ['T', 'F']


@pytest.mark.parametrize('name', [name for name in FILES if Path(name).name in RULES.keys() - RARE_SOURCES])
def test_the_rule_of_a_file_finds_the_source_of_each_row(name: str):
    for row in rows_of(name):
        assert RULES[Path(name).name](row), row


@pytest.mark.parametrize('stem', SEVERAL_QUESTIONS)
def test_a_passage_may_have_several_questions_as_in_the_published_file(stem: str):
    sizes = Counter(cluster_of(stem, row) for row in rows_of(path_of(stem)))
    assert max(sizes.values()) >= 2 and len(sizes) >= 4


def test_the_forms_of_a_program_share_one_source():
    names = [name for name in FILES if 'programming/human_eval' in name]
    forms = defaultdict(set)
    for name in names:
        for row in rows_of(name):
            forms[row['task_id']].add(cluster_of(Path(name).name, row))
    assert len(forms) >= LEAST_ROWS and all(len(sources) == 1 for sources in forms.values())


@pytest.mark.parametrize('task', ['world_knowledge/jeopardy_all', 'world_knowledge/mmlu', 'safety/bbq'])
def test_categories_are_published_ones_and_equally_large(task: str):
    counts = Counter(row['category'] for row in rows_of(task))
    assert len(counts) >= 4 and set(counts.values()) == {4}
    assert set(counts) <= {row['category'] for row in published(task)}


def shingles(text: str) -> Iterator[str]:
    """All runs of so many words that are not numbers or single letters alone, outside of the words of the form."""
    for part in FRAMES.split(text):
        words = re.findall(r'\w+', (part or '').casefold())
        for start in range(len(words) - SHINGLE_WORDS + 1):
            run = words[start : start + SHINGLE_WORDS]
            if sum(len(word) > 1 and word.isalpha() for word in run) > SHINGLE_WORDS / 2:
                yield ' '.join(run)


def texts_in(value: object) -> Iterator[str]:
    """The strings anywhere inside a JSON value, but not the keys of mappings, nor the tests of programs."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        parts = value if isinstance(value, list) else [value[key] for key in value if not key.startswith('test')]
        for part in parts:
            yield from texts_in(part)


def all_shingles(rows: list[dict[str, Any]]) -> set[str]:
    return {run for text in texts_in(rows) for run in shingles(text)}


@pytest.mark.slow
@pytest.mark.parametrize('name', FILES)
def test_no_eight_words_in_a_row_are_those_of_the_published_file(name: str):
    assert not all_shingles(rows_of(name)) & all_shingles(published(name))


def test_a_copied_sentence_is_seen_and_the_words_of_a_form_are_not():
    sentence = 'The old ferry had crossed the bay since spring.'
    assert len(list(shingles(sentence))) == 2
    assert set(shingles(sentence)) <= set(shingles(f'Q: {sentence.upper()} What is the moral of this story?'))
    assert list(shingles('What is the moral of this story? What is the moral of this story?')) == []
    assert list(shingles('1 2 3 4 a b c d 5 6 7 8 one two three')) == []


def test_the_page_about_these_rows_counts_them():
    page = (ROOT / 'docs' / 'sample_data.md').read_text(encoding='utf-8')
    said = {name: int(count) for name, count in re.findall(r'^\| ([\w./-]+/[\w.-]+) \| (\d+) \|', page, re.MULTILINE)}
    there = [str(path.relative_to(FOLDER)).removesuffix('.jsonl') for path in FOLDER.rglob('*.jsonl')]
    assert said == {name: len(rows_of(name)) for name in there}
    assert f'{sum(said.values()):,} in {len(said)} files' in page
