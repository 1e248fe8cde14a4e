"""The settings of an evaluation: the keys of the `eval_gauntlet` callback block, `scripts/eval.py` and `evaluate`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.decode import Problems, decode, describe
from llmfoundry_gauntlet.config.sources import SOURCES, check_source
from llmfoundry_gauntlet.errors import ConfigError

INTERVAL_WORDS = ('first', 'checkpoint', 'last')
BUDGET = re.compile(r'(\d+(?:\.\d+)?)(s|m|h)')
SECONDS = {'s': 1, 'm': 60, 'h': 3600}
COMPOSER_TIME = re.compile(r'\d*\.?\d+(ba|ep|sp|tok|dur|iter|sec)')
INTERVALS = f'{", ".join(INTERVAL_WORDS)} and Composer times (500ba, 1ep, 0.1dur)'
AUTO = 'auto'
CHOICES = {
    'semantics': ('corrected', 'reference'),
    'truncation': ('drop_shots', 'reference'),
    'fewshot': ('reference', 'fixed'),
    'sandbox': (AUTO, 'rlimits', 'none'),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """The settings of an evaluation.

    `tasks` is a path, a list of paths or the list itself; `gauntlet` a path or the mapping itself; `score` a path or
    the list of SCORE's data sets. Either tasks or score may be left out. `interval` holds 'first', 'checkpoint', 'last'
    and Composer times such as '500ba'. `semantics: reference` restores llm-foundry's scores, faults included.
    `fewshot: fixed` shows the same shots to all items of a task, or of its category; 'reference' draws them for each
    item as llm-foundry does. `sandbox` is what confines programs: 'auto' is isolation or nothing, 'rlimits' and 'none'
    do with less. `subset_items` asks at most that many items of each task, the same at every evaluation; of SCORE, that
    many questions of each data set that does not say it itself. `time_budget`, such as '120s', '10m' or '1h', is what
    an evaluation may take: the first one finds out which items fit, and later ones run the same. After `stall_seconds`
    without progress an evaluation ends the job, with every rank's stack in the log; None waits for ever. `save_folder`
    may hold {run_name}; None keeps no records.
    """

    tasks: Any = None
    gauntlet: Any = None
    score: Any = None
    data_root: str = 'eval_data'
    interval: tuple[str, ...] = INTERVAL_WORDS
    subset_items: int | None = None  # None: all
    time_budget: str | None = None  # None: as long as it takes
    max_seq_len: int | None = None  # None: the model's
    tokens_per_batch: Any = AUTO
    semantics: str = 'corrected'
    truncation: str | None = None  # None: as semantics says
    fewshot: str = 'reference'
    sandbox: str = AUTO
    stall_seconds: float | None = 600.0
    save_folder: str | None = 'runs/{run_name}/gauntlet'

    def __post_init__(self) -> None:
        if self.tasks is None and self.score is None:
            raise ValueError('nothing to evaluate: give tasks, score or both')
        for entry in self.interval:
            if not is_interval(entry):
                raise ValueError(f'interval: is {entry!r}; allowed: {INTERVALS}')
        if not self.data_root.strip():
            raise ValueError(f"data_root: is {self.data_root!r}; allowed: a folder, such as '.'")
        if self.save_folder is not None and not self.save_folder.strip():
            raise ValueError(f'save_folder: is {self.save_folder!r}; allowed: a folder, or null for no records')
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ValueError(f'max_seq_len: is {self.max_seq_len}; allowed: 2 or more')
        if self.subset_items is not None and self.subset_items < 1:
            raise ValueError(f'subset_items: is {self.subset_items}; allowed: 1 or more')
        if self.time_budget is not None and not self.budget_seconds:
            raise ValueError(f"time_budget: is {self.time_budget!r}; allowed: a time such as '120s', '10m' or '1h'")
        tokens = self.tokens_per_batch
        if tokens != AUTO and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise ValueError(f'tokens_per_batch: is {tokens!r}; allowed: auto, or 1 or more')
        if self.stall_seconds is not None and not self.stall_seconds > 0:
            raise ValueError(f'stall_seconds: is {self.stall_seconds:g}; allowed: more than 0, or null for no limit')
        for key, allowed in CHOICES.items():
            value = getattr(self, key)
            if value not in allowed and not (key == 'truncation' and value is None):
                raise ValueError(f'{key}: is {value!r}; allowed: {", ".join(allowed)}')

    @property
    def budget_seconds(self) -> float | None:
        """The seconds that an evaluation may take, None where there is no limit or none that can be read."""
        found = BUDGET.fullmatch(self.time_budget or '')
        return float(found[1]) * SECONDS[found[2]] if found else None

    @property
    def reference(self) -> bool:
        """Return whether llm-foundry's scores are wanted, faults included."""
        return self.semantics == 'reference'

    @property
    def cut(self) -> str:
        """'drop_shots' or 'reference': what goes first from a prompt that is too long."""
        return self.truncation or ('reference' if self.reference else 'drop_shots')


def decode_settings(values: Mapping[str, Any], source: str = 'eval_gauntlet') -> EvaluationSettings:
    """Settings from plain values and paths; a single interval may stand without a list. Raises ConfigError."""
    values = {key: plain(value) for key, value in values.items()}
    problems = Problems(source)
    for key in SOURCES:
        if values.get(key) is not None:
            check_source(values[key], key, problems)
    if 'interval' in values:
        values['interval'] = intervals(values['interval'], problems)
    settings: EvaluationSettings = decode(EvaluationSettings, values, '', problems)
    if problems.found:
        raise ConfigError(problems.found)
    return settings


def intervals(value: Any, problems: Problems) -> tuple[str, ...]:
    """Return one interval or a list of them as a tuple; note those that are not text and leave them out."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        problems.add('interval', f'is {describe(value)}; allowed: {INTERVALS}, one or a list')
        return ()
    for index, entry in enumerate(value):
        if not isinstance(entry, str):
            problems.add(f'interval[{index}]', f'is {describe(entry)}; allowed: {INTERVALS}')
    return tuple(entry for entry in value if isinstance(entry, str))


def is_interval(entry: str) -> bool:
    """Return whether this is one of our words or a Composer time."""
    return entry in INTERVAL_WORDS or COMPOSER_TIME.fullmatch(entry) is not None


def plain(value: Any) -> Any:
    """A path as text, also inside a list; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
