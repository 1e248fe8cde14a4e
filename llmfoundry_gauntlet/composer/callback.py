"""The callback that evaluates a model while Composer trains it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from composer.callbacks import CheckpointSaver
from composer.core import Callback, Event, State
from composer.loggers import Logger, LoggerDestination, ProgressBarLogger
from composer.models import HuggingFaceModel
from composer.utils import create_interval_scheduler

from llmfoundry_gauntlet.composer.eval_metrics import call_watchers, metrics_by_label
from llmfoundry_gauntlet.composer.loggers import log_evaluation, warn_of_libraries
from llmfoundry_gauntlet.composer.records import Records, TrainingLoss, checkpoint_savers, environment
from llmfoundry_gauntlet.composer.trainer_loop import (
    after_each_evaluation,
    composer_model_of,
    make_evaluator,
    run_evaluator,
    trainer_of,
)
from llmfoundry_gauntlet.config.resources import path_problem
from llmfoundry_gauntlet.config.settings import INTERVAL_WORDS
from llmfoundry_gauntlet.engine.model import is_sharded
from llmfoundry_gauntlet.errors import ConfigError, ModelError, plural
from llmfoundry_gauntlet.evaluation.inputs import load_inputs
from llmfoundry_gauntlet.evaluation.run import Evaluation, PreparedEvaluation
from llmfoundry_gauntlet.metrics.composites import Sizes
from llmfoundry_gauntlet.results.files import RESULTS, check_writable, is_recorded, write_records
from llmfoundry_gauntlet.results.journal import JOURNAL
from llmfoundry_gauntlet.runtime.distributed import global_rank, on_first_rank
from llmfoundry_gauntlet.runtime.gathered import weights_gathered
from llmfoundry_gauntlet.runtime.journal import (
    Resuming,
    SharedJournal,
    digest_of_items,
    identity_of,
    model_fingerprint,
)
from llmfoundry_gauntlet.runtime.loop import (
    SOME_BATCHES,
    EvaluationLoop,
    Step,
)
from llmfoundry_gauntlet.runtime.models import ModelSource
from llmfoundry_gauntlet.runtime.progress import progress_report
from llmfoundry_gauntlet.runtime.runner import prepare_for_model
from llmfoundry_gauntlet.runtime.watchdog import check_timeout, watchdog
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
    found: dict[str, Sizes] = {}
    for place, sizes in enumerate(stored):
        number = sum(other.keys() == sizes.keys() for other in stored[:place])
        if sizes and None not in sizes.values():
            found[subset_key(number, sizes)] = cast(Sizes, sizes)
    return found


class EvalGauntlet(Callback):
    """Evaluate all tasks at the chosen times, log metrics and composites, and write records.

    The settings are the fields of EvaluationSettings, the same keys as in a training YAML:

        EvalGauntlet(tasks='yamls/tasks/gauntlet_v0.1.yaml', gauntlet='yamls/gauntlets/eval_gauntlet_v0.1.yaml')

    Tasks and data are loaded and validated by the constructor (ConfigError, DataError), the model and its tokenizer
    when the Trainer is created (ModelError). Training is bitwise unchanged. `evaluation` is the latest result in the
    current Trainer.
    """

    def __init__(self, **settings: Any) -> None:
        self.data = load_inputs(settings)
        self.settings = self.data.settings
        self.schedule = EvaluationSchedule(self.settings.interval)
        self.loader: EvaluationLoop | None = None
        self.evaluation: Evaluation | None = None  # the latest of the current Trainer
        self.label = LABEL
        self.records = Records(None)  # with a folder once the run name is known
        self.source: ModelSource | None = None  # only without training: the source of the model
        self.num_parameters = 0  # of the whole model
        self.resuming = Resuming()  # how to treat an interrupted evaluation in the same folder
        self._evaluator: Any = None
        self._model: HuggingFaceModel | None = None  # the one whose `eval_forward` the Trainer calls
        self._ending = ExitStack()  # cleans up after an evaluation
        self._first_is_due = False  # once all callbacks have seen FIT_START
        self._digest: tuple[PreparedEvaluation, str] | None = None  # digest of all items
        self._subsets: dict[str, Sizes] = {}  # of time budgets; all EvalGauntlets of a Trainer share it
        self._subset_key = ''
        self.loss = TrainingLoss()  # since the last evaluation
        self._losses: dict[str, TrainingLoss] = {}  # all EvalGauntlets of a Trainer share it, for the checkpoint
        for warning in self.data.warnings:
            log.warning(warning)

    # Composer's events, in the order in which they occur.

    def init(self, state: State, logger: Logger) -> None:
        """Begin anew in this Trainer, and count the parameters, which are not sharded yet.

        Raise ConfigError if another callback writes to the same folder, and ModelError for tensor parallelism: the
        ranks of a group would run different batches.
        """
        self.evaluation, self.schedule = None, EvaluationSchedule(self.settings.interval)
        check_folders(gauntlets_of(state), state.run_name)
        self.num_parameters = sum(parameter.numel() for parameter in state.model.parameters())
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
        prepared = prepare_for_model(self.data, model)
        self.data = prepared.data  # without tasks whose programs cannot run here
        for reason in dict.fromkeys(self.data.unsupported.values()):
            tasks = [task for task, why in self.data.unsupported.items() if why == reason]
            log.warning('%s; left out: %s', reason, ', '.join(tasks))
        if self.data.sandbox is not None:
            log.info('programs: %s', self.data.sandbox)
        gauntlets = gauntlets_of(state)
        number = gauntlets.index(self) + 1
        self.label = LABEL if number == 1 else f'{LABEL}-{number}'
        self.loader = EvaluationLoop(prepared, model)
        self._model = model
        self._evaluator = make_evaluator(self.label, self.loader, self.schedule)
        self._attach(state)
        after_each_evaluation(trainer_of(state), self._clean_up)
        if self.settings.stall_seconds is not None:
            check_timeout(self.settings.stall_seconds)
        twins = [gauntlet for gauntlet in gauntlets if gauntlet.data.tasks.keys() == self.data.tasks.keys()]
        self._subsets = gauntlets[0]._subsets
        self._subset_key = subset_key(twins.index(self), self.data.tasks)
        self.loss = TrainingLoss()  # not that of an earlier Trainer
        self._losses = gauntlets[0]._losses
        self._losses[self._subset_key] = self.loss
        folder = self.folder(state.run_name)
        if folder is not None:
            if problem := path_problem(str(folder)):
                raise ConfigError(f'save_folder: {problem}; shorten run_name, or give another save_folder')
            on_first_rank(partial(check_writable, folder))
            self.records = Records(folder)
        log.info(
            'gauntlet: %s, %s; max_seq_len %d',
            plural(len(prepared.tasks), 'task'),
            plural(len(prepared.items), 'item'),
            prepared.max_seq_len,
        )

    def after_load(self, state: State, logger: Logger) -> None:
        """Evaluate if the job stopped during the final evaluation; `fit` raises an error if no steps are left.

        Also finish an evaluation whose records were not written before the job stopped, but its checkpoint was.
        """
        if state.max_duration is None or state.timestamp.batch.value == 0:
            return
        is_over = state.timestamp >= state.max_duration
        left = self.records.left(state)
        if left == JOURNAL or (is_over and self.schedule.last and left != RESULTS):
            run_evaluator(trainer_of(state), self._evaluator)
            self.records.wait(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Evaluate before the first step if `interval` contains `first`; Composer itself asks no evaluator then.

        If callbacks after this one have a `fit_start` of their own, which may prepare what they do at EVAL_START, it
        waits for the next event, though Composer then counts its time as that of the first batch.
        """
        self._attach(state)  # again, as `fit(eval_dataloader=...)` replaces the evaluators
        self.schedule.start()
        is_start = state.timestamp.batch.value == 0
        self._first_is_due = self.schedule.first and is_start and self.schedule.evaluated_batch != 0
        if not any(prepares_at_fit_start(callback) for callback in callbacks_after(self, state)):
            self._evaluate_first(state)

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Evaluate before the first step if `fit_start` left it to this event."""
        self._evaluate_first(state)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Replace the model's `eval_forward` with the engine's, only for this callback's evaluator.

        Raise ConfigError for `trainer.eval(subset_num_batches=...)`.
        """
        if self._is_ours(state):
            check_all_batches(state)
            self._begin(state)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Pass the number of steps, known after the first one, to Composer's progress bar and console."""
        if self._is_ours(state) and self.loader is not None and state.dataloader_len != self.loader.work.num_steps:
            state.dataloader_len = self.loader.work.num_steps
            for destination in logger.destinations:
                if isinstance(destination, ProgressBarLogger) and destination.eval_pbar is not None:
                    destination.eval_pbar.pbar.total = self.loader.work.num_steps

    def eval_end(self, state: State, logger: Logger) -> None:
        """Log and record the results."""
        if self._is_ours(state):
            self._finish(state, logger)
            call_watchers(state, logger, self._tasks_shown(state))

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Write the records of an evaluation that was not called by `fit`."""
        self.records.wait(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin to write the records of the previous batch, whose checkpoint is saved."""
        self.schedule.evaluated_batch = None
        self.records.begin(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Add the loss of the batch; evaluations of this event follow it."""
        self.loss.add(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the records of the last batch, whose checkpoint is saved."""
        self.records.wait(state)

    def close(self, state: State, logger: Logger) -> None:
        """Write the records."""
        self.records.close(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the subsets of all callbacks' time budgets, for the checkpoint.

        Composer stores one state per callback class, so each callback returns the subsets of all, also those for tasks
        that only an earlier job had. The state is a single string because torch loads a sharded checkpoint only into a
        state of the same structure; so the training losses since the last evaluations are in it, too.
        """
        losses = {key: [loss.total, loss.num_batches] for key, loss in self._losses.items() if loss.num_batches}
        return {'sizes': json.dumps({**self._subsets, LOSSES: losses} if losses else self._subsets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the subsets from a checkpoint; callbacks with the same tasks are matched in order."""
        stored = state.get('sizes', '{}')
        found = json.loads(stored) if isinstance(stored, str) else stored
        losses = found.pop(LOSSES, {}) if isinstance(found, dict) else {}
        self.loss.total, self.loss.num_batches = losses.get(self._subset_key, (0.0, 0))
        self._subsets.update(subsets_in(found))
        if self._subset_key in self._subsets:
            self.use_subset(self._subsets[self._subset_key])
        elif found and self.settings.time_budget is not None:
            log.warning(
                'time_budget: the checkpoint has no subset for these tasks, so a new one is chosen: scores before and '
                'after it are of different items'
            )

    def use_subset(self, sizes: Sizes) -> None:
        """Evaluate the subset of an earlier evaluation within a time budget, given its number of questions per task."""
        self._subsets[self._subset_key] = dict(sizes)
        if self.loader is not None:
            self.loader.settle(sizes)

    @property
    def sizes(self) -> Sizes | None:
        """Return the number of questions per task in the time budget's subset; None without a budget or subset yet."""
        return None if self.loader is None or self.loader.budget is None else self.loader.budget.sizes

    def folder(self, run_name: str) -> Path | None:
        """Return the folder of the records, None if there are none."""
        name = self.settings.save_folder
        return None if name is None else Path(name.replace('{run_name}', run_name))

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
        return state.dataloader is self.loader

    def _begin(self, state: State) -> None:
        loader, model = self.loader, self._model
        if loader is None or model is None:
            raise RuntimeError('an evaluation began before the Trainer had called before_load')
        self.records.wait(state)
        ending = self._ending
        ending.callback(loader.stop)
        loader.around_steps = partial(self._with_weights, state, loader)
        if self.settings.stall_seconds is not None:
            ending.enter_context(watchdog(self.settings.stall_seconds, loader.progress, loader.doing))
        if global_rank() == 0:
            ending.enter_context(progress_report(title_of(state), lambda: loader.work))
        ending.callback(restore_forward, model, vars(model).get('eval_forward'))
        vars(model)['eval_forward'] = run_step

    @contextmanager
    def _with_weights(self, state: State, loader: EvaluationLoop) -> Iterator[None]:
        """Run the steps of an evaluation in this context, with the weights that are there once it has begun.

        It is entered before the first step, after the EVAL_START of all callbacks, which may have changed the weights
        or replaced the network: these are the weights that score, and so those of the journal. It ends after the last
        step, before any callback's EVAL_END, which may change them back: by then no gathered copies may be left, and
        the scores are there for all callbacks.
        """
        # Composer would reset and log the metrics of the previous evaluation, which it was given.
        given = state.eval_metrics[self.label]
        state.eval_metrics[self.label] = dict(given)
        given.clear()
        model = composer_model_of(state.model)
        if loader.use(model) and not is_sharded(model.model):
            self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        loader.journal = self._journal(state)
        with weights_gathered(model.model) as is_gathered:
            loader.runner.language_model.in_step = not is_gathered
            yield
        self.evaluation = loader.finish()
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
        evaluation, batch = self.evaluation, state.timestamp.batch.value
        if self.loader is None or evaluation is None:
            raise RuntimeError('an evaluation ended before it began')
        if self.sizes is not None:
            self._subsets[self._subset_key] = self.sizes
        self.schedule.evaluated_batch = batch
        log_evaluation(state, logger, evaluation.logged, batch)
        log.info('%s: %s', title_of(state), summary(evaluation))
        folder = self.records.folder_of(state)
        if folder is not None:
            self._write(state, folder, evaluation)
            if self.schedule.event == Event.FIT_END:  # Composer has called `fit_end` before
                self.records.wait(state)
        self.loss.reset()
        if self.loader.journal is not None and self.loader.journal.problem is not None:
            log.warning('%s: %s', title_of(state), self.loader.journal.problem)

    def _journal(self, state: State) -> SharedJournal | None:
        """Return the journal of the current evaluation, beside its records."""
        folder = self.records.folder_of(state)
        if folder is None or self.loader is None or self.loader.is_finding_subset:
            return None
        prepared = self.loader.prepared
        if self._digest is None or self._digest[0] is not prepared:
            self._digest = prepared, digest_of_items(prepared)
        model = model_fingerprint(composer_model_of(state.model), is_sharded=state.fsdp_enabled)
        identity = identity_of(
            self.loader.prepared, items=self._digest[1], model=model, precision=state.precision.value
        )
        return SharedJournal(folder, identity, self.resuming)

    def _write(self, state: State, folder: Path, evaluation: Evaluation) -> None:
        training = None if self.source is None else self.source.training
        if state.max_duration is not None:
            training = TrainingPoint(
                batch=state.timestamp.batch.value,
                epoch=state.timestamp.epoch.value,
                token=state.timestamp.token.value,
                checkpoint=None,
                loss=self.loss.mean,
                loss_batches=self.loss.num_batches or None,
            )
        model = composer_model_of(state.model)
        journal = None if self.loader is None else self.loader.journal
        write = partial(
            write_records,
            folder,
            evaluation,
            model={
                **({'name': state.run_name} if self.source is None else self.source.record),
                'class': type(model.model).__name__,
                'num_parameters': self.num_parameters,
            },
            environment=environment(state),
            identity=None if journal is None else journal.identity,
            reused_items=0 if journal is None else len(journal.done),
            started=None if journal is None else journal.started,
            earlier_seconds=0.0 if journal is None else journal.earlier_seconds,
            time_budget=self.sizes,
        )
        # With items of an earlier attempt at the same weights, its results may be there already.
        is_resumed = journal is not None and bool(journal.done)

        def write_once(checkpoint: str | None) -> None:
            if is_resumed and is_recorded(folder, evaluation):
                log.info('finished already: %s', folder / RESULTS)
            else:
                at_checkpoint = training and checkpoint and replace(training, checkpoint=checkpoint)
                write(training=at_checkpoint or training)

        self.records.write(state, folder, write_once)


def title_of(state: State) -> str:
    """Return the name of an evaluation in messages, with the training batch of the model if it has one."""
    batch = state.timestamp.batch.value
    return 'gauntlet' if batch == 0 and state.max_duration is None else f'gauntlet ba{batch}'


def gauntlets_of(state: State) -> list[EvalGauntlet]:
    """Return the callbacks of this class in a Trainer, in order."""
    return [callback for callback in state.callbacks if isinstance(callback, EvalGauntlet)]


def check_folders(gauntlets: Sequence[EvalGauntlet], run_name: str) -> None:
    """Raise ConfigError if two callbacks would overwrite each other's records."""
    tasks_by_folder: dict[Path, str] = {}
    for number, gauntlet in enumerate(gauntlets, 1):
        folder = gauntlet.folder(run_name)
        if folder is None:
            continue
        tasks = f'EvalGauntlet {number} ({shortened(gauntlet.data.tasks)})'
        other = tasks_by_folder.setdefault(folder.resolve(), tasks)
        if other != tasks:
            raise ConfigError(
                f"save_folder: {other} and {tasks} would overwrite each other's records in {folder}; give each a "
                "folder of its own, such as save_folder='runs/{run_name}/gauntlet-2', or None for no records"
            )


def shortened(tasks: Iterable[str]) -> str:
    """Return the names of the first few tasks, and the number of the others."""
    names = list(tasks)
    further = f' and {len(names) - SHOWN_TASKS} more' if len(names) > SHOWN_TASKS else ''
    return f'{", ".join(names[:SHOWN_TASKS])}{further}'


def check_all_batches(state: State) -> None:
    """Raise ConfigError if the evaluation that begins is to run some of its batches only."""
    if state.dataloader_len is not None:
        raise ConfigError(SOME_BATCHES)


def callbacks_after(callback: Callback, state: State) -> list[Callback]:
    """Return the callbacks that Composer calls after this one."""
    return list(state.callbacks[state.callbacks.index(callback) + 1 :])


def prepares_at_fit_start(callback: Callback) -> bool:
    """Return whether FIT_START means something to a callback; Composer's saver only checks its folder then."""
    kind = type(callback)
    is_overridden = kind.fit_start is not Callback.fit_start or kind.run_event is not Callback.run_event
    return is_overridden and not isinstance(callback, (CheckpointSaver, LoggerDestination, EvalGauntlet))


def run_step(step: Step, outputs: Any = None) -> Results:
    """Run a step of an evaluation; replaces a model's `eval_forward`."""
    return step.run()


def restore_forward(model: HuggingFaceModel, forward: Any) -> None:
    """Restore the `eval_forward` that was set on the model itself, or else that of its class."""
    del vars(model)['eval_forward']
    if forward is not None:
        vars(model)['eval_forward'] = forward


def summary(evaluation: Evaluation) -> str:
    """Return the number of items, the seconds and the composites of an evaluation in one line."""
    num_items = sum(score.num_items for score in evaluation.scores.values())
    parts = [f'{plural(num_items, "item")} in {sum(evaluation.seconds.values()):.1f} s']
    if evaluation.composites is not None:
        composites = evaluation.composites.by_name.items()
        parts += [f'{name} {measure.value:.3f}' for name, measure in composites if measure.value is not None]
    return ', '.join(parts)
