"""Plan batches so that each distinct prefix is computed once. Imports no torch.

The batches depend only on the set of requests, `tokens_per_batch` and the layout. Requests that share a prefix are
joined into trees that hold each distinct prefix once, if that is less work than running them separately. A
continuation's last token is never an input, so single-token choices cost nothing beyond their context. A prefix that
many trees share is run once and cached.

Work is measured in tokens: PAIRS_PER_TOKEN query-key pairs in attention count as one token in the linear layers. The
true figure depends on the model (about 2,000 for a width of 512 on a CPU, more for wider models).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.engine.trees import (
    Tree,
    count_prefixes,
    input_rows,
    num_distinct_prefixes,
    num_shared,
    sortable,
    whole_rows,
)
from llmfoundry_gauntlet.types import Ids, ScoreRequest

STREAM = 'stream'  # trees in one row, attention within each tree
PADDED_ROWS = 'padded_rows'  # one row per sequence; works with every model
LAYOUTS = (STREAM, PADDED_ROWS)  # the fastest first

PAIRS_PER_TOKEN = 2048
MAX_TREE_TOKENS = 4096
BRANCHES = 128  # tokens of a stream that share an attention call, about
LEAST_PREFIX = 64  # tokens
FAMILY = 8  # requests that justify starting a new tree
LEAST_SAVED_BY_PREFIX = 1 / 32  # of tokens_per_batch; the prefix costs a forward of its own

# A batch of padded rows that holds LEAST_SHARE of its tokens is closed once rows are shorter than SHORTEST_SHARE of its
# longest: the padding would cost more than another forward.
LEAST_SHARE = 1 / 16
SHORTEST_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Requests that run together, by tree; in padded rows each request is a tree of its own.

    `num_tokens` are the model's input tokens, with padding and without the cached `prefix`. `cost` is the estimated
    work in tokens. A batch without requests runs its prefix. `rope_length` sets the rotary frequencies of all rows;
    None if they depend on no length. With `padded_to`, rows are padded to this length as by llm-foundry.
    """

    layout: str
    trees: tuple[Tree, ...]
    num_tokens: int
    cost: float
    prefix: Ids | None = None
    rope_length: int | None = None
    padded_to: int = 0

    @property
    def requests(self) -> tuple[ScoreRequest, ...]:
        """Return all requests, in the order of their outputs."""
        return tuple(request for tree in self.trees for request in tree.requests)

    def halves(self) -> tuple[Batch, ...]:
        """Split the batch into two of about equal tokens; return only itself if that is not possible."""
        if len(self.trees) > 1:
            middle = int(np.searchsorted(np.cumsum([tree.num_tokens for tree in self.trees]), self.num_tokens / 2)) + 1
            middle = min(middle, len(self.trees) - 1)
            parts = [self.trees[:middle], self.trees[middle:]]
        elif self.trees and len(self.trees[0].requests) > 1:
            requests = self.trees[0].requests
            middle = len(requests) // 2
            parts = [(self._tree(requests[:middle]),), (self._tree(requests[middle:]),)]
        else:
            return (self,)
        if self.layout == PADDED_ROWS:
            halves = [batch_of_rows([tree.requests[0] for tree in part], self.padded_to) for part in parts]
        else:
            halves = [make_batch(part, self.prefix) for part in parts]
        return tuple(replace(half, rope_length=self.rope_length) for half in halves)

    def _tree(self, requests: tuple[ScoreRequest, ...]) -> Tree:
        num_cached = 0 if self.prefix is None else len(self.prefix)
        return Tree(requests=requests, num_tokens=count_prefixes(requests) - num_cached)


