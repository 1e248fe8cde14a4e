"""The callback that evaluates a model while Composer trains it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

import composer
from composer.callbacks import CheckpointSaver
from composer.core import Callback, Event, State
from composer.loggers import Logger, LoggerDestination, ProgressBarLogger
from composer.models import HuggingFaceModel
from composer.utils import create_interval_scheduler

from llmfoundry_gauntlet.composer.eval_metrics import call_watchers, metrics_by_label
from llmfoundry_gauntlet.composer.loggers import log_evaluation, warn_of_libraries
from llmfoundry_gauntlet.composer.records import TrainingLoss, checkpoint_of_batch, checkpoint_savers
from llmfoundry_gauntlet.composer.trainer_loop import (
    after_each_evaluation,
    composer_model_of,
    make_evaluator,
    run_evaluator,
    trainer_of,
)
from llmfoundry_gauntlet.config.settings import INTERVAL_WORDS, EvaluationSettings, TrainingOptions
from llmfoundry_gauntlet.errors import ConfigError, ModelError, listed
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_inputs
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.evaluation.subsets import Sizes
from llmfoundry_gauntlet.results.files import RESULTS
from llmfoundry_gauntlet.results.journal import JOURNAL
from llmfoundry_gauntlet.runtime.gauntlet import Gauntlet, OnAlert, summary
from llmfoundry_gauntlet.runtime.loop import SOME_BATCHES, Step
from llmfoundry_gauntlet.runtime.records import environment
from llmfoundry_gauntlet.runtime.trained_model import device_of, evaluated_model, num_parameters_of
from llmfoundry_gauntlet.runtime.writer import Results
from llmfoundry_gauntlet.types import TrainingPoint

CHECKPOINT_EVENTS = {Event.BATCH_END: Event.BATCH_CHECKPOINT, Event.EPOCH_END: Event.EPOCH_CHECKPOINT}
SHOWN_TASKS = 3  # in a message
log = logging.getLogger(__name__)

LABEL = 'gauntlet'  # label of the Evaluator that runs all tasks; of a second callback gauntlet-2
LOSSES = 'training losses'  # beside the subsets in a checkpoint


class EvaluationSchedule:
    """Decide at Composer's BATCH_END, EPOCH_END and FIT_END whether to evaluate; at most once per batch.

    Composer saves a checkpoint right after the evaluation at the same batch, so the schedule asks the checkpoint savers
    whether they are about to save one.
    """

    def __init__(self, interval: Sequence[str]) -> None:
        self.interval = interval
        self.first = 'first' in interval
        self.checkpoint = 'checkpoint' in interval
        self.last = 'last' in interval
        self.evaluated_batch: int | None = None  # None once the model is trained further
        self.event: Event | None = None  # the latest
        self.start()

    def start(self) -> None:
        """Begin a training, whose time may be that of an earlier one: Composer's schedulers hold their last batch."""
        self.times = [
            create_interval_scheduler(entry, include_end_of_training=False, checkpoint_events=False)
            for entry in self.interval
            if entry not in INTERVAL_WORDS
        ]

    def __call__(self, state: State, event: Event) -> bool:
        """Return whether an evaluation is due."""
        self.event = event
        due = [time(state, event) for time in self.times]
        due.append(self.last and event == Event.FIT_END)
        due.append(self.checkpoint and self.checkpoint_follows(state, event))
        return any(due) and self.evaluated_batch != state.timestamp.batch.value

    def checkpoint_follows(self, state: State, event: Event) -> bool:
        """Return whether a saver writes a checkpoint right after this event."""
        save_event = CHECKPOINT_EVENTS.get(event)
        if save_event is None:
            return False
        return any(saver.save_interval(state, save_event) for saver in checkpoint_savers(state))


def subset_key(number: int, tasks: Iterable[str]) -> str:
    """Return the name of the subset of a callback, one of several with the same tasks."""
    return f'{number}: {", ".join(sorted(tasks))}'


