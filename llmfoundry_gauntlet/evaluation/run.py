"""Run an evaluation from its settings to its scores, independent of what runs the model.

data = load_data(settings)                                      needs no model (evaluation/inputs.py)
prepared = prepare_evaluation(data, encoder, max_seq_len=...)   needs the tokenizer
planned = plan_evaluation(prepared, layout=..., ...)            needs the batch layout that the model supports
results = planned.results(outputs)                              for any batches, on any rank
evaluation = conclude(planned, results, seconds)                needs every item exactly once
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.tasks import GauntletSpec
from llmfoundry_gauntlet.engine.continuous import ContinuousBatch, plan_continuous_batches
from llmfoundry_gauntlet.engine.plan import NO_STATES, PADDED_ROWS, STREAM, Batch, RowStates, longest_row, plan
from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.errors import named, plural
from llmfoundry_gauntlet.evaluation.inputs import (
    EvaluationData,
    chat_warnings,
    prompt_warnings,
    with_programs,
    with_subsets,
)
from llmfoundry_gauntlet.metrics.alerts import Alert
from llmfoundry_gauntlet.metrics.composites import compute_composites, compute_gold_bits
from llmfoundry_gauntlet.metrics.consistency import PerturbationScore
from llmfoundry_gauntlet.metrics.keys import ALERTS, metric_stream
from llmfoundry_gauntlet.metrics.metrics import BEYOND, GOLD_BITS_PER_BYTE, task_score
from llmfoundry_gauntlet.scoring.code.execution import submit
from llmfoundry_gauntlet.scoring.mathematics import Comparer
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.encode import Encoder, PromptTexts, texts_without_tokenizer
from llmfoundry_gauntlet.tasks.gold import gold_key, with_gold
from llmfoundry_gauntlet.tasks.items import Preparation, item_result
from llmfoundry_gauntlet.tasks.prepare import prepare_tasks
from llmfoundry_gauntlet.types import (
    Composites,
    Example,
    GenerateRequest,
    Generation,
    Item,
    ItemKey,
    ItemResult,
    Measure,
    Output,
    Prompt,
    ScoreRequest,
    TaskScore,
)

log = logging.getLogger(__name__)

NO_GOLD_BITS_PER_BYTE = Measure(value=None, reason=f'its type has no {GOLD_BITS_PER_BYTE}')
WITHOUT_EFFECT = ('batch_size', 'pad_tok_id', 'metric_names', 'dataset_uri')  # keys that do not affect scores


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """All tokenized items of all tasks.

    `tokenizer` is the name of the tokenizer, `texts_of` returns a prompt and its choices as they were tokenized.
    """

    data: EvaluationData
    tasks: Mapping[str, Task]
    items: Mapping[ItemKey, Item]
    max_seq_len: int
    tokenizer: str
    texts_of: Callable[[Prompt], PromptTexts] = texts_without_tokenizer

    def max_seq_len_of(self, task: str) -> int:
        """Return the greatest length of a task's rows, to which llm-foundry pads them."""
        return min(self.tasks[task].max_seq_len or self.max_seq_len, self.max_seq_len)

    @property
    def score_requests(self) -> list[ScoreRequest]:
        """Return the requests to score, in item order."""
        return [item.request for item in self.items.values() if isinstance(item.request, ScoreRequest)]

    @property
    def generate_requests(self) -> list[GenerateRequest]:
        """Return the requests to generate, in item order."""
        return [item.request for item in self.items.values() if isinstance(item.request, GenerateRequest)]

    @property
    def num_items(self) -> int:
        """Return the number of items that have a result in the end, generations without the right ones beside them."""
        return sum(not key.is_gold for key in self.items)

    @property
    def num_questions(self) -> int:
        """Return the number of rows to evaluate, each with all its variants."""
        return len({(key.task, key.file, key.row) for key in self.items})

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all contexts, one per item, plus the maximum length of all generations."""
        # Right generations are left out, so that batches of all others do not depend on them.
        scored = sum(len(request.contexts[0]) for request in self.score_requests if not request.key.is_gold)
        return scored + sum(request.length for request in self.generate_requests)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest row that the model scores."""
        return max((longest_row(request) for request in self.score_requests if request.unscorable is None), default=1)

    @property
    def longest_generation(self) -> int:
        """Return the largest number of tokens of a prompt plus its longest generation; 0 if nothing is generated."""
        wanted = [request for request in self.generate_requests if request.unscorable is None]
        return max((request.length for request in wanted), default=0)

    def only(self, subsets: Mapping[str, list[Example]]) -> PreparedEvaluation:
        """Return the evaluation restricted to these rows of each task, with unchanged prompts."""
        rows = {(key, example.file, example.row) for key, examples in subsets.items() for example in examples}
        items = {key: item for key, item in self.items.items() if (key.task, key.file, key.row) in rows}
        return replace(self, data=with_subsets(self.data, subsets), items=items)

    def results(self, outputs: Iterable[Output], comparer: Comparer | None = None) -> dict[ItemKey, ItemResult]:
        """Return the scored items without duplicates, running generated programs concurrently.

        Tasks with mathematical answers require the `comparer`.
        """
        scored: dict[ItemKey, ItemResult | Future[ItemResult]] = {}
        for output in outputs:
            if output.key in scored:
                continue
            if isinstance(output, Generation) and self.tasks[output.key.task].runs_programs:
                scored[output.key] = submit(self.result, output)
            else:
                scored[output.key] = self.result(output, comparer)
        # All programs have been started before the first is waited for.
        results = {}
        for key, result in scored.items():
            results[key] = result.result() if isinstance(result, Future) else result
        return results

    def result(self, output: Output, comparer: Comparer | None = None) -> ItemResult:
        """Return a scored item. A generated program is run in this thread."""
        return self._result(self.items[output.key], output, comparer)

    def unscorable(self) -> dict[ItemKey, ItemResult]:
        """Return the items that are in no batch as unscored results, each with its reason."""
        return {
            key: self._result(item, None) for key, item in self.items.items() if item.request.unscorable is not None
        }

    def _result(self, item: Item, output: Output | None, comparer: Comparer | None = None) -> ItemResult:
        return item_result(item, output, self.tasks[item.key.task], sandbox=self.data.sandbox, comparer=comparer)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvaluation(PreparedEvaluation):
    """A prepared evaluation with its batches. `scoring` and `generation` describe layouts and probes for records."""

    batches: tuple[Batch, ...]
    continuous_batches: tuple[ContinuousBatch, ...]
    layout: str
    scoring: str
    generation: str
    tokens_per_batch: int
    generation_tokens_per_batch: int
    requests_per_batch: int | None

    @property
    def num_model_tokens(self) -> int:
        """Return the number of tokens that the model runs for scoring, in distinct prefixes or padded rows."""
        return sum(batch.num_tokens for batch in self.batches)