@dataclass(slots=True, eq=False)
class _MeasuredRequest:
    """A request with its lengths in tokens. `context` is its first context as sortable bytes.

    `common` is the prefix that all its contexts share, `num_tokens` the number of distinct prefixes, `shared` the
    prefix that its first context shares with that of the previous request. `nested` if its contexts differ.
    """

    request: ScoreRequest
    context: bytes
    common: int
    num_tokens: int
    nested: bool
    shared: int = 0

    @property
    def cacheable(self) -> int:
        """Return the longest prefix of all contexts that could be cached, leaving each a token to read logits from."""
        return min(self.common, len(self.context) // 4 - 1)


def plan(
    requests: Sequence[ScoreRequest],
    *,
    tokens_per_batch: int,
    layout: str = STREAM,
    rotary: RotaryLengths | None = None,
    padded_to: int = 0,
) -> list[Batch]:
    """Return batches of at most `tokens_per_batch` tokens, padding included, the longest trees or rows first.

    All choices of a request are in one batch, so a single item may exceed the limit. Requests that cannot be scored are
    left out. With `rotary` all requests of a batch have the same rotary frequencies. `padded_to` is the least length of
    padded rows.
    """
    if tokens_per_batch < 1:
        raise ValueError(f'tokens_per_batch is {tokens_per_batch}; allowed: 1 or more')
    scorable = [request for request in requests if request.unscorable is None]
    groups = [(None, scorable)] if rotary is None else rotary.groups(scorable)
    return [
        replace(batch, rope_length=length)
        for length, group in groups
        for batch in plan_alike(group, tokens_per_batch, layout, padded_to)
    ]


def plan_alike(scorable: Sequence[ScoreRequest], tokens_per_batch: int, layout: str, padded_to: int) -> list[Batch]:
    """Return batches of requests with the same rotary frequencies."""
    if layout == PADDED_ROWS:
        return pack_rows(scorable, tokens_per_batch, padded_to)
    batches: list[Batch] = []
    single: list[Tree] = []
    cap = min(MAX_TREE_TOKENS, tokens_per_batch)
    least_saved = LEAST_SAVED_BY_PREFIX * tokens_per_batch
    for family, prefix in families(grow_trees(sort_requests(scorable), cap), least_saved):
        if prefix == 0:
            single.extend(map(make_tree, family))
            continue
        members = [one for group in family for one in group]
        trees = [make_tree(group, prefix) for group in grow_trees(members, prefix + cap, prefix)]
        cached = np.ascontiguousarray(members[0].request.contexts[0][:prefix])
        batches.extend(pack_trees(trees, tokens_per_batch, cached))
    return [*pack_trees(single, tokens_per_batch), *batches]


def sort_requests(requests: Iterable[ScoreRequest]) -> list[_MeasuredRequest]:
    """Return the requests sorted by their tokens, so that requests with a common prefix are adjacent."""
    ordered = sorted(map(measure_request, requests), key=lambda one: (one.context, one.request.key))
    for before, one in pairwise(ordered):
        one.shared = num_shared(before.context, one.context)
    return ordered


def measure_request(request: ScoreRequest) -> _MeasuredRequest:
    """Measure a request."""
    first = request.contexts[0]
    if all(context is first for context in request.contexts):
        beyond = 0
        longer = [continuation for continuation in request.continuations if len(continuation) > 1]
        if len(longer) == 1:
            beyond = len(longer[0]) - 1
        elif longer:
            beyond = num_distinct_prefixes(sorted(sortable(ids[:-1]) for ids in longer))
        return _MeasuredRequest(request, sortable(first), len(first), len(first) + beyond, nested=False)
    contexts = sorted(set(map(sortable, request.contexts)))
    common = num_shared(contexts[0], contexts[-1])
    return _MeasuredRequest(request, contexts[0], common, count_prefixes((request,)), nested=True)


def grow_trees(ordered: Sequence[_MeasuredRequest], cap: int, prefix: int = 0) -> list[list[_MeasuredRequest]]:
    """Join adjacent requests if one tree is less work than two, up to `cap` tokens.

    After a cached prefix they are always joined, as each tree attends to the whole prefix again.
    """
    groups: list[list[_MeasuredRequest]] = []
    num_tokens = alike = 0
    for index, one in enumerate(ordered):
        added = one.num_tokens - one.shared
        joins = bool(groups) and num_tokens + added <= cap
        if joins and not prefix:
            joins = is_less_work(one, num_tokens, added)
            joins = joins and not ends_family(one.shared, len(groups[-1]), alike) and not begins_family(ordered, index)
        if joins:
            groups[-1].append(one)
            num_tokens += added
            alike = min(alike, one.shared, one.cacheable)
        else:
            groups.append([one])
            num_tokens, alike = one.num_tokens, one.cacheable
    return groups


def begins_family(ordered: Sequence[_MeasuredRequest], index: int) -> bool:
    """Return whether many requests from `index` on share far more with each other than with the previous one."""
    least = max(LEAST_PREFIX, 2 * ordered[index].shared + 1)
    following = ordered[index + 1 : index + 1 + FAMILY]
    return len(following) == FAMILY and all(one.shared >= least for one in following)


def ends_family(shared: int, size: int, alike: int) -> bool:
    """Return whether joining a request that shares `shared` tokens would prevent caching the prefix of the group."""
    return size > 1 and alike >= LEAST_PREFIX and 2 * shared < alike


def is_less_work(one: _MeasuredRequest, num_tokens: int, added: int) -> bool:
    """Return whether adding `added` tokens to a tree of `num_tokens` is less work than running the request alone."""
    seen = seen_by_branch(one.shared, num_tokens)
    joined = added * (PAIRS_PER_TOKEN + seen + added)
    return joined <= one.num_tokens * PAIRS_PER_TOKEN + pairs(one.common, one.num_tokens)


def seen_by_branch(depth: int, num_tokens: int) -> int:
    """Return the number of keys in attention for a branch at this depth."""
    return min(num_tokens, depth + BRANCHES)


def pairs(chain: int, num_tokens: int) -> float:
    """Return the number of query-key pairs of a tree that starts with a chain of this length."""
    return chain * chain / 2 + (num_tokens - chain) * seen_by_branch(chain, num_tokens)


def families(
    groups: Sequence[list[_MeasuredRequest]], least_saved: float
) -> list[tuple[list[list[_MeasuredRequest]], int]]:
    """Group adjacent trees that share a prefix; give its length if caching it saves enough tokens, else 0."""
    found: list[tuple[list[list[_MeasuredRequest]], int]] = []
    for group in groups:
        alike = min([*(one.shared for one in group[1:]), *(one.cacheable for one in group)])
        if found:
            family, prefix = found[-1]
            joined = min(prefix, alike, group[0].shared)
            size = sum(map(len, family))
            if (
                joined >= LEAST_PREFIX
                and not ends_family(joined, size, prefix)
                and not ends_family(joined, len(group), alike)
            ):
                family.append(group)
                found[-1] = (family, joined)
                continue
        found.append(([group], alike))
    return [
        (family, prefix if prefix >= LEAST_PREFIX and prefix * (len(family) - 1) >= least_saved else 0)
        for family, prefix in found
    ]


def make_tree(group: Sequence[_MeasuredRequest], prefix: int = 0) -> Tree:
    """Return the tree of adjacent requests, with its exact number of tokens beyond a cached prefix."""
    requests = tuple(one.request for one in group)
    num_tokens = group[0].num_tokens + sum(one.num_tokens - one.shared for one in group[1:])
    # If a context is the prefix of another, its continuations may coincide with the other's tokens: count exactly.
    nested = any(one.nested for one in group) or any(
        4 * one.shared == min(len(one.context), len(before.context)) for before, one in pairwise(group)
    )
    if nested and len(requests) > 1:
        num_tokens = count_prefixes(requests)
    return Tree(requests=requests, num_tokens=num_tokens - prefix)


def make_batch(trees: Sequence[Tree], prefix: Ids | None = None) -> Batch:
    """Return trees as a batch in the stream layout."""
    num_cached = 0 if prefix is None else len(prefix)
    num_tokens = sum(tree.num_tokens for tree in trees)
    in_attention = sum(
        pairs(min(tree.longest_context - num_cached, tree.num_tokens), tree.num_tokens) + tree.num_tokens * num_cached
        for tree in trees
    )
    cost = num_tokens + in_attention / PAIRS_PER_TOKEN
    return Batch(layout=STREAM, trees=tuple(trees), num_tokens=num_tokens, cost=cost, prefix=prefix)


def pack_trees(trees: list[Tree], tokens_per_batch: int, prefix: Ids | None = None) -> list[Batch]:
    """Return batches of trees of similar size, the largest first."""
    batches = []
    group: list[Tree] = []
    num_tokens = 0
    for tree in sorted(trees, key=lambda tree: (-tree.num_tokens, tree.requests[0].key)):
        if group and num_tokens + tree.num_tokens > tokens_per_batch:
            batches.append(make_batch(group, prefix))
            group, num_tokens = [], 0
        group.append(tree)
        num_tokens += tree.num_tokens
    if group:
        batches.append(make_batch(group, prefix))
    return batches


def pack_rows(requests: Sequence[ScoreRequest], tokens_per_batch: int, padded_to: int = 0) -> list[Batch]:
    """Return batches of rows of similar length, the longest first."""
    measured = [
        (request, longest_row(request, padded_to), num_distinct_rows(request, padded_to)) for request in requests
    ]
    measured.sort(key=lambda entry: (-entry[1], entry[0].key))
    batches: list[Batch] = []
    group: list[ScoreRequest] = []
    width = num_rows = 0
    for request, length, rows in measured:
        full = (num_rows + rows) * width > tokens_per_batch
        wasteful = length < SHORTEST_SHARE * width and num_rows * width > LEAST_SHARE * tokens_per_batch
        if group and (full or wasteful):
            batches.append(batch_of_rows(group, padded_to))
            group, num_rows = [], 0
        if not group:
            width = length
        group.append(request)
        num_rows += rows
    if group:
        batches.append(batch_of_rows(group, padded_to))
    return batches


def batch_of_rows(requests: Sequence[ScoreRequest], padded_to: int = 0) -> Batch:
    """Return a batch of padded rows; each request counts as a tree, though its rows share nothing."""
    trees = tuple(Tree(requests=(request,), num_tokens=longest_row(request, padded_to)) for request in requests)
    width = max(tree.num_tokens for tree in trees)
    num_rows = sum(num_distinct_rows(request, padded_to) for request in requests)
    cost = num_rows * width + num_rows * width * width / 2 / PAIRS_PER_TOKEN
    return Batch(layout=PADDED_ROWS, trees=trees, num_tokens=num_rows * width, cost=cost, padded_to=padded_to)


def longest_row(request: ScoreRequest, padded_to: int = 0) -> int:
    """Return the length of the request's longest input row."""
    longest = max(len(a) + len(b) for a, b in zip(request.contexts, request.continuations, strict=True))
    return max(longest, padded_to) if padded_to else longest - 1


def num_distinct_rows(request: ScoreRequest, padded_to: int = 0) -> int:
    """Return the number of distinct input rows of the request."""
    rows = whole_rows(request) if padded_to else input_rows(request)
    return len({row.tobytes() for row in rows})
