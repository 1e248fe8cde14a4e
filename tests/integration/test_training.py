"""The callback in a real Trainer, in one process."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import tiny
import torch
from composer import Trainer
from composer.core import Evaluator
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from watched import record

from llmfoundry_gauntlet import EvalGauntlet, ModelError, build_icl_evaluators, evaluate
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.metrics.keys import with_errors
from llmfoundry_gauntlet.results.files import find_results
from llmfoundry_gauntlet.scoring.code.sandbox import find_sandbox

ACCURACY = 'InContextLearningMultipleChoiceAccuracy'


def batches(records: Path) -> list[int]:
    return [record['training']['batch'] for _, record in find_results(records)]


@pytest.mark.parametrize(
    ('interval', 'expected'),
    [
        (['first', 'checkpoint', 'last'], [0, 4, 8, 10]),
        ('first', [0]),
        ('last', [10]),
        ('checkpoint', [4, 8, 10]),  # Composer also saves at the end
        ('3ba', [3, 6, 9]),
        (['first', '3ba', 'checkpoint'], [0, 3, 4, 6, 8, 9, 10]),
        ('1ep', [8]),  # 16 rows in batches of 2
        ('0.5dur', [5, 10]),
    ],
)
def test_evaluations_run_at_their_interval_and_never_twice(tmp_path, tiny_settings, interval, expected):
    tasks = read_yaml(tiny_settings['tasks'])['icl_tasks'][-1:]  # the smallest
    settings = {'tasks': tasks, 'data_root': tiny_settings['data_root'], 'save_folder': str(tmp_path / 'records')}
    callback = EvalGauntlet(**settings, interval=interval)
    trainer = tiny.trainer(
        [callback], max_duration='10ba', save_folder=str(tmp_path / 'checkpoints'), save_interval='4ba'
    )
    forward = trainer.state.model.eval_forward
    trainer.fit()
    assert batches(tmp_path / 'records') == expected
    assert trainer.state.model.eval_forward == forward
    trainer.close()


def test_training_with_evaluations_is_bitwise_training_without(tmp_path, tiny_settings):
    """Weights, optimizer and random states. Mutation: the evaluator's loader is a torch DataLoader."""
    gauntlet = EvalGauntlet(**tiny_settings, interval=['first', '2ba', 'last'], save_folder=str(tmp_path / 'records'))
    found = [tiny.digests(tiny.train(callbacks, max_duration='5ba')) for callbacks in ([gauntlet], [])]
    assert batches(tmp_path / 'records') == [0, 2, 4, 5]
    assert found[0] == found[1]


def test_two_callbacks_evaluate_different_tasks_at_different_intervals(tmp_path, tiny_settings):
    (sums,) = [task for task in read_yaml(tiny_settings['tasks'])['icl_tasks'] if task['label'] == 'sums']
    often = EvalGauntlet(
        tasks=[sums], data_root=tiny_settings['data_root'], interval='1ba', save_folder=str(tmp_path / 'often')
    )
    rarely = EvalGauntlet(**tiny_settings, interval=['first', '2ba'], save_folder=str(tmp_path / 'rarely'))
    tiny.train([often, rarely], max_duration='3ba')
    assert batches(tmp_path / 'often') == [1, 2, 3]
    assert batches(tmp_path / 'rarely') == [0, 2]
    tasks = [list(record['tasks']) for _, record in find_results(tmp_path / 'often')]
    assert tasks == [['sums/0-shot', 'sums/2-shot']] * 3
    often_tasks, rarely_tasks = (record(tmp_path / name / 'ba2')['tasks'] for name in ('often', 'rarely'))
    assert rarely_tasks.items() >= often_tasks.items()


def test_an_evaluation_before_training_is_not_repeated_at_its_start(tmp_path, tiny_settings):
    callback = EvalGauntlet(**tiny_settings, interval='first', save_folder=str(tmp_path / 'records'))
    trainer = tiny.trainer([callback], max_duration='1ba')
    trainer.eval()
    before = callback.evaluation
    trainer.fit()
    trainer.close()
    assert callback.evaluation is before
    assert batches(tmp_path / 'records') == [0]


