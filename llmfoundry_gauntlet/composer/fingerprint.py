"""A digest of all weights of a model, the same however they are sharded over ranks."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed
from composer.utils import dist

CHUNK = {'cpu': 1 << 14, 'cuda': 1 << 24}  # elements at a time: what fits in a CPU cache, or keeps a GPU busy
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def model_fingerprint(model: torch.nn.Module, *, is_sharded: bool) -> str:
    """Return 16 hexadecimal digits of a digest of a model's parameters. With `is_sharded` each rank holds a part.

    The bits of every weight are summed as integers, to the powers of 1, 2 and 3 modulo 2^64: exact, in any order, on
    any device, and without a copy of the model. Padding adds 0.
    """
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device('cpu')
    sums = torch.zeros(3, dtype=torch.int64, device=device)
    for parameter in parameters:
        local = parameter.detach()
        local = local.to_local() if hasattr(local, 'to_local') else local
        bits = local.contiguous().view(-1).view(INTEGERS[local.element_size()])
        for chunk in bits.split(CHUNK.get(device.type, CHUNK['cuda'])):
            values = chunk.to(torch.int64)
            squares = values * values
            sums += torch.stack([values.sum(), squares.sum(), (squares * values).sum()])
    if is_sharded:
        dist.all_reduce(sums, reduce_operation='SUM')
    return hashlib.sha256(repr(sums.tolist()).encode()).hexdigest()[:16]
