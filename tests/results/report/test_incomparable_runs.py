"""`gauntlet compare` with runs that cannot be compared: status 2 and an error, no output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run_cli
from compared_runs import (
    AGIEVAL,
    CHOICES,
    LINES,
    RIDDLES,
    ROWS,
    SIZES,
    answers_of,
    copy_run,
    record_of,
    samples_path,
    with_truncated_prompts,
    write_lines,
)

METRICS = [  # of multiple choice, language modelling and generation
    *('BrierScore', 'ByteNormalizedMatch', 'CalibrationError', 'CharacterNormalizedMatch'),
    *('GoldBitsPerByte', 'GoldProbability', 'InContextLearningGenerationExactMatchAccuracy'),
    *('InContextLearningLMAccuracy', 'InContextLearningMultipleChoiceAccuracy', 'MajorityClass', 'NumericMatch'),
    *('StrictMatch', 'TokenNormalizedMatch', 'TruncatedShare'),
]
LONGER, SHORTER = {'max_seq_len': 2048}, {'max_seq_len': 1024}


class Stage:
    """Functions and folders for making runs."""

    def __init__(self, runs: dict[str, Path], make_run: Callable[..., Path], folder: Path) -> None:
        self.a, self.make, self.folder = runs['a'], make_run, folder

    def checkpoints(self, *made: Path, batches: tuple[int | None, ...] = (1, 2)) -> Path:
        for number, (run, batch) in enumerate(zip(made, batches, strict=True)):
            copy_run(run, self.folder / 'training' / f'run{number}', batch=batch)
        return self.folder / 'training'


def no_task_in_common(stage: Stage) -> tuple[list[Any], str]:
    one, other = stage.make('one', [LINES, CHOICES]), stage.make('other', [RIDDLES])
    tasks = f'the first has {LINES}, {CHOICES}, the second {RIDDLES}'
    return [one, other], f'{one} and {other} have no task in common: {tasks}'


def other_shots(stage: Stage) -> tuple[list[Any], str]:
    answers = [answer | {'num_shots': 1} for answer in answers_of(0, [LINES])]
    one, other = stage.make('one', [LINES]), stage.make('other', ['lines/1-shot'], answers=answers)
    return [one, other], 'the first has lines/0-shot, the second lines/1-shot'


def no_run(stage: Stage) -> tuple[list[Any], str]:
    return [stage.a, stage.folder / 'nowhere'], f'{stage.folder}/nowhere: there is no results.json at or below it'


def no_samples(stage: Stage) -> tuple[list[Any], str]:
    broken = copy_run(stage.a, stage.folder / 'broken')
    samples_path(broken, LINES).unlink()
    return [stage.a, broken], f'{samples_path(broken, LINES)}: cannot be read'


def one_alone(stage: Stage) -> tuple[list[Any], str]:
    return [stage.a], f'{stage.a}: holds one evaluation; name another run to compare it with'


def unknown_metric(stage: Stage) -> tuple[list[Any], str]:
    allowed = ', '.join(METRICS)
    return [stage.a, stage.a, '--metric', 'GoldBits'], f"--metric: no task has 'GoldBits'; allowed: {allowed}"


def unknown_metric_of_checkpoints(stage: Stage) -> tuple[list[Any], str]:
    return [stage.checkpoints(stage.a, stage.a), '--metric', 'Nothing'], "--metric: no task has 'Nothing'"


def one_batch_twice(stage: Stage) -> tuple[list[Any], str]:
    folder = stage.checkpoints(stage.a, stage.a, batches=(20, 20))
    return [folder], f'{folder}: holds evaluations that are not of different training batches (20, 20)'


def an_unknown_batch(stage: Stage) -> tuple[list[Any], str]:
    return [stage.checkpoints(stage.a, stage.a, batches=(20, None))], 'name the runs one by one'


def checkpoints_of_other_tasks(stage: Stage) -> tuple[list[Any], str]:
    folder = stage.checkpoints(stage.make('one', [LINES]), stage.make('other', [RIDDLES]))
    return [folder], f'{folder}: the evaluations have no task in common'


def checkpoints_with_different_prompts(stage: Stage) -> tuple[list[Any], str]:
    rows = {**{key: range(size) for key, size in SIZES.items()}, AGIEVAL: range(7)}
    first = with_truncated_prompts(stage.a, stage.folder / 'one', {}, config=LONGER)
    folder = stage.checkpoints(first, with_truncated_prompts(stage.a, stage.folder / 'other', rows, config=SHORTER))
    return [folder], f'{LINES}: no item has the same prompt in all runs (max_seq_len 2048 / 1024)'


def runs_with_different_prompts(stage: Stage) -> tuple[list[Any], str]:
    changed = {'choices': {'prompt_string': 'Please answer.\n'}, 'lines': {'prelimiter': 'Say: '}}
    other = stage.make('other', [CHOICES, LINES], tasks=changed)
    return [stage.a, other], (
        f"error: {CHOICES}: no item has the same prompt in all runs (prompt_string '' / 'Please answer.\\n')\n"
        f"error: {LINES}: no item has the same prompt in all runs (prelimiter '' / 'Say: ')\n"
        f'error: {stage.a} and {other} have no item in common; evaluate with the same tasks, shots and data\n'
    )


def other_data(stage: Stage) -> tuple[list[Any], str]:
    first, other = stage.make('one', [RIDDLES]), stage.folder / 'other'
    rows = [{**row, 'context': f'{row["context"]}?'} for row in ROWS[RIDDLES]]
    write_lines(stage.folder / 'riddles.jsonl', rows)
    answers = write_lines(stage.folder / 'answers.jsonl', answers_of(0, [RIDDLES]))
    words = ['--tasks', stage.folder / 'tasks.yaml', '--data-root', stage.folder, '--out', other]
    assert run_cli('run', '--outputs', answers, *words) == 0
    digests = [record_of(run)['tasks'][RIDDLES]['data_sha256'][:8] for run in (first, other)]
    return [
        first,
        other,
    ], f'{RIDDLES}: no item has the same prompt in all runs (data_sha256 {digests[0]} / {digests[1]})'


CASES = (
    no_task_in_common,
    other_shots,
    no_run,
    no_samples,
    one_alone,
    unknown_metric,
    unknown_metric_of_checkpoints,
    one_batch_twice,
    an_unknown_batch,
    checkpoints_of_other_tasks,
    checkpoints_with_different_prompts,
    runs_with_different_prompts,
    other_data,
)


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.__name__)
def test_incomparable_runs_are_an_error(gauntlet, runs: dict[str, Path], make_run, tmp_path: Path, case):
    words, expected = case(Stage(runs, make_run, tmp_path))
    for form in ('table', 'json'):
        status, out, err = gauntlet('compare', *words, '--format', form)
        assert (status, out) == (2, '')
        assert expected in err
