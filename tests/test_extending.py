"""The code of `docs/extending.md`, installed as a third-party package and run by the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

TEXT = (ROOT / 'docs' / 'extending.md').read_text('utf-8')
MODULES = dict(re.findall(r'```python\n# (\w+)\.py\n(.*?)```', TEXT, re.DOTALL))
GROUPS = re.findall(r'\[project\.entry-points\."([\w.]+)"\]\n(.*)\n', TEXT)
ESTIMATES = {'label': 'weights', 'dataset_uri': 'weights.jsonl', 'num_fewshot': [1], 'icl_task_type': 'estimate'}
COLOURS = {'label': 'colours', 'dataset_uri': 'colours.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}


def install(folder: Path, groups: list[tuple[str, str]], name: str = 'theirs') -> None:
    """Write the modules and metadata of a package into a folder of the import path."""
    for module, code in MODULES.items():
        (folder / f'{module}.py').write_text(code)
    metadata = folder / f'{name}-1.0.dist-info'
    metadata.mkdir()
    (metadata / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
    (metadata / 'entry_points.txt').write_text(
        ''.join(f'[{group}]\n{line}\n' for group, line in groups).replace('"', '')
    )


@pytest.fixture
def folder(tmp_path: Path, write_jsonl) -> Path:
    """Write tasks of two types, SCORE on one of them, and their rows."""
    write_jsonl('weights.jsonl', [{'question': f'{n} kg in g?', 'number': f'{1000 * n}'} for n in (1, 2, 3)])
    write_jsonl('colours.jsonl', [{'query': f'Hue {n}?', 'choices': ['red', 'blue'], 'gold': n % 2} for n in range(4)])
    tasks = [{**ESTIMATES, 'tolerance': 0.1}, COLOURS]
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': tasks}))
    score = [{'dataset': 'colours', 'perturbations': ['shout'], 'answers': 'likelihood', 'chat_template': False}]
    (tmp_path / 'score.yaml').write_text(json.dumps({'score': score}))
    return tmp_path


def gauntlet(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / 'gauntlet', *words, '--tasks', str(folder / 'tasks.yaml')]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get('PYTHONPATH'))))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, 'PYTHONPATH': path})
    assert 'Traceback' not in done.stderr
    return done


def test_each_example_has_fewer_than_60_lines():
    assert sorted(MODULES) == ['estimates', 'margins', 'shouting']
    assert {module: code.count('\n') for module, code in MODULES.items() if code.count('\n') >= 60} == {}


def test_an_installed_task_type_metric_and_perturbation_run(folder: Path):
    install(folder, GROUPS)
    shared = ('--score', str(folder / 'score.yaml'), '--data-root', str(folder))
    exported = gauntlet(folder, 'export', *shared, '--out', str(folder / 'requests.jsonl'))
    assert exported.returncode == 0, exported.stderr
    requests = [json.loads(line) for line in (folder / 'requests.jsonl').read_text().splitlines()]
    assert requests[0]['prompt'].endswith('\n1 kg in g? ') and requests[0]['stop'] == ['\n']
    asked = [request for request in requests if request['task'] == 'score_colours']
    assert [request['variant'] for request in asked] == ['shout:no', 'shout:yes'] * 4
    assert 'Hue 0?' in asked[0]['prompt'] and 'HUE 0?' in asked[1]['prompt']

    def answer(request: dict) -> dict:
        name = {key: request[key] for key in ('task', 'num_shots', 'file', 'row', 'variant', 'sample')}
        if request['task'] == 'weights':  # right, near enough, no number
            return {**name, 'text': (' 1000\n5', '2150', 'many')[request['row']]}
        if request['task'] == 'colours':  # the first choice by 1, 2, 3 and 4 nats
            return {**name, 'logprobs': [0.0, -1.0 - request['row']]}
        return {**name, 'logprobs': [-1.0, 0.0 if 'HUE 3?' in request['prompt'] else -2.0]}

    answers = ''.join(f'{json.dumps(answer(request))}\n' for request in requests)
    (folder / 'answers.jsonl').write_text(answers)
    outputs = ('--outputs', str(folder / 'answers.jsonl'), '--out', str(folder / 'out'))
    done = gauntlet(folder, 'run', *shared, *outputs)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((folder / 'out' / 'results.json').read_text())['metrics']
    assert metrics['metrics/weights/1-shot/EstimateAccuracy'] == pytest.approx(2 / 3)
    assert metrics['metrics/weights/1-shot/NumberShare'] == pytest.approx(2 / 3)
    assert metrics['metrics/colours/0-shot/InContextLearningMultipleChoiceAccuracy'] == 0.5
    assert metrics['metrics/colours/0-shot/GoldMargin'] == pytest.approx((1 - 2 + 3 - 4) / 4)
    assert metrics['metrics/colours/0-shot/GoldMarginStandardError'] == pytest.approx((29 / 3) ** 0.5 / 2)
    assert 'metrics/weights/1-shot/GoldMargin' not in metrics
    # In lower case 'red' is always chosen: right in 2 of 4. In upper case 'blue' in the last row, where it is the gold.
    assert metrics['icl/metrics/score/colours/shout/shout_no/accuracy'] == 0.5
    assert metrics['icl/metrics/score/colours/shout/shout_yes/accuracy'] == 0.75
    assert metrics['icl/metrics/score/colours/shout/consistency_rate'] == 0.75
    assert 'icl/metrics/score/colours/shout/consistency_rate_reference' not in metrics


@pytest.mark.parametrize(
    ('words', 'facts'),
    [
        (('weights', '--row', '1'), ('2 kg in g?', 'rule: estimates.EstimateTask.score', 'correct: 2000')),
        (('weights', '--row', '1', '--answer', '2100'), ('rule: estimates.EstimateTask.score', 'score: 1')),
        (('score_colours', '--variant', 'shout:yes'), ('HUE 0?', 'rule: ')),
    ],
)
def test_items_of_an_installed_type_and_perturbation_are_explained(
    folder: Path, words: tuple[str, ...], facts: tuple[str, ...]
):
    install(folder, GROUPS)
    done = gauntlet(folder, 'explain', *words, '--score', str(folder / 'score.yaml'), '--data-root', str(folder))
    assert done.returncode == 0, done.stderr
    for fact in facts:
        assert fact in done.stdout.replace('·', ' ')


def test_keys_of_an_installed_type_are_checked(folder: Path):
    install(folder, GROUPS)
    tasks = [{**ESTIMATES, 'tolerance': 2}, {**COLOURS, 'tolerance': 0.1}, {**ESTIMATES, 'label': 'x', 'tolerence': 1}]
    (folder / 'tasks.yaml').write_text(json.dumps({'icl_tasks': tasks}))
    done = gauntlet(folder, 'validate', '--no-data')
    assert done.returncode == 1
    for place in ('icl_tasks[0]: tolerance: ', 'icl_tasks[1].tolerance: ', 'icl_tasks[2].tolerence: '):
        assert place in done.stderr


WRONG = """\
class NotATask: ...
def listed(task): return ['accuracy']
def nothing(task): return None
def failing(task): return [task.no_such_attribute]
def texts(example, spec, templates): return [example.content.text]
"""
METRIC, EXAMPLE = 'allowed: a function that returns Metric', 'allowed: a function that returns Example'


@pytest.mark.parametrize(
    ('group', 'line', 'problem'),
    [
        (0, 'estimate = "nowhere:EstimateTask"', 'cannot be loaded (No module named'),
        (0, 'estimate = "estimates:NOTHING"', 'NOTHING'),
        (0, 'estimate = "broken:EstimateTask"', 'cannot be loaded ('),
        (0, 'choice = "llmfoundry_gauntlet.tasks.schema:SchemaTask"', "has the type_name 'schema'; allowed: "),
        (0, 'bare = "llmfoundry_gauntlet.tasks:Task"', 'has the type_name None; allowed: text'),
        (0, 'estimate = "estimates:parse_number"', 'allowed: a subclass of Task'),
        (0, 'estimate = "wrong:NotATask"', "is <class 'wrong.NotATask'>; allowed: a subclass of Task"),
        (1, 'margins = "wrong:__name__"', f"is 'wrong'; {METRIC}"),
        (1, 'margins = "wrong:listed"', f"returned 'accuracy'; {METRIC}"),
        (1, 'margins = "wrong:nothing"', f'returned None; {METRIC}'),
        (1, 'margins = "wrong:failing"', "failed: AttributeError: '"),
        (2, 'shout = "wrong:texts"', f"returned 'Hue 0?'; {EXAMPLE}"),
    ],
)
def test_a_wrong_entry_point_is_named_with_its_package(folder: Path, group: int, line: str, problem: str):
    groups = [*GROUPS]
    groups[group] = (GROUPS[group][0], line)
    install(folder, groups)
    (folder / 'wrong.py').write_text(WRONG)
    (folder / 'broken.py').write_text('class EstimateTask(:\n')
    (folder / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [COLOURS]}))
    done = gauntlet(folder, 'validate', '--score', str(folder / 'score.yaml'), '--data-root', str(folder))
    assert done.returncode in (1, 2)
    assert f'theirs 1.0: its entry point {line.split()[0]} in {GROUPS[group][0]} ' in done.stderr
    assert problem in done.stderr and 'internal error' not in done.stderr


def test_two_metrics_may_not_have_the_same_name(folder: Path):
    install(folder, [(GROUPS[1][0], 'more = "estimates:EstimateTask.metrics"'), *GROUPS[::2]])
    done = gauntlet(folder, 'validate', '--no-data')
    assert done.returncode in (1, 2)
    assert 'two metrics' in done.stderr


def test_two_packages_may_not_have_the_same_entry_point(folder: Path):
    install(folder, GROUPS)
    install(folder, [(GROUPS[2][0], 'shout = "elsewhere:shout"')], 'others')
    done = gauntlet(folder, 'validate', '--no-data', '--score', str(folder / 'score.yaml'))
    assert done.returncode in (1, 2)
    assert 'both have an entry point shout in llmfoundry_gauntlet.perturbations' in done.stderr
