"""Rounding of deep models with large logits is told from faults: by what rounding alone makes, and in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import every_family
import networks
import numpy as np
import pytest
import torch
from generations import Letters
from networks import CPU, VOCABULARY

from llmfoundry_gauntlet.engine import attention as attending
from llmfoundry_gauntlet.engine import rounding
from llmfoundry_gauntlet.engine.decoding import NO_CACHE, PROMPT_STREAM, GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, STREAM
from llmfoundry_gauntlet.engine.probe import Probe, probe, probe_generation
from llmfoundry_gauntlet.engine.rounding import Tolerance, difference_in_float64, in_float64

DEEP_TYPES = (
    'llama',
    'gemma3_text',
    'qwen3',
    'gpt_neox',
    'olmo2',
    'mixtral',
    'falcon_h1',
    'deepseek_v3',
    'gpt_oss',
    'qwen3_5_text',
)
TYPES = [name for name in DEEP_TYPES if every_family.STACK in every_family.expected_layouts().get(name, {})]


def generator_of(language_model: CausalLanguageModel) -> TextGenerator:
    return TextGenerator(language_model, GenerationDecoder(Letters(), range(VOCABULARY)))


def probed(model: Any) -> tuple[Probe, Probe, CausalLanguageModel]:
    """Return the layouts of a model for scoring and generation, and the language model that was probed."""
    language_model = CausalLanguageModel(model, device=CPU)
    scoring = probe(language_model, vocabulary=VOCABULARY, longest=60)
    generation = probe_generation(generator_of(language_model), vocabulary=VOCABULARY, longest=60)
    return scoring, generation, language_model


@pytest.mark.parametrize('name', TYPES)
def test_a_deep_model_with_large_logits_has_the_layouts_of_its_type(name: str, caplog):
    """Mutations: `covers` without `widened`; `is_told_by_float64` returns False; attention compared by 1e-4 alone."""
    scoring, generation, language_model = probed(every_family.build_deep(name))

    expected = every_family.expected_layouts()[name][every_family.STACK]
    assert f'{scoring.layout} {generation.layout}' == expected, f'{scoring}; {generation}'
    assert not language_model.eager, caplog.text


def rounding_network(seed: int = 0) -> Any:
    """Return a network whose rounding alone moves logits by several thousandths."""
    sizes = {'num_hidden_layers': 24, 'hidden_size': 64, 'intermediate_size': 128, 'initializer_range': 0.3}
    network = networks.network('llama', seed=seed, tie_word_embeddings=False, **sizes)
    with torch.no_grad():
        network.lm_head.weight.mul_(30)
    return network


@pytest.mark.parametrize('seed', [0, 1])
def test_a_cache_that_is_right_in_float64_is_used(seed: int):
    """Mutation: norms and softmax stay in float32 (`NoFloat32`), in which the cache is a thousandth off."""
    _, generation, language_model = probed(rounding_network(seed))

    assert generation.layout == PROMPT_STREAM
    assert generation.reason.endswith('in float64')
    assert not language_model.eager


def test_a_fault_as_small_as_rounding_is_found_in_float64(monkeypatch):
    """Queries a ten-thousandth too large. Mutation: what is off in float64 is accepted."""
    attend = attending.attend

    def attend_to_larger(query: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        return attend(query * 1.0001, *arguments, **more)

    monkeypatch.setattr(attending, 'attend', attend_to_larger)

    scoring, _, _ = probed(networks.network())

    assert scoring.layout != STREAM
    assert 'token stream' in scoring.reason and 'in float64)' in scoring.reason


def state_of(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Return what training keeps of each weight and buffer: the object, where its numbers are, type and numbers."""
    tensors = (*model.parameters(), *model.buffers())
    return [(id(tensor), tensor.data_ptr(), tensor.dtype, tensor.clone()) for tensor in tensors]


def assert_same_state(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> None:
    for (*facts, numbers), (*facts_after, numbers_after) in zip(before, after, strict=True):
        assert facts == facts_after
        assert torch.equal(numbers, numbers_after)


def fail() -> None:
    raise ValueError('a model without float64')


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('job', [lambda: None, fail])
def test_weights_and_optimizer_are_bitwise_the_same_after_float64(dtype: torch.dtype, job: Callable[[], None]):
    """Also if the model cannot run in float64. Mutation: weights are cast back instead of kept."""
    model, twin = (networks.network().to(dtype) for _ in range(2))
    before = state_of(model)
    ids = torch.tensor([[3, 4, 5]])
    for trained in (model, twin):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        trained(input_ids=ids, labels=ids).loss.backward()
        if trained is model:
            difference_in_float64(CausalLanguageModel(model, device=CPU), lambda: job() or 0.0)
            assert_same_state(before, state_of(model))
        optimizer.step()

    for parameter, of_twin in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, of_twin)


