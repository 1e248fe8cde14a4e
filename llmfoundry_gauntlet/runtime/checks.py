"""Checks before an evaluation: ranks that agree, a folder of records of its own, and steps that go up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from weakref import ref

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation
from llmfoundry_gauntlet.runtime.distributed import gather

OF_NODE = ('save_folder', 'data_root')  # settings that may differ between nodes: the data themselves are compared
SHOWN_CHARACTERS = 100  # of a value in a message


def check_step(step: int, latest: int | None) -> None:
    """Raise ValueError unless a step of training is a number and not before the latest one that was evaluated."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f'step: is {step!r}; allowed: the number of training steps so far, 0 or more')
    if latest is not None and step < latest:
        raise ValueError(
            f'step: is {step}, but step {latest} has been evaluated; steps go up, as records and alerts are those of '
            'one training: make another Gauntlet for another training'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The user of a folder of records, and what it evaluates."""

    user: ref[Any]
    evaluated: Mapping[str, str]


CLAIMS: dict[Path, Claim] = {}  # of this process


def claim_folder(folder: Path, user: Any, evaluated: Mapping[str, str]) -> None:
    """Note who writes records to a folder. Raise ConfigError if another one that still exists writes others there."""
    claim = CLAIMS.get(folder.resolve())
    if claim is not None and claim.user() not in (None, user):
        for name, value in evaluated.items():
            if value != claim.evaluated[name]:
                raise ConfigError(
                    f'save_folder: another Gauntlet writes its records to {folder}, whose {name}: '
                    f"{shortened(claim.evaluated[name])}, here {shortened(value)}; they would overwrite each other's: "
                    'give each a folder of its own, or null for no records'
                )
    CLAIMS[folder.resolve()] = Claim(user=ref(user), evaluated=evaluated)


def what_is_evaluated(data: EvaluationData) -> dict[str, str]:
    """Return all that determines the items of an evaluation and how they are run, as text by name."""
    settings = data.settings
    names = [setting.name for setting in fields(settings) if setting.name not in OF_NODE]
    compared = {name: repr(getattr(settings, name)) for name in names}
    compared['rows of the data files'] = repr(sorted(data.digests.items()))
    return compared


def check_same_on_all_ranks(prepared: PreparedEvaluation) -> None:
    """Raise ConfigError on all ranks if they would not evaluate the same items in the same way."""
    compared = what_is_evaluated(prepared.data)
    # A node without a compiler or sandbox leaves out tasks; the others would wait for its items for ever.
    compared['tasks that can run'] = ', '.join(prepared.tasks)
    compared['max_seq_len of the model'] = repr(prepared.max_seq_len)
    compared['number of items'] = repr(len(prepared.items))

    first, *others = gather(compared)
    problems = []
    for rank, values in enumerate(others, 1):
        for name, value in values.items():
            if value != first[name]:
                problems.append(
                    f'ranks 0 and {rank} differ in {name}: {shortened(first[name])} and {shortened(value)}; all ranks '
                    'need the same settings, data and programs'
                )
    if problems:
        raise ConfigError(problems)


def shortened(text: str) -> str:
    """Return the beginning of a long text."""
    return text if len(text) <= SHOWN_CHARACTERS else f'{text[:SHOWN_CHARACTERS]}...'
