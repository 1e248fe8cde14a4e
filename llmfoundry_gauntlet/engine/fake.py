"""A language model for tests, without torch: its log-probabilities are a hash of the tokens before them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from llmfoundry_gauntlet.engine.plan import Batch
from llmfoundry_gauntlet.values import ScoreOutput, ScoreRequest


class FakeLanguageModel:
    """Scores tokens from -1 to 0 by a hash of every visible token and its position.

    `score` is its own route to the answer of one request, without batches.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def logprob(self, prefix: Sequence[int], token: int) -> float:
        """Log-probability of `token` after `prefix`."""
        text = f'{self.seed}:{",".join(map(str, prefix))}>{token}'
        return -int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], 'big') / 2**48

    def is_top(self, prefix: Sequence[int], token: int) -> bool:
        """Whether `token` is the most probable one after `prefix`."""
        return self.logprob(prefix, token) > -0.5

    def score(self, request: ScoreRequest) -> ScoreOutput:
        """The output of one request."""
        pairs = list(zip(request.contexts, request.continuations, strict=True))
        return self._output(request, [(context.tolist(), continuation.tolist()) for context, continuation in pairs])

    def run(self, batch: Batch) -> list[ScoreOutput]:
        """The outputs of a planned batch, read from its rows."""
        outputs = []
        for request, reads in zip(batch.requests, batch.reads, strict=True):
            pairs = []
            for read, continuation in zip(reads, request.continuations, strict=True):
                row = batch.rows[read.row].tolist()
                tail = row[read.start + 1 : read.start + len(continuation)]
                pairs.append((row[: read.start + 1], [*tail, int(continuation[-1])]))
            outputs.append(self._output(request, pairs))
        return outputs

    def _output(self, request: ScoreRequest, pairs: Sequence[tuple[list[int], list[int]]]) -> ScoreOutput:
        logprobs, tops = [], []
        for context, continuation in pairs:
            prefixes = [(context + continuation[:i], token) for i, token in enumerate(continuation)]
            logprobs.append(np.array([self.logprob(prefix, token) for prefix, token in prefixes]))
            tops.append(np.array([self.is_top(prefix, token) for prefix, token in prefixes]))
        return ScoreOutput(
            key=request.key,
            logprobs=tuple(logprobs),
            is_argmax=tuple(tops),
            num_top=tuple(top.astype(np.int64) for top in tops),
        )
