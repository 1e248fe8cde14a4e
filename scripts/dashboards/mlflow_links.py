"""Prints a link to MLflow's chart page for each panel: composites, tasks and SCORE of one run or of several over steps.

    python scripts/dashboards/mlflow_links.py RUN --uri http://127.0.0.1:5000 --experiment E [--runs NAME ...]

RUN is the folder of a training's or an evaluation's records: the charts are those of its last results.json. Without
--runs all runs of the experiment that have our metrics are compared, the newest first, at most 20.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from panels import Panel, panels_of

from llmfoundry_gauntlet import GauntletError
from llmfoundry_gauntlet.errors import ConfigError, print_problems
from llmfoundry_gauntlet.metrics.keys import BATCH
from llmfoundry_gauntlet.results.files import find_results

MAX_RUNS = 20


def link(uri: str, experiment_id: str, run_ids: Sequence[str], panel: Panel) -> str:
    """MLflow's page of one chart: a line for each key and run, over steps."""
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


def find_runs(uri: str, experiment: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """The ids of the experiment and of the runs. Raises ConfigError where there are none of that name."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        known = ', '.join(entry.name for entry in client.search_experiments())
        raise ConfigError(f'{uri}: there is no experiment {experiment!r}; there are {known}')
    runs = [run for run in client.search_runs([found.experiment_id]) if BATCH in run.data.metrics]
    chosen = [run for run in runs if not names or run.info.run_name in names]
    missing = [name for name in names if name not in {run.info.run_name for run in runs}]
    if missing or not chosen:
        known = ', '.join(sorted({run.info.run_name for run in runs})) or 'none'
        raise ConfigError(f'{uri}: {experiment}: no run {" ".join(missing)} with the key {BATCH}; there are {known}')
    return found.experiment_id, [run.info.run_id for run in chosen[:MAX_RUNS]]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path)
    parser.add_argument('--uri', required=True)
    parser.add_argument('--experiment', required=True)
    parser.add_argument('--runs', nargs='+', default=[])
    options = parser.parse_args(words)
    try:
        panels = panels_of(find_results(options.run)[-1][1])
        experiment_id, run_ids = find_runs(options.uri, options.experiment, options.runs)
    except GauntletError as error:
        print_problems(error)
        return 2
    for panel in panels:
        print(f'{panel.section}: {panel.title}\n  {link(options.uri, experiment_id, run_ids, panel)}')
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
