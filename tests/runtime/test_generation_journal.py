"""Generations are in the journal as soon as they have ended, and an evaluation that ends among them reuses each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import networks
import programs
import pytest
import tiny
import torch

from llmfoundry_gauntlet.engine import generate
from llmfoundry_gauntlet.engine.continuous import ContinuousBatch
from llmfoundry_gauntlet.engine.decoding import CACHE, FORKED_PROMPTS, GENERATION_LAYOUTS, NO_CACHE, PROMPT_STREAM
from llmfoundry_gauntlet.engine.generate import DecodingLoop, TextGenerator
from llmfoundry_gauntlet.engine.probe import Probe
from llmfoundry_gauntlet.results.journal import read_journal
from llmfoundry_gauntlet.runtime import runner
from llmfoundry_gauntlet.runtime.gauntlet import Gauntlet
from llmfoundry_gauntlet.types import Generation, ItemKey

# One family for each layout.
FAMILY_OF = {PROMPT_STREAM: 'qwen2', FORKED_PROMPTS: 'mistral', CACHE: 'llama', NO_CACHE: 'gpt_bigcode'}
NUM_RIDDLES = 24


class Interrupt(BaseException):
    """Raised to end an evaluation, as a signal's handler does."""


def generated(out: Path) -> set[ItemKey]:
    """Return the items in a journal that were generated."""
    finished = read_journal(out)
    return set() if finished is None else {key for key, item in finished.results.items() if item.text is not None}


def tasks_in(folder: Path) -> list[dict[str, Any]]:
    """Write greedy riddles, and sampled ones with two seeds."""
    greedy, drawn = tiny.write_riddles(folder, num_rows=NUM_RIDDLES)
    other_seed = {**drawn, 'label': 'drawn_again', 'generation_kwargs': {**drawn['generation_kwargs'], 'seed': 5}}
    return [greedy, drawn, other_seed]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return the settings of tasks that generate, in several batches."""
    return {'tasks': tasks_in(tmp_path), 'data_root': str(tmp_path), 'max_seq_len': 128}


def network_of(layout: str) -> Any:
    return networks.network(FAMILY_OF[layout], vocab_size=259, max_position_embeddings=128)


def run(settings: dict[str, Any], layout: str, folder: Path) -> Path:
    """Evaluate the network of a layout, or go on with that; return the folder of its records."""
    Gauntlet(**settings, save_folder=str(folder)).evaluate(network_of(layout), tiny.tokenizer(), step=1)
    return folder / 'ba1'


@contextmanager
def stepping(act: Callable[[DecodingLoop], None]) -> Iterator[None]:
    """Call a function before each decoding step of an evaluation, until the context ends."""
    whole_step = DecodingLoop.step

    def step(loop: DecodingLoop) -> None:
        if loop.generator.decoder.end_ids:  # else it is a probe
            act(loop)
        whole_step(loop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodingLoop, 'step', step)
        yield


@contextmanager
def ending_with(out: Path, least: int) -> Iterator[None]:
    """Expect an evaluation that ends within a batch, once so many generated items are in its journal."""

    def act(_: DecodingLoop) -> None:
        if len(generated(out)) >= least:
            raise Interrupt

    with stepping(act), pytest.raises(Interrupt):
        yield


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[list[ItemKey]]:
    """Return a list that gets the items of each continuous batch that is generated."""
    batches: list[list[ItemKey]] = []
    whole = TextGenerator.generate

    def noted(generator: TextGenerator, batch: ContinuousBatch, *more: Any) -> list[Generation]:
        batches.append([request.key for request in batch.requests])
        return whole(generator, batch, *more)

    monkeypatch.setattr(TextGenerator, 'generate', noted)
    return batches


def use_layout(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Generate in a layout, whatever the probe finds, and run what prompts share once."""
    find = runner.probe_generation

    def found(*arguments: Any, **more: Any) -> Probe:
        return replace(find(*arguments, **more), layout=layout)

    monkeypatch.setattr(runner, 'probe_generation', found)
    monkeypatch.setattr(generate, 'FORWARD_TOKENS', 0)


@pytest.mark.parametrize('layout', GENERATION_LAYOUTS)
def test_an_evaluation_that_ends_among_generations_reuses_each_of_them(
    settings, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: list[list[ItemKey]]
):
    """It ends three times, within a batch each time; the results are those of one that does not, to the last bit.

    Mutations: items are written at the end of their batch; a batch with unfinished items is rerun as a whole.
    """
    use_layout(monkeypatch, layout)
    whole = run(settings, layout, tmp_path / 'whole')
    num_items = sum(map(len, requested))
    assert num_items == 3 * NUM_RIDDLES

    out = tmp_path / 'resumed/ba1'
    for least in (3, num_items // 2, num_items - 3):
        before = generated(out)
        requested.clear()
        with ending_with(out, least):
            run(settings, layout, tmp_path / 'resumed')
        assert least <= len(generated(out)) < num_items
        assert generated(out) >= before
        assert before.isdisjoint(key for batch in requested for key in batch)

    done = read_journal(out).results
    run(settings, layout, tmp_path / 'resumed')
    assert tiny.outcome(out) == tiny.outcome(whole)
    assert tiny.record(out)['timing']['reused_items'] == sum(not key.is_gold for key in done)


def test_items_are_written_once_where_memory_runs_out_among_generations(settings, tmp_path: Path):
    """Mutation: items that were written before memory ran out are written again."""
    whole = run(settings, PROMPT_STREAM, tmp_path / 'whole')
    out = tmp_path / 'halved/ba1'
    numbers_of_slots: list[int] = []

    def act(loop: DecodingLoop) -> None:
        num_done = len(generated(out))
        num_lines = len(tiny.journal_lines(out))
        numbers_of_slots.append(loop.num_slots)
        assert num_lines == 1 + len(read_journal(out).results)  # the first is the identity
        if num_done >= 5 and loop.num_slots > 4:
            raise torch.OutOfMemoryError('too many rows')

    with stepping(act):
        run(settings, PROMPT_STREAM, tmp_path / 'halved')

    assert numbers_of_slots[0] > 4
    assert numbers_of_slots[-1] == 4
    assert tiny.outcome(out) == tiny.outcome(whole)


def test_programs_are_in_the_journal_while_others_are_generated(tmp_path: Path):
    """They run in other threads: the model waits for that of the first generation that has ended, then is stopped.

    Mutations: programs begin when their batch has ended; their results are written when all have run.
    """
    programs.sandbox()
    settings = {'tasks': [tiny.write_programs(tmp_path)], 'data_root': str(tmp_path), 'max_seq_len': 128}
    whole = run(settings, PROMPT_STREAM, tmp_path / 'whole')
    out = tmp_path / 'resumed/ba1'

    def act(loop: DecodingLoop) -> None:
        if loop.done:
            forks.wait_until(lambda: len(generated(out)) > 0)
            raise Interrupt

    with stepping(act), pytest.raises(Interrupt):
        run(settings, PROMPT_STREAM, tmp_path / 'resumed')
    done = read_journal(out).results
    assert 0 < len(generated(out)) < 6 * 3

    run(settings, PROMPT_STREAM, tmp_path / 'resumed')
    assert tiny.outcome(out) == tiny.outcome(whole)
    assert tiny.record(out)['timing']['reused_items'] == sum(not key.is_gold for key in done)
