"""Read the `score` block: SCORE's datasets and their perturbations.

One entry is one dataset with all its perturbations. Defaults are those of the paper's reference (lm-eval 0.4.13,
`tasks/score`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.resources import path_problems
from llmfoundry_gauntlet.config.tasks import LABEL_PATTERN, MULTIPLE_CHOICE, TaskSpec, label_problems, task_key
from llmfoundry_gauntlet.config.yaml import YamlProblems, decode, raise_invalid_values, read_key, source_name
from llmfoundry_gauntlet.errors import Problems, describe

SCORE_KEY = 'score'
MMLU_PRO, AGIEVAL, MATH = 'mmlu_pro', 'agieval', 'math'
DATASETS = (MMLU_PRO, AGIEVAL, MATH)
OPTION_ORDER, PROMPT, NON_GREEDY = 'option_order', 'prompt', 'non_greedy'
PERTURBATIONS = (OPTION_ORDER, PROMPT, NON_GREEDY)
GENERATE, LIKELIHOOD = 'generate', 'likelihood'
TOLERANT, REFERENCE = 'tolerant', 'reference'
AUTO = 'auto'
SPEC_NAMES = {  # lm-eval's group and task names: the dataset, and the perturbation or None for all
    **{f'score_robustness_{dataset}': (dataset, None) for dataset in DATASETS},
    **{
        f'score_{perturbation}_robustness_{dataset}': (dataset, perturbation)
        for dataset in DATASETS
        for perturbation in PERTURBATIONS
        if (dataset, perturbation) != (MATH, OPTION_ORDER)
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSpec:
    """One entry of `score`.

    `dataset` is mmlu_pro, agieval, math, or a multiple_choice task's label.
    `answers: likelihood` chooses by log-probability. `chat_template` is auto (the tokenizer's, if it has one), true or
    false. `answer_extraction: reference` parses generations like the paper's reference. `subset_items` is the number of
    questions, each in all its variants; every evaluation uses the same questions.
    """

    dataset: str
    perturbations: tuple[str, ...] | None = None
    subsets: tuple[str, ...] | None = None
    answers: str = GENERATE
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    temperature: float = 0.7
    max_new_tokens: int = 1024
    prompts: str | None = None
    chat_template: Any = AUTO
    answer_extraction: str = TOLERANT
    fix_table: str | None = None
    subset_items: int | None = None

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if not LABEL_PATTERN.fullmatch(self.dataset):
            yield f'dataset: is {self.dataset!r}; allowed: {", ".join(DATASETS)}, or the label of a task'
        yield from label_problems('dataset', self.dataset, prefix='score_')
        yield from path_problems('prompts', self.prompts)
        yield from path_problems('fix_table', self.fix_table)
        words = {'answers': (GENERATE, LIKELIHOOD), 'answer_extraction': (TOLERANT, REFERENCE)}
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                yield f'{name}: is {getattr(self, name)!r}; allowed: {", ".join(allowed)}'
        if self.chat_template != AUTO and not isinstance(self.chat_template, bool):
            yield f'chat_template: is {self.chat_template!r}; allowed: auto, true, false'
        if self.is_math and self.answers == LIKELIHOOD:
            yield 'answers: likelihood needs options to choose from, and math has none; allowed: generate'
        for name in self.perturbations or ():
            if name not in PERTURBATIONS:
                yield f'perturbations: {name!r} is unknown; allowed: {", ".join(PERTURBATIONS)}'
        for name in ('perturbations', 'subsets', 'seeds'):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) < len(values)):
                yield f'{name}: is {list(values)}; allowed: at least one value, without duplicates'
        are_known = set(self.perturbations or PERTURBATIONS).issubset(PERTURBATIONS)
        if are_known and not self.applied:
            reasons = '; '.join(f'{name}: {reason}' for name, reason in self.does_not_apply.items())
            yield f'perturbations: nothing is left to run ({reasons})'
        if self.subsets is not None and self.dataset not in (AGIEVAL, MATH):
            yield f'subsets: {self.dataset} has none; allowed with {AGIEVAL} and {MATH}'
        if self.fix_table is not None and not self.is_math:
            yield f'fix_table: has no meaning in {self.dataset}; it belongs to {MATH}'
        if not 0 < self.temperature < math.inf:
            yield f'temperature: is {self.temperature:g}; allowed: a number above 0'
        if self.seeds and min(self.seeds) < 0:
            yield f'seeds: is {list(self.seeds)}; allowed: 0 or more'
        for name in ('max_new_tokens', 'subset_items'):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f'{name}: is {value}; allowed: 1 or more'

    @property
    def task_label(self) -> str | None:
        """Return the label of the multiple_choice task whose rows are asked; None for one of SCORE's own datasets."""
        return None if self.dataset in DATASETS else self.dataset

    @property
    def is_math(self) -> bool:
        """Return whether answers are expressions instead of letters."""
        return self.dataset == MATH

    @property
    def does_not_apply(self) -> dict[str, str]:
        """Return the paper's perturbations that do not apply to this dataset, with the reason."""
        if self.is_math:
            return {OPTION_ORDER: 'math has no options'}
        if self.answers == LIKELIHOOD:
            return {NON_GREEDY: 'answers: likelihood does not sample'}
        return {}

    @property
    def applied(self) -> tuple[str, ...]:
        """Return the perturbations to run, in the paper's order."""
        wanted = self.perturbations or PERTURBATIONS
        return tuple(name for name in PERTURBATIONS if name in wanted and name not in self.does_not_apply)

    @property
    def label(self) -> str:
        """Return the label of its task."""
        return f'score_{self.dataset}'


def read_score(source: Any, found: list[str]) -> dict[int, ScoreSpec]:
    """Return the entries of a path, a list or a single mapping, by index; entries of one dataset are merged.

    Problems are appended to `found`.
    """
    problems = YamlProblems(source_name(source, SCORE_KEY))
    node = read_key(Path(source), SCORE_KEY, problems) if isinstance(source, (str, Path)) else source
    if isinstance(node, Mapping):
        node = [node]
    specs: dict[int, ScoreSpec] = {}
    if isinstance(node, (list, tuple)) and node:
        decoded = {index: decode_entry(entry, index, problems) for index, entry in enumerate(node)}
        specs = {index: spec for index, spec in decoded.items() if spec is not None}
    elif not problems.messages:
        problems.add(SCORE_KEY, f'is {describe(node)}; allowed: a list with a mapping for each dataset')
    merged = merge(specs, problems)
    found.extend(problems.messages)
    return merged


def decode_entry(entry: Any, index: int, problems: Problems) -> ScoreSpec | None:
    """Return one entry; accept single values for lists, and lm-eval's group names for datasets."""
    path = f'{SCORE_KEY}[{index}]'
    if isinstance(entry, Mapping):
        entry = with_lists(entry)
        group = entry.get('dataset')
        if isinstance(group, str) and group in SPEC_NAMES:
            entry['dataset'], perturbation = SPEC_NAMES[group]
            if perturbation is not None:
                if entry.get('perturbations') not in (None, [perturbation]):
                    problems.add(path, f'perturbations: {group} has only {perturbation}; leave perturbations out')
                    return None
                entry['perturbations'] = [perturbation]
    spec: ScoreSpec | None = decode(ScoreSpec, entry, path, problems)
    return spec


def with_lists(entry: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an entry with single values in lists where it may have lists."""
    listed = dict(entry)
    for name in ('perturbations', 'subsets', 'seeds'):
        value = entry.get(name)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            listed[name] = [value]
    return listed


def merge(specs: Mapping[int, ScoreSpec], problems: Problems) -> dict[int, ScoreSpec]:
    """Merge the perturbations of entries for the same dataset; other settings must agree."""
    merged: dict[int, ScoreSpec] = {}
    index_of_dataset: dict[str, int] = {}  # of its first entry
    for index, spec in specs.items():
        first_index = index_of_dataset.setdefault(spec.dataset, index)
        if first_index == index:
            merged[index] = spec
            continue
        first = merged[first_index]
        if replace(spec, perturbations=None) != replace(first, perturbations=None):
            problems.add(f'{SCORE_KEY}[{index}]', f'duplicate dataset {spec.dataset} with different settings')
        names = {*(spec.perturbations or PERTURBATIONS), *(first.perturbations or PERTURBATIONS)}
        in_order = tuple(name for name in PERTURBATIONS if name in names)
        merged[first_index] = replace(first, perturbations=in_order)
    return merged


def check_labels(specs: Mapping[int, ScoreSpec], tasks: Sequence[TaskSpec], source: Any) -> list[str]:
    """Return a problem for each dataset that is neither SCORE's nor a multiple_choice task, or has a task's name."""
    kinds: dict[str, str] = {task.label: task.icl_task_type for task in tasks}
    names = {task_key(task.label, num_shots) for task in tasks for num_shots in task.num_fewshot}
    problems = YamlProblems(source_name(source, SCORE_KEY))
    for index, spec in specs.items():
        path = f'{SCORE_KEY}[{index}].dataset'
        if (name := task_key(spec.label, 0)) in names:
            problems.add(path, f'{spec.dataset} becomes the task {name}, which is also in tasks; rename the latter')
        if spec.task_label is None or kinds.get(spec.task_label) == MULTIPLE_CHOICE:
            continue
        if spec.dataset in kinds:
            why = f'{spec.dataset} is a {kinds[spec.dataset]} task; only {MULTIPLE_CHOICE} has options to perturb'
        else:
            known = ', '.join((*DATASETS, *SPEC_NAMES))
            why = f'is {spec.dataset!r}; allowed: {known}, or the label of a {MULTIPLE_CHOICE} task among the tasks'
        problems.add(path, why)
    return problems.messages
