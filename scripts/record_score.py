"""Record what lm-eval 0.4.13 computes in its eight SCORE tasks on real questions with canned generations.

    .venv-reference/bin/python scripts/record_score.py [--score-root FOLDER] [--datasets NAME ...] [--out FOLDER]

Runs in the environment of `requirements/reference.txt`. The tasks are lm-eval's own, with its prompt files, 0-shot and
without a chat template. Only two things are replaced: `datasets.load_dataset` returns the rows of the files below the
SCORE root that `tests/fixtures/score_cases.yaml` lists, and the model's generations are those of
`tests/score_generations.py`. To compare with the recorded ones, record into another folder.

One file per dataset, `tests/fixtures/score/{mmlu_pro,agieval,math}.json`, holds numbers, row numbers and digests, and
no text of the data. A sha256 is of the UTF-8 text, in hex; a digest is its first 16 digits:

    dataset, versions
    sources         sha256 of the data files and of lm-eval's prompt templates and fix table
    tasks[]         option_order, prompt and non_greedy; the first is not there for MATH
        name        lm-eval's
        variants    option_order: the labels that the gold option is moved to; prompt: numbers of the ten prompts;
                    non_greedy: the seeds 1 to 5
        items[]     in the order of files and rows
            file, row
            gold        the gold letter, by the row's index; MATH: digest of what lm-eval takes for gold
            prompts     sha256, one per variant; non_greedy: one
            answers     what lm-eval extracts from each generation: itself if it is '' or one to three of A-Z and 0-9,
                        else 'sha256:' and a digest. MATH: null without a box, '' for an empty one, else a digest
            correct     1 or 0, one per variant
        accuracies  by variant, before rounding: MMLU-Pro's over categories, else the mean over files weighted by
                    their numbers of prompts
        consistency_rate    as lm-eval reports it; non_greedy: as non_greedy_summarizer.py does, over all rows

Rows. MMLU-Pro and MATH are as in their files. AGIEval's files are upstream's v1 and lm-eval reads the form of
hails/agieval-*, which is derived from them: query is the passage, then `Q: `, the question, ` Answer Choices: `, the
options joined by spaces and a last line `A: Among A through {D or E}, the answer is`; choices are the options with
their labels; gold is [the label's index]. logiqa-en is not available: groups are without it, and the summarizer gets an
empty log of it. Nor is MMLU-Pro's validation split; nothing reads it at 0 shots, and lm-eval gets the test rows.

Prompts, to make them from the rows: question is MMLU-Pro's `question`, MATH's `problem`, AGIEval's passage + 'Q: ' +
question, or only the question if the passage is empty or null. Options are MMLU-Pro's as they are, and AGIEval's
without the three characters of `(A)`; nothing is stripped. The prompt is str.format of the template in lm-eval's
prompt_templates.json (the same files are in {SCORE root}/upstream_prompts) with question, options (a
'\\n{letter}: {option}' each) and category (MMLU-Pro's). option_order swaps the gold option with the one at each label,
A to J in MMLU-Pro and A to D in AGIEval, even if there is an E; if the question has fewer options than labels, the
variant of an absent label is the unswapped question with its own gold.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ['HF_HUB_OFFLINE'] = os.environ['HF_DATASETS_OFFLINE'] = os.environ['TQDM_DISABLE'] = '1'
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / 'tests'))

import datasets
import numpy as np
import yaml
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import aggregate_subtask_metrics
from lm_eval.api.model import LM
from lm_eval.config.group import GroupConfig
from lm_eval.evaluator import evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager, score
from lm_eval.tasks.score import non_greedy_summarizer
from lm_eval.tasks.score.math import math_grader
from recording import FIXTURES, SCORE_ROOT, Row, digest, read_lines, versions, write_fixture
from score_generations import completion

SCORE_TASKS = Path(next(iter(score.__path__)))
CASES = yaml.safe_load((FIXTURES / 'score_cases.yaml').read_text('utf-8'))
ABSENT_TASKS = ('logiqa_en',)
SEEDS = (1, 2, 3, 4, 5)
RATES = {'option_order': 'options_consistency_rate', 'prompt': 'consistency_rate'}
LONGEST_SECONDS = 4.0  # for a symbolic comparison, which lm-eval aborts after 10
LIMIT = 300_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """A dataset of `score_cases.yaml` with the rows to record, by file below the SCORE root."""

    name: str
    folder: str  # of lm-eval's task files
    perturbations: list[str]
    sources: dict[tuple[str, str], str]  # the arguments of load_dataset, to a file
    numbers: dict[str, list[int]]
    rows: dict[str, list[Row]]

    def load_dataset(self, path: str, name: str = 'default', **_: Any) -> dict[str, datasets.Dataset]:
        """Return the rows as lm-eval expects them, in place of `datasets.load_dataset`."""
        rows = self.rows[self.sources[path, name]]
        rows = [hails_row(row) for row in rows] if self.name == 'agieval' else rows
        return dict.fromkeys(('test', 'validation'), datasets.Dataset.from_list(rows))


def read_data_set(name: str, root: Path) -> DataSet:
    """Read the rows to record of a dataset."""
    case = CASES[name]
    lines = {file: read_lines(root / file) for file in case['files']}
    return DataSet(
        name=name,
        folder=case['folder'],
        perturbations=case['perturbations'],
        sources={tuple(entry['load']): file for file, entry in case['files'].items()},
        numbers={file: entry['rows'] for file, entry in case['files'].items()},
        rows={file: [json.loads(lines[file][row]) for row in entry['rows']] for file, entry in case['files'].items()},
    )


def hails_row(row: Row) -> Row:
    """Return a row of AGIEval v1 in the form of hails/agieval-*."""
    last = 'ABCDE'[len(row['options']) - 1]
    query = f'{row["passage"] or ""}Q: {row["question"]} Answer Choices: {" ".join(row["options"])}\n'
    return {
        'query': f'{query}A: Among A through {last}, the answer is',
        'choices': row['options'],
        'gold': ['ABCDE'.index(row['label'])],
    }


class CannedModel(LM):
    """A model with the canned generations of one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a generation per request; there are no stops."""
        del disable_tqdm
        assert all(request.args[1]['until'] == [] for request in requests)
        return [completion(request.args[0], *question_of(request.doc), self.seed) for request in requests]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Raise an error: SCORE does not use it."""
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Raise an error: SCORE does not use it."""
        raise NotImplementedError


def question_of(doc: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the gold answer and the options."""
    return (doc['answer'], []) if 'solution' in doc else (doc['options'][doc['answer_index']], doc['options'])


