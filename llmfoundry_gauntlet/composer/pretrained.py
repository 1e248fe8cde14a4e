"""Configurations and tokenizers of Hugging Face folders and names, with errors that name the damaged file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer  # type: ignore[import-untyped]
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from llmfoundry_gauntlet.composer.checkpoints import CONFIG
from llmfoundry_gauntlet.composer.weights import place_of_config, reason_of
from llmfoundry_gauntlet.config.decode import describe
from llmfoundry_gauntlet.errors import FOREIGN_ERRORS, ModelError
from llmfoundry_gauntlet.tasks.encode import tokenizer_errors

GENERATION = 'generation_config.json'
TOKENIZER, TOKENIZER_CONFIG = 'tokenizer.json', 'tokenizer_config.json'
OF_TOKENIZER = (TOKENIZER, TOKENIZER_CONFIG, 'special_tokens_map.json', 'added_tokens.json')


def load_config(name: str) -> PretrainedConfig:
    """Return a model configuration by folder or name. Raises ModelError."""
    check_objects(name, CONFIG)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except FOREIGN_ERRORS as error:
        message = f'{place_of(name, CONFIG)}: the model configuration cannot be loaded: {reason_of(error)}'
        raise ModelError(message) from error
    check_numbers(config)
    return config


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer by folder or name. Raises ModelError."""
    check_objects(name, *OF_TOKENIZER)
    with tokenizer_errors() as caught:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        return tokenizer
    place = place_of(name, TOKENIZER_CONFIG)
    if Path(name, TOKENIZER).is_file():
        with tokenizer_errors() as of_file:
            Tokenizer.from_file(str(Path(name, TOKENIZER)))
        place = place if of_file.error is None else place_of(name, TOKENIZER)
    raise ModelError(f'{place}: the tokenizer cannot be loaded: {reason_of(caught.error)}') from caught.error


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """Return the generation settings of a folder, None where it has none. Raises ModelError."""
    if not (folder / GENERATION).is_file():
        return None
    check_objects(str(folder), GENERATION)
    try:
        return GenerationConfig.from_pretrained(folder)
    except FOREIGN_ERRORS as error:
        raise ModelError(f'{folder / GENERATION}: cannot be loaded: {reason_of(error)}') from error


def place_of(name: str, file: str) -> str:
    """Return the path of a file in a folder, else the name as it is."""
    return str(Path(name, file)) if Path(name, file).exists() else name


def check_objects(name: str, *files: str) -> None:
    """Raise ModelError unless those of the files that are in a folder hold a JSON object each."""
    for path in (Path(name, file) for file in files):
        if not path.is_file():
            continue
        try:
            content: Any = json.loads(path.read_text(encoding='utf-8'))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f'{path}: is not JSON in UTF-8: {reason_of(error)}; copy it again') from error
        if not isinstance(content, dict):
            raise ModelError(f'{path}: is {describe(content)}; allowed: a JSON object')


def check_numbers(config: PretrainedConfig) -> None:
    """Raise ModelError for texts and the like where a configuration has numbers by default.

    A model may take a list in place of a whole number, such as one of eos_token_id, but not of a fraction.
    """
    if config.has_no_defaults_at_init:
        return
    for key, default in type(config)().to_dict().items():
        if isinstance(default, bool) or not isinstance(default, (int, float)):
            continue
        value = getattr(config, key, None)
        if isinstance(value, (str, Mapping) if isinstance(default, int) else (str, Mapping, list)):
            raise ModelError(f'{place_of_config(config)}: {key} is {describe(value)}; allowed: a number')
