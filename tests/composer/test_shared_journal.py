"""Records of an earlier attempt in the folder of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.composer import journal
from llmfoundry_gauntlet.composer.journal import Resuming, SharedJournal
from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.results.journal import JOURNAL, Journal, OtherEvaluationError

IDENTITY = {'model': 'ab', 'items': 'cd'}
REQUIRED = Resuming(required=True)


def leave_journal(folder: Path, **identity: str) -> None:
    """Write the journal of an attempt that finished nothing."""
    Journal(folder, {**IDENTITY, 'layout': 'stream', **identity}, attempt=0, rank=0).close()


@pytest.mark.parametrize('content', ['{}', '{', json.dumps({'format_version': 1})])
def test_required_records_that_cannot_be_resumed_are_kept(tmp_path: Path, content: str):
    """Otherwise `--resume` would replace computed results."""
    (tmp_path / 'results.json').write_text(content)
    with pytest.raises(RecordError, match=r'results\.json'):
        SharedJournal(tmp_path, IDENTITY, REQUIRED).read()
    assert (tmp_path / 'results.json').read_text() == content
    shared = SharedJournal(tmp_path, IDENTITY, Resuming())  # in training it is replaced
    shared.read()
    assert not shared.done


def test_an_empty_folder_starts_a_new_evaluation(tmp_path: Path):
    shared = SharedJournal(tmp_path / 'new', IDENTITY, REQUIRED)
    shared.read()
    shared.begin({'layout': 'stream'})
    shared.close()
    assert [path.name for path in (tmp_path / 'new' / JOURNAL).iterdir()] == ['000-rank0.jsonl']


def test_a_journal_of_another_plan_is_an_error_or_replaced(tmp_path: Path):
    leave_journal(tmp_path)
    refusing = SharedJournal(tmp_path, IDENTITY, REQUIRED)
    refusing.read()
    with pytest.raises(OtherEvaluationError, match=r'layout stream \(now padded_rows\)'):
        refusing.begin({'layout': 'padded_rows'})
    replacing = SharedJournal(tmp_path, IDENTITY, Resuming())
    replacing.read()
    replacing.begin({'layout': 'padded_rows'})
    replacing.close()
    (path,) = (tmp_path / JOURNAL).iterdir()
    assert b'padded_rows' in path.read_bytes()


def test_a_journal_of_another_model_is_replaced_in_training(tmp_path: Path):
    leave_journal(tmp_path, model='xy')
    with pytest.raises(OtherEvaluationError, match=r'model xy \(now ab\)'):
        SharedJournal(tmp_path, IDENTITY, REQUIRED).read()
    assert (tmp_path / JOURNAL).is_dir()
    SharedJournal(tmp_path, IDENTITY, Resuming()).read()
    assert not (tmp_path / JOURNAL).exists()


def test_records_are_reused_only_if_wanted(tmp_path: Path):
    leave_journal(tmp_path)
    SharedJournal(tmp_path, IDENTITY, Resuming(wanted=False)).read()
    assert not (tmp_path / JOURNAL).exists()


def test_a_damaged_record_is_an_error_on_all_ranks(tmp_path: Path):
    """The others wait for the first one in a collective."""
    (tmp_path / 'results.json').write_text(json.dumps({'format_version': 1, 'tasks': 3, 'score': None}))
    with pytest.raises(RecordError):
        SharedJournal(tmp_path, IDENTITY, REQUIRED).read()


class Unforeseen(Exception):
    """An unexpected error."""


def test_an_unexpected_error_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first rank reports that it failed before its own error ends it."""
    told: list[Any] = []

    def fail(*_: Any, **__: Any) -> None:
        raise Unforeseen

    monkeypatch.setattr(journal, 'read_journal', fail)
    monkeypatch.setattr(journal.dist, 'all_gather_object', told.extend)
    with pytest.raises(Unforeseen):
        SharedJournal(tmp_path, IDENTITY, REQUIRED).read()
    assert isinstance(told[0], RecordError) and str(tmp_path) in str(told[0]) and told[1] is None
