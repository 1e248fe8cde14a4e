"""`tokens_per_batch: auto`: as many tokens as the device runs well, fewer where there are few to share out."""

from __future__ import annotations

from typing import Any

import torch

from llmfoundry_gauntlet.engine.pools import CACHED_PER_TOKEN

MOST_TOKENS = {'cpu': 2048, 'cuda': 32768}  # on a CPU 4096 took 5 to 12 % longer
LEAST_TOKENS = {'cpu': 1024, 'cuda': 4096}
LEAST_BATCHES = 4  # for each rank: with fewer, ranks wait for each other
SHARE_OF_MEMORY = 0.5  # of what is free: the rest is for what the estimate leaves out
CHUNK_BYTES = 2**29  # a chunk of logits and its copies


def automatic_budget(
    config: Any, device: torch.device, *, num_tokens: int, num_ranks: int, writes: bool = False
) -> int:
    """Tokens of a batch: what the device's free memory holds, halved while ranks would have few batches each.

    Where the model `writes` replies, the keys and values that it keeps for them count as well.
    """
    most, least = (bounds.get(device.type, bounds['cpu']) for bounds in (MOST_TOKENS, LEAST_TOKENS))
    if device.type == 'cuda':
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        most = min(most, tokens_in_memory(config, free, writes=writes))
    while most // 2 >= least and LEAST_BATCHES * most * num_ranks > num_tokens:
        most //= 2
    return most


def tokens_in_memory(config: Any, free_bytes: int, *, writes: bool = False) -> int:
    """The largest power of two of tokens whose activations fit, by the widths of a layer in float32.

    At its widest a layer holds the residual stream, its norm, query, key, value, and three times the inner width of
    the feed-forward part.
    """
    config = config.get_text_config()
    width = config.hidden_size
    inner = getattr(config, 'intermediate_size', None) or 4 * width
    bytes_per_token = 4 * (6 * width + 3 * inner)
    if writes:
        bytes_per_token += CACHED_PER_TOKEN * 4 * 2 * config.num_hidden_layers * cached_width(config)
    tokens = max(1, int((SHARE_OF_MEMORY * free_bytes - CHUNK_BYTES) / bytes_per_token))
    return 1 << (tokens.bit_length() - 1)


def cached_width(config: Any) -> int:
    """Values that a layer keeps of a token as keys, and as many as values."""
    num_heads: int = config.num_attention_heads
    head_width: int = getattr(config, 'head_dim', None) or config.hidden_size // num_heads
    num_cached: int = getattr(config, 'num_key_value_heads', None) or num_heads
    return head_width * num_cached
