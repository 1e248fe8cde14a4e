"""What tasks with programs need of a machine: a sandbox, and the tools of their languages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.errors import SandboxError
from llmfoundry_gauntlet.judging.code.judge import self_test
from llmfoundry_gauntlet.judging.code.sandbox import Sandbox, find_sandbox
from llmfoundry_gauntlet.judging.code.tools import missing_tool
from llmfoundry_gauntlet.tasks import type_of
from llmfoundry_gauntlet.values import Example


def find_means(
    tasks: Sequence[TaskSpec], examples: Mapping[str, Sequence[Example]], asked: str
) -> tuple[Sandbox | None, dict[str, str]]:
    """The sandbox for these tasks' programs, None where there are none, and why tasks with programs cannot be run."""
    tasks = [task for task in tasks if type_of(task).runs_programs]
    if not tasks:
        return None, {}
    try:
        sandbox = find_sandbox(asked)
    except SandboxError as error:
        return None, {task.key: str(error) for task in tasks}
    reasons = {}
    for task in tasks:
        language_of = type_of(task).language
        languages = sorted({language_of(example.content) for example in examples[task.key]})
        if missing := [reason for language in languages if (reason := why_not(language, sandbox))]:
            reasons[task.key] = '; '.join(missing)
    return sandbox, reasons


@functools.cache
def why_not(language: str, sandbox: Sandbox) -> str | None:
    """Why programs of a language cannot be run on this machine, None where they can."""
    return missing_tool(language) or self_test(language, sandbox)
