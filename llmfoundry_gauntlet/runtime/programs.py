"""Run generated programs in the background while the model generates further texts, and collect their results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

from llmfoundry_gauntlet.runtime.distributed import gather
from llmfoundry_gauntlet.runtime.writer import Results
from llmfoundry_gauntlet.scoring.code.execution import submit
from llmfoundry_gauntlet.types import ItemResult

COLLECT_SECONDS = 5.0


class BackgroundPrograms:
    """The programs of this rank, run in the threads of `execution.workers`."""

    def __init__(self) -> None:
        self._running: list[Future[ItemResult]] = []

    def submit(self, score: Callable[[], ItemResult]) -> None:
        """Call a function, which runs a program and returns its result, in the background."""
        self._running.append(submit(score))

    def collect(self) -> Results:
        """Wait for all programs of all ranks and return the results of this rank's. All ranks must call it.

        Ranks exchange their state every COLLECT_SECONDS, so that no collective waits for longer.
        """
        waiting = set(self._running)
        while any(gather(len(waiting))):
            waiting = wait(waiting, timeout=COLLECT_SECONDS).not_done

        results: Results = {}
        for running in self._running:
            result = running.result()
            results[result.key] = result
        self._running = []
        return results

    def cancel(self) -> None:
        """Cancel the programs of an evaluation that failed; the results of those still running are ignored."""
        while self._running:
            self._running.pop().cancel()
