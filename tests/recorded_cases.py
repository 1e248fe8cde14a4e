"""The fixture models, what was recorded of llm-foundry 0.22.0 with them, and its tasks over their recorded rows.

Real rows are read from ../shared/data; the fixtures hold only numbers, row numbers and digests.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from paths import FIXTURES

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.plan import STREAM
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PlannedEvaluation, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.tasks.encode import Encoder

MODELS = ('rotary_bos', 'alibi_pad_eos')


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / 'reference' / f'{name}.json').read_text())


@functools.cache
def encoder(model: str) -> Encoder:
    from transformers import AutoTokenizer  # which loads torch

    return Encoder(AutoTokenizer.from_pretrained(FIXTURES / 'models' / model))


@functools.cache
def network(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FIXTURES / 'models' / model).eval()


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def plan_case(
    model: str, case: dict[str, Any], data_root: Path, folder: Path, layout: str = STREAM, **settings: Any
) -> PlannedEvaluation:
    """Plan the task of a recorded case over its rows, with the categories that it gives them."""
    lines = (data_root / case['path']).read_text('utf-8').split('\n')
    rows = [json.loads(lines[number]) for number in case['rows']]
    # The recording gave rows categories in turn.
    categories = case.get('categories')
    if categories:
        for index, row in enumerate(rows):
            row['category'] = categories[index % len(categories)]
    (folder / 'rows.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))

    values = {'tasks': [{**case['task'], 'dataset_uri': 'rows.jsonl'}], 'data_root': str(folder), **settings}
    data = load_data(decode_settings(values))
    prepared = prepare_evaluation(data, encoder(model), max_seq_len=case['task']['max_seq_len'])
    return plan_evaluation(prepared, tokens_per_batch=4096, layout=layout)
