"""Warn about data that makes scores differ from what the YAML files suggest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from llmfoundry_gauntlet.config.yaml import listed
from llmfoundry_gauntlet.data.manifest import SAMPLE, UNOFFICIAL
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.multiple_choice import MultipleChoiceTask
from llmfoundry_gauntlet.types import Example, Item

Rows = Mapping[str, Sequence[Example]]  # by task


def origin_warnings(origins: Mapping[str, str], data_root: str) -> list[str]:
    """Return at most one warning that data is not the published data; the user's own data gives none."""
    parts = []
    for origin, what, advice in (
        (SAMPLE, 'sample data, not the benchmark', 'gauntlet data fetch --to data downloads the published data'),
        (UNOFFICIAL, 'not known to be the published data', f'gauntlet data verify {data_root} compares the files'),
    ):
        tasks = [task for task, found in origins.items() if found == origin]
        if tasks:
            names = '' if len(tasks) == len(origins) else f' ({listed(tasks)})'
            parts.append(f'{what}, in {len(tasks)} of {len(origins)} tasks{names}; {advice}')
    return ['; '.join(parts)] if parts else []


def row_warnings(tasks: Sequence[Task], examples: Rows, subsets: Rows) -> list[str]:
    """Return all warnings about rows, without duplicates for files that several tasks use."""
    found: list[str] = []
    for task in tasks:
        rows = examples[task.key]
        found += few_rows(task, rows)
        if isinstance(task, MultipleChoiceTask):
            found += repeated_choices(task, rows)
        if task.key in subsets:
            found += lost_categories(task, rows, subsets[task.key])
    return list(dict.fromkeys(found))


def few_rows(task: Task, rows: Sequence[Example]) -> Iterator[str]:
    """Yield a warning if an item has fewer other rows to draw shots from, within its category, than shots."""
    (num_shots,) = task.num_fewshot
    sizes = Counter(row.category for row in rows)
    smallest, size = min(sizes.items(), key=lambda pair: pair[1])
    if size > num_shots:
        return
    of_category = ''
    if smallest is not None:
        num_small = sum(size <= num_shots for size in sizes.values())
        of_category = f' in category {smallest!r} ({num_small} of {len(sizes)} categories have too few)'
    yield f'{task.key}: prompts have {size - 1} of {num_shots} shots, as there are {size} rows{of_category}'


def repeated_choices(task: MultipleChoiceTask, rows: Sequence[Example]) -> Iterator[str]:
    """Yield a warning if rows have duplicate choices; of two equal correct ones only one counts as correct."""
    repeated = [row.content for row in rows if len(set(row.content.choices)) < len(row.content.choices)]
    if repeated:
        right = sum(row.choices.count(row.choices[row.gold]) > 1 for row in repeated)
        yield (
            f'{task.label}: {len(repeated)} of {len(rows)} rows have a choice twice, {right} of them the right one; '
            'gauntlet data check lists them'
        )


def lost_categories(task: Task, rows: Sequence[Example], asked: Sequence[Example]) -> Iterator[str]:
    """Yield a warning if a subset contains no rows of some categories."""
    categories = {row.category for row in rows}
    lost = len(categories - {row.category for row in asked})
    if lost:
        yield (
            f'{task.key}: {len(asked)} items leave out {lost} of {len(categories)} categories; its score is the mean '
            'over the others'
        )


def prompt_warnings(tasks: Mapping[str, Task], items: Mapping[str, Sequence[Item]], max_seq_len: int) -> Iterator[str]:
    """Yield warnings about generations limited to fewer tokens than their task's default, and truncated prompts."""
    short = {
        key: most
        for key, task in tasks.items()
        if task.generates
        and (most := task.default_max_new_tokens) is not None
        and most > max_seq_len // 2  # half of max_seq_len is reserved for the prompt
        and 'max_new_tokens' not in (task.generation_kwargs or {})
    }
    if short:
        names = ', '.join(f'{key} ({most})' for key, most in short.items())
        yield f'max_seq_len is {max_seq_len}, so generations get only {max_seq_len // 2} tokens: {names}'
    truncated = [key for key, found in items.items() if any(item.request.truncated for item in found)]
    if truncated:
        shots: dict[int, list[float]] = {}
        for key in truncated:
            shots.setdefault(tasks[key].num_fewshot[0], []).append(fmean(item.num_shots for item in items[key]))
        means = [f'{num_shots}-shot is {fmean(found):.1f}' for num_shots, found in sorted(shots.items()) if num_shots]
        left = f'; {", ".join(means)} on average' if means else ''
        yield f'{len(truncated)} of {len(items)} tasks: prompts shortened to fit {max_seq_len} tokens{left}'
