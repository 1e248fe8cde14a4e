"""Plan pools: requests whose generations run side by side. Imports no torch.

A pool is written by one rank. Its rows are written side by side, one token each at every step; a row that is done
makes room for the next of the pool. Pools are a function of the requests and `tokens_per_batch` alone, so that no
reply depends on the number of ranks, not even by rounding.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from llmfoundry_gauntlet.engine.layout import num_shared
from llmfoundry_gauntlet.engine.rotary_lengths import RotaryLengths
from llmfoundry_gauntlet.types import GenerateRequest

CACHED_PER_TOKEN = 8  # tokens whose keys and values may be kept, for each token of a batch
TOKENS_PER_ROW = 128  # of a batch, that make a row at most
MOST_POOLS = 32  # are enough to share out
LEAST_POOL = 64  # requests
LEAST_SHARED = 64  # tokens, and half of a prompt, which it begins with like another of its family
WAITING = 4  # requests of a pool for each of its rows

# The work of a step for one row, in tokens of a prompt (about 4 at 16 rows on a CPU), and the share of the longest
# reply that is expected to be written.
STEP_COST = 4
WRITTEN_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Requests whose replies are written together, at most `num_rows` at a time. `cost` is in tokens of a prompt.

    Requests with the same prompt follow each other, and prompts that begin alike. A prompt is run with others in
    batches of `tokens_per_batch`. `rope_length` decides the rotary frequencies of all rows, None where no length does.
    """

    requests: tuple[GenerateRequest, ...]
    num_rows: int
    tokens_per_batch: int
    cost: float = 0.0
    rope_length: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and of the longest replies to them."""
        return sum(request.length for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max((request.length for request in self.requests), default=0)


def plan_pools(
    requests: Sequence[GenerateRequest], *, tokens_per_batch: int, rotary: RotaryLengths | None = None
) -> list[Pool]:
    """Pools of rows of about the same length, the longest first. Requests that cannot be asked are left out.

    Prompts that begin alike, a family, are one after the other. With `rotary` all rows of a pool have the same
    frequencies.
    """
    if tokens_per_batch < 1:
        raise ValueError(f'tokens_per_batch is {tokens_per_batch}; allowed: 1 or more')
    askable = [request for request in requests if request.unscorable is None]
    share = max(LEAST_POOL, math.ceil(len(askable) / MOST_POOLS))
    groups = [(None, askable)] if rotary is None else rotary.groups(askable)
    return [
        replace(make_pool(members, num_rows, tokens_per_batch), rope_length=length)
        for length, group in groups
        for members, num_rows in gather(families(group), share, tokens_per_batch)
    ]


def families(requests: Sequence[GenerateRequest]) -> list[list[GenerateRequest]]:
    """Requests whose prompts begin alike, those with the longest row first; within one in the order of their tokens."""
    found: list[list[GenerateRequest]] = []
    before = b''
    for request in sorted(requests, key=lambda request: (spelled(request), -request.length, request.key)):
        prompt = spelled(request)
        shared = num_shared(before, prompt)
        if found and begins_alike(shared, len(prompt) // 4):
            found[-1].append(request)
        else:
            found.append([request])
        before = prompt
    return sorted(found, key=lambda family: -max(request.length for request in family))


def begins_alike(num_shared: int, length: int) -> bool:
    """Return whether a prompt is of the family of another with which it shares so many tokens."""
    return num_shared >= min(LEAST_SHARED, length) and 2 * num_shared >= length


def spelled(request: GenerateRequest) -> bytes:
    """A prompt's tokens, in an order that compares token by token."""
    return request.context.astype('>i4').tobytes()


def gather(
    families: Iterable[Sequence[GenerateRequest]], share: int, tokens_per_batch: int
) -> Iterator[tuple[list[GenerateRequest], int]]:
    """Requests of each pool and how many rows it has: whole groups with the same prompt, up to a pool's size."""
    members: list[GenerateRequest] = []
    num_rows = size = 0
    for family in families:
        longest = max(request.length for request in family)
        for _, same in groupby(family, key=spelled):
            group = list(same)
            if members and len(members) + len(group) > size:
                yield members, num_rows
                members = []
            if not members:
                num_rows = rows_at_once(longest, tokens_per_batch)
                size = min(share, WAITING * num_rows)
            members.extend(group)
    if members:
        yield members, num_rows


def rows_at_once(length: int, tokens_per_batch: int) -> int:
    """Return the number of rows of this length that are generated side by side."""
    return max(1, min(CACHED_PER_TOKEN * tokens_per_batch // length, tokens_per_batch // TOKENS_PER_ROW))


def make_pool(requests: Sequence[GenerateRequest], num_rows: int, tokens_per_batch: int) -> Pool:
    """A pool, its cost estimated."""
    prompts = {request.context.tobytes(): len(request.context) for request in requests}
    written = sum(request.max_new_tokens for request in requests)
    return Pool(
        requests=tuple(requests),
        num_rows=min(num_rows, len(requests)),
        tokens_per_batch=tokens_per_batch,
        cost=sum(prompts.values()) + STEP_COST * WRITTEN_SHARE * written,
    )


def assign_pools(pools: Sequence[Pool], *, num_ranks: int) -> list[list[Pool]]:
    """The pools of each rank, spread by cost, the dearest first; empty ones make their numbers equal."""
    loads = [(0.0, rank) for rank in range(num_ranks)]
    ranks: list[list[Pool]] = [[] for _ in range(num_ranks)]
    for pool in sorted(pools, key=lambda pool: -pool.cost):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(pool)
        heapq.heappush(loads, (load + pool.cost, rank))
    empty = Pool(requests=(), num_rows=1, tokens_per_batch=1)
    longest = max(map(len, ranks))
    return [mine + [empty] * (longest - len(mine)) for mine in ranks]
