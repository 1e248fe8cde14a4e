"""The end and text of generations token by token, compared with decoding the whole text at every step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import FIXTURES
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

from llmfoundry_gauntlet.engine.decoding import GenerationDecoder, OngoingGeneration
from llmfoundry_gauntlet.engine.logits import uniform_draws
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.scoring.reasoning import KNOWN_MARKERS
from llmfoundry_gauntlet.tasks.base import draw_seed
from llmfoundry_gauntlet.types import GenerateRequest, ItemKey, Reasoning, Sampling, StopRule

EOS = '</s>'
MIXED = 'Hé said: “漢字!” 😀!😀 — naïve\n\nQ: 12\nA: 3 = 👩‍👧.\n'


def rotary_bos(**more: Any) -> Any:
    return AutoTokenizer.from_pretrained(FIXTURES / 'models' / 'rotary_bos', **more)


def alibi_pad_eos() -> Any:
    return AutoTokenizer.from_pretrained(FIXTURES / 'models' / 'alibi_pad_eos')


def bytes_and_parts() -> Any:
    """Return a tokenizer with a token for each byte, and some that end within a character or span two."""
    letter = bytes_to_unicode()  # GPT-2's alphabet
    pairs = ['!ð', ' â', 'ð\x9f', '\x98\x80', 'æ¼', '¢å', '\n\n', 'Q:', 'Ã©', 'â\x80', ': ']
    merges = [tuple(letter[ord(byte)] for byte in pair) for pair in pairs]
    words = [EOS, *sorted(letter.values()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def sentence_pieces() -> Any:
    """Return a tokenizer like Llama 2's: words begin with a mark for their space; other characters are bytes."""
    byte_tokens = [f'<0x{byte:02X}>' for byte in range(256)]
    words = ['<unk>', '<s>', EOS, *byte_tokens, *'▁:.!Q=Aadeins123', '▁a', '▁s', '▁A', 'A:']
    merges = [('▁', 'a'), ('▁', 's'), ('▁', 'A'), ('A', ':')]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token='<unk>', byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    steps = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, bos_token='<s>', clean_up_tokenization_spaces=False
    )


class Listed(PreTrainedTokenizer):
    """A tokenizer of one's own with a list of characters, whose items beyond its end raise IndexError."""

    characters = ('<unk>', EOS, *'abc .\n')

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def get_vocab(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.characters)}

    def _tokenize(self, text: str) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.characters.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.characters[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return ''.join(tokens)


class Mapped(Listed):
    """One with a mapping, which has no text for other ids."""

    def _convert_id_to_token(self, index: int) -> Any:
        return dict(enumerate(self.characters)).get(index)


TOKENIZERS = {make.__name__: make() for make in (rotary_bos, alibi_pad_eos, bytes_and_parts, sentence_pieces)}
every_tokenizer = pytest.mark.parametrize('name', TOKENIZERS)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)['input_ids']


def wanted(stops: StopRule | Sequence[str] = (), *, max_new_tokens: int = 1000) -> GenerateRequest:
    return GenerateRequest(
        key=ItemKey('t/0-shot', 3),
        context=np.array([5], dtype=np.int32),
        max_new_tokens=max_new_tokens,
        stops=stops if isinstance(stops, StopRule) else StopRule(strings=tuple(stops)),
    )


def generated(ids: Sequence[int], decoder: GenerationDecoder, request: GenerateRequest) -> OngoingGeneration:
    """Return the generation once it is done or has all ids."""
    generation = OngoingGeneration(request, decoder)
    for token in ids:
        generation.add(token)
        if generation.is_done:
            break
    return generation


def first_with(ids: list[int], decoder: GenerationDecoder, stops: Sequence[str]) -> int | None:
    """Return the number of leading ids whose text contains a stop string."""
    for count in range(1, len(ids) + 1):
        text = decoder.text(ids[:count])
        if text != decoder.before and any(stop in text for stop in stops):
            return count
    return None


def check(ids: list[int], decoder: GenerationDecoder, stops: Sequence[str]) -> None:
    """Check that a generation ends where the whole text first has a stop."""
    expected = first_with(ids, decoder, stops)
    generation = generated(ids, decoder, wanted(stops))
    assert (len(generation.ids), generation.is_done) == ((expected, True) if expected else (len(ids), False))
    assert not generation.is_truncated
    text = decoder.tokenizer.decode(generation.ids, skip_special_tokens=True)
    assert generation.result().text == (decoder.before + text if generation.ids else '')


