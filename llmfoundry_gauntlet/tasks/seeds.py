"""The seed of a single generation."""

from __future__ import annotations

import hashlib

from llmfoundry_gauntlet.types import ItemKey, Sampling


def draw_seed(sampling: Sampling, key: ItemKey) -> int:
    """Return the seed of one generation, from that of the task and the item's key: 31 bits, as servers accept them."""
    words = (sampling.seed, key.task, key.file, key.row, key.variant, key.sample)
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:4], 'big') >> 1
