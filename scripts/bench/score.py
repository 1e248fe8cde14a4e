"""Times SCORE on MMLU-Pro: all variants together against each apart, and replies against lm-eval's own tasks.

    make bench PART=score [QUICK=1]   (or, once its environments are there: .venv/bin/python scripts/bench/score.py
                                      [options])

Contenders, rounds and figures are as in `run.py`, the model is its Llama, and for replies the copy of it that ends
them itself. Processor seconds are per question, all its variants together.

likelihood    one entry of `score` with a perturbation in one evaluation, against an evaluation of every label or
              prompt on the same engine, by turns for 40 questions at a time; all from the files to the scores:
              variants, prompts, tokenisation, planning, model, judging. Apart the engine still shares what questions
              begin with, such as an instruction (separate), or nothing (alone), which the target is about. Of all
              prompts' tokens are printed the share of distinct prefixes (unique), that which is run together, and
              that which is run apart
generate      the same entry answered in words, against lm-eval's own SCORE task through its `evaluate` with HFLM on
              the same questions and prompts and with the same limit, at the best of batch sizes 8, 16, 32; its rows
              are in memory before. Replies are greedy. How many texts are the same, and why others are not, is printed

Results are in runs/bench/score.json, those of the machine in score_machine.json beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from contenders import load_all, running
from generation import ReplyBench
from materials import lively_folder, model_folder
from run import chosen_effort, machine, measurement, parse_options
from score_suite import (
    END_SCALE,
    FULL,
    MAX_SEQ_LEN,
    PART,
    QUICK,
    ROWS,
    ROWS_FILE,
    SOURCES,
    ScoreRow,
    Source,
    write_questions,
)
from score_summary import LIKELIHOOD_COLUMNS, REPLY_COLUMNS, ChoiceResult, ReplyResult
from suite import Effort
from summary import Measurement, table_line

from llmfoundry_gauntlet.config.score import GENERATE, LIKELIHOOD

APART = {'separate': 'score_ours:Separate', 'alone': 'score_ours:Alone'}
OURS = {LIKELIHOOD: {'together': 'score_ours:Together', **APART}}
OURS[GENERATE] = {'ours': 'score_ours:ScoreReplies'}
COLUMNS = {LIKELIHOOD: LIKELIHOOD_COLUMNS, GENERATE: REPLY_COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBench(ReplyBench):
    """A run whose contenders ask the same questions in several ways."""

    source: Source

    def run_row(self, row: ScoreRow, vocabulary: int) -> ChoiceResult | ReplyResult:
        """All rounds of one row with the model that is loaded."""
        wanted = self.effort.num_items(row, 'ours')
        part = wanted if row.answers == GENERATE else PART
        roots = write_questions(self.source, wanted, part, self.out / 'rows')
        num_questions = sum(roots.values())
        parts = [self.run_rounds(self.jobs(row, root), vocabulary) for root in roots]
        answers = {
            name: [joined(said) for said in zip(*(part[name] for part in parts), strict=True)] for name in parts[0]
        }
        rounds = {name: [of_questions(answer, num_questions) for answer in said] for name, said in answers.items()}
        first = {name: said[0]['predictions'] for name, said in answers.items()}
        shared: dict[str, Any] = {'row': row, 'vocabulary': vocabulary, 'rounds': rounds}
        if row.answers == LIKELIHOOD:
            return ChoiceResult(**shared, **compared(first['together'], first['alone']))
        prompts = {name: said[0]['prompts'] for name, said in answers.items()}
        texts = in_order_of(prompts['ours'], prompts['lm_eval'], first['lm_eval'])
        return ReplyResult(**shared, agreement=self.agreement(first['ours'], texts, [False] * len(texts)))

    def jobs(self, row: ScoreRow, root: Path) -> dict[str, dict[str, Any]]:
        """What each contender is to do with the questions of a data root."""
        job = {'entry': row.entry(self.source.prompts), 'data_root': str(root), 'max_seq_len': MAX_SEQ_LEN}
        jobs = dict.fromkeys(OURS[row.answers], job)
        if row.answers == GENERATE:
            jobs['lm_eval'] = {
                'perturbation': row.perturbation,
                'rows_file': str(root / ROWS_FILE),
                'prompts': str(self.source.prompts),
                'max_new_tokens': row.max_new_tokens,
                'max_seq_len': MAX_SEQ_LEN,
            }
        return jobs


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A contender's answers to the parts of a row as one: seconds and tokens added up, predictions put together."""
    if len(parts) == 1:
        return parts[0]
    return {
        'wall_seconds': sum(part['wall_seconds'] for part in parts),
        'cpu_seconds': sum(part['cpu_seconds'] for part in parts),
        'predictions': [prediction for part in parts for prediction in part['predictions']],
        'tokens': {name: sum(part['tokens'][name] for part in parts) for name in parts[0]['tokens']},
    }


