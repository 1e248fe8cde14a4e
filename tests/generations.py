"""Requests for generations, generators, and what a network generates alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import networks
import numpy as np
import torch
from networks import CPU

from llmfoundry_gauntlet.engine.continuous import ContinuousBatch
from llmfoundry_gauntlet.engine.decoding import NO_CACHE, PROMPT_STREAM, GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.probe import probe_generation
from llmfoundry_gauntlet.types import GenerateRequest, Generation, ItemKey

FIRST_LETTER = 0x4E00
LONGEST = 60
LAYOUT_OF = {**dict.fromkeys(networks.IN_STREAM, PROMPT_STREAM), **dict.fromkeys(networks.IN_PADDED_ROWS, NO_CACHE)}


class Letters:
    """A tokenizer with one letter per token."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {'input_ids': [1]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ''.join(chr(FIRST_LETTER + token) for token in ids)


def letters(ids: Sequence[int]) -> str:
    """Return the text of some tokens."""
    return Letters().decode(ids)


def tokens(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [ord(letter) - FIRST_LETTER for letter in text]


def request(row: int, context: Sequence[int], max_new_tokens: int, *, sample: int = 0, **more: Any) -> GenerateRequest:
    """Return a request from plain numbers."""
    return GenerateRequest(
        key=ItemKey('t/0-shot', row, sample=sample),
        context=np.array(context, dtype=np.int32),
        max_new_tokens=max_new_tokens,
        **more,
    )


def mixed_requests(**more: Any) -> list[GenerateRequest]:
    """Prompts of 1 to 39 tokens and generations of 1 to 12, one prompt four times and one twice."""
    rng = np.random.default_rng(1)
    lengths_and_limits = [(39, 5), (1, 12), (17, 1), (6, 9), (23, 4), (3, 7), (12, 10), (30, 2)]
    firsts = []
    for row, (length, max_new_tokens) in enumerate(lengths_and_limits):
        firsts.append(request(row, networks.draw(rng, length), max_new_tokens, **more))

    # More samples follow the first of their prompt.
    of_row_3 = []
    for sample, max_new_tokens in ((1, 9), (2, 3), (3, 6)):
        of_row_3.append(request(3, firsts[3].context, max_new_tokens, sample=sample, **more))
    of_row_7 = request(7, firsts[7].context, 8, sample=1, **more)
    return [*firsts[:4], *of_row_3, *firsts[4:], of_row_7]


def batch_of(requests: Sequence[GenerateRequest], num_slots: int = 4, tokens_per_batch: int = 100) -> ContinuousBatch:
    """Return all requests in one continuous batch."""
    return ContinuousBatch(requests=tuple(requests), num_slots=num_slots, tokens_per_batch=tokens_per_batch)


def generator_of(model: Any, layout: str | None = None, *, end_ids: Sequence[int] = (), **more: Any) -> TextGenerator:
    """Return a generator with the layout that the probe finds, or with a given one."""
    generator = TextGenerator(CausalLanguageModel(model, device=CPU, **more), GenerationDecoder(Letters(), end_ids))
    generator.layout = layout or probe_generation(generator, vocabulary=networks.VOCABULARY, longest=LONGEST).layout
    return generator


def run(
    generator: TextGenerator, requests: Sequence[GenerateRequest], num_slots: int = 4, **more: Any
) -> list[Generation]:
    """Return the generations of one batch."""
    generations = generator.run(batch_of(requests, num_slots, **more))
    assert [generation.key for generation in generations] == [request.key for request in requests]
    return generations


def texts(generator: TextGenerator, requests: Sequence[GenerateRequest], num_slots: int = 4, **more: Any) -> list[str]:
    """Return the texts of generations, which must all be finite."""
    generations = run(generator, requests, num_slots, **more)
    assert all(generation.is_finite for generation in generations)
    return [generation.text for generation in generations]


def generated_alone(model: Any, requests: Sequence[GenerateRequest], hidden: int = -1) -> list[list[int]]:
    """Return what transformers' `generate` makes of each request, one at a time, the most probable token at each step.

    A hidden token is masked in prompts.
    """
    model.generation_config.eos_token_id = None
    model.generation_config.use_cache = model.config.model_type != 'mamba'  # whose cache is wrong after a single token
    # A shorter generation for the same prompt is the beginning of the longest one.
    longest_by_prompt: dict[bytes, list[int]] = {}
    for request in sorted(requests, key=lambda request: -request.max_new_tokens):
        prompt = request.context.tobytes()
        if prompt not in longest_by_prompt:
            ids = torch.from_numpy(request.context).long()[None]
            settings = {'max_new_tokens': request.max_new_tokens, 'do_sample': False, 'pad_token_id': 0}
            output = model.generate(ids, attention_mask=(ids != hidden).long(), **settings)
            longest_by_prompt[prompt] = output[0, ids.shape[1] :].tolist()
    return [longest_by_prompt[request.context.tobytes()][: request.max_new_tokens] for request in requests]


def by_bare_forwards(logits: Callable[[list[int]], torch.Tensor], request: GenerateRequest) -> list[int]:
    """Return the most probable tokens by bare forwards of the whole row, of which `logits` returns the last logits."""
    ids = request.context.tolist()
    for _ in range(request.max_new_tokens):
        ids.append(int(logits(ids).argmax()))
    return ids[len(request.context) :]


def until(ids: Sequence[int], end: int) -> list[int]:
    """Return the tokens up to the first end token."""
    ids = list(ids)
    return ids[: ids.index(end) + 1] if end in ids else ids


def common_token(written: Sequence[Sequence[int]]) -> int:
    """Return a token that would end some of the generations early, but not all."""
    inner = [set(ids[:-1]) for ids in written]
    counts = {token: sum(token in ids for ids in inner) for token in set().union(*inner)}
    return min(counts, key=lambda token: (abs(counts[token] - len(written) // 3), token))
