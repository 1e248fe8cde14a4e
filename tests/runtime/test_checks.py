"""Mistakes in a loop of one's own: models that are none, steps that go backwards, and two gauntlets in one folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networks
import pytest
import tiny
import torch

from llmfoundry_gauntlet import ConfigError, Gauntlet, ModelError


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {**tiny.write_tasks(tmp_path), 'save_folder': tmp_path / 'records', 'tokens_per_batch': 200}


class Plain(torch.nn.Module):
    """A module with a config, whose forward calls a function."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = tiny.model().config
        self.function = forward

    def forward(self, **inputs: Any) -> Any:
        return self.function(**inputs)


def last_position(input_ids: torch.Tensor, **_: Any) -> Any:
    return SimpleNamespace(logits=torch.zeros(len(input_ids), 1, 259))


def other_argument(tokens: torch.Tensor) -> Any:
    return SimpleNamespace(logits=torch.zeros(*tokens.shape, 259))


def classes(input_ids: torch.Tensor, **_: Any) -> Any:
    return SimpleNamespace(logits=torch.zeros(len(input_ids), 2))


MODELS = {
    'a base model': (
        lambda: tiny.model().transformer,
        'GPT2Model, whose outputs .* have no logits.*AutoModelFor',
    ),
    'a Llama without its head': (lambda: networks.network(vocab_size=259).model, 'LlamaModel, .* no logits'),
    'a classifier': (lambda: Plain(classes), r'logits for \[1, 2\] tokens have the shape \[1, 2\]; .*\[1, 2, 259\]'),
    'logits of the last position': (lambda: Plain(last_position), r'the shape \[1, 1, 259\]'),
    'another signature': (lambda: Plain(other_argument), 'cannot be called with input_ids .*TypeError'),
    'a function': (lambda: last_position, 'the model is a function; allowed: a Hugging Face causal'),
}


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('call', ['prepare', 'evaluate'])
def test_a_model_that_is_not_one_is_an_error_before_any_item(settings, name, call):
    """Mutation: leave out `check_logits`; the probe ends with an AttributeError."""
    make, facts = MODELS[name]
    with pytest.raises(ModelError, match=facts):
        getattr(Gauntlet(**settings), call)(make(), tiny.tokenizer())
    assert not list(settings['save_folder'].rglob('*'))


def test_weights_in_parts_of_deepspeed_are_an_error_in_place_of_ranks_that_wait_for_each_other(settings):
    network = tiny.model()
    next(network.parameters()).ds_id = 0  # as ZeRO stage 3 marks them
    with pytest.raises(ModelError, match=r'ZeRO stage 3.*gauntlet watch'):
        Gauntlet(**settings).prepare(network, tiny.tokenizer())


@pytest.mark.parametrize('step', [9, -1, 10.0, '11', True])
def test_a_step_that_goes_backwards_or_is_no_number_is_an_error_before_any_item(settings, step):
    """Mutation: its records replace those of the first time."""
    gauntlet, network, tokenizer = Gauntlet(**settings), tiny.model(), tiny.tokenizer()
    gauntlet.evaluate(network, tokenizer, step=10)
    calls: list[None] = []
    network.register_forward_pre_hook(lambda *_: calls.append(None))

    with pytest.raises(ValueError, match=f'step: is {step!r}'):
        gauntlet.evaluate(network, tokenizer, step=step)

    assert calls == []
    assert [path.name for path in settings['save_folder'].iterdir()] == ['ba10']
    gauntlet.evaluate(network, tokenizer, step=10)
    gauntlet.evaluate(network, tokenizer, step=11)


def test_two_gauntlets_in_one_folder_are_an_error_before_any_item(settings):
    """Mutation: the second one's records replace the first one's."""
    first, second = Gauntlet(**settings), Gauntlet(**settings, only='sums')
    network, tokenizer = tiny.model(), tiny.tokenizer()
    first.prepare(network, tokenizer)
    with pytest.raises(ConfigError, match=r"another Gauntlet .* whose only: None, here \('sums',\).*folder of its own"):
        second.prepare(network, tokenizer)

    # The same evaluation again, one that is gone, and another folder are none.
    Gauntlet(**settings).prepare(network, tokenizer)
    Gauntlet(**{**settings, 'save_folder': settings['save_folder'] / 'sums'}, only='sums').prepare(network, tokenizer)
    del first
    second.prepare(network, tokenizer)
