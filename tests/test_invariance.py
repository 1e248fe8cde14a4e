"""Invariants of scores. Each test names the mutation (scripts/mutations.yaml) that breaks it.

Ranks in separate processes and killed evaluations are in integration/test_resume.py.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import LAYOUTS, PADDED_ROWS, STREAM, Batch
from llmfoundry_gauntlet.engine.ranks import assign
from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import (
    Evaluation,
    PlannedEvaluation,
    conclude,
    plan_evaluation,
    prepare_evaluation,
    summarize,
)
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import ItemKey, ItemResult, ScoreRequest

LONGEST = 200
WORDS = ('red', 'green', 'blue', 'grey')
ROUNDING = {'rtol': 1e-4, 'atol': 1e-4}  # of float32 sums, nats


@pytest.fixture
def rows() -> dict[str, list[dict[str, Any]]]:
    """Return choices in three categories, questions on passages, passages to continue, and schemas."""
    draw = random.Random(3)
    choices = [
        {
            'query': f'{"so " * draw.randrange(4)}which is {row}?',
            'choices': draw.sample(WORDS, 3),
            'gold': draw.randrange(3),
            'category': f'c{row % 3}',
            'page': row // 4,
        }
        for row in range(60)
    ]
    passages = [{'context': f'{row} and {row} are', 'continuation': str(2 * row)} for row in range(30)]
    schemas = [
        {'context_options': [f'the cup {row}', f'the jug {row}'], 'continuation': 'broke', 'gold': row % 2}
        for row in range(16)
    ]
    return {'choices': choices, 'passages': passages, 'schemas': schemas}


TASKS = (
    {'label': 'choices', 'icl_task_type': 'multiple_choice', 'has_categories': True, 'cluster_key': 'page'},
    {'label': 'passages', 'icl_task_type': 'language_modeling'},
    {'label': 'schemas', 'icl_task_type': 'schema'},
)
GAUNTLET = {
    'weighting': 'LOG_SAMPLE_SZ',
    'categories': [
        {
            'name': name,
            'benchmarks': [{'name': label, 'num_fewshot': 2, 'random_baseline': chance} for label, chance in members],
        }
        for name, members in {
            'all': (('choices', 1 / 3), ('passages', 0.0), ('schemas', 0.5)),
            'some': (('choices', 1 / 3),),
        }.items()
    ],
}


@pytest.fixture
def planned(rows: Mapping[str, Sequence[Any]], tmp_path: Path, character_tokenizer):
    """Plan an evaluation of the rows, or of others."""

    def planned(
        *,
        tokens_per_batch: int = 300,
        layout: str = STREAM,
        tasks: Sequence[Mapping[str, Any]] = TASKS,
        data: Mapping[str, Sequence[Any]] = rows,
        rotary: RotaryLengths | None = None,
        **settings: Any,
    ) -> PlannedEvaluation:
        for label, lines in data.items():
            (tmp_path / f'{label}.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
        entries = [{**task, 'dataset_uri': f'{task["label"]}.jsonl', 'num_fewshot': [2]} for task in tasks]
        values = {'tasks': entries, 'gauntlet': GAUNTLET, 'data_root': str(tmp_path), **settings}
        data_of_tasks = load_data(decode_settings(values))
        prepared = prepare_evaluation(data_of_tasks, Encoder(character_tokenizer), max_seq_len=LONGEST)
        return plan_evaluation(prepared, tokens_per_batch=tokens_per_batch, layout=layout, rotary=rotary)

    return planned


@pytest.fixture
def model() -> CausalLanguageModel:
    """Return a model with random weights; a token is a character."""
    network = networks.network(vocab_size=128)
    return CausalLanguageModel(network, device=torch.device('cpu'))


def run(model: CausalLanguageModel, planned: PlannedEvaluation, batches: Sequence[Batch] | None = None) -> Evaluation:
    """Evaluate a plan with its own batches or others."""
    outputs = [output for batch in batches or planned.batches for output in model.run(batch)]
    model.forget()
    return conclude(planned, planned.results(outputs), dict.fromkeys(planned.tasks, 0.0))


def items(evaluation: Evaluation) -> dict[ItemKey, ItemResult]:
    """Return all items by key."""
    return {result.key: result for results in evaluation.results.values() for result in results}


def numbers(evaluation: Evaluation) -> dict[str, float]:
    """Return all metrics but timings."""
    return {key: value for key, value in evaluation.metrics.items() if not key.startswith('gauntlet/seconds')}


def check_same(first: Evaluation, second: Evaluation) -> None:
    """Check that items and scores are equal, and log-probabilities up to rounding."""
    first_items = items(first)
    second_items = items(second)
    assert first_items.keys() == second_items.keys()
    for key, result in first_items.items():
        other = second_items[key]
        assert (result.score, result.predicted) == (other.score, other.predicted)
        assert result.prompt_sha256 == other.prompt_sha256
        np.testing.assert_allclose(result.logprobs, other.logprobs, **ROUNDING)

    second_numbers = numbers(second)
    for key, value in numbers(first).items():
        assert value == pytest.approx(second_numbers[key], abs=1e-4), key


def test_the_model_gives_different_answers(model, planned):
    """Precondition of the tests below."""
    evaluation = run(model, planned())
    for key in ('choices/2-shot', 'schemas/2-shot'):
        assert {result.score for result in evaluation.results[key]} == {0.0, 1.0}
    assert all(measure.standard_error for measure in evaluation.composites.averages.values())


@pytest.mark.parametrize('tokens_per_batch', [1, 90, 1000, 100_000])
def test_the_tokens_of_a_batch(model, planned, tokens_per_batch: int):
    """Mutation: positions continue from tree to tree."""
    check_same(run(model, planned()), run(model, planned(tokens_per_batch=tokens_per_batch)))


@pytest.mark.parametrize('layout', LAYOUTS[1:])
def test_packing(model, planned, layout: str):
    """Mutation: a token attends to the previous tree."""
    check_same(run(model, planned()), run(model, planned(layout=layout)))


@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
@pytest.mark.parametrize('kind', networks.STRETCHED)
def test_the_lengths_of_other_rows(planned, kind: str, semantics: str):
    """Rotary frequencies depend on a length; the reference's are those of rows padded to max_seq_len.

    Mutations: a batch mixes rotary frequencies; frequencies are those of the longest row of a batch.
    """
    base = 48
    padded_to = {f'{task["label"]}/2-shot': LONGEST for task in TASKS} if semantics == 'reference' else {}
    rotary = RotaryLengths(base=base, scales_by_length=kind == 'dynamic', padded_to=padded_to)
    settings = {'rotary': rotary, 'semantics': semantics}
    model = stretched(kind, base, rotary)
    plan = planned(**settings)
    first = run(model, plan)
    assert len({rotary.of(request) > base for request in plan.score_requests}) == (1 if padded_to else 2)

    # Other companions in a batch, another layout, another order, fewer items.
    for tokens_per_batch in (1, 100_000):
        check_same(first, run(model, planned(**settings, tokens_per_batch=tokens_per_batch)))
    for layout in LAYOUTS[1:]:
        check_same(first, run(model, planned(**settings, layout=layout)))
    check_same(first, run(stretched(kind, base, rotary), plan, plan.batches[::-1]))
    ours = items(first)
    part = run(model, planned(**settings, subset_items=12, tasks=TASKS[::-1]))
    for key, result in items(part).items():
        np.testing.assert_allclose(result.logprobs, ours[key].logprobs, **ROUNDING)

    # Each row by itself, padded as the reference would.
    for request in plan.score_requests[::5]:
        sequences = list(zip(request.contexts, request.continuations, strict=True))
        length = LONGEST if padded_to else max(len(context) + len(ids) for context, ids in sequences)
        expected = [
            networks.alone(stretched(kind, base, None).model, context, ids, length - len(context) - len(ids))[0].sum()
            for context, ids in sequences
        ]
        np.testing.assert_allclose(ours[request.key].logprobs, expected, **ROUNDING)


def stretched(kind: str, base: int, rotary: RotaryLengths | None) -> CausalLanguageModel:
    """Return a fresh model whose rotary frequencies differ beyond `base` tokens."""
    network = networks.stretched(kind, base, vocab_size=128)
    return CausalLanguageModel(network, device=torch.device('cpu'), rotary=rotary)


@pytest.mark.parametrize(
    ('name', 'loaded'), [('bloom', 'eager'), *itertools.product(('llama', 'gpt2', 'mixtral'), ('eager', 'sdpa'))]
)
def test_a_prompt_that_is_masked_as_a_whole(name: str, loaded: str, tmp_path, character_tokenizer):
    """Empty questions whose first token, bos, is also the padding token, in the reference's semantics.

    Eager attention takes the mean over the whole row there, which the reference pads to max_seq_len.
    Mutations: pad these rows as others; leave out the last token; run them with the loaded attention.
    """
    ((hidden,),) = character_tokenizer([''], add_special_tokens=True)['input_ids']
    questions = ['', 'one and one?', '', 'one and one and one and one and one and?']
    choices = ['yes', 'n', 'm']
    rows = [{'query': question, 'choices': choices, 'gold': 0} for question in questions]
    (tmp_path / 'rows.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    task = {
        'label': 't',
        'dataset_uri': 'rows.jsonl',
        'num_fewshot': [0],
        'icl_task_type': 'multiple_choice',
        'continuation_delimiter': '',
        'max_seq_len': 50,
    }
    data = load_data(decode_settings({'tasks': [task], 'data_root': str(tmp_path), 'semantics': 'reference'}))
    prepared = prepare_evaluation(data, Encoder(character_tokenizer), max_seq_len=LONGEST)
    network = networks.network(name, vocab_size=128, attn_implementation=loaded)
    model = CausalLanguageModel(network, device=torch.device('cpu'), hidden_token_id=hidden)
    bare = networks.network(name, vocab_size=128, attn_implementation='eager')
    expected = [logprobs_of_padded_rows(bare, request, 50, hidden) for request in prepared.score_requests]
    assert abs(expected[0] - expected[1]).max() > 0.1

    for layout in LAYOUTS:
        for tokens_per_batch in (1, 60, 100_000):
            plan = plan_evaluation(prepared, tokens_per_batch=tokens_per_batch, layout=layout, hidden_token_id=hidden)
            ours = items(run(model, plan))
            for request, wanted in zip(plan.score_requests, expected, strict=True):
                np.testing.assert_allclose(ours[request.key].logprobs, wanted, **ROUNDING)


@torch.no_grad()
def logprobs_of_padded_rows(network: Any, request: ScoreRequest, length: int, hidden: int) -> np.ndarray:
    """Return the summed log-probability of each choice from a bare forward of rows padded to this length."""
    sums = []
    for context, continuation in zip(request.contexts, request.continuations, strict=True):
        tokens = [*context.tolist(), *continuation.tolist()]
        padding = [hidden] * (length - len(tokens))
        ids = torch.tensor([tokens + padding])
        mask = (ids != hidden).long()
        logprobs = network(input_ids=ids, attention_mask=mask).logits[0].log_softmax(-1)

        # The logits at a position predict the token after it.
        positions = range(len(context), len(tokens))
        sums.append(sum(float(logprobs[position - 1, tokens[position]]) for position in positions))
    return np.array(sums)


@pytest.mark.parametrize('num_ranks', [1, 2, 3])
@pytest.mark.parametrize('layout', [STREAM, PADDED_ROWS])
def test_the_number_of_ranks(model, planned, num_ranks: int, layout: str):
    """Bitwise, whatever a rank has run before. Mutation: the last unit of batches is not assigned."""
    plan = planned(layout=layout)
    shares = assign(plan.batches, num_ranks=num_ranks)
    batches = [batch for share in shares for batch in share]

    in_order = run(model, plan)
    by_rank = run(model, plan, batches)

    assert items(in_order) == items(by_rank)
    assert numbers(in_order) == numbers(by_rank)


def test_the_order_of_items(model, planned):
    """Bitwise, for all metrics and errors. Mutation: sums are rounded at every step."""
    plan = planned()
    evaluation = run(model, plan)
    outputs = [output for batch in plan.batches for output in model.run(batch)]
    no_seconds = dict.fromkeys(plan.tasks, 0.0)
    for seed in range(3):
        shuffled_outputs = random.Random(seed).sample(outputs, len(outputs))
        concluded = conclude(plan, plan.results(shuffled_outputs), no_seconds)
        assert numbers(concluded) == numbers(evaluation)

        shuffled_results = {}
        for key, results in evaluation.results.items():
            shuffled_results[key] = random.Random(seed).sample(results, len(results))
        summarized = summarize(plan.data, plan.tasks, shuffled_results, no_seconds)
        assert numbers(summarized) == numbers(evaluation)


def test_the_order_of_tasks(model, planned):
    """Mutation: shots are drawn from the global generator."""
    forward = run(model, planned())
    backward = run(model, planned(tasks=TASKS[::-1]))
    alone = run(model, planned(tasks=TASKS[1:2], gauntlet=None))

    check_same(forward, backward)
    all_items = items(forward)
    for key, result in items(alone).items():
        assert (result.score, result.prompt_sha256) == (all_items[key].score, all_items[key].prompt_sha256)


def test_a_subset(model, planned):
    """Its items score as in the full run. Mutation: shots are drawn only from the subset."""
    full = run(model, planned())
    part = run(model, planned(subset_items=12))
    again = run(model, planned(subset_items=12, tokens_per_batch=70))

    assert {key: len(results) for key, results in part.results.items()} == {
        'choices/2-shot': 12,
        'passages/2-shot': 12,
        'schemas/2-shot': 12,
    }
    assert items(again).keys() == items(part).keys()

    all_items = items(full)
    for key, result in items(part).items():
        assert (result.score, result.prompt_sha256) == (all_items[key].score, all_items[key].prompt_sha256)
        np.testing.assert_allclose(result.logprobs, all_items[key].logprobs, **ROUNDING)

    # As many passages as there can be.
    assert len(pages_of(part)) == min(12, len(pages_of(full)))


def pages_of(evaluation: Evaluation) -> set[tuple[str | None, str]]:
    """Return the passages that the choices are about; each category has its own."""
    return {(result.category, result.cluster) for result in evaluation.results['choices/2-shot']}
