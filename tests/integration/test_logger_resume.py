"""A training that was killed and resumed continues its curves; only rank 0 logs."""

from __future__ import annotations

from pathlib import Path

import forks
import logged_values
import loggers_worker
import pytest
from logged_values import MLflowServer, Values, approximately, mlflow_values, recorded, sorted_values

pytestmark = pytest.mark.slow  # starts a server and many processes
mlflow_server = logged_values.mlflow_server

STEPS = [0, 2, 4, 6]


def train(num_ranks: int, folder: Path, server: MLflowServer, moment: str) -> list[int]:
    """Train on some ranks; return their exit statuses."""
    log, arguments = folder / 'log.txt', (folder, server.uri, moment)
    ranks = forks.start_ranks(loggers_worker.main, [log] * num_ranks, *arguments, WANDB_MODE='offline')
    return forks.statuses(ranks, log)


def everywhere(folder: Path, server: MLflowServer) -> dict[str, Values]:
    """Return the values of the loggers that record steps."""
    (mlflow,) = mlflow_values(server, folder.name)
    tensorboard = logged_values.tensorboard_values(folder / 'tensorboard' / loggers_worker.RUN_NAME)
    return {'mlflow': mlflow, 'tensorboard': tensorboard, 'wandb': logged_values.wandb_values(folder)}


@pytest.mark.parametrize('moment', ['in_evaluation', 'after_evaluation'])
def test_a_killed_and_resumed_training_logs_each_evaluation_once(tmp_path, mlflow_server, moment):
    log = tmp_path / 'log.txt'
    assert train(1, tmp_path, mlflow_server, moment) == [-9]
    assert 'Traceback' not in log.read_text(), log.read_text()[-3000:]
    assert [step for step, _ in recorded(tmp_path)['gauntlet/batch']] == (
        [0, 2] if moment == 'in_evaluation' else STEPS[:3]
    )
    assert train(1, tmp_path, mlflow_server, 'whole') == [0], log.read_text()[-3000:]
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
    assert train(2, tmp_path, mlflow_server, 'whole') == [0, 0], (tmp_path / 'log.txt').read_text()[-3000:]
    expected = recorded(tmp_path)
    assert [step for step, _ in expected['gauntlet/batch']] == STEPS
    for name, values in everywhere(tmp_path, mlflow_server).items():
        assert sorted_values(values, expected) == approximately(expected, rel=1e-6), name
