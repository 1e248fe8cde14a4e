"""The layout that the probe finds for each family, and its numbers compared with bare forwards."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import networks
import numpy as np
import pytest
import torch
from networks import CPU, LAYOUT_OF, PREFIX_BUDGET
from transformers import AttentionInterface
from transformers.models.falcon.modeling_falcon import FalconAttention

from llmfoundry_gauntlet.engine import attention as attending
from llmfoundry_gauntlet.engine import model as running
from llmfoundry_gauntlet.engine import probe as probing
from llmfoundry_gauntlet.engine import tree_attention as tree_attending
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import FORKED, PADDED_ROWS, STREAM, plan
from llmfoundry_gauntlet.engine.probe import probe

LONGEST = 60


def probed(model, longest: int = LONGEST) -> tuple[probing.Probe, CausalLanguageModel]:
    """Return the result of the probe and the language model that it prepared."""
    language_model = CausalLanguageModel(model, device=CPU)
    return probe(language_model, vocabulary=networks.VOCABULARY, longest=longest), language_model


@pytest.mark.parametrize(('name', 'loaded'), networks.LOADED_AS)
def test_every_family_runs_in_its_fastest_correct_layout(name: str, loaded: str, caplog):
    """With any loaded attention, in its layout and in padded rows.

    Attention that differs from eager is replaced with one warning: sdpa of transformers 4.53 ignores Gemma 2's cap, and
    adds Falcon's ALiBi once where eager adds it twice.
    Fails if a layout is used without a probe, windows or caps are left out, or heads are not shared by their group.
    Mutations: accept `LAYOUTS[:1]` without comparing; `window = None` or `softcap = None` in `attend`; `repeat` for
    `repeat_interleave`; no `check_attention`, or one that measures against the loaded attention.
    """
    model = networks.network(name, attn_implementation=loaded)
    differs_from_eager = loaded == 'sdpa' and name in networks.OFF_AS_SDPA
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix()]

    probe_result, language_model = probed(model)

    assert probe_result.layout == LAYOUT_OF[name], probe_result.reason

    assert bool(language_model.eager) == differs_from_eager
    warnings = [message for message in caplog.messages if message.startswith('attention:')]
    assert len(warnings) == differs_from_eager
    assert all('sdpa' in warning and 'eager' in warning for warning in warnings)

    for layout in {probe_result.layout, PADDED_ROWS}:
        batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=layout)
        assert any(batch.prefix is not None for batch in batches) == (layout == STREAM)
        outputs = networks.run(language_model, batches)
        networks.check_against_bare_forwards(eager(name), requests, outputs)


def eager(name: str, **more: object):
    """Return a family's network with transformers' eager attention."""
    return networks.network(name, attn_implementation='eager', **more)


def state_of(model) -> list[tuple]:
    """Return what determines a model's attention: classes and attributes of modules, and configuration values."""
    return [
        (type(module), sorted(vars(module)), getattr(module, '_use_sdpa', None), str(getattr(module, 'config', '')))
        for module in model.modules()
    ]


@pytest.mark.parametrize('name', ['llama', 'gpt2', 'stablelm', 'gpt_bigcode', *networks.OFF_AS_SDPA])
def test_training_continues_with_the_loaded_attention(name: str):
    """Bitwise, after the probe, after scoring in each layout, and after a failed forward. Mutations: no `finally`."""
    model = networks.network(name, attn_implementation='sdpa').train()
    ids = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9]])

    def loss_and_gradients() -> tuple[torch.Tensor | None, ...]:
        torch.manual_seed(5)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    attention_before = model.config._attn_implementation
    state_before = state_of(model)
    step_before = loss_and_gradients()

    model.eval()
    _, language_model = probed(model)
    probing.use_eager_attention(language_model, 'whatever the probe found')
    assert language_model.eager
    for layout in networks.layouts_of(model):
        batch = plan(networks.mixed_requests(), tokens_per_batch=2000, layout=layout)[0]
        language_model.run(batch)
        failure = model.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            language_model.run(batch)
        failure.remove()
    model.train()

    assert model.config._attn_implementation == attention_before == 'sdpa'
    assert state_of(model) == state_before
    for before, after in zip(step_before, loss_and_gradients(), strict=True):
        # The gradient of an unused parameter is None.
        assert (before is None and after is None) or torch.equal(before, after)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', ['llama', 'mixtral', 'olmo', 'stablelm', *networks.OFF_AS_SDPA])
