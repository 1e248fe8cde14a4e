"""The result of running a completion."""

from __future__ import annotations

from typing import NamedTuple

LATE = 'not done in time'


class Outcome(NamedTuple):
    """The result of a completion: passed or failed. The reason contains no text of the completion or of any file."""

    passed: bool
    reason: str | None


class CannotRun(Exception):
    """Raised if a completion cannot be run because of its problem or this machine."""


class SandboxError(Exception):
    """Raised if no program can run properly on this machine."""


class Undecided(Exception):
    """Raised if the result of a completion is undecided; it counts as wrong."""
