"""The ranks of a job, alone and over a process group of gloo."""

from __future__ import annotations

import json
import os
import pickle
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from paths import ROOT
from torchrun import run_well

from llmfoundry_gauntlet.errors import ConfigError, DataError, MissingFileError, UnwrittenError
from llmfoundry_gauntlet.runtime.distributed import (
    barrier,
    broadcast,
    gather,
    global_rank,
    is_first_to_say,
    on_first_rank,
    raised_on_all_ranks,
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


@pytest.mark.parametrize(
    'error',
    [
        ConfigError([f'tasks.yaml:{line}: is wrong' for line in range(25)]),  # more than its text has
        MissingFileError('rows.jsonl: there is no such file'),
        UnwrittenError('out: the disk is full', folder=Path('out'), record={'tasks': {}}),
        FileNotFoundError(2, 'No such file or directory', 'rows.jsonl'),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_is_sent_to_another_rank_is_the_same_there(error: Exception):
    received = pickle.loads(pickle.dumps(error))

    assert (type(received), str(received), vars(received)) == (type(error), str(error), vars(error))


def test_without_other_ranks_an_error_is_raised_as_it_is():
    raised = DataError('rows.jsonl:1: no row')

    with pytest.raises(DataError) as caught, raised_on_all_ranks():
        raise raised

    assert caught.value is raised
    assert not hasattr(raised, '__notes__')


# Two ranks


def no_row() -> None:
    raise DataError('rows.jsonl:1: no row')


def exchange(folder: Path) -> None:
    """Exchange values as one of two ranks, and write what was received."""
    torch.distributed.init_process_group('gloo')
    rank = global_rank()
    total = torch.tensor([rank + 1])
    sum_over_ranks(total)
    received = [gather(rank), broadcast(f'of {rank}'), on_first_rank(global_rank), total.tolist()]
    try:
        on_first_rank(no_row)
    except DataError as error:
        received.append(str(error))
    barrier()
    (folder / f'{rank}.txt').write_text(repr(received))


@pytest.mark.slow
def test_two_ranks_exchange_values_and_the_error_of_the_first(tmp_path: Path):
    forks.run(exchange, tmp_path / 'log.txt', tmp_path, num_ranks=2)

    expected = repr([[0, 1], 'of 0', 0, [3], 'rows.jsonl:1: no row'])
    assert [(tmp_path / f'{rank}.txt').read_text() for rank in range(2)] == [expected, expected]


def fail(folder: Path, errors: Mapping[int, Exception]) -> None:
    """Raise the error of this rank, if it has one, and write what was raised on all ranks."""
    torch.distributed.init_process_group('gloo')
    rank = global_rank()
    try:
        with raised_on_all_ranks():
            if rank in errors:
                raise errors[rank]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].name  # the last one is the context on other ranks
        content = [type(error).__name__, str(error), getattr(error, '__notes__', []), where]
        (folder / f'{rank}.json').write_text(json.dumps(content))
    barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('errors', 'raised'),
    [
        # An expected error of one rank has its type and message on both, and its traceback on its own.
        (
            {1: DataError('rows.jsonl:1: no row')},
            [
                ['DataError', 'rows.jsonl:1: no row', ['raised on rank 1'], 'raised_on_all_ranks'],
                ['DataError', 'rows.jsonl:1: no row', [], 'fail'],
            ],
        ),
        # Of several errors all ranks raise the first.
        (
            {0: ConfigError('a: is wrong'), 1: DataError('rows.jsonl:1: no row')},
            [
                ['ConfigError', 'a: is wrong', [], 'fail'],
                ['ConfigError', 'a: is wrong', ['raised on rank 0'], 'raised_on_all_ranks'],
            ],
        ),
        # An unexpected error ends the other ranks with its text.
        (
            {1: KeyError('gold')},
            [
                ['RuntimeError', "rank 1 failed: KeyError: 'gold'", ['raised on rank 1'], 'raised_on_all_ranks'],
                ['KeyError', "'gold'", [], 'fail'],
            ],
        ),
    ],
    ids=['one rank', 'both ranks', 'unexpected'],
)
def test_an_error_of_one_rank_is_raised_on_both(tmp_path: Path, errors: dict[int, Exception], raised: list[Any]):
    """Mutation: the other rank waits for ever."""
    forks.run(fail, tmp_path / 'log.txt', tmp_path, errors, num_ranks=2)

    assert [json.loads((tmp_path / f'{rank}.json').read_text()) for rank in range(2)] == raised


def say(folder: Path, environment: Mapping[str, str]) -> None:
    """Write whether this rank is the first to say what both say, twice, and what it alone says."""
    torch.distributed.init_process_group('gloo')  # its store takes the place of torchrun's
    os.environ.update(environment)
    rank = global_rank()
    first = [is_first_to_say('the same'), is_first_to_say('the same'), is_first_to_say(f'of rank {rank}')]
    (folder / f'{rank}.json').write_text(json.dumps(first))
    barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('environment', 'num_firsts'),
    [
        ({'TORCHELASTIC_USE_AGENT_STORE': 'True'}, 1),
        ({}, 4),  # without torchrun every rank says everything
    ],
)
def test_what_two_ranks_say_is_said_once(tmp_path: Path, environment: dict[str, str], num_firsts: int):
    forks.run(say, tmp_path / 'log.txt', tmp_path, environment, num_ranks=2)

    first_of_rank = [json.loads((tmp_path / f'{rank}.json').read_text()) for rank in range(2)]
    assert sum(sum(of_both) for *of_both, _ in first_of_rank) == num_firsts
    assert all(own for *_, own in first_of_rank)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, 'sched_setaffinity'), reason='needs Linux, to slow threads down')
def test_ranks_end_well_while_threads_of_gloo_still_have_tensors():
    """Mutation: the process group is left to the end of the interpreter."""
    run_well(ROOT / 'tests' / 'integration' / 'slow_gloo.py', num_ranks=4)
