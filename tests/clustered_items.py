"""Items with scores and clusters, and standard errors by the usual formula, for tests of statistics."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from llmfoundry_gauntlet.metrics.metrics import accuracy, task_score
from llmfoundry_gauntlet.types import ItemKey, ItemResult, Measure

METRIC = 'Accuracy'


def item(row: int, credit: float | None, cluster: str = '', *, task: str = 'a/0-shot', **changes) -> ItemResult:
    found = ItemResult(
        key=ItemKey(task, row),
        category=None,
        gold=0,
        predicted=None,
        score=credit,
        logprobs=None,
        num_tokens=None,
        reason=None if credit is not None else 'nan',
        prompt_sha256='',
        truncated=False,
        cluster=cluster,
    )
    return replace(found, **changes)


def named(letter: str) -> str:
    """Return a cluster's name, 16 hexadecimal digits."""
    return letter * 16


def usual_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def score_of(results: Sequence[ItemResult], task: str = 'a/0-shot') -> Measure:
    return task_score(task, [accuracy(METRIC)], results).accuracy


def credits_of(task: str, credits: Sequence[float]) -> Measure:
    return score_of([item(row, credit, task=task) for row, credit in enumerate(credits)], task)
