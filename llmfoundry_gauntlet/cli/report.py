"""`gauntlet report`, `compare`, `gate` and `show`: write an HTML report, compare and judge runs, print their scores."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llmfoundry_gauntlet.cli.options import CHECK_FAILED, OutputFormat, check_options, problems_of_file, takes
from llmfoundry_gauntlet.errors import ConfigError

OUTPUT, CONTENT, MARGINS = 'Output', 'Content of the page', 'Margins'  # headings of --help
UNCLEAR = 3  # the exit status of a gate that can neither block nor pass a run
Runs = Annotated[
    list[Path],
    typer.Argument(metavar='FOLDER', help='Folders of evaluations, or of several at training checkpoints.'),
]


class ShowForm(StrEnum):
    """Output formats of `gauntlet show`: those of scores, and lm-eval's."""

    TABLE = 'table'
    MARKDOWN = 'markdown'
    CSV = 'csv'
    JSON = 'json'
    LM_EVAL = 'lm-eval'


def report(
    context: typer.Context,
    runs: Runs,
    out: Annotated[
        Path, typer.Option('--out', metavar='FILE', help='File to write the page to.', rich_help_panel=OUTPUT)
    ] = Path('report.html'),
    overwrite: Annotated[bool, typer.Option('--overwrite', help='Replace the file.', rich_help_panel=OUTPUT)] = False,
    title: Annotated[
        str | None,
        typer.Option(metavar='TEXT', help="Title of the page. Default: the model's name.", rich_help_panel=CONTENT),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(metavar='INTEGER', min=0, help='Number of items to show per task.', rich_help_panel=CONTENT),
    ] = 5,
    data_root: Annotated[
        str | None,
        typer.Option(
            '--data-root',
            metavar='FOLDER',
            help='Folder of the data files, for prompts. Default: the recorded one.',
            rich_help_panel=CONTENT,
        ),
    ] = None,
    no_prompts: Annotated[
        bool,
        typer.Option('--no-prompts', help='Read no data files; prompts are not shown.', rich_help_panel=CONTENT),
    ] = False,
) -> None:
    """Write one self-contained page: scores with standard errors, charts, comparisons, samples and cost.

    A folder with evaluations at several training batches is one run, shown over training. Several runs are compared
    with the first.

    Examples:
      gauntlet report runs/demo --out report.html
      gauntlet report runs/baseline runs/candidate --out report.html --title 'Longer warm-up'
    """
    from llmfoundry_gauntlet.results.files import write_lines
    from llmfoundry_gauntlet.results.report.page import make_page

    problems = problems_of_file(out, overwrite=overwrite)
    check_options(context, excludes={'no_prompts': ('data_root',)}, problems=problems)
    page = make_page(runs, title=title, samples=samples, data_root=data_root, with_prompts=not no_prompts)
    write_lines(out, [page])
    typer.echo(f'{out}: {out.stat().st_size / 1e6:.1f} MB, for any browser; it needs no other file')


@takes()
def compare(
    runs: Runs,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar='NAME',
            help='Metric to compare instead of accuracy, such as GoldBitsPerByte.',
            rich_help_panel='Comparison',
        ),
    ] = None,
    allow_missing: Annotated[
        bool,
        typer.Option(
            '--allow-missing', help='Compare tasks over the items that are scored.', rich_help_panel='Comparison'
        ),
    ] = False,
    *,
    form: OutputFormat,
) -> None:
    """Compare runs with the first, item by item, with standard errors; or show the trend of one run over checkpoints.

    When several runs are compared, a folder with several evaluations is represented by its last one.

    Examples:
      gauntlet compare runs/baseline runs/candidate
      # over the checkpoints of a training
      gauntlet compare runs/demo
      gauntlet compare runs/baseline runs/candidate --format markdown
    """
    from llmfoundry_gauntlet.results.files import results_of_checkpoints
    from llmfoundry_gauntlet.results.report import comparison, printing
    from llmfoundry_gauntlet.results.runs import read_run

    if len(runs) == 1:
        evaluations = [read_run(folder) for folder, _ in results_of_checkpoints(runs[0])]
        if len(evaluations) == 1:
            raise ConfigError(f'{runs[0]}: holds one evaluation; name another run to compare it with')
        trends = comparison.trends(evaluations, metric=metric, allow_missing=allow_missing)
        printing.print_trends(trends, metric, form)
        return
    first, *others = [read_run(results_of_checkpoints(folder)[-1][0]) for folder in runs]
    compared = [comparison.compare_runs(first, other, metric=metric, allow_missing=allow_missing) for other in others]
    printing.print_comparisons(comparison.corrected(compared), metric, form)


