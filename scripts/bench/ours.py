"""Our evaluation as a contender: from the rows of one task to its scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from statistics import mean
from typing import Any, ClassVar, NamedTuple

import torch
from timing import measure
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.assign import assign
from llmfoundry_gauntlet.engine.budget import automatic_budget
from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import Batch
from llmfoundry_gauntlet.engine.probe import probe
from llmfoundry_gauntlet.evaluation import PlannedEvaluation, conclude, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.inputs import EvaluationData, load_data
from llmfoundry_gauntlet.prompts.encode import Encoder
from llmfoundry_gauntlet.tasks import items
from llmfoundry_gauntlet.values import ItemResult

Ids = tuple[int, ...]
WARM_UP_ROWS = 2
PROBE_LENGTH = 512  # tokens; a Llama has no attention window that longer rows would show


class Ours:
    """`measure` times prompts, tokenisation, planning, the model, judging and scores, with a fresh tokenizer.

    Reading the file is not timed, nor is the probe for the model's layout, which is made once for a model.
    """

    warm_up_keys: ClassVar[dict[str, Any]] = {}  # of the task, while the model is warmed up

    def load(self, model_folder: str) -> dict[str, str]:
        """Takes the model into memory; the next measurement warms it up. Returns how the model is run."""
        self.model_folder = model_folder
        model = AutoModelForCausalLM.from_pretrained(model_folder, torch_dtype=torch.float32).eval()
        self.language_model = CausalLanguageModel(model, device=torch.device('cpu'))
        vocabulary = min(len(self.tokenizer()), self.language_model.vocabulary)
        self.found = self.find_way(vocabulary)
        self.warm = False
        return {'way': str(self.found)}

    def find_way(self, vocabulary: int) -> Any:
        """What the model's probe says, of tokens below `vocabulary`."""
        return probe(self.language_model, vocabulary=vocabulary, longest=PROBE_LENGTH)

    def measure(
        self,
        *,
        task: dict[str, Any],
        rows_file: str,
        max_seq_len: int,
        num_items: int | None = None,
        fewshot: str = 'reference',
    ) -> dict[str, Any]:
        """Seconds and predictions for the first `num_items` rows, by default all, and the shape of what was planned."""
        data = task_data(task, rows_file, fewshot)
        if not self.warm:
            with first_items(WARM_UP_ROWS):
                few = task_data({**task, **self.warm_up_keys}, rows_file, fewshot)
                self.evaluate(few, self.tokenizer(), max_seq_len)
            self.warm = True
        tokenizer = self.tokenizer()
        self.language_model.forget()
        with first_items(num_items):
            wall, cpu, (planned, results) = measure(lambda: self.evaluate(data, tokenizer, max_seq_len))
        return {'wall_seconds': wall, 'cpu_seconds': cpu, **self.found_out(planned, results)}

    def found_out(self, planned: PlannedEvaluation, results: tuple[ItemResult, ...]) -> dict[str, Any]:
        """All of an answer but the seconds."""
        return {
            'predictions': predictions(planned, results),
            'shape': plan_shape(planned)._asdict(),
            'sequences': {'count': len(input_rows(planned)), 'longest': max(map(len, input_rows(planned)))},
        }

    def tokenizer(self) -> Any:
        """A new tokenizer: an old one remembers the words it has met."""
        return AutoTokenizer.from_pretrained(self.model_folder)

    def evaluate(
        self, data: EvaluationData, tokenizer: Any, max_seq_len: int
    ) -> tuple[PlannedEvaluation, tuple[ItemResult, ...]]:
        """All that is timed: one task from its rows to its scores."""
        prepared = prepare_evaluation(data, Encoder(tokenizer), max_seq_len=max_seq_len)
        model, device = self.language_model.model, self.language_model.device
        budget = automatic_budget(model.config, device, num_tokens=prepared.num_tokens, num_ranks=1)
        planned = plan_evaluation(prepared, tokens_per_batch=budget, layout=self.found.layout)
        outputs = [output for batch in forwards(planned) for output in self.language_model.run(batch)]
        (results,) = conclude(planned, planned.results(outputs), {}).results.values()
        return planned, results


def task_data(task: dict[str, Any], rows_file: str, fewshot: str = 'reference') -> EvaluationData:
    """The rows of a task, out of a file that takes the place of its own."""
    settings = {'tasks': [{**task, 'dataset_uri': rows_file}], 'truncation': 'reference', 'fewshot': fewshot}
    return load_data(decode_settings(settings))


def forwards(planned: PlannedEvaluation) -> list[Batch]:
    """The batches in the order in which a single rank runs them, kept prefixes as batches of their own."""
    return assign(planned.batches, num_ranks=1)[0]


class Shape(NamedTuple):
    """What a bare forward over the planned tokens needs to know.

    `num_tokens` are the planned unique tokens, `mean_length` the mean over distinct input sequences, `num_reads` the
    distinct prefixes whose next token is scored.
    """

    num_tokens: int
    mean_length: float
    num_reads: int
    tokens_per_batch: int


def plan_shape(planned: PlannedEvaluation) -> Shape:
    """The work that a plan leaves to the model."""
    reads = {
        (*context, *continuation[:count])
        for context, continuation in scored_ids(planned)
        for count in range(len(continuation))
    }
    return Shape(
        num_tokens=num_unique_tokens(planned),
        mean_length=mean(map(len, input_rows(planned))),
        num_reads=len(reads),
        tokens_per_batch=planned.tokens_per_batch,
    )


def num_unique_tokens(planned: PlannedEvaluation) -> int:
    """Tokens that the model is given: distinct prefixes, kept ones once; with their padding in padded rows."""
    return sum(batch.num_tokens for batch in forwards(planned))


def input_rows(planned: PlannedEvaluation) -> set[Ids]:
    """The distinct sequences that the items need: a continuation's last token is never an input."""
    return {(*context, *continuation[:-1]) for context, continuation in scored_ids(planned)}


def scored_ids(planned: PlannedEvaluation) -> Iterator[tuple[Ids, Ids]]:
    """Token ids of every context with each of its continuations."""
    for item in planned.items.values():
        if item.request.unscorable is None:
            for context, continuation in zip(item.request.contexts, item.request.continuations, strict=True):
                yield tuple(context.tolist()), tuple(continuation.tolist())


@contextmanager
def first_items(num_items: int | None) -> Iterator[None]:
    """Within it a task has its first items alone; their shots still come from all rows."""
    with_shots = items.with_shots
    items.with_shots = lambda *args, **options: islice(with_shots(*args, **options), num_items)
    try:
        yield
    finally:
        items.with_shots = with_shots


def predictions(planned: PlannedEvaluation, results: tuple[ItemResult, ...]) -> list[int]:
    """As Timing has them."""
    num_choices = len(planned.items[results[0].key].request.continuations)
    return [int(r.predicted is not None) if num_choices == 1 else r.predicted for r in results]