def subsets_in(stored: Mapping[str, Sizes] | Sequence[Mapping[str, int | None]]) -> Mapping[str, Sizes]:
    """Return the subsets in a checkpoint; 0.1.0 stored a list, one entry per callback, with None for no subset."""
    if isinstance(stored, Mapping):
        return stored
    subsets: dict[str, Sizes] = {}
    for index, sizes in enumerate(stored):
        num_earlier = sum(earlier.keys() == sizes.keys() for earlier in stored[:index])
        if sizes and None not in sizes.values():
            subsets[subset_key(num_earlier, sizes)] = cast(Sizes, sizes)
    return subsets


class EvalGauntlet(Callback):
    """Evaluate all tasks at the chosen times, log metrics and composites, and write records.

    The settings are the fields of EvaluationSettings, the same keys as in a training YAML:

        EvalGauntlet(tasks='yamls/tasks/gauntlet_v0.1.yaml', gauntlet='yamls/gauntlets/eval_gauntlet_v0.1.yaml')

    Tasks and data are loaded and validated by the constructor (ConfigError, DataError), the model and its tokenizer
    when the Trainer is created (ModelError). Training is bitwise unchanged. `evaluation` is the latest result in the
    current Trainer. `on_alert` is called on every rank with each Alert of an evaluation after it is logged; what it
    raises ends the training.
    """

    def __init__(self, *, on_alert: OnAlert | None = None, **settings: Unpack[TrainingOptions]) -> None:
        self.gauntlet = Gauntlet.from_data(load_inputs(settings))
        self.gauntlet.on_alert = on_alert
        self.schedule = EvaluationSchedule(self.settings.interval)
        self.label = LABEL
        self.loss = TrainingLoss()  # since the last evaluation
        self._losses: dict[str, TrainingLoss] = {}  # all EvalGauntlets of a Trainer share it, for the checkpoint
        self._dataloader: Steps | None = None
        self._evaluator: Any = None
        self._ending = ExitStack()  # cleans up after an evaluation
        self._first_is_due = False  # once all callbacks have seen FIT_START
        self._subsets: dict[str, Sizes] = {}  # of time budgets; all EvalGauntlets of a Trainer share it
        self._subset_key = ''

    @property
    def settings(self) -> EvaluationSettings:
        """Return the settings."""
        return self.gauntlet.settings

    @property
    def data(self) -> EvaluationData:
        """Return the tasks and their rows."""
        return self.gauntlet.data

    @property
    def evaluation(self) -> Evaluation | None:
        """Return the latest result in the current Trainer."""
        return self.gauntlet.evaluation

    # Composer's events, in the order in which they occur.

    def init(self, state: State, logger: Logger) -> None:
        """Begin anew in this Trainer, and count the parameters, which are not sharded yet.

        Raise ConfigError if another callback writes to the same folder, and ModelError for tensor parallelism: the
        ranks of a group would run different batches.
        """
        self.schedule = EvaluationSchedule(self.settings.interval)
        gauntlets = gauntlets_of(state)
        for callback in gauntlets:
            callback.gauntlet.run_name = state.run_name
        check_folders(gauntlets)
        self.gauntlet.evaluation = None
        self.gauntlet.num_parameters = num_parameters_of(state.model)
        if state.tp_config is not None:
            raise ModelError(
                "parallelism_config['tp']: a model with tensor parallelism cannot be evaluated while it is trained; "
                'shard it with FSDP alone, or train without this callback and evaluate the checkpoints with '
                '`gauntlet watch`'
            )

    def before_load(self, state: State, logger: Logger) -> None:
        """Prepare the items and attach the evaluator; the Trainer would remove one attached at `init`."""
        warn_of_libraries(logger.destinations)
        model = composer_model_of(state.model)
        subject = evaluated_model(model.model, model.tokenizer)
        self.gauntlet.prepare_items(subject, checkpoint_of=partial(checkpoint_of_batch, state))
        gauntlets = gauntlets_of(state)
        number = gauntlets.index(self) + 1
        self.label = LABEL if number == 1 else f'{LABEL}-{number}'
        self._dataloader = Steps(partial(self._steps, state))
        self._evaluator = make_evaluator(self.label, self._dataloader, self.schedule)
        self._attach(state)
        after_each_evaluation(trainer_of(state), self._clean_up)

        # Subsets that all callbacks of the Trainer share, for the checkpoint.
        with_same_tasks = [callback for callback in gauntlets if callback.data.tasks.keys() == self.data.tasks.keys()]
        self._subset_key = subset_key(with_same_tasks.index(self), self.data.tasks)
        self._subsets = gauntlets[0]._subsets
        self._losses = gauntlets[0]._losses
        self.loss = TrainingLoss()  # not that of an earlier Trainer
        self._losses[self._subset_key] = self.loss

    def after_load(self, state: State, logger: Logger) -> None:
        """Evaluate if the job stopped during the final evaluation; `fit` raises an error if no steps are left.

        Also finish an evaluation whose records were not written before the job stopped, but its checkpoint was.
        """
        batch = batch_of(state)
        if state.max_duration is None or not batch:
            return
        is_over = state.timestamp >= state.max_duration
        left = self.gauntlet.records.left(batch)
        if left == JOURNAL or (is_over and self.schedule.last and left != RESULTS):
            run_evaluator(trainer_of(state), self._evaluator)
            self.gauntlet.records.wait()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Evaluate before the first step if `interval` contains `first`; Composer itself asks no evaluator then.

        If callbacks after this one have a `fit_start` of their own, which may prepare what they do at EVAL_START, it
        waits for the next event, though Composer then counts its time as that of the first batch.
        """
        self._attach(state)  # again, as `fit(eval_dataloader=...)` replaces the evaluators
        self.schedule.start()
        is_first_batch = state.timestamp.batch.value == 0
        self._first_is_due = self.schedule.first and is_first_batch and self.schedule.evaluated_batch != 0
        others_prepare = any(prepares_at_fit_start(callback) for callback in callbacks_after(self, state))
        if not others_prepare:
            self._evaluate_first(state)

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Evaluate before the first step if `fit_start` left it to this event."""
        self._evaluate_first(state)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Let the model's `eval_forward` run the steps of the evaluation, only for this callback's evaluator.

        Raise ConfigError for `trainer.eval(subset_num_batches=...)`.
        """
        if self._is_ours(state):
            if state.dataloader_len is not None:
                raise ConfigError(SOME_BATCHES)
            self.gauntlet.records.wait()
            model = composer_model_of(state.model)
            self._ending.callback(restore_forward, model, vars(model).get('eval_forward'))
            vars(model)['eval_forward'] = run_step

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Pass the number of steps, known after the first one, to Composer's progress bar and console."""
        if not self._is_ours(state) or self.gauntlet.loop is None:
            return
        num_steps = self.gauntlet.loop.work.num_steps
        if state.dataloader_len == num_steps:
            return
        state.dataloader_len = num_steps
        for destination in logger.destinations:
            if isinstance(destination, ProgressBarLogger) and destination.eval_pbar is not None:
                destination.eval_pbar.pbar.total = num_steps

    def eval_end(self, state: State, logger: Logger) -> None:
        """Log and record the results."""
        if self._is_ours(state):
            self._finish(state, logger)
            call_watchers(state, logger, self._tasks_shown(state))

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Write the records of an evaluation that was not called by `fit`."""
        self.gauntlet.records.wait()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin to write the records of the previous batch, whose checkpoint is saved."""
        self.schedule.evaluated_batch = None
        self.gauntlet.records.begin()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Add the loss of the batch; evaluations of this event follow it."""
        self.loss.add(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the records of the last batch, whose checkpoint is saved."""
        self.gauntlet.records.wait()

    def close(self, state: State, logger: Logger) -> None:
        """Write the records."""
        self.gauntlet.records.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the subsets of all callbacks' time budgets, for the checkpoint.

        Composer stores one state per callback class, so each callback returns the subsets of all, also those for tasks
        that only an earlier job had. The state is a single string because torch loads a sharded checkpoint only into a
        state of the same structure; so the training losses since the last evaluations are in it, too.
        """
        losses = {key: [loss.total, loss.num_batches] for key, loss in self._losses.items() if loss.num_batches}
        content = {**self._subsets, LOSSES: losses} if losses else self._subsets
        return {'sizes': json.dumps(content)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the subsets from a checkpoint; callbacks with the same tasks are matched in order."""
        stored = state.get('sizes', '{}')
        content = json.loads(stored) if isinstance(stored, str) else stored
        losses = content.pop(LOSSES, {}) if isinstance(content, dict) else {}
        self.loss.total, self.loss.num_batches = losses.get(self._subset_key, (0.0, 0))
        self._subsets.update(subsets_in(content))
        if self._subset_key in self._subsets:
            self.use_subset(self._subsets[self._subset_key])
        elif content and self.settings.time_budget is not None:
            log.warning(
                'time_budget: the checkpoint has no subset for these tasks, so a new one is chosen: scores before and '
                'after it are of different items'
            )

    def use_subset(self, sizes: Sizes) -> None:
        """Evaluate the subset of an earlier evaluation within a time budget, given its number of questions per task."""
        self._subsets[self._subset_key] = dict(sizes)
        self.gauntlet.use_subset(sizes)

    # Implementation of the events.

    def _attach(self, state: State) -> None:
        if all(evaluator is not self._evaluator for evaluator in state.evaluators):
            state.evaluators.append(self._evaluator)
        state.eval_metrics.setdefault(self.label, {})

    def _evaluate_first(self, state: State) -> None:
        if self._first_is_due:
            self._first_is_due = False
            run_evaluator(trainer_of(state), self._evaluator)

    def _is_ours(self, state: State) -> bool:
        """Return whether this callback's evaluator is running."""
        return state.dataloader is self._dataloader

    def _steps(self, state: State) -> Iterator[Step]:
        """Yield the steps of an evaluation of the weights that are there now.

        Composer asks for the first step after the EVAL_START of all callbacks, which may have changed the weights or
        replaced the network. The code after the last step runs before any callback's EVAL_END, which may change them
        back but needs the scores.
        """
        if not self._is_ours(state):
            return  # Composer takes a first batch of each evaluator before training, for its sampler's sake
        # Composer would log the metrics of the previous evaluation, which it was given.
        given = state.eval_metrics[self.label]
        state.eval_metrics[self.label] = dict(given)
        given.clear()
        steps = self.gauntlet.steps(
            composer_model_of(state.model),
            folder=self.gauntlet.records.folder_of(batch_of(state)),
            title=title_of(state),
            precision=state.precision.value,
            step=batch_of(state),
        )
        self._ending.callback(steps.close)
        yield from steps
        assert self.evaluation is not None  # set after the last step
        shown = self._tasks_shown(state)
        for label, metrics in metrics_by_label(self.evaluation, self.label).items():
            if label == self.label or label in shown:
                state.eval_metrics[label] = dict(metrics)

    def _tasks_shown(self, state: State) -> list[str]:
        """Return the tasks whose metrics are in `state.eval_metrics`: all but those that have an evaluator."""
        labels = {evaluator.label for evaluator in state.evaluators}
        return [task for task in self.data.tasks if task not in labels]

    def _clean_up(self) -> None:
        self._ending.close()

    def _finish(self, state: State, logger: Logger) -> None:
        """Log the results, and write the records once the checkpoint of the batch is saved."""
        evaluation, batch = self.evaluation, state.timestamp.batch.value
        if evaluation is None:
            raise RuntimeError('an evaluation ended before it began')
        if self.gauntlet.sizes is not None:
            self._subsets[self._subset_key] = self.gauntlet.sizes
        self.schedule.evaluated_batch = batch
        log_evaluation(state, logger, evaluation.logged, batch)
        log.info('%s: %s', title_of(state), summary(evaluation))
        records = self.gauntlet.records
        folder = records.folder_of(batch_of(state))
        if folder is not None:
            model = composer_model_of(state.model)
            write = self.gauntlet.writer(
                evaluation,
                folder,
                {'name': state.run_name, **self.gauntlet.description(model.model)},
                {**environment(device_of(model.model), state.precision.value), 'composer': composer.__version__},
                training_point(state, self.loss),
            )
            records.write(batch_of(state), folder, write)
            if self.schedule.event == Event.FIT_END:  # Composer has called `fit_end` before
                records.wait()
        self.loss.reset()
        self.gauntlet.announce_alerts(evaluation)


