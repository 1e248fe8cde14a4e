"""Evaluate one or several models without training them, on any number of ranks.

    composer -n 2 scripts/eval.py yamls/eval/demo.yaml [key=value ...]

The keys are those of `gauntlet run` with underscores; `resume=true` continues an interrupted evaluation. llm-foundry's
evaluation files work too, including several `models` in one (docs/migrating.md): each goes to its own folder below
`out`, and one that fails does not stop the others. Exit status: 0 done, 1 some of several models failed, 2 the file is
invalid or no model could be evaluated.
"""

import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any

from composer.utils import dist

from llmfoundry_gauntlet import EvaluationSettings, evaluate
from llmfoundry_gauntlet.composer.evaluate import DIST_TIMEOUT, TRAINING_KEYS, check_arguments, default_device
from llmfoundry_gauntlet.composer.loggers import build_loggers
from llmfoundry_gauntlet.composer.models import load_config
from llmfoundry_gauntlet.config.llm_foundry import EVALUATION_KEYS, ListedModel, map_evaluation
from llmfoundry_gauntlet.config.yaml import Problems, decode_value, read_yaml, suggestion
from llmfoundry_gauntlet.errors import ConfigError, GauntletError, print_problems
from llmfoundry_gauntlet.results.report.printing import print_runs, scores_table, with_seconds
from llmfoundry_gauntlet.results.report.scores import find_evaluations
from llmfoundry_gauntlet.results.report.tables import print_table

RUN_KEYS = [*(name for name in signature(evaluate).parameters if name != 'settings'), 'dist_timeout']


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The arguments of `evaluate` that all models of a file share, and the models that it lists, if any."""

    shared: dict[str, Any]
    models: tuple[ListedModel, ...]
    lines: tuple[str, ...]  # how llm-foundry's keys were mapped


def read_config(path: str, overrides: list[str]) -> EvaluationConfig:
    """Return the checked content of a YAML file, after `key=value` overrides. Raise ConfigError."""
    content = read_yaml(path, overrides)
    mapped, models = map_evaluation(content, source=path, num_ranks=dist.get_world_size())
    settings = [item.name for item in fields(EvaluationSettings) if item.name not in TRAINING_KEYS]
    allowed = [*RUN_KEYS, *settings]
    known = sorted({*allowed, *EVALUATION_KEYS})
    values = mapped.values
    problems = [f"{path}: unknown key '{key}'{suggestion(str(key), known)}" for key in values if key not in allowed]
    required = ('out',) if models else ('model', 'out')
    problems += [f"{path}: the key '{key}' is missing" for key in required if key not in values]
    if models and 'model_config' in values:
        problems.append(f"{path}: model_config belongs to a 'model' that is a path, not to several models")
    wrong = Problems(path)
    check_arguments({key: value for key, value in values.items() if key in RUN_KEYS}, wrong)
    decode_value(float | None, values.get('dist_timeout'), 'dist_timeout', wrong)
    problems += wrong.found
    if problems:
        raise ConfigError(problems)
    return EvaluationConfig(shared=values, models=models, lines=mapped.lines)


def evaluate_one(shared: dict[str, Any], *, config_overrides: dict[str, Any] | None = None) -> None:
    """Evaluate one model with its own loggers. Raise GauntletError."""
    arguments = {**shared, 'loggers': build_loggers(shared.get('loggers'))}
    if not config_overrides:
        evaluate(arguments.pop('model'), **arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_config(arguments['model_config'], config_overrides, folder)
        evaluate(arguments.pop('model'), **{**arguments, 'model_config': folder})


def save_config(name: str, overrides: dict[str, Any], folder: str) -> None:
    """Write a model's configuration with overrides into a folder. Raise ModelError."""
    config = load_config(name)
    unknown = [key for key in overrides if not hasattr(config, key)]
    if unknown:
        raise ConfigError(
            [f"config_overrides: unknown key '{key}'{suggestion(key, config.to_dict())}" for key in unknown]
        )
    config.update(overrides)
    config.save_pretrained(folder)


def evaluate_listed(config: EvaluationConfig) -> int:
    """Evaluate each model in turn into its own folder; return the exit status."""
    done: list[ListedModel] = []
    for model in config.models:
        say(f'evaluating {model.name}')
        arguments = {**config.shared, **model.arguments, 'out': str(Path(config.shared['out']) / model.folder)}
        if 'run_name' in arguments and len(config.models) > 1:
            arguments['run_name'] = f'{arguments["run_name"]}-{model.folder.replace("/", "-")}'
        try:
            evaluate_one(arguments, config_overrides=model.config_overrides)
            done.append(model)
        except GauntletError as error:
            print(f'{model.name} was not evaluated:', file=sys.stderr)
            print_problems(error)
    if done and dist.get_global_rank() == 0:
        print_models(Path(config.shared['out']), done)
    if len(done) == len(config.models):
        return 0
    return 1 if done else 2


def print_models(out: Path, models: Sequence[ListedModel]) -> None:
    """Print the scores of all models side by side, and the folders of the files."""
    found = [find_evaluations([out / model.folder])[-1] for model in models]
    names = [model.folder.replace('/', ' ') for model in models]
    table = with_seconds(scores_table(found, names, with_errors=len(found) == 1), found)
    print_table(table, width=60 + 20 * len(models))
    folders = ' '.join(str(out / model.folder) for model in models)
    print(f'with errors: gauntlet compare {folders}' if len(found) > 1 else folders)


def say(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_global_rank() == 0:
        print(line, flush=True)


def main(arguments: list[str]) -> int:
    """Evaluate; return the exit status."""
    if not arguments or '=' in arguments[0]:
        print('usage: composer -n RANKS scripts/eval.py CONFIG.yaml [key=value ...]', file=sys.stderr)
        return 2
    logging.basicConfig(format='%(message)s')
    if dist.get_global_rank() == 0:
        logging.getLogger('llmfoundry_gauntlet').setLevel(logging.INFO)
    try:
        config = read_config(arguments[0], arguments[1:])
        for line in config.lines:
            say(line)
        timeout = config.shared.pop('dist_timeout', DIST_TIMEOUT)
        dist.initialize_dist(config.shared.get('device') or default_device(), timeout=timeout)
        if config.models:
            return evaluate_listed(config)
        evaluate_one(config.shared)
    except GauntletError as error:
        print_problems(error)
        return 2
    if dist.get_global_rank() == 0:
        print_runs(Path(config.shared['out']))
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