@takes()
def gate(
    context: typer.Context,
    first: Annotated[
        Path,
        typer.Argument(metavar='A', help='Folder of the run to compare with, or of its evaluations: the last one.'),
    ],
    second: Annotated[Path, typer.Argument(metavar='B', help='Folder of the run that is judged.')],
    margin: Annotated[
        float | None,
        typer.Option(
            metavar='NUMBER',
            help='By how much an average of B may be lower, in units of the score. Default: 0.03.',
            rich_help_panel=MARGINS,
        ),
    ] = None,
    task_margin: Annotated[
        float | None,
        typer.Option(
            metavar='NUMBER',
            help='The same for each task. Default: 0, with which a task can only be worse.',
            rich_help_panel=MARGINS,
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar='NAME',
            help='Row that must be shown not to be lower by more than its margin, beside gauntlet_average; may be '
            'repeated.',
            rich_help_panel=MARGINS,
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar='FILE',
            help='YAML file of margins, relative margins, required and ignored rows.',
            rich_help_panel=MARGINS,
        ),
    ] = None,
    alpha: Annotated[
        float,
        typer.Option(metavar='NUMBER', help='Error rate of the tests.', rich_help_panel='Comparison'),
    ] = 0.05,
    allow_different: Annotated[
        bool,
        typer.Option(
            '--allow-different',
            help='Judge runs of different items, prompts or settings by the items in common.',
            rich_help_panel='Comparison',
        ),
    ] = False,
    *,
    form: OutputFormat,
) -> None:
    """Judge whether run B is worse than run A, and exit with 0 if it is ok, 1 if it is worse, 3 if that is unclear.

    B is worse if any task, category, average or SCORE rate is shown to be lower by more than its margin. It is ok if
    none is, and gauntlet_average is shown not to be. The status is 2 if the runs cannot be compared.

    Examples:
      gauntlet gate runs/baseline runs/candidate
      gauntlet gate runs/baseline runs/candidate --policy gate.yaml --format json > verdict.json
      gauntlet gate runs/float16 runs/int8 --margin 0.02 --task-margin 0.05 --require copa
    """
    from llmfoundry_gauntlet.config.gate import gate_settings
    from llmfoundry_gauntlet.metrics.gate import OK, WORSE
    from llmfoundry_gauntlet.results.files import results_of_checkpoints
    from llmfoundry_gauntlet.results.report.gate import gate_runs
    from llmfoundry_gauntlet.results.report.gate_tables import print_gate
    from llmfoundry_gauntlet.results.runs import read_run

    check_options(context, excludes={'policy': ('margin', 'task_margin')})
    settings = gate_settings(
        policy,
        margin=margin,
        task_margin=task_margin,
        require=require or (),
        alpha=alpha,
        allow_different=allow_different,
    )
    baseline, candidate = [read_run(results_of_checkpoints(folder)[-1][0]) for folder in (first, second)]
    judged = gate_runs(baseline, candidate, settings)
    print_gate(judged, form)
    if judged.verdict == WORSE:
        raise typer.Exit(CHECK_FAILED)
    if judged.verdict != OK:
        raise typer.Exit(UNCLEAR)


def show(
    runs: Runs,
    form: Annotated[
        ShowForm,
        typer.Option(
            '--format', metavar='|'.join(ShowForm), help='Format of the printed scores.', rich_help_panel=OUTPUT
        ),
    ] = ShowForm.TABLE,
) -> None:
    """Print the recorded scores of evaluations side by side; needs no model.

    lm-eval is the results format of lm-evaluation-harness, for the last evaluation of one run.

    Examples:
      gauntlet show runs/demo
      gauntlet show runs/baseline runs/candidate --format markdown
      gauntlet show runs/demo --format csv > scores.csv
    """
    from llmfoundry_gauntlet.results.report.lm_eval import lm_eval_record
    from llmfoundry_gauntlet.results.report.printing import print_scores
    from llmfoundry_gauntlet.results.runs import find_evaluations, find_runs

    if form is not ShowForm.LM_EVAL:
        print_scores(find_evaluations(runs), form)
        return
    first, *others = find_runs(runs)
    if others:
        names = ', '.join(run.name for run in (first, *others))
        raise ConfigError(f'--format lm-eval: takes one run, found {1 + len(others)} ({names}); name one of them')
    typer.echo(json.dumps(lm_eval_record(first.last), indent=2, ensure_ascii=False, allow_nan=False))
