"""Plan continuous batches of generation requests and assign them to ranks. Imports no torch.

A continuous batch has prompts of similar length. It is decoded by one rank with a fixed number of slots; when a
generation ends, a waiting request takes its slot.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.engine.trees import num_shared, sortable
from llmfoundry_gauntlet.types import GenerateRequest, Generation, ItemKey

# The slots of a batch.
CACHED_PER_TOKEN = 8  # tokens in the KV cache per token of a batch, at most
TOKENS_PER_SLOT = 128  # of a batch, at least

# The requests of a batch.
WAITING = 4  # per slot
LEAST_REQUESTS = 64
FEW_REQUESTS = 16  # a decoding step with fewer takes hardly less time
LEAST_SHARED = 64  # tokens, and half of a prompt, that it shares with another of its family

# The number of batches.
MOST_BATCHES = 32  # enough to balance over ranks
LEAST_BATCHES = 4  # per rank; with fewer, ranks wait for each other

# The work of a decoding step for one slot in prompt tokens (about 4 at 16 slots on a CPU), and the share of the longest
# generation that is expected to be generated.
STEP_COST = 4
GENERATED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContinuousBatch:
    """Requests that are decoded together, at most `num_slots` at a time. `cost` is in prompt tokens.

    Requests with equal prompts are adjacent, as are prompts that share a prefix. Prompts run in batches of at most
    `tokens_per_batch` tokens. `rope_length` sets the rotary frequencies; None if they depend on no length.
    """

    requests: tuple[GenerateRequest, ...]
    num_slots: int
    tokens_per_batch: int
    cost: float = 0.0
    rope_length: int | None = None

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all prompts and their longest generations."""
        return sum(request.length for request in self.requests)

    @property
    def longest(self) -> int:
        """Return the largest number of tokens of a prompt with its generation."""
        return max((request.length for request in self.requests), default=0)

    def without(self, finished: Container[ItemKey]) -> ContinuousBatch:
        """Return the batch of the requests that are not finished, in their order; itself if none is."""
        left = tuple(request for request in self.requests if request.key not in finished)
        if len(left) == len(self.requests):
            return self
        return replace(self, requests=left, num_slots=min(self.num_slots, len(left)), cost=expected_cost(left))


@dataclass(slots=True)
class BatchProgress:
    """The shares of a batch's cost and of its requests that are done, 0 to 1, and the number of generated tokens.

    Another thread may read them.
    """

    of_cost: float = 0.0
    of_requests: float = 0.0
    num_generated: int = 0


class GenerationProgress:
    """Follow the progress of a continuous batch, in counts that the host has anyway.

    A generation that has ended counts with all the tokens that it could have had, as the rest will not be run.
    """

    def __init__(self, requests: Sequence[GenerateRequest], progress: BatchProgress) -> None:
        self.progress = progress
        self.num_requests = len(requests)
        self.whole_cost = sum(cost_so_far(request, request.max_new_tokens) for request in requests)
        self.num_ended = 0
        self.cost_of_ended = 0
        self.tokens_of_ended = 0

    def end(self, request: GenerateRequest, num_generated: int) -> None:
        """Count a request whose generation has ended after so many tokens."""
        self.num_ended += 1
        self.cost_of_ended += cost_so_far(request, request.max_new_tokens)
        self.tokens_of_ended += num_generated

    def update(self, running: Iterable[tuple[GenerateRequest, int]]) -> None:
        """Set the progress, given the running requests with their numbers of generated tokens.

        It never falls: after running out of memory, generations begin again.
        """
        cost = self.cost_of_ended
        num_generated = self.tokens_of_ended
        for request, num_tokens in running:
            cost += cost_so_far(request, num_tokens)
            num_generated += num_tokens
        self.progress.of_cost = max(self.progress.of_cost, cost / self.whole_cost)
        self.progress.of_requests = self.num_ended / self.num_requests
        self.progress.num_generated = max(self.progress.num_generated, num_generated)


def cost_so_far(request: GenerateRequest, num_generated: int) -> int:
    """Return the cost of a request in prompt tokens, once it has generated this many tokens."""
    return len(request.context) + STEP_COST * num_generated


def plan_continuous_batches(
    requests: Sequence[GenerateRequest],
    *,
    tokens_per_batch: int,
    requests_per_batch: int | None = None,
    rotary: RotaryLengths | None = None,
) -> list[ContinuousBatch]:
    """Return batches of requests of similar length, the longest first; requests that cannot be run are left out.

    Prompts that share a prefix, a family, are adjacent. With `rotary` all requests of a batch have the same rotary
    frequencies. A batch has more than `requests_per_batch` requests only if their prompts are equal.
    """
    if tokens_per_batch < 1:
        raise ValueError(f'tokens_per_batch is {tokens_per_batch}; allowed: 1 or more')
    runnable = [request for request in requests if request.unscorable is None]
    most_requests = requests_per_batch or max(LEAST_REQUESTS, math.ceil(len(runnable) / MOST_BATCHES))
    groups = [(None, runnable)] if rotary is None else rotary.groups(runnable)
    batches = []
    for length, group in groups:
        for members, num_slots in gather_requests(prompt_families(group), most_requests, tokens_per_batch):
            batches.append(
                ContinuousBatch(
                    requests=tuple(members),
                    num_slots=min(num_slots, len(members)),
                    tokens_per_batch=tokens_per_batch,
                    cost=expected_cost(members),
                    rope_length=length,
                )
            )
    return batches


