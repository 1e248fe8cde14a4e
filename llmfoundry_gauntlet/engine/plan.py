"""Plan batches: requests that share prefixes are computed together. Imports no torch.

The batches are a function of the whole set of requests, `tokens_per_batch` and the layout alone. Requests whose
prompts begin alike are joined into trees in which each distinct prefix stands once, where that is less work than
running them apart; a continuation's last token is never an input, so single-token choices cost nothing beyond their
context. Where many trees begin alike, that beginning is a prefix, run once and kept.

Work is measured in tokens: PAIRS_PER_TOKEN pairs of a query and a key in attention count as one token in the linear
layers. The true figure depends on the model (about 2,000 for a width of 512 on a CPU, more for wider models).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from llmfoundry_gauntlet.engine.layout import Tree, count_prefixes, input_row, num_distinct_prefixes, num_shared
from llmfoundry_gauntlet.engine.rotary_lengths import RotaryLengths
from llmfoundry_gauntlet.types import Ids, ScoreRequest

STREAM = 'stream'  # trees one after the other, attention by tree
MASKED_ROWS = 'masked_rows'  # trees in rows, attention by a dense mask
PADDED_ROWS = 'padded_rows'  # one row a sequence: runs with every model
LAYOUTS = (STREAM, MASKED_ROWS, PADDED_ROWS)  # the least work first

PAIRS_PER_TOKEN = 2048
MAX_TREE_TOKENS = {STREAM: 4096, MASKED_ROWS: 1024}  # under a dense mask work grows with its square
BRANCHES = 128  # tokens of a stream that share a call of attention, about
LEAST_PREFIX = 64  # tokens
FAMILY = 8  # requests that make it worth starting a tree anew
LEAST_SAVED_BY_PREFIX = 1 / 32  # of tokens_per_batch: a forward of its own must be worth it

# A batch of padded rows is closed early, once it holds this share of its tokens, where rows become shorter than this
# share of its longest: padding costs more than a further forward.
LEAST_SHARE = 1 / 16
SHORTEST_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Requests that are run together. `trees` holds them by tree; padded rows need none.

    `num_tokens` is what the model is given, without padding, a kept `prefix` left out. `cost` is the estimated work
    in tokens. A batch without requests runs its prefix. `rope_length` decides the rotary frequencies of all its rows,
    None where no length does.
    """

    layout: str
    trees: tuple[Tree, ...]
    num_tokens: int
    cost: float
    prefix: Ids | None = None
    rope_length: int | None = None

    @property
    def requests(self) -> tuple[ScoreRequest, ...]:
        """All requests, in the order of their outputs."""
        return tuple(request for tree in self.trees for request in tree.requests)

    def halves(self) -> tuple[Batch, ...]:
        """The batch in two of about equal tokens, each running what is its own; itself where it cannot be split."""
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
            halves = [batch_of_rows([tree.requests[0] for tree in part]) for part in parts]
        else:
            halves = [make_batch(part, self.layout, self.prefix) for part in parts]
        return tuple(replace(half, rope_length=self.rope_length) for half in halves)

    def _tree(self, requests: tuple[ScoreRequest, ...]) -> Tree:
        num_kept = 0 if self.prefix is None else len(self.prefix)
        return Tree(requests=requests, num_tokens=count_prefixes(requests) - num_kept)


@dataclass(slots=True, eq=False)
class _Shape:
    """A request in the order of planning: `lead` is its first context, `trunk` what all its contexts begin with."""

    request: ScoreRequest
    spelled: bytes  # of the lead, in an order that compares token by token
    trunk: int
    num_tokens: int
    nested: bool  # its own sequences are not simply trunk and choices
    shared: int = 0  # tokens that its lead begins with like the lead before

    @property
    def lead_length(self) -> int:
        return len(self.spelled) // 4

    @property
    def kept(self) -> int:
        """Tokens that could be a kept prefix of all contexts, one left for each to be read from."""
        return min(self.trunk, self.lead_length - 1)


def plan(
    requests: Sequence[ScoreRequest],
    *,
    tokens_per_batch: int,
    layout: str = STREAM,
    rotary: RotaryLengths | None = None,
) -> list[Batch]:
    """Batches of at most `tokens_per_batch` tokens, those of the longest trees or rows first.

    All choices of a request are in one batch, so one item alone may be larger. Requests that cannot be scored are
    left out. Padded rows count with their padding. With `rotary` all requests of a batch have the same frequencies.
    """
    if tokens_per_batch < 1:
        raise ValueError(f'tokens_per_batch is {tokens_per_batch}; allowed: 1 or more')
    scorable = [request for request in requests if request.unscorable is None]
    groups = [(None, scorable)] if rotary is None else rotary.groups(scorable)
    return [
        replace(batch, rope_length=length)
        for length, group in groups
        for batch in plan_alike(group, tokens_per_batch, layout)
    ]


