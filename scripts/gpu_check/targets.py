"""Targets for speed, which hold for a full run on one kind of card; elsewhere they are written beside the figures."""

from __future__ import annotations

import torch

from gpu_check.options import Options
from gpu_check.results import Row

CARDS = ('H100', 'H200')  # the same processor; parts of the names that torch gives them


def aim(
    row: Row, name: str, figure: float, options: Options, *, at_most: float | None = None, at_least: float | None = None
) -> None:
    """Record a figure with its target, which it can only miss where the target holds."""
    if is_judged(options):
        row.check(name, figure, at_most=at_most, at_least=at_least)
        return
    row.note(**{name: figure})
    target = f'at most {at_most:.3g}' if at_most is not None else f'at least {at_least:.3g}'
    row.limits[name] = f'{target} in a full run on an {CARDS[0]}'


def is_judged(options: Options) -> bool:
    """Return whether targets for speed hold here."""
    if options.is_cpu or options.quick:
        return False
    return any(card in torch.cuda.get_device_name() for card in CARDS)
