"""Items with scores and clusters, and standard errors by the usual formula, for tests of statistics."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from llmfoundry_gauntlet.metrics.metrics import accuracy, task_score
from llmfoundry_gauntlet.types import ItemKey, ItemResult, Measure

METRIC = 'Accuracy'


def item(row: int, credit: float | None, cluster: str = '', *, task: str = 'a/0-shot', **changes: Any) -> ItemResult:
    """Return an item's result of which all fields are empty that are not given; `sample` is part of its key."""
    values = {
        'key': ItemKey(task, row, sample=changes.pop('sample', 0)),
        **dict.fromkeys(('category', 'predicted', 'logprobs', 'num_tokens')),
        'gold': 0,
        'reason': 'nan' if credit is None else None,
        'prompt_sha256': '',
        'prompt_shortened': False,
    }
    return ItemResult(**{**values, **changes}, score=credit, cluster=cluster)


def named(letter: str) -> str:
    """Return a cluster's name, 16 hexadecimal digits."""
    return letter * 16


def usual_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def score_of(results: Sequence[ItemResult], task: str = 'a/0-shot') -> Measure:
    return task_score(task, [accuracy(METRIC)], results).accuracy


def credits_of(task: str, credits: Sequence[float]) -> Measure:
    return score_of([item(row, credit, task=task) for row, credit in enumerate(credits)], task)
