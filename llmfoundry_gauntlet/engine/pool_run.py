"""One pool of requests while its replies are written: which rows there are, and what each forward is of."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmfoundry_gauntlet.engine.layout import num_shared
from llmfoundry_gauntlet.engine.pools import Pool, begins_alike
from llmfoundry_gauntlet.engine.reply import Reply, uniform_draws
from llmfoundry_gauntlet.engine.row_cache import RowCache
from llmfoundry_gauntlet.engine.sampling import next_tokens
from llmfoundry_gauntlet.types import Bools, GenerateRequest, Generation, Ids, ItemKey

if TYPE_CHECKING:
    from llmfoundry_gauntlet.engine.generation import ReplyWriter

ENTERING_SHARE = 8  # prompts are run once this share of the rows is free


@dataclass(slots=True)
class Usage:
    """Counts of the forwards of generations."""

    steps: int = 0
    written: int = 0  # tokens, one a row and step
    places: int = 0  # rows that could have been written in these steps
    prompt_tokens: int = 0
    padding_tokens: int = 0  # beside them

    @property
    def wasted(self) -> float:
        """The share of computed tokens that was padding."""
        computed = self.written + self.prompt_tokens + self.padding_tokens
        return self.padding_tokens / computed if computed else 0.0

    @property
    def idle(self) -> float:
        """The share of places in which no row was written, for want of further requests."""
        return 1 - self.written / self.places if self.places else 0.0


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and the requests for replies to it that wait. `logits` [V] are those after it, once it was run."""

    context: Ids
    waiting: deque[GenerateRequest]
    logits: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Row:
    """A reply that is being written. `end` is the column after its prompt, `position` that of its next token."""

    prompt: Prompt
    reply: Reply
    draws: Iterator[float] | None
    end: int = 0
    position: int = 0


def choose(rows: Sequence[Row], logits: torch.Tensor) -> list[int]:
    """The next token of each row, as its request wants it."""
    draws = [None if row.draws is None else next(row.draws) for row in rows]
    return next_tokens(logits, [row.reply.request.sampling for row in rows], draws)


