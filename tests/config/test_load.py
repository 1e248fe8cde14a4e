import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet import tasks as task_types
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.tasks.multiple_choice import MultipleChoiceTask

TASK = {'label': 'copa', 'dataset_uri': 'copa.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}
BENCHMARK = {'name': 'copa', 'num_fewshot': 0, 'random_baseline': 0.5}


def gauntlet(**changes):
    return {'categories': [{'name': 'commonsense', 'benchmarks': [BENCHMARK]}], **changes}


def problems_of(tasks, gauntlet=None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_suite(tasks, gauntlet)
    return list(raised.value.problems)


def test_every_upstream_yaml_with_tasks_or_a_gauntlet_loads_unchanged(upstream_yamls: Path):
    sizes = {}  # of each file, the numbers of tasks and of categories
    for path in upstream_yamls.iterdir():
        text = path.read_text()
        tasks = path if 'icl_tasks:' in text else None
        gauntlet_path = path if 'eval_gauntlet:' in text else None
        suite = load_suite(tasks, gauntlet_path)
        sizes[path.name] = (len(suite.tasks), len(suite.gauntlet.categories) if suite.gauntlet else 0)

    assert len(sizes) == 25
    assert sizes['tasks_v0.1.yaml'] == (49, 0)
    assert sizes['eval_gauntlet_v0.1.yaml'] == (0, 6)
    assert sizes['hf_eval.yaml'] == (34, 5)  # both keys are paths to other files
    assert sizes['hf_lora_eval.yml'] == (38, 5)
    assert sizes['long_context_tasks.yaml'] == (39, 0)


def test_old_names_of_keys_and_task_types_are_read():
    (task,) = load_suite([{**TASK, 'icl_task_type': 'question_answering', 'question_prelimiter': 'Q: '}]).tasks

    assert (task.icl_task_type, task.prelimiter) == ('generation_task_with_answers', 'Q: ')


def test_keys_of_a_generation_task_of_llm_foundry_are_read(upstream_yamls: Path):
    suite = load_suite(upstream_yamls / 'tasks_v0.3.yaml')

    gsm8k = next(task for task in suite.tasks if task.label == 'gsm8k')
    assert gsm8k.icl_task_type == 'generation_task_with_answers'
    assert gsm8k.num_fewshot == (0,)
    assert gsm8k.cot_delimiter == 'The answer is '
    assert gsm8k.continuation_delimiter == '\n\nA:'
    assert gsm8k.early_stopping_criteria == ('\n\n', 'Question:')
    assert gsm8k.do_normalization is False


def test_an_average_over_an_unknown_category_is_a_warning_with_its_place(upstream_yamls: Path):
    warnings = load_suite(None, upstream_yamls / 'eval_gauntlet.yaml').warnings

    assert len(warnings) == 3
    assert 'eval_gauntlet.averages.core_average' in warnings[0]
    assert "'programming'" in warnings[0]


def test_a_metric_that_is_not_computed_is_a_warning():
    names = ['InContextLearningMultipleChoiceAccuracy', 'InContextLearningMCExpectedCalibrationError']

    (warning,) = load_suite([{**TASK, 'metric_names': names}]).warnings

    assert warning.startswith('copa: metric_names: InContextLearningMCExpectedCalibrationError is not supported')


def test_the_earlier_name_of_truncated_share_is_no_warning():
    task = {**TASK, 'icl_task_type': 'generation_task_with_answers', 'metric_names': ['CutShare']}

    assert load_suite([task]).warnings == ()


def test_all_errors_are_listed_at_once_with_file_line_label_and_dotted_path(tmp_path: Path):
    path = tmp_path / 'tasks.yaml'
    path.write_text(
        """
icl_tasks:
- {label: a b, dataset_uri: x.jsonl, num_fewshot: [0], icl_task_type: multiple_choice}
- {label: b, num_fewshot: [0], icl_task_type: schema}
- {label: c, dataset_uri: x.jsonl, num_fewshot: ten, icl_task_type: language_modeling}
- {label: d, dataset_uri: x.jsonl, num_fewshot: [0], icl_task_type: language_modelling}
- {label: e, dataset_uri: x.jsonl, num_fewshot: [0, 0], icl_task_type: schema}
- {label: f, dataset_uri: x.jsonl, num_fewshot: [1], icl_task_type: schema, prelimiterr: x}
- {label: f, dataset_uri: x.jsonl, num_fewshot: [-1], icl_task_type: schema}
- {label: g, dataset_uri: x.jsonl, num_fewshot: [1], icl_task_type: schema, cot_delimiter: x}
- {label: h, dataset_uri: x.jsonl, num_fewshot: [1], icl_task_type: schema}
- {label: h, dataset_uri: x.jsonl, num_fewshot: [0, 1], icl_task_type: schema}
"""
    )
    gauntlet_path = tmp_path / 'gauntlet.yaml'
    gauntlet_path.write_text(
        """
eval_gauntlet:
  weighting: EVEN
  categories:
  - {name: one, benchmarks: []}
  - {name: two, benchmarks: [{name: h, num_fewshot: 1, random_baseline: 1.0}]}
"""
    )

    problems = problems_of(path, gauntlet_path)

    expected_of_tasks = [
        "3 (a b): icl_tasks[0]: label: 'a b' cannot be a file name; allowed: letters, digits and '_', '-', '.'",
        "4 (b): icl_tasks[1]: the key 'dataset_uri' is missing",
        "5 (c): icl_tasks[2].num_fewshot: is 'ten'; allowed: a list",
        "6 (d): icl_tasks[3].icl_task_type: unknown task type 'language_modelling', did you mean 'language_modeling'?",
        '7 (e): icl_tasks[4]: num_fewshot: [0, 0] has duplicates; give each number of shots once',
        "8 (f): icl_tasks[5].prelimiterr: unknown key 'prelimiterr', did you mean 'prelimiter'?",
        '9 (f): icl_tasks[6]: num_fewshot: is -1; allowed: 0 or more',
        '10 (g): icl_tasks[7].cot_delimiter: has no meaning in schema; it belongs to generation_task_with_answers',
        f'12 (h): icl_tasks[9]: duplicate h/1-shot, first at {path}: icl_tasks[8]; '
        'give each number of shots of a label once',
    ]
    # No second error for h, a benchmark of an invalid task.
    expected_of_gauntlet = [
        '5 (one): eval_gauntlet.categories[0]: benchmarks: is empty; a category needs at least one benchmark',
        '6 (h): eval_gauntlet.categories[1].benchmarks[0]: random_baseline: is 1; allowed: at least 0, and less than 1',
        "3: eval_gauntlet: weighting: unknown weighting 'EVEN'; allowed: EQUAL, SAMPLE_SZ, LOG_SAMPLE_SZ",
    ]
    in_tasks = [f'{path}:{problem}' for problem in expected_of_tasks]
    in_gauntlet = [f'{gauntlet_path}:{problem}' for problem in expected_of_gauntlet]
    assert problems == in_tasks + in_gauntlet


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({'weighting': 'EQUALL'}, 'unknown weighting'),
        ({'categories': []}, 'is empty; a gauntlet needs at least one category'),
        ({'averages': {'commonsense': ['commonsense']}}, 'is also the name of a category'),
        ({'averages': {'core': []}}, 'averages.core: is empty'),
        ({'subtract_random_baseline': False}, 'rescale_accuracy: needs subtract_random_baseline'),
        ({'rescale_accuracy': 'yes'}, "rescale_accuracy: is 'yes'; allowed: true or false"),
        ({'average': {}}, "unknown key 'average', did you mean 'averages'?"),
        ({'categories': [{'name': 'a', 'benchmarks': [{**BENCHMARK, 'random_baseline': -0.1}]}]}, 'random_baseline'),
        ({'categories': [{'name': 'a', 'benchmarks': [BENCHMARK, BENCHMARK]}]}, 'duplicate copa/0-shot'),
    ],
)
def test_an_invalid_gauntlet_is_refused(changes: dict, expected: str):
    (problem,) = problems_of([TASK], gauntlet(**changes))

    assert expected in problem


