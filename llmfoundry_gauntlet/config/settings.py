"""Settings of an evaluation: the keys of the `eval_gauntlet` callback block, `gauntlet eval` and `evaluate`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

from llmfoundry_gauntlet.config.resources import path_problems
from llmfoundry_gauntlet.config.yaml import YamlProblems, decode, raise_invalid_values
from llmfoundry_gauntlet.errors import as_given, named
from llmfoundry_gauntlet.types import ChatFormat, ReasoningMarkers

INTERVAL_WORDS = ('first', 'checkpoint', 'last')
BUDGET = re.compile(r'(\d+(?:\.\d+)?)(s|m|h)')
PRECISION = re.compile(r'(\d+(?:\.\d+)?) *%(?: of (\S.*))?')
SECONDS = {'s': 1, 'm': 60, 'h': 3600}
COUNTED_TIME = re.compile(r'(\d+)(ba|ep|sp|tok|sec)')
SHARE_OF_TRAINING = re.compile(r'(\d*\.?\d+)dur')
INTERVALS = (
    f'{", ".join(INTERVAL_WORDS)} and Composer times (500ba, 1ep, 0.1dur): whole numbers of ba, ep, sp, tok or sec '
    'from 1, and shares of the training (dur) above 0 and at most 1'
)
AUTO: Final = 'auto'
BETWEEN = '...'  # between the start and the end of reasoning
ERROR, SKIP = 'error', 'skip'
AVERAGES = 'averages'  # of the gauntlet, as what alerts watch
LOGGED = ACCURACY, ERRORS, COMPOSITES, SCORE, METRICS = 'accuracy', 'errors', 'composites', 'score', 'metrics'
CHAT = ('chat_template_kwargs', 'system_prompt', 'fewshot_as_turns')  # settings of the form of prompts in chat
OF_TEMPLATE_CALL = (  # arguments of transformers' apply_chat_template that are no variables of a template
    # what is written
    'conversation',
    'messages',
    'chat_template',
    'add_generation_prompt',
    'continue_final_message',
    # how it is tokenized and returned
    'tokenize',
    'tokenizer_kwargs',
    'padding',
    'truncation',
    'max_length',
    'return_tensors',
    'return_dict',
    'return_assistant_tokens_mask',
)
CHOICES = {
    'semantics': ('corrected', 'reference'),
    'truncation': ('drop_shots', 'reference'),
    'fewshot': ('reference', 'fixed'),
    'sandbox': (AUTO, 'rlimits', 'none'),
    'missing': (ERROR, SKIP),
}

# Where tasks, a gauntlet and SCORE's datasets come from: a path, or what a file of theirs holds. What these entries may
# be is checked where they are read, so that all problems of a file are reported at once.
TasksSource = str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]]
GauntletSource = str | Path | Mapping[str, Any]
ScoreSource = str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionTarget:
    """The share by which an average's error may exceed its error over all items; average None: the default average."""

    share: float
    average: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation.

    * `tasks`: a path, a list of paths, or the list itself. `gauntlet`: a path or the mapping itself. `score`: a path or
      the list of SCORE datasets. At least one of tasks and score is needed.
    * `only`: labels of tasks and names of categories to run, one or a list. `num_fewshot`: overrides the number of
      shots of every task. Categories and averages that are then incomplete are left out.
    * `missing`: 'error', or 'skip' to leave out tasks without a data file and the composites over missing tasks.
    * `interval`: 'first', 'checkpoint', 'last' and Composer times such as '500ba'.
    * `subset_items`: maximum number of items per task, for SCORE of questions per dataset; every evaluation uses the
      same ones.
    * `time_budget`, such as '120s', '10m' or '1h': the time for one evaluation. The items that fit are chosen before
      the first one, from the time of a sample; later ones run the same items.
    * `precision_target` (`precision` in YAML), such as '5%' or '5% of core_average': run the smallest subset with which
      an average's error is at most 5 % above its error over all items. It replaces `subset_items` and `time_budget`.
    * `semantics`: 'corrected', or 'reference' for llm-foundry's scores, including its bugs.
    * `fewshot`: 'reference' (shots drawn for each item, as in llm-foundry), or 'fixed' (the same shots for all items of
      a task or category).
    * `apply_chat_template`: send each prompt, shots included, as a user message. SCORE has its own `chat_template`.
    * `chat_template_kwargs`: arguments of the chat template, such as {'enable_thinking': False}. `system_prompt`: the
      system message before each prompt. `fewshot_as_turns`: each shot is a message of the user and its answer one of
      the assistant.
    * `reasoning_markers`: texts around a model's reasoning, such as '<plan>...</plan>', in place of the known ones;
      empty if generations hold none.
    * `sandbox` for generated programs: 'auto' requires full isolation; 'rlimits' and 'none' accept less.
    * `stall_seconds`: after this long without progress, log every rank's stack and stop the job; None disables this.
    * `save_folder`: may contain {run_name}; None writes no records.
    * `log`: what loggers get besides times and counts: 'accuracy' (of tasks and their categories), 'errors' (standard
      errors of all that is logged), 'composites', 'score' (SCORE's) and 'metrics' (all others of tasks). Records hold
      everything. `log_prompts`: samples files also hold the texts of prompts and choices.
    * `alert_on`: scores of which a warning and `on_alert` say if they fall further than they usually vary in this
      training: 'averages', or names of averages, categories and tasks; empty for none.
    """

    tasks: TasksSource | None = None
    gauntlet: GauntletSource | None = None
    score: ScoreSource | None = None
    data_root: str = 'eval_data'
    only: tuple[str, ...] | None = None  # None: all
    num_fewshot: int | None = None  # None: each task's own
    missing: str = ERROR
    interval: tuple[str, ...] = INTERVAL_WORDS
    subset_items: int | None = None  # None: all
    time_budget: str | None = None  # None: no limit
    precision_target: str | None = None  # None: all items
    max_seq_len: int | None = None  # None: the model's
    tokens_per_batch: int | Literal['auto'] = AUTO
    semantics: str = 'corrected'
    truncation: str | None = None  # None: follows semantics
    fewshot: str = 'reference'
    apply_chat_template: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    system_prompt: str | None = None
    fewshot_as_turns: bool = False
    reasoning_markers: tuple[str, ...] | None = None  # None: the known ones
    sandbox: str = AUTO
    stall_seconds: float | None = 240.0  # less than the timeout of Composer's collectives, 300 s
    save_folder: str | None = 'runs/{run_name}/gauntlet'
    log: tuple[str, ...] = LOGGED[:-1]
    log_prompts: bool = False
    alert_on: tuple[str, ...] = (AVERAGES,)

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key if it is about one, for each value that is not allowed."""
        if self.tasks is None and self.score is None:
            yield f'nothing to evaluate: give {named("tasks")}, {named("score")} or both'
        yield from interval_problems(self)
        yield from path_setting_problems(self)
        yield from item_problems(self)
        yield from precision_problems(self)
        yield from number_problems(self)
        yield from word_problems(self)
        yield from chat_problems(self)

    @property
    def budget_seconds(self) -> float | None:
        """Return the seconds an evaluation may take; None if there is no limit or it cannot be parsed."""
        budget = BUDGET.fullmatch(self.time_budget or '')
        if budget is None:
            return None
        number, unit = budget.groups()
        return float(number) * SECONDS[unit]

    @property
    def precision(self) -> PrecisionTarget | None:
        """Return the precision target; None if there is none or it cannot be parsed."""
        target = PRECISION.fullmatch(self.precision_target or '')
        if target is None:
            return None
        percent, average = target.groups()
        return PrecisionTarget(share=float(percent) / 100, average=average) if float(percent) else None

    @property
    def chat_format(self) -> ChatFormat:
        """Return the form of prompts in a chat template."""
        return ChatFormat(
            template_kwargs=self.chat_template_kwargs or {},
            system_prompt=self.system_prompt,
            shots_as_turns=self.fewshot_as_turns,
        )

    @property
    def markers(self) -> tuple[ReasoningMarkers, ...] | None:
        """Return the texts around reasoning; None for the known ones."""
        if self.reasoning_markers is None:
            return None
        markers = []
        for text in self.reasoning_markers:
            start, _, end = text.partition(BETWEEN)
            markers.append(ReasoningMarkers(start.strip(), end.strip()))
        return tuple(markers)

    @property
    def given_markers(self) -> dict[str, Any]:
        """Return `reasoning_markers` if it is given."""
        return {} if self.reasoning_markers is None else {'reasoning_markers': list(self.reasoning_markers)}

    @property
    def given_chat(self) -> dict[str, Any]:
        """Return those of CHAT that are given."""
        values = {key: getattr(self, key) for key in CHAT}
        return {key: value for key, value in values.items() if value}

    @property
    def reference(self) -> bool:
        """Return whether llm-foundry's semantics apply, including its bugs."""
        return self.semantics == 'reference'

    @property
    def effective_truncation(self) -> str:
        """Return how to truncate prompts that are too long: 'drop_shots' or 'reference'."""
        return self.truncation or ('reference' if self.reference else 'drop_shots')


class EvaluationOptions(TypedDict, total=False):
    """The keyword arguments that become EvaluationSettings, where they are explained, for editors and type checkers.

    A path may be text, and where several words are allowed one may stand alone.
    """

    tasks: TasksSource | None
    gauntlet: GauntletSource | None
    score: ScoreSource | None
    data_root: str | Path
    only: str | Sequence[str] | None
    num_fewshot: int | None
    missing: str
    subset_items: int | None
    time_budget: str | None
    precision_target: str | None
    max_seq_len: int | None
    tokens_per_batch: int | str
    semantics: str
    truncation: str | None
    fewshot: str
    apply_chat_template: bool
    chat_template_kwargs: Mapping[str, Any] | None
    system_prompt: str | None
    fewshot_as_turns: bool
    reasoning_markers: str | Sequence[str] | None
    sandbox: str
    stall_seconds: float | None
    log: str | Sequence[str]
    log_prompts: bool


class GauntletOptions(EvaluationOptions, total=False):
    """The keyword arguments of a Gauntlet, which evaluates again and again and records each evaluation."""

    save_folder: str | Path | None
    alert_on: str | Sequence[str]


class TrainingOptions(GauntletOptions, total=False):
    """The keyword arguments of a callback, which also says when to evaluate."""

    interval: str | Sequence[str]


def interval_problems(settings: EvaluationSettings) -> Iterator[str]:
    """Yield a problem for each entry at which nothing can be evaluated."""
    if not settings.interval:
        yield f'interval: is empty; allowed: one or more of {INTERVALS}'
    for entry in settings.interval:
        if not is_interval(entry):
            yield f'interval: is {entry!r}; allowed: {INTERVALS}'


def path_setting_problems(settings: EvaluationSettings) -> Iterator[str]:
    """Yield a problem for each path that no file or folder can have, or that is not on this machine."""
    if not settings.data_root.strip():
        yield f"data_root: is {settings.data_root!r}; allowed: a folder, such as '.'"
    folder = settings.save_folder
    if folder is not None and not folder.strip():
        yield f'save_folder: is {folder!r}; allowed: a folder, or null for no records'
    if folder is not None and '://' in folder:
        yield (
            f'save_folder: is {folder!r}, but records are written to a local folder; allowed: a path '
            'such as runs/{run_name}/gauntlet, which can be uploaded later, or null for the metric stream alone'
        )
    for name in ('tasks', 'gauntlet', 'score', 'data_root', 'save_folder'):
        value = getattr(settings, name)
        if isinstance(value, str):
            yield from path_problems(name, value)


def item_problems(settings: EvaluationSettings) -> Iterator[str]:
    """Yield a problem for each invalid setting that selects tasks and items."""
    if settings.only == ():
        yield 'only: is empty; name at least one task or category, or leave it out'
    if settings.num_fewshot is not None and settings.num_fewshot < 0:
        yield f'num_fewshot: is {settings.num_fewshot}; allowed: 0 or more'
    if settings.subset_items is not None and settings.subset_items < 1:
        yield f'subset_items: is {settings.subset_items}; allowed: 1 or more'
    if settings.time_budget is not None and not settings.budget_seconds:
        yield f"time_budget: is {settings.time_budget!r}; allowed: a time such as '120s', '10m' or '1h'"


def precision_problems(settings: EvaluationSettings) -> Iterator[str]:
    """Yield a problem if the precision target is invalid, and for each other way to choose a subset beside it."""
    if settings.precision_target is None:
        return
    if settings.precision is None:
        yield (
            f"precision_target: is {settings.precision_target!r}; allowed: a share above 0 such as '5%' or '5% of "
            "core_average', by which the error of an average may exceed that of all items"
        )
    for key in ('subset_items', 'time_budget'):
        if getattr(settings, key) is not None:
            yield f'precision_target: chooses the subset by itself; leave out {named(key)}, or give it alone'


def number_problems(settings: EvaluationSettings) -> Iterator[str]:
    """Yield a problem for each number of tokens or seconds that is too small."""
    if settings.max_seq_len is not None and settings.max_seq_len < 2:
        yield f'max_seq_len: is {settings.max_seq_len}; allowed: 2 or more'
    tokens = settings.tokens_per_batch
    if tokens != AUTO and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        yield f'tokens_per_batch: is {tokens!r}; allowed: auto, or 1 or more'
    if settings.stall_seconds is not None and not settings.stall_seconds > 0:
        yield f'stall_seconds: is {settings.stall_seconds:g}; allowed: more than 0, or null for no limit'


def word_problems(settings: EvaluationSettings) -> Iterator[str]:
    """Yield a problem for each word that is not among the allowed ones, and for markers without an end."""
    for key, allowed in CHOICES.items():
        value = getattr(settings, key)
        follows_semantics = key == 'truncation' and value is None
        if value not in allowed and not follows_semantics:
            yield f'{key}: is {value!r}; allowed: {", ".join(allowed)}'
    for entry in settings.log:
        if entry not in LOGGED:
            yield f'log: is {entry!r}; allowed: {", ".join(LOGGED)}, one or a list'
    for entry, markers in zip(settings.reasoning_markers or (), settings.markers or (), strict=True):
        if not markers.end:
            yield (
                f'reasoning_markers: is {entry!r}; allowed: the start and the end of reasoning around three dots, '
                "such as '<plan>...</plan>'; '...DONE' if only the end is marked"
            )


def chat_problems(settings: EvaluationSettings) -> Iterator[str]:
    """Yield a problem for each setting of the chat template that is invalid or has no effect."""
    for key in settings.given_chat:
        is_of_score = settings.score is not None and key != 'fewshot_as_turns'  # whose prompts may be in chat anyway
        if not settings.apply_chat_template and not is_of_score:
            yield f'{key}: has no effect without {as_given("apply_chat_template")}; give that too, or leave it out'
    if settings.system_prompt is not None and not settings.system_prompt.strip():
        yield f'system_prompt: is {settings.system_prompt!r}; allowed: text, or leave it out'
    for name, value in (settings.chat_template_kwargs or {}).items():
        if not isinstance(name, str) or not name.isidentifier():
            yield f'chat_template_kwargs: {name!r} is no name of a variable of a template'
        if name in OF_TEMPLATE_CALL:
            yield f'chat_template_kwargs: {name} is set by the evaluation; leave it out'
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            yield (
                f'chat_template_kwargs: {name} is {value!r}, which is no JSON ({error}); allowed: text, numbers, true, '
                'false, null, and lists and mappings of them'
            )


def decode_settings(values: Mapping[str, Any], source: str = 'eval_gauntlet') -> EvaluationSettings:
    """Return settings from plain values and paths; accept a single interval or name for a list. Raise ConfigError."""
    values = {key: paths_as_text(value) for key, value in values.items()}
    for key in ('only', 'log', 'interval', 'reasoning_markers', 'alert_on'):
        if isinstance(values.get(key), (str, int)):  # the error for a number says which words are allowed
            values[key] = [str(values[key])]
    problems = YamlProblems(source)
    if 'precision' in values and 'precision_target' in values:
        problems.add('precision', 'is another name of precision_target; give one of them')
    elif 'precision' in values:  # the name in YAML, where the model's precision is set elsewhere
        values['precision_target'] = values.pop('precision')
    for key in ('tasks', 'gauntlet', 'score'):  # other kinds are checked where they are read
        if isinstance(values.get(key), str) and not values[key].strip():
            problems.add(key, f'is {values[key]!r}; allowed: a path')
    settings: EvaluationSettings = decode(EvaluationSettings, values, '', problems)
    problems.raise_all()
    return settings


def is_interval(entry: str) -> bool:
    """Return whether an entry is one of our interval names, or a Composer time at which Composer runs an evaluator.

    Those of `iter` are not: Composer asks its evaluators at the end of batches and epochs only.
    """
    if entry in INTERVAL_WORDS:
        return True
    if counted := COUNTED_TIME.fullmatch(entry):
        return int(counted[1]) > 0
    share = SHARE_OF_TRAINING.fullmatch(entry)
    return share is not None and 0 < float(share[1]) <= 1


def paths_as_text(value: Any) -> Any:
    """Convert paths to text, also inside lists; return other values unchanged."""
    if isinstance(value, (list, tuple)):
        return [paths_as_text(item) for item in value]
    return str(value) if isinstance(value, Path) else value
