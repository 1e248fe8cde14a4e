"""Write the records of evaluations on rank 0, in training while it continues."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import composer
import torch
import transformers
from composer.callbacks import CheckpointSaver
from composer.core import State

from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.results.files import RESULTS
from llmfoundry_gauntlet.results.journal import JOURNAL, remove_journal
from llmfoundry_gauntlet.runtime.checkpoints import SHARD
from llmfoundry_gauntlet.runtime.distributed import global_rank, local_rank, on_first_rank, world_size

log = logging.getLogger(__name__)

Write = Callable[[str | None], None]  # writes records, given the name of the checkpoint


class Records:
    """The records of a callback's evaluations, below `folder`; `None` for none.

    In training each evaluation has a folder of its own. Composer saves the checkpoint of a batch after its evaluation,
    so the records are begun once that is done, and written by a thread of rank 0 while training continues. The journal
    of an evaluation is removed once its records are written. All ranks must call these methods, except `close`.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix='gauntlet-records')
        self._latest: Path | None = None  # the folder of the evaluation whose records are not written yet
        self._pending: tuple[int, Write] | None = None  # its batch and work, on rank 0 until they are begun
        self._task: Future[bool] | None = None  # on rank 0 once they are begun

    def folder_of(self, state: State) -> Path | None:
        """Return the folder of the evaluation at the current batch."""
        if self.folder is None or state.max_duration is None:
            return self.folder
        return self.folder / f'ba{state.timestamp.batch.value}'

    def left(self, state: State) -> str | None:
        """Return what an earlier job left of the evaluation at the current batch: RESULTS, else JOURNAL, else None."""
        folder = self.folder_of(state)
        names = () if folder is None else (RESULTS, JOURNAL)
        return on_first_rank(lambda: next((name for name in names if folder and (folder / name).exists()), None))

    def write(self, state: State, folder: Path, work: Write) -> None:
        """Call `work` on rank 0 with the checkpoint of the current batch, None if there is none; it writes the records.

        In training `begin` or `wait` call it later, and errors of it become warnings. Without training raise
        RecordError or OSError on all ranks.
        """
        self._latest = folder
        if state.max_duration is None:
            on_first_rank(partial(work, None))
            self._remove_journal()
        elif global_rank() == 0:
            self._pending = state.timestamp.batch.value, work

    def begin(self, state: State) -> None:
        """Begin to write the records of the latest evaluation; its checkpoint is saved by now, if there is one."""
        if self._pending is not None:
            (batch, work), self._pending = self._pending, None
            self._task = self._writer.submit(attempt, partial(work, checkpoint_of_batch(state, batch)), batch)

    def wait(self, state: State) -> None:
        """Write the records of the latest evaluation, or wait until they are written."""
        self.begin(state)
        if self._latest is not None and on_first_rank(self._is_written):
            self._remove_journal()
        self._latest = None

    def close(self, state: State) -> None:
        """Write the records, also after an error on another rank."""
        self.begin(state)
        if self._task is not None and self._latest is not None and self._is_written():
            self._remove_journal()
        self._writer.shutdown()

    def _is_written(self) -> bool:
        """Wait for the writer; return whether the records were written."""
        return self._task is not None and self._task.result()

    def _remove_journal(self) -> None:
        if self._latest is not None and local_rank() == 0:  # nodes may have a folder each
            remove_journal(self._latest)
        self._latest = None


def attempt(work: Callable[[], None], batch: int) -> bool:
    """Return whether the work succeeded; its expected errors become warnings."""
    try:
        work()
    except (RecordError, OSError) as error:
        log.warning(
            'gauntlet ba%d: %s: the metrics were logged, but there are no records; training continues', batch, error
        )
        return False
    return True


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


def environment(state: State) -> dict[str, Any]:
    """Return the software versions, device, precision, ranks and threads that the results were computed with."""
    return {
        'python': platform.python_version(),
        'torch': torch.__version__,
        'transformers': transformers.__version__,
        'composer': composer.__version__,
        'device': torch.cuda.get_device_name() if state.device.name == 'gpu' else state.device.name,
        'precision': state.precision.value,
        'num_ranks': world_size(),
        'num_threads': torch.get_num_threads(),
    }
