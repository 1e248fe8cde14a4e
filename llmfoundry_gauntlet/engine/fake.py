"""A language model for tests, without torch: each log-probability is a hash of the tokens before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, Batch
from llmfoundry_gauntlet.engine.trees import lay_out_rows, lay_out_stream, split_outputs
from llmfoundry_gauntlet.types import ScoreOutput, ScoreRequest


class FakeLanguageModel:
    """Give each token a log-probability in (-1, 0], a hash of every visible token and its position.

    `score` computes the output of one request directly, without batches.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def logprob(self, prefix: Sequence[int], token: int) -> float:
        """Return the log-probability of `token` after `prefix`."""
        text = f'{self.seed}:{",".join(map(str, prefix))}>{token}'
        return -int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], 'big') / 2**48

    def is_top(self, prefix: Sequence[int], token: int) -> bool:
        """Return whether `token` is the most probable one after `prefix`."""
        return self.logprob(prefix, token) > -0.5

    def score(self, request: ScoreRequest) -> ScoreOutput:
        """Return the output of one request."""
        prefixes, targets = [], []
        for context, continuation in zip(request.contexts, request.continuations, strict=True):
            for place, token in enumerate(continuation.tolist()):
                prefixes.append([*context.tolist(), *continuation[:place].tolist()])
                targets.append(token)
        return self._outputs((request,), prefixes, targets)[0]

    def run(self, batch: Batch) -> list[ScoreOutput]:
        """Return the outputs of a planned batch, read from its layout."""
        if not batch.trees:
            return []
        prefixes = []
        if batch.layout == PADDED_ROWS:
            rows = lay_out_rows(batch.requests)
            for place in rows.reads.tolist():
                row, column = divmod(place, rows.tokens.shape[1])
                prefixes.append(rows.tokens[row, : column + 1].tolist())
            return self._outputs(batch.requests, prefixes, rows.targets.tolist())
        cached = [] if batch.prefix is None else batch.prefix.tolist()
        stream = lay_out_stream(batch.trees, len(cached))
        for place in stream.reads.tolist():
            ancestors = np.flatnonzero(stream.ends[: place + 1] > place)
            if stream.depths[ancestors].tolist() != list(range(len(cached), len(cached) + len(ancestors))):
                raise AssertionError('the ancestors of a token are not a sequence')
            prefixes.append([*cached, *stream.tokens[ancestors].tolist()])
        return self._outputs(batch.requests, prefixes, stream.targets.tolist())

    def _outputs(
        self, requests: Sequence[ScoreRequest], prefixes: Sequence[list[int]], targets: Sequence[int]
    ) -> list[ScoreOutput]:
        pairs = list(zip(prefixes, targets, strict=True))
        tops = np.array([self.is_top(prefix, token) for prefix, token in pairs])
        logprobs = np.array([self.logprob(prefix, token) for prefix, token in pairs])
        return split_outputs(requests, logprobs, tops, tops.astype(np.int64))
