"""Compare runs over the items that they were asked in the same words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from llmfoundry_gauntlet.config.score import ScoreTask
from llmfoundry_gauntlet.config.specs import GauntletSpec, TaskSpec
from llmfoundry_gauntlet.errors import ConfigError, RecordError
from llmfoundry_gauntlet.evaluation import Evaluation, summarize
from llmfoundry_gauntlet.records.runs import Run
from llmfoundry_gauntlet.report.common_items import NO_COMMON_ITEM, CommonItems, common_items
from llmfoundry_gauntlet.scores.comparison import Course, Difference, course, difference, holm
from llmfoundry_gauntlet.scores.consistency import NO_ITEMS
from llmfoundry_gauntlet.tasks import metrics_of
from llmfoundry_gauntlet.values import Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences of a run from the first: 'tasks', 'composites' and 'score', each corrected for their number.

    All of it is over the items of `common`, by task. `warnings` say how many others there are, and in what the runs
    differ besides the model.
    """

    first: str
    second: str
    groups: Mapping[str, Mapping[str, Difference]]
    common: Mapping[str, CommonItems]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trends:
    """The trend of each score over the checkpoints of a run. `warnings` say how many items are left out, and why."""

    batches: Sequence[int]
    trends: Mapping[str, Course]
    composites: frozenset[str]
    warnings: tuple[str, ...]


def compare(first: Run, second: Run, *, metric: str | None = None, allow_missing: bool = False) -> Comparison:
    """Return the differences of the second run from the first over the items that both were asked in the same words.

    `metric` is compared in place of the accuracy, where a task has it. Raises RecordError where they have no task, or
    no item of any task, in common.
    """
    if not first.results.keys() & second.results.keys():
        raise RecordError(
            f'{first.folder} and {second.folder} have no task in common: the first has '
            f'{", ".join(first.results) or "none"}, the second {", ".join(second.results) or "none"}'
        )
    common = common_by_task([first, second], f'{first.folder} and {second.folder} have', scored=allow_missing)
    ours, theirs = (rescored(run, [first, second], common, allow_missing=allow_missing) for run in (first, second))
    differences = {
        'tasks': task_differences(ours, theirs, metric, common),
        'composites': [] if metric is not None else composite_differences(ours, theirs),
        'score': [] if metric is not None else score_differences(ours, theirs),
    }
    return Comparison(
        first=str(first.folder),
        second=str(second.folder),
        groups={kind: corrected(found) for kind, found in differences.items()},
        common=common,
        warnings=tuple(warnings(first, second, common)),
    )


def common_by_task(runs: Sequence[Run], who: str, *, scored: bool) -> dict[str, CommonItems]:
    """Return what the runs have in common of each task that all have.

    Raises RecordError, with the reason for each task, where that is no item at all; `who` begins its last line.
    """
    tasks = [key for key in runs[0].results if all(key in run.results for run in runs)]
    common = {key: common_items(runs, key, scored=scored) for key in tasks}
    if not any(items.keys for items in common.values()):
        reasons = [f'{key}: {items.reason}' for key, items in common.items()]
        raise RecordError([*reasons, f'{who} no item in common; evaluate with the same tasks, shots and data'])
    return common


def rescored(run: Run, runs: Sequence[Run], common: Mapping[str, CommonItems], *, allow_missing: bool) -> Evaluation:
    """Return one of the runs over the common items alone, by the metrics and the gauntlet of the first.

    A task without any is as one that cannot be run, and a composite over it is absent.
    """
    asked = runs[0]
    results = {
        key: [result for result in run.results[key] if result.key in items.keys]
        for key, items in common.items()
        if items.keys or isinstance(asked.tasks[key], ScoreTask)
    }
    absent = {key: items.short_reason for key, items in common.items() if items.short_reason is not None}
    data = replace(asked.data, unsupported={**asked.data.unsupported, **absent})
    evaluation = summarize(data, asked.tasks, results, {}, allow_missing=allow_missing)
    ran = {key for one in runs for key in one.results}
    return without_partial_averages(evaluation, ran - {key for key, items in common.items() if items.keys})


