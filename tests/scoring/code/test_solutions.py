"""Canonical solutions of our problems and of HumanEval, run as if a model had generated them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from programs import CPP, JAVASCRIPT, PYTHON, need, sandbox

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data, with_programs
from llmfoundry_gauntlet.scoring.code.execution import workers
from llmfoundry_gauntlet.types import Generation, ItemKey

FILES = {
    'human_eval': 'human_eval.jsonl',
    'human_eval_25': 'human_eval-0.25.jsonl',
    'human_eval_50': 'human_eval-0.5.jsonl',
    'human_eval_75': 'human_eval-0.75.jsonl',
    'human_eval_return_simple': 'human_eval_return_simple.jsonl',
    'human_eval_return_complex': 'human_eval_return_complex.jsonl',
    'human_eval_cpp': 'processed_human_eval_cpp.jsonl',
    'human_eval_js': 'processed_human_eval_js.jsonl',
}
# Solutions, and the numbers in the names of those whose data are wrong or want a package (by the test), and by pairs.
TESTED = {
    'human_eval': (164, ()),
    'human_eval_25': (164, ()),
    'human_eval_50': (164, ()),
    'human_eval_75': (164, ()),
    'human_eval_return_simple': (37, ()),
    'human_eval_return_complex': (127, ()),
    'human_eval_cpp': (161, ()),
    'human_eval_js': (164, (112, 155, 162)),
}
PAIRS = {
    'human_eval': (164, (11, 15, 44, 65, 70, 84, 103, 137, 161)),
    'human_eval_cpp': (161, (32, 38, 45, 50, 71, 114, 120, 139, 151)),
    'human_eval_js': (164, (2, 7, 32, 38, 50, 71, 74, 112, 145, 155, 162)),
}


@dataclass(frozen=True)
class Checked:
    """The number of a task's canonical solutions, and the reasons for failures by row."""

    num_solutions: int
    failures: dict[int, str]


def check(label: str, data_root: Path, **keys) -> Checked:
    """Run and score the canonical solutions of a task as if a model had generated them."""
    sandbox()
    need({'human_eval_cpp': CPP, 'human_eval_js': JAVASCRIPT}.get(label, PYTHON))
    task = {'label': label, 'dataset_uri': f'programming/{FILES[label]}', 'num_fewshot': [0], **keys}
    settings = {'tasks': [{**task, 'icl_task_type': 'code_evaluation'}], 'data_root': str(data_root)}
    data = with_programs(load_data(decode_settings(settings)))
    ((key, task),) = data.tasks.items()

    programs = {}
    for example in data.examples[key]:
        (solution,) = task.responses(example.content)
        output = Generation(key=ItemKey(key, example.row), text=solution)
        programs[example.row] = workers().submit(task.score_program, output, example.content, data.sandbox)
    scores = {row: program.result() for row, program in programs.items()}
    failures = {row: score.reason or '' for row, score in scores.items() if score.value != 1}
    return Checked(num_solutions=len(scores), failures=failures)


def failing(checked: Checked, data_root: Path, label: str) -> tuple[int, ...]:
    """Return the numbers of the problems that fail."""
    lines = (data_root / 'programming' / FILES[label]).read_text(encoding='utf-8').splitlines()
    return tuple(sorted(int(json.loads(lines[row])['task_id'].split('/')[1]) for row in checked.failures))


@pytest.mark.parametrize('rule', ['test', 'io_pairs'])
@pytest.mark.parametrize('label', FILES)
def test_our_own_solutions_pass(label: str, rule: str):
    checked = check(label, ROOT / 'eval_data', rule=rule)
    assert checked.num_solutions >= 8 and checked.failures == {}


def labels(known: Iterable[str]) -> list[Any]:
    """Return all labels; C++ is marked as it takes minutes to compile."""
    return [pytest.param(label, marks=[pytest.mark.long] if label == 'human_eval_cpp' else []) for label in known]


@pytest.mark.parametrize('label', labels(TESTED))
def test_human_eval_solutions_pass_except_known_errors_in_the_data(label: str, real_data: Path):
    checked = check(label, real_data)
    assert (checked.num_solutions, failing(checked, real_data, label)) == TESTED[label], checked.failures


def test_some_solutions_in_cpp_pass(real_data: Path, tmp_path: Path):
    """The shortest, and those whose functions have names of the C++ library."""
    lines = (real_data / 'programming' / FILES['human_eval_cpp']).read_text(encoding='utf-8').splitlines()
    named = [line for line in lines if re.search(r'"entry_point": "(strlen|max_element|unique|search)"', line)]
    (tmp_path / 'programming').mkdir()
    chosen = dict.fromkeys([*named, *sorted(lines, key=len)[:12]])
    (tmp_path / 'programming' / FILES['human_eval_cpp']).write_text('\n'.join(chosen), encoding='utf-8')
    checked = check('human_eval_cpp', tmp_path)
    assert checked.num_solutions >= 14 and checked.failures == {}


@pytest.mark.parametrize('label', labels(PAIRS))
def test_input_output_pairs_fail_as_in_composer(label: str, real_data: Path):
    checked = check(label, real_data, rule='io_pairs')
    assert (checked.num_solutions, failing(checked, real_data, label)) == PAIRS[label], checked.failures
