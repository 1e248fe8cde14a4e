"""`gauntlet show`: the scores of recorded evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_gauntlet.cli.options import Form, Format


def show(
    runs: Annotated[list[Path], typer.Argument(help='Folders of evaluations, or of several at training checkpoints.')],
    form: Format = Form.TABLE,
) -> None:
    """Prints the scores of evaluations that were recorded, beside each other; needs no model.

    gauntlet show runs/demo

    gauntlet show runs/baseline runs/candidate --format markdown

    gauntlet show runs/demo --format csv > scores.csv
    """
    from llmfoundry_gauntlet.results.report.printing import print_scores
    from llmfoundry_gauntlet.results.report.scores import find_evaluations

    print_scores(find_evaluations(runs), form)
