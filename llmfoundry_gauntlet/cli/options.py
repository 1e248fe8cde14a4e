"""Options shared by subcommands of `gauntlet`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from inspect import Parameter, Signature, signature
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from llmfoundry_gauntlet.config.resources import PACKAGE
from llmfoundry_gauntlet.errors import Collected, ConfigError, closest, named, named_as_options, suggestion

OptionNames = tuple[str, ...]
Function = TypeVar('Function', bound=Callable[..., None])
NOTHING: Mapping[str, OptionNames] = {}
DEFAULTS = ('DEFAULT', 'DEFAULT_MAP')  # click's parameter sources for values that the user did not give
IN_JSON = {  # settings that are mappings, and what each may be
    'chat_template_kwargs': '{"enable_thinking": false}',
    'fsdp_config': '{"sharding_strategy": "FULL_SHARD"}, or {} for the defaults',
}
TRUTHS = ('true', 'false', 'yes', 'no', 'on', 'off')  # which some give to a flag
LISTS = ('only', 'loggers', 'log')  # settings that are lists, separated by commas

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
    'num_fewshot',
    'subset_items',
    'missing',
    'semantics',
    'fewshot',
    'precision_target',
)
INPUTS = (*SELECTION, 'reasoning_markers', 'sandbox', 'log_prompts')
RUNNING = ('max_seq_len', 'tokens_per_batch', 'truncation', 'time_budget')
CHAT = ('apply_chat_template', 'chat_template_kwargs', 'system_prompt', 'fewshot_as_turns')
MODEL = ('tokenizer', 'model_config', 'dtype', 'device_map', 'trust_remote_code', 'device', 'precision', 'fsdp_config')


# An option under each heading of --help; the headings stand in the order in which a command takes its options.
of_input = partial(Option, rich_help_panel='What to evaluate')
of_tasks = partial(Option, rich_help_panel='Tasks')
of_subset = partial(Option, rich_help_panel='Subset and budget')
of_scoring = partial(Option, rich_help_panel='Prompts and scoring')
of_chat = partial(Option, rich_help_panel='Chat template')
of_model = partial(Option, rich_help_panel='Model')
of_hardware = partial(Option, rich_help_panel='Hardware')
of_output = partial(Option, rich_help_panel='Output')
of_resume = partial(Option, rich_help_panel='Resume')
HELP_PANEL = 'Help'
PATHS = ('FILE', 'FOLDER')  # what options with a path take
AS_TYPED = 'llmfoundry_gauntlet.as_typed'  # the key of a context's names of parameters as the user typed them
# Of click, or of the copy of it in newer versions of typer, which exports only this error below it.
UsageError: Any = typer.BadParameter.__base__
EXAMPLES = '\n\nExamples:\n'  # the line of a command's docstring below which its examples are


class OutputFormat(StrEnum):
    """Output formats of scores."""

    TABLE = 'table'
    MARKDOWN = 'markdown'
    CSV = 'csv'
    JSON = 'json'


class Options:
    """Options of evaluations, with their defaults, in the order in which the panels of --help list them."""

    # Models and answers
    model: str | None = of_input(
        None,
        metavar='MODEL',
        help='Composer checkpoint (also sharded), or Hugging Face folder or name; local or s3://.',
    )
    outputs: Path | None = of_input(
        None, metavar='FILE', help='JSON Lines of generations from another engine, to be scored.'
    )
    recorded: Path | None = of_input(
        None, '--from', metavar='FOLDER', help='Folder of an earlier run whose metrics to recompute.'
    )

    # Tasks
    tasks: Path | None = of_tasks(None, metavar='FILE', help='YAML file of tasks (top key icl_tasks).')
    score: Path | None = of_tasks(None, metavar='FILE', help='YAML file of SCORE datasets (top key score).')
    gauntlet: Path | None = of_tasks(
        None, metavar='FILE', help='YAML file of categories and averages (top key eval_gauntlet).'
    )
    data_root: str = of_tasks('eval_data', metavar='FOLDER', help='Folder that data file paths are relative to.')
    only: str | None = of_tasks(
        None, metavar='NAMES', help='Labels of tasks and categories to run, separated by commas. Default: all.'
    )
    num_fewshot: int | None = of_tasks(
        None, metavar='INTEGER', help="Number of shots of every task. Default: each task's own."
    )
    missing: str = of_tasks(
        'error',
        metavar='error|skip',
        help='If a data file is missing: stop, or leave out its tasks and the composites over them.',
    )

    # Subset and budget
    subset_items: int | None = of_subset(
        None,
        '--subset-items',
        '--limit',
        metavar='INTEGER',
        help='Maximum number of items per task; always the same items.',
    )
    time_budget: str | None = of_subset(
        None, metavar='DURATION', help='Time limit such as 120s, 10m or 1h; runs the items that fit.'
    )
    precision_target: str | None = of_subset(
        None,
        metavar='PERCENT',
        help='The smallest subset with which the error of an average is at most this much above that of all items: '
        "5%, or '5% of core_average'.",
    )
    dry_run: bool = of_subset(
        False, '--dry-run', help='Only print items, tokens and estimated time, also of subsets by precision.'
    )

    # Prompts and scoring
    semantics: str = of_scoring(
        'corrected', metavar='corrected|reference', help="reference reproduces llm-foundry's scores, with its bugs."
    )
    fewshot: str = of_scoring(
        'reference',
        metavar='reference|fixed',
        help='Shots drawn for each item as in llm-foundry, or the same for all items of a task.',
    )
    max_seq_len: int | None = of_scoring(
        None, metavar='INTEGER', help="Maximum prompt length in tokens. Default: the model's."
    )
    truncation: str | None = of_scoring(
        None,
        metavar='drop_shots|reference',
        help='Shorten long prompts by whole shots, or as llm-foundry does. Default: as --semantics says.',
    )
    reasoning_markers: list[str] | None = of_scoring(
        None,
        metavar='START...END',
        help="Texts around a model's reasoning in place of the known ones: '<plan>...</plan>'; may be repeated. "
        'none: there is no reasoning.',
    )
    sandbox: str = of_scoring(
        'auto',
        metavar='auto|rlimits|none',
        help='Isolation of generated programs: complete, limits of resources alone, or none.',
    )
    allow_missing: bool = of_scoring(
        False, '--allow-missing', help='With --outputs or --from: score tasks on the items that have a generation.'
    )

    # Chat template
    apply_chat_template: bool = of_chat(
        False, '--apply-chat-template', help="Send prompts, shots included, in the tokenizer's chat template."
    )
    chat_template_kwargs: str | None = of_chat(
        None, metavar='JSON', help='Arguments of the chat template: \'{"enable_thinking": false}\'.'
    )
    system_prompt: str | None = of_chat(
        None, metavar='TEXT', help='System message before each prompt in the chat template.'
    )
    fewshot_as_turns: bool = of_chat(
        False, '--fewshot-as-turns', help='In the chat template, shots are messages of the user and the assistant.'
    )

    # Model
    tokenizer: str | None = of_model(None, metavar='FOLDER', help="Folder or name. Replaces the model's own.")
    model_config: str | None = of_model(None, metavar='FOLDER', help="Folder or name. Replaces the model's own.")
    revision: str | None = of_model(
        None, metavar='NAME', help='Branch, tag or commit of a model on the Hugging Face hub.'
    )
    adapter: str | None = of_model(
        None,
        metavar='FOLDER',
        help='Folder or name of a PEFT adapter (LoRA), merged into the weights. Needs peft.',
    )
    dtype: str = of_model(
        'float32',
        metavar='TYPE',
        help='Type of the weights: float32, or bfloat16 or float16, which take half the memory.',
    )
    trust_remote_code: bool = of_model(
        False, '--trust-remote-code', help="Run Python code from the model's folder. Read it first."
    )

    # Hardware
    device: str | None = of_hardware(None, metavar='cpu|gpu', help='Default: gpu if there is one.')
    precision: str | None = of_hardware(
        None,
        metavar='fp32|amp_bf16|amp_fp16',
        help='Type of the computation. Default: fp32 on a CPU, amp_bf16 on a GPU.',
    )
    tokens_per_batch: str = of_hardware(
        'auto', metavar='auto|INTEGER', help='Tokens per batch; auto fits them into the memory.'
    )
    device_map: str | None = of_hardware(
        None,
        metavar='auto',
        help='Place the layers of a model that is larger than one GPU on several. Needs accelerate.',
    )
    fsdp_config: str | None = of_hardware(
        None,
        metavar='JSON',
        help='Shard the model over the ranks, which torchrun or composer starts: keys of FSDPConfig, or {}.',
    )

    # Output
    out: Path | None = of_output(
        None, metavar='FOLDER', help='Folder for results.json and samples/. Not needed with --dry-run.'
    )
    overwrite: bool = of_output(False, '--overwrite', help='Replace the contents of --out.')
    log_prompts: bool = of_output(False, '--log-prompts', help='Write prompts and choices into the samples files.')
    form: OutputFormat = of_output(
        OutputFormat.TABLE, '--format', metavar='|'.join(OutputFormat), help='Format of the printed scores.'
    )
    as_json: bool = of_output(False, '--json', help='Print JSON instead of text.')
    loggers: str | None = of_output(
        None, metavar='NAMES', help='Also log to these of wandb, mlflow and tensorboard, separated by commas.'
    )
    log: str = of_output(
        'accuracy,errors,composites,score',
        metavar='NAMES',
        show_default=False,
        help='With --loggers: what to log of accuracy, errors, composites, score and metrics (not by default).',
    )

    # Resume
    resume: bool = of_resume(False, '--resume', help='Resume an interrupted evaluation in --out.')
    repair_journal: bool = of_resume(False, '--repair-journal', help='With --resume: drop damaged journal lines.')


def takes(*names: str) -> Callable[[Function], Function]:
    """Give a command these options, as `**given`, and those that its keyword-only parameters name."""

    def add(command: Function) -> Function:
        parameters = signature(command, eval_str=True).parameters.values()
        of_command = [parameter for parameter in parameters if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD]
        named = [parameter.name for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY]
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(Options, name), annotation=hint)
            for name, hint in get_type_hints(Options).items()
            if name in names or name in named
        ]
        command.__signature__ = Signature([*of_command, *shared])  # type: ignore[attr-defined]
        return command

    return add


class CliCommand(TyperCommand):
    """A command with examples below its help, which names every missing argument and option at once.

    The examples are the end of the docstring, below the line 'Examples:'.
    """

    def __init__(self, *arguments: Any, help: str, **settings: Any) -> None:
        text, _, self.examples = help.partition(EXAMPLES)
        paragraphs = [' '.join(paragraph.split()) for paragraph in text.split('\n\n')]
        super().__init__(*arguments, help='\n\n'.join(paragraphs), **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, as --help shows them."""
        return without_type_of_flags(super().get_params(ctx))

    def get_help_option(self, ctx: Any) -> Any:
        """Return --help, under the last heading."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel = HELP_PANEL
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, then the examples as they are: folded to the width of a terminal, none could be copied."""
        super().format_help(ctx, formatter)
        formatter.write(f' Examples:\n{self.examples}\n')

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raise ConfigError with what is wrong, and with every required one that is missing."""
        ctx.meta[AS_TYPED] = names_as_typed(self.params, args)
        problems = empty_paths(self.params, args)
        if problems:
            raise ConfigError(problems)
        try:
            return super().parse_args(ctx, list(args))
        except UsageError as error:
            if type(error).__name__ == 'MissingParameter':
                problems = self.all_missing(ctx, args)
            else:
                problems = [problem_of_usage(error, self.params, args)]
            see = f'see {ctx.command_path} --help'
            raise ConfigError([f'{problem}; {see}' for problem in problems]) from error

    def all_missing(self, ctx: Any, args: list[str]) -> list[str]:
        """Return a problem for each required argument and option that is missing, where click stops at the first."""
        with self.make_context(ctx.info_name, list(args), ctx.parent, resilient_parsing=True) as parsed:
            missing = [
                parameter
                for parameter in self.params
                if parameter.required and parsed.params[parameter.name] in (None, ())
            ]
        return [f'{ctx.meta[AS_TYPED][parameter.name]}: is missing' for parameter in missing]

    def invoke(self, ctx: Any) -> Any:
        """Run the command, in whose messages settings have the names of its options."""
        with named_as_options(flags_of(ctx)):
            return super().invoke(ctx)


class CliGroup(TyperGroup):
    """Commands, whose unknown names and options are errors in one line."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, as --help shows them."""
        return without_type_of_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command. Raise ConfigError with what is wrong."""
        try:
            return super().parse_args(ctx, list(args))
        except UsageError as error:
            if type(error).__name__ == 'NoArgsIsHelpError':  # of newer versions of click and typer: the help itself
                raise
            problem = problem_of_usage(error, self.params, args)
            raise ConfigError(f'{problem}; see {ctx.command_path} --help') from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is named. Raise ConfigError if there is none."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith('-'):
            raise ConfigError(f'{ctx.command_path} {name}: no such command{suggestion(name, self.list_commands(ctx))}')
        return super().resolve_command(ctx, args)


def without_type_of_flags(parameters: list[Any]) -> list[Any]:
    """Return the parameters, of which flags show no type in --help, as they take no value."""
    for parameter in parameters:
        if getattr(parameter, 'is_flag', False):
            parameter.metavar = ''
    return parameters


def names_as_typed(parameters: Iterable[Any], args: Sequence[str]) -> dict[str, str]:
    """Return the name of each argument as in the help text, and of each option as the user has typed it."""
    typed = {word.partition('=')[0] for word in args}
    names = {}
    for parameter in parameters:
        if parameter.param_type_name == 'option':
            names[parameter.name] = next((name for name in parameter.opts if name in typed), parameter.opts[0])
        else:
            names[parameter.name] = parameter.metavar or parameter.name.upper()
    return names


def given_values(args: Sequence[str]) -> list[tuple[str, str]]:
    """Return each word before another as if it were an option with its value, and those with '='."""
    with_sign = [word.partition('=') for word in args if word.startswith('--')]
    return [*pairwise(args), *((name, value) for name, sign, value in with_sign if sign)]


def empty_paths(parameters: Iterable[Any], args: Sequence[str]) -> list[str]:
    """Return a problem for each option whose path is '', as of a shell's unset variable: it would be the folder '.'."""
    of_paths = [name for parameter in parameters if parameter.metavar in PATHS for name in parameter.opts]
    empty = [name for name, value in given_values(args) if name in of_paths and not value]
    return [f"{name}: is ''; allowed: a path" for name in empty]


