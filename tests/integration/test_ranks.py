"""One and several ranks have the same items and metrics, and training is the same with and without evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import attempts
import forks
import pytest
import tiny
import train_worker
from programs import can_confine

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tasks, data and a saved model."""
    folder = tmp_path_factory.mktemp('ranks')
    tiny.write_tasks(folder, replies=True)
    tiny.save(tiny.model(), folder / 'model')
    return folder


def evaluate(folder: Path, num_ranks: int) -> tuple[dict[str, float], dict[str, bytes]]:
    """Return metrics without timings, and every samples file, of an evaluation on some ranks."""
    out = folder / f'out_{num_ranks}'
    assert attempts.evaluate(folder, out, num_ranks, resume=False) == [0] * num_ranks, attempts.said(folder)
    assert json.loads((out / 'results.json').read_text())['environment']['num_ranks'] == num_ranks
    return attempts.outcome(out)


@pytest.fixture(scope='module')
def one(folder: Path) -> tuple[dict[str, float], dict[str, bytes]]:
    """Evaluate on one rank."""
    return evaluate(folder, 1)


@pytest.mark.parametrize('num_ranks', [2, pytest.param(3, marks=pytest.mark.long)])
def test_any_number_of_ranks_gives_identical_items_and_metrics(folder: Path, one, num_ranks: int):
    """Fails when a rank's last batch is dropped, or when results are averaged per rank."""
    num_programs = 6 * 3 if can_confine() else 0
    assert one[0]['gauntlet/items'] == 2 * (7 + 5 + 2) + 2 * 40 + num_programs
    assert len(one[1]) == 6 + 2 + bool(num_programs)
    lengths = {json.loads(line)['num_tokens'][0] for line in one[1]['drawn_1-shot.jsonl'].splitlines()}
    assert len(lengths) > 3
    assert evaluate(folder, num_ranks) == one


@pytest.mark.parametrize('num_ranks', [pytest.param(1, marks=pytest.mark.long), 2])
def test_training_with_evaluation_is_bitwise_training_without(folder: Path, num_ranks: int):
    """Weights, optimizer and random states; fails when the evaluator's loader is a torch DataLoader."""
    for mode in ('without', 'with'):
        forks.run(train_worker.main, folder / 'log.txt', folder, mode, num_ranks=num_ranks)
    assert sorted(path.name for path in (folder / 'records').iterdir()) == ['ba0', 'ba2', 'ba4', 'ba5']
    for rank in range(num_ranks):
        without, with_evaluation = (
            (folder / f'{mode}_{num_ranks}_{rank}.txt').read_text() for mode in ('without', 'with')
        )
        assert with_evaluation == without