def frames() -> Any:
    """Return the package, whose `scores_frame` and `samples_frame` are above this module, so loaded on use."""
    return import_module('llmfoundry_gauntlet')


class Scores:
    """Methods of new and recorded evaluations for notebooks and scripts; pandas is imported on use."""

    __slots__ = ()

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row per metric value; see `scores_frame`."""
        return frames().scores_frame(self)

    def samples(self) -> Any:
        """Return a pandas.DataFrame with a row per item; see `samples_frame`."""
        return frames().samples_frame(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Scores):
    """The results of an evaluation. `seconds` is wall time by task and sums to that of the evaluation.

    `robustness` has SCORE's metrics by dataset and perturbation. `planned` is None if external answers were scored.
    `alerts` are those of an evaluation in training; None outside of it, and while too few evaluations are known.
    """

    data: EvaluationData
    tasks: Mapping[str, Task]
    planned: PlannedEvaluation | None
    results: Mapping[str, tuple[ItemResult, ...]]
    scores: Mapping[str, TaskScore]
    composites: Composites | None
    robustness: Mapping[str, Mapping[str, PerturbationScore]]
    seconds: Mapping[str, float]
    alerts: tuple[Alert, ...] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Return all metric values by key, for records."""
        return {
            **metric_stream(self.scores, self.composites, self.robustness, self.seconds),
            **self._num_alerts,
        }

    @property
    def logged(self) -> dict[str, float]:
        """Return the metric values that loggers get, by key."""
        return {
            **metric_stream(self.scores, self.composites, self.robustness, self.seconds, self.data.settings.log),
            **self._num_alerts,
        }

    @property
    def _num_alerts(self) -> dict[str, float]:
        return {} if self.alerts is None else {ALERTS: len(self.alerts)}