@pytest.mark.parametrize(
    ('changes', 'facts'),
    [
        # Another number of shots.
        (
            {'num_fewshot': 10},
            ['no task provides 1 of 1 benchmarks: copa/10-shot (categories[0]', 'has 0 shots'],
        ),
        # Another name.
        ({'name': 'coppa'}, ["no task has that label, did you mean 'copa'?"]),
    ],
)
def test_a_benchmark_that_no_task_provides_is_an_error_listing_the_tasks(changes: dict[str, Any], facts: list[str]):
    categories = [{'name': 'a', 'benchmarks': [{**BENCHMARK, **changes}]}]

    (problem,) = problems_of([TASK], gauntlet(categories=categories))

    assert [fact for fact in facts if fact not in problem] == []


def test_many_benchmarks_without_tasks_are_one_line(upstream_yamls: Path):
    (problem,) = problems_of(upstream_yamls / 'tasks_light.yaml', upstream_yamls / 'eval_gauntlet_v0.3.yaml')

    assert 'no task provides 29 of 31 benchmarks' in problem
    assert '24 more' in problem
    assert 'missing: skip' in problem


def test_benchmarks_without_tasks_may_be_skipped(upstream_yamls: Path):
    tasks, gauntlet_path = upstream_yamls / 'tasks_light.yaml', upstream_yamls / 'eval_gauntlet_v0.3.yaml'

    assert len(load_suite(tasks, gauntlet_path, missing='skip').missing) == 29


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        ('', "the key 'icl_tasks' is missing; the file is empty"),
        ('icl_tasks: []\n', 'is an empty list; allowed: a list of tasks'),
        ('icl_task: []\n', "the key 'icl_tasks' is missing; found: icl_task"),
    ],
)
def test_a_file_without_tasks_is_an_error(tmp_path: Path, content: str, expected: str):
    path = tmp_path / 'tasks.yaml'
    path.write_text(content)

    (problem,) = problems_of(path)

    assert problem.startswith(str(path))
    assert expected in problem


