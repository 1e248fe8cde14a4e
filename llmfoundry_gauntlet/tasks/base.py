"""What a task type has to say: its keys and rows, how it is asked, how it is marked, and what comes of the marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.data.examples import TaskRows, read_examples
from llmfoundry_gauntlet.scores.consistency import PerturbationScore
from llmfoundry_gauntlet.scores.metrics import Metric
from llmfoundry_gauntlet.values import Generation, Judgement, Question, Sampling, StopRule

if TYPE_CHECKING:
    from llmfoundry_gauntlet.judging.code.sandbox import Sandbox

TRANSFORMERS_TOP_K = 50  # its default where it samples
CUT_SHARE = 'CutShare'
CUT = 'cut at the token limit'

Task = TypeVar('Task', bound=TaskSpec)
Content = TypeVar('Content')


def sampling_of(task: TaskSpec, variant: str | None) -> Sampling:
    """How a task's replies are drawn. What it does not say is as in transformers."""
    given = task.generation_kwargs or {}
    if not given.get('do_sample', False):
        return Sampling()
    return Sampling(
        temperature=float(given.get('temperature', 1.0)),
        top_p=float(given.get('top_p', 1.0)),
        top_k=given.get('top_k', TRANSFORMERS_TOP_K),
        seed=given.get('seed', task.fewshot_random_seed),
    )


def no_shot(content: Any, task: TaskSpec, first: bool) -> str:
    """Of a type whose tasks always have 0 shots."""
    raise TypeError(f'{task.icl_task_type} has no shots')


def as_long_as_right(task: TaskSpec) -> None:
    """A reply may be as long as the longest right one."""
    return None


def no_more(task: TaskSpec) -> int:
    """A reply may have no more tokens than the longest right one."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies(Generic[Task, Content]):
    """What a type says of replies, where the model is to write them.

    * `responses(content, task)` are all the replies that would be right, in full.
    * `stops(task, contents, reference)` says where the replies to all these rows end.
    * `sampling(task, variant)` says how a reply is drawn, by default as the task's generation_kwargs have it.
    * `most_tokens(task)` is how long a reply may be where the task does not say; where it is None, as long as the
      longest right one and `margin(task)` tokens more.
    * `is_verbatim` asks for replies to the last space.
    """

    responses: Callable[[Content, Task], tuple[str, ...]]
    stops: Callable[[Task, Sequence[Content], bool], StopRule]
    sampling: Callable[[Task, str | None], Sampling] = sampling_of
    most_tokens: Callable[[Task], int | None] = as_long_as_right
    margin: Callable[[Task], int] = no_more
    is_verbatim: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs(Generic[Task, Content]):
    """What a type says of replies that are programs, which are run to be marked.

    * `language(content)` is what a program is written in.
    * `judge(output, content, task, reference, sandbox)` runs it.
    """

    language: Callable[[Content], str]
    judge: Callable[[Generation, Content, Task, bool, Sandbox], Judgement]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskType(Generic[Task, Content]):
    """One type of task, as a few functions over its own row type, `Content`, which has `gold`.

    `keys` is what its tasks may say in YAML: TaskSpec, or a subclass with more. `metrics(task)` are its metrics, the
    accuracy first; `older_metrics` are further ones that llm-foundry's YAML files name, which are left out.

    * `read(task, data_root)` gives its examples; `rows_by(parse)` is one for JSON rows that are checked one by one.
    * `shot(content, task, first)` is the text of a shot; `first` where nothing precedes it.
    * `ask(content, task, first)` is the Question; `first` where no instruction or shot precedes it.
    * `judge(output, content, task, reference)` marks an output, a reply up to its stop; `reference` asks for
      llm-foundry's rule. Where replies are programs, `programs` has another in its place.
    * `judge_text(text, content)` marks a reply of somebody else's model to a question with continuations, which that
      could not score.
    * `robustness(task, results, allow_missing)` are SCORE's numbers by perturbation, which are no means.

    `replies` is there where questions have no continuations, so that the model writes a reply.
    """

    name: str
    read: Callable[[Task, str], TaskRows]
    ask: Callable[[Content, Task, bool], Question]
    keys: type[Task]
    metrics: Callable[[Task], tuple[Metric, ...]]
    older_metrics: tuple[str, ...] = ()
    shot: Callable[[Content, Task, bool], str] = no_shot
    judge: Callable[[Any, Content, Task, bool], Judgement] | None = None
    judge_text: Callable[[str, Content], Judgement] | None = None
    replies: Replies[Task, Content] | None = None
    programs: Programs[Task, Content] | None = None
    robustness: Callable[..., dict[str, PerturbationScore]] | None = None

    def __post_init__(self) -> None:
        if (self.judge is None) == (self.programs is None):
            raise ValueError(f'the task type {self.name} needs judge, or programs with one')

    @property
    def has_shots(self) -> bool:
        """Whether its tasks can show examples before the question."""
        return self.shot is not no_shot


AnyTaskType = TaskType[Any, Any]


def rows_by(parse: Callable[[Mapping[str, Any], Task], Any]) -> Callable[[Task, str], TaskRows]:
    """Reads a task's file of JSON rows. `parse` checks a row and returns its content, or raises RowError."""

    def read(task: Task, data_root: str) -> TaskRows:
        return TaskRows(examples=read_examples(task, data_root, parse))

    return read


def part(task: TaskSpec, context: str, first: bool) -> str:
    """`context` between the task's delimiters, as a shot or the item itself begins."""
    return ('' if first else task.example_delimiter) + task.prelimiter + context + task.continuation_delimiter


def strip_end(text: str, task: TaskSpec) -> str:
    """`text` without white space at its end, unless the task keeps its data as they are."""
    return text.rstrip() if task.strip_dataset else text
