"""Runs of a subset: what results.json says of it, and `gauntlet compare` of the same subset."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    tasks, score, gauntlet = tasks_yaml(folder), score_yaml(folder), gauntlet_yaml(folder, weighting='EQUAL')
    words = ['--tasks', tasks, '--score', score, '--gauntlet', gauntlet, '--data-root', data]
    limit = ['--subset-items', NUM_ITEMS]

    # Answers to other rows would be an error.
    settings = {'tasks': str(tasks), 'score': str(score), 'data_root': str(data), 'subset_items': NUM_ITEMS}
    subset = load_data(decode_settings(settings))
    rows_asked = {label_of(key): {example.row for example in subset.asked(key)} for key in (*ROWS, AGIEVAL)}

    def answers_of_subset(seed: int) -> list[dict[str, Any]]:
        return [answer for answer in answers_of(seed) if answer['row'] in rows_asked[answer['task']]]

    def evaluated(name: str, answers: Iterable[dict[str, Any]], *options: Any) -> Path:
        outputs = write_answers(folder, answers)
        assert run_cli('run', '--outputs', outputs, *words, *options, '--out', folder / name) == 0
        return folder / name

    return {
        'a': evaluated('a', answers_of_subset(0), *limit),
        'b': evaluated('b', answers_of_subset(2), *limit),
        'whole': evaluated('whole', answers_of(4)),
    }


def test_a_subset_records_how_many_rows_its_files_have(subsets):
    record = record_of(subsets['a'])

    assert {key: record['tasks'][key]['num_rows'] for key in ROWS} == SIZES
    assert {record['tasks'][key]['subset_items'] for key in ROWS} == {NUM_ITEMS}
    assert record['config']['subset_version'] == 2


def test_shares_of_the_variance_are_recorded_for_composites(subsets):
    tasks_of_category = {'reading': {CHOICES, RIDDLES}, 'rest': {TOPICS, LINES, CHOICES}}

    composites = record_of(subsets['a'])['composites']

    for name, tasks in tasks_of_category.items():
        shares = composites['categories'][name]['variance_shares']
        assert shares.keys() == tasks
        assert sum(shares.values()) == pytest.approx(1)
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

    (comparison,) = compared(subsets['a'], subsets['b'])

    # 6 of 7 riddles are asked, which makes the error no smaller.
    assert comparison['tasks'][RIDDLES]['difference']['standard_error'] == pytest.approx(usual_error(changes))


def test_results_with_the_errors_and_clusters_of_whole_files_are_read(subsets, compared, tmp_path: Path):
    """Development versions before 0.2 wrote them."""
    older = copy_run(subsets['a'], tmp_path / 'a')
    with edited(older) as record:
        task = record['tasks'][RIDDLES]
        task['file_clusters'] = {'': {'1': 7}}
        del task['num_rows']
        for measure in task['metrics'].values():
            measure['standard_error_of_file'] = 0.01

    (of_older,) = compared(older, subsets['b'])
    (of_present,) = compared(subsets['a'], subsets['b'])

    assert of_older['tasks'] == of_present['tasks']
