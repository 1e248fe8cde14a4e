"""Generations compared with llm-foundry 0.22.0, as recorded by scripts/record_generation.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_cases import MODELS, digest, encoder, network, plan_case, recorded

from llmfoundry_gauntlet.engine.decoding import PROMPT_STREAM, GenerationDecoder, end_ids
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.evaluation.run import conclude
from llmfoundry_gauntlet.metrics.keys import task_values
from llmfoundry_gauntlet.scoring.text import normalize_answer
from llmfoundry_gauntlet.types import Generation, ItemResult

NUM_OF_LONG = 3


def cases() -> Iterator[Any]:
    """Yield models and cases; of the longest generations only the first are made, and all in the long tests."""
    for model in MODELS:
        for case in recorded(f'generation_{model}')['cases']:
            name = f'{model}-{case["name"]}'
            if 'sat_math' in name:
                yield pytest.param(model, case, NUM_OF_LONG, id=f'{name}-first')
            yield pytest.param(model, case, None, id=name, marks=[pytest.mark.long] if 'sat_math' in name else [])


def generator(model: str) -> TextGenerator:
    """Return the generator of `semantics: reference`: real tokens equal to the padding token are hidden."""
    tokenizer, padding = encoder(model).tokenizer, recorded(f'generation_{model}')['pad_token_id']
    engine = CausalLanguageModel(network(model), device=torch.device('cpu'), hidden_token_id=padding)
    decoder = GenerationDecoder(tokenizer, end_ids(tokenizer, network(model), reference=True))
    return TextGenerator(engine, decoder, PROMPT_STREAM)


def check_item(item: dict[str, Any], generation: Generation, result: ItemResult, normalized: bool) -> None:
    """Check a generation character by character, and its score."""
    if 'before_stop' in item:
        assert digest(result.text) == item['before_stop']
    else:
        assert digest(generation.text) == item['output']
        assert (generation.num_tokens, generation.is_truncated) == (item['num_tokens'], not item['eos'])
    assert digest(normalize_answer(result.answer) if normalized else result.answer) == item['cleaned']
    assert result.score == item['mark']


@pytest.mark.parametrize(('model', 'case', 'most'), [*cases()])
def test_prompts_generations_scores_and_metrics_equal_the_recording(
    model: str, case: dict[str, Any], most: int | None, real_data: Path, tmp_path: Path
):
    """Compare token ids, texts and scores of up to 60 rows with the keys of their task."""
    items = {item['row']: item for item in case['items']}
    planned = plan_case(model, case, real_data, tmp_path, semantics='reference')
    generated = {key: item for key, item in planned.items.items() if not key.is_gold}
    assert len(generated) == len(items)
    for key, planned_item in generated.items():
        request, item = planned_item.request, items[case['rows'][key.row]]
        assert (request.max_new_tokens, len(request.context)) == (case['max_new_tokens'], item['prompt_length'])
        assert digest(request.context.astype('<i4').tobytes()) == item['prompt']
    batches = list(planned.continuous_batches)
    if most is not None:
        batches = [replace(batches[0], requests=batches[0].requests[:most])]
    run = generator(model)
    generations = {one.key: one for batch in batches for one in run.run(batch)}
    results = planned.results(generations.values())
    assert len(results) == (len(items) if most is None else most)
    for key, result in results.items():
        check_item(items[case['rows'][key.row]], generations[key], result, case['task'].get('do_normalization', True))
    if most is None:
        golds = planned.results(output for batch in planned.batches for output in run.language_model.run(batch))
        (score,) = conclude(planned, {**results, **golds}, {}).scores.values()
        metrics = dict(task_values(score))
        for key, value in case['metrics'].items():
            assert metrics[key] == pytest.approx(value, abs=1e-6), key
