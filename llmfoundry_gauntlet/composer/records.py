"""Read the checkpoints and the loss of a training from Composer, for the records of evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath

from composer.callbacks import CheckpointSaver
from composer.core import State

from llmfoundry_gauntlet.runtime.checkpoints import SHARD


def checkpoint_savers(state: State) -> list[CheckpointSaver]:
    """Return the callbacks that write Composer checkpoints."""
    return [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]


def checkpoint_of_batch(state: State, batch: int) -> str | None:
    """Return the path of the checkpoint saved at a batch, or its folder if sharded; None if there is none yet."""
    for saver in checkpoint_savers(state):
        for name, timestamp in saver.all_saved_checkpoints_to_timestamp.items():
            if timestamp.batch.value == batch:
                return str(PurePath(name).parent) if name.endswith(SHARD) else name
    return None


@dataclass(slots=True)
class TrainingLoss:
    """The sum of the training loss over the batches since the last evaluation, as Composer logs it: over all ranks."""

    total: float = 0.0
    num_batches: int = 0

    def add(self, state: State) -> None:
        """Add the loss of the batch that has just ended."""
        loss = state.total_loss_dict.get('loss/train/total')
        if loss is not None:
            self.total += loss
            self.num_batches += 1

    def reset(self) -> None:
        """Begin anew, after an evaluation."""
        self.total, self.num_batches = 0.0, 0

    @property
    def mean(self) -> float | None:
        """Return the mean over the batches; None without any, or if one was not finite."""
        return self.total / self.num_batches if self.num_batches and math.isfinite(self.total) else None
