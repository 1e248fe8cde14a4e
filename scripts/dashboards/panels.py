"""The charts of a dashboard: titles and metric keys from results.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.metrics.keys import COMPOSITE_PREFIX, SCORE_PREFIX, SECONDS, valid_key


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: a line for each key, over training batches."""

    section: str
    title: str
    keys: tuple[str, ...]


def panels_of(record: Mapping[str, Any]) -> list[Panel]:
    """Averages, categories, each category's tasks, tasks of none, SCORE, and the time; keys without values left out."""
    logged = record['metrics']
    accuracies = {
        task: valid_key(f'metrics/{task}/{next(iter(entry["metrics"]))}') for task, entry in record['tasks'].items()
    }
    composites = record['composites'] or {'categories': {}, 'averages': {}, 'gauntlet': {'categories': []}}
    panels = [
        Panel('Composites', part, tuple(valid_key(f'{COMPOSITE_PREFIX}/{name}') for name in composites[part]))
        for part in ('averages', 'categories')
    ]
    rest = dict(accuracies)
    for category in composites['gauntlet']['categories']:
        tasks = [f'{entry["name"]}/{entry["num_fewshot"]}-shot' for entry in category['benchmarks']]
        panels.append(Panel('Tasks', category['name'], tuple(rest.pop(task) for task in tasks if task in rest)))
    panels.append(Panel('Tasks', 'other tasks', tuple(rest.values())))
    panels += score_panels(logged)
    panels.append(Panel('Cost', 'seconds of an evaluation', (SECONDS,)))
    found = [Panel(panel.section, panel.title, tuple(key for key in panel.keys if key in logged)) for panel in panels]
    return [panel for panel in found if panel.keys]


def score_panels(logged: Mapping[str, float]) -> list[Panel]:
    """Accuracy and consistency of each of SCORE's data sets, a line for each perturbation."""
    keys: dict[tuple[str, str], list[str]] = {}
    for key in logged:
        match = re.fullmatch(rf'{SCORE_PREFIX}/([^/]+)/[^/]+/(accuracy|consistency_rate)', key)
        if match is not None:
            keys.setdefault((match[1], match[2].replace('_', ' ')), []).append(key)
    return [Panel('SCORE', ': '.join(names), tuple(found)) for names, found in keys.items()]
