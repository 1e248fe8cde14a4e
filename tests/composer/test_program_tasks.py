"""Code tasks in Composer's loop, on one rank."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import networks
import pytest
import tiny
from composer import Callback, Logger, State, Trainer
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from programs import sandbox

from llmfoundry_gauntlet import EvalGauntlet, build_icl_evaluators
from llmfoundry_gauntlet.composer.journal import SharedJournal
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation
from llmfoundry_gauntlet.metrics.keys import with_errors
from llmfoundry_gauntlet.scoring.code.execution import check_completion

METRICS = ('InContextLearningCodeEvalAccuracy', 'TruncatedShare', 'PassAt1', 'PassAt1StandardError', 'PassAt3')


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return one task whose programs a random model mostly gets right: they are comments."""
    sandbox()
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [tiny.write_programs(tmp_path)]}))
    return {'tasks': str(tmp_path / 'tasks.yaml'), 'data_root': str(tmp_path)}


ALL = {'log': ['accuracy', 'errors', 'metrics']}


def model() -> HuggingFaceModel:
    network = networks.network('llama', vocab_size=259, max_position_embeddings=128)
    return HuggingFaceModel(network, tokenizer=tiny.tokenizer())


def test_programs_run_beside_the_model_and_all_are_scored(settings, tmp_path):
    logger = InMemoryLogger()
    callback = EvalGauntlet(**settings, **ALL, max_seq_len=128, save_folder=str(tmp_path / 'records'))
    trainer = Trainer(model=model(), callbacks=[callback], loggers=[logger], device='cpu', progress_bar=False)
    trainer.eval()
    trainer.close()
    logged = {key: float(values[-1][1]) for key, values in logger.data.items()}
    results = callback.evaluation.results['programs/0-shot']
    assert [(result.key.row, result.key.sample) for result in results] == [(n, k) for n in range(6) for k in range(3)]
    problems = callback.data.examples['programs/0-shot']
    task = callback.data.suite.tasks[0]
    for result in results:  # each score is that of its text
        program = task.program(problems[result.key.row].content)
        assert result.score == check_completion(program, result.text, sandbox()).passed
    assert {result.score for result in results} == {0.0, 1.0}
    assert set(METRICS) <= {key.rsplit('/', 1)[1] for key in logged if key.startswith('metrics/programs/0-shot/')}
    share = sum(result.score for result in results) / len(results)
    accuracy = logged['metrics/programs/0-shot/InContextLearningCodeEvalAccuracy']
    assert accuracy == pytest.approx(share) == logged['metrics/programs/0-shot/PassAt1']
    assert logged['metrics/programs/0-shot/PassAt3'] >= accuracy
    (record,) = (tmp_path / 'records').rglob('results.json')
    assert json.loads(record.read_text())['config']['sandbox'] == str(sandbox())


def test_a_single_evaluator_gives_the_same_numbers(settings):
    network = model()
    tasks, data_root = settings['tasks'], settings['data_root']
    evaluators = build_icl_evaluators(tasks, network, data_root=data_root, max_seq_len=128, **ALL)
    trainer = Trainer(model=network, device='cpu', progress_bar=False)
    trainer.eval(evaluators)
    values = {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics['programs/0-shot'].items()}
    callback = EvalGauntlet(**settings, max_seq_len=128, save_folder=None)
    other = Trainer(model=model(), callbacks=[callback], device='cpu', progress_bar=False)
    other.eval()
    metrics = callback.evaluation.scores['programs/0-shot'].metrics
    assert values == {name: pytest.approx(value) for name, value in with_errors(metrics)}


class Broken(Exception):
    """Raised to end an evaluation."""


def in_background(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Run `work` in the thread of programs, before its first ones."""
    whole, waiting = PreparedEvaluation.results, [work]

    def results(self: PreparedEvaluation, outputs: Any) -> Any:
        if threading.current_thread().name.startswith('gauntlet-programs') and waiting:
            waiting.pop()()
        return whole(self, outputs)

    monkeypatch.setattr(PreparedEvaluation, 'results', results)


def fail() -> None:
    raise Broken


def test_failed_programs_do_not_affect_the_next_evaluation(settings, monkeypatch):
    in_background(monkeypatch, fail)
    callback = EvalGauntlet(**settings, max_seq_len=128, save_folder=None)
    trainer = Trainer(model=model(), callbacks=[callback], device='cpu', progress_bar=False)
    with pytest.raises(Broken):
        trainer.eval()
    callback.close(trainer.state, trainer.logger)
    trainer.eval()
    assert len(callback.evaluation.results['programs/0-shot']) == 18


@pytest.mark.filterwarnings('ignore:eval_dataloader label')
def test_an_evaluator_can_be_reused_after_failed_programs(settings, monkeypatch):
    in_background(monkeypatch, fail)
    network = model()
    evaluators = build_icl_evaluators(settings['tasks'], network, data_root=settings['data_root'], max_seq_len=128)
    trainer = Trainer(model=network, device='cpu', progress_bar=False)
    with pytest.raises(Broken):
        trainer.eval(evaluators)
    trainer.eval(evaluators)
    assert {float(trainer.state.eval_metrics['programs/0-shot'][METRICS[0]].compute())} - {0.0, 1.0}


class Ending(Callback):
    """End the first evaluation once programs are waiting, and let them continue in the second."""

    def __init__(self, gauntlet: EvalGauntlet, released: threading.Event) -> None:
        self.gauntlet = gauntlet
        self.released = released
        self.journals: list[SharedJournal] = []

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        loader = self.gauntlet.loader
        if loader.journal not in self.journals:
            self.journals.append(loader.journal)
        if len(self.journals) > 1:
            self.released.set()
        elif loader.running:
            raise Broken


def test_programs_of_a_failed_evaluation_are_not_in_the_next_journal(settings, tmp_path, monkeypatch):
    released = threading.Event()
    in_background(monkeypatch, lambda: released.wait() or None)
    written: list[tuple[SharedJournal, Any]] = []
    add = SharedJournal.add

    def noted(self: SharedJournal, results: Mapping[Any, Any], *, suspect: bool = False) -> None:
        if threading.current_thread().name.startswith('gauntlet-programs'):
            written.append((self, [*results]))
        add(self, results, suspect=suspect)

    monkeypatch.setattr(SharedJournal, 'add', noted)
    callback = EvalGauntlet(**settings, **ALL, max_seq_len=128, save_folder=str(tmp_path / 'records'))
    ending = Ending(callback, released)
    trainer = Trainer(model=model(), callbacks=[callback, ending], device='cpu', progress_bar=False)
    with pytest.raises(Broken):
        trainer.eval()
    callback.close(trainer.state, trainer.logger)
    trainer.eval()
    assert len(callback.evaluation.results['programs/0-shot']) == 18
    first, second = ending.journals
    assert written[0][0] is first and [journal for journal, _ in written[1:]] == [second] * (len(written) - 1)
