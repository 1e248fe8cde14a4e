"""Translate the keys of llm-foundry's evaluation files, and of its training for our plug-in, into ours.

Keys are those of llm-foundry 0.22. Each `map_` function also returns a line per key with its translation, or the reason
why it has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from llmfoundry_gauntlet.config.settings import is_interval
from llmfoundry_gauntlet.config.yaml import YamlProblems, decode, find_yaml
from llmfoundry_gauntlet.errors import ConfigError, describe, suggestion

PLUGIN = 'eval_gauntlet_fast'  # our callback in llm-foundry's own training
RENAMED = {'icl_tasks': 'tasks', 'eval_gauntlet': 'gauntlet', 'icl_seq_len': 'max_seq_len'}
BATCH_SIZE = 'device_eval_batch_size'
SUBSET_KEYS = ('icl_subset_num_batches', 'eval_subset_num_batches')  # the first that is given counts
ICL_KEYS = (*RENAMED, 'icl_subset_num_batches', BATCH_SIZE)
MODEL_KEYS = ('model_name', 'model', 'tokenizer', 'load_path')
NO_EFFECT = {  # keys of an evaluation file
    'callbacks': 'nothing is trained',
    'code_paths': 'no code is run; add your own task types and metrics through entry points (docs/extending.md)',
    'console_log_interval': 'the scores are printed at the end',
    'eval_first': 'nothing is trained',
    'eval_interval': 'nothing is trained',
    'eval_loader': 'only icl_tasks and score are evaluated',
    'eval_loaders': 'only icl_tasks and score are evaluated',
    'log_config': 'results.json contains the settings',
    'metadata': 'it is only used by the MosaicML platform',
    'python_log_level': 'the log level is fixed',
    'seed': 'scores do not depend on it: decoding is greedy, and SCORE has its own seeds',
}
EVALUATION_KEYS = (*ICL_KEYS, *MODEL_KEYS, *NO_EFFECT, 'models', 'eval_subset_num_batches', 'variables')

KIND = 'hf_causal_lm'
API = 'is an API; write the requests with gauntlet export, run them there, and score them with gauntlet run --outputs'
OTHER_KINDS = {
    'mpt_causal_lm': (
        "is llm-foundry's own class; convert the checkpoint to a Hugging Face folder with its "
        f'scripts/inference/convert_composer_to_hf.py, and give that folder as {KIND}'
    ),
    'hf_t5': 'is an encoder-decoder model; only decoders are supported',
    **dict.fromkeys(('openai_causal_lm', 'openai_chat', 'fmapi_causal_lm', 'fmapi_chat'), API),
}
OWN_ATTENTION = 'the engine uses its own attention where it can; scores are the same either way'
OWN_TOKEN = 'the token of `huggingface-cli login`, or HF_TOKEN, is used'
OWN_CODE = "it is off; to run the code of a model's folder, set trust_remote_code at the top of the file"


TOKENIZER_ARGUMENTS = {  # without effect
    'model_max_length': 'use max_seq_len',
    'padding_side': 'nothing is padded',
    'token': OWN_TOKEN,
    'truncation_side': "use 'truncation'",
    'trust_remote_code': OWN_CODE,
    'use_auth_token': OWN_TOKEN,
}
OTHER_ARGUMENT = (
    'may change tokens, and is not supported; save a tokenizer with it (from_pretrained, then save_pretrained), and '
    'give that folder'
)


MODEL_ARGUMENTS = {  # without effect
    'additional_eval_metrics': 'all metrics of a task are computed',
    'additional_train_metrics': 'nothing is trained',
    'allow_embedding_resizing': 'the weights are run as they are',
    'attn_implementation': OWN_ATTENTION,
    'init_device': 'weights are loaded directly onto the device',
    'should_save_peft_only': 'nothing is saved',
    'trust_remote_code': OWN_CODE,
    'use_auth_token': OWN_TOKEN,
    'use_flash_attention_2': OWN_ATTENTION,
    'use_train_metrics': 'nothing is trained',
}
REFUSED = {  # arguments that may only be false or empty
    'load_in_8bit': "weights are not quantised, which would change scores; remove it to run with 'precision'",
    'peft_config': 'describes an adapter to be trained; give a trained one as pretrained_lora_id_or_path',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundryModel:
    """A `model` block of llm-foundry with the name hf_causal_lm."""

    name: str
    pretrained_model_name_or_path: str
    pretrained: bool | None = True
    config_overrides: dict[str, Any] | None = None
    pretrained_lora_id_or_path: str | None = None
    load_in_8bit: Any = None
    peft_config: Any = None
    without_effect: ClassVar[Mapping[str, str]] = MODEL_ARGUMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundryTokenizer:
    """A `tokenizer` block of llm-foundry."""

    name: str
    kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundryEntry:
    """An entry of llm-foundry's `models`."""

    model_name: str
    model: FoundryModel
    tokenizer: FoundryTokenizer
    load_path: str | None = None

    def __post_init__(self) -> None:
        if not self.model_name.strip():
            raise ValueError(f'model_name: is {self.model_name!r}; allowed: text')


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """One entry of `models`: its name, its folder below `out`, and its arguments for `evaluate`."""

    name: str
    folder: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A file's values under our keys, a line for each of llm-foundry's keys, and the models listed in it, if any."""

    values: dict[str, Any]
    lines: tuple[str, ...] = ()
    models: tuple[ListedModel, ...] = ()


class Notes(YamlProblems):
    """Collects the problems of a translation and its lines about keys."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.lines: list[str] = []

    def no_effect(self, reasons: Mapping[str, str], given: Iterable[str], prefix: str = '') -> None:
        """Add a line for each given key that changes nothing."""
        self.lines += [f'{prefix}{key}: no effect: {reasons[key]}' for key in given if key in reasons]

    def mapped(self, values: dict[str, Any], models: tuple[ListedModel, ...] = ()) -> Mapped:
        """Return these values and models with the lines. Raise ConfigError with all problems if there are any."""
        self.raise_all()
        return Mapped(values=values, lines=tuple(self.lines), models=models)


