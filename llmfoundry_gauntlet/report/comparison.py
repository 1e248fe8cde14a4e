"""Runs side by side: their items paired, their prompts checked to be the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from llmfoundry_gauntlet.errors import ConfigError, RecordError
from llmfoundry_gauntlet.evaluation import Evaluation, summarize
from llmfoundry_gauntlet.records.runs import Run
from llmfoundry_gauntlet.scores.comparison import Course, Difference, course, difference, holm
from llmfoundry_gauntlet.values import ItemKey, ItemResult, Measure

MAX_ROWS = 3  # named in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a run has more than the first. Tasks, composites and SCORE's numbers are each corrected for their number.

    `warnings` say in what the runs differ besides the model.
    """

    first: str
    second: str
    tasks: Mapping[str, Difference]
    composites: Mapping[str, Difference]
    score: Mapping[str, Difference]
    warnings: tuple[str, ...]


def compare(first: Run, second: Run, *, metric: str | None = None, allow_missing: bool = False) -> Comparison:
    """Both runs over the items that both have. `metric` is compared in place of the accuracy, where a task has it.

    Raises RecordError where they have no task in common, or were asked in different words.
    """
    tasks = [key for key in first.results if key in second.results]
    if not tasks:
        raise RecordError(
            f'{first.folder} and {second.folder} have no task in common: the first has '
            f'{", ".join(first.results) or "none"}, the second {", ".join(second.results) or "none"}'
        )
    check_prompts(first, second, tasks)
    common = {key: common_items([run.results[key] for run in (first, second)], scored=allow_missing) for key in tasks}
    ours, theirs = (rescored(run, first, common, allow_missing=allow_missing) for run in (first, second))
    composites = [] if metric is not None else composite_differences(ours, theirs)
    return Comparison(
        first=str(first.folder),
        second=str(second.folder),
        tasks=corrected(task_differences(ours, theirs, metric)),
        composites=corrected(composites),
        score=corrected(score_differences(ours, theirs) if metric is None else []),
        warnings=tuple(warnings(first, second, common)),
    )


def check_prompts(first: Run, second: Run, tasks: Sequence[str]) -> None:
    """Raises RecordError naming the tasks whose items were not asked in the same words."""
    problems = []
    for key in tasks:
        prompts = {result.key: result.prompt_sha256 for result in first.results[key]}
        pairs = [result for result in second.results[key] if result.key in prompts]
        if differing := [result.key for result in pairs if result.prompt_sha256 != prompts[result.key]]:
            rows = ', '.join(place_of(item) for item in differing[:MAX_ROWS])
            problems.append(f'{key}: {len(differing)} of {len(pairs)} prompts differ, first at {rows}')
    if problems:
        problems.append(
            f'{first.folder} and {second.folder} cannot be paired: evaluate with the same tasks, shots and data'
        )
        raise RecordError(problems)


def place_of(key: ItemKey) -> str:
    """An item of a task in messages."""
    return ' '.join(filter(None, [key.file, f'row {key.row}', key.variant]))


def common_items(parts: Sequence[Sequence[ItemResult]], *, scored: bool) -> set[ItemKey]:
    """The items that all have, or that are `scored` in all."""
    return set.intersection(
        *({result.key for result in part if not scored or result.credit is not None} for part in parts)
    )


def rescored(run: Run, asked: Run, items: Mapping[str, set[ItemKey]], *, allow_missing: bool) -> Evaluation:
    """A run over these items alone, by the metrics and the gauntlet of the run `asked`."""
    results = {key: [result for result in run.results[key] if result.key in kept] for key, kept in items.items()}
    return summarize(asked.data, asked.tasks, results, {}, allow_missing=allow_missing)


def task_differences(ours: Evaluation, theirs: Evaluation, metric: str | None) -> list[tuple[str, Difference]]:
    """A metric of each task that has it, by default the accuracy."""
    names = {key: name for key in ours.scores if (name := metric_of(ours, key, metric)) is not None}
    check_metric(ours, names, metric)
    return [
        (key, difference(ours.scores[key].metrics[name], theirs.scores[key].metrics[name], ours.scores[key].num_items))
        for key, name in names.items()
    ]


def metric_of(evaluation: Evaluation, key: str, metric: str | None) -> str | None:
    """The metric of a task that is looked at: the one that is wanted, else the accuracy; None where it has none."""
    metrics = evaluation.scores[key].metrics
    name = metric or next(iter(metrics), None)
    return name if name in metrics else None


