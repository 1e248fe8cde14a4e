"""`gauntlet compare` on what cannot be compared: the error names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import run_cli
from compared_runs import (
    AGIEVAL,
    CHOICES,
    LINES,
    RIDDLES,
    TOPICS,
    answers_of,
    copy_run,
    samples_of,
    samples_path,
    score_yaml,
    write_lines,
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


def test_other_words_are_a_mistake_that_names_tasks_and_rows(gauntlet, make_run, runs: dict[str, Path]):
    changed = {'choices': {'prompt_string': 'Please answer.\n'}, 'lines': {'prelimiter': 'Say: '}}
    other = make_run('other', [CHOICES, TOPICS, LINES], tasks=changed)
    status, out, err = gauntlet('compare', runs['a'], other)
    assert (status, out) == (2, '')
    assert err.splitlines() == [
        f'error: {CHOICES}: 12 of 12 prompts differ, first at row 0, row 1, row 2',
        f'error: {LINES}: 9 of 9 prompts differ, first at row 0, row 1, row 2',
        f'error: {runs["a"]} and {other} cannot be paired: evaluate with the same tasks, shots and data',
    ]


def test_other_shots_are_a_mistake_even_where_some_prompts_are_the_same(gauntlet, make_run):
    key = 'riddles/1-shot'
    answers = [answer | {'num_shots': 1} for answer in answers_of(0, [RIDDLES])]
    one = make_run('one', [key], answers=answers)
    other = make_run('other', [key], answers=answers, tasks={'riddles': {'fewshot_random_seed': 5}})
    digests = [[sample['prompt_sha256'] for sample in samples_of(run, key)] for run in (one, other)]
    rows = [row for row, (mine, theirs) in enumerate(zip(*digests, strict=True)) if mine != theirs]
    assert 3 < len(rows) < 7
    status, _, err = gauntlet('compare', one, other)
    first = ', '.join(f'row {row}' for row in rows[:3])
    assert status == 2
    assert err.splitlines()[0] == f'error: {key}: {len(rows)} of 7 prompts differ, first at {first}'


def test_other_prompts_of_score_are_named_by_file_row_and_variant(
    gauntlet, runs: dict[str, Path], data: Path, tmp_path: Path
):
    prompts = json.loads((data / 'score' / 'prompts' / 'agieval.json').read_text())
    prompts['prompt_robustness'][4]['prompt'] = 'Four. {question}{options}'
    (tmp_path / 'prompts.json').write_text(json.dumps(prompts))
    answers = write_lines(tmp_path / 'answers.jsonl', answers_of(2, [AGIEVAL]))
    score = score_yaml(tmp_path, prompts=str(tmp_path / 'prompts.json'))
    other = tmp_path / 'other'
    assert run_cli('run', '--outputs', answers, '--score', score, '--data-root', data, '--out', other) == 0
    status, _, err = gauntlet('compare', runs['a'], other)
    places = ', '.join(f'sat-en row {row} prompt:4' for row in range(3))
    assert status == 2
    assert err.splitlines()[0] == f'error: {AGIEVAL}: 7 of 91 prompts differ, first at {places}'


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
