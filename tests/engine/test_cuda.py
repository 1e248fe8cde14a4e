"""Scoring and generation on a stand-in for a GPU: devices, waits of the host, kernels, and numbers as on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import generations
import networks
import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from networks import CPU, LAYOUT_OF, PREFIX_BUDGET

from llmfoundry_gauntlet.engine.decoding import PROMPT_STREAM, GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, STREAM, plan
from llmfoundry_gauntlet.engine.probe import probe
from llmfoundry_gauntlet.types import Sampling

pytestmark = pytest.mark.skipif(shutil.which('g++') is None, reason='the stand-in for a GPU needs g++')

FP32, BF16, AMP_BF16 = 'fp32', 'bf16', 'amp_bf16'
PRECISIONS = [FP32, BF16, AMP_BF16]
SAMPLING = Sampling(temperature=1.0, top_p=0.9)
MOST_WAITS = 4  # of the host, in a batch or a step of generation
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


def outputs_of(language_model: CausalLanguageModel, layout: str, gpu: FakeCuda | None = None) -> np.ndarray:
    """Return the summed log-probabilities of requests in a layout, with cached prefixes; check a GPU's waits."""
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix(4)]
    language_model.learn(requests[:1])
    outputs = {}
    for batch in plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=layout):
        if gpu is not None:
            gpu.clear()
        outputs |= networks.run(language_model, [batch])
        if gpu is not None:
            assert len(gpu.own_waits()) <= MOST_WAITS, gpu.waits
    return networks.sums_of(outputs, requests)


@contextmanager
def no_waits_in_layers(model: Any, gpu: FakeCuda) -> Iterator[None]:
    """Fail if a layer of the model makes the host wait, other than by transformers' own code."""
    hooks = []
    for layer in (layer for part in model.modules() if isinstance(part, torch.nn.ModuleList) for layer in part):
        before: list[int] = []
        hooks += [
            layer.register_forward_pre_hook(lambda *_, before=before: before.append(len(gpu.own_waits()))),
            layer.register_forward_hook(lambda *_, before=before: check(before.pop() == len(gpu.own_waits()))),
        ]
    assert hooks

    def check(equal: bool) -> None:
        assert equal, gpu.waits

    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ('name', 'precision', 'layout'),
    [
        *((name, precision, LAYOUT_OF[name]) for name, precision in FAMILIES),
        *(('llama', precision, PADDED_ROWS) for precision in PRECISIONS),
    ],
)
def test_every_family_scores_as_on_the_cpu(name: str, precision: str, layout: str):
    """In its layout, with cached prefixes. In half precision the typical row agrees.

    Mutations: a tensor left on the CPU; keys of another segment; a causal mask aligned with the first key; an index
    copied in each layer.
    """
    with on_gpu(name, precision) as (gpu, language_model), no_waits_in_layers(language_model.model, gpu):
        found = outputs_of(language_model, layout, gpu)
    with torch.no_grad(), autocast(CPU, precision):
        expected = outputs_of(CausalLanguageModel(network(name, precision), device=CPU), layout)
    off = np.abs(found - expected)
    assert (off.max() < 1e-4) if precision == FP32 else (np.median(off) < 0.05)


@pytest.mark.parametrize('precision', PRECISIONS)
def test_the_probe_finds_the_token_stream(precision: str):
    with on_gpu('llama', precision) as (_, language_model):
        found = probe(language_model, vocabulary=networks.VOCABULARY, longest=60)
    assert found.layout == STREAM, found.reason


@pytest.mark.parametrize(('name', 'precision'), [(name, precision) for name, precision in FAMILIES if name != 'mamba'])
def test_every_family_generates_as_on_the_cpu(name: str, precision: str):
    """With a KV cache, several requests per prompt, and sampling; in half precision most texts are the same.

    Mutation: lists as indices, which are copied.
    """
    requests = generations.mixed_requests()
    requests += [replace(one, key=replace(one.key, sample=9), sampling=SAMPLING) for one in requests[::2]]
    with torch.no_grad(), autocast(CPU, precision):
        expected = generations.texts(generations.generator_of(network(name, precision), PROMPT_STREAM), requests)
    with on_gpu(name, precision) as (gpu, language_model), no_waits_in_layers(language_model.model, gpu):
        generator = TextGenerator(language_model, GenerationDecoder(generations.Letters()), PROMPT_STREAM)
        waits: list[int] = []
        language_model.model.register_forward_pre_hook(lambda *_: waits.append(len(gpu.own_waits())))
        found = generations.texts(generator, requests)
    num_same = sum(map(str.__eq__, found, expected))
    assert num_same >= (len(expected) if precision == FP32 else 0.5 * len(expected))
    assert max(np.diff([*waits, len(gpu.own_waits())])) <= MOST_WAITS, gpu.waits


@pytest.mark.parametrize('name', ['llama', 'mistral, windows', 'falcon, alibi', 'phi'])
@pytest.mark.parametrize('precision', PRECISIONS)
def test_a_layer_launches_few_kernels(name: str, precision: str):
    """However many trees and branches a batch has; flash attention in half precision.

    Mutations: a call for each tree; queries in float32 under autocast.
    """
    (batch,) = plan(networks.mixed_requests(), tokens_per_batch=1000)
    counts = []
    for num_layers in (2, 3):
        with on_gpu(name, precision, num_hidden_layers=num_layers) as (gpu, language_model):
            language_model.learn(batch.requests[:1])
            gpu.clear()
            language_model.run(batch)
            counts.append(gpu.kernels.total())
            kernel = '_efficient_attention_forward' if precision == FP32 else '_flash_attention_forward'
            assert gpu.kernels[kernel] == num_layers
    assert counts[1] - counts[0] <= 80
