"""What is written, whatever is written beside it. The measure is transformers' own `generate`, a prompt at a time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, islice
from typing import Any

import networks
import numpy as np
import pytest
import replies
import torch
from replies import WAY_OF, letters, request, tokens, writer_of

from llmfoundry_gauntlet.engine import pool_run
from llmfoundry_gauntlet.engine.generation import CACHE, NO_CACHE, STREAM, TUPLES, WAYS
from llmfoundry_gauntlet.engine.logits import output_layer
from llmfoundry_gauntlet.engine.reply import uniform_draws
from llmfoundry_gauntlet.engine.row_cache import GROWTH, RowCache
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.types import GenerateRequest, Sampling, StopRule

NUMBERS_OF_ROWS = (1, 2, 4, 50)
# One family for each way.
FAMILY_OF = {STREAM: 'qwen2', CACHE: 'llama', TUPLES: 'mpt', NO_CACHE: 'gpt_bigcode'}
every_way = pytest.mark.parametrize('way', WAYS)


def untied(name: str, loaded: str = 'eager') -> Any:
    """A network whose replies are not its last token again and again."""
    more = {'tie_word_embeddings': False} if name.startswith(('gemma', 'mamba')) else {}
    return networks.network(name, attn_implementation=loaded, **more)


@cache
def written_alone(way: str) -> list[list[int]]:
    """What the network of a way writes to the mixed requests."""
    return replies.written_alone(networks.network(FAMILY_OF[way]), replies.mixed_requests())


@pytest.mark.parametrize(('name', 'loaded'), networks.LOADED_AS)
def test_every_family_writes_what_it_writes_alone_with_eager_attention_in_the_fastest_way_it_can(
    name: str, loaded: str
):
    """Rows of all lengths enter and leave; some end early; a prompt has up to four replies.

    Mutations: a way trusted unseen; `position` not counted on; prompts padded on the right; tuples of all columns.
    """
    model, requests = untied(name, loaded), replies.mixed_requests()
    alone = replies.written_alone(untied(name, 'eager'), requests)
    end = replies.common_token(alone)
    expected = [letters(replies.until(ids, end)) for ids in alone]
    assert 0 < sum(len(text) < len(ids) for text, ids in zip(expected, alone, strict=True)) < len(requests)
    writer = writer_of(model, end_ids=[end])
    assert writer.way == WAY_OF[name]
    for num_rows in NUMBERS_OF_ROWS if name in FAMILY_OF.values() else (3,):
        assert replies.texts(writer, requests, num_rows) == expected


@every_way
@pytest.mark.parametrize('order', [slice(None, None, -1), slice(None, None, 2), slice(5, 6)])
def test_the_other_requests_of_a_pool_change_nothing(way: str, order: slice):
    """In another order, some alone, prompts one by one and all at once. Mutation: rows in the order of slots."""
    model, requests = networks.network(FAMILY_OF[way]), replies.mixed_requests()
    expected = [letters(ids) for ids in written_alone(way)]
    writer = writer_of(model, way)
    for tokens_per_batch in (1, 5000):
        assert replies.texts(writer, requests[order], 3, tokens_per_batch=tokens_per_batch) == expected[order]


@every_way
def test_a_reply_ends_at_its_stop_and_its_place_is_taken(way: str):
    """Mutation: `stops` that nobody looks at."""
    model, requests = networks.network(FAMILY_OF[way]), replies.mixed_requests()
    texts = [letters(ids) for ids in written_alone(way)]
    stopped, expected = [], []
    for one, text in zip(requests, texts, strict=True):
        stop = text[len(text) // 2 :][:2]
        stopped.append(replace(one, stops=StopRule(strings=(stop, 'never'))))
        expected.append(text[: text.index(stop) + len(stop)])
    assert expected != texts
    for num_rows in (2, 50):
        found = replies.run(writer_of(model, way), stopped, num_rows)
        assert [one.text for one in found] == expected
        assert not any(one.is_cut for one in found)
        assert [one.num_tokens for one in found] == [len(text) for text in expected]


def test_a_pool_without_requests_makes_no_forward():
    model = networks.network()
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    assert replies.run(writer_of(model, CACHE), []) == []


# What is run.


def distinct_prompts(requests: Sequence[GenerateRequest]) -> int:
    """Their tokens."""
    return sum(len(context) // 4 for context, _ in groupby(requests, key=lambda one: one.context.tobytes()))


def test_a_prompt_is_run_once_whatever_the_number_of_replies_and_rows():
    """And each of its tokens once, as is every token written but the last. Mutations: no `copy_prompt` beyond the rows
    that are free at first; a further reply's prompt run again."""
    rng = np.random.default_rng(0)
    prompts = [networks.draw(rng, length) for length in (5, 11, 2)]
    requests = [
        request(row, context, 1 + (5 * row + 3 * sample) % 7, sample=sample)
        for row, context in enumerate(prompts)
        for sample in range((9, 1, 4)[row])
    ]
    for way in (STREAM, CACHE, TUPLES):
        model = networks.network(FAMILY_OF[way])
        expected = [letters(ids) for ids in replies.written_alone(model, requests)]
        for num_rows in NUMBERS_OF_ROWS:
            writer = writer_of(model, way)
            assert replies.texts(writer, requests, num_rows, tokens_per_batch=5000) == expected
            assert writer.usage.prompt_tokens == distinct_prompts(requests) == 18
            assert writer.usage.written == sum(one.max_new_tokens - 1 for one in requests)
            assert writer.usage.places == writer.usage.steps * num_rows
            assert writer.usage.idle == 0 or num_rows > 1


