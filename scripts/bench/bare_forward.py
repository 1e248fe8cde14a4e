"""The lower bound as a contender: a bare Hugging Face forward over as many tokens as our plan has."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from materials import load_model
from worker import measure


class Batch(NamedTuple):
    """Rows of one length, with the number of positions that are read in each."""

    num_rows: int
    length: int
    num_reads: int


class BareForward:
    """Times the model with its own attention, without a mask, and with logits only at as many positions as are read.

    Rows have the mean length of the planned sequences. Tokenization, padding, softmax and scoring are not included.
    """

    def load(self, model_folder: str) -> None:
        """Load the model; the next measurement warms it up."""
        self.model = load_model(model_folder)
        self.warm = False

    def measure(self, *, shape: dict[str, Any]) -> dict[str, Any]:
        """Return the seconds of a forward over `shape`, the arguments of `bare_batches`."""
        batches = bare_batches(**shape)
        inputs = [self.inputs(batch) for batch in batches]
        if not self.warm:
            self.forward(inputs[:1])
            self.warm = True
        seconds, _ = measure(lambda: self.forward(inputs))
        return {
            **seconds,
            'predictions': [],
            'num_tokens': sum(batch.num_rows * batch.length for batch in batches),
            'num_reads': sum(batch.num_rows * batch.num_reads for batch in batches),
        }

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Return random token ids, and the number of last positions that are read."""
        generator = torch.Generator().manual_seed(0)
        size = (batch.num_rows, batch.length)
        return torch.randint(self.model.config.vocab_size, size, generator=generator), batch.num_reads

    @torch.no_grad()
    def forward(self, inputs: list[tuple[torch.Tensor, int]]) -> None:
        """Run all batches; this is what is timed."""
        for ids, num_reads in inputs:
            keep = self.model.get_output_embeddings().register_forward_pre_hook(partial(last_positions, num_reads))
            self.model(input_ids=ids, use_cache=False)
            keep.remove()


def last_positions(num_reads: int, _: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an output layer at the last positions; token ids are those of a shared input layer."""
    hidden, *others = arguments
    return (hidden[:, -num_reads:] if hidden.is_floating_point() else hidden, *others)


def bare_batches(*, num_tokens: int, mean_length: float, num_reads: int, tokens_per_batch: int) -> list[Batch]:
    """Return batches of at most `tokens_per_batch`, with rows of about `mean_length`.

    The rows hold `num_tokens` and `num_reads` in all, each row the same number of them or one more.
    """
    num_rows = max(1, round(num_tokens / mean_length))
    rows = Counter(zip(spread(num_tokens, num_rows), spread(num_reads, num_rows), strict=True))
    batches = []
    for (length, reads), count in rows.items():
        num_batches = -(-count // max(1, tokens_per_batch // length))
        batches += [Batch(num, length, min(reads, length)) for num in spread(count, num_batches)]
    return batches


def spread(total: int, num_parts: int) -> list[int]:
    """Return `num_parts` numbers that add up to `total` and differ by at most one."""
    each, rest = divmod(total, num_parts)
    return [each + 1] * rest + [each] * (num_parts - rest)
