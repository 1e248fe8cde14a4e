"""Files of SCORE's prompts: upstream's schema, and what is said where a file is not of it."""

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
def test_texts_stand_in_a_prompt_as_they_are(question: str, options: list[str], category: str):
    text = Template('{category}\0{question}\0{options}').text(question, options, category)
    lines = ''.join(f'\n{"ABCDEFGHIJ"[number]}: {option}' for number, option in enumerate(options))
    assert text == f'{category}\0{question}\0{lines}'


def test_braces_that_are_meant_as_such_are_written_twice(tmp_path):
    boxed = {'prompt': '{question} $\\boxed{{answer}}$'}
    templates = read(tmp_path, {**MATH_FILE, 'non_greedy_robustness': boxed}, 'math')
    assert templates.non_greedy.text('1+1?') == '1+1? $\\boxed{answer}$'
    (problem,) = problems_of(tmp_path, {**MATH_FILE, 'non_greedy_robustness': {'prompt': '{question} }'}}, 'math')
    assert problem == (
        'score_math: prompts.json: non_greedy_robustness.prompt: is not a template (Single '
        "'}' encountered in format string); write literal braces twice: '{{'"
    )
    (problem,) = problems_of(
        tmp_path, {**MATH_FILE, 'non_greedy_robustness': {'prompt': '{question} \\boxed{answer}'}}, 'math'
    )
    assert problem.endswith('the placeholder {answer} is unknown; allowed: {question}')


@pytest.mark.parametrize(
    ('entry', 'problem'),
    [
        ({'prompt': '{options}'}, '.prompt: the placeholder {question} is missing'),
        ({'prompt': '{question}'}, '.prompt: the placeholder {options} is missing'),
        (
            {'prompt': '{question}{options}{answer}'},
            '.prompt: the placeholder {answer} is unknown; allowed: {category}, {options}, {question}',
        ),
        (
            {'prompt': '{question}{options}{}'},
            '.prompt: the placeholder {} is unknown; allowed: {category}, {options}, {question}',
        ),
        (
            {'prompt': '{question}{options}{category.x}'},
            '.prompt: the placeholder {category.x} is unknown; allowed: {category}, {options}, {question}',
        ),
        (
            {'prompt': '{question:{width}}{options}'},
            ".prompt: cannot be filled in ('width')",
        ),
        (
            {'prompt': '{question!x}{options}'},
            '.prompt: cannot be filled in (Unknown conversion specifier x)',
        ),
        (
            {'prompt': '{question:d}{options}'},
            ".prompt: cannot be filled in (Unknown format code 'd' for object of type 'str')",
        ),
        ({'prompt': '{question}{options}', 'options_format': 7}, '.options_format: is 7; allowed: text'),
        ({**ASK, 'options_format': '\n{letter}'}, '.options_format: the placeholder {option} is missing'),
        ({**ASK, 'options_format': '\n{option}'}, '.options_format: the placeholder {letter} is missing'),
        (
            {**ASK, 'options_format': '{letter}{option}{question}'},
            '.options_format: the placeholder {question} is unknown; allowed: {letter}, {option}',
        ),
        ({'text': 'x'}, ": is a mapping; allowed: a mapping with the text 'prompt'"),
        ({'prompt': 7}, ": is a mapping; allowed: a mapping with the text 'prompt'"),
    ],
)
def test_a_wrong_prompt_is_named_by_its_place(tmp_path, entry: dict[str, Any], problem: str):
    (found,) = problems_of(tmp_path, changed(7, **entry))
    assert found.startswith(f'score_mmlu_pro: prompts.json: prompt_robustness[7]{problem}')
    (found,) = problems_of(tmp_path, {**FILE, 'option_order_robustness': entry})
    assert found.startswith(f'score_mmlu_pro: prompts.json: option_order_robustness{problem}')


@pytest.mark.parametrize(
    ('prompts', 'problem'),
    [
        ([ASK] * 9, 'has 9 prompts; allowed: a list of 10'),
        ([ASK] * 11, 'has 11 prompts; allowed: a list of 10'),
        ([], 'has 0 prompts; allowed: a list of 10'),
        (ASK, 'is a mapping; allowed: a list of 10'),
        (None, 'is empty; allowed: a list of 10'),
    ],
)
def test_it_is_ten_prompts_that_are_compared(tmp_path, prompts: Any, problem: str):
    expected = [f'score_mmlu_pro: prompts.json: prompt_robustness: {problem}']
    assert problems_of(tmp_path, {**FILE, 'prompt_robustness': prompts}) == expected