def load_tasks(data_set: DataSet, name: str) -> dict[str, Any]:
    """Return lm-eval's 0-shot task, or its group without the tasks without data, as `evaluate` takes it."""
    manager = TaskManager(include_path=str(SCORE_TASKS), include_defaults=False)
    if data_set.name == 'mmlu_pro':
        loaded = manager.load([name])
    else:
        config = yaml.safe_load((SCORE_TASKS / data_set.folder / f'{name}.yaml').read_text('utf-8'))
        config['task'] = [task for task in config['task'] if not task.endswith(ABSENT_TASKS)]
        group = Group.from_config(GroupConfig(**config))
        for task in manager.load(config['task'])['tasks'].values():
            group.add(task)
        loaded = manager.load([group])
    for task in loaded['tasks'].values():
        task.set_config(key='num_fewshot', value=0)
        task.set_fewshot_seed(seed=0)
    return loaded


def outcome(sample: dict[str, Any]) -> tuple[str | None, str, int]:
    """Return the answer that lm-eval extracted, the gold answer, and 1 if lm-eval counted it as correct."""
    first = sample[sample['metrics'][0]]
    if len(first) == 2:  # MATH, prompts: (prompt number, 1 if correct), then (question, answer)
        return sample['consistency_rate'][1], sample['doc']['answer'], first[1]
    if sample['metrics'][0].startswith('non_greedy'):
        _, answer, gold, _ = first
    else:
        _, _, answer, gold, *_ = first
    is_math = 'solution' in sample['doc']
    return answer, gold, int(math_grader.math_equal(answer, gold) if is_math else answer == gold)


