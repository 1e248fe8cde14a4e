"""An evaluation step by step, as Composer's loop runs it, on one rank."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import tiny
import torch

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.engine.decoding import CACHE, NO_CACHE, PROMPT_STREAM
from llmfoundry_gauntlet.engine.model import Budget
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, STREAM, plan
from llmfoundry_gauntlet.engine.probe import Probe
from llmfoundry_gauntlet.engine.ranks import assign
from llmfoundry_gauntlet.runtime.loop import EvaluationLoop, Step
from llmfoundry_gauntlet.runtime.runner import ProbedModel, agreed
from llmfoundry_gauntlet.scoring.likelihood import NON_FINITE
from llmfoundry_gauntlet.types import ItemKey, ItemResult


@pytest.fixture
def settings(tmp_path) -> dict[str, Any]:
    """Return the tiny tasks in several batches."""
    return {**tiny.write_tasks(tmp_path), 'tokens_per_batch': 200}


def drive(loop: EvaluationLoop) -> tuple[dict[ItemKey, ItemResult], list[Step]]:
    """Return all results and steps of an evaluation."""
    results, steps = {}, []
    for step in loop:
        results_of_step = step.run()
        assert not results.keys() & results_of_step.keys(), 'an item was scored twice'
        results.update(results_of_step)
        steps.append(step)
    assert loop.work.num_steps == len(steps), "Composer's progress bar needs the number of steps"
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
            assert result.score is None
            assert result.reason == NON_FINITE
        else:
            assert result.score == expected[key].score
            assert result.predicted == expected[key].predicted
            np.testing.assert_allclose(result.logprobs, expected[key].logprobs, rtol=0, atol=1e-5)


def check_by_bare_forwards(results: dict[ItemKey, ItemResult], loop: EvaluationLoop) -> None:
    items = loop.prepared.items
    assert len(items) == 28
    assert results.keys() == items.keys()
    for key, result in results.items():
        expected = networks.sums_alone(loop.runner.model.model, [items[key].request])
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-5)


def test_the_processes_that_compare_math_answers_end_with_the_evaluation(settings):
    loop = tiny.loop_of(settings)
    assert loop.comparer.equal(r'x+\frac{1}{2}', r'\frac{1}{2}+x')
    (worker, *_) = loop.comparer._workers.values()
    assert worker.process.poll() is None

    loop.stop()

    assert worker.process.poll() is not None


def test_items_are_scored_once_as_by_bare_forwards(settings):
    loop = tiny.loop_of(settings)

    results, steps = drive(loop)

    check_by_bare_forwards(results, loop)
    assert len(steps) > 3
    assert max(batch.num_tokens for batch in loop.planned.batches) <= 200


def test_a_second_evaluation_has_the_numbers_of_the_new_weights_by_the_same_plan(settings):
    """Mutations: cached values of the first evaluation are used in the second; the plan is made again."""
    loop = tiny.loop_of(settings)
    before, _ = drive(loop)
    planned = loop.planned
    network = loop.runner.model.model
    with torch.no_grad():
        network.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    sizes_of_forwards = count_forwards(network)

    after, steps = drive(loop)

    assert loop.planned is planned
    assert len(sizes_of_forwards) == len(steps) - 1
    check_by_bare_forwards(after, loop)
    assert any(abs(before[key].logprobs[0] - after[key].logprobs[0]) > 0.1 for key in before)


def test_a_batch_is_scored_while_the_device_runs_the_next(settings):
    """Mutations: `run` in place of `launch`; an abandoned batch reaches the next evaluation."""
    loop = tiny.loop_of(settings)
    head = loop.runner.model.model.lm_head.weight.requires_grad_(False)
    expected, _ = drive(loop)
    head.mul_(-1)  # so that results of the abandoned evaluation differ

    for step in islice(loop, 3):  # the plan and two batches
        results_of_step = step.run()

    first_batch = assign(loop.planned.batches, num_ranks=1)[0][0]
    assert results_of_step.keys() == {request.key for request in first_batch.requests}

    # The second batch was run and is not scored.
    loop.stop()
    head.mul_(-1)
    results, _ = drive(loop)
    check(results, expected, set())


def tokens_of_the_probe(settings: dict[str, Any]) -> set[int]:
    """Return the tokens that the first step gives a model; they are always the same."""
    loop = tiny.loop_of(settings)
    tokens: set[int] = set()
    loop.runner.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.update(kwargs['input_ids'].unique().tolist()), with_kwargs=True
    )
    next(iter(loop)).run()
    return tokens


def broken_task(settings: dict[str, Any], character: str) -> dict[str, Any]:
    """Write a task of eight items with a common beginning, two of them with a character that no other item has."""
    rows = [{'context': f'A: {character * (row in (2, 5))}{row}=', 'continuation': f'{row}'} for row in range(8)]
    tiny.write_rows(Path(settings['data_root']) / 'broken.jsonl', rows)
    return {'label': 'broken', 'dataset_uri': 'broken.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'}


def evaluated_by_composer(settings: dict[str, Any], model: Any) -> Any:
    callback = EvalGauntlet(**settings, save_folder=None)
    from composer import Trainer

    trainer = Trainer(model=model, callbacks=[callback], device='cpu', progress_bar=False)
    trainer.eval()
    trainer.close()
    return callback.evaluation


@pytest.mark.parametrize(
    ('in_probe', 'is_alone'),
    [
        (False, False),  # in the stream all eight items of its tree are affected at first
        (True, False),  # the probe finds NaN in the stream, which leaves padded rows
        (False, True),  # its items are the only batch, although the model is not broken
    ],
)
def test_a_token_whose_embedding_is_nan_affects_only_its_items(settings, in_probe: bool, is_alone: bool):
    """Mutation: items are not run again by themselves."""
    import composer_training  # skips the test without Composer

    model = composer_training.composer_model()
    probed_tokens = tokens_of_the_probe(settings)
    tokens = {character: model.tokenizer.convert_tokens_to_ids(character) for character in '@#$%&*<>~^{}|'}
    character = next(character for character, token in tokens.items() if (token in probed_tokens) == in_probe)
    if is_alone:
        settings = {**settings, 'tasks': [broken_task(settings, character)], 'gauntlet': None}
    else:
        other_tasks = read_yaml(settings['tasks'])['icl_tasks']
        settings = {**settings, 'tasks': [*other_tasks, broken_task(settings, character)]}
    loop = tiny.loop_of(settings, model)
    expected, _ = drive(loop)
    assert loop.planned.layout == STREAM
    assert (len(loop.planned.batches) == 1) == is_alone
    token = tokens[character]
    with torch.no_grad():
        model.model.get_input_embeddings().weight[token] = torch.nan

    evaluation = evaluated_by_composer(settings, model)

    assert evaluation.planned.layout == (PADDED_ROWS if in_probe else STREAM)
    score = evaluation.scores['broken/0-shot']
    assert score.num_items == 8
    assert score.num_unscored == 2
    keys_of_token = {key for key, item in loop.prepared.items.items() if is_given(item.request, token)}
    assert keys_of_token == {ItemKey('broken/0-shot', 2), ItemKey('broken/0-shot', 5)}
    results = {result.key: result for results in evaluation.results.values() for result in results}
    check(results, expected, keys_of_token)


def is_given(request, token: int) -> bool:
    """Return whether the model is given a token to read, not only to predict."""
    parts = zip(request.contexts, request.continuations, strict=True)
    return any(token in context or token in continuation[:-1] for context, continuation in parts)


def test_all_items_of_a_nan_model_are_unscored_without_being_run_again(settings):
    """Mutation: every item of a broken model is run again by itself."""
    loop = tiny.loop_of(settings)
    network = loop.runner.model.model
    network.model.norm.weight.requires_grad_(False).fill_(torch.nan)
    steps = iter(loop)
    next(steps).run()  # the probe and the plan
    sizes_of_forwards = count_forwards(network)

    results = {key: result for step in steps for key, result in step.run().items()}

    assert loop.planned.layout == PADDED_ROWS
    assert len(sizes_of_forwards) == len(loop.planned.batches)
    assert len(results) == 28
    assert all(result.score is None for result in results.values())
    assert all(result.reason == NON_FINITE for result in results.values())


def test_a_nan_model_is_probed_again_once_it_is_whole(settings):
    """Mutation: the first layout is kept, whatever is found."""
    loop = tiny.loop_of(settings)
    weight = loop.runner.model.model.model.norm.weight.requires_grad_(False)
    whole_weight = weight.clone()
    weight.fill_(torch.nan)
    drive(loop)
    assert loop.planned.layout == PADDED_ROWS
    weight.copy_(whole_weight)

    results, _ = drive(loop)

    assert loop.planned.layout == STREAM
    assert all(result.status == 'scored' for result in results.values())


def test_running_out_of_memory_changes_no_score(settings, caplog):
    """The probe fits; the batches do not. Mutation: items of the failed batch are dropped."""
    settings |= {'tokens_per_batch': 2000}
    loop = tiny.loop_of(settings)
    expected, _ = drive(loop)

    def fail(_, args, kwargs):
        if kwargs['input_ids'].numel() > 400:
            raise torch.OutOfMemoryError('too many tokens')

    loop.runner.model.model.register_forward_pre_hook(fail, with_kwargs=True)

    results, _ = drive(loop)

    check(results, expected, set())
    assert len([message for message in caplog.messages if 'out of memory' in message]) == 1


def probed(scoring: str, generation: str, budget: Budget) -> ProbedModel:
    """Return the probes of a rank whose model runs in these layouts."""
    return ProbedModel(
        scoring=Probe(layout=scoring, reason=f'of {scoring}'),
        generation=Probe(layout=generation, reason=f'of {generation}'),
        budget=budget,
    )


def test_ranks_agree_on_the_most_general_layouts_and_the_smallest_budgets():
    of_ranks = [
        probed(STREAM, PROMPT_STREAM, Budget(scoring=4096, generation=1)),
        probed(PADDED_ROWS, CACHE, Budget(scoring=2048, generation=2)),
        probed(STREAM, NO_CACHE, Budget(scoring=1024, generation=4)),
    ]

    assert agreed(of_ranks[:2]) == probed(PADDED_ROWS, CACHE, Budget(scoring=2048, generation=1))
    assert agreed(of_ranks) == probed(PADDED_ROWS, NO_CACHE, Budget(scoring=1024, generation=1))


def test_ranks_agree_where_nothing_is_probed():
    nothing = ProbedModel(scoring=None, generation=None, budget=Budget(scoring=7, generation=8))

    assert agreed([nothing, nothing]) == nothing


def test_scores_follow_eager_attention_with_one_log_line(settings, caplog):
    """A Gemma 2 loaded with sdpa, in two evaluations. Mutation: leave out `check_attention`."""

    def evaluated_twice(attention: str) -> tuple[dict[ItemKey, ItemResult], list[str]]:
        """Return the results of the second evaluation, and the lines about attention of both."""
        caplog.clear()
        network = networks.network(
            'gemma2', vocab_size=259, max_position_embeddings=128, attn_implementation=attention, sliding_window=1000
        )
        loop = tiny.loop_of(settings, tiny.model_and_tokenizer(network))
        drive(loop)
        results, _ = drive(loop)
        assert network.config._attn_implementation == attention
        return results, [message for message in caplog.messages if message.startswith('attention: ')]

    of_eager, lines_of_eager = evaluated_twice('eager')
    of_sdpa, lines_of_sdpa = evaluated_twice('sdpa')

    assert lines_of_eager == []
    assert lines_of_sdpa == ['attention: sdpa leaves out attn_logit_softcapping; evaluation follows eager attention']
    for key, result in of_eager.items():
        if result.logprobs is not None:
            np.testing.assert_allclose(of_sdpa[key].logprobs, result.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
def test_only_reference_semantics_pad_to_max_seq_len(settings, semantics: str):
    """Including a task's own limit. Mutations: always or never use `padded_to`."""
    network = networks.stretched('dynamic', 128, vocab_size=259)
    tasks = read_yaml(settings['tasks'])['icl_tasks']
    tasks[0]['max_seq_len'] = 100
    changed = {**settings, 'tasks': tasks, 'semantics': semantics, 'max_seq_len': 300}

    rotary = tiny.loop_of(changed, tiny.model_and_tokenizer(network)).runner.language_model.rotary

    assert rotary.base == 128
    lengths = set(rotary.padded_to.values())
    assert lengths == ({100, 300} if semantics == 'reference' else set())


