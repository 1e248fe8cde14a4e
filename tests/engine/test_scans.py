"""Chunks of the scans of recurrent layers, which suit the rows of an evaluation and are the model's own afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import every_family
import networks
import numpy as np
import pytest
import torch

from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, plan
from llmfoundry_gauntlet.engine.probe import check_scans, probe
from llmfoundry_gauntlet.engine.scans import Scans, chunk_for

SIZES = {'vocabulary': every_family.VOCABULARY, 'longest': every_family.LONGEST}
ON_5 = pytest.mark.skipif(not networks.IS_TRANSFORMERS_5, reason='transformers has the type from 5 on')
# Mamba 2 keeps the length in its layers, the delta rule in functions.
RECURRENT = ('falcon_h1', 'bamba', pytest.param('qwen3_5_text', marks=ON_5), pytest.param('olmo_hybrid', marks=ON_5))


def language_model_of(name: str) -> CausalLanguageModel:
    return CausalLanguageModel(every_family.build(name), device=torch.device('cpu'))


@pytest.mark.parametrize(
    ('longest', 'chunk'), [(2, 8), (8, 8), (9, 16), (16, 16), (25, 32), (45, 16), (140, 16), (600, 32), (4096, 32)]
)
def test_chunks_pad_little(longest: int, chunk: int):
    assert chunk_for(longest) == chunk


@pytest.mark.parametrize('name', RECURRENT)
def test_scores_in_short_chunks_are_those_of_the_models_own(name: str):
    language_model = language_model_of(name)
    assert language_model.scans
    batches = plan(networks.mixed_requests(), tokens_per_batch=200, layout=PADDED_ROWS)
    scores = {}
    for shortens in (False, True):
        language_model.shortens_scans = shortens
        outputs = networks.run(language_model, batches)
        scores[shortens] = networks.sums_of(outputs, networks.mixed_requests())
    np.testing.assert_allclose(scores[True], scores[False], rtol=0, atol=1e-4)


@pytest.mark.parametrize('name', RECURRENT)
def test_the_probe_shortens_scans_that_agree(name: str):
    language_model = language_model_of(name)
    probe(language_model, **SIZES)
    assert language_model.shortens_scans


def test_a_model_without_recurrent_layers_has_none():
    language_model = language_model_of('llama')
    check_scans(language_model, **SIZES)
    assert not language_model.scans
    assert not language_model.shortens_scans


def test_the_probe_refuses_chunks_that_change_scores(monkeypatch: pytest.MonkeyPatch):
    language_model = language_model_of('falcon_h1')
    layers: list[Any] = [layer for layer, _ in language_model.scans.layers]

    @contextmanager
    def without_skip(scans: Scans, longest: int) -> Iterator[None]:
        skips = [layer.D.data.clone() for layer in layers]
        for layer in layers:
            layer.D.data.zero_()
        yield
        for layer, skip in zip(layers, skips, strict=True):
            layer.D.data.copy_(skip)

    monkeypatch.setattr(Scans, 'chunked_for', without_skip)
    check_scans(language_model, **SIZES)
    assert not language_model.shortens_scans


def chunks_of(scans: Scans) -> list[Any]:
    functions = [getattr(module, name) for module, name in scans.functions]
    return [layer.chunk_size for layer, _ in scans.layers] + functions


@pytest.mark.parametrize('name', RECURRENT)
def test_scans_are_as_before_after_an_evaluation_that_fails(name: str):
    network = every_family.build(name)
    for layer, _ in Scans(network).layers:
        layer.chunk_size = 128  # type: ignore[assignment]
    scans = Scans(network)
    before = chunks_of(scans)
    with pytest.raises(KeyError), scans.chunked_for(8):
        chunks = chunks_of(scans)
        assert all(chunk == 8 or chunk.keywords == {'chunk_size': 8} for chunk in chunks)
        raise KeyError
    assert chunks_of(scans) == before


@ON_5
def test_the_length_of_the_delta_rule_is_that_of_its_function():
    scans = Scans(every_family.build('qwen3_5_text'))
    assert [name for _, name in scans.functions] == ['torch_chunk_gated_delta_rule']
    assert scans.functions[0][0] is sys.modules['transformers.models.qwen3_5.modeling_qwen3_5']
