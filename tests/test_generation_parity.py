"""Generations compared with llm-foundry 0.22.0, as recorded by scripts/record_generation.py on the two fixture models.

Real rows are read from ../shared/data; the fixtures hold only numbers, row numbers and digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_cases import encoder, lines_of, network, prepare, recorded

from llmfoundry_gauntlet.engine.decoding import PROMPT_STREAM, GenerationDecoder, end_ids
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, conclude, plan_evaluation
from llmfoundry_gauntlet.metrics.keys import task_values
from llmfoundry_gauntlet.scoring.text import normalize_answer
from llmfoundry_gauntlet.types import Generation, ItemResult

NUM_OF_LONG = 3
LAYOUTS = dict.fromkeys(('rotary_bos', 'alibi_pad_eos'), PROMPT_STREAM)


def cases() -> Iterator[Any]:
    """Yield models and cases; of the longest generations only the first are made, and all in the long tests."""
    for model in LAYOUTS:
        for case in recorded(f'generation_{model}')['cases']:
            name = f'{model}-{case["name"]}'
            if 'sat_math' in name:
                yield pytest.param(model, case, NUM_OF_LONG, id=f'{name}-first')
            yield pytest.param(model, case, None, id=name, marks=[pytest.mark.long] if 'sat_math' in name else [])


def generator(model: str) -> TextGenerator:
    """Return the generator of `semantics: reference`: real tokens equal to the padding token are hidden."""
    tokenizer, padding = encoder(model).tokenizer, recorded(f'generation_{model}')['tokenizer']['pad_tok_id']
    engine = CausalLanguageModel(network(model), device=torch.device('cpu'), hidden_token_id=padding)
    decoder = GenerationDecoder(tokenizer, end_ids(tokenizer, network(model), reference=True))
    return TextGenerator(engine, decoder, LAYOUTS[model])


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def check_item(item: dict[str, Any], reply: Generation, result: ItemResult, normalized: bool) -> None:
    """Check a generation character by character, and its score."""
    if 'before_stop' in item:
        assert digest(result.text) == item['before_stop']
    else:
        assert digest(reply.text) == item['output']
        assert (reply.num_tokens, reply.is_truncated) == (item['num_tokens'], not item['eos'])
    assert digest(normalize_answer(result.answer) if normalized else result.answer) == item['cleaned']
    assert result.score == item['mark']


def check_prompts(planned: PlannedEvaluation, case: dict[str, Any], items: dict[int, dict[str, Any]]) -> None:
    """Check token ids and limits of all requests."""
    for key, planned_item in planned.items.items():
        request, item = planned_item.request, items[case['rows'][key.row]]
        assert request.max_new_tokens == case['max_new_tokens']
        assert len(request.context) == item['prompt_length']
        assert digest(request.context.astype('<i4').tobytes()) == item['prompt']


def plan_case(model: str, case: dict[str, Any], data_root: Path, folder: Path) -> PlannedEvaluation:
    """Plan a recorded case with the reference's semantics."""
    lines = lines_of(data_root / case['path'], case['rows'])
    return plan_evaluation(prepare(model, case['task'], lines, folder, semantics='reference'), tokens_per_batch=4096)


@pytest.mark.parametrize(('model', 'case', 'most'), [*cases()])
def test_prompts_generations_scores_and_metrics_equal_the_recording(
    model: str, case: dict[str, Any], most: int | None, real_data: Path, tmp_path: Path
):
    """Compare token ids, texts and scores of up to 60 rows with the keys of their task."""
    items = {item['row']: item for item in case['items']}
    planned = plan_case(model, case, real_data, tmp_path)
    check_prompts(planned, case, items)
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
        (score,) = conclude(planned, results, {}).scores.values()
        metrics = dict(task_values(score))
        for key, value in case['metrics'].items():
            assert metrics[key] == pytest.approx(value, abs=1e-6), key