def without_partial_averages(evaluation: Evaluation, left_out: set[str]) -> Evaluation:
    """Return the evaluation without averages over benchmarks left out, which llm-foundry's averages pass over."""
    composites, gauntlet = evaluation.composites, evaluation.data.suite.gauntlet
    if composites is None or gauntlet is None:
        return evaluation
    averages = dict(composites.averages)
    for name, tasks in tasks_of_composites(gauntlet).items():
        lacking = [key for key in tasks if key in left_out]
        if lacking and name in averages and averages[name].value is not None:
            averages[name] = Measure(value=None, reason=f'benchmarks without a common item: {", ".join(lacking)}')
    return replace(evaluation, composites=replace(composites, averages=averages))


def tasks_of_composites(gauntlet: GauntletSpec) -> dict[str, list[str]]:
    """Return the tasks of each category and average."""
    tasks = {category.name: [one.key for one in category.benchmarks] for category in gauntlet.categories}
    for name, members in gauntlet.named_averages.items():
        tasks[name] = list(dict.fromkeys(key for member in members for key in tasks.get(member, ())))
    return tasks


def task_differences(
    ours: Evaluation, theirs: Evaluation, metric: str | None, common: Mapping[str, CommonItems]
) -> list[tuple[str, Difference]]:
    """Return the difference in a metric of each task that has it, by default the accuracy."""
    names = metric_names(ours.tasks, common, metric)
    return [
        (key, difference(measured(ours, key, name, items), measured(theirs, key, name, items), len(items.keys)))
        for key, name in names.items()
        for items in [common[key]]
    ]


def measured(evaluation: Evaluation, key: str, name: str, items: CommonItems) -> Measure:
    """Return a task's metric, or why there are no items that it could be of."""
    if items.reason is not None:
        return Measure(value=None, reason=items.reason)
    return evaluation.scores[key].metrics[name]


def metric_names(tasks: Mapping[str, TaskSpec], keys: Iterable[str], metric: str | None) -> dict[str, str]:
    """Return the metric to compare of each task: the one that is wanted, where it has that, or else its accuracy.

    Raises ConfigError where no task has the metric that is wanted.
    """
    known = {key: [one.name for one in metrics_of(tasks[key])] for key in keys}
    names = {key: metric or found[0] for key, found in known.items() if found and metric in (None, *found)}
    if metric is not None and not names:
        allowed = sorted({name for found in known.values() for name in found})
        raise ConfigError(f'--metric: no task has {metric!r}; allowed: {", ".join(allowed)}')
    return names


def composite_differences(ours: Evaluation, theirs: Evaluation) -> list[tuple[str, Difference]]:
    """Return the differences of categories and averages."""
    if ours.composites is None or theirs.composites is None:
        return []
    other, counts = theirs.composites.by_name, items_of_composites(ours)
    return [(name, difference(measure, other[name], counts[name])) for name, measure in ours.composites.by_name.items()]


def items_of_composites(evaluation: Evaluation) -> dict[str, int]:
    """Return how many items each category and average is made of."""
    gauntlet = evaluation.data.suite.gauntlet
    assert gauntlet is not None  # where there are composites
    return {
        name: sum(evaluation.scores[key].num_items for key in keys if key in evaluation.scores)
        for name, keys in tasks_of_composites(gauntlet).items()
    }


def score_differences(ours: Evaluation, theirs: Evaluation) -> list[tuple[str, Difference]]:
    """Return the differences in SCORE's accuracy and consistency, of each data set under each perturbation."""
    return [
        (f'{dataset} {perturbation} {name}', difference(named(one), named(other), score.num_questions))
        for dataset, perturbations in ours.robustness.items()
        for perturbation, score in perturbations.items()
        for name in ('accuracy', 'consistency_rate')
        for one, other in [(getattr(score, name), getattr(theirs.robustness[dataset][perturbation], name))]
    ]


