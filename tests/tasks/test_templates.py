"""SCORE's prompt files: upstream's schema, and the errors in files that do not follow it."""

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
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks.templates import (
    NO_TEMPLATE,
    OPTIONS_FORMAT,
    Template,
    Templates,
    prompts_file,
    read_templates,
)

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
    templates = read(tmp_path, FILE)
    assert templates.option_order == templates.non_greedy == Template('{question}{options}', '\n{letter}: {option}')
    assert [template.prompt[:2] for template in templates.prompt] == [f'{number}.' for number in range(10)]


def test_a_prompt_is_filled_in_with_an_options_line_for_each():
    template = Template('On {category}: {question} {{x}}{options} {question}', ' {letter}) {option};')
    text = template.text('Who {is} {{it}}?', ('{he}', 'she', '{0}'), 'law')
    assert text == 'On law: Who {is} {{it}}? {x} A) {he}; B) she; C) {0}; Who {is} {{it}}?'
    assert Template('{question}').text('1+1?') == '1+1?'
    assert Template('{question}{options}').options_format == OPTIONS_FORMAT == '\n{letter}: {option}'


@given(question=st.text(), options=st.lists(st.text(), min_size=2, max_size=10), category=st.text())
def test_texts_are_put_into_a_prompt_unchanged(question: str, options: list[str], category: str):
    text = Template('{category}\0{question}\0{options}').text(question, options, category)
    lines = ''.join(f'\n{"ABCDEFGHIJ"[number]}: {option}' for number, option in enumerate(options))
    assert text == f'{category}\0{question}\0{lines}'


def test_doubled_braces_are_literal_braces(tmp_path):
    boxed = {'prompt': '{question} $\\boxed{{answer}}$'}
    templates = read(tmp_path, {**MATH_FILE, 'non_greedy_robustness': boxed}, 'math')
    assert templates.non_greedy.text('1+1?') == '1+1? $\\boxed{answer}$'


@pytest.mark.parametrize(
    ('entry', 'facts'),
    [
        ({'prompt': '{options}'}, '.prompt: {question}'),
        ({'prompt': '{question}'}, '.prompt: {options}'),
        ({'prompt': '{question}{options}{answer}'}, '.prompt: {answer} {category}, {options}, {question}'),
        ({'prompt': '{question}{options}{}'}, '.prompt: {} {category}, {options}, {question}'),
        ({'prompt': '{question}{options}{category.x}'}, '.prompt: {category.x} {category}, {options}, {question}'),
        ({'prompt': '{question:{width}}{options}'}, ".prompt: 'width'"),
        ({'prompt': '{question!x}{options}'}, '.prompt: conversion'),
        ({'prompt': '{question:d}{options}'}, ".prompt: 'd'"),
        ({'prompt': '{question}{options} }'}, ".prompt: '}' '{{'"),
        ({'prompt': '{question}{options}', 'options_format': 7}, '.options_format: 7'),
        ({**ASK, 'options_format': '\n{letter}'}, '.options_format: {option}'),
        ({**ASK, 'options_format': '\n{option}'}, '.options_format: {letter}'),
        ({**ASK, 'options_format': '{letter}{option}{question}'}, '.options_format: {question} {letter}, {option}'),
        ({'text': 'x'}, ": 'prompt'"),
        ({'prompt': 7}, ": 'prompt'"),
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


@pytest.mark.parametrize('prompts', [[ASK] * 9, [ASK] * 11, [], ASK, None], ids=lambda prompts: str(prompts)[:9])
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


def test_keys_of_perturbations_that_are_not_applied_may_be_missing(tmp_path):
    templates = read(tmp_path, {'prompt_robustness': FILE['prompt_robustness']}, perturbations='prompt')
    assert (templates.option_order, templates.non_greedy, len(templates.prompt)) == (NO_TEMPLATE, NO_TEMPLATE, 10)
    likely = {key: value for key, value in FILE.items() if key != 'non_greedy_robustness'}
    assert read(tmp_path, likely, answers='likelihood').non_greedy == NO_TEMPLATE
    assert read(tmp_path, MATH_FILE, 'math').option_order == NO_TEMPLATE


def test_prompts_of_math_have_no_options(tmp_path):
    found = problems_of(tmp_path, FILE, 'math')
    assert len(found) == 12 and all('{options}' in problem for problem in found)


@pytest.mark.parametrize(
    ('content', 'place'), [('{\n"a": 1,\n}', 'prompts.json:3: '), ('', 'prompts.json:1: '), ([], 'prompts.json: ')]
)
def test_a_file_without_a_mapping_is_an_error_with_its_line(tmp_path, content: Any, place: str):
    (problem,) = problems_of(tmp_path, content)
    assert problem.startswith(place)


def test_a_file_that_cannot_be_read_is_an_error_with_its_path(tmp_path):
    for path in (tmp_path / 'nowhere.json', tmp_path):
        with pytest.raises(ConfigError) as raised:
            read_templates(task_of(prompts=str(path)), tmp_path)
        assert str(raised.value).startswith(f'{path}: ')


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
