"""Compare runs over the items that they were asked with the same prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmfoundry_gauntlet.config.settings import CHAT
from llmfoundry_gauntlet.errors import ConfigError, RecordError, listed, plural
from llmfoundry_gauntlet.evaluation.run import WITHOUT_EFFECT, Evaluation, summarize
from llmfoundry_gauntlet.metrics.comparison import (
    Difference,
    Trend,
    difference,
    holm_in_families,
    levels_in_families,
    trend,
)
from llmfoundry_gauntlet.metrics.consistency import NO_ITEMS, PerturbationScore
from llmfoundry_gauntlet.metrics.metrics import GOLD_BITS_PER_BYTE, RENAMED
from llmfoundry_gauntlet.metrics.prompt_effects import PromptEffects, effects_of_difference, over_prompts
from llmfoundry_gauntlet.results.report.scores import tasks_of_composites
from llmfoundry_gauntlet.results.runs import Run
from llmfoundry_gauntlet.scoring.mathematics import Comparer
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.types import ItemKey, ItemResult, Measure

NO_SHARED_ITEM = 'the runs have no item in common'
NO_COMMON_ITEM = 'no item has the same prompt in all runs'
NOT_IN_PROMPTS = (*WITHOUT_EFFECT, 'generation_kwargs', 'cluster_key', 'source')  # keys of a task
LIMITS = {'max_seq_len', 'tokenizer', 'truncation'}  # settings that determine how a long prompt is shortened
TOKENIZER = 'tokenizer'  # not compared if a run has not recorded it
MAX_SHOWN = 40  # characters of a setting
SCORED = ('accuracy', 'consistency_rate')  # of SCORE
BY_TOKEN = (None, 'TokenNormalizedMatch')  # metrics of choices that depend on the tokenizer, the first the accuracy
NOT_BY_TOKEN = (GOLD_BITS_PER_BYTE, 'CharacterNormalizedMatch')


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonItems:
    """The items of a task with the same prompt in all runs.

    `num_items` counts the items of each run, `num_shared` those that all runs have. If some have different prompts,
    `settings` are the differing settings, such as 'max_seq_len 1024 / 2048'.
    """

    keys: frozenset[ItemKey]
    num_items: tuple[int, ...]
    num_shared: int
    settings: tuple[str, ...]

    @property
    def causes(self) -> str:
        """Return the differing settings in one text."""
        return ', '.join(self.settings) or 'no recorded setting differs'

    @property
    def reason(self) -> str | None:
        """Return the reason if there is no such item, else `None`."""
        if self.keys:
            return None
        return f'{NO_COMMON_ITEM} ({self.causes})' if self.num_shared else NO_SHARED_ITEM


def common_items(runs: Sequence[Run], task: str, *, scored: bool) -> CommonItems:
    """Return the items of a task that all runs have in common; with `scored`, only those scored in all."""
    results_of_runs = []
    for run in runs:
        results = [result for result in run.results[task] if not scored or result.score is not None]
        results_of_runs.append({result.key: result for result in results})
    shared = [key for key in results_of_runs[0] if all(key in results for results in results_of_runs)]

    differing = differing_settings([prompt_settings(run, task) for run in runs])
    same_limits = not LIMITS & differing.keys()
    keys = set()
    for key in shared:
        results_of_item = [results[key] for results in results_of_runs]
        if same_prompt(results_of_item, same_limits=same_limits):
            keys.add(key)
    return CommonItems(
        keys=frozenset(keys),
        num_items=tuple(len(run.results[task]) for run in runs),
        num_shared=len(shared),
        settings=tuple(differing.values()) if len(keys) < len(shared) else (),
    )


def same_prompt(results: Sequence[ItemResult], *, same_limits: bool) -> bool:
    """Return whether an item had the same prompt in all runs.

    The digest is of the prompt with the remaining shots, before its beginning is dropped token by token. So shortened
    prompts are known to be the same only if the settings that limit the length are.
    """
    if len({(result.prompt_sha256, result.prompt_shortened) for result in results}) > 1:
        return False
    return same_limits or not results[0].prompt_shortened


def prompt_settings(run: Run, task: str) -> dict[str, Any]:
    """Return the settings that determine the prompts of a task."""
    settings, spec, config = run.data.settings, run.tasks[task], run.record['config']
    limits = [limit for limit in (settings.max_seq_len, spec.max_seq_len) if limit is not None]
    return {
        **{name: value for name, value in spec.keys.items() if name not in NOT_IN_PROMPTS},
        'semantics': settings.semantics,
        'fewshot': settings.fewshot,
        'fewshot_version': config.get('fewshot_version'),
        'data_sha256': run.data.digests[task][:8],
        'max_seq_len': min(limits, default=None),
        TOKENIZER: config.get(TOKENIZER),
        'truncation': spec.truncation,
        'apply_chat_template': settings.apply_chat_template,
        **{name: getattr(settings, name) for name in CHAT},
    }


def differing_settings(settings: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the settings that differ among the runs by name, such as 'max_seq_len 1024 / 2048'."""
    differing = {}
    for name in dict.fromkeys(name for settings_of_run in settings for name in settings_of_run):
        values = [settings_of_run.get(name) for settings_of_run in settings]
        texts = dict.fromkeys(map(shown, values))
        if len(texts) > 1 and not (name == TOKENIZER and None in values):
            differing[name] = f'{name} {" / ".join(texts)}'
    return differing


