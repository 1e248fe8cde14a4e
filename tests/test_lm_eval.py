"""GauntletLM beside lm-eval's Hugging Face backend: the same answers to every type of request.

Mutations: drop the last window of a text; cut contexts on the right; give one answer to both of two equal pairs that
stand apart; leave out `add_partial`; keep a cached prefix after the weights have changed; take the first `</think>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from paths import FIXTURES

from llmfoundry_gauntlet.lm_eval import GauntletLM

MODELS = FIXTURES / 'models'
TOLERANCE = 1e-4  # nats, in float32
NAMES = ('rotary_bos', 'alibi_pad_eos')
QUESTION = 'Question: What is warm?\nAnswer:'


def instances(kind: str, arguments: Sequence[tuple[Any, ...]], task: str = 'warm') -> list[Any]:
    return [
        Instance(request_type=kind, doc={}, arguments=of_document, idx=0, metadata=(task, number, 1))
        for number, of_document in enumerate(arguments)
    ]


def both(name: str = 'rotary_bos', **settings: Any) -> tuple[GauntletLM, HFLM]:
    arguments = {'pretrained': str(MODELS / name), 'device': 'cpu', 'dtype': 'float32', **settings}
    return GauntletLM(**arguments), HFLM(**arguments)


PAIRS = [
    *((QUESTION, f' {choice}') for choice in ('the sun', 'the sea', 'ice', 'a long night in the cold of winter')),
    # Choices that share the continuation.
    ('The cup was on the table because the cup', ' was full.'),
    ('The cup was on the table because the table', ' was full.'),
    # No context, twice, and a context that ends with spaces.
    ('', ' the sun'),
    ('', ' the sea'),
    (QUESTION + '  ', 'the sun'),
    (QUESTION, ' the sun'),
    # A beginning token that the text already has.
    ('<s>' + QUESTION, ' ice'),
    # A row that is longer than the model (of the tests that set max_length).
    (QUESTION * 8, ' the sun'),
]


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('settings', [{}, {'max_length': 24}, {'add_bos_token': True}, {'prefix_token_id': 5}], ids=str)
def test_log_likelihoods_are_those_of_lm_eval(name: str, settings: dict[str, Any]) -> None:
    ours, theirs = both(name, **settings)
    requests = instances('loglikelihood', PAIRS)

    answers = ours.loglikelihood(requests, disable_tqdm=True)

    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
    assert [total for total, _ in answers] == pytest.approx([total for total, _ in expected], abs=TOLERANCE, rel=0)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('max_length', [16, 2048])
def test_texts_are_scored_in_the_windows_of_lm_eval(name: str, max_length: int) -> None:
    ours, theirs = both(name, max_length=max_length)
    requests = instances('loglikelihood_rolling', [(QUESTION * 5,), ('warm',), (QUESTION * 2 + ' the end',)])

    answers = ours.loglikelihood_rolling(requests, disable_tqdm=True)

    assert answers == pytest.approx(theirs.loglikelihood_rolling(requests, disable_tqdm=True), abs=TOLERANCE, rel=0)
    assert ours.batch_size == 1


PROMPTS = (QUESTION, 'Q: ' + QUESTION * 3, 'once upon', '<s>' + QUESTION, QUESTION, 'The night was')
GENERATION_SETTINGS = {
    'no stops': {'max_gen_toks': 12},
    'strings across tokens': {'until': ['e ', '\n\n', 'th'], 'max_gen_toks': 40},
    'the end token': {'until': ['</s>'], 'max_gen_toks': 20},
    'a special token that ends nothing': {'until': ['<pad>', '<s>'], 'max_gen_toks': 40},
    'another name of the limit': {'until': '\n', 'max_new_tokens': 9},
    'greedy in many words': {'until': [], 'do_sample': False, 'temperature': 0.0, 'num_beams': 1, 'max_gen_toks': 8},
}


def common_words(lm: HFLM, num_words: int) -> list[str]:
    """Return pieces of the text that a model generates, so that stops occur in it."""
    requests = instances('generate_until', [(prompt, {'max_gen_toks': 40}) for prompt in PROMPTS])
    pieces = [text[place : place + 3] for text in lm.generate_until(requests, disable_tqdm=True) for place in (9, 30)]
    return [piece for piece in pieces if piece][:num_words]


@pytest.mark.parametrize('name', NAMES)
def test_generations_are_those_of_lm_eval(name: str) -> None:
    ours, theirs = both(name)
    settings = [*GENERATION_SETTINGS.values(), {'until': common_words(theirs, 4), 'max_gen_toks': 60}]
    requests = instances('generate_until', [(prompt, of_request) for prompt in PROMPTS for of_request in settings])

    texts = ours.generate_until(requests, disable_tqdm=True)

    assert texts == theirs.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize('of_task', [{'max_gen_toks': 20}, {'until': ['\n'], 'max_gen_toks': 30}], ids=str)
def test_prompts_are_cut_on_the_left_as_in_lm_eval(of_task: dict[str, Any]) -> None:
    ours, theirs = both(max_length=40)
    requests = instances('generate_until', [(prompt * 4, of_task) for prompt in PROMPTS])

    assert ours.generate_until(requests, disable_tqdm=True) == theirs.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize('ends_reasoning', ['word', 'token'])
def test_the_answer_follows_the_reasoning_as_in_lm_eval(ends_reasoning: str) -> None:
    _, plain = both()
    word = common_words(plain, 1)[0]
    think_end_token = word if ends_reasoning == 'word' else plain.tok_encode(word, add_special_tokens=False)[-1]
    ours, theirs = both(think_end_token=think_end_token)
    settings = [{'max_gen_toks': 60}, {'until': ['e'], 'max_gen_toks': 60}]
    requests = instances('generate_until', [(prompt, of_request) for prompt in PROMPTS for of_request in settings])

    texts = ours.generate_until(requests, disable_tqdm=True)

    assert texts == theirs.generate_until(requests, disable_tqdm=True)
    assert texts != plain.generate_until(requests, disable_tqdm=True)
