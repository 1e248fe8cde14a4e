"""The end and text of generations token by token, compared with decoding the whole text at every step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lm_eval.models.huggingface import stop_sequences_criteria
from paths import FIXTURES
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
    letter_of_byte = bytes_to_unicode()  # GPT-2's alphabet
    pairs_of_bytes = [
        # The first half of an emoji, after another character or alone, and its second half.
        '!\xf0',
        '\xf0\x9f',
        '\x98\x80',
        # The beginning of a quotation mark, after a space or alone.
        ' \xe2',
        '\xe2\x80',
        # The first two bytes of a Chinese character, and the last of it with the first of the next.
        '\xe6\xbc',
        '\xa2\xe5',
        # A whole letter of two bytes.
        '\xc3\xa9',
        # Beginnings of usual stop strings.
        '\n\n',
        'Q:',
        ': ',
    ]
    merges = []
    for pair in pairs_of_bytes:
        left, right = pair.encode('latin-1')
        merges.append((letter_of_byte[left], letter_of_byte[right]))

    words = [EOS, *sorted(letter_of_byte.values()), *(left + right for left, right in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
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


def num_ids_up_to(text: str, ids: list[int], decoder: GenerationDecoder) -> int:
    """Return how many leading ids have the text; it must be there before the last id."""
    return next(count for count in range(len(ids)) if text in decoder.text(ids[:count]))


def check_against_whole_texts(ids: list[int], decoder: GenerationDecoder, stops: Sequence[str]) -> None:
    """Check that a generation ends where the whole text first has a stop, and that its text is that of its ids."""
    num_ids_with_stop = first_with(ids, decoder, stops)

    generation = generated(ids, decoder, wanted(stops))

    if num_ids_with_stop is None:
        assert not generation.is_done
        assert len(generation.ids) == len(ids)
    else:
        assert generation.is_done
        assert len(generation.ids) == num_ids_with_stop
    assert not generation.is_truncated
    text = decoder.tokenizer.decode(generation.ids, skip_special_tokens=True)
    assert generation.result().text == (decoder.before + text if generation.ids else '')


# Characters of one to four bytes: `bytes_and_parts` has tokens within them and across two. The last one joins emojis.
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
        # A stop that occurs, which random ones seldom do.
        start = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.integers(1, 5))
        stops = [*stops, text[start : start + length]]
    tokenizer = TOKENIZERS[name]
    check_against_whole_texts(encode(tokenizer, text), GenerationDecoder(tokenizer), stops)


@every_tokenizer
@given(st.data())
def test_a_stop_is_found_among_undecodable_tokens(name: str, data):
    """Models at their first steps generate invalid bytes and special tokens."""
    tokenizer = TOKENIZERS[name]
    any_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=25))
    ending = data.draw(st.sampled_from(['Q:', 'a\n\n', '!', ' a']))
    ids = any_ids + encode(tokenizer, ending)
    check_against_whole_texts(ids, GenerationDecoder(tokenizer), ['Q:', '\n\n', '!', ' a'])


def stops_after_line_with(delimiter: str) -> StopRule:
    return StopRule(answer_delimiter=delimiter, answer_end='\n')


@pytest.mark.parametrize(
    ('text', 'delimiter', 'up_to'),
    [
        # After the line with the delimiter.
        ('1 + 1 #### 2\nQ: 3', '####', '1 + 1 #### 2\n'),
        # The answer is on a later line; empty lines before it do not end it.
        ('1\n2\n3 ####\n\n 4\n5', '####', '1\n2\n3 ####\n\n 4\n'),
        # Without a delimiter, the answer is the first line that is not empty.
        ('\n \n1\n2', '', '\n \n1\n'),
        # A character of several tokens follows.
        ('1 #### 2\nQ: 漢', '####', '1 #### 2\n'),
    ],
)
@every_tokenizer
def test_a_generation_ends_after_its_answer(name: str, text: str, delimiter: str, up_to: str):
    """Mutations: only strings stop; the end of the line searched only in the latest piece."""
    decoder = GenerationDecoder(TOKENIZERS[name])
    ids = encode(TOKENIZERS[name], text)

    generation = generated(ids, decoder, wanted(stops_after_line_with(delimiter)))

    assert generation.is_done
    assert len(generation.ids) == num_ids_up_to(up_to, ids, decoder)


@pytest.mark.parametrize(
    'text',
    [
        '1\n2\n3',  # no delimiter
        '1 ####\n',  # nothing after it
    ],
)
@every_tokenizer
def test_a_generation_goes_on_until_it_has_an_answer(name: str, text: str):
    ids = encode(TOKENIZERS[name], text)

    generation = generated(ids, GenerationDecoder(TOKENIZERS[name]), wanted(stops_after_line_with('####')))

    assert not generation.is_done
    assert generation.ids == ids


LINE = StopRule(answer_end='\n')
BLANK_LINE = StopRule(strings=('\n\n',))
BRACE = StopRule(strings=('}',))

# Each row: the text, its stops, whether the prompt has opened the reasoning, and up to where the text is generated.
STOPPED_AFTER_REASONING = [
    ('<think>\nOne\n\ntwo\n</think>\n\nThree\n\nfour', BLANK_LINE, False, 'Three\n\n'),
    ('<think>\nOne\n\ntwo\n</think>\n\nThree\nfour', LINE, False, 'Three\n'),
    # The prompt ends with the marker.
    ('One\n\ntwo\n</think>\nThree\n\nfour', BLANK_LINE, True, 'Three\n\n'),
    # A stop before any reasoning counts.
    ('One\n\n<think>two</think>', BLANK_LINE, False, 'One\n\n'),
    # Reasoning begins a second time.
    ('<think>One</think>Two<think>\n\n</think>three\n\nfour', BLANK_LINE, False, 'three\n\n'),
    # A stop of one character, which the reasoning has too.
    ('<think>One } {</think> x; }\n}', BRACE, False, 'x; }'),
]
# Reasoning that does not end; `is_open` as above.
IN_REASONING = [
    ('One\n\ntwo\n\nthree', True),
    ('<think>One\n\ntwo\n\nthree', False),
]


def reasoning(*, is_open: bool) -> Reasoning:
    return Reasoning(markers=KNOWN_MARKERS, is_open=is_open)


@pytest.mark.parametrize(('text', 'stops', 'is_open', 'up_to'), STOPPED_AFTER_REASONING)
@every_tokenizer
def test_a_stop_in_reasoning_ends_no_generation(name: str, text: str, stops: StopRule, is_open: bool, up_to: str):
    """Mutation: stops are searched in all of the text."""
    decoder = GenerationDecoder(TOKENIZERS[name])
    ids = encode(TOKENIZERS[name], text)

    generation = generated(ids, decoder, replace(wanted(stops), reasoning=reasoning(is_open=is_open)))

    assert generation.is_done
    assert len(generation.ids) == num_ids_up_to(up_to, ids, decoder)


@pytest.mark.parametrize(('text', 'is_open'), IN_REASONING)
@every_tokenizer
def test_reasoning_that_does_not_end_is_generated_to_the_limit(name: str, text: str, is_open: bool):
    """Mutation: stops are searched in all of the text."""
    ids = encode(TOKENIZERS[name], text)
    request = replace(wanted(BLANK_LINE), reasoning=reasoning(is_open=is_open))

    generation = generated(ids, GenerationDecoder(TOKENIZERS[name]), request)

    assert not generation.is_done
    assert generation.ids == ids


@pytest.mark.parametrize(
    ('text', 'stops', 'is_open'),
    [row[:3] for row in STOPPED_AFTER_REASONING] + [(text, BLANK_LINE, is_open) for text, is_open in IN_REASONING],
)
@every_tokenizer
def test_a_stop_in_reasoning_counts_under_reference_semantics(name: str, text: str, stops: StopRule, is_open: bool):
    """The reference knows no reasoning."""
    decoder = GenerationDecoder(TOKENIZERS[name])
    ids = encode(TOKENIZERS[name], text)
    aware = generated(ids, decoder, replace(wanted(stops), reasoning=reasoning(is_open=is_open)))

    unaware = generated(ids, decoder, wanted(stops))

    assert unaware.is_done
    assert len(unaware.ids) <= len(aware.ids)


@pytest.fixture
def tokenizer_with_markers() -> Any:
    """Return a tokenizer with the special tokens of Magistral and gpt-oss for reasoning, and another one."""
    tokenizer = rotary_bos()
    words = ['[THINK]', '[/THINK]', '<|channel|>', '<|message|>', '<|other|>']
    tokenizer.add_special_tokens({'additional_special_tokens': words})
    return tokenizer


KNOWS_REASONING = replace(wanted(BLANK_LINE), reasoning=Reasoning(markers=KNOWN_MARKERS))


def generated_from(text: str, tokenizer: Any, request: GenerateRequest) -> OngoingGeneration:
    decoder = GenerationDecoder(tokenizer, [tokenizer.eos_token_id])
    return generated(encode(tokenizer, text), decoder, request)


def test_special_tokens_that_mark_reasoning_are_text_for_requests_that_know_it(tokenizer_with_markers):
    """As those of Magistral. Mutation: they are dropped as other special tokens are."""
    text = '[THINK]One\n\ntwo[/THINK]Three\n\n<|other|>four'

    generation = generated_from(text, tokenizer_with_markers, KNOWS_REASONING)

    assert generation.is_done
    assert generation.result().text == '[THINK]One\n\ntwo[/THINK]Three\n\n'


def test_special_tokens_that_mark_reasoning_are_no_text_for_other_requests(tokenizer_with_markers):
    text = '[THINK]One\n\ntwo[/THINK]Three\n\n<|other|>four'

    generation = generated_from(text, tokenizer_with_markers, wanted(BLANK_LINE))

    assert generation.is_done
    assert generation.result().text == 'One\n\n'


def test_special_tokens_that_name_channels_are_text_and_others_are_not(tokenizer_with_markers):
    """As those of gpt-oss."""
    text = '<|channel|>analysis<|message|>One\n\n<|other|><|channel|>final<|message|>Two\n\nthree'

    generation = generated_from(text, tokenizer_with_markers, KNOWS_REASONING)

    assert generation.is_done
    assert generation.result().text.endswith('<|channel|>final<|message|>Two\n\n')
    assert '<|other|>' not in generation.result().text


@pytest.mark.parametrize(
    ('limit', 'stops', 'num_ids', 'is_truncated'),
    [
        # The end token is the ninth.
        (1, [], 1, True),
        (8, [], 8, True),
        (9, [], 9, False),
        (10, [], 9, False),
        # The stop is complete with the seventh token.
        (6, ['\n\n'], 6, True),
        (7, ['\n\n'], 7, False),
        (8, ['\n\n'], 7, False),
    ],
)
def test_the_token_limit_truncates(limit: int, stops: list[str], num_ids: int, is_truncated: bool):
    """Unless a stop or the end comes with the last token. Mutation: check the limit first."""
    tokenizer = TOKENIZERS['rotary_bos']
    end = tokenizer.eos_token_id
    ids = [*encode(tokenizer, 'Hello world\n\nQuestion'), end, 7]

    generation = generated(ids, GenerationDecoder(tokenizer, [end]), wanted(stops, max_new_tokens=limit))

    assert generation.is_done
    assert len(generation.ids) == num_ids
    assert generation.is_truncated == is_truncated


def test_a_special_end_token_counts_but_is_no_text():
    tokenizer = TOKENIZERS['rotary_bos']
    end = tokenizer.eos_token_id
    ids = [*encode(tokenizer, 'Hello'), end, 8]

    generation = generated(ids, GenerationDecoder(tokenizer, [end]), wanted()).result()

    assert generation.text == 'Hello'
    assert generation.num_tokens == 4
    assert not generation.is_truncated
    assert generation.is_finite


def test_an_end_token_that_is_not_special_is_text():
    tokenizer = TOKENIZERS['rotary_bos']
    (newline,) = encode(tokenizer, '\n')
    ids = [*encode(tokenizer, 'Hello'), newline, 8]

    generation = generated(ids, GenerationDecoder(tokenizer, {tokenizer.eos_token_id, newline}), wanted())

    assert generation.result().text == 'Hello\n'


def test_a_special_token_that_is_no_end_token_ends_nothing():
    tokenizer = TOKENIZERS['rotary_bos']
    ids = [*encode(tokenizer, 'Hello'), tokenizer.eos_token_id]
    assert not generated(ids, GenerationDecoder(tokenizer), wanted()).is_done


def test_a_generation_without_tokens_has_an_empty_text():
    assert OngoingGeneration(wanted(), GenerationDecoder(TOKENIZERS['rotary_bos'])).result().text == ''


def test_a_failed_generation_ends():
    tokenizer = TOKENIZERS['rotary_bos']
    generation = OngoingGeneration(wanted(), GenerationDecoder(tokenizer))
    generation.add(encode(tokenizer, 'Hello')[0])

    generation.fail()

    assert generation.is_done
    assert generation.result().num_tokens == 1
    assert not generation.result().is_finite
    assert not generation.result().is_truncated


@every_tokenizer
def test_a_dropped_leading_space_is_restored(name: str):
    """Or the tokenizer has a token for it: Composer encodes ' a'. A stop may begin with it.

    Mutations: `before` left out of the text, or of the text that is searched for stops.
    """
    ids = encode(TOKENIZERS[name], 'Hello')
    decoder = GenerationDecoder(TOKENIZERS[name])

    generation = generated(ids, decoder, wanted([' H']))

    has_space = name != 'rotary_bos'
    assert decoder.text(ids) == (' Hello' if has_space else 'Hello')
    assert generation.is_done == has_space


def test_a_stop_removed_by_the_tokenizer_is_ignored():
    """The scored text decides. Mutation: do not check the whole text."""
    tokenizer = rotary_bos(clean_up_tokenization_spaces=True)
    # Without it transformers 5 leaves the spaces of this kind of tokenizer.
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = encode(tokenizer, 'a . b\n')
    assert tokenizer.decode(ids) == 'a. b\n'

    generation = generated(ids, GenerationDecoder(tokenizer), wanted([' .', '\n']))

    assert generation.result().text == 'a. b\n'


def lengths_of_decodings(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of a tokenizer's `decode` appends the number of its ids."""
    lengths: list[int] = []
    decode = tokenizer.decode

    def counted(ids: Sequence[int], **more: Any) -> str:
        lengths.append(len(ids))
        return decode(ids, **more)

    monkeypatch.setattr(tokenizer, 'decode', counted)
    return lengths