def map_evaluation(values: Mapping[str, Any], *, source: str, num_ranks: int) -> Mapped:
    """Return an evaluation file under our keys, with its models in file order.

    Without llm-foundry's `models` or `model` the values keep our `model`, and no models are listed.
    Raise ConfigError with all problems, including unsupported kinds of models.
    """
    notes = Notes(source)
    values = {key: value for key, value in values.items() if value is not None}
    entries = model_entries(values, notes)
    if entries is None:  # model and tokenizer are our own keys, the other two are nobody's
        own_keys = {'model', 'tokenizer'}
        for key in ('model_name', 'load_path'):
            if key in values:
                notes.add(key, 'belongs to models, or to a model that is a mapping with a name')
    else:
        own_keys = set()
    own = {key: value for key, value in values.items() if key in own_keys or key not in EVALUATION_KEYS}
    settings = merge_settings(icl_settings(values, notes, num_ranks=num_ranks), own, notes)
    if entries is not None and 'model_config' in settings:
        notes.add('model_config', "belongs to a 'model' that is a path, not to models")
    notes.no_effect(NO_EFFECT, values)
    if num_ranks == 1:
        notes.no_effect({'fsdp_config': 'there is one rank'}, settings)
        settings.pop('fsdp_config', None)
    if entries is not None and 'out' not in settings:
        settings['out'] = f'runs/{settings.get("run_name", Path(source).stem)}'
        notes.lines.append(f'out is not given -> out: {settings["out"]}')
    listings = [listed_model(entry, index, notes, settings) for index, entry in enumerate(entries or ())]
    models = tuple(model for model in listings if model is not None)
    check_output_folders(models, notes)
    return notes.mapped(settings, models)


def map_plugin(settings: Mapping[str, Any], train_config: Mapping[str, Any]) -> Mapped:
    """Return our callback's settings in llm-foundry's own training, with defaults from its training file.

    Raise ConfigError if the file has `icl_tasks`: llm-foundry would evaluate them too, and log the same keys.
    """
    notes = Notes(f'callbacks.{PLUGIN}')
    if any(train_config.get(key) is not None for key in ('icl_tasks', 'icl_tasks_str')):
        notes.add('', "icl_tasks is llm-foundry's own evaluation, with the same metric keys; give tasks here instead")
        raise ConfigError(notes.messages)
    values = dict(settings)
    length = train_config.get('icl_seq_len') or train_config.get('max_seq_len')
    if values.get('max_seq_len') is None and length is not None:
        values['max_seq_len'] = length
        notes.lines.append(f'max_seq_len: {length}, from the training file')
    if values.get('interval') is None and train_config.get('eval_interval') is not None:
        values['interval'] = interval_of(train_config, notes)
        if not values['interval'] and not notes.messages:
            notes.add('interval', 'is missing, and eval_interval of the training file is 0 (never); give one')
    return notes.mapped(values)


