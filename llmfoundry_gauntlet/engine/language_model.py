"""The only room that knows how torch models are run: planned batches in, log-probabilities out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from llmfoundry_gauntlet.engine.plan import Batch
from llmfoundry_gauntlet.values import ScoreOutput

TOKENS_PER_BATCH = {'cpu': 4096, 'cuda': 32768}
CHUNK = 512  # logit positions reduced at a time in float32


class LanguageModel(Protocol):
    """What the engine asks of a model."""

    def run(self, batch: Batch) -> list[ScoreOutput]:
        """The outputs of a batch, in the order of its requests."""
        ...


class CausalLanguageModel:
    """A Hugging Face causal language model, also wrapped by FSDP: `model` is what is called.

    Rows are padded to the longest of the batch. Logits are made at the scored positions alone: the inputs of the
    model's output layer are picked before it, so that its own scaling and soft caps still apply after it.
    `hidden_token_id` names a token that is masked wherever it stands, as llm-foundry does with real eos tokens
    where pad is eos; None masks padding alone.
    """

    def __init__(self, model: Any, *, device: torch.device, hidden_token_id: int | None = None) -> None:
        self.model = model
        self.device = device
        self.hidden_token_id = hidden_token_id

    @torch.no_grad()
    def run(self, batch: Batch) -> list[ScoreOutput]:
        """The outputs of a batch, in the order of its requests."""
        # R = rows, L = longest row, N = scored positions, V = vocabulary
        ids, mask = self._pad(batch.rows)  # [R, L] each
        rows, columns, targets = self._positions(batch)  # [N] each
        unique, inverse = torch.unique(torch.stack([rows, columns]), dim=1, return_inverse=True)
        with self._picked(unique[0], unique[1]):
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        if logits.shape[:2] == ids.shape:  # a model without an output layer of its own
            logits = logits[unique[0], unique[1]]
        logits = logits.reshape(-1, logits.shape[-1])  # [unique positions, V]
        return split_outputs(batch, *self._read(logits, inverse, targets))

    def _pad(self, rows: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        length = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        mask = torch.zeros(len(rows), length, dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.from_numpy(row)
            mask[index, : len(row)] = 1
        if self.hidden_token_id is not None:
            mask[ids == self.hidden_token_id] = 0
        return ids.to(self.device), mask.to(self.device)

    def _positions(self, batch: Batch) -> torch.Tensor:
        """Row, column and target token of every scored token, shape [3, N]."""
        found = [
            (read.row, read.start + offset, token)
            for request, reads in zip(batch.requests, batch.reads, strict=True)
            for read, continuation in zip(reads, request.continuations, strict=True)
            for offset, token in enumerate(continuation.tolist())
        ]
        return torch.tensor(found, dtype=torch.long, device=self.device).T

    @contextmanager
    def _picked(self, rows: torch.Tensor, columns: torch.Tensor) -> Iterator[None]:
        """Within it the output layer sees the hidden states at these positions alone, as one row."""
        layer = getattr(self.model, 'get_output_embeddings', lambda: None)()
        if layer is None:
            yield
            return
        handle = layer.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows, columns].unsqueeze(0), *inputs[1:]))
        try:
            yield
        finally:
            handle.remove()

    def _read(
        self, logits: torch.Tensor, inverse: torch.Tensor, targets: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-probability, argmax flag and number of equally probable tokens of every scored token, shape [N]."""
        logprobs, is_argmax, num_top = [], [], []
        for start in range(0, len(targets), CHUNK):
            target = targets[start : start + CHUNK, None]
            chunk = logits[inverse[start : start + CHUNK]].float()  # [chunk, V]
            of_target = chunk.gather(1, target)
            top = chunk.amax(1, keepdim=True)
            logprobs.append((of_target - chunk.logsumexp(1, keepdim=True)).squeeze(1))
            is_argmax.append((chunk.argmax(1, keepdim=True) == target).squeeze(1))
            num_top.append(torch.where(of_target == top, (chunk == top).sum(1, keepdim=True), 0).squeeze(1))
        return (
            torch.cat(logprobs).double().cpu().numpy(),
            torch.cat(is_argmax).cpu().numpy(),
            torch.cat(num_top).cpu().numpy(),
        )


def split_outputs(batch: Batch, logprobs: np.ndarray, is_argmax: np.ndarray, num_top: np.ndarray) -> list[ScoreOutput]:
    """Per-token values of a whole batch, shape [N], as one output a request."""
    outputs = []
    start = 0
    for request in batch.requests:
        spans = []
        for continuation in request.continuations:
            spans.append(slice(start, start + len(continuation)))
            start += len(continuation)
        outputs.append(
            ScoreOutput(
                key=request.key,
                logprobs=tuple(logprobs[span] for span in spans),
                is_argmax=tuple(is_argmax[span] for span in spans),
                num_top=tuple(num_top[span] for span in spans),
            )
        )
    return outputs


def default_tokens_per_batch(device_type: str) -> int:
    """Padded tokens of a batch on 'cpu' or 'cuda' where the user names no number."""
    return TOKENS_PER_BATCH.get(device_type, TOKENS_PER_BATCH['cpu'])
