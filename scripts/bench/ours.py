"""Our evaluation as a contender: from the files of one task to its scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from materials import load_model
from parts import PLANNED, UNSHARED
from transformers import AutoTokenizer
from worker import NUM_WARM_UP_ROWS, measure

from llmfoundry_gauntlet.config.score import PROMPT
from llmfoundry_gauntlet.engine import plan
from llmfoundry_gauntlet.engine.continuous import assign_continuous_batches
from llmfoundry_gauntlet.engine.decoding import NO_CACHE, GenerationDecoder, end_ids
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel, automatic_budget
from llmfoundry_gauntlet.engine.probe import probe, probe_generation
from llmfoundry_gauntlet.engine.ranks import assign
from llmfoundry_gauntlet.engine.trees import count_prefixes
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_inputs
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, conclude, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.tasks import base
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import Example, ItemResult, ScoreRequest

Ids = tuple[int, ...]
PROBE_LENGTH = 512  # tokens; a Llama has no attention window that longer rows would show


class Evaluated(NamedTuple):
    """A plan, its results in a fixed order, and its generator."""

    planned: PlannedEvaluation
    results: Sequence[ItemResult]
    generator: TextGenerator


class Ours:
    """Time everything from the files to the scores, with a fresh tokenizer, but not the probe of the model."""

    def load(self, model_folder: str, device: str = 'cpu', dtype: str = 'float32') -> dict[str, str]:
        """Load the model; the next measurement warms it up. Return its batch layouts, with how they were chosen."""
        self.model_folder, self.device = model_folder, device
        model = load_model(model_folder, device, dtype)
        self.language_model = CausalLanguageModel(model, device=torch.device(device))
        self.warm = False
        return {'layouts': self.choose_layouts()}

    def choose_layouts(self) -> str:
        """Set the batch layouts that the model supports; return a description."""
        vocabulary = min(len(self.tokenizer()), self.language_model.vocabulary)
        scoring = probe(self.language_model, vocabulary=vocabulary, longest=PROBE_LENGTH)
        generator = self.generator(self.tokenizer())
        generation = probe_generation(generator, vocabulary=vocabulary, longest=PROBE_LENGTH)
        self.scoring_layout, self.generation_layout = scoring.layout, generation.layout
        self.cached_bytes = generator.cached_bytes
        return f'{scoring}; {generation}'

    def tokenizer(self) -> Any:
        """Return a new tokenizer, which has cached no words yet."""
        return AutoTokenizer.from_pretrained(self.model_folder)

    def generator(self, tokenizer: Any) -> TextGenerator:
        """Return a new generator."""
        decoder = GenerationDecoder(tokenizer, end_ids(tokenizer, self.language_model.model, reference=False))
        return TextGenerator(self.language_model, decoder)

    def measure(
        self, *, settings: dict[str, Any], warm_up: dict[str, Any], max_seq_len: int, num_items: int | None = None
    ) -> dict[str, Any]:
        """Return seconds, predictions and notes for these settings, of the first `num_items` rows if given."""
        if not self.warm:
            with first_items(NUM_WARM_UP_ROWS if 'tasks' in warm_up else None):  # SCORE's entry has fewer questions
                self.evaluate(read(warm_up), self.tokenizer(), max_seq_len)
            self.warm = True
        tokenizer = self.tokenizer()
        self.language_model.forget()

        def run() -> list[Evaluated]:
            return [self.evaluate(data, tokenizer, max_seq_len) for data in self.evaluations(read(settings))]

        with first_items(num_items):
            seconds, evaluated = measure(run, self.device)
        results = [result for one in evaluated for result in one.results]
        planned, wall = evaluated[0].planned, seconds['wall_seconds']
        return {
            **seconds,
            'predictions': predictions(planned, results),
            'prompts': [result.prompt_sha256 for result in results],
            'logprobs': None if planned.generate_requests else [result.logprobs for result in results],
            'num_items': len({result.key.row for result in results}),  # of SCORE: questions, whatever their variants
            **(generated(evaluated, results, wall) if planned.generate_requests else scored(evaluated)),
        }

    def evaluations(self, data: EvaluationData) -> list[EvaluationData]:
        """Return the evaluations to run one after the other."""
        return [data]

    def evaluate(self, data: EvaluationData, tokenizer: Any, max_seq_len: int) -> Evaluated:
        """Run one evaluation."""
        prepared = prepare_evaluation(data, Encoder(tokenizer), max_seq_len=max_seq_len)
        # The others generate alone: without the bits of the gold answers, which are scored.
        prepared = replace(prepared, items={key: item for key, item in prepared.items.items() if not key.is_gold})
        budget = automatic_budget(
            self.language_model.model.config,
            self.language_model.device,
            cached_bytes=self.cached_bytes,
            num_tokens=prepared.num_tokens,
            num_generations=len(prepared.generate_requests),
            num_ranks=1,
        )
        planned = plan_evaluation(
            prepared,
            tokens_per_batch=budget.scoring,
            generation_tokens_per_batch=budget.generation,
            requests_per_batch=budget.requests,
            layout=self.scoring_layout,
        )
        generator = self.generator(tokenizer)
        generator.layout = self.generation_layout
        outputs: list[Any] = [
            output for batch in forwards(planned.batches) for output in self.language_model.run(batch)
        ]
        for continuous_batch in assign_continuous_batches(planned.continuous_batches, num_ranks=1)[0]:
            outputs += generator.generate(continuous_batch)
        (results,) = conclude(planned, planned.results(outputs), {}).results.values()
        return Evaluated(planned, sorted(results, key=lambda one: (one.key.variant or '', one.key.row)), generator)


class Alone(Ours):
    """Run every variant of SCORE in its own evaluation, in which no prompts share a prefix."""

    def evaluations(self, data: EvaluationData) -> list[EvaluationData]:
        """Return an evaluation for each label or prompt, as if it were the only prompt."""
        (task,) = data.suite.tasks
        alone = replace(task, spec=replace(task.spec, perturbations=(PROMPT,)))
        by_variant: dict[str | None, list[Example]] = {}
        for example in data.examples[task.key]:
            by_variant.setdefault(example.variant, []).append(replace(example, variant=f'{PROMPT}:0'))
        suite = replace(data.suite, tasks=(alone,))
        return [replace(data, suite=suite, examples={task.key: by_variant[name]}) for name in sorted(by_variant)]

    def evaluate(self, data: EvaluationData, tokenizer: Any, max_seq_len: int) -> Evaluated:
        """Run one evaluation with a tree for each request, and no cached prefix."""
        with patch.object(plan, 'MAX_TREE_TOKENS', 1), patch.object(plan, 'LEAST_PREFIX', math.inf):
            return super().evaluate(data, tokenizer, max_seq_len)


class Uncached(Ours):
    """Generate without a cache: whole rows for every new token."""

    def choose_layouts(self) -> str:
        """Set the layouts that work with every model."""
        self.scoring_layout, self.generation_layout = plan.PADDED_ROWS, NO_CACHE
        self.cached_bytes = 0
        return 'padded rows; no cache'

    def measure(self, *, settings: dict[str, Any], num_new_tokens: int, **job: Any) -> dict[str, Any]:
        """Return seconds for all tokens of the generations, from those of the first `num_new_tokens`.

        Tokens in rows are in proportion to seconds; attention grows faster, so the seconds are rather too few.
        """
        (task,) = settings['tasks']
        max_new_tokens = task['generation_kwargs']['max_new_tokens']
        short = {**task, 'generation_kwargs': {**task['generation_kwargs'], 'max_new_tokens': num_new_tokens}}
        answer = super().measure(settings={**settings, 'tasks': [short]}, **job)

        lengths = [len(context) for context in answer['shapes'][PLANNED]['contexts']]
        times_more = tokens_in_rows(lengths, max_new_tokens) / tokens_in_rows(lengths, num_new_tokens)
        return {
            **answer,
            'wall_seconds': answer['wall_seconds'] * times_more,
            'cpu_seconds': answer['cpu_seconds'] * times_more,
            'predictions': [],  # they are shorter than those of the others
            'notes': {'no_cache': f'from {num_new_tokens} tokens'},
        }


def tokens_in_rows(lengths: Sequence[int], num_new_tokens: int) -> int:
    """Return the tokens of all rows, if each new token runs its whole row, for prompts of these lengths."""
    return sum(length + earlier for length in lengths for earlier in range(num_new_tokens))


def read(settings: dict[str, Any]) -> EvaluationData:
    """Read the files of an evaluation."""
    return load_inputs(settings)


def text_pairs(settings: dict[str, Any], encoder: Encoder) -> Iterator[list[tuple[str, str]]]:
    """Yield the texts of each row of the task in these settings, as our tokenization joins them."""
    data = read(settings)
    (task,) = data.suite.tasks
    examples = data.examples[task.key]
    for example, shots in task.examples_with_shots(examples, examples):
        prompt = task.prompt(example, shots)
        continuations = encoder.continuations(prompt)
        contexts = prompt.own_texts
        if len(contexts) == 1:
            contexts *= len(continuations)
        whole_contexts = [prompt.preamble + context for context in contexts]
        yield list(zip(whole_contexts, continuations, strict=True))


def scored(evaluated: Sequence[Evaluated]) -> dict[str, Any]:
    """Return the shape of the work, the sequences, and for SCORE the share of the prompts' tokens that was run."""
    plans = [one.planned for one in evaluated]
    first = plans[0]
    rows = input_rows(first.score_requests)
    notes = {}
    if evaluated[0].results[0].key.variant is not None:
        num_tokens = sum(len(request.contexts[0]) for planned in plans for request in planned.score_requests)
        run = sum(num_model_tokens(planned.batches) for planned in plans) / num_tokens
        distinct = sum(count_prefixes(planned.score_requests) for planned in plans) / num_tokens
        notes = {'tokens run': f'{run:.3f} of the prompts, {distinct:.3f} are distinct'}
    return {
        'shapes': {
            PLANNED: planned_shape(first.score_requests, first.batches, first.tokens_per_batch),
            UNSHARED: unshared_shape(first.score_requests, first.tokens_per_batch),
        },
        'sequences': {'count': len(rows), 'longest': max(map(len, rows))},
        'notes': notes,
    }


