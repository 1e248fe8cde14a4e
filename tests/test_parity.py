"""Prompts and scores compared item by item with llm-foundry 0.22.0 (scripts/record_reference.py, record_prompts.py)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_cases import MODELS, digest, encoder, network, plan_case, recorded

from llmfoundry_gauntlet.config.tasks import task_key
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import FORKED, LAYOUTS, PADDED_ROWS, STREAM
from llmfoundry_gauntlet.engine.probe import probe
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, conclude
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.composites import compute_composites
from llmfoundry_gauntlet.metrics.keys import composite_values, task_values
from llmfoundry_gauntlet.types import GenerateRequest, ItemKey, ItemResult, Measure, Request, ScoreOutput

PROMPTS = recorded('prompts')['models']

# Where padded rows take long; other tasks are asked in them too, and these in the other layouts.
LONG_IN_ROWS = ('hellaswag/3-shot', 'hellaswag_spaces/0-shot', 'arc_easy/3-shot', 'math_qa/3-shot', 'piqa/10-shot')


def marks_of(model: str, case: str, layout: str) -> list[Any]:
    """Return the marks of a case: of all of them, `make test` has one model in one layout."""
    if layout == PADDED_ROWS and case in LONG_IN_ROWS:
        return [pytest.mark.long]
    if (model, layout) == ('rotary_bos', STREAM):
        return []
    return [pytest.mark.slow]


def cases_of_scores() -> Iterator[Any]:
    """Yield every recorded case in each layout."""
    for model in MODELS:
        for index, case in enumerate(recorded(model)['cases']):
            for layout in LAYOUTS:
                if layout == FORKED and model != 'rotary_bos':  # forks run the same attention as padded rows
                    continue
                marks = marks_of(model, case['name'], layout)
                yield pytest.param(model, index, layout, marks=marks, id=f'{model}-{case["name"]}-{layout}')


@functools.cache
def language_model(model: str) -> CausalLanguageModel:
    return CausalLanguageModel(network(model), device=torch.device('cpu'))


def check_prompts(planned: PlannedEvaluation, case: dict[str, Any]) -> None:
    """Check the token ids of the recorded prompts, and where their continuations start."""
    requests = {case['rows'][key.row]: item.request for key, item in planned.items.items()}
    for prompt in case['prompts']:
        request = requests[prompt['row']]
        first = prompt['choices'][0]['ids']
        pairs = zip(request.contexts, request.continuations, strict=True)
        for (context, continuation), choice in zip(pairs, prompt['choices'], strict=True):
            assert [*context.tolist(), *continuation.tolist()] == first[: choice['shared']] + choice['ids']
            assert len(context) == choice['start']


def check_item(item: dict[str, Any], output: ScoreOutput, result: ItemResult) -> None:
    """Check mean losses within 1e-4, and the rest for equality."""
    losses = [float(-values.mean()) for values in output.logprobs]
    np.testing.assert_allclose(losses, item['losses'], atol=1e-4, rtol=0)
    assert list(result.num_tokens) == item['num_tokens']
    if 'matches' in item:
        (flags,) = output.is_argmax
        assert flags.astype(int).tolist() == item['matches']
        assert (result.predicted is not None) == bool(item['prediction'])
    else:
        assert (result.gold, result.predicted) == (item['gold'], item['prediction'])


@pytest.mark.parametrize('model', MODELS)
def test_the_probe_finds_the_compared_layouts(model: str):
    result = probe(language_model(model), vocabulary=len(encoder(model).tokenizer), longest=200)

    assert result.layout == LAYOUTS[0]


# Cases with duplicate rows, which are shots of each other in the reference.
OWN_SHOTS = ('with_all_texts/3-shot',)
# Models whose tokenizer splits spaces off, so that the reference drops those before choices.
LOST_SPACE = ('alibi_pad_eos',)


@pytest.mark.parametrize(('model', 'index', 'layout'), list(cases_of_scores()))
def test_items_and_metrics_agree_with_the_reference(
    model: str, index: int, layout: str, real_data: Path, tmp_path: Path
):
    """Token ids and predictions are equal, mean losses within 1e-4, metrics within 1e-6; ties differ on purpose."""
    case = recorded(model)['cases'][index]
    differs = case['name'] in OWN_SHOTS or model in LOST_SPACE
    settings = {'semantics': 'reference'} if differs else {'truncation': 'reference'}
    planned = plan_case(model, case, real_data, tmp_path, layout, **settings)
    check_prompts(planned, case)

    outputs = {}
    for batch in planned.batches:
        outputs |= {output.key: output for output in language_model(model).run(batch)}

    results = {case['rows'][key.row]: result for key, result in planned.results(outputs.values()).items()}
    assert len(results) == len(case['items'])
    for item in case['items']:
        check_item(item, outputs[results[item['row']].key], results[item['row']])

    as_reference = plan_case(model, case, real_data, tmp_path, layout, semantics='reference')
    metrics = metrics_of(as_reference, outputs)
    for key, value in case['metrics'].items():
        assert metrics[key] == pytest.approx(value, abs=1e-6), key
    # Corrected scores differ only where an item has a reason, as ties have.
    if not any(result.reason for result in results.values()):
        assert metrics_of(planned, outputs) == metrics


def metrics_of(planned: PlannedEvaluation, outputs: dict[ItemKey, ScoreOutput]) -> dict[str, float]:
    """Return every metric by its key in the metric stream."""
    scores = conclude(planned, planned.results(outputs.values()), {}).scores
    return {key: value for score in scores.values() for key, value in task_values(score)}


@pytest.mark.parametrize('model', MODELS)
def test_composites_equal_the_reference(model: str):
    """Check all weightings, with and without baseline and rescaling, from the recorded accuracies."""
    content = recorded(model)
    gauntlet = content['gauntlet']
    assert {run['weighting'] for run in gauntlet['runs']} == {'EQUAL', 'SAMPLE_SZ', 'LOG_SAMPLE_SZ'}
    accuracies, sizes = {}, {}
    for case in content['cases']:
        task = task_key(case['task']['label'], case['task']['num_fewshot'][0])
        values = list(case['metrics'].values())
        accuracies[task] = Measure(value=sum(values) / len(values))
        sizes[task] = len(case['items'])

    for run in gauntlet['runs']:
        block = {'categories': gauntlet['categories'], 'averages': gauntlet['averages'], **run}
        spec = load_suite(None, {key: value for key, value in block.items() if key != 'composites'}).gauntlet
        for reference in (False, True):
            composites = compute_composites(spec, accuracies, sizes, reference=reference)
            values = dict(composite_values(composites))
            errors = {f'{key}/standard_error' for key in run['composites']}
            assert values.keys() == run['composites'].keys() | errors
            for key, value in run['composites'].items():
                assert values[key] == pytest.approx(value, abs=1e-6), key


def requests_of(planned: PlannedEvaluation, case: dict[str, Any]) -> dict[int, tuple[Request, np.ndarray]]:
    """Return the requests of a case with their token ids, by row."""
    requests = {}
    for key, item in planned.items.items():
        if key.is_gold:
            continue
        request = item.request
        if isinstance(request, GenerateRequest):
            ids = request.context
        else:
            ids = np.concatenate([request.contexts[0], request.continuations[0]])
        requests[case['rows'][key.row]] = (request, ids.astype('<i4'))
    return requests


def cases_of_prompts() -> Iterator[Any]:
    for model, cases in PROMPTS.items():
        for case in cases:
            yield pytest.param(model, case, id=f'{model}-{case["name"]}')


@pytest.mark.parametrize(('model', 'case'), list(cases_of_prompts()))
def test_token_ids_and_limits_equal_the_reference(model: str, case: dict[str, Any], real_data: Path, tmp_path: Path):
    requests = requests_of(plan_case(model, case, real_data, tmp_path, semantics='reference'), case)

    assert requests.keys() == {item['row'] for item in case['items']}
    for item in case['items']:
        request, ids = requests[item['row']]
        assert (len(ids), digest(ids.tobytes())) == (item['num_tokens'], item['ids'])
        if isinstance(request, GenerateRequest):
            assert request.max_new_tokens == item['max_new_tokens']
        else:
            assert len(request.contexts[0]) == item['start']


@pytest.mark.parametrize('model', PROMPTS)
def test_corrected_prompts_equal_the_reference_unless_truncated(model: str, real_data: Path, tmp_path: Path):
    """With one token per character all 12 exceed 1024; without shots to drop they lose as much, but keep bos.

    Where the reference drops the space before the continuation, prompts have a token more.
    """
    (case,) = [case for case in PROMPTS[model] if case['name'] == 'conlang_truncated/0-shot']
    is_long = model == 'unigram_characters'
    num_spaces_lost = 1 if model in LOST_SPACE else 0

    requests = requests_of(plan_case(model, case, real_data, tmp_path), case)

    for item in case['items']:
        request, ids = requests[item['row']]
        assert request.prompt_shortened == is_long
        assert len(ids) == item['num_tokens'] + num_spaces_lost
        is_equal = digest(ids.tobytes()) == item['ids']
        assert is_equal == (not is_long and num_spaces_lost == 0)
        assert not is_long or ids[0] == 1  # <s>
