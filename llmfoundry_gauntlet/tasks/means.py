"""What tasks with programs need of a machine: a sandbox, and the tools of their languages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.judging.code.judge import self_test
from llmfoundry_gauntlet.judging.code.languages import missing_tool
from llmfoundry_gauntlet.judging.code.sandbox import Sandbox, find_sandbox
from llmfoundry_gauntlet.judging.code.verdicts import SandboxError
from llmfoundry_gauntlet.tasks import type_of
from llmfoundry_gauntlet.values import Example


def find_means(
    tasks: Sequence[TaskSpec], examples: Mapping[str, Sequence[Example]], asked: str
) -> tuple[Sandbox | None, dict[str, str]]:
    """The sandbox for these tasks' programs, None where there are none, and why tasks with programs cannot be run."""
    languages = {
        task.key: sorted({programs.language(example.content) for example in examples[task.key]})
        for task in tasks
        if (programs := type_of(task).programs) is not None
    }
    if not languages:
        return None, {}
    try:
        sandbox = find_sandbox(asked)
    except SandboxError as error:
        return None, dict.fromkeys(languages, str(error))
    reasons = {}
    for key, names in languages.items():
        if missing := [reason for name in names if (reason := why_not(name, sandbox))]:
            reasons[key] = '; '.join(missing)
    return sandbox, reasons


@functools.cache
def why_not(language: str, sandbox: Sandbox) -> str | None:
    """Why programs of a language cannot be run on this machine, None where they can."""
    return missing_tool(language) or self_test(language, sandbox)
