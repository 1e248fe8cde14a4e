"""Generations do not depend on what else is generated; expected texts are from transformers' `generate`, one prompt at
a time.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import generations
import networks
import numpy as np
import pytest
import torch
from generations import LAYOUT_OF, generator_of, letters, request, tokens
from memory_limits import limit_rows

from llmfoundry_gauntlet.engine import generate, kv_cache
from llmfoundry_gauntlet.engine.continuous import BatchProgress
from llmfoundry_gauntlet.engine.decoding import (
    CACHE,
    FORKED_PROMPTS,
    GENERATION_LAYOUTS,
    NO_CACHE,
    PROMPT_STREAM,
    Usage,
)
from llmfoundry_gauntlet.engine.kv_cache import CachedAttention
from llmfoundry_gauntlet.engine.logits import output_layer, uniform_draws
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.types import GenerateRequest, Generation, Sampling, StopRule

NUMBERS_OF_SLOTS = (1, 2, 4, 50)
# One family for each layout.
FAMILY_OF = {PROMPT_STREAM: 'qwen2', FORKED_PROMPTS: 'mistral', CACHE: 'llama', NO_CACHE: 'gpt_bigcode'}


@pytest.fixture(autouse=True, scope='module')
def columns_that_soon_end():
    """Make the KV cache grow every other step, and run what prompts share once even where that does not pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, 'GROWTH', 2)
        patch.setattr(generate, 'FORWARD_TOKENS', 0)
        yield


every_layout = pytest.mark.parametrize('layout', GENERATION_LAYOUTS)


def untied(name: str, loaded: str = 'eager') -> Any:
    """Return a network that does not repeat its last token."""
    more = {'tie_word_embeddings': False} if name.startswith(('gemma', 'mamba')) else {}
    return networks.network(name, attn_implementation=loaded, **more)


@cache
def generated_alone(layout: str) -> list[list[int]]:
    """Return the tokens that the network of a layout generates for the mixed requests, one at a time."""
    return generations.generated_alone(networks.network(FAMILY_OF[layout]), generations.mixed_requests())


@pytest.mark.parametrize(('name', 'loaded'), networks.LOADED_AS)
def test_every_family_generates_as_alone_with_eager_attention(name: str, loaded: str):
    """Sequences of many lengths enter and leave; some end early; a prompt has up to four generations.

    Mutations: a layout is used without a probe; `position` is not advanced; prompts are padded on the right.
    """
    model, requests = untied(name, loaded), generations.mixed_requests()
    alone = generations.generated_alone(untied(name, 'eager'), requests)
    end = generations.common_token(alone)
    expected = [letters(generations.until(ids, end)) for ids in alone]
    assert 0 < sum(len(text) < len(ids) for text, ids in zip(expected, alone, strict=True)) < len(requests)
    generator = generator_of(model, end_ids=[end])
    assert generator.layout == LAYOUT_OF[name]
    for num_slots in NUMBERS_OF_SLOTS if name in FAMILY_OF.values() else (3,):
        assert generations.texts(generator, requests, num_slots) == expected


@every_layout
@pytest.mark.parametrize('order', [slice(None, None, -1), slice(None, None, 2), slice(5, 6)])
def test_other_requests_of_a_batch_change_nothing(layout: str, order: slice):
    """Other orders, single requests, prompts one by one and all at once. Mutation: slots not in their new order."""
    model, requests = networks.network(FAMILY_OF[layout]), generations.mixed_requests()
    expected = [letters(ids) for ids in generated_alone(layout)]
    generator = generator_of(model, layout)
    for tokens_per_batch in (1, 5000):
        assert generations.texts(generator, requests[order], 3, tokens_per_batch=tokens_per_batch) == expected[order]


