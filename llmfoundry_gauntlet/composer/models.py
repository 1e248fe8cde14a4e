"""Models and tokenizers from Hugging Face folders or names and from Composer checkpoints."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer.models import HuggingFaceModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.values import TrainingPoint

LENGTH_KEYS = ('max_position_embeddings', 'n_positions', 'max_seq_len', 'max_sequence_length', 'seq_length')
MAX_MESSAGE = 300
ALIBI_MODELS = ('bloom', 'mpt')  # any length can be run, whatever the configuration names


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model whose configuration and tokenizer are there, and whose weights `load` brings."""

    name: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    load: Callable[[], Any]
    training: TrainingPoint | None = None  # where training stood, for a Composer checkpoint


def open_model(model: str, *, tokenizer: str | None = None, model_config: str | None = None) -> ModelSource:
    """The source of a Hugging Face folder or name, or of a Composer checkpoint file.

    `tokenizer` and `model_config` name what is used in place of what lies in the model's folder or checkpoint.
    Raises ModelError.
    """
    path = Path(model)
    if path.is_file():
        return open_checkpoint(path, tokenizer=tokenizer, model_config=model_config)
    if path.is_dir() and not (path / 'config.json').is_file():
        raise ModelError(f'{model}: has no config.json; allowed: a Hugging Face folder or a Composer checkpoint file')
    looks_local = model.startswith(('.', '/', '~')) or model.count('/') > 1 or path.suffix == '.pt'
    if not path.exists() and looks_local:
        raise ModelError(f'{model}: there is no such file or folder')
    config = load_config(model_config or model)
    return ModelSource(
        name=model,
        config=config,
        tokenizer=load_tokenizer(tokenizer or model),
        load=lambda: load_pretrained(model, config),
    )


def load_config(name: str) -> PretrainedConfig:
    """A model configuration by folder or name."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f'{name}: the model configuration cannot be loaded: {first_line(error)}') from error
    return config


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer by folder or name."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f'{name}: the tokenizer cannot be loaded: {first_line(error)}') from error
    return tokenizer


def load_pretrained(name: str, config: PretrainedConfig) -> Any:
    """The weights of a Hugging Face folder or name, in float32."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, config=config, torch_dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f'{name}: the model cannot be loaded: {first_line(error)}') from error


def open_checkpoint(path: Path, *, tokenizer: str | None, model_config: str | None) -> ModelSource:
    """A Composer checkpoint of a HuggingFaceModel, read without its weights until they are wanted."""
    try:
        content = torch.load(path, map_location='cpu', weights_only=False, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ModelError(f'{path}: is not a Composer checkpoint: {first_line(error)}') from error
    state = content.get('state') if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or 'model' not in state:
        raise ModelError(f"{path}: is not a Composer checkpoint: it has no 'state' with a 'model'")
    stored = state.get('integrations', {}).get('huggingface')
    if stored is None and (tokenizer is None or model_config is None):
        raise ModelError(
            f'{path}: holds no Hugging Face configuration and tokenizer; give them with --model-config and --tokenizer'
        )
    config = load_config(model_config) if model_config else stored_config(stored)
    return ModelSource(
        name=str(path),
        config=config,
        tokenizer=load_tokenizer(tokenizer) if tokenizer else stored_tokenizer(path, stored),
        load=lambda: load_state(path, config, state['model']),
        training=training_of(state, path),
    )


def stored_config(stored: Mapping[str, Any]) -> PretrainedConfig:
    """The model configuration that Composer keeps in a checkpoint."""
    content = dict(stored['model']['config']['content'])
    return AutoConfig.for_model(content.pop('model_type'), **content)


def stored_tokenizer(path: Path, stored: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that Composer keeps in a checkpoint."""
    if not stored.get('tokenizer'):
        raise ModelError(f'{path}: holds no tokenizer; give one with --tokenizer')
    with tempfile.TemporaryDirectory() as folder:
        try:
            found: Any = HuggingFaceModel.load_huggingface_tokenizer_from_saved_state(dict(stored), False, folder)
        except (OSError, ValueError) as error:
            message = f'{path}: the tokenizer in it cannot be loaded; give one with --tokenizer: {first_line(error)}'
            raise ModelError(message) from error
    tokenizer: PreTrainedTokenizerBase = found
    return tokenizer


def load_state(path: Path, config: PretrainedConfig, state: Mapping[str, torch.Tensor]) -> Any:
    """The model of a checkpoint's weights, in float32."""
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    weights = {name.removeprefix('model.'): value for name, value in state.items()}
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ModelError(f'{path}: the weights do not fit the configuration: {first_line(error)}') from error
    tied = set(getattr(model, '_tied_weights_keys', None) or ())
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        raise ModelError(
            f'{path}: the weights do not fit the configuration: missing {missing[:5]}, unexpected {unexpected[:5]}'
        )
    return model


def training_of(state: Mapping[str, Any], path: Path) -> TrainingPoint | None:
    """Where training stood when a checkpoint was written."""
    timestamp = state.get('timestamp')
    if timestamp is None:
        return None
    with contextlib.suppress(AttributeError):
        timestamp = timestamp.state_dict()
    counts = timestamp.get('Timestamp', timestamp)
    return TrainingPoint(
        batch=int(counts['batch']),
        epoch=int(counts['epoch']),
        token=int(counts['token']),
        checkpoint=str(path.resolve()),
    )


def composer_model(model: Any, tokenizer: Any) -> HuggingFaceModel:
    """The Hugging Face model as Composer wants it. Raises ModelError where the tokenizer does not fit."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # about embeddings larger than the vocabulary, which is common and harmless
        try:
            return HuggingFaceModel(model, tokenizer=tokenizer, shift_labels=True)
        except ValueError as error:
            raise ModelError(f'tokenizer and model do not fit: {first_line(error)}') from error


def length_limit(config: PretrainedConfig) -> int | None:
    """The sequence length that a model's configuration names; None where it names none."""
    return next((value for key in LENGTH_KEYS if isinstance(value := getattr(config, key, None), int)), None)


def resolve_max_seq_len(wanted: int | None, config: PretrainedConfig, task_limits: Mapping[str, int]) -> int:
    """The length that prompts may have. Raises ModelError where the model cannot run what is wanted.

    `task_limits` maps tasks with a max_seq_len of their own to it.
    """
    limit = length_limit(config)
    hard = None if config.model_type in ALIBI_MODELS else limit
    for name, value in (('max_seq_len', wanted), *((f'{task}: max_seq_len', own) for task, own in task_limits.items())):
        if value is not None and hard is not None and value > hard:
            raise ModelError(f'{name} is {value}, but the model ({config.model_type}) has positions for {hard} tokens')
    if wanted is not None:
        return wanted
    if limit is None:
        raise ModelError(f"the model's configuration ({config.model_type}) names no sequence length; give max_seq_len")
    return limit


def rotary_length_matters(config: PretrainedConfig) -> bool:
    """Whether a model's rotary embedding depends on the longest row of a batch (dynamic NTK, LongRoPE).

    Then every forward is given the last position, as llm-foundry's padding does: no score may depend on its batch.
    """
    scaling = getattr(config.get_text_config(), 'rope_scaling', None) or {}
    return scaling.get('rope_type', scaling.get('type')) in ('dynamic', 'longrope')


def first_line(error: Exception) -> str:
    """The first line of an error's message, cut where it is very long, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines[0]) <= MAX_MESSAGE else f'{lines[0][:MAX_MESSAGE]}...'
