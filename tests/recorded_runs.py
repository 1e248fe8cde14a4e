"""Runs of answers to the same rows, for tests that read, compare and show them.

They answer questions on passages, some of which two tasks share; sentences, two of which have one context; riddles; and
questions of SCORE.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_cli

from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData
from llmfoundry_gauntlet.results.external import read_answers, score_answers

CHOICES, TOPICS, LINES, RIDDLES = 'choices/0-shot', 'topics/0-shot', 'lines/0-shot', 'riddles/0-shot'
AGIEVAL = 'score_agieval/0-shot'
PASSAGES = (0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4)
ROWS: dict[str, list[dict[str, Any]]] = {
    CHOICES: [
        {
            'query': f'Question {row} on passage {passage}?',
            'choices': ['no', 'schön und gut', 'ja' * (row % 3 + 1)],
            'gold': row % 3,
            'passage': f'passage {passage}',
        }
        for row, passage in enumerate(PASSAGES)
    ],
    TOPICS: [
        {
            'query': f'Topic {row}?',
            'choices': ['red', 'deep blue', 'éclair', 'x'],
            'gold': row * row % 4,
            'passage': f'passage {row % 5}',
            'category': 'aabbbbccc'[row % 9],
        }
        for row in range(14)
    ],
    LINES: [{'context': f'{max(row, 1)} and {max(row, 1)} are', 'continuation': f'{2 * row} ö'} for row in range(9)],
    RIDDLES: [{'context': f'Twice {row}?', 'answer': f'{2 * row}'} for row in range(7)],
}
QUESTIONS = [
    {
        'passage': f'Salt {row // 2} is cheap.',
        'question': f'How {row}?',
        'options': ['(A)x', '(B)y', '(C)z'],
        'label': 'ABC'[row % 3],
    }
    for row in range(7)
]
KINDS = {
    CHOICES: {'icl_task_type': 'multiple_choice', 'cluster_key': 'passage'},
    TOPICS: {'icl_task_type': 'multiple_choice', 'cluster_key': 'passage', 'has_categories': True},
    LINES: {'icl_task_type': 'language_modeling'},
    RIDDLES: {'icl_task_type': 'generation_task_with_answers'},
}
BASELINES = {CHOICES: 1 / 3, TOPICS: 0.25, LINES: 0.0, RIDDLES: 0.0}
CATEGORIES = {'reading': (CHOICES, RIDDLES), 'rest': (TOPICS, LINES, CHOICES)}
AVERAGES = {'core': ('reading', 'rest'), 'reading alone': ('reading',)}
SIZES = {key: len(rows) for key, rows in ROWS.items()}
SEEDS = {'a': 0, 'b': 2, 'c': 4, 'd': 9}  # of answers
BATCHES = {'a': 20, 'b': 100, 'c': 400, 'd': 1000}  # as checkpoints of one training
LOSSES = {100: 3.5, 400: 2.25, 1000: 2.0}  # by batch; before the first one, there is none
LOSS_BATCHES = {100: 80, 400: 300, 1000: 600}  # those since the evaluation before
VARIANTS = [*(f'option_order:{letter}' for letter in 'ABC'), *(f'prompt:{number}' for number in range(10))]
NAMES = ('task', 'num_shots', 'file', 'row', 'variant', 'sample')  # of an item, in requests and answers

Sample = dict[str, Any]


def label_of(key: str) -> str:
    return key.partition('/')[0]


def write_data(folder: Path) -> None:
    """Write all data files and SCORE's prompts."""
    for key, rows in ROWS.items():
        write_lines(folder / f'{label_of(key)}.jsonl', rows)
    (folder / 'score' / 'agieval_v1').mkdir(parents=True)
    (folder / 'score' / 'prompts').mkdir()
    write_lines(folder / 'score' / 'agieval_v1' / 'sat-en.jsonl', QUESTIONS)
    content = {
        'option_order_robustness': {'prompt': '{question}{options}'},
        'prompt_robustness': [{'prompt': f'{number}. {{question}}{{options}}'} for number in range(10)],
    }
    (folder / 'score' / 'prompts' / 'agieval.json').write_text(json.dumps(content))


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Write JSON lines; text is written unchanged."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text(''.join(f'{text}\n' for text in texts))
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def write_answers(folder: Path, lines: Iterable[Any]) -> Path:
    return write_lines(folder / 'answers.jsonl', lines)


def problems_of(data: EvaluationData, path: Path) -> list[str]:
    """Return the problems of answers that cannot be scored, with `line ` for their file."""
    with pytest.raises(DataError) as raised:
        score_answers(data, read_answers(path))
    return [problem.replace(f'{path}:', 'line ') for problem in raised.value.problems]


def tasks_yaml(folder: Path, keys: Iterable[str] = ROWS, **changes: Any) -> Path:
    """Write a file of tasks with some keys changed."""
    path = folder / 'tasks.yaml'
    tasks = []
    for key in keys:
        label, shots = key.split('/')
        task = {'label': label, 'dataset_uri': f'{label}.jsonl', 'num_fewshot': [int(shots[0])]}
        kind = KINDS[f'{label}/0-shot']
        tasks.append({**task, **kind, **changes.get(label, {})})
    path.write_text(json.dumps({'icl_tasks': tasks}))
    return path


def gauntlet_yaml(folder: Path, **changes: Any) -> Path:
    path = folder / 'gauntlet.yaml'
    categories = []
    for name, members in CATEGORIES.items():
        benchmarks = [{'name': label_of(key), 'num_fewshot': 0, 'random_baseline': BASELINES[key]} for key in members]
        categories.append({'name': name, 'benchmarks': benchmarks})
    averages = {name: list(members) for name, members in AVERAGES.items()}
    content = {'categories': categories, 'averages': averages, 'weighting': 'SAMPLE_SZ', **changes}
    path.write_text(json.dumps({'eval_gauntlet': content}))
    return path


