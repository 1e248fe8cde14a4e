"""Generation and code tasks in Composer's loop, on one rank."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networks
import pytest
import tiny
from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from programs import sandbox

from llmfoundry_gauntlet import EvalGauntlet, build_icl_evaluators
from llmfoundry_gauntlet.engine.decoding import end_ids
from llmfoundry_gauntlet.engine.model import Budget
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation
from llmfoundry_gauntlet.metrics.keys import with_errors
from llmfoundry_gauntlet.runtime import runner
from llmfoundry_gauntlet.runtime.journal import SharedJournal
from llmfoundry_gauntlet.runtime.plan_run import PlanRun
from llmfoundry_gauntlet.scoring.code.execution import check_completion

ALL = ['accuracy', 'errors', 'metrics']
METRICS = ('InContextLearningGenerationExactMatchAccuracy', 'StrictMatch', 'NumericMatch', 'TruncatedShare')
CODE_METRICS = ('InContextLearningCodeEvalAccuracy', 'TruncatedShare', 'PassAt1', 'PassAt1StandardError', 'PassAt3')


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings with only the two generation tasks."""
    return {'tasks': tiny.write_riddles(tmp_path, num_rows=20), 'data_root': str(tmp_path)}


def small(family: str) -> Any:
    return networks.network(family, vocab_size=259, max_position_embeddings=128)


def evaluate(settings: dict[str, Any], model: HuggingFaceModel) -> tuple[EvalGauntlet, dict[str, float]]:
    """Return the callback after `Trainer.eval`, and what was logged."""
    logger = InMemoryLogger()
    callback = EvalGauntlet(**{'max_seq_len': 128, 'save_folder': None, 'log': ALL, **settings})
    trainer = Trainer(model=model, callbacks=[callback], loggers=[logger], device='cpu', progress_bar=False)
    trainer.eval()
    trainer.close()
    return callback, {key: float(values[-1][1]) for key, values in logger.data.items()}


def test_an_evaluation_of_only_generation_tasks(settings, caplog):
    with caplog.at_level(logging.INFO, 'llmfoundry_gauntlet'):
        callback, logged = evaluate(settings, tiny.composer_model())
    said = [record.message for record in caplog.records if 'probe' in record.message]
    assert len(said) == 1
    assert said[0].startswith('generation: key-value cache, prompts in a token stream (probe: 8 generations within ')
    for task in ('greedy/1-shot', 'drawn/1-shot'):
        assert all(0 <= logged[f'metrics/{task}/{metric}'] <= 1 for metric in METRICS)
    results = [result for results in callback.evaluation.results.values() for result in results]
    assert len(results) == 40 == logged['gauntlet/items']
    assert all(result.text is not None and result.status == 'scored' for result in results)
    assert not any(stop in result.text for result in results for stop in 'aeiou')
    cut = sum(result.metrics['TruncatedShare'] for result in callback.evaluation.results['greedy/1-shot'])
    assert logged['metrics/greedy/1-shot/TruncatedShare'] == pytest.approx(cut / 20)
    assert logged['gauntlet/seconds/drawn/1-shot'] > 0


