"""`--dry-run` counts the work of an evaluation and writes nothing. No test depends on how long anything takes."""

from __future__ import annotations

import csv
import io
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from composer.models import HuggingFaceModel
from paths import FIXTURES

from llmfoundry_gauntlet.composer.dry_run import measure
from llmfoundry_gauntlet.composer.loop import EvaluationLoader
from llmfoundry_gauntlet.composer.runner import prepare_for_model
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, STREAM
from llmfoundry_gauntlet.engine.ranks import scored_tokens
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, plan_evaluation
from llmfoundry_gauntlet.types import GenerateRequest, ScoreRequest

MODEL = FIXTURES / 'models' / 'rotary_bos'


@pytest.fixture
def with_programs(tmp_path: Path) -> dict[str, Any]:
    """Return scored tasks and generation tasks, one of which runs programs."""
    found = tiny.write_tasks(tmp_path, replies=True)
    return {**found, 'tokens_per_batch': 300, 'max_seq_len': 128, 'sandbox': 'none'}


@pytest.fixture
def settings(with_programs: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return the same without programs, which take a while."""
    tasks = json.loads((tmp_path / 'tasks.yaml').read_text())['icl_tasks']
    tasks = [task for task in tasks if task['label'] != 'programs']
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': tasks}))
    return with_programs


def loader_of(settings: dict[str, Any], **changes: Any) -> tuple[EvaluationLoader, HuggingFaceModel]:
    model = tiny.composer_model()
    loader = EvaluationLoader(prepare_for_model(load_data(decode_settings({**settings, **changes})), model), model)
    return loader, model


def rows_of(request: ScoreRequest | GenerateRequest) -> list[list[int]]:
    """Return what the model is given; a continuation's last token is never given."""
    if isinstance(request, GenerateRequest):
        return [request.context.tolist()]
    return [
        [*context.tolist(), *continuation.tolist()[:-1]]
        for context, continuation in zip(request.contexts, request.continuations, strict=True)
    ]


def prefixes_of(request: ScoreRequest) -> set[tuple[int, ...]]:
    return {tuple(row[: end + 1]) for row in rows_of(request) for end in range(len(row))}


def count_tokens(planned: PlannedEvaluation) -> Counter[str]:
    """Return tokens by task, counted by the sequences: those that no earlier request of the tree begins with."""
    found: Counter[str] = Counter()
    kept: set[tuple[int, ...]] = set()
    for batch in planned.batches:
        prefix = () if batch.prefix is None else tuple(batch.prefix.tolist())
        if prefix and prefix not in kept:
            kept.add(prefix)
            found[batch.requests[0].key.task] += len(prefix)
        for tree in batch.trees:
            seen = {prefix[: end + 1] for end in range(len(prefix))}
            for request in tree.requests:
                new = prefixes_of(request) - seen
                seen |= new
                found[request.key.task] += len(new)
    for batch in planned.continuous_batches:
        prompts: set[tuple[int, ...]] = set()
        for request in batch.requests:
            prompt = tuple(request.context.tolist())
            found[request.key.task] += 0 if prompt in prompts else len(prompt)
            prompts.add(prompt)
    return found


@pytest.mark.parametrize('fewshot', ['reference', 'fixed'])
def test_items_and_tokens_equal_a_count_of_the_plan(settings, fewshot: str):
    """Mutations: a prefix counted in each tree or not at all; prompts counted once per generation."""
    loader, _ = loader_of(settings, fewshot=fewshot)
    found = measure(loader)
    planned = loader.current_plan
    expected = count_tokens(planned)
    assert {task.task: task.num_tokens for task in found.tasks} == dict(expected)
    assert sum(expected.values()) < sum(len(row) for item in planned.items.values() for row in rows_of(item.request)), (
        'nothing is shared'
    )
    items = Counter(key.task for key in planned.items)
    assert {task.task: task.num_items for task in found.tasks} == items
    assert (items['sums/2-shot'], items['drawn/1-shot']) == (7, 40)
    assert all(task.num_truncated == 0 for task in found.tasks)
    most = {task.task: task.generation_tokens for task in found.tasks}
    assert most['sums/2-shot'] == 0
    assert most['drawn/1-shot'] == 40 * 9


@pytest.mark.parametrize('layout', [STREAM, PADDED_ROWS])
def test_tokens_sum_to_those_of_the_batches(settings, layout: str):
    loader, _ = loader_of(settings)
    planned = plan_evaluation(loader.prepared, tokens_per_batch=300, layout=layout)
    prefixes = {id(batch.prefix): len(batch.prefix) for batch in planned.batches if batch.prefix is not None}
    assert sum(scored_tokens(planned.batches).values()) == planned.num_model_tokens + sum(prefixes.values())


def test_truncated_items_are_counted(settings):
    loader, _ = loader_of(settings, max_seq_len=56)
    found = {task.task: task.num_truncated for task in measure(loader).tasks}
    truncated = [key.task for key, item in loader.prepared.items.items() if item.request.truncated]
    assert found == {task: truncated.count(task) for task in found}
    assert len(set(truncated)) > 1


def test_a_dry_run_changes_no_weight_or_random_state(settings):
    loader, model = loader_of(settings)
    model.train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    measure(loader)
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert random.getstate() == states[0]
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_seconds_of_parts_sum_to_those_of_tasks(with_programs):
    found = measure(loader_of(with_programs)[0])
    assert found.seconds.keys() == {'probing the model', 'scoring', 'generating', 'programs'}
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert sum(task.seconds for task in found.tasks) == pytest.approx(found.total_seconds)
    assert all(task.seconds > 0 for task in found.tasks)


def test_a_dry_run_changes_no_later_evaluation(settings):
    """Timed items are in no result."""
    alone, dry = loader_of(settings)[0], loader_of(settings)[0]
    measure(dry)
    results = [{key: result for step in loader for key, result in step.run().items()} for loader in (alone, dry)]
    assert results[0].keys() == results[1].keys() == dry.prepared.items.keys()
    assert results[0] == results[1]


def words_of(settings: dict[str, Any]) -> list[Any]:
    words = ['run', '--model', MODEL, '--tasks', settings['tasks'], '--data-root', settings['data_root']]
    return [*words, '--device', 'cpu', '--max-seq-len', 128, '--sandbox', 'none']


def test_the_command_prints_everything_and_writes_nothing(gauntlet, settings, tmp_path, monkeypatch):
    work = tmp_path / 'work'
    work.mkdir()
    monkeypatch.chdir(work)
    before = sorted(tmp_path.rglob('*'))
    words = [*words_of(settings), '--dry-run']
    status, out, _ = gauntlet(*words)
    assert status == 0
    assert 'sums/2-shot' in out and 'about ' in out and 'one batch was run, and scaled by its cost' in out
    status, out, _ = gauntlet(*words, '--out', tmp_path / 'out', '--format', 'csv')
    rows = {row['task']: row for row in csv.DictReader(io.StringIO(out))}
    assert (status, rows['sums/2-shot']['num_items'], list(rows)[-1]) == (0, '7', 'all')
    assert int(rows['all']['num_tokens']) == sum(int(row['num_tokens']) for row in list(rows.values())[:-1])
    assert sorted(tmp_path.rglob('*')) == before


def test_precision_targets_are_shown_with_a_gauntlet(gauntlet, settings, tmp_path):
    tasks = json.loads((tmp_path / 'tasks.yaml').read_text())['icl_tasks']
    benchmarks = [{'name': task['label'], 'num_fewshot': task['num_fewshot'][0]} for task in tasks]
    suite = {'eval_gauntlet': {'categories': [{'name': 'all', 'benchmarks': benchmarks}]}}
    (tmp_path / 'gauntlet.yaml').write_text(json.dumps(suite))
    words = [*words_of(settings), '--dry-run']
    status, out, err = gauntlet(*words, '--gauntlet', tmp_path / 'gauntlet.yaml', '--format', 'json')
    assert status == 0, err
    found = json.loads(out)
    assert found['average'] == 'default_average'
    assert [one['share'] for one in found['targets']] == [0.02, 0.05, 0.1, 0.2, 0]
    items = [one['num_items'] for one in found['targets']]
    assert items[:4] == sorted(items[:4], reverse=True)
    num_questions = sum(task['num_items'] for task in found['tasks'])
    assert items[4] <= num_questions  # several generations of a question are items
    assert found['targets'][4]['seconds'] == pytest.approx(found['total_seconds'])
    _, out, _ = gauntlet(*words, '--gauntlet', tmp_path / 'gauntlet.yaml')
    assert 'Subsets by --precision-target, for default_average' in out


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        (('--dry-run', '--max-seq-len', 99999), '--max-seq-len: is 99999'),
        (('--dry-run', '--out', 'FULL'), 'is not empty'),
        ((), '--out: is missing'),
    ],
)
def test_settings_are_checked_as_in_a_real_run_which_needs_a_folder(gauntlet, settings, tmp_path, words, expected: str):
    words = [{'FULL': tmp_path}.get(word, word) for word in words]
    status, out, err = gauntlet(*words_of(settings), *words)
    assert (status, out) == (2, '')
    assert expected in err and 'Traceback' not in err
