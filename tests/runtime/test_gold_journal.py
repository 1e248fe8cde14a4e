"""An evaluation that ends between the two requests of an item, its generation and the right one, is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.results.journal import line_of, payloads
from llmfoundry_gauntlet.runtime.launcher import Launcher


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that evaluates a model on riddles; the folder is returned."""
    tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path, num_rows=6))
    tiny.save(tiny.model(), tmp_path / 'model')

    def run_in(name: str, **settings: Any) -> Path:
        out = tmp_path / name
        evaluate(tmp_path / 'model', out=out, device='cpu', **tiny.settings_of(tmp_path), **settings)
        return out

    return run_in


class Interrupt(Exception):
    """Raised to end an evaluation."""


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, fails: bool = False) -> list[None]:
    """Return a list that gets an element whenever a method is called; if it `fails` the first call is the last."""
    calls: list[None] = []
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        calls.append(None)
        if fails:
            raise Interrupt
        return method(*arguments)

    monkeypatch.setattr(owner, name, call)
    return calls


def entries(out: Path) -> list[dict[str, Any]]:
    """Return the items in the only file of the journal."""
    (path,) = (out / 'journal').iterdir()
    lines = [json.loads(payload) for payload in payloads(path.read_bytes()) if payload is not None]
    return [line['item'] for line in lines if 'item' in line]


def test_an_interrupt_before_generations_keeps_the_right_ones(run, monkeypatch: pytest.MonkeyPatch):
    """Mutations: an item counts as finished with one of its requests; the right one is scored again."""
    whole = run('whole')
    with monkeypatch.context() as patch:
        counted(patch, TextGenerator, 'generate', fails=True)
        with pytest.raises(Interrupt):
            run('resumed')
    golds = [entry for entry in entries(whole.parent / 'resumed') if entry.get('is_gold')]
    assert len(golds) == 12  # six of each task
    assert all(entry['text'] is None and entry['metrics']['GoldBitsPerByte'] > 0 for entry in golds)

    batches = counted(monkeypatch, Launcher, 'run')
    generations = counted(monkeypatch, TextGenerator, 'generate')
    resumed = run('resumed', resume=True)

    assert tiny.outcome(resumed) == tiny.outcome(whole)
    assert not batches and generations
    assert tiny.record(resumed)['timing']['reused_items'] == 28  # of 40, without generations


def test_right_generations_that_a_journal_has_lost_are_scored_alone(run, monkeypatch: pytest.MonkeyPatch):
    whole = run('whole')
    with monkeypatch.context() as patch:
        patch.setattr('llmfoundry_gauntlet.runtime.records.remove_journal', lambda folder: None)
        resumed = run('resumed')
    (path,) = (resumed / 'journal').iterdir()
    (resumed / 'results.json').unlink()
    kept = [payload for payload in payloads(path.read_bytes()) if payload and b'"is_gold": true' not in payload]
    path.write_bytes(b''.join(line_of(payload.decode()) for payload in kept))

    batches = counted(monkeypatch, Launcher, 'run')
    generations = counted(monkeypatch, TextGenerator, 'generate')
    run('resumed', resume=True)

    assert tiny.outcome(resumed) == tiny.outcome(whole)
    assert batches and not generations


def test_a_finished_evaluation_is_written_elsewhere_with_its_bits(run, monkeypatch: pytest.MonkeyPatch):
    """The right generations are no lines of their own in samples. Mutation: they are scored again."""
    whole = run('whole')
    expected = tiny.outcome(whole)
    batches = counted(monkeypatch, Launcher, 'run')

    moved = whole.rename(whole.parent / 'moved')
    run('moved', resume=True)

    assert tiny.outcome(moved) == expected
    assert not batches
    lines = (moved / 'samples/greedy_1-shot.jsonl').read_text().splitlines()
    assert len(lines) == 6
    samples = [json.loads(line) for line in lines]
    assert all('is_gold' not in sample and sample['metrics']['GoldBitsPerByte'] > 0 for sample in samples)
