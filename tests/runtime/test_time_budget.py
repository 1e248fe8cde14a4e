"""Time budgets: one choice before the first evaluation, and the same questions afterwards."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import composer_training
import forks
import numpy as np
import pytest
import tiny
import torch
import transformers
from command_line import run_cli

from llmfoundry_gauntlet import EvalGauntlet, evaluate
from llmfoundry_gauntlet.errors import ConfigError, RecordError
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.files import find_results
from llmfoundry_gauntlet.runtime import checks, time_budget, timed_sample
from llmfoundry_gauntlet.runtime.distributed import global_rank
from llmfoundry_gauntlet.runtime.gauntlet import Gauntlet
from llmfoundry_gauntlet.runtime.journal import Resuming
from llmfoundry_gauntlet.runtime.timed_sample import EstimatedSeconds

NUM_ROWS = {'short': 300, 'long': 300, 'few': 12}
LONG = 'long/0-shot'
BUDGET = '10s'


@pytest.fixture(scope='module')
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return three tasks: of short rows, of long ones in two categories and passages of three, and of few rows."""
    folder = tmp_path_factory.mktemp('data')
    tasks = []
    for label, count in NUM_ROWS.items():
        more = ' and so' * (8 if label == 'long' else 1)
        rows = [
            {'context': f'{row}{more}', 'continuation': str(row), 'category': 'ab'[row % 2], 'page': row // 6}
            for row in range(count)
        ]
        tiny.write_rows(folder / f'{label}.jsonl', rows)
        task = {'label': label, 'dataset_uri': f'{label}.jsonl', 'num_fewshot': [0]}
        task['icl_task_type'] = 'language_modeling'
        tasks.append({**task, 'has_categories': True, 'cluster_key': 'page'} if label == 'long' else task)
    benchmarks = [{'name': label, 'num_fewshot': 0} for label in NUM_ROWS]
    gauntlet = {'categories': [{'name': 'all', 'benchmarks': benchmarks}]}
    return {
        'tasks': tasks,
        'gauntlet': gauntlet,
        'data_root': str(folder),
        'save_folder': None,
        'max_seq_len': 128,
        'tokens_per_batch': 1000,
    }


@pytest.fixture
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return tiny.tokenizer()


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that fixes the seconds which all questions of each task are estimated to take."""

    def fix(seconds_of_task: float) -> None:
        busy_by_task = dict.fromkeys((f'{label}/0-shot' for label in NUM_ROWS), seconds_of_task)
        estimated = EstimatedSeconds(
            by_part={'scoring': len(NUM_ROWS) * seconds_of_task}, busy_by_task=busy_by_task, notes=()
        )
        monkeypatch.setattr(time_budget, 'estimated_seconds', lambda *_, **__: estimated)

    return fix


def items_of(evaluation: Evaluation) -> dict[str, str]:
    """Return every item with its prediction, score and log-probabilities, as exact text."""
    return {str(result.key): repr(result) for results in evaluation.results.values() for result in results}


def scores_of(evaluation: Evaluation) -> dict[str, tuple[float | None, str]]:
    """Return every item's score and the digest of its prompt, which do not depend on the batch."""
    return {
        str(result.key): (result.score, result.prompt_sha256)
        for results in evaluation.results.values()
        for result in results
    }


def total(gauntlet: Gauntlet) -> int:
    assert gauntlet.sizes is not None
    return sum(gauntlet.sizes.values())


# The choice.


def random_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_the_choice_changes_no_item_and_leaves_the_random_states(settings, tokenizer):
    """Mutation: a batch of the sample is left in a cache, or its results are kept."""
    network = tiny.model().train()
    items_without = items_of(Gauntlet(**settings).evaluate(network, tokenizer))
    states = random_states()
    gauntlet = Gauntlet(**settings, time_budget='1h')

    evaluation = gauntlet.evaluate(network, tokenizer)

    assert items_of(evaluation) == items_without  # there is time for all
    assert gauntlet.sizes == {f'{label}/0-shot': number for label, number in NUM_ROWS.items()}
    assert random_states() == states
    assert network.training


def test_a_subset_that_fits_scores_as_within_all_questions(settings, tokenizer, takes):
    scores_alone = scores_of(Gauntlet(**settings).evaluate(tiny.model(), tokenizer))
    takes(10.0)
    gauntlet = Gauntlet(**settings, time_budget=BUDGET)

    scores = scores_of(gauntlet.evaluate(tiny.model(), tokenizer))

    assert len(scores) == total(gauntlet) < len(scores_alone)
    assert scores.items() <= scores_alone.items()


def test_time_that_a_machine_takes_decides(settings, tokenizer, monkeypatch):
    """On a machine that takes ten times as long, about a tenth of the questions fit."""
    chosen = []
    for factor in (1, 10):
        monkeypatch.setattr(timed_sample, 'scoring_seconds', lambda *_, factor=factor: 30.0 * factor)
        gauntlet = Gauntlet(**settings, time_budget='15s')
        gauntlet.evaluate(tiny.model(), tokenizer)
        chosen.append(total(gauntlet))

    assert chosen[0] > 4 * chosen[1]


def test_the_number_of_questions_and_the_time_of_the_choice_are_said(settings, tokenizer, takes, caplog):
    takes(10.0)
    gauntlet = Gauntlet(**settings, time_budget=BUDGET)

    with caplog.at_level('INFO'):
        gauntlet.evaluate(tiny.model(), tokenizer)

    (said,) = [text for text in caplog.messages if text.startswith('time_budget')]
    assert f'{BUDGET}: {total(gauntlet)} of {sum(NUM_ROWS.values())} questions' in said
    assert 'chosen in 0.' in said


def test_a_budget_that_is_too_short_is_an_error_before_any_item_is_recorded(settings, tokenizer, takes, tmp_path):
    takes(10_000.0)
    gauntlet = Gauntlet(**{**settings, 'save_folder': str(tmp_path / 'records')}, time_budget=BUDGET)

    with pytest.raises(ConfigError, match='the minimum of each task takes about'):
        gauntlet.evaluate(tiny.model(), tokenizer, step=2)

    assert not list(tmp_path.rglob('*.jsonl'))


def test_a_dry_run_says_what_would_be_chosen(settings, tmp_path, takes, capsys):
    takes(10.0)
    model = tiny.save(tiny.model(), tmp_path / 'model')
    words = ['run', '--model', model, '--data-root', settings['data_root'], '--device', 'cpu', '--max-seq-len', 128]
    for name, key in (('tasks', 'icl_tasks'), ('gauntlet', 'eval_gauntlet')):
        path = tmp_path / f'{name}.yaml'
        path.write_text(json.dumps({key: settings[name]}))
        words += [f'--{name}', path]

    status = run_cli(*words, '--time-budget', BUDGET, '--dry-run', '--format', 'json')

    found = json.loads(capsys.readouterr().out)
    num_items = sum(task['num_items'] for task in found['tasks'])
    assert status == 0
    assert num_items < sum(NUM_ROWS.values())
    assert f'time_budget {BUDGET}: {num_items} of {sum(NUM_ROWS.values())} questions fit' in found['notes']
    assert found['seconds'].keys() >= {'choosing the subset', 'scoring'}


# Later evaluations and resumed ones.


def raise_at(network: torch.nn.Module, num_forwards: int) -> Any:
    """Interrupt the network's forward after this many."""
    forwards = iter(range(num_forwards))

    def count(*_: Any) -> None:
        if next(forwards, None) is None:
            raise KeyboardInterrupt

    return network.register_forward_pre_hook(count)


def forwards_of(settings: dict[str, Any], tokenizer: Any) -> int:
    """Return the number of forwards of an evaluation with a time budget."""
    network, calls = tiny.model(), []
    network.register_forward_pre_hook(lambda *_: calls.append(None))
    Gauntlet(**{**settings, 'save_folder': None}, time_budget=BUDGET).evaluate(network, tokenizer)
    return len(calls)


@pytest.fixture
def interrupted(settings, tokenizer, takes, tmp_path) -> Iterator[tuple[Gauntlet, torch.nn.Module, dict[str, Any]]]:
    """Return a Gauntlet, interrupted two forwards before the end of its first evaluation, its network and settings."""
    takes(10.0)
    recorded = {**settings, 'save_folder': str(tmp_path / 'records'), 'time_budget': BUDGET}
    gauntlet, network = Gauntlet(**recorded), tiny.model()
    hook = raise_at(network, forwards_of(settings, tokenizer) - 2)
    with pytest.raises(KeyboardInterrupt):
        gauntlet.evaluate(network, tokenizer, step=2)
    hook.remove()
    yield gauntlet, network, recorded


def test_an_interrupted_first_evaluation_is_repeated_in_the_same_process(interrupted, tokenizer):
    gauntlet, network, recorded = interrupted

    evaluation = gauntlet.evaluate(network, tokenizer, step=2)

    alone = Gauntlet(**{**recorded, 'save_folder': None}).evaluate(tiny.model(), tokenizer)
    assert items_of(evaluation) == items_of(alone)
    assert tiny.record(Path(recorded['save_folder']) / 'ba2')['timing']['reused_items'] > 0


def test_a_first_evaluation_interrupted_while_it_chooses_chooses_again(settings, tokenizer, monkeypatch):
    gauntlet = Gauntlet(**settings, time_budget='1h')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(timed_sample, 'gather', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        gauntlet.evaluate(tiny.model(), tokenizer)
    assert gauntlet.sizes is None

    gauntlet.evaluate(tiny.model(), tokenizer)

    assert total(gauntlet) == sum(NUM_ROWS.values())


def test_another_job_resumes_the_subset_whatever_time_it_would_take_there(interrupted, tokenizer, takes):
    """Mutation: it times a sample anew, so that the items of the journal are of another subset."""
    gauntlet, network, recorded = interrupted
    takes(20.0)
    later_job = Gauntlet(**recorded)

    evaluation = later_job.evaluate(network, tokenizer, step=2)

    assert later_job.sizes == gauntlet.sizes
    assert len(items_of(evaluation)) == total(gauntlet)
    assert tiny.record(Path(recorded['save_folder']) / 'ba2')['timing']['reused_items'] > 0


def test_a_job_with_another_budget_does_not_resume(interrupted, tokenizer, monkeypatch):
    _, network, recorded = interrupted
    monkeypatch.setattr(checks, 'CLAIMS', {})  # the folder is claimed in the job that was interrupted
    other_budget = Gauntlet(**{**recorded, 'time_budget': '5s'})
    other_budget.resuming = Resuming(required=True)

    with pytest.raises(RecordError, match=r'time_budget 10s \(now 5s\)'):
        other_budget.evaluate(network, tokenizer, step=2)


def test_finished_records_are_resumed_with_their_subset(settings, tokenizer, takes, tmp_path):
    takes(10.0)
    recorded = {**settings, 'save_folder': str(tmp_path), 'time_budget': BUDGET}
    first, network = Gauntlet(**recorded), tiny.model()
    first.evaluate(network, tokenizer, step=2)
    takes(20.0)
    again = Gauntlet(**recorded)

    again.evaluate(network, tokenizer, step=2)

    assert again.sizes == first.sizes


def rows_of_long(folder: Path) -> list[int]:
    """Return the rows of the task of long questions in a record."""
    lines = (folder / 'samples' / 'long_0-shot.jsonl').read_text().splitlines()
    return [json.loads(line)['row'] for line in lines]


@pytest.mark.slow
def test_all_evaluations_use_the_same_items(settings, tmp_path):
    settings = {**settings, 'time_budget': '1s', 'interval': ['first', '2ba']}
    gauntlet = EvalGauntlet(**{**settings, 'save_folder': str(tmp_path / 'records')})

    composer_training.train([gauntlet], max_duration='4ba')

    records = [record for _, record in find_results(tmp_path / 'records')]
    sizes = gauntlet.gauntlet.sizes
    assert [record['timing']['time_budget'] for record in records] == [sizes] * 3
    folders = sorted((tmp_path / 'records').iterdir())
    first_rows, *later_rows = [rows_of_long(folder) for folder in folders]
    assert later_rows == [first_rows] * 2
    assert len(first_rows) == sizes[LONG]
    assert records[1]['composites']['version'] == records[2]['composites']['version']


@pytest.mark.slow
def test_a_model_without_training_is_evaluated_within_a_budget(settings, tmp_path):
    model = tiny.save(tiny.model(), tmp_path / 'model')
    # Only a training has a save_folder.
    settings = {key: value for key, value in settings.items() if key != 'save_folder'}

    part = evaluate(model, **settings, device='cpu', time_budget='1s', out=str(tmp_path / 'out'))

    sizes = tiny.record(tmp_path / 'out')['timing']['time_budget']
    assert {key: len(results) for key, results in part.results.items()} == sizes


# Several ranks.


def evaluate_on_ranks(folder: Path, settings: dict[str, Any]) -> None:
    """Evaluate on ranks of which each takes longer than the one before, and write what each has chosen."""
    torch.distributed.init_process_group('gloo')
    seconds_of_batch = timed_sample.seconds_of_batch

    def slower(*arguments: Any, **keys: Any) -> float:
        return seconds_of_batch(*arguments, **keys) + 5.0 * global_rank()

    timed_sample.seconds_of_batch = slower
    gauntlet = Gauntlet(**settings)
    items = items_of(gauntlet.evaluate(tiny.model(), tiny.tokenizer()))
    (folder / f'rank{global_rank()}.json').write_text(json.dumps([gauntlet.sizes, items]))
    torch.distributed.barrier()


@pytest.mark.slow
def test_ranks_choose_what_the_slowest_of_them_can_run(settings, tmp_path):
    """Mutation: each rank goes by its own clock."""
    forks.run(evaluate_on_ranks, tmp_path / 'log.txt', tmp_path, {**settings, 'time_budget': '30s'}, num_ranks=2)

    sizes_and_items = json.loads((tmp_path / 'rank0.json').read_text())
    assert sizes_and_items == json.loads((tmp_path / 'rank1.json').read_text())
    # A batch that takes 5 s is at most 1,000 tokens: all of them would take minutes.
    sizes, _ = sizes_and_items
    assert sum(sizes.values()) < sum(NUM_ROWS.values())
