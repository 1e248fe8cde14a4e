"""A generation layout is used only if its logits are those of whole rows. Families are tested in test_generate.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networks
import pytest
import torch
from generations import LONGEST, Letters
from networks import CPU

from llmfoundry_gauntlet.engine.decoding import CACHE, NO_CACHE, PROMPT_STREAM, GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.kv_cache import KVCache
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.probe import NAMES, Probe, probe_generation
from llmfoundry_gauntlet.errors import ModelError

LONG_WINDOW = 40


def probed(model: Any, longest: int = LONGEST) -> Probe:
    """Probe with every token as an end token, which the probe must ignore."""
    generator = TextGenerator(
        CausalLanguageModel(model, device=CPU), GenerationDecoder(Letters(), range(networks.VOCABULARY))
    )
    return probe_generation(generator, vocabulary=networks.VOCABULARY, longest=longest)


def change(model: Any, how: Callable[[dict[str, Any]], None]) -> Any:
    """Return the model with its arguments changed before each forward."""

    def hook(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
        how(kwargs)
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def is_step(kwargs: dict[str, Any]) -> bool:
    """Return whether a forward is a step in the engine's attention."""
    mask = kwargs['attention_mask']
    return kwargs['input_ids'].shape[1] == 1 and (mask is None or mask.dim() == 4)


def drop_positions(kwargs: dict[str, Any]) -> None:
    if is_step(kwargs):
        del kwargs['position_ids']


def one_position_late(kwargs: dict[str, Any]) -> None:
    if is_step(kwargs):
        kwargs['position_ids'] = kwargs['position_ids'] + 1


def stream_positions(kwargs: dict[str, Any]) -> None:
    """Give prompts the positions of the stream instead of their own."""
    if kwargs['attention_mask'].dim() == 4 and not is_step(kwargs):
        kwargs['position_ids'] = torch.arange(kwargs['input_ids'].shape[1])[None]


def stream_positions_in_branches(kwargs: dict[str, Any]) -> None:
    """Do the same only where the stream returns to a later position: prompts with a common prefix."""
    if kwargs['attention_mask'].dim() == 4 and not is_step(kwargs):
        positions = kwargs['position_ids'][0]
        if ((positions.diff() <= 0) & (positions[1:] > 0)).any():
            stream_positions(kwargs)


@pytest.mark.parametrize(
    ('name', 'fault'),
    [
        ('llama', drop_positions),
        ('llama', one_position_late),
        ('llama', stream_positions),
        ('llama', stream_positions_in_branches),
        ('gptj', one_position_late),
    ],
)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_silently_wrong_layout_is_not_used(name: str, fault: Callable, dtype: torch.dtype):
    """Mutations: accept the first layout; end or compare generations at the first token; prompts of one length; no two
    prompts run together, or none with a common prefix.
    """
    assert probed(networks.network(name).to(dtype)).layout == PROMPT_STREAM
    found = probed(change(networks.network(name).to(dtype), fault))
    assert found.layout == CACHE, found.reason
    assert found.certain
    assert f'{NAMES[PROMPT_STREAM]} ' in found.reason and ' off' in found.reason


@pytest.mark.parametrize('name', ['llama', 'mpt', 'bloom'])
def test_a_wrong_cache_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch):
    """Slots see unused columns. MPT has no positions: its mask alone says where a sequence begins."""
    monkeypatch.setattr(KVCache, 'seen', lambda cache: torch.ones_like(cache.mask[cache._slots, : cache.column]))
    assert probed(networks.network(name)).layout == NO_CACHE