def test_all_that_is_wrong_with_a_file_is_listed_at_once(tmp_path):
    content = {**changed(2, prompt='{question}'), 'non_greedy_robustness': {'prompt': '{options}'}}
    del content['option_order_robustness']
    assert [problem.removeprefix('score_mmlu_pro: prompts.json: ') for problem in problems_of(tmp_path, content)] == [
        "the key 'option_order_robustness' is missing; found: non_greedy_robustness, prompt_robustness",
        'prompt_robustness[2].prompt: the placeholder {options} is missing',
        'non_greedy_robustness.prompt: the placeholder {question} is missing',
    ]


def test_a_key_that_is_not_asked_for_may_be_missing(tmp_path):
    templates = read(tmp_path, {'prompt_robustness': FILE['prompt_robustness']}, perturbations='prompt')
    assert (templates.option_order, templates.non_greedy, len(templates.prompt)) == (NO_TEMPLATE, NO_TEMPLATE, 10)
    likely = {key: value for key, value in FILE.items() if key != 'non_greedy_robustness'}
    assert read(tmp_path, likely, answers='likelihood').non_greedy == NO_TEMPLATE
    assert read(tmp_path, MATH_FILE, 'math').option_order == NO_TEMPLATE


def test_prompts_of_math_have_no_options(tmp_path):
    expected = 'the placeholder {options} is unknown; allowed: {question}'
    assert all(problem.endswith(expected) for problem in problems_of(tmp_path, FILE, 'math'))
    assert len(problems_of(tmp_path, FILE, 'math')) == 12


@pytest.mark.parametrize(
    ('content', 'problem'),
    [
        ('{\n"a": 1,\n}', ':3: malformed JSON: Expecting property name enclosed in double quotes at column 1'),
        ('', ':1: malformed JSON: Expecting value at column 1'),
        (
            [],
            ': is an empty list; allowed: a mapping with option_order_robustness, prompt_robustness, '
            'non_greedy_robustness',
        ),
    ],
)
def test_a_file_that_is_no_mapping_says_so(tmp_path, content: Any, problem: str):
    assert problems_of(tmp_path, content) == [f'prompts.json{problem}']


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / 'nowhere.json', tmp_path):
        with pytest.raises(ConfigError) as raised:
            read_templates(task_of(prompts=str(path)), tmp_path)
        assert str(raised.value).startswith(f'{path}: cannot be read: ')


def test_without_a_file_ours_is_taken_that_below_the_data_first(tmp_path, monkeypatch):
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


@pytest.mark.parametrize('dataset', ['mmlu_pro', 'agieval', 'math'])
def test_our_own_files_load(dataset: str):
    templates = read_templates(task_of(dataset), ROOT / 'eval_data')
    assert len(templates.prompt) == 10
    assert (templates.option_order == NO_TEMPLATE) == (dataset == 'math')


@pytest.mark.skipif(not UPSTREAM.is_dir(), reason=f"{UPSTREAM} is absent: upstream's prompts")
@pytest.mark.parametrize(('dataset', 'name'), [('mmlu_pro', 'mmlu_pro'), ('agieval', 'agi_eval'), ('math', 'math')])
def test_upstreams_files_load_as_they_are(dataset: str, name: str):
    path = UPSTREAM / f'{name}_prompt_templates.json'
    templates = read_templates(task_of(dataset, prompts=str(path)), ROOT)
    content = json.loads(path.read_text())
    assert [template.prompt for template in templates.prompt] == [
        entry['prompt'] for entry in content['prompt_robustness']
    ]
    assert templates.non_greedy.prompt == content['non_greedy_robustness']['prompt']
    options = ('x', '{y}')
    assert templates.non_greedy.text('Is {1} a set?', options).count('Is {1} a set?') == 1
    if dataset != 'math':
        assert '\nA: x\nB: {y}\n' in templates.option_order.text('Q', options)
