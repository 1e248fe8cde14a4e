"""Make dashboards of composites, tasks and SCORE over training batches in W&B or MLflow.

    python scripts/dashboards.py wandb RUN --entity E --project P [--name 'Eval Gauntlet'] [--dry-run]
    python scripts/dashboards.py mlflow RUN --uri http://127.0.0.1:5000 --experiment E [--runs NAME ...]

RUN is the folder of a training's or an evaluation's records; the charts are those of its last results.json. `wandb`
saves a workspace, or prints it as W&B stores it (--dry-run), and needs `pip install wandb-workspaces`. `mlflow` prints
a link to MLflow's page of each chart, which compares the runs of the experiment that have our metrics: those of --runs,
else the 20 newest.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llmfoundry_gauntlet import GauntletError
from llmfoundry_gauntlet.errors import ConfigError, print_problems
from llmfoundry_gauntlet.metrics.keys import BATCH, COMPOSITE_PREFIX, GOLD_BITS, SCORE_PREFIX, SECONDS, valid_key
from llmfoundry_gauntlet.results.files import find_results

MAX_RUNS = 20


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: a line for each key, over training batches."""

    section: str
    title: str
    keys: tuple[str, ...]


def panels_of(record: Mapping[str, Any]) -> list[Panel]:
    """Return averages, categories, gold bits, each category's tasks, other tasks, SCORE, and seconds.

    They have the keys alone that have values.
    """
    logged = record['metrics']
    accuracies = {
        task: valid_key(f'metrics/{task}/{next(iter(entry["metrics"]))}') for task, entry in record['tasks'].items()
    }
    composites = record['composites'] or {'categories': {}, 'averages': {}, 'gauntlet': {'categories': []}}
    panels = [
        Panel('Composites', part, tuple(valid_key(f'{COMPOSITE_PREFIX}/{name}') for name in composites[part]))
        for part in ('averages', 'categories')
    ]
    of_averages = [valid_key(f'{COMPOSITE_PREFIX}/{name}/{GOLD_BITS}') for name in composites['averages']]
    panels.append(Panel('Composites', f'{GOLD_BITS} of averages (lower is better)', tuple(of_averages)))
    rest = dict(accuracies)
    for category in composites['gauntlet']['categories']:
        tasks = [f'{entry["name"]}/{entry["num_fewshot"]}-shot' for entry in category['benchmarks']]
        panels.append(Panel('Tasks', category['name'], tuple(rest.pop(task) for task in tasks if task in rest)))
    panels.append(Panel('Tasks', 'other tasks', tuple(rest.values())))
    panels += score_panels(logged)
    panels.append(Panel('Cost', 'seconds of an evaluation', (SECONDS,)))

    # A run has logged only a part of these: panels keep what it has, and go if they have nothing.
    shown = []
    for panel in panels:
        keys = tuple(key for key in panel.keys if key in logged)
        if keys:
            shown.append(Panel(panel.section, panel.title, keys))
    return shown


def score_panels(logged: Mapping[str, float]) -> list[Panel]:
    """Return accuracy and consistency of each of SCORE's datasets, a line for each perturbation."""
    keys_by_title: dict[str, list[str]] = defaultdict(list)
    for key in logged:
        match = re.fullmatch(rf'{SCORE_PREFIX}/([^/]+)/[^/]+/(accuracy|consistency_rate)', key)
        if match is not None:
            dataset, metric = match.groups()
            title = f'{dataset}: {metric.replace("_", " ")}'
            keys_by_title[title].append(key)
    return [Panel('SCORE', title, tuple(keys)) for title, keys in keys_by_title.items()]


def wandb_workspace(panels: Sequence[Panel], *, entity: str, project: str, name: str) -> Any:
    """Return the workspace, not yet saved: a section for each of the panels', the first ones open."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ModuleNotFoundError as error:
        raise ConfigError(f'{error}; pip install wandb-workspaces') from error
    sections = [
        workspaces.Section(
            name=section,
            is_open=section in ('Composites', 'Tasks'),
            panels=[reports.LinePlot(title=panel.title, x=BATCH, y=list(panel.keys)) for panel in members],
        )
        for section, members in groupby(panels, key=lambda panel: panel.section)
    ]
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


def mlflow_link(uri: str, experiment_id: str, run_ids: Sequence[str], panel: Panel) -> str:
    """Return the address of MLflow's page of one chart: a line for each key and run, over steps."""
    query = {
        'runs': run_ids,
        'metric': panel.keys[0],
        'experiments': [experiment_id],
        'plot_metric_keys': panel.keys,
        'plot_layout': {'autosize': True},
        'deselected_curves': [],
        'last_linear_y_axis_range': [],
    }
    words = [f'{name}={quote(json.dumps(value, separators=(",", ":")))}' for name, value in query.items()]
    words += ['x_axis=step', 'y_axis_scale=linear', 'line_smoothness=1', 'show_point=true']
    return f'{uri.rstrip("/")}/#/metric?{"&".join(words)}'


def find_mlflow_runs(uri: str, experiment: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the ids of the experiment and of its runs. Raise ConfigError if one of them does not exist."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    entry = client.get_experiment_by_name(experiment)
    if entry is None:
        known = ', '.join(other.name for other in client.search_experiments())
        raise ConfigError(f'{uri}: there is no experiment {experiment!r}; there are {known}')

    runs = [run for run in client.search_runs([entry.experiment_id]) if BATCH in run.data.metrics]
    chosen = [run for run in runs if not names or run.info.run_name in names]
    names_of_runs = {run.info.run_name for run in runs}
    missing = [name for name in names if name not in names_of_runs]
    if missing or not chosen:
        known = ', '.join(sorted(names_of_runs)) or 'none'
        raise ConfigError(f'{uri}: {experiment}: no run {" ".join(missing)} with the key {BATCH}; there are {known}')
    return entry.experiment_id, [run.info.run_id for run in chosen[:MAX_RUNS]]


def make_wandb(panels: Sequence[Panel], options: argparse.Namespace) -> None:
    """Save the workspace and print its address, or print the workspace."""
    workspace = wandb_workspace(panels, entity=options.entity, project=options.project, name=options.name)
    if options.dry_run:
        print(workspace._to_model().model_dump_json(by_alias=True, indent=2))
    else:
        print(workspace.save().url)


def print_mlflow(panels: Sequence[Panel], options: argparse.Namespace) -> None:
    """Print a link for each chart."""
    experiment_id, run_ids = find_mlflow_runs(options.uri, options.experiment, options.runs)
    for panel in panels:
        print(f'{panel.section}: {panel.title}\n  {mlflow_link(options.uri, experiment_id, run_ids, panel)}')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    wandb = commands.add_parser('wandb')
    wandb.set_defaults(make=make_wandb)
    mlflow = commands.add_parser('mlflow')
    mlflow.set_defaults(make=print_mlflow)
    for command in (wandb, mlflow):
        command.add_argument('run', type=Path)
    wandb.add_argument('--entity', required=True)
    wandb.add_argument('--project', required=True)
    wandb.add_argument('--name', default='Eval Gauntlet')
    wandb.add_argument('--dry-run', action='store_true')
    mlflow.add_argument('--uri', required=True)
    mlflow.add_argument('--experiment', required=True)
    mlflow.add_argument('--runs', nargs='+', default=[])
    options = parser.parse_args()
    try:
        options.make(panels_of(find_results(options.run)[-1][1]), options)
    except GauntletError as error:
        print_problems(error)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
