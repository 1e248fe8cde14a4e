"""`gauntlet compare`: the differences of runs from the first, or the trends of one over its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_gauntlet.cli.options import Form, Format
from llmfoundry_gauntlet.errors import ConfigError


def compare(
    runs: Annotated[list[Path], typer.Argument(help='Folders of evaluations, or of several at training checkpoints.')],
    metric: Annotated[str | None, typer.Option(help='To compare in place of the accuracy, as GoldBitsPerByte.')] = None,
    allow_missing: Annotated[
        bool, typer.Option('--allow-missing', help='Compare tasks over the items that are scored.')
    ] = False,
    form: Format = Form.TABLE,
) -> None:
    """Compare runs with the first, item by item, with standard errors; or show the trend of one run over checkpoints.

    Of a folder with several evaluations, beside others, the last one is taken.

    gauntlet compare runs/baseline runs/candidate

    gauntlet compare runs/demo

    gauntlet compare runs/baseline runs/candidate --format markdown
    """
    from llmfoundry_gauntlet.results.files import find_results
    from llmfoundry_gauntlet.results.report import comparison, printing
    from llmfoundry_gauntlet.results.runs import read_run, read_runs

    if len(runs) == 1:
        found = read_runs(runs[0])
        if len(found) == 1:
            raise ConfigError(f'{runs[0]}: holds one evaluation; name another run to compare it with')
        printing.print_trends(comparison.trends(found, metric=metric, allow_missing=allow_missing), form)
        return
    first, *others = [read_run(find_results(folder)[-1][0]) for folder in runs]
    compared = [comparison.compare(first, other, metric=metric, allow_missing=allow_missing) for other in others]
    printing.print_comparisons(compared, metric, form)
