"""A generation layout is used only if its logits are those of whole rows. Families are tested in test_generate.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import every_family
import networks
import pytest
import torch
from generations import LONGEST, Letters
from networks import CPU

from llmfoundry_gauntlet.engine import attention as attending
from llmfoundry_gauntlet.engine import kv_cache
from llmfoundry_gauntlet.engine.decoding import FORKED_PROMPTS, NO_CACHE, PROMPT_STREAM, GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.kv_cache import CachedAttention, KVCache
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.probe import NAMES, Probe, probe_generation
from llmfoundry_gauntlet.engine.tree_attention import dense
from llmfoundry_gauntlet.errors import ModelError

LONG_WINDOW = 40


def probed(model: Any, longest: int = LONGEST) -> Probe:
    """Probe with every token as an end token, which the probe must ignore."""
    decoder = GenerationDecoder(Letters(), range(networks.VOCABULARY))
    generator = TextGenerator(CausalLanguageModel(model, device=CPU), decoder)
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
        is_return = positions.diff() <= 0
        is_inside_a_prompt = positions[1:] > 0
        if (is_return & is_inside_a_prompt).any():
            stream_positions(kwargs)


@pytest.mark.parametrize('name', ['llama', 'gptj'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_fastest_layout_is_used_where_it_is_right(name: str, dtype: torch.dtype):
    assert probed(networks.network(name).to(dtype)).layout == PROMPT_STREAM


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
    model = change(networks.network(name).to(dtype), fault)

    probe_result = probed(model)

    assert probe_result.layout == FORKED_PROMPTS, probe_result.reason
    assert probe_result.certain
    assert f'{NAMES[PROMPT_STREAM]} ' in probe_result.reason
    assert ' off' in probe_result.reason


def every_chunk(attention: CachedAttention, chunk: int) -> torch.Tensor:
    """Let queries see all chunks."""
    return torch.ones(1, 1, len(attention.columns), dtype=torch.bool)


def columns_of_queries(attention: CachedAttention) -> torch.Tensor:
    """Count positions from the first column of the cache, as if all rows began there."""
    return attention.ends.expand(len(attention.seen), -1)


def without_sinks(queries, keys, values, mask, rule, bias) -> torch.Tensor:
    return dense(queries, keys, values, mask, replace(rule, sinks=None), bias)


def without_caps(queries, keys, values, mask, rule, bias) -> torch.Tensor:
    return dense(queries, keys, values, mask, replace(rule, softcap=None), bias)


WRONG_STEPS = {
    'llama4 without chunks': ('llama4', CachedAttention, 'same_chunk', every_chunk),
    'llama4 scaled by column': ('llama4', CachedAttention, 'query_positions', property(columns_of_queries)),
    'gpt_oss without sinks': ('gpt_oss', kv_cache, 'dense', without_sinks),
    'phimoe without windows': ('phimoe', attending, 'rule_of', lambda _: (None, None)),
    'gemma2 without caps': ('gemma2', kv_cache, 'dense', without_caps),
}


@pytest.mark.parametrize('case', [case for case, (name, *_) in WRONG_STEPS.items() if name in networks.FAMILIES])
def test_steps_without_a_part_that_a_family_needs_are_refused(case: str, monkeypatch: pytest.MonkeyPatch):
    """Generation then uses a slower layout that is right. Mutations: those of the table."""
    name, owner, attribute, wrong = WRONG_STEPS[case]
    assert probed(networks.network(name)).layout == PROMPT_STREAM
    monkeypatch.setattr(owner, attribute, wrong)

    probe_result = probed(networks.network(name))

    assert probe_result.layout != PROMPT_STREAM
    assert f'{NAMES[PROMPT_STREAM]} ' in probe_result.reason
    assert ' off' in probe_result.reason


@pytest.mark.parametrize('name', ['llama', 'mpt', 'bloom'])
def test_a_wrong_cache_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch):
    """Slots see unused columns. MPT has no positions: its mask alone says where a sequence begins."""

    def every_column(cache: KVCache) -> torch.Tensor:
        return torch.ones_like(cache.mask[cache._slots, : cache.column])

    monkeypatch.setattr(KVCache, 'seen', every_column)

    assert probed(networks.network(name)).layout == NO_CACHE


@pytest.mark.parametrize(('dtype', 'layout'), [(torch.bfloat16, PROMPT_STREAM), (torch.float32, FORKED_PROMPTS)])
@pytest.mark.parametrize('name', ['llama', 'gptj'])
def test_half_precision_is_compared_within_its_own_rounding(name: str, dtype: torch.dtype, layout: str):
    """Steps that are off by twice the spacing of the largest logit, as other kernels may be.

    Mutations: the tolerance of float32; the rounding of GPT-J's returned logits, which are float32.
    """

    def add_rounding(_: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if is_step(kwargs):
            output.logits.add_(2 * output.logits.abs().max() * torch.finfo(torch.bfloat16).eps)

    model = networks.network(name).to(dtype)
    model.register_forward_hook(add_rounding, with_kwargs=True)

    probe_result = probed(model)

    assert probe_result.layout == layout, probe_result.reason


def windowed(dtype: torch.dtype) -> Any:
    """Return a network whose window is longer than the probe's short rows."""
    return networks.network('mistral, windows', sliding_window=LONG_WINDOW).to(dtype)