letters = st.sampled_from('aQ: .!\nééü漢字😀👧—“”\u200d')
texts = st.text(letters, max_size=30)
stop_lists = st.lists(st.text(letters, min_size=1, max_size=4), min_size=1, max_size=3)


@every_tokenizer
@given(texts, stop_lists, st.data())
def test_a_generation_ends_with_the_first_token_that_completes_a_stop(name: str, text: str, stops: list[str], data):
    """Random texts with stop strings across tokens and within multi-byte characters.

    Mutations: pieces decoded without the previous token; `_lookback` of 0; parts of characters treated as text; stops
    searched only in whole characters.
    """
    if text:
        start = data.draw(st.integers(0, len(text) - 1))
        stops = [*stops, text[start : start + data.draw(st.integers(1, 5))]]
    check(encode(TOKENIZERS[name], text), GenerationDecoder(TOKENIZERS[name]), stops)


@every_tokenizer
@given(st.data())
def test_a_stop_is_found_among_undecodable_tokens(name: str, data):
    """Models at their first steps generate invalid bytes and special tokens."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=25))
    after = encode(tokenizer, data.draw(st.sampled_from(['Q:', 'a\n\n', '!', ' a'])))
    check(ids + after, GenerationDecoder(tokenizer), ['Q:', '\n\n', '!', ' a'])


@pytest.mark.parametrize(
    ('text', 'delimiter', 'up_to'),
    [
        ('1 + 1 #### 2\nQ: 3', '####', '1 + 1 #### 2\n'),
        ('1\n2\n3 ####\n\n 4\n5', '####', '1\n2\n3 ####\n\n 4\n'),
        ('1\n2\n3', '####', None),
        ('1 ####\n', '####', None),
        ('\n \n1\n2', '', '\n \n1\n'),
        ('1 #### 2\nQ: 漢', '####', '1 #### 2\n'),
    ],
)
@every_tokenizer
def test_a_generation_ends_after_its_answer(name: str, text: str, delimiter: str, up_to: str | None):
    """Mutations: only strings stop; the end of the line searched only in the latest piece."""
    tokenizer = TOKENIZERS[name]
    decoder, ids = GenerationDecoder(tokenizer), encode(tokenizer, text)
    generation = generated(ids, decoder, wanted(StopRule(answer_delimiter=delimiter, answer_end='\n')))
    if up_to is None:
        assert (generation.is_done, generation.ids) == (False, ids)
    else:
        assert generation.is_done
        assert len(generation.ids) == next(n for n in range(len(ids)) if up_to in decoder.text(ids[:n]))


LINE = StopRule(answer_end='\n')
BLANK_LINE = StopRule(strings=('\n\n',))


@pytest.mark.parametrize(
    ('text', 'stops', 'is_open', 'up_to'),
    [
        ('<think>\nOne\n\ntwo\n</think>\n\nThree\n\nfour', BLANK_LINE, False, 'Three\n\n'),
        ('<think>\nOne\n\ntwo\n</think>\n\nThree\nfour', LINE, False, 'Three\n'),
        ('One\n\ntwo\n</think>\nThree\n\nfour', BLANK_LINE, True, 'Three\n\n'),
        ('One\n\ntwo\n\nthree', BLANK_LINE, True, None),
        ('<think>One\n\ntwo\n\nthree', BLANK_LINE, False, None),
        ('One\n\n<think>two</think>', BLANK_LINE, False, 'One\n\n'),
        ('<think>One</think>Two<think>\n\n</think>three\n\nfour', BLANK_LINE, False, 'three\n\n'),
        ('<think>One } {</think> x; }\n}', StopRule(strings=('}',)), False, 'x; }'),
    ],
)
@every_tokenizer
def test_a_stop_in_reasoning_ends_no_generation(
    name: str, text: str, stops: StopRule, is_open: bool, up_to: str | None
):
    """Mutation: stops are searched in all of the text."""
    tokenizer = TOKENIZERS[name]
    decoder, ids = GenerationDecoder(tokenizer), encode(tokenizer, text)
    reasoning = Reasoning(markers=KNOWN_MARKERS, is_open=is_open)
    generation = generated(ids, decoder, replace(wanted(stops), reasoning=reasoning))
    if up_to is None:
        assert (generation.is_done, generation.ids) == (False, ids)
    else:
        assert generation.is_done
        assert len(generation.ids) == next(n for n in range(len(ids)) if decoder.text(ids[:n]).find(up_to) >= 0)
    without = generated(ids, decoder, wanted(stops))  # under reference semantics
    assert without.is_done and len(without.ids) <= len(generation.ids)


def test_special_tokens_that_mark_reasoning_are_text_for_requests_that_know_it():
    """As those of Magistral and gpt-oss. Mutation: they are dropped as other special tokens are."""
    tokenizer = rotary_bos()
    words = ['[THINK]', '[/THINK]', '<|channel|>', '<|message|>', '<|other|>']
    tokenizer.add_special_tokens({'additional_special_tokens': words})
    decoder = GenerationDecoder(tokenizer, [tokenizer.eos_token_id])
    known = replace(wanted(BLANK_LINE), reasoning=Reasoning(markers=KNOWN_MARKERS))

    def read(text: str, request: GenerateRequest) -> tuple[str, bool]:
        found = generated(encode(tokenizer, text), decoder, request)
        return found.result().text, found.is_done

    magistral = '[THINK]One\n\ntwo[/THINK]Three\n\n<|other|>four'
    assert read(magistral, known) == ('[THINK]One\n\ntwo[/THINK]Three\n\n', True)
    assert read(magistral, wanted(BLANK_LINE)) == ('One\n\n', True)
    channels = '<|channel|>analysis<|message|>One\n\n<|other|><|channel|>final<|message|>Two\n\nthree'
    text, is_done = read(channels, known)
    assert is_done and text.endswith('<|channel|>final<|message|>Two\n\n') and '<|other|>' not in text


def test_the_token_limit_truncates():
    """Unless a stop or the end comes with the last token. Mutation: check the limit first."""
    tokenizer = TOKENIZERS['rotary_bos']
    decoder = GenerationDecoder(tokenizer, [tokenizer.eos_token_id])
    ids = [*encode(tokenizer, 'Hello world\n\nQuestion'), tokenizer.eos_token_id, 7]

    def outcome(limit: int, *stops: str) -> tuple[int, bool]:
        generation = generated(ids, decoder, wanted(stops, max_new_tokens=limit))
        assert generation.is_done
        return len(generation.ids), generation.is_truncated

    assert [outcome(limit) for limit in (1, 8, 9, 10)] == [(1, True), (8, True), (9, False), (9, False)]
    assert [outcome(limit, '\n\n') for limit in (6, 7, 8)] == [(6, True), (7, False), (7, False)]


def test_a_special_end_token_counts_but_is_no_text_and_a_failed_generation_ends():
    tokenizer = TOKENIZERS['rotary_bos']
    (newline,) = encode(tokenizer, '\n')
    decoder = GenerationDecoder(tokenizer, {tokenizer.eos_token_id, newline})
    ids = encode(tokenizer, 'Hello')
    special = generated([*ids, tokenizer.eos_token_id, 8], decoder, wanted()).result()
    assert (special.text, special.num_tokens, special.is_truncated, special.is_finite) == ('Hello', 4, False, True)
    assert generated([*ids, newline, 8], decoder, wanted()).result().text == 'Hello\n'
    assert not generated([*ids, tokenizer.eos_token_id], GenerationDecoder(tokenizer), wanted()).is_done
    failed = OngoingGeneration(wanted(), decoder)
    assert failed.result().text == ''
    failed.add(ids[0])
    failed.fail()
    found = failed.result()
    assert (failed.is_done, found.num_tokens, found.is_finite, found.is_truncated) == (True, 1, False, False)


@every_tokenizer
def test_a_dropped_leading_space_is_restored(name: str):
    """Or the tokenizer has a token for it: Composer encodes ' a'. A stop may begin with it.

    Mutations: `before` left out of the text, or of the text that is searched for stops.
    """
    text = 'Hello' if name == 'rotary_bos' else ' Hello'
    decoder = GenerationDecoder(TOKENIZERS[name])
    generation = generated(encode(TOKENIZERS[name], 'Hello'), decoder, wanted([' H']))
    assert decoder.text(encode(TOKENIZERS[name], 'Hello')) == text
    assert generation.is_done == (text[0] == ' ')


def test_a_stop_removed_by_the_tokenizer_is_ignored():
    """The scored text decides. Mutation: do not check the whole text."""
    tokenizer = rotary_bos(clean_up_tokenization_spaces=True)
    ids = encode(tokenizer, 'a . b\n')
    assert tokenizer.decode(ids) == 'a. b\n'
    assert generated(ids, GenerationDecoder(tokenizer), wanted([' .', '\n'])).result().text == 'a. b\n'


@every_tokenizer
@pytest.mark.parametrize(('text', 'most'), [('Q: a dead end 123 ', 4), ('漢字', 12), ('😀', 12), (MIXED, 8)])
def test_decoding_is_linear_in_length(monkeypatch, name: str, text: str, most: int):
    """Count decoded tokens per generated one: more if a character has several. Mutation: `_start` stays 0."""
    tokenizer, decoded = TOKENIZERS[name], []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, 'decode', lambda ids, **more: decoded.append(len(ids)) or decode(ids, **more))
    ids = [token for _ in range(500) for token in encode(tokenizer, text)][:500]
    generation = generated(ids, GenerationDecoder(tokenizer), wanted(['never', '\n\n\n'], max_new_tokens=500))
    assert generation.is_truncated and len(generation.result().text) > 100
    assert sum(decoded) <= most * 500
    decoded.clear()
    generation = generated(ids, GenerationDecoder(tokenizer), wanted(max_new_tokens=500))
    assert decoded == [] and generation.result() and decoded == [500]


# What draws depend on.

KEY = ItemKey('t/0-shot', 3)
FIELDS = [{'task': 't/1-shot'}, {'row': 4}, {'file': 'part'}, {'variant': 'order:B'}, {'sample': 1}, {'file': 'None'}]
KEYS = [KEY, *(replace(KEY, **field) for field in FIELDS)]


def test_seeds_depend_on_the_whole_item_key():
    """Mutation: leave any field out."""
    text = b"(5, 't/0-shot', None, 3, None, 0)"
    assert draw_seed(Sampling(seed=5), KEY) == int.from_bytes(hashlib.sha256(text).digest()[:4], 'big') // 2
    many = [*KEYS, *(replace(KEY, sample=sample) for sample in range(2, 2000))]
    seeds = [draw_seed(Sampling(seed=5), key) for key in many] + [draw_seed(Sampling(seed=6), KEY)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0 and 2**30 < max(seeds) < 2**31


def test_draws_depend_only_on_the_request():
    """Settings other than the seed leave them unchanged. Mutation: NumPy's global generator."""

    def draws(key: ItemKey = KEY, **sampling: Any) -> list[float]:
        np.random.seed(len(sampling))
        return list(islice(uniform_draws(replace(wanted(), key=key, sampling=Sampling(**sampling))), 500))

    first = draws()
    assert min(first) >= 0 and max(first) < 1 and abs(np.mean(first) - 0.5) < 0.05
    assert draws(temperature=2.0, top_p=0.5, top_k=3) == first
    assert draws(seed=1)[0] != first[0]
    assert len({draws(key)[0] for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize('make', [Listed, Mapped, rotary_bos, sentence_pieces])
def test_a_generated_id_beyond_the_tokenizer_has_no_text(make):
    """A model whose embeddings are padded has such ids; the text around them, and its stop, are found all the same."""
    tokenizer = make(eos_token=EOS) if isinstance(make, type) else make()
    decoder, beyond = GenerationDecoder(tokenizer), len(tokenizer) + 5
    ids = encode(tokenizer, 'a. b')

    with_beyond = [beyond, *ids, beyond, beyond, *encode(tokenizer, '\n'), *ids, beyond]
    without = [*ids, *encode(tokenizer, '\n'), *ids]

    assert decoder.text(with_beyond) == decoder.text(without)
    stopped = generated(with_beyond, decoder, wanted(['\n']))
    assert stopped.is_done and len(stopped.ids) == 1 + len(ids) + 2 + len(encode(tokenizer, '\n'))


def test_ids_that_a_tokenizer_has_and_cannot_decode_are_an_error():
    class Broken(Listed):
        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            if len(tokens) > 1:
                raise RuntimeError('broken')
            return ''.join(tokens)

    with pytest.raises(ModelError, match=r'Broken.* cannot decode \[2, 3\]: broken'):
        GenerationDecoder(Broken(eos_token=EOS)).text([2, 3])
