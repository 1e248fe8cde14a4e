"""Where the records of watched checkpoints go, and whether they are there already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.composer.checkpoint_folders import Checkpoint
from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.inputs import EvaluationData
from llmfoundry_gauntlet.records.results import RESULTS, read_results

CLAIM_FORMAT = 2
COMPARED = ('semantics', 'fewshot', 'subset_items', 'time_budget')


def digest_of_questions(data: EvaluationData, precision: str | None) -> str:
    """Return 16 hexadecimal digits of everything that makes two evaluations of a checkpoint the same."""
    settings = data.settings
    asked = [
        CLAIM_FORMAT,
        [task.keys for task in data.suite.tasks],
        dict(data.digests),
        data.suite.gauntlet and asdict(data.suite.gauntlet),
        settings.semantics,
        settings.fewshot,
        settings.cut,
        settings.subset_items,
        settings.time_budget,
        settings.max_seq_len,
        precision,
    ]
    text = json.dumps(asked, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def folder_of(out: Path, checkpoint: Checkpoint, *, others: Collection[Checkpoint]) -> Path:
    """Return `out/ba{batch}`, or a folder with the checkpoint's name if that is ambiguous or there is no batch.

    `others` are checkpoints that come first where they have the same batch. Raise RecordError.
    """
    name = checkpoint.name.replace('/', '-')
    if checkpoint.batch is None:
        return out / name
    folder = out / f'ba{checkpoint.batch}'
    is_taken = any(other.batch == checkpoint.batch for other in others)
    if not is_taken and (folder / RESULTS).is_file():
        recorded = str((read_results(folder)['training'] or {}).get('checkpoint'))
        is_taken = not f'/{recorded}/'.endswith(f'/{checkpoint.name}/')
    return out / f'ba{checkpoint.batch}-{name}' if is_taken else folder


def is_recorded(folder: Path, checkpoint: Checkpoint, data: EvaluationData, precision: str | None) -> bool:
    """Return whether a folder holds the records of a checkpoint; those that its training has written count.

    Raise RecordError if they are of other tasks, rows or settings.
    """
    if not (folder / RESULTS).is_file():
        return False
    differing = different_questions(read_results(folder), data, precision)
    if differing:
        raise RecordError(
            f'{folder / RESULTS}: is of {checkpoint.name}, but differs in {", ".join(differing)}; give another --out'
        )
    return True


def different_questions(record: Mapping[str, Any], data: EvaluationData, precision: str | None) -> list[str]:
    """Return in what an evaluation differs from what is asked now."""
    score = {entry['task']: entry for entry in (record['score'] or {}).values()}
    then = {key: entry.get('data_sha256') for key, entry in {**record['tasks'], **score}.items()}
    now = {task.key: data.digests.get(task.key) for task in data.suite.tasks}
    differing = [] if then == now else ['tasks or rows']
    settings, identity = data.settings, record.get('identity') or {}
    pairs = {name: (record['config'].get(name), getattr(settings, name)) for name in COMPARED}
    given = {'precision': precision, 'max_seq_len': settings.max_seq_len, 'truncation': settings.cut}
    pairs |= {name: (identity[name], wanted) for name, wanted in given.items() if wanted and name in identity}
    return differing + [f'{name} {found} (now {wanted})' for name, (found, wanted) in pairs.items() if found != wanted]


def budget_sizes(folder: Path) -> dict[str, int] | None:
    """Return the questions of each task that fit into the time budget, `None` if there was none. Raise RecordError."""
    sizes: dict[str, int] | None = read_results(folder)['timing'].get('time_budget')
    return sizes