def check_metric(evaluation: Evaluation, names: Mapping[str, str], metric: str | None) -> None:
    """Raises ConfigError where no task has the metric that is wanted."""
    if metric is not None and not names:
        known = sorted({name for score in evaluation.scores.values() for name in score.metrics})
        raise ConfigError(f'--metric: no task has {metric!r}; allowed: {", ".join(known)}')


def composite_differences(ours: Evaluation, theirs: Evaluation) -> list[tuple[str, Difference]]:
    """Category scores and averages."""
    if ours.composites is None or theirs.composites is None:
        return []
    other, counts = theirs.composites.by_name, items_of_composites(ours)
    return [(name, difference(measure, other[name], counts[name])) for name, measure in ours.composites.by_name.items()]


def items_of_composites(evaluation: Evaluation) -> dict[str, int]:
    """How many items each category and average is made of."""
    gauntlet = evaluation.data.suite.gauntlet
    assert gauntlet is not None  # where there are composites
    tasks = {category.name: {one.key for one in category.benchmarks} for category in gauntlet.categories}
    for name, members in gauntlet.named_averages.items():
        tasks[name] = set().union(*(tasks.get(member, set()) for member in members))
    return {
        name: sum(evaluation.scores[key].num_items for key in keys if key in evaluation.scores)
        for name, keys in tasks.items()
    }


def score_differences(ours: Evaluation, theirs: Evaluation) -> list[tuple[str, Difference]]:
    """SCORE's accuracy and consistency, of each data set under each perturbation."""
    return [
        (f'{dataset} {perturbation} {name}', difference(one, other, score.num_questions))
        for dataset, perturbations in ours.robustness.items()
        for perturbation, score in perturbations.items()
        for name in ('accuracy', 'consistency_rate')
        for one, other in [(getattr(score, name), getattr(theirs.robustness[dataset][perturbation], name))]
    ]


def corrected(differences: Iterable[tuple[str, Difference]]) -> dict[str, Difference]:
    """The differences with their p-values corrected for their number."""
    found = list(differences)
    p_values = holm([one.p_value for _, one in found])
    return {name: replace(one, p_holm=p) for (name, one), p in zip(found, p_values, strict=True)}


def warnings(first: Run, second: Run, common: Mapping[str, set[ItemKey]]) -> Iterable[str]:
    """In what two runs differ besides the model; `common` has the items of each task that are compared."""
    for one, other in ((first, second), (second, first)):
        if lacking := [key for key in one.results if key not in other.results]:
            yield f'{other.folder} has no {", ".join(lacking)}'
    for key, items in common.items():
        counts = [len(run.results[key]) for run in (first, second)]
        if max(counts) > len(items):
            yield f'{key}: {len(items)} items are in both, of {counts[0]} and {counts[1]}'
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


def courses(runs: Sequence[Run], *, metric: str | None = None, allow_missing: bool = False) -> dict[str, Course]:
    """Tasks and composites over the checkpoints of one run, over the items that all have.

    `metric` is followed in place of the accuracy, where a task has it.
    Raises RecordError where checkpoints were asked different tasks, in different words, or stand at the same batch.
    """
    batches = [run.batch for run in runs]
    known = [batch for batch in batches if batch is not None]
    if len(known) < len(batches) or len(set(known)) < len(known):
        raise RecordError(
            f'{runs[0].folder.parent}: holds evaluations that are not of different training batches '
            f'({", ".join(map(str, batches))}); name the runs one by one to compare them'
        )
    tasks = [key for key in runs[0].results if all(key in run.results for run in runs)]
    if not tasks:
        raise RecordError(f'{runs[0].folder.parent}: the evaluations have no task in common')
    for run in runs[1:]:
        check_prompts(runs[0], run, tasks)
    items = {key: common_items([run.results[key] for run in runs], scored=allow_missing) for key in tasks}
    evaluations = [rescored(run, runs[0], items, allow_missing=allow_missing) for run in runs]
    names = {key: name for key in tasks if (name := metric_of(evaluations[0], key, metric)) is not None}
    check_metric(evaluations[0], names, metric)
    scores: dict[str, list[Measure]] = {
        key: [evaluation.scores[key].metrics[name] for evaluation in evaluations] for key, name in names.items()
    }
    for evaluation in evaluations if metric is None else ():
        if evaluation.composites is not None:
            for name, measure in evaluation.composites.by_name.items():
                scores.setdefault(name, []).append(measure)
    return {name: course(known, measures) for name, measures in scores.items()}
