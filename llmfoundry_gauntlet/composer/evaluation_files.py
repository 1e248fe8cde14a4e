"""`gauntlet eval`: evaluate one or several models from a YAML file, on any number of ranks.

Its keys are those of `evaluate`, or llm-foundry's, which may list several `models`: each is written to its own folder
below `out`, and a model that fails does not stop the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from composer.utils import dist

from llmfoundry_gauntlet.composer.evaluate import DIST_TIMEOUT, default_device, evaluate, run_settings
from llmfoundry_gauntlet.config.llm_foundry import EVALUATION_KEYS, ListedModel, Mapped, map_evaluation
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.errors import GauntletError, print_problems
from llmfoundry_gauntlet.results.report.printing import print_runs, print_scores
from llmfoundry_gauntlet.results.report.scores import find_evaluations


def read_config(path: str, overrides: list[str]) -> Mapped:
    """Read a YAML file, apply `key=value` overrides and validate it. Raise ConfigError."""
    mapped = map_evaluation(read_yaml(path, overrides), source=path, num_ranks=dist.get_world_size())
    for arguments in [model.arguments for model in mapped.models] or [{}]:
        run_settings({**mapped.values, **arguments}, path, required=('out',), further=EVALUATION_KEYS)
    return mapped


def evaluate_listed(config: Mapped) -> int:
    """Evaluate each model in turn into its own folder; return the exit status."""
    done: list[ListedModel] = []
    for model in config.models:
        say(f'evaluating {model.name}')
        arguments = {**config.values, **model.arguments, 'out': str(Path(config.values['out']) / model.folder)}
        if 'run_name' in arguments and len(config.models) > 1:
            arguments['run_name'] = f'{arguments["run_name"]}-{model.folder.replace("/", "-")}'
        try:
            evaluate(**arguments)
            done.append(model)
        except GauntletError as error:
            print(f'{model.name} was not evaluated:', file=sys.stderr)
            print_problems(error)
    if done and dist.get_global_rank() == 0:
        print_models(Path(config.values['out']), done)
    if len(done) == len(config.models):
        return 0
    return 1 if done else 2


def print_models(out: Path, models: Sequence[ListedModel]) -> None:
    """Print the scores of all models side by side, and for several the command that compares them with errors."""
    print_scores([find_evaluations([out / model.folder])[-1] for model in models])
    folders = ' '.join(str(out / model.folder) for model in models)
    if len(models) > 1:
        print(f'with errors: gauntlet compare {folders}')


def say(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_global_rank() == 0:
        print(line, flush=True)


def evaluate_file(path: str, overrides: list[str]) -> int:
    """Evaluate from a YAML file and return the exit status. Raise GauntletError."""
    config = read_config(path, overrides)
    for line in config.lines:
        say(line)
    timeout = config.values.get('dist_timeout', DIST_TIMEOUT)
    dist.initialize_dist(config.values.get('device') or default_device(), timeout=timeout)
    if config.models:
        return evaluate_listed(config)
    evaluate(**config.values)
    if dist.get_global_rank() == 0:
        print_runs(Path(config.values['out']))
    return 0