@every_layout
def test_a_generation_ends_at_its_stop_and_frees_its_slot(layout: str):
    """Mutation: ignore `stops`."""
    model, requests = networks.network(FAMILY_OF[layout]), generations.mixed_requests()
    texts = [letters(ids) for ids in generated_alone(layout)]
    stopped, expected = [], []
    for wanted, text in zip(requests, texts, strict=True):
        stop = text[len(text) // 2 :][:2]  # two letters of the middle
        stopped.append(replace(wanted, stops=StopRule(strings=(stop, 'never'))))
        expected.append(text[: text.index(stop) + len(stop)])
    assert expected != texts

    for num_slots in (2, 50):
        outcomes = generations.run(generator_of(model, layout), stopped, num_slots)
        assert [generation.text for generation in outcomes] == expected
        assert [generation.num_tokens for generation in outcomes] == [len(text) for text in expected]
        assert not any(generation.is_truncated for generation in outcomes)


# Batches that are run.


def requests_with_a_prefix() -> list[GenerateRequest]:
    """Return six prompts that share 30 tokens, of one of which there are three samples, and one that shares nothing."""
    rng = np.random.default_rng(3)
    prefix = networks.draw(rng, 30)
    lengths_and_limits = [(9, 4), (1, 12), (5, 1), (2, 8), (7, 6), (3, 10)]  # of what follows the prefix
    requests = []
    for row, (length, max_new_tokens) in enumerate(lengths_and_limits):
        prompt = np.concatenate([prefix, networks.draw(rng, length)])
        for sample in range(3 if row == 1 else 1):
            requests.append(request(row, prompt, max_new_tokens - 2 * sample, sample=sample))
    return [*requests, request(6, networks.draw(rng, 20), 5)]


# Families with windows, biases or caps in all layers, whose keys are read slot by slot.
READ_BY_SLOT = (
    'mistral, windows',
    'gemma2',
    'phi3, windows',
    'cohere2',
    'starcoder2',
    'mpt',
    'bloom',
    'falcon, alibi',
    'phimoe',
    'gpt_oss',
)


@pytest.mark.parametrize('name', networks.IN_STREAM)
def test_keys_that_all_slots_share_are_read_once_for_the_same_texts(name: str, monkeypatch: pytest.MonkeyPatch):
    """Mutations: what follows the prefix begins in the column of the first slot; masked columns count; a window or a
    chunk is not heeded; a slot that has left counts.
    """
    monkeypatch.setattr(generate, 'LEAST_SHARED', 20)
    lengths: list[int] = []  # tokens that are read once, in each call
    attend = CachedAttention.attend_after_shared

    def counted(attention: CachedAttention, *states: Any) -> torch.Tensor:
        lengths.append(attention.num_shared)
        return attend(attention, *states)

    monkeypatch.setattr(CachedAttention, 'attend_after_shared', counted)
    model, requests = untied(name), requests_with_a_prefix()
    expected = [letters(ids) for ids in generations.generated_alone(model, requests)]
    generator = generator_of(model, PROMPT_STREAM)

    for num_slots in (2, 4, 50):
        assert generations.texts(generator, requests, num_slots) == expected

    # Of the prompts, and of the samples of one.
    assert set(lengths) == (set() if name in READ_BY_SLOT else {30, 31})


@pytest.mark.parametrize('layout', [PROMPT_STREAM, CACHE])
def test_a_prompt_is_run_once(layout: str):
    """For any number of generations and slots; every generated token but the last runs once too.

    Mutations: no `copy_prompt` beyond the slots that are free at first; the prompt runs again for a further generation.
    """
    rng = np.random.default_rng(0)
    requests = []
    for row, (length, num_samples) in enumerate([(5, 9), (11, 1), (2, 4)]):
        prompt = networks.draw(rng, length)
        for sample in range(num_samples):
            max_new_tokens = 1 + (5 * row + 3 * sample) % 7  # from 1 to 7, in no order
            requests.append(request(row, prompt, max_new_tokens, sample=sample))
    model = networks.network(FAMILY_OF[layout])
    expected = [letters(ids) for ids in generations.generated_alone(model, requests)]

    for num_slots in NUMBERS_OF_SLOTS:
        generator = generator_of(model, layout)
        assert generations.texts(generator, requests, num_slots, tokens_per_batch=5000) == expected
        assert generator.usage.prompt_tokens == 5 + 11 + 2
        assert generator.usage.generated_tokens == sum(request.max_new_tokens - 1 for request in requests)


def test_usage_counts_padding():
    """By hand: prompts of 5 and 2 tokens together, and a step of the first one."""
    generator = generator_of(networks.network(), CACHE)

    generations.run(generator, [request(0, [3] * 5, 2), request(1, [4] * 2, 1)])

    assert generator.usage == Usage(steps=1, prompt_tokens=5 + 2, padding_tokens=5 - 2, generated_tokens=1)
    assert generator.usage.wasted == 3 / (7 + 3 + 1)


def test_usage_counts_repeated_tokens():
    """By hand: without a cache, 3 tokens after a prompt of 4 are generated in rows of 4, 5 and 6."""
    generator = generator_of(networks.network(), NO_CACHE)

    generations.run(generator, [request(0, [3] * 4, 3)])

    # Of each row all but the last token count as padding.
    assert generator.usage == Usage(steps=3, padding_tokens=3 + 4 + 5, generated_tokens=3)


@every_layout
@pytest.mark.parametrize('tokens_per_batch', [1, 50, 130])
def test_forwards_keep_to_tokens_per_batch(layout: str, tokens_per_batch: int):
    """Except for a single prompt of up to 44 tokens with its generation, the longest of all.

    Mutations: as many prompts as slots; as many whole rows as cached ones; columns that no slot uses are kept.
    """
    model = networks.network(FAMILY_OF[layout])
    tokens_of_shared_forwards, columns = [0], []

    def count(_: Any, args: tuple, kwargs: dict) -> None:
        # A stream has several prompts in one row.
        if len(kwargs['input_ids']) > 1 or layout == PROMPT_STREAM:
            tokens_of_shared_forwards.append(kwargs['input_ids'].numel())
        columns.append(kwargs['attention_mask'].shape[-1])

    model.register_forward_pre_hook(count, with_kwargs=True)
    generations.run(generator_of(model, layout), generations.mixed_requests(), 8, tokens_per_batch=tokens_per_batch)

    most_tokens = max(tokens_of_shared_forwards)
    assert most_tokens <= max(tokens_per_batch, 44)
    if tokens_per_batch == 130:
        assert most_tokens > 44  # a large budget is used
    assert max(columns) <= 44 + 2 * kv_cache.GROWTH


@every_layout
def test_logits_are_made_at_one_position_per_row(layout: str):
    """No tensor of [rows, length, vocabulary] exists. Mutation: no `picking`."""
    model, numbers_of_positions = networks.network(FAMILY_OF[layout]), []

    def count(_: Any, inputs: tuple, logits: torch.Tensor) -> None:
        numbers_of_positions.append(logits[..., 0].numel())

    output_layer(model).register_forward_hook(count)
    num_slots = 4
    generations.run(generator_of(model, layout), generations.mixed_requests(), num_slots, tokens_per_batch=5000)

    assert max(numbers_of_positions) == num_slots


# Drawn tokens.


def sampled_requests(seed: int = 0, temperature: float = 1.0) -> list[GenerateRequest]:
    """Return four samples for each of three prompts."""
    rng = np.random.default_rng(4)
    sampling = Sampling(temperature=temperature, top_p=0.98, top_k=60, seed=seed)
    requests = []
    for row, length in enumerate((7, 3, 12), start=50):
        prompt = networks.draw(rng, length)
        requests += [request(row, prompt, 7, sample=sample, sampling=sampling) for sample in range(4)]
    return requests


def sampled_texts(layout: str, requests: list[GenerateRequest], num_slots: int) -> list[str]:
    return generations.texts(generator_of(networks.network(FAMILY_OF[layout]), layout), requests, num_slots)


@every_layout
def test_each_sample_of_a_prompt_is_another(layout: str):
    """Mutation: seeds without the sample."""
    requests = sampled_requests()
    assert len(set(sampled_texts(layout, requests, num_slots=50))) == len(requests)


@every_layout
def test_a_sampled_generation_depends_only_on_its_request(layout: str):
    """Whatever torch's seed, the number of slots and the order. Mutation: one generator for all."""
    requests = sampled_requests()
    generator = generator_of(networks.network(FAMILY_OF[layout]), layout)
    expected = generations.texts(generator, requests, 50)

    for num_slots in (1, 4):
        torch.manual_seed(num_slots)
        assert generations.texts(generator, requests, num_slots) == expected
    assert generations.texts(generator, requests[::-1], 3) == expected[::-1]


@every_layout
def test_greedy_requests_among_sampled_ones_change_nothing(layout: str):
    """Nor are they changed."""
    requests = sampled_requests()
    sampled = requests[::2]
    greedy = [replace(drawn, sampling=Sampling()) for drawn in requests[1::2]]

    texts = sampled_texts(layout, [*sampled, *greedy], num_slots=4)

    greedy_alone = generations.generated_alone(networks.network(FAMILY_OF[layout]), greedy)
    assert texts[: len(sampled)] == sampled_texts(layout, requests, num_slots=50)[::2]
    assert texts[len(sampled) :] == [letters(ids) for ids in greedy_alone]


@every_layout
def test_another_seed_gives_other_generations(layout: str):
    texts = sampled_texts(layout, sampled_requests(), num_slots=50)
    texts_of_other_seed = sampled_texts(layout, sampled_requests(seed=1), num_slots=4)
    assert all(text != other for text, other in zip(texts, texts_of_other_seed, strict=True))


def test_sampled_tokens_follow_the_probabilities_of_a_bare_forward():
    """Expected: a loop of bare forwards, NumPy's cumulative probabilities, and the request's own uniform draws."""
    model = networks.network()
    requests = [replace(drawn, sampling=Sampling(temperature=0.8)) for drawn in sampled_requests()]

    texts = generations.texts(generator_of(model, CACHE), requests, 4)

    for wanted, text in zip(requests, texts, strict=True):
        ids = wanted.context.tolist()
        for number in islice(uniform_draws(wanted), wanted.max_new_tokens):
            logits = networks.logits_of(model, ids)[-1].double()
            probabilities = (logits / 0.8).softmax(-1).numpy()
            ids.append(int(np.searchsorted(probabilities.cumsum(), number, side='right')))
        assert tokens(text) == ids[len(wanted.context) :]


# Models that fail.


@every_layout
def test_non_finite_logits_fail_only_their_own_generations(layout: str):
    """A token makes everything NaN, in prompts or in generations that reach it.

    Mutations: no `clear`; only the first row's logits are checked; a NaN row continues; `logits` of a failed prompt
    are used for its further generations.
    """
    model, requests = networks.network(FAMILY_OF[layout]), generations.mixed_requests()
    ids_alone = generated_alone(layout)
    poison = generations.common_token(ids_alone)

    # A generation has its text up to the token, and fails unless that is its last one or does not occur.
    expected = []
    for wanted, ids in zip(requests, ids_alone, strict=True):
        if poison in wanted.context:
            expected.append(('', False))
        else:
            expected.append((letters(generations.until(ids, poison)), poison not in ids[:-1]))
    assert 0 < sum(is_finite for _, is_finite in expected) < len(expected)

    # Prompts with the token in the middle of the batch: six samples of one, and a long one.
    failing = [request(20, [9, poison, 8], 5, sample=sample) for sample in range(6)]
    failing.append(request(21, [7] * 30 + [poison], 3))
    requests[6:6] = failing
    expected[6:6] = [('', False)] * len(failing)

    networks.poison(model, poison)
    for num_slots in (1, 4):
        outcomes = generations.run(generator_of(model, layout), requests, num_slots, tokens_per_batch=300)
        assert [(generation.text, generation.is_finite) for generation in outcomes] == expected
        assert not any(generation.is_truncated for generation in outcomes if not generation.is_finite)


@every_layout
def test_the_progress_of_a_batch_rises_to_one_while_it_runs(layout: str):
    """Equal greedy requests share a generation and count all the same.

    Mutations: no `update` in the loop; generations that end early do not count as whole.
    """
    model, progress = networks.network(FAMILY_OF[layout]), BatchProgress()
    batch = generations.batch_of([*generations.mixed_requests(), *sampled_requests()])
    generator = generator_of(model, layout, end_ids=range(0, networks.VOCABULARY, 3))  # a third of all tokens
    costs_done = []
    model.register_forward_pre_hook(lambda *_: costs_done.append(progress.of_cost))

    generator.generate(batch, progress)

    costs_done.append(progress.of_cost)
    assert costs_done[0] == 0.0
    assert costs_done == sorted(costs_done)
    assert len(set(costs_done)) > len(costs_done) / 2
    assert progress.of_cost == progress.of_requests == 1.0


@every_layout
def test_each_generation_is_reported_as_soon_as_it_has_ended(layout: str):
    """All prompts run in the first forward, which has the first token of each; every further one is a step.

    Mutations: report generations at the end of the batch; report only one of equal requests.
    """
    model = networks.network(FAMILY_OF[layout])
    limits = [1, 4, 2, 6, 4]
    requests = [request(row, [5 + row] * 7, limit) for row, limit in enumerate(limits)]
    equal = replace(requests[2], key=replace(requests[2].key, sample=1))
    generator = generator_of(model, layout)
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    model.register_forward_pre_hook(count)
    reported: dict[Generation, int] = {}  # to the number of forwards before

    batch = generations.batch_of([*requests, equal], 5, tokens_per_batch=1000)
    outcomes = generator.generate(batch, on_finished=lambda ended: reported.update(dict.fromkeys(ended, num_forwards)))

    assert list(reported.values()) == sorted(reported.values())
    assert [reported[generation] for generation in outcomes] == [*limits, 2]


@every_layout
@pytest.mark.parametrize('after', [0, 7])
def test_each_generation_is_reported_once_also_where_memory_runs_out(layout: str, after: int):
    """Mutation: those that had ended when memory ran out are reported again."""
    model, requests = networks.network(FAMILY_OF[layout]), [*generations.mixed_requests(), *sampled_requests()]
    generator = generator_of(model, layout)
    limit_rows(model, 3, after)
    reported: list[Generation] = []

    outcomes = generator.run(generations.batch_of(requests, 8, tokens_per_batch=1000), on_finished=reported.extend)

    assert generator.most_slots == 2
    by_key = {generation.key: generation for generation in reported}
    assert len(reported) == len(by_key)
    assert [by_key[wanted.key] for wanted in requests] == outcomes


@every_layout
@pytest.mark.parametrize('after', [0, 7])
def test_slots_are_halved_when_memory_runs_out(layout: str, after: int, caplog):
    """At the start or in the middle. Mutation: `most_slots` not kept."""
    model, requests = networks.network(FAMILY_OF[layout]), [*generations.mixed_requests(), *sampled_requests()]
    expected = generations.texts(generator_of(model, layout), requests, 8, tokens_per_batch=1000)
    sizes = limit_rows(model, 3, after)
    generator = generator_of(model, layout)

    with caplog.at_level(logging.WARNING):
        assert generations.texts(generator, requests, 8, tokens_per_batch=1000) == expected
    assert caplog.messages == [
        'out of memory with 8 generations at a time: 4 from now on',
        'out of memory with 4 generations at a time: 2 from now on',
    ]
    assert max(sizes) > 4

    # Later batches keep the limit.
    sizes.clear()
    assert generations.texts(generator, requests, 8, tokens_per_batch=1000) == expected
    assert max(sizes) == 2


@every_layout
def test_a_single_row_that_does_not_fit_is_an_error(layout: str):
    """Mutation: halve forever."""
    model, requests = networks.network(FAMILY_OF[layout]), [*generations.mixed_requests(), *sampled_requests()]
    generator = generator_of(model, layout)
    limit_rows(model, 0)

    with pytest.raises(ModelError, match='1 rows of up to 44 tokens do not fit into the memory of the device: 1 rows'):
        generations.run(generator, requests, 8)


@every_layout
def test_finished_generations_survive_running_out_of_memory(layout: str):
    """Two generations of three tokens are done when the next two run out of memory. Mutation: `done` starts empty.

    A generated token is run in a step of the next one, and without a cache in its own; a failed step counts too.
    """
    model = networks.network(FAMILY_OF[layout])
    limit_rows(model, 1, after=3)
    generator = generator_of(model, layout)
    generations.run(generator, [request(row, [5 + row] * 7, 3) for row in range(4)], 2)
    assert generator.most_slots == 1
    assert (
        generator.usage.generated_tokens
        == {PROMPT_STREAM: 4 + 2 + 4, FORKED_PROMPTS: 4 + 4, CACHE: 4 + 4, NO_CACHE: 6 + 2 + 6}[layout]
    )


@every_layout
def test_a_model_is_restored_after_runs_and_errors(layout: str):
    """Mutations: no `finally` in `picking` or `trying`."""
    model = networks.network(FAMILY_OF[layout])
    layer, state = output_layer(model), {key: value.clone() for key, value in model.state_dict().items()}
    attributes, config = dict(layer.__dict__), model.config.to_dict()
    generator = generator_of(model, layout)
    expected = generations.texts(generator, generations.mixed_requests())
    steps = []

    def fail(*_: Any) -> None:
        steps.append(1)
        if len(steps) > 5:
            raise ZeroDivisionError

    handle = layer.register_forward_hook(fail)
    settings = dict(generator.__dict__)
    with pytest.raises(ZeroDivisionError), generator.trying(layout, lambda rows, logits: [3] * len(rows)):
        generations.run(generator, generations.mixed_requests())
    handle.remove()
    assert generator.__dict__ == settings
    assert len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 0
    assert dict(layer.__dict__) == attributes
    assert model.config.to_dict() == config and not model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert generations.texts(generator, generations.mixed_requests()) == expected


def test_equal_greedy_requests_are_generated_once():
    rng_of_prompt, rng_of_other = np.random.default_rng(3), np.random.default_rng(4)
    prompt, other = networks.draw(rng_of_prompt, 9), networks.draw(rng_of_other, 9)
    drawn = Sampling(temperature=2.0, seed=1)
    wanted = [
        request(0, prompt, 6),
        request(1, other, 6),
        # Equal to the first one, or a part of it.
        request(2, prompt, 6),
        request(3, prompt, 4),
        # Drawn, each with a seed of its own.
        request(4, prompt, 6, sampling=drawn),
        request(5, prompt, 6, sampling=drawn),
    ]
    generator = generator_of(untied('llama'))

    texts = [generation.text for generation in generator.generate(generations.batch_of(wanted))]

    assert texts == generations.texts(generator_of(untied('llama')), wanted, 4)
    assert texts[2] == texts[0]
    assert texts[3] == texts[0][:4]
    assert len({texts[0], texts[1], texts[4], texts[5]}) == 4
    assert generator.usage.generated_tokens == 5 + 5 + 3 + 5 + 5  # a generation's last token is never run
