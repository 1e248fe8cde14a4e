"""Draw the few-shot examples of each item."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Iterator, Sequence

from llmfoundry_gauntlet.types import Example, ItemKey, Sampling

FIXED_VERSION = 1  # of how fixed shots are drawn; recorded in results


def draw_seed(sampling: Sampling, key: ItemKey) -> int:
    """Return the seed of one generation, 31 bits as servers accept, from the task's seed and the item's key."""
    words = (sampling.seed, key.task, key.file, key.row, key.variant, key.sample)
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:4], 'big') >> 1


def fewshot_indices(num_examples: int, num_shots: int, *, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each example in order, the indices of its shots, never its own; fewer if there are too few others.

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


def fixed_indices(questions: Sequence[Hashable], num_shots: int, *, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each question in order, the same `num_shots` indices, drawn once; fewer if there are too few others.

    They are drawn from the distinct questions, with a spare that replaces a shot equal to the item's own question. So
    no item is shown the answer to its own question, even if the question is repeated.
    """
    first_of: dict[Hashable, int] = {}
    for index, question in enumerate(questions):
        first_of.setdefault(question, index)
    rng = random.Random(seed)
    *shots, spare = rng.sample(list(first_of.values()), min(num_shots + 1, len(first_of)))
    for question in questions:
        yield tuple(spare if questions[shot] == question else shot for shot in shots)


def by_category(examples: Sequence[Example]) -> dict[str | None, list[Example]]:
    """Return the examples of each category, in their order."""
    categories: dict[str | None, list[Example]] = {}
    for example in examples:
        categories.setdefault(example.category, []).append(example)
    return categories


def with_shots(
    examples: Sequence[Example],
    num_shots: int,
    *,
    seed: int,
    question_of: Callable[[Example], Hashable] | None = None,
) -> Iterator[tuple[Example, tuple[Example, ...]]]:
    """Yield each example with its shots, drawn within its category; categories are sorted, each with a fresh seed.

    With `question_of` all examples of a category get the same shots, except those with their own question.
    """
    categories = by_category(examples)
    for category in sorted(categories, key=lambda name: name or ''):
        members = categories[category]
        if question_of is None:
            drawn = fewshot_indices(len(members), num_shots, seed=seed)
        else:
            drawn = fixed_indices([question_of(member) for member in members], num_shots, seed=seed)
        for example, indices in zip(members, drawn, strict=True):
            yield example, tuple(members[index] for index in indices)
