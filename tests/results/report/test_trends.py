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
    found = {}
    for key, rows in ROWS.items():
        kept = [row for row in range(len(rows)) if (key, row) not in set(without)]
        scores = [
            [sample['score'] for sample in samples_of(folder / f'ba{batch}', key) if sample['row'] in kept]
            for batch in batches
        ]
        found[key] = over_items(key, kept, np.polyfit(batches, np.array(scores), 1)[0].tolist())
    return found


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
        assert one['slope']['standard_error'] >= expected[name].error - 1e-15, name
        assert one['slope']['degrees_of_freedom'] <= 2
        assert one['noise'] > 0.001, name
        assert one['signal_to_noise'] == pytest.approx(abs(expected[name].value) * 980 / one['noise'], rel=1e-9), name


def test_slopes_are_printed_for_the_batches_that_were_seen(gauntlet, compared, training: Path):
    """Per 1,000 batches at most, and per batch in CSV and JSON."""
    status, out, _ = gauntlet('compare', training)
    assert status == 0 and out.splitlines()[0] == 'slope per 980 batches over 4 checkpoints, ba20 to ba1000'
    table, found = rows_of_table(out), compared(training)
    assert {*found} < {*table}
    for name, one in found.items():  # all are within noise
        slope, error = (980 * one['slope'][key] for key in ('value', 'standard_error'))
        assert table[name] == [f'{slope:+.3f}', f'{error:.3f}', f'{one["noise"]:.3f}']
    markdown = gauntlet('compare', training, '--format', 'markdown')[1]
    names = [line.split('|')[1].strip() for line in markdown.splitlines() if line.startswith('|')][2:]
    assert [name[:2] for name in names[:4]] == ['**'] * 4 and {*names[4:]} == {*ROWS}  # composites are first
    rows = csv.DictReader(io.StringIO(gauntlet('compare', training, '--format', 'csv')[1]))
    assert {row['name']: row['slope'] for row in rows} == {
        name: repr(one['slope']['value']) for name, one in found.items()
    }


def test_signal_to_noise_is_shown_for_a_clear_trend(gauntlet, compared, runs, tmp_path: Path):
    for batch, num_right in enumerate((0, 2, 4, 5, 7, 9)):
        run = copy_run(runs['a'], tmp_path / 'training' / f'ba{batch}', batch=batch)
        lines = [{**line, 'score': float(line['row'] < num_right)} for line in samples_of(run, LINES)]
        write_lines(samples_path(run, LINES), lines)
    one = compared(tmp_path / 'training')[LINES]
    assert one['slope']['confidence_interval'][0] > 0
    table = rows_of_table(gauntlet('compare', tmp_path / 'training')[1])
    assert table[LINES][3] == f'{one["signal_to_noise"]:.1f}' and len(table[CHOICES]) == 2


def test_trends_are_over_items_that_all_checkpoints_were_asked_with_the_same_prompt(
    compared, gauntlet, runs: dict[str, Path], tmp_path: Path
):
    folder = tmp_path / 'training'
    lacking = {'a': ([0, 3], {}), 'b': ([], {}), 'c': ([3, 8], {TOPICS: [0, 13], RIDDLES: range(7)})}
    for name, (rows, prompts) in lacking.items():
        run, batch = copy_run(runs[name], tmp_path / name, without={CHOICES: rows}), BATCHES[name]
        config = {'max_seq_len': 1024 if prompts else 2048}
        with_shortened_prompts(run, folder / f'ba{batch}', prompts, config=config, batch=batch)
    found = compared(folder)
    left_out = {CHOICES: (0, 3, 8), TOPICS: (0, 13)}
    tasks = slopes(folder, [20, 100, 400], without=[(key, row) for key, rows in left_out.items() for row in rows])
    composites = composites_of(tasks, {**SIZES, CHOICES: 9, TOPICS: 12})
    expected = tasks | composites
    for name in (LINES, TOPICS, CHOICES, 'rest'):
        slope = found[name]['slope']
        assert slope['value'] == pytest.approx(expected[name].value, abs=1e-15), name
        assert slope['standard_error'] >= expected[name].error - 1e-15, name
    reason = 'no item has the same prompt in all runs (max_seq_len 2048 / 1024)'
    assert found[RIDDLES]['slope'] == {'reason': reason}
    assert found['reading']['slope'] == {'reason': f'benchmarks without a score: {RIDDLES} ({reason})'}
    for form, place in (('table', 1), ('csv', 2), ('json', 2)):
        shown = ' '.join(gauntlet('compare', folder, '--format', form)[place].split())
        assert f'{TOPICS} 2 of 14, {RIDDLES} 7 of 7' in shown, form


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
