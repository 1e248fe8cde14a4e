"""Counts of a plan by task, and estimates of its seconds from timed parts. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from llmfoundry_gauntlet.engine.layout import Tree, count_prefixes
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, Batch, num_distinct_rows
from llmfoundry_gauntlet.engine.pools import Pool
from llmfoundry_gauntlet.types import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEstimate:
    """The work of one task.

    `num_tokens` are those of contexts, choices and prompts, each distinct prefix once, as the model is given them; a
    prefix of several tasks counts for the first of them. `reply_tokens` are the most that can be written.
    """

    task: str
    num_items: int
    num_tokens: int
    reply_tokens: int
    num_truncated: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated cost of an evaluation. Its `seconds` by part add up to those of the tasks.

    `preparing_seconds` is what reading data and loading the model took; a real run spends it as well, before the
    evaluation. `notes` say how the rest was found out.
    """

    tasks: tuple[TaskEstimate, ...]
    seconds: Mapping[str, float]
    preparing_seconds: float
    num_ranks: int
    notes: tuple[str, ...]

    @property
    def total_seconds(self) -> float:
        """Return the seconds of the evaluation itself."""
        return sum(self.seconds.values())


def scored_tokens(batches: Sequence[Batch]) -> Counter[str]:
    """Tokens that the model is given to score, by task; a kept prefix once."""
    found: Counter[str] = Counter()
    prefix = None
    for batch in batches:
        if batch.prefix is not None and batch.prefix is not prefix:
            found[batch.requests[0].key.task] += len(batch.prefix)
        prefix = batch.prefix
        for task, count in tokens_of_batch(batch):
            found[task] += count
    return found


def tokens_of_batch(batch: Batch) -> Iterator[tuple[str, int]]:
    """The tokens of a batch by task, in parts; they add up to its own."""
    if batch.layout == PADDED_ROWS:
        width = max(tree.num_tokens for tree in batch.trees)
        for request in batch.requests:
            yield request.key.task, num_distinct_rows(request) * width
        return
    for tree in batch.trees:
        yield from tokens_of_tree(tree)


def tokens_of_tree(tree: Tree) -> Iterator[tuple[str, int]]:
    """The tokens of a tree by task: what is added to those of the requests before."""
    parts = [(task, len(list(requests))) for task, requests in groupby(tree.requests, lambda request: request.key.task)]
    rest = tree.num_tokens
    for place in range(len(parts) - 1, 0, -1):
        task, size = parts[place]
        num_before = sum(count for _, count in parts[:place])
        added = count_prefixes(tree.requests[: num_before + size]) - count_prefixes(tree.requests[:num_before])
        yield task, added
        rest -= added
    yield parts[0][0], rest


def prompt_tokens(pools: Sequence[Pool]) -> Counter[str]:
    """Tokens of the prompts that replies are wanted to, by task; equal prompts of a pool once."""
    found: Counter[str] = Counter()
    for pool in pools:
        prompts = {request.context.tobytes(): request for request in reversed(pool.requests)}
        for request in prompts.values():
            found[request.key.task] += len(request.context)
    return found


def expected_tokens(replies: Sequence[Generation], most: int) -> float:
    """Tokens that a reply of at most `most` takes, if it is as likely to end at each token as these replies.

    Those that were cut tell only that they did not end so far.
    """
    num_ended = sum(not reply.is_cut for reply in replies)
    num_tokens = sum(reply.num_tokens or 0 for reply in replies)
    if not num_ended or not num_tokens:
        return float(most)
    share = num_ended / num_tokens
    return (1 - (1 - share) ** most) / share
