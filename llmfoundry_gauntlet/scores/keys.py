"""The names of everything that goes into the metric stream. Task and composite keys are llm-foundry's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmfoundry_gauntlet.values import Composites, Measure, TaskScore

COMPOSITE_PREFIX = 'icl/metrics/eval_gauntlet'
SECONDS = 'gauntlet/seconds'
ITEMS = 'gauntlet/items'
TRUNCATED_ITEMS = 'gauntlet/truncated_items'
UNSCORED_ITEMS = 'gauntlet/unscored_items'
BATCH = 'gauntlet/batch'


def task_measures(score: TaskScore) -> Iterator[tuple[str, Measure]]:
    """Key and value of every metric of a task, its categories first."""
    for category, part in score.categories.items():
        for metric, measure in part.metrics.items():
            yield f'metrics/{score.task}/{category}/{metric}', measure
    for metric, measure in score.metrics.items():
        yield f'metrics/{score.task}/{metric}', measure


def composite_measures(composites: Composites) -> Iterator[tuple[str, Measure]]:
    """Key and value of every category score and average."""
    for name, measure in (*composites.categories.items(), *composites.averages.items()):
        yield f'{COMPOSITE_PREFIX}/{name}', measure


def metric_stream(
    scores: Mapping[str, TaskScore], composites: Composites | None, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Everything that has a value, flat. `seconds` is by task; the whole is its sum."""
    measures = [pair for score in scores.values() for pair in task_measures(score)]
    if composites is not None:
        measures.extend(composite_measures(composites))
    metrics = {key: measure.value for key, measure in measures if measure.value is not None}
    metrics[SECONDS] = sum(seconds.values())
    metrics.update({f'{SECONDS}/{task}': value for task, value in seconds.items()})
    metrics[ITEMS] = sum(score.num_items for score in scores.values())
    metrics[TRUNCATED_ITEMS] = sum(score.num_truncated for score in scores.values())
    metrics[UNSCORED_ITEMS] = sum(score.num_unscored for score in scores.values())
    return metrics
