"""Two nodes, each with its own launcher, cache directory and, unless they share one, working directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attempts
import forks
import pytest
import tiny
from watched import record

pytestmark = pytest.mark.slow


class Nodes:
    """Two nodes that evaluate into the folder `out` of their working directories, with `num_ranks` ranks each."""

    def __init__(self, folder: Path, tasks: Path, *, shares: bool, num_ranks: int = 1) -> None:
        self.folder = folder
        self.homes = [folder / f'home{node}' for node in range(2)]
        self.places = [folder if shares else home for home in self.homes]
        self.outs = [place / 'out' for place in self.places]
        for home in self.homes:
            home.mkdir()
        settings: dict[str, Any] = {'model': f'{tasks}/model', 'tokens_per_batch': 120, 'device': 'cpu', 'resume': True}
        (folder / 'eval.yaml').write_text(json.dumps({**settings, **tiny.settings_of(tasks), 'out': 'out'}))
        self.caches = [self.homes[0] / 'cache', self.homes[1] / '.cache/llmfoundry_gauntlet']
        self.num_ranks = num_ranks

    def start(self) -> list[subprocess.Popen[bytes]]:
        """Start both launchers. The first node's cache is in a directory of its own, the second's in its home."""
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = free.getsockname()[1]
        shared = {name: value for name, value in os.environ.items() if name != 'LLMFOUNDRY_GAUNTLET_CACHE'}
        shared |= {'PYTHONPATH': forks.PATHS, 'OMP_NUM_THREADS': '1'}
        caches = [{'LLMFOUNDRY_GAUNTLET_CACHE': str(self.caches[0])}, {'XDG_CACHE_HOME': ''}]
        of_torchrun = ['--nnodes=2', f'--nproc_per_node={self.num_ranks}', '--master_addr=127.0.0.1']
        launchers = []
        for node in range(2):
            command = [sys.executable, '-m', 'torch.distributed.run', *of_torchrun, f'--master_port={port}']
            command += [f'--node_rank={node}', '-m', 'llmfoundry_gauntlet', 'eval', str(self.folder / 'eval.yaml')]
            environment = {**shared, **caches[node], 'HOME': str(self.homes[node])}
            with (self.folder / f'node{node}.txt').open('ab') as log:
                launchers.append(
                    subprocess.Popen(command, cwd=self.places[node], env=environment, stdout=log, stderr=log)
                )
        return launchers

    def finish(self) -> dict[str, Any]:
        """Evaluate until both launchers end; return results.json."""
        launchers = self.start()
        assert [launcher.wait(forks.PATIENCE) for launcher in launchers] == [0, 0], self.said
        return record(self.outs[0])

    def interrupt(self) -> list[int]:
        """End the evaluation once each node has finished some items; return how many lines their journals have."""
        launchers = self.start()
        end = time.monotonic() + forks.PATIENCE
        while min(map(attempts.num_lines, self.outs)) < 10 and time.monotonic() < end:
            time.sleep(0.005)
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        assert 0 not in [launcher.wait(forks.PATIENCE) for launcher in launchers], self.said
        return [len(attempts.journal_lines(out)) for out in self.outs]

    @property
    def said(self) -> str:
        """Return the end of what both have printed."""
        return '\n'.join(forks.tail_of(self.folder / f'node{node}.txt') for node in range(2))


@pytest.mark.parametrize(('shares', 'num_ranks'), [(True, 1), pytest.param(False, 2, marks=pytest.mark.long)])
def test_two_nodes_score_as_one_rank(folder: Path, undisturbed, tmp_path: Path, shares: bool, num_ranks: int):
    """Records are in the working directory of the first node, token ids in the cache directory of each."""
    nodes = Nodes(tmp_path, folder, shares=shares, num_ranks=num_ranks)
    found = nodes.finish()
    assert attempts.outcome(nodes.outs[0]) == undisturbed
    assert found['environment']['num_ranks'] == 2 * num_ranks
    assert sorted(path.name for path in nodes.outs[0].iterdir()) == ['results.json', 'samples']
    assert shares or not any(nodes.outs[1].glob('*'))
    for cache in nodes.caches:
        assert len([*cache.glob('tokens/*.tokens')]) == len(found['tasks'])


def test_nodes_without_a_shared_folder_resume_from_the_journals_of_both(folder: Path, undisturbed, tmp_path: Path):
    """Mutation: only the first node's journal is read."""
    nodes = Nodes(tmp_path, folder, shares=False)
    lines = nodes.interrupt()
    reused = nodes.finish()['timing']['reused_items']
    assert attempts.outcome(nodes.outs[0]) == undisturbed
    assert sum(lines) - 4 <= reused < sum(lines)  # without identities and torn last lines
    assert not (nodes.outs[1] / 'journal').exists()
