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


def with_prompt(number: int, **keys: Any) -> dict[str, Any]:
    """Return the content of a file with another prompt at one place of the ten."""
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


def test_a_prompt_may_be_the_question_alone():
    assert Template('{question}').text('1+1?') == '1+1?'


def test_options_have_a_line_each_with_a_letter_by_default():
    assert Template('{question}{options}').options_format == OPTIONS_FORMAT == '\n{letter}: {option}'


@pytest.mark.parametrize(
    ('entry', 'facts'),
    [
        # A field that is missing, that is unknown, or that cannot be filled in.
        ({'prompt': '{options}'}, '.prompt: {question}'),
        ({'prompt': '{question}'}, '.prompt: {options}'),
        ({'prompt': '{question}{options}{answer}'}, '.prompt: {answer} {category}, {options}, {question}'),
        ({'prompt': '{question}{options}{category.x}'}, '.prompt: {category.x} {category}, {options}, {question}'),
        ({'prompt': '{question:{width}}{options}'}, ".prompt: 'width'"),
        ({'prompt': '{question!x}{options}'}, '.prompt: conversion'),
        ({'prompt': '{question}{options} }'}, ".prompt: '}' '{{'"),
        # The line of an option.
        ({'prompt': '{question}{options}', 'options_format': 7}, '.options_format: 7'),
        ({**ASK, 'options_format': '\n{option}'}, '.options_format: {letter}'),
        ({**ASK, 'options_format': '{letter}{option}{question}'}, '.options_format: {question} {letter}, {option}'),
        # Values and keys.
        ({'prompt': 7}, '.prompt: 7 text'),
        ({'options_format': '{letter}{option}'}, ": 'prompt' missing"),
        ({**ASK, 'promt': ''}, ".promt: unknown 'prompt'"),
    ],
)
def test_errors_name_the_prompt_its_key_and_what_is_allowed(tmp_path, entry: dict[str, Any], facts: str):
    key, _, words = facts.partition(': ')
    content_by_place = {
        'prompt_robustness[7]': with_prompt(7, **entry),
        'option_order_robustness': {**FILE, 'option_order_robustness': entry},
    }

    for place, content in content_by_place.items():
        (problem,) = problems_of(tmp_path, content)
        assert problem.startswith(f'score_mmlu_pro: prompts.json: {place}{key}: ')
        assert all(word in problem for word in words.split())


@pytest.mark.parametrize('prompts', [[ASK] * 9, [ASK] * 11, ASK], ids=lambda prompts: str(prompts)[:9])
def test_there_are_ten_prompts_to_compare(tmp_path, prompts: Any):
    (problem,) = problems_of(tmp_path, {**FILE, 'prompt_robustness': prompts})

    assert problem.startswith('score_mmlu_pro: prompts.json: prompt_robustness: ') and problem.endswith('10')


def test_all_errors_in_a_file_are_listed_at_once(tmp_path):
    content = {**with_prompt(2, prompt='{question}'), 'non_greedy_robustness': {'prompt': '{options}'}}
    del content['option_order_robustness']

    missing, *others = problems_of(tmp_path, content)

    assert "'option_order_robustness'" in missing
    places = [problem.split(': ')[2] for problem in others]
    assert places == ['prompt_robustness[2].prompt', 'non_greedy_robustness.prompt']


def test_every_prompt_of_math_that_asks_for_options_is_an_error(tmp_path):
    problems = problems_of(tmp_path, FILE, 'math')

    assert len(problems) == 12
    assert all('{options}' in problem for problem in problems)


def test_keys_of_perturbations_that_are_not_applied_may_be_missing(tmp_path):
    templates = read(tmp_path, {'prompt_robustness': FILE['prompt_robustness']}, perturbations='prompt')

    assert (templates.option_order, templates.non_greedy, len(templates.prompt)) == (NO_TEMPLATE, NO_TEMPLATE, 10)


def test_likelihood_needs_no_prompt_for_draws(tmp_path):
    content = {key: value for key, value in FILE.items() if key != 'non_greedy_robustness'}

    assert read(tmp_path, content, answers='likelihood').non_greedy == NO_TEMPLATE


def test_math_needs_no_prompt_for_option_order(tmp_path):
    assert read(tmp_path, MATH_FILE, 'math').option_order == NO_TEMPLATE


@pytest.mark.parametrize(
    ('content', 'place'),
    [
        ('{\n"a": 1\n"b": 2}', 'prompts.json:3: '),
        ('', 'prompts.json:1: '),
        ([], 'prompts.json: '),  # JSON, but a list
    ],
)
def test_a_file_without_a_mapping_is_an_error_with_its_line(tmp_path, content: Any, place: str):
    (problem,) = problems_of(tmp_path, content)

    assert problem.startswith(place)


@pytest.mark.parametrize('name', ['nowhere.json', '.'], ids=['no file', 'a folder'])
def test_a_path_that_is_no_file_is_an_error_that_names_it(tmp_path, name: str):
    path = tmp_path / name

    with pytest.raises(ConfigError, match=f'^{path}: '):
        read_templates(task_of(prompts=str(path)), tmp_path)


# The file that is read.

DEFAULTS = Path('eval_data/score/prompts')


@pytest.fixture
def arc() -> ScoreSpec:
    """Return the spec of the variants of a task of the suite."""
    tasks = [{'label': 'arc', 'dataset_uri': 'x', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}]
    return load_suite(tasks, None, {'dataset': 'arc'}).tasks[-1].spec


