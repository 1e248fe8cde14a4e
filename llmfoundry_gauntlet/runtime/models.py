"""Load models and tokenizers from Hugging Face folders or names and checkpoints, local or in object stores."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer  # type: ignore[import-untyped]
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from llmfoundry_gauntlet.config.run import ModelSettings
from llmfoundry_gauntlet.config.yaml import InvalidValuesError
from llmfoundry_gauntlet.data.hub import download_weights, find_model, find_model_folder, is_from_hub
from llmfoundry_gauntlet.data.stores import scheme_of
from llmfoundry_gauntlet.errors import Caught, ConfigError, ModelError, describe, suggestion, tokenizer_errors
from llmfoundry_gauntlet.runtime.averages import mean_of
from llmfoundry_gauntlet.runtime.checkpoint_folders import downloaded, named_as, what_is_in_it
from llmfoundry_gauntlet.runtime.checkpoints import (
    ADAPTER_CONFIG,
    CONFIG,
    OF_ACCELERATE,
    CheckpointContent,
    StoredWeights,
    has_weights,
    is_sharded_checkpoint,
    model_errors,
    place_of_config,
    read_file,
    read_folder,
    read_sharded,
    read_tensors,
    reason_of,
)
from llmfoundry_gauntlet.runtime.loading import WeightSource, load_network
from llmfoundry_gauntlet.types import TrainingPoint

GGUF = '.gguf'  # the suffix of its files
NOT_AVERAGED = 'a GGUF file cannot be averaged; give the checkpoints that it was made of'
GENERATION = 'generation_config.json'
TOKENIZER, TOKENIZER_CONFIG = 'tokenizer.json', 'tokenizer_config.json'
OF_TOKENIZER = ('tokenizer', 'vocab', 'spiece', 'sentencepiece', 'merges')  # prefixes of its file names
TOKENIZER_SUFFIXES = ('.model', '.tiktoken')


def load_config(name: str, settings: ModelSettings) -> PretrainedConfig:
    """Load a model configuration by folder or name, and apply the overrides. Raise ConfigError or ModelError."""
    folder = find_model_folder(name)
    check_objects(folder, CONFIG)
    with model_errors(f'{place_of(folder, CONFIG)}: the model configuration cannot be loaded'):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    return with_overrides(config, settings.config_overrides)


def with_overrides(config: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """Set the overrides in a configuration and return it. Raise ConfigError or ModelError."""
    known = [*config.to_dict(), *config.attribute_map]
    unknown = [key for key in overrides if key not in known]
    if unknown:
        raise ConfigError([f"config_overrides: unknown key '{key}'{suggestion(key, known)}" for key in unknown])
    config.update(dict(overrides))
    check_numbers(config)
    return config


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer by folder or name. Raise ModelError."""
    folder = find_model_folder(name)
    if not any(path.name.startswith(OF_TOKENIZER) or path.suffix in TOKENIZER_SUFFIXES for path in folder.iterdir()):
        raise ModelError(f'{name}: has no tokenizer; give one with --tokenizer, a folder or a name on the hub')
    check_objects(folder, TOKENIZER, TOKENIZER_CONFIG, 'special_tokens_map.json', 'added_tokens.json')
    with tokenizer_errors() as caught:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return tokenizer
    # Name the file that is wrong: the tokenizer's own if it cannot be read, else the one of its settings.
    wrong_file = TOKENIZER_CONFIG
    if (folder / TOKENIZER).is_file():
        with tokenizer_errors() as of_file:
            Tokenizer.from_file(str(folder / TOKENIZER))
        if of_file.error is not None:
            wrong_file = TOKENIZER
    path = place_of(folder, wrong_file)
    raise ModelError(f'{path}: the tokenizer cannot be loaded: {reason_of(caught.error)}') from caught.error


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """Load the generation configuration in a folder; return None if it has none. Raise ModelError."""
    if not (folder / GENERATION).is_file():
        return None
    check_objects(folder, GENERATION)
    with model_errors(f'{folder / GENERATION}: cannot be loaded'):
        config: GenerationConfig = GenerationConfig.from_pretrained(folder)
    return config


def place_of(folder: Path, file: str) -> Path:
    """Return the path of a file in a folder, or the folder if there is no such file."""
    return folder / file if (folder / file).exists() else folder


