"""SCORE's prompt files (upstream's schema, and errors in files that do not follow it), and variants of a question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.resources import PACKAGE
from llmfoundry_gauntlet.config.score import ScoreSpec
from llmfoundry_gauntlet.data.score_rows import LetteredQuestion, MathQuestion
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks.templates import (
    NO_TEMPLATE,
    OPTIONS_FORMAT,
    Posed,
    Template,
    Templates,
    perturbation_of,
    prompts_file,
    read_templates,
    seed_of,
    variants,
)
from llmfoundry_gauntlet.types import Example

ASK = {'prompt': '{question}{options}', 'options_format': '\n{letter}: {option}'}
FILE = {
    'option_order_robustness': ASK,
    'non_greedy_robustness': ASK,
    'prompt_robustness': [{**ASK, 'prompt': f'{number}. {{question}}{{options}}'} for number in range(10)],
}
SOLVE = {'prompt': 'Solve: {question}'}
MATH_FILE = {'non_greedy_robustness': SOLVE, 'prompt_robustness': [SOLVE] * 10}
UPSTREAM = SHARED_DATA / 'score' / 'upstream_prompts'


def task_of(dataset: str = 'mmlu_pro', **keys: Any) -> ScoreSpec:
    return load_suite(None, None, {'dataset': dataset, **keys}).tasks[0].spec


def read(tmp_path: Path, content: Any, dataset: str = 'mmlu_pro', **keys: Any) -> Templates:
    path = tmp_path / 'prompts.json'
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_templates(task_of(dataset, prompts=str(path), **keys), tmp_path)


def problems_of(tmp_path: Path, content: Any, dataset: str = 'mmlu_pro', **keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, content, dataset, **keys)
    return [problem.replace(f'{tmp_path}/', '') for problem in raised.value.problems]


def changed(number: int, **keys: Any) -> dict[str, Any]:
    """The file with another prompt at one place of the ten."""
    prompts = [*FILE['prompt_robustness']]
    prompts[number] = keys
    return {**FILE, 'prompt_robustness': prompts}


def test_a_file_has_one_prompt_for_two_perturbations_and_ten_that_are_compared(tmp_path):
    templates = read(tmp_path, {**FILE, 'non_greedy_robustness': {'prompt': '{question}{options} {{it}}'}})
    assert templates.option_order == Template('{question}{options}', '\n{letter}: {option}')
    assert templates.non_greedy == Template('{question}{options} {{it}}', OPTIONS_FORMAT)
    assert [template.prompt[:2] for template in templates.prompt] == [f'{number}.' for number in range(10)]


def test_a_prompt_is_filled_in_with_an_options_line_for_each():
    template = Template('On {category}: {question} {{x}}{options} {question}', ' {letter}) {option};')
    text = template.text('Who {is} {{it}}?', ('{he}', 'she', '{0}'), 'law')
    assert text == 'On law: Who {is} {{it}}? {x} A) {he}; B) she; C) {0}; Who {is} {{it}}?'
    assert Template('{question}').text('1+1?') == '1+1?'
    assert Template('{question}{options}').options_format == OPTIONS_FORMAT == '\n{letter}: {option}'


@pytest.mark.parametrize(
    ('entry', 'facts'),
    [
        ({'prompt': '{options}'}, '.prompt: {question}'),
        ({'prompt': '{question}'}, '.prompt: {options}'),
        ({'prompt': '{question}{options}{answer}'}, '.prompt: {answer} {category}, {options}, {question}'),
        ({'prompt': '{question}{options}{category.x}'}, '.prompt: {category.x} {category}, {options}, {question}'),
        ({'prompt': '{question:{width}}{options}'}, ".prompt: 'width'"),
        ({'prompt': '{question!x}{options}'}, '.prompt: conversion'),
        ({'prompt': '{question}{options} }'}, ".prompt: '}' '{{'"),
        ({'prompt': '{question}{options}', 'options_format': 7}, '.options_format: 7'),
        ({**ASK, 'options_format': '\n{option}'}, '.options_format: {letter}'),
        ({**ASK, 'options_format': '{letter}{option}{question}'}, '.options_format: {question} {letter}, {option}'),
        ({'prompt': 7}, '.prompt: 7 text'),
        ({'options_format': '{letter}{option}'}, ": 'prompt' missing"),
        ({**ASK, 'promt': ''}, ".promt: unknown 'prompt'"),
    ],
)
def test_errors_name_the_prompt_its_key_and_what_is_allowed(tmp_path, entry: dict[str, Any], facts: str):
    key, _, words = facts.partition(': ')
    for place, content in (
        ('prompt_robustness[7]', changed(7, **entry)),
        ('option_order_robustness', {**FILE, 'option_order_robustness': entry}),
    ):
        (problem,) = problems_of(tmp_path, content)
        assert problem.startswith(f'score_mmlu_pro: prompts.json: {place}{key}: ')
        assert all(word in problem for word in words.split())


@pytest.mark.parametrize('prompts', [[ASK] * 9, [ASK] * 11, ASK], ids=lambda prompts: str(prompts)[:9])
def test_there_are_ten_prompts_to_compare(tmp_path, prompts: Any):
    (problem,) = problems_of(tmp_path, {**FILE, 'prompt_robustness': prompts})
    assert problem.startswith('score_mmlu_pro: prompts.json: prompt_robustness: ') and problem.endswith('10')


def test_all_errors_in_a_file_are_listed_at_once(tmp_path):
    content = {**changed(2, prompt='{question}'), 'non_greedy_robustness': {'prompt': '{options}'}}
    del content['option_order_robustness']
    missing, *others = problems_of(tmp_path, content)
    assert "'option_order_robustness'" in missing
    places = [problem.split(': ')[2] for problem in others]
    assert places == ['prompt_robustness[2].prompt', 'non_greedy_robustness.prompt']
    of_math = problems_of(tmp_path, FILE, 'math')  # whose prompts have no options
    assert len(of_math) == 12 and all('{options}' in problem for problem in of_math)


def test_keys_of_perturbations_that_are_not_applied_may_be_missing(tmp_path):
    templates = read(tmp_path, {'prompt_robustness': FILE['prompt_robustness']}, perturbations='prompt')
    assert (templates.option_order, templates.non_greedy, len(templates.prompt)) == (NO_TEMPLATE, NO_TEMPLATE, 10)
    likely = {key: value for key, value in FILE.items() if key != 'non_greedy_robustness'}
    assert read(tmp_path, likely, answers='likelihood').non_greedy == NO_TEMPLATE
    assert read(tmp_path, MATH_FILE, 'math').option_order == NO_TEMPLATE


@pytest.mark.parametrize(
    ('content', 'place'), [('{\n"a": 1,\n}', 'prompts.json:3: '), ('', 'prompts.json:1: '), ([], 'prompts.json: ')]
)
def test_a_file_without_a_mapping_is_an_error_with_its_line(tmp_path, content: Any, place: str):
    (problem,) = problems_of(tmp_path, content)
    assert problem.startswith(place)
    for path in (tmp_path / 'nowhere.json', tmp_path):
        with pytest.raises(ConfigError, match=f'^{path}: '):
            read_templates(task_of(prompts=str(path)), tmp_path)


def test_the_default_file_is_below_the_data_root_or_the_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    own = Path('eval_data/score/prompts')
    for dataset in ('mmlu_pro', 'agieval', 'math'):
        assert prompts_file(task_of(dataset), tmp_path) == own / f'{dataset}.json'
    tasks = [{'label': 'arc', 'dataset_uri': 'x', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}]
    arc = load_suite(tasks, None, {'dataset': 'arc'}).tasks[-1].spec
    assert prompts_file(arc, tmp_path) == own / 'agieval.json'  # which names no number of letters
    below = tmp_path / 'score' / 'prompts' / 'agieval.json'
    below.parent.mkdir(parents=True)
    below.write_text(json.dumps(FILE))
    assert prompts_file(task_of('agieval'), tmp_path) == prompts_file(arc, tmp_path) == below
    assert prompts_file(task_of('agieval', prompts='mine.json'), tmp_path) == Path('mine.json')
    monkeypatch.chdir(tmp_path)
    assert prompts_file(task_of('math'), tmp_path) == PACKAGE / own / 'math.json'
    assert prompts_file(task_of('math', prompts=str(own / 'math.json')), tmp_path) == PACKAGE / own / 'math.json'


@pytest.mark.skipif(not UPSTREAM.is_dir(), reason=f"{UPSTREAM} is absent: upstream's prompts")
@pytest.mark.parametrize(('dataset', 'name'), [('mmlu_pro', 'mmlu_pro'), ('agieval', 'agi_eval'), ('math', 'math')])
def test_upstreams_files_load_unchanged(dataset: str, name: str):
    path = UPSTREAM / f'{name}_prompt_templates.json'
    templates = read_templates(task_of(dataset, prompts=str(path)), ROOT)
    content = json.loads(path.read_text())
    wanted = [entry['prompt'] for entry in content['prompt_robustness']]
    assert [template.prompt for template in templates.prompt] == wanted
    assert templates.non_greedy.prompt == content['non_greedy_robustness']['prompt']
    options = ('x', '{y}')
    assert templates.non_greedy.text('Is {1} a set?', options).count('Is {1} a set?') == 1
    if dataset != 'math':
        assert '\nA: x\nB: {y}\n' in templates.option_order.text('Q', options)


# Variants of a question.

TEN = tuple(Template(f'{number}. {{question}}{{options}}') for number in range(10))
TEMPLATES = Templates(
    option_order=Template('Order: {question}{options}'),
    non_greedy=Template('Drawn: {question}{options}', ' ({letter}) {option}'),
    prompt=TEN,
)
QUESTION = LetteredQuestion('Who?', ('he', 'she', 'it'), 1, 'law')

# Options may be equal, even to the gold one.
QUESTIONS = st.lists(st.sampled_from('uvwxyz'), min_size=2, max_size=26).flatmap(
    lambda options: st.integers(0, len(options) - 1).map(lambda gold: LetteredQuestion('?', tuple(options), gold))
)


def asked(question, **keys) -> list[Example]:
    spec = ScoreSpec(**{'dataset': 'mmlu_pro', **keys})
    example = Example(row=7, content=question, category='law', file='sat-en')
    return list(variants(example, spec, TEMPLATES))


@given(question=QUESTIONS)
def test_option_order_swaps_the_gold_option_into_every_place(question: LetteredQuestion):
    """Mutation: the displaced option is lost, or put anywhere but in the place of the gold one."""
    found = asked(question, perturbations=('option_order',))
    letters = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'[: len(question.options)]
    assert [example.variant for example in found] == [f'option_order:{letter}' for letter in letters]
    right = question.options[question.gold]
    for place, example in enumerate(found):
        posed: Posed = example.content
        assert (posed.gold, posed.own_gold, len(posed.options)) == (place, question.gold, len(letters))
        assert posed.question.options[place] == right
        assert sorted(posed.question.options) == sorted(question.options)
        moved = [i for i, option in enumerate(question.options) if posed.question.options[i] != option]
        assert set(moved) <= {place, question.gold}
        assert posed.question.options[question.gold] == question.options[place]
        assert (posed.question.text, posed.question.topic) == (question.text, question.topic)
    assert found[question.gold].content.question == question
    for example in asked(question, perturbations=('prompt', 'non_greedy')):  # which move no options
        assert example.content.question == question
        assert example.content.gold == example.content.own_gold == question.gold


def test_variants_are_named_and_keep_row_file_and_category_and_use_their_prompts():
    found = asked(QUESTION, seeds=(0, 12))
    assert [example.variant for example in found] == [
        *(f'option_order:{letter}' for letter in 'ABC'),
        *(f'prompt:{number}' for number in range(10)),
        'non_greedy:0',
        'non_greedy:12',
    ]
    assert {(example.row, example.file, example.category) for example in found} == {(7, 'sat-en', 'law')}
    texts = {example.variant: example.content.text for example in found}
    assert texts['option_order:A'] == 'Order: Who?\nA: she\nB: he\nC: it'
    assert texts['option_order:B'] == 'Order: Who?\nA: he\nB: she\nC: it'
    assert texts['option_order:C'] == 'Order: Who?\nA: he\nB: it\nC: she'
    assert texts['prompt:9'] == '9. Who?\nA: he\nB: she\nC: it'
    assert texts['non_greedy:0'] == texts['non_greedy:12'] == 'Drawn: Who? (A) he (B) she (C) it'


def test_likelihood_has_no_non_greedy_variants_and_math_no_option_order():
    found = asked(QUESTION, answers='likelihood')
    assert {perturbation_of(example.variant) for example in found} == {'option_order', 'prompt'}
    templates = Templates(
        option_order=NO_TEMPLATE, non_greedy=Template('{question}'), prompt=(Template('{question}!'),) * 10
    )
    problem = MathQuestion('1+1', r'\boxed{2}', '2')
    found = list(variants(Example(row=0, content=problem), ScoreSpec(dataset='math', seeds=(3,)), templates))
    assert [example.variant for example in found] == [*(f'prompt:{number}' for number in range(10)), 'non_greedy:3']
    assert [seed_of(example.variant) for example in found[-2:]] == [None, 3] and seed_of(None) is None
    posed: Posed = found[-1].content
    assert (posed.text, posed.gold) == ('1+1', '2')
    assert found[0].content.text == '1+1!'
