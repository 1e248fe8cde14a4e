"""Evaluations of hybrids, whose contexts and prompts fork: interrupted, on ranks, in a subset, beside padded rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import every_family
import forks
import networks
import pytest
import tiny
import torch
from torch.nn.parallel import DistributedDataParallel

from llmfoundry_gauntlet.engine import probe
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.runtime.distributed import global_rank
from llmfoundry_gauntlet.runtime.gauntlet import Gauntlet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not networks.IS_TRANSFORMERS_5, reason='below transformers 5 caches of hybrids cannot be copied'
    ),
]
HYBRIDS = ('falcon_h1', 'qwen3_5_text', 'lfm2')
FORKED_LAYOUTS = ('forked prefixes', 'key-value cache, forked prompts')


def hybrid(name: str) -> torch.nn.Module:
    network: torch.nn.Module = every_family.build(name, vocab_size=len(tiny.tokenizer()), pad_token_id=2)
    return network


def settings_in(folder: Path) -> dict[str, Any]:
    """Write tasks that are scored and tasks that are generated; return their settings, in several batches."""
    paths = tiny.write_tasks(folder, tiny.write_riddles(folder, num_rows=4))
    return {**paths, 'tokens_per_batch': 200}


def items_of(evaluation: Evaluation) -> dict[str, str]:
    """Return every item with its prediction, score, log-probabilities and text, as exact text."""
    return {str(result.key): repr(result) for results in evaluation.results.values() for result in results}


@contextmanager
def interrupted_at(network: torch.nn.Module, number: int) -> Iterator[list[None]]:
    """Raise KeyboardInterrupt at a forward; yield a list that grows by one at each."""
    forwards: list[None] = []

    def count(*_: Any) -> None:
        forwards.append(None)
        if len(forwards) == number:
            raise KeyboardInterrupt

    handle = network.register_forward_pre_hook(count)
    try:
        yield forwards
    finally:
        handle.remove()


@pytest.mark.parametrize('name', HYBRIDS)
def test_an_interrupted_evaluation_is_resumed_with_the_same_items(name: str, tmp_path: Path):
    """Interrupted within what is scored, and within generation. Mutation: batches depend on what is done already."""
    settings = settings_in(tmp_path)
    network = hybrid(name)
    with interrupted_at(network, -1) as forwards:
        whole = Gauntlet(**settings, save_folder=tmp_path / 'whole').evaluate(network, tiny.tokenizer(), step=1)
    layouts = json.dumps(tiny.record(tmp_path / 'whole' / 'ba1'))
    assert all(layout in layouts for layout in FORKED_LAYOUTS)

    for share in (0.7, 0.95):
        folder = tmp_path / str(share)
        gauntlet = Gauntlet(**settings, save_folder=folder)
        with interrupted_at(network, int(share * len(forwards))), pytest.raises(KeyboardInterrupt):
            gauntlet.evaluate(network, tiny.tokenizer(), step=1)
        resumed = Gauntlet(**settings, save_folder=folder).evaluate(network, tiny.tokenizer(), step=1)
        assert tiny.record(folder / 'ba1')['timing']['reused_items'] > 0
        assert items_of(resumed) == items_of(whole)


@pytest.mark.parametrize('name', HYBRIDS)
def test_a_subset_in_a_time_budget_has_the_items_of_the_whole(name: str, tmp_path: Path):
    settings = {**settings_in(tmp_path), 'save_folder': None}
    network = hybrid(name)
    whole = items_of(Gauntlet(**settings).evaluate(network, tiny.tokenizer()))

    settings['time_budget'] = '1h'
    gauntlet = Gauntlet(**settings)
    assert items_of(gauntlet.evaluate(network, tiny.tokenizer())) == whole  # there is time for all

    later_job, tokenizer = Gauntlet(**settings), tiny.tokenizer()
    later_job.prepare(network, tokenizer)
    later_job.use_subset({task: min(size, 3) for task, size in (gauntlet.sizes or {}).items()})
    subset = items_of(later_job.evaluate(network, tokenizer))
    assert 0 < len(subset) < len(whole)
    assert {key: predicted(whole[key]) for key in subset} == {key: predicted(item) for key, item in subset.items()}


def predicted(item: str) -> str:
    """Return the item without log-probabilities, which other batches round otherwise."""
    return item.split('logprobs=')[0]


@pytest.mark.parametrize('name', HYBRIDS)
def test_the_scores_are_those_of_padded_rows_without_a_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {**settings_in(tmp_path), 'save_folder': None}
    network = hybrid(name)
    forked = Gauntlet(**settings).evaluate(network, tiny.tokenizer())
    monkeypatch.setattr(probe, 'LAYOUTS', probe.LAYOUTS[-1:])
    monkeypatch.setattr(probe, 'GENERATION_LAYOUTS', probe.GENERATION_LAYOUTS[-1:])
    whole = Gauntlet(**settings).evaluate(network, tiny.tokenizer())
    assert {key: predicted(item) for key, item in items_of(forked).items()} == {
        key: predicted(item) for key, item in items_of(whole).items()
    }


def evaluate_on_ranks(folder: Path, settings: dict[str, Any], name: str) -> None:
    torch.distributed.init_process_group('gloo')
    network = DistributedDataParallel(hybrid(name))
    evaluation = Gauntlet(**settings).evaluate(network, tiny.tokenizer())
    (folder / f'rank{global_rank()}.json').write_text(json.dumps(items_of(evaluation)))
    torch.distributed.barrier()


@pytest.mark.parametrize('name', HYBRIDS)
def test_two_ranks_have_the_items_of_one(name: str, tmp_path: Path):
    """Mutation: forks are planned for what a rank has."""
    settings = {**settings_in(tmp_path), 'save_folder': None}
    expected = items_of(Gauntlet(**settings).evaluate(hybrid(name), tiny.tokenizer()))
    forks.run(evaluate_on_ranks, tmp_path / 'log.txt', tmp_path, settings, name, num_ranks=2)
    for rank in range(2):
        assert json.loads((tmp_path / f'rank{rank}.json').read_text()) == expected
