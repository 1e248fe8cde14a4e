"""Keep the weights of a sharded model gathered while an evaluation runs.

FSDP gathers the weights in every forward, and so for every generated token. Kept, they are gathered once, and the ranks
need not make the same forwards. torch 2.7 has no public way: FSDP1 has none at all, and the one of FSDP2
(`set_reshard_after_forward`) comes with 2.8 (docs/compatibility.md: `_handle`, `_fsdp_param_group`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import HandleShardingStrategy
from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard, _unshard

from llmfoundry_gauntlet.engine.model import free_bytes
from llmfoundry_gauntlet.runtime.distributed import global_rank

log = logging.getLogger(__name__)

SHARE_OF_MEMORY = 0.5  # of free memory, for whole weights; the rest is for activations and the KV cache
KEPT = {  # what a strategy becomes; hybrid ones gather within a node
    HandleShardingStrategy.FULL_SHARD: HandleShardingStrategy.SHARD_GRAD_OP,
    HandleShardingStrategy.HYBRID_SHARD: HandleShardingStrategy._HYBRID_SHARD_ZERO2,
}


@contextmanager
def weights_gathered(model: Any) -> Iterator[bool]:
    """Gather the weights of a model, the root module of FSDP, and keep them until the context ends.

    Yield whether forwards gather nothing: the weights fit on every rank, or the model is not sharded.
    """
    units = [module for module in model.modules() if is_unit(module)]
    if not units or not all_fit(sum(map(whole_bytes, units)), next(model.parameters()).device):
        yield not units
        return
    with ExitStack() as kept:
        for unit in units:
            kept.enter_context(keep_1(model, unit) if isinstance(unit, FullyShardedDataParallel) else keep_2(unit))
        yield True


def is_unit(module: Any) -> bool:
    """Return whether a module is a unit of FSDP with weights of its own."""
    if isinstance(module, FullyShardedDataParallel):
        return module._handle is not None and module._handle.uses_sharded_strategy
    return isinstance(module, FSDPModule) and module._get_fsdp_state()._fsdp_param_group is not None


def whole_bytes(unit: Any) -> int:
    """Return the size of a unit's whole weights in the precision in which it computes."""
    if isinstance(unit, FullyShardedDataParallel):
        handle: Any = unit._handle
        return int(handle.flat_param._unpadded_unsharded_size.numel() * handle._fwd_bwd_param_dtype.itemsize)
    state: Any = unit._get_fsdp_state()
    dtype = state._mp_policy.param_dtype
    return sum(
        math.prod(part._orig_size) * (dtype or part.sharded_param.dtype).itemsize
        for part in state._fsdp_param_group.fsdp_params
    )


def gathered_at_a_time(model: Any) -> int:
    """Return the bytes of weights that a forward gathers at a time: the root's, a layer's and the next layer's."""
    root, *layers = [whole_bytes(module) if is_unit(module) else 0 for module in model.modules()]
    return root + sum(sorted(layers)[-2:])


def all_fit(num_bytes: int, device: torch.device) -> bool:
    """Return whether whole weights fit into the free memory of every rank; on a CPU always."""
    free = free_bytes(device)
    if free is None:
        return True
    least = torch.tensor(free, device=device)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN)
    fit = num_bytes <= SHARE_OF_MEMORY * least.item()
    if not fit and global_rank() == 0:
        log.warning(
            'weights: the whole model has %.1f GB, more than half of the %.1f GB that are free on the fullest device: '
            'every forward, so every generated token, gathers the weights again. HYBRID_SHARD gathers within a node; '
            '`gauntlet watch` evaluates checkpoints apart from training',
            num_bytes / 1e9,
            least.item() / 1e9,
        )
    return fit


@contextmanager
def keep_1(root: Any, unit: Any) -> Iterator[None]:
    """Keep the weights of a unit of FSDP1 gathered."""
    handle = unit._handle
    strategy = handle._sharding_strategy
    _lazy_init(root, root)
    try:
        handle._sharding_strategy = KEPT.get(strategy, strategy)
        _unshard(unit, handle, unit._unshard_stream, unit._pre_unshard_stream)
        _reshard(unit, handle, False)  # the module has its shards again outside of forwards
        yield
    finally:
        handle._sharding_strategy = strategy
        _reshard(unit, handle, True)


@contextmanager
def keep_2(unit: Any) -> Iterator[None]:
    """Keep the weights of a unit of FSDP2 gathered."""
    state = unit._get_fsdp_state()
    group = state._fsdp_param_group
    mesh = group.post_forward_mesh_info
    try:
        group.post_forward_mesh_info = None
        unit.unshard()
        yield
    finally:
        group.post_forward_mesh_info = None if state._is_root else mesh  # the first forward sets None for the root
        group._to_sharded()  # unlike `reshard`, also after a forward that failed
