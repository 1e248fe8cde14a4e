"""Generation tasks in Composer's loop, on one rank."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networks
import pytest
import tiny
from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.composer import runner
from llmfoundry_gauntlet.engine.decoding import end_ids
from llmfoundry_gauntlet.engine.model import Budget
from llmfoundry_gauntlet.errors import ModelError

METRICS = ('InContextLearningGenerationExactMatchAccuracy', 'StrictMatch', 'NumericMatch', 'TruncatedShare')


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings with only the two generation tasks."""
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': tiny.write_replies(tmp_path, num_rows=20)}))
    return {'tasks': str(tmp_path / 'tasks.yaml'), 'data_root': str(tmp_path)}


def composer_model(family: str = 'llama') -> HuggingFaceModel:
    network = networks.network(family, vocab_size=259, max_position_embeddings=128)
    return HuggingFaceModel(network, tokenizer=tiny.tokenizer())


def evaluate(settings: dict[str, Any], model: HuggingFaceModel) -> tuple[EvalGauntlet, dict[str, float]]:
    """Return the callback after `Trainer.eval`, and what was logged."""
    logger = InMemoryLogger()
    callback = EvalGauntlet(**{'max_seq_len': 128, 'save_folder': None, 'log': ['accuracy', 'metrics'], **settings})
    trainer = Trainer(model=model, callbacks=[callback], loggers=[logger], device='cpu', progress_bar=False)
    trainer.eval()
    trainer.close()
    return callback, {key: float(values[-1][1]) for key, values in logger.data.items()}


def test_an_evaluation_of_only_generation_tasks(settings, caplog):
    with caplog.at_level(logging.INFO, 'llmfoundry_gauntlet'):
        callback, logged = evaluate(settings, composer_model())
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
    """Also from the records of earlier versions, with one number for both."""
    folder = tmp_path / 'records'

    def budgets(chosen: Budget) -> tuple[int | None, ...]:
        """Return the tokens and requests per batch when these would be chosen for a new evaluation."""
        monkeypatch.setattr(runner, 'automatic_budget', lambda *_, **__: chosen)
        evaluate({**settings, 'save_folder': str(folder)}, composer_model())
        record = json.loads((folder / 'results.json').read_text())
        names = ('tokens_per_batch', 'generation_tokens_per_batch', 'requests_per_batch')
        return tuple(record['config'][name] for name in names)

    assert budgets(Budget(scoring=300, generation=150, requests=7)) == (300, 150, 7)
    assert budgets(Budget(scoring=90, generation=80, requests=9)) == (300, 150, 7)
    record = json.loads((folder / 'results.json').read_text())
    del record['identity']['generation_tokens_per_batch'], record['identity']['requests_per_batch']
    (folder / 'results.json').write_text(json.dumps(record))
    assert budgets(Budget(scoring=90, generation=80, requests=9)) == (300, 300, None)
    timing = json.loads((folder / 'results.json').read_text())['timing']
    assert timing['reused_items'] == 40


def test_a_model_without_a_cache_generates_and_logs_it(settings, caplog):
    with caplog.at_level(logging.INFO, 'llmfoundry_gauntlet'):
        callback, _ = evaluate(settings, composer_model('mamba'))
    assert any('no cache, whole rows at every token' in record.message for record in caplog.records)
    assert len(callback.evaluation.results['greedy/1-shot']) == 20


def test_without_eos_generations_reach_their_limit(settings, tmp_path: Path):
    tasks = json.loads(Path(settings['tasks']).read_text())['icl_tasks'][:1]
    del tasks[0]['early_stopping_criteria']
    bare = tiny.tokenizer()
    bare.eos_token = bare.pad_token = None
    network = networks.network(vocab_size=259, max_position_embeddings=128)
    network.generation_config.eos_token_id = None
    callback, _ = evaluate({**settings, 'tasks': tasks}, HuggingFaceModel(network, tokenizer=bare))
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
    tasks = json.loads(Path(settings['tasks']).read_text())['icl_tasks']
    tasks[0]['generation_kwargs'] = {'max_new_tokens': count}
    settings = {**settings, 'tasks': tasks, 'semantics': semantics}
    with pytest.raises(ModelError, match=f'greedy/1-shot: {problem}'):
        evaluate(settings, composer_model())
    if semantics == 'reference':
        _, logged = evaluate(settings, composer_model('mpt'))  # whose positions have no end
        assert 0 <= logged[f'metrics/greedy/1-shot/{METRICS[0]}'] <= 1


@pytest.mark.parametrize(('own', 'expected'), [(None, {7}), (9, {7, 9}), ([8, 9], {7, 8, 9})])
def test_generation_config_names_further_end_tokens(own, expected):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=own))
    assert end_ids(SimpleNamespace(eos_token_id=7), model, reference=False) == expected
    assert end_ids(SimpleNamespace(eos_token_id=7), model, reference=True) == {7}
    assert end_ids(SimpleNamespace(eos_token_id=None), model, reference=True) == set()
