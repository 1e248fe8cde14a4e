"""The checkpoints in a folder on a disk or in an object store."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from llmfoundry_gauntlet.composer.checkpoints import CONFIG, METADATA, SHARD
from llmfoundry_gauntlet.data.stores import StoredFile

SINGLE, SHARDED, HUGGING_FACE = 'file', 'sharded', 'hugging face'
BATCH = re.compile(r'(?:^|[^A-Za-z])(?:ba|batch|checkpoint-|step)[-_]?(\d+)')
LATER_RANK = re.compile(r'rank[1-9]\d*\.pt$')  # of a checkpoint of several files the first stands for all


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint by its name relative to a store, and its files."""

    name: str
    kind: str
    files: tuple[StoredFile, ...]

    @property
    def batch(self) -> int | None:
        """The training batch in the name, if there is one."""
        found = BATCH.findall(self.name)
        return int(found[-1]) if found else None

    @property
    def version(self) -> str:
        """16 hexadecimal digits that change whenever a file does."""
        content = repr([(file.name, file.version) for file in self.files])
        return hashlib.sha256(content.encode('utf-8', 'surrogatepass')).hexdigest()[:16]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by its name in the checkpoint's folder."""
        return {PurePosixPath(file.name).name: file.size for file in self.files}


def find_checkpoints(files: Sequence[StoredFile]) -> list[Checkpoint]:
    """Return the checkpoints among files, by name.

    Composer's single files (`*.pt`), its folders of shards, and Hugging Face folders. Hidden files and folders are
    skipped.
    """
    by_parent: dict[str, list[StoredFile]] = {}
    for file in files:
        if not is_hidden(file.name):
            by_parent.setdefault(str(PurePosixPath(file.name).parent), []).append(file)
    found = []
    for parent, inside in by_parent.items():
        names = {PurePosixPath(file.name).name for file in inside}
        if METADATA in names or any(name.endswith(SHARD) for name in names):
            shards = [f for f in inside if f.name.endswith(SHARD) or PurePosixPath(f.name).name == METADATA]
            found.append(Checkpoint(name=parent, kind=SHARDED, files=tuple(shards)))
        elif CONFIG in names or any(name.endswith('.safetensors') for name in names):
            found.append(Checkpoint(name=parent, kind=HUGGING_FACE, files=tuple(inside)))
        else:
            found += [
                Checkpoint(name=file.name, kind=SINGLE, files=(file,))
                for file in inside
                if file.name.endswith('.pt') and not LATER_RANK.search(file.name)
            ]
    return sorted(found, key=lambda checkpoint: checkpoint.name)


def is_hidden(name: str) -> bool:
    """Return whether a file or a folder above it is hidden; the metadata of shards is not."""
    return any(part.startswith('.') and part != METADATA for part in PurePosixPath(name).parts)