class PoolRun:
    """One pool while its replies are written, at most `num_rows` at a time. Finished ones go to `done`.

    Every turn of its loop makes one forward, so that ranks of a sharded model can take part in each other's.
    """

    def __init__(self, writer: ReplyWriter, pool: Pool, num_rows: int, done: dict[ItemKey, Generation]) -> None:
        self.writer = writer
        self.pool = pool
        self.done = done
        self.num_rows = num_rows
        self.streams = writer.streams
        if not writer.keeps and pool.requests:
            self.num_rows = max(1, min(num_rows, pool.tokens_per_batch // pool.longest))
        left = [request for request in pool.requests if request.key not in done]
        self.prompts = deque(
            Prompt(context=same[0].context, waiting=deque(same))
            for same in (list(group) for _, group in groupby(left, key=lambda request: request.context.tobytes()))
        )
        self.rows: list[Row] = []
        self.cache: RowCache | None = None
        if writer.keeps and left:
            self.cache = RowCache(
                self.num_rows,
                longest_context=max(len(request.context) for request in left),
                device=writer.language_model.device,
            )

    def run(self) -> None:
        """Writes all replies."""
        while self.writer.is_any(bool(self.prompts or self.rows)):
            free = self.num_rows - len(self.rows)
            if self.prompts and (not self.rows or free >= max(1, self.num_rows // ENTERING_SHARE)):
                self.enter(free)
            elif self.rows:
                self.step()
            else:
                self.writer.take_part()

    def enter(self, free: int) -> None:
        """Runs the next prompts, and starts a reply to each, further ones to the same prompt while there is room."""
        if self.cache is None:
            while self.prompts and len(self.rows) < self.num_rows:
                prompt = self.prompts[0]
                self.rows.append(self.row(prompt, prompt.waiting.popleft()))
                if not prompt.waiting:
                    self.prompts.popleft()
            self.step()
            return
        prompts = self.next_prompts(free)
        logits = self.run_prompts(prompts, self.cache)
        if self.streams and len(prompts) > 1 and not torch.isfinite(logits.amax(dim=-1)).all():
            self.take_back(prompts)
            return
        first_slot = len(self.rows)
        new = [self.row(prompt, prompt.waiting.popleft()) for prompt in prompts]
        sources = list(range(len(new)))
        for index, prompt in enumerate(prompts):
            while prompt.waiting and first_slot + len(new) < self.num_rows:
                new.append(self.row(prompt, prompt.waiting.popleft()))
                sources.append(index)
                self.cache.copy_prompt(
                    first_slot + index, new[index].end, len(prompt.context), first_slot + len(new) - 1
                )
            if prompt.waiting:
                prompt.logits = logits[index].clone()
        self.rows += new
        self.write(new, logits[sources])

    def take_back(self, prompts: Sequence[Prompt]) -> None:
        """Has prompts wait again, for padded rows: in a stream one without numbers spoils those that begin like it."""
        if self.cache is None:
            raise RuntimeError('prompts are taken back, though nothing is kept of them')
        self.streams = False
        slots = range(len(self.rows), len(self.rows) + len(prompts))
        for slot in slots:
            self.cache.clear(slot)
        self.cache.leave(slots)
        self.prompts.extendleft(reversed(prompts))

    def next_prompts(self, free: int) -> list[Prompt]:
        """As many waiting prompts as there are free rows and a batch has tokens for."""
        chosen: list[Prompt] = []
        width = total = 0
        while self.prompts and len(chosen) < free:
            context = self.prompts[0].context
            width, total = max(width, len(context)), total + len(context)
            if self.streams and chosen:
                shared = num_shared(chosen[-1].context.tobytes(), context.tobytes())
                total -= shared if begins_alike(shared, len(context)) else 0
            num_tokens = total if self.streams else width * (len(chosen) + 1)
            if chosen and num_tokens > self.pool.tokens_per_batch:
                break
            chosen.append(self.prompts.popleft())
        return chosen

    def run_prompts(self, prompts: Sequence[Prompt], cache: RowCache) -> torch.Tensor:
        """Keys, values and last logits of prompts, which end in the same column."""
        lengths = [len(prompt.context) for prompt in prompts]
        width = max(lengths)
        tokens = np.zeros((len(prompts), width), np.int64)
        seen = np.zeros((len(prompts), width), np.bool_)
        for row, prompt in enumerate(prompts):
            tokens[row, width - lengths[row] :] = prompt.context
            seen[row, width - lengths[row] :] = self.is_seen(prompt.context)
        positions = np.maximum(seen.cumsum(axis=1) - 1, 0)
        mask = torch.from_numpy(seen).to(self.writer.language_model.device)
        cache.enter(lengths, mask)
        if self.streams and seen.sum() == sum(lengths):  # no token is hidden
            return self.writer.run_stream([prompt.context for prompt in prompts], cache)
        self.writer.usage.prompt_tokens += sum(lengths)
        self.writer.usage.padding_tokens += tokens.size - sum(lengths)
        return self.writer.forward(tokens, mask, self.writer.ids(positions), cache=cache)

    def is_seen(self, context: Ids) -> Bools:
        """Return which tokens of a prompt are seen: all but those that the reference hides."""
        hidden = self.writer.language_model.hidden_token_id
        return np.ones(len(context), np.bool_) if hidden is None else context != hidden

    def row(self, prompt: Prompt, request: GenerateRequest) -> Row:
        """A new row, its prompt at the end of the columns."""
        sampling = request.sampling
        return Row(
            prompt=prompt,
            reply=Reply(request, self.writer.decoder),
            draws=uniform_draws(request) if sampling.temperature > 0 else None,
            end=0 if self.cache is None else self.cache.column + self.cache.moved,
            position=int(self.is_seen(prompt.context).sum()),
        )

    def step(self) -> None:
        """Writes one more token of every row."""
        usage = self.writer.usage
        usage.steps += 1
        usage.written += len(self.rows)
        usage.places += self.num_rows
        if self.cache is None:
            self.write(self.rows, self.run_whole_rows())
            return
        tokens = [[row.reply.ids[-1]] for row in self.rows]
        positions = [[row.position] for row in self.rows]
        self.cache.step()
        for row in self.rows:
            row.position += 1
        logits = self.writer.forward(
            np.array(tokens), self.cache.seen(), self.writer.ids(positions), cache=self.cache, has_past=True
        )
        self.write(self.rows, logits)

    def run_whole_rows(self) -> torch.Tensor:
        """Logits after all rows, without a cache."""
        whole = [np.append(row.prompt.context, row.reply.ids).astype(np.int64) for row in self.rows]
        width = max(map(len, whole))
        tokens = np.zeros((len(whole), width), np.int64)
        seen = np.zeros((len(whole), width), np.bool_)
        for index, (row, ids) in enumerate(zip(self.rows, whole, strict=True)):
            tokens[index, : len(ids)] = ids
            seen[index, : len(ids)] = True
            seen[index, : len(row.prompt.context)] = self.is_seen(row.prompt.context)
        positions = None
        if self.writer.language_model.hidden_token_id is not None:
            positions = self.writer.ids(np.maximum(seen.cumsum(axis=1) - 1, 0))
        self.writer.usage.padding_tokens += tokens.size - len(whole)
        ends = self.writer.ids([len(ids) - 1 for ids in whole])
        return self.writer.forward(
            tokens, torch.from_numpy(seen).to(self.writer.language_model.device), positions, ends
        )

    def write(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """The next token of each of these rows from its logits; rows that are done make room."""
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        tokens = self.writer.choose(rows, logits)
        for row, token, is_finite in zip(rows, tokens, finite, strict=True):
            if is_finite:
                row.reply.add(token)
            else:
                row.reply.spoil()
        if any(row.reply.is_done for row in rows):
            self.make_room()

    def make_room(self) -> None:
        """Takes the rows that are done out, and starts further replies to their prompts in their places."""
        leaving = []
        for slot, row in enumerate(self.rows):
            while row.reply.is_done:
                self.done[row.reply.request.key] = row.reply.result()
                following = self.following(slot, row)
                if following is None:
                    leaving.append(slot)
                    break
                row = self.rows[slot] = following
        if not leaving:
            return
        if self.cache is None:
            self.rows = [row for row in self.rows if not row.reply.is_done]
            return
        for slot in leaving:
            if not self.rows[slot].reply.is_finite:
                self.cache.clear(slot)
        self.rows = [self.rows[slot] for slot in self.cache.leave(leaving)]

    def following(self, slot: int, row: Row) -> Row | None:
        """A further reply in a slot, its first token written; None where there is none to be had here.

        One to the same prompt, or to that of another row, the one for which most wait.
        """
        if not row.reply.is_finite:  # what is kept of the prompt is spoilt
            if row.prompt.waiting and row.prompt.logits is not None:
                self.prompts.appendleft(Prompt(context=row.prompt.context, waiting=row.prompt.waiting))
                row.prompt.waiting = deque()
            return None
        sources = [
            (place, other, other.prompt.logits)
            for place, other in enumerate(self.rows)
            if other.reply.is_finite and other.prompt.logits is not None and other.prompt.waiting
        ]
        if self.cache is None or not sources:
            return None
        source, other, logits = max(sources, key=lambda entry: (entry[0] == slot, len(entry[1].prompt.waiting)))
        prompt = other.prompt
        following = self.row(prompt, prompt.waiting.popleft())
        self.cache.copy_prompt(source, other.end, len(prompt.context), slot)
        (token,) = self.writer.choose([following], logits[None])
        following.reply.add(token)
        return following
