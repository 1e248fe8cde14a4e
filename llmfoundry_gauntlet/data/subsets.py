"""Fewer items of a task: always the same, a smaller number's among a larger one's, every category in proportion."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from llmfoundry_gauntlet.types import Example


def subset(examples: Sequence[Example], num_items: int | None) -> list[Example]:
    """At most so many examples, in their own order; all where there are no more.

    Rows of one cluster, such as the questions of a passage, are taken together, so that there may be a few less, and as
    many as the first cluster has where that alone is more.
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
    """The places of the examples by cluster, in the order in which clusters are taken.

    Within a category that is the order of the clusters' names, which are digests of what the rows say. Categories take
    turns by how much of each has been taken. Neither depends on the order of the rows.
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
    """The name of an example's cluster; of a row that belongs to none, a digest of its place."""
    return example.cluster or hashlib.sha256(repr((example.file, example.row)).encode()).hexdigest()
