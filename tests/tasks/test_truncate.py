"""Truncation of prompts: whole shots are dropped first, then the beginning of the question."""

import numpy as np
import pytest
from character_tokenizer import CharacterTokenizer
from hypothesis import given
from hypothesis import strategies as st
from paths import FIXTURES

from llmfoundry_gauntlet.tasks.encode import EncodedPrompt, Encoder, as_ids
from llmfoundry_gauntlet.tasks.truncate import EncodedItem, Shortenable, fit_shots, truncated_item
from llmfoundry_gauntlet.types import Prompt

BOS = 1
INSTRUCTION = 'in'
EMPTY = Prompt(contexts=('',))


def text_of(ids: np.ndarray) -> str:
    return ''.join('^' if i == BOS else chr(i) for i in ids)


def encoded(preamble: str, context: str, *continuations: str) -> EncodedPrompt:
    return EncodedPrompt(
        prompt=EMPTY,
        preamble=as_ids([BOS, *map(ord, preamble)]),
        contexts=(as_ids([*map(ord, context)]),),
        continuations=tuple(as_ids([*map(ord, continuation)]) for continuation in continuations),
    )


def truncated(parts: EncodedPrompt, max_tokens: int, *, reference: bool = False) -> EncodedItem:
    return truncated_item(parts, max_tokens=max_tokens, reference=reference)


@pytest.mark.parametrize(
    ('parts', 'max_tokens', 'contexts', 'reference_contexts'),
    [
        # the question loses its start alike for all choices, and the instruction stays; the reference truncates each
        # choice by itself, through special tokens
        (('in', 'question', 'a', 'bcd'), 8, ['^inon', '^inon'], ['uestion', 'stion']),
        (('instruction', 'question', 'ab'), 8, ['estion'], ['estion']),  # no room for the instruction
        (('in', 'q', 'ab'), 6, ['^inq'], ['^inq']),
        (('', 'question', 'abcd'), 4, [''], ['^question']),  # fix 3: the reference takes `context[-0:]`
    ],
)
def test_truncation_keeps_the_end_of_the_question(parts, max_tokens: int, contexts, reference_contexts):
    for reference, expected in ((False, contexts), (True, reference_contexts)):
        item = truncated(encoded(*parts), max_tokens, reference=reference)
        assert [text_of(ids) for ids in item.contexts] == expected
        assert item.prompt_shortened == (expected not in (['^inq'], ['^question']))


def test_equal_contexts_are_the_same_array():
    item = truncated(encoded('in', 'question', 'a', 'bcd'), 8)
    first, second = item.contexts
    assert first is second


@pytest.mark.parametrize(
    ('parts', 'max_tokens', 'reason'),
    [
        (encoded('', 'question', 'abcd'), 4, 'no context token'),  # fix 3
        (encoded('', 'q', 'abcde'), 4, 'max_seq_len 4'),
        (encoded('', 'q', ''), 9, 'no tokens for a continuation'),
        (
            EncodedPrompt(prompt=EMPTY, preamble=as_ids([]), contexts=(as_ids([]),), continuations=()),
            9,
            'no context token',
        ),
    ],
)
def test_without_context_or_continuation_an_item_is_unscorable(parts: EncodedPrompt, max_tokens: int, reason: str):
    assert reason in truncated(parts, max_tokens).unscorable


# Shots that fit.


def source(shots: list[str], max_tokens: int, instruction: str = '') -> Shortenable:
    """Return a prompt whose shots have nothing between them."""

    def build(num_shots: int) -> Prompt:
        return Prompt(
            preamble=instruction + ''.join(shots[len(shots) - num_shots :]),
            contexts=('q',),
            continuations=('a',),
            num_shots=num_shots,
        )

    return Shortenable(shots=tuple(shots), build=build, max_tokens=max_tokens)


def fit(tokenizer, *sources: Shortenable) -> list[EncodedPrompt]:
    return fit_shots(Encoder(tokenizer), sources)


