"""Score documents of lm-eval's tasks by its own filters and metrics, and aggregate them by its own functions.

Numbers that a task's `process_results` gives a document are its metrics; all else, such as a pair of a reference and an
answer, is kept as JSON among its facts. So records, journals and resumed evaluations give the same aggregates.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llmfoundry_gauntlet.errors import Caught, ConfigError, listed
from llmfoundry_gauntlet.metrics.metrics import Absent, Metric, compute_metric, mean_over, scored_once
from llmfoundry_gauntlet.metrics.statistics import SHARE, weighted_sum
from llmfoundry_gauntlet.tasks.lm_eval_source import (
    GENERATE,
    LOGLIKELIHOOD,
    NO_FILTER,
    ROLLING,
    SHARES,
    Subtask,
)
from llmfoundry_gauntlet.types import ItemResult, Measure, Score, TaskScore

MEAN = 'mean'
NO_AGGREGATE = 'lm-eval does not average it over the tasks of the group'
NOT_LOADED = "the task's own code aggregates it, which records do not hold; evaluate again"

# The aggregations that tasks bring as functions of their own, by the name that records have for them.
OWN_AGGREGATIONS: dict[str, Callable[[Sequence[Any]], float]] = {}

Description = Mapping[str, Any]  # of a task or a group, as in records


# Documents


def score_of(subtask: Subtask, doc_id: int, responses: Sequence[Sequence[Any]], *, metric: str | None) -> Score:
    """Return the score of a document from the responses to each of its requests.

    Its value is the metric of this name, by default the first one, where that is a share, else 0. An error of the
    task's code leaves the document unscored, with that reason.
    """
    metrics: dict[str, float] = {}
    facts: dict[str, str | int] = {}
    with Caught(packages=('jinja2', 'sacrebleu', 'sympy', 'antlr4'), bare=True) as caught:
        for filter_name, name, value in subtask.metrics_of(doc_id, responses):
            shown = metric_name(name, filter_name, subtask.filters)
            number = number_of(value)
            if number is None:
                facts[shown] = json.dumps(value, default=json_value)
            else:
                metrics[shown] = number
    if caught.error is not None:
        error = ' '.join(str(caught.error).split())
        return Score.unscored(f"the task's own code failed: {type(caught.error).__name__}: {error}")
    first = metric or next(iter([*metrics, *facts]), None)
    value = metrics.get(first or '')
    is_share = value is not None and 0 <= value <= 1
    return Score(value=value if is_share else 0.0, metrics=metrics, facts=facts)


def metric_name(metric: str, filter_name: str, filters: Iterable[str]) -> str:
    """Return the name of a metric after a filter, as lm-eval's results have it; alone if there is no other filter."""
    return metric if set(filters) == {NO_FILTER} else f'{metric},{filter_name}'


def number_of(value: Any) -> float | None:
    """Return a finite number, None for any other value."""
    if getattr(value, 'ndim', None) == 0:  # a number of NumPy or torch
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def json_value(value: Any) -> Any:
    """Return a value of NumPy, a set or any other object in JSON types."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, 'tolist'):
        return value.tolist()
    return str(value)


def value_of(result: ItemResult, name: str) -> Any:
    """Return what a document has for a metric, None if it has nothing."""
    if name in result.metrics:
        return result.metrics[name]
    text = result.facts.get(name)
    if text is None:
        return None
    value = json.loads(str(text))
    return tuple(value) if isinstance(value, list) else value


# What a task measures, as records hold it


def measured(subtask: Subtask) -> dict[str, dict[str, Any]]:
    """Return each metric of a task by name, with its aggregation and direction. Raise ConfigError.

    The names are those of a first document with responses that say nothing, and of the task's list.
    """
    aggregations = subtask.task.aggregation()
    directions = subtask.task.higher_is_better()
    pairs: dict[tuple[str, str], Any] = dict.fromkeys(
        (filter_name, metric) for filter_name in subtask.filters for metric in aggregations
    )
    with Caught(packages=('jinja2', 'sacrebleu', 'sympy', 'antlr4'), bare=True) as caught:
        of_first = {}
        for filter_name, metric, value in subtask.metrics_of(0, blank_responses(subtask)):
            of_first[filter_name, metric] = value
    if caught.error is None:
        is_own = callable(subtask.task.get_config('process_results'))
        pairs = {**of_first, **pairs} if is_own else of_first

    described = {}
    for (filter_name, metric), value in pairs.items():
        aggregation = aggregations.get(metric)
        if aggregation is None and value is not None and number_of(value) is None:
            raise ConfigError(
                f'the metric {metric} of the task {subtask.name} of lm-eval has no aggregation, and is no number; give '
                'it one in metric_list'
            )
        described[metric_name(metric, filter_name, subtask.filters)] = {
            'metric': metric,
            'filter': filter_name,
            'aggregation': MEAN if aggregation is None else aggregation_name(aggregation),
            'higher_is_better': bool(directions.get(metric, True)),
        }
    return described


def blank_responses(subtask: Subtask) -> list[list[Any]]:
    """Return responses to the requests of the first document that say nothing."""
    (first, *_) = subtask.instances(None)
    blanks: dict[str, Any] = {LOGLIKELIHOOD: (-1.0, False), ROLLING: -1.0, GENERATE: ''}
    return [[blanks[instance.request_type]] * subtask.repeats for instance in first]


def aggregation_name(function: Callable[..., Any]) -> str:
    """Return the name of an aggregation in lm-eval's registry; of a task's own a name with a digest of its source."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    for name, registered in AGGREGATION_REGISTRY.items():
        if registered is function:
            return str(name)
    plain = function.func if isinstance(function, partial) else function
    try:
        source = inspect.getsource(plain)
    except (OSError, TypeError):
        source = getattr(plain, '__qualname__', type(plain).__name__)
    digest = hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:8]
    name = f'{getattr(plain, "__name__", "function")} ({digest})'
    OWN_AGGREGATIONS[name] = function
    return name


