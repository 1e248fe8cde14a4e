"""One and several ranks have the same items and metrics, and training is the same with and without evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from paths import ROOT
from programs import can_confine

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def launch(num_ranks: int, *arguments: str) -> None:
    """Run a script with the `composer` launcher, one thread per rank."""
    composer = Path(sys.executable).parent / 'composer'
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(HERE)}
    done = subprocess.run(
        [composer, '-n', str(num_ranks), *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tasks, data and a saved model."""
    folder = tmp_path_factory.mktemp('ranks')
    tiny.write_tasks(folder, replies=True)
    tiny.model().save_pretrained(folder / 'model')
    tiny.tokenizer().save_pretrained(folder / 'model')
    return folder


def evaluate(folder: Path, num_ranks: int) -> tuple[dict[str, float], dict[str, bytes]]:
    """Return metrics without timings, and every samples file, of `gauntlet eval` on some ranks."""
    out = folder / f'out_{num_ranks}'
    config = folder / f'eval_{num_ranks}.yaml'
    config.write_text(
        json.dumps(
            {
                'model': str(folder / 'model'),
                'tasks': str(folder / 'tasks.yaml'),
                'gauntlet': str(folder / 'gauntlet.yaml'),
                'data_root': str(folder),
                'out': str(out),
                'tokens_per_batch': 120,
                'device': 'cpu',
            }
        )
    )
    launch(num_ranks, '-m', 'llmfoundry_gauntlet', 'eval', str(config))
    record = json.loads((out / 'results.json').read_text())
    assert record['environment']['num_ranks'] == num_ranks
    metrics = {key: value for key, value in record['metrics'].items() if not key.startswith('gauntlet/seconds')}
    return metrics, {path.name: path.read_bytes() for path in sorted((out / 'samples').iterdir())}


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
        launch(num_ranks, str(HERE / 'train_worker.py'), str(folder), mode)
    assert sorted(path.name for path in (folder / 'records').iterdir()) == ['ba0', 'ba2', 'ba4', 'ba5']
    for rank in range(num_ranks):
        without, with_evaluation = (
            (folder / f'{mode}_{num_ranks}_{rank}.txt').read_text() for mode in ('without', 'with')
        )
        assert with_evaluation == without
