"""`gauntlet report`: its options, and where the page goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_gauntlet.cli.options import check_options
from llmfoundry_gauntlet.errors import RecordError


def report(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help='Folders of evaluations, or of several at training checkpoints.')],
    out: Annotated[Path, typer.Option('--out', help='The file of the page.')] = Path('report.html'),
    title: Annotated[str | None, typer.Option(help="Of the page. Default: the model's name.")] = None,
    samples: Annotated[int, typer.Option(min=0, help='How many items of each task are shown.')] = 5,
    data_root: Annotated[
        str | None,
        typer.Option('--data-root', help='Folder of the data files, for prompts. Default: the recorded one.'),
    ] = None,
    no_prompts: Annotated[
        bool, typer.Option('--no-prompts', help='Read no data files; prompts are not shown.')
    ] = False,
    overwrite: Annotated[bool, typer.Option('--overwrite', help='Replace the file.')] = False,
) -> None:
    """Write one self-contained page: scores with errors, charts, comparisons, samples and cost.

    Evaluations beside each other at several training batches are one run; it is shown over training. Several runs are
    compared with the first.

    gauntlet report runs/demo --out report.html

    gauntlet report runs/baseline runs/candidate --out report.html --title 'Longer warm-up'
    """
    from llmfoundry_gauntlet.results.report.page import make_page
    from llmfoundry_gauntlet.results.writing import write_lines

    check_options(context, excludes={'no_prompts': ('data_root',)})
    if out.is_dir() or (out.exists() and not overwrite):
        raise RecordError(f'{out}: is there already; give another file, or --overwrite to replace it')
    page = make_page(runs, title=title, samples=samples, data_root=data_root, with_prompts=not no_prompts)
    write_lines(out, [page])
    typer.echo(f'{out}: {out.stat().st_size / 1e6:.1f} MB')
