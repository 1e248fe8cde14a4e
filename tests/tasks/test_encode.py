import numpy as np
import pytest
from character_tokenizer import CharacterTokenizer
from hypothesis import given
from hypothesis import strategies as st
from paths import FIXTURES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.tasks.encode import EncodedItem, EncodedPrompt, Encoder, as_ids, encode_scored
from llmfoundry_gauntlet.types import Prompt

BOS = 1


def prompt(preamble: str, context: str, *continuations: str, num_shots: int = 0) -> Prompt:
    return Prompt(preamble=preamble, contexts=(context,), continuations=continuations, num_shots=num_shots)


def text_of(ids: np.ndarray) -> str:
    return ''.join('^' if i == BOS else chr(i) for i in ids)


def encoded(preamble: str, context: str, *continuations: str) -> EncodedPrompt:
    return EncodedPrompt(
        preamble=as_ids([BOS, *map(ord, preamble)]),
        contexts=(as_ids([*map(ord, context)]),),
        continuations=tuple(as_ids([*map(ord, continuation)]) for continuation in continuations),
    )


def cut(parts: EncodedPrompt, max_seq_len: int, *, reference: bool = False) -> EncodedItem:
    return encode_scored(parts, prompt_sha256='', max_seq_len=max_seq_len, truncated=False, reference=reference)


def test_the_three_parts_are_tokenised_apart_and_the_first_alone_gets_special_tokens(character_tokenizer):
    encoder = Encoder(character_tokenizer)
    assert not encoder.prefix_space  # ' a' is two tokens
    (parts,) = encoder.prompts([prompt('shots', 'query', 'x', 'yz')])
    assert text_of(parts.preamble) == '^shots'
    assert [text_of(ids) for ids in parts.contexts] == ['query']
    assert [text_of(ids) for ids in parts.continuations] == ['x', 'yz']
    assert {ids.dtype for ids in (parts.preamble, *parts.contexts, *parts.continuations)} == {np.dtype(np.int32)}


def test_a_continuation_gets_a_space_where_the_tokenizer_has_one_token_for_it(character_tokenizer, monkeypatch):
    encoder = Encoder(character_tokenizer)
    monkeypatch.setattr(encoder, 'prefix_space', True)
    (parts,) = encoder.prompts([prompt('', 'query', 'x', ' y')])
    assert [text_of(ids) for ids in parts.continuations] == [' x', ' y']


def test_an_eos_at_the_end_of_the_preamble_is_dropped_but_not_when_it_is_alone(character_tokenizer):
    encoder = Encoder(character_tokenizer)
    encoder.eos_token_id = ord('!')
    assert text_of(encoder.preambles(['a!'])['a!']) == '^a'
    encoder.eos_token_id = BOS
    assert text_of(encoder.preambles([''])['']) == '^'


def test_a_tokenizer_that_cannot_encode_is_a_model_error():
    tokenizers = pytest.importorskip('tokenizers')
    transformers = pytest.importorskip('transformers')
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({' a': 0, 'yes': 1, 'no': 2}, unk_token='?'))
    encoder = Encoder(transformers.PreTrainedTokenizerFast(tokenizer_object=words))
    found = encoder.encode(['yes', 'no'], special=False)
    assert {text: ids.tolist() for text, ids in found.items()} == {'yes': [1], 'no': [2]}
    with pytest.raises(ModelError, match=r"the tokenizer \(PreTrainedTokenizerFast\) cannot encode 'maybe'"):
        encoder.encode(['yes', 'no', 'maybe'], special=False)


def test_the_reference_cuts_each_choice_by_itself_through_special_tokens():
    request = cut(encoded('in', 'question', 'a', 'bcd'), 8, reference=True)
    assert [text_of(ids) for ids in request.contexts] == ['uestion', 'stion']
    assert request.truncated


def test_the_question_is_cut_alike_for_all_choices_and_the_instruction_stays():
    request = cut(encoded('in', 'question', 'a', 'bcd'), 8)
    assert [text_of(ids) for ids in request.contexts] == ['^inon', '^inon']
    assert request.contexts[0] is request.contexts[1]
    assert request.truncated


def test_an_instruction_that_leaves_no_room_is_cut_as_well():
    request = cut(encoded('instruction', 'question', 'ab'), 8)
    assert text_of(request.contexts[0]) == 'estion'


def test_what_fits_is_not_cut():
    request = cut(encoded('in', 'q', 'ab'), 6)
    assert text_of(request.contexts[0]) == '^inq' and not request.truncated


def test_a_continuation_that_fills_the_length_leaves_no_context_and_is_unscorable():
    """Fix 3 of the reference: `context[-0:]` there keeps the whole context."""
    request = cut(encoded('', 'question', 'abcd'), 4)
    assert request.unscorable == 'no context token is left to predict the continuation from'
    whole = cut(encoded('', 'question', 'abcd'), 4, reference=True)
    assert text_of(whole.contexts[0]) == '^question'


def test_a_continuation_longer_than_the_length_is_unscorable():
    assert cut(encoded('', 'q', 'abcde'), 4).unscorable == 'a continuation has 5 tokens, more than max_seq_len 4'


