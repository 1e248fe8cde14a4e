"""llm-foundry's keys of training and evaluation files, mapped onto ours.

Keys of its version 0.22. Each function tells in lines what became of a key, and names those that have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from llmfoundry_gauntlet.config.decode import Problems, describe, suggestion
from llmfoundry_gauntlet.config.llm_foundry_models import Mapped, Notes, check_text, mapping, model_arguments, short
from llmfoundry_gauntlet.config.settings import is_interval
from llmfoundry_gauntlet.config.sources import find_yaml

CALLBACK = 'eval_gauntlet'  # the callback's name is that of llm-foundry's key
PLUGIN = 'eval_gauntlet_fast'  # and in llm-foundry's own training
SOURCES = {'icl_tasks': 'tasks', CALLBACK: 'gauntlet'}
ICL_KEYS = (*SOURCES, 'icl_seq_len', 'icl_subset_num_batches', 'device_eval_batch_size')
TRAINING_KEYS = (*ICL_KEYS, 'eval_first', 'eval_subset_num_batches')
MODEL_KEYS = ('model_name', 'model', 'tokenizer', 'load_path')
NO_EFFECT = {
    'callbacks': 'nothing is trained',
    'code_paths': 'no code is run; task types and metrics of your own come by entry points (docs/extending.md)',
    'console_log_interval': 'the scores are printed at the end',
    'eval_first': 'nothing is trained',
    'eval_interval': 'nothing is trained',
    'eval_loader': 'icl_tasks and score alone are evaluated',
    'eval_loaders': 'icl_tasks and score alone are evaluated',
    'log_config': 'results.json holds the settings',
    'metadata': 'it is for the MosaicML platform alone',
    'python_log_level': 'what is worth knowing is printed',
    'seed': 'no score depends on it: greedy replies are not drawn, SCORE has seeds of its own',
}
EVALUATION_KEYS = (*ICL_KEYS, *MODEL_KEYS, *NO_EFFECT, 'models', 'eval_subset_num_batches', 'variables')
BY_TOKENS = 'no effect on scores or speed: batches are made by tokens (tokens_per_batch)'


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """One entry of `models`: its name, its folder below `out`, and what `evaluate` is given of it.

    `config_overrides` are put into the configuration that its `model_config` names.
    """

    name: str
    folder: str
    arguments: dict[str, Any]
    config_overrides: dict[str, Any] = field(default_factory=dict)


def map_training(values: Mapping[str, Any], *, source: str, num_ranks: int) -> Mapped:
    """A training file whose top-level keys for ICL are the callback's; without such keys, as it is.

    With `icl_tasks` at the top the rest is as llm-foundry has it too: `eval_interval` is when, by default at each
    epoch, `max_seq_len` how long. Raises ConfigError for keys that disagree with those of the callback.
    """
    notes = Notes(Problems(source))
    given = {key: value for key, value in values.items() if key not in (*TRAINING_KEYS, 'variables')}
    keys = {key: values[key] for key in TRAINING_KEYS if values.get(key) is not None}
    if not keys:
        return Mapped(values=given)
    callbacks = mapping(given.get('callbacks'), 'callbacks', notes.problems)
    own = mapping(callbacks.get(CALLBACK), f'callbacks.{CALLBACK}', notes.problems)
    notes.check()
    if 'icl_tasks' not in keys and CALLBACK not in callbacks:
        if CALLBACK in keys:
            notes.problems.add(CALLBACK, 'is a gauntlet without tasks; give icl_tasks as well')
            notes.check()
        for key in keys:
            notes.no_effect(key, 'nothing is evaluated; give icl_tasks, or a callback eval_gauntlet')
        return notes.mapped(given)
    settings = icl_settings(keys, notes, source=source, num_ranks=num_ranks)
    if 'icl_tasks' in keys:
        settings |= icl_schedule({**given, **keys}, own, notes)
        given.pop('eval_interval', None)  # the callback's from here on
    elif 'eval_first' in keys:
        notes.no_effect('eval_first', f'callbacks.{CALLBACK}.interval says when')
    callbacks[CALLBACK] = joined(settings, own, f'callbacks.{CALLBACK}.', notes.problems)
    return notes.mapped({**given, 'callbacks': callbacks})


def map_evaluation(values: Mapping[str, Any], *, source: str, num_ranks: int) -> tuple[Mapped, tuple[ListedModel, ...]]:
    """An evaluation file in our keys, without its models; and the models, in its order.

    Without llm-foundry's `models` or `model` the values keep their `model` and there is no listed one.
    Raises ConfigError with every problem, also for a kind of model that cannot be run here.
    """
    notes = Notes(Problems(source))
    values = {key: value for key, value in values.items() if value is not None}
    found = listed(values, notes.problems)
    top = MODEL_KEYS if found is not None else ('model_name', 'load_path')
    given = {key: value for key, value in values.items() if key not in EVALUATION_KEYS or key in MODEL_KEYS}
    given = {key: value for key, value in given.items() if key not in top}
    keys = {key: value for key, value in values.items() if key in EVALUATION_KEYS}
    for key in top if found is None else ():
        if key in keys:
            notes.problems.add(key, 'belongs to models, or to a model that is a mapping with a name')
    settings = icl_settings(keys, notes, source=source, num_ranks=num_ranks)
    settings = joined(settings, given, '', notes.problems)
    for key in (key for key in keys if key in NO_EFFECT):
        notes.no_effect(key, NO_EFFECT[key])
    if num_ranks == 1 and settings.pop('fsdp_config', None) is not None:
        notes.no_effect('fsdp_config', 'there is one rank')
    if found is not None and 'out' not in settings:
        settings['out'] = f'runs/{settings.get("run_name", Path(source).stem)}'
        notes.lines.append(f'out is not given -> out: {settings["out"]}')
    models = tuple(listed_model(entry, index, notes, settings) for index, entry in enumerate(found or ()))
    check_folders(models, notes.problems)
    return notes.mapped(settings), models


def map_plugin(settings: Mapping[str, Any], train_config: Mapping[str, Any]) -> Mapped:
    """The settings of our callback in llm-foundry's own training; what they leave out comes from its file.

    Raises ConfigError for `icl_tasks` in it: llm-foundry would evaluate these too, and log the same keys.
    """
    notes = Notes(Problems(f'callbacks.{PLUGIN}'))
    if any(train_config.get(key) is not None for key in ('icl_tasks', 'icl_tasks_str')):
        notes.problems.add('', "icl_tasks is llm-foundry's own evaluation, with the same metric keys; give tasks here")
        notes.check()
    values = dict(settings)
    length = train_config.get('icl_seq_len') or train_config.get('max_seq_len')
    if values.get('max_seq_len') is None and length is not None:
        values['max_seq_len'] = length
        notes.lines.append(f'max_seq_len: {length}, from the training file')
    if values.get('interval') is None and train_config.get('eval_interval') is not None:
        values['interval'] = interval_of(train_config, notes)
    return notes.mapped(values)


def icl_settings(keys: Mapping[str, Any], notes: Notes, *, source: str, num_ranks: int) -> dict[str, Any]:
    """Our settings for llm-foundry's keys of tasks, gauntlet, length and subset."""
    settings: dict[str, Any] = {}
    for key, our_key in SOURCES.items():
        if key in keys:
            settings[our_key] = located(keys[key], key, source, notes.problems)
            notes.became(key, keys[key], our_key, settings[our_key])
    if 'icl_seq_len' in keys:
        settings['max_seq_len'] = keys['icl_seq_len']
        notes.became('icl_seq_len', keys['icl_seq_len'], 'max_seq_len', keys['icl_seq_len'])
    wanted = {key: keys[key] for key in ('icl_subset_num_batches', 'eval_subset_num_batches') if key in keys}
    num_rows = keys.get('device_eval_batch_size')
    for index, (key, num_batches) in enumerate(wanted.items()):
        if index > 0:
            notes.no_effect(key, 'icl_subset_num_batches says it')
        elif num_batches == -1:
            notes.became(key, num_batches, 'subset_items', None, 'all items')
        elif not (is_count(num_batches) and is_count(num_rows)):
            rows = f'with {short(num_rows)} rows of device_eval_batch_size'
            notes.problems.add(key, f'is {short(num_batches)} {rows}; allowed: -1, or both 1 or more')
        else:
            settings['subset_items'] = num_batches * num_rows * num_ranks
            ranks = 'one rank' if num_ranks == 1 else f'{num_ranks} ranks'
            what = f'{num_rows} rows of device_eval_batch_size on {ranks}; by category, not the first rows'
            notes.became(key, num_batches, 'subset_items', settings['subset_items'], what)
    if num_rows is not None and 'subset_items' not in settings:
        notes.no_effect('device_eval_batch_size', BY_TOKENS)
    return settings


