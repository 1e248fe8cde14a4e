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
from llmfoundry_gauntlet.engine.continuous import (
    LEAST_SHARED,
    BatchProgress,
    ContinuousBatch,
    GenerationProgress,
    is_family,
)
from llmfoundry_gauntlet.engine.decoding import (
    FORKED_PROMPTS,
    NO_CACHE,
    PROMPT_STREAM,
    DecodingModel,
    GenerationDecoder,
    OngoingGeneration,
    Usage,
)
from llmfoundry_gauntlet.engine.kv_cache import KeptPrompt, KVCache
from llmfoundry_gauntlet.engine.logits import next_tokens, uniform_draws
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import best_groups, measure_request, saved_by_fork
from llmfoundry_gauntlet.engine.trees import context_request, num_shared
from llmfoundry_gauntlet.errors import ModelError, as_given
from llmfoundry_gauntlet.types import GenerateRequest, Generation, Ids, ItemKey

log = logging.getLogger(__name__)

ENTERING_SHARE = 8  # prompts are run once 1 / 8 of the slots are free
FORWARD_TOKENS = 128  # prompt tokens that take as long as another forward, about


@dataclass(slots=True, eq=False)
class PromptGroup:
    """A prompt and its waiting requests. It may run its first `shared` tokens once with other prompts.

    Once it was run, `logits` [V] are its last logits, `states` those that it left in recurrent layers, if any.
    """

    context: Ids
    waiting: deque[GenerateRequest]
    shared: int = 0
    logits: torch.Tensor | None = None
    states: Sequence[torch.Tensor] = ()


@dataclass(slots=True, eq=False)
class Slot:
    """A generation in a slot. `end` is the column after its prompt, `position` the position of its next token."""

    prompt: PromptGroup
    generation: OngoingGeneration
    draws: Iterator[float] | None
    end: int = 0
    position: int = 0


Choice = Callable[[Sequence[Slot], torch.Tensor], list[int]]
OnFinished = Callable[[Sequence[Generation]], None]


def ignore(generations: Sequence[Generation]) -> None:
    """Do nothing with finished generations, which are returned in the end."""


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
        self.forward_tokens = FORWARD_TOKENS
        self.most_slots: int | None = None  # once the device ran out of memory with more
        self.cached_bytes = 0  # per token in the latest KV cache

    @property
    def forks_prompts(self) -> bool:
        """Return whether what prompts share runs once; tokens that the reference masks have no place in it."""
        return self.layout == FORKED_PROMPTS and self.language_model.hidden_token_id is None

    @contextmanager
    def trying(self, layout: str, choice: Choice) -> Iterator[None]:
        """Generate in another layout, with another choice of tokens and no stop rules, until the context ends.

        What prompts share runs once even where that does not pay.
        """
        before = self.layout, self.choose, self.decoder, self.usage, self.forward_tokens
        self.layout, self.choose, self.usage, self.forward_tokens = layout, choice, Usage(), 0
        self.decoder = GenerationDecoder(self.decoder.tokenizer)
        try:
            yield
        finally:
            self.layout, self.choose, self.decoder, self.usage, self.forward_tokens = before

    def generate(
        self, batch: ContinuousBatch, progress: BatchProgress | None = None, on_finished: OnFinished = ignore
    ) -> list[Generation]:
        """Return the generations of a batch, in the order of its requests; equal greedy requests share one.

        `progress` and `on_finished` are as for `run`; generations that are equal finish together.
        """
        first_of = first_of_equal(batch.requests)
        distinct = tuple(request for request in batch.requests if first_of[request.key] == request.key)
        keys_by_first: dict[ItemKey, list[ItemKey]] = {}
        for key, first in first_of.items():
            keys_by_first.setdefault(first, []).append(key)

        def finish(generations: Sequence[Generation]) -> None:
            for generation in generations:
                on_finished([replace(generation, key=key) for key in keys_by_first[generation.key]])

        generations = self.run(replace(batch, requests=distinct), progress, finish)
        by_key = {generation.key: generation for generation in generations}
        return [replace(by_key[first], key=key) for key, first in first_of.items()]

    @torch.no_grad()
    def run(
        self, batch: ContinuousBatch, progress: BatchProgress | None = None, on_finished: OnFinished = ignore
    ) -> list[Generation]:
        """Return a generation for every request of a batch, in their order.

        Meanwhile `progress` is kept up to date, and `on_finished` gets each generation once, as soon as it has ended.
        If the device runs out of memory, fewer slots are used, from then on as well. Raise ModelError if a single
        sequence does not fit, or if ranks run in step.
        """
        done: dict[ItemKey, Generation] = {}
        progress = progress or BatchProgress()
        while True:
            num_slots = min(batch.num_slots, self.most_slots or batch.num_slots)
            try:
                with self.language_model.rotary_length(batch.rope_length):
                    DecodingLoop(self, batch, num_slots, done, progress, on_finished).run()
                return [done[request.key] for request in batch.requests]
            except torch.OutOfMemoryError as error:
                failure = str(error)
            self._make_room(num_slots, batch, failure)

    def _make_room(self, num_slots: int, batch: ContinuousBatch, failure: str) -> None:
        too_large = f'{num_slots} rows of up to {batch.longest} tokens do not fit into the memory of the device'
        if self.language_model.in_step:
            raise ModelError(
                f'{too_large}, and ranks of a sharded model cannot try again alone; '
                f'give {as_given("tokens_per_batch", batch.tokens_per_batch // 2)}: {failure}'
            )
        if num_slots == 1:
            raise ModelError(f'{too_large}: {failure}')
        if self.language_model.device.type == 'cuda':
            torch.cuda.empty_cache()
        self.most_slots = num_slots // 2
        log.warning('out of memory with %d generations at a time: %d from now on', num_slots, self.most_slots)


