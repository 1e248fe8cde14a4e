"""Runs of answers to a task of each type and to SCORE on two data sets, for tests that read them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data
from llmfoundry_gauntlet.results.external import read_answers, score_answers
from llmfoundry_gauntlet.results.files import write_lines

NAMES = ('task', 'num_shots', 'file', 'row', 'variant', 'sample')  # of an item, in requests and answers
ROWS: dict[str, list[dict[str, Any]]] = {
    'choices': [
        {
            'query': f'Frage {row}?',
            'choices': ['ja', 'nein, überhaupt nicht'],
            'gold': row // 2 % 2,
            'category': 'ab'[row % 2],
            'passage': f'{row // 3}',
        }
        for row in range(8)
    ],
    'lines': [{'context': f'{row} and 1 are', 'continuation': f'{row + 1}'} for row in range(5)],
    'riddles': [{'context': f'Twice {row}?', 'answer': f'{2 * row}', 'aliases': [f'{row}+{row}']} for row in range(4)],
}
QUESTIONS = [
    {'passage': 'Salt is cheap.', 'question': f'How {row}?', 'options': ['(A)x', '(B)y'], 'label': 'AB'[row % 2]}
    for row in range(4)
]
KINDS = {
    'choices': {'icl_task_type': 'multiple_choice', 'has_categories': True, 'cluster_key': 'passage'},
    'lines': {'icl_task_type': 'language_modeling', 'max_seq_len': 99, 'batch_size': 3},
    'riddles': {
        'icl_task_type': 'generation_task_with_answers',
        'early_stopping_criteria': ['\n\n'],
        'generation_kwargs': {'max_new_tokens': 9, 'do_sample': True, 'temperature': 0.5, 'seed': 3},
    },
}
GAUNTLET = {
    'categories': [
        {
            'name': 'words',
            'benchmarks': [
                {'name': 'choices', 'num_fewshot': 1, 'random_baseline': 0.5},
                {'name': 'lines', 'num_fewshot': 1},
            ],
        },
        {'name': 'numbers', 'benchmarks': [{'name': 'riddles', 'num_fewshot': 1}]},
    ],
    'averages': {'all of it': ['words', 'numbers']},
}
TEMPLATE = {'prompt': '{question}{options}'}


def write_yaml(path: Path, **content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def answers() -> list[dict[str, Any]]:
    """Return right and wrong answers, with a tie among them."""
    found: list[dict[str, Any]] = []
    for label, rows in ROWS.items():
        for number, row in enumerate(rows):
            name = {'task': label, 'num_shots': 1, 'row': number}
            if label == 'choices':
                values = [-1.25, -1.25 - number % 3] if row['gold'] == 0 else [-2.5, -2.0 - number % 2]
                found.append({**name, 'logprobs': values, 'num_tokens': [1, 1]})
            elif label == 'lines':
                found.append({**name, 'logprobs': [-1 / (number + 1)], 'is_argmax': number != 2})
            else:
                found.append({**name, 'text': f'{2 * max(number, 1)}\u2028 \x85\nand so on\n\nno'})
    for variant in ('option_order:A', 'option_order:B', *(f'prompt:{number}' for number in range(10))):
        for number in range(4):
            name = {'task': 'score_agieval', 'num_shots': 0, 'file': 'sat-en', 'row': number, 'variant': variant}
            reply = (
                'I do not know' if (number, variant) == (3, 'prompt:7') else f'The best answer is {"AB"[number // 2]}'
            )
            found.append({**name, 'text': reply})
            if variant.startswith('option_order'):
                for row in (number, number + 4):
                    name = {'task': 'score_choices', 'num_shots': 0, 'row': row, 'variant': variant}
                    found.append({**name, 'text': f'The best answer is {"BA"[row % 2]}'})
    return found


def words(source: Path) -> list[Any]:
    """Return the options that name the YAML files and the data."""
    files = [f'--{name}={source / name}.yaml' for name in ('tasks', 'gauntlet', 'score')]
    return [*files, '--data-root', source]


def write_answers(folder: Path, lines: Iterable[Any]) -> Path:
    """Write answers as JSON lines; text is written unchanged."""
    path = folder / 'answers.jsonl'
    write_lines(path, (line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def problems_of(data: EvaluationData, path: Path) -> list[str]:
    """Return the problems of answers that cannot be scored, with `line ` for their file."""
    with pytest.raises(DataError) as raised:
        score_answers(data, read_answers(path))
    return [problem.replace(f'{path}:', 'line ') for problem in raised.value.problems]


def data_of(source: Path) -> EvaluationData:
    """Return the data that these YAML files name."""
    files = {name: str(source / f'{name}.yaml') for name in ('tasks', 'gauntlet', 'score')}
    return load_data(decode_settings({**files, 'data_root': str(source)}))


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the names and bytes of a folder's files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / 'results.json').read_text())


def edit(run: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a run with a changed record."""
    record = record_of(run)
    change(record)
    (run / 'results.json').write_text(json.dumps(record))
    return run
