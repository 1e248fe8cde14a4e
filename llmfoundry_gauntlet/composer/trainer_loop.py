"""Composer's own evaluation loop, for every evaluation in a Trainer and with a clean-up after each.

A callback gets the state of its Trainer, but not the Trainer. Names of mosaicml 0.32.1 that are private: the method
`Trainer._eval_loop`, which runs one evaluator with all events, and which Composer itself calls (docs/compatibility.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from composer import Trainer
from composer.core import DataSpec, Evaluator, Event, State
from composer.models import HuggingFaceModel
from torch.nn.parallel import DistributedDataParallel

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.runtime.callers import caller
from llmfoundry_gauntlet.runtime.unchanged import modes_kept

EVAL_LOOP = '_eval_loop'
EvalInterval = Callable[[State, Any], bool]


def trainer_of(state: State) -> Trainer:
    """Return the Trainer with this state. Raise RuntimeError unless it is running an event, and so is on the stack."""
    return caller(Trainer, lambda trainer: trainer.state is state)


def run_evaluator(trainer: Trainer, evaluator: Evaluator) -> None:
    """Run an evaluator as Composer does between two batches, but whatever its interval, and also before the first."""
    state = trainer.state
    dataloader, label, length = state.dataloader, state.dataloader_label, state.dataloader_len
    if dataloader is None:  # in a Trainer whose data only `fit` gets; the events need one
        state.set_dataloader(evaluator.dataloader.dataloader, evaluator.label)
    try:
        trainer.engine.run_event(Event.EVAL_BEFORE_ALL)
        trainer._eval_loop(evaluator=evaluator, metrics={}, subset_num_batches=-1)
        trainer.engine.run_event(Event.EVAL_AFTER_ALL)
    finally:
        set_dataloader(state, dataloader, label, length)


def after_each_evaluation(trainer: Trainer, clean_up: Callable[[], None]) -> None:
    """Call a function after each evaluation of a Trainer, with any evaluator, also after an error or an interrupt.

    Composer fires no event then. It also leaves the evaluator's dataloader in place, with which `fit` would go on.
    """
    owner = weakref.ref(trainer)  # without a cycle, as Composer closes a Trainer when it is freed
    earlier: Callable[..., None] | None = vars(trainer).get(EVAL_LOOP)  # of another callback

    def run_and_clean_up(*arguments: Any, **named: Any) -> None:
        trainer = owner()
        assert trainer is not None  # it is running this
        state = trainer.state
        dataloader, label, length = state.dataloader, state.dataloader_label, state.dataloader_len
        run = earlier or partial(type(trainer)._eval_loop, trainer)
        try:
            with modes_kept(state.model):  # Composer puts all modules into the mode of the whole model
                run(*arguments, **named)
        finally:
            clean_up()
            if state.dataloader is not dataloader:
                set_dataloader(state, dataloader, label, length)

    vars(trainer)[EVAL_LOOP] = run_and_clean_up


def set_dataloader(state: State, dataloader: Any, label: str | None, length: Any) -> None:
    """Set a state's dataloader with its label and number of batches, None if unknown."""
    state.set_dataloader(dataloader, label)
    if length is not None:
        state.dataloader_len = length


def make_evaluator(
    label: str, dataloader: Any, eval_interval: EvalInterval | None, metric_names: Sequence[str] = ()
) -> Evaluator:
    """Return a Composer Evaluator of a dataloader whose only batch is the whole evaluation."""
    return Evaluator(
        label=label,
        dataloader=DataSpec(
            dataloader,
            split_batch=lambda batch, _: [batch],
            get_num_samples_in_batch=lambda _: 1,  # not used
        ),
        metric_names=list(metric_names),
        eval_interval=eval_interval,
        subset_num_batches=-1,
        device_eval_microbatch_size=1,
    )


def composer_model_of(model: Any) -> HuggingFaceModel:
    """Return the Composer model without DDP. Raise ModelError unless it is a HuggingFaceModel with a tokenizer."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not isinstance(model, HuggingFaceModel):
        raise ModelError(f'the model is a {type(model).__name__}; allowed: a composer.models.HuggingFaceModel')
    if model.tokenizer is None:
        raise ModelError('the model has no tokenizer; construct HuggingFaceModel(model, tokenizer=...)')
    return model