def first_of_equal(requests: Sequence[GenerateRequest]) -> dict[ItemKey, ItemKey]:
    """Return for each request, in their order, the first request whose generation must be the same."""
    first_of: dict[ItemKey, ItemKey] = {}
    first_with: dict[tuple[object, ...], ItemKey] = {}  # by all that a greedy generation depends on
    for request in requests:
        if request.sampling.temperature > 0:  # the draws depend on the key
            first_of[request.key] = request.key
            continue
        settings = (
            request.context.tobytes(),
            request.max_new_tokens,
            request.stops,
            request.reasoning,
            request.verbatim,
            request.restores_space,
            request.text_after,
        )
        first_of[request.key] = first_with.setdefault(settings, request.key)
    return first_of


def prompt_groups(requests: Sequence[GenerateRequest]) -> Iterator[PromptGroup]:
    """Yield the prompts of requests, in which those with equal prompts are adjacent."""
    for _, same_prompt in groupby(requests, key=lambda request: request.context.tobytes()):
        waiting = deque(same_prompt)
        yield PromptGroup(context=waiting[0].context, waiting=waiting)


def share_prefixes(prompts: Sequence[PromptGroup], forward_tokens: int) -> None:
    """Set what adjacent prompts share and run once, where that saves tokens.

    The rest of a prompt can only run beside rests of its length: padding between them and what they share would count.
    So each length takes a forward of its own, as does what they share.
    """
    measured = [measure_request(context_request(prompt.context)) for prompt in prompts]
    place = 0
    for group, fork in best_groups(measured):
        members = prompts[place : place + len(group)]
        place += len(group)
        shared = min([fork, *(len(prompt.context) - 1 for prompt in members)])
        num_forwards = 1 + len({len(prompt.context) for prompt in members})
        if saved_by_fork(len(members), shared) > num_forwards * forward_tokens:
            for prompt in members:
                prompt.shared = shared


