"""Choose a subset of a task's items: fixed, nested, and stratified by category."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from llmfoundry_gauntlet.types import Example


def subset(examples: Sequence[Example], num_items: int | None) -> list[Example]:
    """Return at most `num_items` examples in their original order; all if `num_items` is None.

    Rows of one cluster, such as the questions on a passage, are taken together, so there may be slightly fewer; at
    least one cluster is taken, however large.
    """
    if num_items is None or num_items >= len(examples):
        return list(examples)
    taken: list[int] = []
    for group in in_turns(examples):
        if taken and len(taken) + len(group) > num_items:
            break
        taken.extend(group)
    return [examples[place] for place in sorted(taken)]


def in_turns(examples: Sequence[Example]) -> list[list[int]]:
    """Return the positions of the examples by cluster, in the order in which clusters are taken.

    Within a category, clusters are ordered by name, a digest of the rows' content. Categories alternate by the share
    of each taken so far. Neither depends on the order of the rows.
    """
    categories: dict[str | None, dict[str, list[int]]] = {}
    for place, example in enumerate(examples):
        clusters = categories.setdefault(example.category, {})
        clusters.setdefault(name_of(example), []).append(place)
    turns = []
    for clusters in categories.values():
        whole = sum(map(len, clusters.values()))
        before = 0
        for name in sorted(clusters):
            turns.append(((before + len(clusters[name]) / 2) / whole, name, clusters[name]))
            before += len(clusters[name])
    return [places for _, _, places in sorted(turns)]


def name_of(example: Example) -> str:
    """Return the name of an example's cluster, or a digest of its file and row if it has none."""
    return example.cluster or hashlib.sha256(repr((example.file, example.row)).encode()).hexdigest()
