"""The code of `docs/extending.md`, installed as a third-party package and run by the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

TEXT = (ROOT / 'docs' / 'extending.md').read_text('utf-8')
MODULES = dict(re.findall(r'```python\n# (\w+)\.py\n(.*?)```', TEXT, re.DOTALL))
GROUP = 'llmfoundry_gauntlet.task_types'
ENTRY_POINTS = tuple(re.findall(r'^(\w+ = "\w+:\w+")$', TEXT, re.MULTILINE))

ESTIMATES = {'label': 'weights', 'dataset_uri': 'weights.jsonl', 'num_fewshot': [1], 'icl_task_type': 'estimate'}
COLOURS = {'label': 'colours', 'dataset_uri': 'colours.jsonl', 'num_fewshot': [0], 'icl_task_type': 'margin_choice'}
WEIGHT_ROWS = [{'question': f'{number} kg in g?', 'number': f'{1000 * number}'} for number in (1, 2, 3)]
COLOUR_ROWS = [{'query': f'Hue {number}?', 'choices': ['red', 'blue'], 'gold': number % 2} for number in range(4)]


def install(folder: Path, entry_points: Sequence[str] = ENTRY_POINTS, name: str = 'theirs') -> None:
    """Write the modules and metadata of a package into a folder of the import path."""
    for module, code in MODULES.items():
        (folder / f'{module}.py').write_text(code)
    metadata = folder / f'{name}-1.0.dist-info'
    metadata.mkdir()
    (metadata / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
    lines = [f'[{GROUP}]', *(line.replace('"', '') for line in entry_points)]
    (metadata / 'entry_points.txt').write_text('\n'.join(lines))


def write_tasks(folder: Path, *tasks: dict[str, Any]) -> None:
    (folder / 'tasks.yaml').write_text(json.dumps({'icl_tasks': tasks}))


@pytest.fixture
def folder(tmp_path: Path, write_jsonl) -> Path:
    """Write tasks of the two types and their rows."""
    write_jsonl('weights.jsonl', WEIGHT_ROWS)
    write_jsonl('colours.jsonl', COLOUR_ROWS)
    write_tasks(tmp_path, {**ESTIMATES, 'tolerance': 0.1}, COLOURS)
    return tmp_path


def gauntlet(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line with the folder on the import path."""
    command = [Path(sys.executable).parent / 'gauntlet', *words, '--tasks', folder / 'tasks.yaml']
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get('PYTHONPATH'))))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, 'PYTHONPATH': path})
    assert 'Traceback' not in done.stderr
    return done


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request: texts for weights, log-probabilities for colours."""
    key = {name: request[name] for name in ('task', 'num_shots', 'file', 'row', 'variant', 'sample')}
    row = request['row']
    if request['task'] == 'weights':
        right, near_enough, no_number = ' 1000\n5', '2150', 'many'
        return {**key, 'text': (right, near_enough, no_number)[row]}
    return {**key, 'logprobs': [0.0, -1.0 - row]}  # the first choice is preferred by 1, 2, 3 and 4 nats


def test_each_example_has_fewer_than_60_lines():
    num_lines = {module: code.count('\n') for module, code in MODULES.items()}

    assert sorted(num_lines) == ['estimates', 'margins']
    assert max(num_lines.values()) < 60


def test_installed_task_types_run_with_their_metrics(folder: Path):
    install(folder)
    requests_file, answers_file = folder / 'requests.jsonl', folder / 'answers.jsonl'

    exported = gauntlet(folder, 'export', '--data-root', folder, '--out', requests_file)
    assert exported.returncode == 0, exported.stderr
    requests = [json.loads(line) for line in requests_file.read_text().splitlines()]
    answers_file.write_text(''.join(f'{json.dumps(answer(request))}\n' for request in requests))
    done = gauntlet(folder, 'run', '--data-root', folder, '--outputs', answers_file, '--out', folder / 'out')
    assert done.returncode == 0, done.stderr

    assert requests[0]['prompt'].endswith('\n1 kg in g? ') and requests[0]['stop'] == ['\n']
    metrics = json.loads((folder / 'out' / 'results.json').read_text())['metrics']
    assert metrics['metrics/weights/1-shot/EstimateAccuracy'] == pytest.approx(2 / 3)
    assert metrics['metrics/weights/1-shot/NumberShare'] == pytest.approx(2 / 3)
    assert metrics['metrics/colours/0-shot/InContextLearningMultipleChoiceAccuracy'] == 0.5
    # The gold choices are the first and the second in turn, so the margins are 1, -2, 3 and -4.
    assert metrics['metrics/colours/0-shot/GoldMargin'] == pytest.approx((1 - 2 + 3 - 4) / 4)
    assert metrics['metrics/colours/0-shot/GoldMarginStandardError'] == pytest.approx((29 / 3) ** 0.5 / 2)


@pytest.mark.parametrize(
    ('words', 'facts'),
    [
        (['weights', '--row', '1'], ['2 kg in g?', 'rule: estimates.EstimateTask.score', 'correct: 2000']),
        (['weights', '--row', '1', '--answer', '2100'], ['rule: estimates.EstimateTask.score', 'score: 1']),
    ],
)
def test_items_of_an_installed_type_are_explained(folder: Path, words: list[str], facts: list[str]):
    install(folder)

    done = gauntlet(folder, 'explain', *words, '--data-root', folder)

    assert done.returncode == 0, done.stderr
    shown = done.stdout.replace('·', ' ')
    assert [fact for fact in facts if fact not in shown] == []


def test_keys_of_an_installed_type_are_checked(folder: Path):
    install(folder)
    write_tasks(
        folder,
        {**ESTIMATES, 'tolerance': 2},  # refused by the type
        {**COLOURS, 'tolerance': 0.1},  # a key of another type
        {**ESTIMATES, 'label': 'x', 'tolerence': 1},  # misspelled
    )

    done = gauntlet(folder, 'validate', '--no-data')

    assert done.returncode == 1
    for place in ('icl_tasks[0]: tolerance: ', 'icl_tasks[1].tolerance: ', 'icl_tasks[2].tolerence: '):
        assert place in done.stderr


WRONG = """\
from llmfoundry_gauntlet.tasks.multiple_choice import MultipleChoiceTask

