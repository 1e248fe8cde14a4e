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
from paths import FIXTURES

from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation
from llmfoundry_gauntlet.runtime.dry_run import measure
from llmfoundry_gauntlet.types import GenerateRequest, ScoreRequest


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return scored and generation tasks, without programs, which take a while."""
    found = tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path))
    return {**found, 'tokens_per_batch': 300, 'max_seq_len': 128}


def rows_of(request: ScoreRequest | GenerateRequest) -> list[tuple[int, ...]]:
    """Return what the model is given; a continuation's last token is never given."""
    if isinstance(request, GenerateRequest):
        return [tuple(request.context.tolist())]
    pairs = zip(request.contexts, request.continuations, strict=True)
    return [(*context.tolist(), *continuation.tolist()[:-1]) for context, continuation in pairs]


def count_tokens(planned: PlannedEvaluation) -> Counter[str]:
    """Return tokens by task, counted by the sequences: those that no earlier request of the tree begins with."""
    found: Counter[str] = Counter()
    kept: set[tuple[int, ...]] = {()}
    for batch in planned.batches:
        prefix = () if batch.prefix is None else tuple(batch.prefix.tolist())
        if prefix not in kept:
            kept.add(prefix)
            found[batch.requests[0].key.task] += len(prefix)
        for tree in batch.trees:
            seen = {prefix[: end + 1] for end in range(len(prefix))}
            for request in tree.requests:
                new = {row[: end + 1] for row in rows_of(request) for end in range(len(row))} - seen
                seen |= new
                found[request.key.task] += len(new)
    for continuous in planned.continuous_batches:
        tasks = {rows_of(request)[0]: request.key.task for request in reversed(continuous.requests)}
        for prompt, task in tasks.items():  # a prompt counts once, for the first that has it
            found[task] += len(prompt)
    return found


@pytest.mark.parametrize(('fewshot', 'max_seq_len'), [('reference', 128), ('fixed', 128), ('reference', 56)])
def test_items_and_tokens_equal_a_count_of_the_plan(settings, fewshot: str, max_seq_len: int):
    """Mutations: a prefix counted in each tree or not at all; prompts counted once per generation."""
    loader = tiny.loop_of({**settings, 'fewshot': fewshot, 'max_seq_len': max_seq_len})
    found = {task.task: task for task in measure(loader).tasks}
    planned = loader.current_plan
    expected = count_tokens(planned)
    assert Counter({name: task.num_tokens for name, task in found.items()}) == expected
    rows = [len(row) for item in planned.items.values() for row in rows_of(item.request)]
    assert sum(expected.values()) < sum(rows), 'nothing is shared'
    assert {name: task.num_items for name, task in found.items()} == Counter(key.task for key in planned.items)
    assert (found['sums/2-shot'].num_items, found['drawn/1-shot'].num_items) == (7, 40)
    assert (found['sums/2-shot'].generation_tokens, found['drawn/1-shot'].generation_tokens) == (0, 40 * 9)
    shortened = Counter(key.task for key, item in planned.items.items() if item.request.prompt_shortened)
    assert Counter({name: task.num_shortened for name, task in found.items()}) == shortened
    assert len(shortened) > 1 if max_seq_len == 56 else not shortened


def test_a_dry_run_changes_no_weight_random_state_or_later_evaluation(settings):
    alone, dry = tiny.loop_of(settings), tiny.loop_of(settings)
    model = dry.runner.model.train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    measure(dry)
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    model.eval()
    results = [{key: result for step in loader for key, result in step.run().items()} for loader in (alone, dry)]
    assert results[0] == results[1] and results[0].keys() == dry.prepared.items.keys()


def test_seconds_of_parts_sum_to_those_of_tasks(settings, tmp_path):
    tasks = [*tiny.write_riddles(tmp_path), tiny.write_programs(tmp_path)]
    found = measure(tiny.loop_of({**settings, **tiny.write_tasks(tmp_path, tasks), 'sandbox': 'none'}))
    assert found.seconds.keys() == {'probing the model', 'scoring', 'generating', 'programs'}
    assert all(seconds > 0 for seconds in (*found.seconds.values(), *(task.seconds for task in found.tasks)))
    assert sum(task.seconds for task in found.tasks) == pytest.approx(found.total_seconds)


def words_of(settings: dict[str, Any]) -> list[Any]:
    words = ['run', '--model', FIXTURES / 'models/rotary_bos', '--tasks', settings['tasks']]
    return [*words, '--data-root', settings['data_root'], '--device', 'cpu', '--max-seq-len', 128]


def test_the_command_prints_everything_and_writes_nothing(gauntlet, settings, tmp_path, monkeypatch):
    work = tmp_path / 'work'
    work.mkdir()
    monkeypatch.chdir(work)
    before = sorted(tmp_path.rglob('*'))
    words = [*words_of(settings), '--dry-run', '--out', tmp_path / 'out']
    status, out, _ = gauntlet(*words, '--format', 'csv')
    rows = {row['task']: row for row in csv.DictReader(io.StringIO(out))}
    assert (status, rows['sums/2-shot']['num_items'], list(rows)[-1]) == (0, '7', 'all')
    assert int(rows['all']['num_tokens']) == sum(int(row['num_tokens']) for row in list(rows.values())[:-1])
    assert sorted(tmp_path.rglob('*')) == before


def test_precision_targets_are_shown_with_a_gauntlet(gauntlet, settings, tmp_path):
    tasks = json.loads((tmp_path / 'tasks.yaml').read_text())['icl_tasks']
    benchmarks = [{'name': task['label'], 'num_fewshot': task['num_fewshot'][0]} for task in tasks]
    suite = {'eval_gauntlet': {'categories': [{'name': 'all', 'benchmarks': benchmarks}]}}
    (tmp_path / 'gauntlet.yaml').write_text(json.dumps(suite))
    words = [*words_of(settings), '--dry-run', '--gauntlet', tmp_path / 'gauntlet.yaml']
    found = json.loads(gauntlet(*words, '--format', 'json')[1])
    assert found['average'] == 'default_average'
    assert [one['share'] for one in found['targets']] == [0.02, 0.05, 0.1, 0.2, 0]
    *items, num_all = [one['num_items'] for one in found['targets']]
    assert items == sorted(items, reverse=True)
    assert num_all <= sum(task['num_items'] for task in found['tasks'])  # several generations of a question are items
    assert found['targets'][4]['seconds'] == pytest.approx(found['total_seconds'])
    status, out, _ = gauntlet(*words)
    assert status == 0
    assert 'sums/2-shot' in out and 'about ' in out and 'one batch was run, and scaled by its cost' in out
    assert 'Subsets by --precision-target, for default_average' in out


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        (('--dry-run', '--max-seq-len', 99999), 'max_seq_len is 99999'),
        (('--dry-run', '--out', 'FULL'), 'is not empty'),
        ((), '--out: is missing'),
    ],
)
def test_settings_are_checked_as_in_a_real_run_which_needs_a_folder(gauntlet, settings, tmp_path, words, expected: str):
    words = [{'FULL': tmp_path}.get(word, word) for word in words]
    status, out, err = gauntlet(*words_of(settings), *words)
    assert (status, out) == (2, '')
    assert expected in err and 'Traceback' not in err
