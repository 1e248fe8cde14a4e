"""`tokens_per_batch: auto`, by hand."""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import pytest
import torch
from generations import Letters
from networks import CPU
from transformers import Gemma3Config, GPT2Config, LlamaConfig, MptConfig

from llmfoundry_gauntlet.engine.continuous import assign_continuous_batches, plan_continuous_batches
from llmfoundry_gauntlet.engine.decoding import GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import Budget, CausalLanguageModel, automatic_budget, budget_in_memory
from llmfoundry_gauntlet.engine.probe import probe_generation
from llmfoundry_gauntlet.types import GenerateRequest, ItemKey

GIB = 2**30
GB = 10**9

# A token of scoring takes 4 * (6 * width + 3 * feed-forward width) bytes. A token of generation also takes those of 9
# tokens in the KV cache, each with 2 * layers * key-value heads * head width values of 2 bytes in bfloat16.
OF_125M = MptConfig(d_model=768)  # 4 * (4,608 + 9,216) = 55,296
OF_1B = LlamaConfig(hidden_size=2048, intermediate_size=8192)  # 4 * (12,288 + 24,576) = 147,456
OF_7B = LlamaConfig(hidden_size=4096, intermediate_size=11008)  # 4 * (24,576 + 33,024) = 230,400
OF_70B = LlamaConfig(hidden_size=8192, intermediate_size=28672)  # 4 * (49,152 + 86,016) = 540,672
CACHED_125M = 2 * 12 * 12 * 64 * 2  # 36,864: 387,072 a token with the scoring part
CACHED_1B = 2 * 16 * 8 * 64 * 2  # 32,768: 442,368
CACHED_7B = 2 * 32 * 32 * 128 * 2  # 524,288: 4,948,992
CACHED_70B = 2 * 80 * 8 * 128 * 2  # 327,680: 3,489,792


