"""Load tasks and groups of the LM Evaluation Harness: their definitions, their documents, and the requests of each.

Everything that is done to a document is lm-eval's own code, in the order of its `simple_evaluate` and with its seeds.
lm_eval is imported once a task is loaded, and not before. Its tasks may hold Python functions (`!function` in YAML, or
a `class`), which run in this process, as they do in lm-eval; docs/security.md.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.data.hugging_face import TRUST, reason_of, to_json_types
from llmfoundry_gauntlet.errors import Caught, ConfigError, DataError, closest, listed

RANDOM_SEED, NUMPY_SEED, TORCH_SEED = 0, 1234, 1234  # of `simple_evaluate`
FIRST_VERSION = (0, 4, 13)  # of lm-eval whose TaskManager has `load`
NO_FILTER = 'none'
RUNS_PROGRAMS = 'runs the programs that the model writes, which is never done in this process'
IN_SANDBOX = 'icl_task_type: code_evaluation runs programs in a sandbox'
CODE_METRICS = ('code_eval', 'pass_at_k', 'pass@k')  # which run the model's answers
GROUP_KEYS = ('group', 'group_alias', 'task', 'aggregate_metric_list', 'metadata', 'tag')
ADDRESS = re.compile(r' at 0x[0-9a-f]+')
OF_THIS_MACHINE = 'config_source'  # in a task's metadata: the path of its YAML
MULTIPLE_CHOICE, LOGLIKELIHOOD, ROLLING, GENERATE = (
    'multiple_choice',
    'loglikelihood',
    'loglikelihood_rolling',
    'generate_until',
)
SCORED = (LOGLIKELIHOOD, ROLLING)  # types of requests

# Metrics that are shares, the higher the better, wherever they are means: the names that lm-eval's registry has, and
# those that many of its tasks give themselves.
SHARES = ('acc', 'acc_norm', 'acc_bytes', 'acc_mutual_info', 'exact_match', 'em', 'acc_all', 'pass@1')


# Chats


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The chat of prompts: lm-eval's `system_instruction`, `fewshot_as_multiturn` and `chat_template`.

    `render` returns the text of a list of messages. `name` tells chats apart.
    """

    name: str
    system_instruction: str | None
    shots_as_turns: bool
    render: Callable[..., str]


