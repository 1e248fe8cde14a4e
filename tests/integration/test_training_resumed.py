"""Trainings resumed from a checkpoint: each due evaluation runs once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import composer_training
import pytest
import torch.distributed.checkpoint as dist_checkpoint
from composer import Callback
from composer.loggers import InMemoryLogger
from tiny import finished_items, outcome, record

from llmfoundry_gauntlet import EvalGauntlet, RecordError
from llmfoundry_gauntlet.composer import callback
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.results.files import find_results

KEY = 'icl/metrics/eval_gauntlet/all'


def interrupt() -> None:
    raise KeyboardInterrupt


def job(folder: Path, settings: dict[str, str], interval: str, callbacks: Sequence[Callback] = ()) -> list[int]:
    """Run one job of a training of four batches with a checkpoint every two; return the batches that it logged."""
    logger = InMemoryLogger()
    gauntlet = EvalGauntlet(**settings, interval=interval, tokens_per_batch=60, save_folder=str(folder / 'records'))
    trainer = composer_training.trainer(
        [*callbacks, gauntlet],
        max_duration='4ba',
        loggers=[logger],
        run_name='job',
        save_folder=str(folder / 'checkpoints'),
        save_interval='2ba',
        autoresume=True,
    )
    with contextlib.closing(trainer), contextlib.suppress(KeyboardInterrupt):
        if trainer.state.timestamp < trainer.state.max_duration:
            trainer.fit()
    return [timestamp.batch.value for timestamp, _ in logger.data.get(KEY, [])]


@pytest.mark.parametrize(
    ('interval', 'due'),
    [
        ('2ba', [2, 4]),
        ('checkpoint', [2, 4]),
        ('last', [4]),
    ],
)
def test_an_interrupted_evaluation_is_finished_once(tmp_path, tiny_settings, interval, due):
    assert job(tmp_path / 'whole', tiny_settings, interval) == due

    folder = tmp_path / 'cut'
    assert job(folder, tiny_settings, interval, [composer_training.AtEvaluation(4, interrupt, step=4)]) == due[:-1]
    assert not (folder / 'records/ba4/results.json').exists()
    num_finished = finished_items(folder / 'records/ba4')

    assert job(folder, tiny_settings, interval) == [4]
    assert job(folder, tiny_settings, interval) == []  # nothing is left

    last = record(folder / 'records/ba4')
    assert last['timing']['reused_items'] == num_finished > 0
    assert Path(last['training']['checkpoint']).name == 'ep0-ba4-rank0.pt'
    assert outcome(folder / 'records/ba4') == outcome(tmp_path / 'whole/records/ba4')


def test_records_missing_beside_a_checkpoint_are_written_by_the_next_job(tmp_path, tiny_settings, monkeypatch):
    def killed(*_: Any, **__: Any) -> None:
        raise RecordError('the job was killed before they were written')

    records = tmp_path / 'records'
    with monkeypatch.context() as patch:
        patch.setattr('llmfoundry_gauntlet.runtime.gauntlet.write_records', killed)
        assert job(tmp_path, tiny_settings, 'checkpoint', [composer_training.AtBatches({3: interrupt})]) == [2]
    assert not list(records.rglob('results.json'))

    assert job(tmp_path, tiny_settings, 'checkpoint') == [2, 4]

    first = record(records / 'ba2')
    assert first['timing']['reused_items'] == first['metrics']['gauntlet/items'] > 0
    assert (records / 'ba4/results.json').is_file()
    assert not list(records.rglob('journal'))


@pytest.mark.filterwarnings('ignore:EvalGauntlet is not in the state_dict')  # Composer's warning about any new callback
def test_checkpoints_load_with_and_without_the_callback(tmp_path, tiny_settings):
    callbacks_until_batch = {
        2: ['a'],
        4: [],
        6: ['b', 'c'],
        8: ['d'],
    }

    load_path = None
    for batch, names in callbacks_until_batch.items():
        gauntlets = [
            EvalGauntlet(**tiny_settings, interval='2ba', save_folder=str(tmp_path / 'records' / name))
            for name in names
        ]
        folder = str(tmp_path / f'{batch}')
        saved = {'save_folder': folder, 'save_interval': '2ba', 'load_path': load_path}
        trainer = composer_training.train(gauntlets, max_duration=f'{batch}ba', **saved)
        assert trainer.state.timestamp.batch == batch
        load_path = f'{folder}/latest-rank0.pt'

    records = find_results(tmp_path / 'records')
    evaluated_at = {path.parent.name: record['training']['batch'] for path, record in records}
    assert evaluated_at == {'a': 2, 'b': 6, 'c': 6, 'd': 8}


def losses_of(records: Path) -> dict[int, tuple[float, int]]:
    points = [record['training'] for _, record in find_results(records)]
    return {point['batch']: (point['loss'], point['loss_batches']) for point in points}


def test_the_training_loss_is_the_mean_since_the_last_evaluation_also_over_a_resume(tmp_path, tiny_settings):
    """Evaluations at 2, 4 and the end at 7, of two callbacks; the job stops at 3, with its last checkpoint."""
    logged: dict[int, float] = {}
    load_path = None
    for batch in (3, 7):
        memory = InMemoryLogger()
        gauntlets = [
            EvalGauntlet(**tiny_settings, interval=interval, save_folder=str(tmp_path / name))
            for name, interval in (('often', ['first', '2ba', 'last']), ('rarely', ['5ba']))
        ]
        folder = str(tmp_path / f'{batch}')
        saved = {'save_folder': folder, 'save_interval': '1ba', 'load_path': load_path}
        composer_training.train(gauntlets, loggers=[memory], max_duration=f'{batch}ba', **saved)
        load_path = f'{folder}/ep0-ba3-rank0.pt'
        logged.update({time.batch.value: value for time, value in memory.data['loss/train/total']})

    losses = [logged[batch] for batch in range(7)]  # each logged at the number of batches before it
    expected: dict[int, Any] = {0: (None, None)}
    # The checkpoint of batch 3 is older than the evaluation at the end of the first job.
    spans = {2: losses[:2], 3: losses[2:3], 4: losses[2:4], 6: losses[4:6], 7: losses[6:]}
    for batch, span in spans.items():
        expected[batch] = (pytest.approx(sum(span) / len(span)), len(span))
    assert losses_of(tmp_path / 'often') == expected
    assert losses_of(tmp_path / 'rarely') == {5: (pytest.approx(sum(losses[:5]) / 5), 5)}  # over the resume


NEVER = '1000ba'
FEWER = 2  # items of each task taken to fit into the time


def budgeted(settings: dict[str, Any], budget: str | None = '60s', **further: Any) -> EvalGauntlet:
    return EvalGauntlet(**{**settings, 'interval': 'last', 'time_budget': budget, 'save_folder': None, **further})


def run_job(folder: Path, gauntlets: list[EvalGauntlet], batch: int) -> None:
    """Train from the latest checkpoint, if there is one, to a batch, and save another there."""
    latest = folder / 'latest-rank0.pt'
    saved = {'save_folder': str(folder), 'save_interval': f'{batch}ba', 'save_overwrite': True}
    load_path = str(latest) if latest.exists() else None
    trainer = composer_training.trainer(gauntlets, max_duration=f'{batch}ba', **saved, load_path=load_path)
    if load_path is None:
        gauntlets[0].use_subset(dict.fromkeys(gauntlets[0].data.tasks, FEWER))
    trainer.fit()
    trainer.close()
    assert latest.resolve().name == f'ep0-ba{batch}-rank0.pt'


def part_of(settings: dict[str, Any], label: str) -> dict[str, Any]:
    """Return the settings of an evaluation of one of the tasks."""
    entries = read_yaml(settings['tasks'])['icl_tasks']
    return {'tasks': [entry for entry in entries if entry['label'] == label], 'data_root': settings['data_root']}


BETWEEN = {
    'no evaluation': lambda settings: [budgeted(settings, interval=NEVER)],
    'no time budget': lambda settings: [budgeted(settings, None)],
    'other tasks': lambda settings: [budgeted(part_of(settings, 'sums'))],
    'another callback before it': lambda settings: [
        budgeted(part_of(settings, 'sums'), None),
        budgeted(settings, interval=NEVER),
    ],
}


@pytest.mark.parametrize('between', BETWEEN)
def test_a_job_that_saves_before_it_evaluates_keeps_the_subset_of_a_time_budget(tmp_path, tiny_settings, between):
    """Otherwise the next job would measure again and continue the curve with other items."""
    first, last = budgeted(tiny_settings), budgeted(tiny_settings)

    run_job(tmp_path, [first], 2)
    run_job(tmp_path, BETWEEN[between](tiny_settings), 4)
    run_job(tmp_path, [last], 6)

    assert set(last.gauntlet.sizes.values()) == {FEWER}
    assert [*last.evaluation.results] == [*first.evaluation.results]
    for task, results in first.evaluation.results.items():
        assert [result.key for result in last.evaluation.results[task]] == [result.key for result in results]


@pytest.mark.filterwarnings('ignore:torch.distributed is')
def test_a_sharded_checkpoint_restores_the_subset(tmp_path, tiny_settings):
    """It is loaded into the state of a callback without sizes, which must have the same structure."""
    first, second = budgeted(tiny_settings), budgeted(tiny_settings)
    run_job(tmp_path / 'job', [first], 2)
    saved = {'callbacks': {'EvalGauntlet': first.state_dict()}}
    loaded = {'callbacks': {'EvalGauntlet': budgeted(tiny_settings).state_dict()}}

    dist_checkpoint.save(saved, checkpoint_id=tmp_path / 'sharded', no_dist=True)
    dist_checkpoint.load(loaded, checkpoint_id=tmp_path / 'sharded', no_dist=True)
    second.load_state_dict(loaded['callbacks']['EvalGauntlet'])

    assert second.state_dict() == first.state_dict()


def test_the_list_of_subsets_in_older_checkpoints_is_read():
    known = {'a/0-shot': 3, 'b/0-shot': 4}
    others = {'c/0-shot': 5}
    unknown = dict.fromkeys(known)

    subsets = callback.subsets_in([unknown, others, known, {}])

    assert subsets == {
        '1: a/0-shot, b/0-shot': known,
        '0: c/0-shot': others,
    }


def test_two_callbacks_keep_the_subsets_of_their_own_budgets(tmp_path, tiny_settings):
    """The first takes the items that are settled, the second those that fit."""

    def gauntlets(name: str) -> list[EvalGauntlet]:
        folders = {budget: str(tmp_path / name / budget) for budget in ('60s', '90s')}
        return [budgeted(tiny_settings, budget, interval='2ba', save_folder=path) for budget, path in folders.items()]

    first, second = gauntlets('first'), gauntlets('second')
    run_job(tmp_path / 'checkpoints', first, 2)
    sizes = [dict(callback.gauntlet.sizes) for callback in first]
    assert sizes[0] != sizes[1]

    run_job(tmp_path / 'checkpoints', second, 4)

    assert [dict(callback.gauntlet.sizes) for callback in second] == sizes