def unknown_option(name: str, parameters: Iterable[Any]) -> str:
    """Return the problem of an option that does not exist, with the one that was probably meant."""
    names = [option for parameter in parameters if parameter.param_type_name == 'option' for option in parameter.opts]
    close = closest(name, names)
    return f'{name}: no such option' + ('' if close is None else f", did you mean '{close}'?")


def problem_of_usage(error: Any, parameters: Sequence[Any], args: Sequence[str]) -> str:
    """Return what click or typer says is wrong in the words of this package: the name as typed, value, what is allowed.

    Values are numbers or words; all others are texts and paths, which are checked where they are used.
    """
    if type(error).__name__ == 'NoSuchOption':
        return unknown_option(error.option_name, parameters)
    parameter = getattr(error, 'param', None)
    if parameter is None:  # an option without a value, a flag with one, or a word too many
        flags = [name for option in parameters if getattr(option, 'is_flag', False) for name in option.opts]
        for name, value in given_values(args):
            if name in flags and value.lower() in TRUTHS:
                return f'{name}: takes no value, found {value!r}; give or leave out the option alone'
        message = ' '.join(error.format_message().split()).rstrip('.')
        return f'{message[:1].lower()}{message[1:]}'
    name = names_as_typed(parameters, args)[parameter.name]
    value = next((value for option, value in given_values(args) if option == name), '')
    of_type = getattr(parameter, 'type', None)  # of click, which typer uses up to version 0.2x
    least = getattr(parameter, 'min', getattr(of_type, 'min', None))
    allowed = 'a whole number' if least is None else f'a whole number, {least} or more'
    if parameter.metavar == 'NUMBER':
        allowed = 'a number'
    if '|' in parameter.metavar:
        allowed = ', '.join(parameter.metavar.split('|'))
    return f'{name}: is {value!r}; allowed: {allowed}'


