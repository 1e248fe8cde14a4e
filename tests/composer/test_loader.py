"""An evaluation step by step, as Composer's loop runs it, on one rank."""

from __future__ import annotations

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import tiny
import torch
from composer import Trainer
from composer.models import HuggingFaceModel

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.composer.loop import EvaluationLoader, Step
from llmfoundry_gauntlet.composer.runner import Found, ModelRunner, agreed, prepare_for_model
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.engine.decoding import CACHE, NO_CACHE, PROMPT_STREAM
from llmfoundry_gauntlet.engine.model import Budget
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, STREAM
from llmfoundry_gauntlet.engine.probe import Probe
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.scoring.likelihood import NON_FINITE
from llmfoundry_gauntlet.types import ItemKey, ItemResult


@pytest.fixture
def settings(tmp_path) -> dict[str, Any]:
    """Return the tiny tasks in several batches."""
    return {**tiny.write_tasks(tmp_path), 'tokens_per_batch': 200}


def loader_of(model: HuggingFaceModel, settings: dict[str, Any]) -> EvaluationLoader:
    return EvaluationLoader(prepare_for_model(load_data(decode_settings(settings)), model), model)


def drive(loader: EvaluationLoader) -> tuple[dict[ItemKey, ItemResult], list[Step]]:
    """Return all results and steps of an evaluation."""
    results, steps = {}, []
    for step in loader:
        found = step.run()
        assert not results.keys() & found.keys(), 'an item was scored twice'
        results.update(found)
        steps.append(step)
    assert loader.work.num_steps == len(steps), "Composer's progress bar needs the number of steps"
    return results, steps


def count_forwards(network: Any) -> list[int]:
    """Return a list that records the number of tokens of each forward."""
    sizes: list[int] = []
    network.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs['input_ids'].numel()), with_kwargs=True
    )
    return sizes


def check(results: dict[ItemKey, ItemResult], expected: dict[ItemKey, ItemResult], unscored: set[ItemKey]) -> None:
    """Check that these items are unscored for the reason, and all others are right."""
    assert results.keys() == expected.keys()
    assert {key for key, result in results.items() if result.status == 'unscored'} == unscored
    for key, result in results.items():
        if key in unscored:
            assert (result.score, result.reason) == (None, NON_FINITE)
        else:
            assert (result.score, result.predicted) == (expected[key].score, expected[key].predicted)
            np.testing.assert_allclose(result.logprobs, expected[key].logprobs, rtol=0, atol=1e-5)


def test_every_item_is_scored_once_as_by_bare_forwards(settings):
    model = tiny.composer_model()
    loader = loader_of(model, settings)
    results, steps = drive(loader)
    assert results.keys() == loader.prepared.items.keys() and len(results) == 28
    assert sum(step.num_items for step in steps) == 28
    assert len(steps) > 3 and max(step.num_tokens for step in steps) <= 200
    for key, result in results.items():
        expected = networks.sums_alone(model.model, [loader.prepared.items[key].request])
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-5)


def test_a_batch_is_scored_while_the_device_runs_the_next(settings):
    """Mutations: `run` in place of `launch`; an abandoned batch reaches the next evaluation."""
    model = tiny.composer_model()
    loader = loader_of(model, settings)
    expected, _ = drive(loader)
    with torch.no_grad():
        model.model.lm_head.weight.mul_(-1)
    steps = []
    for step in islice(loader, 3):  # the plan and two batches
        found = step.run()
        steps.append(step)
    assert found.keys() == {request.key for request in steps[1].requests}
    loader.stop()
    with torch.no_grad():
        model.model.lm_head.weight.mul_(-1)
    results, _ = drive(loader)
    check(results, expected, set())


