"""Fixtures of the integration tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import attempts
import pytest
import tiny

SUMS = [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(300)]


@pytest.fixture
def tiny_settings(tmp_path: Path) -> dict[str, str]:
    """Write the tiny tasks into the test's folder; return the settings that name them."""
    return tiny.write_tasks(tmp_path)


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tasks of several hundred items and a saved model."""
    folder = tmp_path_factory.mktemp('resume')
    tiny.write_tasks(folder, [*tiny.write_replies(folder), tiny.write_programs(folder)])
    tiny.write_rows(folder / 'sums.jsonl', SUMS)
    tiny.save(tiny.model(), folder / 'model')
    (folder / 'errors.txt').touch()
    return folder


@pytest.fixture(scope='session')
def attempt(folder: Path) -> attempts.Attempt:
    """Return a function that evaluates on some ranks, killed after some seconds or lines in the journal."""
    return partial(attempts.attempt, folder)


@pytest.fixture(scope='session')
def undisturbed(folder: Path, attempt: attempts.Attempt) -> attempts.Outcome:
    """Return the outcome of an evaluation on one rank that is not killed."""
    assert attempt(folder / 'undisturbed', 1) == [0], attempts.said(folder)
    assert not (folder / 'undisturbed' / 'journal').exists()
    return attempts.outcome(folder / 'undisturbed')
