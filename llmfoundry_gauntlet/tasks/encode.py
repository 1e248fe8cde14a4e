"""Tokenize prompts, and identify a tokenizer by a digest of everything that its token ids depend on.

The preamble (instruction and shots), the item's own context and each continuation are tokenized separately and joined,
as in llm-foundry 0.22 (`eval/datasets/in_context_learning_evaluation.py:tokenize_example`): only the preamble gets the
tokenizer's special tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_gauntlet.errors import ModelError, named, tokenizer_errors
from llmfoundry_gauntlet.scoring.reasoning import KNOWN_MARKERS, is_opened_by
from llmfoundry_gauntlet.types import ChatFormat, Ids, Prompt

# Increment it if texts or token ids of prompts change, so that cached requests are recomputed.
PROMPTS_VERSION = 4

Parts = tuple[Ids, ...]
PromptTexts = tuple[str, tuple[str, ...]]  # a prompt, its contexts separated by NUL, and its choices
THINKING = 'enable_thinking'  # the argument by which chat templates switch reasoning off
MAX_SHOWN = 200  # characters of a text in an error
ENDING_CHARACTERS = 100  # of a prompt, more than any mark of reasoning
NO_IDS = np.zeros(0, np.int32)
LINE_BREAK = '\n'
WORDS = ('a', 'A', 'the', '0', '1')  # tried in turn, as a vocabulary may lack the first

# Settings that a slow tokenizer saves only once it has been loaded from a folder. The first two say where it came from;
# the third repeats tokens that are saved under their own names too.
SAVED_AFTER_LOADING = ('is_local', 'local_files_only', 'model_specific_special_tokens')

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt and its parts in token ids. `contexts` exclude the preamble: one for all continuations, or one each.

    `ending` are the last characters of the context that is continued by a generation, '' for others.
    """

    prompt: Prompt
    preamble: Ids
    contexts: Parts
    continuations: Parts
    ending: str = ''

    @property
    def length(self) -> int:
        """Return the number of tokens of the longest context and the longest continuation together."""
        return len(self.preamble) + max(map(len, self.contexts)) + max(map(len, self.continuations), default=0)