class DecodingLoop:
    """Decode one continuous batch, at most `num_slots` requests at a time.

    Finished generations go to `done` and to `on_finished`; those that are in `done` already are not run again. Each
    iteration makes exactly one forward, so that the ranks of a sharded model stay in step, and updates `progress`.
    """

    def __init__(
        self,
        generator: TextGenerator,
        batch: ContinuousBatch,
        num_slots: int,
        done: dict[ItemKey, Generation],
        progress: BatchProgress,
        on_finished: OnFinished = ignore,
    ) -> None:
        self.generator = generator
        self.batch = batch
        self.done = done
        self.on_finished = on_finished
        self.num_slots = num_slots
        # Without a cache every step runs whole rows, which must fit into `tokens_per_batch`.
        if not generator.caches and batch.requests:
            self.num_slots = max(1, min(num_slots, batch.tokens_per_batch // batch.longest))
        self.streams = generator.layout == PROMPT_STREAM
        self.progress = GenerationProgress(batch.requests, progress)
        left = []
        for request in batch.requests:
            if request.key in done:  # before the device ran out of memory
                self.progress.end(request, done[request.key].num_tokens or 0)
            else:
                left.append(request)
        self.kept: KeptPrompt | None = None  # the prefix that ran last
        self.prompts = deque(prompt_groups(left))
        if generator.forks_prompts:
            share_prefixes(tuple(self.prompts), generator.forward_tokens)
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
            # Prompts run together, so some slots stay free for a while.
            num_free = self.num_slots - len(self.slots)
            enough_free = num_free >= max(1, self.num_slots // ENTERING_SHARE)
            if self.prompts and (not self.slots or enough_free):
                self.enter(num_free)
            elif self.slots:
                self.step()
            else:
                self.generator.take_part()
            if self.batch.requests:
                self.progress.update((slot.generation.request, len(slot.generation.ids)) for slot in self.slots)
        if self.cache is not None:
            self.generator.cached_bytes = self.cache.bytes_per_token

    def enter(self, num_free: int) -> None:
        """Run the next prompts and start their generations, several per prompt while slots are free."""
        if self.cache is None:
            self.enter_whole()
        else:
            self.enter_cache(self.cache, num_free)

    def enter_whole(self) -> None:
        """Start generations without a cache: the next step runs their prompts, with all others."""
        while self.prompts and len(self.slots) < self.num_slots:
            self.slots.append(self.new_slot(self.prompts[0]))
            if not self.prompts[0].waiting:
                self.prompts.popleft()
        self.step()

    def enter_cache(self, cache: KVCache, num_free: int) -> None:
        """Run the next prompts into the cache and start their generations."""
        prompts = self.next_prompts(num_free)
        if any(prompt.shared for prompt in prompts):
            prompts, logits = self.run_forked(prompts, cache)
        else:
            logits = self.generator.run_prompts([prompt.context for prompt in prompts], cache, as_stream=self.streams)
        if self.streams and len(prompts) > 1 and not torch.isfinite(logits.amax(dim=-1)).all():
            self.take_back(prompts, cache)
            return
        num_before = len(self.slots)
        new = [self.new_slot(prompt) for prompt in prompts]
        prompt_of_slot = list(range(len(prompts)))
        # Further generations of a prompt copy its keys and values into the slots that are still free.
        for index, prompt in enumerate(prompts):
            while prompt.waiting and num_before + len(new) < self.num_slots:
                target = num_before + len(new)
                new.append(self.new_slot(prompt))
                prompt_of_slot.append(index)
                source = num_before + index
                cache.copy_prompt(source, new[index].end, len(prompt.context), target, cache.states_of(source))
            if prompt.waiting:  # for generations that get a slot later
                prompt.logits = logits[index].clone()
                prompt.states = [state.clone() for state in cache.states_of(num_before + index)]
        self.slots += new
        self.extend(new, logits[to_device(np.array(prompt_of_slot), logits.device)])

    def run_forked(self, prompts: Sequence[PromptGroup], cache: KVCache) -> tuple[list[PromptGroup], torch.Tensor]:
        """Run prompts after what they share; return them in the order of their slots, with their last logits."""
        in_order: list[PromptGroup] = []
        logits: list[torch.Tensor] = []
        whole = [prompt for prompt in prompts if not prompt.shared]
        rests: dict[tuple[bytes, int], list[PromptGroup]] = {}  # by what they share, and the length of the rest
        for prompt in prompts:
            if prompt.shared:
                shared = prompt.context[: prompt.shared]
                rests.setdefault((shared.tobytes(), len(prompt.context)), []).append(prompt)

        for (shared_bytes, _), members in rests.items():
            if self.kept is None or self.kept.ids.tobytes() != shared_bytes:
                self.kept = None  # free its memory first
                self.kept = self.generator.run_shared(members[0].context[: members[0].shared], cache)
            after = [prompt.context[prompt.shared :] for prompt in members]
            logits.append(self.generator.run_after(self.kept, after, cache))
            in_order += members
        if whole:
            contexts = [prompt.context for prompt in whole]
            logits.append(self.generator.run_prompts(contexts, cache, as_stream=False))
            in_order += whole
        return in_order, torch.cat(logits)

    def take_back(self, prompts: Sequence[PromptGroup], cache: KVCache) -> None:
        """Requeue prompts to run as padded rows: in a stream non-finite values spread across a shared prefix."""
        self.streams = False
        slots = range(len(self.slots), len(self.slots) + len(prompts))
        for slot in slots:
            cache.clear(slot)
        cache.leave(slots)
        self.prompts.extendleft(reversed(prompts))

    def next_prompts(self, num_free: int) -> list[PromptGroup]:
        """Take as many waiting prompts as fit into the free slots and into `tokens_per_batch`."""
        chosen: list[PromptGroup] = []
        longest = 0
        in_stream = 0  # tokens, shared prefixes once
        while self.prompts and len(chosen) < num_free:
            context = self.prompts[0].context
            longest = max(longest, len(context) - self.prompts[0].shared)
            in_stream += len(context)
            if self.streams and chosen:
                shared = num_shared(chosen[-1].context.tobytes(), context.tobytes())
                if is_family(shared, len(context)):
                    in_stream -= shared
            num_tokens = in_stream if self.streams else longest * (len(chosen) + 1)
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
            contexts = [slot.prompt.context for slot in self.slots]
            logits = self.generator.run_whole(contexts, [slot.generation.ids for slot in self.slots])[:, -1]
        else:
            tokens = [slot.generation.ids[-1] for slot in self.slots]
            positions = [slot.position for slot in self.slots]
            logits = self.generator.run_step(tokens, positions, self.cache, self.shared_by_slots())
            for slot in self.slots:
                slot.position += 1
        self.extend(self.slots, logits)

    def shared_by_slots(self) -> int:
        """Return the number of first tokens that the prompts of all slots share, which attention then reads once.

        0 if there are few, or if the reference masks some of them.
        """
        if len(self.slots) == 1 or self.generator.language_model.hidden_token_id is not None:
            return 0
        contexts = sorted(slot.prompt.context.tobytes() for slot in self.slots)
        shared = num_shared(contexts[0], contexts[-1])  # of sorted rows, the first and the last differ earliest
        return shared if shared >= LEAST_SHARED else 0

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
            # A generation may end with its first token, and so may those that follow it in the slot.
            while slot.generation.is_done:
                self.finish(slot.generation)
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

    def finish(self, ongoing: OngoingGeneration) -> None:
        """Keep a generation that has ended, and report it."""
        generation = ongoing.result()
        self.done[generation.key] = generation
        self.progress.end(ongoing.request, len(ongoing.ids))
        # At once: what follows may run out of memory, after which those in `done` are not run again.
        self.on_finished([generation])

    def following(self, index: int, slot: Slot) -> Slot | None:
        """Return the next generation for a slot, with its first token; None if no cached prompt has waiting requests.

        The slot's own prompt comes first, then the cached prompt with the most waiting requests.
        """
        if self.cache is None:
            return None
        if not slot.generation.is_finite:  # its cached keys and values are not finite either
            self.requeue(slot.prompt)
            return None
        sources = {
            place: other
            for place, other in enumerate(self.slots)
            if other.generation.is_finite and other.prompt.logits is not None and other.prompt.waiting
        }
        if not sources:
            return None
        source = max(sources, key=lambda place: (place == index, len(sources[place].prompt.waiting)))
        prompt, end = sources[source].prompt, sources[source].end
        assert prompt.logits is not None
        following = self.new_slot(prompt)
        self.cache.copy_prompt(source, end, len(prompt.context), index, prompt.states)
        (token,) = self.generator.choose([following], prompt.logits[None])
        following.generation.add(token)
        return following

    def requeue(self, prompt: PromptGroup) -> None:
        """Let the waiting requests of a prompt run it again, and first."""
        if prompt.waiting and prompt.logits is not None:
            self.prompts.appendleft(PromptGroup(context=prompt.context, waiting=prompt.waiting))
            prompt.waiting = deque()
