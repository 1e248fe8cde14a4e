"""Times the likelihood suite on ours, llm-foundry, lm-eval and a bare forward, in one run, and prints ratios.

    make bench [QUICK=1]      (or, once its environments are there: .venv/bin/python scripts/bench/run.py [options])

The model is a Llama of 25M parameters besides its embeddings, with random weights; tokenizers of 8,000 and 50,000
entries are trained on the data. Each contender has a process of its own, with the model in memory and one thread, and
waits while another is measured: in each round every contender runs the same rows with the same shots once. Figures
are medians over rounds, in processor seconds per item; the ratios of one run are what counts.

ours          from rows in memory to scores: prompts, tokenisation, planning, model, judging. Not the probe, which is
              made once for a model, whatever the number of tasks
llm-foundry   the Trainer's evaluation, prompting and tokenisation included, at its defaults. It pads every item to
              max_seq_len, so all cost the same: it runs the first few items alone, and fewer rounds
lm-eval       tokenisation and scoring of ready texts, at the best of batch sizes 8, 16, 32. The first round measures
              them all (with QUICK=1 until one is slower than a smaller one), later rounds the best
bare forward  the model alone over as many tokens as ours plans, in rows of their mean length, logits only where read

Results are in runs/bench/bench.json, all else that is known of them in bench_details.json beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from contenders import Contender, load_all, running
from materials import model_folder, task_entry, write_rows
from suite import FULL, LM_EVAL_BATCH_SIZES, QUICK, ROWS, Effort, Row
from summary import Measurement, RowResult, group_lines, group_means, head_line, row_line

OUT = Path('runs/bench')
DATA_ROOTS = ('../shared/data/local_data', 'eval_data')
REFERENCE_PYTHON = '.venv-reference/bin/python'
MEMORY_SHARE = 0.6  # of what is free, for lm-eval's logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A run: its contenders, and how much is to be done."""

    contenders: dict[str, Contender]
    effort: Effort
    data_root: str
    out: Path

    def run_row(self, row: Row, vocabulary: int) -> RowResult:
        """All rounds of one row with the model that is loaded."""
        num_items = self.effort.num_items(row, 'ours')
        rows_file = write_rows(row, num_items, self.data_root, self.out / 'rows')
        job = {
            'task': task_entry(row),
            'rows_file': str(rows_file),
            'max_seq_len': row.max_seq_len,
            'num_items': num_items,
        }
        foundry_job = job | {
            'batch_size': row.foundry_batch_size,
            'num_items': self.effort.num_items(row, 'llm_foundry'),
        }
        jobs = {'ours': job, 'bare_forward': {}, 'llm_foundry': foundry_job, 'lm_eval': job}
        return row_result(row, vocabulary, self.run_rounds(jobs, vocabulary))

    def run_rounds(self, jobs: dict[str, dict[str, Any]], vocabulary: int) -> dict[str, list[dict[str, Any]]]:
        """The answers of all rounds to the jobs of the contenders, which run one after the other in each."""
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
        for number in range(max(self.effort.rounds[name] for name in jobs)):
            for name, job in jobs.items():
                if number >= self.effort.rounds[name]:
                    continue
                if name == 'bare_forward':
                    answer = self.ask(name, {'shape': rounds['ours'][0]['shape']})
                elif name == 'lm_eval' and number == 0:
                    answer = self.best_of_lm_eval(job, batch_sizes(rounds['ours'][0]['sequences'], vocabulary))
                elif name == 'lm_eval':
                    answer = self.ask(name, job | {'batch_size': rounds[name][0]['batch_size']})
                else:
                    answer = self.ask(name, job)
                rounds[name].append(answer)
        return rounds

    def ask(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        """A contender's answer to one measurement."""
        return self.contenders[name].ask('measure', **job)

    def best_of_lm_eval(self, job: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
        """lm-eval's fastest answer, with its batch size. A quick run stops at the first size that is slower."""
        tried: dict[int, dict[str, Any]] = {}
        for size in sizes:
            tried[size] = self.ask('lm_eval', job | {'batch_size': size})
            best = min(tried, key=lambda size: tried[size]['cpu_seconds'])
            if self.effort.quick and best != size:
                break
        seconds = {size: answer['cpu_seconds'] for size, answer in tried.items()}
        return tried[best] | {'batch_size': best, 'tried_cpu_seconds': seconds}


def row_result(row: Row, vocabulary: int, rounds: dict[str, list[dict[str, Any]]]) -> RowResult:
    """The answers of all rounds, and how many of llm-foundry's predictions are ours too."""
    ours, foundry = rounds['ours'][0]['predictions'], rounds['llm_foundry'][0]['predictions']
    return RowResult(
        row=row,
        vocabulary=vocabulary,
        rounds={name: [measurement(answer, len(ours)) for answer in rounds[name]] for name in rounds},
        lm_eval_batch_size=rounds['lm_eval'][0]['batch_size'],
        num_same=sum(a == b for a, b in zip(ours, foundry, strict=False)),
        num_compared=len(foundry),
    )


def measurement(answer: dict[str, Any], num_items: int) -> Measurement:
    """A contender's answer; one that makes no predictions ran all `num_items`."""
    details = {key: value for key, value in answer.items() if key not in ('wall_seconds', 'cpu_seconds', 'predictions')}
    return Measurement(
        num_items=len(answer['predictions']) or num_items,
        wall_seconds=answer['wall_seconds'],
        cpu_seconds=answer['cpu_seconds'],
        details=details,
    )


def batch_sizes(sequences: dict[str, int], vocabulary: int) -> list[int]:
    """lm-eval's batch sizes that are worth trying and fit: it keeps float32 logits of all positions twice.

    Of those that hold all sequences in one batch only the smallest is tried: the others would do the same.
    """
    count, longest = sequences['count'], sequences['longest']
    free = available_bytes()
    num_different = sum(size < count for size in LM_EVAL_BATCH_SIZES) + 1
    sizes = LM_EVAL_BATCH_SIZES[:num_different]
    fitting = [size for size in sizes if 2 * 4 * min(size, count) * longest * vocabulary < MEMORY_SHARE * free]
    return fitting or list(sizes[:1])


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    lines = proc_lines('meminfo')
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith('MemAvailable')]
    return kibibytes[0] * 1024 if kibibytes else os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    models = [line.split(':', 1)[1].strip() for line in proc_lines('cpuinfo') if line.startswith('model name')]
    return {
        'processor': models[0] if models else platform.processor(),
        'cores': os.cpu_count(),
        'load_average': os.getloadavg()[0],
        'python': platform.python_version(),
        'torch': torch.__version__,
    }


def proc_lines(name: str) -> list[str]:
    """What Linux says of itself; nothing elsewhere."""
    path = Path('/proc') / name
    return path.read_text().splitlines() if path.exists() else []


def parse_options(description: str | None = __doc__) -> argparse.Namespace:
    """The options of a benchmark, described by the first line of its module's docstring."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument('--quick', action='store_true', help='every row with fewer items, one vocabulary')
    parser.add_argument('--rounds', type=int, help='of ours and bare forward; at most as many of the others')
    parser.add_argument('--rows', help='comma-separated names such as copa/0-shot; default: all')
    parser.add_argument('--vocabularies', help='comma-separated sizes')
    parser.add_argument('--data-root', default=next(root for root in DATA_ROOTS if Path(root).is_dir()))
    parser.add_argument('--out', type=Path, default=OUT, help='folder for the results and what is made for them')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--reference-python', default=REFERENCE_PYTHON, help='with llm-foundry and lm-eval')
    return parser.parse_args()


def chosen_effort(options: argparse.Namespace, full: Effort = FULL, quick: Effort = QUICK) -> Effort:
    """How much is to be run."""
    effort = quick if options.quick else full
    if options.rounds:
        own = ('ours', 'bare_forward')
        rounds = {
            name: options.rounds if name in own else min(options.rounds, effort.rounds[name]) for name in effort.rounds
        }
        effort = replace(effort, rounds=rounds)
    if options.vocabularies:
        effort = replace(effort, vocabularies=tuple(map(int, options.vocabularies.split(','))))
    return effort


def main() -> None:
    options = parse_options()
    effort = chosen_effort(options)
    rows = [row for row in ROWS if options.rows is None or row.name in options.rows.split(',')]
    started = time.perf_counter()
    commands = {
        'ours': (sys.executable, 'ours:Ours'),
        'bare_forward': (sys.executable, 'bare_forward:BareForward'),
        'llm_foundry': (options.reference_python, 'foundry_and_lm_eval:LLMFoundry'),
        'lm_eval': (options.reference_python, 'foundry_and_lm_eval:LMEval'),
    }
    torch.set_num_threads(options.threads)
    results: list[RowResult] = []
    print_header(options, effort)
    with running(commands, options.out, options.threads) as contenders:
        bench = Bench(contenders=contenders, effort=effort, data_root=options.data_root, out=options.out)
        for vocabulary in effort.vocabularies:
            said = load_all(contenders, model_folder(vocabulary, options.data_root, options.out / 'models'))
            print(f'vocabulary of {vocabulary}; ours runs it as a {said["ours"]["way"]}', flush=True)
            for row in rows:
                results.append(bench.run_row(row, vocabulary))
                print(row_line(results[-1]), flush=True)
    print('', *group_lines(results), sep='\n')
    wall_seconds = time.perf_counter() - started
    write_results(options, effort, results, wall_seconds)
    print(f'{wall_seconds / 60:.1f} minutes; {options.out / "bench.json"}')


def print_header(options: argparse.Namespace, effort: Effort) -> None:
    rounds = ', '.join(f'{name} {count}' for name, count in effort.rounds.items())
    print(
        f'Processor seconds per item, medians over rounds ({rounds}); Llama of 25M parameters and its embeddings, '
        f'fp32, {options.threads} thread(s).'
    )
    print(
        'max_seq_len is 1,024, for squad and coqa 2,048. items: ours, lm-eval and bare forward / llm-foundry; batch: '
        "lm-eval's best of 8, 16, 32; same: predictions equal to llm-foundry's."
    )
    print(head_line(), flush=True)


def write_results(options: argparse.Namespace, effort: Effort, results: list[RowResult], wall_seconds: float) -> None:
    """bench.json and bench_details.json."""
    details = {
        'machine': machine(),
        'options': {'quick': options.quick, 'threads': options.threads, 'rounds': effort.rounds},
        'wall_seconds': wall_seconds,
        'group_means': [
            {'group': group.name, 'means': means, 'targets': group.targets}
            for group, means in group_means(results).items()
        ],
        'rows': [result.details() for result in results],
    }
    contents = {'bench.json': [result.as_json() for result in results], 'bench_details.json': details}
    for name, content in contents.items():
        (options.out / name).write_text(json.dumps(content, indent=1) + '\n', 'utf-8')


if __name__ == '__main__':
    main()
