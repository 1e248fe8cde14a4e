"""Generation and code tasks in Composer's loop, on one rank."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import composer_training
import networks
import pytest
import tiny
from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from forks import wait_until
from programs import sandbox

from llmfoundry_gauntlet import EvalGauntlet, build_icl_evaluators
from llmfoundry_gauntlet.engine.decoding import end_ids
from llmfoundry_gauntlet.engine.model import Budget
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.metrics.keys import with_errors
from llmfoundry_gauntlet.runtime import runner
from llmfoundry_gauntlet.runtime.journal import SharedJournal
from llmfoundry_gauntlet.runtime.plan_run import PlanRun
from llmfoundry_gauntlet.runtime.writer import ResultWriter
from llmfoundry_gauntlet.scoring.code.execution import check_completion
from llmfoundry_gauntlet.types import Generation, ItemResult

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
        callback, logged = evaluate(settings, composer_training.composer_model())

    # Right generations are scored.
    scoring, generation = [message for message in caplog.messages if 'probe' in message]
    assert scoring.startswith('scoring: token stream (probe: ')
    assert generation.startswith('generation: key-value cache, prompts in a token stream (probe: 8 generations within ')
    for task in ('greedy/1-shot', 'drawn/1-shot'):
        assert all(0 <= logged[f'metrics/{task}/{metric}'] <= 1 for metric in METRICS)
        assert logged[f'metrics/{task}/GoldBitsPerByte'] > 0
    results = [result for results in callback.evaluation.results.values() for result in results]
    assert len(results) == logged['gauntlet/items'] == 40
    assert all(result.text is not None for result in results)
    assert all(result.status == 'scored' for result in results)
    assert not any(stop in result.text for result in results for stop in 'aeiou')
    greedy_results = callback.evaluation.results['greedy/1-shot']
    num_truncated = sum(result.metrics['TruncatedShare'] for result in greedy_results)
    assert logged['metrics/greedy/1-shot/TruncatedShare'] == pytest.approx(num_truncated / 20)
    assert logged['gauntlet/seconds/drawn/1-shot'] > 0


@pytest.fixture
def recorded_budget(settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Budget], Budget]:
    """Return a function that evaluates where a budget would be chosen, and returns the one in the records."""

    def evaluate_and_read(chosen: Budget) -> Budget:
        monkeypatch.setattr(runner, 'automatic_budget', lambda *_, **__: chosen)
        evaluate({**settings, 'save_folder': str(tmp_path / 'records')}, composer_training.composer_model())
        config = tiny.record(tmp_path / 'records')['config']
        return Budget(
            scoring=config['tokens_per_batch'],
            generation=config['generation_tokens_per_batch'],
            requests=config['requests_per_batch'],
        )

    return evaluate_and_read


FIRST_BUDGET = Budget(scoring=300, generation=150, requests=7)
OTHER_BUDGET = Budget(scoring=90, generation=80, requests=9)


def test_a_chosen_budget_is_recorded_and_used_again(recorded_budget):
    assert recorded_budget(FIRST_BUDGET) == FIRST_BUDGET
    assert recorded_budget(OTHER_BUDGET) == FIRST_BUDGET


def test_records_of_another_version_without_a_part_of_the_budget_are_replaced(recorded_budget, tmp_path: Path):
    recorded_budget(FIRST_BUDGET)
    record = tiny.record(tmp_path / 'records')
    del record['identity']['requests_per_batch']
    (tmp_path / 'records' / 'results.json').write_text(json.dumps(record))

    assert recorded_budget(OTHER_BUDGET) == OTHER_BUDGET
    assert tiny.record(tmp_path / 'records')['timing']['reused_items'] == 0


def test_a_model_without_a_cache_generates_and_logs_it(settings, caplog):
    with caplog.at_level(logging.INFO, 'llmfoundry_gauntlet'):
        callback, _ = evaluate(settings, composer_training.composer_model(small('mamba')))
    assert any('no cache, whole rows at every token' in record.message for record in caplog.records)
    assert len(callback.evaluation.results['greedy/1-shot']) == 20


def test_without_eos_generations_reach_their_limit(settings, tmp_path: Path):
    task = settings['tasks'][0]
    del task['early_stopping_criteria']
    tokenizer_without_eos = tiny.tokenizer()
    tokenizer_without_eos.eos_token = tokenizer_without_eos.pad_token = None
    network = small('llama')
    network.generation_config.eos_token_id = None
    model = HuggingFaceModel(network, tokenizer=tokenizer_without_eos)

    callback, _ = evaluate({**settings, 'tasks': [task]}, model)

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
        evaluate(settings, composer_training.composer_model())


def test_generations_of_the_reference_may_be_longer_where_positions_have_no_end(settings):
    settings['tasks'][0]['generation_kwargs'] = {'max_new_tokens': 127}
    settings['semantics'] = 'reference'

    _, logged = evaluate(settings, composer_training.composer_model(small('mpt')))

    assert 0 <= logged[f'metrics/greedy/1-shot/{METRICS[0]}'] <= 1


def end_ids_of(*, tokenizer: int | None, model: Any, reference: bool) -> set[int]:
    """Return the end tokens, given those of the tokenizer and of the model's generation_config."""
    network = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=model))
    return end_ids(SimpleNamespace(eos_token_id=tokenizer), network, reference=reference)


