"""The names of everything that goes into the metric stream. Task and composite keys are llm-foundry's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmfoundry_gauntlet.scores.consistency import PerturbationScore
from llmfoundry_gauntlet.values import Composites, Measure, TaskScore

SCORE_PREFIX = 'icl/metrics/score'
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


def score_measures(dataset: str, perturbation: str, score: PerturbationScore) -> Iterator[tuple[str, Measure]]:
    """Key and value of what SCORE says of a data set under one perturbation."""
    prefix = f'{SCORE_PREFIX}/{dataset}/{perturbation}'
    yield f'{prefix}/accuracy', score.accuracy
    yield f'{prefix}/accuracy/standard_error', score.accuracy_standard_error
    yield f'{prefix}/consistency_rate', score.consistency_rate
    yield f'{prefix}/consistency_rate/standard_error', score.consistency_rate_standard_error
    if score.consistency_rate_reference is not None:
        yield f'{prefix}/consistency_rate_reference', score.consistency_rate_reference
    for name in ('unparsed_rate', 'accuracy_worst', 'accuracy_best', 'all_variants_right'):
        yield f'{prefix}/{name}', getattr(score, name)
    for variant, measure in score.accuracy_by_variant.items():
        yield f'{prefix}/{variant.replace(":", "_")}/accuracy', measure


def metric_stream(
    scores: Mapping[str, TaskScore],
    composites: Composites | None,
    robustness: Mapping[str, Mapping[str, PerturbationScore]],
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Everything that has a value, flat. `robustness` is by data set; `seconds` is by task, the whole is its sum."""
    measures = [pair for score in scores.values() for pair in task_measures(score)]
    if composites is not None:
        measures.extend(composite_measures(composites))
    for dataset, perturbations in robustness.items():
        for perturbation, score in perturbations.items():
            measures.extend(score_measures(dataset, perturbation, score))
    metrics = {key: measure.value for key, measure in measures if measure.value is not None}
    metrics[SECONDS] = sum(seconds.values())
    metrics.update({f'{SECONDS}/{task}': value for task, value in seconds.items()})
    metrics[ITEMS] = sum(score.num_items for score in scores.values())
    metrics[TRUNCATED_ITEMS] = sum(score.num_truncated for score in scores.values())
    metrics[UNSCORED_ITEMS] = sum(score.num_unscored for score in scores.values())
    return metrics