def shown(value: Any) -> str:
    """Return a setting in one line; texts with white space at their ends or line breaks in quotes."""
    if value is None:
        return 'none'
    is_plain = isinstance(value, str) and value and value == value.strip() and value.isprintable()
    text = value if is_plain else repr(value)
    return text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences of a run from the first: 'tasks', 'composites' and 'score', corrected for the number of all.

    All are over the items of `common`, by task. `averages` are the composites that are averages. `warnings` count the
    other items and list differences besides the model.
    """

    first: str
    second: str
    groups: Mapping[str, Mapping[str, Difference]]
    averages: tuple[str, ...]
    common: Mapping[str, CommonItems]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trends:
    """The trend of each score over the checkpoints of a run. `warnings` say which items are left out and why."""

    batches: Sequence[int]
    trends: Mapping[str, Trend]
    composites: frozenset[str]
    warnings: tuple[str, ...]


def compare_runs(first: Run, second: Run, *, metric: str | None = None, allow_missing: bool = False) -> Comparison:
    """Return the differences of the second run from the first over the items that both were asked with the same prompt.

    `metric` is compared in place of the accuracy for tasks that have it. p-values are corrected for this pair of runs;
    `corrected` does so for several. Raise RecordError if the runs have no task, or no item of any task, in common.
    """
    who = f'{first.folder} and {second.folder} have'
    evaluations, common, (of_first, of_second) = measured(
        [first, second], who, metric=metric, allow_missing=allow_missing
    )
    asked = evaluations[0]
    counts = item_counts(asked, common)
    groups: dict[str, dict[str, Difference]] = {}
    for kind, measures_of_first in of_first.items():
        measures_of_second = of_second[kind]
        names = [name for name in measures_of_first if name in measures_of_second]
        groups[kind] = {
            name: difference(measures_of_first[name], measures_of_second[name], counts[kind][name]) for name in names
        }
    groups['score'] = with_errors_over_prompts(groups['score'], evaluations)
    comparison = Comparison(
        first=str(first.folder),
        second=str(second.folder),
        groups=groups,
        averages=() if asked.composites is None else tuple(asked.composites.averages),
        common=common,
        warnings=(
            *warnings(first, second, common),
            *different_tokens(first, second, common, metric),
            *compared_losses(asked.tasks, metric_names(asked.tasks, common, metric)),
        ),
    )
    return corrected([comparison])[0]


def compared_losses(tasks: Mapping[str, Task], names: Mapping[str, str]) -> Iterator[str]:
    """Yield a line that names the tasks whose metric is a loss by its task's own word, as of lm-eval."""
    losses = []
    for key, name in names.items():
        if any(metric.is_loss and metric.name == name for metric in tasks[key].metrics()):
            losses.append(f'{key} ({name})')
    if losses:
        yield f'the lower the better, so that a negative difference is an improvement: {listed(losses)}'


