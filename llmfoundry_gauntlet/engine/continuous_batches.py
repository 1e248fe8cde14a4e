"""Plan continuous batches: requests whose generations are decoded side by side. Imports no torch.

A continuous batch is decoded by one rank, one token in each of its slots at every step; when a generation is finished,
a waiting request takes its slot. The plan is a function of the requests and `tokens_per_batch` alone, so that no
generation depends on the number of ranks, not even by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.engine.trees import num_shared, sortable
from llmfoundry_gauntlet.types import GenerateRequest

CACHED_PER_TOKEN = 8  # tokens whose keys and values may be cached, for each token of a batch
TOKENS_PER_SLOT = 128  # of a batch, for each slot at least
MOST_BATCHES = 32  # are enough to share out
LEAST_REQUESTS = 64  # of a continuous batch
LEAST_SHARED = 64  # tokens, and half of a prompt, that it shares with another of its family
WAITING = 4  # requests of a continuous batch for each of its slots

# The work of a step for one slot, in tokens of a prompt (about 4 at 16 slots on a CPU), and the share of the longest
# generation that is expected to be generated.
STEP_COST = 4
GENERATED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContinuousBatch:
    """Requests that are decoded together, at most `num_slots` at a time. `cost` is in tokens of a prompt.

    Requests with the same prompt are neighbours, as are prompts that share a prefix. A prompt is run with others in
    batches of `tokens_per_batch`. `rope_length` decides the rotary frequencies of all; None if no length does.
    """

    requests: tuple[GenerateRequest, ...]
    num_slots: int
    tokens_per_batch: int
    cost: float = 0.0
    rope_length: int | None = None

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all prompts and of the longest generations for them."""
        return sum(request.length for request in self.requests)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompt with its generation."""
        return max((request.length for request in self.requests), default=0)


def plan_continuous_batches(
    requests: Sequence[GenerateRequest], *, tokens_per_batch: int, rotary: RotaryLengths | None = None
) -> list[ContinuousBatch]:
    """Return batches of requests of about the same length, the longest first, without those that cannot be run.

    Prompts that share a prefix, a family, are neighbours. With `rotary` all requests of a batch have the same
    frequencies.
    """
    if tokens_per_batch < 1:
        raise ValueError(f'tokens_per_batch is {tokens_per_batch}; allowed: 1 or more')
    runnable = [request for request in requests if request.unscorable is None]
    share = max(LEAST_REQUESTS, math.ceil(len(runnable) / MOST_BATCHES))
    groups = [(None, runnable)] if rotary is None else rotary.groups(runnable)
    return [
        replace(make_continuous_batch(members, num_slots, tokens_per_batch), rope_length=length)
        for length, group in groups
        for members, num_slots in gather(families(group), share, tokens_per_batch)
    ]


def families(requests: Sequence[GenerateRequest]) -> list[list[GenerateRequest]]:
    """Return requests whose prompts share a prefix, the longest family first; within one in the order of tokens."""
    found: list[list[GenerateRequest]] = []
    before = b''
    for request in sorted(requests, key=lambda request: (sortable(request.context), -request.length, request.key)):
        prompt = sortable(request.context)
        if found and is_family(num_shared(before, prompt), len(request.context)):
            found[-1].append(request)
        else:
            found.append([request])
        before = prompt
    return sorted(found, key=lambda family: -max(request.length for request in family))


def is_family(num_shared: int, length: int) -> bool:
    """Return whether a prompt of this length is of the family of another with which it shares so many tokens."""
    return num_shared >= min(LEAST_SHARED, length) and 2 * num_shared >= length


def gather(
    families: Iterable[Sequence[GenerateRequest]], share: int, tokens_per_batch: int
) -> Iterator[tuple[list[GenerateRequest], int]]:
    """Yield the requests and slots of each batch: whole groups with the same prompt, up to a batch's size."""
    members: list[GenerateRequest] = []
    num_slots = size = 0
    for family in families:
        longest = max(request.length for request in family)
        for _, same in groupby(family, key=lambda request: request.context.tobytes()):
            group = list(same)
            if members and len(members) + len(group) > size:
                yield members, num_slots
                members = []
            if not members:
                num_slots = slots_at_once(longest, tokens_per_batch)
                size = min(share, WAITING * num_slots)
            members.extend(group)
    if members:
        yield members, num_slots


def slots_at_once(length: int, tokens_per_batch: int) -> int:
    """Return the number of sequences of this length that are decoded side by side."""
    return max(1, min(CACHED_PER_TOKEN * tokens_per_batch // length, tokens_per_batch // TOKENS_PER_SLOT))


def make_continuous_batch(
    requests: Sequence[GenerateRequest], num_slots: int, tokens_per_batch: int
) -> ContinuousBatch:
    """Return a batch with its estimated cost."""
    prompts = {request.context.tobytes(): len(request.context) for request in requests}
    new_tokens = sum(request.max_new_tokens for request in requests)
    return ContinuousBatch(
        requests=tuple(requests),
        num_slots=min(num_slots, len(requests)),
        tokens_per_batch=tokens_per_batch,
        cost=sum(prompts.values()) + STEP_COST * GENERATED_SHARE * new_tokens,
    )