@pytest.mark.parametrize('name', ['llama', 'gptj'])
def test_half_precision_is_compared_within_its_own_rounding(name: str):
    """Steps that are off by twice the spacing of the largest logit, as other kernels may be.

    Mutations: the tolerance of float32; the rounding of GPT-J's returned logits, which are float32.
    """

    def rounded(_: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if is_step(kwargs):
            output.logits.add_(2 * output.logits.abs().max() * torch.finfo(torch.bfloat16).eps)

    for dtype, expected in ((torch.bfloat16, PROMPT_STREAM), (torch.float32, CACHE)):
        model = networks.network(name).to(dtype)
        model.register_forward_hook(rounded, with_kwargs=True)
        found = probed(model)
        assert found.layout == expected, found.reason


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_window_ignored_by_steps_is_rejected(dtype: torch.dtype):
    """The window is longer than the probe's short rows. Mutations: no long row; a long row of two tokens, of which half
    precision tolerates one.
    """

    def forgetful() -> Any:
        model = networks.network('mistral, windows', sliding_window=LONG_WINDOW).to(dtype)

        def forget(kwargs: dict[str, Any]) -> None:
            model.config.sliding_window = None if is_step(kwargs) else LONG_WINDOW

        return change(model, forget)

    assert probed(networks.network('mistral, windows', sliding_window=LONG_WINDOW).to(dtype)).layout == PROMPT_STREAM
    assert probed(forgetful(), LONG_WINDOW).layout == PROMPT_STREAM
    found = probed(forgetful(), 3 * LONG_WINDOW)
    assert found.layout == CACHE, found.reason


def no_numbers_where(model: Any, spoilt: Callable[[dict[str, Any]], torch.Tensor | bool]) -> Any:
    """Return the model with NaN in the given rows."""

    def hook(_: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        rows = torch.as_tensor(spoilt(kwargs)).expand(len(output.logits))
        output.logits[rows] = torch.nan

    model.register_forward_hook(hook, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    'spoilt',
    [
        lambda kwargs: True,
        lambda kwargs: kwargs['attention_mask'].dim() == 2 and kwargs['attention_mask'].sum(1) < 3,
        lambda kwargs: kwargs['attention_mask'].dim() == 2 and kwargs['attention_mask'].sum(1) > LONGEST - 3,
    ],
    ids=['all', 'short', 'long'],
)
def test_a_model_of_nan_runs_whole_rows_and_is_probed_again(spoilt: Callable):
    """Also if only a single prompt shows it. Mutation: Python's `max`, which ignores NaN."""
    found = probed(no_numbers_where(networks.network(), spoilt))
    assert (found.layout, found.certain) == (NO_CACHE, False)
    assert found.reason == "probe: the model's numbers are not finite"


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('last', [True, False])
def test_a_layout_that_gives_nan_is_not_used(last: bool, dtype: torch.dtype):
    """In the last step of the long row, or in steps after single tokens. Mutation: Python's `max` in `furthest`."""

    def in_steps(kwargs: dict[str, Any]) -> torch.Tensor | bool:
        if not is_step(kwargs):
            return False
        positions = kwargs['position_ids'][:, 0]
        return positions == LONGEST - 2 if last else positions < 3

    found = probed(no_numbers_where(networks.network().to(dtype), in_steps))
    assert found.layout == CACHE, found.reason


@pytest.mark.parametrize('name', ['llama', 'gpt2'])
def test_weights_that_ignore_their_context_are_probed_again(name: str):
    """They agree in any layout. Fails without the contrast, or if that has another last token or position."""
    model = networks.network(name)
    for layer in model.model.layers if name == 'llama' else model.transformer.h:
        output = layer.self_attn.o_proj if name == 'llama' else layer.attn.c_proj
        torch.nn.init.zeros_(output.weight)
    assert not probed(model).certain
    assert probed(networks.network(name)).certain


@pytest.mark.parametrize('longest', [1, 2, 3, 7, 30, 200])
def test_rows_of_any_length_are_probed(longest: int):
    """No row is longer than the longest. Mutation: prompts not shortened."""
    widths = []

    def measure(kwargs: dict[str, Any]) -> None:
        if not kwargs['use_cache']:
            widths.append(kwargs['input_ids'].shape[1])

    model = change(networks.network(), measure)
    found = probed(model, longest)
    assert found.layout == PROMPT_STREAM
    assert max(widths) <= max(longest - 1, 1) or found.reason.startswith('probe: 8 generations')


def test_the_probe_reports_and_restores_the_generator():
    generator = TextGenerator(
        CausalLanguageModel(networks.network('bloom'), device=CPU), GenerationDecoder(Letters(), [5])
    )
    before = dict(generator.__dict__)
    found = probe_generation(generator, vocabulary=networks.VOCABULARY, longest=LONGEST)
    assert {**generator.__dict__, 'rounding': 0.0, 'cached_bytes': 0} == before
    assert str(found).startswith('key-value cache, prompts in a token stream (probe: 8 generations within ')


@pytest.mark.parametrize(
    ('family', 'heads', 'dtype'),
    [
        ('llama', 2, torch.float32),  # two of four heads
        ('llama', 2, torch.bfloat16),
        ('mpt', 4, torch.float32),
        ('gpt_bigcode', 4, torch.float32),  # has one, which transformers repeats before attention
    ],
)
def test_the_kv_cache_is_measured_by_the_probe(family: str, heads: int, dtype: torch.dtype):
    """All have two layers and heads of width 8."""
    model = networks.network(family).to(dtype)
    generator = TextGenerator(CausalLanguageModel(model, device=CPU), GenerationDecoder(Letters()))
    probe_generation(generator, vocabulary=networks.VOCABULARY, longest=40)
    assert generator.cached_bytes == 2 * 2 * heads * 8 * dtype.itemsize


def test_every_rank_makes_the_same_forwards():
    """Ranks of a sharded model must probe the same prompts. Mutation: prompts without a fixed seed."""
    made = []
    for seed in (0, 1):
        model, rows = networks.network(seed=seed), []
        torch.manual_seed(7 + seed)
        probed(change(model, lambda kwargs, rows=rows: rows.append(kwargs['input_ids'].tolist())))
        made.append(rows)
    assert made[0] == made[1] and len(made[0]) > 20


def test_a_model_that_does_not_fit_is_an_error():
    """It is no reason to use another layout. Mutation: treat the error as one of the layout."""
    model = networks.network()

    def fail(kwargs: dict[str, Any]) -> None:
        raise torch.OutOfMemoryError('no memory')

    with pytest.raises(ModelError, match='do not fit into the memory of the device: no memory'):
        probed(change(model, fail))