def with_errors_over_prompts(
    differences: Mapping[str, Difference], evaluations: Sequence[Evaluation]
) -> dict[str, Difference]:
    """Return the differences between two evaluations with their errors over prompts, where SCORE varies these."""
    effects_by_name: dict[str, list[PromptEffects]] = {}
    for evaluation in evaluations:
        for name, of_perturbation in perturbations(evaluation):
            if of_perturbation.over_prompts is not None:
                for metric, effects in of_perturbation.over_prompts.effects.items():
                    effects_by_name.setdefault(f'{name} {metric}', []).append(effects)

    with_errors = dict(differences)
    for name, compared in differences.items():
        effects_of_runs = effects_by_name.get(name, [])
        if len(effects_of_runs) == len(evaluations) and compared.difference.value is not None:
            effects = effects_of_difference(*effects_of_runs)
            with_errors[name] = replace(compared, over_prompts=over_prompts(compared.difference, effects))
    return with_errors


def measured(
    runs: Sequence[Run], who: str, *, metric: str | None, allow_missing: bool
) -> tuple[list[Evaluation], dict[str, CommonItems], list[dict[str, dict[str, Measure]]]]:
    """Return the runs over the items in common, these items by task, and the measures of each run over them."""
    common = common_by_task(runs, who, scored=allow_missing)
    with Comparer() as comparer:
        evaluations = [rescored(run, runs, common, comparer, allow_missing=allow_missing) for run in runs]
    names = metric_names(evaluations[0].tasks, common, metric)
    of_runs = [measures(evaluation, names, common, metric=metric) for evaluation in evaluations]
    return evaluations, common, of_runs


def common_by_task(runs: Sequence[Run], who: str, *, scored: bool) -> dict[str, CommonItems]:
    """Return the items in common of each task that all runs have.

    Raise RecordError, with the reason for each task, if there is none; `who` begins its last line.
    """
    tasks = [key for key in runs[0].results if all(key in run.results for run in runs)]
    if not tasks:
        parts = [f'{run.folder} has {", ".join(run.results) or "none"}' for run in runs]
        raise RecordError(f'{who} no task in common: {"; ".join(parts)}')
    common = {key: common_items(runs, key, scored=scored) for key in tasks}
    if not any(items.keys for items in common.values()):
        reasons = [f'{key}: {items.reason}' for key, items in common.items()]
        raise RecordError([*reasons, f'{who} no item in common; evaluate with the same tasks, shots and data'])
    return common


def rescored(
    run: Run, runs: Sequence[Run], common: Mapping[str, CommonItems], comparer: Comparer, *, allow_missing: bool
) -> Evaluation:
    """Return one of the runs over the common items only, with the metrics and the gauntlet of the first.

    A task without common items counts as one that cannot be run, and a composite over it is absent.
    """
    asked = runs[0]
    results = {
        key: [result for result in run.results[key] if result.key in items.keys]
        for key, items in common.items()
        if items.keys or asked.tasks[key].asks_variants
    }
    absent = {key: items.reason for key, items in common.items() if items.reason is not None}
    data = replace(asked.data, unsupported={**asked.data.unsupported, **absent})
    evaluation = summarize(data, asked.tasks, results, {}, comparer=comparer, allow_missing=allow_missing)
    # llm-foundry's averages are over the benchmarks that ran; here, over those that ran in any of the runs.
    ran = {key for other in runs for key in other.results}
    compared = {key for key, items in common.items() if items.keys}
    return without_partial_averages(evaluation, ran - compared)


def without_partial_averages(evaluation: Evaluation, left_out: set[str]) -> Evaluation:
    """Return the evaluation without averages over missing benchmarks, which llm-foundry's averages ignore."""
    composites, gauntlet = evaluation.composites, evaluation.data.suite.gauntlet
    if composites is None or gauntlet is None:
        return evaluation
    averages = dict(composites.averages)
    for name, tasks in tasks_of_composites(gauntlet).items():
        lacking = [key for key in tasks if key in left_out]
        if lacking and name in averages and averages[name].value is not None:
            averages[name] = Measure(value=None, reason=f'benchmarks without a common item: {", ".join(lacking)}')
    return replace(evaluation, composites=replace(composites, averages=averages))