def test_a_continuation_without_tokens_and_a_context_without_tokens_are_unscorable():
    assert 'no tokens for a continuation' in cut(encoded('', 'q', ''), 9).unscorable
    empty = EncodedPrompt(preamble=as_ids([]), contexts=(as_ids([]),), continuations=(as_ids([5]),))
    assert 'no context token' in cut(empty, 9).unscorable


MODELS = ('rotary_bos', 'alibi_pad_eos')
TEXTS = st.lists(st.text(st.characters(exclude_categories=['Cs']), max_size=40), min_size=2, max_size=6)


def fixture_tokenizer(name: str):
    return pytest.importorskip('transformers').AutoTokenizer.from_pretrained(FIXTURES / 'models' / name)


@pytest.fixture(scope='module', params=MODELS)
def fast_encoder(request) -> Encoder:
    encoder = Encoder(fixture_tokenizer(request.param))
    assert encoder.uses_backend
    return encoder


@given(texts=TEXTS, special=st.booleans())
def test_the_backend_gives_what_the_tokenizers_own_call_gives(fast_encoder, texts: list[str], special: bool):
    texts = [*texts, '<s>a</s> <|endoftext|>', ' \n\n']
    expected = fast_encoder.tokenizer(texts, add_special_tokens=special)['input_ids']
    found = fast_encoder.encode(texts, special=special)
    assert [found[text].tolist() for text in texts] == expected
    assert fast_encoder.uses_backend


def test_the_backend_gives_what_the_tokenizers_own_call_gives_on_real_rows(fast_encoder, real_data):
    lines = (real_data / 'reading_comprehension/squad.jsonl').read_text(encoding='utf-8').splitlines()[:300]
    found = fast_encoder.encode(lines, special=True)
    assert [ids.tolist() for ids in found.values()] == fast_encoder.tokenizer(list(found))['input_ids']


@pytest.mark.parametrize('name', MODELS)
def test_truncation_and_padding_of_an_earlier_use_do_not_reach_the_prompts(name: str):
    tokenizer = fixture_tokenizer(name)
    encoder = Encoder(tokenizer)
    texts = ['one two three four five six', 'a']
    expected = [ids.tolist() for ids in encoder.encode(texts, special=True).values()]
    tokenizer(texts, truncation=True, max_length=2, padding='max_length')
    assert [ids.tolist() for ids in encoder.encode(texts, special=True).values()] == expected


def test_special_tokens_in_texts_are_taken_apart_where_the_tokenizer_says_so():
    whole = Encoder(fixture_tokenizer('rotary_bos')).encode(['</s>', 'a'], special=False)
    assert whole['</s>'].tolist() == [1]
    tokenizer = fixture_tokenizer('rotary_bos')
    tokenizer.split_special_tokens = True
    apart = Encoder(tokenizer).encode(['</s>', 'a'], special=False)
    assert apart['</s>'].tolist() == tokenizer('</s>', add_special_tokens=False)['input_ids'] != [1]


def test_foreign_code_around_a_tokenizer_is_not_gone_round():
    kind = type(fixture_tokenizer('rotary_bos'))

    class LowerCase(kind):
        def _batch_encode_plus(self, batch_text_or_text_pairs, **keys):
            return super()._batch_encode_plus([text.lower() for text in batch_text_or_text_pairs], **keys)

    encoder = Encoder(LowerCase.from_pretrained(FIXTURES / 'models' / 'rotary_bos'))
    assert not encoder.uses_backend
    found = encoder.encode(['HELLO', 'hello'], special=False)
    assert found['HELLO'].tolist() == found['hello'].tolist()


def test_a_backend_that_differs_from_the_call_is_found_out():
    tokenizer = fixture_tokenizer('rotary_bos')
    tokenizer._call_one = lambda text, **_: {'input_ids': [[7] for _ in text]}
    encoder = Encoder(tokenizer)
    assert {text: ids.tolist() for text, ids in encoder.encode(['a', 'b'], special=False).items()} == {
        'a': [7],
        'b': [7],
    }


def test_a_slow_tokenizer_gives_its_own_ids():
    tokenizer = pytest.importorskip('transformers').ByT5Tokenizer()  # a byte b is the id b + 3
    encoder = Encoder(tokenizer)
    assert not encoder.uses_backend
    found = encoder.encode(['ab', ' '], special=False)
    assert {text: ids.tolist() for text, ids in found.items()} == {'ab': [100, 101], ' ': [35]}
    assert encoder.preambles(['a'])['a'].tolist() == [100]  # without the eos that it adds


def test_a_word_has_one_space_before_it_whatever_the_tokenizer():
    """Some split a space off (one would come twice), some have it in every first token, some leave it as it is."""
    metaspace = Tokenizer(models.WordLevel({'▁': 0, '▁a': 1, '▁A': 2, '<unk>': 3}, unk_token='<unk>'))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=metaspace, unk_token='<unk>'))
    assert encoder.adds_space and encoder.word_after(' A') == 'A'
    assert encoder.encode(['A', ' A'], special=False)['A'].tolist() == [2]
    characters = Encoder(CharacterTokenizer())
    assert not characters.adds_space and characters.word_after(' A') == characters.word_after('A') == ' A'