def test_a_file_that_does_not_exist_is_an_error():
    assert problems_of('nowhere/tasks.yaml') == ['nowhere/tasks.yaml: there is no such file']


ALLOWED_AS_TASKS = 'allowed: a list of tasks, or a path to a file with one'


@pytest.mark.parametrize(
    ('tasks', 'problem'),
    [
        ({'label': 'copa'}, f'icl_tasks: is a mapping; {ALLOWED_AS_TASKS}'),
        (0, f'icl_tasks: is 0; {ALLOWED_AS_TASKS}'),
        (True, f'icl_tasks: is True; {ALLOWED_AS_TASKS}'),
        ([TASK, 'a.yaml'], "icl_tasks[1]: is 'a.yaml'; allowed: a mapping"),
    ],
)
def test_tasks_of_the_wrong_kind_are_not_read_as_paths(tasks: object, problem: str):
    assert problems_of(tasks) == [f'<icl_tasks>: {problem}']


@pytest.mark.parametrize(
    ('gauntlet', 'problem'),
    [
        (['g.yaml'], 'eval_gauntlet: is a list; allowed: a mapping'),
        (True, 'eval_gauntlet: is True; allowed: a mapping'),
    ],
)
def test_a_gauntlet_of_the_wrong_kind_is_not_read_as_a_path(gauntlet: object, problem: str):
    assert problems_of([TASK], gauntlet) == [f'<eval_gauntlet>: {problem}']


class Bare(MultipleChoiceTask):
    """A type without shots."""

    type_name = 'bare'
    shot = Task.shot