def test_metrics_are_logged_at_their_training_batch_with_upstreams_keys(tmp_path, tiny_settings):
    logger = InMemoryLogger()
    callback = EvalGauntlet(**tiny_settings, interval=['first', 'last'], save_folder=str(tmp_path / 'records'))
    tiny.train([callback], max_duration='3ba', loggers=[logger])
    for key in (
        f'metrics/colours/2-shot/{ACCURACY}',
        'metrics/sums/0-shot/InContextLearningLMAccuracy',
        'icl/metrics/eval_gauntlet/all',
        'icl/metrics/eval_gauntlet/default_average',
        'gauntlet/seconds',
        'gauntlet/seconds/colours/2-shot',
        'gauntlet/items',
        'gauntlet/truncated_items',
        'gauntlet/unscored_items',
        'gauntlet/batch',
    ):
        assert [timestamp.batch.value for timestamp, _ in logger.data[key]] == [0, 3], key
    assert [value for _, value in logger.data['gauntlet/batch']] == [0, 3]
    logged = [value for _, value in logger.data['icl/metrics/eval_gauntlet/all']]
    records = [found['metrics'] for _, found in find_results(tmp_path / 'records')]
    assert [metrics['icl/metrics/eval_gauntlet/all'] for metrics in records] == logged


def test_records_name_their_checkpoint(tmp_path, tiny_settings):
    callback = EvalGauntlet(**tiny_settings, save_folder=str(tmp_path / 'records'))
    tiny.train([callback], max_duration='4ba', save_folder=str(tmp_path / 'checkpoints'), save_interval='2ba')
    names = [record['training']['checkpoint'] for _, record in find_results(tmp_path / 'records')]
    assert names == [None, *(f'{tmp_path}/checkpoints/ep0-ba{batch}-rank0.pt' for batch in (2, 4))]


@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
def test_a_model_of_nan_has_no_scores_except_with_reference_semantics(tmp_path, tiny_settings, semantics):
    """Fix 1: with upstream's rule it is right if the gold is choice 0."""
    network = tiny.model()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(torch.nan)
    model, out = tiny.save(network, tmp_path / 'nan'), tmp_path / 'out'
    evaluation = evaluate(model, device='cpu', semantics=semantics, out=out, **tiny_settings)
    accuracies = {task: next(iter(score.metrics.values())).value for task, score in evaluation.scores.items()}
    if semantics == 'reference':
        assert accuracies['colours/0-shot'] == 2 / 5 and accuracies['pronouns/2-shot'] == 1 / 2
        assert evaluation.composites.categories['all'].value is not None
    else:
        assert set(accuracies.values()) == {None}
        assert evaluation.composites.categories['all'].value is None
        metrics = record(out)['metrics']
        assert metrics['gauntlet/unscored_items'] == metrics['gauntlet/items'] == 28
        assert not any(key.startswith(('metrics/', 'icl/')) for key in metrics)


def test_evaluators_of_single_tasks_have_the_metrics_of_the_callback(tmp_path, tiny_settings):
    network = tiny.model()
    tasks = [*read_yaml(tiny_settings['tasks'])['icl_tasks'], *tiny.write_replies(tmp_path, num_rows=20)]
    settings = {'data_root': tiny_settings['data_root']}
    expected = evaluate(tiny.save(network, tmp_path / 'model'), tasks=tasks, device='cpu', **settings)
    model = HuggingFaceModel(network, tokenizer=tiny.tokenizer())
    evaluators = build_icl_evaluators(tasks, model, log=['accuracy', 'errors', 'metrics'], **settings)
    assert all(isinstance(evaluator, Evaluator) for evaluator in evaluators)
    trainer = Trainer(model=model, eval_dataloader=evaluators, device='cpu', progress_bar=False)
    trainer.eval()
    metrics = trainer.state.eval_metrics
    assert set(metrics) == set(expected.scores)
    for task, score in expected.scores.items():
        values = {name: value for name, value in with_errors(score.metrics) if 'MajorityClass' not in name}
        assert set(metrics[task]) == set(values)
        for name, value in values.items():
            found = metrics[task][name].compute().item()
            # The batches differ from those of all tasks, so float32 sums of tens of nats round differently.
            assert math.isnan(found) if value is None else found == pytest.approx(value, rel=1e-5)
    trainer.close()