def plan_alike(scorable: Sequence[ScoreRequest], tokens_per_batch: int, layout: str) -> list[Batch]:
    """Batches of requests that may all be run together."""
    if layout == PADDED_ROWS:
        return pack_rows(scorable, tokens_per_batch)
    shapes = in_order(scorable)
    batches: list[Batch] = []
    loose: list[Tree] = []
    cap = min(MAX_TREE_TOKENS[layout], tokens_per_batch)
    least_saved = LEAST_SAVED_BY_PREFIX * tokens_per_batch if layout == STREAM else math.inf
    for family, prefix in families(grow_trees(shapes, cap, layout), least_saved):
        if prefix == 0:
            loose.extend(map(make_tree, family))
            continue
        members = [shape for group in family for shape in group]
        trees = [make_tree(group, prefix) for group in grow_trees(members, prefix + cap, layout, prefix)]
        kept = np.ascontiguousarray(members[0].request.contexts[0][:prefix])
        batches.extend(pack_trees(trees, layout, tokens_per_batch, kept))
    return [*pack_trees(loose, layout, tokens_per_batch, None), *batches]


def in_order(requests: Iterable[ScoreRequest]) -> list[_Shape]:
    """The requests sorted by their tokens, so that those that begin alike are neighbours."""
    shapes = sorted(map(shape_of, requests), key=lambda shape: (shape.spelled, shape.request.key))
    before = b''
    for shape in shapes:
        shape.shared = num_shared(before, shape.spelled)
        before = shape.spelled
    return shapes


def shape_of(request: ScoreRequest) -> _Shape:
    """A request's measures."""
    lead = request.contexts[0]
    spelled = lead.astype('>i4').tobytes()
    if all(context is lead for context in request.contexts):
        beyond, nested = 0, False
        longer = [continuation for continuation in request.continuations if len(continuation) > 1]
        if len(longer) == 1:
            beyond = len(longer[0]) - 1
        elif longer:
            beyond = num_distinct_prefixes(sorted(ids[:-1].astype('>i4').tobytes() for ids in longer))
        return _Shape(request, spelled, len(lead), len(lead) + beyond, nested)
    leads = sorted({context.astype('>i4').tobytes() for context in request.contexts})
    trunk = num_shared(leads[0], leads[-1])
    return _Shape(request, leads[0], trunk, count_prefixes((request,)), True)


def grow_trees(shapes: Sequence[_Shape], cap: int, layout: str, prefix: int = 0) -> list[list[_Shape]]:
    """Neighbours joined where one tree is less work than two, up to `cap` tokens.

    After a kept prefix they are joined anyway, as each tree reads all of it again.
    """
    groups: list[list[_Shape]] = []
    num_tokens = alike = 0
    for index, shape in enumerate(shapes):
        added = shape.num_tokens - shape.shared
        joins = bool(groups) and num_tokens + added <= cap
        if joins and not prefix:
            joins = is_less_work(shape, num_tokens, added, layout)
            joins = joins and not leaves_early(shape.shared, groups[-1], alike) and not begins_family(shapes, index)
        if joins:
            groups[-1].append(shape)
            num_tokens += added
            alike = min(alike, shape.shared, shape.kept)
        else:
            groups.append([shape])
            num_tokens, alike = shape.num_tokens, shape.kept
    return groups


def begins_family(shapes: Sequence[_Shape], index: int) -> bool:
    """Return whether many requests from this one on share far more with each other than it does with the one before."""
    least = max(LEAST_PREFIX, 2 * shapes[index].shared + 1)
    following = shapes[index + 1 : index + 1 + FAMILY]
    return len(following) == FAMILY and all(shape.shared >= least for shape in following)


def leaves_early(shared: int, group: Sequence[_Shape], alike: int) -> bool:
    """Return whether joining what shares so few tokens would keep a beginning of `alike` tokens from being run once."""
    return len(group) > 1 and alike >= LEAST_PREFIX and 2 * shared < alike


def is_less_work(shape: _Shape, num_tokens: int, added: int, layout: str) -> bool:
    """Return whether `added` tokens after a tree of `num_tokens` are less work than the request by itself."""
    seen = seen_by_branch(shape.shared, num_tokens, layout)
    joined = added * (PAIRS_PER_TOKEN + seen + added)
    return joined <= shape.num_tokens * PAIRS_PER_TOKEN + pairs(shape.trunk, shape.num_tokens, layout)


def seen_by_branch(depth: int, num_tokens: int, layout: str) -> int:
    """Keys of attention for tokens that leave the first path of a tree so deep: under a dense mask all of the tree."""
    return min(num_tokens, depth + BRANCHES) if layout == STREAM else num_tokens


def pairs(trunk: int, num_tokens: int, layout: str) -> float:
    """Pairs of query and key in a tree whose first `trunk` tokens are a chain."""
    return trunk * trunk / 2 + (num_tokens - trunk) * seen_by_branch(trunk, num_tokens, layout)


