"""`gauntlet compare` with the checkpoints of one run: slopes and signal to noise."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from paired_estimates import Estimate, check_differences, composites_of, over_items, paired
from recorded_runs import (
    BATCHES,
    CHOICES,
    LINES,
    RIDDLES,
    ROWS,
    SIZES,
    TOPICS,
    copy_run,
    record_of,
    rows_of_table,
    samples_of,
    samples_path,
    with_shortened_prompts,
    write_lines,
)


def slopes(folder: Path, batches: Sequence[int], without: Iterable[tuple[str, int]] = ()) -> dict[str, Estimate]:
    """Return the mean of the least-squares slopes of each item's scores."""
    left_out = set(without)
    slope_by_task = {}
    for key, rows in ROWS.items():
        kept = [row for row in range(len(rows)) if (key, row) not in left_out]
        scores = []  # of each checkpoint, by row
        for batch in batches:
            samples = samples_of(folder / f'ba{batch}', key)
            scores.append([sample['score'] for sample in samples if sample['row'] in kept])
        slopes_of_items, _ = np.polyfit(batches, np.array(scores), 1)
        slope_by_task[key] = over_items(key, kept, slopes_of_items.tolist())
    return slope_by_task


def test_trends_equal_least_squares_slopes(compared, training: Path):
    batches = list(BATCHES.values())
    tasks = slopes(training, batches)
    expected = tasks | composites_of(tasks, SIZES)

    trends = compared(training)

    assert list(trends) == list(expected)
    for name, trend in trends.items():
        slope = trend['slope']
        assert slope['value'] == pytest.approx(expected[name].value, abs=1e-15), name
        assert slope['standard_error'] >= expected[name].error - 1e-15, name
        assert slope['degrees_of_freedom'] <= 2
        assert trend['noise'] > 0.001, name
        change = expected[name].value * (batches[-1] - batches[0])
        assert trend['signal_to_noise'] == pytest.approx(change / trend['noise'], rel=1e-9), name


def test_slopes_are_those_of_the_recorded_scores(compared, training: Path):
    batches = list(BATCHES.values())
    scores: dict[str, list[float]] = {}
    for batch in batches:
        record = record_of(training / f'ba{batch}')
        accuracies = {key: next(iter(task['metrics'].values())) for key, task in record['tasks'].items()}
        composites = record['composites']['categories'] | record['composites']['averages']
        for name, measure in (accuracies | composites).items():
            scores.setdefault(name, []).append(measure['value'])

    trends = compared(training)

    for name, trend in trends.items():
        slope, _ = np.polyfit(batches, scores[name], 1)
        assert trend['slope']['value'] == pytest.approx(slope, abs=1e-15), name


def test_slopes_are_printed_for_the_batches_that_were_seen(gauntlet, compared, training: Path):
    """Per 1,000 batches at most, and per batch in CSV and JSON."""
    trends = compared(training)

    status, out, _ = gauntlet('compare', training)
    _, markdown, _ = gauntlet('compare', training, '--format', 'markdown')
    _, of_csv, _ = gauntlet('compare', training, '--format', 'csv')

    assert status == 0
    assert out.splitlines()[0] == 'slope per 980 batches over 4 checkpoints, ba20 to ba1000'
    table = rows_of_table(out)
    assert {*trends} < {*table}
    for name, trend in trends.items():  # all are within noise
        slope, error = 980 * trend['slope']['value'], 980 * trend['slope']['standard_error']
        assert table[name] == [f'{slope:+.3f}', f'{error:.3f}', f'{trend["noise"]:.3f}']

    _, _, *names = [line.split('|')[1].strip() for line in markdown.splitlines() if line.startswith('|')]
    assert all(name.startswith('**') for name in names[:4])  # composites are first
    assert {*names[4:]} == {*ROWS}

    slopes_of_csv = {row['name']: row['slope'] for row in csv.DictReader(io.StringIO(of_csv))}
    assert slopes_of_csv == {name: repr(trend['slope']['value']) for name, trend in trends.items()}


