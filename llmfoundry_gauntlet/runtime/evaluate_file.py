"""Evaluate one or several models from a YAML file: `gauntlet eval`.

The keys of the file are those of `evaluate`, or llm-foundry's, which may list several `models`: each is written to its
own folder below `out`, and a model that fails does not stop the others.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.llm_foundry import EVALUATION_KEYS, ListedModel, Mapped, map_evaluation
from llmfoundry_gauntlet.config.run import SETTINGS, decode_run
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.errors import Collected, ConfigError, GauntletError, UnwrittenError, print_problems
from llmfoundry_gauntlet.evaluation.inputs import check_named_files
from llmfoundry_gauntlet.results.interrupts import Interrupted, exit_on_signals, with_remedy
from llmfoundry_gauntlet.results.report.printing import print_runs, print_scores, print_unwritten
from llmfoundry_gauntlet.results.runs import find_evaluations
from llmfoundry_gauntlet.runtime.distributed import global_rank, is_first_to_say, world_size
from llmfoundry_gauntlet.runtime.evaluate import evaluate, hardware_of


def read_config(path: str, overrides: list[str]) -> Mapped:
    """Read a YAML file, apply `key=value` overrides and validate it. Raise GauntletError with every problem found."""
    values = read_yaml(path, overrides)
    collected = Collected()
    mapped = Mapped(values=values)
    with collected:
        mapped = map_evaluation(values, source=path, num_ranks=world_size())
        for arguments in [arguments_of(mapped, model) for model in mapped.models] or [mapped.values]:
            with collected:
                check_keys(arguments, path)
    if collected.errors:
        with collected:  # what the files hold is checked later, unless this ends here
            check_named_files(mapped.values)
    collected.raise_all()
    return mapped


def check_keys(arguments: Mapping[str, Any], path: str) -> None:
    """Check the keys and values of a YAML file for one model. Raise ConfigError with every problem found."""
    collected = Collected()
    run, problems = decode_run(arguments, path, required=('out',), further=EVALUATION_KEYS)
    if problems:
        collected.add(ConfigError(problems))
    if run is not None:
        with collected:
            hardware_of(run)
    with collected:
        decode_settings({key: value for key, value in arguments.items() if key in SETTINGS}, path)
    collected.raise_all()


def arguments_of(config: Mapped, model: ListedModel) -> dict[str, Any]:
    """Return the arguments of `evaluate` for one of the models of a file; each has a folder and a run of its own."""
    arguments = {**config.values, **model.arguments}
    out, run_name = arguments.get('out'), arguments.get('run_name')
    if isinstance(out, str):
        arguments['out'] = str(Path(out) / model.folder)
    if isinstance(run_name, str) and len(config.models) > 1:
        suffix = model.folder.replace('/', '-')
        arguments['run_name'] = f'{run_name}-{suffix}'
    return arguments


def evaluate_models(config: Mapped) -> int:
    """Evaluate each model in turn into its own folder; return the exit status."""
    done: list[ListedModel] = []
    for model in config.models:
        say(f'evaluating {model.name}')
        try:
            evaluate_interruptibly(arguments_of(config, model), done)
            done.append(model)
        except GauntletError as error:
            if is_first_to_say(f'{model.name}: {error}'):
                print(f'{model.name} was not evaluated:', file=sys.stderr)
                print_problems(error)
    if done and global_rank() == 0:
        print_models(Path(config.values['out']), done)
    if len(done) == len(config.models):
        return 0
    return 1 if done else 2


def evaluate_interruptibly(arguments: Mapping[str, Any], done: Sequence[ListedModel] = ()) -> None:
    """Evaluate a model; if a signal interrupts that, say what is kept and what is done. Raise GauntletError."""
    option = 'resume=true in place of overwrite' if arguments.get('overwrite') else 'resume=true'
    kept = Interrupted(folder=Path(arguments['out']), option=None if arguments.get('resume') else option)

    def explain() -> str:
        return '\n'.join([kept(), *(f'done already: {model.name}' for model in done)])

    with exit_on_signals(explain):
        try:
            evaluate(**arguments)
        except UnwrittenError as error:
            if global_rank() == 0:
                print_unwritten(error)
            raise with_remedy(error, kept) from error


def print_models(out: Path, models: Sequence[ListedModel]) -> None:
    """Print the scores of all models side by side, and for several the command that compares them with errors."""
    folders = [out / model.folder for model in models]
    latest = [find_evaluations([folder])[-1] for folder in folders]
    print_scores(latest)
    if len(models) > 1:
        print(f'with errors: gauntlet compare {" ".join(map(str, folders))}')


def say(line: str) -> None:
    """Print a line on rank 0."""
    if global_rank() == 0:
        print(line, flush=True)


def evaluate_file(path: str, overrides: list[str]) -> int:
    """Evaluate from a YAML file and return the exit status. Raise GauntletError."""
    config = read_config(path, overrides)
    for line in config.lines:
        say(line)
    if config.models:
        return evaluate_models(config)
    evaluate_interruptibly(config.values)
    if global_rank() == 0:
        print_runs(Path(config.values['out']))
    return 0
