"""Generate text with continuous batching.

In place of transformers' `generate` (4.53), which keeps a batch at full width until its last sequence ends, searches
prompt and generation together for stop strings, and samples from the global random state. Here a finished generation
frees its slot for a waiting request, a prompt runs once for all its generations, and sampling depends on the request
alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from llmfoundry_gauntlet.engine.attention import to_device
from llmfoundry_gauntlet.engine.continuous import BatchProgress, ContinuousBatch, GenerationProgress, is_family
from llmfoundry_gauntlet.engine.decoding import (
    NO_CACHE,
    PROMPT_STREAM,
    DecodingModel,
    GenerationDecoder,
    OngoingGeneration,
    Usage,
)
from llmfoundry_gauntlet.engine.kv_cache import KVCache
from llmfoundry_gauntlet.engine.logits import next_tokens, uniform_draws
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.trees import num_shared
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.types import GenerateRequest, Generation, Ids, ItemKey

log = logging.getLogger(__name__)

ENTERING_SHARE = 8  # prompts are run once 1 / 8 of the slots are free


@dataclass(slots=True, eq=False)
class PromptGroup:
    """A prompt and its waiting requests. `logits` [V] are its last logits, once it was run."""

    context: Ids
    waiting: deque[GenerateRequest]
    logits: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Slot:
    """A generation in a slot. `end` is the column after its prompt, `position` the position of its next token."""

    prompt: PromptGroup
    generation: OngoingGeneration
    draws: Iterator[float] | None
    end: int = 0
    position: int = 0


Choice = Callable[[Sequence[Slot], torch.Tensor], list[int]]


def choose(slots: Sequence[Slot], logits: torch.Tensor) -> list[int]:
    """Return the next token of each slot, by its request's sampling."""
    draws = [None if slot.draws is None else next(slot.draws) for slot in slots]
    return next_tokens(logits, [slot.generation.request.sampling for slot in slots], draws)


class TextGenerator(DecodingModel):
    """Generate for continuous batches with a language model."""

    def __init__(self, language_model: CausalLanguageModel, decoder: GenerationDecoder, layout: str = NO_CACHE) -> None:
        super().__init__(language_model, layout)
        self.decoder = decoder
        self.choose: Choice = choose
        self.most_slots: int | None = None  # once the device ran out of memory with more
        self.cached_bytes = 0  # per token in the latest KV cache

    @contextmanager
    def trying(self, layout: str, choice: Choice) -> Iterator[None]:
        """Generate in another layout, with another choice of tokens and no stop rules, until the context ends."""
        before = self.layout, self.choose, self.decoder, self.usage
        self.layout, self.choose, self.usage = layout, choice, Usage()
        self.decoder = GenerationDecoder(self.decoder.tokenizer)
        try:
            yield
        finally:
            self.layout, self.choose, self.decoder, self.usage = before

    def generate(self, batch: ContinuousBatch, progress: BatchProgress | None = None) -> list[Generation]:
        """Return the generations of a batch, in the order of its requests; equal greedy requests share one.

        `progress` is kept up to date meanwhile.
        """
        names = first_of_equal(batch.requests)
        distinct = tuple(request for request in batch.requests if names[request.key] == request.key)
        done = {generation.key: generation for generation in self.run(replace(batch, requests=distinct), progress)}
        return [replace(done[first], key=key) for key, first in names.items()]

    @torch.no_grad()
    def run(self, batch: ContinuousBatch, progress: BatchProgress | None = None) -> list[Generation]:
        """Return a generation for every request of a batch, in their order. `progress` is kept up to date meanwhile.

        If the device runs out of memory, fewer slots are used, from then on as well. Raise ModelError if a single
        sequence does not fit, or if ranks run in step.
        """
        done: dict[ItemKey, Generation] = {}
        progress = progress or BatchProgress()
        while True:
            num_slots = min(batch.num_slots, self.most_slots or batch.num_slots)
            try:
                with self.language_model.rotary_length(batch.rope_length):
                    DecodingLoop(self, batch, num_slots, done, progress).run()
                return [done[request.key] for request in batch.requests]
            except torch.OutOfMemoryError as error:
                failure = str(error)
            self._make_room(num_slots, batch, failure)

    def _make_room(self, num_slots: int, batch: ContinuousBatch, failure: str) -> None:
        too_large = f'{num_slots} rows of up to {batch.longest} tokens do not fit into the memory of the device'
        if self.language_model.in_step:
            raise ModelError(
                f'{too_large}, and ranks of a sharded model cannot try again alone; '
                f'give tokens_per_batch: {batch.tokens_per_batch // 2}: {failure}'
            )
        if num_slots == 1:
            raise ModelError(f'{too_large}: {failure}')
        if self.language_model.device.type == 'cuda':
            torch.cuda.empty_cache()
        self.most_slots = num_slots // 2
        log.warning('out of memory with %d generations at a time: %d from now on', num_slots, self.most_slots)