def flags_of(context: Any) -> Mapping[str, str]:
    """Return a command's options as typed on the command line, by parameter name."""
    names: Mapping[str, str] = context.meta[AS_TYPED]
    return names


def settings_of(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the given values of these options as evaluation settings, which have the same names.

    Raise ConfigError with every value that should be JSON and is not.
    """
    settings = {name: given[name] for name in names if name in given}
    if str(settings.get('tokens_per_batch')).isdecimal():
        settings['tokens_per_batch'] = int(settings['tokens_per_batch'])
    if 'reasoning_markers' in settings:
        settings['reasoning_markers'] = markers_of(settings['reasoning_markers'])
    for name in LISTS:
        if settings.get(name) is not None:
            settings[name] = [entry.strip() for entry in settings[name].split(',')]
    if 'loggers' in settings:
        settings['loggers'] = dict.fromkeys(settings['loggers'] or ())  # without arguments
    collected = Collected()
    for name in IN_JSON:
        if settings.get(name) is not None:
            with collected:
                settings[name] = from_json(name, settings[name])
    collected.raise_all()
    return settings


def markers_of(given: Sequence[str] | None) -> list[str] | None:
    """Return the setting `reasoning_markers`: None for the known ones, [] for 'none'."""
    if not given:
        return None
    return [] if given == ['none'] else list(given)


def from_json(name: str, text: str) -> Any:
    """Return the value of a setting given in JSON. Raise ConfigError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'{named(name)}: is {text!r}, which is not JSON ({error}); allowed: a mapping such as {IN_JSON[name]}'
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
    flags = flags_of(context)
    sources = {name: context.get_parameter_source(name) for name in flags}
    given = [name for name, source in sources.items() if source is not None and source.name not in DEFAULTS]
    problems = list(problems)
    for name in given:
        excluding = [flags[other] for other in given if name in excludes.get(other, ())]
        needed = needs.get(name, ())
        if excluding:
            problems.append(f'{flags[name]}: has no effect with {" and ".join(excluding)}; leave it out')
        elif needed and not any(other in given for other in needed):
            others = ' or '.join(flags[other] for other in needed)
            problems.append(f'{flags[name]}: has no effect without {others}; leave it out')
    if problems:
        raise ConfigError(problems)


def problems_of_file(out: Path, *, overwrite: bool) -> list[str]:
    """Return a problem if the file --out is there already and may not be replaced."""
    if out.is_dir():
        return [f'--out: {out} is a folder; give a file']
    if out.exists() and not overwrite:
        return [f'--out: {out} is there already; give another file, or --overwrite to replace it']
    return []


def start_logging(form: str = '%(message)s') -> None:
    """Print this package's log messages on rank 0, and warnings on every rank."""
    logging.basicConfig(format=form, datefmt='%Y-%m-%d %H:%M:%S')
    if os.environ.get('RANK', '0') == '0':
        logging.getLogger('llmfoundry_gauntlet').setLevel(logging.INFO)


def print_warnings(warnings: Iterable[str], *, err: bool = False) -> None:
    """Print a line for each warning, on standard error if `err`."""
    for warning in warnings:
        typer.echo(f'warning: {warning}', err=err)