def icl_settings(keys: Mapping[str, Any], notes: Notes, *, num_ranks: int) -> dict[str, Any]:
    """Return our settings for llm-foundry's keys for tasks, gauntlet, length and subset."""
    settings: dict[str, Any] = {}
    for key, our_key in RENAMED.items():
        if key in keys:
            settings[our_key] = keys[key] if key == 'icl_seq_len' else located(keys[key], key, notes)
            notes.lines.append(f'{key}: {short(keys[key])} -> {our_key}: {short(settings[our_key])}')
    given = [key for key in SUBSET_KEYS if key in keys]
    if given:
        first, *others = given
        notes.no_effect(dict.fromkeys(others, f'{first} takes its place'), others)
        num_items = subset_items_of(first, keys, notes, num_ranks=num_ranks)
        if num_items is not None:
            settings['subset_items'] = num_items
    if keys.get(BATCH_SIZE) is not None and 'subset_items' not in settings:
        notes.lines.append(f'{BATCH_SIZE}: no effect on scores or speed: batches are made by tokens (tokens_per_batch)')
    return settings


def subset_items_of(key: str, keys: Mapping[str, Any], notes: Notes, *, num_ranks: int) -> int | None:
    """Return the number of items in llm-foundry's number of batches, the value of `key`; None for all items."""
    num_batches, num_rows = keys[key], keys.get(BATCH_SIZE)
    if num_batches == -1:
        notes.lines.append(f'{key}: -1 -> subset_items: null (all items)')
        return None
    if not (is_count(num_batches) and is_count(num_rows)):
        notes.add(key, f'is {short(num_batches)} with {BATCH_SIZE} {short(num_rows)}; allowed: -1, or both 1 or more')
        return None
    num_items: int = num_batches * num_rows * num_ranks
    ranks = 'one rank' if num_ranks == 1 else f'{num_ranks} ranks'
    how = f'{BATCH_SIZE} {num_rows} on {ranks}; stratified by category, not the first rows'
    notes.lines.append(f'{key}: {num_batches} -> subset_items: {num_items} ({how})')
    return num_items


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 1."""
    return type(value) is int and value > 0


def interval_of(values: Mapping[str, Any], notes: Notes) -> list[str]:
    """Return llm-foundry's interval in our notation: periodic and at the end; a bare number counts epochs."""
    every, is_first = values['eval_interval'], bool(values.get('eval_first'))
    is_epochs = isinstance(every, int) and not isinstance(every, bool) and every >= 0
    is_time = isinstance(every, str) and (every == '0' or is_interval(every))
    if not is_epochs and not is_time:
        notes.add(
            'eval_interval', f'is {describe(every)}; allowed: a number of epochs (0: never), or a time such as 500ba'
        )
        return []
    interval = []
    if is_first:
        interval.append('first')
    if every not in (0, '0'):
        interval += [f'{every}ep' if is_epochs else str(every), 'last']
    first = ', with eval_first' if is_first else ''
    ours = f'interval: {short(interval)}' if interval else 'nothing is evaluated'
    notes.lines.append(f'eval_interval: {every}{first} -> {ours}')
    return interval


def located(value: Any, key: str, notes: Notes) -> Any:
    """Return the path of a YAML file that another file refers to; return values other than text unchanged."""
    if not isinstance(value, str):
        return value
    path = find_yaml(value, Path(notes.source))
    if path is None:
        notes.add(key, f'there is no file {value!r} (looked in the working directory and beside {notes.source})')
        return None
    return str(path)


