"""The evaluation of a training run, whatever trains: load tasks and data once, evaluate any number of times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from llmfoundry_gauntlet.config.resources import path_problem
from llmfoundry_gauntlet.config.settings import EvaluationSettings, GauntletOptions
from llmfoundry_gauntlet.engine.model import is_sharded
from llmfoundry_gauntlet.errors import ConfigError, duration, plural
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_inputs
from llmfoundry_gauntlet.evaluation.run import Evaluation, PreparedEvaluation
from llmfoundry_gauntlet.evaluation.subsets import Sizes
from llmfoundry_gauntlet.evaluation.suite import watched_scores
from llmfoundry_gauntlet.metrics.alerts import Alert
from llmfoundry_gauntlet.results.files import RESULTS, check_writable, is_recorded, write_records
from llmfoundry_gauntlet.runtime.alerts import AlertHistory
from llmfoundry_gauntlet.runtime.checks import check_same_on_all_ranks, check_step, claim_folder, what_is_evaluated
from llmfoundry_gauntlet.runtime.distributed import gather, global_rank, on_first_rank, raised_on_all_ranks
from llmfoundry_gauntlet.runtime.gathered import weights_gathered
from llmfoundry_gauntlet.runtime.journal import (
    Resuming,
    SharedJournal,
    digest_of_items,
    identity_of,
    model_fingerprint,
)
from llmfoundry_gauntlet.runtime.loop import EvaluationLoop, Step
from llmfoundry_gauntlet.runtime.precision import ambient_precision
from llmfoundry_gauntlet.runtime.progress import progress_report
from llmfoundry_gauntlet.runtime.records import CheckpointOf, Records, Write, environment, no_checkpoint
from llmfoundry_gauntlet.runtime.runner import EvaluatedModel, prepare_for_model
from llmfoundry_gauntlet.runtime.trained_model import (
    check_logits,
    device_of,
    evaluated_model,
    num_parameters_of,
)
from llmfoundry_gauntlet.runtime.unchanged import autocast_casts_dropped, evaluation_mode, random_states_kept
from llmfoundry_gauntlet.runtime.watchdog import check_timeout, watchdog
from llmfoundry_gauntlet.types import TrainingPoint

log = logging.getLogger(__name__)

RUN_NAME = '{run_name}'  # in save_folder
OnAlert = Callable[[Alert], object]


class Gauntlet:
    """Evaluate a model on the same items, again and again while it is trained, on all ranks of a job.

        gauntlet = Gauntlet(tasks='yamls/tasks/gauntlet_v0.1.yaml', gauntlet='yamls/gauntlets/eval_gauntlet_v0.1.yaml')
        evaluation = gauntlet.evaluate(model, tokenizer, step=1000)

    The settings are the fields of EvaluationSettings except `interval`; `run_name` replaces {run_name} in
    `save_folder`, and without a name there are no records in such a folder. Tasks and data are loaded and validated by
    the constructor; raise ConfigError or DataError with every problem found.

    `on_alert` is called on every rank with each Alert of an evaluation at a step, after it is logged and recorded; what
    it raises is raised by `evaluate`.
    """

    def __init__(
        self, *, run_name: str | None = None, on_alert: OnAlert | None = None, **settings: Unpack[GauntletOptions]
    ) -> None:
        if 'interval' in settings:  # which EvaluationSettings has for the callback
            raise ConfigError(
                'Gauntlet: interval: only applies in the callback EvalGauntlet; here call evaluate when it is due'
            )
        self._start(load_inputs(settings, 'Gauntlet'), run_name, on_alert)

    @classmethod
    def from_data(cls, data: EvaluationData, *, run_name: str | None = None) -> Gauntlet:
        """Return a Gauntlet of tasks and data that are loaded already, with the settings that they were loaded for."""
        gauntlet = cls.__new__(cls)
        gauntlet._start(data, run_name)
        return gauntlet

    def _start(self, data: EvaluationData, run_name: str | None, on_alert: OnAlert | None = None) -> None:
        self.data = data
        self.run_name = run_name
        self.save_folder = data.settings.save_folder  # a trainer may have a better place than the default
        self.evaluation: Evaluation | None = None  # the latest
        self.loop: EvaluationLoop | None = None  # once the items are prepared
        self.records = Records(None)  # with a folder once the items are prepared
        self.resuming = Resuming()  # how to treat an interrupted evaluation in the same folder
        self.num_parameters: int | None = None  # of the whole model; None: not known
        self.on_alert = on_alert
        self.alert_history = AlertHistory(None, ())  # of the folder of records once the items are prepared
        self._tokenizer: Any = None  # that the items are prepared with
        self._latest_step: int | None = None  # of an evaluation by `evaluate`
        self._digest: tuple[PreparedEvaluation, str] | None = None  # digest of all items
        for warning in data.warnings:
            log.warning(warning)

    @property
    def settings(self) -> EvaluationSettings:
        """Return the settings."""
        return self.data.settings

    @property
    def folder(self) -> Path | None:
        """Return the folder of the records, None if there are none."""
        name = self.save_folder
        if name is None or (RUN_NAME in name and self.run_name is None):
            return None
        return Path(name.replace(RUN_NAME, self.run_name or ''))

    @property
    def sizes(self) -> Sizes | None:
        """Return the number of questions per task in the time budget's subset; None without a budget or subset yet."""
        return None if self.loop is None else self.loop.sizes

    def prepare(self, model: Any, tokenizer: Any, *, checkpoint_of: CheckpointOf = no_checkpoint) -> None:
        """Tokenize the items and check that the model can run them; `evaluate` does so if it has not been done.

        `checkpoint_of` returns the checkpoint that was saved at a batch, for the records. All ranks must call this.
        Raise ConfigError if their settings, tasks or data differ, or if another Gauntlet writes to the same folder, and
        ModelError. Raise RuntimeError if a launcher has started several ranks and there is no process group.
        """
        with raised_on_all_ranks():  # else the other ranks would wait for one that cannot run the items
            subject = evaluated_model(model, tokenizer)
            if self.folder is not None:
                claim_folder(self.folder, self, what_is_evaluated(self.data))
        self.prepare_items(subject, checkpoint_of=checkpoint_of)
        check_logits(subject.model)

    def prepare_items(self, subject: EvaluatedModel, *, checkpoint_of: CheckpointOf = no_checkpoint) -> None:
        """Tokenize the items, without a forward: the model may not be on its device yet. Raise as `prepare` does."""
        with raised_on_all_ranks():
            prepared = prepare_for_model(self.data, subject)
        check_same_on_all_ranks(prepared)
        self.use_prepared(prepared, subject)
        for reason in dict.fromkeys(self.data.unsupported.values()):
            tasks = [task for task, reason_of_task in self.data.unsupported.items() if reason_of_task == reason]
            log.warning('%s; left out: %s', reason, ', '.join(tasks))
        if self.data.sandbox is not None:
            log.info('programs: %s', self.data.sandbox)
        if self.settings.stall_seconds is not None:
            check_timeout(self.settings.stall_seconds)
        self._open_records(checkpoint_of)
        watched = watched_scores(self.data.suite, self.settings.alert_on)
        self.alert_history = AlertHistory(self.records.folder, watched)
        log.info(
            'gauntlet: %s, %s; max_seq_len %d',
            plural(len(prepared.tasks), 'task'),
            plural(prepared.num_items, 'item'),
            prepared.max_seq_len,
        )

    def use_prepared(self, prepared: PreparedEvaluation, model: EvaluatedModel) -> None:
        """Evaluate items that are tokenized already, first those of this model."""
        self.data = prepared.data  # without tasks whose programs cannot run here
        self.loop = EvaluationLoop(prepared, model)
        self._tokenizer = model.tokenizer
        if self.num_parameters is None:
            self.num_parameters = num_parameters_of(model.model)

    def _open_records(self, checkpoint_of: CheckpointOf) -> None:
        folder = self.folder
        if folder is None:
            if self.save_folder is not None:
                log.info('no records are written: save_folder is %s, without a run_name', self.save_folder)
            return
        if problem := path_problem(str(folder)):
            raise ConfigError(f'save_folder: {problem}; shorten run_name, or give another save_folder')
        on_first_rank(partial(check_writable, folder))
        self.records = Records(folder, checkpoint_of)

    def evaluate(self, model: Any, tokenizer: Any, *, step: int | None = None) -> Evaluation:
        """Evaluate a model at a step of its training, and write the records to `ba{step}` in the folder of records.

        `model` is a Hugging Face causal language model, or any torch module that works like one (`config`, and a
        forward that takes `input_ids` and returns `logits`), also in DistributedDataParallel, sharded by FSDP, or
        compiled. It computes in the autocast around this call. Weights, modes, hooks and random states are bitwise as
        before afterwards, also after an error or an interrupt.

        All ranks must call this; each gets the result. An interrupted evaluation of the same weights at this step is
        resumed. Records that cannot be written are a warning, without `step` an error (RecordError). The metrics for
        loggers are `evaluation.logged`. Raise as `prepare` does, and ValueError for a step before the latest.
        """
        training = None
        if step is not None:
            check_step(step, self._latest_step)
            self._latest_step = step
            training = TrainingPoint(batch=step, epoch=None, token=None, checkpoint=None)
        evaluation = self.evaluate_at(training, model, tokenizer)
        self.records.wait()
        self.announce_alerts(evaluation)
        return evaluation

    def evaluate_at(self, training: TrainingPoint | None, model: Any, tokenizer: Any) -> Evaluation:
        """Evaluate a model at a point of its training, for a trainer that saves a checkpoint of it afterwards.

        The records are written by `records.begin` or `records.wait`, once the checkpoint is there; then it is time for
        `announce_alerts`. All else is as in `evaluate`.
        """
        with raised_on_all_ranks():
            subject = evaluated_model(model, tokenizer)
        step = None if training is None else training.batch
        is_unprepared = self.loop is None or self._tokenizer is not tokenizer
        steps, unprepared = zip(*gather((step, is_unprepared)), strict=True)
        if len(set(steps)) > 1:
            raise ConfigError(f'step: the ranks evaluate at different steps: {", ".join(map(str, steps))}')
        if any(unprepared):  # preparing contains collectives: if one rank needs it, all take part
            self.prepare(model, tokenizer)

        device = device_of(subject.model)
        precision = ambient_precision(device)
        title = 'gauntlet' if step is None else f'gauntlet step {step}'
        self.records.wait()
        folder = self.records.folder_of(step)
        evaluation = self.run(subject, folder=folder, title=title, precision=precision, step=step)
        log.info('%s: %s', title, summary(evaluation))
        if folder is not None:
            description = {'name': self.run_name, **self.description(subject.model)}
            write = self.writer(evaluation, folder, description, environment(device, precision), training)
            self.records.write(step, folder, write)
        return evaluation

    def run(
        self, model: EvaluatedModel, *, folder: Path | None, title: str, precision: str, step: int | None = None
    ) -> Evaluation:
        """Run all items through the model and return the scores, the same on every rank; nothing is logged or written.

        The journal of the evaluation is in `folder`; `title` names it in messages about its progress. At a `step` of
        training the scores are compared with those of earlier steps.
        """
        steps = self.steps(model, folder=folder, title=title, precision=precision, step=step)
        with closing(steps):
            for part in steps:
                part.run()
        assert self.evaluation is not None  # set after the last step
        return self.evaluation

    def steps(
        self, model: EvaluatedModel, *, folder: Path | None, title: str, precision: str, step: int | None = None
    ) -> Generator[Step, None, None]:
        """Yield the steps of `run`, for a caller that runs them in its own loop; `evaluation` is then the result.

        The caller must close the generator, also after an error: until then the evaluation is watched.
        """
        self.evaluation = None
        loop = self._loop
        with ExitStack() as ending:
            ending.callback(loop.stop)
            ending.enter_context(random_states_kept())
            ending.enter_context(evaluation_mode(model.model))
            ending.enter_context(autocast_casts_dropped())
            ending.enter_context(torch.no_grad())
            if self.settings.stall_seconds is not None:
                ending.enter_context(watchdog(self.settings.stall_seconds, loop.progress, loop.doing))
            if global_rank() == 0:
                ending.enter_context(progress_report(title, lambda: loop.work))
            # The model that is there now is evaluated: a trainer may have changed the weights, or replaced the network.
            if loop.use(model) and not is_sharded(model.model):
                self.num_parameters = num_parameters_of(model.model)
            loop.journal = self._journal(model, folder, precision)
            with weights_gathered(model.model) as is_gathered:
                loop.runner.language_model.in_step = not is_gathered
                yield from loop
            evaluation = loop.finish()
        self.evaluation = evaluation if step is None else self._with_alerts(evaluation, step, title)
        if loop.journal is not None and loop.journal.problem is not None:
            log.warning('%s: %s', title, loop.journal.problem)

    def _with_alerts(self, evaluation: Evaluation, step: int, title: str) -> Evaluation:
        """Return an evaluation with its alerts, on which the first rank decides for all."""
        if not self.alert_history.names:
            return evaluation
        alerts = on_first_rank(partial(self.alert_history.alerts_of, evaluation, step))
        if global_rank() == 0:
            for alert in alerts or ():
                log.warning('%s: alert: %s', title, alert)
        return replace(evaluation, alerts=alerts)

    def announce_alerts(self, evaluation: Evaluation) -> None:
        """Call `on_alert` with each alert of an evaluation that is logged and recorded."""
        if self.on_alert is not None:
            for alert in evaluation.alerts or ():
                self.on_alert(alert)

    @property
    def _loop(self) -> EvaluationLoop:
        if self.loop is None:
            raise RuntimeError('an evaluation began before its items were prepared')
        return self.loop

    def _journal(self, model: EvaluatedModel, folder: Path | None, precision: str) -> SharedJournal | None:
        """Return the journal of the current evaluation, beside its records."""
        if folder is None:
            return None
        prepared = self._loop.everything  # of which a time budget's subset is chosen, or resumed, in the first step
        weights = model_fingerprint(model.model, is_sharded=is_sharded(model.model))
        items = self._digest_of(prepared)
        identity = identity_of(prepared, items=items, model=weights, precision=precision)
        return SharedJournal(folder, identity, self.resuming)

    def _digest_of(self, prepared: PreparedEvaluation) -> str:
        """Return the digest of all items, which is computed once for all evaluations of the same items."""
        if self._digest is None or self._digest[0] is not prepared:
            self._digest = prepared, digest_of_items(prepared)
        _, digest = self._digest
        return digest

    def use_subset(self, sizes: Sizes) -> None:
        """Evaluate the subset of an earlier evaluation within a time budget, given its number of questions per task."""
        self._loop.use_subset(sizes)

    def use_latest_subset(self) -> None:
        """Evaluate the subset that an earlier job's time budget has chosen, if it recorded one, in the same folder."""
        sizes = self.records.latest_sizes()
        if sizes is not None:
            self.use_subset(sizes)

    def description(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return what results.json says of a model besides its name."""
        return {'class': type(model).__name__, 'num_parameters': self.num_parameters}

    def writer(
        self,
        evaluation: Evaluation,
        folder: Path,
        model: Mapping[str, Any],
        environment: Mapping[str, Any],
        training: TrainingPoint | None,
    ) -> Write:
        """Return a function that writes the records of the latest evaluation, given the name of its checkpoint."""
        journal = self._loop.journal
        write = partial(
            write_records,
            folder,
            evaluation,
            model=model,
            environment=environment,
            identity=None if journal is None else journal.identity,
            reused_items=0 if journal is None else journal.num_reused,
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

        return write_once


def summary(evaluation: Evaluation) -> str:
    """Return the number of items, the seconds and the composites of an evaluation in one line."""
    num_items = sum(score.num_items for score in evaluation.scores.values())
    seconds = sum(evaluation.seconds.values())
    parts = [f'{plural(num_items, "item")} in {duration(seconds)}']
    if evaluation.composites is not None:
        for name, measure in evaluation.composites.by_name.items():
            if measure.value is not None:
                parts.append(f'{name} {measure.value:.3f}')
    return ', '.join(parts)
