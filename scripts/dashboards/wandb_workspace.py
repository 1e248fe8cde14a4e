"""Makes a W&B workspace with charts of composites, tasks and SCORE over training batches.

    python scripts/dashboards/wandb_workspace.py RUN --entity E --project P [--name 'Eval Gauntlet'] [--dry-run]

RUN is the folder of a training's or an evaluation's records: the charts are those of its last results.json. With
--dry-run the workspace is printed as W&B stores it, and nothing is sent. Needs `pip install wandb-workspaces`.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from panels import Panel, panels_of

from llmfoundry_gauntlet import GauntletError
from llmfoundry_gauntlet.errors import print_problems
from llmfoundry_gauntlet.metrics.keys import BATCH
from llmfoundry_gauntlet.results.files import find_results


def workspace(panels: Sequence[Panel], *, entity: str, project: str, name: str) -> Any:
    """The workspace, not yet saved: a section for each of the panels', the first ones open."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    sections = [
        workspaces.Section(
            name=section,
            is_open=section in ('Composites', 'Tasks'),
            panels=[reports.LinePlot(title=panel.title, x=BATCH, y=list(panel.keys)) for panel in found],
        )
        for section, found in groupby(panels, key=lambda panel: panel.section)
    ]
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path)
    parser.add_argument('--entity', required=True)
    parser.add_argument('--project', required=True)
    parser.add_argument('--name', default='Eval Gauntlet')
    parser.add_argument('--dry-run', action='store_true')
    options = parser.parse_args(words)
    try:
        panels = panels_of(find_results(options.run)[-1][1])
    except GauntletError as error:
        print_problems(error)
        return 2
    try:
        made = workspace(panels, entity=options.entity, project=options.project, name=options.name)
    except ModuleNotFoundError as error:
        print(f'error: {error}; pip install wandb-workspaces', file=sys.stderr)
        return 2
    if options.dry_run:
        print(made._to_model().model_dump_json(by_alias=True, indent=2))
        return 0
    print(made.save().url)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
