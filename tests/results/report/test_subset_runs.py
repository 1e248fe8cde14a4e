"""Runs of a subset: errors about the whole files in results.json, and in `gauntlet compare` of the same subset."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from clustered_items import usual_error
from command_line import run_cli
from recorded_runs import (
    AGIEVAL,
    CHOICES,
    LINES,
    RIDDLES,
    ROWS,
    TOPICS,
    accuracy_of,
    answers_of,
    copy_run,
    edited,
    files_of,
    gauntlet_yaml,
    label_of,
    record_of,
    samples_of,
    score_yaml,
    tasks_yaml,
    write_answers,
)

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data

NUM_ITEMS = 6


@pytest.fixture(scope='module')
def subsets(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Path]:
    """Return two runs of six items of each task, and one of all."""
    folder = tmp_path_factory.mktemp('subsets')
    words = ['--gauntlet', gauntlet_yaml(folder, weighting='EQUAL')]
    files = {'tasks': str(tasks_yaml(folder)), 'score': str(score_yaml(folder))}
    chosen = load_data(decode_settings({**files, 'data_root': str(data), 'subset_items': NUM_ITEMS}))
    rows = {label_of(key): {example.row for example in chosen.asked(key)} for key in (*ROWS, AGIEVAL)}
    words += [word for name, path in files.items() for word in (f'--{name}', path)]
    found = {}
    for name, seed, limit in (('a', 0, ['--limit', NUM_ITEMS]), ('b', 2, ['--limit', NUM_ITEMS]), ('whole', 4, [])):
        path = write_answers(folder, (one for one in answers_of(seed) if not limit or one['row'] in rows[one['task']]))
        found[name] = folder / name
        assert run_cli('run', '--outputs', path, *words, *limit, '--data-root', data, '--out', found[name]) == 0
    return found


def test_a_subset_records_both_errors_and_the_clusters_of_its_files(subsets):
    record = record_of(subsets['a'])
    clusters = {key: record['tasks'][key]['file_clusters'] for key in ROWS}
    assert clusters[RIDDLES] == {'': {'1': 7}} and record['config']['subset_version'] == 2
    assert clusters[CHOICES] == {'': {'1': 2, '2': 1, '3': 1, '5': 1}}  # questions on five passages
    assert clusters[LINES] == {'': {'1': 7, '2': 1}}  # two lines have one context
    sizes = {name: sum(int(size) * n for size, n in of.items()) for name, of in clusters[TOPICS].items()}
    assert sizes == {'a': 4, 'b': 7, 'c': 3}
    riddles = accuracy_of(record, RIDDLES)
    assert riddles['standard_error_of_file'] == pytest.approx(riddles['standard_error'] * math.sqrt(1 / 7))
    measures = [accuracy_of(record, key) for key in ROWS] + [*record['composites']['averages'].values()]
    assert all(0 < one['standard_error_of_file'] < one['standard_error'] for one in measures)


def test_shares_of_the_variance_are_recorded_for_composites(subsets):
    composites = record_of(subsets['a'])['composites']
    for name, tasks in {'reading': {CHOICES, RIDDLES}, 'rest': {TOPICS, LINES, CHOICES}}.items():
        shares = composites['categories'][name]['variance_shares']
        assert shares.keys() == tasks and sum(shares.values()) == pytest.approx(1)
    assert composites['averages']['core']['variance_shares'].keys() == ROWS.keys()


def test_a_whole_run_has_one_error(subsets):
    record = record_of(subsets['whole'])
    assert 'standard_error_of_file' not in json.dumps(record) and 'subset_version' not in record['config']
    assert record['tasks'][CHOICES]['file_clusters'] is None


def test_recomputed_results_of_a_subset_are_identical(subsets, tmp_path: Path):
    assert run_cli('run', '--from', subsets['a'], '--out', tmp_path / 'again') == 0
    assert files_of(tmp_path / 'again') == files_of(subsets['a'])


def test_runs_of_the_same_subset_are_compared_over_the_whole_files(subsets, compared, gauntlet):
    (found,) = compared(subsets['a'], subsets['b'])
    assert all(one['is_of_file'] for kind in ('tasks', 'composites') for one in found[kind].values())
    scores = [[sample['score'] for sample in samples_of(subsets[name], RIDDLES)] for name in 'ab']
    changes = [b - a for a, b in zip(*scores, strict=True)]
    assert any(changes)
    expected = usual_error(changes) * math.sqrt(1 / 7)
    assert found['tasks'][RIDDLES]['difference']['standard_error'] == pytest.approx(expected)
    _, out, _ = gauntlet('compare', subsets['a'], subsets['b'], '--format', 'markdown')
    assert 'are of the whole files' in out


@pytest.mark.parametrize('other', ['whole', 'another file', 'other items', 'an older record'])
def test_other_runs_are_compared_over_other_items(subsets, compared, tmp_path: Path, other: str):
    second = subsets['whole']
    if other != 'whole':
        row = samples_of(subsets['b'], RIDDLES)[0]['row']
        second = copy_run(subsets['b'], tmp_path / 'b', without={RIDDLES: [row]} if other == 'other items' else None)
    first = copy_run(subsets['a'], tmp_path / 'a')
    for folder in (first, second) if other == 'an older record' else ():
        with edited(folder) as record:
            del record['tasks'][RIDDLES]['file_clusters']
    if other == 'another file':
        with edited(second) as record:
            record['tasks'][RIDDLES]['data_sha256'] = 'ab' * 32
    (found,) = compared(first, second)
    assert not found['tasks'][RIDDLES]['is_of_file']
    assert not found['composites']['reading']['is_of_file']  # which it is a part of
    assert found['tasks'][CHOICES]['is_of_file'] == (other != 'whole')
