"""Composer's loggers, and other parts of a Trainer, by their names in a YAML file."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from composer.loggers import FileLogger, LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger
from composer.utils import MissingConditionalImportError

from llmfoundry_gauntlet.config.decode import describe, suggestion
from llmfoundry_gauntlet.errors import ConfigError

Builders = Mapping[str, Callable[..., Any]]

LOGGERS: Builders = {'file': FileLogger, 'mlflow': MLFlowLogger, 'tensorboard': TensorboardLogger, 'wandb': WandBLogger}


def build_loggers(chosen: Mapping[str, Any] | None) -> list[LoggerDestination]:
    """Return a Composer logger for each name, with its arguments: `{'mlflow': {'experiment_name': 'llama'}}`.

    Raises ConfigError for unknown names and arguments, and where a logger's library is not installed.
    """
    return build_each('loggers', LOGGERS, chosen)


def logger_settings(loggers: Mapping[str, Any], run_name: str | None, checkpoint: str) -> dict[str, Any]:
    """Return the loggers' arguments for one of the evaluations of a run.

    Each evaluation has its own loggers, which resume the same run of W&B (not the training's, as two processes cannot
    write to one) and of MLflow, and write separate files. Settings of the user take precedence.
    """
    settings = {name: dict(arguments or {}) for name, arguments in loggers.items()}
    if run_name is not None and 'wandb' in settings:
        kept = {'id': re.sub(r'[^\w.-]', '-', f'{run_name}-watch'), 'resume': 'allow'}
        settings['wandb']['init_kwargs'] = {**kept, **(settings['wandb'].get('init_kwargs') or {})}
    if run_name is not None and 'mlflow' in settings:
        settings['mlflow'].setdefault('resume', True)
    if 'file' in settings:
        path = PurePosixPath(settings['file'].get('filename', '{run_name}/logs-rank{rank}.txt'))
        name = f'{checkpoint.replace("/", "-")}-{path.name}'
        settings['file'] = {**settings['file'], 'filename': str(path.with_name(name)), 'overwrite': True}
    return settings


def build_each(part: str, known: Builders, chosen: Mapping[str, Any] | None) -> list[Any]:
    """Return an object for each entry of a part such as `loggers`, in the order of the file; None: no arguments.

    Raises one ConfigError with every unknown name and argument.
    """
    if chosen is not None and not isinstance(chosen, Mapping):
        raise ConfigError(f'{part}: is {describe(chosen)}; allowed: a mapping with {", ".join(known)}')
    entries = {name: {} if arguments is None else arguments for name, arguments in (chosen or {}).items()}
    problems = [problem for name, arguments in entries.items() for problem in check(part, known, name, arguments)]
    if problems:
        raise ConfigError(problems)
    return [build(part, known, name, arguments) for name, arguments in entries.items()]


def check(part: str, known: Builders, name: str, arguments: Any) -> list[str]:
    """Return the problems of one entry."""
    if name not in known:
        return [f"{part}: unknown key '{name}'{suggestion(str(name), known)}"]
    if not isinstance(arguments, Mapping):
        return [f'{part}.{name}: is {describe(arguments)}; allowed: a mapping']
    parameters = inspect.signature(known[name]).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []  # it checks its own keys
    problems = [
        f"{part}.{name}: unknown key '{key}'{suggestion(str(key), parameters)}"
        for key in arguments
        if key not in parameters
    ]
    missing = [key for key, value in parameters.items() if value.default is value.empty and key not in arguments]
    return problems + [f"{part}.{name}: the key '{key}' is missing" for key in missing]


def build(part: str, known: Builders, name: str, arguments: Mapping[str, Any]) -> Any:
    """Return an object. Raise ConfigError if its library is not installed."""
    try:
        return known[name](**arguments)
    except MissingConditionalImportError as error:
        raise ConfigError(
            f"{part}.{name}: its library is not installed; pip install 'llmfoundry-gauntlet[{name}]'"
        ) from error
