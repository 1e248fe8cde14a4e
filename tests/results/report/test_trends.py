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
    ROWS,
    SIZES,
    copy_run,
    record_of,
    rows_of_table,
    samples_of,
    samples_path,
    write_lines,
)


def slopes(folder: Path, batches: Sequence[int], without: Iterable[tuple[str, int]] = ()) -> dict[str, Estimate]:
    """Return the mean of the least-squares slopes of each item's scores."""
    found = {}
    for key, rows in ROWS.items():
        kept = [row for row in range(len(rows)) if (key, row) not in set(without)]
        scores = [
            [sample['score'] for sample in samples_of(folder / f'ba{batch}', key) if sample['row'] in kept]
            for batch in batches
        ]
        found[key] = over_items(key, kept, np.polyfit(batches, np.array(scores), 1)[0].tolist())
    return found


def noise_of(batches: Sequence[int], values: Sequence[float]) -> float:
    """Return the noise from steps minus the mean slope; their variance is 2 K / (K - 1) that of K scores."""
    rate = (values[-1] - values[0]) / (batches[-1] - batches[0])
    variance = np.var(np.diff(values) - rate * np.diff(batches), ddof=1)
    return float(np.sqrt(variance * (len(values) - 1) / (2 * len(values))))


def error_over_checkpoints(batches: Sequence[int], values: Sequence[float]) -> float:
    """Return the error of the slope by the distances from the line, which resemble their neighbours."""
    strays = values - np.polyval(np.polyfit(batches, values, 1), batches)
    number = len(values)
    correlation = (strays[1:] @ strays[:-1]) / (strays @ strays)
    correlation = min(max(correlation + (1 + 4 * correlation) / number, 0), 0.9)
    plain = strays @ strays / (number - 2) / np.sum(np.square(np.array(batches) - np.mean(batches)))
    return float(np.sqrt(plain * (1 + correlation) / (1 - correlation)))


def test_trends_equal_least_squares_slopes(compared, training: Path):
    batches = list(BATCHES.values())
    found = compared(training)
    tasks = slopes(training, batches)
    expected = tasks | composites_of(tasks, SIZES)
    assert list(found) == list(expected)
    recorded = []
    for batch in batches:
        record = record_of(training / f'ba{batch}')
        measures = {key: next(iter(task['metrics'].values())) for key, task in record['tasks'].items()}
        recorded.append(measures | record['composites']['categories'] | record['composites']['averages'])
    for name, one in found.items():
        values = [measures[name]['value'] for measures in recorded]
        assert one['slope']['value'] == pytest.approx(np.polyfit(batches, values, 1)[0], abs=1e-15), name
        assert one['slope']['value'] == pytest.approx(expected[name].value, abs=1e-15), name
        error = max(expected[name].error, error_over_checkpoints(batches, values))
        assert one['slope']['standard_error'] == pytest.approx(error, abs=1e-15), name
        assert one['slope']['degrees_of_freedom'] <= 2
        noise = noise_of(batches, values)
        assert one['noise'] == pytest.approx(noise, abs=1e-14) and noise > 0.001, name
        assert one['signal_to_noise'] == pytest.approx(abs(expected[name].value) * 980 / noise, rel=1e-9), name


def test_slopes_are_printed_per_thousand_batches(gauntlet, compared, training: Path):
    status, out, _ = gauntlet('compare', training)
    assert status == 0 and out.splitlines()[0] == 'slope per 1000 batches over 4 checkpoints, ba20 to ba1000'
    table = rows_of_table(out)
    found = compared(training)
    assert {*found} < {*table}
    for name, one in found.items():  # all are within noise
        slope, error = (1000 * one['slope'][key] for key in ('value', 'standard_error'))
        assert table[name] == [f'{slope:+.3f}', f'{error:.3f}', f'{one["noise"]:.3f}']
    markdown = gauntlet('compare', training, '--format', 'markdown')[1]
    names = [line.split('|')[1].strip() for line in markdown.splitlines() if line.startswith('|')][2:]
    assert [name[:2] for name in names[:4]] == ['**'] * 4 and {*names[4:]} == {*ROWS}  # composites are first


def test_csv_has_the_slopes_of_json(gauntlet, compared, training: Path):
    rows = csv.DictReader(io.StringIO(gauntlet('compare', training, '--format', 'csv')[1]))
    slopes = {name: repr(one['slope']['value']) for name, one in compared(training).items()}
    assert {row['name']: row['slope'] for row in rows} == slopes


def test_signal_to_noise_is_shown_for_a_clear_trend(gauntlet, compared, runs, tmp_path: Path):
    for batch, num_right in enumerate((0, 2, 4, 5, 7, 9)):
        run = copy_run(runs['a'], tmp_path / 'training' / f'ba{batch}', batch=batch)
        lines = [{**line, 'score': float(line['row'] < num_right)} for line in samples_of(run, LINES)]
        write_lines(samples_path(run, LINES), lines)
    one = compared(tmp_path / 'training')[LINES]
    assert one['slope']['confidence_interval'][0] > 0
    table = rows_of_table(gauntlet('compare', tmp_path / 'training')[1])
    assert table[LINES][3] == f'{one["signal_to_noise"]:.1f}' and len(table[CHOICES]) == 2


def test_trends_are_over_rows_that_all_checkpoints_have(compared, runs: dict[str, Path], tmp_path: Path):
    folder = tmp_path / 'training'
    lacking = {'a': [0, 3], 'b': [], 'c': [3, 8]}
    for name, rows in lacking.items():
        batch = BATCHES[name]
        copy_run(runs[name], folder / f'ba{batch}', without={CHOICES: rows}, batch=batch)
    found = compared(folder)
    tasks = slopes(folder, [20, 100, 400], without=[(CHOICES, row) for row in (0, 3, 8)])
    expected = tasks | composites_of(tasks, {**SIZES, CHOICES: 9})
    for name, one in found.items():
        assert one['slope']['value'] == pytest.approx(expected[name].value, abs=1e-15), name
        assert one['slope']['standard_error'] >= expected[name].error - 1e-15, name


def test_unscored_items_prevent_a_trend_unless_allowed(
    compared, gauntlet, unscored, runs: dict[str, Path], tmp_path: Path
):
    folder = tmp_path / 'training'
    for batch, run in ((10, unscored[0]), (20, unscored[1]), (30, runs['c'])):
        copy_run(run, folder / f'ba{batch}', batch=batch)
    reason = '2 of 12 items unscored: there is no answer'
    found = compared(folder)
    assert found[CHOICES] == {'slope': {'reason': reason}, 'noise': None, 'signal_to_noise': None}
    assert 'value' in found[LINES]['slope']
    _, out, _ = gauntlet('compare', folder)
    assert f'- {reason}: {CHOICES}' in out and CHOICES not in rows_of_table(out)
    allowed = compared(folder, '--allow-missing')
    expected = slopes(folder, [10, 20, 30], without=[(CHOICES, 2), (CHOICES, 3)])
    assert allowed[CHOICES]['slope']['value'] == pytest.approx(expected[CHOICES].value, abs=1e-15)


def test_the_last_checkpoint_represents_a_run(compared, runs: dict[str, Path], training: Path):
    (found,) = compared(runs['a'], training)
    assert found['second'] == str(training / 'ba1000')
    check_differences(found['tasks'], {key: paired(key, runs['a'], runs['d']) for key in ROWS})
