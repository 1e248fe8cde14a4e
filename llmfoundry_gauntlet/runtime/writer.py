"""Score the outputs of an evaluation, and write each result to the journal as soon as it is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmfoundry_gauntlet.engine.continuous import ContinuousBatch
from llmfoundry_gauntlet.engine.plan import Batch
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation
from llmfoundry_gauntlet.runtime.journal import SharedJournal
from llmfoundry_gauntlet.scoring.mathematics import Comparer
from llmfoundry_gauntlet.types import Generation, ItemKey, ItemResult, Output

Results = dict[ItemKey, ItemResult]


class ResultWriter:
    """Score and write the results of one evaluation.

    Programs of an evaluation that failed may still run during the next one. They keep the writer that they began with,
    so that they never write to the journal of the other.
    """

    def __init__(self, prepared: PreparedEvaluation, journal: SharedJournal | None, comparer: Comparer) -> None:
        self.prepared = prepared  # all items
        self.journal = journal
        self.comparer = comparer  # of the evaluation's mathematical answers

    def score(self, outputs: Iterable[Output]) -> Results:
        """Score outputs, write their results and return them."""
        results = self.results_of(outputs)
        self.write(results)
        return results

    def score_program(self, generation: Generation) -> ItemResult:
        """Run a generated program in this thread, write its result and return it."""
        result = self.prepared.result(generation)
        self.write({result.key: result})
        return result

    def results_of(self, outputs: Iterable[Output]) -> Results:
        """Score outputs and return their results, which are not written."""
        return self.prepared.results(outputs, self.comparer)

    def write(self, results: Results) -> None:
        """Write final results."""
        if self.journal is not None:
            self.journal.add(results)

    def write_suspects(self, results: Results) -> None:
        """Write non-finite results of items that are still to be rerun as padded rows."""
        if self.journal is not None:
            self.journal.add(results, suspect=True)

    def unfinished(self, batches: Sequence[Batch], *, also_suspects: bool = False) -> list[Batch]:
        """Return the scored batches with at least one unfinished item.

        Such a batch is rerun as a whole, as the last bits of its log-probabilities depend on all of it. Items with
        non-finite results in an earlier attempt count as finished; with `also_suspects` only if they were also rerun as
        padded rows.
        """
        if self.journal is None:
            return list(batches)
        finished = self.journal.done
        if not also_suspects:
            finished = finished | self.journal.suspects.keys()

        unfinished = []
        for batch in batches:
            keys = {request.key for request in batch.requests}
            if not keys <= finished:
                unfinished.append(batch)
        return unfinished

    def not_generated(self, batches: Sequence[ContinuousBatch]) -> list[ContinuousBatch]:
        """Return the continuous batches of the requests whose items are unfinished.

        A generation may take long and is the same beside others, so none is rerun.
        """
        if self.journal is None:
            return list(batches)
        left = [batch.without(self.journal.done) for batch in batches]
        return [batch for batch in left if batch.requests]