def windowed_except_in_steps(dtype: torch.dtype) -> Any:
    model = windowed(dtype)

    def forget_window_in_steps(kwargs: dict[str, Any]) -> None:
        model.config.sliding_window = None if is_step(kwargs) else LONG_WINDOW

    return change(model, forget_window_in_steps)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_window_ignored_by_steps_is_rejected(dtype: torch.dtype):
    """Mutations: no long row; a long row of two tokens, of which half precision tolerates one."""
    probe_result = probed(windowed_except_in_steps(dtype), 3 * LONG_WINDOW)

    assert probe_result.layout == FORKED_PROMPTS, probe_result.reason


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_window_in_every_forward_is_accepted(dtype: torch.dtype):
    assert probed(windowed(dtype)).layout == PROMPT_STREAM


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_window_that_no_row_exceeds_does_not_count(dtype: torch.dtype):
    assert probed(windowed_except_in_steps(dtype), LONG_WINDOW).layout == PROMPT_STREAM


def no_numbers_where(model: Any, is_spoiled: Callable[[dict[str, Any]], torch.Tensor | bool]) -> Any:
    """Return the model with NaN in the given rows."""

    def hook(_: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        rows = torch.as_tensor(is_spoiled(kwargs)).expand(len(output.logits))
        output.logits[rows] = torch.nan

    model.register_forward_hook(hook, with_kwargs=True)
    return model


def every_row(kwargs: dict[str, Any]) -> bool:
    return True


def short_whole_rows(kwargs: dict[str, Any]) -> torch.Tensor | bool:
    mask = kwargs['attention_mask']
    return mask.dim() == 2 and mask.sum(1) < 4  # a prompt of one token and two more


def long_whole_rows(kwargs: dict[str, Any]) -> torch.Tensor | bool:
    mask = kwargs['attention_mask']
    return mask.dim() == 2 and mask.sum(1) > LONGEST - 3


@pytest.mark.parametrize('is_spoiled', [every_row, short_whole_rows, long_whole_rows])
def test_a_model_of_nan_runs_whole_rows_and_is_probed_again(is_spoiled: Callable):
    """Also if only a single prompt shows it. Mutation: Python's `max`, which ignores NaN."""
    probe_result = probed(no_numbers_where(networks.network(), is_spoiled))

    assert probe_result.layout == NO_CACHE
    assert probe_result.certain is False
    assert probe_result.reason == "probe: the model's numbers are not finite"


def last_step_of_the_long_row(kwargs: dict[str, Any]) -> torch.Tensor | bool:
    return is_step(kwargs) and kwargs['position_ids'][:, 0] == LONGEST - 2


def steps_after_single_tokens(kwargs: dict[str, Any]) -> torch.Tensor | bool:
    return is_step(kwargs) and kwargs['position_ids'][:, 0] < 3


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('is_spoiled', [last_step_of_the_long_row, steps_after_single_tokens])
def test_a_layout_that_gives_nan_is_not_used(is_spoiled: Callable, dtype: torch.dtype):
    """Mutation: Python's `max` in `furthest`."""
    probe_result = probed(no_numbers_where(networks.network().to(dtype), is_spoiled))

    assert probe_result.layout == FORKED_PROMPTS, probe_result.reason


def attention_outputs(model: Any) -> list[Any]:
    """Return the last part of each layer's attention, of Llama or GPT-2."""
    if model.config.model_type == 'llama':
        return [layer.self_attn.o_proj for layer in model.model.layers]
    return [layer.attn.c_proj for layer in model.transformer.h]


@pytest.mark.parametrize('name', ['llama', 'gpt2'])
def test_weights_that_ignore_their_context_are_probed_again(name: str):
    """They agree in any layout. Fails without the contrast, or if that has another last token or position."""
    model = networks.network(name)
    for output in attention_outputs(model):
        torch.nn.init.zeros_(output.weight)

    assert not probed(model).certain


@pytest.mark.parametrize('name', ['llama', 'gpt2'])
def test_weights_that_depend_on_their_context_are_not_probed_again(name: str):
    assert probed(networks.network(name)).certain


@pytest.mark.parametrize('longest', [1, 2, 3, 7, 30, 200])
def test_rows_of_any_length_are_probed(longest: int):
    """No row is longer than the longest. Mutation: prompts not shortened."""
    widths = []

    def record_width(kwargs: dict[str, Any]) -> None:
        if not kwargs['use_cache']:
            widths.append(kwargs['input_ids'].shape[1])

    probe_result = probed(change(networks.network(), record_width), longest)

    assert probe_result.layout == PROMPT_STREAM
    assert max(widths) <= max(longest - 1, 1) or probe_result.reason.startswith('probe: 8 generations')


def test_the_probe_restores_the_generator():
    """Except for what it measures."""
    language_model = CausalLanguageModel(networks.network('bloom'), device=CPU)
    generator = TextGenerator(language_model, GenerationDecoder(Letters(), [5]))
    before = dict(generator.__dict__)

    probe_generation(generator, vocabulary=networks.VOCABULARY, longest=LONGEST)

    assert {**generator.__dict__, 'rounding': 0.0, 'cached_bytes': 0} == before


def test_the_probe_reports_the_layout_and_what_it_compared():
    report = str(probed(networks.network('bloom')))

    assert report.startswith('key-value cache, prompts in a token stream (probe: 8 generations within ')


@pytest.mark.parametrize(
    ('family', 'heads', 'dtype'),
    [
        ('llama', 2, torch.float32),  # two of four heads
        ('llama', 2, torch.bfloat16),
        ('mpt', 4, torch.float32),
        # It has one, which transformers below 5 repeats before attention.
        ('gpt_bigcode', 1 if networks.IS_TRANSFORMERS_5 else 4, torch.float32),
    ],
)
def test_the_kv_cache_is_measured_by_the_probe(family: str, heads: int, dtype: torch.dtype):
    """Of each token, in bytes. All have two layers and heads of width 8."""
    model = networks.network(family).to(dtype)
    generator = TextGenerator(CausalLanguageModel(model, device=CPU), GenerationDecoder(Letters()))

    probe_generation(generator, vocabulary=networks.VOCABULARY, longest=40)

    num_layers, width = 2, 8
    keys_and_values = 2
    assert generator.cached_bytes == keys_and_values * num_layers * heads * width * dtype.itemsize


def test_every_rank_makes_the_same_forwards():
    """Ranks of a sharded model must probe the same prompts. Mutation: prompts without a fixed seed."""

    def rows_probed(seed: int) -> list[list[list[int]]]:
        rows = []
        model = change(networks.network(seed=seed), lambda kwargs: rows.append(kwargs['input_ids'].tolist()))
        torch.manual_seed(7 + seed)
        probed(model)
        return rows

    rows_of_a_rank = rows_probed(0)
    rows_of_another = rows_probed(1)

    assert rows_of_a_rank == rows_of_another
    assert len(rows_of_a_rank) > 20


def test_a_model_that_does_not_fit_is_an_error():
    """It is no reason to use another layout. Mutation: treat the error as one of the layout."""
    model = networks.network()

    def fail(kwargs: dict[str, Any]) -> None:
        raise torch.OutOfMemoryError('no memory')

    with pytest.raises(ModelError, match='do not fit into the memory of the device: no memory'):
        probed(change(model, fail))


@pytest.mark.skipif(not networks.IS_TRANSFORMERS_5, reason='hybrids of earlier transformers have caches of their own')
@pytest.mark.parametrize('name', ['falcon_h1', 'lfm2', 'qwen3_5_text'])
def test_states_are_had_by_layer_too_as_models_of_transformers_5_17_read_them(monkeypatch, name: str):
    """Mutations: the states are copies, which models cannot change in place; those of another layer."""

    def by_layer(kind: str) -> Callable[..., torch.Tensor | None]:
        def state(cache: KVCache, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
            if not cache.has_previous_state(layer_idx):
                return None
            assert not cache.layers[layer_idx].record_past
            found: torch.Tensor = getattr(cache.layers[layer_idx], kind)[state_idx]
            return found

        return state

    monkeypatch.setattr(KVCache, 'get_conv_state', by_layer('conv_states'))
    monkeypatch.setattr(KVCache, 'get_recurrent_state', by_layer('recurrent_states'))

    found = probed(every_family.build(name))

    assert found.layout == FORKED_PROMPTS