def test_half_precision_rounding_is_not_another_attention(name: str, dtype: torch.dtype):
    """Mutation: use the largest difference, which fails if rounding sends a token to other experts."""
    _, language_model = probed(networks.network(name, attn_implementation='sdpa').to(dtype))

    assert bool(language_model.eager) == (name in networks.OFF_AS_SDPA)


@pytest.mark.skipif(networks.IS_TRANSFORMERS_5, reason='transformers 5 has no sdpa for models with a cap')
@pytest.mark.parametrize(
    'scale_of_weights',
    [
        0.3,  # as of a trained model
        0.003,  # no score comes near the cap
    ],
)
def test_a_cap_counts_before_it_has_an_effect(scale_of_weights: float):
    """Mutation: compare only."""
    model = networks.network('gemma2', attn_implementation='sdpa', initializer_range=scale_of_weights)

    _, language_model = probed(model)

    assert language_model.eager


class ReadsInForward(FalconAttention):
    """Falcon's attention as in transformers 4.54 and newer: one class, sdpa or eager by the configuration at a call."""

    def forward(self, *arguments, **more):
        self._use_sdpa = self.config._attn_implementation == 'sdpa'
        output = super().forward(*arguments, **more)
        del self._use_sdpa
        return output


class ReadsInMethod(FalconAttention):
    """The same, read below the forward."""

    def is_sdpa(self) -> bool:
        return self.config._attn_implementation == 'sdpa'

    def forward(self, *arguments, **more):
        self._use_sdpa = self.is_sdpa()
        output = super().forward(*arguments, **more)
        del self._use_sdpa
        return output


class IsFixed(torch.nn.Module):
    """Attention of code that transformers does not know, sdpa once and for all."""

    def __init__(self, attention: FalconAttention) -> None:
        super().__init__()
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = 'sdpa'
        attention._use_sdpa = True  # of transformers 4.53
        self.own = [attention]  # in a list, so that it is no module of the model

    def forward(self, *arguments, **more):
        return self.own[0](*arguments, **more)


def falcon_with_fixed_attention(loaded: str):
    """Return Falcon with ALiBi whose configuration says `loaded` but whose layers always use sdpa."""
    model = networks.network('falcon, alibi', attn_implementation=loaded)
    vars(model.transformer).pop('_use_sdpa', None)  # of transformers 4.53
    for layer in model.transformer.h:
        layer.self_attention = IsFixed(layer.self_attention)
    return model


def falcon_with(attention: type[FalconAttention], loaded: str):
    """Return Falcon with ALiBi whose layers have this attention class, and no flag of transformers 4.53."""
    model = networks.network('falcon, alibi', attn_implementation=loaded)
    for module in model.modules():
        vars(module).pop('_use_sdpa', None)
        if isinstance(module, FalconAttention):
            module.__class__ = attention
    return model


@pytest.mark.parametrize('loaded', ['sdpa', 'eager'])
@pytest.mark.parametrize('attention', [ReadsInForward, ReadsInMethod])
def test_layers_that_select_their_attention_at_each_call_are_switched(
    attention: type[FalconAttention], loaded: str, caplog
):
    """Loaded as sdpa they were scored 0.6 nats off. Mutation: switch by class and flag alone."""
    requests = networks.mixed_requests()

    probe_result, language_model = probed(falcon_with(attention, loaded))

    assert probe_result.layout == STREAM, probe_result.reason
    assert bool(language_model.eager) == (loaded == 'sdpa')
    assert len(caplog.messages) == (loaded == 'sdpa')
    for layout in networks.layouts_of(language_model.model):
        outputs = networks.run(language_model, plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=layout))
        networks.check_against_bare_forwards(eager('falcon, alibi'), requests, outputs)