class Steps:
    """The dataloader of a callback's evaluator: the steps of an evaluation are its batches.

    Not a torch DataLoader, because iterating one draws random numbers. It has no length, so that Composer has one only
    if the user asks for some of the batches.
    """

    batch_size = 1  # read by Composer

    def __init__(self, steps: Callable[[], Iterator[Step]]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Step]:
        return self.steps()


def run_step(step: Step, outputs: Any = None) -> Results:
    """Run a step of an evaluation; replaces a model's `eval_forward`."""
    return step.run()


def batch_of(state: State) -> int | None:
    """Return the number of training batches; None if the Trainer only evaluates."""
    return None if state.max_duration is None else state.timestamp.batch.value


def title_of(state: State) -> str:
    """Return the title of an evaluation in messages: with the batch of the model if it has one."""
    batch = state.timestamp.batch.value
    return 'gauntlet' if batch == 0 and state.max_duration is None else f'gauntlet ba{batch}'


def training_point(state: State, loss: TrainingLoss) -> TrainingPoint | None:
    """Return the point of training that is evaluated; None if the Trainer only evaluates."""
    if state.max_duration is None:
        return None
    return TrainingPoint(
        batch=state.timestamp.batch.value,
        epoch=state.timestamp.epoch.value,
        token=state.timestamp.token.value,
        checkpoint=None,
        loss=loss.mean,
        loss_batches=loss.num_batches or None,
    )


