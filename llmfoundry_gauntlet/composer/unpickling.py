"""Read the pickles in checkpoints without running code.

torch.save and torch's sharded checkpoints write pickles, and an ordinary unpickler calls whatever a pickle names.
"""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from composer.core import Time, Timestamp, TimeUnit
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from llmfoundry_gauntlet.errors import FOREIGN_ERRORS

UNPICKLING_ERRORS = (*FOREIGN_ERRORS, pickle.UnpicklingError, EOFError)  # of a damaged pickle, or something else
VALUES = tuple((value, f'{value.__module__}.{value.__qualname__}') for value in (Time, Timestamp, TimeUnit, timedelta))
OF_TORCH = 'WeightsUnpickler error: '
OF_METADATA = {
    'collections': ('OrderedDict',),
    'pathlib': ('PosixPath', 'WindowsPath', 'PurePosixPath', 'PureWindowsPath'),
    'torch': ('Size', *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    'torch.serialization': ('_get_layout',),
    'torch.distributed.checkpoint.filesystem': ('_StorageInfo', '_StoragePrefix'),
    'torch.distributed.checkpoint.metadata': (
        *('Metadata', 'MetadataIndex', 'StorageMeta', 'TensorProperties', '_MEM_FORMAT_ENCODING'),
        *('TensorStorageMetadata', 'BytesStorageMetadata', 'ChunkStorageMetadata'),
    ),
    'torch.distributed._shard.sharded_tensor.metadata': ('TensorProperties', 'MEM_FORMAT_ENCODING'),  # torch 2.2
}


class Inert:
    """Placeholder for an object of a class that is not loaded, such as a callback's; accepts and ignores any state."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass


def load_inert(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """Load what torch.save has written: tensors, plain Python values, and Composer's times.

    Objects of all other classes become `Inert`. Raise UNPICKLING_ERRORS; UnpicklingError says why something cannot be
    read without running code.
    """
    with torch.serialization.safe_globals([*VALUES]):
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with torch.serialization.safe_globals([(Inert, name) for name in foreign]):
            try:
                return torch.load(source, map_location='cpu', weights_only=True, mmap=mmap)
            except pickle.UnpicklingError as error:  # its long message recommends weights_only=False
                raise pickle.UnpicklingError(str(error).rpartition(OF_TORCH)[2].partition('\n')[0]) from error


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles the `.metadata` of a sharded checkpoint and refuses all classes but those of torch's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of torch's metadata. Raise UnpicklingError for any other."""
        if name not in OF_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f'names {module}.{name}, which is not part of the metadata of a checkpoint')
        return super().find_class(module, name)


def load_metadata(content: bytes) -> Metadata:
    """Load the metadata of a sharded checkpoint. Raise UNPICKLING_ERRORS."""
    metadata = MetadataUnpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f'holds {type(metadata).__name__}; allowed: the metadata of a checkpoint')
    return metadata


class InertReader(FileSystemReader):
    """Reads shards, with metadata that run no code."""

    def read_metadata(self) -> Metadata:
        """Return the metadata. Raise UNPICKLING_ERRORS."""
        metadata = load_metadata((Path(self.path) / '.metadata').read_bytes())
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class InertPlanner(DefaultLoadPlanner):
    """Reads values other than tensors without running code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value into the state dict."""
        self.state_dict[read_item.dest_index.fqn] = load_inert(value)