def aggregation_of(name: str) -> Callable[[Sequence[Any]], float]:
    """Return an aggregation by its name in records. Raise Absent if it is a function that is not loaded."""
    if name in OWN_AGGREGATIONS:
        return OWN_AGGREGATIONS[name]
    try:
        from lm_eval.api.registry import get_aggregation
    except ImportError as error:
        raise Absent(f'it is aggregated by lm-eval, which is not installed: {error}') from error
    function: Callable[[Sequence[Any]], float] | None = get_aggregation(name)
    if function is None:
        raise Absent(NOT_LOADED)
    return function


# Metrics


def metrics_of_task(task: Description) -> list[Metric]:
    """Return the metrics of a single task, in order."""
    return [metric_of(name, entry) for name, entry in task['metrics'].items()]


def metric_of(name: str, entry: Description) -> Metric:
    """Return a metric of a task: a mean over documents, or lm-eval's aggregate of them."""
    is_loss = not entry['higher_is_better']
    if entry['aggregation'] == MEAN:
        bounds = SHARE if entry['metric'] in SHARES else (None, None)
        return Metric(name, partial(numbers, name), bounds=bounds, is_loss=is_loss)
    aggregate = partial(aggregated, name, entry['aggregation'])
    return Metric(name, partial(numbers, name), aggregate=aggregate, is_loss=is_loss)


def is_share(entry: Description) -> bool:
    """Return whether a metric may be a share, the higher the better: a mean over documents."""
    return entry['aggregation'] == MEAN and bool(entry['higher_is_better'])


def numbers(name: str, results: Sequence[ItemResult]) -> list[float | None]:
    """Return the number that each document has for a metric, at the position of its first generation."""
    first = {id(result) for result in scored_once(results)}
    return [result.metrics.get(name) if id(result) in first else None for result in results]


def aggregated(name: str, aggregation: str, results: Sequence[ItemResult]) -> float:
    """Return lm-eval's aggregate of what the documents have for a metric, in their order. Raise Absent."""
    values = [value_of(result, name) for result in scored_once(results)]
    known = [value for value in values if value is not None]
    if not known:
        raise Absent('no item has a value')
    function = aggregation_of(aggregation)
    with Caught(packages=('sacrebleu', 'sklearn', 'scipy'), bare=True) as caught:
        value = number_of(function(known))
    if caught.error is not None:
        raise Absent(f'lm-eval cannot aggregate it: {type(caught.error).__name__}: {caught.error}')
    if value is None:
        raise Absent("lm-eval's aggregate is no finite number")
    return float(value)


# Groups


