"""Values of scored tokens as the outputs of their requests. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from llmfoundry_gauntlet.types import Bools, Floats, Ints, ScoreOutput, ScoreRequest


def split_outputs(
    requests: Sequence[ScoreRequest], logprobs: Floats, is_argmax: Bools, num_top: Ints
) -> list[ScoreOutput]:
    """Per-token values of all requests in order, shape [N], as one output a request."""
    outputs = []
    start = 0
    for request in requests:
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