def generated(evaluated: Sequence[Evaluated], results: Sequence[ItemResult], wall_seconds: float) -> dict[str, Any]:
    """Return the lengths of the generations, and the tokens run for them."""
    ((planned, _, generator),) = evaluated
    lengths = [result.num_tokens[0] for result in results]
    prompt_tokens = sum(len(request.context) for request in planned.generate_requests)
    contexts = [request.context.tolist() for request in planned.generate_requests]
    return {
        'shapes': {PLANNED: {'contexts': contexts, 'max_new_tokens': planned.generate_requests[0].max_new_tokens}},
        'sequences': {'count': len(results), 'longest': 1},  # logits are made after a row's last token only
        'notes': {
            'new tokens': f'{mean(lengths):.0f}, at most {max(lengths)}',
            'per second': f'{sum(lengths) / wall_seconds:.0f}',
            'padding': f'{generator.usage.wasted:.3f}',
            'prompt tokens run': f'{generator.usage.prompt_tokens / prompt_tokens:.3f}',
        },
    }


def forwards(batches: Sequence[plan.Batch]) -> list[plan.Batch]:
    """Return the batches in the order in which a single rank runs them, including those of cached prefixes."""
    return assign(batches, num_ranks=1)[0] if batches else []


def planned_shape(
    requests: Sequence[ScoreRequest], batches: Sequence[plan.Batch], tokens_per_batch: int
) -> dict[str, float]:
    """Return the work that a plan leaves to the model, as the arguments of a bare forward.

    `num_tokens` are the planned unique tokens, `mean_length` the mean over distinct input sequences, `num_reads` the
    distinct prefixes whose next token is scored.
    """
    reads = {
        (*context, *continuation[:count])
        for context, continuation in scored_ids(requests)
        for count in range(len(continuation))
    }
    return {
        'num_tokens': num_model_tokens(batches),
        'mean_length': mean(map(len, input_rows(requests))),
        'num_reads': len(reads),
        'tokens_per_batch': tokens_per_batch,
    }


