"""Write the records of evaluations on rank 0, in training while it continues."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

import composer
import torch
import transformers
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.utils import dist

from llmfoundry_gauntlet.composer.checkpoints import SHARD
from llmfoundry_gauntlet.errors import GauntletError, RecordError
from llmfoundry_gauntlet.results.files import RESULTS, note_checkpoint
from llmfoundry_gauntlet.results.journal import JOURNAL, remove_journal

log = logging.getLogger(__name__)

Answer = TypeVar('Answer')


class Records:
    """The records of a callback's evaluations, below `folder`; `None` for none.

    In training each evaluation has a folder of its own, and is written by a thread of rank 0 while training continues.
    An evaluation's journal is removed once its records are written. All ranks must call these methods, except `close`.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix='gauntlet-records')
        self._written: Path | None = None  # the folder of the evaluation that is being written
        self._tasks: list[Future[bool]] = []  # on rank 0, while it is written; the first one writes the records
        self._awaiting_checkpoint: tuple[int, Path] | None = None  # on rank 0

    def folder_of(self, state: State) -> Path | None:
        """Return the folder of the evaluation at the current batch."""
        if self.folder is None or state.max_duration is None:
            return self.folder
        return self.folder / f'ba{state.timestamp.batch.value}'

    def has(self, state: State) -> bool:
        """Return whether the records of the evaluation at the current batch exist."""
        folder = self.folder_of(state)
        return on_first_rank(lambda: folder is not None and (folder / RESULTS).is_file())

    def has_journal_alone(self, state: State) -> bool:
        """Return whether the evaluation at the current batch has a journal but no records."""
        folder = self.folder_of(state)
        return not self.has(state) and on_first_rank(lambda: folder is not None and (folder / JOURNAL).is_dir())

    def write(self, state: State, folder: Path, work: Callable[[], None], checkpoint: str | None) -> None:
        """Call `work` on rank 0, which writes the records. In training, errors of it become warnings.

        `checkpoint` is the one of the current batch; if it is not saved yet, `note_checkpoint` adds it later. Raise
        RecordError or OSError on all ranks.
        """
        batch = state.timestamp.batch.value
        if state.max_duration is None:
            on_first_rank(work)
            if dist.get_local_rank() == 0:  # nodes may have a folder each
                remove_journal(folder)
            return
        self._written = folder
        if dist.get_global_rank() == 0:
            self._tasks.append(self._writer.submit(attempt, work, batch, 'there are no records'))
            self._awaiting_checkpoint = (batch, folder) if checkpoint is None else None
        if state.timestamp >= state.max_duration:
            self.wait()

    def note_checkpoint(self, state: State) -> None:
        """Add the checkpoint of the last evaluation's batch to its records, once it is saved."""
        if self._awaiting_checkpoint is None:
            return
        batch, folder = self._awaiting_checkpoint
        checkpoint = checkpoint_of_batch(state, batch)
        if checkpoint is not None:
            work = partial(note_if_written, folder, checkpoint)
            consequence = f'the records lack the checkpoint {checkpoint}'
            if self._written is None:
                attempt(work, batch, consequence)
            else:
                self._tasks.append(self._writer.submit(attempt, work, batch, consequence))
        if checkpoint is not None or state.timestamp.batch.value > batch:
            self._awaiting_checkpoint = None

    def wait(self) -> None:
        """Wait until the records are written."""
        if self._written is not None and on_first_rank(self._finish) and dist.get_local_rank() == 0:
            remove_journal(self._written)
        self._written = None

    def close(self) -> None:
        """Wait until the records are written, also after an error on another rank."""
        if self._tasks and self._written is not None and self._finish():
            remove_journal(self._written)
        self._writer.shutdown()

    def _finish(self) -> bool:
        """Wait for the writer; return whether the records were written."""
        tasks, self._tasks = self._tasks, []
        is_written, *_ = [task.result() for task in tasks]
        return is_written


def attempt(work: Callable[[], None], batch: int, consequence: str) -> bool:
    """Return whether the work succeeded; its expected errors become warnings."""
    try:
        work()
    except (RecordError, OSError) as error:
        log.warning('gauntlet ba%d: %s: the metrics were logged, but %s; training continues', batch, error, consequence)
        return False
    return True


def note_if_written(folder: Path, checkpoint: str) -> None:
    """Add a checkpoint to the records in a folder, if they could be written."""
    if (folder / RESULTS).is_file():
        note_checkpoint(folder, checkpoint)


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


def on_first_rank(work: Callable[[], Answer]) -> Answer:
    """Call a function on rank 0 and return its result on all ranks; its expected errors are raised on all ranks."""
    found: list[Any] = [None, None]
    if dist.get_global_rank() == 0:
        try:
            found[0] = work()
        except (GauntletError, OSError) as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    answer: Answer = found[0]
    return answer


def training_loss(state: State) -> float | None:
    """Return the loss of the last training batch as Composer logs it; None before the first one or if not finite."""
    loss = state.total_loss_dict.get('loss/train/total')
    return loss if loss is not None and math.isfinite(loss) else None


def environment(state: State) -> dict[str, Any]:
    """Return the software versions, device, precision, ranks and threads that the results were computed with."""
    return {
        'python': platform.python_version(),
        'torch': torch.__version__,
        'transformers': transformers.__version__,
        'composer': composer.__version__,
        'device': torch.cuda.get_device_name() if state.device.name == 'gpu' else state.device.name,
        'precision': state.precision.value,
        'num_ranks': dist.get_world_size(),
        'num_threads': torch.get_num_threads(),
    }