def score_yaml(folder: Path, *more: Mapping[str, Any], **changes: Any) -> Path:
    """Write a file of one dataset of SCORE with some keys changed, and of more datasets."""
    path = folder / 'score.yaml'
    entry = {'dataset': 'agieval', 'subsets': ['sat-en'], 'perturbations': ['option_order', 'prompt'], **changes}
    path.write_text(json.dumps({'score': [entry, *more]}))
    return path


def answers_of(seed: int, keys: Iterable[str] = (*ROWS, AGIEVAL)) -> list[dict[str, Any]]:
    """Return answers that correlate between seeds, as those of real models do."""
    shared, own = np.random.default_rng(77), np.random.default_rng(seed)

    def drawn(size: int) -> np.ndarray:
        return shared.normal(size=size) + 0.8 * own.normal(size=size)

    answers = []
    for key, rows in ROWS.items():
        for number, row in enumerate(rows):
            name = {'task': label_of(key), 'num_shots': 0, 'row': number}
            if 'choices' in row:
                values = drawn(len(row['choices']))
                values[row['gold']] += 0.9
                answers.append({**name, 'logprobs': (values - 6).tolist()})
            elif 'continuation' in row:
                (value,) = drawn(1)
                answers.append({**name, 'logprobs': [-float(np.exp(-value))], 'is_argmax': bool(value > 0)})
            else:
                answers.append({**name, 'text': row['answer'] if drawn(1)[0] > -0.3 else 'who knows'})
    for number in range(len(QUESTIONS)):
        for variant in VARIANTS:
            name = {'task': 'score_agieval', 'num_shots': 0, 'file': 'sat-en', 'row': number, 'variant': variant}
            letter = 'ABC'[int(np.argmax(drawn(3) + np.eye(3)[number % 3]))]
            answers.append({**name, 'text': f'The best answer is {letter}'})
    labels = set(map(label_of, keys))
    return [answer for answer in answers if answer['task'] in labels]


def record_run(
    out: Path,
    data: Path,
    keys: Iterable[str] = (*ROWS, AGIEVAL),
    *words: Any,
    answers: Iterable[Mapping[str, Any]] | None = None,
    gauntlet: Mapping[str, Any] | None = None,
    tasks: Mapping[str, Any] | None = None,
) -> Path:
    """Score answers to some of the tasks with changed settings; YAML files are written beside the run."""
    folder, keys = out.parent, list(keys)
    tasks_of_files = [key for key in keys if key != AGIEVAL]
    if tasks_of_files:
        words += ('--tasks', tasks_yaml(folder, tasks_of_files, **(tasks or {})))
    if gauntlet is not None:
        words += ('--gauntlet', gauntlet_yaml(folder, **gauntlet))
    if AGIEVAL in keys and '--score' not in words:
        words += ('--score', score_yaml(folder))
    path = write_answers(folder, answers_of(0, keys) if answers is None else answers)
    assert run_cli('run', '--outputs', path, '--data-root', data, *words, '--out', out) == 0
    return out


def samples_path(run: Path, key: str) -> Path:
    return run / 'samples' / f'{key.replace("/", "_")}.jsonl'


def samples_of(run: Path, key: str) -> list[Sample]:
    return read_lines(samples_path(run, key))


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / 'results.json').read_text())


def accuracy_of(record: dict[str, Any], key: str) -> dict[str, Any]:
    return next(iter(record['tasks'][key]['metrics'].values()))


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the names and bytes of a folder's files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


@contextmanager
def edited(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the record of a run, which is written with its changes."""
    record = record_of(run)
    yield record
    (run / 'results.json').write_text(json.dumps(record, indent=2, ensure_ascii=False) + '\n')


def copy_run(
    run: Path, to: Path, *, without: Mapping[str, Sequence[int]] | None = None, batch: int | None = None
) -> Path:
    """Copy a run, leaving out rows of its samples, at a training batch."""
    shutil.copytree(run, to)
    with edited(to) as record:
        for key, rows in (without or {}).items():
            kept = [sample for sample in samples_of(to, key) if sample['row'] not in rows]
            write_lines(samples_path(to, key), kept)
            record['tasks'][key]['num_items'] = len(kept)
        if batch is not None:
            record['training'] = {'batch': batch, 'epoch': 0, 'token': 0, 'checkpoint': None}
    return to


def with_shortened_prompts(
    run: Path,
    to: Path,
    rows: Mapping[str, Sequence[int]],
    *,
    same_digest: bool = False,
    config: Mapping[str, Any] | None = None,
    batch: int | None = None,
) -> Path:
    """Copy a run with shortened prompts for some rows."""
    copy_run(run, to, batch=batch)
    for key, rows_of_task in rows.items():
        lines = samples_of(to, key)
        for sample in lines:
            if sample['row'] in rows_of_task:
                digest = sample['prompt_sha256'] if same_digest else 'ab' * 32
                sample.update(prompt_shortened=True, prompt_sha256=digest)
        write_lines(samples_path(to, key), lines)
    with edited(to) as record:
        record['config'].update(config or {})
    return to


def rows_of_table(out: str) -> dict[str, list[str]]:
    """Return the cells of each row of a table on the terminal that are not empty, by its first cell."""
    before_notes = itertools.takewhile(lambda line: not line.startswith('- '), out.splitlines())
    lines = [line for line in before_notes if line and not line.startswith('\u2500')]
    rows = [re.split(r' {2,}', line.strip()) for line in lines]
    return {name: cells for name, *cells in rows}
