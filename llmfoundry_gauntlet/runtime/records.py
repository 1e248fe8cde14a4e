"""Write the records of evaluations on rank 0, in training while it continues."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.evaluation.subsets import Sizes
from llmfoundry_gauntlet.results.files import RESULTS, find_results
from llmfoundry_gauntlet.results.journal import JOURNAL, remove_journal
from llmfoundry_gauntlet.runtime.distributed import global_rank, local_rank, on_first_rank, world_size

log = logging.getLogger(__name__)

CheckpointOf = Callable[[int], str | None]  # returns the checkpoint saved at a batch, None if there is none yet
Write = Callable[[str | None], None]  # writes records, given the name of the checkpoint


def no_checkpoint(batch: int) -> None:
    """Return None: nothing is known about checkpoints."""


class Records:
    """The records of the evaluations of a training run or of one model, below `folder`; `None` for none.

    In training each evaluation has a folder of its own, `ba{batch}`. A trainer saves the checkpoint of a batch after
    its evaluation, so the records are begun once that is done, and written by a thread of rank 0 while training
    continues. The journal of an evaluation is removed once its records are written. All ranks must call these methods,
    except `close`. Everywhere `batch` is the number of training batches, None without training.
    """

    def __init__(self, folder: Path | None, checkpoint_of: CheckpointOf = no_checkpoint) -> None:
        self.folder = folder
        self.checkpoint_of = checkpoint_of
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix='gauntlet-records')
        self._latest: Path | None = None  # the folder of the evaluation whose records are not written yet
        self._pending: tuple[int, Write] | None = None  # its batch and work, on rank 0 until they are begun
        self._task: Future[bool] | None = None  # on rank 0 once they are begun

    def folder_of(self, batch: int | None) -> Path | None:
        """Return the folder of the evaluation at a batch."""
        if self.folder is None or batch is None:
            return self.folder
        return self.folder / f'ba{batch}'

    def left(self, batch: int) -> str | None:
        """Return what an earlier job left of the evaluation at a batch: RESULTS, else JOURNAL, else None."""
        folder = self.folder_of(batch)
        return on_first_rank(partial(left_in, folder))

    def latest_sizes(self) -> Sizes | None:
        """Return the subset that an earlier job's time budget has chosen, None if nothing is recorded."""
        return on_first_rank(partial(sizes_in, self.folder))

    def write(self, batch: int | None, folder: Path, work: Write) -> None:
        """Call `work` on rank 0 with the checkpoint of the batch, None if there is none; it writes the records.

        In training `begin` or `wait` call it later, and errors of it become warnings. Without training raise
        RecordError or OSError on all ranks.
        """
        self._latest = folder
        if batch is None:
            on_first_rank(partial(work, None))
            self._remove_journal()
        elif global_rank() == 0:
            self._pending = batch, work

    def begin(self) -> None:
        """Begin to write the records of the latest evaluation; its checkpoint is saved by now, if there is one."""
        if self._pending is not None:
            batch, work = self._pending
            self._pending = None
            self._task = self._writer.submit(attempt, partial(work, self.checkpoint_of(batch)), batch)

    def wait(self) -> None:
        """Write the records of the latest evaluation, or wait until they are written."""
        self.begin()
        if self._latest is not None and on_first_rank(self._is_written):
            self._remove_journal()
        self._latest = None

    def close(self) -> None:
        """Write the records, also after an error on another rank."""
        self.begin()
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


def left_in(folder: Path | None) -> str | None:
    """Return which of an evaluation's files is in a folder: RESULTS, else JOURNAL, else None."""
    if folder is None:
        return None
    for name in (RESULTS, JOURNAL):
        if (folder / name).exists():
            return name
    return None


def sizes_in(folder: Path | None) -> Sizes | None:
    """Return the number of questions per task within a time budget, in the latest record of a folder."""
    if folder is None or not any(folder.glob(f'ba*/{RESULTS}')):
        return None
    _, latest = find_results(folder)[-1]
    sizes: Sizes | None = latest['timing'].get('time_budget')
    return sizes


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


def environment(device: torch.device, precision: str) -> dict[str, Any]:
    """Return the software versions, device, precision, ranks and threads that the results were computed with."""
    return {
        'python': platform.python_version(),
        'torch': torch.__version__,
        'transformers': transformers.__version__,
        'device': torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type,
        'precision': precision,
        'num_ranks': world_size(),
        'num_threads': torch.get_num_threads(),
    }