def test_padding_is_what_shorter_prompts_lack_and_whole_rows_run_again():
    """By hand: prompts of 5 and 2 tokens together; then 3 tokens after 4 prompts tokens, in rows of 4, 5 and 6."""
    writer = writer_of(networks.network(), CACHE)
    replies.run(writer, [request(0, [3] * 5, 2), request(1, [4] * 2, 1)])
    assert (writer.usage.prompt_tokens, writer.usage.padding_tokens, writer.usage.written) == (7, 3, 1)
    assert writer.usage.wasted == 3 / 11
    writer = writer_of(networks.network(), NO_CACHE)
    replies.run(writer, [request(0, [3] * 4, 3)])
    assert (writer.usage.padding_tokens, writer.usage.written) == (3 + 4 + 5, 3)


@every_way
@pytest.mark.parametrize('tokens_per_batch', [1, 50, 130])
def test_no_forward_has_more_tokens_than_a_batch_but_for_a_single_prompt(way: str, tokens_per_batch: int):
    """Mutations: prompts as many as there are rows; whole rows as many as a cache has."""
    model, forwards = networks.network(FAMILY_OF[way]), []

    def count(_: Any, args: tuple, kwargs: dict) -> None:
        forwards.append((kwargs['input_ids'].numel(), len(kwargs['input_ids'])))

    model.register_forward_pre_hook(count, with_kwargs=True)
    replies.run(writer_of(model, way), replies.mixed_requests(), 8, tokens_per_batch=tokens_per_batch)
    shared = [num_tokens for num_tokens, rows in forwards if rows > 1 or way == STREAM]
    assert max(shared, default=0) <= max(tokens_per_batch, 44)
    assert max(shared, default=0) > 44 or tokens_per_batch < 130


@every_way
def test_the_output_layer_makes_one_place_of_each_row_alone(way: str):
    """No tensor of [rows, length, vocabulary] exists. Mutation: no `picking`."""
    model, places = networks.network(FAMILY_OF[way]), []
    output_layer(model).register_forward_hook(lambda _, inputs, output: places.append(output[..., 0].numel()))
    replies.run(writer_of(model, way), replies.mixed_requests(), 4, tokens_per_batch=5000)
    assert max(places) == 4


@pytest.mark.parametrize('way', [STREAM, CACHE, TUPLES])
def test_rows_move_to_the_left_while_they_are_written(way: str, monkeypatch):
    """Twelve replies of up to 22 tokens, two at a time. Mutations: `_grow` without the keys, or without `starts`."""
    caches = []

    def made(*args: Any, **kwargs: Any) -> RowCache:
        caches.append(RowCache(*args, **kwargs))
        return caches[-1]

    monkeypatch.setattr(pool_run, 'RowCache', made)
    rng = np.random.default_rng(3)
    requests = [request(row, networks.draw(rng, 1 + row % 2), 22 - row) for row in range(9)]
    requests += [request(8, requests[8].context, 18, sample=n) for n in (1, 2, 3)]
    model = networks.network(FAMILY_OF[way])
    expected = [letters(ids) for ids in replies.written_alone(model, requests)]
    assert replies.texts(writer_of(model, way), requests, 2) == expected
    (cache,) = caches
    assert cache.moved > 42
    assert cache.mask.shape[1] <= 24 + GROWTH


