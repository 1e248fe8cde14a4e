import numpy as np
import pytest
from character_tokenizer import CharacterTokenizer
from hypothesis import given
from hypothesis import strategies as st
from paths import FIXTURES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.tasks.encode import EncodedPrompt, Encoder, as_ids
from llmfoundry_gauntlet.tasks.truncate import EncodedItem, FittedPrompt, truncated_item
from llmfoundry_gauntlet.types import Prompt

BOS = 1


def prompt(preamble: str, context: str, *continuations: str, num_shots: int = 0) -> Prompt:
    return Prompt(preamble=preamble, contexts=(context,), continuations=continuations, num_shots=num_shots)


def text_of(ids: np.ndarray) -> str:
    return ''.join('^' if i == BOS else chr(i) for i in ids)


def ids_of(encoder: Encoder, *texts: str, special: bool = False) -> list[list[int]]:
    found = encoder.encode(list(texts), special=special)
    return [found[text].tolist() for text in texts]


def encoded(preamble: str, context: str, *continuations: str) -> EncodedPrompt:
    return EncodedPrompt(
        preamble=as_ids([BOS, *map(ord, preamble)]),
        contexts=(as_ids([*map(ord, context)]),),
        continuations=tuple(as_ids([*map(ord, continuation)]) for continuation in continuations),
    )


def truncated(parts: EncodedPrompt, max_seq_len: int, *, reference: bool = False) -> EncodedItem:
    fitted = FittedPrompt(prompt=Prompt(contexts=('',)), encoded=parts, too_long=False)
    return truncated_item(fitted, max_tokens=max_seq_len, reference=reference)


def test_parts_are_tokenized_separately_and_only_the_first_gets_special_tokens(character_tokenizer):
    encoder = Encoder(character_tokenizer)
    assert not encoder.prefix_space  # ' a' is two tokens
    (parts,) = encoder.prompts([prompt('shots', 'query', 'x', 'yz')])
    assert text_of(parts.preamble) == '^shots'
    assert [text_of(ids) for ids in parts.contexts] == ['query']
    assert [text_of(ids) for ids in parts.continuations] == ['x', 'yz']
    assert {ids.dtype for ids in (parts.preamble, *parts.contexts, *parts.continuations)} == {np.dtype(np.int32)}


def test_continuations_get_a_space_if_the_tokenizer_merges_it(character_tokenizer, monkeypatch):
    encoder = Encoder(character_tokenizer)
    monkeypatch.setattr(encoder, 'prefix_space', True)
    (parts,) = encoder.prompts([prompt('', 'query', 'x', ' y')])
    assert [text_of(ids) for ids in parts.continuations] == [' x', ' y']


def test_a_trailing_eos_of_the_preamble_is_dropped_unless_it_is_alone(character_tokenizer):
    encoder = Encoder(character_tokenizer)
    encoder.eos_token_id = ord('!')
    assert text_of(encoder.preambles(['a!'])['a!']) == '^a'
    encoder.eos_token_id = BOS
    assert text_of(encoder.preambles([''])['']) == '^'


def test_a_tokenizer_that_cannot_encode_is_a_model_error():
    words = Tokenizer(models.WordLevel({' a': 0, 'yes': 1, 'no': 2}, unk_token='?'))
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=words))
    assert ids_of(encoder, 'yes', 'no') == [[1], [2]]
    with pytest.raises(ModelError, match="'maybe'"):
        encoder.encode(['yes', 'no', 'maybe'], special=False)


@pytest.mark.parametrize(
    ('parts', 'max_seq_len', 'contexts', 'reference_contexts'),
    [
        # the question loses its start alike for all choices, and the instruction stays; the reference truncates each
        # choice by itself, through special tokens
        (('in', 'question', 'a', 'bcd'), 8, ['^inon', '^inon'], ['uestion', 'stion']),
        (('instruction', 'question', 'ab'), 8, ['estion'], ['estion']),  # no room for the instruction
        (('in', 'q', 'ab'), 6, ['^inq'], ['^inq']),
    ],
)
def test_truncation_keeps_the_end_of_the_question(parts, max_seq_len: int, contexts, reference_contexts):
    for reference, expected in ((False, contexts), (True, reference_contexts)):
        request = truncated(encoded(*parts), max_seq_len, reference=reference)
        assert [text_of(ids) for ids in request.contexts] == expected
        assert request.truncated == (expected != ['^inq'])
    shared = truncated(encoded(*parts), max_seq_len).contexts
    assert all(context is shared[0] for context in shared)


NOTHING = EncodedPrompt(preamble=as_ids([]), contexts=(as_ids([]),), continuations=(as_ids([5]),))