def first_of_equal(requests: Sequence[GenerateRequest]) -> dict[ItemKey, ItemKey]:
    """Return for each request, in their order, the first request whose generation must be the same."""
    first: dict[tuple[object, ...], ItemKey] = {}
    names: dict[ItemKey, ItemKey] = {}
    for request in requests:
        limits = (request.max_new_tokens, request.stops, request.reasoning)
        wanted = (request.context.tobytes(), *limits, request.verbatim, request.restores_space)
        is_drawn = request.sampling.temperature > 0
        names[request.key] = request.key if is_drawn else first.setdefault(wanted, request.key)
    return names


class DecodingLoop:
    """Decode one continuous batch, at most `num_slots` requests at a time. Finished generations go to `done`.

    `progress` is updated at each iteration.

    Each iteration makes exactly one forward, so that the ranks of a sharded model stay in step.
    """

    def __init__(
        self,
        generator: TextGenerator,
        batch: ContinuousBatch,
        num_slots: int,
        done: dict[ItemKey, Generation],
        progress: BatchProgress,
    ) -> None:
        self.generator = generator
        self.batch = batch
        self.done = done
        self.num_slots = num_slots
        self.streams = generator.layout == PROMPT_STREAM
        if not generator.caches and batch.requests:
            self.num_slots = max(1, min(num_slots, batch.tokens_per_batch // batch.longest))
        left = [request for request in batch.requests if request.key not in done]
        self.progress = GenerationProgress(batch.requests, progress)
        for request in batch.requests:
            if request.key in done:
                self.progress.end(request)
        self.prompts = deque(
            PromptGroup(context=same[0].context, waiting=deque(same))
            for same in (list(group) for _, group in groupby(left, key=lambda request: request.context.tobytes()))
        )
        self.slots: list[Slot] = []
        self.cache: KVCache | None = None
        if generator.caches and left:
            self.cache = KVCache(
                self.num_slots,
                longest_context=max(len(request.context) for request in left),
                device=generator.language_model.device,
            )

    def run(self) -> None:
        """Finish all generations."""
        while self.generator.is_any(bool(self.prompts or self.slots)):
            free = self.num_slots - len(self.slots)
            if self.prompts and (not self.slots or free >= max(1, self.num_slots // ENTERING_SHARE)):
                self.enter(free)
            elif self.slots:
                self.step()
            else:
                self.generator.take_part()
            if self.batch.requests:
                self.progress.update((slot.generation.request, len(slot.generation.ids)) for slot in self.slots)
        if self.cache is not None:
            self.generator.cached_bytes = self.cache.bytes_per_token

    def enter(self, free: int) -> None:
        """Run the next prompts and start their generations, several per prompt while slots are free."""
        if self.cache is None:
            while self.prompts and len(self.slots) < self.num_slots:
                self.slots.append(self.new_slot(self.prompts[0]))
                if not self.prompts[0].waiting:
                    self.prompts.popleft()
            self.step()
            return
        prompts = self.next_prompts(free)
        logits = self.generator.run_prompts([prompt.context for prompt in prompts], self.cache, as_stream=self.streams)
        if self.streams and len(prompts) > 1 and not torch.isfinite(logits.amax(dim=-1)).all():
            self.take_back(prompts, self.cache)
            return
        first = len(self.slots)
        new = list(map(self.new_slot, prompts))
        sources = list(range(len(new)))
        for index, prompt in enumerate(prompts):
            while prompt.waiting and first + len(new) < self.num_slots:
                new.append(self.new_slot(prompt))
                sources.append(index)
                self.cache.copy_prompt(first + index, new[index].end, len(prompt.context), first + len(new) - 1)
            if prompt.waiting:
                prompt.logits = logits[index].clone()
        self.slots += new
        self.extend(new, logits[to_device(np.array(sources), logits.device)])

    def take_back(self, prompts: Sequence[PromptGroup], cache: KVCache) -> None:
        """Requeue prompts to run as padded rows: in a stream non-finite values spread across a shared prefix."""
        self.streams = False
        slots = range(len(self.slots), len(self.slots) + len(prompts))
        for slot in slots:
            cache.clear(slot)
        cache.leave(slots)
        self.prompts.extendleft(reversed(prompts))

    def next_prompts(self, free: int) -> list[PromptGroup]:
        """Take as many waiting prompts as fit into the free slots and into `tokens_per_batch`."""
        chosen: list[PromptGroup] = []
        width = total = 0
        while self.prompts and len(chosen) < free:
            context = self.prompts[0].context
            width, total = max(width, len(context)), total + len(context)
            if self.streams and chosen:
                shared = num_shared(chosen[-1].context.tobytes(), context.tobytes())
                total -= shared if is_family(shared, len(context)) else 0
            num_tokens = total if self.streams else width * (len(chosen) + 1)
            if chosen and num_tokens > self.batch.tokens_per_batch:
                break
            chosen.append(self.prompts.popleft())
        return chosen

    def new_slot(self, prompt: PromptGroup) -> Slot:
        """Return a slot for the next waiting request of a prompt that ends in the cache's last column."""
        request = prompt.waiting.popleft()
        return Slot(
            prompt=prompt,
            generation=OngoingGeneration(request, self.generator.decoder),
            draws=uniform_draws(request) if request.sampling.temperature > 0 else None,
            end=0 if self.cache is None else self.cache.column + self.cache.moved,
            position=int(self.generator.is_seen(prompt.context).sum()),
        )

    def step(self) -> None:
        """Generate one more token in every slot."""
        self.generator.usage.steps += 1
        self.generator.usage.generated_tokens += len(self.slots)
        if self.cache is None:
            logits = self.generator.run_whole(
                [slot.prompt.context for slot in self.slots], [slot.generation.ids for slot in self.slots]
            )
        else:
            tokens = [slot.generation.ids[-1] for slot in self.slots]
            logits = self.generator.run_step(tokens, [slot.position for slot in self.slots], self.cache)
            for slot in self.slots:
                slot.position += 1
        self.extend(self.slots, logits)

    def extend(self, slots: Sequence[Slot], logits: torch.Tensor) -> None:
        """Append the next token to each of these slots; finished generations leave."""
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        tokens = self.generator.choose(slots, logits)
        for slot, token, is_finite in zip(slots, tokens, finite, strict=True):
            if is_finite:
                slot.generation.add(token)
            else:
                slot.generation.fail()
        if any(slot.generation.is_done for slot in slots):
            self.free_slots()

    def free_slots(self) -> None:
        """Remove finished generations and give their slots to further requests for cached prompts."""
        leaving = []
        for index, slot in enumerate(self.slots):
            while slot.generation.is_done:
                self.done[slot.generation.request.key] = slot.generation.result()
                self.progress.end(slot.generation.request)
                following = self.following(index, slot)
                if following is None:
                    leaving.append(index)
                    break
                slot = self.slots[index] = following
        if not leaving:
            return
        if self.cache is None:
            self.slots = [slot for slot in self.slots if not slot.generation.is_done]
            return
        for index in leaving:
            if not self.slots[index].generation.is_finite:
                self.cache.clear(index)
        self.slots = [self.slots[index] for index in self.cache.leave(leaving)]

    def following(self, index: int, slot: Slot) -> Slot | None:
        """Return the next generation for a slot, with its first token; None if no cached prompt has waiting requests.

        The slot's own prompt comes first, then the cached prompt with the most waiting requests.
        """
        if not slot.generation.is_finite:  # its cached keys and values are not finite either
            if slot.prompt.waiting and slot.prompt.logits is not None:
                self.prompts.appendleft(PromptGroup(context=slot.prompt.context, waiting=slot.prompt.waiting))
                slot.prompt.waiting = deque()
            return None
        sources = [
            (place, other, other.prompt.logits)
            for place, other in enumerate(self.slots)
            if other.generation.is_finite and other.prompt.logits is not None and other.prompt.waiting
        ]
        if self.cache is None or not sources:
            return None
        source, other, logits = max(sources, key=lambda entry: (entry[0] == index, len(entry[1].prompt.waiting)))
        following = self.new_slot(other.prompt)
        self.cache.copy_prompt(source, other.end, len(other.prompt.context), index)
        (token,) = self.generator.choose([following], logits[None])
        following.generation.add(token)
        return following