def repeated_to(count: int, ids: list[int]) -> list[int]:
    return list(islice(cycle(ids), count))


@every_tokenizer
@pytest.mark.parametrize(
    ('text', 'most_per_token'),
    [
        ('Q: a dead end 123 ', 4),
        # More, as a character has several tokens.
        ('漢字', 12),
        ('😀', 12),
        (MIXED, 8),
    ],
)
def test_decoding_is_linear_in_length(monkeypatch, name: str, text: str, most_per_token: int):
    """Count decoded tokens per generated one. Mutation: `_start` stays 0."""
    tokenizer = TOKENIZERS[name]
    lengths = lengths_of_decodings(tokenizer, monkeypatch)
    ids = repeated_to(500, encode(tokenizer, text))

    generation = generated(ids, GenerationDecoder(tokenizer), wanted(['never', '\n\n\n'], max_new_tokens=500))

    assert generation.is_truncated
    assert len(generation.result().text) > 100
    assert sum(lengths) <= most_per_token * 500


@every_tokenizer
@pytest.mark.parametrize('text', ['Q: a dead end 123 ', '漢字', '😀', MIXED])
def test_a_generation_without_stops_is_decoded_once(monkeypatch, name: str, text: str):
    tokenizer = TOKENIZERS[name]
    lengths = lengths_of_decodings(tokenizer, monkeypatch)
    ids = repeated_to(500, encode(tokenizer, text))

    generation = generated(ids, GenerationDecoder(tokenizer), wanted(max_new_tokens=500))
    assert lengths == []

    generation.result()
    assert lengths == [500]


