"""The items with the same prompts in all runs, how many others there are, and which settings differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.evaluation.run import WITHOUT_EFFECT
from llmfoundry_gauntlet.results.runs import Run
from llmfoundry_gauntlet.tasks.score import ScoreTask
from llmfoundry_gauntlet.types import ItemKey, ItemResult

NO_COMMON_ITEM = 'no item was asked in the same words'
NOT_IN_PROMPTS = (*WITHOUT_EFFECT, 'max_seq_len', 'generation_kwargs', 'cluster_key', 'source')  # keys of a task
MAX_SHOWN = 40  # characters of a setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonItems:
    """The items of a task with the same prompt in all runs.

    `num_items` counts the items of each run, `num_shared` those that all runs have. `settings` are differing settings
    that may explain different prompts, such as 'max_seq_len 1024 / 2048'; `first_other` is the first item with
    different prompts.
    """

    keys: frozenset[ItemKey]
    num_items: tuple[int, ...]
    num_shared: int
    settings: tuple[str, ...]
    first_other: ItemKey | None

    @property
    def num_other_words(self) -> int:
        """Return the number of items that all runs have but with different prompts."""
        return self.num_shared - len(self.keys)

    @property
    def causes(self) -> str:
        """Return the settings that differ, or an example item if none does."""
        if self.settings or self.first_other is None:
            return ', '.join(self.settings)
        place = (self.first_other.file, f'row {self.first_other.row}', self.first_other.variant)
        return f'no recorded setting differs, first at {" ".join(filter(None, place))}'

    @property
    def short_reason(self) -> str | None:
        """Return why there is no such item, without the settings; None where there is one."""
        if self.keys:
            return None
        return NO_COMMON_ITEM if self.num_shared else 'the runs have no item in common'

    @property
    def reason(self) -> str | None:
        """Return the reason why the task is left out, with these settings."""
        return f'{NO_COMMON_ITEM} ({self.causes})' if self.num_shared and not self.keys else self.short_reason


def common_items(runs: Sequence[Run], task: str, *, scored: bool) -> CommonItems:
    """Return what the runs have in common of a task that all have; with `scored`, of the items scored in all."""
    parts = [
        {result.key: result for result in run.results[task] if not scored or result.score is not None} for run in runs
    ]
    is_cut_alike = not differing([length_settings(run, task) for run in runs])
    shared = [key for key in parts[0] if all(key in part for part in parts)]
    others = {}
    for key in shared:
        results = [part[key] for part in parts]
        if not asked_alike(results, is_cut_alike=is_cut_alike):
            others[key] = results
    return CommonItems(
        keys=frozenset(shared) - others.keys(),
        num_items=tuple(len(run.results[task]) for run in runs),
        num_shared=len(shared),
        settings=causes_of(runs, task, list(others.values())),
        first_other=next(iter(others), None),
    )


def asked_alike(results: Sequence[ItemResult], *, is_cut_alike: bool) -> bool:
    """Return whether an item was asked in the same words in all runs.

    The digest is of the prompt with the shots that are left, before its beginning is cut off token by token, where that
    is needed. So prompts that were truncated are known to be the same only if the settings of length are.
    """
    if len({(result.prompt_sha256, result.truncated) for result in results}) > 1:
        return False
    return is_cut_alike or not results[0].truncated


def causes_of(runs: Sequence[Run], task: str, others: Sequence[Sequence[ItemResult]]) -> tuple[str, ...]:
    """Return the settings that differ: those of length if any prompt was truncated, the others if any was not."""
    truncated = [any(result.truncated for result in results) for results in others]
    found: list[str] = []
    if any(truncated):
        found += differing(lengths := [length_settings(run, task) for run in runs])
        if not found and any(of_run['tokenizer'] is None for of_run in lengths):
            found.append('tokenizers, which not all runs have recorded')
    if not all(truncated):
        found += differing([word_settings(run, task) for run in runs])
    return tuple(dict.fromkeys(found))


def length_settings(run: Run, task: str) -> dict[str, Any]:
    """Return what decides how much of a long prompt is asked."""
    settings, spec = run.data.settings, run.tasks[task]
    limits = [limit for limit in (settings.max_seq_len, spec.max_seq_len) if limit is not None]
    return {
        'max_seq_len': min(limits, default=None),
        'tokenizer': run.record['config'].get('tokenizer'),
        'truncation': spec.truncation,
    }


def word_settings(run: Run, task: str) -> dict[str, Any]:
    """Return what decides the words of a prompt that fits."""
    spec = run.tasks[task]
    keys = spec.keys
    if isinstance(spec, ScoreTask):  # whose chat template is the tokenizer's
        keys = {**keys, 'tokenizer': run.record['config'].get('tokenizer')}
    return {
        'semantics': run.data.settings.semantics,
        'fewshot': run.data.settings.fewshot,
        'fewshot_version': run.record['config'].get('fewshot_version'),
        'data_sha256': run.data.digests.get(task, '')[:8] or None,
        **{name: value for name, value in keys.items() if name not in NOT_IN_PROMPTS},
    }


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the settings that differ among the runs, such as 'max_seq_len 1024 / 2048'.

    Digests and tokenizers that a run has not recorded differ from none.
    """
    found = []
    for name in dict.fromkeys(name for of_run in settings for name in of_run):
        values = [shown(of_run.get(name)) for of_run in settings]
        is_known = name not in ('tokenizer', 'data_sha256') or shown(None) not in values
        if is_known and len(set(values)) > 1:
            found.append(f'{name} {" / ".join(dict.fromkeys(values))}')
    return found


def shown(value: Any) -> str:
    """Return a setting in one line; texts with white space in quotes."""
    if value is None:
        return 'none'
    text = value if isinstance(value, str) and value and value == value.strip() and value.isprintable() else repr(value)
    return text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'
