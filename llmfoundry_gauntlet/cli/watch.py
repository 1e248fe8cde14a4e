"""`gauntlet watch`: parse the options and start watching a folder of checkpoints."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmfoundry_gauntlet.cli.options import (
    CHAT,
    CHECK_FAILED,
    INPUTS,
    MODEL,
    RUNNING,
    check_options,
    flags_of,
    settings_of,
    start_logging,
    takes,
)
from llmfoundry_gauntlet.cli.run import check_model, check_parts
from llmfoundry_gauntlet.errors import ConfigError, named_as_options, plural

NEVER = 'never'
NO_FOLDER = '--out: is missing; give the folder for records'
OUTPUT, WAITING, CLAIMS = 'Output', 'Waiting', 'Several watchers'  # headings of --help
EVALUATION = (*INPUTS, *CHAT, *RUNNING)  # options that --train-yaml sets


@takes(*EVALUATION, *MODEL)
def watch(
    context: typer.Context,
    folder: Annotated[
        str, typer.Argument(metavar='FOLDER', help='save_folder of the training: local, s3://, gs:// or az://.')
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar='FOLDER',
            help='Folder for records, in ba{batch}/. Default: from --train-yaml.',
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    train_yaml: Annotated[
        Path | None,
        typer.Option(
            metavar='FILE',
            help='Take eval_gauntlet, loggers, run_name and precision from this training YAML.',
            rich_help_panel='Tasks',
        ),
    ] = None,
    poll: Annotated[
        str,
        typer.Option(
            metavar='DURATION', help='Interval between listings of FOLDER, such as 30s.', rich_help_panel=WAITING
        ),
    ] = '30s',
    settle: Annotated[
        str,
        typer.Option(
            metavar='DURATION',
            help='Evaluate a checkpoint once it has not changed for this long.',
            rich_help_panel=WAITING,
        ),
    ] = '5s',
    once: Annotated[
        bool, typer.Option('--once', help='Evaluate the existing checkpoints, then exit.', rich_help_panel=WAITING)
    ] = False,
    stop_after: Annotated[
        str,
        typer.Option(
            metavar='DURATION',
            help='Exit after this long without a new checkpoint, such as 2h; 0s is --once.',
            rich_help_panel=WAITING,
        ),
    ] = NEVER,
    average: Annotated[
        int | None,
        typer.Option(
            metavar='N',
            help='Also evaluate the mean of the weights of the last N checkpoints, beside each.',
            rich_help_panel='Model',
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            '--model',
            metavar='MODEL',
            help='The base of PEFT adapters: FOLDER has checkpoints of adapters.',
            rich_help_panel='Model',
        ),
    ] = None,
    claims: Annotated[
        str | None,
        typer.Option(
            metavar='FOLDER', help='Folder or URI for claims. Default: FOLDER/.gauntlet.', rich_help_panel=CLAIMS
        ),
    ] = None,
    claim_expires: Annotated[
        str,
        typer.Option(metavar='DURATION', help='Take over claims not renewed for this long.', rich_help_panel=CLAIMS),
    ] = '10m',
    **given: Any,
) -> None:
    r"""Evaluate each new checkpoint of a folder once and log at its training step. Exit status 1 if any failed.

    Examples:
      # with the settings and the loggers of the training, beside it
      gauntlet watch runs/demo/checkpoints --train-yaml yamls/train/demo.yaml
      # the checkpoints that are there, then exit
      gauntlet watch s3://bucket/run/checkpoints --tasks yamls/tasks/gauntlet_v0.1.yaml \
          --data-root data --out runs/watched --once
      # beside each checkpoint the mean of its weights and those of the two before it
      gauntlet watch runs/demo/checkpoints --train-yaml yamls/train/demo.yaml --average 3
      torchrun --nproc-per-node 8 -m llmfoundry_gauntlet watch runs/demo/checkpoints \
          --train-yaml yamls/train/demo.yaml --stop-after 2h
    """
    problems = []
    if given['tasks'] is None and given['score'] is None and train_yaml is None:
        problems.append('nothing to evaluate: give --tasks, --score or both, or --train-yaml')
    if out is None and train_yaml is None:
        problems.append(NO_FOLDER)
    if average is not None and average < 2:
        problems.append(f'--average: is {average}; allowed: a number of checkpoints, 2 or more')
    if average is not None and base is not None:
        problems.append('--average: is not allowed with --model: the mean of adapters is not that of what they add')
    check_options(context, excludes={'train_yaml': EVALUATION, 'once': ('stop_after',)}, problems=problems)
    training: dict[str, Any] = {'settings': settings_of(given, EVALUATION)}
    flags = flags_of(context)
    if train_yaml is not None:
        # Settings of the training YAML have the names of its keys in messages.
        flags = {name: flag for name, flag in flags.items() if name not in EVALUATION}
        with named_as_options(flags):
            training = training_settings(train_yaml)
    training['out'] = out or training.get('out')
    if training['out'] is None:
        raise ConfigError(f'{NO_FOLDER}, or set run_name and save_folder in {train_yaml}')
    model = settings_of(given, MODEL)
    check_parts(model)
    if base is not None:
        check_model(base, {})
    precision_of_training = training.pop('precision', None)
    model['precision'] = model['precision'] or precision_of_training
    durations = {'--poll': poll, '--settle': settle, '--claim-expires': claim_expires}
    if stop_after != NEVER:
        durations['--stop-after'] = stop_after
    seconds = seconds_by_option(durations)
    timing: dict[str, Any] = {
        'poll_seconds': seconds['--poll'],
        'settle_seconds': seconds['--settle'],
        'expires_seconds': seconds['--claim-expires'],
        'stop_seconds': 0.0 if once else seconds.get('--stop-after'),
    }
    start_logging('%(asctime)s %(message)s')
    from llmfoundry_gauntlet.results.files import RESULTS
    from llmfoundry_gauntlet.results.report.printing import print_runs
    from llmfoundry_gauntlet.runtime.watch import DAMAGED, WatchSettings, watch_checkpoints

    with named_as_options(flags):
        options = WatchSettings(
            folder=folder, model=model, average=average, base=base, claims=claims, **timing, **training
        )
        table = watch_checkpoints(options)
    for name, state, detail in table:
        typer.echo(f'{name}: {state} {detail}')
    if table and any(training['out'].rglob(RESULTS)):
        print_runs(training['out'])
    if table:
        num_by_state = Counter(state for _, state, _ in table)
        counts = ', '.join(f'{count} {state}' for state, count in num_by_state.items())
        what = 'checkpoint' if average is None else 'evaluation'  # of averages too
        typer.echo(f'{plural(len(table), what)} in {folder}: {counts}')
    if any(state == DAMAGED for _, state, _ in table):
        raise typer.Exit(CHECK_FAILED)


def training_settings(path: Path) -> dict[str, Any]:
    """Return the WatchSettings fields given by a training YAML, `out` possibly None. Raise ConfigError."""
    from llmfoundry_gauntlet.config.resources import path_problem
    from llmfoundry_gauntlet.config.run import TRAINING_KEYS
    from llmfoundry_gauntlet.config.settings import decode_settings
    from llmfoundry_gauntlet.config.yaml import YamlProblems, decode_value, read_yaml

    values, problems = read_yaml(path), YamlProblems(str(path))
    callbacks = decode_value(dict[str, Any], values.get('callbacks', {}), 'callbacks', problems) or {}
    block = decode_value(dict[str, Any], callbacks.get('eval_gauntlet'), 'callbacks.eval_gauntlet', problems)
    run_name = values.get('run_name') or os.environ.get('RUN_NAME')
    loggers = values.get('loggers') or {}
    if loggers and run_name is None:
        problems.add('', 'has loggers but no run_name; set run_name so that all evaluations are logged as one run')
    elif run_name is not None and (problem := path_problem(str(run_name))):
        problems.add('run_name', problem)
    problems.raise_all()
    save_folder = decode_settings(block, f'{path}: callbacks.eval_gauntlet').save_folder
    if run_name is not None and save_folder is not None:
        save_folder = save_folder.replace('{run_name}', run_name)
    settings = {key: value for key, value in block.items() if key not in TRAINING_KEYS}
    if 'precision' in settings:  # in YAML the precision target; for `evaluate`, `precision` is the model's
        settings['precision_target'] = settings.pop('precision')
    return {
        'settings': settings,
        'loggers': loggers,
        'run_name': run_name,
        'precision': values.get('precision'),
        'out': None if save_folder is None or '{run_name}' in save_folder else Path(save_folder),
    }


def seconds_by_option(durations: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds in times such as '30s', '10m' or '12h'. Raise ConfigError with every other one."""
    from llmfoundry_gauntlet.config.settings import BUDGET, SECONDS

    seconds = {}
    problems = []
    for option, text in durations.items():
        time = BUDGET.fullmatch(text)
        if time is None:
            never = f', or {NEVER}' if option == '--stop-after' else ''
            problems.append(f"{option}: is {text!r}; allowed: a time such as '30s', '10m' or '12h'{never}")
            continue
        number, unit = time.groups()
        seconds[option] = float(number) * SECONDS[unit]
    if problems:
        raise ConfigError(problems)
    return seconds
