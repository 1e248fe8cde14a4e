"""The `gauntlet` console script; its subcommands are in the modules beside this one."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Annotated

import typer

from llmfoundry_gauntlet.cli.data import data_commands
from llmfoundry_gauntlet.cli.explain import explain
from llmfoundry_gauntlet.cli.inspect import ls, validate
from llmfoundry_gauntlet.cli.lm_eval import ALL_TO_LM_EVAL, is_of_lm_eval, lm_eval
from llmfoundry_gauntlet.cli.options import BROKEN, MISTAKE, CliCommand, CliGroup
from llmfoundry_gauntlet.cli.report import compare, gate, report, show
from llmfoundry_gauntlet.cli.run import eval_file, export, run
from llmfoundry_gauntlet.cli.watch import watch
from llmfoundry_gauntlet.config.resources import plugin_of
from llmfoundry_gauntlet.errors import MOST_SHOWN, GauntletError, print_problems
from llmfoundry_gauntlet.stack import VERSION, check_stack

app = typer.Typer(
    name='gauntlet',
    cls=CliGroup,
    help='The Mosaic Eval Gauntlet: evaluate Hugging Face models and Composer checkpoints on tasks from YAML files.',
    epilog='gauntlet COMMAND --help lists the options of a command, with examples.',
    pretty_exceptions_enable=False,
    rich_markup_mode='rich',
)


# The commands by purpose, which are the headings of `gauntlet --help`.
PURPOSES: dict[str, dict[str, Callable[..., None]]] = {
    'Tasks and data': {'ls': ls, 'explain': explain, 'validate': validate},
    'Evaluate': {'run': run, 'watch': watch, 'eval': eval_file, 'export': export, 'lm-eval': lm_eval},
    'Read scores': {'show': show, 'compare': compare, 'gate': gate, 'report': report},
}
GROUPS = {'Tasks and data': {'data': data_commands}}
CONTEXTS = {'lm-eval': ALL_TO_LM_EVAL}

BEGINNING = """\
The Mosaic Eval Gauntlet and SCORE. Getting started:

  gauntlet ls                           list the tasks and the state of their data
  gauntlet explain copa --row 3         show the exact prompt of one item and its scoring
  gauntlet data fetch --to data         download the published data of all tasks
  gauntlet run --model MODEL --data-root data --out runs/model
                                        evaluate a model; --only copa,safety and --subset-items 100 for a first look
  gauntlet report runs/model            write a page with all scores, errors and samples

All commands, each with examples in gauntlet COMMAND --help:

{commands}

In training, call Gauntlet.evaluate in your loop, or give Composer's Trainer the callback EvalGauntlet.
Shell completion: gauntlet --install-completion
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
        typer.echo(BEGINNING.format(commands=commands_by_purpose()), nl=False)


def commands_by_purpose() -> str:
    """Return a line for each purpose with the names of its commands."""
    lines = []
    for purpose, commands in PURPOSES.items():
        names = ', '.join([*commands, *GROUPS.get(purpose, ())])
        lines.append(f'  {purpose + ":":<38}{names}')
    return '\n'.join(lines)


for purpose, commands in PURPOSES.items():
    for name, command in commands.items():
        app.command(name, cls=CliCommand, rich_help_panel=purpose, context_settings=CONTEXTS.get(name))(command)
    for name, group in GROUPS.get(purpose, {}).items():
        app.add_typer(group, name=name, rich_help_panel=purpose)


def main() -> None:
    """Run the console script, printing errors without tracebacks.

    Exit status: 0 success, 1 a check failed, 2 an error the user can fix, 3 an internal error, or of `gauntlet gate` an
    unclear verdict.
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
        plugin = 'lm-eval' if is_of_lm_eval(traceback) else plugin_of(traceback)
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