# Facts that draws depend on.

KEY = ItemKey('t/0-shot', 3)
# Keys that differ from KEY in one field, the last one by a file named like None.
OTHER_KEYS = [
    replace(KEY, task='t/1-shot'),
    replace(KEY, row=4),
    replace(KEY, file='part'),
    replace(KEY, variant='order:B'),
    replace(KEY, sample=1),
    replace(KEY, file='None'),
]
KEYS = [KEY, *OTHER_KEYS]


def test_a_seed_by_hand():
    """The first four bytes of a hash of the sampling's seed and the key, without the last bit."""
    digest = hashlib.sha256(b"(5, 't/0-shot', None, 3, None, 0)").digest()
    assert draw_seed(Sampling(seed=5), KEY) == int.from_bytes(digest[:4], 'big') // 2


def test_seeds_depend_on_the_whole_item_key():
    """Mutation: leave any field out."""
    samples = [replace(KEY, sample=sample) for sample in range(2, 2000)]

    seeds = [draw_seed(Sampling(seed=5), key) for key in [*KEYS, *samples]]
    seeds.append(draw_seed(Sampling(seed=6), KEY))

    assert len(set(seeds)) == len(seeds)
    # They fill the 31 bits.
    assert min(seeds) >= 0
    assert 2**30 < max(seeds) < 2**31


