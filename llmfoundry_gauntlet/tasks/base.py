"""What a task type has to say: its row format, how it is asked, how it is marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.values import Judgement, Question, ScoreOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskType:
    """One type of task, as four functions over its own row type.

    * `parse(row, task)` checks a data row and returns its content, or raises RowError.
    * `shot(content, task, first)` is the text of a shot; `first` where nothing precedes it.
    * `ask(content, task, first)` is the Question; `first` where no instruction or shot precedes it.
    * `judge(output, content, reference)` marks an output; `reference` asks for llm-foundry's rule.
    """

    name: str
    metric: str
    parse: Callable[[Mapping[str, Any], TaskSpec], Any]
    shot: Callable[[Any, TaskSpec, bool], str]
    ask: Callable[[Any, TaskSpec, bool], Question]
    judge: Callable[[ScoreOutput, Any, bool], Judgement]


def part(task: TaskSpec, context: str, first: bool) -> str:
    """`context` between the task's delimiters, as a shot or the item itself begins."""
    return ('' if first else task.example_delimiter) + task.prelimiter + context + task.continuation_delimiter


def strip_end(text: str, task: TaskSpec) -> str:
    """`text` without white space at its end, unless the task keeps its data as they are."""
    return text.rstrip() if task.strip_dataset else text
