"""Scoring and generation on a stand-in for a GPU: devices, waits of the host, kernels, and numbers as on the CPU."""

from __future__ import annotations

import shutil
from collections import Counter
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
from llmfoundry_gauntlet.engine.tree_attention import HAS_PUBLIC_FLASH
from llmfoundry_gauntlet.types import GenerateRequest, Sampling

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, '_ensureCUDADeviceGuardSet') and shutil.which('g++') is None,
    reason='below torch 2.8 the stand-in for a GPU needs g++',
)

FP32, BF16, AMP_BF16 = 'fp32', 'bf16', 'amp_bf16'
PRECISIONS = [FP32, BF16, AMP_BF16]
SAMPLING = Sampling(temperature=1.0, top_p=0.9)
FLASH = '_varlen_attn' if HAS_PUBLIC_FLASH else '_flash_attention_forward'
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
        if gpu is None:
            outputs |= networks.run(language_model, [batch])
        else:
            gpu.clear()
            outputs |= networks.run(language_model, [batch])
            assert len(gpu.own_waits()) <= MOST_WAITS, gpu.waits
    return networks.sums_of(outputs, requests)


@contextmanager
def no_waits_in_layers(model: Any, gpu: FakeCuda) -> Iterator[None]:
    """Fail if a layer of the model makes the host wait, other than by transformers' own code."""
    waits_before: list[int] = []  # of the layers that are running, the innermost last

    def note_waits(*_: Any) -> None:
        waits_before.append(len(gpu.own_waits()))

    def check_waits(*_: Any) -> None:
        assert len(gpu.own_waits()) == waits_before.pop(), gpu.waits

    hooks = []
    for layers in model.modules():
        if isinstance(layers, torch.nn.ModuleList):
            for layer in layers:
                hooks += [layer.register_forward_pre_hook(note_waits), layer.register_forward_hook(check_waits)]
    assert hooks
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ('name', 'precision', 'layout'),
    [
        *[(name, precision, LAYOUT_OF[name]) for name, precision in FAMILIES],
        # A family of the token stream in padded rows.
        ('llama', FP32, PADDED_ROWS),
        ('llama', BF16, PADDED_ROWS),
        ('llama', AMP_BF16, PADDED_ROWS),
    ],
)
def test_every_family_scores_as_on_the_cpu(name: str, precision: str, layout: str):
    """In its layout, with cached prefixes. In half precision the typical row agrees.

    Mutations: a tensor left on the CPU; keys of another segment; a causal mask aligned with the first key; an index
    copied in each layer.
    """
    with torch.no_grad(), autocast(CPU, precision):
        on_cpu = CausalLanguageModel(network(name, precision), device=CPU)
        expected = outputs_of(on_cpu, layout)

    with on_gpu(name, precision) as (gpu, language_model), no_waits_in_layers(language_model.model, gpu):
        scores = outputs_of(language_model, layout, gpu)

    differences = np.abs(scores - expected)
    if precision == FP32:
        assert differences.max() < 1e-4
    else:
        assert np.median(differences) < 0.05


@pytest.mark.parametrize('precision', PRECISIONS)
def test_the_probe_finds_the_token_stream(precision: str):
    with on_gpu('llama', precision) as (_, language_model):
        probe_result = probe(language_model, vocabulary=networks.VOCABULARY, longest=60)

    assert probe_result.layout == STREAM, probe_result.reason


def requests_with_samples() -> list[GenerateRequest]:
    """Return mixed requests, and a sample of every other one of them."""
    requests = generations.mixed_requests()
    samples = [replace(request, key=replace(request.key, sample=9), sampling=SAMPLING) for request in requests[::2]]
    return [*requests, *samples]


WITH_KEY_VALUE_CACHE = [(name, precision) for name, precision in FAMILIES if name != 'mamba']


