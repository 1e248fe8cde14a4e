"""Scores and items as pandas frames."""

from __future__ import annotations

import doctest
from pathlib import Path

import pandas as pd
import pytest
from compared_runs import CHOICES, ROWS, TOPICS, record_of, samples_of

from llmfoundry_gauntlet import Run, read_run, read_runs, samples_frame, scores_frame
from llmfoundry_gauntlet.results import runs as module
from llmfoundry_gauntlet.results.runs import summarize_again


@pytest.fixture
def run(runs: dict[str, Path]) -> Run:
    return read_run(str(runs['a']))


def test_a_frame_has_the_numbers_of_the_record(run: Run):
    frame = run.to_pandas()
    assert set(frame.kind) == {'category', 'average', 'task', 'perturbation'}
    tasks = frame[(frame.kind == 'task') & frame.part.isna()].set_index(['name', 'metric'])
    for key in ROWS:
        for metric, measure in record_of(run.folder)['tasks'][key]['metrics'].items():
            row = tasks.loc[(key, metric), :].astype(object)
            for name in ('value', 'standard_error', 'reason'):
                assert row[name] == measure[name] if name in measure else pd.isna(row[name])
            assert row.num_items == len(ROWS[key])
    parts = frame[(frame.name == TOPICS) & frame.part.notna()]
    assert set(parts.part) == {'a', 'b', 'c'}
    assert frame.batch.isna().all() and set(frame.run) == {str(run.folder)}


def test_an_evaluation_has_the_frame_of_its_run(run: Run):
    evaluation = summarize_again(run, None, allow_missing=False)
    ours, theirs = evaluation.to_pandas(), run.to_pandas()
    pd.testing.assert_frame_equal(ours.drop(columns='run'), theirs.drop(columns='run'))
    assert evaluation.samples().drop(columns='run').equals(run.samples().drop(columns='run'))


def test_samples_frame_has_the_lines_of_the_files(run: Run):
    frame = run.samples()
    for key in ROWS:
        lines = samples_of(run.folder, key)
        mine = frame[frame.task == key]
        assert list(mine.row) == [line['row'] for line in lines]
        assert list(mine.score) == [line['score'] for line in lines]
        assert list(mine.prompt_sha256) == [line['prompt_sha256'] for line in lines]


def test_frames_of_several_runs_are_in_order_of_training(training: Path):
    found = read_runs(str(training))
    frame = scores_frame(found)
    assert list(frame.batch.unique()) == [20, 100, 400, 1000]
    assert len(samples_frame(found)) == 4 * len(found[0].samples())


def test_docstring_examples_run(run: Run):
    failed, tried = doctest.testmod(module, extraglobs={'run': run})
    assert (failed, tried > 0) == (0, True)


def test_absent_values_are_nan_with_a_reason(unscored: tuple[Path, Path], gauntlet, tmp_path):
    assert gauntlet('run', '--from', unscored[1], '--out', tmp_path / 'again')[0] == 0
    frame = read_run(tmp_path / 'again').to_pandas()
    row = frame[(frame.name == CHOICES)].iloc[0]
    assert pd.isna(row.value) and '2 of 12 items' in row.reason
    assert frame[frame.value.isna()].reason.notna().all()
