"""Averages of checkpoints: the mean of the weights of the last few, evaluated as a model of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

import torch

from llmfoundry_gauntlet.errors import ModelError, listed
from llmfoundry_gauntlet.runtime.checkpoint_folders import BATCH, Checkpoint
from llmfoundry_gauntlet.runtime.checkpoints import StoredWeights
from llmfoundry_gauntlet.runtime.weight_names import without_wrappers

ReadWeights = Callable[[], StoredWeights]


def average_name(num_checkpoints: int) -> str:
    """Return the name of averages of so many checkpoints: the prefix of their metrics, and the folder of records."""
    return f'average_{num_checkpoints}'


def averages_of(checkpoints: Sequence[Checkpoint], num_checkpoints: int) -> Iterator[Checkpoint]:
    """Yield the average that ends at each checkpoint with enough others of the same training before it.

    Its files are those of its members, so that it has a new version when one of them has.
    """
    for series in series_of(checkpoints):
        for end in range(num_checkpoints, len(series) + 1):
            members = tuple(reversed(series[end - num_checkpoints : end]))
            files = [file for member in members for file in member.files]
            name = f'{average_name(num_checkpoints)}/{members[0].name}'
            yield Checkpoint(name=name, files=tuple(files), members=members)


def series_of(checkpoints: Sequence[Checkpoint]) -> list[list[Checkpoint]]:
    """Return the checkpoints that differ in their training batch alone, oldest first, of each such name."""
    by_name: dict[str, dict[int, Checkpoint]] = {}
    for checkpoint in checkpoints:
        if checkpoint.batch is not None:
            # Of two with the same batch one is evaluated.
            by_name.setdefault(name_without_numbers(checkpoint.name), {})[checkpoint.batch] = checkpoint
    return [[of_batch[batch] for batch in sorted(of_batch)] for of_batch in by_name.values()]


def name_without_numbers(name: str) -> str:
    """Return the name of a checkpoint without the numbers beside its batch, which are epochs and ranks.

    Those of the folders above are kept: they tell trainings apart.
    """
    parts = list(PurePosixPath(name).parts)
    last_with_batch = max(index for index, part in enumerate(parts) if BATCH.search(part))
    parts[last_with_batch] = re.sub(r'\d+', '#', parts[last_with_batch])
    return '/'.join(parts)


def mean_of(readers: Mapping[str, ReadWeights]) -> ReadWeights:
    """Return a function that reads the mean of weights, given by the names of their checkpoints, newest first.

    It adds up in float32, or in float64 what is stored so; tensors of integers are those of the newest. Beside the sum
    it holds the weights of one checkpoint at a time, and of those that are mapped only what the system keeps. It raises
    ModelError for a checkpoint that cannot be read, or whose weights are others than the newest's.
    """

    def read() -> StoredWeights:
        (newest, read_newest), *older = readers.items()
        total = begun_with(read_newest())
        for checkpoint, read_weights in older:
            add(total, read_weights(), f'{checkpoint}: its weights are not those of {newest}')
        for tensor in total.values():
            if tensor.is_floating_point():
                tensor.div_(len(readers))
        return StoredWeights(tensors=total, is_mapped=False)

    return read


def begun_with(stored: StoredWeights) -> dict[str, torch.Tensor]:
    """Return the sum of the weights of one checkpoint; what is mapped to a file is copied."""
    return {
        name: tensor.to(type_of_sum(tensor), copy=stored.is_mapped)
        for name, tensor in without_wrappers(stored.tensors).items()
    }


def type_of_sum(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which a tensor is summed: no narrower than float32; its own if it has integers."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def add(total: Mapping[str, torch.Tensor], stored: StoredWeights, problem: str) -> None:
    """Add the weights of one more checkpoint to a sum, in place.

    Raise ModelError, which begins with `problem`, if it has others.
    """
    weights = without_wrappers(stored.tensors)
    differing = [name for name in total if name not in weights or weights[name].shape != total[name].shape]
    differing += [name for name in weights if name not in total]
    if differing:
        raise ModelError(
            f'{problem} in name and shape: {listed(differing)}; an average takes checkpoints of one training'
        )
    for name, tensor in weights.items():
        if total[name].is_floating_point():
            total[name].add_(tensor)
