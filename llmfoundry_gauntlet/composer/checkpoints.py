"""Files of models: Composer checkpoints, in one file or sharded, and the weights of Hugging Face folders."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from composer.core import Timestamp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from llmfoundry_gauntlet.composer.unpickling import UNPICKLING_ERRORS, InertPlanner, InertReader, load_inert
from llmfoundry_gauntlet.composer.weights import Weights, copy_mapped, first_line, first_of, reason_of
from llmfoundry_gauntlet.errors import ModelError

METADATA = '.metadata'  # of a sharded checkpoint
CONFIG = 'config.json'  # of a Hugging Face folder
SHARD = '.distcp'
LINK = '.symlink'  # of a link in an object store: a text file with the name of its target
WHOLE = ('.pt', '.pth', '.ckpt')
PACKED = ('.tar', '.gz', '.tgz', '.bz2', '.lz4', '.lzma', '.lzo', '.xz', '.zst')
WEIGHTS = ('model.safetensors', 'pytorch_model.bin')
OF_MODEL = ('state', 'model')
OF_HUGGINGFACE = ('state', 'integrations', 'huggingface')
OF_TIME = ('state', 'timestamp')
READ_AGAIN = 'copy it again, or name another checkpoint'


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """The model in a Composer checkpoint; `huggingface` is the state stored by its HuggingFaceModel."""

    weights: Weights
    huggingface: Mapping[str, Any] | None
    timestamp: Timestamp | None


def is_sharded(path: Path) -> bool:
    """Return whether a folder is a sharded checkpoint, finished or not."""
    return (path / METADATA).is_file() or any(path.glob(f'*{SHARD}'))


def checkpoints_among(names: Sequence[str]) -> list[str]:
    """Return the files and folders among relative names below a folder that are models."""
    found = set()
    for name in names:
        folder, _, file = name.rpartition('/')
        if file in (METADATA, CONFIG) and folder:
            found.add(f'{folder}/')
        elif file.endswith((*WHOLE, LINK, *PACKED)):
            found.add(name)
    return sorted(found)


def read_file(path: Path) -> CheckpointContent:
    """Return a checkpoint in one file, mapped into memory. Raise ModelError."""
    if path.name.endswith(PACKED):
        raise ModelError(f'{path}: is compressed or an archive; unpack it first and give the file in it')
    content = load_mapped(path, 'a Composer checkpoint')
    state = content.get('state') if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not isinstance(state.get('model'), Mapping):
        raise ModelError(f"{path}: is not a Composer checkpoint: it has no 'state' with a 'model'")
    tensors = {own_name(name): value for name, value in state['model'].items() if isinstance(value, torch.Tensor)}
    huggingface = huggingface_of(state)
    return CheckpointContent(
        weights=mapped_weights(tensors, model_type_of(huggingface)),
        huggingface=huggingface,
        timestamp=timestamp_of(path, state.get('timestamp')),
    )


def load_mapped(path: Path, kind: str) -> Any:
    """Load what torch.save has written, its tensors mapped from the file, without running code. Raise ModelError."""
    try:
        if not zipfile.is_zipfile(path):
            size = path.stat().st_size
            with path.open('rb') as file:
                begins_well = file.read(4) == b'PK\x03\x04'
            if begins_well or not size:
                raise ModelError(
                    f'{path}: is truncated after {size} bytes: the directory at its end is missing; {READ_AGAIN}'
                )
            raise ModelError(f'{path}: is not {kind}: it was not written by torch.save')
        return load_inert(path, mmap=True)
    except UnpicklingError as error:
        raise ModelError(
            f'{path}: cannot be read as {kind} without running code: {first_line(error)}; save it again with '
            'save_weights_only: true, or as a Hugging Face folder'
        ) from error
    except UNPICKLING_ERRORS as error:
        raise ModelError(f'{path}: is not {kind}: {first_line(error)}') from error


def own_name(name: str) -> str:
    """Return a weight's name in the Hugging Face model, which is the attribute `model` of Composer's."""
    return name.removeprefix('model.')


def huggingface_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the state stored by a HuggingFaceModel, None if the checkpoint has none."""
    integrations = state.get('integrations')
    found = integrations.get('huggingface') if isinstance(integrations, Mapping) else None
    return found if isinstance(found, Mapping) else None


def model_type_of(huggingface: Mapping[str, Any] | None) -> str | None:
    """Return the model type stored in a checkpoint, None if unknown."""
    try:
        found = None if huggingface is None else huggingface['model']['config']['content'].get('model_type')
    except (LookupError, TypeError, AttributeError):  # an error once the configuration is loaded
        return None
    return found if isinstance(found, str) else None


def timestamp_of(path: Path, stored: Any) -> Timestamp | None:
    """Return the timestamp of a checkpoint; None for one of weights alone. Raise ModelError."""
    if stored is None or isinstance(stored, Timestamp):
        return stored
    try:
        counts = stored.get('Timestamp', stored)
        units: dict[str, Any] = {unit: int(counts[unit]) for unit in ('epoch', 'batch', 'sample', 'token')}
        return Timestamp(**units)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f'{path}: its timestamp cannot be read: {first_line(error)}; {READ_AGAIN}') from error