def check_objects(folder: Path, *files: str) -> None:
    """Raise ModelError if one of these files exists in the folder and does not contain a JSON object."""
    for path in (folder / file for file in files):
        if not path.is_file():
            continue
        with model_errors(f'{path}: is not JSON in UTF-8', 'copy it again'):
            content: Any = json.loads(path.read_text(encoding='utf-8'))
        if not isinstance(content, dict):
            raise ModelError(f'{path}: is {describe(content)}; allowed: a JSON object')


def check_numbers(config: PretrainedConfig) -> None:
    """Raise ModelError if a configuration has text, a mapping or a list instead of a number.

    A list is allowed instead of an integer, as some models accept one (eos_token_id), but not instead of a float.
    """
    if getattr(config, 'has_no_defaults_at_init', False):  # of transformers below 5 (docs/compatibility.md)
        return
    for key, default in type(config)().to_dict().items():
        if isinstance(default, bool) or not isinstance(default, (int, float)):
            continue
        value = getattr(config, key, None)
        refused = (str, Mapping) if isinstance(default, int) else (str, Mapping, list)
        if isinstance(value, refused):
            raise ModelError(f'{place_of_config(config)}: {key} is {describe(value)}; allowed: a number')


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model's configuration and tokenizer; `load` returns the model with its weights on a device."""

    settings: ModelSettings
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    load: Callable[[torch.device], Any]
    revision: str | None = None  # the commit of a model from the hub
    training: TrainingPoint | None = None  # of a checkpoint of Composer

    @property
    def record(self) -> dict[str, Any]:
        """Return the fields that describe the model in results.json."""
        settings = self.settings
        return {
            'name': settings.model,
            'revision': self.revision,
            'adapter': settings.adapter,
            'averaged_with': list(settings.averaged_with) or None,
            'dtype': settings.dtype,
            'config_overrides': settings.config_overrides or None,
        }


@contextlib.contextmanager
def open_model(model: str, **settings: Any) -> Iterator[ModelSource]:
    """Open a model with these ModelSettings; a copy from an object store is deleted when the context ends.

    All ranks must call this. Raise ConfigError, ModelError or StoreError.
    """
    try:
        wanted = ModelSettings(model=model, **settings)
    except InvalidValuesError as error:
        raise ConfigError(error.problems) from error
    if wanted.adapter is not None and not scheme_of(wanted.adapter):
        find_model_folder(wanted.adapter)  # raises before anything is loaded
    with contextlib.ExitStack() as copies:

        def local(name: str) -> tuple[Path, str]:
            """Return the path of a file or folder, copied from its store if it is in one, and its name."""
            if not scheme_of(name):
                return find_model(name), name
            path, uri = copies.enter_context(downloaded(name))
            copies.enter_context(named_as(uri, path))
            return path, uri

        # `here` are the settings with local paths; messages and records have the names that were given.
        here = wanted
        if wanted.adapter is not None and scheme_of(wanted.adapter):
            here = replace(here, adapter=str(local(wanted.adapter)[0]))
        if wanted.averaged_with:
            here = replace(here, averaged_with=tuple(str(local(name)[0]) for name in wanted.averaged_with))
        if not scheme_of(model):
            yield replace(open_local(find_model(model, revision=wanted.revision), here), settings=wanted)
            return
        path, uri = local(model)
        source = open_local(path, here)
        training = None if source.training is None else replace(source.training, checkpoint=uri)
        yield replace(source, settings=wanted, training=training)


def open_local(path: Path, settings: ModelSettings) -> ModelSource:
    """Open a local file or folder. Raise ModelError."""
    if path.suffix == GGUF:
        return open_gguf(path, settings)
    if path.is_file():
        return open_checkpoint(path, read_file(path), settings)
    path = folder_of_shards(path)
    if is_sharded_checkpoint(path):
        return open_checkpoint(path, read_sharded(path, wants_tokenizer=settings.tokenizer is None), settings)
    if not (path / CONFIG).is_file() and (path / ADAPTER_CONFIG).is_file():
        raise ModelError(f'{settings.model}: is a PEFT adapter; give its base as --model and this as --adapter')
    if not (path / CONFIG).is_file() and has_weights(path):
        if settings.model_config is None:
            raise ModelError(
                f'{settings.model}: has weights and no {CONFIG}, so that their architecture is not known; give the '
                'folder or name of a model of the same architecture with --model-config'
            )
    elif not (path / CONFIG).is_file():
        inside = [*path.glob('*'), *path.glob('*/*')]
        names = [file.relative_to(path).as_posix() for file in inside if file.is_file()]
        raise ModelError(f'{settings.model}: {what_is_in_it(names)}')
    config = load_config(settings.model_config or str(path), settings)
    return ModelSource(
        settings=settings,
        config=config,
        tokenizer=load_tokenizer(settings.tokenizer or str(path), trust_remote_code=settings.trust_remote_code),
        load=partial(load_folder, path, config, settings),
        revision=path.name if is_from_hub(path, settings.model) else None,
    )


