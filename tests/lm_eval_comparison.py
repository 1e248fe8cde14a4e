"""The prompts, answers and metrics that a model has in lm-eval's tasks, compared one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval
import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.types import ItemResult, Prompt, TaskScore

MAX_NATS = 1e-4
MAX_RELATIVE = 1e-6  # of sums of log-probabilities
# Metrics that are made of log-probabilities. All others are equal to the last bit.
EXPONENTIALS = ('perplexity', 'word_perplexity', 'byte_perplexity')
SUMS = ('bits_per_byte',)
PROBABILITIES = ('brier_score', 'no_answer_probability')
WITH_PROBABILITY_AS_ACCURACY = 'truthfulqa_mc2'


@dataclass(frozen=True)
class Item:
    """A document's requests, the model's answers to them, and the metrics of each filter."""

    prompts: list[Any]
    answers: list[Any]  # a log-probability and whether it is greedy, a sum of log-probabilities, or texts of repeats
    metrics_by_filter: dict[str, dict[str, Any]]
    answers_by_filter: dict[str, list[Any]]


@dataclass(frozen=True)
class Outcome:
    """The items and metrics of tasks, and the metrics of groups."""

    items: dict[tuple[str, int], Item]
    metrics: dict[tuple[str, str], Any]  # by task or group, and `metric,filter`


@dataclass
class Figures:
    """The figures of outcomes that were found equal."""

    num_documents: int = 0
    num_requests: int = 0
    num_texts: int = 0
    max_nats: float = 0.0


def evaluated(model: Any, task: str, definitions: Path, **settings: Any) -> Outcome:
    """Return the outcome of lm-eval's own evaluation with a model of its interface."""
    manager = TaskManager(include_path=str(definitions), include_defaults=False)
    with patch('lm_eval.evaluator.add_env_info'):  # which lists all packages, for more than a second
        results = lm_eval.simple_evaluate(
            model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True, **settings
        )
    return Outcome(items=dict(items_of(results['samples'])), metrics=metrics_of(results))


def items_of(samples_by_task: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[tuple[str, int], Item]]:
    """Yield the items of lm-eval's samples, of which each filter has its own."""
    for task, samples in samples_by_task.items():
        samples_by_document: dict[int, list[dict[str, Any]]] = {}
        for sample in samples:
            samples_by_document.setdefault(sample['doc_id'], []).append(sample)
        for document, of_filters in samples_by_document.items():
            metrics_by_filter = {
                sample['filter']: {metric: sample[metric] for metric in sample['metrics']} for sample in of_filters
            }
            answers_by_filter = {sample['filter']: sample['filtered_resps'] for sample in of_filters}
            first = of_filters[0]
            yield (task, document), Item(first['arguments'], first['resps'], metrics_by_filter, answers_by_filter)