def read_sharded(path: Path, *, wants_tokenizer: bool) -> CheckpointContent:
    """Return a sharded checkpoint, whatever the numbers of ranks that wrote it and read it. Raise ModelError.

    The tokenizer is thousands of entries, one per token, and only read if `wants_tokenizer`.
    """
    metadata = read_metadata(path)
    paths = {name: tuple(place) for name, place in (metadata.planner_data or {}).items()}
    tensors = {
        own_name(paths[name][2]): (name, torch.empty(stored.size, dtype=stored.properties.dtype, device='meta'))
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and paths.get(name, ())[:2] == OF_MODEL
    }
    if not tensors:
        raise ModelError(f"{path}: is not a Composer checkpoint: it has no 'state' with a 'model'")
    check_shards(path, metadata, {file.name: file.stat().st_size for file in path.iterdir()})
    of_tokenizer = (*OF_HUGGINGFACE, 'tokenizer')
    wanted = [
        name
        for name, place in paths.items()
        if place[:2] == OF_TIME or (place[:3] == OF_HUGGINGFACE and (wants_tokenizer or place[:4] != of_tokenizer))
    ]
    values: dict[str, Any] = dict.fromkeys(wanted)
    load_distributed(path, values)
    state = nested({paths[name]: value for name, value in values.items()}).get('state', {})
    huggingface = huggingface_of(state)
    return CheckpointContent(
        weights=Weights(
            tensors={own: tensor for own, (_, tensor) in tensors.items()},
            copy_into=lambda targets: load_distributed(path, {tensors[own][0]: to for own, to in targets.items()}),
            model_type=model_type_of(huggingface),
        ),
        huggingface=huggingface,
        timestamp=timestamp_of(path, state.get('timestamp')),
    )


def read_metadata(path: Path) -> Metadata:
    """Return the metadata of a sharded checkpoint. Raise ModelError."""
    try:
        metadata = InertReader(path).read_metadata()
    except FileNotFoundError as error:
        raise ModelError(f'{path}: has shards but no {METADATA}, which is written last: {READ_AGAIN}') from error
    except UNPICKLING_ERRORS as error:
        raise ModelError(f'{path / METADATA}: cannot be read: {first_line(error)}; {READ_AGAIN}') from error
    return metadata


def check_shards(path: Path, metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Raise ModelError unless all files of a sharded checkpoint exist in full length, given their sizes by name."""
    lengths: dict[str, int] = {}
    for info in metadata.storage_data.values():
        lengths[info.relative_path] = max(lengths.get(info.relative_path, 0), info.offset + info.length)
    missing = [name for name in sorted(lengths) if name not in sizes]
    if missing:
        raise ModelError(f'{path}: of {len(lengths)} files {len(missing)} are missing: {first_of(missing, ", ")}')
    for name, length in lengths.items():
        if sizes[name] < length:
            raise ModelError(f'{path / name}: is truncated after {sizes[name]} of {length} bytes; {READ_AGAIN}')


def load_distributed(path: Path, values: dict[str, Any]) -> None:
    """Load the named entries of a sharded checkpoint into `values`: in place for tensors, else replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is .*unavailable')  # each rank reads by itself
        try:
            load(values, storage_reader=InertReader(path), planner=InertPlanner(), no_dist=True)
        except CheckpointException as error:
            reasons = [first_line(reason) for reason, _ in error.failures.values()]
            raise ModelError(f'{path}: cannot be read: {first_of(reasons, "; ")}; {READ_AGAIN}') from error


def nested(values: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return a tree of dicts, or of lists if the keys are numbers, from values by their paths."""
    whole: dict[Any, Any] = {}
    for path, value in values.items():
        part = whole
        for key in path[:-1]:
            part = part.setdefault(key, {})
        part[path[-1]] = value
    return {key: with_lists(value) for key, value in whole.items()}


def with_lists(part: Any) -> Any:
    """Return a tree with a list in place of each dict whose keys are all numbers."""
    if not isinstance(part, dict):
        return part
    if part and all(isinstance(key, int) for key in part):
        return [with_lists(part[key]) for key in sorted(part)]
    return {key: with_lists(value) for key, value in part.items()}


def read_folder(path: Path, model_type: str | None) -> Weights:
    """Return the weights of a Hugging Face folder, mapped from one file or several. Raise ModelError."""
    for name in WEIGHTS:
        if (path / f'{name}.index.json').is_file():
            return mapped_weights(read_shards(path / f'{name}.index.json'), model_type)
        if (path / name).is_file():
            return mapped_weights(read_tensors(path / name), model_type)
    allowed = ', '.join(f'{name}, {name}.index.json' for name in WEIGHTS)
    raise ModelError(f'{path}: has no weights; allowed: {allowed}')


def read_shards(index: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files in an index. Raise ModelError."""
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding='utf-8'))['weight_map']
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f'{index}: cannot be read: {reason_of(error)}; {READ_AGAIN}') from error
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(f'{index}: weight_map is not a mapping of weights to file names; {READ_AGAIN}')
    files = sorted(set(places.values()))
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(f'{index}: of {len(files)} files {len(missing)} are missing: {first_of(missing, ", ")}')
    tensors = {name: tensor for file in files for name, tensor in read_tensors(index.parent / file).items()}
    lost = [f'{name} in {file}' for name, file in places.items() if name not in tensors]
    if lost:
        raise ModelError(f'{index}: lists weights that do not exist: {first_of(lost, ", ")}; {READ_AGAIN}')
    return tensors


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, mapped into memory. Raise ModelError."""
    if path.suffix != '.safetensors':
        content = load_mapped(path, 'a file of weights')
        if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
            raise ModelError(f'{path}: is not a file of weights: it contains something other than named tensors')
        return dict(content)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        size = path.stat().st_size
        raise ModelError(f'{path}: cannot be read ({size} bytes): {first_line(error)}; {READ_AGAIN}') from error


def mapped_weights(tensors: Mapping[str, torch.Tensor], model_type: str | None) -> Weights:
    """Return weights whose tensors are mapped from files."""

    def copy_into(targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            copy_mapped(tensors[name], target)

    return Weights(tensors=tensors, copy_into=copy_into, model_type=model_type)