def draws(key: ItemKey = KEY, **sampling: Any) -> list[float]:
    """Return the first draws of a request, for sampling with the given settings."""
    np.random.seed(len(sampling))  # whatever the state of NumPy's global generator
    request = replace(wanted(), key=key, sampling=Sampling(**sampling))
    return list(islice(uniform_draws(request), 500))


def test_draws_are_uniform():
    numbers = draws()
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.05  # four standard errors of 500 draws are 0.052


def test_settings_other_than_the_seed_leave_draws_unchanged():
    """Mutation: NumPy's global generator."""
    assert draws(temperature=2.0, top_p=0.5, top_k=3) == draws()


def test_another_seed_has_other_draws():
    assert draws(seed=1)[0] != draws()[0]


def test_each_item_has_draws_of_its_own():
    first_draws = {draws(key)[0] for key in KEYS}
    assert len(first_draws) == len(KEYS)


@pytest.mark.parametrize('make', [Listed, Mapped, rotary_bos, sentence_pieces])
def test_a_generated_id_beyond_the_tokenizer_has_no_text(make):
    """A model whose embeddings are padded has such ids; the text around them, and its stop, are found all the same."""
    tokenizer = make(eos_token=EOS) if isinstance(make, type) else make()
    decoder = GenerationDecoder(tokenizer)
    beyond = len(tokenizer) + 5
    ids = encode(tokenizer, 'a. b')
    newline = encode(tokenizer, '\n')
    with_beyond = [beyond, *ids, beyond, beyond, *newline, *ids, beyond]
    without = [*ids, *newline, *ids]

    stopped = generated(with_beyond, decoder, wanted(['\n']))

    assert decoder.text(with_beyond) == decoder.text(without)
    assert stopped.is_done
    assert stopped.ids == [beyond, *ids, beyond, beyond, *newline]


