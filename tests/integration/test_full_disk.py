"""Scores that cannot be written, as the disk is full, are printed before the error, and its remedy works."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from llmfoundry_gauntlet.results import files
from llmfoundry_gauntlet.results import journal as journals

pytestmark = pytest.mark.slow

Command = Callable[..., tuple[int, str, str]]


def full(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Return the options of an evaluation of a saved model."""
    settings = {**tiny.write_tasks(tmp_path), 'model': str(tiny.save(tiny.model(), tmp_path / 'model'))}
    return [word for name, value in settings.items() for word in (f'--{name.replace("_", "-")}', value)]


def test_a_full_disk_hides_no_scores_and_the_same_command_with_resume_reuses_all_items(
    gauntlet: Command, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(files, 'write_synced', full)
        status, out, err = gauntlet('run', *options, '--device', 'cpu', '--out', tmp_path / 'out')
    assert status == 2
    assert 'sums/2-shot' in out and 'default_average' in out and 'results.json' not in out
    assert f'{tmp_path}/out: cannot be written: No space left on device; free space there' in err
    assert 'the same command with --resume, which reuses all items' in err
    status, again, err = gauntlet('run', *options, '--device', 'cpu', '--out', tmp_path / 'out', '--resume')
    assert status == 0, err
    timing = tiny.record(tmp_path / 'out')['timing']
    assert timing['reused_items'] == tiny.record(tmp_path / 'out')['metrics']['gauntlet/items']
    assert scores_in(again) == scores_in(out)


def test_if_the_journal_could_not_be_written_either_the_error_says_so(
    gauntlet: Command, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, 'write_synced', full)
    monkeypatch.setattr(journals.Journal, 'add', lambda *_, **__: None)
    _, _, err = gauntlet('run', *options, '--device', 'cpu', '--out', tmp_path / 'out')
    assert 'which reuses 0 of ' in err and 'the journal could not be written either' in err


def test_recomputed_scores_are_printed_too_and_the_command_is_to_be_run_again(
    gauntlet: Command, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert gauntlet('run', *options, '--device', 'cpu', '--out', tmp_path / 'out')[0] == 0
    monkeypatch.setattr(files, 'write_synced', full)
    status, out, err = gauntlet('run', '--from', tmp_path / 'out', '--out', tmp_path / 'again')
    assert status == 2 and 'sums/2-shot' in out
    assert 'free space there, then run the same command again' in err


def scores_in(table: str) -> list[str]:
    """Return the lines of a printed table that have scores."""
    return [line for line in table.splitlines() if '-shot' in line or 'average' in line]
