"""Token ids and limits of prompts compared with llm-foundry 0.22.0, as recorded by scripts/record_prompts.py.

Real rows are read from ../shared/data; the fixture holds only numbers, row numbers and digests.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_cases import lines_of, prepare, recorded

from llmfoundry_gauntlet.types import GenerateRequest, Request

RECORDED = recorded('prompts')['models']
CASES = [pytest.param(model, case, id=f'{model}-{case["name"]}') for model, cases in RECORDED.items() for case in cases]


def requests_of(model: str, case: dict[str, Any], data_root: Path, folder: Path, semantics: str) -> dict[int, Request]:
    """Return our requests for the rows of a case, by row."""
    rows = [json.loads(line) for line in lines_of(data_root / case['path'], case['rows'])]
    if names := case.get('categories'):
        rows = [{**row, 'category': names[place % len(names)]} for place, row in enumerate(rows)]
    prepared = prepare(model, case['task'], map(json.dumps, rows), folder, semantics=semantics)
    return {case['rows'][key.row]: item.request for key, item in prepared.items.items()}


def ids_of(request: Request) -> np.ndarray:
    if isinstance(request, GenerateRequest):
        return request.context
    return np.concatenate([request.contexts[0], request.continuations[0]])


@pytest.mark.parametrize(('model', 'case'), CASES)
def test_token_ids_and_limits_equal_the_reference(model: str, case: dict[str, Any], real_data: Path, tmp_path: Path):
    requests = requests_of(model, case, real_data, tmp_path, 'reference')
    assert requests.keys() == {item['row'] for item in case['items']}
    for item in case['items']:
        request = requests[item['row']]
        ids = ids_of(request)
        assert len(ids) == item['num_tokens']
        assert hashlib.sha256(ids.astype('<i4').tobytes()).hexdigest() == item['ids']
        if isinstance(request, GenerateRequest):
            assert request.max_new_tokens == item['max_new_tokens']
        else:
            assert len(request.contexts[0]) == item['start']


@pytest.mark.parametrize('model', RECORDED)
def test_corrected_prompts_equal_the_reference_unless_truncated(model: str, real_data: Path, tmp_path: Path):
    """With one token per character all 12 exceed 1024; without shots to drop they lose as much, but keep bos."""
    case = next(case for case in RECORDED[model] if case['name'] == 'conlang_truncated/0-shot')
    requests = requests_of(model, case, real_data, tmp_path, 'corrected')
    is_long = model == 'unigram_characters'
    for item in case['items']:
        request = requests[item['row']]
        ids = ids_of(request)
        assert request.truncated == is_long
        assert len(ids) == item['num_tokens']
        assert (hashlib.sha256(ids.astype('<i4').tobytes()).hexdigest() == item['ids']) == (not is_long)
        if is_long:
            assert ids[0] == 1  # <s>