def open_gguf(path: Path, settings: ModelSettings) -> ModelSource:
    """Open a GGUF file, whose weights transformers converts to floating point. Raise ModelError."""
    if find_spec('gguf') is None:
        raise ModelError(f"{path}: a GGUF file needs gguf; pip install 'llmfoundry-gauntlet[gguf]'")
    if settings.tokenizer is None:
        raise ModelError(
            f'{path}: transformers converts the tokenizers of GGUF files wrongly; give the one that the model was '
            'trained with (--tokenizer), a folder or a name on the hub'
        )
    with model_errors(f'{path}: the model configuration cannot be read', 'copy it again'):
        config: PretrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    return ModelSource(
        settings=settings,
        config=with_overrides(config, settings.config_overrides),
        tokenizer=load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code),
        load=partial(load_weights, str(path), config, path, settings),
    )


def load_folder(folder: Path, config: PretrainedConfig, settings: ModelSettings, device: torch.device) -> Any:
    """Load the model in a Hugging Face folder; download its weights first if it is on the hub. Raise ModelError."""
    if is_from_hub(folder, settings.model):
        download_weights(settings.model, folder)
    generation = load_generation_config(folder)
    network = load_weights(str(folder), config, partial(read_folder, folder), settings, device)
    if generation is not None and network.can_generate():
        network.generation_config = generation
    return network


def load_weights(
    name: str, config: PretrainedConfig, source: WeightSource, settings: ModelSettings, device: torch.device
) -> Any:
    """Build the model of a configuration, load its weights and merge its adapter. Raise ModelError."""
    if settings.averaged_with:
        if isinstance(source, Path):
            raise ModelError(f'{name}: {NOT_AVERAGED}')
        readers = {other: reader_of(Path(other)) for other in settings.averaged_with}
        source = mean_of({name: source, **readers})
    network = load_network(
        name,
        config,
        source,
        device,
        dtype=getattr(torch, settings.dtype),
        trust_remote_code=settings.trust_remote_code,
        device_map=settings.device_map,
    )
    if settings.adapter is None or device.type == 'meta':  # without weights there is nothing to merge into
        return network
    return with_adapter(network, settings.adapter)


def folder_of_shards(path: Path) -> Path:
    """Return the folder inside a checkpoint of Accelerate that has its sharded weights; any other path as it is."""
    inner = path / OF_ACCELERATE
    return inner if is_sharded_checkpoint(inner) else path


def reader_of(path: Path) -> Callable[[], StoredWeights]:
    """Return a function that reads the weights of a local checkpoint or folder. Raise ModelError."""
    if path.suffix == GGUF:
        raise ModelError(f'{path}: {NOT_AVERAGED}')
    if path.is_file():
        return read_file(path).read_weights
    path = folder_of_shards(path)
    if is_sharded_checkpoint(path):
        return read_sharded(path, wants_tokenizer=False).read_weights
    return partial(read_folder, path)


def with_adapter(network: Any, name: str) -> Any:
    """Merge a PEFT adapter into a model's weights and return the model. Raise ModelError."""
    folder = find_model_folder(name)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(f'{name}: has no {ADAPTER_CONFIG}; allowed: the folder or name of a PEFT adapter')
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ModelError("an adapter needs peft; pip install 'llmfoundry-gauntlet[peft]'") from error
    # PEFT unpickles without running code too, but its error recommends to run it.
    pickled = folder / 'adapter_model.bin'
    if pickled.is_file() and not (folder / 'adapter_model.safetensors').is_file():
        read_tensors(pickled)
    with Caught(packages=('peft', 'safetensors')) as caught:
        return PeftModel.from_pretrained(network, folder).merge_and_unload().requires_grad_(False)
    raise ModelError(f'{name}: the adapter cannot be loaded: {reason_of(caught.error)}') from caught.error