def icl_schedule(values: Mapping[str, Any], own: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return when and how long llm-foundry evaluates in training, where the callback's `own` keys do not say it."""
    settings: dict[str, Any] = {}
    if 'eval_interval' in values or 'eval_first' in values or own.get('interval') is None:
        settings['interval'] = interval_of(values, notes)
    if 'max_seq_len' in values and 'icl_seq_len' not in values and own.get('max_seq_len') is None:
        settings['max_seq_len'] = values['max_seq_len']
        length = values['max_seq_len']
        notes.lines.append(f'icl_seq_len is not given -> max_seq_len: {length}, the length of training')
    return settings


def interval_of(values: Mapping[str, Any], notes: Notes) -> list[str]:
    """Return when llm-foundry evaluates, in our words: at each interval and at the end; a bare number is epochs."""
    is_given, first = values.get('eval_interval') is not None, bool(values.get('eval_first'))
    every = values['eval_interval'] if is_given else 1
    is_epochs = isinstance(every, int) and not isinstance(every, bool) and every >= 0
    if not is_epochs and not (isinstance(every, str) and (every == '0' or is_interval(every))):
        notes.problems.add(
            'eval_interval', f'is {describe(every)}; allowed: a number of epochs (0: never), or a time such as 500ba'
        )
        return []
    default = '' if is_given else ', its default'
    times = [f'{every}ep' if isinstance(every, int) else str(every), 'last'] if every not in (0, '0') else []
    interval = ['first', *times] if first else times
    notes.lines.append(f'eval_interval: {every}{default}{first * ", with eval_first"} -> interval: {short(interval)}')
    return interval


def located(value: Any, key: str, source: str, problems: Problems) -> Any:
    """A path to a YAML file as it can be opened from here; anything else as it is."""
    if not isinstance(value, str):
        return value
    found = find_yaml(value, Path(source))
    if found is None:
        problems.add(key, f'there is no file {value!r} (looked in the working directory and beside {source})')
    return None if found is None else str(found)


def joined(settings: Mapping[str, Any], own: Mapping[str, Any], where: str, problems: Problems) -> dict[str, Any]:
    """Both; a key that both have with different values is a problem."""
    for key in settings.keys() & {key for key, value in own.items() if value is not None}:
        mine, theirs = (as_set(value) if key == 'interval' else value for value in (own[key], settings[key]))
        if mine != theirs:
            problems.add(
                f'{where}{key}',
                f"is {short(own[key])}, but llm-foundry's keys make it {short(settings[key])}; leave one of them out",
            )
    return {**settings, **{key: value for key, value in own.items() if value is not None or key not in settings}}


def listed(values: Mapping[str, Any], problems: Problems) -> list[Any] | None:
    """The entries of `models`, or one of the keys at the top; None where the file is in our own keys."""
    models = values.get('models')
    if models is not None and 'model' in values:
        problems.add('models', "stands beside 'model'; leave one of them out")
    if models is None:
        if not isinstance(values.get('model'), Mapping):
            return None
        entry = {key: values[key] for key in MODEL_KEYS if key in values}
        return [{'model_name': values['model'].get('name'), **entry}]
    if not isinstance(models, list) or not models:
        problems.add('models', f'is {describe(models)}; allowed: a list of models')
        return []
    return models


def listed_model(entry: Any, index: int, notes: Notes, settings: Mapping[str, Any]) -> ListedModel:
    """One entry of `models`; what is wrong with it is noted."""
    path = f'models[{index}]'
    if not isinstance(entry, Mapping):
        notes.problems.add(path, f'is {describe(entry)}; allowed: a mapping')
        entry = {}
    for key in entry:
        if key not in MODEL_KEYS:
            notes.problems.add(f'{path}.{key}', f'unknown key{suggestion(str(key), MODEL_KEYS)}')
    for key in ('model_name', 'model', 'tokenizer'):
        if entry and entry.get(key) is None:
            notes.problems.add(path, f"the key '{key}' is missing")
    for key in ('model_name', 'load_path'):
        check_text(entry.get(key), f'{path}.{key}', notes.problems)
    arguments, overrides = model_arguments(entry, path, notes)
    name = str(entry.get('model_name'))
    folder = '/'.join(part for part in PurePosixPath(name).parts if part not in ('/', '.', '..'))
    notes.lines.append(f'{path}: {name} -> model: {short(arguments.get("model"))}, out: {settings.get("out")}/{folder}')
    return ListedModel(name=name, folder=folder, arguments=arguments, config_overrides=overrides)


def check_folders(models: tuple[ListedModel, ...], problems: Problems) -> None:
    """Notes models whose records would lie in each other's folder."""
    for index, model in enumerate(models):
        for other in models[:index]:
            one, two = PurePosixPath(other.folder), PurePosixPath(model.folder)
            if one.is_relative_to(two) or two.is_relative_to(one):
                message = f'the folders of {other.name!r} and {model.name!r} lie in each other; give other names'
                problems.add(f'models[{index}].model_name', message)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def as_set(value: Any) -> set[str]:
    """A list's entries as text, or the one that stands without a list."""
    return {str(entry) for entry in (value if isinstance(value, (list, tuple)) else [value])}
