"""The `gauntlet` console script; its subcommands are in the modules beside this one."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from types import TracebackType
from typing import Annotated

import typer

from llmfoundry_gauntlet.cli.data import data_commands
from llmfoundry_gauntlet.cli.explain import explain
from llmfoundry_gauntlet.cli.inspect import ls, validate
from llmfoundry_gauntlet.cli.options import BROKEN, MISTAKE, CliCommand
from llmfoundry_gauntlet.cli.report import compare, report, show
from llmfoundry_gauntlet.cli.run import eval_file, export, run
from llmfoundry_gauntlet.cli.watch import watch
from llmfoundry_gauntlet.config.resources import plugin_of
from llmfoundry_gauntlet.errors import MOST_SHOWN, GauntletError, print_problems
from llmfoundry_gauntlet.stack import VERSION, check_stack

app = typer.Typer(
    name='gauntlet',
    help='The Mosaic Eval Gauntlet: evaluate Hugging Face models and Composer checkpoints on tasks from YAML files.',
    pretty_exceptions_enable=False,
    rich_markup_mode='rich',
)


BEGINNING = """\
The Mosaic Eval Gauntlet and SCORE. Getting started:

  gauntlet ls                           list the tasks and the state of their data
  gauntlet explain copa --row 3         show the exact prompt of one item and its scoring
  gauntlet data fetch --to data         download the published data of all tasks
  gauntlet run --model MODEL --data-root data --out runs/model
                                        evaluate a model; --only copa,safety and --subset-items 100 for a first look
  gauntlet report runs/model            write a page with all scores, errors and samples

In training, call Gauntlet.evaluate in your loop, or give Composer's Trainer the callback EvalGauntlet.
All commands: gauntlet --help. Shell completion: gauntlet --install-completion
"""


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option('--version', help='Print the version.')] = False,
    traceback: Annotated[bool, typer.Option('--traceback', help='Print the traceback of an error.')] = False,
) -> None:
    """Define the options shared by all subcommands."""
    if version:
        typer.echo(VERSION)
    elif context.invoked_subcommand is None:
        typer.echo(BEGINNING, nl=False)


for command in (ls, explain, validate, run, watch, show, compare, report, export):
    app.command(cls=CliCommand)(command)
app.command('eval', cls=CliCommand)(eval_file)
app.add_typer(data_commands, name='data')


def main() -> None:
    """Run the console script, printing errors without tracebacks.

    Exit status: 0 success, 1 a check failed, 2 an error the user can fix, 3 an internal error.
    """
    with contextlib.ExitStack() as stack:
        if '--traceback' not in sys.argv:
            stack.push(exit_without_traceback)
        check_stack()
        app([word for word in sys.argv[1:] if word != '--traceback'])


def exit_without_traceback(
    kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
) -> None:
    """Print the error that ended the program, if any, and exit with its status."""
    if isinstance(error, GauntletError):
        if is_first_to_say(str(error)):
            print_problems(error)
        raise SystemExit(MISTAKE)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        print(f'error: {str(error.filename)[:MOST_SHOWN]}...: {error.strerror}; give another path', file=sys.stderr)
        raise SystemExit(MISTAKE)
    if kind is not None and not issubclass(kind, (SystemExit, KeyboardInterrupt)):
        text = ' '.join(f'{kind.__name__}: {error}'.split())
        plugin = plugin_of(traceback)
        where = 'internal error' if plugin is None else f'{plugin} failed'
        if is_first_to_say(text):
            print(f'error: {where}: {text}; rerun with --traceback to see where', file=sys.stderr)
        raise SystemExit(BROKEN if plugin is None else MISTAKE)


def is_first_to_say(text: str) -> bool:
    """Return whether this rank is to print an error, which the other ranks of a launcher may have too."""
    if int(os.environ.get('WORLD_SIZE', '1')) == 1:
        return True  # without importing torch
    from llmfoundry_gauntlet.runtime import distributed

    return distributed.is_first_to_say(text)
