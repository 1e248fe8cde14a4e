"""Record the lengths of rows of some tasks, with which `make gpu` times tasks without the published files at hand.

    python scripts/record_lengths.py DATA_ROOT

Writes scripts/gpu_check/lengths.json: tokens of the query of a row, and of its choices or its answer, with a tokenizer
of 50,000 entries that is trained on all files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).with_name('bench')))

from gpu_check.workloads import GSM8K, LENGTHS, SCORED, SHOT_ROWS, VOCABULARY, Workload, prepared
from materials import make_tokenizer
from parts import task_entries

from llmfoundry_gauntlet.data.readers import locate

NUM_RECORDED = 64  # rows of a task, spread evenly over all lengths of its file


def record(data_root: Path) -> None:
    """Write the lengths of rows of each task, spread evenly over all lengths of its file."""
    lengths = {}
    for workload in (*SCORED[:4], GSM8K):
        rows = gsm8k_rows(data_root) if workload.generates else scored_rows(workload, data_root)
        rows.sort()
        places = np.linspace(0, len(rows) - 1, NUM_RECORDED).round().astype(int)
        lengths[workload.label] = [rows[place] for place in places]
    lines = [f' "{label}": {json.dumps(rows)}' for label, rows in lengths.items()]
    LENGTHS.write_text('{\n' + ',\n'.join(lines) + '\n}\n', 'utf-8')


def scored_rows(workload: Workload, data_root: Path) -> list[list[int]]:
    """Return the lengths of a task's rows without shots."""
    alone = Workload(label=workload.label, num_shots=0)
    requests = prepared(alone, data_root, SHOT_ROWS, VOCABULARY).score_requests
    return [[len(request.contexts[0]), *map(len, request.continuations)] for request in requests]


def gsm8k_rows(data_root: Path) -> list[list[int]]:
    """Return the lengths of questions and of their written answers."""
    tokenizer = make_tokenizer(str(data_root), VOCABULARY)
    text = locate(task_entries()[GSM8K.label]['dataset_uri'], data_root).read_text('utf-8')
    rows = [json.loads(line) for line in text.split('\n') if line.strip()]
    return [
        [len(tokenizer(row['context'])['input_ids']), len(tokenizer(row['chain_of_thought'])['input_ids'])]
        for row in rows
    ]


if __name__ == '__main__':
    record(Path(sys.argv[1]))
