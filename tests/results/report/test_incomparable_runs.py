"""`gauntlet compare` with runs that cannot be compared: status 2 and an error, no output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import (
    AGIEVAL,
    CHOICES,
    LINES,
    RIDDLES,
    ROWS,
    SIZES,
    answers_of,
    copy_run,
    samples_path,
    with_truncated_prompts,
    write_lines,
)

LONGER, SHORTER = {'max_seq_len': 2048}, {'max_seq_len': 1024}


@dataclass(frozen=True, slots=True)
class Stage:
    """A complete run, a function that makes others, and a folder for them."""

    a: Path
    make: Callable[..., Path]
    folder: Path

    def checkpoints(self, *made: Path, batches: tuple[int | None, ...] = (1, 2)) -> list[Path]:
        for number, (run, batch) in enumerate(zip(made, batches, strict=True)):
            copy_run(run, self.folder / 'training' / f'run{number}', batch=batch)
        return [self.folder / 'training']

    def other_shots(self) -> list[Path]:
        answers = [answer | {'num_shots': 1} for answer in answers_of(0, [LINES])]
        return [self.make('one', [LINES]), self.make('other', ['lines/1-shot'], answers=answers)]

    def without_samples(self) -> list[Path]:
        broken = copy_run(self.a, self.folder / 'broken')
        samples_path(broken, LINES).unlink()
        return [self.a, broken]

    def checkpoints_with_other_prompts(self) -> list[Path]:
        rows = {**{key: range(size) for key, size in SIZES.items()}, AGIEVAL: range(7)}
        first = with_truncated_prompts(self.a, self.folder / 'one', {}, config=LONGER)
        return self.checkpoints(first, with_truncated_prompts(self.a, self.folder / 'other', rows, config=SHORTER))

    def other_prompts(self) -> list[Path]:
        changed = {'choices': {'prompt_string': 'Please answer.\n'}, 'lines': {'prelimiter': 'Say: '}}
        return [self.a, self.make('other', [CHOICES, LINES], tasks=changed)]

    def other_data(self) -> list[Path]:
        first = self.make('one', [RIDDLES])
        write_lines(self.folder / 'riddles.jsonl', [{**row, 'context': f'{row["context"]}?'} for row in ROWS[RIDDLES]])
        return [first, self.make('other', [RIDDLES], '--data-root', self.folder)]


CASES: dict[str, tuple[Callable[[Stage], list[Any]], list[str]]] = {
    'no task in common': (
        lambda stage: [stage.make('one', [LINES, CHOICES]), stage.make('other', [RIDDLES])],
        ['{folder}/one', '{folder}/other', f'{LINES}, {CHOICES}', RIDDLES],
    ),
    'other shots': (Stage.other_shots, ['lines/0-shot', 'lines/1-shot']),
    'no run': (lambda stage: [stage.a, stage.folder / 'nowhere'], ['{folder}/nowhere: ', 'results.json']),
    'no samples': (Stage.without_samples, ['{folder}/broken/samples/lines_0-shot.jsonl: ']),
    'one alone': (lambda stage: [stage.a], ['{a}: ']),
    'an unknown metric': (
        lambda stage: [stage.a, stage.a, '--metric', 'GoldBits'],
        ['--metric: ', "'GoldBits'", 'GoldBitsPerByte, GoldProbability, ', 'NumericMatch, StrictMatch, '],
    ),
    'an unknown metric of checkpoints': (
        lambda stage: [*stage.checkpoints(stage.a, stage.a), '--metric', 'Nothing'],
        ['--metric: ', "'Nothing'"],
    ),
    'one batch twice': (
        lambda stage: stage.checkpoints(stage.a, stage.a, batches=(20, 20)),
        ['{folder}/training: ', '(20, 20)'],
    ),
    'an unknown batch': (
        lambda stage: stage.checkpoints(stage.a, stage.a, batches=(20, None)),
        ['{folder}/training: ', '(None, 20)'],
    ),
    'checkpoints of other tasks': (
        lambda stage: stage.checkpoints(stage.make('one', [LINES]), stage.make('other', [RIDDLES])),
        ['{folder}/training: ', 'no task in common'],
    ),
    'checkpoints with other prompts': (
        Stage.checkpoints_with_other_prompts,
        [f'{LINES}: ', '(max_seq_len 2048 / 1024)', '{folder}/training: '],
    ),
    'other prompts': (
        Stage.other_prompts,
        [f'{CHOICES}: ', "(prompt_string '' / 'Please answer.\\n')", f'{LINES}: ', "(prelimiter '' / 'Say: ')"],
    ),
    'other data': (Stage.other_data, [f'{RIDDLES}: ', '(data_sha256 ']),
}


@pytest.mark.parametrize('case', CASES)
def test_incomparable_runs_are_an_error(gauntlet, runs: dict[str, Path], make_run, tmp_path: Path, case: str):
    make, facts = CASES[case]
    words = make(Stage(runs['a'], make_run, tmp_path))
    for form in ('table', 'json'):
        status, out, err = gauntlet('compare', *words, '--format', form)
        assert (status, out) == (2, '')
        for fact in facts:
            assert fact.format(folder=tmp_path, a=runs['a']) in err