@pytest.fixture
def bare_type(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Register a type without shots for a test, and return its name."""
    monkeypatch.setattr(task_types, 'OWN', (*task_types.OWN, Bare))
    task_types.task_types.cache_clear()
    yield Bare.type_name
    task_types.task_types.cache_clear()


def test_shots_of_a_type_that_has_none_are_refused(bare_type: str):
    (problem,) = problems_of([{**TASK, 'icl_task_type': bare_type, 'num_fewshot': [0, 2]}])

    assert 'icl_tasks[0].num_fewshot: is [0, 2]; allowed: [0], as bare has no shots' in problem


def test_a_type_that_has_no_shots_is_read_with_0_shots(bare_type: str):
    assert len(load_suite([{**TASK, 'icl_task_type': bare_type}]).tasks) == 1


def test_tasks_of_several_files_may_not_share_label_and_shots(tmp_path: Path):
    first, second = tmp_path / 'a.yaml', tmp_path / 'b.yaml'
    for path in (first, second):
        path.write_text('icl_tasks: [{label: x, dataset_uri: x.jsonl, num_fewshot: [0], icl_task_type: schema}]')

    (problem,) = problems_of([str(first), str(second)])

    assert problem.startswith(str(second))
    assert str(first) in problem


GENERATION, CODE = 'generation_task_with_answers', 'code_evaluation'
GENERATION_TASK = {**TASK, 'icl_task_type': GENERATION}
OF_GENERATION = f'has no meaning in schema; it belongs to {GENERATION}'


@pytest.mark.parametrize(
    ('kind', 'key', 'value', 'problem'),
    [
        # Labels, which are names of files.
        ('schema', 'label', '..', 'cannot be a file name'),
        ('schema', 'label', '.', 'cannot be a file name'),
        ('schema', 'label', '', 'cannot be a file name'),
        ('schema', 'label', 'a/b', 'cannot be a file name'),
        ('schema', 'label', 'ü', 'cannot be a file name'),
        ('schema', 'label', 'a b', 'cannot be a file name'),
        ('schema', 'label', 'x' * 240, 'has 240 characters; allowed: 239, as'),
        # Metrics.
        ('schema', 'metric_names', ['Accuracy'], "'Accuracy' is not a metric of schema"),
        ('schema', 'metric_names', [], 'is empty'),
        ('multiple_choice', 'pmi_context', 'A:', 'went with the metric PMINormalizedMatch; leave it out'),
        ('multiple_choice', 'metric_names', ['PMINormalizedMatch'], "'PMINormalizedMatch' is not a metric of multiple"),
        # Keys of generation.
        ('schema', 'early_stopping_criteria', [], OF_GENERATION),
        ('schema', 'do_normalization', [], OF_GENERATION),
        ('schema', 'cot_delimiter', [], OF_GENERATION),
        (GENERATION, 'max_new_tokens', 8, 'belongs to generation_kwargs; write generation_kwargs: {max_new_tokens: 8}'),
        (GENERATION, 'early_stopping_criteria', ['\n', ''], 'is empty; allowed: a text that ends a generation'),
        # Keys of code evaluation.
        (CODE, 'pass_at_k', 2, 'is 2, but generations_per_sample is 1; allowed: 1 or less'),
        (CODE, 'pass_at_k', 0, 'is 0; allowed: a whole number of 1 or more, or a list of them'),
        (CODE, 'pass_at_k', [1, 1], 'is [1, 1]; allowed: different numbers, one at least'),
        (CODE, 'pass_at_k', [], 'is []; allowed: different numbers, one at least'),
        (CODE, 'pass_at_k', 'all', "is 'all'; allowed: a whole number of 1 or more"),
        (CODE, 'rule', 'luck', "is 'luck'; allowed: test, io_pairs"),
        (CODE, 'temperature', -1.0, 'is -1; allowed: 0 (the most probable tokens) or more'),
        (CODE, 'top_p', 0.0, 'is 0; allowed: a number above 0, 1 at most'),
        (CODE, 'top_k', -1, 'is -1; allowed: 0 (all tokens) or more'),
        (CODE, 'generation_kwargs', {'top_p': 0.5}, '.top_p: is a key of the task itself: top_p'),
        (CODE, 'generations_per_sample', 0, 'is 0; allowed: 1 or more'),
    ],
)
def test_an_invalid_key_of_a_task_is_an_error_with_what_is_allowed(kind: str, key: str, value: object, problem: str):
    (message,) = problems_of([{**TASK, 'icl_task_type': kind, key: value}])

    assert re.match(rf'<icl_tasks>: icl_tasks\[0\](: |\.){key}', message)
    assert problem in message


NOT_A_LENGTH = 'allowed: a whole number, 1 or'
NO_EFFECT = 'has no effect without do_sample: true; decoding is greedy'


@pytest.mark.parametrize(
    ('kwargs', 'problem'),
    [
        # The key, and the number of tokens.
        ({'max_new_token': 5}, '.max_new_token: is not supported; allowed: max_new_tokens, do_sample, temper'),
        ({'max_new_tokens': 0}, f'.max_new_tokens: is 0; {NOT_A_LENGTH}'),
        ({'max_new_tokens': 5.0}, f'.max_new_tokens: is 5.0; {NOT_A_LENGTH}'),
        ({'max_new_tokens': '5'}, f".max_new_tokens: is '5'; {NOT_A_LENGTH}"),
        ({'max_new_tokens': True}, f'.max_new_tokens: is True; {NOT_A_LENGTH}'),
        ({'max_new_tokens': None}, f'.max_new_tokens: is None; {NOT_A_LENGTH}'),
        # Sampling.
        ({'do_sample': 1}, '.do_sample: is 1; allowed: true or false'),
        ({'do_sample': True, 'temperature': 0}, '.temperature: is 0; allowed: a number above 0'),
        ({'do_sample': True, 'temperature': math.nan}, '.temperature: is nan; allowed: a number above 0'),
        ({'do_sample': True, 'top_p': 1.1}, '.top_p: is 1.1; allowed: a number above 0, 1 at most'),
        ({'do_sample': True, 'top_k': 1.5}, '.top_k: is 1.5; allowed: a whole number; 0: all tokens'),
        ({'do_sample': True, 'seed': -1}, '.seed: is -1; allowed: a whole number, 0 or more'),
        # Settings of sampling without it.
        ({'temperature': 0.7}, f'.temperature: {NO_EFFECT}'),
        ({'do_sample': False, 'top_p': 0.9}, f'.top_p: {NO_EFFECT}'),
    ],
)
def test_invalid_generation_kwargs_are_an_error_with_what_is_allowed(kwargs: dict[str, Any], problem: str):
    (message,) = problems_of([{**GENERATION_TASK, 'generation_kwargs': kwargs}])

    assert re.match(r'<icl_tasks>: icl_tasks\[0\](: |\.)generation_kwargs', message)
    assert problem in message


def test_a_key_that_went_is_read_where_records_of_earlier_versions_hold_it_as_null():
    assert load_suite([{**TASK, 'pmi_context': None}]).tasks == load_suite([TASK]).tasks


def test_valid_generation_kwargs_and_stops_are_unchanged():
    given = {'max_new_tokens': 5, 'do_sample': True, 'temperature': 1, 'top_p': 1.0, 'top_k': 0, 'seed': 0}
    entry = {**GENERATION_TASK, 'generation_kwargs': given, 'early_stopping_criteria': ['\n', ' ']}

    (task,) = load_suite([entry]).tasks

    assert task.generation_kwargs == given
    assert task.early_stopping_criteria == ('\n', ' ')


@pytest.mark.parametrize('given', [{}, {'do_sample': False}])
def test_generation_kwargs_that_change_nothing_are_no_error(given: dict[str, Any]):
    suite = load_suite([{**GENERATION_TASK, 'generation_kwargs': given}])

    assert (suite.tasks[0].generation_kwargs, suite.warnings) == (given, ())