def metrics_of(results: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the values of tasks and groups; a group's are among the tasks' too."""
    values = {}
    for source in (results['results'], results.get('groups', {})):
        for task, metrics in source.items():
            for metric, value in metrics.items():
                if ',' in metric:
                    values[task, metric] = value
    return values


def compare(expected: Outcome, outcome: Outcome, max_nats: float = MAX_NATS) -> Figures:
    """Check that two outcomes have the same prompts, answers, predictions and metrics; return how far they are off."""
    figures = Figures()
    assert outcome.items.keys() == expected.items.keys()
    for key, expected_item in expected.items.items():
        item = outcome.items[key]
        assert item.prompts == expected_item.prompts, key
        assert item.metrics_by_filter.keys() == expected_item.metrics_by_filter.keys(), key
        figures.num_documents += 1
        figures.num_requests += len(item.prompts)
        compare_answers(key, expected_item.answers, item.answers, max_nats, figures)
        assert most_probable(item.answers) == most_probable(expected_item.answers), key
        for name, answers in expected_item.answers_by_filter.items():
            compare_answers((*key, name), answers, item.answers_by_filter[name], max_nats, Figures())
        for name, metrics in expected_item.metrics_by_filter.items():
            assert item.metrics_by_filter[name].keys() == metrics.keys(), key
            for metric, value in metrics.items():
                compare_metric((*key, name), metric, value, item.metrics_by_filter[name][metric])

    assert outcome.metrics.keys() == expected.metrics.keys()
    for (task, metric), value in expected.metrics.items():
        compare_metric((task,), metric.partition(',')[0], value, outcome.metrics[task, metric])
    return figures


def compare_answers(where: object, expected: Any, answer: Any, max_nats: float, figures: Figures) -> None:
    """Check that answers, of whatever nesting, are equal."""
    if isinstance(expected, list | tuple):
        assert len(answer) == len(expected), where
        for expected_part, part in zip(expected, answer, strict=True):
            compare_answers(where, expected_part, part, max_nats, figures)
    elif isinstance(expected, float):
        nats = abs(answer - expected)
        assert nats <= max(max_nats, MAX_RELATIVE * abs(expected)), (where, expected, answer)
        figures.max_nats = max(figures.max_nats, nats)
    else:  # a text, or whether a continuation is greedy
        assert type(answer) is type(expected), where
        assert answer == expected, where
        figures.num_texts += isinstance(expected, str)


def most_probable(answers: list[Any]) -> int | None:
    """Return the first of the most probable continuations."""
    if not isinstance(answers[0][0], tuple | list):
        return None
    logprobs = [logprob for ((logprob, _is_greedy),) in answers]
    return logprobs.index(max(logprobs))


def compare_with_evaluation(expected: Outcome, evaluation: Evaluation, max_nats: float = MAX_NATS) -> Figures:
    """Check that an evaluation of ours has the same prompts, answers, predictions and metrics as lm-eval's own."""
    figures = Figures()
    ((key, score),) = evaluation.scores.items()
    examples = evaluation.data.examples[key]
    results = evaluation.results[key]
    assert [(result.key.file, result.key.row) for result in results] == [(one.file, one.row) for one in examples]
    assert len(results) == len(expected.items)
    (own_name,) = {name for name, _ in expected.items} if len(score.categories) == 0 else {None}
    for example, result in zip(examples, results, strict=True):
        where = (result.key.file or own_name, result.key.row)
        item = expected.items[where]
        assert result.status == 'scored', (where, result.reason)
        figures.num_documents += 1
        figures.num_requests += len(item.prompts)
        prompt = evaluation.tasks[key].ask(example.content, True)
        check_prompt(where, item.prompts, prompt)
        compare_with_result(where, item, result, max_nats, figures)

    compare_scores(expected, score, own_name)
    return figures


def check_prompt(where: object, arguments: list[Any], prompt: Prompt) -> None:
    """Check that the texts of a document are those of lm-eval's requests, whose last argument is a continuation."""
    contexts = [request[0] for request in arguments] if len(arguments[0]) > 1 else ['']
    same_contexts = contexts[:1] if len(set(contexts)) == 1 else contexts
    assert list(prompt.contexts) == same_contexts, where
    if isinstance(arguments[0][-1], str):
        assert list(prompt.continuations) == [request[-1] for request in arguments], where


def compare_with_result(
    where: tuple[str, int], item: Item, result: ItemResult, max_nats: float, figures: Figures
) -> None:
    """Check the answers and metrics of a document."""
    first_answers = [answers[0] for answers in item.answers]
    if isinstance(first_answers[0], str):
        assert [result.answer] == first_answers, where
        figures.num_texts += 1
    elif isinstance(first_answers[0], float):
        assert result.logprobs is not None
        compare_answers(where, first_answers[0], math.fsum(result.logprobs), max_nats, figures)
    else:
        logprobs = [logprob for logprob, _is_greedy in first_answers]
        compare_answers(where, logprobs, result.logprobs, max_nats, figures)
        if result.predicted is not None:
            choices = logprobs[: len(result.num_characters or ())] or logprobs
            assert result.predicted == choices.index(max(choices)), where

    named = values_by_name(item.metrics_by_filter)
    assert named.keys() == result.metrics.keys() | (result.facts.keys() & named.keys()), where
    for name, value in named.items():
        own_value = result.metrics[name] if name in result.metrics else json.loads(str(result.facts[name]))
        compare_metric(where, name.partition(',')[0], value, own_value)


def values_by_name(metrics_by_filter: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics of a document with the names of ours, which have no filter where there is none."""
    values = {}
    for filter_name, metrics in metrics_by_filter.items():
        for metric, value in metrics.items():
            values[f'{metric},{filter_name}'.removesuffix(',none')] = value
    return values


def compare_scores(expected: Outcome, score: TaskScore, own_name: str | None) -> None:
    """Check the metrics of a task, or of a group, its tasks and the groups within it."""
    num_compared = 0
    for (name, metric), value in expected.metrics.items():
        if '_stderr' in metric:
            continue
        own_metric = metric.removesuffix(',none')
        if name in score.categories:
            measure = score.categories[name].metrics[own_metric]
        elif name == own_name or (own_name is None and name == score.task.partition('/')[0]):
            measure = score.metrics[own_metric]
        else:
            measure = score.metrics[f'{name}/{own_metric}']
        assert measure.value is not None, (name, metric, measure.reason)
        compare_metric((name,), metric.partition(',')[0], value, measure.value)
        num_compared += 1
    assert num_compared > 0


def compare_metric(where: tuple[Any, ...], metric: str, expected: Any, value: Any) -> None:
    """Check that a metric of an item, a task or a group is equal."""
    if isinstance(expected, list | tuple | np.ndarray):
        assert len(value) == len(expected), (where, metric)
        for expected_part, part in zip(expected, value, strict=True):
            compare_metric(where, metric, expected_part, part)
    elif isinstance(expected, str):
        assert value == expected, (where, metric)
    elif metric in EXPONENTIALS and expected > 0:
        assert math.log(value) == pytest.approx(math.log(expected), rel=MAX_RELATIVE, abs=0), (where, metric)
    elif metric in EXPONENTIALS + SUMS:
        assert value == pytest.approx(expected, rel=MAX_RELATIVE, abs=MAX_NATS), (where, metric)
    elif metric in PROBABILITIES or where[0] == WITH_PROBABILITY_AS_ACCURACY:
        assert value == pytest.approx(expected, abs=MAX_NATS), (where, metric)
    else:
        assert value == expected or (math.isnan(value) and math.isnan(expected)), (where, metric, expected, value)
