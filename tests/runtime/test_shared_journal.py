"""Records of an earlier attempt in the folder of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.results.journal import JOURNAL, Journal, OtherEvaluationError
from llmfoundry_gauntlet.runtime import distributed, journal
from llmfoundry_gauntlet.runtime.journal import Resuming, SharedJournal

IDENTITY = {'model': 'ab', 'items': 'cd'}
PLAN = {'layout': 'stream'}
REQUIRED = Resuming(required=True)


def leave_journal(folder: Path, **identity: str) -> Path:
    """Write the journal of an attempt that finished nothing; return its file."""
    Journal(folder, {**IDENTITY, **PLAN, **identity}, attempt=0, rank=0).close()
    (path,) = (folder / JOURNAL).iterdir()
    return path


def begin(folder: Path, resuming: Resuming) -> list[Path]:
    """Begin another attempt; return the files of the journal."""
    shared = SharedJournal(folder, IDENTITY, resuming)
    shared.read()
    shared.begin(PLAN)
    shared.close()
    return sorted((folder / JOURNAL).iterdir())


@pytest.mark.parametrize(
    'content', ['{}', '{', '{"format_version": 1}', '{"format_version": 1, "tasks": 3, "score": null}']
)
def test_required_records_that_cannot_be_resumed_are_kept(tmp_path: Path, content: str):
    """Otherwise `--resume` would replace computed results."""
    (tmp_path / 'results.json').write_text(content)
    with pytest.raises(RecordError, match=r'results\.json'):
        begin(tmp_path, REQUIRED)
    assert (tmp_path / 'results.json').read_text() == content
    assert begin(tmp_path, Resuming())  # in training they are replaced


@pytest.mark.parametrize(
    ('identity', 'differing'),
    [({'model': 'xy'}, r'model xy \(now ab\)'), ({'layout': 'padded_rows'}, r'layout padded_rows \(now stream\)')],
)
def test_a_journal_of_another_model_or_plan_is_an_error_if_it_is_required_else_replaced(
    tmp_path: Path, identity: dict[str, str], differing: str
):
    path = leave_journal(tmp_path, **identity)
    before = path.read_bytes()
    with pytest.raises(OtherEvaluationError, match=differing):
        begin(tmp_path, REQUIRED)
    assert path.read_bytes() == before
    (path,) = begin(tmp_path, Resuming())
    assert path.read_bytes() != before


def test_records_are_reused_only_if_wanted(tmp_path: Path):
    first = leave_journal(tmp_path)
    assert begin(tmp_path, REQUIRED) == [first, first.with_name('001-rank0.jsonl')]
    assert begin(tmp_path, Resuming(wanted=False)) == [first] == [tmp_path / JOURNAL / '000-rank0.jsonl']
    assert len(begin(tmp_path / 'empty', REQUIRED)) == 1


class Unforeseen(Exception):
    """An unexpected error."""


def test_an_unexpected_error_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first rank reports that it failed before its own error ends it."""
    told: list[Any] = []

    def fail(*_: Any, **__: Any) -> None:
        raise Unforeseen('no row')

    monkeypatch.setattr(journal, 'read_journal', fail)
    monkeypatch.setattr(distributed, 'gather', told.append)
    with pytest.raises(Unforeseen):
        begin(tmp_path, REQUIRED)
    assert [(type(error), str(error)) for error in told] == [(RuntimeError, 'rank 0 failed: Unforeseen: no row')]
