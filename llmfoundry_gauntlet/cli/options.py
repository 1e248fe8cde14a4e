"""Options shared by subcommands of `gauntlet`."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer
from typer import Option
from typer.core import TyperCommand

from llmfoundry_gauntlet.config.resources import PACKAGE
from llmfoundry_gauntlet.errors import ConfigError, GauntletError

OptionNames = tuple[str, ...]
Function = TypeVar('Function', bound=Callable[..., None])
NOTHING: Mapping[str, OptionNames] = {}
DEFAULTS = ('DEFAULT', 'DEFAULT_MAP')  # click's parameter sources for values that the user did not give
SETTINGS = {
    'limit': 'subset_items',
    'shots': 'num_fewshot',
    'fsdp': 'fsdp_config',
    'logger': 'loggers',
}  # options whose settings have other names
LISTS = ('only', 'log')  # options that are lists, separated by commas
# Matches the beginning of a message about a setting or an argument, after the name of a command or a function.
COMMANDS = 'run|export|explain|watch|data check|evaluate|eval_gauntlet'
ABOUT_SETTING = re.compile(rf'(?:(?:{COMMANDS}): )?(\w+)(?:: |(?= is | has | needs ))')

CHECK_FAILED, MISTAKE, BROKEN = 1, 2, 3  # exit statuses
GAUNTLET_TASKS = PACKAGE / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml'
GAUNTLET = GAUNTLET_TASKS.parent.parent / 'gauntlets' / 'eval_gauntlet_v0.1.yaml'
# Options by their purpose: to select items, to run a model over them, and to load it.
SELECTION = (
    'tasks',
    'score',
    'gauntlet',
    'data_root',
    'only',
    'shots',
    'limit',
    'missing',
    'semantics',
    'fewshot',
    'precision_target',
)
INPUTS = (*SELECTION, 'reasoning_markers', 'sandbox', 'log_prompts')
RUNNING = ('max_seq_len', 'tokens_per_batch', 'truncation', 'time_budget')
CHAT = ('apply_chat_template', 'chat_template_kwargs', 'system_prompt', 'fewshot_as_turns')
MODEL = ('tokenizer', 'model_config', 'dtype', 'trust_remote_code', 'device', 'precision', 'fsdp')


class OutputFormat(StrEnum):
    """Output formats of scores."""

    TABLE = 'table'
    MARKDOWN = 'markdown'
    CSV = 'csv'
    JSON = 'json'


class Options:
    """Options of evaluations, with their defaults, in the order in which commands list those that they take."""

    out: Path | None = Option(None, help='Folder for results.json and samples/. Not needed with --dry-run.')
    tasks: Path | None = Option(None, help='YAML file of tasks (top key icl_tasks).')
    score: Path | None = Option(None, help='YAML file of SCORE datasets (top key score).')
    model: str | None = Option(
        None, help='Composer checkpoint (also sharded), or Hugging Face folder or name; local or s3://.'
    )
    outputs: Path | None = Option(None, help='JSON Lines of generations from another engine, to be scored.')
    recorded: Path | None = Option(None, '--from', help='Folder of an earlier run whose metrics to recompute.')
    gauntlet: Path | None = Option(None, help='YAML file of categories and averages (top key eval_gauntlet).')
    data_root: str = Option('eval_data', help='Folder that data file paths are relative to.')
    only: str | None = Option(None, help='Labels of tasks and categories to run, separated by commas. Default: all.')
    shots: int | None = Option(None, help="Number of shots of every task. Default: each task's own.")
    limit: int | None = Option(None, help='Maximum number of items per task; always the same items.')
    missing: str = Option('error', help='error, or skip: leave out tasks without a data file and composites over them.')
    tokenizer: str | None = Option(None, help="Replaces the model's own.")
    model_config: str | None = Option(None, help="Replaces the model's own.")
    revision: str | None = Option(None, help='Branch, tag or commit of a model on the Hugging Face hub.')
    adapter: str | None = Option(
        None, help='Folder or name of a PEFT adapter (LoRA), merged into the weights. Needs peft.'
    )
    dtype: str = Option('float32', help='Type of the weights: float32, bfloat16 or float16 (half the memory).')
    trust_remote_code: bool = Option(
        False, '--trust-remote-code', help="Run Python code from the model's folder. Read it first."
    )
    apply_chat_template: bool = Option(
        False, '--apply-chat-template', help="Send prompts, shots included, in the tokenizer's chat template."
    )
    chat_template_kwargs: str | None = Option(
        None, help='Arguments of the chat template, in JSON: \'{"enable_thinking": false}\'.'
    )
    system_prompt: str | None = Option(None, help='System message before each prompt in the chat template.')
    fewshot_as_turns: bool = Option(
        False, '--fewshot-as-turns', help='In the chat template, shots are messages of the user and the assistant.'
    )
    max_seq_len: int | None = Option(None, help="Maximum prompt length in tokens. Default: the model's.")
    tokens_per_batch: str = Option('auto', help='Tokens per batch, or auto.')
    device: str | None = Option(None, help='cpu or gpu. Default: gpu if available.')
    precision: str | None = Option(None, help='fp32, amp_bf16 or amp_fp16.')
    fsdp: bool = Option(False, '--fsdp', help='Shard the model over the ranks, which torchrun or composer starts.')
    semantics: str = Option('corrected', help="corrected, or reference to reproduce llm-foundry's scores.")
    truncation: str | None = Option(None, help='Truncation of long prompts: drop_shots or reference.')
    fewshot: str = Option('reference', help='reference, or fixed: the same shots for all items of a task.')
    reasoning_markers: list[str] | None = Option(
        None,
        help="Texts around a model's reasoning in place of the known ones: '<plan>...</plan>'; may be repeated; none.",
    )
    sandbox: str = Option('auto', help='For generated programs: auto (full isolation), rlimits or none.')
    time_budget: str | None = Option(None, help="Time limit such as '120s'; runs the items that fit.")
    precision_target: str | None = Option(
        None,
        help="The smallest subset with which an average's error is at most this much above that of all items: '5%'.",
    )
    logger: list[str] | None = Option(None, help='Also log to wandb, mlflow or tensorboard; may be repeated.')
    log: str = Option(
        'accuracy,errors,composites,score',
        help='With --logger: what to log of accuracy, errors, composites, score and metrics.',
    )
    log_prompts: bool = Option(False, '--log-prompts', help='Write prompts and choices into the samples files.')
    allow_missing: bool = Option(
        False, '--allow-missing', help='With --outputs or --from: score tasks on the items that have a generation.'
    )
    overwrite: bool = Option(False, '--overwrite', help='Replace the contents of --out.')
    resume: bool = Option(False, '--resume', help='Resume an interrupted evaluation in --out.')
    repair_journal: bool = Option(False, '--repair-journal', help='With --resume: drop damaged journal lines.')
    dry_run: bool = Option(
        False, '--dry-run', help='Only print items, tokens and estimated time, also of subsets by precision.'
    )
    form: OutputFormat = Option(OutputFormat.TABLE, '--format', help='Output format of the scores.')
    as_json: bool = Option(False, '--json', help='Print JSON instead of text.')


def takes(*names: str) -> Callable[[Function], Function]:
    """Give a command these options, as `**given`, and those that its keyword-only parameters name."""

    def add(command: Function) -> Function:
        own = signature(command, eval_str=True).parameters.values()
        taken = {*names, *(one.name for one in own if one.kind is one.KEYWORD_ONLY)}
        options = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(Options, name), annotation=hint)
            for name, hint in get_type_hints(Options).items()
            if name in taken
        ]
        others = [one for one in own if one.kind is one.POSITIONAL_OR_KEYWORD]
        command.__signature__ = Signature([*others, *options])  # type: ignore[attr-defined]
        return command

    return add


class CliCommand(TyperCommand):
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


def settings_of(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the given values of these options as evaluation settings."""
    settings = {SETTINGS.get(name, name): given[name] for name in names if name in given}
    if str(settings.get('tokens_per_batch')).isdecimal():
        settings['tokens_per_batch'] = int(settings['tokens_per_batch'])
    if 'fsdp_config' in settings:
        settings['fsdp_config'] = {} if settings['fsdp_config'] else None
    if settings.get('chat_template_kwargs') is not None:
        settings['chat_template_kwargs'] = from_json('chat_template_kwargs', settings['chat_template_kwargs'])
    if settings.get('reasoning_markers') == ['none']:
        settings['reasoning_markers'] = []
    elif not settings.get('reasoning_markers', True):
        settings['reasoning_markers'] = None
    for name in LISTS:
        if settings.get(name) is not None:
            settings[name] = [entry.strip() for entry in settings[name].split(',')]
    return settings


def from_json(name: str, text: str) -> Any:
    """Return the value of a setting given in JSON. Raise ConfigError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'{name}: is {text!r}, which is not JSON ({error}); '
            'allowed: a mapping such as \'{"enable_thinking": false}\''
        ) from error


def check_options(
    context: typer.Context,
    *,
    needs: Mapping[str, OptionNames] = NOTHING,
    excludes: Mapping[str, OptionNames] = NOTHING,
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
