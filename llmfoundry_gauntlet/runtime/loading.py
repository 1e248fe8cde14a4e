"""Load the weights of a causal language model with transformers, and check that every one of them was stored.

transformers renames stored weights, joins those of experts, ties and casts them, in each of its versions. A weight that
is missing, unknown or of another shape is an error here, where transformers draws a random one or ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from llmfoundry_gauntlet.errors import ModelError, listed
from llmfoundry_gauntlet.runtime.checkpoints import StoredWeights, model_errors, place_of_config
from llmfoundry_gauntlet.runtime.weight_names import huggingface_weights

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# `dtype` was named `torch_dtype` before transformers 4.56 (docs/compatibility.md).
DTYPE = 'dtype' if Version(transformers.__version__) >= Version('4.56') else 'torch_dtype'
MAY_BE_MISSING = '_keys_to_ignore_on_load_missing'  # of the classes of models

WeightSource = Callable[[], StoredWeights] | Path  # a function that reads the weights, or a GGUF file
CORRUPTED = 'state dictionary of the model you are trying to load is corrupted'  # of transformers below 5


def load_network(
    name: str,
    config: PretrainedConfig,
    source: WeightSource,
    device: torch.device,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool,
    device_map: Any = None,
) -> Any:
    """Build the causal language model of a configuration and load its weights on a device; none requires grad.

    Every weight must be stored with the right shape, or be tied to one that is. On the meta device, which has shapes
    alone, nothing is loaded. With `device_map` the layers are placed as it says, on several devices, by accelerate.
    Raise ModelError.
    """
    if getattr(config, 'quantization_config', None) is not None:
        raise ModelError(f'{name}: has quantised weights; allowed: float32, bfloat16, float16, float64')
    empty = empty_network(name, config, dtype=dtype, trust_remote_code=trust_remote_code)
    if device.type == 'meta':
        return empty
    place: Path | None
    found: dict[str, Any]
    if isinstance(source, Path):
        weights, is_mapped = {}, False
        place, found = source.parent, {'gguf_file': source.name}
    else:
        stored = source()
        weights = huggingface_weights(name, config, empty.state_dict(), stored.tensors)
        is_mapped = stored.is_mapped
        check_types(name, empty, weights)
        place, found = None, {'state_dict': dict(weights)}
    with model_errors(f'{name}: the weights cannot be loaded'), quiet(), all_reported(empty):
        try:
            network, report = type(empty).from_pretrained(
                place,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
                device_map=device_map,
                **{DTYPE: dtype},
                **found,
            )
        except ValueError as error:
            if CORRUPTED not in str(error):
                raise
            # So it says when names of another architecture have this one's prefix.
            own = dict(empty.named_parameters())
            raise mismatch(name, config, sorted(own.keys() - weights), sorted(weights.keys() - own)) from error
    check_report(name, network, report, weights)
    if is_mapped:
        copy_shared(network, weights.values())
    if device_map is None:
        network.to(device)
    return network.eval().requires_grad_(False)


def empty_network(name: str, config: PretrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Return the model of a configuration on the meta device: shapes without weights. Raise ModelError."""
    source = place_of_config(config) or name
    with (
        model_errors(f'{source}: no model can be built from the configuration ({config.model_type})'),
        torch.device('meta'),
    ):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **{DTYPE: dtype})
        network.tie_weights()
    return network.eval().requires_grad_(False)


def check_types(name: str, empty: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError if stored weights are integers: quantised ones would be cast, and be other numbers."""
    floating = {own for own, tensor in empty.state_dict().items() if tensor.is_floating_point()}
    integers = {
        stored: tensor.dtype
        for stored, tensor in weights.items()
        if tensor.dtype not in FLOATS and (stored in floating or stored.endswith('.weight'))
    }
    if integers:
        found = listed([f'{stored} is {str(dtype).removeprefix("torch.")}' for stored, dtype in integers.items()])
        allowed = 'float32, bfloat16, float16, float64'
        raise ModelError(f'{name}: the weights cannot be read: {found}; allowed: {allowed}')


def check_report(name: str, network: Any, report: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError if transformers' report on loading has anything but weights that it found and used."""
    missing, unknown = report['missing_keys'], report['unexpected_keys']
    if missing or unknown:
        raise mismatch(name, network.config, missing, unknown)
    # Names, or since transformers 5 tuples of a name and both shapes.
    mismatched = [entry if isinstance(entry, str) else entry[0] for entry in report['mismatched_keys']]
    if mismatched:
        own = network.state_dict()
        shapes = [
            f'{weight} is {list(weights[weight].shape)} in the file and {list(own[weight].shape)} in the model'
            if weight in weights
            else f'{weight} is {list(own[weight].shape)} in the model'
            for weight in own
            if weight in mismatched
        ]
        raise ModelError(
            f'{name}: the weights do not match the configuration: {listed(shapes)}; give the configuration that they '
            'were trained with (--model-config)'
        )
    problems = [*report['error_msgs'], *report.get('conversion_errors', ())]
    if problems:
        raise ModelError(f'{name}: the weights cannot be loaded: {listed([str(problem) for problem in problems])}')


def mismatch(name: str, config: PretrainedConfig, missing: Collection[str], unknown: Collection[str]) -> ModelError:
    """Return the error of weights that are not those of a configuration."""
    return ModelError(
        f'{name}: the weights do not match the configuration, which is of {config.model_type}: {counted(missing)} '
        f'missing, {counted(unknown)} unknown; give the configuration that they were trained with (--model-config)'
    )


def counted(names: Collection[str]) -> str:
    """Return the number of names and the first five."""
    return f'{len(names)} ({listed(sorted(names))})' if names else 'none'


def copy_shared(network: Any, stored: Iterable[torch.Tensor]) -> None:
    """Copy the weights that share memory with stored ones: pages of a file that may change during an evaluation."""
    of_file = {tensor.untyped_storage().data_ptr() for tensor in stored}
    for tensor in (*network.parameters(), *network.buffers()):
        if not tensor.is_meta and tensor.untyped_storage().data_ptr() in of_file:
            tensor.data = tensor.data.clone()


@contextmanager
def all_reported(empty: Any) -> Iterator[None]:
    """Let transformers report every missing weight until the context ends.

    Some models list weights that it leaves out of its report: MPT of transformers 4.53 its output embedding, which is
    not tied in each configuration.
    """
    models = [type(module) for module in empty.modules() if isinstance(module, PreTrainedModel)]
    kinds = {kind for model in models for kind in model.__mro__}
    listed_by = {kind: vars(kind)[MAY_BE_MISSING] for kind in kinds if MAY_BE_MISSING in vars(kind)}
    for kind in listed_by:
        setattr(kind, MAY_BE_MISSING, None)
    try:
        yield
    finally:
        for kind, names in listed_by.items():
            setattr(kind, MAY_BE_MISSING, names)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing its report and a progress bar until the context ends."""
    verbosity = transformers_logging.get_verbosity()
    has_progress_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_progress_bar:
            transformers_logging.enable_progress_bar()