def show_messages(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    """Return messages as text where no tokenizer is known."""
    return '\n'.join(f'{message["role"]}: {message["content"]}' for message in messages)


# Loaded tasks


class Subtask:
    """One task of lm-eval with its documents. It is loaded once, and makes its requests when they are first needed."""

    def __init__(self, task: Any, *, seed: int) -> None:
        self.task = task
        self.name: str = task.task_name
        self.seed = seed
        self.docs: list[Any] = list(task.eval_docs)
        self.golds = [gold_of(self, doc) for doc in self.docs]
        self.num_shots = int(task.get_config('num_fewshot') or 0)
        self.repeats = int(task.get_config('repeats') or 1)
        self.end_text: str | None = None  # of the tokenizer, which ends generations beside the task's own strings
        self._instances: list[list[Any]] = []
        self._chat_name: str | None = None  # of the chat in which they are

    @property
    def filters(self) -> list[str]:
        """Return the names of the task's filters, in order."""
        return [ensemble.name for ensemble in self.task._filters]  # lm-eval 0.4.13 (docs/compatibility.md)

    @property
    def has_choices(self) -> bool:
        """Return whether the continuations of a document are choices of which one is right."""
        return bool(self.task.OUTPUT_TYPE == MULTIPLE_CHOICE)

    def instances(self, chat: Chat | None) -> list[list[Any]]:
        """Return lm-eval's requests of each document, with the shots that the full run draws for it."""
        name = '' if chat is None else chat.name
        if self._chat_name != name:
            with random_states_kept():
                seed_everything()
                self._instances = self._built(chat)
            self._chat_name = name
        return self._instances

    def latest_instances(self, system_instruction: str | None, *, in_chat: bool, as_turns: bool) -> list[list[Any]]:
        """Return the requests as they were made last; if they are not yet, with messages in place of a template."""
        if self._chat_name is None or bool(self._chat_name) != in_chat:
            chat = Chat(
                name='messages',
                system_instruction=system_instruction,
                shots_as_turns=as_turns,
                render=show_messages,
            )
            return self.instances(chat if in_chat else None)
        return self._instances

    def _built(self, chat: Chat | None) -> list[list[Any]]:
        task = self.task
        task.set_fewshot_seed(seed=self.seed)
        in_chat = chat is not None
        built = []
        for doc_id, doc in enumerate(self.docs):
            # As `Task.build_all_requests` of lm-eval 0.4.13.
            context = task.fewshot_context(
                doc,
                num_fewshot=self.num_shots,
                system_instruction=chat.system_instruction if chat is not None else None,
                apply_chat_template=in_chat,
                fewshot_as_multiturn=chat is not None and chat.shots_as_turns,
                chat_template=chat.render if chat is not None else None,
                gen_prefix=task.doc_to_prefix(doc),
            )
            made = task.construct_requests(
                doc=doc,
                ctx=context,
                metadata=(self.name, doc_id, self.repeats),
                apply_chat_template=in_chat,
                chat_template=chat.render if chat is not None else None,
            )
            instances = made if isinstance(made, list) else [made]
            built.append(sorted(instances, key=lambda instance: instance.idx))
        return built

    def metrics_of(self, doc_id: int, responses: Sequence[Sequence[Any]]) -> Iterator[tuple[str, str, Any]]:
        """Yield filter, metric and value of a document, from the responses to each of its requests.

        A request has as many responses as the task has repeats.
        """
        instances = self._answered(doc_id, responses)
        for ensemble in self.task._filters:
            ensemble.apply(instances)
        # A filter may drop instances, so its results are those of the first.
        for filter_name in instances[0].filtered_resps:
            filtered = [instance.filtered_resps[filter_name] for instance in instances]
            for metric, value in self.task.process_results(self.docs[doc_id], filtered).items():
                yield filter_name, metric, value

    def _answered(self, doc_id: int, responses: Sequence[Sequence[Any]]) -> list[Any]:
        from lm_eval.api.instance import Instance

        output_type = LOGLIKELIHOOD if self.has_choices else self.task.OUTPUT_TYPE
        return [
            Instance(
                request_type=output_type,
                doc=self.docs[doc_id],
                arguments=(),
                idx=index,
                metadata=(self.name, doc_id, self.repeats),
                resps=list(of_request),
            )
            for index, of_request in enumerate(responses)
        ]


@dataclass(frozen=True, slots=True)
class Document:
    """The content of a row: one document of a task of lm-eval."""

    subtask: Subtask = field(repr=False)
    doc_id: int

    @property
    def gold(self) -> int | str | None:
        """Return the index of the right choice, or the right text; None if there are several or none."""
        return self.subtask.golds[self.doc_id]


def gold_of(subtask: Subtask, doc: Any) -> int | str | None:
    """Return the index of the right choice of a document, or the right text; None if there are several or none."""
    task = subtask.task
    target = task.doc_to_text(doc) if getattr(task, 'multiple_input', 0) else task.doc_to_target(doc)
    if getattr(target, 'ndim', None) == 0:  # a number of NumPy
        target = target.item()
    if isinstance(target, int):
        return int(target)
    if not isinstance(target, str):
        return None
    if subtask.has_choices:
        choices = task.doc_to_choice(doc)
        return choices.index(target) if target in choices else None
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A task, a group or a tag of lm-eval: its tasks in order, and the groups among them, the outermost first."""

    subtasks: tuple[Subtask, ...]
    groups: tuple[Mapping[str, Any], ...] = ()
    is_single: bool = True


def load(name: str, include_path: str | None, *, num_shots: int, seed: int, label: str) -> Loaded:
    """Return a task or group with its data, at this number of shots. Raise ConfigError or DataError."""
    manager = manager_of(name, include_path, label)
    definitions = list(leaf_definitions(name, manager, label))
    raise_refusals(label, ((leaf, refusals(config)) for leaf, config in definitions))
    with random_states_kept():
        seed_everything()
        with Caught(packages=('datasets', 'huggingface_hub', 'jinja2', 'yaml'), bare=True) as caught:
            loaded = manager.load(name)
            subtasks = [started(task, num_shots, seed) for task in loaded['tasks'].values()]
    if caught.error is not None:
        raise loading_error(caught.error, definitions, label)
    raise_refusals(label, ((subtask.name, refusals_of_loaded(subtask)) for subtask in subtasks))
    is_single = not loaded.get('groups') and len(subtasks) == 1
    return Loaded(
        subtasks=tuple(subtasks),
        groups=tuple(described_groups(loaded.get('groups') or {})),
        is_single=is_single,
    )


def started(task: Any, num_shots: int, seed: int) -> Subtask:
    """Return a task with its documents at this number of shots, unless it says 0 itself, as in `simple_evaluate`."""
    if task.get_config('num_fewshot') != 0:
        task.set_config(key='num_fewshot', value=num_shots)
    task.set_fewshot_seed(seed=seed)
    return Subtask(task, seed=seed)


def loading_error(error: BaseException, definitions: Sequence[tuple[str, Mapping[str, Any]]], label: str) -> DataError:
    """Return the error for a task that cannot be loaded, with its data set and how to read a file in its place."""
    data_sets = {}
    for _, config in definitions:
        parts = [str(config[key]) for key in ('dataset_path', 'dataset_name') if config.get(key)]
        data_sets[' '.join(parts) or 'made by its own code'] = config.get('dataset_path')
    # The parts of a data set that a group's tasks have one each would say no more.
    if len(data_sets) > 1:
        data_sets = dict.fromkeys(str(path) for path in data_sets.values())
    return DataError(
        f'{label}: {listed([leaf for leaf, _ in definitions])} of lm-eval cannot be loaded, data set: '
        f'{listed(data_sets)}: {type(error).__name__}: {reason_of(error)}; where it cannot be downloaded, write a YAML '
        'of your own that includes that of lm-eval, with dataset_path: json and dataset_kwargs: {data_files: {test: '
        'FILE}}, and give its folder as include_path'
    )


# Definitions, before anything of a task is run or downloaded


def manager_of(name: str, include_path: str | None, label: str) -> Any:
    """Return lm-eval's index of tasks that has this one. Raise ConfigError.

    That of its own 14,000 takes seconds to make, so it is made only if the folder of the user's own does not do.
    """
    check_installed(label)
    if include_path is not None:
        folder = Path(include_path).expanduser()
        if not folder.is_dir():
            raise ConfigError(f'{label}: include_path: {include_path} is no folder; give the folder of its YAML file')
        own = new_manager(str(folder), include_defaults=False)
        entry = own.task_index.get(name)
        if entry is not None and entry.kind.name in ('TASK', 'PY_TASK'):
            return own
        versions = tuple(sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob('*.yaml')))
        return extended_manager(str(folder), versions)
    return default_manager()


def check_installed(label: str) -> None:
    """Raise ConfigError unless an lm-eval that has what is needed is installed."""
    needed = '.'.join(map(str, FIRST_VERSION))
    advice = f"pip install 'llmfoundry-gauntlet[lm-eval]' 'lm-eval>={needed}' installs it"
    try:
        import_module('lm_eval.tasks')
    except ImportError as error:
        raise ConfigError(f'{label}: icl_task_type: lm_eval needs lm-eval ({error}); {advice}') from error
    installed = tuple(int(part) for part in re.findall(r'\d+', version('lm-eval'))[:3])
    if installed < FIRST_VERSION:
        found = version('lm-eval')
        raise ConfigError(f'{label}: icl_task_type: lm_eval needs lm-eval {needed}, found {found}; {advice}')


def new_manager(include_path: str | None, *, include_defaults: bool) -> Any:
    """Return an index of tasks."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=include_defaults)


@functools.cache
def default_manager() -> Any:
    """Return the index of lm-eval's own tasks."""
    return new_manager(None, include_defaults=True)


@functools.lru_cache(maxsize=2)
def extended_manager(folder: str, versions: tuple[tuple[str, int], ...]) -> Any:
    """Return the index of lm-eval's own tasks and those of a folder, whose files are at these times of change."""
    return new_manager(folder, include_defaults=True)


def leaf_definitions(name: str, manager: Any, label: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and keys of a task, or of each task of a group or tag, functions not loaded. Raise ConfigError."""
    index = manager.task_index
    if name not in index:
        path = Path(name).expanduser()
        if path.suffix == '.yaml' and path.is_file():
            from lm_eval.tasks._yaml_loader import load_yaml  # lm-eval 0.4.13 (docs/compatibility.md)

            config = load_yaml(path, resolve_func=False)
            yield from leaves_of(str(config.get('task', name)), config, {}, index)
            return
        meant = closest(name, names_in(manager.include_path, index)) or closest(name, index)
        hint = '`lm-eval ls tasks` lists them' if meant is None else f"did you mean '{meant}'?"
        raise ConfigError(f'{label}: lm_eval_task: lm-eval has no task or group {name!r}; {hint}')
    yield from leaves_of_entry(index[name], {}, index)


def names_in(folder: str | None, index: Mapping[str, Any]) -> list[str]:
    """Return the names of the tasks and groups below a folder; none without one."""
    if folder is None:
        return []
    paths = {name: entry.yaml_path for name, entry in index.items()}
    return [name for name, path in paths.items() if path is not None and Path(folder) in path.parents]


def leaves_of_entry(entry: Any, overrides: Mapping[str, Any], index: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and keys of the tasks below an entry of the index, as lm-eval's factory builds them."""
    if entry.kind.name == 'TAG':
        for member in sorted(entry.tags):
            if member in index:
                yield from leaves_of_entry(index[member], overrides, index)
        return
    yield from leaves_of(entry.name, entry.cfg or {}, overrides, index)


def leaves_of(
    name: str, config: Mapping[str, Any], overrides: Mapping[str, Any], index: Any
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and keys of a task, or of the members of a group, to which the group's other keys apply."""
    members = config.get('task')
    if not isinstance(members, list):
        yield name, {**config, **overrides}
        return
    of_group = {key: value for key, value in config.items() if key not in GROUP_KEYS}
    for member in members:
        given = {**of_group, **overrides}
        member_name = member
        if isinstance(member, Mapping):
            given |= {key: value for key, value in member.items() if key not in GROUP_KEYS}
            member_name = member.get('group', member.get('task'))
        if isinstance(member_name, str) and member_name in index:
            yield from leaves_of_entry(index[member_name], given, index)
        elif isinstance(member, Mapping):
            yield from leaves_of(str(member_name), member, given, index)


def own_shots(name: str, include_path: str | None, label: str) -> int:
    """Return the number of shots that a task says itself, the same for all tasks of a group. Raise ConfigError."""
    manager = manager_of(name, include_path, label)
    numbers = {int(config.get('num_fewshot') or 0) for _, config in leaf_definitions(name, manager, label)}
    if len(numbers) > 1:
        raise ConfigError(
            f'{label}: num_fewshot: the tasks of {name} have {listed(map(str, sorted(numbers)))} shots of their own; '
            'give a number for all, or its tasks one by one'
        )
    return numbers.pop() if numbers else 0


def raise_refusals(label: str, refusals_by_task: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Raise one ConfigError with every reason why tasks cannot be run, each with the tasks that it is about."""
    tasks_by_reason: dict[str, list[str]] = {}
    for task, reasons in refusals_by_task:
        for reason in reasons:
            tasks_by_reason.setdefault(reason, []).append(task)
    if tasks_by_reason:
        raise ConfigError([f'{label}: {listed(tasks)} of lm-eval: {why}' for why, tasks in tasks_by_reason.items()])


def refusals(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a task cannot be run here, from its YAML alone, before any of its code is imported."""
    if config.get('unsafe_code'):
        yield f'{RUNS_PROGRAMS} (unsafe_code: true); {IN_SANDBOX}'
    for key in ('doc_to_image', 'doc_to_audio'):
        if config.get(key):
            yield f'has images or sounds ({key}); allowed: tasks of text'
    if (config.get('dataset_kwargs') or {}).get(TRUST) and int(version('datasets').partition('.')[0]) < 4:
        yield (
            f'runs code of its data set ({TRUST}: true), which needs your consent in lm-eval; save its rows to a file, '
            'or install datasets 4 or later, which runs no such code'
        )
    for entry in config.get('metric_list') or ():
        yield from refusals_of_metric(entry)


def refusals_of_metric(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield why an entry of `metric_list` cannot be used."""
    from lm_eval.api.registry import get_aggregation, get_metric_aggregation

    name = entry.get('metric')
    if name in CODE_METRICS:
        yield f'{RUNS_PROGRAMS} (metric {name}); {IN_SANDBOX}'
    aggregation = entry.get('aggregation')
    if aggregation is None and isinstance(name, str) and get_metric_aggregation(name) is None:
        yield f'the metric {name} has no aggregation; give it one in metric_list, such as aggregation: mean'
    is_name = isinstance(aggregation, str) and '/' not in aggregation  # a function is shown as the path of its file
    if is_name and get_aggregation(aggregation) is None:
        yield f'the metric {name} has the unknown aggregation {aggregation!r}; allowed: a name of its registry'


def refusals_of_loaded(subtask: Subtask) -> Iterator[str]:
    """Yield why a loaded task cannot be run here, for what its YAML does not say."""
    task = subtask.task
    if getattr(task, 'UNSAFE_CODE', False):
        yield f'{RUNS_PROGRAMS}; {IN_SANDBOX}'
    if getattr(task, 'MULTIMODAL', False):
        yield 'has images or sounds; allowed: tasks of text'
    if not subtask.docs:
        yield 'has no documents'
    for metric, aggregation in task.aggregation().items():
        if aggregation is None:
            yield f'the metric {metric} has no aggregation; give it one in metric_list, such as aggregation: mean'


# Descriptions, for records and identities


def described_task(subtask: Subtask) -> dict[str, Any]:
    """Return what records hold of a task: its version, configuration, metrics, and a digest of its documents."""
    task = subtask.task
    return {
        'version': str(task.VERSION),
        'output_type': task.OUTPUT_TYPE,
        'num_fewshot': subtask.num_shots,
        'repeats': subtask.repeats,
        'filters': subtask.filters,
        'num_docs': len(subtask.docs),
        'docs_sha256': digest_of(subtask.docs),
        'config': described_config(task),
    }


def described_config(task: Any) -> dict[str, Any]:
    """Return a task's configuration in JSON types, functions as their source, without paths of this machine."""
    config = dict(task.dump_config())
    metadata = config.get('metadata')
    if isinstance(metadata, Mapping):
        config['metadata'] = {key: value for key, value in metadata.items() if key != OF_THIS_MACHINE}
    text = json.dumps(config, default=str, ensure_ascii=False, sort_keys=True)
    without_addresses: dict[str, Any] = json.loads(ADDRESS.sub('', text))
    return without_addresses


def described_groups(groups: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what records hold of each group: its version, its tasks, and how its numbers follow from theirs."""
    for name, group in groups.items():
        aggregates = []
        for entry in group.aggregate_metric_list or ():
            aggregates.append(
                {
                    'metric': entry.metric,
                    'weight_by_size': bool(entry.weight_by_size),
                    'filter_list': list(entry.filter_list) if entry.filter_list is not None else None,
                }
            )
        yield {
            'name': name,
            'version': group.version,
            'tasks': [task.task_name for task in group.get_all_tasks()],
            'aggregates': aggregates,
        }


def digest_of(docs: Sequence[Any]) -> str:
    """Return a SHA-256 of documents, in hexadecimal digits."""
    digest = hashlib.sha256()
    for doc in docs:
        text = json.dumps(to_json_types(doc), sort_keys=True, ensure_ascii=False)
        digest.update(text.encode('utf-8', 'surrogatepass') + b'\n')
    return digest.hexdigest()


# Random states


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore all random states when the context ends."""
    # The module is above this one, as it imports torch, so it is loaded on use.
    unchanged = import_module('llmfoundry_gauntlet.runtime.unchanged')
    with unchanged.random_states_kept():
        yield


def seed_everything() -> None:
    """Set the random states that lm-eval's `simple_evaluate` sets before it loads tasks."""
    random.seed(RANDOM_SEED)
    import_module('numpy').random.seed(NUMPY_SEED)  # late, as reading a YAML file needs no numpy
    import_module('torch').default_generator.manual_seed(TORCH_SEED)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Drop the warnings of a module of lm-eval until the context ends."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
