"""Scores and items as pandas frames and charts."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from compared_runs import CHOICES, LINES, ROWS, TOPICS, record_of, samples_of

from llmfoundry_gauntlet import ConfigError, Run, read_run, read_runs, samples_frame, scores_chart, scores_frame
from llmfoundry_gauntlet.results.report import frames
from llmfoundry_gauntlet.results.runs import summarize_again


def drawn(chart: Any) -> list[dict[str, Any]]:
    """Return the data of a chart, which must render."""
    assert len(chart.to_dict()) > 1
    vl_convert = pytest.importorskip('vl_convert')
    assert '<svg' in vl_convert.vegalite_to_svg(chart.to_json())
    found = [row for rows in chart.to_dict()['datasets'].values() for row in rows]
    return [json.loads(line) for line in dict.fromkeys(json.dumps(row) for row in found)]


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


def test_points_have_chance_and_intervals(run: Run):
    rows = {row['name']: row for row in drawn(run.plot())}
    assert {'reading', 'core', *ROWS} < rows.keys()
    measure = record_of(run.folder)['composites']['categories']['reading']
    row = rows['reading']
    assert row['value'] == measure['value']
    assert [row['low'], row['high']] == measure['confidence_interval']
    assert (rows[CHOICES]['chance'], rows[LINES]['chance']) == (1 / 3, 0.0)


def test_checkpoints_are_learning_curves_and_models_are_side_by_side(training: Path, runs: dict[str, Path]):
    curves = scores_chart(read_runs(training))
    assert 'concat' in curves.to_dict()
    assert {(row['name'], row['batch']) for row in drawn(curves)} == {
        (name, batch) for name in ('reading', 'rest', 'core', 'reading alone') for batch in (20, 100, 400, 1000)
    }
    beside = drawn(scores_chart([read_run(runs['a']), read_run(runs['b'])]))
    assert {row['run'] for row in beside if row['name'] == LINES and 'run' in row} == {str(runs['a']), str(runs['b'])}


def test_a_chart_without_altair_names_the_extra(run: Run, monkeypatch):
    monkeypatch.setattr(frames, 'find_spec', lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'llmfoundry-gauntlet\[report\]'"):
        run.plot()


def test_docstring_examples_run(run: Run):
    failed, tried = doctest.testmod(frames, extraglobs={'run': run})
    assert (failed, tried > 0) == (0, True)


def test_absent_values_are_nan_with_a_reason(unscored: tuple[Path, Path], gauntlet, tmp_path):
    assert gauntlet('run', '--from', unscored[1], '--out', tmp_path / 'again')[0] == 0
    frame = read_run(tmp_path / 'again').to_pandas()
    row = frame[(frame.name == CHOICES)].iloc[0]
    assert pd.isna(row.value) and '2 of 12 items' in row.reason
    assert frame[frame.value.isna()].reason.notna().all()
