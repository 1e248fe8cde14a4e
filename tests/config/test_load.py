from pathlib import Path

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


def test_old_names_of_keys_and_task_types_are_read(upstream_yamls: Path):
    (task,) = load_suite(
        [{**TASK, 'icl_task_type': 'question_answering', 'question_prelimiter': 'Q: ', 'cot_delimiter': ' #### '}]
    ).tasks
    assert (task.icl_task_type, task.prelimiter) == ('generation_task_with_answers', 'Q: ')
    suite = load_suite(upstream_yamls / 'tasks_v0.1.yaml')
    assert next(task for task in suite.tasks if task.label == 'gsm8k').prelimiter == 'Q: '


def test_each_number_of_shots_becomes_a_task_of_its_own():
    suite = load_suite([{**TASK, 'num_fewshot': [0, 10]}])
    assert [task.key for task in suite.tasks] == ['copa/0-shot', 'copa/10-shot']


def test_an_average_over_an_unknown_category_is_a_warning_with_its_place(upstream_yamls: Path):
    suite = load_suite(None, upstream_yamls / 'eval_gauntlet.yaml')
    assert len(suite.warnings) == 3
    assert 'eval_gauntlet.averages.core_average' in suite.warnings[0] and "'programming'" in suite.warnings[0]


def test_a_metric_that_is_not_computed_is_a_warning_and_an_unknown_one_an_error():
    names = ['InContextLearningMultipleChoiceAccuracy', 'InContextLearningMCExpectedCalibrationError']
    (warning,) = load_suite([{**TASK, 'metric_names': names}]).warnings
    assert warning.startswith('copa: metric_names: InContextLearningMCExpectedCalibrationError is not supported')
    assert "'Accuracy' is not a metric of multiple_choice" in problems_of([{**TASK, 'metric_names': ['Accuracy']}])[0]
    riddle = {**TASK, 'icl_task_type': 'generation_task_with_answers', 'metric_names': ['CutShare']}
    assert load_suite([riddle]).warnings == ()  # the earlier name of TruncatedShare
    assert 'metric_names: is empty' in problems_of([{**TASK, 'metric_names': []}])[0]


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
    found = problems_of(path, gauntlet_path)
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
    ]


@pytest.mark.parametrize('label', ['..', '.', '', 'a/b', 'ü', 'a b'])
def test_a_label_that_cannot_be_a_file_name_is_refused(label: str):
    (problem,) = problems_of([{**TASK, 'label': label}])
    assert 'cannot be a file name' in problem


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


def test_a_benchmark_that_no_task_provides_is_an_error_that_says_what_there_is():
    wrong_shots = gauntlet(categories=[{'name': 'a', 'benchmarks': [{**BENCHMARK, 'num_fewshot': 10}]}])
    (problem,) = problems_of([TASK], wrong_shots)
    assert 'no task provides 1 of 1 benchmarks: copa/10-shot (categories[0]' in problem and 'has 0 shots' in problem
    wrong_name = gauntlet(categories=[{'name': 'a', 'benchmarks': [{**BENCHMARK, 'name': 'coppa'}]}])
    assert "no task has that label, did you mean 'copa'?" in problems_of([TASK], wrong_name)[0]


def test_many_benchmarks_without_tasks_are_one_line_and_may_be_skipped(upstream_yamls: Path):
    files = upstream_yamls / 'tasks_light.yaml', upstream_yamls / 'eval_gauntlet_v0.3.yaml'
    (problem,) = problems_of(*files)
    assert 'no task provides 29 of 31 benchmarks' in problem and '24 more' in problem and '--missing skip' in problem
    assert len(load_suite(*files, missing='skip').missing) == 29


def test_a_benchmark_of_an_invalid_task_is_not_a_second_error():
    other = {**TASK, 'label': 'piqa'}
    (problem,) = problems_of([{**TASK, 'num_fewshot': []}, other], gauntlet())
    assert 'num_fewshot: is empty' in problem


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        ('', "the key 'icl_tasks' is missing; the file is empty"),
        ('- label: a\n', 'is a list at its top; allowed: a mapping'),
        ('icl_tasks: []\n', 'is an empty list; allowed: a list of tasks'),
        ('icl_task: []\n', "the key 'icl_tasks' is missing; found: icl_task"),
        ('icl_tasks: {a: 1}\n', 'is a mapping; allowed: a list of tasks'),
        ('icl_tasks: [\n', 'is not valid YAML'),
        ('icl_tasks: nowhere.yaml\n', "there is no file 'nowhere.yaml'"),
        ('icl_tasks: [{label: "${nowhere}"}]\n', 'an interpolation cannot be resolved'),
        ('icl_tasks: [1]\n', 'icl_tasks[0]: is 1; allowed: a mapping'),
    ],
)
def test_a_file_without_tasks_is_an_error(tmp_path: Path, content: str, expected: str):
    path = tmp_path / 'tasks.yaml'
    path.write_text(content)
    (problem,) = problems_of(path)
    assert problem.startswith(str(path)) and expected in problem


@pytest.mark.parametrize('tasks', [{'label': 'copa'}, {}, 3, 0, True, False, 1.5])
def test_tasks_of_the_wrong_kind_are_not_read_as_paths(tasks: object):
    (problem,) = problems_of(tasks)
    assert problem.startswith('<icl_tasks>: icl_tasks: is ')
    assert problem.endswith('; allowed: a list of tasks, or a path to a file with one')


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