def test_signal_to_noise_is_shown_for_a_clear_trend(gauntlet, compared, runs, tmp_path: Path):
    for batch, num_right in enumerate((0, 2, 4, 5, 7, 9)):
        run = copy_run(runs['a'], tmp_path / 'training' / f'ba{batch}', batch=batch)
        lines = [{**line, 'score': float(line['row'] < num_right)} for line in samples_of(run, LINES)]
        write_lines(samples_path(run, LINES), lines)

    trend = compared(tmp_path / 'training')[LINES]
    _, out, _ = gauntlet('compare', tmp_path / 'training')

    assert trend['slope']['confidence_interval'][0] > 0
    table = rows_of_table(out)
    assert table[LINES][3] == f'+{trend["signal_to_noise"]:.1f}'
    assert len(table[CHOICES]) == 2  # no slope that is clear


def test_trends_are_over_items_that_all_checkpoints_were_asked_with_the_same_prompt(
    compared, gauntlet, runs: dict[str, Path], tmp_path: Path
):
    folder = tmp_path / 'training'
    checkpoints = (
        # run, rows without an answer, shortened prompts, length of the model
        ('a', [0, 3], {}, 2048),
        ('b', [], {}, 2048),
        ('c', [3, 8], {TOPICS: [0, 13], RIDDLES: range(7)}, 1024),
    )
    for name, rows, prompts, length in checkpoints:
        run = copy_run(runs[name], tmp_path / name, without={CHOICES: rows})
        batch = BATCHES[name]
        with_shortened_prompts(run, folder / f'ba{batch}', prompts, config={'max_seq_len': length}, batch=batch)
    left_out = [*((CHOICES, row) for row in (0, 3, 8)), (TOPICS, 0), (TOPICS, 13)]
    tasks = slopes(folder, [20, 100, 400], without=left_out)
    expected = tasks | composites_of(tasks, {**SIZES, CHOICES: 9, TOPICS: 12})

    trends = compared(folder)

    for name in (LINES, TOPICS, CHOICES, 'rest'):
        slope = trends[name]['slope']
        assert slope['value'] == pytest.approx(expected[name].value, abs=1e-15), name
        assert slope['standard_error'] >= expected[name].error - 1e-15, name
    reason = 'no item has the same prompt in all runs (max_seq_len 2048 / 1024)'
    assert trends[RIDDLES]['slope'] == {'reason': reason}
    assert trends['reading']['slope'] == {'reason': f'benchmarks without a score: {RIDDLES} ({reason})'}

    _, table, _ = gauntlet('compare', folder)
    _, _, errors_of_csv = gauntlet('compare', folder, '--format', 'csv')
    _, _, errors_of_json = gauntlet('compare', folder, '--format', 'json')
    for shown in (table, errors_of_csv, errors_of_json):
        assert f'{TOPICS} 2 of 14, {RIDDLES} 7 of 7' in ' '.join(shown.split())


def test_unscored_items_prevent_a_trend_unless_allowed(
    compared, gauntlet, unscored, runs: dict[str, Path], tmp_path: Path
):
    folder = tmp_path / 'training'
    for batch, run in ((10, unscored[0]), (20, unscored[1]), (30, runs['c'])):
        copy_run(run, folder / f'ba{batch}', batch=batch)
    reason = '2 of 12 items unscored: there is no answer'
    expected = slopes(folder, [10, 20, 30], without=[(CHOICES, 2), (CHOICES, 3)])

    trends = compared(folder)
    allowed = compared(folder, '--allow-missing')
    _, out, _ = gauntlet('compare', folder)

    assert trends[CHOICES] == {'slope': {'reason': reason}, 'noise': None, 'signal_to_noise': None}
    assert 'value' in trends[LINES]['slope']
    assert f'- {reason}: {CHOICES}' in out
    assert CHOICES not in rows_of_table(out)
    assert allowed[CHOICES]['slope']['value'] == pytest.approx(expected[CHOICES].value, abs=1e-15)


def test_the_last_checkpoint_represents_a_run(compared, runs: dict[str, Path], training: Path):
    (comparison,) = compared(runs['a'], training)
    assert comparison['second'] == str(training / 'ba1000')
    check_differences(comparison['tasks'], {key: paired(key, runs['a'], runs['d']) for key in ROWS})