def prepare_evaluation(
    data: EvaluationData, encoder: Encoder, *, max_seq_len: int, cache: Path | None = None
) -> PreparedEvaluation:
    """Tokenize all items, caching them in the folder `cache`. Raise ConfigError or ModelError.

    A task's own max_seq_len can only lower the limit.
    """
    data = with_programs(data)
    tasks = data.tasks
    preparations = {
        key: Preparation(
            task=task,
            examples=data.examples[key],
            encoder=encoder,
            max_seq_len=min(task.max_seq_len or max_seq_len, max_seq_len),
        )
        for key, task in tasks.items()
    }
    prepared = prepare_tasks(preparations, cache, data.subsets)
    for warning in (*prompt_warnings(tasks, prepared, max_seq_len), *chat_warnings(tasks, data.examples, encoder)):
        log.warning(warning)
    items = {item.key: item for key, task_items in prepared.items() for item in samples_of(task_items, tasks[key])}
    return PreparedEvaluation(
        data=data,
        tasks=tasks,
        items=items,
        max_seq_len=max_seq_len,
        tokenizer=encoder.name,
        texts_of=encoder.texts,
    )


def samples_of(items: Iterable[Item], task: Task) -> Iterator[Item]:
    """Yield each item once for every generation of its prompt, and the one that scores the right generation."""
    for item in items:
        for sample in range(task.num_samples_of(item.example.content)):
            request = replace(item.request, key=replace(item.key, sample=sample))
            yield replace(item, request=request, gold=None)
        if item.gold is not None:
            yield item.gold


def one_task(prepared: PreparedEvaluation, key: str) -> PreparedEvaluation:
    """Return the evaluation restricted to a single task."""
    items = {item_key: item for item_key, item in prepared.items.items() if item_key.task == key}
    data = replace(prepared.data, examples={key: prepared.data.examples[key]}, unsupported={})
    return replace(prepared, data=data, tasks={key: prepared.tasks[key]}, items=items)


