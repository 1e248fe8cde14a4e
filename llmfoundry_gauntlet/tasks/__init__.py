"""The task types: one file each, or an installed package's entry point in `llmfoundry_gauntlet.task_types`."""

from __future__ import annotations

from functools import cache

from llmfoundry_gauntlet.config.resources import load_installed_types, plugin_error
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.tasks.code import CodeTask
from llmfoundry_gauntlet.tasks.generation import GenerationTask
from llmfoundry_gauntlet.tasks.language_modeling import LanguageModelingTask
from llmfoundry_gauntlet.tasks.lm_eval import LmEvalTask
from llmfoundry_gauntlet.tasks.multiple_choice import MultipleChoiceTask
from llmfoundry_gauntlet.tasks.schema import SchemaTask

__all__ = ['Task', 'task_types']

OWN: tuple[type[Task], ...] = (
    LanguageModelingTask,
    MultipleChoiceTask,
    SchemaTask,
    GenerationTask,
    CodeTask,
    LmEvalTask,
)


@cache
def task_types() -> dict[str, type[Task]]:
    """Return the types that a task of a YAML file can have, by `icl_task_type`. Raise ConfigError."""
    types = {kind.type_name: kind for kind in OWN}
    for name, kind in load_installed_types().items():
        if not (isinstance(kind, type) and issubclass(kind, Task)):
            raise plugin_error(name, f'is {kind!r}; allowed: a subclass of Task')
        own_name = getattr(kind, 'type_name', None)
        if not isinstance(own_name, str) or own_name in types:
            known = ', '.join(types)
            raise plugin_error(name, f'has the type_name {own_name!r}; allowed: text other than {known}')
        types[own_name] = kind
    return types
