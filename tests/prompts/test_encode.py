import numpy as np
import pytest

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.prompts.encode import EncodedPrompt, Encoder, drop_shots, score_request
from llmfoundry_gauntlet.values import ItemKey, Prompt, Question

KEY = ItemKey('t/0-shot', 0)
BOS = 1


def prompt(preamble: str, context: str, *continuations: str, num_shots: int = 0) -> Prompt:
    return Prompt(
        preamble=preamble, question=Question(contexts=(context,), continuations=continuations), num_shots=num_shots
    )


def text_of(ids: np.ndarray) -> str:
    return ''.join('^' if i == BOS else chr(i) for i in ids)


def encoded(preamble: str, context: str, *continuations: str) -> EncodedPrompt:
    return EncodedPrompt(
        preamble=[BOS, *map(ord, preamble)],
        contexts=([*map(ord, context)],),
        continuations=tuple([*map(ord, continuation)] for continuation in continuations),
    )


def cut(parts: EncodedPrompt, max_seq_len: int, *, reference: bool = False):
    return score_request(KEY, parts, max_seq_len=max_seq_len, truncated=False, reference=reference)


def test_the_three_parts_are_tokenised_apart_and_the_first_alone_gets_special_tokens(character_tokenizer):
    encoder = Encoder(character_tokenizer)
    assert not encoder.prefix_space  # ' a' is two tokens
    (parts,) = encoder.prompts([prompt('shots', 'query', 'x', 'yz')])
    assert parts.preamble == [BOS, *map(ord, 'shots')]
    assert parts.contexts == ([*map(ord, 'query')],)
    assert parts.continuations == ([ord('x')], [ord('y'), ord('z')])


def test_a_continuation_gets_a_space_where_the_tokenizer_has_one_token_for_it(character_tokenizer, monkeypatch):
    encoder = Encoder(character_tokenizer)
    monkeypatch.setattr(encoder, 'prefix_space', True)
    (parts,) = encoder.prompts([prompt('', 'query', 'x', ' y')])
    assert parts.continuations == ([*map(ord, ' x')], [*map(ord, ' y')])


def test_an_eos_at_the_end_of_the_preamble_is_dropped_but_not_when_it_is_alone(character_tokenizer):
    encoder = Encoder(character_tokenizer)
    encoder.eos_token_id = ord('!')
    assert encoder.preambles(['a!'])['a!'] == [BOS, ord('a')]
    encoder.eos_token_id = BOS
    assert encoder.preambles([''])[''] == [BOS]


def test_a_tokenizer_that_cannot_encode_is_a_model_error():
    tokenizers = pytest.importorskip('tokenizers')
    transformers = pytest.importorskip('transformers')
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({' a': 0, 'yes': 1, 'no': 2}, unk_token='?'))
    encoder = Encoder(transformers.PreTrainedTokenizerFast(tokenizer_object=words))
    assert encoder.encode(['yes', 'no'], special=False) == {'yes': [1], 'no': [2]}
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
    empty = EncodedPrompt(preamble=[], contexts=([],), continuations=([5],))
    assert 'no context token' in cut(empty, 9).unscorable


# bos, 3 characters a shot, 'q' and 'a': 3 + 3n tokens with n shots
@pytest.mark.parametrize(('max_seq_len', 'kept'), [(17, 4), (15, 4), (14, 3), (9, 2), (8, 1), (5, 0), (2, 0)])
def test_the_most_shots_that_fit_are_kept_and_the_first_go_first(character_tokenizer, max_seq_len: int, kept: int):
    def build(num_shots: int) -> Prompt:
        return prompt('aaabbbcccdddeee'[15 - 3 * num_shots :], 'q', 'a', num_shots=num_shots)

    shorter, parts = drop_shots(build(5), build, Encoder(character_tokenizer), max_seq_len)
    assert shorter.num_shots == kept
    assert text_of(parts.preamble) == '^' + 'aaabbbcccdddeee'[15 - 3 * kept :]