def test_chosen_budgets_are_recorded_and_used_again(settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Records of another version, without one of the numbers, are replaced."""
    folder = tmp_path / 'records'

    def budgets(chosen: Budget) -> tuple[int | None, ...]:
        """Return the tokens and requests per batch when these would be chosen for a new evaluation."""
        monkeypatch.setattr(runner, 'automatic_budget', lambda *_, **__: chosen)
        evaluate({**settings, 'save_folder': str(folder)}, tiny.composer_model())
        record = json.loads((folder / 'results.json').read_text())
        names = ('tokens_per_batch', 'generation_tokens_per_batch', 'requests_per_batch')
        return tuple(record['config'][name] for name in names)

    assert budgets(Budget(scoring=300, generation=150, requests=7)) == (300, 150, 7)
    assert budgets(Budget(scoring=90, generation=80, requests=9)) == (300, 150, 7)
    record = json.loads((folder / 'results.json').read_text())
    del record['identity']['requests_per_batch']
    (folder / 'results.json').write_text(json.dumps(record))
    assert budgets(Budget(scoring=90, generation=80, requests=9)) == (90, 80, 9)
    timing = json.loads((folder / 'results.json').read_text())['timing']
    assert timing['reused_items'] == 0


def test_a_model_without_a_cache_generates_and_logs_it(settings, caplog):
    with caplog.at_level(logging.INFO, 'llmfoundry_gauntlet'):
        callback, _ = evaluate(settings, tiny.composer_model(small('mamba')))
    assert any('no cache, whole rows at every token' in record.message for record in caplog.records)
    assert len(callback.evaluation.results['greedy/1-shot']) == 20


def test_without_eos_generations_reach_their_limit(settings, tmp_path: Path):
    task = settings['tasks'][0]
    del task['early_stopping_criteria']
    bare = tiny.tokenizer()
    bare.eos_token = bare.pad_token = None
    network = small('llama')
    network.generation_config.eos_token_id = None
    callback, _ = evaluate({**settings, 'tasks': [task]}, HuggingFaceModel(network, tokenizer=bare))
    results = callback.evaluation.results['greedy/1-shot']
    assert {result.num_tokens for result in results} == {(9,)}
    assert {result.metrics['TruncatedShare'] for result in results} == {1.0}


@pytest.mark.parametrize(
    ('count', 'semantics', 'problem'),
    [
        (128, 'corrected', r'a generation may have 128 tokens .* max_seq_len is 128'),
        # llm-foundry's truncation leaves room only for the longest answer, so that 127 tokens may exceed 128.
        (127, 'reference', r'a prompt of \d+ tokens and a generation of 127 make .* 128'),
    ],
)
def test_a_generation_beyond_the_positions_is_an_error(settings, count: int, semantics: str, problem: str):
    settings['tasks'][0]['generation_kwargs'] = {'max_new_tokens': count}
    settings['semantics'] = semantics
    with pytest.raises(ModelError, match=f'greedy/1-shot: {problem}'):
        evaluate(settings, tiny.composer_model())
    if semantics == 'reference':
        _, logged = evaluate(settings, tiny.composer_model(small('mpt')))  # whose positions have no end
        assert 0 <= logged[f'metrics/greedy/1-shot/{METRICS[0]}'] <= 1


@pytest.mark.parametrize(('own', 'expected'), [(None, {7}), (9, {7, 9}), ([8, 9], {7, 8, 9})])
def test_generation_config_names_further_end_tokens(own, expected):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=own))
    assert end_ids(SimpleNamespace(eos_token_id=7), model, reference=False) == expected
    assert end_ids(SimpleNamespace(eos_token_id=7), model, reference=True) == {7}
    assert end_ids(SimpleNamespace(eos_token_id=None), model, reference=True) == set()


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, Any]:
    """Return one task whose programs a random model mostly gets right: they are comments."""
    sandbox()
    return {'tasks': [tiny.write_programs(tmp_path)], 'data_root': str(tmp_path)}


def test_programs_run_beside_the_model_and_all_are_scored(programs, tmp_path):
    callback, logged = evaluate({**programs, 'save_folder': str(tmp_path / 'records')}, tiny.composer_model())
    results = callback.evaluation.results['programs/0-shot']
    assert [(result.key.row, result.key.sample) for result in results] == [(n, k) for n in range(6) for k in range(3)]
    problems = callback.data.examples['programs/0-shot']
    task = callback.data.suite.tasks[0]
    for result in results:  # each score is that of its text
        program = task.program(problems[result.key.row].content)
        assert result.score == check_completion(program, result.text, sandbox()).passed
    assert {result.score for result in results} == {0.0, 1.0}
    assert set(CODE_METRICS) <= {key.rsplit('/', 1)[1] for key in logged if key.startswith('metrics/programs/0-shot/')}
    share = sum(result.score for result in results) / len(results)
    accuracy = logged['metrics/programs/0-shot/InContextLearningCodeEvalAccuracy']
    assert accuracy == pytest.approx(share) == logged['metrics/programs/0-shot/PassAt1']
    assert logged['metrics/programs/0-shot/PassAt3'] >= accuracy
    (record,) = (tmp_path / 'records').rglob('results.json')
    assert json.loads(record.read_text())['config']['sandbox'] == str(sandbox())


class Broken(Exception):
    """Raised to end an evaluation."""


def in_background(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Run `work` in the thread of programs, before its first ones."""
    whole, waiting = PreparedEvaluation.results, [work]

    def results(self: PreparedEvaluation, *arguments: Any) -> Any:
        if threading.current_thread().name.startswith('gauntlet-programs') and waiting:
            waiting.pop()()
        return whole(self, *arguments)

    monkeypatch.setattr(PreparedEvaluation, 'results', results)


def fail() -> None:
    raise Broken


@pytest.mark.filterwarnings('ignore:eval_dataloader label')
def test_a_single_evaluator_gives_the_numbers_of_the_callback_also_after_failed_programs(programs, monkeypatch):
    network = tiny.composer_model()
    tasks, data_root = programs['tasks'], programs['data_root']
    evaluators = build_icl_evaluators(tasks, network, data_root=data_root, max_seq_len=128, log=ALL)
    trainer = Trainer(model=network, device='cpu', progress_bar=False)
    with monkeypatch.context() as patch, pytest.raises(Broken):
        in_background(patch, fail)
        trainer.eval(evaluators)
    trainer.eval(evaluators)
    values = {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics['programs/0-shot'].items()}
    callback, _ = evaluate(programs, tiny.composer_model())
    metrics = callback.evaluation.scores['programs/0-shot'].metrics
    assert values == {name: pytest.approx(value) for name, value in with_errors(metrics)}


def test_programs_of_a_failed_evaluation_are_not_in_the_next_journal(programs, tmp_path, monkeypatch):
    """The first evaluation ends while programs are waiting, which continue in the second."""
    released, journals, written = threading.Event(), [], []
    collect, add = PlanRun._collect, SharedJournal.add

    def fail_at_first(plan_run: PlanRun) -> Any:
        journals.append(plan_run.writer.journal)
        if len(journals) == 1:
            raise Broken
        released.set()
        return collect(plan_run)

    def noted(journal: SharedJournal, results: Any, **keys: Any) -> None:
        if threading.current_thread().name.startswith('gauntlet-programs'):
            written.append(journal)
        add(journal, results, **keys)

    in_background(monkeypatch, lambda: released.wait() or None)
    monkeypatch.setattr(PlanRun, '_collect', fail_at_first)
    monkeypatch.setattr(SharedJournal, 'add', noted)
    callback = EvalGauntlet(**programs, max_seq_len=128, save_folder=str(tmp_path / 'records'))
    trainer = Trainer(model=tiny.composer_model(), callbacks=[callback], device='cpu', progress_bar=False)
    with pytest.raises(Broken):
        trainer.eval()
    callback.close(trainer.state, trainer.logger)
    trainer.eval()
    assert len(callback.evaluation.results['programs/0-shot']) == 18
    assert written[0] is journals[0] and {*written[1:]} == {journals[1]}