def test_everything_is_computed_in_float64():
    """Mutation: no `NoFloat32`, with which norms round to float32."""
    model = networks.network(attn_implementation='eager')
    dtypes: set[torch.dtype] = set()
    for module in model.modules():
        module.register_forward_hook(
            lambda _, inputs, output: dtypes.add(output.dtype) if isinstance(output, torch.Tensor) else None
        )
    ids = torch.tensor([[3, 14, 15, 9]])

    with in_float64(CausalLanguageModel(model, device=CPU)), torch.no_grad():
        exact = model(input_ids=ids).logits
    doubled = copy.deepcopy(model).double()
    with torch.no_grad():
        with_norms_in_float32 = doubled(input_ids=ids).logits

    assert dtypes == {torch.float64}
    assert 0 < float((exact - with_norms_in_float32).abs().max()) < 1e-4


def test_a_mask_of_the_least_number_is_computed_in_float64():
    """As XGLM of transformers 5 makes it. Mutation: numbers are of float32, which has none so low."""
    model = every_family.build_reference('xglm')
    ids = torch.tensor([[3, 14, 15, 9]])

    with torch.no_grad():
        rounded = model(input_ids=ids).logits
        with in_float64(CausalLanguageModel(model, device=CPU)):
            exact = model(input_ids=ids).logits

    assert exact.dtype == torch.float64
    assert float((exact - rounded).abs().max()) < 1e-4


@pytest.mark.skipif(not networks.IS_TRANSFORMERS_5, reason='experts in groups are of transformers 5')
def test_a_mixture_whose_experts_run_in_groups_is_computed_in_float64():
    """Mutation: no `experts_one_by_one`, as the kernel takes no float64."""
    language_model = CausalLanguageModel(every_family.build_deep('mixtral'), device=CPU)
    model = language_model.model
    model.set_experts_implementation('grouped_mm')
    ids = torch.tensor([[3, 14, 15, 9]])

    def off_the_second_run() -> float:
        first, second = (model(input_ids=ids).logits for _ in range(2))
        assert first.dtype == torch.float64
        return float((first - second).abs().max())

    with torch.no_grad():
        assert difference_in_float64(language_model, off_the_second_run) == 0
    assert model.config._experts_implementation == 'grouped_mm'


@pytest.mark.parametrize(
    ('nominal', 'of_rounding', 'covered', 'beyond'),
    [
        (1e-4, 0.0, 1e-4, 1.1e-4),
        (1e-4, 1e-4, 4e-4, 4.1e-4),
        (1e-4, 1.0, 30e-4, 31e-4),
        (1e-2, 1.0, 1e-2, 1.1e-2),  # of half precision, which is measured before
    ],
)
def test_a_tolerance_widens_by_what_rounding_makes(nominal: float, of_rounding: float, covered: float, beyond: float):
    tolerance = Tolerance(nominal, lambda: of_rounding)

    assert tolerance.covers(covered)
    assert not tolerance.covers(beyond)
    assert not tolerance.covers(np.nan)
    assert not Tolerance(nominal, lambda: np.nan).covers(beyond)


def test_rounding_is_measured_only_if_it_decides():
    tolerance = Tolerance(1e-4, fail)

    assert tolerance.covers(1e-4)
    assert not tolerance.covers(1.0)
    with pytest.raises(ValueError):
        tolerance.covers(2e-4)


@pytest.mark.parametrize(('nominal', 'told', 'not_told'), [(1e-4, 0.1, 0.11), (1e-2, 0.04, 0.05)])
def test_what_is_far_off_is_not_run_in_float64(nominal: float, told: float, not_told: float):
    tolerance = Tolerance(nominal, fail)

    assert tolerance.is_told_by_float64(told)
    assert not tolerance.is_told_by_float64(not_told)
    assert not tolerance.is_told_by_float64(np.nan)


@pytest.mark.parametrize('reason', ['memory', 'shards'])
def test_without_memory_or_with_shards_nothing_runs_in_float64(monkeypatch, reason: str):
    """The layout is then rejected by what was measured in float32."""
    language_model = CausalLanguageModel(rounding_network(), device=CPU)
    if reason == 'memory':
        monkeypatch.setattr(rounding, 'unused_bytes', lambda device: 0)
    else:
        language_model.in_step = True

    assert difference_in_float64(language_model, lambda: 0.0) is None
    generation = probe_generation(generator_of(language_model), vocabulary=VOCABULARY, longest=60)
    assert generation.layout == NO_CACHE
    assert 'float64' not in generation.reason


def test_scoring_without_float64_is_in_the_layout_that_is_defined(monkeypatch):
    """A stream whose difference rounding does not explain is not used."""
    monkeypatch.setattr(rounding, 'ROUNDING_TOLERANCE', 0)
    monkeypatch.setattr(rounding, 'unused_bytes', lambda device: 0)

    scoring, _, language_model = probed(rounding_network())

    assert scoring.layout == PADDED_ROWS
    assert language_model.eager
