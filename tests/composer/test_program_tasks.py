"""Tasks whose replies are programs in Composer's loop, on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networks
import pytest
import tiny
from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from programs import sandbox

from llmfoundry_gauntlet import EvalGauntlet, build_icl_evaluators
from llmfoundry_gauntlet.judging.code.judge import judge
from llmfoundry_gauntlet.scores.keys import with_errors

METRICS = ('InContextLearningCodeEvalAccuracy', 'CutShare', 'PassAt1', 'PassAt1StandardError', 'PassAt3')


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """One task, whose programs a random model writes right more often than not: they are comments."""
    sandbox()
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [tiny.write_programs(tmp_path)]}))
    return {'tasks': str(tmp_path / 'tasks.yaml'), 'data_root': str(tmp_path)}


def model() -> HuggingFaceModel:
    network = networks.network('llama', vocab_size=259, max_position_embeddings=128)
    return HuggingFaceModel(network, tokenizer=tiny.tokenizer())


def test_programs_are_run_while_the_model_goes_on_and_all_are_marked(settings, tmp_path):
    logger = InMemoryLogger()
    callback = EvalGauntlet(**settings, max_seq_len=128, save_folder=str(tmp_path / 'records'))
    trainer = Trainer(model=model(), callbacks=[callback], loggers=[logger], device='cpu', progress_bar=False)
    trainer.eval()
    trainer.close()
    logged = {key: float(values[-1][1]) for key, values in logger.data.items()}
    results = callback.evaluation.results['programs/0-shot']
    assert [(result.key.row, result.key.sample) for result in results] == [(n, k) for n in range(6) for k in range(3)]
    problems = callback.data.examples['programs/0-shot']
    task = callback.data.suite.tasks[0]
    for result in results:  # each verdict is what its text deserves
        program = problems[result.key.row].content.program(task, False)
        assert result.credit == judge(program, result.text, sandbox()).passed
    assert {result.credit for result in results} == {0.0, 1.0}
    assert set(METRICS) <= {key.rsplit('/', 1)[1] for key in logged if key.startswith('metrics/programs/0-shot/')}
    share = sum(result.credit for result in results) / len(results)
    accuracy = logged['metrics/programs/0-shot/InContextLearningCodeEvalAccuracy']
    assert accuracy == pytest.approx(share) == logged['metrics/programs/0-shot/PassAt1']
    assert logged['metrics/programs/0-shot/PassAt3'] >= accuracy
    (record,) = (tmp_path / 'records').rglob('results.json')
    assert json.loads(record.read_text())['config']['sandbox'] == str(sandbox())


def test_one_evaluator_gives_the_same_numbers(settings):
    network = model()
    tasks, data_root = settings['tasks'], settings['data_root']
    evaluators = build_icl_evaluators(tasks, network, data_root=data_root, max_seq_len=128)
    trainer = Trainer(model=network, device='cpu', progress_bar=False)
    trainer.eval(evaluators)
    values = {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics['programs/0-shot'].items()}
    callback = EvalGauntlet(**settings, max_seq_len=128, save_folder=None)
    other = Trainer(model=model(), callbacks=[callback], device='cpu', progress_bar=False)
    other.eval()
    metrics = callback.evaluation.scores['programs/0-shot'].metrics
    assert values == {name: pytest.approx(value) for name, value in with_errors(metrics)}
