"""Load weights from files into a network piece by piece, so that no second copy of a model is in memory."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import no_init_weights

from llmfoundry_gauntlet.errors import FOREIGN_ERRORS, ModelError

PIECE_BYTES = 1 << 24
MAX_NAMES = 5
MAX_MESSAGE = 300
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The stored tensors of a model by name: shapes and types, not necessarily data.

    `copy_into` reads the named ones into tensors of the same shapes, cast to their type, on their device.
    """

    tensors: Mapping[str, torch.Tensor]
    copy_into: Callable[[Mapping[str, torch.Tensor]], None]
    model_type: str | None = None  # that they were trained as, if known


def load_network(name: str, config: PretrainedConfig, weights: Weights, device: torch.device) -> Any:
    """Return the causal language model of a configuration with stored weights in float32 on a device, without grads.

    Every weight must be stored in the right shape, or be tied to one that is. Raise ModelError.
    """
    if getattr(config, 'quantization_config', None) is not None:
        raise ModelError(f'{name}: has quantised weights; allowed: float32, bfloat16, float16, float64')
    try:
        with no_init_weights():  # memory that is not written to is not allocated yet
            network = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    except FOREIGN_ERRORS as error:
        place = place_of_config(config) or name
        raise ModelError(
            f'{place}: no model can be built from the configuration ({config.model_type}): {reason_of(error)}'
        ) from error
    network.tie_weights()
    network.to(device).eval().requires_grad_(False)
    targets = network.state_dict()
    places = places_of(network, weights.tensors)
    check_names(name, network, places, weights.model_type)
    found = {places[own]: target for own, target in targets.items() if own in places}
    check_tensors(name, {stored: (weights.tensors[stored], target) for stored, target in found.items()})
    weights.copy_into({stored: found[stored] for stored in first_of_tied(found)})
    return network


def identity(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    """Return what tied weights share: address and shape."""
    return tensor.data_ptr(), tensor.shape


def first_of_tied(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors, for tied ones only the first."""
    firsts: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in tensors.items():
        firsts.setdefault(identity(tensor), name)
    return list(firsts.values())


def places_of(network: Any, stored: Collection[str]) -> dict[str, str]:
    """Return the stored name of each weight by the network's name; old and bare names as in transformers."""
    prefix = network.base_model_prefix
    is_bare = hasattr(network, prefix) and not any(name.startswith(prefix) for name in stored)
    renamed = network._get_key_renaming_mapping(list(stored), None, False, is_bare)
    return {own: name for name, own in renamed.items()}


def check_names(name: str, network: Any, places: Mapping[str, str], model_type: str | None) -> None:
    """Raise ModelError unless all weights are stored and nothing else is, given `places_of` them."""
    targets = network.state_dict()
    buffers = dict(network.named_buffers())
    found = {identity(targets[own]) for own in places if own in targets}
    lacking = {own: target for own, target in targets.items() if identity(target) not in found}
    optional = '|'.join(network._keys_to_ignore_on_load_missing or ()) or '$^'  # buffers are not stored
    missing = [own for own in first_of_tied(lacking) if own not in buffers or not re.search(optional, own)]
    ignored = '|'.join([*(network._keys_to_ignore_on_load_unexpected or ()), r'rotary_emb\.inv_freq'])
    unknown = [
        stored
        for own, stored in places.items()
        if own not in targets and own not in buffers and not re.search(ignored, own)
    ]
    if not missing and not unknown:
        return
    own_type = network.config.model_type
    types = f'is of {own_type}' if model_type in (None, own_type) else f'is of {own_type}, they are of {model_type}'
    raise ModelError(
        f'{name}: the weights do not match the configuration, which {types}: {listed(missing)} missing, '
        f'{listed(unknown)} unknown; give the configuration that they were trained with (--model-config)'
    )


def check_tensors(name: str, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise ModelError unless stored tensors, the first of each pair, have the network's shapes and are floats."""
    shapes = [
        f'{key} is {list(stored.shape)} in the file and {list(target.shape)} in the model'
        for key, (stored, target) in pairs.items()
        if stored.shape != target.shape
    ]
    types = [
        f'{key} is {str(stored.dtype).removeprefix("torch.")}'
        for key, (stored, target) in pairs.items()
        if target.is_floating_point() and stored.dtype not in FLOATS
    ]
    if shapes:
        raise ModelError(
            f'{name}: the weights do not match the configuration: {first_of(shapes, "; ")}; give the configuration '
            'that they were trained with (--model-config)'
        )
    if types:
        allowed = 'float32, bfloat16, float16, float64'
        raise ModelError(f'{name}: the weights cannot be read: {first_of(types, ", ")}; allowed: {allowed}')


def listed(names: Collection[str]) -> str:
    """Return the number of names and the first five."""
    return f'{len(names)} ({first_of(sorted(names), ", ")})' if names else 'none'


def first_of(words: Collection[str], between: str) -> str:
    """Return the first five, with dots if there are more."""
    shown = [*words][:MAX_NAMES]
    return between.join([*shown, '...'] if len(words) > MAX_NAMES else shown)


def copy_mapped(stored: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor that is mapped from a file piece by piece, releasing each piece's pages."""
    if not stored.is_contiguous():
        target.copy_(stored)
        return
    source, goal = stored.view(-1), target.view(-1)
    step = PIECE_BYTES // stored.element_size()
    for start in range(0, len(source), step):
        piece = source[start : start + step]
        goal[start : start + step].copy_(piece)
        release_pages(piece)


def release_pages(piece: torch.Tensor) -> None:
    """Release the pages of a part of a mapped file; they are read again on use.

    Otherwise mapped pages count as the process's memory until the file is unmapped. Does nothing except on Linux.
    """
    if sys.platform != 'linux':
        return
    start = -(-piece.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (piece.data_ptr() + piece.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, truncated if very long, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines[0]) <= MAX_MESSAGE else f'{lines[0][:MAX_MESSAGE]}...'


def reason_of(error: BaseException | None) -> str:
    """Return the first line of an error's message, with its type unless the message is meant for users."""
    if error is None:
        return ''
    text = first_line(error)
    is_plain = isinstance(error, (OSError, ValueError, ImportError)) or type(error) is Exception
    return text if is_plain or text == type(error).__name__ else f'{type(error).__name__}: {text}'


def place_of_config(config: PretrainedConfig) -> str:
    """Return the file that a configuration was read from, else its name on the hub, else ''."""
    path = Path(config.name_or_path, 'config.json')
    return str(path) if config.name_or_path and path.is_file() else str(config.name_or_path)
