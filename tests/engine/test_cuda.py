"""Scoring and generation on a stand-in for a GPU: devices, waits of the host, kernels, and numbers as on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import networks
import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from networks import CPU, LAYOUT_OF, PREFIX_BUDGET

from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import STREAM, plan
from llmfoundry_gauntlet.engine.probe import probe
from llmfoundry_gauntlet.types import ScoreRequest

pytestmark = pytest.mark.skipif(shutil.which('g++') is None, reason='the stand-in for a GPU needs g++')

FP32, BF16, AMP_BF16 = 'fp32', 'bf16', 'amp_bf16'
PRECISIONS = [FP32, BF16, AMP_BF16]
FAMILIES = [(name, precision) for name in networks.FAMILIES for precision in PRECISIONS]


def network(name: str, precision: str, **more: Any) -> Any:
    return networks.network(name, **more).to(torch.bfloat16 if precision == BF16 else torch.float32)


def autocast(device: torch.device, precision: str) -> Any:
    return torch.autocast(device.type, torch.bfloat16) if precision == AMP_BF16 else nullcontext()


@contextmanager
def on_gpu(name: str, precision: str, **more: Any) -> Iterator[tuple[FakeCuda, CausalLanguageModel]]:
    """Yield a GPU and a model on it."""
    with FakeCuda() as gpu, torch.no_grad(), autocast(gpu.device, precision):
        model = gpu.put(network(name, precision, **more))
        yield gpu, CausalLanguageModel(model, device=gpu.device)


def sums(language_model: CausalLanguageModel, layout: str, requests: Sequence[ScoreRequest]) -> np.ndarray:
    """Return the summed log-probabilities of the requests in a layout."""
    language_model.learn(requests[:1])
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=layout)
    return networks.sums_of(networks.run(language_model, batches), requests)


@pytest.mark.parametrize(('name', 'precision'), FAMILIES)
def test_every_family_scores_as_on_the_cpu(name: str, precision: str):
    """In its layout, with cached prefixes. In half precision the typical row agrees.

    Mutations: a tensor left on the CPU; keys of another segment; a causal mask aligned with the first key.
    """
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix(4)]
    with on_gpu(name, precision) as (_, language_model):
        found = sums(language_model, LAYOUT_OF[name], requests)
    with torch.no_grad(), autocast(CPU, precision):
        expected = sums(CausalLanguageModel(network(name, precision), device=CPU), LAYOUT_OF[name], requests)
    off = np.abs(found - expected)
    assert (off.max() < 1e-4) if precision == FP32 else (np.median(off) < 0.05)


@pytest.mark.parametrize('precision', PRECISIONS)
def test_the_probe_finds_the_token_stream(precision: str):
    with on_gpu('llama', precision) as (_, language_model):
        found = probe(language_model, vocabulary=networks.VOCABULARY, longest=60)
    assert found.layout == STREAM, found.reason