def plan_evaluation(
    prepared: PreparedEvaluation,
    *,
    tokens_per_batch: int,
    generation_tokens_per_batch: int | None = None,
    requests_per_batch: int | None = None,
    layout: str = STREAM,
    scoring: str = '',
    generation: str = '',
    hidden_token_id: int | None = None,
    rotary: RotaryLengths | None = None,
    row_states: RowStates = NO_STATES,
) -> PlannedEvaluation:
    """Return the evaluation with batches over all tasks together.

    Right generations have batches of their own, so that those of choices are the same with and without them.
    Requests that contain `hidden_token_id` always run in padded rows, and those with a context of nothing else padded
    to the task's length: attention over a context that is masked as a whole depends on the padding. Requests with
    different rotary frequencies are never in one batch. `tokens_per_batch` is raised to the size of the largest
    request, with a warning. That of generation is the same by default; `requests_per_batch` are those of a continuous
    batch. `row_states` is as for `plan`.
    """
    others: list[ScoreRequest] = []
    golds: list[ScoreRequest] = []
    hidden: list[ScoreRequest] = []
    blind: dict[int, list[ScoreRequest]] = defaultdict(list)  # by length
    for request in prepared.score_requests:
        task = request.key.task
        unhidden = golds if request.key.is_gold else others
        if hidden_token_id is None or not prepared.tasks[task].is_in_llm_foundry:
            unhidden.append(request)
        elif is_blind(request, hidden_token_id):
            blind[prepared.max_seq_len_of(task)].append(request)
        elif holds(request, hidden_token_id):
            hidden.append(request)
        else:
            unhidden.append(request)

    def batches_of(tokens: int) -> list[Batch]:
        return [
            *plan(others, tokens_per_batch=tokens, layout=layout, rotary=rotary, row_states=row_states),
            *plan(golds, tokens_per_batch=tokens, layout=layout, rotary=rotary, row_states=row_states),
            *plan(hidden, tokens_per_batch=tokens, layout=PADDED_ROWS, rotary=rotary),
        ]

    def padded_batches(tokens: int) -> list[Batch]:
        return [
            batch
            for length, requests in sorted(blind.items(), reverse=True)
            for batch in plan(requests, tokens_per_batch=tokens, layout=PADDED_ROWS, rotary=rotary, padded_to=length)
        ]

    generation_tokens = tokens_per_batch if generation_tokens_per_batch is None else generation_tokens_per_batch
    batches = batches_of(tokens_per_batch)
    largest = max((batch.num_tokens for batch in batches), default=0)
    if largest > tokens_per_batch:
        log.warning(
            '%s is %d, but a request has %d tokens: it is raised', named('tokens_per_batch'), tokens_per_batch, largest
        )
        batches = batches_of(largest)
    return PlannedEvaluation(
        **{part.name: getattr(prepared, part.name) for part in fields(PreparedEvaluation)},
        batches=(*batches, *padded_batches(max(tokens_per_batch, largest))),
        continuous_batches=tuple(
            plan_continuous_batches(
                prepared.generate_requests,
                tokens_per_batch=generation_tokens,
                requests_per_batch=requests_per_batch,
                rotary=rotary,
            )
        ),
        layout=layout,
        scoring=scoring,
        generation=generation,
        tokens_per_batch=max(tokens_per_batch, largest),
        generation_tokens_per_batch=generation_tokens,
        requests_per_batch=requests_per_batch,
    )


def is_blind(request: ScoreRequest, hidden: int) -> bool:
    """Return whether a context of a request holds nothing but hidden tokens, so that its choice sees no token."""
    return request.unscorable is None and any((context == hidden).all() for context in request.contexts)


def holds(request: ScoreRequest, token: int) -> bool:
    """Return whether the model's input for a request contains a token."""
    # The last token of a continuation is only predicted.
    inputs = [*request.contexts, *(continuation[:-1] for continuation in request.continuations)]
    return any((ids == token).any() for ids in inputs)


def conclude(
    planned: PlannedEvaluation,
    results: Mapping[ItemKey, ItemResult],
    seconds: Mapping[str, float],
    comparer: Comparer | None = None,
) -> Evaluation:
    """Return the evaluation's scores and composites. Raise RuntimeError if an item is missing or unknown.

    Tasks with mathematical answers require the `comparer`.
    """
    results = {**planned.unscorable(), **results}
    missing = planned.items.keys() - results.keys()
    unknown = results.keys() - planned.items.keys()
    if missing or unknown:
        examples = ', '.join(map(str, sorted([*missing, *unknown])[:5]))
        raise RuntimeError(f'{len(missing)} items are missing and {len(unknown)} unknown after gathering: {examples}')
    by_task: dict[str, list[ItemResult]] = {key: [] for key in planned.tasks}
    contents: dict[str, list[Any]] = {key: [] for key in planned.tasks}
    for key, item in planned.items.items():  # in row order
        if not key.is_gold:
            by_task[key.task].append(with_gold(results[key], results.get(gold_key(key))))
            contents[key.task].append(item.example.content)
    completed = {key: planned.tasks[key].completed(of_task, contents[key]) for key, of_task in by_task.items()}
    return summarize(planned.data, planned.tasks, completed, seconds, planned=planned, comparer=comparer)


