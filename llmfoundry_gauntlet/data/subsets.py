"""Fewer items of a task: always the same, a smaller number's among a larger one's, every category in proportion."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from llmfoundry_gauntlet.values import Example


def subset(examples: Sequence[Example], num_items: int | None) -> list[Example]:
    """So many examples, in their own order; all where there are no more.

    Within a category they come in the order of a digest of their name; categories take turns by how much of each has
    been taken.
    """
    if num_items is None or num_items >= len(examples):
        return list(examples)
    by_category: dict[str | None, list[tuple[str, int]]] = {}
    for place, example in enumerate(examples):
        name = hashlib.sha256(repr((example.file, example.row)).encode()).hexdigest()
        by_category.setdefault(example.category, []).append((name, place))
    turns = [
        ((rank + 0.5) / len(members), name, place)
        for members in by_category.values()
        for rank, (name, place) in enumerate(sorted(members))
    ]
    return [examples[place] for place in sorted(place for _, _, place in sorted(turns)[:num_items])]
