"""Scores of `gauntlet run`, beside published ones."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from parts import TASKS_YAML, task_entries
from real_rows import GEMMA3, PUBLISHED, SMOLLM2, Published
from wheels import Skipped

from llmfoundry_gauntlet.data.readers import locate

# Items of each task, the same at each run.
PUBLISHED_ITEMS = {SMOLLM2: 200, GEMMA3: 300}
GAUNTLET_ITEMS = {SMOLLM2: 2, GEMMA3: 1}
MAX_SEQ_LEN = 2048
# Programs take as long to generate as all other tasks together.
PROGRAMS = 'human_eval'
SHOWN_LINES = 5  # of a run that failed


def evaluate_published(name: str, model: Path, data_root: Path, out: Path) -> dict[str, Any]:
    """Return the scores of the tasks with published ones, each with its error, by name."""
    entries = [entry for entry in PUBLISHED if entry.model == name]
    rows = out / 'rows'
    rows.mkdir(parents=True, exist_ok=True)
    tasks = [task_of(entry, number, data_root, rows) for number, entry in enumerate(entries)]
    tasks_file = rows / f'published-{name}.yaml'
    tasks_file.write_text(yaml.safe_dump({'icl_tasks': tasks}), 'utf-8')

    run = out / f'published-{name}'
    limits = ['--limit', str(PUBLISHED_ITEMS[name]), '--max-seq-len', str(MAX_SEQ_LEN)]
    seconds = gauntlet_run(['--model', model, '--tasks', tasks_file, *limits, '--log-prompts'], run)
    scores = [
        score_of(entry, run / 'samples' / f'{task["label"]}_{entry.num_shots}-shot.jsonl')
        for entry, task in zip(entries, tasks, strict=True)
    ]
    return {'scores': scores, 'cpu_seconds': seconds}


def evaluate_gauntlet(name: str, model: Path, data_root: Path, out: Path) -> dict[str, Any]:
    """Return the scores of a few items of every task whose file is at hand."""
    labels = [label for label in task_entries() if PROGRAMS not in label]
    limits = ['--limit', str(GAUNTLET_ITEMS[name]), '--max-seq-len', str(MAX_SEQ_LEN), '--missing', 'skip']
    chosen = ['--tasks', TASKS_YAML, '--only', ','.join(labels), '--data-root', data_root]
    run = out / f'gauntlet-{name}'
    seconds = gauntlet_run(['--model', model, *chosen, *limits], run)

    results = json.loads((run / 'results.json').read_text('utf-8'))
    return {'scores': scores_of_tasks(results['tasks']), 'cpu_seconds': seconds}


def scores_of_tasks(tasks: dict[str, Any]) -> dict[str, Any]:
    """Return the first metric of each task that was run, with its number of items."""
    scores = {}
    for task, result in tasks.items():
        # A task whose file is not at hand has a reason in place of metrics.
        if 'metrics' not in result:
            continue
        first_metric = next(iter(result['metrics'].values()))
        scores[task] = {'accuracy': first_metric['value'], 'items': result['num_items']}
    return scores


def gauntlet_run(arguments: Sequence[Any], run: Path) -> float:
    """Run `gauntlet run`, from where it was if it was cut off. Return its processor seconds. Raise Skipped."""
    command = [sys.executable, '-m', 'llmfoundry_gauntlet', 'run', '--device', 'cpu', '--out', run]
    if (run / 'results.json').exists():
        command.append('--overwrite')
    elif run.exists():
        command.append('--resume')
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false', 'HF_HUB_OFFLINE': '1'}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = subprocess.run(
        [str(part) for part in [*command, *arguments]], env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    run.parent.joinpath(f'{run.name}.log').write_text(finished.stdout + finished.stderr, 'utf-8')
    if finished.returncode:
        last = finished.stderr.strip().splitlines()[-SHOWN_LINES:]
        raise Skipped(f'gauntlet run ended with status {finished.returncode}: {" ".join(last)}')
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def task_of(entry: Published, number: int, data_root: Path, rows: Path) -> dict[str, Any]:
    """Return the YAML keys of a task in a prompt form; a file with other words is written to the folder `rows`."""
    task = {**task_entries()[entry.label], 'num_fewshot': [entry.num_shots], 'has_categories': False}
    source = locate(task['dataset_uri'], data_root)
    label = f'{entry.label}_{number}'
    if entry.words:
        source = with_words(source, entry.words, rows / f'{label}.jsonl')
    task |= {'label': label, 'dataset_uri': str(source.resolve())}
    if entry.delimiter is not None:
        task['continuation_delimiter'] = entry.delimiter
    if entry.blank_line_between_shots:
        task['example_delimiter'] = '\n\n'
    return task


def with_words(source: Path, words: Sequence[tuple[str, str]], target: Path) -> Path:
    """Write the rows of a file with other words in their contexts to another file, which is returned."""
    lines = []
    # Not by `splitlines`, which ends lines at characters that JSON texts may hold.
    for line in source.read_text('utf-8').strip().split('\n'):
        row = json.loads(line)
        for old, new in words:
            row['context'] = row['context'].replace(old, new)
        lines.append(json.dumps(row, ensure_ascii=False))
    target.write_text('\n'.join(lines) + '\n', 'utf-8')
    return target


def score_of(entry: Published, samples: Path) -> dict[str, Any]:
    """Return a score in percent, with its standard error, beside the published one."""
    items = [json.loads(line) for line in samples.read_text('utf-8').split('\n') if line.strip()]
    right = [SCORES[entry.score](item) for item in items]
    share = sum(right) / len(right)
    return {
        'label': entry.label,
        'num_shots': entry.num_shots,
        'form': entry.form,
        'score': entry.score,
        'items': len(right),
        'percent': 100 * share,
        'stderr': 100 * math.sqrt(share * (1 - share) / len(right)),
        'published': entry.percent,
        'source': entry.source,
    }


def right_by_sum(item: dict[str, Any]) -> float:
    """Return 1 if the gold choice is the most probable as a whole."""
    return float(best(item['logprobs']) == item['gold'])


def right_per_character(item: dict[str, Any]) -> float:
    """Return 1 if the gold choice is the most probable per character, without the space before it."""
    lengths = [len(choice.strip()) for choice in item['choices']]
    means = [logprob / length for logprob, length in zip(item['logprobs'], lengths, strict=True)]
    return float(best(means) == item['gold'])


def best(values: Sequence[float]) -> int:
    """Return the place of the first of the largest values."""
    return values.index(max(values))


SCORES: dict[str, Callable[[dict[str, Any]], float]] = {
    'sum': right_by_sum,
    'per_character': right_per_character,
    'accuracy': lambda item: float(item['score'] or 0.0),
}
