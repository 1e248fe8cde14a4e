"""The checkpoints in a folder that a training writes to: which there are, and whether they are all there."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from llmfoundry_gauntlet.composer.stores import Folder, StoredFile

SINGLE, SHARDED, HUGGING_FACE = 'file', 'sharded', 'hugging face'
BATCH = re.compile(r'(?:^|[^A-Za-z])(?:ba|batch|checkpoint-|step)[-_]?(\d+)')
LATER_RANK = re.compile(r'rank[1-9]\d*\.pt$')  # of several files of a checkpoint the first stands for all
METADATA, CONFIG = '.metadata', 'config.json'
INDEXES = ('model.safetensors.index.json', 'pytorch_model.bin.index.json')
WEIGHTS = ('model.safetensors', 'pytorch_model.bin')
END_OF_ZIP = (1 << 16) + 22  # bytes at the end of a zip file among which its directory's place is written


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint by its name relative to the folder, and the files that it is made of, by name."""

    name: str
    kind: str
    files: tuple[StoredFile, ...]

    @property
    def batch(self) -> int | None:
        """The training batch in the name, where there is one."""
        found = BATCH.findall(self.name)
        return int(found[-1]) if found else None

    @property
    def version(self) -> str:
        """16 hexadecimal digits that change whenever a file does."""
        content = repr([(file.name, file.version) for file in self.files])
        return hashlib.sha256(content.encode('utf-8', 'surrogatepass')).hexdigest()[:16]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by its name relative to the checkpoint's folder."""
        return {PurePosixPath(file.name).name: file.size for file in self.files}


def find_checkpoints(files: Sequence[StoredFile]) -> list[Checkpoint]:
    """The checkpoints that these files are of, by name.

    Composer's single files (`*.pt`), its folders of shards, and Hugging Face folders. Links and `.symlink` files lead
    to checkpoints and are none; hidden files and folders are not looked at, nor what lies beside other kinds' files.
    """
    plain = [file for file in files if not file.is_link and not is_hidden(file.name)]
    by_parent: dict[str, list[StoredFile]] = {}
    for file in plain:
        by_parent.setdefault(str(PurePosixPath(file.name).parent), []).append(file)
    found = []
    for parent, inside in by_parent.items():
        names = {PurePosixPath(file.name).name for file in inside}
        if METADATA in names or any(name.endswith('.distcp') for name in names):
            shards = [f for f in inside if f.name.endswith('.distcp') or PurePosixPath(f.name).name == METADATA]
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
    """Whether a file or a folder above it is hidden; the metadata of shards only looks so."""
    return any(part.startswith('.') and part != METADATA for part in PurePosixPath(name).parts)


def missing_part(folder: Folder, checkpoint: Checkpoint) -> str | None:
    """What a checkpoint lacks to be whole, None where it lacks nothing. Raises StoreError."""
    if checkpoint.kind == SINGLE:
        return missing_of_zip(folder, checkpoint.files[0])
    if checkpoint.kind == SHARDED:
        return missing_shards(folder, checkpoint)
    return missing_of_hugging_face(folder, checkpoint)


def missing_of_zip(folder: Folder, file: StoredFile) -> str | None:
    """torch.save writes a zip file, whose directory comes last."""
    end = folder.read_part(file.name, max(0, file.size - END_OF_ZIP), END_OF_ZIP)
    if zipfile.is_zipfile(io.BytesIO(end)):
        return None
    return f'its {file.size} bytes do not end in the directory of a zip file, as those of torch.save do'


def missing_shards(folder: Folder, checkpoint: Checkpoint) -> str | None:
    """`.metadata` comes last and says which file holds what."""
    sizes = checkpoint.sizes
    if METADATA not in sizes:
        return f'there is no {METADATA} beside its {len(sizes)} shards'
    try:
        stored = pickle.loads(folder.read(f'{checkpoint.name}/{METADATA}')).storage_data
        wanted: dict[str, int] = {}
        for place in stored.values():
            wanted[place.relative_path] = max(wanted.get(place.relative_path, 0), place.offset + place.length)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError, TypeError) as error:
        return f'its {METADATA} cannot be read ({type(error).__name__})'
    return first_missing(wanted, sizes)


def first_missing(wanted: dict[str, int], sizes: dict[str, int]) -> str | None:
    """The files that are absent or too short; `wanted` are the bytes that each has at least."""
    absent = sorted(set(wanted) - set(sizes))
    if absent:
        return f'{len(absent)} of {len(wanted)} files are absent: {", ".join(absent[:3])}'
    short = sorted(name for name, size in wanted.items() if sizes[name] < size)
    return f'{short[0]} has {sizes[short[0]]} of {wanted[short[0]]} bytes' if short else None


def missing_of_hugging_face(folder: Folder, checkpoint: Checkpoint) -> str | None:
    """A configuration, a tokenizer, and all weights that an index names, whole."""
    sizes = checkpoint.sizes
    if CONFIG not in sizes:
        return f'there is no {CONFIG}'
    if not any('token' in name or name.startswith('vocab') for name in sizes):
        return 'there are no files of a tokenizer'
    index = next((name for name in INDEXES if name in sizes), None)
    if index is None:
        weights = [name for name in WEIGHTS if name in sizes]
        if not weights:
            return f'there are no weights; allowed: {", ".join((*WEIGHTS, *INDEXES))}'
    else:
        try:
            weights = sorted(set(json.loads(folder.read(f'{checkpoint.name}/{index}'))['weight_map'].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f'its {index} cannot be read ({type(error).__name__})'
    try:
        wanted = {name: size_of_weights(folder, checkpoint, name) for name in weights if name in sizes}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f'the beginning of its weights cannot be read ({type(error).__name__})'
    return first_missing({**dict.fromkeys(weights, 0), **wanted}, sizes)


def size_of_weights(folder: Folder, checkpoint: Checkpoint, name: str) -> int:
    """The bytes that a safetensors file has by its own head, 0 for other files."""
    if not name.endswith('.safetensors'):
        return 0
    path = f'{checkpoint.name}/{name}'
    length = int.from_bytes(folder.read_part(path, 0, 8), 'little')
    if not 0 < length < checkpoint.sizes[name]:
        return length + 8
    head = json.loads(folder.read_part(path, 8, length))
    ends = [entry['data_offsets'][1] for key, entry in head.items() if key != '__metadata__']
    return 8 + length + max(ends, default=0)
