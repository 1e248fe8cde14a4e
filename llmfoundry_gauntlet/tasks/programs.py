"""Check the requirements of tasks that run programs: a sandbox and the tools of their languages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from llmfoundry_gauntlet.scoring.code.execution import self_test
from llmfoundry_gauntlet.scoring.code.programs import missing_tool
from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox, SandboxError, find_sandbox
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.types import Example


def check_programs(
    tasks: Sequence[Task], examples: Mapping[str, Sequence[Example]], asked: str
) -> tuple[Sandbox | None, dict[str, str]]:
    """Return the sandbox for these tasks, None if none runs programs, and by key why a task cannot run its programs."""
    languages = {
        task.key: sorted({task.language(example.content) for example in examples[task.key]})
        for task in tasks
        if task.runs_programs
    }
    if not languages:
        return None, {}
    try:
        sandbox = find_sandbox(asked)
    except SandboxError as error:
        return None, dict.fromkeys(languages, str(error))
    reasons = {}
    for key, names in languages.items():
        if missing := [reason for name in names if (reason := problem_of(name, sandbox))]:
            reasons[key] = '; '.join(missing)
    return sandbox, reasons


@functools.cache
def problem_of(language: str, sandbox: Sandbox) -> str | None:
    """Return why programs of a language cannot run on this machine, None if they can."""
    return missing_tool(language) or self_test(language, sandbox)