def test_attention_that_cannot_be_switched_is_told_once(caplog):
    """It is run as loaded. Mutation: return without a word, or at every probe."""
    _, language_model = probed(falcon_with_fixed_attention('sdpa'))
    probe(language_model, vocabulary=networks.VOCABULARY, longest=LONGEST)

    assert not language_model.eager
    (message,) = caplog.messages
    assert 'sdpa' in message
    assert "attn_implementation='eager'" in message


def test_eager_attention_that_cannot_be_switched_is_not_told(caplog):
    _, language_model = probed(falcon_with_fixed_attention('eager'))
    probe(language_model, vocabulary=networks.VOCABULARY, longest=LONGEST)

    assert not language_model.eager
    assert caplog.messages == []


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('window', [8, LONGEST])
def test_attention_that_needs_a_mask_is_not_used_where_transformers_leaves_it_out(monkeypatch, dtype, window: int):
    """As sdpa of Doge with transformers 5.17: rows within a window that needed no padding saw their later tokens.

    Mutations: rows with padding alone are compared; the median is that of all rows.
    """
    sdpa = AttentionInterface()['sdpa']

    def without_order(module, query, key, value, attention_mask, **more):
        length = query.shape[2]
        if attention_mask is None and length <= window:
            attention_mask = query.new_zeros(1, 1, length, length)
        return sdpa(module, query, key, value, attention_mask, **more)

    monkeypatch.setitem(AttentionInterface._global_mapping, 'sdpa', without_order)
    model = networks.network('llama', attn_implementation='sdpa').to(dtype)

    _, language_model = probed(model)

    assert language_model.eager


def test_long_rows_are_shortened_for_eager_attention(monkeypatch):
    """Four heads: rows of 50 tokens make 10,000 scores per layer. Mutation: use `longest`."""
    monkeypatch.setattr(probing, 'MAX_EAGER_SCORES', 10_000)
    model = networks.network('llama', attn_implementation='sdpa')
    widths: dict[str, list[int]] = defaultdict(list)  # of rows, by attention

    def record_width(_, args, kwargs) -> None:
        widths[model.config._attn_implementation].append(kwargs['input_ids'].shape[1])

    model.register_forward_pre_hook(record_width, with_kwargs=True)

    probed(model, longest=200)

    assert max(widths['eager']) <= 53
    assert max(widths['sdpa']) >= 200


def test_a_window_by_stream_position_is_rejected(monkeypatch):
    """The probe's rows are long enough and its branches far enough apart. Mutation: the wrong window made here."""
    from llmfoundry_gauntlet.engine.tree_attention import TreeLayout

    mask_by_depth = TreeLayout._mask

    def mask_by_position(self, span, window, chunk):
        depths = self.depths
        self.depths = torch.arange(len(depths))
        try:
            return mask_by_depth(self, span, window, chunk)
        finally:
            self.depths = depths

    monkeypatch.setattr(TreeLayout, '_mask', mask_by_position)

    probe_result, _ = probed(networks.network('mistral, windows'))

    assert probe_result.layout != STREAM
    assert 'token stream' in probe_result.reason
    assert 'nats off' in probe_result.reason


@pytest.mark.parametrize(
    ('part', 'value', 'reason'),
    [
        # It ignores its context and would agree in any layout.
        ('self_attn.o_proj', 0.0, 'too little to tell'),
        # Comparisons with NaN are false.
        ('mlp.up_proj', torch.nan, "probe: the model's numbers are not finite"),
    ],
)
def test_a_model_that_cannot_be_compared_runs_padded_rows(part: str, value: float, reason: str):
    """Fails without the contrast, or without the check of finite numbers."""
    model = networks.network()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.get_submodule(part).weight, value)

    probe_result, _ = probed(model)

    assert probe_result.layout == PADDED_ROWS
    assert reason in probe_result.reason


def is_after_a_prefix(positions: torch.Tensor) -> bool:
    return positions[0, 0].item() > 0


def has_a_long_row(positions: torch.Tensor) -> bool:
    return positions.max().item() > 50