def test_each_dataset_has_a_default_file(tmp_path, monkeypatch, arc: ScoreSpec):
    monkeypatch.chdir(ROOT)

    for dataset in ('mmlu_pro', 'agieval', 'math'):
        assert prompts_file(task_of(dataset), tmp_path) == DEFAULTS / f'{dataset}.json'
    assert prompts_file(arc, tmp_path) == DEFAULTS / 'agieval.json'  # which names no number of letters


def test_a_file_below_the_data_root_precedes_the_default(tmp_path, monkeypatch, arc: ScoreSpec):
    monkeypatch.chdir(ROOT)
    path = tmp_path / 'score' / 'prompts' / 'agieval.json'
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(FILE))

    assert prompts_file(task_of('agieval'), tmp_path) == path
    assert prompts_file(arc, tmp_path) == path
    assert prompts_file(task_of('agieval', prompts='own.json'), tmp_path) == Path('own.json')


def test_in_any_other_folder_the_default_file_is_the_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = DEFAULTS / 'math.json'

    assert prompts_file(task_of('math'), tmp_path) == PACKAGE / path
    assert prompts_file(task_of('math', prompts=str(path)), tmp_path) == PACKAGE / path


@pytest.mark.skipif(not UPSTREAM.is_dir(), reason=f"{UPSTREAM} is absent: upstream's prompts")
@pytest.mark.parametrize(('dataset', 'name'), [('mmlu_pro', 'mmlu_pro'), ('agieval', 'agi_eval'), ('math', 'math')])
def test_upstreams_files_load_unchanged(dataset: str, name: str):
    path = UPSTREAM / f'{name}_prompt_templates.json'
    content = json.loads(path.read_text())

    templates = read_templates(task_of(dataset, prompts=str(path)), ROOT)

    prompts = [entry['prompt'] for entry in content['prompt_robustness']]
    assert [template.prompt for template in templates.prompt] == prompts
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
    letters = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'[: len(question.options)]

    examples = asked(question, perturbations=('option_order',))

    assert [example.variant for example in examples] == [f'option_order:{letter}' for letter in letters]
    for place, example in enumerate(examples):
        posed: Posed = example.content
        options = posed.question.options
        assert (posed.gold, posed.own_gold, len(posed.options)) == (place, question.gold, len(letters))
        assert (posed.question.text, posed.question.topic) == (question.text, question.topic)
        # The gold option and the one whose place it takes change places; all others stay.
        assert sorted(options) == sorted(question.options)
        assert options[place] == question.options[question.gold]
        assert options[question.gold] == question.options[place]
        moved = [i for i, option in enumerate(question.options) if options[i] != option]
        assert set(moved) <= {place, question.gold}
    assert examples[question.gold].content.question == question


@given(question=QUESTIONS)
def test_other_variants_move_no_options(question: LetteredQuestion):
    for example in asked(question, perturbations=('prompt', 'non_greedy')):
        assert example.content.question == question
        assert example.content.gold == example.content.own_gold == question.gold


def test_variants_are_named_and_keep_row_file_and_category():
    examples = asked(QUESTION, seeds=(0, 12))

    assert [example.variant for example in examples] == [
        *(f'option_order:{letter}' for letter in 'ABC'),
        *(f'prompt:{number}' for number in range(10)),
        'non_greedy:0',
        'non_greedy:12',
    ]
    assert {(example.row, example.file, example.category) for example in examples} == {(7, 'sat-en', 'law')}


def test_variants_use_the_prompt_of_their_perturbation():
    texts = {example.variant: example.content.text for example in asked(QUESTION, seeds=(0, 12))}

    assert texts['option_order:A'] == 'Order: Who?\nA: she\nB: he\nC: it'
    assert texts['option_order:B'] == 'Order: Who?\nA: he\nB: she\nC: it'
    assert texts['option_order:C'] == 'Order: Who?\nA: he\nB: it\nC: she'
    assert texts['prompt:9'] == '9. Who?\nA: he\nB: she\nC: it'
    assert texts['non_greedy:0'] == texts['non_greedy:12'] == 'Drawn: Who? (A) he (B) she (C) it'


def test_likelihood_has_no_non_greedy_variants():
    examples = asked(QUESTION, answers='likelihood')

    assert {perturbation_of(example.variant) for example in examples} == {'option_order', 'prompt'}


def test_math_has_no_variants_in_option_order():
    templates = Templates(
        option_order=NO_TEMPLATE,
        non_greedy=Template('{question}'),
        prompt=(Template('{question}!'),) * 10,
    )
    problem = Example(row=0, content=MathQuestion('1+1', r'\boxed{2}', '2'))

    *in_prompts, drawn = variants(problem, ScoreSpec(dataset='math', seeds=(3,)), templates)

    assert [example.variant for example in in_prompts] == [f'prompt:{number}' for number in range(10)]
    assert drawn.variant == 'non_greedy:3'
    assert in_prompts[0].content.text == '1+1!'
    assert (drawn.content.text, drawn.content.gold) == ('1+1', '2')


@pytest.mark.parametrize(('variant', 'seed'), [('non_greedy:3', 3), ('prompt:9', None), (None, None)])
def test_only_non_greedy_variants_have_a_seed(variant: str | None, seed: int | None):
    assert seed_of(variant) == seed