def answer_record(answer: str | None, is_math: bool) -> str | None:
    """Return the answer, or its digest if it may be text of the data."""
    if not answer or (not is_math and re.fullmatch('[A-Z0-9]{1,3}', answer)):
        return answer
    return ('' if is_math else 'sha256:') + digest(answer)[:16]


def item_record(runs: list[list[dict[str, Any]]], is_math: bool) -> dict[str, Any]:
    """Return what one row gave: a list per run of the samples of its prompts."""
    outcomes = [outcome(sample) for run in runs for sample in run]
    doc = runs[0][0]['doc']
    if is_math:
        gold = digest(doc['answer'])[:16]
    else:
        # Where options are swapped, the document has the index before the swap too.
        original_index = doc.get('original_answer_index', doc.get('answer_index'))
        gold = 'ABCDEFGHIJ'[original_index]
    return {
        'gold': gold,
        'prompts': [digest(sample['arguments'][0][0]) for sample in runs[0]],
        'answers': [answer_record(answer, is_math) for answer, _, _ in outcomes],
        'correct': [correct for _, _, correct in outcomes],
    }


def unrounded(loaded: dict[str, Any], samples: dict[str, Any], metric: str) -> float:
    """Return an accuracy over all tasks, by lm-eval's own functions without the rounding."""
    accuracies = []
    sizes = []
    # lm-eval's functions round by np.round.
    with mock.patch.object(np, 'round', lambda value, _: value):
        for name, task in loaded['tasks'].items():
            scores = [sample[metric] for sample in samples[name] if metric in sample]
            aggregate = task.aggregation()[metric]
            accuracies.append(float(aggregate(scores)))
            sizes.append(len(samples[name]))
    return aggregate_subtask_metrics(accuracies, sizes)


def summarized_rate(data_set: DataSet, samples: list[dict[str, Any]]) -> float:
    """Return the consistency rate that lm-eval's summariser makes of the five runs' logs."""
    with tempfile.TemporaryDirectory() as folder:
        for seed, tasks in zip(SEEDS, samples, strict=True):
            tracker = EvaluationTracker(output_path=str(Path(folder, f'seed_{seed}')))
            tracker.general_config_tracker.model_name_sanitized = 'canned'
            tracker.date_id = 'now'
            for name, logged in tasks.items():
                # A copy of JSON values, as in the log of a run.
                copied = json.loads(json.dumps(logged))
                tracker.save_results_samples(name, copied)
            if data_set.name == 'agieval':
                for name in ABSENT_TASKS:
                    tracker.save_results_samples(f'non_greedy_robustness_agieval_{name}', [])

        arguments = ['non_greedy_summarizer', '--log_dir', folder, '--dataset', data_set.name]
        with mock.patch.object(sys, 'argv', arguments), contextlib.redirect_stdout(io.StringIO()):
            non_greedy_summarizer.main()
        (path,) = Path(folder).glob('*_results_*.json')
        (results,) = json.loads(path.read_text('utf-8'))['results'].values()
    return results['consistency_rate,none']