def named(measure: Measure) -> Measure:
    """Return the measure; one without items, with the reason for that."""
    return replace(measure, reason=NO_COMMON_ITEM) if measure.reason == NO_ITEMS else measure


def corrected(differences: Iterable[tuple[str, Difference]]) -> dict[str, Difference]:
    """Return the differences with their p-values corrected for their number."""
    found = list(differences)
    p_values = holm([one.p_value for _, one in found])
    return {name: replace(one, p_holm=p) for (name, one), p in zip(found, p_values, strict=True)}


def other_words(common: Mapping[str, CommonItems]) -> Iterable[str]:
    """Yield how many items of which tasks were asked in different words, a line for each set of differing settings."""
    tasks: dict[str, list[str]] = {}
    for key, items in common.items():
        if items.num_other_words:
            tasks.setdefault(items.causes, []).append(f'{key} {items.num_other_words} of {items.num_shared}')
    for causes, parts in tasks.items():
        yield f'asked in different words and left out ({causes}): {", ".join(parts)}'


def warnings(first: Run, second: Run, common: Mapping[str, CommonItems]) -> Iterable[str]:
    """Yield how many items are left out, and in what two runs differ besides the model."""
    yield from other_words(common)
    for one, other in ((first, second), (second, first)):
        if lacking := [key for key in one.results if key not in other.results]:
            yield f'{other.folder} has no {", ".join(lacking)}'
    for key, items in common.items():
        if max(items.num_items) > items.num_shared:
            yield f'{key}: {items.num_shared} items are in both, of {items.num_items[0]} and {items.num_items[1]}'
        digests = [run.data.digests.get(key) for run in (first, second)]
        if None not in digests and digests[0] != digests[1]:
            yield f'{key}: the data files differ, in rows or their right answers'
    versions = [(run.record['composites'] or {}).get('version') for run in (first, second)]
    if None not in versions and versions[0] != versions[1]:
        yield (
            f'the gauntlets differ (version {versions[0]} and {versions[1]}): in tasks, shots, rows, weights or '
            f'settings; composites are made by that of {first.folder}, over the items that both have'
        )
    for name in ('semantics', 'fewshot', 'truncation'):
        values = [run.record['config'].get(name) for run in (first, second)]
        if values[0] != values[1]:
            yield f'{name} is {values[0]} and {values[1]}'


def trends(runs: Sequence[Run], *, metric: str | None = None, allow_missing: bool = False) -> Trends:
    """Return the trends of tasks and composites over the items that all checkpoints were asked in the same words.

    `metric` is followed in place of the accuracy, where a task has it.
    Raises RecordError where checkpoints have no task or item in common, or stand at the same batch.
    """
    folder = runs[0].folder.parent
    batches = [run.batch for run in runs]
    known = [batch for batch in batches if batch is not None]
    if len(set(known)) < len(batches):
        raise RecordError(
            f'{folder}: holds evaluations that are not of different training batches '
            f'({", ".join(map(str, batches))}); name the runs one by one to compare them'
        )
    if not any(all(key in run.results for run in runs) for key in runs[0].results):
        raise RecordError(f'{folder}: the evaluations have no task in common')
    common = common_by_task(runs, f'{folder}: the evaluations have', scored=allow_missing)
    evaluations = [rescored(run, runs, common, allow_missing=allow_missing) for run in runs]
    names = metric_names(evaluations[0].tasks, common, metric)
    scores = {key: [measured(one, key, name, common[key]) for one in evaluations] for key, name in names.items()}
    composites: dict[str, list[Measure]] = {}
    for one in evaluations if metric is None else ():
        for name, measure in one.composites.by_name.items() if one.composites is not None else ():
            composites.setdefault(name, []).append(measure)
    return Trends(
        batches=known,
        trends={name: course(known, measures) for name, measures in {**scores, **composites}.items()},
        composites=frozenset(composites),
        warnings=tuple(other_words(common)),
    )