def measures(
    evaluation: Evaluation, names: Mapping[str, str], common: Mapping[str, CommonItems], *, metric: str | None
) -> dict[str, dict[str, Measure]]:
    """Return a metric of each task by group, the given one or the accuracy, with the composites that there are of it.

    The accuracy is beside SCORE's accuracy and consistency.
    """
    tasks: dict[str, Measure] = {}
    for key, name in names.items():
        reason = common[key].reason
        if reason is None:
            tasks[key] = evaluation.scores[key].metrics[name]
        else:
            tasks[key] = Measure(value=None, reason=reason)
    if metric is not None:
        composites = evaluation.composites
        gold_bits: dict[str, Measure] = {}
        if metric == GOLD_BITS_PER_BYTE and composites is not None:
            gold_bits = dict(composites.gold_bits)
        return {'tasks': tasks, 'composites': gold_bits, 'score': {}}

    by_name = {} if evaluation.composites is None else dict(evaluation.composites.by_name)
    score: dict[str, Measure] = {}
    for name, of_perturbation in perturbations(evaluation):
        for metric in SCORED:
            measure: Measure = getattr(of_perturbation, metric)
            if measure.reason == NO_ITEMS:
                measure = replace(measure, reason=NO_COMMON_ITEM)
            score[f'{name} {metric}'] = measure
    return {'tasks': tasks, 'composites': by_name, 'score': score}


def perturbations(evaluation: Evaluation) -> Iterator[tuple[str, PerturbationScore]]:
    """Yield SCORE's datasets under each perturbation, by name."""
    for dataset, scores in evaluation.robustness.items():
        yield from ((f'{dataset} {perturbation}', score) for perturbation, score in scores.items())


def item_counts(evaluation: Evaluation, common: Mapping[str, CommonItems]) -> dict[str, dict[str, int]]:
    """Return the number of items, or of SCORE questions, of each measure."""
    composites = {}
    gauntlet = evaluation.data.suite.gauntlet
    if gauntlet is not None:
        for name, keys in tasks_of_composites(gauntlet).items():
            composites[name] = sum(evaluation.scores[key].num_items for key in keys if key in evaluation.scores)

    score = {}
    for name, of_perturbation in perturbations(evaluation):
        for metric in SCORED:
            score[f'{name} {metric}'] = of_perturbation.num_questions

    tasks = {key: len(items.keys) for key, items in common.items()}
    return {'tasks': tasks, 'composites': composites, 'score': score}


