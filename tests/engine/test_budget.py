"""`tokens_per_batch: auto`, by hand."""

import pytest
from networks import CPU
from transformers import Gemma3Config, GPT2Config, LlamaConfig, MptConfig

from llmfoundry_gauntlet.engine.budget import automatic_budget, tokens_in_memory

GIB = 2**30


@pytest.mark.parametrize(
    ('config', 'free_bytes', 'tokens'),
    [
        # A Llama of 7B: 6 * 4096 + 3 * 11008 = 57,600 values, 230,400 bytes a token. Half of 80 GiB less half a GiB
        # holds 184,084 tokens: 2**17 = 131,072 is the power of two below.
        (LlamaConfig(hidden_size=4096, intermediate_size=11008), 80 * GIB, 2**17),
        # Half of 4 GiB less half a GiB is 1.5 GiB: 6,990 tokens.
        (LlamaConfig(hidden_size=4096, intermediate_size=11008), 4 * GIB, 2**12),
        # GPT-2 names no inner width: 4 * 768. 6 * 768 + 3 * 3072 = 13,824 values, 55,296 bytes; 29,127 tokens.
        (GPT2Config(), 4 * GIB, 2**14),
        # MPT calls its width d_model; 18 * 2048 = 36,864 values, 147,456 bytes; 10,922 tokens.
        (MptConfig(d_model=2048), 4 * GIB, 2**13),
        # Less than the chunk of logits alone: one token, never none.
        (LlamaConfig(hidden_size=4096, intermediate_size=11008), GIB // 2, 1),
    ],
)
def test_as_many_tokens_are_run_as_half_of_the_free_memory_holds(config, free_bytes: int, tokens: int):
    assert tokens_in_memory(config, free_bytes) == tokens


def test_a_model_of_text_and_images_counts_by_its_text_part():
    text = {'hidden_size': 4096, 'intermediate_size': 11008}
    assert tokens_in_memory(Gemma3Config(text_config=text), 4 * GIB) == 2**12


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
def test_a_cpu_takes_fewer_tokens_where_each_rank_would_have_less_than_four_batches(num_tokens, num_ranks, tokens):
    assert automatic_budget(LlamaConfig(), CPU, num_tokens=num_tokens, num_ranks=num_ranks) == tokens


@pytest.mark.parametrize(
    ('config', 'tokens'),
    [
        # 32 layers keep 2 * 4096 values of a token, 4 bytes each, for 8 tokens: 8,388,608 bytes beside the 230,400
        # above. Half of 80 GiB less half a GiB holds 4,920.
        (LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32), 2**12),
        # A quarter of the heads: 2,327,552 bytes, 18,222 tokens.
        (LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_key_value_heads=8), 2**14),
        # MPT: 147,456 and 8 * 4 * 2 * 24 * 2048 = 3,145,728 bytes; 12,879 tokens.
        (MptConfig(d_model=2048, n_layers=24, n_heads=16), 2**13),
    ],
)
def test_replies_count_with_the_keys_and_values_that_are_kept_for_them(config, tokens: int):
    assert tokens_in_memory(config, 80 * GIB, writes=True) == tokens
