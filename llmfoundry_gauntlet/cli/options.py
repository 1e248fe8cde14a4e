"""Options shared by subcommands of `gauntlet`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer
from typer import Option
from typer.core import TyperCommand

from llmfoundry_gauntlet.config.resources import PACKAGE
from llmfoundry_gauntlet.errors import Collected, ConfigError

OptionNames = tuple[str, ...]
Function = TypeVar('Function', bound=Callable[..., None])
NOTHING: Mapping[str, OptionNames] = {}
DEFAULTS = ('DEFAULT', 'DEFAULT_MAP')  # click's parameter sources for values that the user did not give
IN_JSON = {  # settings that are mappings, and what each may be
    'chat_template_kwargs': '{"enable_thinking": false}',
    'fsdp_config': '{"sharding_strategy": "FULL_SHARD"}, or {} for the defaults',
}
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
    num_fewshot: int | None = Option(None, help="Number of shots of every task. Default: each task's own.")
    subset_items: int | None = Option(
        None, '--subset-items', '--limit', help='Maximum number of items per task; always the same items.'
    )
    missing: str = Option('error', help='error, or skip: leave out tasks without a data file and composites over them.')
    tokenizer: str | None = Option(None, help="Replaces the model's own.")
    model_config: str | None = Option(None, help="Replaces the model's own.")
    revision: str | None = Option(None, help='Branch, tag or commit of a model on the Hugging Face hub.')
    adapter: str | None = Option(
        None, help='Folder or name of a PEFT adapter (LoRA), merged into the weights. Needs peft.'
    )
    dtype: str = Option('float32', help='Type of the weights: float32, bfloat16 or float16 (half the memory).')
    device_map: str | None = Option(
        None, help='auto: place the layers of a model that is larger than one GPU on several. Needs accelerate.'
    )
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
    fsdp_config: str | None = Option(
        None,
        help='Shard the model over the ranks, which torchrun or composer starts: keys of FSDPConfig in JSON, or {}.',
    )
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
    loggers: str | None = Option(None, help='Also log to these of wandb, mlflow and tensorboard, separated by commas.')
    log: str = Option(
        'accuracy,errors,composites,score',
        help='With --loggers: what to log of accuracy, errors, composites, score and metrics.',
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
    """A command that names every missing argument and option at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raise ConfigError with every required one that is missing."""
        try:
            return super().parse_args(ctx, list(args))
        except typer.BadParameter as error:
            if type(error).__name__ != 'MissingParameter':  # of click, or of typer's copy of it
                raise
            # Click stops at the first one; parsing again without its checks shows them all.
            with self.make_context(ctx.info_name, list(args), ctx.parent, resilient_parsing=True) as parsed:
                missing = [
                    parameter
                    for parameter in self.params
                    if parameter.required and parsed.params[parameter.name] in (None, ())
                ]
            names = [name_as_typed(parameter) for parameter in missing]
            raise ConfigError([f'{name}: is missing; see {ctx.command_path} --help' for name in names]) from error


def name_as_typed(parameter: Any) -> str:
    """Return the name of an option, or of an argument as in the help text."""
    if parameter.param_type_name == 'option':
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.name.upper())


def flags_of(parameters: Iterable[Any]) -> dict[str, str]:
    """Return a command's options as typed on the command line, by parameter name."""
    return {parameter.name: parameter.opts[0] for parameter in parameters}


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
            f'{name}: is {text!r}, which is not JSON ({error}); allowed: a mapping such as {IN_JSON[name]}'
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
        excluding = [flags[other] for other in given if name in excludes.get(other, ())]
        needed = needs.get(name, ())
        if excluding:
            problems.append(f'{flags[name]}: has no effect with {" and ".join(excluding)}; leave it out')
        elif needed and not any(other in given for other in needed):
            others = ' or '.join(flags[other] for other in needed)
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
