"""Define tasks and gauntlets as frozen dataclasses.

Keys and defaults are llm-foundry 0.22's (`llmfoundry/utils/builders.py`, `callbacks/eval_gauntlet_callback.py`), so
its YAML files mean the same here. Keys specific to a task type are defined with the type, in `tasks/`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

from llmfoundry_gauntlet.config.resources import MOST_NAME_BYTES, path_problems
from llmfoundry_gauntlet.config.yaml import raise_invalid_values
from llmfoundry_gauntlet.types import ChatFormat, ReasoningMarkers

MULTIPLE_CHOICE = 'multiple_choice'  # the task type whose rows SCORE can perturb
WEIGHTINGS = ('EQUAL', 'SAMPLE_SZ', 'LOG_SAMPLE_SZ')
# Keys of generation_kwargs: the type, a check and its description.
GENERATION_KEYS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    'max_new_tokens': (int, lambda value: value >= 1, 'a whole number, 1 or more'),
    'do_sample': (bool, lambda value: True, 'true or false'),
    'temperature': ((int, float), lambda value: 0 < value < math.inf, 'a number above 0'),
    'top_p': ((int, float), lambda value: 0 < value <= 1, 'a number above 0, 1 at most'),
    'top_k': (int, lambda value: value >= 0, 'a whole number; 0: all tokens'),
    'seed': (int, lambda value: value >= 0, 'a whole number, 0 or more'),
}
# Fields of a task that are not YAML keys.
SETTINGS = ('semantics', 'truncation', 'fewshot', 'apply_chat_template', 'chat_format', 'markers')
MOST_SHOTS = 9999  # for which a label leaves room in the name of a file of samples
LABEL_PATTERN = re.compile(r'(?!\.{1,2}$)[A-Za-z0-9_.-]+')


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One entry of `icl_tasks`: the keys of all task types. Each type is a subclass in `tasks/`.

    `num_fewshot` is never empty; each number of shots is evaluated separately. `cluster_key` names the field that
    identifies a source shared by several rows, such as a passage, for clustered standard errors; by default the source
    is detected (data/examples.py). The last fields are settings of the evaluation, the same for all its tasks:

    * `semantics`: 'corrected', or 'reference' for llm-foundry's scores, including its bugs.
    * `truncation` of prompts longer than max_seq_len: 'drop_shots', or 'reference' (drop tokens from the left, for each
      choice separately, as llm-foundry does).
    * `fewshot`: 'reference' (shots drawn for each item, as llm-foundry does), or 'fixed', the same for all items.
    """

    is_in_llm_foundry: ClassVar[bool] = True  # its semantics can be reproduced
    samples_by_default: ClassVar[bool] = False  # generations are sampled without `generation_kwargs.do_sample`

    label: str
    dataset_uri: str
    icl_task_type: str
    num_fewshot: tuple[int, ...]
    metric_names: tuple[str, ...] | None = None
    prompt_string: str = ''
    example_delimiter: str = '\n'
    continuation_delimiter: str = ' '
    prelimiter: str = ''
    has_categories: bool = False
    strip_dataset: bool = True
    fewshot_random_seed: int = 1234
    max_seq_len: int | None = None
    batch_size: int | None = None  # no effect: batches are made by tokens
    pad_tok_id: int | None = None  # no effect: padding is masked
    context_key: str | None = None
    answer_key: str | None = None
    cluster_key: str | None = None
    hf_loading_vars: dict[str, Any] | None = None
    hf_parsing_map: dict[str, Any] | None = None
    generation_kwargs: dict[str, Any] | None = None
    semantics: str = 'corrected'
    truncation: str = 'drop_shots'
    fewshot: str = 'reference'
    apply_chat_template: bool = False
    chat_format: ChatFormat = ChatFormat()
    markers: tuple[ReasoningMarkers, ...] | None = None  # around reasoning; None: the known ones

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if not LABEL_PATTERN.fullmatch(self.label):
            yield f"label: {self.label!r} cannot be a file name; allowed: letters, digits and '_', '-', '.'"
        yield from label_problems('label', self.label)
        if not self.dataset_uri.strip():
            yield 'dataset_uri: is empty; give the path of a data file'
        yield from path_problems('dataset_uri', self.dataset_uri)
        if not self.num_fewshot:
            yield 'num_fewshot: is empty; give at least one number of shots'
        for shots in self.num_fewshot:
            if shots < 0:
                yield f'num_fewshot: is {shots}; allowed: 0 or more'
        if len(set(self.num_fewshot)) < len(self.num_fewshot):
            yield f'num_fewshot: {list(self.num_fewshot)} has duplicates; give each number of shots once'
        for name in ('max_seq_len', 'batch_size'):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f'{name}: is {value}; allowed: 1 or more'
        yield from generation_key_problems(self)
        if self.metric_names == ():
            yield 'metric_names: is empty; leave it out for the metric of the task type'

    @property
    def reference(self) -> bool:
        """Return whether llm-foundry's semantics apply."""
        return self.semantics == 'reference'

    @property
    def has_rows(self) -> bool:
        """Return whether the location of the rows is known."""
        return True

    @property
    def strips_rows(self) -> bool:
        """Return whether leading and trailing white space of a row's texts is stripped."""
        return self.strip_dataset

    @property
    def num_samples(self) -> int:
        """Return the number of generations per prompt."""
        return 1

    @property
    def keys(self) -> dict[str, Any]:
        """Return the values of all YAML keys, defaults included."""
        return {name: value for name, value in asdict(self).items() if name not in SETTINGS}

    @property
    def key(self) -> str:
        """Return '{label}/{n}-shot', the name of a task with one number of shots in metric keys."""
        (num_shots,) = self.num_fewshot
        return task_key(self.label, num_shots)

    def at(self, num_shots: int) -> Self:
        """Return the same task with one number of shots."""
        return replace(self, num_fewshot=(num_shots,))


