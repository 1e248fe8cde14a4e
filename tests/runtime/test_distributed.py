"""The ranks of a job, alone and over a process group of gloo."""

from __future__ import annotations

from pathlib import Path

import forks
import pytest
import torch

from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.runtime.distributed import (
    barrier,
    broadcast,
    gather,
    global_rank,
    on_first_rank,
    sum_over_ranks,
    world_size,
)


def test_one_process_without_a_group_is_a_job_of_one_rank():
    total = torch.tensor([3])
    sum_over_ranks(total)
    barrier()
    assert (global_rank(), world_size()) == (0, 1)
    assert (gather('a'), broadcast('a'), on_first_rank(lambda: 'a'), total.tolist()) == (['a'], 'a', 'a', [3])


def test_ranks_of_a_launcher_without_a_group_are_an_error(monkeypatch: pytest.MonkeyPatch):
    """Mutation: a single answer in place of those of all ranks."""
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: False)  # another test may have made a group
    monkeypatch.setenv('RANK', '1')
    monkeypatch.setenv('WORLD_SIZE', '4')
    assert (global_rank(), world_size()) == (1, 4)
    with pytest.raises(RuntimeError, match=r'WORLD_SIZE=4.*init_process_group'):
        gather('a')


def fail() -> None:
    raise DataError('rows.jsonl:1: no row')


def work(folder: Path) -> None:
    """Communicate as one of two ranks, and write what was found."""
    torch.distributed.init_process_group('gloo')
    rank = global_rank()
    total = torch.tensor([rank + 1])
    sum_over_ranks(total)
    found = [gather(rank), broadcast(f'of {rank}'), on_first_rank(global_rank), total.tolist()]
    try:
        on_first_rank(fail)
    except DataError as error:
        found.append(str(error))
    barrier()
    (folder / f'{rank}.txt').write_text(repr(found))


@pytest.mark.slow
def test_two_ranks_exchange_values_and_the_error_of_the_first(tmp_path: Path):
    forks.run(work, tmp_path / 'log.txt', tmp_path, num_ranks=2)
    expected = repr([[0, 1], 'of 0', 0, [3], 'rows.jsonl:1: no row'])
    assert [(tmp_path / f'{rank}.txt').read_text() for rank in range(2)] == [expected, expected]