@pytest.mark.parametrize(
    ('config', 'cached_bytes', 'free', 'scoring', 'generation'),
    [
        # Half of the free memory less 2**29 bytes, 0.54 GB, is for the batch. On a whole 80 GB, less weights in bf16:
        # 0.25 GB of weights leave 39.34 GB: 711,000 and 101,600 tokens, more than 32,768.
        (OF_125M, CACHED_125M, 79.75 * GB, 32768, 32768),
        # 2.47 GB of weights leave 38.23 GB: 259,000 and 86,400 tokens.
        (OF_1B, CACHED_1B, 77.53 * GB, 32768, 32768),
        # 13.48 GB of weights leave 32.72 GB: 142,000 tokens, and 6,612, of which the power of two is 4,096.
        (OF_7B, CACHED_7B, 66.52 * GB, 32768, 4096),
        # Sharded over 8: weights 1.68 GB, gathered 1.33 GB (embeddings and head 0.52 GB, two layers of 0.40 GB).
        # 77.0 GB free leave 37.96 GB: 164,000 and 7,671 tokens.
        (OF_7B, CACHED_7B, 77.0 * GB, 32768, 4096),
        # 70B does not fit whole. Over 8: weights 17.64 GB, gathered 7.62 GB (embeddings and head 4.20 GB, two layers of
        # 1.71 GB). 54.74 GB free leave 26.83 GB: 49,600 and 7,689 tokens.
        (OF_70B, CACHED_70B, 54.74 * GB, 32768, 4096),
        # Over 64: weights 2.20 GB, gathered 7.62 GB. 70.18 GB free leave 34.55 GB: 63,900 and 9,901 tokens.
        (OF_70B, CACHED_70B, 70.18 * GB, 32768, 8192),
        # In training, with gradients and Adam's moments, a weight takes 16 bytes: 7B over 8 is as whole in bf16, 70B
        # over 64 as over 8 in bf16. Smaller models and larger numbers of ranks reach 32,768.
        # Less memory. Half of 4 GiB less half a GiB is 1.5 GiB: 6,990 tokens of 7B, 325 with the cache.
        (OF_7B, CACHED_7B, 4 * GIB, 4096, 256),
        # GPT-2 names no feed-forward width: 4 * 768. 29,127 tokens of 55,296 bytes, 4,161 of 387,072.
        (GPT2Config(), CACHED_125M, 4 * GIB, 16384, 4096),
        # A multimodal model's text part counts.
        (Gemma3Config(text_config={'hidden_size': 4096, 'intermediate_size': 11008}), 0, 4 * GIB, 4096, 4096),
        # Less than the chunk of logits alone: one token, never none.
        (OF_7B, CACHED_7B, GIB // 2, 1, 1),
    ],
)
def test_scoring_and_generation_fill_half_of_the_free_memory(
    config: Any, cached_bytes: int, free: float, scoring: int, generation: int
):
    found = budget_in_memory(config, int(free), cached_bytes=cached_bytes)
    assert found == Budget(scoring=scoring, generation=generation)


@pytest.mark.parametrize(
    ('num_tokens', 'num_ranks', 'tokens'),
    [
        (10**9, 1, 2048),
        (8192, 1, 2048),  # four batches
        (8191, 1, 1024),
        (16384, 2, 2048),
        (16383, 2, 1024),
        (1, 64, 1024),  # never less: small batches are slow
        (10**9, 64, 2048),
    ],
)
def test_each_rank_gets_four_batches_on_a_cpu(num_tokens: int, num_ranks: int, tokens: int):
    work = {'num_tokens': num_tokens, 'num_generations': 0, 'num_ranks': num_ranks}
    found = automatic_budget(LlamaConfig(), CPU, cached_bytes=10**6, **work)
    assert (found.scoring, found.generation) == (tokens, tokens)


@pytest.mark.parametrize(
    ('num_generations', 'num_ranks', 'requests', 'num_batches'),
    [
        (2000, 1, 500, 4),
        (2000, 8, 64, 32),
        (2000, 64, 31, 65),  # was 32
        (5000, 64, 64, 79),
        (20_000, 8, 625, 32),
        (300, 8, 37, 9),  # was 5
        (300, 64, 16, 19),  # fewer would not be faster
    ],
)
def test_each_rank_gets_a_continuous_batch(num_generations: int, num_ranks: int, requests: int, num_batches: int):
    """Of prompts of 100 tokens, generations of 28 tokens and 256 slots. Mutation: the same number for all ranks."""
    work = {'num_tokens': 10**9, 'num_generations': num_generations, 'num_ranks': num_ranks}
    found = automatic_budget(LlamaConfig(), CPU, cached_bytes=10**6, **work)
    assert found.requests == requests
    prompts = [
        GenerateRequest(key=ItemKey('t/0-shot', row), context=np.full(100, row, np.int32), max_new_tokens=28)
        for row in range(num_generations)
    ]
    batches = plan_continuous_batches(prompts, tokens_per_batch=32_768, requests_per_batch=found.requests)
    assert len(batches) == num_batches
    busy = [mine for mine in assign_continuous_batches(batches, num_ranks=num_ranks) if mine[0].requests]
    assert len(busy) == min(num_ranks, num_batches)


@pytest.mark.parametrize(
    ('family', 'heads', 'size'),
    [
        ('llama', 2, 4),  # two of four heads
        ('llama', 2, 2),  # in bfloat16
        ('mpt', 4, 4),
        ('gpt_bigcode', 4, 4),  # has one, which transformers repeats before attention
    ],
)
def test_the_kv_cache_is_measured_by_the_probe(family: str, heads: int, size: int):
    """All have two layers and heads of width 8."""
    model = networks.network(family).to(torch.float32 if size == 4 else torch.bfloat16)
    generator = TextGenerator(CausalLanguageModel(model, device=CPU), GenerationDecoder(Letters()))
    probe_generation(generator, vocabulary=networks.VOCABULARY, longest=40)
    assert generator.cached_bytes == 2 * 2 * heads * 8 * size
