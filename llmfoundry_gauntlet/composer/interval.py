"""The schedule of evaluations during training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from composer.callbacks import CheckpointSaver
from composer.core import Event, State
from composer.utils import create_interval_scheduler

from llmfoundry_gauntlet.composer.checkpoints import SHARD

CHECKPOINT_EVENTS = {Event.BATCH_END: Event.BATCH_CHECKPOINT, Event.EPOCH_END: Event.EPOCH_CHECKPOINT}


class EvaluationSchedule:
    """Decides at Composer's BATCH_END, EPOCH_END and FIT_END whether to evaluate; never twice at the same batch.

    A checkpoint is written right after the evaluation of its batch, so the schedule asks the checkpoint savers whether
    they are about to write one.
    """

    def __init__(self, interval: Sequence[str]) -> None:
        self.first = 'first' in interval
        self.checkpoint = 'checkpoint' in interval
        self.last = 'last' in interval
        self.times = [
            create_interval_scheduler(entry, include_end_of_training=False, checkpoint_events=False)
            for entry in interval
            if entry not in ('first', 'checkpoint', 'last')
        ]
        self.evaluated_batch: int | None = None

    def __call__(self, state: State, event: Event) -> bool:
        """Return whether an evaluation is due."""
        due = [time(state, event) for time in self.times]
        due.append(self.last and event == Event.FIT_END)
        due.append(self.checkpoint and self.checkpoint_follows(state, event))
        return any(due) and self.evaluated_batch != state.timestamp.batch.value

    def checkpoint_follows(self, state: State, event: Event) -> bool:
        """Return whether a saver writes a checkpoint right after this event."""
        save_event = CHECKPOINT_EVENTS.get(event)
        if save_event is None:
            return False
        return any(saver.save_interval(state, save_event) for saver in checkpoint_savers(state))


def checkpoint_savers(state: State) -> list[CheckpointSaver]:
    """Return the callbacks that write Composer checkpoints."""
    return [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]


def checkpoint_of_batch(state: State, batch: int) -> str | None:
    """Return the checkpoint written at a training batch, None if there is none yet; the folder of a sharded one."""
    for saver in checkpoint_savers(state):
        for name, timestamp in saver.all_saved_checkpoints_to_timestamp.items():
            if timestamp.batch.value == batch:
                return str(PurePath(name).parent) if name.endswith(SHARD) else name
    return None