def of_questions(answer: dict[str, Any], num_questions: int) -> Measurement:
    """A contender's answer, whose seconds are of questions and not of replies."""
    return replace(measurement(answer, num_questions), num_items=num_questions)


def compared(together: Sequence[int | None], separate: Sequence[int | None]) -> dict[str, int]:
    """How many choices there are and how many are the same."""
    return {
        'num_choices': len(together),
        'num_same': sum(one == other for one, other in zip(together, separate, strict=True)),
    }


def in_order_of(prompts: Sequence[str], others: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Another's replies in the order of our prompts. Raises ValueError where the two ask different prompts."""
    replies = dict(zip(others, texts, strict=True))
    if replies.keys() != set(prompts):
        raise ValueError(f'{len(replies.keys() ^ set(prompts))} prompts are asked by one of ours and lm-eval alone')
    return [replies[prompt] for prompt in prompts]


def print_header(options: argparse.Namespace, effort: Effort, source: Source) -> None:
    rounds = ', '.join(f'{name} {count}' for name, count in effort.rounds.items())
    print(
        f'Processor seconds per question, medians over rounds ({rounds}); Llama of 25M parameters and its embeddings, '
        f'fp32, {options.threads} thread(s), max_seq_len {MAX_SEQ_LEN:,}.'
    )
    print(f'{source.note}; load average {os.getloadavg()[0]:.1f}')


def run_rows(
    options: argparse.Namespace, effort: Effort, rows: Sequence[ScoreRow], source: Source
) -> list[dict[str, Any]]:
    """The results of the rows that are answered in one way, as they are kept."""
    answers = rows[0].answers
    commands = {name: (sys.executable, of_class) for name, of_class in OURS[answers].items()}
    if answers == GENERATE:
        commands['lm_eval'] = (options.reference_python, 'score_lm_eval:LMEvalScore')
    lines = []
    print('', table_line('', COLUMNS[answers], COLUMNS[answers].values()), sep='\n', flush=True)
    with running(commands, options.out, options.threads) as contenders:
        bench = ScoreBench(
            contenders=contenders, effort=effort, data_root=options.data_root, out=options.out, source=source
        )
        for vocabulary in effort.vocabularies:
            folder = model_folder(vocabulary, options.data_root, options.out / 'models')
            load_all(contenders, lively_folder(folder, END_SCALE) if answers == GENERATE else folder)
            for row in rows:
                result = bench.run_row(row, vocabulary)
                print(result.line(), *result.remarks(), sep='\n', flush=True)
                lines.append(result.as_json())
    return lines


def main() -> None:
    options = parse_options(__doc__)
    effort = chosen_effort(options, FULL, QUICK)
    source = next(source for source in SOURCES if source.is_there)
    chosen = [row for row in ROWS if options.rows is None or row.name in options.rows.split(',')]
    started = time.perf_counter()
    torch.set_num_threads(options.threads)
    print_header(options, effort, source)
    lines: list[dict[str, Any]] = []
    for answers in (LIKELIHOOD, GENERATE):
        if rows := [row for row in chosen if row.answers == answers]:
            lines += run_rows(options, effort, rows, source)
    wall_seconds = time.perf_counter() - started
    about = {
        'machine': machine(),
        'quick': options.quick,
        'threads': options.threads,
        'wall_seconds': wall_seconds,
        'source': source.note,
    }
    for name, content in {'score.json': lines, 'score_machine.json': about}.items():
        (options.out / name).write_text(json.dumps(content, indent=1) + '\n', 'utf-8')
    print(f'{wall_seconds / 60:.1f} minutes; {options.out / "score.json"}')


if __name__ == '__main__':
    main()
