"""Our evaluation beside lm-eval and llm-foundry, item by item, on one model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contenders import Contender, load_all, running
from parts import task_entries
from real_rows import AgreementRow

from llmfoundry_gauntlet.data.readers import locate

OURS, LM_EVAL, FOUNDRY = 'ours', 'lm_eval', 'llm_foundry'
HERE = Path(__file__).parent
LM_EVAL_BATCH_SIZE = 8
FOUNDRY_TOKENS = 2048  # in a batch, padding included
MAX_SEQ_LEN = 2048  # that none of the other two's items reaches
SHOT_ROWS = 500  # to draw shots from, as all rows would have to be tokenized by llm-foundry
CLASSES = {
    OURS: 'ours:Ours',
    LM_EVAL: 'lm_eval_items:LMEvalOnRealTexts',
    FOUNDRY: 'foundry_contender:LLMFoundry',
}


@contextmanager
def contenders_with(model: Path, reference_python: str, folder: Path) -> Iterator[tuple[dict[str, Contender], str]]:
    """Yield processes that have loaded a model, by name, with the batch layouts that ours chose."""
    modules = [str(HERE), str(HERE.parent / 'bench'), str(HERE.parent.parent)]
    before = os.environ.get('PYTHONPATH')
    os.environ['PYTHONPATH'] = os.pathsep.join(modules)
    commands = {name: (sys.executable if name == OURS else reference_python, CLASSES[name]) for name in CLASSES}
    try:
        with running(commands, folder) as contenders:
            yield contenders, load_all(contenders, model)[OURS]['layouts']
    finally:
        del os.environ['PYTHONPATH']
        if before is not None:
            os.environ['PYTHONPATH'] = before


def compare(row: AgreementRow, contenders: dict[str, Contender], data_root: Path, folder: Path) -> dict[str, Any]:
    """Return what agrees and what differs in a row, and the processor seconds per item of each."""
    rows_file = write_rows(row, data_root, folder)
    task = entry_of(row, rows_file)
    settings = {'tasks': [task]}
    job = {'settings': settings, 'max_seq_len': MAX_SEQ_LEN, 'num_items': row.items}
    ours = contenders[OURS].ask('measure', **job, warm_up=settings)
    lm_eval = contenders[LM_EVAL].ask('measure', **job, batch_size=LM_EVAL_BATCH_SIZE)
    compared = {
        'model': row.model,
        'row': row.name,
        'seconds': {OURS: ours['cpu_seconds'] / row.items, LM_EVAL: lm_eval['cpu_seconds'] / row.items},
        LM_EVAL: compare_items(ours, lm_eval),
    }
    if row.foundry_items:
        compared[FOUNDRY], seconds = compare_with_foundry(row, task, contenders)
        compared['seconds'] |= seconds
    return compared


def compare_with_foundry(
    row: AgreementRow, task: dict[str, Any], contenders: dict[str, Contender]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what agrees under `semantics: reference`, and llm-foundry's processor seconds per item."""
    settings = {'tasks': [task], 'semantics': 'reference'}
    ours = contenders[OURS].ask(
        'measure', settings=settings, warm_up=settings, max_seq_len=row.foundry_length, num_items=row.foundry_items
    )
    foundry = contenders[FOUNDRY].ask(
        'measure',
        task=task,
        rows_file=task['dataset_uri'],
        max_seq_len=row.foundry_length,
        batch_size=max(FOUNDRY_TOKENS // row.foundry_length // choices_of(ours), 1),
        num_items=row.foundry_items,
    )
    num_items = len(foundry['predictions'])
    compared = {**compare_items(ours, foundry), 'padded_to': row.foundry_length}
    return compared, {
        FOUNDRY: foundry['cpu_seconds'] / num_items,
        'ours_beside_llm_foundry': ours['cpu_seconds'] / num_items,
    }


def choices_of(ours: dict[str, Any]) -> int:
    """Return the number of choices of an item, 1 if its answer is generated."""
    return len(ours['logprobs'][0]) if ours['logprobs'] else 1


def compare_items(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return how many items have equal predictions, those that have not, and the distance of log-probabilities."""
    predictions = list(zip(ours['predictions'], theirs['predictions'], strict=False))
    differing = [
        {'item': item, 'ours': own, 'theirs': other} for item, (own, other) in enumerate(predictions) if own != other
    ]
    compared: dict[str, Any] = {
        'items': len(predictions),
        'equal': len(predictions) - len(differing),
        'differing': differing,
    }
    if not ours['logprobs'] or 'logprobs' not in theirs:
        return compared

    alike = theirs['tokenized_alike']
    distances: dict[bool, list[float]] = {True: [], False: []}
    for own_row, other_row, alike_row in zip(ours['logprobs'], theirs['logprobs'], alike, strict=True):
        for own, other, is_alike in zip(own_row, other_row, alike_row, strict=True):
            distances[is_alike].append(abs(own - other))

    items_alike = [all(of_row) for of_row in alike]
    for difference in differing:
        item = difference['item']
        difference['tokenized_alike'] = items_alike[item]
        difference['logprobs'] = [ours['logprobs'][item], theirs['logprobs'][item]]
    return {
        **compared,
        'choices': sum(map(len, alike)),
        'items_alike': sum(items_alike),
        'equal_alike': sum(items_alike) - sum(difference['tokenized_alike'] for difference in differing),
        'choices_alike': len(distances[True]),
        'largest_distance': max(distances[True], default=0.0),
    }


def entry_of(row: AgreementRow, rows_file: Path) -> dict[str, Any]:
    """Return the YAML keys of the task."""
    entry = {
        **task_entries()[row.label],
        'dataset_uri': str(rows_file),
        'num_fewshot': [row.num_shots],
        'has_categories': False,
    }
    if row.max_new_tokens is None:
        return entry
    return {
        **entry,
        'early_stopping_criteria': list(row.stops),
        'generation_kwargs': {'max_new_tokens': row.max_new_tokens},
    }


def write_rows(row: AgreementRow, data_root: Path, folder: Path) -> Path:
    """Write the rows to run, with shots more to draw them from."""
    source = locate(task_entries()[row.label]['dataset_uri'], data_root)
    num_rows = max(row.items, SHOT_ROWS) if row.num_shots else row.items
    return write_first_lines(source, num_rows, folder / f'{row.label}-{row.num_shots}-{num_rows}.jsonl')


def write_first_lines(source: Path, num_rows: int, path: Path) -> Path:
    """Write the first rows of a file of JSON Lines; return the path."""
    lines: Sequence[str] = [line for line in source.read_text('utf-8').split('\n') if line.strip()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(lines[:num_rows]) + '\n', 'utf-8')
    return path
