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
from llmfoundry_gauntlet.runtime.dry_run import TaskEstimate, measure
from llmfoundry_gauntlet.runtime.loop import EvaluationLoop
from llmfoundry_gauntlet.types import GenerateRequest, ItemKey, ItemResult, ScoreRequest


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return scored and generation tasks, without programs, which take a while."""
    written = tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path))
    return {**written, 'tokens_per_batch': 300, 'max_seq_len': 128}


def rows_of(request: ScoreRequest | GenerateRequest) -> list[tuple[int, ...]]:
    """Return what the model is given; a continuation's last token is never given."""
    if isinstance(request, GenerateRequest):
        return [tuple(request.context.tolist())]
    return [
        tuple(context.tolist() + continuation.tolist()[:-1])
        for context, continuation in zip(request.contexts, request.continuations, strict=True)
    ]


def beginnings(row: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return every beginning of a row, one for each of its tokens."""
    return {row[: end + 1] for end in range(len(row))}


def count_tokens(planned: PlannedEvaluation) -> Counter[str]:
    """Return tokens by task, counted by the sequences: those that no earlier request of the tree begins with."""
    num_tokens: Counter[str] = Counter()

    kept_prefixes: set[tuple[int, ...]] = {()}
    for batch in planned.batches:
        prefix = () if batch.prefix is None else tuple(batch.prefix.tolist())
        if prefix not in kept_prefixes:
            kept_prefixes.add(prefix)
            num_tokens[batch.requests[0].key.task] += len(prefix)
        for tree in batch.trees:
            run_before = beginnings(prefix)
            for request in tree.requests:
                run_now = set().union(*map(beginnings, rows_of(request))) - run_before
                run_before |= run_now
                num_tokens[request.key.task] += len(run_now)

    for continuous in planned.continuous_batches:
        # A prompt counts once, for the first task that has it.
        task_of_prompt = {rows_of(request)[0]: request.key.task for request in reversed(continuous.requests)}
        for prompt, task in task_of_prompt.items():
            num_tokens[task] += len(prompt)

    return num_tokens


def measured_and_planned(settings: dict[str, Any], **changes: Any) -> tuple[dict[str, TaskEstimate], PlannedEvaluation]:
    """Return what a dry run says of each task, and the plan that it counted."""
    loop = tiny.loop_of({**settings, **changes})
    measured = {task.task: task for task in measure(loop).tasks}
    return measured, loop.current_plan


with_and_without_shared_shots = pytest.mark.parametrize(
    ('fewshot', 'max_seq_len'),
    [
        ('reference', 128),
        ('fixed', 128),  # the same shots in all prompts of a task, a long prefix
        ('reference', 56),  # prompts are shortened
    ],
)


@with_and_without_shared_shots
def test_tokens_equal_a_count_of_the_plan(settings, fewshot: str, max_seq_len: int):
    """Mutations: a prefix counted in each tree or not at all; prompts counted once per generation."""
    measured, planned = measured_and_planned(settings, fewshot=fewshot, max_seq_len=max_seq_len)

    expected = count_tokens(planned)
    assert Counter({name: task.num_tokens for name, task in measured.items()}) == expected
    lengths_of_rows = [len(row) for item in planned.items.values() for row in rows_of(item.request)]
    assert sum(expected.values()) < sum(lengths_of_rows), 'nothing is shared'


@with_and_without_shared_shots
def test_items_and_generated_tokens_are_those_of_the_tasks(settings, fewshot: str, max_seq_len: int):
    measured, planned = measured_and_planned(settings, fewshot=fewshot, max_seq_len=max_seq_len)

    num_items = Counter(key.task for key in planned.items if not key.is_gold)
    assert {name: task.num_items for name, task in measured.items()} == num_items
    assert measured['sums/2-shot'].num_items == 7
    assert measured['sums/2-shot'].generation_tokens == 0
    assert measured['drawn/1-shot'].num_items == 40
    assert measured['drawn/1-shot'].generation_tokens == 40 * 9


@with_and_without_shared_shots
def test_shortened_prompts_are_counted(settings, fewshot: str, max_seq_len: int):
    measured, planned = measured_and_planned(settings, fewshot=fewshot, max_seq_len=max_seq_len)

    items = [item for key, item in planned.items.items() if not key.is_gold]
    shortened = Counter(item.key.task for item in items if item.request.prompt_shortened)
    assert Counter({name: task.num_shortened for name, task in measured.items()}) == shortened
    assert len(shortened) > 1 if max_seq_len == 56 else not shortened


def random_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_a_dry_run_changes_no_weight_mode_or_random_state(settings):
    loop = tiny.loop_of(settings)
    model = loop.runner.model.model.train()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    states = random_states()

    measure(loop)

    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert random_states() == states


def results_of(loop: EvaluationLoop) -> dict[ItemKey, ItemResult]:
    return {key: result for step in loop for key, result in step.run().items()}


def test_a_dry_run_changes_no_later_evaluation(settings):
    without = tiny.loop_of(settings)
    with_dry_run = tiny.loop_of(settings)
    model = with_dry_run.runner.model.model.train()

    measure(with_dry_run)
    model.eval()

    results = results_of(with_dry_run)
    assert results == results_of(without)
    assert results.keys() == with_dry_run.prepared.items.keys()


def test_seconds_of_parts_sum_to_those_of_tasks(settings, tmp_path):
    tasks = [*tiny.write_riddles(tmp_path), tiny.write_programs(tmp_path)]
    loop = tiny.loop_of({**settings, **tiny.write_tasks(tmp_path, tasks), 'sandbox': 'none'})

    estimate = measure(loop)

    assert estimate.seconds.keys() == {'probing the model', 'scoring', 'generating', 'programs'}
    assert all(seconds > 0 for seconds in estimate.seconds.values())
    assert all(task.seconds > 0 for task in estimate.tasks)
    assert sum(task.seconds for task in estimate.tasks) == pytest.approx(estimate.total_seconds)


def words_of(settings: dict[str, Any]) -> list[Any]:
    """Return the words of a run without a folder for its results."""
    model = ['--model', FIXTURES / 'models/rotary_bos', '--device', 'cpu', '--max-seq-len', 128]
    tasks = ['--tasks', settings['tasks'], '--data-root', settings['data_root']]
    return ['run', *model, *tasks]


def test_the_command_prints_a_row_for_each_task_and_their_sum(gauntlet, settings):
    status, out, _ = gauntlet(*words_of(settings), '--dry-run', '--format', 'csv')

    *tasks, total = csv.DictReader(io.StringIO(out))
    assert status == 0
    assert [row['num_items'] for row in tasks if row['task'] == 'sums/2-shot'] == ['7']
    assert total['task'] == 'all'
    assert int(total['num_tokens']) == sum(int(row['num_tokens']) for row in tasks)


def test_the_command_writes_nothing(gauntlet, settings, tmp_path, monkeypatch):
    work = tmp_path / 'work'
    work.mkdir()
    monkeypatch.chdir(work)
    before = sorted(tmp_path.rglob('*'))

    status, _, _ = gauntlet(*words_of(settings), '--dry-run', '--out', tmp_path / 'out', '--format', 'csv')

    assert status == 0
    assert sorted(tmp_path.rglob('*')) == before


@pytest.fixture
def gauntlet_file(settings, tmp_path) -> Path:
    """Write a gauntlet of one category over all tasks."""
    tasks = json.loads((tmp_path / 'tasks.yaml').read_text())['icl_tasks']
    benchmarks = [{'name': task['label'], 'num_fewshot': task['num_fewshot'][0]} for task in tasks]
    suite = {'eval_gauntlet': {'categories': [{'name': 'all', 'benchmarks': benchmarks}]}}
    path = tmp_path / 'gauntlet.yaml'
    path.write_text(json.dumps(suite))
    return path


def test_precision_targets_take_fewer_items_the_less_precise_they_are(gauntlet, settings, gauntlet_file):
    words = [*words_of(settings), '--dry-run', '--gauntlet', gauntlet_file, '--format', 'json']

    _, out, _ = gauntlet(*words)

    printed = json.loads(out)
    assert printed['average'] == 'default_average'
    assert [target['share'] for target in printed['targets']] == [0.02, 0.05, 0.1, 0.2, 0]
    *items_of_targets, num_all = [target['num_items'] for target in printed['targets']]
    assert items_of_targets == sorted(items_of_targets, reverse=True)
    # Several generations of a question are items.
    assert num_all <= sum(task['num_items'] for task in printed['tasks'])
    assert printed['targets'][4]['seconds'] == pytest.approx(printed['total_seconds'])


def test_precision_targets_are_shown_with_a_gauntlet(gauntlet, settings, gauntlet_file):
    status, out, _ = gauntlet(*words_of(settings), '--dry-run', '--gauntlet', gauntlet_file)

    assert status == 0
    assert 'sums/2-shot' in out
    assert 'about ' in out
    assert 'one batch was run, and scaled by its cost' in out
    assert 'Subsets by --precision-target, for default_average' in out


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        (('--dry-run', '--max-seq-len', 99999), '--max-seq-len is 99999'),
        (('--dry-run', '--out', 'FULL'), 'is not empty'),
        # Without --dry-run.
        ((), '--out: is missing'),
    ],
)
def test_settings_are_checked_as_in_a_real_run_which_needs_a_folder(gauntlet, settings, tmp_path, words, expected: str):
    words = [{'FULL': tmp_path}.get(word, word) for word in words]

    status, out, err = gauntlet(*words_of(settings), *words)

    assert status == 2
    assert out == ''
    assert expected in err
    assert 'Traceback' not in err
