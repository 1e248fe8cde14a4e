"""Move arrays to the model's device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array on a device; a GPU copies it from pinned memory, so that the host need not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == 'cuda' else tensor.to(device)
