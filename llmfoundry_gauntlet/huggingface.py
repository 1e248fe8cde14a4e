"""The callback that evaluates a model while the Trainer of transformers trains it, also under Accelerate with FSDP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from llmfoundry_gauntlet.config.settings import GauntletOptions
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.files import RESULTS
from llmfoundry_gauntlet.results.journal import JOURNAL
from llmfoundry_gauntlet.runtime.callers import caller
from llmfoundry_gauntlet.runtime.gauntlet import Gauntlet, OnAlert
from llmfoundry_gauntlet.types import TrainingPoint

FIRST, EVALUATE, CHECKPOINT, LAST = WORDS = ('first', 'evaluate', 'checkpoint', 'last')
PREFIX = 'eval_'  # by which the Trainer and its loggers know the metrics of an evaluation


class GauntletCallback(TrainerCallback):
    """Evaluate all tasks at the chosen times, log metrics and composites, and write records beside the checkpoints.

        Trainer(..., callbacks=[GauntletCallback(tasks='yamls/tasks/gauntlet_v0.1.yaml', interval=['first', 500])])

    `interval` has numbers of steps and words: `first` is before the first step, `evaluate` whenever the Trainer
    evaluates, `checkpoint` before it writes a checkpoint, `last` at the end. The metrics of `evaluate` are among the
    Trainer's, for `metric_for_best_model='icl/metrics/eval_gauntlet/default_average'` and for EarlyStoppingCallback,
    which must come after this callback. The other settings are those of Gauntlet; records are in OUTPUT_DIR/gauntlet
    unless `save_folder` says otherwise. The tokenizer is the Trainer's `processing_class` unless one is given.

    Raise ConfigError or DataError in the constructor, and ModelError before the first step.
    """

    def __init__(
        self,
        *,
        interval: str | int | Sequence[str | int] = (FIRST, EVALUATE, LAST),
        tokenizer: Any = None,
        on_alert: OnAlert | None = None,
        **settings: Unpack[GauntletOptions],
    ) -> None:
        self.interval = (interval,) if isinstance(interval, (str, int)) else tuple(interval)
        for entry in self.interval:
            is_time = isinstance(entry, int) and not isinstance(entry, bool) and entry > 0
            if not is_time and entry not in WORDS:
                allowed = f'{", ".join(WORDS)}, and numbers of steps'
                raise ConfigError(f'GauntletCallback: interval: is {entry!r}; allowed: {allowed}')
        self.gauntlet = Gauntlet(on_alert=on_alert, **settings)
        self.tokenizer = tokenizer
        self._has_folder = 'save_folder' in settings
        self._evaluated_step: int | None = None  # in the current training
        self._metrics: dict[str, float] = {}  # of the latest evaluation, as the Trainer names them

    @property
    def evaluation(self) -> Evaluation | None:
        """Return the latest result."""
        return self.gauntlet.evaluation

    # The Trainer's events, in the order in which they occur.

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Check the model and tokenize the items; evaluate if that is due, or if an earlier job did not finish it."""
        self._evaluated_step = None
        self._prepare(self._trainer(state))
        step, is_due = state.global_step, FIRST in self.interval
        if step:  # resumed
            left = self.gauntlet.records.left(step)
            is_over = step >= state.max_steps
            is_due = left == JOURNAL or (is_over and LAST in self.interval and left != RESULTS)
        if is_due:
            self._evaluate(state, control)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin to write the records of the previous step, whose checkpoint is saved."""
        self.gauntlet.records.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluate every so many steps, before a checkpoint, and at the end."""
        times = [entry for entry in self.interval if isinstance(entry, int)]
        is_due = any(state.global_step % time == 0 for time in times)
        is_due = is_due or (CHECKPOINT in self.interval and control.should_save)
        if is_due or (LAST in self.interval and control.should_training_stop):
            self._evaluate(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluate before a checkpoint of the epoch, and at an end that another callback has asked for."""
        self.on_step_end(args, state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Evaluate, and add the metrics to the Trainer's, of which it takes `metric_for_best_model`."""
        if EVALUATE in self.interval:
            self._evaluate(state, control)
        if self._evaluated_step == state.global_step:
            given['metrics'].update(self._metrics)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the records of the last step, whose checkpoint is saved."""
        self.gauntlet.records.wait()
        self._evaluated_step = None  # from now on the model may be the best one

    # Implementation of the events.

    def _trainer(self, state: TrainerState) -> Any:
        def has_state(trainer: Any) -> bool:
            return trainer.state is state

        return caller(Trainer, has_state)

    def _tokenizer(self, trainer: Any) -> Any:
        processing = self.tokenizer or trainer.processing_class
        return getattr(processing, 'tokenizer', processing)  # of a processor, its tokenizer

    def _prepare(self, trainer: Any) -> None:
        output = Path(trainer.args.output_dir)

        def checkpoint_of(step: int) -> str | None:
            folder = output / f'checkpoint-{step}'
            return str(folder) if folder.is_dir() else None

        self.gauntlet.run_name = trainer.args.run_name or output.name
        if not self._has_folder:
            self.gauntlet.save_folder = str(output / 'gauntlet')
        self.gauntlet.prepare(trainer.model, self._tokenizer(trainer), checkpoint_of=checkpoint_of)
        if trainer.state.global_step and self.gauntlet.settings.time_budget is not None:
            self.gauntlet.use_latest_subset()

    def _evaluate(self, state: TrainerState, control: TrainerControl) -> None:
        """Evaluate and log, at most once per step of a training; outside of one the records are those of no step."""
        trainer, step = self._trainer(state), state.global_step
        if trainer.is_in_train and self._evaluated_step == step:
            return
        if self.gauntlet.loop is None:
            self._prepare(trainer)
        training = None
        if trainer.is_in_train:
            num_tokens = int(state.num_input_tokens_seen) or None
            training = TrainingPoint(batch=step, epoch=int(state.epoch or 0), token=num_tokens, checkpoint=None)
        with trainer.accelerator.autocast():
            evaluation = self.gauntlet.evaluate_at(training, trainer.model, self._tokenizer(trainer))
        self._evaluated_step = step
        self._metrics = {f'{PREFIX}{name}': float(value) for name, value in evaluation.logged.items()}
        should_log = control.should_log  # the loss of this step; the Trainer's `log` ends that
        trainer.log(dict(self._metrics))
        control.should_log = should_log
        self.gauntlet.announce_alerts(evaluation)
