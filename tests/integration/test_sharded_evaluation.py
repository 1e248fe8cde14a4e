"""Evaluate a model that is sharded over two CPU ranks, which Composer does not support by itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import forks
import networks
import numpy as np
import pytest
import tiny
import torch
from composer.utils import dist
from torch.distributed.fsdp import _init_utils

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.evaluation.run import Evaluation

pytestmark = pytest.mark.slow
evaluation = sys.modules[evaluate.__module__]


def shard_on_cpu(devices: list[str]) -> None:
    """Let Composer and torch shard in this process; `devices` gets the device that each weight is loaded on."""
    tiny.shard_on_cpu()
    evaluation.check_fsdp = lambda *_: None
    _init_utils._check_module_states_for_sync_module_states = lambda _: None
    to_empty, load = torch.nn.Module.to_empty, evaluation.load_to_shard
    torch.nn.Module.to_empty = lambda module, *, device, recurse: to_empty(module, device='cpu', recurse=recurse)

    def noted(source):
        network = load(source)
        devices.extend(weight.device.type for weight in network.parameters())
        return network

    evaluation.load_to_shard = noted


def worker(folder: Path, models: list[str]) -> None:
    """Write this rank's scores of each model, or its error."""
    devices: list[str] = []
    shard_on_cpu(devices)
    settings = {**tiny.write_tasks(folder / str(os.environ['RANK'])), 'device': 'cpu', 'max_seq_len': 128}
    found = {}
    for model in models:
        try:
            done = evaluate(model, **settings, fsdp_config={})
            found[model] = items_of(done)
        except ModelError as error:
            found[model] = str(error)
    content = {'devices': sorted(set(devices)), 'found': found}
    (folder / f'rank{dist.get_global_rank()}.json').write_text(json.dumps(content))


def items_of(done: Evaluation) -> list[list[Any]]:
    items = [result for results in done.results.values() for result in results]
    return [[str(item.key), item.predicted, item.score, list(item.logprobs)] for item in items]


def test_only_the_first_rank_loads_weights_and_scores_are_those_of_the_whole_model(tmp_path: Path):
    """Tied weights and a sharded checkpoint too; an error of the first rank is raised on all.

    Mutation: without `sync_module_states` the second rank scores with unwritten memory.
    """
    models = []
    for name, is_tied in (('plain', False), ('tied', True)):
        network = networks.network('llama', vocab_size=259, tie_word_embeddings=is_tied)
        network.save_pretrained(tmp_path / name)
        tiny.tokenizer().save_pretrained(tmp_path / name)
        models.append(str(tmp_path / name))
    models.append(
        str(tiny.save_sharded(tiny.content_of(networks.network('llama', vocab_size=259)), tmp_path / 'sharded'))
    )
    broken = tmp_path / 'broken'
    networks.network('llama', vocab_size=259, num_hidden_layers=1).save_pretrained(broken)
    (broken / 'config.json').write_text((tmp_path / 'plain' / 'config.json').read_text())
    tiny.tokenizer().save_pretrained(broken)
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    forks.run(worker, tmp_path / 'log.txt', tmp_path, [*models, str(broken)], num_ranks=2)
    first, second = (json.loads((tmp_path / f'rank{rank}.json').read_text()) for rank in (0, 1))
    assert (first['devices'], second['devices']) == (['cpu'], ['meta'])
    assert 'the weights do not match' in first['found'][str(broken)] == second['found'][str(broken)]
    settings = {**tiny.write_tasks(tmp_path / '0'), 'device': 'cpu', 'max_seq_len': 128}
    for model in models:
        expected = items_of(evaluate(model, **settings))
        for found in (first['found'][model], second['found'][model]):
            assert [item[:3] for item in found] == [item[:3] for item in expected]
            for item, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(item[3], wanted[3], rtol=0, atol=1e-5)
