"""Run generated programs in the background while the model generates further ones, and collect their results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from llmfoundry_gauntlet.runtime.distributed import gather
from llmfoundry_gauntlet.runtime.writer import Results

COLLECT_SECONDS = 5.0


class BackgroundPrograms:
    """The programs of this rank: batches of them, run one batch at a time in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix='gauntlet-programs')
        self._running: list[Future[Results]] = []

    def submit(self, score: Callable[[], Results]) -> None:
        """Call a function, which runs the programs of a batch and returns their results, in the background."""
        self._running.append(self._thread.submit(score))

    def collect(self) -> Results:
        """Wait for all programs of all ranks and return the results of this rank's. All ranks must call it.

        Ranks exchange their state every COLLECT_SECONDS, so that no collective waits for longer.
        """
        waiting = set(self._running)
        while any(gather(len(waiting))):
            waiting = wait(waiting, timeout=COLLECT_SECONDS).not_done

        results: Results = {}
        for running in self._running:
            results.update(running.result())
        self._running = []
        return results

    def cancel(self) -> None:
        """Cancel the programs of an evaluation that failed; the results of those still running are ignored."""
        while self._running:
            self._running.pop().cancel()
