"""The settings of `gauntlet gate`: margins and required rows, from a policy file or from options."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmfoundry_gauntlet.config.resources import shipped
from llmfoundry_gauntlet.config.yaml import YamlProblems, decode, read_yaml
from llmfoundry_gauntlet.errors import COMMAND_LINE, Problems, join

# The margins of families. Of averages it is one with which a model that is as good is ok in nine of ten cases at 200
# items a task. Nothing of the kind can be asked of 57 tasks at once: tasks, categories and SCORE have none, so that
# they can only show that a run is worse.
MARGINS = {'tasks': 0.0, 'categories': 0.0, 'averages': 0.03, 'score': 0.0}
ALPHA = 0.05  # the error rate of either test
MOST_ALPHA = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePolicy:
    """The requirements of a gate: the keys of a policy file.

    Rows are tasks ('copa/0-shot', or 'copa' at all its numbers of shots), categories, averages, and accuracies and
    consistency rates of SCORE ('agieval prompt accuracy').

    * `margins`: by how much a row, or each of a family of rows (a key of MARGINS), may be lower, in the unit of its
      score.
    * `relative`: the same for a row as a share of the first run's score.
    * `require`: rows that must be shown not to be lower by more; None for gauntlet_average, else the first average.
    * `ignore`: rows that are left out.
    """

    margins: dict[str, float] = field(default_factory=dict)
    relative: dict[str, float] = field(default_factory=dict)
    require: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """A policy, the file it is from (COMMAND_LINE for options) with its SHA-256, and the other options of the command.

    `require` are rows that are required beside those of the policy. With `allow_different` runs are compared although
    they were not asked the same items, with a warning.
    """

    policy: GatePolicy = GatePolicy()
    source: str = COMMAND_LINE
    sha256: str | None = None
    require: tuple[str, ...] = ()
    alpha: float = ALPHA
    allow_different: bool = False

    @property
    def problems(self) -> Problems:
        """Return a new collection of problems of the policy, each with its line."""
        return Problems(self.source) if self.source == COMMAND_LINE else YamlProblems(self.source)


def gate_settings(
    policy: Path | None,
    *,
    margin: float | None,
    task_margin: float | None,
    require: Sequence[str],
    alpha: float,
    allow_different: bool,
) -> GateSettings:
    """Return the settings of the command from its options: a policy file, or the margins of averages and of tasks.

    Raise ConfigError with every problem found.
    """
    problems = Problems(COMMAND_LINE)
    margins = {}
    for option, family, value in (('margin', 'averages', margin), ('task_margin', 'tasks', task_margin)):
        if value is not None:
            margins[family] = value
            check_margin(option, value, problems)
    if not 0 < alpha < MOST_ALPHA:
        problems.add('alpha', f'is {alpha:g}; allowed: above 0 and below {MOST_ALPHA:g}, such as {ALPHA:g}')
    problems.raise_all()

    settings = GateSettings(
        policy=GatePolicy(margins=margins), require=tuple(require), alpha=alpha, allow_different=allow_different
    )
    if policy is None:
        return settings
    of_file, sha256 = read_policy(policy)
    return replace(settings, policy=of_file, source=str(policy), sha256=sha256)


def read_policy(path: Path) -> tuple[GatePolicy, str]:
    """Return the policy in a YAML file and the SHA-256 of the file. Raise ConfigError with every problem, by line."""
    content = read_yaml(path)
    problems = YamlProblems(str(path))
    policy: GatePolicy | None = decode(GatePolicy, content, '', problems)
    if policy is not None:
        check_margins('margins', policy.margins, problems)
        check_margins('relative', policy.relative, problems)
        for name in policy.relative:
            if name in policy.margins:
                problems.add(join('relative', name), 'has a margin too; give one of them')
    problems.raise_all()
    assert policy is not None
    return policy, hashlib.sha256(shipped(path).read_bytes()).hexdigest()


def check_margins(key: str, margins: Mapping[str, float], problems: Problems) -> None:
    """Add a problem for each margin of a mapping that is not allowed."""
    for name, margin in margins.items():
        check_margin(join(key, name), margin, problems)


def check_margin(path: str, margin: float, problems: Problems) -> None:
    """Add a problem for a margin that is no share, such as 3 for 3 %."""
    if not 0 <= margin < 1:
        problems.add(path, f'is {margin:g}; allowed: from 0 to less than 1, such as 0.03')
