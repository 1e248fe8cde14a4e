"""Trainings that go on from a checkpoint: each evaluation that is due is made, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch.distributed.checkpoint as dist_checkpoint
from attempts import outcome
from composer import Callback, Logger, State
from composer.loggers import InMemoryLogger

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.results.files import find_results

KEY = 'icl/metrics/eval_gauntlet/all'


class Cut(Callback):
    """Ends the job in the middle of the evaluation at a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.steps = 0

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self.steps += state.timestamp.batch.value == self.batch
        if self.steps == 4:
            raise KeyboardInterrupt


def job(folder: Path, settings: dict[str, str], interval: str, callbacks: list[Callback]) -> InMemoryLogger:
    """One job of a training of four batches with a checkpoint every two; what it has logged."""
    logger = InMemoryLogger()
    gauntlet = EvalGauntlet(**settings, interval=interval, tokens_per_batch=60, save_folder=str(folder / 'records'))
    trainer = tiny.trainer(
        [*callbacks, gauntlet],
        max_duration='4ba',
        save_folder=str(folder / 'checkpoints'),
        save_interval='2ba',
        autoresume=True,
        run_name='job',
        loggers=[logger],
    )
    try:
        if trainer.state.timestamp < trainer.state.max_duration:
            trainer.fit()
    except KeyboardInterrupt:
        pass
    finally:
        trainer.close()
    return logger


def batches(logger: InMemoryLogger) -> list[int]:
    return [timestamp.batch.value for timestamp, _ in logger.data.get(KEY, [])]


@pytest.mark.parametrize(('interval', 'due'), [('2ba', [2, 4]), ('checkpoint', [2, 4]), ('last', [4])])
def test_an_evaluation_that_was_cut_off_is_made_once(tmp_path, tiny_settings, interval, due):
    assert batches(job(tmp_path / 'whole', tiny_settings, interval, [])) == due
    folder = tmp_path / 'cut'
    assert batches(job(folder, tiny_settings, interval, [Cut(4)])) == due[:-1]
    assert not (folder / 'records/ba4/results.json').exists()
    assert batches(job(folder, tiny_settings, interval, [])) == [4]
    assert batches(job(folder, tiny_settings, interval, [])) == []
    (*_, last) = [record for _, record in find_results(folder / 'records')]
    assert last['timing']['reused_items'] > 0
    assert Path(last['training']['checkpoint']).name == 'ep0-ba4-rank0.pt'
    assert outcome(folder / 'records/ba4') == outcome(tmp_path / 'whole/records/ba4')


@pytest.mark.filterwarnings('ignore:EvalGauntlet is not in the state_dict')  # as Composer says of any new callback
def test_a_checkpoint_loads_with_the_callback_and_without_it(tmp_path, tiny_settings):
    def train(duration: str, gauntlets: list[EvalGauntlet], name: str, **keys: str) -> None:
        folder = str(tmp_path / name)
        trainer = tiny.trainer(gauntlets, max_duration=duration, save_folder=folder, save_interval='2ba', **keys)
        trainer.fit()
        trainer.close()
        assert trainer.state.timestamp.batch == int(duration.removesuffix('ba'))

    def gauntlet(name: str) -> EvalGauntlet:
        return EvalGauntlet(**tiny_settings, interval='2ba', save_folder=str(tmp_path / 'records' / name))

    train('2ba', [gauntlet('a')], 'with')
    train('4ba', [], 'then_without', load_path=str(tmp_path / 'with/latest-rank0.pt'))
    train('6ba', [gauntlet('b'), gauntlet('c')], 'then_two', load_path=str(tmp_path / 'then_without/latest-rank0.pt'))
    train('8ba', [gauntlet('d')], 'then_one', load_path=str(tmp_path / 'then_two/latest-rank0.pt'))
    found = {folder.parent.name: record['training']['batch'] for folder, record in find_results(tmp_path / 'records')}
    assert found == {'a': 2, 'b': 6, 'c': 6, 'd': 8}


NEVER = '1000ba'
FEWER = 2  # questions of each task that fit into the time, as if no more had


def budgeted(settings: dict[str, Any], budget: str | None = '60s', **further: Any) -> EvalGauntlet:
    return EvalGauntlet(**{**settings, 'interval': 'last', 'time_budget': budget, 'save_folder': None, **further})


