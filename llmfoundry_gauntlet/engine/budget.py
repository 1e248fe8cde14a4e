"""Choose `tokens_per_batch: auto`, separately for scoring and for generation, which also needs a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from llmfoundry_gauntlet.engine.plan import CACHED_PER_TOKEN, LEAST_REQUESTS

MOST_TOKENS = {'cpu': 2048, 'cuda': 32768}  # on a CPU 4096 took 5 to 12 % longer
LEAST_TOKENS = {'cpu': 1024, 'cuda': 4096}
LEAST_BATCHES = 4  # per rank; with fewer, ranks wait for each other
FEW_REQUESTS = 16  # a decoding step with fewer takes hardly less time
SHARE_OF_MEMORY = 0.5  # of free memory; the rest is a margin for what the estimate leaves out
CHUNK_BYTES = 2**29  # for a chunk of logits and its copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The tokens per batch of scoring and of generation, and the requests per continuous batch (None: the default)."""

    scoring: int
    generation: int
    requests: int | None = None


def automatic_budget(
    config: Any,
    device: torch.device,
    *,
    cached_bytes: int,
    num_tokens: int,
    num_generations: int,
    num_ranks: int,
    gathered_bytes: int = 0,
) -> Budget:
    """Return what fits into free memory, halved while ranks would have too few batches.

    `cached_bytes` is the size of a token in the KV cache; `gathered_bytes` that of the weights that FSDP gathers at a
    time.
    """
    most, least = (bounds.get(device.type, bounds['cpu']) for bounds in (MOST_TOKENS, LEAST_TOKENS))
    budget = Budget(scoring=most, generation=most)
    if (free := free_bytes(device)) is not None:
        budget = budget_in_memory(config, free - gathered_bytes, cached_bytes=cached_bytes, most=most)

    def halved(tokens: int) -> int:
        while tokens // 2 >= least and LEAST_BATCHES * tokens * num_ranks > num_tokens:
            tokens //= 2
        return tokens

    return Budget(
        scoring=halved(budget.scoring),
        generation=halved(budget.generation),
        requests=requests_per_batch(num_generations, num_ranks),
    )


def requests_per_batch(num_requests: int, num_ranks: int) -> int:
    """Return the requests per continuous batch with which each rank has a batch, or four if there are many requests."""
    of_rank = num_requests // num_ranks
    return max(FEW_REQUESTS, min(LEAST_REQUESTS, of_rank), of_rank // LEAST_BATCHES)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, with what torch has reserved and does not use; None on a CPU."""
    if device.type != 'cuda':
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def budget_in_memory(config: Any, free: int, *, cached_bytes: int, most: int = MOST_TOKENS['cuda']) -> Budget:
    """Return the largest powers of two of tokens, at most `most`, that fit into this many bytes.

    Estimated from a layer's widths in float32: at its peak a layer holds the residual stream, its norm, query, key and
    value, and three times the feed-forward width. Generation also holds the KV cache and the keys and values of prompts
    that enter it.
    """
    config = config.get_text_config()
    width = getattr(config, 'hidden_size', None) or config.d_model
    inner = getattr(config, 'intermediate_size', None) or 4 * width
    activations = 4 * (6 * width + 3 * inner)

    def fitting(bytes_per_token: int) -> int:
        tokens = max(1, int((SHARE_OF_MEMORY * free - CHUNK_BYTES) / bytes_per_token))
        return min(most, 1 << (tokens.bit_length() - 1))

    return Budget(
        scoring=fitting(activations),
        generation=fitting(activations + (CACHED_PER_TOKEN + 1) * cached_bytes),
    )