def gauntlets_of(state: State) -> list[EvalGauntlet]:
    """Return the callbacks of this class in a Trainer, in order."""
    return [callback for callback in state.callbacks if isinstance(callback, EvalGauntlet)]


def check_folders(gauntlets: Sequence[EvalGauntlet]) -> None:
    """Raise ConfigError if two callbacks would overwrite each other's records."""
    tasks_by_folder: dict[Path, str] = {}
    for number, callback in enumerate(gauntlets, 1):
        folder = callback.gauntlet.folder
        if folder is None:
            continue
        tasks = f'EvalGauntlet {number} ({listed(callback.data.tasks, SHOWN_TASKS)})'
        other = tasks_by_folder.setdefault(folder.resolve(), tasks)
        if other != tasks:
            raise ConfigError(
                f"save_folder: {other} and {tasks} would overwrite each other's records in {folder}; give each a "
                "folder of its own, such as save_folder='runs/{run_name}/gauntlet-2', or None for no records"
            )


def callbacks_after(callback: Callback, state: State) -> list[Callback]:
    """Return the callbacks that Composer calls after this one."""
    return list(state.callbacks[state.callbacks.index(callback) + 1 :])


def prepares_at_fit_start(callback: Callback) -> bool:
    """Return whether FIT_START means something to a callback; Composer's saver only checks its folder then."""
    kind = type(callback)
    is_overridden = kind.fit_start is not Callback.fit_start or kind.run_event is not Callback.run_event
    return is_overridden and not isinstance(callback, (CheckpointSaver, LoggerDestination, EvalGauntlet))


def restore_forward(model: HuggingFaceModel, forward: Any) -> None:
    """Restore the `eval_forward` that was set on the model itself, or else that of its class."""
    del vars(model)['eval_forward']
    if forward is not None:
        vars(model)['eval_forward'] = forward
