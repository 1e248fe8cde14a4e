"""Requests of lm-eval as ours, and our outputs as its answers, beside what lm-eval's own functions make of them.

Mutations: keep `max_length` tokens of a row in place of one more; cut contexts on the right; copy equal contexts; take
the mean of log-probabilities; leave out the text of the end token, or the two further tokens of a window; take top_k
for greedy settings; accept num_beams.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.tasks.lm_eval_requests import (
    GenerationSettings,
    answers_of,
    generate_request,
    generated_text,
    generation_settings,
    score_request,
)
from llmfoundry_gauntlet.types import ItemKey, Sampling, ScoreOutput

KEY = ItemKey(task='arc_easy', row=3)
GREEDY = {'do_sample': False, 'until': ['\n\n']}
NUCLEUS = Sampling(temperature=2.0, top_p=0.9, seed=11)


def settings_of(gen_kwargs: dict[str, Any], **more: Any) -> GenerationSettings:
    return generation_settings(gen_kwargs, end_text='</s>', **more)


def request_for(context: list[int], settings: GenerationSettings, **more: Any) -> Any:
    return generate_request(KEY, context, settings, max_length=16, num_tokens_of=len, **more)


def test_pairs_with_equal_contexts_share_an_array_and_others_do_not() -> None:
    request = score_request(KEY, [([5, 6], [7]), ([5, 6], [8, 9]), ([5], [7])], max_length=8)

    assert request.contexts[0] is request.contexts[1]
    assert [ids.tolist() for ids in request.contexts] == [[5, 6], [5, 6], [5]]
    assert [ids.tolist() for ids in request.continuations] == [[7], [8, 9], [7]]
    assert not request.prompt_shortened


@pytest.mark.parametrize(
    ('context', 'continuation'),
    [([1, 2, 3, 4], [5]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10])],
)
def test_a_row_has_the_tokens_that_lm_eval_keeps(context: list[int], continuation: list[int]) -> None:
    request = score_request(KEY, [(context, continuation)], max_length=4)

    row = [*request.contexts[0], *request.continuations[0]]
    assert row == (context + continuation)[-(4 + 1) :]  # HFLM._loglikelihood_tokens of 0.4.13
    assert request.prompt_shortened == (len(context + continuation) > 5)


@pytest.mark.parametrize(
    ('context', 'continuation', 'said'),
    [([1], [2, 3, 4, 5, 6], '5 tokens'), ([], [2], 'context has no tokens'), ([1], [], 'continuation has no tokens')],
)
def test_what_lm_eval_asserts_is_an_error_that_names_the_task(
    context: list[int], continuation: list[int], said: str
) -> None:
    with pytest.raises(DataError, match=rf'arc_easy: .*{said}'):
        score_request(KEY, [(context, continuation)], max_length=4)


def test_an_answer_is_the_sum_and_whether_all_tokens_are_the_argmax() -> None:
    output = ScoreOutput(
        key=KEY,
        logprobs=(np.array([-0.5, -0.25]), np.array([-2.0])),
        is_argmax=(np.array([True, False]), np.array([True])),
        num_top=(np.array([1, 0]), np.array([1])),
    )

    assert answers_of(output) == [(-0.75, False), (-2.0, True)]


def test_greedy_settings_have_the_end_token_among_the_stops() -> None:
    settings = settings_of({**GREEDY, 'max_gen_toks': 7, 'top_k': 3})

    assert settings == GenerationSettings(until=('\n\n', '</s>'), max_new_tokens=7)
    assert settings_of({'until': 'Q:'}).until == ('Q:', '</s>')
    assert settings_of({'until': ['</s>']}).until == ('</s>',)
    assert settings_of({}) == GenerationSettings(until=('</s>',), max_new_tokens=256)


@pytest.mark.parametrize(
    ('gen_kwargs', 'limit'),
    [
        ({'max_new_tokens': 5}, 5),
        ({'max_tokens': '6'}, 6),
        ({'max_completion_tokens': 7}, 7),
        ({'max_new_tokens': 5, 'max_gen_toks': 8}, 8),
    ],
)
def test_the_token_limit_has_all_the_names_that_lm_eval_knows(gen_kwargs: dict[str, Any], limit: int) -> None:
    assert settings_of(gen_kwargs).max_new_tokens == limit


@pytest.mark.parametrize(
    ('gen_kwargs', 'model_defaults', 'sampling'),
    [
        ({'temperature': 0.7}, {}, Sampling(temperature=0.7, top_k=50, seed=11)),
        (
            {'do_sample': True, 'temperature': 1.0, 'top_p': 0.9, 'top_k': 0},
            {},
            Sampling(temperature=1.0, top_p=0.9, seed=11),
        ),
        ({'temperature': 0.5}, {'top_p': 0.8, 'top_k': 20}, Sampling(temperature=0.5, top_p=0.8, top_k=20, seed=11)),
        ({'do_sample': False, 'temperature': 0.7}, {'top_k': 20}, Sampling()),
        ({'temperature': 0.0, 'top_p': 0.5}, {}, Sampling()),
    ],
)
def test_sampling_is_what_the_task_and_then_the_model_say(
    gen_kwargs: dict[str, Any], model_defaults: dict[str, Any], sampling: Sampling
) -> None:
    settings = settings_of(gen_kwargs, model_defaults=model_defaults, seed=11)

    assert settings.sampling == sampling
    assert settings.unsupported is None


@pytest.mark.parametrize(
    ('gen_kwargs', 'model_defaults', 'said'),
    [
        ({'num_beams': 4}, {}, 'num_beams: 4'),
        ({'repetition_penalty': 1.2}, {}, 'repetition_penalty: 1.2'),
        ({}, {'repetition_penalty': 1.05}, 'repetition_penalty: 1.05'),
        ({'max_length': 40}, {}, 'max_length: 40'),
        ({'stopping_criteria': 'x'}, {}, 'stopping_criteria: x'),
        ({'do_sample': True}, {}, 'temperature: 0'),
    ],
)
def test_settings_that_the_engine_cannot_follow_are_named(
    gen_kwargs: dict[str, Any], model_defaults: dict[str, Any], said: str
) -> None:
    unsupported = settings_of(gen_kwargs, model_defaults=model_defaults).unsupported

    assert unsupported is not None and said in unsupported


def test_settings_with_their_neutral_values_are_followed() -> None:
    assert settings_of({**GREEDY, 'num_beams': 1, 'repetition_penalty': 1.0, 'use_cache': True}).unsupported is None


def test_a_prompt_leaves_room_for_its_generation_and_stops_are_searched_in_windows() -> None:
    request = request_for(list(range(20)), settings_of({**GREEDY, 'max_gen_toks': 6}))

    assert request.context.tolist() == list(range(10, 20))
    assert request.prompt_shortened and request.length == 16
    assert request.stops.windows == (('\n\n', 4), ('</s>', 6))  # two more tokens than their own


def test_a_generation_as_long_as_the_model_is_an_error() -> None:
    with pytest.raises(DataError, match=r'arc_easy: 16 tokens .* max_gen_toks'):
        request_for([1], settings_of({'max_gen_toks': 16}))


@pytest.mark.parametrize(
    ('think_end_token', 'text', 'answer'),
    [
        (None, ' a b\n\nc', ' a b'),
        ('</think>', 'x\n\ny</think>\n 42 \n\nmore', '42 '),
        ('</think>', 'x\n\ny', 'x'),
        (9, '\n 42</s>', '42'),
    ],
)
def test_the_answer_follows_the_reasoning_and_ends_at_the_first_stop(
    think_end_token: str | int | None, text: str, answer: str
) -> None:
    assert generated_text(text, settings_of(GREEDY), think_end_token) == answer


def test_a_token_that_ends_reasoning_is_where_the_text_begins() -> None:
    assert request_for([1], settings_of(GREEDY | {'max_gen_toks': 2}), think_end_token=9).text_after == 9
    assert request_for([1], settings_of(GREEDY | {'max_gen_toks': 2}), think_end_token='</think>').text_after is None
