"""Fixtures for tests of runs that are read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from answered_runs import GAUNTLET, KINDS, QUESTIONS, ROWS, TEMPLATE, answers, words, write_answers, write_yaml
from command_line import run_cli

from llmfoundry_gauntlet.results.files import write_lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return data and YAML files of a task of each type with one shot, of SCORE on two datasets, and of a gauntlet."""
    folder = tmp_path / 'source'
    (folder / 'score' / 'agieval_v1').mkdir(parents=True)
    (folder / 'score' / 'prompts').mkdir()
    for label, rows in ROWS.items():
        write_lines(folder / f'{label}.jsonl', map(json.dumps, rows))
    write_lines(folder / 'score' / 'agieval_v1' / 'sat-en.jsonl', map(json.dumps, QUESTIONS))
    prompts = {'option_order_robustness': TEMPLATE, 'prompt_robustness': [TEMPLATE] * 10}
    (folder / 'score' / 'prompts' / 'agieval.json').write_text(json.dumps(prompts))
    tasks = [{'label': label, 'dataset_uri': f'{label}.jsonl', 'num_fewshot': [1], **KINDS[label]} for label in ROWS]
    write_yaml(folder / 'tasks.yaml', icl_tasks=tasks)
    write_yaml(folder / 'gauntlet.yaml', eval_gauntlet=GAUNTLET)
    entries = [
        {'dataset': 'agieval', 'perturbations': ['option_order', 'prompt']},
        {'dataset': 'choices', 'perturbations': ['option_order']},
    ]
    write_yaml(folder / 'score.yaml', score=entries)
    return folder


@pytest.fixture
def make_run(source: Path, tmp_path: Path):
    """Return a function that scores answers, by default all, into a folder of the test."""

    def make(*more: Any, lines: Iterable[Mapping[str, Any]] | None = None, name: str = 'run') -> Path:
        path = write_answers(tmp_path, answers() if lines is None else lines)
        assert run_cli('run', '--outputs', path, *words(source), *more, '--out', tmp_path / name) == 0
        return tmp_path / name

    return make


@pytest.fixture
def recompute(tmp_path: Path):
    """Return a function that recomputes a run from its samples into a folder of the test."""

    def recompute(run: Path, *more: Any, name: str = 'again') -> Path:
        assert run_cli('run', '--from', run, *more, '--out', tmp_path / name) == 0
        return tmp_path / name

    return recompute