def test_a_missing_file_is_named():
    assert problems_of('nowhere/tasks.yaml') == ['nowhere/tasks.yaml: there is no such file']


def test_tasks_of_several_files_may_not_share_label_and_shots(tmp_path: Path):
    for name in ('a.yaml', 'b.yaml'):
        (tmp_path / name).write_text(
            'icl_tasks: [{label: x, dataset_uri: x.jsonl, num_fewshot: [0], icl_task_type: schema}]'
        )
    (problem,) = problems_of([str(tmp_path / 'a.yaml'), str(tmp_path / 'b.yaml')])
    assert problem.startswith(str(tmp_path / 'b.yaml')) and str(tmp_path / 'a.yaml') in problem


REPLY_TASK = {**TASK, 'icl_task_type': 'generation_task_with_answers'}


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        (
            {'max_new_token': 5},
            'max_new_token: is not supported; allowed: max_new_tokens, do_sample, temperature, top_p, top_k, seed',
        ),
        ({'num_beams': 4}, 'num_beams: is not supported; allowed: max_new_tokens'),
        ({'max_new_tokens': 0}, 'max_new_tokens: is 0; allowed: a whole number, 1 or more'),
        ({'max_new_tokens': 5.0}, 'max_new_tokens: is 5.0; allowed: a whole number, 1 or more'),
        ({'max_new_tokens': '5'}, "max_new_tokens: is '5'; allowed: a whole number, 1 or more"),
        ({'max_new_tokens': True}, 'max_new_tokens: is True; allowed: a whole number, 1 or more'),
        ({'max_new_tokens': None}, 'max_new_tokens: is None; allowed: a whole number, 1 or more'),
        ({'do_sample': 1}, 'do_sample: is 1; allowed: true or false'),
        ({'do_sample': True, 'temperature': 0}, 'temperature: is 0; allowed: a number above 0'),
        ({'do_sample': True, 'temperature': True}, 'temperature: is True; allowed: a number above 0'),
        ({'do_sample': True, 'temperature': float('nan')}, 'temperature: is nan; allowed: a number above 0'),
        ({'do_sample': True, 'top_p': 1.1}, 'top_p: is 1.1; allowed: a number above 0, 1 at most'),
        ({'do_sample': True, 'top_p': 0}, 'top_p: is 0; allowed: a number above 0, 1 at most'),
        ({'do_sample': True, 'top_k': -1}, 'top_k: is -1; allowed: a whole number; 0: all tokens'),
        ({'do_sample': True, 'top_k': 1.5}, 'top_k: is 1.5; allowed: a whole number; 0: all tokens'),
        ({'do_sample': True, 'seed': -1}, 'seed: is -1; allowed: a whole number, 0 or more'),
        ({'temperature': 0.7}, 'temperature: has no effect without do_sample: true; decoding is greedy'),
        ({'do_sample': False, 'top_p': 0.9}, 'top_p: has no effect without do_sample: true; decoding is greedy'),
        ({'top_k': 5}, 'top_k: has no effect without do_sample: true; decoding is greedy'),
        ({'seed': 5}, 'seed: has no effect without do_sample: true; decoding is greedy'),
    ],
)
def test_invalid_generation_kwargs_are_errors_with_the_allowed_values(given: dict, expected: str):
    (problem,) = problems_of([{**REPLY_TASK, 'generation_kwargs': given}])
    assert f'icl_tasks[0]: generation_kwargs.{expected}' in problem


def test_valid_generation_kwargs_are_unchanged():
    given = {'max_new_tokens': 5, 'do_sample': True, 'temperature': 1, 'top_p': 1.0, 'top_k': 0, 'seed': 0}
    (task,) = load_suite([{**REPLY_TASK, 'generation_kwargs': given}]).tasks
    assert task.generation_kwargs == given
    assert load_suite([{**REPLY_TASK, 'generation_kwargs': {}}]).tasks[0].generation_kwargs == {}
    assert load_suite([{**REPLY_TASK, 'generation_kwargs': {'do_sample': False}}]).warnings == ()


def test_an_empty_stop_is_refused_since_it_would_end_every_generation_at_once():
    (problem,) = problems_of([{**REPLY_TASK, 'early_stopping_criteria': ['\n', '']}])
    assert 'early_stopping_criteria[1]: is empty; allowed: a text that ends a generation' in problem
    (task,) = load_suite([{**REPLY_TASK, 'early_stopping_criteria': ['\n', ' ']}]).tasks
    assert task.early_stopping_criteria == ('\n', ' ')
    assert load_suite([REPLY_TASK]).tasks[0].early_stopping_criteria is None


def test_generation_keys_are_refused_in_other_tasks():
    for key, value in (('early_stopping_criteria', ['\n']), ('do_normalization', False), ('cot_delimiter', '#')):
        (problem,) = problems_of([{**TASK, key: value}])
        assert f'{key}: has no meaning in multiple_choice; it belongs to generation_task_with_answers' in problem


def test_upstreams_generation_tasks_have_their_stops_and_delimiters(upstream_yamls: Path):
    suite = load_suite(upstream_yamls / 'tasks_v0.3.yaml')
    gsm8k = next(task for task in suite.tasks if task.label == 'gsm8k')
    assert gsm8k.icl_task_type == 'generation_task_with_answers'
    assert (gsm8k.early_stopping_criteria, gsm8k.do_normalization) == (('\n\n', 'Question:'), False)
    assert (gsm8k.cot_delimiter, gsm8k.continuation_delimiter, gsm8k.num_fewshot) == ('The answer is ', '\n\nA:', (0,))
