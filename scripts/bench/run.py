"""Time our evaluation, llm-foundry's and lm-eval's in one run, and print ratios.

    make bench [QUICK=1] [PART=generation]      (or: .venv/bin/python scripts/bench/run.py [PART] [options])

The model is a Llama (part families: one of each of nine families; part mpt: llm-foundry's own MPT with ALiBi) of 25M
parameters besides its embeddings, with random weights; tokenizers of 8,000 and 50,000 entries are trained on the data.
Part hybrids has six hybrids, and models with sinks, latent attention and chunks, all of that width and depth. Part
lm-eval has lm-eval's own tasks, and a second Llama with as many heads of keys as of queries.
Each contender has its own process, with the model in memory and one thread, and is idle while another is measured: in
each round every contender runs the same rows with the same shots once. The table shows medians over rounds, in
processor seconds per item; compare the ratios within one run.

ours          from the files to the scores: rows, prompts, tokenization, planning, model, scoring. Without the probe,
              which runs once per model, whatever the number of tasks
alone         the same (part score), but each variant in its own evaluation, in which no prompts share a prefix
llm_foundry   the Trainer's evaluation, including prompting and tokenization, at its defaults. It pads every item to
              max_seq_len, so all cost the same and the first few items suffice
lm_eval       tokenization and scoring or generation of ready texts, or (part score) its own SCORE tasks, at the best of
              batch sizes 8, 16, 32. The first round measures them all (a quick run until one is slower than a smaller
              one, of part hybrids only 8), later rounds only the best. In part lm-eval both are its `simple_evaluate`
              of its own tasks, with its Hugging Face backend and with ours
bare_forward  only the model, over as many tokens as ours plans, in rows of their mean length, logits only where read.
              In part hybrids over whole rows, in which nothing is shared, and for generation transformers' `generate`
no_cache      ours without a cache, which runs whole rows for every new token (part hybrids). Measured for a few tokens;
              the seconds are in proportion to the tokens in rows, so they leave out that attention grows faster

Generation is greedy, by a copy of the model whose generations do not repeat themselves (not in the parts with other
models than Llama). Part hybrids runs in `.venv-newest`, where lm-eval gets ready texts of ours; the table then has the
largest difference of a choice's log-probability too, as in part lm-eval, which also has the largest relative difference
of a metric. Results are in runs/bench/{part}.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from contenders import Contender, load_all, running
from materials import lively_folder, model_folder
from parts import BARE, FOUNDRY, LM_EVAL, LM_EVAL_BATCH_SIZES, OURS, PARTS, ROUNDS, Part, Place, Row
from table import RowResult, groups_table, rows_table

OUT = Path('runs/bench')
DATA_ROOTS = ('../shared/data/local_data', 'eval_data')
REFERENCE_PYTHON = '.venv-reference/bin/python'
MEMORY_SHARE = 0.6  # of the free memory, for lm-eval's logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A run: its contenders, and the number of rounds of each."""

    contenders: dict[str, Contender]
    rounds: dict[str, int]
    quick: bool
    place: Place
    device: str = 'cpu'
    lm_eval_batch_sizes: tuple[int, ...] = LM_EVAL_BATCH_SIZES

    @property
    def clock(self) -> str:
        """The seconds to compare: those of the processor, or on a GPU the wall's."""
        return 'cpu_seconds' if self.device == 'cpu' else 'wall_seconds'

    def run_row(self, row: Row, vocabulary: int) -> RowResult:
        """Run all rounds of one row with the model that is loaded."""
        all_jobs = row.jobs(self.place, quick=self.quick)
        jobs = {name: job for name, job in all_jobs.items() if name in self.contenders}
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}

        # Round by round, so that a slower minute of the machine is all contenders'.
        num_rounds = max(self.rounds[name] for name in jobs)
        for number in range(num_rounds):
            for name, job in jobs.items():
                if number < self.rounds[name]:
                    answer = self.measure(name, job, answers, vocabulary)
                    answers[name].append(answer)

        # All contenders run the same items, but for llm-foundry, which runs fewer.
        num_items = answers[OURS][0]['num_items']
        for name, answers_of_contender in answers.items():
            for answer in answers_of_contender:
                answer['num_items'] = len(answer['predictions']) if name == FOUNDRY else num_items

        return RowResult(row=row, vocabulary=vocabulary, rounds=answers, clock=self.clock)

    def measure(
        self, name: str, job: dict[str, Any], answers: dict[str, list[dict[str, Any]]], vocabulary: int
    ) -> dict[str, Any]:
        """Return a contender's answer in the next round."""
        if name == BARE:
            job = {'shape': answers[OURS][0]['shapes'][job['shape']]}
        elif name == LM_EVAL and answers[name]:
            # The first round has found the fastest batch size.
            job = job | {'batch_size': answers[name][0]['batch_size']}
        elif name == LM_EVAL:
            sizes = self.batch_sizes(answers[OURS][0]['sequences'], vocabulary)
            return self.best_of_lm_eval(job, sizes)
        return self.contenders[name].ask('measure', **job)

    def best_of_lm_eval(self, job: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
        """Return lm-eval's fastest answer, with its batch size. A quick run stops at the first size that is slower."""
        tried: dict[int, dict[str, Any]] = {}
        for size in sizes:
            tried[size] = self.contenders[LM_EVAL].ask('measure', **job, batch_size=size)
            best = min(tried, key=lambda size: tried[size][self.clock])
            if self.quick and best != size:
                break
        return tried[best] | {'batch_size': best}

    def batch_sizes(self, sequences: dict[str, int], vocabulary: int) -> list[int]:
        """Return the batch sizes to try with lm-eval, which keeps float32 logits of all positions twice.

        Leaves out sizes that do not fit in memory, and those beyond the smallest that holds all sequences in one batch.
        """
        count = sequences['count']
        num_smaller = sum(size < count for size in self.lm_eval_batch_sizes)
        sizes = self.lm_eval_batch_sizes[: num_smaller + 1]

        if self.device == 'cpu':
            free_bytes = psutil.virtual_memory().available
        else:
            free_bytes, _ = torch.cuda.mem_get_info()
        bytes_of_sequence = 2 * 4 * sequences['longest'] * vocabulary
        allowed_bytes = MEMORY_SHARE * free_bytes
        fitting = [size for size in sizes if min(size, count) * bytes_of_sequence < allowed_bytes]
        return fitting or list(sizes[:1])


def machine() -> dict[str, Any]:
    """Return the properties of the machine that the figures depend on."""
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    return {
        'processor': models[0] if models else platform.processor(),
        'cores': os.cpu_count(),
        'load_average': os.getloadavg()[0],
        'python': platform.python_version(),
        'torch': version('torch'),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('part', nargs='?', choices=list(PARTS), default='likelihood')
    parser.add_argument('--quick', action='store_true', help='fewer items, one round, one vocabulary')
    parser.add_argument('--rows', default='*', help="comma-separated, such as copa/0-shot or 'lfm2/*'; default: all")
    parser.add_argument('--data-root', default=next(root for root in DATA_ROOTS if Path(root).is_dir()))
    parser.add_argument('--reference-python', default=REFERENCE_PYTHON, help='with llm-foundry and lm-eval')
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    part = PARTS[options.part]
    rounds = {name: 1 if options.quick else ROUNDS[name] for name in part.contenders}
    patterns = options.rows.split(',')
    rows = [row for row in part.rows if any(fnmatch(row.name, pattern) for pattern in patterns)]
    started = time.perf_counter()
    results = run_rows(part, rows, rounds, options)
    wall_seconds = time.perf_counter() - started
    counts = ', '.join(f'{name} {count}' for name, count in rounds.items())
    print(f'\nProcessor seconds per item, one thread, fp32, medians over rounds ({counts}):\n')
    print(rows_table(results), groups_table(part, results), sep='\n\n')
    path = OUT / f'{options.part}.json'
    about = {'quick': options.quick, 'wall_seconds': wall_seconds}
    content = {'machine': machine(), 'options': about, 'rows': [result.as_json() for result in results]}
    path.write_text(json.dumps(content, indent=1) + '\n', 'utf-8')
    print(f'{wall_seconds / 60:.1f} minutes; {path}')


def run_rows(part: Part, rows: list[Row], rounds: dict[str, int], options: argparse.Namespace) -> list[RowResult]:
    """Run the rows with each vocabulary, a quick run only with the last; print each as it is done."""
    commands = {
        name: (
            options.reference_python if name in part.in_reference else sys.executable,
            of_class,
        )
        for name, of_class in part.contenders.items()
    }
    results: list[RowResult] = []
    place = Place(Path(options.data_root), OUT / 'rows')
    with running(commands, OUT) as contenders:
        bench = Bench(
            contenders=contenders,
            rounds=rounds,
            quick=options.quick,
            place=place,
            lm_eval_batch_sizes=part.quick_batch_sizes if options.quick else LM_EVAL_BATCH_SIZES,
        )
        loaded = None
        for vocabulary in part.vocabularies[-1:] if options.quick else part.vocabularies:
            for row in rows:
                base = model_folder(vocabulary, options.data_root, OUT / 'models', row.family)
                folder = base if row.end_scale is None else lively_folder(base, row.end_scale)
                if folder != loaded:
                    print(load_all(contenders, folder)[OURS]['layouts'], flush=True)
                    loaded = folder
                results.append(bench.run_row(row, vocabulary))
                print(rows_table(results[-1:]), flush=True)
    return results


if __name__ == '__main__':
    main()
