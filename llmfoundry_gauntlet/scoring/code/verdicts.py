"""The verdicts on a completion."""

from __future__ import annotations

from typing import NamedTuple

LATE = 'not done in time'


class Verdict(NamedTuple):
    """A completion passed or failed. The reason holds no text of the completion or of any file."""

    passed: bool
    reason: str | None


class CannotJudge(Exception):
    """A completion cannot be judged, as its problem or this machine is at fault."""


class SandboxError(Exception):
    """No program can run on this machine as it should."""


class Undecided(Exception):
    """A completion could not be judged, and counts as wrong."""
