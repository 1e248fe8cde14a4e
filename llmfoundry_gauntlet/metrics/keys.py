"""The keys of the metric stream. Task and composite keys are llm-foundry's."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from llmfoundry_gauntlet.config.settings import ACCURACY, COMPOSITES, ERRORS, METRICS, SCORE
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.metrics.consistency import PerturbationScore
from llmfoundry_gauntlet.types import Composites, Measure, TaskScore

SCORE_PREFIX = 'icl/metrics/score'
COMPOSITE_PREFIX = 'icl/metrics/eval_gauntlet'
GOLD_BITS = 'gold_bits_per_byte'  # of a category or an average: a loss, so lower is better
SECONDS = 'gauntlet/seconds'
ITEMS = 'gauntlet/items'
SHORTENED_ITEMS = 'gauntlet/shortened_items'
UNSCORED_ITEMS = 'gauntlet/unscored_items'
ALERTS = 'gauntlet/alerts'
BATCH = 'gauntlet/batch'
STANDARD_ERROR = 'StandardError'
OVER_PROMPTS = 'standard_error_over_prompts'  # of SCORE
MAJORITY = 'MajorityClass'  # a property of the data, which is in records only
MAX_KEY_LENGTH = 250  # MLflow's


def valid_key(key: str) -> str:
    """Return a key that every logger accepts; one that MLflow accepts is unchanged unless it has a colon.

    Characters other than letters, digits, '_', '-', '.', space and '/' become '_', and so does a part between two '/'
    that is empty, '.' or '..' (each of its dots). A key of more than 250 characters is truncated and ends in '_' and 12
    digits of its SHA-256.
    """
    parts = re.sub(r'[^\w\-. /]', '_', key).split('/')
    valid = '/'.join({'': '_', '.': '_', '..': '__'}.get(part, part) for part in parts)
    if len(valid) <= MAX_KEY_LENGTH:
        return valid
    return f'{valid[: MAX_KEY_LENGTH - 13]}_{hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:12]}'


def valid_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the valid form of each key. Raise ConfigError for keys with the same form."""
    forms = {key: valid_key(key) for key in keys}
    first_keys: dict[str, str] = {}
    problems = []
    for key, form in forms.items():
        first_key = first_keys.setdefault(form, key)
        if first_key != key:
            problems.append(
                f'{first_key!r} and {key!r} would both be {form!r} in loggers; give one of them another name'
            )
    if problems:
        raise ConfigError(problems)
    return forms


def check_key_names(categories: Mapping[str, Iterable[str]], composites: Iterable[str]) -> None:
    """Raise ConfigError if two tasks, two categories of a task, or two composites have the same key in loggers."""
    tasks = [f'metrics/{task}' for task in categories]
    parts = [f'metrics/{task}/{category}' for task, of_task in categories.items() for category in of_task]
    valid_keys([*tasks, *parts, *(f'{COMPOSITE_PREFIX}/{name}' for name in composites)])


def with_errors(metrics: Mapping[str, Measure]) -> Iterator[tuple[str, float | None]]:
    """Yield name and value of each metric and of its standard error, named StandardError for the accuracy."""
    for place, (name, measure) in enumerate(metrics.items()):
        yield name, measure.value
        yield error_name(name, is_accuracy=place == 0), measure.standard_error


def error_name(metric: str, *, is_accuracy: bool) -> str:
    """Return the name of a metric's standard error."""
    return STANDARD_ERROR if is_accuracy else f'{metric}{STANDARD_ERROR}'


def task_values(score: TaskScore) -> Iterator[tuple[str, float | None]]:
    """Yield key and value of every metric of a task, those of its categories first."""
    for category, part in score.categories.items():
        for name, value in with_errors(part.metrics):
            yield f'metrics/{score.task}/{category}/{name}', value
    for name, value in with_errors(score.metrics):
        yield f'metrics/{score.task}/{name}', value


