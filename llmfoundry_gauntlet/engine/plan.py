"""Plan batches so that each distinct prefix is computed once. Imports no torch.

The batches depend only on the set of requests, `tokens_per_batch` and the layout. Requests that share a prefix are
joined into trees that hold each distinct prefix once, if that is less work than running them separately. A
continuation's last token is never an input, so single-token choices cost nothing beyond their context. A prefix that
many trees share is run once and cached.

Work is measured in tokens: PAIRS_PER_TOKEN query-key pairs in attention count as one token in the linear layers. The
true figure depends on the model (about 2,000 for a width of 512 on a CPU, more for wider models).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.engine.trees import (
    ID_BYTES,
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
FORKED = 'forked'  # contexts as rows, whose states in the model's own cache are copied for their choices
PADDED_ROWS = 'padded_rows'  # one row per sequence; works with every model
LAYOUTS = (STREAM, FORKED, PADDED_ROWS)  # the fastest first

# The estimate of work.
PAIRS_PER_TOKEN = 2048
BRANCHES = 128  # tokens of a stream that share an attention call, about

# Trees and cached prefixes.
MAX_TREE_TOKENS = 4096
LEAST_PREFIX = 64  # tokens
FAMILY = 8  # requests that justify starting a new tree
LEAST_SAVED_BY_PREFIX = 1 / 32  # of tokens_per_batch; the prefix costs a forward of its own

# A fork costs another forward and copies of the states.
COPY_TOKENS = 4  # for each row: the tokens that take as long as a copy of its states, about
LEAST_AFTER_PREFIX = 1 / 4  # of tokens_per_batch; fewer tokens fork beside those of other prefixes
LEAST_SPLIT = 64  # tokens of padding that take longer than another forward of rows, with a copy of their contexts
MOST_PADDED = 1.25  # times the tokens of contexts without padding, once a batch holds LEAST_SHARE of its tokens

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
    def forks(self) -> bool:
        """Return whether what rows share runs before them, in the layout FORKED; otherwise whole rows run."""
        return any(tree.fork for tree in self.trees)

    @property
    def requests(self) -> tuple[ScoreRequest, ...]:
        """Return all requests, in the order of their outputs."""
        return tuple(request for tree in self.trees for request in tree.requests)

    def halves(self) -> tuple[Batch, ...]:
        """Split the batch into two of about equal tokens; return only itself if that is not possible."""
        if len(self.trees) > 1:
            parts = self._halves_by_trees()
        elif self.trees and len(self.trees[0].requests) > 1:
            parts = self._halves_of_tree(self.trees[0])
        else:
            return (self,)
        return tuple(replace(self._batch(part), rope_length=self.rope_length) for part in parts)

    def _halves_by_trees(self) -> tuple[tuple[Tree, ...], tuple[Tree, ...]]:
        tokens_so_far = np.cumsum([tree.num_tokens for tree in self.trees])
        middle = int(np.searchsorted(tokens_so_far, self.num_tokens / 2)) + 1
        middle = min(middle, len(self.trees) - 1)
        return self.trees[:middle], self.trees[middle:]

    def _halves_of_tree(self, tree: Tree) -> tuple[tuple[Tree], tuple[Tree]]:
        middle = len(tree.requests) // 2
        return (self._part(tree, tree.requests[:middle]),), (self._part(tree, tree.requests[middle:]),)

    def _part(self, tree: Tree, requests: tuple[ScoreRequest, ...]) -> Tree:
        num_cached = 0 if self.prefix is None else len(self.prefix)
        return replace(tree, requests=requests, num_tokens=count_prefixes(requests) - num_cached)

    def _batch(self, trees: Sequence[Tree]) -> Batch:
        if self.layout == PADDED_ROWS:
            return batch_of_rows([tree.requests[0] for tree in trees], self.padded_to)
        if self.layout == FORKED:
            return batch_of_forks(trees, self.prefix)
        return make_batch(trees, self.prefix)


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
    def num_added(self) -> int:
        """Return the number of tokens that the request adds to a tree with the previous one."""
        return self.num_tokens - self.shared

    @property
    def cacheable(self) -> int:
        """Return the longest prefix of all contexts that could be cached, leaving each a token to read logits from."""
        return min(self.common, len(self.context) // ID_BYTES - 1)


class _Family(NamedTuple):
    """Adjacent trees, and the length of the prefix that all their requests share and that could be cached."""

    trees: list[list[_MeasuredRequest]]
    prefix: int

    @property
    def requests(self) -> list[_MeasuredRequest]:
        """Return the requests of all its trees, in order."""
        return [measured for tree in self.trees for measured in tree]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStates:
    """The memory of what a row leaves in the model's own cache, in that of the activations of a token.

    `per_token` are its keys and values, `per_row` the states of recurrent layers, however short the row is.
    """

    per_token: float
    per_row: float

    def held(self, size: _ForkedSize, num_cached: int) -> float:
        """Return the memory of the states of all rows at once, each of which has a copy of all before it."""
        num_rows = max(size.num_contexts, size.num_rows)
        return num_rows * (self.per_row + self.per_token * (num_cached + size.context + size.row))


NO_STATES = RowStates(per_token=0, per_row=0)


@dataclass(frozen=True, slots=True, eq=False)
class _MeasuredRows:
    """The padded rows of a request: the longest in tokens, and the number of distinct ones."""

    request: ScoreRequest
    longest: int
    num_rows: int


def plan(
    requests: Sequence[ScoreRequest],
    *,
    tokens_per_batch: int,
    layout: str = STREAM,
    rotary: RotaryLengths | None = None,
    padded_to: int = 0,
    row_states: RowStates = NO_STATES,
) -> list[Batch]:
    """Return batches of at most `tokens_per_batch` tokens, padding included, the longest trees or rows first.

    All choices of a request are in one batch, so a single item may exceed the limit. Requests that cannot be scored are
    left out. With `rotary` all requests of a batch have the same rotary frequencies. `padded_to` is the least length of
    padded rows; `row_states` what rows leave in a cache, in the layout FORKED.
    """
    if tokens_per_batch < 1:
        raise ValueError(f'tokens_per_batch is {tokens_per_batch}; allowed: 1 or more')
    scorable = [request for request in requests if request.unscorable is None]
    groups = [(None, scorable)] if rotary is None else rotary.groups(scorable)
    batches: list[Batch] = []
    for length, group in groups:
        of_group = plan_alike(group, tokens_per_batch, layout, padded_to, row_states)
        batches += [replace(batch, rope_length=length) for batch in of_group]
    return batches


def plan_alike(
    scorable: Sequence[ScoreRequest], tokens_per_batch: int, layout: str, padded_to: int, states: RowStates
) -> list[Batch]:
    """Return batches of requests with the same rotary frequencies."""
    if layout == PADDED_ROWS:
        return pack_rows(scorable, tokens_per_batch, padded_to)
    if layout == FORKED:
        return plan_forks(scorable, tokens_per_batch, states)
    max_tree_tokens = min(MAX_TREE_TOKENS, tokens_per_batch)
    least_saved = LEAST_SAVED_BY_PREFIX * tokens_per_batch
    without_prefix: list[Tree] = []
    after_prefixes: list[Batch] = []
    for family in families(grow_trees(sort_requests(scorable), max_tree_tokens)):
        if not is_worth_caching(family, least_saved):
            without_prefix.extend(map(make_tree, family.trees))
            continue
        # Trees are grown again: those that only run what follows the prefix may hold more requests.
        prefix, members = family.prefix, family.requests
        groups = grow_trees(members, prefix + max_tree_tokens, prefix)
        trees = [make_tree(group, prefix) for group in groups]
        # One array for all batches: they are recognized as following one prefix by its identity.
        cached = np.ascontiguousarray(members[0].request.contexts[0][:prefix])
        after_prefixes.extend(pack_trees(trees, tokens_per_batch, cached))
    return [*pack_trees(without_prefix, tokens_per_batch), *after_prefixes]


def sort_requests(requests: Iterable[ScoreRequest]) -> list[_MeasuredRequest]:
    """Return the requests sorted by their tokens, so that requests with a common prefix are adjacent."""
    ordered = [measure_request(request) for request in requests]
    ordered.sort(key=lambda measured: (measured.context, measured.request.key))
    for before, measured in pairwise(ordered):
        measured.shared = num_shared(before.context, measured.context)
    return ordered


def measure_request(request: ScoreRequest) -> _MeasuredRequest:
    """Measure a request."""
    first = request.contexts[0]
    if all(context is first for context in request.contexts):
        num_tokens = len(first) + num_beyond_context(request.continuations)
        return _MeasuredRequest(request, sortable(first), len(first), num_tokens, nested=False)
    contexts = sorted(set(map(sortable, request.contexts)))
    common = num_shared(contexts[0], contexts[-1])  # of sorted rows, the first and the last differ earliest
    return _MeasuredRequest(request, contexts[0], common, count_prefixes((request,)), nested=True)


def num_beyond_context(continuations: Sequence[Ids]) -> int:
    """Return the number of tokens that continuations of one context add to it; their last ones are never inputs."""
    inputs = [ids[:-1] for ids in continuations if len(ids) > 1]
    if len(inputs) < 2:
        return sum(map(len, inputs))
    return num_distinct_prefixes(sorted(map(sortable, inputs)))


def grow_trees(ordered: Sequence[_MeasuredRequest], max_tokens: int, prefix: int = 0) -> list[list[_MeasuredRequest]]:
    """Join adjacent requests if one tree is less work than two, up to `max_tokens` tokens.

    After a cached prefix they are always joined, as each tree attends to the whole prefix again.
    """
    groups: list[list[_MeasuredRequest]] = []
    num_tokens = 0  # of the last group
    alike = 0  # the cacheable prefix of the last group
    for index, measured in enumerate(ordered):
        joins = bool(groups) and num_tokens + measured.num_added <= max_tokens
        if joins and not prefix:
            joins = (
                is_less_work(measured, num_tokens)
                and not ends_family(measured.shared, len(groups[-1]), alike)
                and not begins_family(ordered, index)
            )
        if joins:
            groups[-1].append(measured)
            num_tokens += measured.num_added
            alike = min(alike, measured.shared, measured.cacheable)
        else:
            groups.append([measured])
            num_tokens = measured.num_tokens
            alike = measured.cacheable
    return groups


def begins_family(ordered: Sequence[_MeasuredRequest], index: int) -> bool:
    """Return whether many requests from `index` on share far more with each other than with the previous one."""
    least = max(LEAST_PREFIX, 2 * ordered[index].shared + 1)
    following = ordered[index + 1 : index + 1 + FAMILY]
    return len(following) == FAMILY and all(measured.shared >= least for measured in following)


def ends_family(shared: int, size: int, alike: int) -> bool:
    """Return whether joining a request that shares `shared` tokens would prevent caching the prefix of the group."""
    return size > 1 and alike >= LEAST_PREFIX and 2 * shared < alike


def is_less_work(measured: _MeasuredRequest, num_tokens: int) -> bool:
    """Return whether adding a request to a tree of `num_tokens` is less work than running it alone."""
    seen = seen_by_branch(measured.shared, num_tokens)
    joined = measured.num_added * (PAIRS_PER_TOKEN + seen + measured.num_added)
    alone = measured.num_tokens * PAIRS_PER_TOKEN + pairs(measured.common, measured.num_tokens)
    return joined <= alone


def seen_by_branch(depth: int, num_tokens: int) -> int:
    """Return the number of keys in attention for a branch at this depth."""
    return min(num_tokens, depth + BRANCHES)


def pairs(chain: int, num_tokens: int) -> float:
    """Return the number of query-key pairs of a tree that starts with a chain of this length."""
    return chain * chain / 2 + (num_tokens - chain) * seen_by_branch(chain, num_tokens)


def families(trees: Sequence[list[_MeasuredRequest]]) -> list[_Family]:
    """Group adjacent trees that share a prefix of LEAST_PREFIX tokens or more; other trees are families of one."""
    grouped: list[_Family] = []
    for tree in trees:
        # The first request's `shared` is with the previous tree.
        alike = min(measured.cacheable for measured in tree)
        alike = min([alike, *(measured.shared for measured in tree[1:])])
        if grouped:
            family = grouped[-1]
            joined = min(family.prefix, alike, tree[0].shared)
            num_requests = sum(map(len, family.trees))
            if (
                joined >= LEAST_PREFIX
                and not ends_family(joined, num_requests, family.prefix)
                and not ends_family(joined, len(tree), alike)
            ):
                family.trees.append(tree)
                grouped[-1] = _Family(family.trees, joined)
                continue
        grouped.append(_Family([tree], alike))
    return grouped


def is_worth_caching(family: _Family, least_saved: float) -> bool:
    """Return whether running the prefix of a family once saves enough tokens: every tree but one runs without it."""
    return family.prefix >= LEAST_PREFIX and family.prefix * (len(family.trees) - 1) >= least_saved


def make_tree(group: Sequence[_MeasuredRequest], prefix: int = 0) -> Tree:
    """Return the tree of adjacent requests, with its exact number of tokens beyond a cached prefix."""
    requests = tuple(measured.request for measured in group)
    # If a context is the prefix of another, its continuations may coincide with the other's tokens: count exactly.
    if len(group) > 1 and is_nested(group):
        num_tokens = count_prefixes(requests)
    else:
        num_tokens = group[0].num_tokens + sum(measured.num_added for measured in group[1:])
    return Tree(requests=requests, num_tokens=num_tokens - prefix)


def is_nested(group: Sequence[_MeasuredRequest]) -> bool:
    """Return whether a context of adjacent requests may be the prefix of another."""
    return any(measured.nested for measured in group) or any(
        measured.shared * ID_BYTES == min(len(measured.context), len(before.context))
        for before, measured in pairwise(group)
    )


def make_batch(trees: Sequence[Tree], prefix: Ids | None = None) -> Batch:
    """Return trees as a batch in the stream layout."""
    num_cached = 0 if prefix is None else len(prefix)
    num_tokens = 0
    num_pairs = 0.0
    for tree in trees:
        chain = min(tree.longest_context - num_cached, tree.num_tokens)
        num_tokens += tree.num_tokens
        num_pairs += pairs(chain, tree.num_tokens) + tree.num_tokens * num_cached
    cost = num_tokens + num_pairs / PAIRS_PER_TOKEN
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
    ordered = [
        _MeasuredRows(request, longest_row(request, padded_to), num_distinct_rows(request, padded_to))
        for request in requests
    ]
    ordered.sort(key=lambda measured: (-measured.longest, measured.request.key))
    batches: list[Batch] = []
    group: list[ScoreRequest] = []
    num_rows = 0  # of the group
    width = 0  # of the group: the length of its first row, as the longest come first
    for measured in ordered:
        is_full = (num_rows + measured.num_rows) * width > tokens_per_batch
        is_wasteful = measured.longest < SHORTEST_SHARE * width and num_rows * width > LEAST_SHARE * tokens_per_batch
        if group and (is_full or is_wasteful):
            batches.append(batch_of_rows(group, padded_to))
            group, num_rows = [], 0
        if not group:
            width = measured.longest
        group.append(measured.request)
        num_rows += measured.num_rows
    if group:
        batches.append(batch_of_rows(group, padded_to))
    return batches


def batch_of_rows(requests: Sequence[ScoreRequest], padded_to: int = 0) -> Batch:
    """Return a batch of padded rows; each request counts as a tree, though its rows share nothing."""
    trees = tuple(Tree(requests=(request,), num_tokens=longest_row(request, padded_to)) for request in requests)
    width = max(tree.num_tokens for tree in trees)
    num_rows = sum(num_distinct_rows(request, padded_to) for request in requests)
    num_tokens = num_rows * width
    num_pairs = num_rows * width * width / 2
    return Batch(
        layout=PADDED_ROWS,
        trees=trees,
        num_tokens=num_tokens,
        cost=num_tokens + num_pairs / PAIRS_PER_TOKEN,
        padded_to=padded_to,
    )


def plan_forks(scorable: Sequence[ScoreRequest], tokens_per_batch: int, states: RowStates) -> list[Batch]:
    """Return batches in which what rows share runs before them, or of whole rows where that is less work."""
    ordered = sort_requests(scorable)
    without_prefix: list[_MeasuredRequest] = []
    after_prefixes: list[Batch] = []
    end = 0  # of the requests that were planned
    for family in prefix_families(ordered, tokens_per_batch):
        without_prefix += ordered[end : family.begin]
        end = family.end
        members = ordered[family.begin : family.end]
        # One array for all batches: they are recognized as following one prefix by its identity.
        prefix = np.ascontiguousarray(members[0].request.contexts[0][: family.prefix])
        trees = grow_forks(members, tokens_per_batch, states, len(prefix))
        after_prefixes += pack_forks(trees, tokens_per_batch, states, prefix)
    without_prefix += ordered[end:]
    trees = grow_forks(without_prefix, tokens_per_batch, states)
    return [*pack_forks(trees, tokens_per_batch, states), *after_prefixes]


class _PrefixFamily(NamedTuple):
    """Sorted requests from `begin` to `end` and the prefix that they share; cached, it saves so many tokens."""

    begin: int
    end: int
    prefix: int
    saved: int


@dataclass(slots=True, eq=False)
class _SharedPrefix:
    """Sorted requests from `begin` on that share `depth` tokens, and the best families among them."""

    depth: int
    begin: int
    families: list[_PrefixFamily]


def prefix_families(ordered: Sequence[_MeasuredRequest], tokens_per_batch: int) -> list[_PrefixFamily]:
    """Return the families whose cached prefixes save the most tokens together, in order.

    The requests that share a prefix are one family, or those among them that share longer ones are families of their
    own: one request with other shots does not take the prefix from the rest. Prefixes are nested, as the nodes of a
    tree: the requests are walked through once.
    """
    families: list[_PrefixFamily] = []
    opened: list[_SharedPrefix] = []  # each within the one before
    depths = [*(num_shared(before.context, after.context) for before, after in pairwise(ordered)), -1]
    for end, depth in enumerate(depths, start=1):
        begin, families = end - 1, []
        while opened and opened[-1].depth > depth:
            closed = opened.pop()
            closed.families += families
            begin = closed.begin
            whole = family_of(ordered, begin, end, closed.depth, tokens_per_batch)
            is_best = whole.saved > sum(family.saved for family in closed.families)
            families = [whole] if is_best else closed.families
        if opened and opened[-1].depth == depth:
            opened[-1].families += families
        else:
            opened.append(_SharedPrefix(depth, begin, families))
    return opened[0].families


def family_of(
    ordered: Sequence[_MeasuredRequest], begin: int, end: int, depth: int, tokens_per_batch: int
) -> _PrefixFamily:
    """Return requests that share `depth` tokens as a family; it saves nothing if its prefix is not worth caching.

    Of requests that fit into a part of a batch, what they share runs beside that of others.
    """
    if depth < LEAST_PREFIX:
        return _PrefixFamily(begin, end, depth, 0)
    members = ordered[begin:end]
    prefix = min([depth, *(measured.cacheable for measured in members)])
    num_after = sum(measured.num_tokens - prefix for measured in members)
    saved = prefix * (len(members) - 1)
    is_worth_it = (
        prefix >= LEAST_PREFIX
        and saved >= LEAST_SAVED_BY_PREFIX * tokens_per_batch
        and num_after >= LEAST_AFTER_PREFIX * tokens_per_batch
    )
    return _PrefixFamily(begin, end, prefix, saved - LEAST_PREFIX if is_worth_it else 0)


def grow_forks(
    ordered: Sequence[_MeasuredRequest], tokens_per_batch: int, states: RowStates, num_cached: int = 0
) -> list[Tree]:
    """Join adjacent requests where running what they share once, before all their rows, saves the most tokens.

    `ordered` are sorted by their tokens, and begin with a cached prefix. Requests that save too little do not fork.
    """
    trees = []
    for group, fork in best_groups(ordered, tokens_per_batch, states, num_cached):
        requests = tuple(measured.request for measured in group)
        trees.append(Tree(requests=requests, num_tokens=0, fork=fork))
    return trees


def best_groups(
    ordered: Sequence[_MeasuredRequest],
    tokens_per_batch: float = math.inf,
    states: RowStates = NO_STATES,
    num_cached: int = 0,
) -> list[tuple[Sequence[_MeasuredRequest], int]]:
    """Return the groups of adjacent requests that save the most, and the length of what the rows of each share.

    A group is no larger than a batch. What it saves counts from the best groups of the requests before it.
    """
    num_rows = [num_distinct_rows(measured.request) for measured in ordered]
    shared = [0, *(num_shared(before.context, measured.context) for before, measured in pairwise(ordered))]
    saved: list[int] = [0]  # by the best groups of the first requests
    groups: list[tuple[int, int]] = []  # the last of these groups: where it begins, and what its rows share
    for end, last in enumerate(ordered):
        rows, tokens, fork = 0, 0, last.common - num_cached
        best = -1
        for begin in range(end, -1, -1):
            measured = ordered[begin]
            fork = min(fork, measured.common - num_cached)
            rows += num_rows[begin]
            tokens += measured.num_tokens - num_cached
            is_full = max(tokens, rows * states.per_row) > tokens_per_batch
            if begin < end and (is_full or fork <= COPY_TOKENS):
                break
            gain = saved_by_fork(rows, fork)
            if saved[begin] + gain > best:
                best = saved[begin] + gain
                chosen = (begin, fork if gain else 0)
            fork = min(fork, shared[begin] - num_cached)
        saved.append(best)
        groups.append(chosen)

    in_order = []
    end = len(ordered)
    while end:
        begin, fork = groups[end - 1]
        in_order.append((ordered[begin:end], fork))
        end = begin
    return in_order[::-1]


def saved_by_fork(num_rows: int, fork: int) -> int:
    """Return the tokens that rows need less if the first `fork` tokens, which they share, run once; 0 if none."""
    return max(0, (num_rows - 1) * fork - num_rows * COPY_TOKENS)


class _ForkedSize(NamedTuple):
    """The shape of trees that run together: their contexts, if they fork, and the rows that follow.

    `num_inputs` are all distinct rows and `longest` the longest of them, contexts included; `num_rows` those that
    continue a context, and `row` the longest of these without it. `num_own` are the tokens of contexts without padding.
    """

    num_contexts: int
    context: int
    num_inputs: int
    longest: int
    num_rows: int
    row: int
    num_own: int

    @property
    def num_tokens(self) -> int:
        """Return the input tokens, with padding."""
        return self.num_contexts * self.context + self.num_rows * self.row

    def joined(self, other: _ForkedSize, *, cuts: bool) -> _ForkedSize:
        """Return the shape of both together: contexts padded to the longer, or cut to the shorter.

        What is cut from a context is part of each of its rows.
        """
        longest = max(self.longest, other.longest)
        if cuts:
            context = min(self.context, other.context)
            num_rows = sum(size.num_inputs if size.context > context else size.num_rows for size in (self, other))
            row = longest - context if num_rows else 0
        else:
            context = max(self.context, other.context)
            num_rows = self.num_rows + other.num_rows
            row = max(self.row, other.row)
        return _ForkedSize(
            num_contexts=self.num_contexts + other.num_contexts,
            context=context,
            num_inputs=self.num_inputs + other.num_inputs,
            longest=longest,
            num_rows=num_rows,
            row=row,
            num_own=self.num_own + other.num_own,
        )


def forked_size(tree: Tree, num_cached: int) -> _ForkedSize:
    """Return the shape of one tree after a cached prefix."""
    lengths = row_lengths(tree, num_cached)
    beyond = [length - tree.fork for length in lengths if length > tree.fork]
    return _ForkedSize(
        num_contexts=int(tree.fork > 0),
        context=tree.fork,
        num_inputs=len(lengths),
        longest=max(lengths),
        num_rows=len(beyond),
        row=max(beyond, default=0),
        num_own=tree.fork,
    )


def pack_forks(
    trees: Sequence[Tree], tokens_per_batch: int, states: RowStates, prefix: Ids | None = None
) -> list[Batch]:
    """Return batches of trees of similar shape, the longest first, those that fork before those that do not."""
    num_cached = 0 if prefix is None else len(prefix)
    measured = [(forked_size(tree, num_cached), tree) for tree in trees]
    measured.sort(key=lambda pair: (-pair[0].context, -pair[0].row, pair[1].requests[0].key))
    batches: list[Batch] = []
    group: list[Tree] = []
    size: _ForkedSize | None = None  # of the group
    for of_tree, tree in measured:
        if size is not None:
            joined = size.joined(of_tree, cuts=num_cached > 0)
            is_full = joined.num_tokens > tokens_per_batch or states.held(joined, num_cached) > tokens_per_batch
            is_padded = joined.num_contexts * joined.context > MOST_PADDED * joined.num_own
            if not joined.context:
                is_padded = of_tree.row < SHORTEST_SHARE * size.row
            is_wasteful = is_padded and size.num_tokens > LEAST_SHARE * tokens_per_batch
            if is_full or is_wasteful or (size.context > 0) != (of_tree.context > 0):
                batches.append(batch_of_forks(group, prefix))
                group, size = [], None
        group.append(tree)
        size = of_tree if size is None else joined
    if group:
        batches.append(batch_of_forks(group, prefix))
    return batches


def batch_of_forks(trees: Sequence[Tree], prefix: Ids | None = None) -> Batch:
    """Return a batch in the layout FORKED of trees that all fork, or of whole rows.

    After a cached prefix contexts are cut to one length: padding between the prefix and a context would count.
    """
    num_cached = 0 if prefix is None else len(prefix)
    if num_cached:
        shortest = min(tree.fork for tree in trees)
        trees = [replace(tree, fork=shortest) for tree in trees]
    lengths_by_tree = [
        [length - tree.fork for length in row_lengths(tree, num_cached) if length > tree.fork] for tree in trees
    ]
    context = max(tree.fork for tree in trees)
    num_contexts = sum(tree.fork > 0 for tree in trees)
    all_lengths = [length for lengths in lengths_by_tree for length in lengths]
    # Whole rows run in one forward.
    widths = iter(padded_lengths(all_lengths) if num_contexts else [max(all_lengths)] * len(all_lengths))

    padded = []
    num_pairs = num_contexts * context * (num_cached + context / 2)
    for tree, lengths in zip(trees, lengths_by_tree, strict=True):
        of_tree = list(islice(widths, len(lengths)))
        num_tokens = sum(of_tree) + (context if tree.fork else 0)
        padded.append(replace(tree, num_tokens=num_tokens))
        num_pairs += sum(width * (num_cached + context + width / 2) for width in of_tree)
    num_tokens = sum(tree.num_tokens for tree in padded)
    return Batch(
        layout=FORKED,
        trees=tuple(padded),
        num_tokens=num_tokens,
        cost=num_tokens + num_pairs / PAIRS_PER_TOKEN,
        prefix=prefix,
    )


def row_lengths(tree: Tree, num_cached: int) -> list[int]:
    """Return the lengths of a tree's distinct rows after a cached prefix."""
    rows = {row.tobytes(): len(row) for request in tree.requests for row in input_rows(request)}
    return [length - num_cached for length in rows.values()]