@pytest.mark.parametrize(
    ('parts', 'max_seq_len', 'reason'),
    [
        (encoded('', 'question', 'abcd'), 4, 'no context token'),  # fix 3
        (encoded('', 'q', 'abcde'), 4, 'max_seq_len 4'),
        (encoded('', 'q', ''), 9, 'no tokens for a continuation'),
        (NOTHING, 9, 'no context token'),
    ],
)
def test_without_context_or_continuation_an_item_is_unscorable(parts: EncodedPrompt, max_seq_len: int, reason: str):
    assert reason in truncated(parts, max_seq_len).unscorable


def test_the_reference_keeps_the_whole_context_before_a_continuation_of_full_length():
    """Fix 3: it takes `context[-0:]`."""
    assert text_of(truncated(encoded('', 'question', 'abcd'), 4, reference=True).contexts[0]) == '^question'


MODELS = ('rotary_bos', 'alibi_pad_eos')
TEXTS = st.lists(st.text(st.characters(exclude_categories=['Cs']), max_size=40), min_size=2, max_size=6)


def fixture_tokenizer(name: str):
    return AutoTokenizer.from_pretrained(FIXTURES / 'models' / name)


@pytest.fixture(scope='module', params=MODELS)
def fast_encoder(request) -> Encoder:
    encoder = Encoder(fixture_tokenizer(request.param))
    assert encoder.uses_backend
    return encoder


@given(texts=TEXTS, special=st.booleans())
def test_the_backend_gives_the_ids_of_the_tokenizer(fast_encoder, texts: list[str], special: bool):
    texts = [*texts, '<s>a</s> <|endoftext|>', ' \n\n']
    expected = fast_encoder.tokenizer(texts, add_special_tokens=special)['input_ids']
    assert ids_of(fast_encoder, *texts, special=special) == expected
    assert fast_encoder.uses_backend


@pytest.mark.parametrize('name', MODELS)
def test_earlier_truncation_and_padding_do_not_change_prompts(name: str):
    tokenizer = fixture_tokenizer(name)
    encoder = Encoder(tokenizer)
    texts = ['one two three four five six', 'a']
    expected = ids_of(encoder, *texts, special=True)
    tokenizer(texts, truncation=True, max_length=2, padding='max_length')
    assert ids_of(encoder, *texts, special=True) == expected


def test_split_special_tokens_is_respected():
    tokenizer = fixture_tokenizer('rotary_bos')
    assert ids_of(Encoder(tokenizer), '</s>', 'a')[0] == [1]
    tokenizer.split_special_tokens = True
    apart = ids_of(Encoder(tokenizer), '</s>', 'a')[0]
    assert apart == tokenizer('</s>', add_special_tokens=False)['input_ids'] != [1]


def test_overridden_tokenizer_methods_are_not_bypassed():
    kind = type(fixture_tokenizer('rotary_bos'))

    class LowerCase(kind):
        def _batch_encode_plus(self, batch_text_or_text_pairs, **keys):
            return super()._batch_encode_plus([text.lower() for text in batch_text_or_text_pairs], **keys)

    encoder = Encoder(LowerCase.from_pretrained(FIXTURES / 'models' / 'rotary_bos'))
    assert not encoder.uses_backend
    upper, lower = ids_of(encoder, 'HELLO', 'hello')
    assert upper == lower


def test_a_backend_that_differs_from_the_tokenizer_is_not_used():
    tokenizer = fixture_tokenizer('rotary_bos')
    tokenizer._call_one = lambda text, **_: {'input_ids': [[7] for _ in text]}
    assert ids_of(Encoder(tokenizer), 'a', 'b') == [[7], [7]]


def test_slow_tokenizers_give_their_own_ids():
    encoder = Encoder(ByT5Tokenizer())  # a byte b is the id b + 3
    assert not encoder.uses_backend
    assert ids_of(encoder, 'ab', ' ') == [[100, 101], [35]]
    assert encoder.preambles(['a'])['a'].tolist() == [100]  # without the eos that it adds


def test_a_word_has_one_space_before_it_with_any_tokenizer():
    """Some tokenizers split a space off (it would be duplicated), some add it to every first token, some do neither."""
    metaspace = Tokenizer(models.WordLevel({'▁': 0, '▁a': 1, '▁A': 2, '<unk>': 3}, unk_token='<unk>'))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=metaspace, unk_token='<unk>'))
    assert encoder.adds_space and encoder.word_after(' A') == 'A'
    assert ids_of(encoder, 'A', ' A')[0] == [2]
    characters = Encoder(CharacterTokenizer())
    assert not characters.adds_space and characters.word_after(' A') == characters.word_after('A') == ' A'
