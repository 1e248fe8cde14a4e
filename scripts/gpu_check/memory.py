"""Memory: batches of `tokens_per_batch: auto` fit, and a device that runs out of it halves them, with the same numbers.

`auto` takes at most 32,768 tokens, as more are no faster; with that limit lifted, the memory alone decides. Larger
cards also stand in for one of 80 GB, with the rest taken. On a CPU a number stands in for the size of the memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from generations import Letters
from memory_limits import limit_rows, limit_tokens, peak_bytes

from gpu_check.fitting import free_memory
from gpu_check.options import Options
from gpu_check.results import Row, Rows, Skipped
from gpu_check.shapes import HYBRID_1B, LLAMA_1B, LLAMA_7B, LLAMA_125M, shape_of
from gpu_check.speed import Ours
from gpu_check.workloads import GSM8K, MMLU, PIQA, Source
from llmfoundry_gauntlet.engine.continuous import plan_continuous_batches
from llmfoundry_gauntlet.engine.decoding import GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import MOST_TOKENS, Budget, budget_in_memory, free_bytes
from llmfoundry_gauntlet.engine.plan import FORKED, PADDED_ROWS, STREAM
from llmfoundry_gauntlet.engine.probe import probe_generation
from llmfoundry_gauntlet.types import ItemKey, ScoreOutput

STAND_IN_BYTES = 1280 * 2**20  # of a CPU
SMALLER_CARD = 80 * 10**9  # bytes; 80 GB cards have a little more
LIFTED = 2**26  # tokens of a batch, for which no card has room
LEAST_SHARE = 0.5  # of the memory, where it alone decides
MOST_NATS = 1e-3  # between scores of batches of different sizes in float32, summed over a choice
NUM_NEW = 4  # tokens of a generation
PROBE_LENGTH = 600  # tokens
ITEMS_OF_BATCH = 4  # at least, where memory runs out: a half of it must fit
ITEMS_OF_FAILURES = 24
SHARE_OF_CARD = 0.7  # of what a batch needs, so that its halves fit


def run(options: Options, rows: Rows) -> None:
    """Fill the memory as `auto` does, with models that leave the most and the least of it; then run out of it."""
    for name in [LLAMA_1B] if options.quick else [LLAMA_1B, LLAMA_7B]:
        for memory in memories(options):
            with memory.smaller():
                fill_memory(name, memory, options, rows)
    for name, layout in ((LLAMA_125M, STREAM), (LLAMA_125M, PADDED_ROWS), (HYBRID_1B, FORKED)):
        with rows.row(f'{name}, {layout}: out of memory in scoring') as row:
            run_out_in_scoring(name, layout, options, row)
        free_memory(options)
    with rows.row(f'{LLAMA_125M}: out of memory in generation') as row:
        run_out_in_generation(options, row)
    free_memory(options)
    with rows.row(f'{LLAMA_125M}: out of memory of the card itself') as row:
        run_out_of_card(options, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of a device, or of a smaller one for which it stands in: the other bytes are `taken`."""

    options: Options
    name: str
    total: int
    taken: int = 0

    @contextmanager
    def smaller(self) -> Iterator[None]:
        """Take the bytes that a smaller device has not, until the context ends."""
        ballast = torch.empty(self.taken, dtype=torch.uint8, device=self.options.torch_device)
        yield
        del ballast
        free_memory(self.options)

    def budget(self, ours: Ours, most: int, cached_bytes: int = 0) -> Budget:
        """Return the tokens per batch that `auto` chooses for a large suite, at most so many."""
        free = free_bytes(self.options.torch_device)
        if free is None:
            free = self.total - weight_bytes(ours.model)
        return budget_in_memory(
            ours.model.config, free, cached_bytes=cached_bytes, most=most, forks=ours.layout == FORKED
        )

    def peak(self, run: Callable[[], object], model: Any) -> int:
        """Return the most bytes that were reserved during some work, with the model's weights."""
        if self.options.is_cpu:
            with tempfile.TemporaryDirectory() as folder:
                return weight_bytes(model) + peak_bytes(run, Path(folder) / 'memory.json')
        free_memory(self.options)
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_reserved() - self.taken