def summarize(
    data: EvaluationData,
    tasks: Mapping[str, Task],
    results: Mapping[str, Sequence[ItemResult]],
    seconds: Mapping[str, float],
    *,
    planned: PlannedEvaluation | None = None,
    comparer: Comparer | None = None,
    allow_missing: bool = False,
) -> Evaluation:
    """Compute all scores and composites from results by task; `allow_missing` leaves out unscored items.

    Tasks with mathematical answers require the `comparer`, which compares those to the variants of a question.
    """
    scores = {}
    robustness = {}
    for key, task_results in results.items():
        task = tasks[key]
        scores[key] = task_score(key, task.metrics(), task_results, allow_missing=allow_missing)
        if task.asks_variants:
            robustness[task.dataset_name] = task.robustness(task_results, comparer, allow_missing=allow_missing)
    return Evaluation(
        data=data,
        tasks=tasks,
        planned=planned,
        results={key: tuple(task_results) for key, task_results in results.items()},
        scores=scores,
        composites=composites_of(data, scores),
        robustness=robustness,
        seconds=dict(seconds),
    )


def composites_of(data: EvaluationData, scores: Mapping[str, TaskScore]) -> Composites | None:
    """Return the gauntlet's composites; None without a gauntlet."""
    if data.suite.gauntlet is None:
        return None
    accuracies: dict[str, Measure] = {key: Measure(value=None, reason=why) for key, why in data.unsupported.items()}
    bits = dict(accuracies)
    for key, score in scores.items():
        if not score.metrics:
            continue
        accuracies[key] = of_all_items(score, share_of(score))
        bits[key] = of_all_items(score, score.metrics.get(GOLD_BITS_PER_BYTE, NO_GOLD_BITS_PER_BYTE))
    sizes = {key: score.num_items for key, score in scores.items()}
    composites = compute_composites(data.suite.gauntlet, accuracies, sizes, reference=data.settings.reference)
    return replace(composites, gold_bits=compute_gold_bits(data.suite.gauntlet, bits, sizes))


def share_of(score: TaskScore) -> Measure:
    """Return a task's accuracy for composites; absent if it is no share, as a task type's own metric may be."""
    value = score.accuracy.value
    if value is None or -BEYOND <= value <= 1 + BEYOND:
        return score.accuracy
    return Measure(value=None, reason=f'its metric is {value:g}; allowed in composites: a share, from 0 to 1')


def of_all_items(score: TaskScore, measure: Measure) -> Measure:
    """Return a metric of a task for composites: over part of a task's items they would be none of the gauntlet."""
    if not score.num_unscored or measure.value is None:
        return measure
    return Measure(value=None, reason=f'{score.num_unscored} of {plural(score.num_items, "item")} unscored')


def gauntlet_version(data: EvaluationData, gauntlet: GauntletSpec) -> str:
    """Return a digest, 16 hexadecimal digits, of everything except the model that a gauntlet's composites depend on.

    It covers the gauntlet's YAML, its tasks with their shots, rows and metrics, and the settings that affect scores.
    """
    settings = data.settings
    benchmarks = {benchmark.key for category in gauntlet.categories for benchmark in category.benchmarks}
    # Tasks that cannot run here are in no composite.
    in_composites = [task for task in data.suite.tasks if task.key in benchmarks and task.key in data.digests]
    tasks = {}
    for task in in_composites:
        tasks[task.key] = {
            'task': {name: value for name, value in task.keys.items() if name not in WITHOUT_EFFECT},
            'metric': task.metrics()[0].name,
            'rows': (data.digests.get(task.key), data.subset_sizes.get(task.key)),
        }
    parts = [asdict(gauntlet), tasks, settings.semantics, settings.effective_truncation, settings.fewshot]
    # Settings at their defaults add nothing, so the version of a run that does not use them stays as it was.
    if settings.apply_chat_template:
        parts.append('chat template')
    parts += [given for given in (settings.given_chat, settings.given_markers) if given]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def share_seconds(wall_seconds: float, busy_seconds: Mapping[str, float]) -> dict[str, float]:
    """Divide the wall time among the tasks in proportion to their busy time."""
    busy = sum(busy_seconds.values())
    if busy == 0:
        return dict.fromkeys(busy_seconds, 0.0)
    return {task: wall_seconds * seconds / busy for task, seconds in busy_seconds.items()}