def test_categories_are_separate_metrics(tmp_path):
    rows = [{'context': f'{i}', 'continuation': f'{i}', 'category': 'even' if i % 2 == 0 else 'odd'} for i in range(6)]
    tiny.write_rows(tmp_path / 'rows.jsonl', rows)
    task = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [1], 'icl_task_type': 'language_modeling'}
    model = HuggingFaceModel(tiny.model(), tokenizer=tiny.tokenizer())
    evaluators = build_icl_evaluators([{**task, 'has_categories': True}], model, data_root=str(tmp_path))
    logger = InMemoryLogger()
    trainer = Trainer(model=model, eval_dataloader=evaluators, device='cpu', progress_bar=False, loggers=[logger])
    trainer.eval()
    trainer.close()
    names = {f'metrics/t/1-shot/{category}InContextLearningLMAccuracy' for category in ('', 'even/', 'odd/')}
    assert names <= set(logger.data)


def test_a_failed_evaluation_leaves_the_model_unchanged(tmp_path, tiny_settings, monkeypatch):
    callback = EvalGauntlet(**tiny_settings, interval='2ba', save_folder=None)
    trainer = tiny.trainer([callback], max_duration='4ba')
    forward = trainer.state.model.eval_forward

    def fail(*_):
        raise RuntimeError('no memory')

    monkeypatch.setattr('llmfoundry_gauntlet.engine.model.CausalLanguageModel.run', fail)
    with pytest.raises(RuntimeError, match='no memory'):
        trainer.fit()
    trainer.close()
    assert trainer.state.model.eval_forward == forward


def test_models_without_tokenizer_or_enough_positions_are_errors(tiny_settings):
    with pytest.raises(ModelError, match='tokenizer'):
        Trainer(model=HuggingFaceModel(tiny.model()), callbacks=[EvalGauntlet(**tiny_settings)], device='cpu')
    with pytest.raises(ModelError, match=r'max_seq_len is 129.*\(gpt2\).*128'):
        tiny.trainer([EvalGauntlet(**tiny_settings, max_seq_len=129)])


def test_tasks_that_cannot_run_are_one_warning(tmp_path, tiny_settings, caplog, monkeypatch):
    monkeypatch.setattr('shutil.which', lambda tool: None)
    find_sandbox.cache_clear()
    row = {'prompt': 'def f():\n', 'entry_point': 'f', 'test': 'def check(f): f()'}
    (Path(tiny_settings['data_root']) / 'programs.jsonl').write_text(json.dumps(row))
    tasks = [
        {'label': 'code', 'dataset_uri': 'programs.jsonl', 'num_fewshot': [0], 'icl_task_type': 'code_evaluation'},
        {'label': 'sums', 'dataset_uri': 'sums.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'},
    ]
    with caplog.at_level(logging.WARNING):
        callback = EvalGauntlet(tasks=tasks, data_root=tiny_settings['data_root'], max_seq_len=128, save_folder=None)
        assert not caplog.messages and list(callback.data.tasks) == ['code/0-shot', 'sums/0-shot']
        tiny.trainer([callback]).close()
    find_sandbox.cache_clear()
    assert list(callback.data.tasks) == ['sums/0-shot']
    (message,) = [text for text in caplog.messages if 'left out' in text]
    assert 'prlimit' in message and message.endswith('code/0-shot')
