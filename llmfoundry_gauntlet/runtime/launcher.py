"""Keep the device busy: the outputs of a batch are had, and scored, while the device runs the next one."""

from __future__ import annotations

from collections.abc import Iterator

from llmfoundry_gauntlet.engine.model import CausalLanguageModel, Outputs
from llmfoundry_gauntlet.engine.plan import Batch
from llmfoundry_gauntlet.types import ScoreOutput


class Launcher:
    """Run batches one after another, each before the outputs of the one before are waited for."""

    def __init__(self) -> None:
        self._launched: Outputs | None = None  # of the batch that the device is running

    def run(
        self, language_model: CausalLanguageModel, batch: Batch, following: Batch | None
    ) -> Iterator[list[ScoreOutput]]:
        """Start a batch and yield the outputs of the one before, if there is one.

        With no batch `following`, yield the outputs of this one too.
        """
        before, self._launched = self._launched, language_model.launch(batch)

        # The device is busy from here on, so the work of the host costs no time.
        if before is not None:
            yield before()
        if following is not None:
            language_model.lay_out(following)
            return

        last, self._launched = self._launched, None
        yield last()

    def drop(self) -> None:
        """Drop the batch that the device is running, that of an evaluation that failed."""
        self._launched = None
