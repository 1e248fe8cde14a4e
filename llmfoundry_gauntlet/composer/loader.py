"""An evaluation as the steps that Composer's loop takes: the probe, this rank's batches, and a second look."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from composer.utils import dist

from llmfoundry_gauntlet.config.settings import AUTO
from llmfoundry_gauntlet.engine.assign import assign
from llmfoundry_gauntlet.engine.budget import automatic_budget
from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import LAYOUTS, PADDED_ROWS, Batch, plan
from llmfoundry_gauntlet.engine.probe import Probe, probe
from llmfoundry_gauntlet.evaluation import PlannedEvaluation, PreparedEvaluation, plan_evaluation
from llmfoundry_gauntlet.values import ItemKey, ItemResult

log = logging.getLogger(__name__)

Results = dict[ItemKey, ItemResult]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One step of an evaluation as Composer carries it: what `eval_forward` runs.

    The first step has no plan yet: it makes it.
    """

    loader: EvaluationLoader
    run: Callable[[CausalLanguageModel], Results]
    planned: PlannedEvaluation | None = None
    batch: Batch | None = None

    @property
    def num_items(self) -> int:
        """How many items the step scores."""
        return 0 if self.batch is None else len(self.batch.requests)

    @property
    def num_tokens(self) -> int:
        """How many tokens the step runs."""
        return 0 if self.batch is None else self.batch.num_tokens


class EvaluationLoader:
    """This rank's steps, again at each evaluation. Not a torch DataLoader, whose iteration draws random numbers.

    The first step finds out what the model allows; the batches follow from that. Items whose numbers are not finite,
    some of which may have been spoilt by others of their batch, are run once more by themselves at the end. `planned`
    is the latest plan, and stays while the layout is the same.
    """

    batch_size = 1  # Composer asks for it

    def __init__(self, prepared: PreparedEvaluation, tokenizer: Any) -> None:
        self.prepared = prepared
        self.num_tokenizer_tokens = len(tokenizer)
        self.longest = prepared.longest
        self.planned: PlannedEvaluation | None = None
        self.found: Probe | None = None
        self.language_model: CausalLanguageModel | None = None  # once there is a model to run
        self.budget: int | None = None  # stays as it was first found, so that evaluations can be compared

    def __iter__(self) -> Iterator[Step]:
        yield Step(loader=self, run=self._plan)
        suspects: Results = {}
        for batch in self._share(self.planned.batches):
            yield self._step(partial(self._score, batch, suspects), batch)
        found = [key for keys in dist.all_gather_object(list(suspects)) for key in keys]
        if self.planned.layout == PADDED_ROWS:  # where nothing spoils another row
            yield self._step(lambda _: suspects)
        else:
            again = [self.prepared.items[key].request for key in dict.fromkeys(sorted(found))]
            alone = plan(again, tokens_per_batch=self.planned.tokens_per_batch, layout=PADDED_ROWS)
            for batch in self._share(alone):
                yield self._step(partial(self._score, batch, None), batch)
        self.language_model.forget()

    def _step(self, run: Callable[[CausalLanguageModel], Results], batch: Batch | None = None) -> Step:
        return Step(loader=self, run=run, planned=self.planned, batch=batch)

    @staticmethod
    def _share(batches: Sequence[Batch]) -> list[Batch]:
        return assign(batches, num_ranks=dist.get_world_size())[dist.get_global_rank()]

    def _plan(self, language_model: CausalLanguageModel) -> Results:
        """Plans for what every rank can run, after a probe unless the model is known for certain."""
        if self.found is None or not self.found.certain:
            vocabulary = min(self.num_tokenizer_tokens, language_model.vocabulary)
            found = probe(language_model, vocabulary=vocabulary, longest=self.longest)
            budget = self.budget or self._budget(language_model)
            self.found, self.budget = agreed(dist.all_gather_object((found, budget)))
        if self.planned is None or self.planned.layout != self.found.layout:
            self.planned = plan_evaluation(
                self.prepared,
                tokens_per_batch=self.budget,
                layout=self.found.layout,
                way=str(self.found),
                hidden_token_id=language_model.hidden_token_id,
            )
            log.info('scoring: %s; %d tokens per batch', self.found, self.planned.tokens_per_batch)
        return {}

    def _budget(self, language_model: CausalLanguageModel) -> int:
        """The tokens of a batch that are wanted, or that suit this rank's device."""
        tokens = self.prepared.data.settings.tokens_per_batch
        if tokens != AUTO:
            return tokens
        return automatic_budget(
            language_model.model.config,
            language_model.device,
            num_tokens=self.prepared.num_tokens,
            num_ranks=dist.get_world_size(),
        )

    def _score(self, batch: Batch, suspects: Results | None, language_model: CausalLanguageModel) -> Results:
        """The results of a batch; those that are not finite go to `suspects` where they are to be run again."""
        results = self.planned.results(language_model.run(batch))
        if suspects is not None:
            for key in [key for key, result in results.items() if not is_finite(result)]:
                suspects[key] = results.pop(key)
        return results


def agreed(found: Sequence[tuple[Probe, int]]) -> tuple[Probe, int]:
    """What every rank can run: the most careful layout and the smallest budget of all ranks."""
    probes, budgets = zip(*found, strict=True)
    return max(probes, key=lambda probe: LAYOUTS.index(probe.layout)), min(budgets)


def is_finite(result: ItemResult) -> bool:
    """Whether all log-probabilities of an item are numbers."""
    return result.logprobs is None or all(map(math.isfinite, result.logprobs))
