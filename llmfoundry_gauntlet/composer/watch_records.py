"""Where the records of watched checkpoints go, and which checkpoint each folder of records is of."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.composer.checkpoint_folders import Checkpoint
from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.inputs import EvaluationData
from llmfoundry_gauntlet.records.results import RESULTS, read_results, write_json

MARK = 'checkpoint.json'  # in each folder of records: of which checkpoint, which version, and what was asked


def digest_of_questions(data: EvaluationData, precision: str | None) -> str:
    """16 hexadecimal digits of all that makes two evaluations of a checkpoint the same."""
    settings = data.settings
    asked = [
        [asdict(task) for task in data.suite.tasks],
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


def folder_of(out: Path, checkpoint: Checkpoint) -> Path:
    """`out/ba{batch}`; by the checkpoint's name where that has no batch, or where another one has the folder."""
    plain = checkpoint.name.replace('/', '-')
    if checkpoint.batch is None:
        marks = {path.parent: read_mark(path.parent) for path in out.glob(f'*/{MARK}')}
        mine = [folder for folder, mark in marks.items() if mark and mark['checkpoint'] == checkpoint.name]
        return mine[0] if mine else out / plain
    folder = out / f'ba{checkpoint.batch}'
    return folder if is_free_for(folder, checkpoint) else out / f'ba{checkpoint.batch}-{plain}'


def is_free_for(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether a folder's records are of this checkpoint, or of none. Raises RecordError."""
    mark = read_mark(folder)
    if mark is not None:
        return mark['checkpoint'] == checkpoint.name
    if not (folder / RESULTS).is_file():
        return True
    recorded = str((read_results(folder)['training'] or {}).get('checkpoint'))
    return f'/{recorded}/'.endswith(f'/{checkpoint.name}/')


def is_of_other_version(folder: Path, checkpoint: Checkpoint) -> bool:
    """Whether what a folder holds is of what the checkpoint was before it was overwritten. Raises RecordError."""
    mark = read_mark(folder)
    return mark is not None and mark['version'] != checkpoint.version


def read_mark(folder: Path) -> dict[str, str] | None:
    """Which checkpoint, version and questions a folder's records are of, None where it does not say."""
    path = folder / MARK
    try:
        mark = json.loads(path.read_text(encoding='utf-8'))
        return {name: str(mark[name]) for name in ('checkpoint', 'version', 'asked')}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f'{path}: cannot be read: {error!r}; delete the folder, or give another one') from error


def mark_folder(folder: Path, checkpoint: Checkpoint, asked: str) -> None:
    """Says what the records are of that come into a folder. Raises RecordError."""
    write_json(folder / MARK, {'checkpoint': checkpoint.name, 'version': checkpoint.version, 'asked': asked})


def remove_mark(folder: Path) -> None:
    """Takes the mark off a folder that nothing has come into, and the folder away."""
    if not [path for path in folder.glob('*') if path.name != MARK]:
        shutil.rmtree(folder, ignore_errors=True)


def is_recorded(folder: Path, checkpoint: Checkpoint, asked: str, data: EvaluationData) -> bool:
    """Whether a folder holds the finished records of this version of a checkpoint.

    Records of a training are those of its checkpoint if they are of the same questions. Raises RecordError where they
    are of others: nothing that was computed is replaced.
    """
    mark = read_mark(folder)
    if mark is not None and mark['asked'] != asked:
        raise RecordError(
            f'{folder}: is of {mark["checkpoint"]} as well, but of other tasks or settings; give another --out'
        )
    if not (folder / RESULTS).is_file():
        return False
    if mark is not None:
        return mark['version'] == checkpoint.version
    differing = other_questions(read_results(folder), data)
    if differing:
        raise RecordError(
            f'{folder / RESULTS}: is of {checkpoint.name} as well, but of others: {", ".join(differing)}; give another '
            '--out'
        )
    return True


def other_questions(record: Mapping[str, Any], data: EvaluationData) -> list[str]:
    """In what an evaluation differs from what is asked now."""
    score = {entry['task']: entry for entry in (record['score'] or {}).values()}
    then = {key: entry.get('data_sha256') for key, entry in {**record['tasks'], **score}.items()}
    now = {task.key: data.digests.get(task.key) for task in data.suite.tasks}
    differing = [] if then == now else ['tasks or rows']
    for name in ('semantics', 'fewshot', 'subset_items', 'time_budget'):
        found, wanted = record['config'].get(name), getattr(data.settings, name)
        if found != wanted:
            differing.append(f'{name} {found} (now {wanted})')
    return differing


def finish_records(folder: Path, checkpoint: Checkpoint, uri: str) -> Path:
    """Names the checkpoint in the records, and has the folder be `ba{batch}` once that is known; the folder."""
    record = read_results(folder)
    training = record['training'] or {'batch': checkpoint.batch, 'epoch': None, 'token': None}
    if training['batch'] is None:
        return folder
    write_json(folder / RESULTS, {**record, 'training': {**training, 'checkpoint': uri}})
    target = folder.parent / f'ba{training["batch"]}'
    if checkpoint.batch is not None or target.exists():
        return folder
    return folder.rename(target)


def budget_sizes(folder: Path) -> dict[str, int] | None:
    """The questions of each task that fit into the time budget, None where there was none. Raises RecordError."""
    sizes: dict[str, int] | None = read_results(folder)['timing'].get('time_budget')
    return sizes
