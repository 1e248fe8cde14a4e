"""Whether the solutions that come with code tasks pass their tests. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from llmfoundry_gauntlet.inputs import EvaluationData, tasks_with_data
from llmfoundry_gauntlet.judging.code.workers import workers
from llmfoundry_gauntlet.tasks import type_of
from llmfoundry_gauntlet.values import Generation, ItemKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTask:
    """A task's solutions: how many there are, why some fail, by row, and what all took in seconds."""

    task: str
    num_solutions: int
    failures: Mapping[int, str]
    seconds: float


def check_solutions(data: EvaluationData) -> list[CheckedTask]:
    """Every code task's solutions, each run as if a model had written it."""
    checked = []
    for key, task in tasks_with_data(data).items():
        replies, programs = type_of(task).replies, type_of(task).programs
        if replies is None or programs is None or data.sandbox is None:
            continue
        started = time.perf_counter()
        running = {}
        for example in data.examples[key]:
            (text,) = replies.responses(example.content, task)
            output = Generation(key=ItemKey(key, example.row), text=text)
            running[example.row] = workers().submit(
                programs.judge, output, example.content, task, data.settings.reference, data.sandbox
            )
        judged = {row: program.result() for row, program in running.items()}
        failures = {row: found.reason or '' for row, found in judged.items() if found.credit != 1}
        seconds = time.perf_counter() - started
        checked.append(CheckedTask(task=key, num_solutions=len(judged), failures=failures, seconds=seconds))
    return checked
