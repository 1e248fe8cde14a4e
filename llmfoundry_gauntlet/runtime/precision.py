"""The precision of an evaluation: torch's autocast, under the names that Composer gives to precisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FP32 = 'fp32'  # no autocast: each module computes in the type of its weights
# An evaluation in amp_fp8 computes in bfloat16: the 8-bit kernels need lengths that are multiples of 16.
AUTOCAST = {'amp_fp16': torch.float16, 'amp_bf16': torch.bfloat16, 'amp_fp8': torch.bfloat16}
NAMES = {torch.float16: 'amp_fp16', torch.bfloat16: 'amp_bf16'}


@contextmanager
def precision_context(precision: str, device: torch.device) -> Iterator[None]:
    """Compute in a precision, fp32 or one of AUTOCAST, on a device until the context ends."""
    with torch.autocast(device.type, dtype=AUTOCAST.get(precision), enabled=precision in AUTOCAST):
        yield


def ambient_precision(device: torch.device) -> str:
    """Return the name of the precision in which the caller lets a device compute: that of the autocast around it."""
    if not torch.is_autocast_enabled(device.type):
        return FP32
    dtype = torch.get_autocast_dtype(device.type)
    return NAMES.get(dtype, f'amp_{str(dtype).removeprefix("torch.")}')