def metrics_of_group(tasks: Mapping[str, Description], groups: Sequence[Description]) -> list[Metric]:
    """Return the metrics of a group: its averages, those of the groups within it, and what its tasks have alone."""
    if not groups:  # a tag
        outermost: Description = {'name': '', 'tasks': list(tasks), 'aggregates': []}
        inner: Sequence[Description] = ()
    else:
        outermost, *inner = groups
    metrics: dict[str, Metric] = {}
    for aggregate in averages(outermost, tasks):
        entries = [task['metrics'][aggregate.name] for task in tasks.values() if aggregate.name in task['metrics']]
        metrics[aggregate.name] = with_average(metric_of(aggregate.name, entries[0]), aggregate.combine)
    for task in tasks.values():
        for name, entry in task['metrics'].items():
            metrics.setdefault(name, with_average(metric_of(name, entry), without_aggregate))
    for group in inner:
        for aggregate in averages(group, tasks):
            name = f'{group["name"]}/{aggregate.name}'
            metrics[name] = Metric(name, aggregate.values, combine=aggregate.combine, in_categories=False)
    return list(metrics.values())


def with_average(metric: Metric, combine: Any) -> Metric:
    """Return a metric that a group averages in this way."""
    return Metric(
        metric.name,
        metric.values,
        bounds=metric.bounds,
        aggregate=metric.aggregate,
        combine=combine,
        is_loss=metric.is_loss,
    )


def without_aggregate(scores: Mapping[str, TaskScore], results: Sequence[ItemResult]) -> Measure:
    """Return no number, with the reason."""
    return Measure(value=None, reason=NO_AGGREGATE)


def averages(group: Description, tasks: Mapping[str, Description]) -> list[Metric]:
    """Return the averages that a group has, by the names that its tasks have for them."""
    found = []
    of_group = {name: tasks[name] for name in group['tasks'] if name in tasks}
    for aggregate in group['aggregates']:
        for name in names_of(aggregate, of_group):
            combine = partial(
                average,
                name,
                [task for task, entry in of_group.items() if name in entry['metrics']],
                weight_by_size=aggregate['weight_by_size'],
            )
            found.append(Metric(name, partial(numbers, name), combine=combine))
    return found


def names_of(aggregate: Description, tasks: Mapping[str, Description]) -> list[str]:
    """Return the names of the metrics that an entry of `aggregate_metric_list` averages, in lm-eval's order."""
    filters_of_name: dict[str, str] = {}
    for task in tasks.values():
        for name, entry in task['metrics'].items():
            if entry['metric'] == aggregate['metric']:
                filters_of_name[name] = entry['filter']
    wanted = aggregate['filter_list']
    if wanted is None:
        return sorted(filters_of_name, key=lambda name: filters_of_name[name])
    return [name for of_filter in wanted for name, own in filters_of_name.items() if own == of_filter]


def average(
    name: str,
    tasks: Sequence[str],
    scores: Mapping[str, TaskScore],
    results: Sequence[ItemResult],
    *,
    weight_by_size: bool,
) -> Measure:
    """Return lm-eval's average of a metric over these tasks of a group, of those that have been asked."""
    asked = {task: scores[task] for task in tasks if task in scores}
    absent = {task: score.metrics[name].reason for task, score in asked.items() if score.metrics[name].value is None}
    if absent or not asked:
        reasons = dict.fromkeys(str(reason) for reason in absent.values())
        return Measure(value=None, reason=f'{listed(absent) or name}: {"; ".join(reasons) or "no task was asked"}')
    measures = [score.metrics[name] for score in asked.values()]
    if not weight_by_size:
        of_tasks = [result for result in results if result.category in asked]
        mean = mean_over(asked, Metric(name, partial(numbers, name)), of_tasks)
        return replace(mean, value=lm_eval_mean(measures, [1] * len(measures)))
    size_of_task = Counter(result.category for result in scored_once(results))
    sizes = [size_of_task[task] for task in asked]
    weighted = weighted_sum(measures, [size / sum(sizes) for size in sizes])
    if weighted.spread is None:
        # A task with a single document has no error of its own. Over all documents alike there is one, which is larger
        # by what tasks differ.
        of_tasks = [result for result in results if result.category in asked and result.score is not None]
        weighted = compute_metric(Metric(name, partial(numbers, name)), of_tasks, stratum=results[0].key.task)
    return replace(weighted, value=lm_eval_mean(measures, sizes))


def lm_eval_mean(measures: Sequence[Measure], sizes: Sequence[int]) -> float:
    """Return the mean of a group in the order in which lm-eval rounds it, so that its last digit is the same too."""
    products = [
        measure.value * size for measure, size in zip(measures, sizes, strict=True) if measure.value is not None
    ]
    return sum(products) / sum(sizes)
