"""Read checkpoints without executing code from them.

Formats: files that torch.save wrote, folders of torch.distributed.checkpoint, and the weights in Hugging Face folders.
Those of Composer also have the configuration, the tokenizer and the time.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import IO, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict
from transformers import PretrainedConfig

from llmfoundry_gauntlet.errors import FOREIGN_ERRORS, ModelError, listed
from llmfoundry_gauntlet.runtime.weight_names import (
    EXPORT_OF_MEGATRON,
    check_no_other_model,
    names_of_entries,
    weights_in,
)
from llmfoundry_gauntlet.types import TrainingPoint

# A file that is damaged or of another kind, or a configuration that transformers 5 refuses.
READING_ERRORS = (*FOREIGN_ERRORS, UnpicklingError, EOFError, SafetensorError, StrictDataclassError)
PATHS = ('PosixPath', 'WindowsPath', 'PurePosixPath', 'PureWindowsPath')
# Classes of torch 2.7, some of them private: `_StorageInfo` in docs/compatibility.md.
OF_METADATA = {
    'collections': ('OrderedDict',),
    'pathlib': PATHS,
    'pathlib._local': PATHS,  # of Python 3.13
    'torch': ('Size', *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    'torch.serialization': ('_get_layout',),
    'torch.distributed.checkpoint.filesystem': ('_StorageInfo', '_StoragePrefix'),
    'torch.distributed.checkpoint.metadata': (
        'Metadata',
        'MetadataIndex',
        'StorageMeta',
        'TensorProperties',
        '_MEM_FORMAT_ENCODING',
        'TensorStorageMetadata',
        'BytesStorageMetadata',
        'ChunkStorageMetadata',
    ),
    'torch.distributed._shard.sharded_tensor.metadata': ('TensorProperties', 'MEM_FORMAT_ENCODING'),  # torch 2.2
}
MAX_MESSAGE = 300
SAFE_TORCH = Version('2.10')  # whose reader of pickles has no known fault
log = logging.getLogger(__name__)
METADATA = '.metadata'  # of a sharded checkpoint
SAFETENSORS = '.safetensors'
CONFIG = 'config.json'  # of a Hugging Face folder
ADAPTER_CONFIG = 'adapter_config.json'  # of the folder of a PEFT adapter
OF_ACCELERATE = 'pytorch_model_fsdp_0'  # in the folder of a checkpoint: its weights, sharded
SHARD = '.distcp'
LINK = '.symlink'  # of Composer's symlinks in object stores: text files that contain the name of the target
PACKED = ('.tar', '.gz', '.tgz', '.bz2', '.lz4', '.lzma', '.lzo', '.xz', '.zst')
WEIGHTS = ('model.safetensors', 'pytorch_model.bin')
OF_HUGGINGFACE = ('state', 'integrations', 'huggingface')
OF_TIME = ('state', 'timestamp')
OF_OPTIMIZER = 'optim'  # the beginning of a key: Composer's optimizers, torchtitan's optimizer, the tutorial's optim
COMMON = 'common.pt'  # beside the shards of Megatron
READ_AGAIN = 'copy it again, or name another checkpoint'


class Inert:
    """Placeholder for an object of a class that is not loaded, such as a callback's; accepts and ignores any state."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass


class ComposerTime:
    """Stand-in for Composer's Time and Timestamp, which keeps the attributes of the stored object in `state`."""

    state: Mapping[str, Any] = MappingProxyType({})  # of an object that was stored without any

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.state = state

    @property
    def counts(self) -> dict[str, Any]:
        """Return the counts of a Timestamp by name, such as 'batch'; its other attributes are durations."""
        return {
            name.removeprefix('_'): value.state['_value']
            for name, value in self.state.items()
            if isinstance(value, ComposerTime)
        }


# Names in the file, whether Composer is installed or not. A TimeUnit becomes `Inert`: names say which unit a count has.
COMPOSER_TIMES = (
    (ComposerTime, 'composer.core.time.Time'),
    (ComposerTime, 'composer.core.time.Timestamp'),
)


@cache
def warn_of_pickles() -> None:
    """Log once that this torch's reader of pickles, which runs no code, has a fault that corrupts memory."""
    if Version(torch.__version__) < SAFE_TORCH:
        log.warning(
            'torch %s: a file that torch.save wrote can corrupt the memory of its reader (CVE-2026-24747, mended in '
            'torch %s); read files of others with a newer torch, or as safetensors',
            torch.__version__,
            SAFE_TORCH,
        )


