"""Tables of the scaling benchmark, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaling_model import Device, Shape, break_even_tokens, free_bytes, gather_seconds
from scaling_work import Shared, TaskWork

from llmfoundry_gauntlet.engine.logits import CHUNK, CHUNK_ELEMENTS
from llmfoundry_gauntlet.engine.pools import Pool

GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """How a model is evaluated: ranks, how many of them share its weights, and the tokens of a batch."""

    shape: Shape
    num_ranks: int
    num_sharing: int
    tokens_per_batch: int

    @property
    def sharing(self) -> str:
        """In words."""
        if self.num_sharing == 1:
            return 'whole'
        return f'{"all" if self.num_sharing == self.num_ranks else "a node"} ({self.num_sharing})'


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Seconds of an evaluation, and the shares of them that are waiting for other ranks."""

    fitted: Fitted
    num_forwards: int
    scoring_seconds: float
    scoring_waiting: float
    replies_seconds: float
    replies_waiting: float

    @property
    def seconds(self) -> float:
        """Of scoring and replies."""
        return self.scoring_seconds + self.replies_seconds

    def record(self) -> dict[str, Any]:
        """In numbers."""
        fitted = self.fitted
        return {
            'size': fitted.shape.name,
            'ranks': fitted.num_ranks,
            'sharing': fitted.num_sharing,
            'tokens_per_batch': fitted.tokens_per_batch,
            'scoring_seconds': self.scoring_seconds,
            'scoring_waiting': self.scoring_waiting,
            'replies_seconds': self.replies_seconds,
            'replies_waiting': self.replies_waiting,
        }


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return [f'| {" | ".join(heads)} |', '|' + '---|' * len(heads), *(f'| {" | ".join(row)} |' for row in rows)]


def work_table(works: Sequence[TaskWork]) -> list[str]:
    """A row for each task, the most tokens first, and their sum."""
    names = ('items', 'rows', 'prompt_tokens', 'padded_tokens', 'run_tokens', 'reply_tokens')
    rows = [(work.key, [getattr(work, name) for name in names]) for work in works]
    rows.sort(key=lambda row: -row[1][4])
    rows.append(('all', [sum(numbers) for numbers in zip(*(row[1] for row in rows), strict=True)]))
    heads = ('task', 'items', 'requests', 'prompt tokens', 'padded to 2,048', 'ours', 'padded / ours', 'replies')
    return table(
        heads,
        (
            (name, *(f'{number:,}' for number in numbers[:5]), f'{numbers[3] / numbers[4]:.1f}', f'{numbers[5]:,}')
            for name, numbers in rows
        ),
    )


def shared_table(shared: Sequence[Shared]) -> list[str]:
    """A row for each plan and number of ranks."""
    heads = ('tokens per batch', 'ranks', 'forwards of each', 'tokens above the mean', 'waiting', 'seconds to assign')
    return table(
        heads,
        (
            (
                f'{one.tokens_per_batch:,}',
                f'{one.num_ranks}',
                f'{one.forwards.tokens.shape[1]:,}',
                f'{one.above_mean:.2%}',
                f'{one.waiting:.1%}',
                f'{one.assign_seconds:.2f}',
            )
            for one in shared
        ),
    )


def evaluated_table(evaluated: Sequence[Evaluated]) -> list[str]:
    """A row for each model, number of ranks and way of sharing weights."""
    heads = ('model', 'GPUs', 'weights', 'tokens per batch', 'forwards', 'scoring', 'waiting', 'replies', 'waiting')
    return table(
        heads,
        (
            (
                one.fitted.shape.name,
                f'{one.fitted.num_ranks}',
                one.fitted.sharing,
                f'{one.fitted.tokens_per_batch:,}',
                f'{one.num_forwards:,}',
                f'{one.scoring_seconds:,.1f} s',
                f'{one.scoring_waiting:.0%}',
                f'{one.replies_seconds:,.1f} s',
                f'{one.replies_waiting:.0%}',
            )
            for one in evaluated
        ),
    )


def link_table(shapes: Sequence[Shape], device: Device) -> list[str]:
    """What a forward gets over the links, and from how many tokens on it takes longer itself."""
    heads = ('model', 'weights', 'in a node', 'tokens that take as long', 'on 64 GPUs', 'tokens that take as long')
    return table(
        heads,
        (
            (
                shape.name,
                f'{shape.parameters * device.number_bytes / GIGA:.1f} GB',
                *(
                    cell
                    for sharing in (device.near_ranks, 64)
                    for cell in (
                        f'{gather_seconds(shape, device, sharing) * 1e3:.1f} ms',
                        f'{break_even_tokens(shape, device, sharing):,.0f}',
                    )
                ),
            )
            for shape in shapes
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """Replies in so many pools: for some numbers of ranks the busiest one's share above the mean, and seconds."""

    num_pools: int
    above_mean: tuple[float, ...]
    seconds: tuple[float, ...]


def pool_table(rows: Sequence[PoolRow], shape: Shape, ranks: Sequence[int]) -> list[str]:
    """A row for each number of pools."""
    heads = [f'{shape.name}, pools', *(name for one in ranks for name in (f'{one} GPUs, above the mean', 'replies'))]
    return table(
        heads,
        (
            (
                f'{row.num_pools}',
                *(
                    cell
                    for above, seconds in zip(row.above_mean, row.seconds, strict=True)
                    for cell in (f'{above:.1%}', f'{seconds:,.1f} s')
                ),
            )
            for row in rows
        ),
    )


def memory_table(fitted: Sequence[tuple[Fitted, Sequence[Pool]]], device: Device) -> list[str]:
    """Gigabytes of a GPU by what they hold."""
    heads = ('model', 'weights by', 'tokens per batch', 'free', 'activations', 'logits', 'cache of a pool')
    return table(heads, (memory_row(one, pools, device) for one, pools in fitted))


def memory_row(fitted: Fitted, pools: Sequence[Pool], device: Device) -> tuple[str, ...]:
    """Gigabytes of one model. Activations as `budget.py` counts them, at their widest in a layer and in fp32."""
    shape = fitted.shape
    logits = 2 * 4 * min(CHUNK * shape.vocabulary, CHUNK_ELEMENTS)
    cached = max((pool.num_rows * pool.longest for pool in pools), default=0)
    amounts = (
        free_bytes(shape, device, fitted.num_sharing),
        4 * (6 * shape.width + 3 * shape.inner) * fitted.tokens_per_batch,
        logits,
        cached * shape.cached_per_token * device.number_bytes,
    )
    cells = (f'{amount / GIGA:.1f} GB' for amount in amounts)
    return (shape.name, fitted.sharing, f'{fitted.tokens_per_batch:,}', *cells)


def precision_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each size and time; where two items of each task take longer, that is said."""
    heads = ('model', 'GPUs', 'time', 'seconds', 'items', 'standard error of the average')
    return table(heads, map(precision_row, rows))


def precision_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One size and time."""
    fits = row['seconds'] <= row['budget']
    seconds = f'{row["seconds"]:,.1f}'
    found = (f'{row["items"]:,}', f'{row["standard_error"]:.4f}') if fits else ('too few seconds', '')
    return (row['size'], f'{row["ranks"]}', row['time'], seconds if fits else f'{seconds} at least', *found)
