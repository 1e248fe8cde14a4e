"""The task types: one file each, or an installed package's entry point in `llmfoundry_gauntlet.task_types`."""

from __future__ import annotations

from functools import cache

from llmfoundry_gauntlet.config.score import SCORE_TASK_TYPES
from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.installed import METRICS, TASK_TYPES, load_installed
from llmfoundry_gauntlet.scores.metrics import Metric
from llmfoundry_gauntlet.tasks import code, generation, language_modeling, multiple_choice, schema
from llmfoundry_gauntlet.tasks.base import AnyTaskType, TaskType

__all__ = ['TaskType', 'metrics_of', 'named_types', 'task_types', 'type_of']

OWN = (
    language_modeling.TASK_TYPE,
    multiple_choice.TASK_TYPE,
    schema.TASK_TYPE,
    generation.TASK_TYPE,
    code.TASK_TYPE,
)


@cache
def named_types() -> dict[str, AnyTaskType]:
    """The types that a task of a YAML file can have, by `icl_task_type`. Raises ConfigError."""
    types: dict[str, AnyTaskType] = {}
    for task_type in (*OWN, *load_installed(TASK_TYPES).values()):
        if task_type.name in types:
            raise ConfigError(f'{task_type.name} is the name of two task types; an installed one must have another')
        types[task_type.name] = task_type
    return types


@cache
def task_types() -> dict[str, AnyTaskType]:
    """Every type, SCORE's too, by name. Raises ConfigError."""
    from llmfoundry_gauntlet.tasks import score  # late, as tasks of YAML files do not need it

    return {**named_types(), **{task_type.name: task_type for task_type in score.TASK_TYPES}}


def type_of(task: TaskSpec) -> AnyTaskType:
    """A task's type."""
    types = task_types() if task.icl_task_type in SCORE_TASK_TYPES.values() else named_types()
    return types[task.icl_task_type]


def metrics_of(task: TaskSpec) -> tuple[Metric, ...]:
    """A task's metrics, the accuracy first, those of installed packages last; SCORE has none. Raises ConfigError."""
    own: tuple[Metric, ...] = type_of(task).metrics(task)
    if not own:
        return ()
    metrics = [*own, *(metric for further in load_installed(METRICS).values() for metric in further(task))]
    names = [metric.name for metric in metrics]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f'{task.label}: {", ".join(twice)} names two metrics; an installed one needs another name')
    return tuple(metrics)
