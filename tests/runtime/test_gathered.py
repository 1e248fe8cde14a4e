"""Weights that FSDP gathers, by hand. That they are kept is tested in tests/integration/test_fsdp.py."""

from __future__ import annotations

from collections.abc import Iterator

import networks
import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llmfoundry_gauntlet.runtime.gathered import gathered_at_a_time


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of one rank, in the process group of an earlier test's Trainer if there is one."""
    is_new = not torch.distributed.is_initialized()
    if is_new:
        torch.distributed.init_process_group('gloo', rank=0, world_size=1, store=torch.distributed.HashStore())
    yield init_device_mesh('cpu', (1,))
    if is_new:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(('dtype', 'size'), [(None, 4), (torch.bfloat16, 2)])
def test_a_forward_gathers_the_root_and_two_layers(mesh: DeviceMesh, dtype: torch.dtype | None, size: int):
    """Weights of a layer: query and output 32 * 32, key and value 16 * 32, three of 32 * 64, two norms of 32."""
    model = networks.network('llama', num_hidden_layers=3, vocab_size=100)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    assert gathered_at_a_time(model) == 0
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    layer = 2 * 1024 + 2 * 512 + 3 * 2048 + 2 * 32
    embeddings_head_and_norm = 2 * 3200 + 32
    assert gathered_at_a_time(model) == size * (2 * layer + embeddings_head_and_norm)
