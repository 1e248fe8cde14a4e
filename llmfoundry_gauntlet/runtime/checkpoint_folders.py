"""Find the checkpoints in a local folder or object store, and download them."""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from llmfoundry_gauntlet.data.stores import Store, StoredFile, scheme_of
from llmfoundry_gauntlet.errors import ModelError, listed
from llmfoundry_gauntlet.runtime.checkpoints import (
    ADAPTER_CONFIG,
    CONFIG,
    LINK,
    METADATA,
    OF_ACCELERATE,
    SAFETENSORS,
    SHARD,
    parts_without_optimizer,
)
from llmfoundry_gauntlet.runtime.distributed import barrier, gather, global_rank, local_rank, meet, raised_on_all_ranks

BATCH = re.compile(r'(?:^|[^A-Za-z])(?:ba|batch|checkpoint-|step)[-_]?(\d+)')
SINGLE_FILE = '.pt'
OPTIMIZER = re.compile(r'optimizer_\d+')  # a sharded folder of Accelerate, beside that of the weights
LATER_RANK = re.compile(r'rank[1-9]\d*\.pt$')  # rank 0's file represents the files of all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint: its name, relative to a store, and its files; or the average of its `members`, newest first."""

    name: str
    files: tuple[StoredFile, ...]
    members: tuple[Checkpoint, ...] = ()

    @property
    def is_adapter(self) -> bool:
        """Return whether it is a PEFT adapter, which needs its base."""
        return any(PurePosixPath(file.name).name == ADAPTER_CONFIG for file in self.files)

    @property
    def claimed_name(self) -> str:
        """Return the name for claims, another one for an average of other members.

        Trainers delete old checkpoints: what is then the average up to the same batch is no new version of it.
        """
        if not self.members:
            return self.name
        names = repr([member.name for member in self.members])
        return f'{self.name}+{hashlib.sha256(names.encode()).hexdigest()[:8]}'

    @property
    def batch(self) -> int | None:
        """Return the training batch in the name, or None if it contains none."""
        batches = BATCH.findall(self.name)
        return int(batches[-1]) if batches else None

    @property
    def version(self) -> str:
        """Return a hash of 16 hexadecimal digits that changes whenever a file does."""
        content = repr([(file.name, file.version) for file in self.files])
        return hashlib.sha256(content.encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def find_checkpoints(files: Sequence[StoredFile]) -> list[Checkpoint]:
    """Return the checkpoints among files, sorted by name.

    These are single files (`*.pt`), sharded folders, Hugging Face folders and those of PEFT adapters. Hidden files and
    folders are skipped, and single files below the folder of a checkpoint.
    """
    by_parent: dict[str, list[StoredFile]] = {}
    for file in files:
        path = PurePosixPath(file.name)
        if not any(part.startswith('.') and part != METADATA for part in path.parts):
            by_parent.setdefault(str(path.parent), []).append(file)

    checkpoints: list[Checkpoint] = []
    for folder, inside in by_parent.items():
        checkpoints += checkpoints_in(folder, inside)
    of_batches = {PurePosixPath(checkpoint.name) for checkpoint in checkpoints if checkpoint.batch is not None}
    alone = [checkpoint for checkpoint in checkpoints if not is_part(checkpoint, of_batches)]
    return sorted(alone, key=lambda checkpoint: checkpoint.name)


def is_part(checkpoint: Checkpoint, of_batches: Set[PurePosixPath]) -> bool:
    """Return whether a file is part of one of these checkpoints: the state of a scheduler, or shards of DeepSpeed."""
    path = PurePosixPath(checkpoint.name)
    return path.suffix == SINGLE_FILE and not of_batches.isdisjoint(path.parents)


def checkpoints_in(folder: str, files: Sequence[StoredFile]) -> list[Checkpoint]:
    """Return the checkpoint that a folder is, or the single-file ones in it; `files` are those in it, not below."""
    file_of_name = {PurePosixPath(file.name).name: file for file in files}
    if METADATA in file_of_name or any(name.endswith(SHARD) for name in file_of_name):
        path = PurePosixPath(folder)
        if OPTIMIZER.fullmatch(path.name):
            return []
        shards = [file for name, file in file_of_name.items() if name.endswith(SHARD) or name == METADATA]
        name = str(path.parent) if path.name == OF_ACCELERATE else folder
        return [Checkpoint(name=name, files=tuple(shards))]
    is_model = CONFIG in file_of_name or ADAPTER_CONFIG in file_of_name
    if is_model or any(name.endswith(SAFETENSORS) for name in file_of_name):
        return [Checkpoint(name=folder, files=tuple(files))]
    return [
        Checkpoint(name=file.name, files=(file,))
        for name, file in file_of_name.items()
        if name.endswith(SINGLE_FILE) and not LATER_RANK.search(name)
    ]


@contextlib.contextmanager
def downloaded(uri: str) -> Iterator[tuple[Path, str]]:
    """Download a model from an object store; yield the path of the copy and the model's URI with any link resolved.

    All ranks must call this. One rank per machine downloads; the copy is deleted when all ranks have left the context.
    Raise ModelError or StoreError on all ranks.
    """
    is_first = local_rank() == 0
    first = global_rank() - local_rank()
    temporary = tempfile.TemporaryDirectory(prefix='gauntlet-model-') if is_first else contextlib.nullcontext('')
    with temporary as made:
        folder = Path(gather(made)[first])
        with raised_on_all_ranks():
            try:
                path_and_uri: Any = download(uri, folder) if is_first else None
            finally:
                meet()  # a download may take longer than the timeout of collectives
        yield gather(path_and_uri)[first]
        barrier()


def download(uri: str, folder: Path) -> tuple[Path, str]:
    """Download a model into a folder; return its local path and its URI. Raise ModelError or StoreError."""
    bucket, _, key = uri.partition('://')[2].partition('/')
    store = Store(f'{scheme_of(uri)}://{bucket}')
    checkpoint = checkpoint_at(store, key.rstrip('/'))
    path = folder / 'model' / PurePosixPath(checkpoint.name).name
    own_uri = f'{store.uri}/{checkpoint.name}'.removesuffix('/.')
    names = [file.name for file in checkpoint.files]
    metadata = [name for name in names if name.endswith(METADATA)]
    if not any(name.endswith(SHARD) for name in names):
        store.download(names, path.parent if names == [checkpoint.name] else path)
        return path, own_uri
    if not metadata:
        raise ModelError(f'{own_uri}: has shards but no {METADATA}, which is written last')
    store.download(metadata, path)
    with named_as(own_uri, path):
        parts = parts_without_optimizer(path)
    for file in checkpoint.files:
        shard = PurePosixPath(file.name).name
        if shard in parts:
            store.download_parts(file, path / shard, parts[shard])
    return path, own_uri


@contextlib.contextmanager
def named_as(uri: str, path: Path) -> Iterator[None]:
    """Name the URI instead of its local copy in the message of a ModelError."""
    try:
        yield
    except ModelError as error:
        raise ModelError([problem.replace(str(path), uri) for problem in error.problems]) from error


def checkpoint_at(store: Store, key: str) -> Checkpoint:
    """Return the checkpoint at a key of a bucket, following a link. Raise ModelError."""
    files = {file.name: file for file in store.files(key)}
    for link in (key, f'{key}{LINK}'):
        if link.endswith(LINK) and link in files:
            text = store.read(link).decode(errors='replace').strip()
            target = text.removeprefix(f'{store.uri}/').strip('/')
            if not target or target.endswith(LINK):
                raise ModelError(f'{store.uri}/{link}: leads to {text!r}; allowed: the key of a checkpoint')
            return checkpoint_at(store, target)
    if key in files:
        return Checkpoint(name=key, files=(files[key],))
    below = [file for name, file in files.items() if name.startswith(f'{key}/') or not key]
    for checkpoint in find_checkpoints(below):
        if checkpoint.name == (key or '.'):
            return checkpoint
    if not below:
        raise ModelError(f'{store.uri}/{key}: there is no such object, and nothing below it')
    names = [str(PurePosixPath(file.name).relative_to(key)) for file in below]
    raise ModelError(f'{store.uri}/{key}: {what_is_in_it(names)}')


def what_is_in_it(names: list[str]) -> str:
    """Return a message that says why a folder is not a model, given the relative names of its files."""
    checkpoints = find_checkpoints([StoredFile(name, 0, '') for name in names])
    if checkpoints:
        known = ', '.join(checkpoint.name for checkpoint in checkpoints)
        return f'is a folder of {len(checkpoints)} checkpoints; name one of them: {known}'
    return (
        f'is not a model: it has no {CONFIG} and no {METADATA}; allowed: a checkpoint, whole or sharded, or a '
        f'Hugging Face folder; it contains {listed(sorted(names)) or "no files"}'
    )