# Drawn tokens.


def sampled_requests(seed: int = 0, temperature: float = 1.0) -> list[GenerateRequest]:
    rng = np.random.default_rng(4)
    sampling = Sampling(temperature=temperature, top_p=0.98, top_k=60, seed=seed)
    return [
        request(50 + row, context, 7, sample=sample, sampling=sampling)
        for row, context in enumerate([networks.draw(rng, length) for length in (7, 3, 12)])
        for sample in range(4)
    ]


@every_way
def test_a_drawn_reply_depends_on_its_request_alone(way: str):
    """Mutations: one generator for all; seeds without the sample."""
    model, requests = networks.network(FAMILY_OF[way]), sampled_requests()
    writer = writer_of(model, way)
    expected = replies.texts(writer, requests, 50)
    assert len(set(expected)) == len(requests)
    for num_rows in (1, 4):
        torch.manual_seed(num_rows)
        assert replies.texts(writer, requests, num_rows) == expected
    assert replies.texts(writer, requests[::-1], 3) == expected[::-1]
    greedy = [replace(one, sampling=Sampling()) for one in requests[1::2]]
    mixed = [*requests[::2], *greedy]
    found = replies.texts(writer, mixed, 4)
    assert found[: len(requests[::2])] == expected[::2]
    assert found[len(requests[::2]) :] == [letters(ids) for ids in replies.written_alone(model, greedy)]
    others = replies.texts(writer, sampled_requests(seed=1), 4)
    assert all(one != other for one, other in zip(expected, others, strict=True))


def test_tokens_are_drawn_by_the_probabilities_of_a_bare_forward_and_the_requests_own_numbers():
    """A loop of bare forwards, numpy's cumulated probabilities, and the place of each number among them."""
    model = networks.network()
    requests = [replace(one, sampling=Sampling(temperature=0.8)) for one in sampled_requests()]
    found = replies.texts(writer_of(model, CACHE), requests, 4)
    for one, text in zip(requests, found, strict=True):
        ids = one.context.tolist()
        for number in islice(uniform_draws(one), one.max_new_tokens):
            probabilities = (networks.logits_of(model, ids)[-1].double() / 0.8).softmax(-1).numpy()
            ids.append(int(np.searchsorted(probabilities.cumsum(), number, side='right')))
        assert tokens(text) == ids[len(one.context) :]


# Models that fail.


