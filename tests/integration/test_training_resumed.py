"""Trainings that go on from a checkpoint: each evaluation that is due is made, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from attempts import outcome
from composer import Callback, Logger, State
from composer.loggers import InMemoryLogger

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.records.results import find_results

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
