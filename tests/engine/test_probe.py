"""Which layout the probe finds for a family, and that the numbers in it are those of bare forwards."""

from __future__ import annotations

import networks
import numpy as np
import pytest
import torch
from networks import CPU, LAYOUT_OF, PREFIX_BUDGET, WINDOW

from llmfoundry_gauntlet.engine import probe as probing
from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import MASKED_ROWS, PADDED_ROWS, STREAM, plan
from llmfoundry_gauntlet.engine.probe import probe

LONGEST = 60


def probed(model, longest: int = LONGEST) -> tuple[probing.Probe, CausalLanguageModel]:
    language_model = CausalLanguageModel(model, device=CPU)
    return probe(language_model, vocabulary=networks.VOCABULARY, longest=longest), language_model


@pytest.mark.parametrize('name', LAYOUT_OF)
def test_every_family_runs_in_the_fastest_layout_that_gives_its_numbers(name: str):
    """Fails when a layout is trusted unseen, windows or caps are left out, or heads are not shared by their group.

    Mutations: `LAYOUTS[:1]` accepted without comparing; `window = None` or `softcap = None` in `attend`; `repeat`
    for `repeat_interleave`.
    """
    model = networks.network(name)
    found, language_model = probed(model)
    assert found.layout == LAYOUT_OF[name], found.reason
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix()]
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=found.layout)
    assert any(batch.prefix is not None for batch in batches) == (found.layout == STREAM)
    networks.check_against_bare_forwards(model, requests, networks.run(language_model, batches))


@pytest.mark.parametrize(
    ('name', 'layout'), [('gpt_neo', STREAM), ('gpt_neo', MASKED_ROWS), ('mpt', MASKED_ROWS), ('stablelm', STREAM)]
)
def test_families_that_the_probe_keeps_from_a_layout_give_wrong_numbers_in_it_without_a_word(name: str, layout: str):
    """Nothing but the probe stands between these and wrong scores."""
    model = networks.network(name)
    requests = networks.mixed_requests()
    outputs = networks.run(networks.untaught(model), plan(requests, tokens_per_batch=400, layout=layout))
    off = np.abs(networks.sums_of(outputs, requests) - networks.sums_alone(model, requests))
    assert np.isfinite(off).all()
    assert off.max() > 0.1


@pytest.mark.parametrize('longest', [WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_a_model_with_windows_runs_in_a_stream_whether_or_not_rows_are_longer(longest: int):
    model = networks.network('mistral, windows')
    found, language_model = probed(model, longest)
    requests = networks.requests_after_a_prefix() if longest == 40 else networks.mixed_requests()
    assert found.layout == STREAM
    outputs = networks.run(language_model, plan(requests, tokens_per_batch=PREFIX_BUDGET))
    networks.check_against_bare_forwards(model, requests, outputs)


def test_a_window_by_stream_position_is_found_out(monkeypatch):
    """The probe's rows are long enough, and its branches far enough apart, to tell. Mutation: the one made here."""
    from llmfoundry_gauntlet.engine.tree_attention import TreeLayout

    right = TreeLayout._mask

    def by_position(self, span, window):
        depths, self.depths = self.depths, torch.arange(len(self.depths))
        try:
            return right(self, span, window)
        finally:
            self.depths = depths

    monkeypatch.setattr(TreeLayout, '_mask', by_position)
    found, _ = probed(networks.network('mistral, windows'))
    assert found.layout != STREAM
    assert 'token stream' in found.reason and 'nats off' in found.reason


def test_a_model_whose_numbers_do_not_depend_on_the_context_runs_padded_rows():
    """It would agree with anything. Fails without the contrast: it is then given a stream."""
    model = networks.network()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    found, _ = probed(model)
    assert found.layout == PADDED_ROWS
    assert 'too little to tell' in found.reason


def test_a_model_of_nan_runs_padded_rows():
    """Fails without the check: a comparison with NaN says nothing."""
    model = networks.network()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(torch.nan)
    found, _ = probed(model)
    assert found.layout == PADDED_ROWS
    assert found.reason == "probe: the model's numbers are not finite"


@pytest.mark.parametrize(
    'breaks', [lambda positions: positions[0, 0] > 0, lambda positions: positions.max() > 50], ids=['prefix', 'long']
)
def test_a_way_that_gives_nan_is_not_taken(breaks):
    """After a kept prefix, or in long rows alone, where all else agrees. Mutation: Python's `max`, which passes NaN."""
    model = networks.network()

    def spoil(_, args, kwargs, outputs):
        if kwargs.get('position_ids') is not None and breaks(kwargs['position_ids']):
            outputs.last_hidden_state.fill_(torch.nan)

    model.model.register_forward_hook(spoil, with_kwargs=True)
    found, _ = probed(model)
    assert found.layout != STREAM, found.reason


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_within_its_own_rounding(dtype: torch.dtype):
    """Twice the spacing of the largest logit. Fails with the tolerance of float32, and with one that lets all pass."""
    model = networks.network().to(dtype)
    found, language_model = probed(model)
    assert found.layout == STREAM
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix()]
    stream, padded = (
        networks.sums_of(
            networks.run(language_model, plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=layout)), requests
        )
        for layout in (STREAM, PADDED_ROWS)
    )
    largest = max(networks.logits_of(model, request.contexts[0]).abs().max().item() for request in requests)
    tolerance = 2 * largest * torch.finfo(dtype).eps
    assert tolerance < 0.5
    np.testing.assert_allclose(stream, padded, rtol=0, atol=tolerance)
    assert probed(networks.network('stablelm').to(dtype))[0].layout == MASKED_ROWS


@pytest.mark.parametrize('name', ['llama', 'gemma2, eager', 'stablelm', 'bloom'])
def test_mixed_precision_is_that_of_the_run(name: str):
    """Under autocast the numbers are those of bare forwards under autocast. Mutation: the forward outside of it."""
    model = networks.network(name)
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix(4)]
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        found, language_model = probed(model)
        batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=found.layout)
        scores = networks.sums_of(networks.run(language_model, batches), requests)
        expected = networks.sums_alone(model, requests)
        largest = max(networks.logits_of(model, request.contexts[0]).abs().max().item() for request in requests)
    assert found.layout == LAYOUT_OF[name], found.reason
    np.testing.assert_allclose(scores, expected, rtol=0, atol=2 * largest * torch.finfo(torch.bfloat16).eps)
    assert np.abs(scores - networks.sums_alone(model, requests)).max() > 1e-3  # of float32