def composite_values(composites: Composites) -> Iterator[tuple[str, float | None]]:
    """Yield key and value of every category score and average, then those of their gold answers' bits per byte."""
    named = dict(composites.by_name)
    for name, measure in composites.gold_bits.items():
        named[f'{name}/{GOLD_BITS}'] = measure
    for name, measure in named.items():
        yield f'{COMPOSITE_PREFIX}/{name}', measure.value
        yield f'{COMPOSITE_PREFIX}/{name}/standard_error', measure.standard_error


def score_values(dataset: str, perturbation: str, score: PerturbationScore) -> Iterator[tuple[str, float | None]]:
    """Yield key and value of SCORE's metrics of a dataset under one perturbation."""
    prefix = f'{SCORE_PREFIX}/{dataset}/{perturbation}'
    for name in ('accuracy', 'consistency_rate'):
        measure: Measure = getattr(score, name)
        yield f'{prefix}/{name}', measure.value
        yield f'{prefix}/{name}/standard_error', measure.standard_error
        if score.over_prompts is not None:
            measure = getattr(score.over_prompts, name)
            yield f'{prefix}/{name}/{OVER_PROMPTS}', measure.standard_error
    if score.over_prompts is not None:
        yield f'{prefix}/prompt_deviation', score.over_prompts.prompt_deviation.value
    yield f'{prefix}/consistency_rate_reference', score.consistency_rate_reference.value
    for name in ('unparsed_rate', 'accuracy_worst', 'accuracy_best', 'all_variants_right'):
        yield f'{prefix}/{name}', getattr(score, name).value
    for variant, measure in score.accuracy_by_variant.items():
        yield f'{prefix}/{variant.replace(":", "_")}/accuracy', measure.value


def metric_stream(
    scores: Mapping[str, TaskScore],
    composites: Composites | None,
    robustness: Mapping[str, Mapping[str, PerturbationScore]],
    seconds: Mapping[str, float],
    groups: Collection[str] | None = None,
) -> dict[str, float]:
    """Return the values of these groups (settings.LOGGED; None: all values, for records) and all times and counts.

    Every logger accepts the keys. `robustness` is by dataset; `seconds` is by task, their sum is the total. Raise
    ConfigError for duplicate keys.
    """
    values = [
        (task_group(key, next(iter(score.metrics))), key, value)
        for score in scores.values()
        for key, value in task_values(score)
    ]
    if composites is not None:
        values.extend((COMPOSITES, key, value) for key, value in composite_values(composites))
    for dataset, perturbations in robustness.items():
        for perturbation, score in perturbations.items():
            values.extend((SCORE, key, value) for key, value in score_values(dataset, perturbation, score))
    given = {
        key: value
        for group, key, value in values
        if value is not None and math.isfinite(value) and (groups is None or is_logged(key, group, groups))
    }
    metrics = {valid: given[key] for key, valid in valid_keys(given).items()}
    metrics[SECONDS] = sum(seconds.values())
    metrics.update({f'{SECONDS}/{task}': value for task, value in seconds.items()})
    metrics[ITEMS] = sum(score.num_items for score in scores.values())
    metrics[SHORTENED_ITEMS] = sum(score.num_shortened for score in scores.values())
    metrics[UNSCORED_ITEMS] = sum(score.num_unscored for score in scores.values())
    return metrics


def task_group(key: str, accuracy: str) -> str:
    """Return the group of a metric or standard error of a task by its key or name; '' for one in records only."""
    metric = key.rpartition('/')[2].removesuffix(STANDARD_ERROR)
    if metric in ('', accuracy):
        return ACCURACY
    return '' if metric == MAJORITY else METRICS


def is_logged(key: str, group: str, groups: Collection[str]) -> bool:
    """Return whether loggers get the value of a key of this group."""
    is_error = key.endswith((STANDARD_ERROR, '/standard_error', f'/{OVER_PROMPTS}'))
    return group in groups and (ERRORS in groups or not is_error)
