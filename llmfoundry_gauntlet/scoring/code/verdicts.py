"""What is said of a completion."""

from __future__ import annotations

from typing import NamedTuple

LATE = 'not done in time'


class Verdict(NamedTuple):
    """Whether a completion passed, and why not. The reason has no text of the completion's, nor of any file."""

    passed: bool
    reason: str | None


class CannotJudge(Exception):
    """Why nothing can be said of a completion: its problem or this machine is at fault."""


class SandboxError(Exception):
    """Why no program can be run on this machine as it should be."""


class Undecided(Exception):
    """Why a completion could not be judged; it counts as wrong."""
