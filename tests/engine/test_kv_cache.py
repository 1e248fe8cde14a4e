"""The KV cache: what rows see, compared with lists of their own tokens while rows enter, leave and move."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import CPU

from llmfoundry_gauntlet.engine import kv_cache
from llmfoundry_gauntlet.engine.kv_cache import CachedAttention, KVCache

LONGEST_CONTEXT = 5
LONGEST_ROW = 9
NUM_SLOTS = 4
NUM_LAYERS = 2
PADDING = -7.0
MOST_COLUMNS = LONGEST_ROW + 2 * 2


@pytest.fixture(autouse=True, scope='module')
def columns_that_soon_end():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, 'GROWTH', 2)
        yield


@dataclass
class Row:
    """The expected state of a row: the token of each of its columns, and whether it is seen."""

    context: list[tuple[float, bool]]
    end: int  # of its prompt, in columns from before any move
    generated: list[float] = field(default_factory=list)

    @property
    def seen(self) -> list[float]:
        return [token for token, is_seen in self.context if is_seen] + self.generated

    @property
    def is_full(self) -> bool:
        return len(self.context) + len(self.generated) == LONGEST_ROW - 1


class Model:
    """A stand-in for a model whose keys are token ids and whose values are their negatives, in two layers."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.cache = KVCache(NUM_SLOTS, longest_context=LONGEST_CONTEXT, device=CPU)
        self.rows: list[Row] = []
        self.last = 0.0

    def token(self) -> float:
        self.last += 1
        return self.last

    def states(self, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of tokens [rows, columns], by layer."""
        tokens = tokens[:, None, :, None]
        return [(100 * layer + tokens, -tokens) for layer in range(NUM_LAYERS)]

    def forward(self, tokens: torch.Tensor, *, is_step: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tokens according to the keys and values that each layer's attention gets, [rows, columns]."""
        new = self.states(tokens)
        found = [self.cache.update(*states, layer) for layer, states in enumerate(new)]
        width, first = self.cache.get_mask_sizes(torch.arange(tokens.shape[1]), 0)
        assert (width, first) == (found[0][0].shape[2], 0)
        assert self.cache.get_seq_length() == (self.cache.column - 1 if is_step else 0)
        return [(keys[:, 0, :, 0] - 100 * layer, -values[:, 0, :, 0]) for layer, (keys, values) in enumerate(found)]

    def stream(self, contexts: list[list[float]]) -> None:
        """Run prompts as a stream, in which their tokens are interleaved in any order."""
        order = np.random.default_rng(len(contexts)).permutation(3 + sum(map(len, contexts)))
        tokens = torch.full((1, len(order)), PADDING)
        places = np.full((len(contexts), max(map(len, contexts))), order[-1])
        done = 0
        for place, context in zip(places, contexts, strict=True):
            place[len(place) - len(context) :] = order[done : done + len(context)]
            tokens[0, order[done : done + len(context)]] = torch.tensor(context)
            done += len(context)
        self.cache.take_stream(dict(enumerate(self.states(tokens))), torch.from_numpy(places))

    # What may happen, each with a number that decides on its details.

    def enter(self, choice: int) -> None:
        rng = np.random.default_rng(choice)
        free = NUM_SLOTS - len(self.rows)
        if not free:
            return
        lengths = rng.integers(1, LONGEST_CONTEXT + 1, rng.integers(1, free + 1)).tolist()
        width = max(lengths)
        tokens = torch.full((len(lengths), width), PADDING)
        seen = torch.zeros(tokens.shape, dtype=torch.bool)
        contexts = []
        for row, length in enumerate(lengths):
            context = [(self.token(), self.layout == 'stream' or bool(rng.integers(4))) for _ in range(length)]
            contexts.append([token for token, _ in context])
            tokens[row, width - length :] = torch.tensor(contexts[-1])
            seen[row, width - length :] = torch.tensor([is_seen for _, is_seen in context])
            self.rows.append(Row(context, self.cache.column + self.cache.moved))
        self.cache.enter(lengths, seen)
        if self.layout == 'stream':
            self.stream(contexts)
            return
        for keys, values in self.forward(tokens, is_step=False):
            assert torch.equal(keys, tokens) and torch.equal(values, tokens)

    def step(self, _: int = 0) -> None:
        full = [slot for slot, row in enumerate(self.rows) if row.is_full]
        if full:
            self.leave_all(full)
        if not self.rows:
            return
        for row in self.rows:
            row.generated.append(self.token())
        self.cache.step()
        tokens = [row.generated[-1] for row in self.rows]
        seen = self.cache.seen()
        assert seen.shape[1] <= MOST_COLUMNS
        for keys, values in self.forward(torch.tensor(tokens)[:, None], is_step=True):
            assert keys.shape == values.shape == seen.shape
            assert keys.isfinite().all() and values.isfinite().all()
            for slot, row in enumerate(self.rows):
                assert keys[slot, seen[slot]].tolist() == row.seen
                assert values[slot, seen[slot]].tolist() == row.seen

    def leave(self, choice: int) -> None:
        self.leave_all([slot for slot in range(len(self.rows)) if choice >> slot & 1])

    def leave_all(self, slots: list[int]) -> None:
        order = self.cache.leave(slots)
        assert sorted(order) == [slot for slot in range(len(self.rows)) if slot not in slots]
        self.rows = [self.rows[slot] for slot in order]
        assert self.cache.num_used == len(self.rows)

    def spoil(self, choice: int) -> None:
        if self.rows:
            slot = choice % len(self.rows)
            for buffer in (buffer for buffers in self.cache._layers.values() for buffer in buffers):
                buffer[slot] = torch.nan
            self.cache.clear(slot)
            self.leave_all([slot])

    def copy(self, choice: int) -> None:
        """Add a row with the prompt of another."""
        if 0 < len(self.rows) < NUM_SLOTS:
            slot = choice % len(self.rows)
            row = self.rows[slot]
            self.rows.append(Row(row.context, self.cache.column + self.cache.moved))
            self.cache.copy_prompt(slot, row.end, len(row.context), len(self.rows) - 1)

    def restart(self, choice: int) -> None:
        """Reset a row to its prompt."""
        if self.rows:
            slot = choice % len(self.rows)
            row = self.rows[slot]
            self.rows[slot] = Row(row.context, self.cache.column + self.cache.moved)
            self.cache.copy_prompt(slot, row.end, len(row.context), slot)


EVENTS = ['step', 'step', 'step', 'step', 'enter', 'enter', 'copy', 'restart', 'leave', 'spoil']
events = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1000)), max_size=40)