def memories(options: Options) -> list[Memory]:
    """Return the memory of the device, and that of a smaller card if there is room for its bytes and more."""
    if options.is_cpu:
        return [Memory(options=options, name='a stand-in of 1.25 GiB', total=STAND_IN_BYTES)]
    total = torch.cuda.get_device_properties(options.torch_device).total_memory
    sizes = [Memory(options=options, name=f'{total / 2**30:.0f} GiB', total=total)]
    if total > 1.25 * SMALLER_CARD:
        sizes.append(Memory(options=options, name='80 GB', total=SMALLER_CARD, taken=total - SMALLER_CARD))
    return sizes


def weight_bytes(model: Any) -> int:
    """Return the memory of the weights."""
    return sum(weight.numel() * weight.itemsize for weight in model.parameters())


def fill_memory(name: str, memory: Memory, options: Options, rows: Rows) -> None:
    """Score and generate with the batches that `auto` chooses, and with those that the memory alone limits."""
    ours = Ours(shape_of(name, options.device), options)
    for most, limit in ((MOST_TOKENS['cuda'], 'auto'), (LIFTED, 'auto without its limit')):
        with rows.row(f'{name}, {memory.name}, {limit}: scoring') as row:
            score_within(memory, ours, most, row)
        with rows.row(f'{name}, {memory.name}, {limit}: generation') as row:
            generate_within(memory, ours, most, row)


def score_within(memory: Memory, ours: Ours, most: int, row: Row) -> None:
    """Score a batch of as many tokens as `auto` chooses."""
    ours.tokens_per_batch = memory.budget(ours, most).scoring
    source = Source.of(ours.shape, ours.options)
    num_items = 2 * round(ours.tokens_per_batch / source.mean_length(MMLU))
    batches = ours.plan(source.score_requests(MMLU, num_items))
    largest = max(batches, key=lambda batch: batch.num_tokens)

    ours.language_model.most_tokens = None
    peak = memory.peak(lambda: ours.language_model.run(largest), ours.model)
    row.note(tokens_per_batch=ours.tokens_per_batch, tokens_run=largest.num_tokens)
    row.expect('fits', ours.language_model.most_tokens is None, True)
    note_peak(row, peak, memory, is_lifted=most == LIFTED)


