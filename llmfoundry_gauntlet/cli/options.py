"""Options shared by subcommands of `gauntlet`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from llmfoundry_gauntlet.config.resources import PACKAGE
from llmfoundry_gauntlet.errors import ConfigError, GauntletError

Names = tuple[str, ...]
NOTHING: Mapping[str, Names] = {}
DEFAULTS = ('DEFAULT', 'DEFAULT_MAP')  # click's parameter sources for values that the user did not give
SETTINGS = {
    'limit': 'subset_items',
    'shots': 'num_fewshot',
    'fsdp': 'fsdp_config',
}  # options whose settings have other names
LISTS = ('only', 'log')  # options that are lists, separated by commas
# Matches the beginning of a message about a setting or an argument, after the name of a command or a function.
COMMANDS = 'run|export|explain|watch|data check|evaluate|eval_gauntlet'
ABOUT_SETTING = re.compile(rf'(?:(?:{COMMANDS}): )?(\w+)(?:: |(?= is | has | needs ))')

Tasks = Annotated[Path | None, typer.Option('--tasks', help='YAML file of tasks (top key icl_tasks).')]
Score = Annotated[Path | None, typer.Option('--score', help='YAML file of SCORE datasets (top key score).')]
Gauntlet = Annotated[
    Path | None, typer.Option('--gauntlet', help='YAML file of categories and averages (top key eval_gauntlet).')
]
Semantics = Annotated[str, typer.Option(help="corrected, or reference to reproduce llm-foundry's scores.")]
Fewshot = Annotated[str, typer.Option(help='reference, or fixed: the same shots for all items of a task.')]
Confinement = Annotated[
    str, typer.Option('--sandbox', help='For generated programs: auto (full isolation), rlimits or none.')
]
DataRoot = Annotated[str, typer.Option('--data-root', help='Folder that data file paths are relative to.')]
Out = Annotated[
    Path | None, typer.Option('--out', help='Folder for results.json and samples/. Not needed with --dry-run.')
]
Model = Annotated[
    str | None, typer.Option(help='Composer checkpoint (also sharded), or Hugging Face folder or name; local or s3://.')
]
Outputs = Annotated[Path | None, typer.Option(help='JSON Lines of generations from another engine, to be scored.')]
OfModel = Annotated[str | None, typer.Option(help="Replaces the model's own.")]
Revision = Annotated[str | None, typer.Option(help='Branch, tag or commit of a model on the Hugging Face hub.')]
Adapter = Annotated[
    str | None, typer.Option(help='Folder or name of a PEFT adapter (LoRA), merged into the weights. Needs peft.')
]
DType = Annotated[
    str, typer.Option('--dtype', help='Type of the weights: float32, bfloat16 or float16 (half the memory).')
]
Trust = Annotated[
    bool, typer.Option('--trust-remote-code', help="Run Python code from the model's folder. Read it first.")
]
ChatTemplate = Annotated[
    bool,
    typer.Option('--apply-chat-template', help="Send prompts, shots included, in the tokenizer's chat template."),
]
Loggers = Annotated[
    list[str] | None, typer.Option('--logger', help='Also log to wandb, mlflow or tensorboard; may be repeated.')
]
Log = Annotated[
    str, typer.Option('--log', help='With --logger: what to log of accuracy, errors, composites, score and metrics.')
]
LogPrompts = Annotated[bool, typer.Option('--log-prompts', help='Write prompts and choices into the samples files.')]
Length = Annotated[int | None, typer.Option(help="Maximum prompt length in tokens. Default: the model's.")]
Tokens = Annotated[str, typer.Option(help='Tokens per batch, or auto.')]
Device = Annotated[str | None, typer.Option(help='cpu or gpu. Default: gpu if available.')]
Sharded = Annotated[bool, typer.Option('--fsdp', help='Shard the model over the GPUs of the composer launcher.')]
Precision = Annotated[str | None, typer.Option(help='fp32, amp_bf16 or amp_fp16.')]
Truncation = Annotated[str | None, typer.Option(help='Truncation of long prompts: drop_shots or reference.')]
Recorded = Annotated[Path | None, typer.Option('--from', help='Folder of an earlier run whose metrics to recompute.')]
Only = Annotated[
    str | None, typer.Option('--only', help='Labels of tasks and categories to run, separated by commas. Default: all.')
]
Shots = Annotated[int | None, typer.Option('--shots', help="Number of shots of every task. Default: each task's own.")]
Missing = Annotated[
    str,
    typer.Option('--missing', help='error, or skip: leave out tasks without a data file and composites over them.'),
]
Limit = Annotated[int | None, typer.Option('--limit', help='Maximum number of items per task; always the same items.')]
Budget = Annotated[
    str | None, typer.Option('--time-budget', help="Time limit such as '120s'; runs the items that fit.")
]
Target = Annotated[
    str | None,
    typer.Option(
        '--precision-target',
        help="The smallest subset with which an average's error is at most this much above that of all items: '5%'.",
    ),
]
Partial = Annotated[
    bool,
    typer.Option('--allow-missing', help='With --outputs or --from: score tasks on the items that have a generation.'),
]
Overwrite = Annotated[bool, typer.Option('--overwrite', help='Replace the contents of --out.')]
Resume = Annotated[bool, typer.Option('--resume', help='Resume an interrupted evaluation in --out.')]
Repair = Annotated[bool, typer.Option('--repair-journal', help='With --resume: drop damaged journal lines.')]
AsJson = Annotated[bool, typer.Option('--json', help='Print JSON instead of text.')]

CHECK_FAILED, MISTAKE, BROKEN = 1, 2, 3  # exit statuses
GAUNTLET_TASKS = PACKAGE / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml'
GAUNTLET = GAUNTLET_TASKS.parent.parent / 'gauntlets' / 'eval_gauntlet_v0.1.yaml'


class Form(StrEnum):
    """Output formats of scores."""

    TABLE = 'table'
    MARKDOWN = 'markdown'
    CSV = 'csv'
    JSON = 'json'


Format = Annotated[Form, typer.Option('--format', help='Output format of the scores.')]
DryRun = Annotated[
    bool,
    typer.Option('--dry-run', help='Only print items, tokens and estimated time, also of subsets by precision.'),
]


class Command(TyperCommand):
    """A command whose error messages name options (`--limit`) instead of settings (`subset_items`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raise ConfigError with every required one that is missing."""
        try:
            return super().parse_args(ctx, list(args))
        except typer.BadParameter as error:
            if type(error).__name__ != 'MissingParameter':  # of click, or of typer's copy of it
                raise
            with self.make_context(ctx.info_name, list(args), ctx.parent, resilient_parsing=True) as found:
                missing = [one for one in self.params if one.required and found.params[one.name] in (None, ())]
            names = [
                one.opts[0] if one.param_type_name == 'option' else one.metavar or one.name.upper() for one in missing
            ]
            raise ConfigError([f'{name}: is missing; see {ctx.command_path} --help' for name in names]) from error

    def invoke(self, ctx: Any) -> Any:
        """Run the command, renaming settings in errors."""
        flags = flags_of(self.params)
        flags.update({SETTINGS[name]: flag for name, flag in flags.items() if name in SETTINGS})
        try:
            return super().invoke(ctx)
        except GauntletError as error:
            raise type(error)([with_flag(problem, flags) for problem in error.problems]) from error


def with_flag(problem: str, flags: Mapping[str, str]) -> str:
    """Replace the setting at the beginning of a problem, if any, by its option."""
    about = ABOUT_SETTING.match(problem)
    if about is None or about[1] not in flags:
        return problem
    return f'{flags[about[1]]}: {problem[about.end() :].lstrip()}'


def flags_of(parameters: Iterable[Any]) -> dict[str, str]:
    """Return a command's options as typed on the command line, by parameter name."""
    return {parameter.name: parameter.opts[0] for parameter in parameters}


def settings_of(context: typer.Context, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of these parameters as evaluation settings."""
    settings = {SETTINGS.get(name, name): context.params[name] for name in names}
    if str(settings.get('tokens_per_batch')).isdecimal():
        settings['tokens_per_batch'] = int(settings['tokens_per_batch'])
    if 'fsdp_config' in settings:
        settings['fsdp_config'] = {} if settings['fsdp_config'] else None
    for name in LISTS:
        if settings.get(name) is not None:
            settings[name] = [entry.strip() for entry in settings[name].split(',')]
    return settings


def check_options(
    context: typer.Context,
    *,
    needs: Mapping[str, Names] = NOTHING,
    excludes: Mapping[str, Names] = NOTHING,
    problems: Sequence[str] = (),
) -> None:
    """Raise one ConfigError with the `problems` and every given option that would have no effect.

    `needs` maps an option to those of which at least one must also be given; `excludes` maps an option to those that
    have no effect with it. An option that the user sets to its default value counts as given.
    """
    flags = flags_of(context.command.params)
    sources = {name: context.get_parameter_source(name) for name in flags}
    given = [name for name, source in sources.items() if source is not None and source.name not in DEFAULTS]
    problems = list(problems)
    for name in given:
        if beside := [flags[other] for other in given if name in excludes.get(other, ())]:
            problems.append(f'{flags[name]}: has no effect with {" and ".join(beside)}; leave it out')
        elif name in needs and not {*needs[name]} & {*given}:
            others = ' or '.join(flags[other] for other in needs[name])
            problems.append(f'{flags[name]}: has no effect without {others}; leave it out')
    if problems:
        raise ConfigError(problems)


def start_logging(form: str = '%(message)s') -> None:
    """Print this package's log messages on rank 0, and warnings on every rank."""
    logging.basicConfig(format=form, datefmt='%Y-%m-%d %H:%M:%S')
    if os.environ.get('RANK', '0') == '0':
        logging.getLogger('llmfoundry_gauntlet').setLevel(logging.INFO)


def print_warnings(warnings: Iterable[str], *, err: bool = False) -> None:
    """Print a line for each warning, on standard error if `err`."""
    for warning in warnings:
        typer.echo(f'warning: {warning}', err=err)