def test_ids_that_a_tokenizer_has_and_cannot_decode_are_an_error():
    class Broken(Listed):
        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            if len(tokens) > 1:
                raise RuntimeError('broken')
            return ''.join(tokens)

    with pytest.raises(ModelError, match=r'Broken.* cannot decode \[2, 3\]: broken'):
        GenerationDecoder(Broken(eos_token=EOS)).text([2, 3])


@every_tokenizer
@given(st.lists(st.text(letters, max_size=4), max_size=6), st.text(letters, min_size=1, max_size=3) | st.just(EOS))
@example(['a\n\n\n'], '\n\n\n')  # written in more tokens than the tokenizer has for it
def test_a_stop_in_a_window_ends_a_generation_where_lm_eval_ends_it(name: str, parts: list[str], stop: str):
    """Mutations: two tokens less in the window; leave special tokens, such as that after each part, out of it."""
    tokenizer = TOKENIZERS[name]
    by_character = [[encode(tokenizer, character) for character in part] for part in parts]
    ids = [id_ for part in by_character for id_ in [*chain(*part), tokenizer.eos_token_id]]
    num_tokens = len(encode(tokenizer, stop)) + 2
    (criterion,) = stop_sequences_criteria(tokenizer, [stop], initial_decoder_input_length=0, batch_size=1)
    rows = [torch.tensor([ids[:count]]) for count in range(1, len(ids) + 1)]
    expected = next((row.shape[1] for row in rows if criterion(row, None)), None)

    generation = generated(ids, GenerationDecoder(tokenizer), wanted(StopRule(windows=((stop, num_tokens),))))

    assert generation.is_done == (expected is not None)
    assert len(generation.ids) == (expected or len(ids))


def test_the_text_may_begin_after_the_last_of_a_token():
    """Mutation: after the first."""
    tokenizer = alibi_pad_eos()
    ids = encode(tokenizer, 'a. b. c')
    request = replace(wanted(), text_after=encode(tokenizer, '.')[-1], restores_space=False)

    generation = generated(ids, GenerationDecoder(tokenizer), request)

    assert generation.result().text.strip() == 'c'
