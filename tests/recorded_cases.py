"""The fixture models, what was recorded of llm-foundry 0.22.0 with them, and tasks over a few rows for them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paths import FIXTURES

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation, prepare_evaluation
from llmfoundry_gauntlet.tasks.encode import Encoder


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


def lines_of(path: Path, rows: Sequence[int]) -> list[str]:
    lines = path.read_text(encoding='utf-8').split('\n')
    return [lines[row] for row in rows]


def prepare(
    model: str, task: dict[str, Any], lines: Iterable[str], folder: Path, **settings: Any
) -> PreparedEvaluation:
    """Prepare a task with its `max_seq_len` over these lines of its file."""
    (folder / 'rows.jsonl').write_text(''.join(f'{line}\n' for line in lines), encoding='utf-8')
    values = {'tasks': [{**task, 'dataset_uri': 'rows.jsonl'}], 'data_root': str(folder), **settings}
    return prepare_evaluation(load_data(decode_settings(values)), encoder(model), max_seq_len=task['max_seq_len'])
