"""Fixtures of the tests of models."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope='session')
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model of 259 tokens as one and several files, as a Composer checkpoint, whole and sharded; and tasks."""
    import networks  # which load torch
    import tiny
    import torch

    folder = tmp_path_factory.mktemp('models')
    tiny.write_tasks(folder)
    network = networks.network('llama', vocab_size=259, max_position_embeddings=128)
    tiny.save(network, folder / 'one')
    tiny.save(network, folder / 'several', max_shard_size='20KB')
    torch.save(tiny.content_of(network), folder / 'whole.pt')
    tiny.save_sharded(tiny.content_of(network), folder / 'sharded')
    return folder