class Encoder:
    """Encode prompts with a Hugging Face tokenizer. Raise ModelError for text that it cannot encode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._system_prompts: set[str] = set()  # that the chat template has been found to take
        ids_of_word = self.encode([' a'], special=False)[' a']
        self.prefix_space = len(ids_of_word) == 1  # as llm-foundry asks whether words begin with a space

    # Which tokenizer it is.

    @cached_property
    def fingerprint(self) -> str | None:
        """Return a digest of everything that token ids depend on; None if unknown."""
        digest = tokenizer_fingerprint(self.tokenizer)
        return digest and f'{digest} {self.eos_token_id} {self.prefix_space}'

    @cached_property
    def name(self) -> str:
        """Return the tokenizer's class, its size, and 8 hex digits of a hash of its content and chat template.

        'LlamaTokenizerFast 32000 (1a2b3c4d)' is the same on all machines, and across library versions that save it
        identically. Without readable content there are no digits.
        """
        name = f'{type(self.tokenizer).__name__} {len(self.tokenizer)}'
        content = content_of(self.tokenizer)
        if content is None:
            return name
        template = repr(getattr(self.tokenizer, 'chat_template', None)).encode('utf-8', 'surrogatepass')
        digest = hashlib.sha256()
        for part in [*content, template]:
            digest.update(hashlib.sha256(part).digest())
        return f'{name} ({digest.hexdigest()[:8]})'

    # Texts to token ids.

    def encode(self, texts: Iterable[str], *, special: bool) -> dict[str, Ids]:
        """Return token ids by text; each distinct text is tokenized once."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return {}
        ids = self._ids(distinct, special)
        return dict(zip(distinct, ids, strict=True))

    def _ids(self, texts: list[str], special: bool) -> list[Ids]:
        with tokenizer_errors() as caught:
            encoded = self.tokenizer(
                texts,
                add_special_tokens=special,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            return [as_ids(ids) for ids in encoded['input_ids']]
        # The tokenizer does not say which text failed, so each half is tried alone.
        if len(texts) > 1:
            half = len(texts) // 2
            return self._ids(texts[:half], special) + self._ids(texts[half:], special)
        name = type(self.tokenizer).__name__
        shown = texts[0] if len(texts[0]) <= MAX_SHOWN else f'{texts[0][:MAX_SHOWN]}...'
        raise ModelError(f'the tokenizer ({name}) cannot encode {shown!r}: {caught.error}') from caught.error

    def encode_verbatim(self, texts: Collection[str]) -> dict[str, Ids]:
        """Return ids by text that continue another text with the text's own white space and no other.

        A tokenizer that puts a space before every text puts none after a line break, so texts are encoded after one.
        """
        if not self.adds_space:
            return self.encode(texts, special=False)
        encoded = self.encode([LINE_BREAK, *(LINE_BREAK + text for text in texts)], special=False)
        of_break = encoded[LINE_BREAK]
        num_of_break = len(of_break)
        verbatim = {}
        merged = []
        for text in texts:
            ids = encoded[LINE_BREAK + text]
            if np.array_equal(ids[:num_of_break], of_break):
                verbatim[text] = ids[num_of_break:]
            else:
                merged.append(text)
        # Where the line break is one token with what follows, the tokenizer's own space stands for that of the text.
        without_space = {text: text.removeprefix(' ') for text in merged}
        encoded = self.encode(without_space.values(), special=False)
        return verbatim | {text: encoded[shorter] for text, shorter in without_space.items()}

    def preambles(self, texts: Iterable[str]) -> dict[str, Ids]:
        """Return ids of preambles with special tokens, but without a final eos, which some tokenizers add."""
        encoded = self.encode(texts, special=True)
        for text, ids in encoded.items():
            if len(ids) > 1 and ids[-1] == self.eos_token_id:
                encoded[text] = ids[:-1]
        return encoded

    def longest(self, texts: Collection[str], *, as_reference: bool) -> int:
        """Return the number of tokens of the longest text, special tokens included.

        There is room for the space that a generation begins with, unless `as_reference`.
        """
        lengths = [len(ids) for ids in self.encode(texts, special=True).values()]
        if self.needs_space and not as_reference:
            after_space = [spaced(text) for text in texts]
            lengths += [len(ids) for ids in self.encode(after_space, special=False).values()]
        return max(lengths, default=0)

    # The space between two texts that are tokenized separately.

    @cached_property
    def adds_space(self) -> bool:
        """Return whether separately tokenized texts are joined with a space, as in SentencePiece."""
        for word in WORDS:
            ids = self.encode([word], special=False)[word].tolist()
            with tokenizer_errors():
                once = str(self.tokenizer.decode(ids)).strip()
                twice = str(self.tokenizer.decode(ids + ids)).strip()
                # Another text than the word says nothing: the vocabulary lacks the word.
                if once == word:
                    return twice == f'{word} {word}'
        return False

    @cached_property
    def needs_space(self) -> bool:
        """Return whether words are joined without a space unless they begin with one, of which llm-foundry drops it.

        It gives a leading space only to tokenizers that have ' a' as one token. Those that have a token per byte or
        character, or split spaces off, need it as much.
        """
        return not self.prefix_space and not self.adds_space

    def word_after(self, text: str) -> str:
        """Return a word that follows another, with a leading space unless the tokenizer adds one."""
        return text.lstrip(' ') if self.adds_space else spaced(text)

    # The chat template.

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
                f'the tokenizer ({name}) has no chat template; leave out {named("apply_chat_template")} (of SCORE: '
                'chat_template: true), or give a tokenizer that has one'
            )
        return bool(prompt.chat_template) and self.chat_template is not None

    def contexts(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the contexts, in the chat template if they are sent in chat; it has its own special tokens."""
        if not self.in_chat(prompt):
            return prompt.own_texts
        self._check_system_prompt(prompt.chat_format)
        kwargs = prompt.chat_format.template_kwargs
        rendered = [self._rendered(prompt.messages(context), kwargs) for context in prompt.contexts]
        return tuple(text + prompt.lead for text in rendered)

    def texts(self, prompt: Prompt) -> PromptTexts:
        """Return a prompt, in the chat template if it is sent in chat, and its choices as they are scored after it.

        Joined, they are what the model reads.
        """
        text = '\0'.join(self.contexts(prompt)) if self.in_chat(prompt) else prompt.text
        return text, tuple(map(self._as_read, self.continuations(prompt)))

    def choices_outside_chat(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the continuations as they are read after the prompt's text without a chat template."""
        return tuple(map(self._as_read, self.after(prompt)))

    def _as_read(self, text: str) -> str:
        """Return a continuation with the space that such a tokenizer itself puts before a text."""
        if not self.adds_space:
            return text
        # Some take a space at the beginning for their own, others put a second one before it.
        unspaced, with_space = self.encode(['a', ' a'], special=False).values()
        return spaced(text) if np.array_equal(unspaced, with_space) else f' {text}'

    def _check_system_prompt(self, chat: ChatFormat) -> None:
        """Raise ModelError if the chat template rejects or ignores system messages."""
        if chat.system_prompt is None or chat.system_prompt in self._system_prompts:
            return
        question = Prompt(contexts=('?',))
        with_system_prompt = replace(question, chat_format=chat)
        text_without = self._rendered(question.messages('?'), chat.template_kwargs)
        what, reason = 'ignores', ''
        try:
            text_with = self._rendered(with_system_prompt.messages('?'), chat.template_kwargs)
            if text_with != text_without:
                self._system_prompts.add(chat.system_prompt)
                return
        except ModelError as error:
            what, reason = 'rejects', f' ({error.__cause__})'
        raise ModelError(
            f"the tokenizer's chat template {what} system messages{reason}; leave out {named('system_prompt')}, or put "
            'its text into the prompt_string of tasks'
        )

    def _rendered(self, messages: list[dict[str, str]], kwargs: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ModelError(f"the tokenizer's chat template cannot be applied: {error}") from error

    def unused_arguments(self, chat: ChatFormat) -> list[str]:
        """Return the arguments of the chat template that it does not name."""
        template = self.chat_template or ''
        return [name for name in chat.template_kwargs if not re.search(rf'\b{re.escape(name)}\b', template)]

    def reasons_first(self, chat: ChatFormat) -> bool:
        """Return whether an answer in chat begins with reasoning: the template opens it, or leaves it to the model."""
        question = '\u2047'
        text = self._rendered(Prompt(contexts=(question,)).messages(question), chat.template_kwargs)
        ending = text.rpartition(question)[2]
        if is_opened_by(ending, KNOWN_MARKERS):
            return True
        is_closed = any(markers.end in ending for markers in KNOWN_MARKERS)
        is_switched_off = chat.template_kwargs.get(THINKING) is False
        return THINKING in (self.chat_template or '') and not is_closed and not is_switched_off

    # Whole prompts.

    def continuations(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the continuations as they follow the prompt: after a space, unless they begin an answer in chat."""
        if prompt.lead:
            return tuple(map(self.word_after, prompt.continuations))
        if self.in_chat(prompt):
            return tuple(text.lstrip() for text in prompt.continuations)
        return self.after(prompt)

    def after(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the continuations as they follow the prompt's text without a chat template."""
        texts = prompt.continuations
        contexts = prompt.contexts * len(texts) if len(prompt.contexts) == 1 else prompt.contexts
        pairs = zip(contexts, texts, strict=True)
        return tuple(self._after(context, text, as_reference=prompt.as_reference) for context, text in pairs)

    def _after(self, context: str, text: str, *, as_reference: bool) -> str:
        if self.prefix_space:
            return spaced(text)
        has_space = context[-1:].isspace() or text[:1].isspace()
        # llm-foundry adds no space here, even where words then run together.
        return text if as_reference or has_space or not self.needs_space else spaced(text)

    def golds(self, prompts: Sequence[Prompt], texts: Sequence[str | None], *, is_verbatim: bool) -> list[Ids | None]:
        """Return the right generation of each prompt in token ids, as it follows the prompt; None where there is none.

        The beginning of an answer in chat is that of a choice there, unless white space is part of the text.
        """
        following = [
            text if text is None or is_verbatim or not self.in_chat(prompt) else self._begun_in_chat(text)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        known = self.encode_verbatim(list(dict.fromkeys(text for text in following if text is not None)))
        return [None if text is None else known[text] for text in following]

    def _begun_in_chat(self, text: str) -> str:
        # Separately tokenized, as choices are, a text has the space that such a tokenizer adds.
        return f' {text.lstrip()}' if self.adds_space else text.lstrip()

    def prompts(self, prompts: Sequence[Prompt], known: dict[str, Ids] | None = None) -> list[EncodedPrompt]:
        """Return all prompts in token ids, in order. `known` caches ids of contexts and continuations across calls."""
        known = {} if known is None else known
        preambles = self.preambles(prompt.preamble for prompt in prompts)
        texts = [(self.contexts(prompt), self.continuations(prompt)) for prompt in prompts]
        # All texts of all prompts in one call: the tokenizer is much faster on many texts than on one at a time.
        needed: list[str] = []
        for contexts, continuations in texts:
            needed += contexts
            needed += continuations
        unknown = [text for text in needed if text not in known]
        known.update(self.encode(unknown, special=False))
        return [
            EncodedPrompt(
                prompt=prompt,
                # In chat the preamble is part of the message, so it is in the context.
                preamble=NO_IDS if self.in_chat(prompt) else preambles[prompt.preamble],
                contexts=tuple(known[text] for text in contexts),
                continuations=tuple(known[text] for text in continuations),
                ending='' if continuations else contexts[-1][-ENDING_CHARACTERS:],
            )
            for prompt, (contexts, continuations) in zip(prompts, texts, strict=True)
        ]


def texts_without_tokenizer(prompt: Prompt) -> PromptTexts:
    """Return a prompt without a chat template, and its choices as most tokenizers score them: after a space.

    A choice that begins an answer in chat has none.
    """
    begins_answer = prompt.chat_template is True and not prompt.lead
    choices = [text.lstrip() if begins_answer else spaced(text) for text in prompt.continuations]
    return prompt.text, tuple(choices)


def spaced(text: str) -> str:
    """Return a text with a leading space."""
    return text if text.startswith(' ') else f' {text}'


def as_ids(ids: Sequence[int]) -> Ids:
    """Return token ids as an array."""
    return np.asarray(ids, dtype=np.int32)


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """Return the digest of a Hugging Face tokenizer, None if it is unknown what its ids depend on."""
    special_tokens = getattr(tokenizer, 'all_special_tokens', ())
    texts = [*PROBES, ' a'.join(map(str, special_tokens))]  # some settings split special tokens
    # First, because a call resets a truncation or padding left by earlier use, which would be in the content.
    probed = [encode_probe(tokenizer, text, special) for text in texts for special in (True, False)]
    kind = type(tokenizer)
    content = content_of(tokenizer)
    sources = foreign_sources(kind)
    if content is None or sources is None:
        return None
    described = [f'{kind.__module__}.{kind.__qualname__}', probed, version('tokenizers'), version('transformers')]
    digest = hashlib.sha256(repr(described).encode('utf-8', 'surrogatepass'))
    for part in [*content, *sources]:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def encode_probe(tokenizer: Any, text: str, special: bool) -> str:
    """Return the token ids of a text, or '' if it cannot be encoded."""
    with tokenizer_errors():
        return repr(tokenizer([text], add_special_tokens=special, verbose=False)['input_ids'])
    return ''


def content_of(tokenizer: Any) -> list[bytes] | None:
    """Return the state of a Rust tokenizer, or the files that a slow one saves; None if it cannot be saved."""
    backend: Any = getattr(tokenizer, 'backend_tokenizer', None)
    if hasattr(backend, 'to_str'):
        return [backend.to_str().encode('utf-8', 'surrogatepass')]
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            return [path.name.encode() + b'\0' + saved_bytes(path) for path in sorted(Path(folder).iterdir())]
    except (AttributeError, NotImplementedError, OSError, TypeError, ValueError):
        return None


def saved_bytes(path: Path) -> bytes:
    """Return the content of a file that a tokenizer saved, the same before and after it is loaded from there."""
    content = path.read_bytes()
    if path.name != 'tokenizer_config.json':
        return content
    settings = json.loads(content)
    for name in SAVED_AFTER_LOADING:
        settings.pop(name, None)
    # transformers 5 adds null once loaded. Tokens given here change ids, and stay.
    if settings.get('additional_special_tokens', ()) is None:
        del settings['additional_special_tokens']
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + '\n'  # as transformers writes it
    return text.encode('utf-8', 'surrogatepass')


def foreign_sources(kind: type) -> list[bytes] | None:
    """Return the source files of a tokenizer's classes outside transformers; None if they cannot be read."""
    classes = [base for base in kind.__mro__ if base is not object]
    foreign = [base for base in classes if not base.__module__.startswith('transformers.')]
    try:
        return [Path(inspect.getfile(base)).read_bytes() for base in foreign]
    except (OSError, TypeError):
        return None