def load_inert(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """Load a file written by torch.save: tensors, plain Python values, and `ComposerTime`.

    Objects of all other classes become `Inert`. Raise READING_ERRORS; UnpicklingError says why something cannot be
    read without running code.
    """
    warn_of_pickles()
    with torch.serialization.safe_globals([*COMPOSER_TIMES]):
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with torch.serialization.safe_globals([(Inert, name) for name in foreign]):
            try:
                return torch.load(source, map_location='cpu', weights_only=True, mmap=mmap)
            except pickle.UnpicklingError as error:
                # torch 2.7 raises it in place of one that states the reason, and recommends weights_only=False.
                reason = error.__context__ or error
                raise pickle.UnpicklingError(str(reason).partition('\n')[0]) from error


class PropertiesOfLaterTorch(TensorProperties):
    """The properties of a stored tensor, also as a later version of torch wrote them (docs/compatibility.md)."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # torch 2.15 also writes the strides, which torch 2.7 does not read; what is loaded is contiguous.
        num_read = len(TensorProperties().__getstate__())
        super().__setstate__(state[:num_read])  # type: ignore[no-untyped-call]


class MetadataUnpickler(pickle.Unpickler):
    """Unpickle the `.metadata` of a sharded checkpoint, refusing all classes except those of torch's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of torch's metadata. Raise UnpicklingError for any other."""
        if name not in OF_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f'names {module}.{name}, which is not part of the metadata of a checkpoint')
        if (module, name) == (TensorProperties.__module__, TensorProperties.__name__):
            return PropertiesOfLaterTorch
        # A checkpoint that Python 3.13 has written is read by earlier versions too, and the reverse.
        return super().find_class('pathlib' if name in PATHS else module, name)


class InertReader(FileSystemReader):
    """Read shards; their metadata are unpickled without running code."""

    def read_metadata(self) -> Metadata:
        """Return the metadata. Raise READING_ERRORS."""
        metadata = MetadataUnpickler(io.BytesIO((Path(self.path) / METADATA).read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f'holds {type(metadata).__name__}; allowed: the metadata of a checkpoint')
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class InertPlanner(DefaultLoadPlanner):
    """Load values other than tensors without running code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value into the state dict."""
        self.state_dict[read_item.dest_index.fqn] = load_inert(value)


@contextmanager
def model_errors(message: str, advice: str = '') -> Iterator[None]:
    """Raise errors of other code as a ModelError with this message, the reason and advice."""
    try:
        yield
    except READING_ERRORS as error:
        what_to_do = f'; {advice}' if advice else ''
        raise ModelError(f'{message}: {reason_of(error)}{what_to_do}') from error


def reason_of(error: BaseException | None) -> str:
    """Return the first line of an error's message, with its type unless the message is meant for users."""
    if 'trust_remote_code=True' in str(error):
        return 'needs Python code of its own; read that code, then allow it with --trust-remote-code'
    kind = type(error).__name__
    if isinstance(error, StrictDataclassError):  # the value that is wrong stands below the name of its field
        return str(error).splitlines()[-1].strip().partition(': ')[2]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return kind
    text = lines[0] if len(lines[0]) <= MAX_MESSAGE else f'{lines[0][:MAX_MESSAGE]}...'
    is_for_users = isinstance(error, (OSError, ValueError, ImportError, UnpicklingError)) or type(error) is Exception
    return text if is_for_users or text == kind else f'{kind}: {text}'


def place_of_config(config: PretrainedConfig) -> str:
    """Return the file that a configuration was read from, else its name on the hub, else ''."""
    path = Path(config.name_or_path, 'config.json')
    return str(path) if config.name_or_path and path.is_file() else str(config.name_or_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The stored tensors of a model by name; `is_mapped` if they are pages of a file, read when they are used."""

    tensors: Mapping[str, torch.Tensor]
    is_mapped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """The model in a checkpoint; `huggingface` is the state stored by Composer's HuggingFaceModel, None without one.

    `read_weights` raises ModelError.
    """

    read_weights: Callable[[], StoredWeights]
    huggingface: Mapping[str, Any] | None
    training: TrainingPoint | None


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether a folder is a sharded checkpoint, complete or not."""
    return (path / METADATA).is_file() or any(path.glob(f'*{SHARD}'))


def read_file(path: Path) -> CheckpointContent:
    """Read a single-file checkpoint, memory-mapped. Raise ModelError."""
    if path.name.endswith(PACKED):
        raise ModelError(f'{path}: is compressed or an archive; unpack it first and give the file in it')
    content: Any = read_tensors(path) if path.suffix == SAFETENSORS else load_mapped(path, 'a checkpoint')
    tensors = weights_in(path, content)
    state = content.get('state')
    state = state if isinstance(state, Mapping) else {}  # of Composer
    return CheckpointContent(
        read_weights=lambda: StoredWeights(tensors=tensors, is_mapped=True),
        huggingface=huggingface_of(state),
        training=training_of(path, state.get('timestamp')),
    )


def load_mapped(path: Path, kind: str) -> Any:
    """Load a file written by torch.save, its tensors memory-mapped, without running code. Raise ModelError."""
    try:
        if not zipfile.is_zipfile(path):
            size = path.stat().st_size
            raise ModelError(
                f'{path}: is not {kind}: it is truncated after {size} bytes, or was not written by torch.save; '
                f'{READ_AGAIN}'
            )
        return load_inert(path, mmap=True)
    except UnpicklingError as error:
        raise ModelError(
            f'{path}: cannot be read as {kind} without running code: {reason_of(error)}; save it again with '
            "the weights alone (Composer's save_weights_only: true), or as a Hugging Face folder"
        ) from error
    except READING_ERRORS as error:
        raise ModelError(f'{path}: is not {kind}: {reason_of(error)}') from error


def huggingface_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the state stored by a HuggingFaceModel, None if the checkpoint has none."""
    integrations = state.get('integrations')
    huggingface = integrations.get('huggingface') if isinstance(integrations, Mapping) else None
    return huggingface if isinstance(huggingface, Mapping) else None


def training_of(path: Path, timestamp: Any) -> TrainingPoint | None:
    """Return the point of training at which a checkpoint was written; None if it contains only weights.

    Composer stores `{'Timestamp': {'batch': 7, ...}}`, or the Timestamp itself. Raise ModelError.
    """
    if timestamp is None:
        return None
    with model_errors(f'{path}: its timestamp cannot be read', READ_AGAIN):
        counts = timestamp.counts if isinstance(timestamp, ComposerTime) else timestamp.get('Timestamp', timestamp)
        point = TrainingPoint(
            batch=int(counts['batch']),
            epoch=int(counts['epoch']),
            token=int(counts['token']),
            checkpoint=str(path.resolve()),
        )
    return point


def read_sharded(path: Path, *, wants_tokenizer: bool) -> CheckpointContent:
    """Read a sharded checkpoint, regardless of the numbers of ranks that wrote and read it. Raise ModelError.

    The tokenizer consists of thousands of entries, one per token, and is read only if `wants_tokenizer`.
    """
    metadata = metadata_of(path)
    keys_of_entry = keys_by_entry(metadata)

    # The entries of the model's tensors.
    tensors = {
        entry: stored
        for entry, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    name_of_entry = names_of_entries({entry: keys_of_entry[entry] for entry in tensors})
    if not name_of_entry:
        raise ModelError(
            f'{path}: has no weights: its entries are {listed(metadata.state_dict_metadata)}; allowed: tensors by '
            "name, alone, in 'model', or in Composer's 'state' with a 'model'"
        )
    check_no_other_model(path, {name: tensors[entry].size for entry, name in name_of_entry.items()})
    check_shards(path, metadata)

    def read_weights() -> StoredWeights:
        weights = {
            entry: torch.empty(tensors[entry].size, dtype=tensors[entry].properties.dtype) for entry in name_of_entry
        }
        load_distributed(path, weights)
        named = {name_of_entry[entry]: weight for entry, weight in weights.items()}
        return StoredWeights(tensors=named, is_mapped=False)

    # Everything else that is read: the time, and the configuration and tokenizer.
    of_tokenizer = (*OF_HUGGINGFACE, 'tokenizer')
    values: dict[str, Any] = {}
    for entry, keys in keys_of_entry.items():
        is_of_model = keys[:3] == OF_HUGGINGFACE and (wants_tokenizer or keys[:4] != of_tokenizer)
        if keys[:2] == OF_TIME or is_of_model:
            values[entry] = None
    load_distributed(path, values)
    state: Any = unflatten_state_dict(values, keys_of_entry).get('state', {})
    return CheckpointContent(
        read_weights=read_weights,
        huggingface=huggingface_of(state),
        training=training_of(path, state.get('timestamp')),
    )


def metadata_of(path: Path) -> Metadata:
    """Return the metadata of a sharded checkpoint. Raise ModelError."""
    if (path / COMMON).is_file():
        raise ModelError(f'{path}: {EXPORT_OF_MEGATRON}')
    if not (path / METADATA).is_file():
        raise ModelError(f'{path}: has shards but no {METADATA}, which is written last; {READ_AGAIN}')
    with model_errors(f'{path / METADATA}: cannot be read', READ_AGAIN):
        metadata = InertReader(path).read_metadata()
    return metadata


def keys_by_entry(metadata: Metadata) -> dict[str, tuple[Any, ...]]:
    """Return the keys that led to each entry of a sharded checkpoint when it was saved, else its name alone."""
    planned = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return {entry: tuple(planned.get(entry, (entry,))) for entry in metadata.state_dict_metadata}


def parts_without_optimizer(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Return (start, end) in bytes of the entries in each shard, except those of optimizers. Raise ModelError."""
    metadata = metadata_of(path)
    keys_of_entry = keys_by_entry(metadata)
    parts: dict[str, list[tuple[int, int]]] = {}  # by file; a file of optimizers alone has none
    for index, stored in metadata.storage_data.items():
        parts_of_file = parts.setdefault(stored.relative_path, [])
        outer_keys = keys_of_entry.get(index.fqn, ())[:2]
        if not any(str(key).startswith(OF_OPTIMIZER) for key in outer_keys):
            parts_of_file.append((stored.offset, stored.offset + stored.length))
    return parts


def check_shards(path: Path, metadata: Metadata) -> None:
    """Raise ModelError unless all files of a sharded checkpoint exist and are not truncated."""
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    lengths: dict[str, int] = {}
    for info in metadata.storage_data.values():
        lengths[info.relative_path] = max(lengths.get(info.relative_path, 0), info.offset + info.length)
    missing = [name for name in sorted(lengths) if name not in sizes]
    if missing:
        raise ModelError(f'{path}: of {len(lengths)} files {len(missing)} are missing: {listed(missing)}')
    for name, length in lengths.items():
        if sizes[name] < length:
            raise ModelError(f'{path / name}: is truncated after {sizes[name]} of {length} bytes; {READ_AGAIN}')


def load_distributed(path: Path, values: dict[str, Any]) -> None:
    """Load entries of a sharded checkpoint by the names in `values`; tensors are filled in place, others replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is .*unavailable')  # each rank reads by itself
        warnings.filterwarnings('ignore', message='`load_state_dict` is deprecated', category=FutureWarning)
        # Before torch 2.7 only the former function lets a rank read by itself.
        read = load if 'no_dist' in inspect.signature(load).parameters else load_state_dict
        try:
            read(values, storage_reader=InertReader(path), planner=InertPlanner(), no_dist=True)
        except CheckpointException as error:
            reasons = [reason_of(reason) for reason, _ in error.failures.values()]
            raise ModelError(f'{path}: cannot be read: {listed(reasons)}; {READ_AGAIN}') from error


def has_weights(path: Path) -> bool:
    """Return whether a folder has the weights of a Hugging Face model, complete or not."""
    return any((path / name).is_file() or (path / f'{name}.index.json').is_file() for name in WEIGHTS)


def read_folder(path: Path) -> StoredWeights:
    """Read the weights of a Hugging Face folder, memory-mapped from one or several files. Raise ModelError."""
    for name in WEIGHTS:
        if (path / f'{name}.index.json').is_file():
            return StoredWeights(tensors=read_shards(path / f'{name}.index.json'), is_mapped=True)
        if (path / name).is_file():
            return StoredWeights(tensors=read_tensors(path / name), is_mapped=True)
    allowed = ', '.join(f'{name}, {name}.index.json' for name in WEIGHTS)
    raise ModelError(f'{path}: has no weights; allowed: {allowed}')


def read_shards(index: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of all files in an index. Raise ModelError."""
    with model_errors(f'{index}: cannot be read', READ_AGAIN):
        file_of_weight: dict[str, str] = json.loads(index.read_text(encoding='utf-8'))['weight_map']
    if not isinstance(file_of_weight, dict) or not all(isinstance(name, str) for name in file_of_weight.values()):
        raise ModelError(f'{index}: weight_map is not a mapping of weights to file names; {READ_AGAIN}')
    files = sorted(set(file_of_weight.values()))
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(f'{index}: of {len(files)} files {len(missing)} are missing: {listed(missing)}')
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        tensors.update(read_tensors(index.parent / name))
    return tensors


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file, memory-mapped. Raise ModelError."""
    if path.suffix != SAFETENSORS:
        content = load_mapped(path, 'a file of weights')
        if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
            raise ModelError(f'{path}: is not a file of weights: it contains something other than named tensors')
        return dict(content)
    with model_errors(f'{path}: cannot be read ({path.stat().st_size} bytes)', READ_AGAIN):
        tensors = load_file(path)
    return tensors