def shifted_by_position(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Move the positions of streams and caches, which a model is given; padded rows have none."""
    if kwargs.get('position_ids') is not None:
        kwargs = {**kwargs, 'position_ids': kwargs['position_ids'] // 2}
    return args, kwargs


def test_a_model_without_a_fast_layout_is_a_warning_with_cost_and_reason(settings, caplog):
    """Mutations: the ratio is of batches, not of tokens; the warning comes without the reason."""
    loop = tiny.loop_of(settings)
    loop.runner.model.model.register_forward_pre_hook(shifted_by_position, with_kwargs=True)

    drive(loop)

    assert loop.planned.layout == PADDED_ROWS
    warnings = [message for message in caplog.messages if ' times the tokens of the fastest layout: ' in message]
    stream = plan(loop.prepared.score_requests, tokens_per_batch=200)
    ratio = loop.planned.num_model_tokens / sum(batch.num_tokens for batch in stream)
    assert ratio > 2
    assert any(message.startswith(f'scoring runs up to {ratio:.0f} times') for message in warnings), caplog.text
    assert all('(probe: ' in message and ' off' in message for message in warnings)

    caplog.clear()
    drive(loop)
    assert not any('fastest layout' in message for message in caplog.messages)  # once for a plan


def test_a_model_that_is_probed_again_is_no_warning(settings, caplog):
    """Its layout follows from its weights at the first steps."""
    loop = tiny.loop_of(settings)
    weight = loop.runner.model.model.model.norm.weight.requires_grad_(False)
    weight.fill_(torch.nan)

    drive(loop)

    assert loop.planned.layout == PADDED_ROWS
    assert not any('fastest layout' in message for message in caplog.messages)
