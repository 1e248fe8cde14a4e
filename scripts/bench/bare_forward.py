"""Transformers alone as a contender: a bare forward over as many tokens as our plan has, or `generate`."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from materials import load_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer
from worker import measure

BATCH_SIZES = (16, 32, 64)  # tried with `generate`


class Batch(NamedTuple):
    """Rows of one length, with the number of positions that are read in each."""

    num_rows: int
    length: int
    num_reads: int


class BareForward:
    """Times the model with its own attention, without a mask, and with logits only at as many positions as are read.

    Rows have the mean length of the planned sequences. Tokenization, padding, softmax and scoring are not included. On
    a GPU attention is flash attention. For generation tasks it is transformers' greedy `generate` instead.
    """

    def load(self, model_folder: str, device: str = 'cpu', dtype: str = 'float32') -> None:
        """Load the model; the next measurement warms it up."""
        self.model_folder, self.device = model_folder, device
        self.model = load_model(model_folder, device, dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self.warm = False

    def measure(self, *, shape: dict[str, Any]) -> dict[str, Any]:
        """Return the seconds of a forward over `shape`, the arguments of `bare_batches`, or of `generate`."""
        if 'contexts' in shape:
            return self.generate(**shape)
        batches = bare_batches(**shape)
        inputs = [self.inputs(batch) for batch in batches]
        if not self.warm:
            self.forward(inputs[:1])
            self.warm = True
        seconds, _ = measure(lambda: self.forward(inputs), self.device)
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
        ids = torch.randint(self.model.config.vocab_size, size, generator=generator)
        return ids.to(self.device), batch.num_reads

    @torch.no_grad()
    def forward(self, inputs: list[tuple[torch.Tensor, int]]) -> None:
        """Run all batches; this is what is timed."""
        for ids, num_reads in inputs:
            keep = self.model.get_output_embeddings().register_forward_pre_hook(partial(last_positions, num_reads))
            try:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.device == 'cuda' else nullcontext():
                    self.model(input_ids=ids, use_cache=False)
            finally:  # others run the same model after this one has run out of memory
                keep.remove()

    def generate(self, *, contexts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
        """Return the seconds at the best of `BATCH_SIZES`, and the texts.

        Batches are sorted by length and padded on the left. Sizes beyond the smallest that holds all are left out.
        """
        order = sorted(range(len(contexts)), key=lambda index: len(contexts[index]), reverse=True)
        ordered = [contexts[index] for index in order]
        self.generate_batch(ordered[:2], 4)  # what the first call prepares is not measured

        def generate_all(batch_size: int) -> list[list[int]]:
            generated = []
            for start in range(0, len(ordered), batch_size):
                generated += self.generate_batch(ordered[start : start + batch_size], max_new_tokens)
            return generated

        num_smaller = sum(size < len(contexts) for size in BATCH_SIZES)
        measured = [measure(partial(generate_all, size), self.device) for size in BATCH_SIZES[: num_smaller + 1]]
        fastest, generated = min(measured, key=lambda pair: pair[0]['wall_seconds'])
        texts = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
        text_of = dict(zip(order, texts, strict=True))
        return {**fastest, 'predictions': [text_of[index] for index in range(len(contexts))]}

    @torch.no_grad()
    def generate_batch(self, contexts: list[list[int]], max_new_tokens: int, **settings: Any) -> list[list[int]]:
        """Generate for one batch; return the new tokens of each row. `settings` are further ones of `generate`."""
        longest = max(map(len, contexts))
        ids = torch.zeros(len(contexts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, longest - len(context) :] = torch.tensor(context)
            mask[row, longest - len(context) :] = 1
        whole_rows = self.model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=self.model.config.eos_token_id,
            **settings,
        )
        return whole_rows[:, longest:].tolist()


def last_positions(num_reads: int, _: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an output layer at the last positions; token ids are those of a shared input layer."""
    hidden, *others = arguments
    if hidden.is_floating_point():
        hidden = hidden[:, -num_reads:]
    return (hidden, *others)


def bare_batches(*, num_tokens: int, mean_length: float, num_reads: int, tokens_per_batch: int) -> list[Batch]:
    """Return batches of at most `tokens_per_batch`, with rows of about `mean_length`.

    The rows hold `num_tokens` and `num_reads` in all, each row the same number of them or one more.
    """
    num_rows = max(1, round(num_tokens / mean_length))
    lengths, reads = spread(num_tokens, num_rows), spread(num_reads, num_rows)
    num_alike = Counter(zip(lengths, reads, strict=True))
    batches = []
    for (length, reads_of_row), count in num_alike.items():
        most_rows = max(1, tokens_per_batch // length)
        num_batches = math.ceil(count / most_rows)
        batches += [Batch(rows, length, min(reads_of_row, length)) for rows in spread(count, num_batches)]
    return batches


def spread(total: int, num_parts: int) -> list[int]:
    """Return `num_parts` numbers that add up to `total` and differ by at most one."""
    each, rest = divmod(total, num_parts)
    return [each + 1] * rest + [each] * (num_parts - rest)
