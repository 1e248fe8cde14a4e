"""Tokenize prompts, and identify a tokenizer by a digest of everything that its token ids depend on.

The preamble (instruction and shots), the item's own context and each continuation are tokenized separately and joined,
as in llm-foundry 0.22 (`eval/datasets/in_context_learning_evaluation.py:tokenize_example`): only the preamble gets the
tokenizer's special tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_gauntlet.errors import Caught, ModelError
from llmfoundry_gauntlet.types import Ids, Prompt

# Increment it if texts or token ids of prompts change, so that cached requests are recomputed.
PROMPTS_VERSION = 2

Parts = tuple[Ids, ...]
MAX_SHOWN = 200  # characters of a text in an error
NO_IDS = np.zeros(0, np.int32)
CALL_METHODS = ('__call__', '_call_one', 'batch_encode_plus', '_batch_encode_plus', 'set_truncation_and_padding')

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt and its parts in token ids. `contexts` exclude the preamble: one for all continuations, or one each."""

    prompt: Prompt
    preamble: Ids
    contexts: Parts
    continuations: Parts

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest context and the longest continuation together."""
        return len(self.preamble) + max(map(len, self.contexts)) + max(map(len, self.continuations), default=0)


class Encoder:
    """Encode prompts with a Hugging Face tokenizer. Raise ModelError for text that it cannot encode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.uses_backend = has_plain_backend(tokenizer)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.prefix_space = len(self.encode([' a'], special=False)[' a']) == 1

    @cached_property
    def fingerprint(self) -> str | None:
        """Return a digest of everything that token ids depend on; None if unknown."""
        probed = tokenizer_fingerprint(self.tokenizer, self._probe)
        return probed and f'{probed} {self.eos_token_id} {self.prefix_space}'

    @cached_property
    def name(self) -> str:
        """Return the tokenizer's class, size and digest, for records."""
        return tokenizer_name(self.tokenizer)

    def _probe(self, text: str, special: bool) -> list[int] | None:
        try:
            ids: list[int] = self.encode([text], special=special)[text].tolist()
        except ModelError:
            return None
        return ids

    def encode(self, texts: Iterable[str], *, special: bool) -> dict[str, Ids]:
        """Return token ids by text; each distinct text is tokenized once."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return {}
        return dict(zip(distinct, self._ids(distinct, special), strict=True))

    def _ids(self, texts: list[str], special: bool) -> list[Ids]:
        with tokenizer_errors() as caught:
            if self.uses_backend and len(texts) > 1:
                return self._backend_ids(texts, special)
            return self._called(texts, special)
        if len(texts) > 1:  # find the text that failed
            half = len(texts) // 2
            return self._ids(texts[:half], special) + self._ids(texts[half:], special)
        name = type(self.tokenizer).__name__
        shown = texts[0] if len(texts[0]) <= MAX_SHOWN else f'{texts[0][:MAX_SHOWN]}...'
        raise ModelError(f'the tokenizer ({name}) cannot encode {shown!r}: {caught.error}') from caught.error

    def _called(self, texts: list[str], special: bool) -> list[Ids]:
        """Encode by calling the tokenizer."""
        encoded = self.tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [as_ids(ids) for ids in encoded['input_ids']]

    def _backend_ids(self, texts: list[str], special: bool) -> list[Ids]:
        """Encode with the Rust backend without offsets, which takes a quarter less time than calling the tokenizer.

        The first text is encoded both ways: the call sets up the backend (no truncation, no padding, special tokens in
        texts), and its result confirms that the backend gives the same ids.
        """
        (first,) = self._called(texts[:1], special)
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        arrays = [as_ids(encoding.ids) for encoding in encodings]
        if np.array_equal(arrays[0], first):
            return arrays
        self.uses_backend = False
        return self._called(texts, special)

    def preambles(self, texts: Iterable[str]) -> dict[str, Ids]:
        """Return ids of preambles with special tokens, but without a final eos, which some tokenizers add."""
        encoded = self.encode(texts, special=True)
        return {
            text: ids[:-1] if len(ids) > 1 and ids[-1] == self.eos_token_id else ids for text, ids in encoded.items()
        }

    def longest(self, texts: Iterable[str]) -> int:
        """Return the number of tokens of the longest text, special tokens included."""
        return max((len(ids) for ids in self.encode(texts, special=True).values()), default=0)

    def continuation_text(self, text: str) -> str:
        """Return a continuation with the leading space that byte-pair tokenizers expect."""
        return spaced(text) if self.prefix_space else text

    @cached_property
    def adds_space(self) -> bool:
        """Return whether separately tokenized texts are joined with a space, as in SentencePiece."""
        (ids,) = self.encode(['a'], special=False).values()
        return bool(self.tokenizer.decode([*ids, *ids]) == 'a a')

    def word_after(self, text: str) -> str:
        """Return a word that follows another, with a leading space unless the tokenizer adds one."""
        return text.lstrip(' ') if self.adds_space else spaced(text)

    @property
    def chat_template(self) -> str | None:
        """Return the tokenizer's chat template, if it has one."""
        template = getattr(self.tokenizer, 'chat_template', None)
        return None if template is None else repr(template)

    def in_chat(self, prompt: Prompt) -> bool:
        """Return whether a prompt is sent as a chat message. Raise ModelError if the tokenizer lacks a template."""
        if prompt.chat_template is True and self.chat_template is None:
            name = type(self.tokenizer).__name__
            raise ModelError(
                f'the tokenizer ({name}) has no chat template; leave out apply_chat_template (of SCORE: chat_template: '
                'true), or give a tokenizer that has one'
            )
        return bool(prompt.chat_template) and self.chat_template is not None

    def contexts(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the contexts, in the chat template if they are sent in chat; it has its own special tokens."""
        if not self.in_chat(prompt):
            return prompt.own_texts
        return tuple(self._message(prompt.preamble + context) + prompt.lead for context in prompt.contexts)

    def _message(self, text: str) -> str:
        from jinja2 import TemplateError

        message = [{'role': 'user', 'content': text}]
        try:
            return str(self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ModelError(f"the tokenizer's chat template cannot be applied: {error}") from error

    def _continuing(self, prompt: Prompt) -> Callable[[str], str]:
        """Return a function from a continuation to its text after a prompt; an answer begins without a space."""
        if prompt.lead:
            return self.word_after
        return str.lstrip if self.in_chat(prompt) else self.continuation_text

    def prompts(self, prompts: Sequence[Prompt], known: dict[str, Ids] | None = None) -> list[EncodedPrompt]:
        """Return all prompts in token ids, in order. `known` caches ids of contexts and continuations across calls."""
        known = {} if known is None else known
        preambles = self.preambles(prompt.preamble for prompt in prompts)
        texts = [
            (self.contexts(prompt), tuple(map(self._continuing(prompt), prompt.continuations))) for prompt in prompts
        ]
        needed = (text for parts in texts for part in parts for text in part)
        known.update(self.encode((text for text in needed if text not in known), special=False))
        return [
            EncodedPrompt(
                prompt=prompt,
                preamble=NO_IDS if self.in_chat(prompt) else preambles[prompt.preamble],
                contexts=tuple(known[text] for text in contexts),
                continuations=tuple(known[text] for text in continuations),
            )
            for prompt, (contexts, continuations) in zip(prompts, texts, strict=True)
        ]


def tokenizer_errors() -> Caught:
    """Return a context that catches a tokenizer's errors; the tokenizers library, in Rust, raises Exception itself."""
    return Caught(packages=('pyo3_runtime',), bare=True)


def spaced(text: str) -> str:
    """Return a text with a leading space."""
    return text if text.startswith(' ') else f' {text}'


def as_ids(ids: Sequence[int]) -> Ids:
    """Return token ids as an array."""
    return np.asarray(ids, dtype=np.int32)


def has_plain_backend(tokenizer: Any) -> bool:
    """Return whether `tokenizer` is a Rust tokenizer whose call runs no code from outside transformers."""
    methods = [getattr(type(tokenizer), name, None) for name in CALL_METHODS]
    plain = all(method is None or method.__module__.startswith('transformers.') for method in methods)
    return plain and hasattr(getattr(tokenizer, 'backend_tokenizer', None), 'encode_batch_fast')


def tokenizer_fingerprint(tokenizer: Any, encode: Callable[[str, bool], Any]) -> str | None:
    """Return the digest of a Hugging Face tokenizer, None if it is unknown what its ids depend on.

    `encode(text, special)` encodes as an evaluation does. It is called first, as that resets a truncation or padding
    left by earlier use.
    """
    texts = (*PROBES, ' a'.join(map(str, getattr(tokenizer, 'all_special_tokens', ()))))  # which some settings split
    probed = [[repr(encode(text, special)) for special in (True, False)] for text in texts]
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
