import re
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
    loaded = {}
    for path in sorted(upstream_yamls.iterdir()):
        text = path.read_text()
        tasks = path if 'icl_tasks:' in text else None
        suite = load_suite(tasks, path if 'eval_gauntlet:' in text else None)
        loaded[path.name] = (len(suite.tasks), len(suite.gauntlet.categories) if suite.gauntlet else 0)
    assert len(loaded) == 25
    assert loaded['tasks_v0.1.yaml'] == (49, 0)
    assert loaded['eval_gauntlet_v0.1.yaml'] == (0, 6)
    assert loaded['hf_eval.yaml'] == (34, 5)  # both keys are paths to other files
    assert loaded['hf_lora_eval.yml'] == (38, 5)
    assert loaded['long_context_tasks.yaml'] == (39, 0)


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
    suite = load_suite(None, upstream_yamls / 'eval_gauntlet.yaml')
    assert len(suite.warnings) == 3
    assert 'eval_gauntlet.averages.core_average' in suite.warnings[0] and "'programming'" in suite.warnings[0]


def test_a_metric_that_is_not_computed_is_a_warning():
    names = ['InContextLearningMultipleChoiceAccuracy', 'InContextLearningMCExpectedCalibrationError']
    (warning,) = load_suite([{**TASK, 'metric_names': names}]).warnings
    assert warning.startswith('copa: metric_names: InContextLearningMCExpectedCalibrationError is not supported')
    riddle = {**TASK, 'icl_task_type': 'generation_task_with_answers', 'metric_names': ['CutShare']}
    assert load_suite([riddle]).warnings == ()  # the earlier name of TruncatedShare


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
    found = problems_of(path, gauntlet_path)  # no second error for h, a benchmark of an invalid task
    expected = [
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
    assert [line.removeprefix(f'{path}:') for line in found[: len(expected)]] == expected
    assert [line.removeprefix(f'{gauntlet_path}:') for line in found[len(expected) :]] == [
        '5 (one): eval_gauntlet.categories[0]: benchmarks: is empty; a category needs at least one benchmark',
        '6 (h): eval_gauntlet.categories[1].benchmarks[0]: random_baseline: is 1; allowed: at least 0, and less than 1',
        "3: eval_gauntlet: weighting: unknown weighting 'EVEN'; allowed: EQUAL, SAMPLE_SZ, LOG_SAMPLE_SZ",
    ]


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
        # another number of shots
        (
            {'num_fewshot': 10},
            ['no task provides 1 of 1 benchmarks: copa/10-shot (categories[0]', 'has 0 shots'],
        ),
        # another name
        ({'name': 'coppa'}, ["no task has that label, did you mean 'copa'?"]),
    ],
)
def test_a_benchmark_that_no_task_provides_is_an_error_listing_the_tasks(changes: dict[str, Any], facts: list[str]):
    categories = [{'name': 'a', 'benchmarks': [{**BENCHMARK, **changes}]}]

    (problem,) = problems_of([TASK], gauntlet(categories=categories))

    assert [fact for fact in facts if fact not in problem] == []


def test_many_benchmarks_without_tasks_are_one_line_and_may_be_skipped(upstream_yamls: Path):
    files = upstream_yamls / 'tasks_light.yaml', upstream_yamls / 'eval_gauntlet_v0.3.yaml'
    (problem,) = problems_of(*files)
    assert 'no task provides 29 of 31 benchmarks' in problem and '24 more' in problem and '--missing skip' in problem
    assert len(load_suite(*files, missing='skip').missing) == 29


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        ('', "the key 'icl_tasks' is missing; the file is empty"),
        ('icl_tasks: []\n', 'is an empty list; allowed: a list of tasks'),
        ('icl_task: []\n', "the key 'icl_tasks' is missing; found: icl_task"),
    ],
)
def test_a_file_without_tasks_or_no_file_is_an_error(tmp_path: Path, content: str, expected: str):
    path = tmp_path / 'tasks.yaml'
    path.write_text(content)
    (problem,) = problems_of(path)
    assert problem.startswith(str(path)) and expected in problem
    assert problems_of('nowhere/tasks.yaml') == ['nowhere/tasks.yaml: there is no such file']


WRONG_TASKS = '; allowed: a list of tasks, or a path to a file with one'


@pytest.mark.parametrize(
    ('tasks', 'gauntlet', 'problem'),
    [
        ({'label': 'copa'}, None, f'tasks: is a mapping{WRONG_TASKS}'),
        (0, None, f'tasks: is 0{WRONG_TASKS}'),
        (True, None, f'tasks: is True{WRONG_TASKS}'),
        ([TASK, 'a.yaml'], None, "tasks[1]: is 'a.yaml'; allowed: a mapping"),
        ([TASK], ['g.yaml'], 'eval_gauntlet: is a list; allowed: a mapping'),
        ([TASK], True, 'eval_gauntlet: is True; allowed: a mapping'),
    ],
)
def test_values_of_the_wrong_kind_are_not_read_as_paths(tasks: object, gauntlet: object, problem: str):
    place = '<icl_tasks>: icl_' if gauntlet is None else '<eval_gauntlet>: '
    assert problems_of(tasks, gauntlet) == [f'{place}{problem}']


