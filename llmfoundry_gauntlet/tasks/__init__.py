"""The task types: one file each, or an installed package's entry point in `llmfoundry_gauntlet.task_types`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.tasks import code, generation, language_modeling, multiple_choice, schema, score
from llmfoundry_gauntlet.tasks.base import TaskType

__all__ = ['TaskType', 'task_types', 'type_of']


@cache
def task_types() -> dict[str, TaskType]:
    """Every task type that can be run, by its `icl_task_type`."""
    own = [module.TASK_TYPE for module in (language_modeling, multiple_choice, schema, generation, code)]
    installed = [entry_point.load() for entry_point in entry_points(group='llmfoundry_gauntlet.task_types')]
    return {task_type.name: task_type for task_type in (*own, *score.TASK_TYPES, *installed)}


def type_of(task: TaskSpec) -> TaskType:
    """A task's type."""
    return task_types()[task.icl_task_type]
