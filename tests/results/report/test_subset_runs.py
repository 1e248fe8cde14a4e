"""Runs of a subset: what results.json says of it, and `gauntlet compare` of the same subset."""

from __future__ import annotations

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
    SIZES,
    TOPICS,
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
    for name, seed, limit in (
        ('a', 0, ['--subset-items', NUM_ITEMS]),
        ('b', 2, ['--subset-items', NUM_ITEMS]),
        ('whole', 4, []),
    ):
        path = write_answers(folder, (one for one in answers_of(seed) if not limit or one['row'] in rows[one['task']]))
        found[name] = folder / name
        assert run_cli('run', '--outputs', path, *words, *limit, '--data-root', data, '--out', found[name]) == 0
    return found


def test_a_subset_records_how_many_rows_its_files_have(subsets):
    record = record_of(subsets['a'])

    assert {key: record['tasks'][key]['num_rows'] for key in ROWS} == SIZES
    assert {record['tasks'][key]['subset_items'] for key in ROWS} == {NUM_ITEMS}
    assert record['config']['subset_version'] == 2


def test_shares_of_the_variance_are_recorded_for_composites(subsets):
    composites = record_of(subsets['a'])['composites']
    for name, tasks in {'reading': {CHOICES, RIDDLES}, 'rest': {TOPICS, LINES, CHOICES}}.items():
        shares = composites['categories'][name]['variance_shares']
        assert shares.keys() == tasks and sum(shares.values()) == pytest.approx(1)
    assert composites['averages']['core']['variance_shares'].keys() == ROWS.keys()


def test_a_whole_run_is_no_subset(subsets):
    record = record_of(subsets['whole'])

    assert 'subset_version' not in record['config']
    assert record['tasks'][CHOICES]['subset_items'] is None


def test_recomputed_results_of_a_subset_are_identical(subsets, tmp_path: Path):
    assert run_cli('run', '--from', subsets['a'], '--out', tmp_path / 'again') == 0
    assert files_of(tmp_path / 'again') == files_of(subsets['a'])


def test_runs_of_the_same_subset_are_compared_by_the_error_over_all_items_that_could_be_asked(subsets, compared):
    scores_of_a, scores_of_b = ([sample['score'] for sample in samples_of(subsets[name], RIDDLES)] for name in 'ab')
    changes = [of_b - of_a for of_a, of_b in zip(scores_of_a, scores_of_b, strict=True)]
    assert any(changes)

    (found,) = compared(subsets['a'], subsets['b'])

    # 6 of 7 riddles are asked, which makes the error no smaller.
    assert found['tasks'][RIDDLES]['difference']['standard_error'] == pytest.approx(usual_error(changes))


def test_results_with_the_errors_and_clusters_of_whole_files_are_read(subsets, compared, tmp_path: Path):
    """Development versions before 0.2 wrote them."""
    older = copy_run(subsets['a'], tmp_path / 'a')
    with edited(older) as record:
        task = record['tasks'][RIDDLES]
        task['file_clusters'] = {'': {'1': 7}}
        del task['num_rows']
        for measure in task['metrics'].values():
            measure['standard_error_of_file'] = 0.01

    assert compared(older, subsets['b'])[0]['tasks'] == compared(subsets['a'], subsets['b'])[0]['tasks']
