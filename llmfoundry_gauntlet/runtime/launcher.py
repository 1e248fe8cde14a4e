"""Keep the device busy: score a batch on the host while the device runs the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llmfoundry_gauntlet.engine.model import Outputs
from llmfoundry_gauntlet.engine.plan import Batch
from llmfoundry_gauntlet.runtime.runner import ModelRunner
from llmfoundry_gauntlet.runtime.writer import Results
from llmfoundry_gauntlet.types import ScoreOutput

ResultsOf = Callable[[Sequence[ScoreOutput]], Results]


class Launcher:
    """Run scored batches one after another; each returns the results of the one before."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._finish_launched: Callable[[], Results] | None = None  # of the batch that the device is running

    def run(self, batch: Batch, following: Batch | None, results_of: ResultsOf) -> Results:
        """Start a batch and return the results of the one before.

        `results_of` scores the batch's outputs once they are there. With no batch `following`, return these results
        too.
        """
        language_model = self.runner.language_model
        outputs = language_model.launch(batch)

        # The device is busy from here on, so the work of the host costs no time.
        results = self._finish()
        self._finish_launched = partial(finished, outputs, results_of)
        if following is None:
            return results | self._finish()
        language_model.lay_out(following)
        return results

    def drop(self) -> None:
        """Drop the batch that the device is running, that of an evaluation that failed."""
        self._finish_launched = None

    def _finish(self) -> Results:
        """Wait for the batch that was launched last, if any, and return its results."""
        finish, self._finish_launched = self._finish_launched, None
        return {} if finish is None else finish()


def finished(outputs: Outputs, results_of: ResultsOf) -> Results:
    """Wait for the outputs of a batch and return their results."""
    return results_of(outputs())