def unshared_shape(requests: Sequence[ScoreRequest], tokens_per_batch: int) -> dict[str, float]:
    """Return the work of running every distinct row as a whole, without padding, as the arguments of a bare forward."""
    rows = input_rows(requests)
    reads_by_row: dict[Ids, int] = {}
    for context, continuation in scored_ids(requests):
        row = (*context, *continuation[:-1])
        reads_by_row[row] = max(reads_by_row.get(row, 0), len(continuation))
    return {
        'num_tokens': sum(map(len, rows)),
        'mean_length': mean(map(len, rows)),
        'num_reads': sum(reads_by_row.values()),
        'tokens_per_batch': tokens_per_batch,
    }


def num_model_tokens(batches: Sequence[plan.Batch]) -> int:
    """Return the number of input tokens: distinct prefixes, cached ones once, and padding in padded rows."""
    return sum(batch.num_tokens for batch in forwards(batches))


def input_rows(requests: Sequence[ScoreRequest]) -> set[Ids]:
    """Return the distinct sequences that the items need: a continuation's last token is never an input."""
    return {(*context, *continuation[:-1]) for context, continuation in scored_ids(requests)}


def scored_ids(requests: Sequence[ScoreRequest]) -> Iterator[tuple[Ids, Ids]]:
    """Yield the token ids of every context with each of its continuations."""
    for request in requests:
        if request.unscorable is not None:
            continue
        for context, continuation in zip(request.contexts, request.continuations, strict=True):
            yield tuple(context.tolist()), tuple(continuation.tolist())


@contextmanager
def first_items(num_items: int | None) -> Iterator[None]:
    """Restrict tasks to their first items within the context; their shots still come from all rows."""
    with_shots = base.with_shots
    base.with_shots = lambda *args, **options: islice(with_shots(*args, **options), num_items)
    try:
        yield
    finally:
        base.with_shots = with_shots


def predictions(planned: PlannedEvaluation, results: Sequence[ItemResult]) -> list[Any]:
    """Return the texts of generations, the chosen indices, or for a single continuation 1 if it is correct."""
    if planned.generate_requests:
        return [result.text for result in results]
    num_choices = len(planned.items[results[0].key].request.continuations)
    if num_choices == 1:
        return [int(result.predicted is not None) for result in results]
    return [result.predicted for result in results]