@given(
    prompts=st.lists(st.tuples(st.lists(st.integers(0, 90), max_size=7), st.integers(2, 300)), min_size=1, max_size=5)
)
def test_every_prompt_of_a_batch_keeps_as_many_of_its_last_shots_as_fit(prompts: list[tuple[list[int], int]]):
    """A token a character: bos, the instruction, the last shots, 'q' and ' a' are counted by hand.

    Each prompt has a limit of its own, as those of a task's categories have. The shots consist of different letters.
    """
    limits = [max_tokens for _, max_tokens in prompts]
    lengths_of_prompts = [lengths for lengths, _ in prompts]
    texts_of_prompts = [
        [letter * length for letter, length in zip('abcdefg', lengths, strict=False)] for lengths in lengths_of_prompts
    ]
    sources = [
        source(texts, max_tokens, instruction=INSTRUCTION)
        for texts, max_tokens in zip(texts_of_prompts, limits, strict=True)
    ]

    fitted_prompts = fit(CharacterTokenizer(), *sources)

    for lengths, texts, max_tokens, fitted in zip(
        lengths_of_prompts, texts_of_prompts, limits, fitted_prompts, strict=True
    ):
        # By the number of last shots that are kept: 4 are bos, 'q' and ' a'.
        totals = [4 + len(INSTRUCTION) + sum(lengths[len(lengths) - kept :]) for kept in range(len(lengths) + 1)]
        fitting = [kept for kept, total in enumerate(totals) if total <= max_tokens]
        num_kept = fitted.prompt.num_shots
        # A shot may be empty, so several numbers of shots have the same total.
        assert totals[num_kept] == totals[max(fitting, default=0)]
        preamble = INSTRUCTION + ''.join(texts[len(texts) - num_kept :])
        assert fitted.preamble.tolist() == [BOS, *map(ord, preamble)]
        item = truncated_item(fitted, num_shots=len(lengths), max_tokens=max_tokens, reference=False)
        assert item.prompt_shortened == (totals[-1] > max_tokens)


@pytest.mark.parametrize('model', ['rotary_bos', 'alibi_pad_eos'])
@pytest.mark.parametrize('max_seq_len', [40, 100, 250, 600, 1500])
def test_real_prompts_keep_as_many_shots_as_an_exhaustive_search(real_data, model: str, max_seq_len: int):
    tokenizer = pytest.importorskip('transformers').AutoTokenizer.from_pretrained(FIXTURES / 'models' / model)
    lines = (real_data / 'reading_comprehension/squad.jsonl').read_text(encoding='utf-8').splitlines()[:60]
    texts = [f'\n{line[:300]}' for line in lines]
    sources = [source(texts[start : start + 10], max_seq_len) for start in range(0, 50, 5)]
    for shortenable, fitted in zip(sources, fit(tokenizer, *sources), strict=True):
        every_number = Encoder(tokenizer).prompts([shortenable.build(num_shots) for num_shots in range(11)])
        fitting = [num_shots for num_shots, prompt in enumerate(every_number) if prompt.length <= max_seq_len]
        num_kept = fitted.prompt.num_shots
        assert num_kept == max(fitting, default=0)
        assert fitted.preamble.tolist() == every_number[num_kept].preamble.tolist()


def test_prompts_that_are_much_too_long_are_tokenized_once(character_tokenizer, monkeypatch):
    encoder, tokenized = Encoder(character_tokenizer), []
    original = encoder.preambles
    monkeypatch.setattr(encoder, 'preambles', lambda texts: original(tokenized.append(text) or text for text in texts))
    fit_shots(encoder, [source([letter * 500 for letter in 'abcdefghij'], 1600)])
    assert [len(text) for text in tokenized] == [0, 1500]


class Joining:
    """A tokenizer that makes one token of every run of a letter, so that shots alone say little about the total."""

    eos_token_id = None

    def __call__(self, texts, *, add_special_tokens, **_):
        runs = [[ord(b) for a, b in zip(f' {text}', text, strict=False) if a != b] for text in texts]
        return {'input_ids': runs}


def test_a_length_overestimate_drops_no_shots():
    """Five shots of one letter are five tokens one by one and one together, so all fit with the question."""
    (fitted,) = fit(Joining(), source(['x' * 20] * 5, 4))
    assert fitted.prompt.num_shots == 5
