"""The version of a gauntlet: what changes it and what does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import LINES, TOPICS, record_of, write_lines
from recorded_runs import ROWS as ALL_ROWS

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import gauntlet_version
from llmfoundry_gauntlet.results.runs import read_run

ROWS = {'choices': ALL_ROWS[TOPICS], 'lines': ALL_ROWS[LINES]}


def version(folder: Path, **changes: Any) -> str:
    """Return the version with changed rows, task keys, gauntlet keys or settings."""
    rows = changes.pop('rows', ROWS['choices'])
    uri = changes.pop('uri', 'rows.jsonl')
    dumps = changes.pop('dumps', json.dumps)
    write_lines(folder / uri, map(dumps, rows))
    write_lines(folder / 'lines.jsonl', changes.pop('other_rows', ROWS['lines']))
    task = {'label': 'choices', 'dataset_uri': uri, 'num_fewshot': [1], 'icl_task_type': 'multiple_choice'}
    task |= changes.pop('task', {})
    other = {'label': 'lines', 'dataset_uri': 'lines.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'}
    benchmarks = [{'name': 'choices', 'num_fewshot': 1, 'random_baseline': 0.5, **changes.pop('benchmark', {})}]
    gauntlet = {'categories': [{'name': 'all', 'benchmarks': benchmarks}], **changes.pop('gauntlet', {})}
    tasks = changes.pop('order', lambda tasks: tasks)([task, other])
    settings = {'tasks': tasks, 'gauntlet': gauntlet, 'data_root': str(folder), **changes}
    data = load_data(decode_settings(settings))
    assert data.suite.gauntlet is not None
    return gauntlet_version(data, data.suite.gauntlet)


def changed_row(row: int, **values: Any) -> list[dict[str, Any]]:
    """Return the rows with other values in one of them."""
    return [{**old, **(values if number == row else {})} for number, old in enumerate(ROWS['choices'])]


@pytest.mark.parametrize(
    'changes',
    [
        {'task': {'num_fewshot': [0]}, 'benchmark': {'num_fewshot': 0}},
        {'rows': changed_row(7, query='Warum?')},
        {'rows': changed_row(0, gold=1)},
        {'rows': ROWS['choices'][::-1]},
        {'subset_items': 3},
        {'semantics': 'reference'},
        {'truncation': 'reference'},
        {'fewshot': 'fixed'},
        {'reasoning_markers': ['<plan>...</plan>']},
        {'gauntlet': {'weighting': 'LOG_SAMPLE_SZ'}},
        {'gauntlet': {'rescale_accuracy': False}},
        {'gauntlet': {'averages': {'mine': ['all']}}},
        {'benchmark': {'random_baseline': 0.25}},
        {'task': {'prompt_string': 'Answer.\n'}},
        {'task': {'fewshot_random_seed': 5}},
        {'task': {'example_delimiter': '\n\n'}},
        {'task': {'continuation_delimiter': ': '}},
        {'task': {'has_categories': True}},
        {'task': {'max_seq_len': 100}},
    ],
)
def test_the_version_depends_on_everything_that_changes_composites(tmp_path: Path, changes: dict[str, Any]):
    assert version(tmp_path, **changes) != version(tmp_path)


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'task': {'batch_size': 7}},
        {'task': {'pad_tok_id': 3}},
        {'task': {'metric_names': ['InContextLearningMultipleChoiceAccuracy']}},
        {'task': {'metric_names': ['InContextLearningMCExpectedCalibrationError']}},
        {'task': {'num_fewshot': [1, 0]}},
        {'uri': 'renamed.jsonl'},
        {'rows': [dict(reversed(row.items())) for row in ROWS['choices']]},
        {'dumps': lambda row: json.dumps(row, ensure_ascii=False, separators=(' ,', ' : '))},
        {'order': lambda tasks: tasks[::-1]},
        {'order': lambda tasks: tasks[:1]},
        {'other_rows': ROWS['lines'][:2]},
        {'gauntlet': {'weighting': 'EQUAL', 'subtract_random_baseline': True}},
        {'truncation': 'drop_shots'},
        {'tokens_per_batch': 1000, 'sandbox': 'none'},
    ],
)
def test_the_version_does_not_depend_on_anything_else(tmp_path: Path, changes: dict[str, Any]):
    assert version(tmp_path, **changes) == version(tmp_path)


def test_the_version_is_16_hexadecimal_digits_and_recorded(runs: dict[str, Path]):
    data = read_run(runs['a']).data
    recorded = record_of(runs['a'])['composites']['version']
    assert re.fullmatch('[0-9a-f]{16}', recorded)
    assert data.suite.gauntlet is not None
    assert gauntlet_version(data, data.suite.gauntlet) == recorded