@every_way
def test_numbers_that_are_not_finite_spoil_the_replies_that_saw_them_alone(way: str):
    """A token turns all into NaN: of prompts, or of replies that come to write it.

    Mutations: `clear` left out; logits looked at in the first row alone; a NaN row goes on; `logits` of a spoilt prompt
    taken for its further replies.
    """
    model, requests = networks.network(FAMILY_OF[way]), replies.mixed_requests()
    alone = written_alone(way)
    poison = replies.common_token(alone)
    in_prompt = [request(20, [9, poison, 8], 5, sample=n) for n in range(6)] + [request(21, [7] * 30 + [poison], 3)]
    expected = [
        (letters(replies.until(ids, poison)), poison not in ids[:-1]) if poison not in one.context else ('', False)
        for one, ids in zip(requests, alone, strict=True)
    ]
    assert 0 < sum(is_finite for _, is_finite in expected) < len(expected)
    requests, expected = requests[:6] + in_prompt + requests[6:], expected[:6] + [('', False)] * 7 + expected[6:]

    def spoil(_: Any, inputs: tuple, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.masked_fill((inputs[0] == poison)[..., None], torch.nan)

    model.get_input_embeddings().register_forward_hook(spoil)
    for num_rows in (1, 4):
        found = replies.run(writer_of(model, way), requests, num_rows, tokens_per_batch=300)
        assert [(one.text, one.is_finite) for one in found] == expected
        assert not any(one.is_cut for one in found if not one.is_finite)


def limit_rows(model: Any, most: int, after: int = 0) -> list[int]:
    """Makes a model run out of memory with more rows after so many forwards; returns how many it was given."""
    sizes: list[int] = []

    def fail(_: Any, args: tuple, kwargs: dict) -> None:
        sizes.append(len(kwargs['input_ids']))
        if sizes[-1] > most and len(sizes) > after:
            raise torch.OutOfMemoryError(f'{sizes[-1]} rows')

    model.register_forward_pre_hook(fail, with_kwargs=True)
    return sizes


@every_way
@pytest.mark.parametrize('after', [0, 7])
def test_rows_are_halved_until_they_fit_and_later_pools_have_no_more(way: str, after: int, caplog):
    """Right from the start, or in the middle. Mutation: `most_rows` not kept."""
    model, requests = networks.network(FAMILY_OF[way]), [*replies.mixed_requests()[2:], *sampled_requests()]
    expected = replies.texts(writer_of(model, way), requests, 8, tokens_per_batch=1000)
    sizes = limit_rows(model, 3, after)
    writer = writer_of(model, way)
    with caplog.at_level(logging.WARNING):
        assert replies.texts(writer, requests, 8, tokens_per_batch=1000) == expected
    assert caplog.messages == [
        'out of memory with 8 replies at a time: 4 from now on',
        'out of memory with 4 replies at a time: 2 from now on',
    ]
    assert max(sizes) > 4
    sizes.clear()
    assert replies.texts(writer, requests, 8, tokens_per_batch=1000) == expected
    assert max(sizes) == 2


@every_way
def test_what_was_written_before_memory_ran_out_is_kept(way: str):
    """Two replies of three tokens are done when the next two make it run out. Mutation: `done` begins anew."""
    model = networks.network(FAMILY_OF[way])
    requests = [request(row, [5 + row] * 7, 3) for row in range(4)]
    limit_rows(model, 1, after=3)
    writer, chosen = writer_of(model, way), Counter()
    right = writer.choose

    def choose(rows: Sequence[pool_run.Row], logits: torch.Tensor) -> list[int]:
        chosen.update(row.reply.request.key.row for row in rows)
        return right(rows, logits)

    writer.choose = choose
    replies.run(writer, requests, 2)
    assert writer.most_rows == 1
    assert (chosen[0], chosen[1]) == (3, 3)
    assert min(chosen.values()) == 3


def test_a_single_row_that_does_not_fit_is_an_error():
    """Mutation: halving goes on for ever."""
    model = networks.network()
    limit_rows(model, 0)
    with pytest.raises(ModelError, match='1 rows of up to 44 tokens do not fit into the memory of the device: 1 rows'):
        replies.run(writer_of(model, CACHE), replies.mixed_requests(), 8)


@every_way
def test_a_model_is_left_as_it_was_after_a_run_and_after_an_error_in_the_middle(way: str):
    """Mutations: no `finally` in `picking` or `trying`."""
    model = networks.network(FAMILY_OF[way])
    layer, state = output_layer(model), {key: value.clone() for key, value in model.state_dict().items()}
    attributes, config = dict(layer.__dict__), model.config.to_dict()
    writer = writer_of(model, way)
    expected = replies.texts(writer, replies.mixed_requests())
    steps = []

    def fail(*_: Any) -> None:
        steps.append(1)
        if len(steps) > 5:
            raise ZeroDivisionError

    handle = layer.register_forward_hook(fail)
    settings = dict(writer.__dict__)
    with pytest.raises(ZeroDivisionError), writer.trying(way, lambda rows, logits: [3] * len(rows)):
        replies.run(writer, replies.mixed_requests())
    handle.remove()
    assert writer.__dict__ == settings
    assert len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 0
    assert dict(layer.__dict__) == attributes
    assert model.config.to_dict() == config and not model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert replies.texts(writer, replies.mixed_requests()) == expected


def test_equal_requests_from_which_nothing_is_drawn_are_written_once():
    prompt, other = networks.draw(np.random.default_rng(3), 9), networks.draw(np.random.default_rng(4), 9)
    drawn = Sampling(temperature=2.0, seed=1)
    wanted = [
        request(0, prompt, 6),
        request(1, other, 6),
        request(2, prompt, 6),
        request(3, prompt, 4),
        request(4, prompt, 6, sampling=drawn),
        request(5, prompt, 6, sampling=drawn),
    ]
    writer = writer_of(untied('llama'))
    texts = [reply.text for reply in writer.write(replies.pool_of(wanted))]
    assert texts == replies.texts(writer_of(untied('llama')), wanted, 4)
    assert texts[0] == texts[2] and texts[3] == texts[0][:4] and len({texts[0], texts[1], texts[4], texts[5]}) == 4
    assert writer.usage.written == 5 + 5 + 3 + 5 + 5  # a reply's last token is never run
