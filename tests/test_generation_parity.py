"""Generations compared with llm-foundry 0.22.0, as recorded by scripts/record_generation.py on the two fixture models.

Real rows are read from ../shared/data; the fixtures hold only numbers, row numbers and digests.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import FIXTURES
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.decoding import PROMPT_STREAM
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import ContinuousBatch
from llmfoundry_gauntlet.engine.stopping import GenerationDecoder, end_ids
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, conclude, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.metrics.keys import task_values
from llmfoundry_gauntlet.scoring.text import normalize_answer
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import Generation, ItemKey, ItemResult

LONG = 100  # tokens of a generation
NUM_OF_LONG = 3
LAYOUTS = dict.fromkeys(('rotary_bos', 'alibi_pad_eos'), PROMPT_STREAM)


@functools.cache
def recorded(model: str) -> dict[str, Any]:
    return json.loads((FIXTURES / 'reference' / f'generation_{model}.json').read_text())


CASES = [(model, index) for model in LAYOUTS for index in range(len(recorded(model)['cases']))]
NAMES = [f'{model}-{recorded(model)["cases"][index]["name"]}' for model, index in CASES]
ALL_CASES = [
    pytest.param(*case, id=name, marks=[pytest.mark.long] if 'sat_math' in name else [])
    for case, name in zip(CASES, NAMES, strict=True)
]


@functools.cache
def tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(FIXTURES / 'models' / model)


def generator(model: str) -> TextGenerator:
    """Return the generator of `semantics: reference`: real tokens equal to the padding token are hidden."""
    network = AutoModelForCausalLM.from_pretrained(FIXTURES / 'models' / model).eval()
    padding = recorded(model)['tokenizer']['pad_tok_id']
    engine = CausalLanguageModel(network, device=torch.device('cpu'), hidden_token_id=padding)
    return TextGenerator(
        engine, GenerationDecoder(tokenizer(model), end_ids(tokenizer(model), network, reference=True)), LAYOUTS[model]
    )


def plan_case(case: dict[str, Any], model: str, data_root: Path, folder: Path) -> PlannedEvaluation:
    """Plan a recorded case with the reference's semantics."""
    lines = (data_root / case['path']).read_text(encoding='utf-8').split('\n')
    (folder / 'rows.jsonl').write_text(''.join(f'{lines[row]}\n' for row in case['rows']), encoding='utf-8')
    settings = decode_settings(
        {'tasks': [{**case['task'], 'dataset_uri': 'rows.jsonl'}], 'data_root': str(folder), 'semantics': 'reference'}
    )
    prepared = prepare_evaluation(
        load_data(settings), Encoder(tokenizer(model)), max_seq_len=case['task']['max_seq_len']
    )
    return plan_evaluation(prepared, tokens_per_batch=4096)


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


def check_generations(
    planned: PlannedEvaluation,
    case: dict[str, Any],
    items: dict[int, dict[str, Any]],
    model: str,
    batches: list[ContinuousBatch],
) -> dict[ItemKey, ItemResult]:
    """Generate for some batches and check each generation."""
    run = generator(model)
    replies = {reply.key: reply for batch in batches for reply in run.run(batch)}
    results = planned.results(replies.values())
    assert len(results) == sum(len(batch.requests) for batch in batches)
    for key, result in results.items():
        check_item(items[case['rows'][key.row]], replies[key], result, case['task'].get('do_normalization', True))
    return results


@pytest.mark.parametrize(('model', 'index'), CASES, ids=NAMES)
def test_prompts_generations_and_scores_equal_the_recording(model: str, index: int, real_data: Path, tmp_path: Path):
    """Compare token ids, texts and scores; of long generations only those of the first items."""
    case = recorded(model)['cases'][index]
    items = {item['row']: item for item in case['items']}
    planned = plan_case(case, model, real_data, tmp_path)
    check_prompts(planned, case, items)
    batches = list(planned.continuous_batches)
    if case['max_new_tokens'] > LONG:
        batches = [replace(batches[0], requests=batches[0].requests[:NUM_OF_LONG])]
    check_generations(planned, case, items, model, batches)


@pytest.mark.parametrize(('model', 'index'), ALL_CASES)
def test_all_generations_and_metrics_equal_the_recording(model: str, index: int, real_data: Path, tmp_path: Path):
    """Run 60 rows of each of the four files with the keys of its task."""
    case = recorded(model)['cases'][index]
    planned = plan_case(case, model, real_data, tmp_path)
    results = check_generations(
        planned, case, {item['row']: item for item in case['items']}, model, list(planned.continuous_batches)
    )
    (score,) = conclude(planned, results, {}).scores.values()
    metrics = dict(task_values(score))
    for key, value in case['metrics'].items():
        assert metrics[key] == pytest.approx(value, abs=1e-6), key
