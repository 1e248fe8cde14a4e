"""The limit as a contender: a bare Hugging Face forward over as many tokens as our plan has, nothing around it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM
from worker import measure

LENGTH_TOLERANCE = 0.05  # rows may be this much shorter or longer than the mean


class Batch(NamedTuple):
    """Rows of one length, and how many positions of each row are read."""

    num_rows: int
    length: int
    num_reads: int


class BareForward:
    """`measure` times the model's own attention without a mask, and logits at as many positions as are read.

    Rows have the mean length of the planned sequences; there is no tokenisation, padding, softmax or scoring in it.
    """

    def load(self, model_folder: str) -> None:
        """Takes the model into memory; the next measurement warms it up."""
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, torch_dtype=torch.float32).eval()
        self.warm = False

    def measure(self, *, shape: dict[str, Any]) -> dict[str, Any]:
        """Seconds of a forward over `shape`, the fields of ours.Shape."""
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

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Random token ids, and the last positions as the ones that are read."""
        generator = torch.Generator().manual_seed(0)
        size = (batch.num_rows, batch.length)
        return {
            'input_ids': torch.randint(self.model.config.vocab_size, size, generator=generator),
            'logits_to_keep': torch.arange(batch.length - batch.num_reads, batch.length),
        }

    @torch.no_grad()
    def forward(self, inputs: list[dict[str, torch.Tensor]]) -> None:
        """All that is timed."""
        for arguments in inputs:
            self.model(**arguments, use_cache=False)


def bare_batches(*, num_tokens: int, mean_length: float, num_reads: int, tokens_per_batch: int) -> list[Batch]:
    """Rows of about `mean_length` that hold `num_tokens` together, in like batches of at most `tokens_per_batch`.

    Some rows have one read more than the others, so that there are `num_reads` in all.
    """
    num_rows, length = rows_of(num_tokens, mean_length)
    reads, num_longer = divmod(num_reads, num_rows)
    batches = []
    for count, reads_each in ((num_rows - num_longer, reads), (num_longer, reads + 1)):
        num_batches = -(-count // max(1, tokens_per_batch // length))
        bounds = [count * index // num_batches for index in range(num_batches + 1)] if count else []
        batches += [Batch(end - start, length, min(reads_each, length)) for start, end in pairwise(bounds)]
    return batches


def rows_of(num_tokens: int, mean_length: float) -> tuple[int, int]:
    """Number and length of rows: their product as near to `num_tokens` as a length near the mean allows."""
    least = round(num_tokens / mean_length * (1 - LENGTH_TOLERANCE))
    most = round(num_tokens / mean_length * (1 + LENGTH_TOLERANCE))
    pairs = [(rows, max(1, round(num_tokens / rows))) for rows in range(max(1, least), max(1, most) + 1)]
    return min(pairs, key=lambda pair: (abs(pair[0] * pair[1] - num_tokens), abs(pair[1] - mean_length)))