def generate_within(memory: Memory, ours: Ours, most: int, row: Row) -> None:
    """Generate a few tokens in as many slots as `auto` chooses, after prompts of the length of GSM8K's."""
    generator = TextGenerator(ours.language_model, GenerationDecoder(Letters()))
    generator.layout = probe_generation(
        generator, vocabulary=ours.language_model.vocabulary, longest=PROBE_LENGTH
    ).layout
    tokens_per_batch = memory.budget(ours, most, generator.cached_bytes).generation
    source = Source.of(ours.shape, ours.options)
    requests = source.generate_requests(GSM8K, num_items=tokens_per_batch // 128)
    short = [replace(request, max_new_tokens=NUM_NEW) for request in requests]
    (batch, *_) = plan_continuous_batches(short, tokens_per_batch=tokens_per_batch, requests_per_batch=len(short))

    peak = memory.peak(lambda: generator.run(batch), ours.model)
    row.note(tokens_per_batch=tokens_per_batch, slots=batch.num_slots)
    row.expect('fits', generator.most_slots is None, True)
    note_peak(row, peak, memory, is_lifted=most == LIFTED)


def note_peak(row: Row, peak: int, memory: Memory, *, is_lifted: bool) -> None:
    """Record the peak; where the memory alone decides, more than half of it must be used."""
    row.note(peak_gib=peak / 2**30)
    share = peak / memory.total
    if is_lifted and not memory.options.is_cpu:
        row.check('share of the memory', share, at_least=LEAST_SHARE)
    else:
        row.note(share_of_the_memory=share)


def in_float32(name: str, options: Options) -> Ours:
    """Return a model in float32, in which the size of a batch changes scores by hardly anything."""
    return Ours(replace(shape_of(name, options.device), dtype=torch.float32), options)


def run_out_in_scoring(name: str, layout: str, options: Options, row: Row) -> None:
    """Fail in every forward of more than half of the tokens of the largest; scores must be the same."""
    ours = in_float32(name, options)
    ours.layout = layout
    requests = Source.of(ours.shape, options).score_requests(PIQA, ITEMS_OF_FAILURES)
    ours.tokens_per_batch = 1
    tokens_of_largest_item = max(batch.num_tokens for batch in ours.plan(requests))
    ours.tokens_per_batch = ITEMS_OF_BATCH * tokens_of_largest_item
    batches = ours.plan(requests)
    sizes = limit_tokens(ours.model, LIFTED)
    expected = ours.score(batches)

    limit = max(sizes) // 2
    limit_tokens(ours.model, limit)
    outputs = ours.score(batches)
    row.note(tokens_of_the_largest_forward=max(sizes), limit=limit)
    row.expect('halved', ours.language_model.most_tokens is not None, True)
    row.check('most nats apart', most_nats_apart(expected, outputs), at_most=MOST_NATS)


def most_nats_apart(expected: dict[ItemKey, ScoreOutput], outputs: dict[ItemKey, ScoreOutput]) -> float:
    """Return the largest difference of a choice's summed log-probability."""
    differences = []
    for key, output in expected.items():
        for logprobs, others in zip(output.logprobs, outputs[key].logprobs, strict=True):
            differences.append(abs(float(logprobs.sum()) - float(others.sum())))
    return max(differences)


def run_out_in_generation(options: Options, row: Row) -> None:
    """Fail in every forward of more than half of the slots; texts must be the same."""
    ours = in_float32(LLAMA_125M, options)
    generator = TextGenerator(ours.language_model, GenerationDecoder(Letters()))
    generator.layout = probe_generation(
        generator, vocabulary=ours.language_model.vocabulary, longest=PROBE_LENGTH
    ).layout
    requests = Source.of(ours.shape, options).generate_requests(GSM8K, ITEMS_OF_FAILURES)
    (batch,) = plan_continuous_batches(requests, tokens_per_batch=32_768, requests_per_batch=len(requests))
    expected = generator.run(batch)

    limit_rows(ours.model, batch.num_slots // 2)
    generations = generator.run(batch)
    same = [one.text == other.text for one, other in zip(expected, generations, strict=True)]
    row.note(slots=batch.num_slots, tokens_generated=sum(one.num_tokens or 0 for one in generations))
    row.expect('slots once it ran out', generator.most_slots, batch.num_slots // 2)
    row.expect('equal texts', f'{sum(same)} of {len(same)}', f'{len(same)} of {len(same)}')


def run_out_of_card(options: Options, row: Row) -> None:
    """Let torch's allocator refuse a part of what a batch needs; scores must be the same."""
    if options.is_cpu:
        raise Skipped("torch's allocator has no limit on a CPU")
    ours = in_float32(LLAMA_125M, options)
    ours.tokens_per_batch = MOST_TOKENS['cuda']
    source = Source.of(ours.shape, options)
    num_items = round(2 * ours.tokens_per_batch / source.mean_length(MMLU))
    batches = ours.plan(source.score_requests(MMLU, num_items))
    (memory, *_) = memories(options)
    expected: dict[ItemKey, ScoreOutput] = {}
    peak = memory.peak(lambda: expected.update(ours.score(batches)), ours.model)

    free_memory(options)
    before = torch.cuda.memory_reserved()
    allowed = before + SHARE_OF_CARD * (peak - before)
    torch.cuda.set_per_process_memory_fraction(allowed / memory.total)
    try:
        outputs = ours.score(batches)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    row.note(needed_gib=peak / 2**30, allowed_gib=allowed / 2**30)
    row.expect('halved', ours.language_model.most_tokens is not None, True)
    row.check('most nats apart', most_nats_apart(expected, outputs), at_most=MOST_NATS)