@pytest.mark.parametrize('is_spoiled', [is_after_a_prefix, has_a_long_row])
def test_a_layout_that_gives_nan_is_not_used(is_spoiled: Callable[[torch.Tensor], bool]):
    """After a cached prefix, or only in long rows. Mutation: Python's `max`, which ignores NaN."""
    model = networks.network()

    def spoil(_, args, kwargs, outputs):
        positions = kwargs.get('position_ids')
        if positions is not None and is_spoiled(positions):
            outputs.last_hidden_state.fill_(torch.nan)

    model.model.register_forward_hook(spoil, with_kwargs=True)

    probe_result, _ = probed(model)

    assert probe_result.layout != STREAM, probe_result.reason


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', ['llama', 'bloom'])
def test_half_precision_is_compared_within_its_own_rounding(name: str, dtype: torch.dtype):
    """Fails with the tolerance of float32."""
    probe_result, _ = probed(networks.network(name).to(dtype))

    assert probe_result.layout == STREAM


def deep_network(seed: int):
    """Return 24 layers in bf16 with eager attention, whose rounding the stream does not share."""
    sizes = {'num_hidden_layers': 24, 'hidden_size': 64, 'intermediate_size': 128, 'initializer_range': 0.15}
    return networks.network('llama', seed=seed, attn_implementation='eager', **sizes).to(torch.bfloat16)


@pytest.mark.parametrize('seed', [0, 1])
def test_rounding_in_many_layers_is_not_another_layout(seed: int):
    """Mutations: a tolerance of two roundings of the largest logit; embeddings nudged by ten roundings."""
    probe_result, _ = probed(deep_network(seed))

    assert probe_result.layout == STREAM, probe_result.reason
    assert 'too little' not in probe_result.reason


def one_position_late(stream):
    return replace(stream, depths=stream.depths + (stream.depths > 5))


def seen_by_all_later_tokens(stream):
    return replace(stream, ends=np.full_like(stream.ends, len(stream.ends)))


@pytest.mark.parametrize('fault', [one_position_late, seen_by_all_later_tokens])
@pytest.mark.parametrize('seed', [0, 1])
def test_wrong_positions_and_masks_are_more_than_rounding_in_many_layers(monkeypatch, seed: int, fault):
    """Mutation: embeddings nudged by ten roundings, which leaves too little to tell."""
    lay_out = running.lay_out_stream
    monkeypatch.setattr(running, 'lay_out_stream', lambda *arguments: fault(lay_out(*arguments)))

    probe_result, _ = probed(deep_network(seed))

    assert probe_result.layout != STREAM
    assert 'too little' not in probe_result.reason


@pytest.mark.parametrize('name', ['llama', 'gemma2', 'stablelm', 'mpt'])
def test_mixed_precision_follows_the_run(name: str):
    """Under autocast, numbers equal those of bare forwards under autocast. Mutation: the forward outside of it."""
    model = networks.network(name)
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix(4)]
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        probe_result, language_model = probed(model)
        batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=probe_result.layout)
        scores = networks.sums_of(networks.run(language_model, batches), requests)

        expected = networks.sums_alone(model, requests)
        largest_logits = [networks.logits_of(model, request.contexts[0]).abs().max().item() for request in requests]
    in_full_precision = networks.sums_alone(model, requests)

    tolerance = 2 * max(largest_logits) * torch.finfo(torch.bfloat16).eps
    assert probe_result.layout == LAYOUT_OF[name], probe_result.reason
    np.testing.assert_allclose(scores, expected, rtol=0, atol=tolerance)
    assert np.abs(scores - in_full_precision).max() > 1e-3


