"""`gauntlet validate`: check YAML files and their data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmfoundry_gauntlet.cli.options import CHECK_FAILED, DataRoot, Gauntlet, Score, Tasks, check_options
from llmfoundry_gauntlet.errors import ConfigError, GauntletError, print_problems

if TYPE_CHECKING:
    from llmfoundry_gauntlet.evaluation.suite import Suite


def validate(
    context: typer.Context,
    tasks: Tasks = None,
    gauntlet: Gauntlet = None,
    score: Score = None,
    data_root: DataRoot = 'eval_data',
    no_data: Annotated[bool, typer.Option('--no-data', help='Check only the YAML files.')] = False,
) -> None:
    """Check YAML files and the data of their tasks; list all errors at once. Exit status 1 if there are any.

    gauntlet validate --tasks yamls/tasks/gauntlet_v0.1.yaml --gauntlet yamls/gauntlets/eval_gauntlet_v0.1.yaml
    """
    if tasks is None and gauntlet is None and score is None:
        raise ConfigError('nothing to check: give at least one of --tasks, --gauntlet and --score')
    check_options(context, needs={'data_root': ('tasks', 'score')}, excludes={'no_data': ('data_root',)})
    try:
        check(tasks, gauntlet, score, None if no_data else data_root)
    except GauntletError as error:
        print_problems(error)
        raise typer.Exit(CHECK_FAILED) from error
    typer.echo('no errors')


def check(tasks: Path | None, gauntlet: Path | None, score: Path | None, data_root: str | None) -> None:
    """Print what was found and all warnings; data is read if `data_root` is given. Raises ConfigError, DataError."""
    from llmfoundry_gauntlet.evaluation.suite import load_suite

    suite = load_suite(tasks, gauntlet, score, is_partial=tasks is None)
    for warning in suite.warnings:
        typer.echo(f'warning: {warning}')
    num_score = sum(not task.metrics() for task in suite.tasks)
    if tasks is not None:
        typer.echo(f'{tasks}: {len(suite.tasks) - num_score} tasks')
    if score is not None:
        typer.echo(f'{score}: {num_score} SCORE datasets')
    if suite.gauntlet is not None:
        typer.echo(f'{gauntlet}: {len(suite.gauntlet.categories)} categories')
    complete = replace(suite, tasks=tuple(task for task in suite.tasks if task.has_rows))
    if complete.tasks and data_root is not None:
        check_data(complete, data_root)


def check_data(suite: Suite, data_root: str) -> None:
    """Print the number of rows and all warnings. Raises DataError."""
    from llmfoundry_gauntlet.evaluation.inputs import read_data

    rows = read_data(suite, data_root)
    for warning in rows.warnings:
        typer.echo(f'warning: {warning}')
    examples = rows.examples
    typer.echo(f'{data_root}: {sum(map(len, examples.values()))} rows of {len(examples)} tasks')