class NotATask: ...

class FailingTask(MultipleChoiceTask):
    type_name = 'margin_choice'
    def metrics(self): return [self.no_such_attribute]

class RepeatingTask(MultipleChoiceTask):
    type_name = 'margin_choice'
    def metrics(self): return [*MultipleChoiceTask.metrics(self)] * 2
"""


def validated_with(folder: Path, entry_points: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Validate a task of the type `margin_choice` with these entry points, of which one is wrong."""
    install(folder, entry_points)
    (folder / 'wrong.py').write_text(WRONG)
    (folder / 'broken.py').write_text('class EstimateTask(:\n')
    write_tasks(folder, COLOURS)
    done = gauntlet(folder, 'validate', '--data-root', folder)
    assert done.returncode in (1, 2)
    return done


@pytest.mark.parametrize(
    ('entry_point', 'problem'),
    [
        # Nothing can be loaded.
        ('estimate = "nowhere:EstimateTask"', 'cannot be loaded (No module named'),
        ('estimate = "estimates:NOTHING"', 'NOTHING'),
        ('estimate = "broken:EstimateTask"', 'cannot be loaded ('),
        # The name of the type is taken, or missing.
        ('choice = "llmfoundry_gauntlet.tasks.schema:SchemaTask"', "has the type_name 'schema'; allowed: "),
        ('bare = "llmfoundry_gauntlet.tasks:Task"', 'has the type_name None; allowed: text'),
        # It is no task type.
        ('estimate = "estimates:parse_number"', 'allowed: a subclass of Task'),
        ('estimate = "wrong:NotATask"', "is <class 'wrong.NotATask'>; allowed: a subclass of Task"),
        # Its own code fails.
        ('margin = "wrong:FailingTask"', "failed: AttributeError: '"),
    ],
)
def test_a_wrong_entry_point_is_named_with_its_package(folder: Path, entry_point: str, problem: str):
    name = entry_point.split()[0]
    others = [line for line in ENTRY_POINTS if line.split()[0] != name]

    done = validated_with(folder, [entry_point, *others])

    assert f'theirs 1.0: its entry point {name} in {GROUP} ' in done.stderr
    assert problem in done.stderr and 'internal error' not in done.stderr


def test_two_metrics_of_a_type_may_not_have_the_same_name(folder: Path):
    done = validated_with(folder, ['margin = "wrong:RepeatingTask"'])

    assert "the task type margin_choice has two metrics 'GoldBitsPerByte'" in done.stderr


def test_two_packages_may_not_have_the_same_entry_point(folder: Path):
    install(folder)
    install(folder, ['margin = "elsewhere:MarginTask"'], 'others')

    done = gauntlet(folder, 'validate', '--no-data')

    assert done.returncode in (1, 2)
    assert f'both have an entry point margin in {GROUP}' in done.stderr
