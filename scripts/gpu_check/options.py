"""The options of a run, as every part gets them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

CUDA, CPU = 'cuda', 'cpu'


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The device, the size of the parts, and the folders.

    On a CPU the parts run with tiny shapes and without targets for speed, to show that they run at all. `data_root` has
    the published files of the Gauntlet, None without them; `folder` is for files of a part's own. `vllm_python` is the
    Python that runs vLLM, in a process of its own.
    """

    device: str
    quick: bool
    data_root: Path | None
    folder: Path
    vllm_python: str

    @property
    def is_cpu(self) -> bool:
        """Return whether this is a run on a CPU, with tiny shapes."""
        return self.device == CPU

    @property
    def torch_device(self) -> torch.device:
        """Return the device of models and batches."""
        return torch.device(CPU) if self.is_cpu else torch.device(CUDA, 0)
