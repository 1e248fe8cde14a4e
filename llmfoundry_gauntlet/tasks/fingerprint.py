"""Compute a digest of everything that a tokenizer's token ids depend on."""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Encoded for the digest, with and without special tokens, to detect the effect of any setting.
PROBES = (
    '',
    ' ',
    'a',
    ' a',
    'Two and two are 4.\n\nHello\tWORLD!  ',
    '  3.14159\r\n- "x" = {y};',
    'Stra\u00dfe, \ufb01n, \u6771\u4eac \U0001f642e\u0301',
)
LIBRARIES = ('tokenizers', 'transformers', 'sentencepiece', 'tiktoken')

# Attributes and arguments of a tokenizer that vary between runs but do not affect token ids.
IRRELEVANT = {
    'name_or_path',
    'vocab_file',
    'merges_file',
    'tokenizer_file',
    'tokenizer_config_file',
    'special_tokens_map_file',
    'added_tokens_file',
    'chat_template',
    'model_max_length',
    'max_len',
    'verbose',
    '_in_target_context_manager',
    '_decode_use_source_tokenizer',
    '_pad_token_type_id',
    'clean_up_tokenization_spaces',
}


def tokenizer_fingerprint(tokenizer: Any, encode: Callable[[str, bool], Any]) -> str | None:
    """Return the digest of a Hugging Face tokenizer, None if it is unknown what its ids depend on.

    `encode(text, special)` encodes as an evaluation does. It is called first, as that resets a truncation or padding
    left by earlier use.
    """
    probed = [[repr(encode(text, special)) for special in (True, False)] for text in (*PROBES, special_text(tokenizer))]
    vocabulary = vocabulary_of(tokenizer)
    sources = foreign_sources(type(tokenizer))
    if vocabulary is None or sources is None:
        return None
    kind = type(tokenizer)
    described = [f'{kind.__module__}.{kind.__qualname__}', probed, plain_settings(tokenizer), library_versions()]
    digest = hashlib.sha256(repr(described).encode('utf-8', 'surrogatepass'))
    for content in (*vocabulary, *sources):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def tokenizer_name(tokenizer: Any) -> str:
    """Return a tokenizer's class, its size, and 8 hex digits of a hash of its vocabulary, rules and chat template.

    'LlamaTokenizerFast 32000 (1a2b3c4d)' is the same on all machines, and across library versions that save it
    identically. Without a readable vocabulary there are no digits.
    """
    vocabulary = vocabulary_of(tokenizer)
    name = f'{type(tokenizer).__name__} {len(tokenizer)}'
    if vocabulary is None:
        return name
    template = repr(getattr(tokenizer, 'chat_template', None)).encode('utf-8', 'surrogatepass')
    digest = hashlib.sha256(b''.join(hashlib.sha256(content).digest() for content in (*vocabulary, template)))
    return f'{name} ({digest.hexdigest()[:8]})'


def special_text(tokenizer: Any) -> str:
    """Return a text with all special tokens, which some settings split."""
    return ' a'.join(map(str, getattr(tokenizer, 'all_special_tokens', ())))


def vocabulary_of(tokenizer: Any) -> list[bytes] | None:
    """Return the content of a tokenizer: the state of a Rust tokenizer, or the files and arguments of a slow one."""
    backend = getattr(tokenizer, 'backend_tokenizer', None)
    if backend is not None and hasattr(backend, 'to_str'):
        return [backend.to_str().encode('utf-8', 'surrogatepass')]
    try:
        added = sorted((index, repr(token)) for index, token in tokenizer.added_tokens_decoder.items())
        arguments = sorted((key, repr(value)) for key, value in tokenizer.init_kwargs.items() if key not in IRRELEVANT)
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(path) for path in tokenizer.save_vocabulary(folder)]
            files = [path.name.encode() + b'\0' + path.read_bytes() for path in paths]
    except (AttributeError, NotImplementedError, OSError, TypeError, ValueError):
        return None
    return [repr([added, arguments]).encode('utf-8', 'surrogatepass'), *files]


def foreign_sources(kind: type) -> list[bytes] | None:
    """Return the source files of a tokenizer's classes outside transformers; None if they cannot be read."""
    foreign = [base for base in kind.__mro__ if base is not object and not base.__module__.startswith('transformers.')]
    try:
        return [Path(inspect.getfile(base)).read_bytes() for base in foreign]
    except (OSError, TypeError):
        return None


def plain_settings(tokenizer: Any) -> list[tuple[str, Any]]:
    """Return the tokenizer's flags and numbers, such as `add_bos_token`."""
    return sorted(
        (name, value)
        for name, value in getattr(tokenizer, '__dict__', {}).items()
        if isinstance(value, (bool, int, float)) and name not in IRRELEVANT
    )


def library_versions() -> list[tuple[str, str]]:
    """Return the installed tokenizer libraries with their versions."""
    found = []
    for name in LIBRARIES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return found
