"""The runs of a report page: each a single evaluation, or the evaluations of one training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.records.results import find_results
from llmfoundry_gauntlet.report.scores import Record, ScoreRow, batch_of, read_scores
from llmfoundry_gauntlet.report.wording import unique_labels

MAX_RUNS = 8  # that colours tell apart


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvaluation:
    """One results.json and its checked numbers."""

    folder: Path
    record: Record
    scores: tuple[ScoreRow, ...]

    @property
    def batch(self) -> int | None:
        """The training batch, `None` where it is unknown."""
        return batch_of(self.record)

    @property
    def name(self) -> str:
        """The training batch, else the name of the folder."""
        return self.folder.name if self.batch is None else f'ba{self.batch}'


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """At least one evaluation, in the order of training, under a short name; `label` is the name in charts."""

    name: str
    label: str
    folder: Path
    evaluations: tuple[RecordedEvaluation, ...]

    @property
    def last(self) -> RecordedEvaluation:
        """The evaluation that stands for the run beside others."""
        return self.evaluations[-1]


def find_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs at or below these folders.

    Sibling folders with evaluations of different training batches are one run, every other evaluation is a run of its
    own. Raises RecordError for a damaged record, ConfigError for more runs than a page can show.
    """
    runs = [run for folder in dict.fromkeys(folders) for run in runs_below(folder)]
    if len(runs) > MAX_RUNS:
        raise ConfigError(
            f'there are {len(runs)} runs ({", ".join(str(run.folder) for run in runs[:3])}, ...); a page shows at most '
            f'{MAX_RUNS}: name fewer'
        )
    names = short_names([run.folder for run in runs])
    found = zip(runs, names, unique_labels(names), strict=True)
    return [replace(run, name=name, label=label) for run, name, label in found]


def runs_below(folder: Path) -> list[RecordedRun]:
    """Return the runs at or below one folder, in the order of their paths."""
    groups: dict[Path, list[RecordedEvaluation]] = {}
    for place, record in sorted(find_results(folder), key=lambda found: found[0]):
        found = RecordedEvaluation(folder=place, record=record, scores=tuple(read_scores(place, record)))
        groups.setdefault(place.parent, []).append(found)
    runs: list[RecordedRun] = []
    for parent, members in groups.items():
        batches = {member.batch for member in members}
        if len(members) > 1 and None not in batches and len(batches) == len(members):
            ordered = sorted(members, key=lambda member: member.batch or 0)
            runs.append(RecordedRun(name='', label='', folder=parent, evaluations=tuple(ordered)))
        else:
            runs += [RecordedRun(name='', label='', folder=member.folder, evaluations=(member,)) for member in members]
    return runs


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders without the part of their paths that all share."""
    if len(folders) == 1:
        return [str(folders[0])]
    common = os.path.commonpath([os.path.abspath(folder) for folder in folders])
    names = [os.path.relpath(os.path.abspath(folder), common) for folder in folders]
    return [folder.name if name == os.curdir else name for name, folder in zip(names, folders, strict=True)]