@given(events, st.sampled_from(['cache', 'stream']))
def test_a_row_sees_its_own_tokens_in_order(happening, layout: str):
    """Mutations: a mask not written; `starts` not in the new order; `moved` not subtracted from `end`; columns moved
    without their mask; values written as keys; positions of a stream taken in order; no `clear`.
    """
    model = Model(layout)
    model.enter(len(happening))
    for event, choice in happening:
        getattr(model, event)(choice)
        model.step()
    while model.rows:
        model.step()


@pytest.mark.parametrize(('counts_masked', 'positions'), [(True, [0, 1, 2, 3]), (False, [0, 0, 1, 2])])
def test_positions_of_biases_count_masked_tokens_as_the_model_does(counts_masked: bool, positions: list[int]):
    """A prompt of three tokens, the second masked, and a step: MPT counts columns, Bloom the tokens that are seen."""
    cache = KVCache(1, longest_context=3, device=CPU)
    cache.enter([3], torch.tensor([[True, False, True]]))
    prompt = CachedAttention(cache, 3, None, counts_masked=counts_masked)
    assert prompt.positions[0].tolist() == positions[:3]
    assert prompt.seen[0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]  # a masked token sees itself
    cache.step()
    step = CachedAttention(cache, 1, None, counts_masked=counts_masked)
    assert step.positions[0, :4].tolist() == positions
    assert step.seen[0, 0, :5].int().tolist() == [1, 0, 1, 1, 0]
