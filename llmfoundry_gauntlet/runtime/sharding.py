"""Shard a model over the ranks with torch's `fully_shard`, for evaluations of models larger than a device.

Rank 0 alone loads the weights, in host memory. Each transformer block in turn is sent to all ranks and sharded before
the next one is sent, so that no device ever holds more than a block and its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from llmfoundry_gauntlet.config.yaml import decode, raise_invalid_values
from llmfoundry_gauntlet.errors import Problems, named, suggestion
from llmfoundry_gauntlet.runtime.distributed import local_world_size, world_size
from llmfoundry_gauntlet.runtime.precision import AUTOCAST

WHOLE, HYBRID = 'NO_SHARD', 'HYBRID_SHARD'
STRATEGIES = ('FULL_SHARD', 'SHARD_GRAD_OP', HYBRID, WHOLE)
MIXED_PRECISIONS = ('FULL', 'DEFAULT', 'PURE')


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSettings:
    """Settings of a sharded model: the keys of Composer's FSDPConfig that matter without training.

    * `sharding_strategy`: over all ranks, with HYBRID_SHARD over the ranks of each node, with NO_SHARD not at all.
    * `mixed_precision`: FULL computes in the type of the weights, DEFAULT and PURE in that of the precision.

    Those `without_effect` are about training, and are accepted for the sake of a training YAML's `fsdp_config`.
    """

    sharding_strategy: str = 'FULL_SHARD'
    mixed_precision: str = 'DEFAULT'

    without_effect: ClassVar[tuple[str, ...]] = (
        'activation_checkpointing',
        'activation_checkpointing_reentrant',
        'activation_cpu_offload',
        'auto_wrap',
        'backward_prefetch',
        'backward_prefetch_limit',
        'cpu_offload',
        'data_parallel_replicate_degree',
        'data_parallel_shard_degree',
        'forward_prefetch',
        'forward_prefetch_limit',
        'ignored_modules',
        'keep_low_precision_grads',
        'limit_all_gathers',
        'load_monolith_rank0_only',
        'load_planner',
        'process_group',
        'save_planner',
        'sharded_ckpt_prefix_dir',
        'state_dict_type',
        'sync_module_states',
        'te_checkpoint_wrapper',
        'te_shard_fp8_weight',
        'use_orig_params',
        'verbose',
    )

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if self.sharding_strategy not in STRATEGIES:
            yield f'sharding_strategy: is {self.sharding_strategy!r}{suggestion(self.sharding_strategy, STRATEGIES)}'
        if self.mixed_precision not in MIXED_PRECISIONS:
            yield f'mixed_precision: is {self.mixed_precision!r}{suggestion(self.mixed_precision, MIXED_PRECISIONS)}'

    @property
    def is_sharded(self) -> bool:
        """Return whether there is anything to shard."""
        return self.sharding_strategy != WHOLE and world_size() > 1


def decode_sharding(config: Any) -> ShardingSettings | None:
    """Return the settings in an `fsdp_config`; None without one. Raise ConfigError with every problem found."""
    if config is None:
        return None
    problems = Problems(named('fsdp_config'))
    values = config
    if isinstance(config, Mapping):
        values = {key: value for key, value in config.items() if key not in ShardingSettings.without_effect}
    settings: ShardingSettings = decode(ShardingSettings, values, '', problems)
    problems.raise_all()
    return settings


def shard(network: Any, device: torch.device, settings: ShardingSettings, precision: str) -> None:
    """Shard a model over all ranks, in place. Rank 0 has its weights, the others the same model on the meta device."""
    dtype = None if settings.mixed_precision == 'FULL' else AUTOCAST.get(precision)
    options: dict[str, Any] = {
        'mesh': mesh_of(settings, device),
        'mp_policy': MixedPrecisionPolicy(param_dtype=dtype),
    }
    # Inner blocks come after outer ones in `modules`, and must be sharded before them.
    for block in reversed(blocks_of(network)):
        send(block, device)
        fully_shard(block, **options)
    send(network, device)
    fully_shard(network, **options)


def blocks_of(network: Any) -> list[torch.nn.Module]:
    """Return the transformer blocks of a model, outer ones first."""
    # Private in transformers 4.53: `_no_split_modules` in docs/compatibility.md.
    names = network._no_split_modules or ()
    return [module for module in network.modules() if type(module).__name__ in names]


def mesh_of(settings: ShardingSettings, device: torch.device) -> DeviceMesh:
    """Return the ranks as one dimension; with a hybrid strategy as nodes, with a copy each, and ranks of a node."""
    num_ranks = world_size()
    num_local = local_world_size()
    # On a single node a copy per node is the only copy.
    if settings.sharding_strategy != HYBRID or num_local == num_ranks:
        return init_device_mesh(device.type, (num_ranks,))
    num_nodes = num_ranks // num_local
    return init_device_mesh(device.type, (num_nodes, num_local))


def send(module: torch.nn.Module, device: torch.device) -> None:
    """Send the weights and buffers of a module from rank 0 to the device of every rank, except those sharded already.

    Tied weights stay tied.
    """
    sent: dict[int, torch.nn.Parameter] = {}  # by the id of the parameter that it replaces
    for owner in module.modules():
        # Lists, because registering a parameter changes what is iterated over.
        parameters = list(owner.named_parameters(recurse=False))
        buffers = list(owner.named_buffers(recurse=False))
        for name, parameter in parameters:
            if isinstance(parameter, DTensor):  # of an inner block, sharded already
                continue
            if id(parameter) not in sent:
                values = received(parameter.data, device)
                sent[id(parameter)] = torch.nn.Parameter(values, requires_grad=False)
            owner.register_parameter(name, sent[id(parameter)])
        for name, buffer in buffers:
            setattr(owner, name, received(buffer, device))


def received(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return rank 0's values of a tensor, which on the other ranks may be on the meta device."""
    values = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    torch.distributed.broadcast(values, src=0)
    return values