def test_a_second_evaluation_reuses_the_plan_with_new_weights(settings):
    """Mutations: cached values of the first evaluation are used in the second; the plan is made again."""
    model = tiny.composer_model()
    loader = loader_of(model, settings)
    first, _ = drive(loader)
    planned = loader.planned
    with torch.no_grad():
        model.model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    sizes = count_forwards(model.model)
    second, steps = drive(loader)
    assert loader.planned is planned
    assert len(sizes) == len(steps) - 1
    for key, result in second.items():
        expected = networks.sums_alone(model.model, [loader.prepared.items[key].request])
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-5)
    assert any(abs(first[key].logprobs[0] - second[key].logprobs[0]) > 0.1 for key in first)


def tokens_of_the_probe(settings: dict[str, Any]) -> set[int]:
    """Return the tokens that the first step gives a model; they are always the same."""
    model = tiny.composer_model()
    seen: set[int] = set()
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs['input_ids'].unique().tolist()), with_kwargs=True
    )
    loader = loader_of(model, settings)
    next(iter(loader)).run()
    return seen


def add_task(settings: dict[str, Any], character: str) -> dict[str, Any]:
    """Add a task of eight items with a common beginning, two of them with a character that no other item has."""
    rows = [{'context': f'A: {character * (row in (2, 5))}{row}=', 'continuation': f'{row}'} for row in range(8)]
    lines = ''.join(f'{json.dumps(row)}\n' for row in rows)
    (Path(settings['data_root']) / 'broken.jsonl').write_text(lines)
    task = {'label': 'broken', 'dataset_uri': 'broken.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'}
    return {**settings, 'tasks': [*read_yaml(settings['tasks'])['icl_tasks'], task]}


@pytest.mark.parametrize(('in_probe', 'is_alone'), [(False, False), (True, False), (False, True)])
def test_a_nan_token_affects_only_its_items(settings, in_probe: bool, is_alone: bool):
    """Its embedding is NaN. In the stream all eight items of its tree are affected at first.

    Alone they are the only batch, although the model is not broken. Mutation: items are not run again by themselves.
    """
    given = tokens_of_the_probe(settings)
    model = tiny.composer_model()
    tokens = {character: model.tokenizer.convert_tokens_to_ids(character) for character in '@#$%&*<>~^{}|'}
    character, token = next((text, token) for text, token in tokens.items() if (token in given) == in_probe)
    settings = add_task(settings, character)
    if is_alone:
        settings = {**settings, 'tasks': settings['tasks'][-1:], 'gauntlet': None}
    loader = loader_of(model, settings)
    expected, _ = drive(loader)
    assert loader.planned.layout == STREAM and (len(loader.planned.batches) == 1) == is_alone
    broken = {key for key, item in loader.prepared.items.items() if is_given(item.request, token)}
    assert broken == {ItemKey('broken/0-shot', 2), ItemKey('broken/0-shot', 5)}
    with torch.no_grad():
        model.model.get_input_embeddings().weight[token] = torch.nan
    callback = EvalGauntlet(**settings, save_folder=None)
    trainer = Trainer(model=model, callbacks=[callback], device='cpu', progress_bar=False)
    trainer.eval()
    trainer.close()
    evaluation = callback.evaluation
    assert evaluation.planned.layout == (PADDED_ROWS if in_probe else STREAM)
    score = evaluation.scores['broken/0-shot']
    assert (score.num_items, score.num_unscored) == (8, 2)
    check({result.key: result for results in evaluation.results.values() for result in results}, expected, broken)


def is_given(request, token: int) -> bool:
    """Return whether the model is given a token to read, not only to predict."""
    parts = zip(request.contexts, request.continuations, strict=True)
    return any(token in context or token in continuation[:-1] for context, continuation in parts)


def test_a_nan_model_is_unscored_without_reruns(settings):
    """Mutation: every item of a broken model is run again by itself."""
    model = tiny.composer_model()
    with torch.no_grad():
        model.model.model.norm.weight.fill_(torch.nan)
    loader = loader_of(model, settings)
    steps = iter(loader)
    next(steps).run()
    sizes = count_forwards(model.model)
    results = {}
    for step in steps:
        results.update(step.run())
    assert len(sizes) == len(loader.planned.batches)
    assert len(results) == 28
    assert all((result.score, result.reason) == (None, NON_FINITE) for result in results.values())