def metric_names(tasks: Mapping[str, Task], keys: Iterable[str], metric: str | None) -> dict[str, str]:
    """Return the metric to compare of each task: the given one for tasks that have it, else the accuracy.

    Raise ConfigError if no task has the given metric.
    """
    names_by_task = {key: [measured.name for measured in tasks[key].metrics()] for key in keys}
    if metric is None:
        return {key: names[0] for key, names in names_by_task.items() if names}

    metric = RENAMED.get(metric, metric)
    having = [key for key, names in names_by_task.items() if metric in names]
    if not having:
        allowed = sorted({name for names in names_by_task.values() for name in names})
        raise ConfigError(f'--metric: no task has {metric!r}; allowed: {", ".join(allowed)}')
    return dict.fromkeys(having, metric)


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return comparisons shown together with their p-values corrected for the number of all of them.

    Tasks, composites and SCORE are a family each.
    """
    kinds = dict.fromkeys(kind for comparison in comparisons for kind in comparison.groups)
    p_values: dict[str, list[float | None]] = {}
    for kind in kinds:
        p_values[kind] = [of_name.p_value for comparison in comparisons for of_name in comparison.groups[kind].values()]
    levels = levels_in_families(p_values)
    corrected_values = {kind: iter(values) for kind, values in holm_in_families(p_values).items()}

    with_corrected = []
    for comparison in comparisons:
        groups = {}
        for kind, group in comparison.groups.items():
            groups[kind] = {
                name: replace(of_name, p_holm=next(corrected_values[kind]), level=levels[kind])
                for name, of_name in group.items()
            }
        with_corrected.append(replace(comparison, groups=groups))
    return with_corrected


def different_prompts(common: Mapping[str, CommonItems]) -> Iterable[str]:
    """Yield the number of items with different prompts by task, one line for each set of differing settings."""
    tasks: dict[str, list[str]] = {}
    for key, items in common.items():
        num_different = items.num_shared - len(items.keys)
        if num_different > 0:
            tasks.setdefault(items.causes, []).append(f'{key} {num_different} of {items.num_shared}')
    for causes, parts in tasks.items():
        yield f'items with different prompts are left out ({causes}): {", ".join(parts)}'


def different_items(common: Mapping[str, CommonItems]) -> Iterable[str]:
    """Yield the tasks that have items in one run only, one line for each set of numbers of items."""
    tasks: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for key, items in common.items():
        if max(items.num_items) > items.num_shared:
            tasks.setdefault((items.num_shared, items.num_items), []).append(key)
    for (num_shared, (of_first, of_second)), keys in tasks.items():
        shared = plural(num_shared, 'item')
        yield f'of {of_first:,} and {of_second:,} items both runs have {shared}: {", ".join(keys)}'


def different_tokens(first: Run, second: Run, common: Mapping[str, CommonItems], metric: str | None) -> Iterable[str]:
    """Yield a line if choices have other numbers of tokens in both runs and the metric is by the mean over tokens."""
    if metric not in BY_TOKEN:
        return
    tasks = []
    for key, items in common.items():
        of_first, of_second = [tokens_of_choices(run.results[key], items) for run in (first, second)]
        if any(counts != of_second.get(item, counts) for item, counts in of_first.items()):
            tasks.append(key)
    if tasks:
        names = [run.record['config'].get(TOKENIZER) for run in (first, second)]
        named = '' if None in names else f' ({" and ".join(names)})'
        yield (
            f'the tokenizers differ{named}: the accuracy of choices is by their mean log-probability per token, which '
            f'depends on the tokenizer; compare also --metric {" and --metric ".join(NOT_BY_TOKEN)}, which do not: '
            f'{listed(tasks)}'
        )


def tokens_of_choices(results: Sequence[ItemResult], items: CommonItems) -> dict[ItemKey, tuple[int, ...]]:
    """Return the numbers of tokens of the choices of those of the items that have several and of which it is known."""
    return {
        result.key: result.num_tokens
        for result in results
        if result.key in items.keys and result.num_tokens is not None and len(result.num_tokens) > 1
    }


def warnings(first: Run, second: Run, common: Mapping[str, CommonItems]) -> Iterable[str]:
    """Yield the number of items left out, and the differences between two runs besides the model."""
    yield from different_prompts(common)
    for run, other in ((first, second), (second, first)):
        lacking = [key for key in run.results if key not in other.results]
        if lacking:
            yield f'{other.folder} has no {", ".join(lacking)}'
    yield from different_items(common)
    for key in common:
        if first.data.digests[key] != second.data.digests[key]:
            yield f'{key}: the data files differ, in rows or their right answers'
    versions = [(run.record['composites'] or {}).get('version') for run in (first, second)]
    if None not in versions and versions[0] != versions[1]:
        yield (
            f'the gauntlets differ (version {versions[0]} and {versions[1]}): in tasks, shots, rows, weights or '
            f'settings; composites are made by that of {first.folder}, over the items that both have'
        )
    weights = ['of one checkpoint' if run.average is None else f'the mean of {run.average}' for run in (first, second)]
    if weights[0] != weights[1]:
        yield f'the weights of {first.folder} are {weights[0]}, those of {second.folder} {weights[1]}'
    for name in ('semantics', 'fewshot', 'truncation', 'apply_chat_template', *CHAT, 'reasoning_markers'):
        values = [getattr(run.data.settings, name) for run in (first, second)]
        if values[0] != values[1]:
            yield f'{name} is {values[0]} and {values[1]}'


def trends(runs: Sequence[Run], *, metric: str | None = None, allow_missing: bool = False) -> Trends:
    """Return the trends of tasks and composites over the items that all checkpoints were asked with the same prompt.

    `metric` is used in place of the accuracy for tasks that have it. Raise RecordError if checkpoints have no task or
    item in common, or are of the same batch.
    """
    folder = runs[0].folder.parent
    batches = [run.batch for run in runs]
    known = [batch for batch in batches if batch is not None]
    if len(set(known)) < len(batches):
        raise RecordError(
            f'{folder}: holds evaluations that are not of different training batches '
            f'({", ".join(map(str, batches))}); name the runs one by one to compare them'
        )
    who = f'{folder}: the evaluations have'
    _, common, measures_of_runs = measured(runs, who, metric=metric, allow_missing=allow_missing)
    scores: dict[str, list[Measure]] = {}
    for of_run in measures_of_runs:
        for name, measure in {**of_run['tasks'], **of_run['composites']}.items():
            scores.setdefault(name, []).append(measure)
    return Trends(
        batches=known,
        trends={name: trend(known, of_score) for name, of_score in scores.items()},
        composites=frozenset(measures_of_runs[0]['composites']),
        warnings=tuple(different_prompts(common)),
    )
