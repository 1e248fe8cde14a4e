"""Times replies on ours, llm-foundry and lm-eval side by side, in one run, and prints ratios.

    make bench PART=generation [QUICK=1]   (or, once its environments are there: .venv/bin/python
                                           scripts/bench/generation.py [options])

Contenders, rounds and figures are as in `run.py`; the model is a copy of its Llama whose replies do not repeat
themselves, as random weights would have it. Prompts, stop strings and token limits are the same for all; replies are
greedy. How many texts are the same, and why others are not, is printed.

ours          from rows in memory to marked items: prompts, tokenisation, planning, model, stops, judging
llm-foundry   the Trainer's evaluation, prompting and tokenisation included, 8 prompts in a batch, which it pads to
              max_seq_len less its longest right answer. It runs the first items alone
lm-eval       HFLM.generate_until of ready texts, at the best of batch sizes 8, 16, 32

vary          the model ends replies itself, now and then; limit: the task's own, that of its longest right answer
limit         every reply has as many tokens as it may have
stop          a stop string ends them early
samples       ours alone: several replies drawn to a prompt, which is run once for them all

Results are in runs/bench/generation.json, those of the machine in generation_machine.json beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from contenders import load_all, running
from generation_suite import FULL, QUICK, ROWS, SAMPLED, ReplyRow, SampleRow
from generation_summary import COLUMNS, NEAR, Agreement, ReplyResult, SampleResult
from materials import lively_folder, model_folder, write_rows
from run import Bench, chosen_effort, machine, measurement, parse_options
from suite import Effort
from summary import table_line


class ReplyBench(Bench):
    """A run whose contenders write replies."""

    def run_row(self, row: ReplyRow, vocabulary: int) -> ReplyResult:
        """All rounds of one row with the model that is loaded."""
        num_items = self.effort.num_items(row, 'ours')
        source = {
            'rows_file': str(write_rows(row, num_items, self.data_root, self.out / 'rows')),
            'max_seq_len': row.max_seq_len,
        }
        task = row.entry(lambda entry: self.contenders['ours'].ask('token_limit', task=entry, **source))
        job = {'task': task, **source, 'num_items': num_items}
        few = {'batch_size': row.foundry_batch_size, 'num_items': self.effort.num_items(row, 'llm_foundry')}
        rounds = self.run_rounds({'ours': job, 'llm_foundry': {**job, **few}, 'lm_eval': job}, vocabulary)
        prompt_room = self.contenders['llm_foundry'].ask('prompt_room', task=task, **source)
        first = {name: answers[0]['predictions'] for name, answers in rounds.items()}
        first['llm_foundry'] = [up_to_stop(text, row.stops) for text in first['llm_foundry']]
        is_cut = [length > prompt_room for length in rounds['ours'][0]['prompt_lengths']]
        return ReplyResult(
            row=row,
            vocabulary=vocabulary,
            max_new_tokens=task['generation_kwargs']['max_new_tokens'],
            rounds={name: [measurement(answer, num_items) for answer in answers] for name, answers in rounds.items()},
            agreements={
                'lm_eval': self.agreement(first['ours'], first['lm_eval'], [False] * num_items),
                'llm_foundry': self.agreement(first['ours'], first['llm_foundry'], is_cut),
            },
        )

    def agreement(self, ours: list[str], texts: list[str], is_cut: list[bool]) -> Agreement:
        """How far another's replies to the first items agree with ours. `is_cut` says whose prompts were cut for it."""
        gaps: dict[int, float] = dict(self.contenders['ours'].ask('gaps', texts=texts))
        near = sum(gap <= NEAR for index, gap in gaps.items() if not is_cut[index])
        cut = sum(is_cut[index] for index in gaps)
        same = sum(own == other for own, other in zip(ours, texts, strict=False))
        return Agreement(compared=len(texts), same=same, near=near, cut=cut, others=len(texts) - same - near - cut)

    def run_samples(self, row: SampleRow, vocabulary: int) -> SampleResult:
        """All rounds of several replies to one prompt."""
        num_prompts = self.effort.num_items(row, 'ours')
        job = {
            'task': row.entry(lambda _: row.max_seq_len),
            'rows_file': str(write_rows(row, num_prompts * row.num_samples, self.data_root, self.out / 'rows')),
            'max_seq_len': row.max_seq_len,
            'num_prompts': num_prompts,
            'num_samples': row.num_samples,
            'length': row.length,
        }
        rounds = [self.contenders['ours'].ask('measure_samples', **job) for _ in range(self.effort.rounds['ours'])]
        return SampleResult(row=row, vocabulary=vocabulary, num_prompts=num_prompts, rounds=rounds)


def up_to_stop(text: str, stops: tuple[str, ...]) -> str:
    """A reply without its first stop and what follows."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]


def print_header(options: argparse.Namespace, effort: Effort) -> None:
    rounds = ', '.join(f'{name} {count}' for name, count in effort.rounds.items())
    print(
        f'Processor seconds per item, medians over rounds ({rounds}); Llama of 25M parameters and its embeddings, '
        f'fp32, {options.threads} thread(s), max_seq_len 1,024.'
    )
    print(
        'items: ours and lm-eval / llm-foundry; mean/longest: new tokens; tok/s, padding (share of computed tokens), '
        "idle (share of rows), rows (mean number): ours; batch: lm-eval's best."
    )
    print(table_line('', COLUMNS, COLUMNS.values()), flush=True)


def main() -> None:
    options = parse_options(__doc__)
    effort = chosen_effort(options, FULL, QUICK)
    chosen = [row for row in (*ROWS, SAMPLED) if options.rows is None or row.name in options.rows.split(',')]
    started = time.perf_counter()
    commands = {
        'ours': (sys.executable, 'ours_replies:OurReplies'),
        'llm_foundry': (options.reference_python, 'foundry_and_lm_eval_replies:FoundryReplies'),
        'lm_eval': (options.reference_python, 'foundry_and_lm_eval_replies:LMEvalReplies'),
    }
    torch.set_num_threads(options.threads)
    lines: list[dict[str, Any]] = []
    print_header(options, effort)
    with running(commands, options.out, options.threads) as contenders:
        bench = ReplyBench(contenders=contenders, effort=effort, data_root=options.data_root, out=options.out)
        for vocabulary in effort.vocabularies:
            base = model_folder(vocabulary, options.data_root, options.out / 'models')
            loaded = None
            for row in chosen:
                if loaded != row.end_scale:
                    load_all(contenders, lively_folder(base, row.end_scale))
                    loaded = row.end_scale
                lines.append(run_and_print(bench, row, vocabulary))
    wall_seconds = time.perf_counter() - started
    about = {'machine': machine(), 'quick': options.quick, 'threads': options.threads, 'wall_seconds': wall_seconds}
    for name, content in {'generation.json': lines, 'generation_machine.json': about}.items():
        (options.out / name).write_text(json.dumps(content, indent=1) + '\n', 'utf-8')
    print(f'{wall_seconds / 60:.1f} minutes; {options.out / "generation.json"}')


def run_and_print(bench: ReplyBench, row: ReplyRow | SampleRow, vocabulary: int) -> dict[str, Any]:
    """A row's results, as they are kept."""
    if isinstance(row, SampleRow):
        result: ReplyResult | SampleResult = bench.run_samples(row, vocabulary)
        printed = result.lines()
    else:
        result = bench.run_row(row, vocabulary)
        printed = [result.line(), *result.reasons()]
    print(*printed, sep='\n', flush=True)
    return result.as_json()


if __name__ == '__main__':
    main()