def merge_settings(settings: Mapping[str, Any], own: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Return the merged settings; a key with different values in both is a problem."""
    own = {key: value for key, value in own.items() if value is not None or key not in settings}
    for key in settings.keys() & own.keys():
        if own[key] != settings[key]:
            notes.add(
                key,
                f"is {short(own[key])}, but llm-foundry's keys make it {short(settings[key])}; leave one of them out",
            )
    return {**settings, **own}


def model_entries(values: Mapping[str, Any], notes: Notes) -> list[Any] | None:
    """Return the entries of `models`, or the one top-level `model`; None if the file uses our own keys."""
    models = values.get('models')
    if models is None and isinstance(values.get('model'), Mapping):
        entry = {key: values[key] for key in MODEL_KEYS if key in values}
        return [{'model_name': values['model'].get('name'), **entry}]
    if models is not None and 'model' in values:
        notes.add('models', "is given together with 'model'; leave one of them out")
    if models is not None and not (isinstance(models, list) and models):
        notes.add('models', f'is {describe(models)}; allowed: a list of models')
        return []
    return models


def listed_model(entry: Any, index: int, notes: Notes, settings: Mapping[str, Any]) -> ListedModel | None:
    """Return one entry of `models`; None if it has problems, which are added to `notes`."""
    path = f'models[{index}]'
    if isinstance(entry, Mapping) and isinstance(entry.get('model'), Mapping):
        if not check_kind(entry['model'].get('name'), f'{path}.model', notes):
            return None
        given = [key for key, value in entry['model'].items() if value is not None]
        notes.no_effect(MODEL_ARGUMENTS, given, f'{path}.model.')
    decoded: FoundryEntry | None = decode(FoundryEntry, entry, path, notes)
    if decoded is None:
        return None
    model, checkpoint = decoded.model, decoded.load_path
    for key, reason in REFUSED.items():
        if value := getattr(model, key):
            notes.add(f'{path}.model.{key}', f'is {describe(value)}: {reason}')
    if checkpoint is None and model.pretrained is False:
        notes.add(f'{path}.model.pretrained', 'is false: the weights would be random; give load_path, a checkpoint')
    check_tokenizer(decoded.tokenizer, f'{path}.tokenizer', notes)
    # With a checkpoint the name is that of the configuration alone.
    arguments = {
        'model': checkpoint or model.pretrained_model_name_or_path,
        'tokenizer': decoded.tokenizer.name,
        'model_config': model.pretrained_model_name_or_path if checkpoint else None,
        'config_overrides': model.config_overrides,
        'adapter': model.pretrained_lora_id_or_path,
    }
    name = decoded.model_name
    folder = '/'.join(part for part in PurePosixPath(name).parts if part not in ('/', '.', '..'))
    notes.lines.append(f'{path}: {name} -> model: {arguments["model"]}, out: {settings.get("out")}/{folder}')
    return ListedModel(name=name, folder=folder, arguments={key: value for key, value in arguments.items() if value})


def check_tokenizer(tokenizer: FoundryTokenizer, path: str, notes: Notes) -> None:
    """Add a problem for a tokenizer that is not from Hugging Face, and for arguments that might change its tokens."""
    if tokenizer.name == 'tiktoken':
        notes.add(f'{path}.name', "tiktoken is llm-foundry's own class; give a Hugging Face tokenizer with its tokens")
    given = tokenizer.kwargs or {}
    notes.no_effect(TOKENIZER_ARGUMENTS, given, f'{path}.kwargs.')
    for key in given.keys() - TOKENIZER_ARGUMENTS.keys():
        notes.add(f'{path}.kwargs.{key}', OTHER_ARGUMENT)


def check_output_folders(models: tuple[ListedModel, ...], notes: Notes) -> None:
    """Add a problem for each pair of models whose folders are the same or nested."""
    for index, model in enumerate(models):
        for other in models[:index]:
            folder, earlier = PurePosixPath(model.folder), PurePosixPath(other.folder)
            if folder.is_relative_to(earlier) or earlier.is_relative_to(folder):
                message = f'the output folders of {other.name!r} and {model.name!r} overlap; use other names'
                notes.add(f'models[{index}].model_name', message)


def check_kind(name: Any, path: str, notes: Notes) -> bool:
    """Return whether this kind of model can be run; if not, add a problem that says what to do."""
    if name == KIND:
        return True
    if name in OTHER_KINDS:
        notes.add(f'{path}.name', f'{name} {OTHER_KINDS[name]}')
    elif name is None:
        notes.add(path, f"the key 'name' is missing, such as {KIND}")
    else:
        notes.add(f'{path}.name', f'there is no kind of model {name!r}{suggestion(str(name), [KIND, *OTHER_KINDS])}')
    return False


def short(value: Any) -> str:
    """Return a value as short text that fits on one line."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, int)) for item in value):
        return f'[{", ".join(map(str, value))}]'
    if isinstance(value, (list, tuple, Mapping)):
        return f'{describe(value)} of {len(value)}'
    return 'null' if value is None else str(value)
