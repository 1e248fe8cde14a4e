"""A tiny training run of Composer. Tests that import this are skipped without it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tiny
import torch
from paths import HAS_COMPOSER

if not HAS_COMPOSER:
    import pytest  # which workers with Composer need not have

    pytest.skip('mosaicml is not installed', allow_module_level=True)

from composer import Callback, Logger, State, Trainer
from composer.core import DataSpec
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.utils.data import DataLoader


def composer_model(network: Any = None) -> HuggingFaceModel:
    """Return a network with the tokenizer as Composer trains it, by default a Llama of 128 positions."""
    both = tiny.model_and_tokenizer(network)
    return HuggingFaceModel(both.model, tokenizer=both.tokenizer)


def shard_on_cpu() -> None:
    """Let Composer 0.32 shard in this process: it asks for the current GPU, whatever the device."""
    torch.cuda.current_device = lambda: torch.device('cpu')
    torch.cuda.synchronize = lambda *_: None


def digests(trainer: Trainer) -> dict[str, str]:
    """Return digests of this rank's weights, and of its optimizer, random states and training mode.

    They are of shards: gathering whole weights on a CPU crashes in torch 2.7.
    """

    def content(value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        return (value.to_local() if hasattr(value, 'to_local') else value).detach().cpu().numpy().tobytes()

    moments = trainer.state.optimizers[0].state_dict()['state']
    numpy_state = np.random.get_state()
    state = [
        [content(value) for moment in moments.values() for value in moment.values()],
        [content(torch.get_rng_state()), random.getstate(), numpy_state[1].tobytes(), numpy_state[2:]],
        trainer.state.model.training,
    ]
    weights = [(name, content(value)) for name, value in trainer.state.model.named_parameters()]
    return {
        name: hashlib.sha256(repr(value).encode()).hexdigest()
        for name, value in (('weights', weights), ('state', state))
    }


class AtBatches(Callback):
    """Call functions when these batches start, counted from 1."""

    def __init__(self, functions: dict[int, Callable[[], object]]) -> None:
        self.functions = functions

    def batch_start(self, state: State, logger: Logger) -> None:
        self.functions.get(state.timestamp.batch.value + 1, lambda: None)()


class AtEvaluation(Callback):
    """Call a function in the evaluation at a batch: after this many of its steps, or at its end."""

    def __init__(self, batch: int, function: Callable[[], object], *, step: int | None = None) -> None:
        self.batch, self.function, self.step = batch, function, step
        self.num_steps = 0

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self.num_steps += state.timestamp.batch.value == self.batch
        if self.num_steps == self.step:
            self.function()

    def eval_end(self, state: State, logger: Logger) -> None:
        if self.step is None and state.timestamp.batch.value == self.batch:
            self.function()


def trainer(
    callbacks: list[Any], *, max_duration: str = '6ba', whole: HuggingFaceModel | None = None, **arguments: Any
) -> Trainer:
    """Return a training run of two rows per rank and batch, shuffled; by default of `tiny.model()`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 259, (16, 16), generator=generator)
    rows = [{'input_ids': row, 'labels': row} for row in ids]
    sampler = dist.get_sampler(rows, shuffle=True)
    whole = whole or HuggingFaceModel(tiny.model(), tokenizer=tiny.tokenizer())
    return Trainer(
        model=whole,
        train_dataloader=DataSpec(DataLoader(rows, batch_size=2, sampler=sampler)),
        optimizers=torch.optim.AdamW(whole.parameters(), lr=1e-3),
        max_duration=max_duration,
        seed=3,
        callbacks=callbacks,
        progress_bar=False,
        **{'device': 'cpu', **arguments},
    )


def train(callbacks: list[Any], **arguments: Any) -> Trainer:
    """Return a training run that has ended."""
    made = trainer(callbacks, **arguments)
    made.fit()
    made.close()
    return made
