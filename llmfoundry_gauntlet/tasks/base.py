"""What a task type has to say: its row format, how it is asked, how it is marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.judging.code.sandbox import Sandbox
from llmfoundry_gauntlet.values import Judgement, Question, Sampling, StopRule

TRANSFORMERS_TOP_K = 50  # its default where it samples


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskType:
    """One type of task, as a few functions over its own row type.

    Its accuracy is called `metric`; `marks` are the names of further metrics that `judge` gives with every item. SCORE
    has neither: its numbers are not means over items.

    * `parse(row, task)` checks a data row and returns its content, or raises RowError. A content has `gold`.
    * `shot(content, task, first)` is the text of a shot; `first` where nothing precedes it. SCORE, which has its own
      files and no shots, has neither of these two.
    * `ask(content, task, first)` is the Question; `first` where no instruction or shot precedes it.
    * `judge(output, content, task, reference)` marks an output, a reply up to its stop; `reference` asks for
      llm-foundry's rule.

    Types whose questions have no continuations, so that the model writes a reply, have some more:

    * `responses(content, task)` are all the replies that would be right, in full.
    * `stops(task, contents, reference)` says where the replies to all these rows end.
    * `sampling(task, variant)` says how a reply is drawn, by default as the task's generation_kwargs have it.
    * `most_tokens(task)` is how long a reply may be where the task does not say; without it, or where it is None, as
      long as the longest right one.
    * `is_verbatim` asks for replies to the last space.

    A type with continuations may have one more, for replies that somebody else's model wrote in place of scoring them:

    * `judge_text(text, content)` marks such a reply.

    A type whose replies are programs has two more:

    * `language(content)` says what a program is written in.
    * `judge_program(output, content, task, reference, sandbox)` takes the place of `judge`.
    """

    name: str
    ask: Callable[[Any, TaskSpec, bool], Question]
    metric: str | None = None
    parse: Callable[[Mapping[str, Any], TaskSpec], Any] | None = None
    shot: Callable[[Any, TaskSpec, bool], str] | None = None
    judge: Callable[[Any, Any, TaskSpec, bool], Judgement] | None = None
    marks: tuple[str, ...] = ()
    responses: Callable[[Any, TaskSpec], tuple[str, ...]] | None = None
    stops: Callable[[TaskSpec, Sequence[Any], bool], StopRule] | None = None
    sampling: Callable[[Any, str | None], Sampling] = sampling_of
    most_tokens: Callable[[Any], int | None] = lambda task: None
    judge_text: Callable[[str, Any], Judgement] | None = None
    language: Callable[[Any], str] | None = None
    judge_program: Callable[[Any, Any, TaskSpec, bool, Sandbox], Judgement] | None = None
    is_verbatim: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics, the accuracy first."""
        return () if self.metric is None else (self.metric, *self.marks)

    @property
    def wants_reply(self) -> bool:
        """Whether the model is to write a reply."""
        return self.responses is not None

    @property
    def runs_programs(self) -> bool:
        """Whether a reply is a program, which is run to be marked."""
        return self.judge_program is not None


def part(task: TaskSpec, context: str, first: bool) -> str:
    """`context` between the task's delimiters, as a shot or the item itself begins."""
    return ('' if first else task.example_delimiter) + task.prelimiter + context + task.continuation_delimiter


def strip_end(text: str, task: TaskSpec) -> str:
    """`text` without white space at its end, unless the task keeps its data as they are."""
    return text.rstrip() if task.strip_dataset else text
