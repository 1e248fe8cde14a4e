"""A training that was killed and resumed continues its curves; only rank 0 logs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import logged_values
import loggers_worker
import pytest
from logged_values import MLflowServer, Values, approximately, mlflow_values, recorded, sorted_values

pytestmark = pytest.mark.slow  # starts a server and many processes
mlflow_server = logged_values.mlflow_server

HERE = Path(__file__).parent
STEPS = [0, 2, 4, 6]


def launch(num_ranks: int, folder: Path, server: MLflowServer, moment: str) -> subprocess.CompletedProcess[str]:
    """Train, on several ranks with the `composer` launcher."""
    composer = [Path(sys.executable).parent / 'composer', '-n', str(num_ranks)]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(HERE), 'WANDB_MODE': 'offline'}
    launcher = [sys.executable] if num_ranks == 1 else composer
    words = [*launcher, HERE / 'loggers_worker.py', folder, server.uri, moment]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)


def everywhere(folder: Path, server: MLflowServer) -> dict[str, Values]:
    """Return the values of the loggers that record steps."""
    (mlflow,) = mlflow_values(server, folder.name)
    tensorboard = logged_values.tensorboard_values(folder / 'tensorboard' / loggers_worker.RUN_NAME)
    return {'mlflow': mlflow, 'tensorboard': tensorboard, 'wandb': logged_values.wandb_values(folder)}


@pytest.mark.parametrize('moment', ['in_evaluation', 'after_evaluation'])
def test_a_killed_and_resumed_training_logs_each_evaluation_once(tmp_path, mlflow_server, moment):
    killed = launch(1, tmp_path, mlflow_server, moment)
    assert killed.returncode != 0
    assert 'Traceback' not in killed.stderr, killed.stderr[-3000:]
    assert [step for step, _ in recorded(tmp_path)['gauntlet/batch']] == (
        [0, 2] if moment == 'in_evaluation' else STEPS[:3]
    )
    resumed = launch(1, tmp_path, mlflow_server, 'whole')
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    expected = {key: points for key, points in recorded(tmp_path).items() if not key.startswith('gauntlet/seconds')}
    assert [step for step, _ in expected['gauntlet/batch']] == STEPS
    found = everywhere(tmp_path, mlflow_server)
    for name in ('mlflow', 'tensorboard'):
        assert sorted_values(found[name], expected) == approximately(expected, rel=1e-6), name
        assert [step for step, _ in sorted(found[name]['gauntlet/seconds'])] == STEPS, name
    # Offline W&B loses what it has in memory when it is killed; what it has it has once.
    steps = [step for step, _ in found['wandb']['gauntlet/batch']]
    assert steps in ([0, 4, 6], [0, 2, 4, 6])
    kept = {key: [point for point in points if point[0] in steps] for key, points in expected.items()}
    assert sorted_values(found['wandb'], kept) == approximately(kept, rel=1e-6)


def test_only_rank_0_logs(tmp_path, mlflow_server):
    done = launch(2, tmp_path, mlflow_server, 'whole')
    assert done.returncode == 0, done.stderr[-3000:]
    expected = recorded(tmp_path)
    assert [step for step, _ in expected['gauntlet/batch']] == STEPS
    for name, values in everywhere(tmp_path, mlflow_server).items():
        assert sorted_values(values, expected) == approximately(expected, rel=1e-6), name