def test_a_model_that_was_broken_once_is_probed_again(settings):
    """Mutation: the layout of the first evaluation is kept, whatever the probe found."""
    model = tiny.composer_model()
    loader = loader_of(model, settings)
    weight = model.model.model.norm.weight
    whole = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    drive(loader)
    assert loader.planned.layout == PADDED_ROWS
    with torch.no_grad():
        weight.copy_(whole)
    results, _ = drive(loader)
    assert loader.planned.layout == STREAM
    assert all(result.status == 'scored' for result in results.values())


def test_running_out_of_memory_changes_no_score(settings, caplog):
    """The probe fits; the batches do not. Mutation: items of the failed batch are dropped."""
    settings |= {'tokens_per_batch': 2000}
    model = tiny.composer_model()
    expected, _ = drive(loader_of(model, settings))

    def fail(_, args, kwargs):
        if kwargs['input_ids'].numel() > 400:
            raise torch.OutOfMemoryError('too many tokens')

    model.model.register_forward_pre_hook(fail, with_kwargs=True)
    with caplog.at_level(logging.WARNING):
        results, _ = drive(loader_of(model, settings))
    check(results, expected, set())
    assert len([message for message in caplog.messages if 'out of memory' in message]) == 1


def test_ranks_agree_on_the_layout_and_budget():
    """The most general layout and the smallest budgets, whatever the order of the ranks."""
    layouts = [Probe(layout=layout, reason=f'of {layout}') for layout in (STREAM, PADDED_ROWS, STREAM)]
    generation = [Probe(layout=layout, reason=f'of {layout}') for layout in (PROMPT_STREAM, CACHE, NO_CACHE)]
    found = [
        Found(scoring=layout, generation=reply, budget=Budget(scoring=tokens, generation=4096 // tokens))
        for layout, reply, tokens in zip(layouts, generation, (4096, 2048, 1024), strict=True)
    ]
    assert agreed(found) == Found(
        scoring=layouts[1], generation=generation[2], budget=Budget(scoring=1024, generation=1)
    )
    assert agreed(found[:2]) == Found(
        scoring=layouts[1], generation=generation[1], budget=Budget(scoring=2048, generation=1)
    )
    nothing = Found(scoring=None, generation=None, budget=Budget(scoring=7, generation=8))
    assert agreed([nothing, nothing]) == nothing


def test_scores_follow_eager_attention_with_one_log_line(settings, caplog):
    """A Gemma 2 loaded with sdpa, in two evaluations. Mutation: leave out `check_attention`."""
    scores, lines = [], []
    for loaded in ('eager', 'sdpa'):
        caplog.clear()
        network = networks.network(
            'gemma2', vocab_size=259, max_position_embeddings=128, attn_implementation=loaded, sliding_window=1000
        )
        model = tiny.composer_model(network)
        loader = loader_of(model, settings)
        drive(loader)
        scores.append(drive(loader)[0])
        lines.append([one.getMessage() for one in caplog.records if one.getMessage().startswith('attention: ')])
        assert network.config._attn_implementation == loaded
    assert lines == [[], ['attention: sdpa leaves out attn_logit_softcapping; evaluation follows eager attention']]
    for key, result in scores[0].items():
        if result.logprobs is not None:
            np.testing.assert_allclose(scores[1][key].logprobs, result.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
def test_only_reference_semantics_pad_to_max_seq_len(settings, semantics: str):
    """Including a task's own limit. Mutations: always or never use `padded_to`."""
    network = networks.stretched('dynamic', 128, vocab_size=259)
    tasks = json.loads(Path(settings['tasks']).read_text())['icl_tasks']
    tasks[0]['max_seq_len'] = 100
    model = tiny.composer_model(network)
    loader = loader_of(model, {**settings, 'tasks': tasks, 'semantics': semantics, 'max_seq_len': 300})
    rotary = ModelRunner(model, loader.prepared).language_model.rotary
    assert rotary.base == 128
    lengths = set(rotary.padded_to.values())
    assert lengths == ({100, 300} if semantics == 'reference' else set())
