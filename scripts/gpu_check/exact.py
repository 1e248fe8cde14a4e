"""Scores in float64 on a CPU, and how far rounding alone may take others from them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import networks
import numpy as np
import torch

from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import plan
from llmfoundry_gauntlet.engine.rounding import ROUNDING_TOLERANCE, TOLERANCE, in_float64
from llmfoundry_gauntlet.runtime.loading import DTYPE, quiet
from llmfoundry_gauntlet.types import Floats, ScoreRequest

FP32, BF16, FP16 = 'fp32', 'bf16', 'fp16'
DTYPES = {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}
HALF_TOLERANCE = 2  # in half precision, in rounding errors of the largest logit; the probe of the package has as many


def on_device(model: Any, dtype: str, device: torch.device) -> CausalLanguageModel:
    """Return a copy of the model on the device in this type, ready to be run."""
    return CausalLanguageModel(loaded(model, dtype).to(device), device=device)


def loaded(model: Any, dtype: str) -> Any:
    """Return a copy of the model as transformers loads it in this type.

    Weights such as those of routers stay in float32, and so do rotary frequencies, as in half precision the angles of
    late positions would be others altogether. Of some families the row of the padding token becomes zeros.
    """
    with quiet():
        return type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict={name: weight.clone() for name, weight in model.state_dict().items()},
            **{DTYPE: DTYPES[dtype]},
        )


@contextmanager
def exactly(model: Any) -> Iterator[Any]:
    """Yield a model on a CPU that computes in float64."""
    with in_float64(CausalLanguageModel(model, device=networks.CPU)):
        yield model


@torch.no_grad()
def bare_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [T, V] of one unpadded row by the model alone, in float64 on the CPU."""
    device = next(model.parameters()).device
    logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits[0]
    return logits.double().cpu()


def bare_scores(model: Any, requests: Sequence[ScoreRequest]) -> Floats:
    """Return the summed log-probability of each continuation, each row by the model alone."""
    sums = []
    for request in requests:
        for context, continuation in zip(request.contexts, request.continuations, strict=True):
            logits = bare_logits(model, [*context.tolist(), *continuation.tolist()])
            logprobs = logits[len(context) - 1 : -1].log_softmax(-1)
            targets = torch.from_numpy(continuation).long()
            sums.append(float(logprobs.gather(1, targets[:, None]).sum()))
    return np.array(sums)


def scores_in(
    language_model: CausalLanguageModel, requests: Sequence[ScoreRequest], layout: str, *, tokens_per_batch: int
) -> Floats:
    """Return the same by the package in a layout."""
    batches = plan(requests, tokens_per_batch=tokens_per_batch, layout=layout)
    return networks.sums_of(networks.run(language_model, batches), requests)


def off(found: Floats, exact: Floats, dtype: str) -> float:
    """Return the largest difference, in half precision the median: rounding may send a token to other experts there."""
    differences = np.abs(found - exact)
    return float(np.max(differences) if dtype == FP32 else np.median(differences))


def most_off(rounded: float, *, largest_logit: float, rounding: float) -> float:
    """Return how far scores may be from the exact ones, given how far the model's own are.

    `largest_logit` and the relative `rounding`, 0 in float32, are those of `CausalLanguageModel.learn`.
    """
    return max(ROUNDING_TOLERANCE * rounded, TOLERANCE, HALF_TOLERANCE * largest_logit * rounding)
