"""The task types: one file each, or an installed package's entry point in `llmfoundry_gauntlet.task_types`."""

from __future__ import annotations

from functools import cache

from llmfoundry_gauntlet.config.resources import METRICS, TASK_TYPES, load_installed
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.metrics.metrics import Metric
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.tasks.code import CodeTask
from llmfoundry_gauntlet.tasks.generation import GenerationTask
from llmfoundry_gauntlet.tasks.language_modeling import LanguageModelingTask
from llmfoundry_gauntlet.tasks.multiple_choice import MultipleChoiceTask
from llmfoundry_gauntlet.tasks.schema import SchemaTask

__all__ = ['Task', 'metrics_of', 'task_types']

OWN: tuple[type[Task], ...] = (LanguageModelingTask, MultipleChoiceTask, SchemaTask, GenerationTask, CodeTask)


@cache
def task_types() -> dict[str, type[Task]]:
    """Return the types that a task of a YAML file can have, by `icl_task_type`. Raise ConfigError."""
    types: dict[str, type[Task]] = {}
    for name, kind in [(kind.type_name, kind) for kind in OWN] + list(load_installed(TASK_TYPES).items()):
        if not (isinstance(kind, type) and issubclass(kind, Task)):
            raise ConfigError(f'the entry point {name} in {TASK_TYPES} is {kind!r}; allowed: a subclass of Task')
        if kind.type_name in types:
            raise ConfigError(f'{kind.type_name} is the name of two task types; an installed one needs another')
        types[kind.type_name] = kind
    return types


def metrics_of(task: Task) -> tuple[Metric, ...]:
    """Return a task's metrics, the accuracy first, those of installed packages last; none for SCORE.

    Raise ConfigError if two have the same name.
    """
    own = task.metrics()
    if not own:
        return ()
    metrics = [*own, *(metric for further in load_installed(METRICS).values() for metric in further(task))]
    names = [metric.name for metric in metrics]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f'{task.label}: {", ".join(twice)} names two metrics; an installed one needs another name')
    return tuple(metrics)