def families(groups: Sequence[list[_Shape]], least_saved: float) -> list[tuple[list[list[_Shape]], int]]:
    """Neighbouring trees that begin alike, with the length of the beginning where keeping it saves enough, else 0."""
    found: list[tuple[list[list[_Shape]], int]] = []
    for group in groups:
        alike = common(group)
        if found:
            family, prefix = found[-1]
            joined = min(prefix, alike, group[0].shared)
            members = [shape for part in family for shape in part]
            if (
                joined >= LEAST_PREFIX
                and not leaves_early(joined, members, prefix)
                and not leaves_early(joined, group, alike)
            ):
                family.append(group)
                found[-1] = (family, joined)
                continue
        found.append(([group], alike))
    return [(family, prefix if is_worth_keeping(family, prefix, least_saved) else 0) for family, prefix in found]


def is_worth_keeping(family: Sequence[list[_Shape]], prefix: int, least_saved: float) -> bool:
    """Return whether a prefix saves enough by running once instead of in each tree."""
    return prefix >= LEAST_PREFIX and prefix * (len(family) - 1) >= least_saved


def num_tokens_of(group: Sequence[_Shape]) -> int:
    """Tokens of a tree, at most: what a context goes on with like the continuations before is counted twice."""
    return group[0].num_tokens + sum(shape.num_tokens - shape.shared for shape in group[1:])


def common(group: Sequence[_Shape]) -> int:
    """Tokens that all contexts of a tree begin with and that can be kept."""
    return min([*(shape.shared for shape in group[1:]), *(shape.kept for shape in group)])


def make_tree(group: Sequence[_Shape], prefix: int = 0) -> Tree:
    """The tree of neighbours, its tokens counted exactly, those of a kept prefix left out."""
    requests = tuple(shape.request for shape in group)
    # A context that another begins with may go on with the same tokens as its continuations: only a count tells.
    nested = any(shape.nested for shape in group) or any(
        shape.shared == min(shape.lead_length, before.lead_length) for before, shape in pairwise(group)
    )
    num_tokens = count_prefixes(requests) if nested and len(requests) > 1 else num_tokens_of(group)
    return Tree(requests=requests, num_tokens=num_tokens - prefix)


def make_batch(trees: Sequence[Tree], layout: str, prefix: Ids | None) -> Batch:
    """The batch of these trees."""
    num_kept = 0 if prefix is None else len(prefix)
    num_tokens = sum(tree.num_tokens for tree in trees)
    in_attention = sum(
        pairs(min(tree.longest_context - num_kept, tree.num_tokens), tree.num_tokens, layout)
        + tree.num_tokens * num_kept
        for tree in trees
    )
    cost = num_tokens + in_attention / PAIRS_PER_TOKEN
    return Batch(layout=layout, trees=tuple(trees), num_tokens=num_tokens, cost=cost, prefix=prefix)


def pack_trees(trees: list[Tree], layout: str, tokens_per_batch: int, prefix: Ids | None) -> list[Batch]:
    """Trees of like size together, the largest first."""
    batches = []
    group: list[Tree] = []
    num_tokens = 0
    for tree in sorted(trees, key=lambda tree: (-tree.num_tokens, tree.requests[0].key)):
        if group and num_tokens + tree.num_tokens > tokens_per_batch:
            batches.append(make_batch(group, layout, prefix))
            group, num_tokens = [], 0
        group.append(tree)
        num_tokens += tree.num_tokens
    if group:
        batches.append(make_batch(group, layout, prefix))
    return batches


def pack_rows(requests: Sequence[ScoreRequest], tokens_per_batch: int) -> list[Batch]:
    """Rows of like length together, the longest first, within the tokens that they have once padded."""
    measured = [(request, longest_row(request), num_distinct_rows(request)) for request in requests]
    measured.sort(key=lambda entry: (-entry[1], entry[0].key))
    batches: list[Batch] = []
    group: list[ScoreRequest] = []
    width = num_rows = 0
    for request, length, rows in measured:
        full = (num_rows + rows) * width > tokens_per_batch
        wasteful = length < SHORTEST_SHARE * width and num_rows * width > LEAST_SHARE * tokens_per_batch
        if group and (full or wasteful):
            batches.append(batch_of_rows(group))
            group, num_rows = [], 0
        if not group:
            width = length
        group.append(request)
        num_rows += rows
    if group:
        batches.append(batch_of_rows(group))
    return batches


def batch_of_rows(requests: Sequence[ScoreRequest]) -> Batch:
    """A batch of padded rows. Each request stands for a tree, though its rows are run one by one."""
    trees = tuple(Tree(requests=(request,), num_tokens=longest_row(request)) for request in requests)
    width = max(tree.num_tokens for tree in trees)
    num_rows = sum(map(num_distinct_rows, requests))
    cost = num_rows * width + num_rows * width * width / 2 / PAIRS_PER_TOKEN
    return Batch(layout=PADDED_ROWS, trees=trees, num_tokens=num_rows * width, cost=cost)


def longest_row(request: ScoreRequest) -> int:
    """Tokens of the request's longest input row."""
    return max(len(a) + len(b) - 1 for a, b in zip(request.contexts, request.continuations, strict=True))


def num_distinct_rows(request: ScoreRequest) -> int:
    """Input rows of the request, equal ones counted once."""
    pairs_of_parts = zip(request.contexts, request.continuations, strict=True)
    return len({input_row(context, continuation).tobytes() for context, continuation in pairs_of_parts})