@pytest.mark.parametrize(
    ('model', 'expected'),
    [
        (None, {7}),
        (9, {7, 9}),
        ([8, 9], {7, 8, 9}),
    ],
)
def test_generation_config_names_further_end_tokens(model, expected: set[int]):
    assert end_ids_of(tokenizer=7, model=model, reference=False) == expected


@pytest.mark.parametrize('model', [None, 9, [8, 9]])
def test_reference_semantics_have_only_the_end_token_of_the_tokenizer(model):
    assert end_ids_of(tokenizer=7, model=model, reference=True) == {7}
    assert end_ids_of(tokenizer=None, model=model, reference=True) == set()


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, Any]:
    """Return one task whose programs a random model mostly gets right: they are comments."""
    sandbox()
    return {'tasks': [tiny.write_programs(tmp_path)], 'data_root': str(tmp_path)}


def test_programs_run_beside_the_model_and_each_score_is_that_of_its_text(programs):
    callback, _ = evaluate(programs, composer_training.composer_model())

    results = callback.evaluation.results['programs/0-shot']
    expected_keys = [(row, sample) for row in range(6) for sample in range(3)]
    assert [(result.key.row, result.key.sample) for result in results] == expected_keys
    task = callback.data.suite.tasks[0]
    problems = callback.data.examples['programs/0-shot']
    for result in results:
        program = task.program(problems[result.key.row].content)
        assert result.score == check_completion(program, result.text, sandbox()).passed
    assert {result.score for result in results} == {0.0, 1.0}


def test_metrics_of_programs_are_logged_and_the_sandbox_is_recorded(programs, tmp_path):
    callback, logged = evaluate(
        {**programs, 'save_folder': str(tmp_path / 'records')}, composer_training.composer_model()
    )

    prefix = 'metrics/programs/0-shot/'
    assert set(CODE_METRICS) <= {key.rsplit('/', 1)[1] for key in logged if key.startswith(prefix)}
    results = callback.evaluation.results['programs/0-shot']
    share_passed = sum(result.score for result in results) / len(results)
    assert logged[f'{prefix}InContextLearningCodeEvalAccuracy'] == pytest.approx(share_passed)
    assert logged[f'{prefix}PassAt1'] == pytest.approx(share_passed)
    assert logged[f'{prefix}PassAt3'] >= logged[f'{prefix}InContextLearningCodeEvalAccuracy']
    (path,) = (tmp_path / 'records').rglob('results.json')
    assert json.loads(path.read_text())['config']['sandbox'] == str(sandbox())


class Broken(Exception):
    """Raised to end an evaluation."""


def in_background(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Run `work` in the thread of the first program, before it."""
    whole, waiting = ResultWriter.score_program, [work]

    def score_program(writer: ResultWriter, generation: Generation) -> ItemResult:
        if waiting:
            waiting.pop()()
        return whole(writer, generation)

    monkeypatch.setattr(ResultWriter, 'score_program', score_program)


def fail() -> None:
    raise Broken


@pytest.mark.filterwarnings('ignore:eval_dataloader label')
def test_a_single_evaluator_gives_the_numbers_of_the_callback_also_after_failed_programs(programs, monkeypatch):
    network = composer_training.composer_model()
    tasks, data_root = programs['tasks'], programs['data_root']
    evaluators = build_icl_evaluators(tasks, network, data_root=data_root, max_seq_len=128, log=ALL)
    trainer = Trainer(model=network, device='cpu', progress_bar=False)
    with monkeypatch.context() as patch, pytest.raises(Broken):
        in_background(patch, fail)
        trainer.eval(evaluators)
    trainer.eval(evaluators)
    values = {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics['programs/0-shot'].items()}
    callback, _ = evaluate(programs, composer_training.composer_model())
    metrics = callback.evaluation.scores['programs/0-shot'].metrics
    assert values == {name: pytest.approx(value) for name, value in with_errors(metrics)}


def test_programs_of_a_failed_evaluation_are_not_in_the_next_journal(programs, tmp_path, monkeypatch):
    """The first evaluation ends while a program is running, which goes on in the second; others are cancelled."""
    released, journals, written = threading.Event(), [], []
    collect, add = PlanRun._collect, SharedJournal.add

    def fail_at_first(plan_run: PlanRun) -> Any:
        journals.append(plan_run.writer.journal)
        if len(journals) == 1:
            raise Broken
        released.set()
        return collect(plan_run)

    def noted(journal: SharedJournal, results: Any, **keys: Any) -> None:
        if threading.current_thread().name.startswith('program'):
            written.append(journal)
        add(journal, results, **keys)

    in_background(monkeypatch, lambda: released.wait() and None)
    monkeypatch.setattr(PlanRun, '_collect', fail_at_first)
    monkeypatch.setattr(SharedJournal, 'add', noted)
    callback = EvalGauntlet(**programs, max_seq_len=128, save_folder=str(tmp_path / 'records'))
    trainer = Trainer(model=composer_training.composer_model(), callbacks=[callback], device='cpu', progress_bar=False)
    with pytest.raises(Broken):
        trainer.eval()
    callback.close(trainer.state, trainer.logger)
    trainer.eval()
    assert len(callback.evaluation.results['programs/0-shot']) == 18
    # The one that went on is written to the journal of its evaluation, which is closed and takes no more.
    assert len(journals) == 2
    wait_until(lambda: journals[0] in written)
    assert written.count(journals[1]) == 18 - journals[1].num_reused