def test_shots_of_a_type_that_has_none_are_refused(monkeypatch: pytest.MonkeyPatch):
    class Bare(MultipleChoiceTask):
        type_name = 'bare'
        shot = Task.shot

    monkeypatch.setattr(task_types, 'OWN', (*task_types.OWN, Bare))
    task_types.task_types.cache_clear()
    try:
        (problem,) = problems_of([{**TASK, 'icl_task_type': 'bare', 'num_fewshot': [0, 2]}])
        assert 'icl_tasks[0].num_fewshot: is [0, 2]; allowed: [0], as bare has no shots' in problem
        assert len(load_suite([{**TASK, 'icl_task_type': 'bare'}]).tasks) == 1
    finally:
        task_types.task_types.cache_clear()


def test_tasks_of_several_files_may_not_share_label_and_shots(tmp_path: Path):
    for name in ('a.yaml', 'b.yaml'):
        (tmp_path / name).write_text(
            'icl_tasks: [{label: x, dataset_uri: x.jsonl, num_fewshot: [0], icl_task_type: schema}]'
        )
    (problem,) = problems_of([str(tmp_path / 'a.yaml'), str(tmp_path / 'b.yaml')])
    assert problem.startswith(str(tmp_path / 'b.yaml')) and str(tmp_path / 'a.yaml') in problem


GENERATION, CODE = 'generation_task_with_answers', 'code_evaluation'
GENERATION_TASK = {**TASK, 'icl_task_type': GENERATION}
ELSEWHERE = 'early_stopping_criteria', 'do_normalization', 'cot_delimiter'
NO_EFFECT = 'has no effect without do_sample: true; decoding is greedy'
SAMPLE = {'do_sample': True}


@pytest.mark.parametrize(
    ('kind', 'key', 'value', 'problem'),
    [
        *(('schema', 'label', label, 'cannot be a file name') for label in ('..', '.', '', 'a/b', 'ü', 'a b')),
        ('schema', 'label', 'x' * 240, 'has 240 characters; allowed: 239, as'),
        ('schema', 'metric_names', ['Accuracy'], "'Accuracy' is not a metric of schema"),
        ('schema', 'metric_names', [], 'is empty'),
        ('multiple_choice', 'pmi_context', 'A:', 'went with the metric PMINormalizedMatch; leave it out'),
        ('multiple_choice', 'metric_names', ['PMINormalizedMatch'], "'PMINormalizedMatch' is not a metric of multiple"),
        *(('schema', key, [], f'has no meaning in schema; it belongs to {GENERATION}') for key in ELSEWHERE),
        (GENERATION, 'max_new_tokens', 8, 'belongs to generation_kwargs; write generation_kwargs: {max_new_tokens: 8}'),
        (GENERATION, 'early_stopping_criteria', ['\n', ''], 'is empty; allowed: a text that ends a generation'),
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
        *(
            (GENERATION, 'generation_kwargs', given, problem)
            for given, problem in (
                ({'max_new_token': 5}, '.max_new_token: is not supported; allowed: max_new_tokens, do_sample, temper'),
                *(
                    ({'max_new_tokens': value}, f'.max_new_tokens: is {value!r}; allowed: a whole number, 1 or')
                    for value in (0, 5.0, '5', True, None)
                ),
                ({'do_sample': 1}, '.do_sample: is 1; allowed: true or false'),
                ({**SAMPLE, 'temperature': 0}, '.temperature: is 0; allowed: a number above 0'),
                ({**SAMPLE, 'temperature': float('nan')}, '.temperature: is nan; allowed: a number above 0'),
                ({**SAMPLE, 'top_p': 1.1}, '.top_p: is 1.1; allowed: a number above 0, 1 at most'),
                ({**SAMPLE, 'top_k': 1.5}, '.top_k: is 1.5; allowed: a whole number; 0: all tokens'),
                ({**SAMPLE, 'seed': -1}, '.seed: is -1; allowed: a whole number, 0 or more'),
                ({'temperature': 0.7}, f'.temperature: {NO_EFFECT}'),
                ({'do_sample': False, 'top_p': 0.9}, f'.top_p: {NO_EFFECT}'),
            )
        ),
    ],
)
def test_an_invalid_key_of_a_task_is_an_error_with_what_is_allowed(kind: str, key: str, value: object, problem: str):
    (found,) = problems_of([{**TASK, 'icl_task_type': kind, key: value}])
    assert re.match(rf'<icl_tasks>: icl_tasks\[0\](: |\.){key}', found) and problem in found


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