@pytest.mark.parametrize(
    ('argument', 'is_known'),
    [
        # Of the sparse attention of DeepSeek 3.2 and Hunyuan 4, of BERT's kin, and one that nobody has yet.
        ({'indices': torch.zeros(1, 1, 1, dtype=torch.long)}, False),
        ({'block_indices': torch.zeros(1, 1, 1, dtype=torch.long)}, False),
        ({'position_bias': torch.zeros(1, 4, 1, 1)}, False),
        ({'temperature': 2.0}, False),
        ({'indices': None}, True),
        ({'s_aux': None}, True),
        ({'is_causal': None}, True),
        ({'dropout': 0.0}, True),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, dict) else 'known' if value else 'unknown',
)
def test_an_argument_of_attention_that_the_stream_does_not_know_is_the_reason_against_it(
    monkeypatch: pytest.MonkeyPatch, argument: dict[str, object], is_known: bool
):
    """Without a word such a model was scored nats off before the probe. Mutation: ignore further arguments."""
    attention = attending.attend_by_name

    def with_argument(*arguments, **more):
        return attention(*arguments, **{**more, **argument})

    monkeypatch.setitem(AttentionInterface._global_mapping, attending.NAME, with_argument)

    probe_result, _ = probed(networks.network('llama'))

    (name,) = argument
    assert probe_result.layout == (STREAM if is_known else FORKED)
    assert is_known or f'token stream: {name} is not supported' in probe_result.reason


def attention_without(left_out: str) -> Callable[..., object]:
    """Return an attention by name that knows of no such part of the rule."""
    attend = attending.attend

    def attend_without(query, key, value, rule):
        return attend(query, key, value, replace(rule, **{left_out: None}))

    return attend_without


def unscaled(module, query):
    return query


def of_narrowest_width(query, key, value):
    narrowest = min(query.shape[-1], value.shape[-1])
    return query[..., :narrowest], key[..., :narrowest], value


# A part of the engine's attention that a family needs, and a wrong one in its place: an object, a name, a value.
WRONG_PARTS = {
    'gpt_oss without sinks': ('gpt_oss', attending, 'attend', attention_without('sinks')),
    'gpt_oss without windows': ('gpt_oss', attending, 'attend', attention_without('window')),
    'deepseek_v3 with queries as narrow as values': (
        'deepseek_v3',
        tree_attending,
        'of_one_width',
        of_narrowest_width,
    ),
    'llama4 without chunks': ('llama4', attending, 'attend', attention_without('chunk')),
    'llama4 without scaled queries': ('llama4', attending.QUERY_SCALES, 'Llama4TextAttention', unscaled),
    'phimoe without its window': ('phimoe', attending, 'rule_of', lambda _: (None, None)),
    'gemma2 without caps': ('gemma2', attending, 'attend', attention_without('softcap')),
    'gemma2 without windows': ('gemma2', attending, 'attend', attention_without('window')),
}


@pytest.mark.parametrize('case', [case for case, (name, *_) in WRONG_PARTS.items() if name in networks.FAMILIES])
def test_the_stream_without_a_part_that_a_family_needs_is_refused(monkeypatch: pytest.MonkeyPatch, case: str):
    """So that no family gets scores from an attention that leaves something out. Mutations: those of the table."""
    name, owner, attribute, wrong = WRONG_PARTS[case]
    assert LAYOUT_OF[name] == STREAM
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, attribute, wrong)
    else:
        monkeypatch.setattr(owner, attribute, wrong)

    probe_result, _ = probed(networks.network(name))

    assert probe_result.layout in (FORKED, PADDED_ROWS)
    assert re.search(r'token stream \S+ nats off', probe_result.reason)


@pytest.mark.skipif(networks.IS_TRANSFORMERS_5, reason='the table of transformers 5 is by positions')
def test_phimoe_with_frequencies_by_the_length_of_a_forward_stays_in_padded_rows():
    """Its rotary embedding of 4.53 sees the number of tokens in the stream alone. Mutation: no `Unsupported`."""
    scaling = {
        'rope_type': 'longrope',
        'short_factor': [1.0] * 4,
        'long_factor': [2.0] * 4,
        'short_mscale': 1.0,
        'long_mscale': 1.2,
        'original_max_position_embeddings': 1000,
    }

    probe_result, _ = probed(networks.network('phimoe', rope_scaling=scaling))

    assert probe_result.layout == PADDED_ROWS
    assert 'rope_scaling' in probe_result.reason