@pytest.mark.parametrize(('name', 'precision'), WITH_KEY_VALUE_CACHE)
def test_every_family_generates_as_on_the_cpu(name: str, precision: str):
    """With a KV cache, several requests per prompt, and sampling; in half precision most texts are the same.

    Mutation: lists as indices, which are copied.
    """
    requests = requests_with_samples()
    with torch.no_grad(), autocast(CPU, precision):
        on_cpu = generations.generator_of(network(name, precision), PROMPT_STREAM)
        expected = generations.texts(on_cpu, requests)

    waits_before_steps: list[int] = []
    with on_gpu(name, precision) as (gpu, language_model), no_waits_in_layers(language_model.model, gpu):
        generator = TextGenerator(language_model, GenerationDecoder(generations.Letters()), PROMPT_STREAM)
        language_model.model.register_forward_pre_hook(lambda *_: waits_before_steps.append(len(gpu.own_waits())))
        texts = generations.texts(generator, requests)

    if precision == FP32:
        assert texts == expected
    else:
        num_same = sum(map(str.__eq__, texts, expected))
        assert num_same >= 0.5 * len(expected)
    waits_of_steps = np.diff([*waits_before_steps, len(gpu.own_waits())])
    assert max(waits_of_steps) <= MOST_WAITS, gpu.waits


def kernels_of_a_batch(name: str, precision: str, num_layers: int) -> Counter[str]:
    """Return the number of kernels that a batch of many trees and branches launches, by operator."""
    (batch,) = plan(networks.mixed_requests(), tokens_per_batch=1000)
    with on_gpu(name, precision, num_hidden_layers=num_layers) as (gpu, language_model):
        language_model.learn(batch.requests[:1])
        gpu.clear()
        language_model.run(batch)
        return gpu.kernels


each_kind_of_attention = pytest.mark.parametrize('name', ['llama', 'mistral, windows', 'falcon, alibi', 'phi'])


@each_kind_of_attention
@pytest.mark.parametrize('precision', PRECISIONS)
def test_a_layer_launches_few_kernels(name: str, precision: str):
    """Mutation: a call for each tree."""
    of_two_layers = kernels_of_a_batch(name, precision, num_layers=2)
    of_three_layers = kernels_of_a_batch(name, precision, num_layers=3)

    assert of_three_layers.total() - of_two_layers.total() <= 80


@each_kind_of_attention
@pytest.mark.parametrize(
    ('precision', 'kernel'),
    [
        (FP32, '_efficient_attention_forward'),
        (BF16, FLASH),
        (AMP_BF16, FLASH),
    ],
)
@pytest.mark.parametrize('num_layers', [2, 3])
def test_a_layer_calls_one_kernel_of_attention(name: str, precision: str, kernel: str, num_layers: int):
    """Flash attention in half precision. Mutations: a call for each tree; queries in float32 under autocast."""
    kernels = kernels_of_a_batch(name, precision, num_layers)

    assert kernels[kernel] == num_layers


@pytest.mark.parametrize(
    ('operator', 'arguments'),
    [
        (
            '_flash_attention_forward',
            'query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale '
            'window_size_left',
        ),
        (
            '_efficient_attention_forward',
            'query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type '
            'compute_log_sumexp scale window_size',
        ),
        ('_scaled_dot_product_flash_attention_for_cpu', 'query key value dropout_p is_causal attn_mask scale'),
    ],
)
def test_private_operators_of_torch_have_the_arguments_that_they_are_given(operator: str, arguments: str):
    """In the order in which they are given; what a version adds has a default."""
    schema = getattr(torch.ops.aten, operator).default._schema
    given = arguments.split()

    names = [argument.name for argument in schema.arguments]
    assert [name for name in names if name in given] == given
    by_keyword = ('attn_mask', 'scale', 'window_size_left', 'window_size')
    by_position = [name for name in given if name not in by_keyword]
    assert names[: len(by_position)] == by_position
    optional = [argument.has_default_value() for argument in schema.arguments if argument.name not in given]
    assert all(optional), names