def padded_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the length to which each row is padded: that of the longest row of its forward.

    Rows of similar length run together: where a further forward saves more than LEAST_SPLIT tokens of padding, there is
    one.
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    in_order = [lengths[row] for row in longest_first]
    padded = [0] * len(lengths)
    parts = [(0, len(lengths))]
    while parts:
        begin, end = parts.pop()
        place = best_split(in_order[begin:end])
        if place:
            parts += [(begin, begin + place), (begin + place, end)]
        else:
            for row in longest_first[begin:end]:
                padded[row] = in_order[begin]
    return padded


def best_split(lengths: Sequence[int]) -> int:
    """Return where a split of rows, the longest first, saves the most padding; 0 if that is too little."""
    saved = [(len(lengths) - place) * (lengths[0] - length) for place, length in enumerate(lengths)]
    most = max(saved, default=0)
    return saved.index(most) if most > LEAST_SPLIT else 0


def longest_row(request: ScoreRequest, padded_to: int = 0) -> int:
    """Return the length of the request's longest input row."""
    rows = zip(request.contexts, request.continuations, strict=True)
    longest = max(len(context) + len(continuation) for context, continuation in rows)
    return max(longest, padded_to) if padded_to else longest - 1


def num_distinct_rows(request: ScoreRequest, padded_to: int = 0) -> int:
    """Return the number of distinct input rows of the request."""
    rows = whole_rows(request) if padded_to else input_rows(request)
    return len({row.tobytes() for row in rows})