def generation_key_problems(task: TaskSpec) -> Iterator[str]:
    """Yield a problem for each key or value of generation_kwargs that is not allowed."""
    given = task.generation_kwargs or {}
    for key, value in given.items():
        if key not in GENERATION_KEYS:
            yield f'generation_kwargs.{key}: is not supported; allowed: {", ".join(GENERATION_KEYS)}'
            continue
        kind, holds, allowed = GENERATION_KEYS[key]
        is_right_kind = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if not is_right_kind or not holds(value):
            yield f'generation_kwargs.{key}: is {value!r}; allowed: {allowed}'
    unused = [key for key in ('temperature', 'top_p', 'top_k', 'seed') if key in given]
    if not task.samples_by_default and not given.get('do_sample', False):
        for key in unused:
            yield f'generation_kwargs.{key}: has no effect without do_sample: true; decoding is greedy'


def label_problems(key: str, label: str, *, prefix: str = '') -> Iterator[str]:
    """Yield a problem if a label, after a prefix, is too long for the name of its file of samples."""
    most = MOST_NAME_BYTES - len(f'{prefix}_{MOST_SHOTS}-shot.jsonl')
    if len(label) > most:
        yield (
            f'{key}: has {len(label)} characters; allowed: {most}, as a file of samples has the name of its task, and '
            f'names of files have {MOST_NAME_BYTES} bytes at most'
        )


def task_key(label: str, num_shots: int) -> str:
    """Return the name of a task at one number of shots in metric keys."""
    return f'{label}/{num_shots}-shot'


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSpec:
    """A task's place in a category. `random_baseline` is the accuracy of guessing."""

    name: str
    num_fewshot: int
    random_baseline: float = 0.0

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if not 0 <= self.random_baseline < 1:
            yield f'random_baseline: is {self.random_baseline:g}; allowed: at least 0, and less than 1'
        if self.num_fewshot < 0:
            yield f'num_fewshot: is {self.num_fewshot}; allowed: 0 or more'

    @property
    def key(self) -> str:
        """Return '{label}/{n}-shot', the same as TaskSpec.key."""
        return task_key(self.name, self.num_fewshot)


@dataclass(frozen=True, slots=True, kw_only=True)
class CategorySpec:
    """A category and its benchmarks, at least one."""

    name: str
    benchmarks: tuple[BenchmarkSpec, ...]

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if not self.benchmarks:
            yield 'benchmarks: is empty; a category needs at least one benchmark'
        keys = [benchmark.key for benchmark in self.benchmarks]
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            yield f'benchmarks: duplicate {key}'


@dataclass(frozen=True, slots=True, kw_only=True)
class GauntletSpec:
    """The `eval_gauntlet` block: categories, their weighting, and named averages over categories."""

    categories: tuple[CategorySpec, ...]
    weighting: str = 'EQUAL'
    subtract_random_baseline: bool = True
    rescale_accuracy: bool = True
    averages: dict[str, tuple[str, ...]] | None = None

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if not self.categories:
            yield 'categories: is empty; a gauntlet needs at least one category'
        if self.weighting not in WEIGHTINGS:
            yield f'weighting: unknown weighting {self.weighting!r}; allowed: {", ".join(WEIGHTINGS)}'
        if self.rescale_accuracy and not self.subtract_random_baseline:
            yield 'rescale_accuracy: needs subtract_random_baseline: true'
        names = [category.name for category in self.categories]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f'categories: duplicate category {name!r}'
        for name, members in (self.averages or {}).items():
            if name in names:
                yield f'averages.{name}: is also the name of a category; names must differ'
            if not members:
                yield f'averages.{name}: is empty; name at least one category'

    @property
    def named_averages(self) -> dict[str, tuple[str, ...]]:
        """Return the averages; if the file has none, one over all categories, as in llm-foundry."""
        if self.averages is not None:
            return self.averages
        return {'default_average': tuple(category.name for category in self.categories)}
