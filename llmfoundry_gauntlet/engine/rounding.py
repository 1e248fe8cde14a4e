"""Tell differences by rounding from others: by what rounding alone makes, and in float64.

Deep models and large logits round more: the logits of Gemma 3 270M reach 139, and float32 alone moves them by 3e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmfoundry_gauntlet.engine.attention import to_device
from llmfoundry_gauntlet.engine.model import SHARE_OF_MEMORY, CausalLanguageModel, unused_bytes

FLOAT32_ROUNDING = 2**-23  # relative
FLOAT64_BYTES = 8
TOLERANCE = 1e-4  # in float32, of summed log-probabilities in nats and of logits
WIDEST_TOLERANCE = 30  # times that in float32, if rounding alone makes a difference
WIDEST_IN_FLOAT64 = 1000  # times that in float32: what is further off is not run in float64 either
ROUNDING_TOLERANCE = 4  # times the difference that rounding makes
CANNOT = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, AssertionError)


class Tolerance:
    """The largest difference that rounding explains: `nominal`, or in float32 more if rounding alone makes more.

    That is measured by `of_rounding`, once it decides. In half precision `nominal` is measured already.
    """

    def __init__(self, nominal: float, of_rounding: Callable[[], float]) -> None:
        self.nominal = nominal
        self.is_half = nominal > TOLERANCE
        self._of_rounding = of_rounding

    @cached_property
    def widened(self) -> float:
        """Return the tolerance by what rounding makes, at least the nominal one and at most 30 times that."""
        measured = ROUNDING_TOLERANCE * self._of_rounding()
        return float(np.clip(measured, self.nominal, WIDEST_TOLERANCE * self.nominal))

    def covers(self, difference: float) -> bool:
        """Return whether rounding explains a difference; never if it is NaN."""
        if difference <= self.nominal:
            return True
        if self.is_half or not difference <= WIDEST_TOLERANCE * self.nominal:
            return False
        return difference <= self.widened

    def is_told_by_float64(self, difference: float) -> bool:
        """Return whether a difference that is not covered is small enough to be rounding nevertheless.

        In half precision other kernels may run than in float64: what is far off there may be a fault of theirs.
        """
        widest = ROUNDING_TOLERANCE if self.is_half else WIDEST_IN_FLOAT64
        return difference <= widest * self.nominal


def difference_in_float64(language_model: CausalLanguageModel, difference: Callable[[], float]) -> float | None:
    """Return a difference of a model's numbers in float64; None if it cannot be computed."""
    if not fits_in_float64(language_model):
        return None
    try:
        with in_float64(language_model):
            return difference()
    except (torch.OutOfMemoryError, *CANNOT):
        return None


def fits_in_float64(language_model: CausalLanguageModel) -> bool:
    """Return whether this rank has all weights, and memory for a copy of them in float64."""
    if language_model.in_step:
        return False
    num_bytes = sum(FLOAT64_BYTES * tensor.numel() for tensor in floating_tensors(language_model.model))
    return num_bytes <= SHARE_OF_MEMORY * unused_bytes(language_model.device)


@contextmanager
def in_float64(language_model: CausalLanguageModel) -> Iterator[None]:
    """Run the model with its weights and buffers in float64; afterwards it has the same tensors as before."""
    tensors = floating_tensors(language_model.model)
    originals = [tensor.data for tensor in tensors]
    learned = language_model.tail, language_model.dtype
    language_model.forget()
    try:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original.double()
        with NoFloat32(), experts_one_by_one(language_model.model):  # type: ignore[no-untyped-call]
            yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original
        language_model.tail, language_model.dtype = learned
        language_model.forget()


def floating_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weights and buffers of a model that are floating-point numbers, each once."""
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]


@contextmanager
def experts_one_by_one(model: Any) -> Iterator[None]:
    """Run the experts of a mixture one by one until the context ends, as no grouped kernel of torch takes float64."""
    implementation = getattr(getattr(model, 'config', None), '_experts_implementation', None)  # of transformers 5
    if implementation is None:
        yield
        return
    model.set_experts_implementation('eager')
    try:
        yield
    finally:
        model.set_experts_implementation(implementation)


class NoFloat32(TorchDispatchMode):
    """Make tensors of float64 where a model asks for float32, as norms and softmax of transformers do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation with float64 for its `dtype` if that is float32."""
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.full.default and isinstance(args[1], float):
            kwargs.setdefault('dtype', torch.float32)  # that of a number by default, as XGLM has its masks
        if kwargs.get('dtype') == torch.float32:
            kwargs['dtype'] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def nudged_embeddings(model: Any, rounding: float) -> Iterator[None]:
    """Increase a random half of the elements of all embeddings by a rounding error, always the same."""

    def nudge(layer: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 1:  # the output layer of llm-foundry's models with tied weights
            return output
        is_nudged = np.random.default_rng(0).integers(0, 2, size=output.shape)
        nudges = to_device((is_nudged * rounding).astype(np.float32), output.device)
        return output * (1 + nudges).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()
