"""Which examples are shown as shots before which item."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from llmfoundry_gauntlet.values import Example


def fewshot_indices(num_examples: int, num_shots: int, *, seed: int) -> Iterator[tuple[int, ...]]:
    """For each example in order, the indices of its shots, never its own; fewer where there are too few others.

    The draws and their order, a set's iteration order included, follow llm-foundry 0.22
    (`eval/datasets/utils.py:get_fewshot_sample_idxs`): one generator runs through all examples.
    """
    rng = random.Random(seed)
    num_shots = min(num_shots, num_examples - 1)
    if num_shots == 0:
        yield from ((),) * num_examples
        return
    for index in range(num_examples):
        chosen = set(rng.sample(range(num_examples), num_shots))
        if index in chosen:
            chosen.remove(index)
            replacement = rng.choice(range(num_examples))
            while replacement in chosen or replacement == index:
                replacement = rng.choice(range(num_examples))
            chosen.add(replacement)
        yield tuple(chosen)


def with_shots(
    examples: Sequence[Example], num_shots: int, *, seed: int
) -> Iterator[tuple[Example, tuple[Example, ...]]]:
    """Each example with its shots, drawn within its category; categories in sorted order, each with a fresh seed."""
    categories: dict[str | None, list[Example]] = {}
    for example in examples:
        categories.setdefault(example.category, []).append(example)
    for category in sorted(categories, key=lambda name: name or ''):
        members = categories[category]
        for example, indices in zip(members, fewshot_indices(len(members), num_shots, seed=seed), strict=True):
            yield example, tuple(members[index] for index in indices)
