"""Generation: ours against transformers' `generate` and vLLM, and the price of several tokens a slot in a step.

A model with random weights in bf16 answers prompts with the lengths of GSM8K's and shots that all have in common. It
ends nowhere, so each answer is as long as one of the file; what `generate` runs beyond it does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from bare_forward import BareForward
from generations import Letters

from gpu_check.fitting import free_memory
from gpu_check.options import Options
from gpu_check.profiles import profiled, seconds_of
from gpu_check.results import Row, Rows, Skipped
from gpu_check.shapes import LLAMA_1B, LLAMA_125M, Shape, shape_of
from gpu_check.speed import Ours, note_profile
from gpu_check.targets import aim
from gpu_check.vllm_engine import NO_VLLM, is_vllm_here, running_vllm
from gpu_check.workloads import GSM8K, Source
from llmfoundry_gauntlet.engine.attention import AttentionRule, to_device, torch_attention
from llmfoundry_gauntlet.engine.continuous import ContinuousBatch, plan_continuous_batches
from llmfoundry_gauntlet.engine.decoding import PROMPT_STREAM, GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.kv_cache import CachedAttention, KVCache
from llmfoundry_gauntlet.engine.logits import logits_of
from llmfoundry_gauntlet.engine.model import automatic_budget
from llmfoundry_gauntlet.engine.probe import NAMES, probe_generation
from llmfoundry_gauntlet.types import GenerateRequest, Generation, Ids

MOST_OF_VLLM = 1.5  # ours / vLLM
PROBE_LENGTH = 600  # tokens
SLOTS = (64, 16)  # beside those of `tokens_per_batch: auto`
ITEMS = {64: 256, 16: 64}
ITEMS_OF_AUTO = 1024
QUICK = 4  # the part of the items in a quick run
ITEMS_ON_CPU = 6

# A step with several tokens a slot.
STEP_SLOTS = 64
SLOTS_ON_CPU = 4
WIDTHS = (1, 3, 5, 9)
STEP_ROUNDS = 20
DRAFTS_PAY_BELOW = 1.3  # times the seconds of a step with one token, for a step with five
MOST_LOGIT_APART = 1e-3  # between a wide step and single ones, in float32


def run(options: Options, rows: Rows) -> None:
    """Time ours, `generate` and steps with one model, and vLLM; then the smaller model, and compiled steps."""
    rate = time_model(LLAMA_1B, options, rows)
    free_memory(options)
    if options.quick:
        return
    time_vllm(LLAMA_1B, options, rows, rate)
    time_model(LLAMA_125M, options, rows)
    free_memory(options)
    time_static_cache(LLAMA_1B, options, rows)


def time_model(name: str, options: Options, rows: Rows) -> float | None:
    """Time one model; return the tokens per second of ours with the slots of `auto`, None if that has failed."""
    generating = None
    rate_of_auto = None
    with rows.row(f'{name}: made and probed') as row:
        generating = Generating(name, options)
        row.note(layout=NAMES[generating.generator.layout], tokens_per_batch=generating.tokens_per_batch)
    if generating is None:
        return None

    with rows.row(f'{name}, {GSM8K.name}: ours, auto') as row:
        rate_of_auto = generating.time_ours(requests_of(generating.shape, ITEMS_OF_AUTO, options), None, row)
    with rows.row(f'{name}, {GSM8K.name}: a step') as row:
        generating.profile_step(row)
    with rows.row(f'{name}, {GSM8K.name}: a step of several tokens a slot') as row:
        time_wide_steps(generating, row)
    for num_slots in SLOTS[:1] if options.quick else SLOTS:
        requests = requests_of(generating.shape, ITEMS[num_slots], options)
        rate = None
        with rows.row(f'{name}, {GSM8K.name}: ours, {num_slots} slots') as row:
            rate = generating.time_ours(requests, num_slots, row)
        with rows.row(f'{name}, {GSM8K.name}: generate, {num_slots} rows') as row:
            generating.time_transformers(requests, num_slots, rate, row)
    return rate_of_auto


def time_static_cache(name: str, options: Options, rows: Rows) -> None:
    """Time `generate` with a static cache, for which it compiles the model on a GPU, on one batch of each size."""
    generating = Generating(name, options)
    for num_rows in SLOTS:
        requests = requests_of(generating.shape, num_rows, options)
        rate = None
        with rows.row(f'{name}, {GSM8K.name}: ours, {num_rows} slots, one batch') as row:
            rate = generating.time_ours(requests, num_rows, row)
        with rows.row(f'{name}, {GSM8K.name}: generate, {num_rows} rows, one batch, static cache') as row:
            generating.time_transformers(requests, num_rows, rate, row, cache_implementation='static')


def requests_of(shape: Shape, num_items: int, options: Options) -> list[GenerateRequest]:
    """Return so many requests for a model, fewer in a quick run, and a few on a CPU."""
    if options.is_cpu:
        num_items = ITEMS_ON_CPU
    elif options.quick:
        num_items //= QUICK
    return Source.of(shape, options).generate_requests(GSM8K, num_items)


class Generating:
    """A model that generates in our engine and in transformers."""

    def __init__(self, name: str, options: Options) -> None:
        self.options = options
        self.shape = shape_of(name, options.device)
        self.ours = Ours(self.shape, options)
        self.model = self.ours.model
        self.model.generation_config.eos_token_id = None  # a model with random weights would end anywhere
        language_model = self.ours.language_model
        self.generator = TextGenerator(language_model, GenerationDecoder(Letters()))
        self.generator.layout = probe_generation(
            self.generator, vocabulary=language_model.vocabulary, longest=PROBE_LENGTH
        ).layout
        self.tokens_per_batch = automatic_budget(
            self.model.config,
            options.torch_device,
            cached_bytes=self.generator.cached_bytes,
            num_tokens=10**9,
            num_generations=ITEMS_OF_AUTO,
            num_ranks=1,
        ).generation

    def time_ours(self, requests: Sequence[GenerateRequest], num_slots: int | None, row: Row) -> float:
        """Generate with so many slots, or as many as `auto` plans; return the tokens per second."""
        batches = plan_continuous_batches(
            requests, tokens_per_batch=self.tokens_per_batch, requests_per_batch=len(requests)
        )
        if num_slots is not None:
            batches = [replace(batch, num_slots=min(num_slots, batch.num_slots)) for batch in batches]
        self.generator.run(shortened(batches[0]))
        steps_before = self.generator.usage.steps
        generations: list[Generation] = []

        def generate() -> None:
            for batch in batches:
                generations.extend(self.generator.run(batch))

        seconds = seconds_of(generate, self.options)
        num_steps = self.generator.usage.steps - steps_before
        row.note(items=len(requests), slots=max(batch.num_slots for batch in batches))
        rate = note_tokens(row, sum(generation.num_tokens or 0 for generation in generations), seconds)
        row.note(milliseconds_per_step=1000 * seconds / num_steps)
        return rate

    def time_transformers(
        self,
        requests: Sequence[GenerateRequest],
        num_rows: int,
        rate_of_ours: float | None,
        row: Row,
        **settings: Any,
    ) -> None:
        """Generate by `generate` in batches of so many rows, each as long as the longest answer of its batch."""
        bare = BareForward()
        bare.model, bare.device = self.model, self.options.device
        batches = [requests[start : start + num_rows] for start in range(0, len(requests), num_rows)]

        def generate(batches: Sequence[Sequence[GenerateRequest]] = batches) -> None:
            for batch in batches:
                contexts = [request.context.tolist() for request in batch]
                longest = max(request.max_new_tokens for request in batch)
                bare.generate_batch(contexts, longest, **settings)

        generate(batches[:1])  # for what first calls prepare, or compile
        seconds = seconds_of(generate, self.options)
        row.note(items=len(requests), slots=num_rows)
        rate = note_tokens(row, sum(request.max_new_tokens for request in requests), seconds)
        if rate_of_ours is not None:
            row.note(**{'generate / ours': rate_of_ours / rate})

    def profile_step(self, row: Row) -> None:
        """Count the kernels of a step, and the waits of the host; record where the time goes."""
        step = WideSteps(self)

        def one_token() -> None:
            step.run(step.tokens[:, :1])

        row.note(slots=step.num_slots)
        note_profile(row, profiled(one_token, self.options), self.ours)


def note_tokens(row: Row, num_tokens: int, seconds: float) -> float:
    """Record generated tokens and their number per second; return the latter."""
    rate = num_tokens / seconds
    row.note(tokens_generated=num_tokens, seconds=seconds, tokens_per_second=rate)
    return rate


def shortened(batch: ContinuousBatch) -> ContinuousBatch:
    """Return a batch that ends after a few tokens, for what the first call of each kernel prepares."""
    requests = tuple(replace(request, max_new_tokens=2) for request in batch.requests[: batch.num_slots])
    return replace(batch, requests=requests)


def time_wide_steps(generating: Generating, row: Row) -> None:
    """Time a step of several tokens in each slot: the price of drafts that the model confirms."""
    if generating.generator.layout != PROMPT_STREAM:
        raise Skipped(f'steps of several tokens are timed in the layout {PROMPT_STREAM}')
    steps = WideSteps(generating)
    options = generating.options
    row.note(columns=steps.cache.column, slots=steps.num_slots)
    if options.is_cpu:
        row.check('most logits apart', steps.most_logits_apart(), at_most=MOST_LOGIT_APART)
    milliseconds = {}
    for width in WIDTHS:
        tokens = steps.tokens[:, :width]
        steps.run(tokens)
        rounds = [seconds_of(lambda tokens=tokens: steps.run(tokens), options) for _ in range(STEP_ROUNDS)]
        milliseconds[width] = 1000 * median(rounds)
        row.note(**{f'milliseconds with {width}': milliseconds[width]})
    row.note(**{'five / one': milliseconds[5] / milliseconds[1]})
    row.limits['five / one'] = f'drafts pay below {DRAFTS_PAY_BELOW}'


class WideSteps:
    """Steps of one or several tokens a slot after the same prompts, each of which is taken back."""

    def __init__(self, generating: Generating) -> None:
        self.num_slots = SLOTS_ON_CPU if generating.options.is_cpu else STEP_SLOTS
        self.language_model = generating.ours.language_model
        requests = Source.of(generating.shape, generating.options).generate_requests(GSM8K, self.num_slots)
        contexts = [request.context for request in requests]
        self.lengths = np.array([len(context) for context in contexts])
        self.cache = WideCache(
            self.num_slots, longest_context=max(map(len, contexts)), device=generating.options.torch_device
        )
        with torch.no_grad():
            generating.generator.run_prompts(contexts, self.cache, as_stream=True)
        random = np.random.default_rng(0)
        vocabulary = self.language_model.vocabulary
        self.tokens = random.integers(3, vocabulary, (self.num_slots, max(WIDTHS)))

    def run(self, tokens: Ids) -> list[list[int]]:
        """Run the next tokens of each slot, [slots, width]; return the most likely token after each of them."""
        return self.logits(tokens).argmax(dim=-1).tolist()

    @torch.no_grad()
    def logits(self, tokens: Ids, *, keeps: bool = False) -> torch.Tensor:
        """Return the logits after the next tokens of each slot, [slots, width, V]; `keeps` them in the cache."""
        device = self.language_model.device
        width = tokens.shape[1]
        positions = (self.lengths + self.num_kept)[:, None] + np.arange(width)
        self.cache.take(width)
        engine = self.language_model.engine_attention
        with engine.using(WideAttention(self.cache, width)):
            outputs = self.language_model.model(
                input_ids=to_device(tokens, device),
                position_ids=to_device(positions, device),
                attention_mask=engine.mask(device),
                use_cache=False,
            )
        if not keeps:
            self.cache.give_back(width)
        return logits_of(outputs)

    @property
    def num_kept(self) -> int:
        """Return the number of tokens after the prompts that steps have left in the cache."""
        return self.cache.column + self.cache.moved - int(self.lengths.max())

    def most_logits_apart(self) -> float:
        """Return the largest difference of a logit between a wide step and single ones of the same tokens."""
        wide = self.logits(self.tokens)
        single = [self.logits(column, keeps=True) for column in np.hsplit(self.tokens, max(WIDTHS))]
        self.cache.give_back(max(WIDTHS))
        return float((wide - torch.cat(single, dim=1)).abs().max())


class WideCache(KVCache):
    """A cache whose steps write several columns, and take them back."""

    def take(self, width: int) -> None:
        """Take the columns that the next forward writes."""
        while self.column + width > self.mask.shape[1]:
            self._grow()
        self.is_prompt = False
        self._slots = slice(0, self.num_used)
        self._columns = slice(self.column, self.column + width)
        self._seen = slice(0, self.mask.shape[1])
        self.mask[self._slots, self._columns] = True
        self.column += width

    def give_back(self, width: int) -> None:
        """Free the columns that were taken last."""
        self.column -= width
        self.mask[:, self.column : self.column + width] = False


class WideAttention(CachedAttention):
    """The attention of a step with several tokens a slot, which see each other in their order."""

    def __init__(self, cache: KVCache, width: int) -> None:
        super().__init__(cache, width, None, counts_masked=False)
        self.ends = self.columns[cache.column - width : cache.column]
        self.seen = cache.seen()[:, None] & (self.columns <= self.ends[:, None])  # [slots, queries, columns]
        self.mask_of_group: torch.Tensor | None = None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """Write the next layer's keys and values; heads that share them are queries of one head, as in one step."""
        keys, values = self.cache.update(key, value, self.next_layer)
        self.next_layer += 1
        slots, heads, width, _ = query.shape
        of_groups = query.reshape(slots, keys.shape[1], -1, query.shape[-1])
        if self.mask_of_group is None:  # the same for all layers
            self.mask_of_group = self.seen.repeat(1, of_groups.shape[2] // width, 1)[:, None]
        output = torch_attention(of_groups, keys, values, attn_mask=self.mask_of_group, scale=rule.scale(query))
        return output.reshape(slots, heads, width, -1).transpose(1, 2)


def time_vllm(name: str, options: Options, rows: Rows, rate_of_ours: float | None) -> None:
    """Time vLLM on the requests of the row with the slots of `auto`."""
    if not is_vllm_here(options):
        with rows.row(f'{name}: vLLM'):
            raise Skipped(NO_VLLM)
        return
    shape = shape_of(name, options.device)
    requests = requests_of(shape, ITEMS_OF_AUTO, options)
    with running_vllm(shape, options, rows) as engine:
        if engine is None:
            return
        with rows.row(f'{name}, {GSM8K.name}: vLLM') as row:
            answer = engine.ask(
                'generate',
                prompts=[request.context.tolist() for request in requests],
                max_new_tokens=[request.max_new_tokens for request in requests],
            )
            row.note(items=len(requests))
            rate = note_tokens(row, answer['num_new'], answer['wall_seconds'])
            if rate_of_ours is not None:
                aim(row, 'ours / vLLM', rate / rate_of_ours, options, at_most=MOST_OF_VLLM)
