"""`tokens_per_batch: auto`: as many tokens as the device runs well, fewer where there are few to share out."""

from __future__ import annotations

from typing import Any

import torch

MOST_TOKENS = {'cpu': 4096, 'cuda': 32768}
LEAST_TOKENS = {'cpu': 1024, 'cuda': 4096}
LEAST_BATCHES = 4  # for each rank: with fewer, ranks wait for each other
SHARE_OF_MEMORY = 0.5  # of what is free: the rest is for what the estimate leaves out
CHUNK_BYTES = 2**29  # a chunk of logits and its copies


def automatic_budget(config: Any, device: torch.device, *, num_tokens: int, num_ranks: int) -> int:
    """Tokens of a batch: what the device's free memory holds, halved while ranks would have few batches each."""
    most, least = (bounds.get(device.type, bounds['cpu']) for bounds in (MOST_TOKENS, LEAST_TOKENS))
    if device.type == 'cuda':
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        most = min(most, tokens_in_memory(config, free))
    while most // 2 >= least and LEAST_BATCHES * most * num_ranks > num_tokens:
        most //= 2
    return most


def tokens_in_memory(config: Any, free_bytes: int) -> int:
    """The largest power of two of tokens whose activations fit, by the widths of a layer in float32.

    At its widest a layer holds the residual stream, its norm, query, key, value, and three times the inner width of
    the feed-forward part.
    """
    config = config.get_text_config()
    width = config.hidden_size
    inner = getattr(config, 'intermediate_size', None) or 4 * width
    bytes_per_token = 4 * (6 * width + 3 * inner)
    tokens = max(1, int((SHARE_OF_MEMORY * free_bytes - CHUNK_BYTES) / bytes_per_token))
    return 1 << (tokens.bit_length() - 1)
