"""`gauntlet compare` on what cannot be compared: the error names what is wrong."""

from __future__ import annotations

from pathlib import Path

from compared_runs import (
    CHOICES,
    LINES,
    RIDDLES,
    answers_of,
    copy_run,
    samples_path,
)


def test_runs_without_a_task_in_common_are_a_mistake(gauntlet, make_run):
    one, other = make_run('one', [LINES, CHOICES]), make_run('other', [RIDDLES])
    status, _, err = gauntlet('compare', one, other)
    assert status == 2
    assert err == (
        f'error: {one} and {other} have no task in common: the first has {LINES}, {CHOICES}, the second {RIDDLES}\n'
    )


def test_other_numbers_of_shots_are_other_tasks(gauntlet, make_run):
    answers = [answer | {'num_shots': 1} for answer in answers_of(0, [LINES])]
    one, other = make_run('one', [LINES]), make_run('other', ['lines/1-shot'], answers=answers)
    status, _, err = gauntlet('compare', one, other)
    assert status == 2 and 'the first has lines/0-shot, the second lines/1-shot' in err


def test_a_folder_that_holds_no_run_is_a_mistake(gauntlet, runs: dict[str, Path], tmp_path: Path):
    for words in ([runs['a'], tmp_path], [tmp_path, runs['a']], [tmp_path]):
        status, out, err = gauntlet('compare', *words)
        assert (status, out) == (2, '')
        assert err == f'error: {tmp_path}: there is no results.json at or below it\n'
    status, _, err = gauntlet('compare', runs['a'], tmp_path / 'nowhere')
    assert status == 2 and f'{tmp_path}/nowhere: there is no results.json' in err
    assert gauntlet('compare')[0] == 2


def test_a_run_without_its_samples_is_a_mistake(gauntlet, runs: dict[str, Path], tmp_path: Path):
    broken = copy_run(runs['b'], tmp_path / 'broken')
    samples_path(broken, LINES).unlink()
    status, _, err = gauntlet('compare', runs['a'], broken)
    assert status == 2 and err.startswith(f'error: {samples_path(broken, LINES)}: cannot be read')


def test_one_run_alone_is_a_mistake_with_a_hint(gauntlet, runs: dict[str, Path]):
    status, out, err = gauntlet('compare', runs['a'])
    assert (status, out) == (2, '')
    assert err == f'error: {runs["a"]}: holds one evaluation; name another run to compare it with\n'