def expected_cost(requests: Sequence[GenerateRequest]) -> float:
    """Return the expected cost of generating for requests, in prompt tokens; equal prompts run once."""
    prompts = {request.context.tobytes(): len(request.context) for request in requests}
    most_new_tokens = sum(request.max_new_tokens for request in requests)
    return sum(prompts.values()) + STEP_COST * GENERATED_SHARE * most_new_tokens


def prompt_families(requests: Sequence[GenerateRequest]) -> list[list[GenerateRequest]]:
    """Group requests whose prompts share a prefix, the longest family first, each sorted by its tokens."""
    ordered = sorted(requests, key=lambda request: (sortable(request.context), -request.length, request.key))
    families: list[list[GenerateRequest]] = []
    previous = b''
    for request in ordered:
        prompt = sortable(request.context)
        if families and is_family(num_shared(previous, prompt), len(request.context)):
            families[-1].append(request)
        else:
            families.append([request])
        previous = prompt
    families.sort(key=lambda family: -max(request.length for request in family))
    return families


def is_family(num_shared: int, length: int) -> bool:
    """Return whether a prompt of this length, which shares `num_shared` tokens with another, is of its family."""
    return num_shared >= min(LEAST_SHARED, length) and 2 * num_shared >= length


def gather_requests(
    families: Iterable[Sequence[GenerateRequest]], most_requests: int, tokens_per_batch: int
) -> Iterator[tuple[list[GenerateRequest], int]]:
    """Yield the requests and the number of slots of each batch; requests with equal prompts stay together."""
    members: list[GenerateRequest] = []
    num_slots = 0
    size = 0  # the most requests of the batch
    for family in families:
        longest = max(request.length for request in family)
        for _, requests in groupby(family, key=lambda request: request.context.tobytes()):
            same_prompt = list(requests)
            if members and len(members) + len(same_prompt) > size:
                yield members, num_slots
                members = []
            # The first family is the longest: slots that its sequences fit into suit all others of the batch.
            if not members:
                in_cache = CACHED_PER_TOKEN * tokens_per_batch // longest
                num_slots = max(1, min(in_cache, tokens_per_batch // TOKENS_PER_SLOT))
                size = min(most_requests, WAITING * num_slots)
            members.extend(same_prompt)
    if members:
        yield members, num_slots


def requests_per_batch(num_requests: int, num_ranks: int) -> int:
    """Return the requests per continuous batch with which each rank has a batch, or four if there are many requests."""
    of_rank = num_requests // num_ranks
    return max(FEW_REQUESTS, min(LEAST_REQUESTS, of_rank), of_rank // LEAST_BATCHES)


def assign_continuous_batches(batches: Sequence[ContinuousBatch], *, num_ranks: int) -> list[list[ContinuousBatch]]:
    """Return the continuous batches of each rank, balanced by cost, the costliest first; padded with empty ones."""
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap, the least loaded rank first
    ranks: list[list[ContinuousBatch]] = [[] for _ in range(num_ranks)]
    for batch in sorted(batches, key=lambda batch: -batch.cost):
        load, rank = loads[0]
        ranks[rank].append(batch)
        heapq.heapreplace(loads, (load + batch.cost, rank))
    # Ranks of a sharded model must take part in as many batches.
    empty = ContinuousBatch(requests=(), num_slots=1, tokens_per_batch=1)
    most_batches = max(map(len, ranks))
    return [of_rank + [empty] * (most_batches - len(of_rank)) for of_rank in ranks]


def prompt_tokens(batches: Sequence[ContinuousBatch]) -> Counter[str]:
    """Return the prompt tokens of generation by task; equal prompts of a batch count once."""
    num_tokens: Counter[str] = Counter()
    for batch in batches:
        # Reversed, so that a prompt of several tasks counts for the first.
        request_of_prompt = {request.context.tobytes(): request for request in reversed(batch.requests)}
        for request in request_of_prompt.values():
            num_tokens[request.key.task] += len(request.context)
    return num_tokens


def expected_tokens(generations: Sequence[Generation], most: int) -> float:
    """Return the expected length of a generation of at most `most` tokens, from the rate at which `generations` end.

    The rate is ends per token, so that truncated generations only count as not having ended yet.
    """
    num_ended = sum(not generation.is_truncated for generation in generations)
    num_tokens = sum(generation.num_tokens or 0 for generation in generations)
    if not num_ended or not num_tokens:
        return float(most)
    share = num_ended / num_tokens
    return (1 - (1 - share) ** most) / share