def run_job(folder: Path, gauntlets: list[EvalGauntlet], batch: int) -> None:
    """Trains on from the latest checkpoint, if there is one, and saves another at a batch."""
    latest = folder / 'latest-rank0.pt'
    trainer = tiny.trainer(
        gauntlets,
        max_duration=f'{batch}ba',
        save_folder=str(folder),
        save_interval=f'{batch}ba',
        save_overwrite=True,
        load_path=str(latest) if latest.exists() else None,
    )
    if not latest.exists():
        for gauntlet in gauntlets:
            gauntlet.loader.settle(dict.fromkeys(gauntlet.loader.prepared.tasks, FEWER))
    trainer.fit()
    trainer.close()
    assert latest.resolve().name == f'ep0-ba{batch}-rank0.pt'


def part_of(settings: dict[str, Any], label: str) -> dict[str, Any]:
    """The settings of an evaluation of one of the tasks."""
    entries = json.loads(Path(settings['tasks']).read_text())['icl_tasks']
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
def test_a_job_that_saves_before_it_evaluates_keeps_the_items_of_a_time_budget(tmp_path, tiny_settings, between):
    """Without them the next job finds out anew what fits, and the curve goes on with other items."""
    first, last = budgeted(tiny_settings), budgeted(tiny_settings)
    run_job(tmp_path, [first], 2)
    run_job(tmp_path, BETWEEN[between](tiny_settings), 4)
    run_job(tmp_path, [last], 6)
    assert set(last.sizes.values()) == {FEWER}
    assert [*last.evaluation.results] == [*first.evaluation.results]
    for task, results in first.evaluation.results.items():
        assert [result.key for result in last.evaluation.results[task]] == [result.key for result in results]


def test_a_callback_that_is_added_before_another_leaves_it_its_items(tmp_path, tiny_settings):
    run_job(tmp_path, [budgeted(tiny_settings)], 2)
    added, last = budgeted(part_of(tiny_settings, 'sums')), budgeted(tiny_settings)
    run_job(tmp_path, [added, last], 4)
    assert set(last.sizes.values()) == {FEWER}
    assert added.sizes == {'sums/0-shot': 7, 'sums/2-shot': 7}  # all of them, as the time is more than enough


def test_a_state_that_is_loaded_before_there_is_a_trainer_counts(tmp_path, tiny_settings):
    first, second = budgeted(tiny_settings), budgeted(tiny_settings)
    run_job(tmp_path, [first], 2)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    trainer = tiny.trainer([second], max_duration='1ba')
    trainer.fit()
    trainer.close()
    assert second.sizes == first.sizes


@pytest.mark.filterwarnings('ignore:torch.distributed is')
def test_a_sharded_checkpoint_gives_the_sizes_back(tmp_path, tiny_settings):
    """It is loaded into the state of a callback that has no sizes yet, which has to be of the same shape."""
    saved, loaded = ({'callbacks': {'EvalGauntlet': budgeted(tiny_settings).state_dict()}} for _ in range(2))
    first, second = budgeted(tiny_settings), budgeted(tiny_settings)
    run_job(tmp_path / 'job', [first], 2)
    saved['callbacks']['EvalGauntlet'] = first.state_dict()
    dist_checkpoint.save(saved, checkpoint_id=tmp_path / 'sharded', no_dist=True)
    dist_checkpoint.load(loaded, checkpoint_id=tmp_path / 'sharded', no_dist=True)
    second.load_state_dict(loaded['callbacks']['EvalGauntlet'])
    assert second.state_dict() == first.state_dict()


def test_two_callbacks_go_on_with_the_items_that_fitted_into_their_own_budgets(tmp_path, tiny_settings):
    def gauntlets(job_name: str) -> list[EvalGauntlet]:
        return [
            EvalGauntlet(
                **tiny_settings, interval='2ba', time_budget=budget, save_folder=str(tmp_path / job_name / budget)
            )
            for budget in ('60s', '90s')
        ]

    first, second = gauntlets('first'), gauntlets('second')
    trainer = tiny.trainer(first, max_duration='2ba', save_folder=str(tmp_path / 'checkpoints'), save_interval='2ba')
    first[0].loader.settle(dict.fromkeys(first[0].loader.prepared.tasks, 2))  # as if no more had fitted
    trainer.fit()
    trainer.close()
    sizes = [dict(one.sizes) for one in first]
    assert sizes[0] != sizes[1]
    trainer = tiny.trainer(second, max_duration='4ba', load_path=str(tmp_path / 'checkpoints/latest-rank0.pt'))
    trainer.fit()
    trainer.close()
    assert [dict(one.sizes) for one in second] == sizes
