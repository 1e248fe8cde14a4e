"""Times our evaluation with `fewshot: fixed` against the default, on the same engine.

    make bench PART=fixed_shots      (or: .venv/bin/python scripts/bench/fixed_shots.py [--quick])

With fixed shots all items of a task begin alike, and that beginning is run once and kept. What is timed is said in
`ours.py`; model and tokenizer are those of the likelihood suite. Results are in runs/bench/fixed_shots.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from materials import model_folder, task_entry, write_rows
from ours import Ours
from suite import FOUR_TEXTS, TWO_CHOICES, Row

OUT = Path('runs/bench')
DATA_ROOTS = ('../shared/data/local_data', 'eval_data')
VOCABULARY = 8_000
ROUNDS = 3
ROWS = (
    Row(label='arc_challenge', num_shots=10, group=FOUR_TEXTS, items=(64, 24), foundry_items=(0, 0)),
    Row(label='hellaswag', num_shots=10, group=FOUR_TEXTS, items=(64, 24), foundry_items=(0, 0), max_seq_len=2048),
    Row(label='piqa', num_shots=10, group=TWO_CHOICES, items=(64, 24), foundry_items=(0, 0)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data-root', default=next(root for root in DATA_ROOTS if Path(root).is_dir()))
    parser.add_argument('--quick', action='store_true', help='fewer items and a single round')
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours = Ours()
    ours.load(str(model_folder(VOCABULARY, options.data_root, OUT / 'models')))
    print(f'{"processor seconds per item":<28}{"items":>8}{"default":>12}{"fixed":>12}{"default/fixed":>16}')
    found = []
    for row in ROWS:
        rows_file = write_rows(row, row.items[options.quick], options.data_root, OUT / 'rows' / 'fixed_shots')
        num_items = min(row.items[options.quick], len(rows_file.read_text('utf-8').splitlines()))
        seconds: dict[str, list[float]] = {'reference': [], 'fixed': []}
        for _ in range(1 if options.quick else ROUNDS):
            for fewshot, times in seconds.items():
                timing = ours.measure(
                    task=task_entry(row),
                    rows_file=str(rows_file),
                    max_seq_len=row.max_seq_len,
                    num_items=num_items,
                    fewshot=fewshot,
                )
                times.append(timing['cpu_seconds'] / num_items)
        default, fixed = (statistics.median(times) for times in seconds.values())
        print(f'{row.name:<28}{num_items:>8}{default:>12.4f}{fixed:>12.4f}{default / fixed:>16.1f}', flush=True)
        found.append(
            {'task': row.label, 'num_shots': row.num_shots, 'items': num_items, 'default': default, 'fixed': fixed}
        )
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / 'fixed_shots.json').write_text(json.dumps(found, indent=1) + '\n', 'utf-8')


if __name__ == '__main__':
    main()
