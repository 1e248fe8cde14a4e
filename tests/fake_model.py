"""A language model without torch: the log-probability of a token, in (-1, 0], is a hash of all tokens before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, Batch
from llmfoundry_gauntlet.engine.trees import lay_out_rows, lay_out_stream, split_outputs
from llmfoundry_gauntlet.types import ScoreOutput, ScoreRequest


def score(request: ScoreRequest) -> ScoreOutput:
    """Return the output of one request, computed without batches."""
    prefixes, targets = [], []
    for context, continuation in zip(request.contexts, request.continuations, strict=True):
        for index, token in enumerate(continuation.tolist()):
            prefixes.append([*context.tolist(), *continuation[:index].tolist()])
            targets.append(token)
    (output,) = outputs_of((request,), prefixes, targets)
    return output


def run(batch: Batch) -> list[ScoreOutput]:
    """Return the outputs of a planned batch, read from its layout."""
    if not batch.trees:
        return []
    prefixes = []
    if batch.layout == PADDED_ROWS:
        rows = lay_out_rows(batch.requests)
        for position in rows.reads.tolist():
            row, column = divmod(position, rows.tokens.shape[1])
            prefixes.append(rows.tokens[row, : column + 1].tolist())
        return outputs_of(batch.requests, prefixes, rows.targets.tolist())

    cached = [] if batch.prefix is None else batch.prefix.tolist()
    stream = lay_out_stream(batch.trees, len(cached))
    for position in stream.reads.tolist():
        # A token sees itself and those before it whose branches it continues.
        ancestors = np.flatnonzero(stream.ends[: position + 1] > position)
        assert stream.depths[ancestors].tolist() == list(range(len(cached), len(cached) + len(ancestors)))
        prefixes.append([*cached, *stream.tokens[ancestors].tolist()])
    return outputs_of(batch.requests, prefixes, stream.targets.tolist())


def outputs_of(
    requests: Sequence[ScoreRequest], prefixes: Sequence[list[int]], targets: Sequence[int]
) -> list[ScoreOutput]:
    """Return outputs of the tokens `targets` after `prefixes`."""
    hashes = (
        hashlib.sha256(f'{",".join(map(str, prefix))}>{token}'.encode()).digest()[:6]
        for prefix, token in zip(prefixes, targets, strict=True)
    )
    logprobs = np.array([-int.from_bytes(digest, 'big') / 2**48 for digest in hashes])
    is_argmax = logprobs > -0.5
    return split_outputs(requests, logprobs, is_argmax, is_argmax.astype(np.int64))