def task_record(data_set: DataSet, perturbation: str) -> dict[str, Any]:
    """Return the fixture's entry of one of the eight tasks: one evaluation, or one per seed."""
    name = f'score_{perturbation}_robustness_{data_set.name}'
    is_drawn = perturbation == 'non_greedy'
    seeds = SEEDS if is_drawn else (0,)
    macro = 'macro_' if data_set.name == 'mmlu_pro' else ''

    evaluations = []
    accuracy_of_seed = {}
    for seed in seeds:
        loaded = load_tasks(data_set, name)
        results = evaluate(CannedModel(seed), loaded, bootstrap_iters=0)
        evaluations.append(results['samples'])
        accuracy_of_seed[seed] = partial(unrounded, loaded, results['samples'])

    items = []
    variants = list(SEEDS)
    for task, file in zip(loaded['tasks'], files_of(loaded, data_set), strict=True):
        row_numbers = data_set.numbers[file]
        num_prompts = len(evaluations[0][task]) // len(row_numbers)  # of each row
        if not is_drawn:
            key = 'prompt_id' if perturbation == 'prompt' else 'always_same_option'
            variants = [sample['doc'][key] for sample in evaluations[0][task][:num_prompts]]
        for index, number in enumerate(row_numbers):
            prompts_of_row = slice(index * num_prompts, (index + 1) * num_prompts)
            samples = [run[task][prompts_of_row] for run in evaluations]
            item = item_record(samples, data_set.name == 'math')
            items.append({'file': file, 'row': number, **item})

    if is_drawn:
        metric = f'non_greedy_{macro}accuracy'
        by_variant = {seed: accuracy_of(metric) for seed, accuracy_of in accuracy_of_seed.items()}
        rate = summarized_rate(data_set, evaluations)
    else:
        accuracy_of = accuracy_of_seed[0]
        metric = f'{{}}_{macro}accuracy' if perturbation == 'prompt' else f'per_option_{macro}accuracy_{{}}'
        by_variant = {variant: accuracy_of(metric.format(variant)) for variant in variants}
        rate = results['results'][name][f'{RATES[perturbation]},none']

    record = {'name': name, 'variants': variants, 'items': items, 'accuracies': by_variant, 'consistency_rate': rate}
    num_completions = sum(len(item['correct']) for item in items)
    print(f'{name}: {len(items)} rows, {num_completions} completions', flush=True)
    return record


def files_of(loaded: dict[str, Any], data_set: DataSet) -> list[str]:
    """Return the data file of each task."""
    configs = [task.config for task in loaded['tasks'].values()]
    return [data_set.sources[config.dataset_path, config.dataset_name or 'default'] for config in configs]


def data_set_record(data_set: DataSet, root: Path) -> dict[str, Any]:
    """Return the fixture of one dataset."""
    data_files = {file: digest((root / file).read_bytes()) for file in data_set.numbers}
    prompt_files = sorted((SCORE_TASKS / data_set.folder).glob('*.json'))
    assets = {path.name: digest(path.read_bytes()) for path in prompt_files}
    with mock.patch.object(datasets, 'load_dataset', data_set.load_dataset), watched_time():
        tasks = [task_record(data_set, perturbation) for perturbation in data_set.perturbations]
    return {
        'dataset': data_set.name,
        'versions': versions('lm_eval', 'datasets', 'sympy', 'antlr4-python3-runtime'),
        'sources': {**data_files, **assets},
        'tasks': tasks,
    }


@contextlib.contextmanager
def watched_time() -> Iterator[None]:
    """Fail if a symbolic comparison takes so long that a slower machine might abort it."""
    symbolic_equal = math_grader.symbolic_equal

    def timed(prediction: Any, reference: Any, *arguments: Any) -> bool:
        started = time.monotonic()
        equal = symbolic_equal(prediction, reference, *arguments)
        seconds = time.monotonic() - started
        assert seconds < LONGEST_SECONDS, f'{prediction!r} and {reference!r} took {seconds:.1f} s to compare'
        return equal

    with mock.patch.object(math_grader, 'symbolic_equal', timed):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--score-root', type=Path, default=SCORE_ROOT)
    parser.add_argument('--out', type=Path, default=FIXTURES / 'score')
    parser.add_argument('--datasets', nargs='*', choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    for name in options.datasets:
        fixture = data_set_record(read_data_set(name, options.score_root), options.score_root)
        write_fixture(options.out / f'{name}.json', fixture, limit=LIMIT)


if __name__ == '__main__':
    main()
