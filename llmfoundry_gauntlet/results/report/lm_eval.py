"""Return an evaluation in the results format of lm-evaluation-harness 0.4, for tools that read its results_*.json.

The keys are those of its `EvaluationTracker.save_results_aggregated` and `simple_evaluate`. SCORE, composites and tasks
without a score are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from llmfoundry_gauntlet.results.report.scores import MeasureRecord, TaskRecord
from llmfoundry_gauntlet.results.runs import Run

METRICS = {
    'InContextLearningMultipleChoiceAccuracy': 'acc',
    'InContextLearningLMAccuracy': 'acc',
    'InContextLearningGenerationExactMatchAccuracy': 'exact_match',
    'CharacterNormalizedMatch': 'acc_norm',
}
PASS_AT = 'PassAt'  # and a number
OUTPUT_TYPES = {
    'multiple_choice': 'multiple_choice',
    'schema': 'multiple_choice',
    'language_modeling': 'loglikelihood',
    'generation_task_with_answers': 'generate_until',
    'code_evaluation': 'generate_until',
}
FILTER = 'none'  # the name of lm-eval's filter that changes nothing
NO_ERROR = 'N/A'  # in place of a standard error, as in lm-eval


def lm_eval_record(evaluation: Run) -> dict[str, Any]:
    """Return the tasks that have a score, with their settings, and those of the evaluation."""
    record = evaluation.record
    model = record.get('model') or {}
    config = record.get('config') or {}
    environment = record.get('environment') or {}
    name_of_model = str(model.get('name') or '')
    started = record['timing'].get('started')

    # Our key and record of each task, by its name in lm-eval.
    tasks = {key: task for key, task in evaluation.scores.tasks.items() if named_measures(task)}
    keys = {name: key for key, name in task_names(tasks).items()}
    measures = {name: named_measures(tasks[key]) for name, key in keys.items()}
    records = {name: record['tasks'][key] for name, key in keys.items()}
    return {
        'results': {name: lm_eval_values(name, of_task) for name, of_task in measures.items()},
        'group_subtasks': {name: [] for name in keys},
        'configs': {name: config_of(name, key, records[name]) for name, key in keys.items()},
        'versions': dict.fromkeys(keys, record.get('package_version')),
        'n-shot': {name: num_shots(key) for name, key in keys.items()},
        'higher_is_better': {name: dict.fromkeys(of_task, True) for name, of_task in measures.items()},
        'n-samples': {name: counts_of(tasks[key], records[name].get('num_rows')) for name, key in keys.items()},
        'config': {
            'model': model.get('class'),
            'model_args': f'pretrained={name_of_model}',
            'model_num_parameters': model.get('num_parameters'),
            'batch_size': None,
            'device': environment.get('device'),
            'limit': config.get('subset_items'),
        },
        'git_hash': environment.get('git_commit'),
        'date': None if started is None else datetime.fromisoformat(started).timestamp(),
        'transformers_version': environment.get('transformers'),
        'max_length': config.get('max_seq_len'),
        'model_source': 'llmfoundry-gauntlet',
        'model_name': name_of_model,
        'model_name_sanitized': re.sub(r'[\"<>:/|\\?*\[\]]+', '__', name_of_model),
        'total_evaluation_time_seconds': str(evaluation.scores.timing.seconds),
    }


def task_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the label of each task, with the number of shots if the label has several."""
    labels = {key: key.rpartition('/')[0] for key in keys}
    counts = Counter(labels.values())
    return {key: label if counts[label] == 1 else f'{label}_{num_shots(key)}-shot' for key, label in labels.items()}


def num_shots(key: str) -> int:
    """Return the number of shots in a task's key."""
    return int(key.rpartition('/')[2].removesuffix('-shot'))


def named_measures(task: TaskRecord) -> dict[str, MeasureRecord]:
    """Return the metrics that have a value and a name in lm-eval, by that name."""
    measures = {}
    for name, measure in (task.metrics or {}).items():
        name_in_lm_eval = name.replace(PASS_AT, 'pass@') if name.startswith(PASS_AT) else METRICS.get(name)
        if name_in_lm_eval is not None and measure.value is not None:
            measures[name_in_lm_eval] = measure
    return measures


def lm_eval_values(name: str, scores: Mapping[str, MeasureRecord]) -> dict[str, Any]:
    """Return the values and standard errors of a task."""
    values: dict[str, Any] = {'alias': name}
    for metric, measure in scores.items():
        error = measure.standard_error
        values[f'{metric},{FILTER}'] = measure.value
        values[f'{metric}_stderr,{FILTER}'] = NO_ERROR if error is None else error
    return values


def config_of(name: str, key: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task."""
    spec = task.get('spec') or {}
    return {
        'task': name,
        'dataset_path': task.get('dataset_uri'),
        'output_type': OUTPUT_TYPES.get(task.get('icl_task_type', '')),
        'description': spec.get('prompt_string', ''),
        'target_delimiter': spec.get('continuation_delimiter'),
        'fewshot_delimiter': spec.get('example_delimiter'),
        'num_fewshot': num_shots(key),
        'metadata': {'data_sha256': task.get('data_sha256'), **spec},
    }


def counts_of(task: TaskRecord, num_rows: int | None) -> dict[str, int]:
    """Return the number of rows of a task's file, or of its items if that is unknown, and of scored items."""
    return {'original': num_rows or task.num_items, 'effective': task.num_items - task.num_unscored}