def open_checkpoint(path: Path, checkpoint: CheckpointContent, settings: ModelSettings) -> ModelSource:
    """Return the source of a checkpoint, with the configuration and tokenizer that it stores or else the given ones.

    Raise ModelError.
    """
    if settings.model_config is None:
        config = with_overrides(stored_config(path, checkpoint.huggingface), settings.config_overrides)
    else:
        config = load_config(settings.model_config, settings)
    if settings.tokenizer is None:
        tokenizer = stored_tokenizer(path, checkpoint.huggingface)
    else:
        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
    return ModelSource(
        settings=settings,
        config=config,
        tokenizer=tokenizer,
        load=partial(load_weights, str(path), config, checkpoint.read_weights, settings),
        training=checkpoint.training,
    )


def stored_config(path: Path, stored: Mapping[str, Any] | None) -> PretrainedConfig:
    """Return the model configuration stored in a Composer checkpoint. Raise ModelError."""
    if stored is None:
        raise ModelError(
            f'{path}: has no Hugging Face configuration and tokenizer; give them with --model-config and --tokenizer: '
            'it has weights, but not the architecture that they are of'
        )
    with model_errors(f'{path}: its model configuration cannot be loaded; give one with --model-config'):
        content = dict(stored['model']['config']['content'])
        config: PretrainedConfig = AutoConfig.for_model(content.pop('model_type'), **content)
    return config


def stored_tokenizer(path: Path, stored: Mapping[str, Any] | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer stored in a Composer checkpoint. Raise ModelError."""
    if stored is None or not stored.get('tokenizer'):
        raise ModelError(f'{path}: has no tokenizer; give one with --tokenizer')
    with tempfile.TemporaryDirectory() as folder, tokenizer_errors() as caught:
        files = {file_name(name, entry): entry for name, entry in stored['tokenizer'].items()}
        outside = [name for name in files if '/' in name or '\\' in name]
        if outside:
            raise ModelError(f'{path}: its tokenizer has the file {outside[0]!r}; allowed: names without a folder')
        for name, entry in files.items():
            Path(folder, name).write_bytes(file_content(entry))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # It has the name of the tokenizer that was saved, not that of the temporary folder. Composer also sets
        # `tokenizer_file`, without which the fingerprint of a slow tokenizer would be another one.
        tokenizer.name_or_path = files[TOKENIZER_CONFIG]['content'].get('name_or_path', '')
        tokenizer.init_kwargs['name_or_path'] = tokenizer.name_or_path
        tokenizer.init_kwargs.setdefault('tokenizer_file', None)
        return tokenizer
    message = f'{path}: its tokenizer cannot be loaded; give one with --tokenizer: {reason_of(caught.error)}'
    raise ModelError(message) from caught.error


def file_name(name: str, entry: Mapping[str, Any]) -> str:
    """Return the name of a tokenizer's file in a Composer checkpoint; earlier versions stored it without its suffix."""
    suffix = entry['file_extension']
    return name if name.endswith(suffix) else f'{name}{suffix}'


def file_content(entry: Mapping[str, Any]) -> bytes:
    """Return the content of a tokenizer's file: Composer stores JSON decoded, `.txt` as lines, `.model` as bytes."""
    if entry['file_extension'] == '.json':
        # A sharded checkpoint has no entry for an empty mapping, such as the special tokens of a tokenizer without any.
        content = entry.get('content', {})
        template = content.get('post_processor') if isinstance(content, dict) else None
        if isinstance(template, dict) and template.get('type') == 'TemplateProcessing':
            template.setdefault('special_tokens', {})
        return json.dumps(content).encode()
    content = entry['content']
    if isinstance(content, bytes):
        return content
    text = content if isinstance(content, str) else '\n'.join(content)
    return text.encode()


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Raise ModelError if the tokenizer has ids beyond the rows of the model's embedding."""
    num_rows = getattr(config.get_text_config(), 'vocab_size', None)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if isinstance(num_rows, int) and highest >= num_rows:
        raise ModelError(
            f'tokenizer and model do not match: the tokenizer has {len(tokenizer)} tokens with ids up to {highest}, '
            f'the embedding of the model ({config.model_type}) has {num_rows} rows; give the tokenizer that the model '
            'was trained with, or train the model with an embedding for all tokens'
        )
