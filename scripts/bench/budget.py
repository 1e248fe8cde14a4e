"""Trains a tiny model with evaluations under a time budget, and prints the time that they took.

    make bench PART=budget [QUICK=1]

A real Composer run on two ranks with one thread each, on the Gauntlet's real files where they are at hand. For each
budget there is a job of its own, evaluated before the first batch, when it is found out which items fit, and after
every second one. What counts is the time for which training stands still, from the moment at which the callback is
called until it gives back control, records written; its share of the budget is to be within 15 %.

Results are in runs/bench/budget.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OUT = Path('runs/bench/budget')
DATA_ROOTS = ('../shared/data/local_data', 'eval_data')
TASKS = 'yamls/tasks/gauntlet_v0.1.yaml'
GAUNTLET = 'yamls/gauntlets/eval_gauntlet_v0.1.yaml'
BUDGETS = {False: (10, 30), True: (10,)}  # seconds
NUM_RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--quick', action='store_true', help='the smaller budget alone')
    parser.add_argument('--job', type=float, help='be one of the ranks of a job with this budget')
    parser.add_argument('--data-root', default=next(root for root in DATA_ROOTS if Path(root).is_dir()))
    arguments = parser.parse_args()
    if arguments.job is not None:
        job(arguments.job, arguments.data_root)
        return
    if not Path('runs/demo/data/tokenizer').is_dir():
        subprocess.run([sys.executable, 'scripts/make_demo_data.py'], check=True)
    found = {}
    for seconds in BUDGETS[arguments.quick]:
        launcher = [str(Path(sys.executable).parent / 'composer'), '-n', str(NUM_RANKS)]
        command = [*launcher, __file__, '--job', str(seconds), '--data-root', arguments.data_root]
        subprocess.run(command, check=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
        found[seconds] = json.loads((OUT / f'{seconds}.json').read_text())
        print_job(seconds, found[seconds])
    (OUT.parent / 'budget.json').write_text(json.dumps(found, indent=2))


def print_job(seconds: float, evaluations: list[dict[str, Any]]) -> None:
    """A line for each evaluation of a job."""
    print(f'\ntime_budget {seconds:g}s, {evaluations[0]["all_items"]} items at hand')
    for number, one in enumerate(evaluations):
        share = one['seconds'] / seconds
        what = '; finds out which items fit' if number == 0 else ''
        error = one['average_error']
        print(
            f'  evaluation {number}: {one["seconds"]:6.2f} s, {share:6.1%} of the budget, {one["items"]} items'
            f'{"" if error is None else f", average ± {error:.4f}"}{what}'
        )


def job(seconds: float, data_root: str) -> None:
    """One rank of a training run; the first writes what its evaluations took."""
    import torch
    import transformers
    from composer import Callback, Trainer
    from composer.models import HuggingFaceModel
    from composer.utils import dist

    from llmfoundry_gauntlet import EvalGauntlet

    class Clock(Callback):
        """Notes when it is called before and after evaluations."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def note(self, *_: Any) -> None:
            """The time now."""
            self.times.append(time.perf_counter())

        fit_start = note

    class Before(Clock):
        eval_start = Clock.note

    class After(Clock):
        eval_end = Clock.note

    dist.initialize_dist('cpu', timeout=600.0)
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained('runs/demo/data/tokenizer')
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=512,
    )
    model = transformers.LlamaForCausalLM(config)
    tasks = tasks_at_hand(data_root)
    gauntlet = EvalGauntlet(
        tasks=tasks,
        gauntlet=gauntlet_over(tasks),
        data_root=data_root,
        interval=['first', '2ba'],
        time_budget=f'{seconds:g}s',
        save_folder=str(OUT / f'records_{seconds:g}'),
    )
    before, after = Before(), After()
    evaluations: list[dict[str, Any]] = []

    class Reader(Callback):
        """Notes what an evaluation has found."""

        def note(self, *_: Any) -> None:
            """Its size and precision."""
            found = gauntlet.evaluation
            averages = found.composites.averages.values()
            evaluations.append(
                {
                    'items': sum(score.num_items for score in found.scores.values()),
                    'all_items': len(gauntlet.loader.everything.items),
                    'average_error': next((one.standard_error for one in averages if one.value is not None), None),
                }
            )

        fit_start = eval_end = note

    rows = [{'input_ids': ids, 'labels': ids} for ids in torch.randint(3, len(tokenizer), (8 * NUM_RANKS, 64))]
    trainer = Trainer(
        model=HuggingFaceModel(model, tokenizer=tokenizer),
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=1, sampler=dist.get_sampler(rows)),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        max_duration='7ba',
        device='cpu',
        callbacks=[before, gauntlet, after, Reader()],
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    if dist.get_global_rank() == 0:
        OUT.mkdir(parents=True, exist_ok=True)
        for one, begin, end in zip(evaluations, before.times, after.times, strict=True):
            one['seconds'] = end - begin
        (OUT / f'{seconds:g}.json').write_text(json.dumps(evaluations, indent=2))


def tasks_at_hand(data_root: str) -> list[dict[str, Any]]:
    """The Gauntlet's tasks whose files are there, but those with programs, where compilers alone take 10 s.

    Replies get 64 tokens, as this model does not know how to end one.
    """
    from llmfoundry_gauntlet.config.yaml_files import read_yaml
    from llmfoundry_gauntlet.data.files import locate
    from llmfoundry_gauntlet.errors import DataError

    found = []
    for task in read_yaml(TASKS, [])['icl_tasks']:
        try:
            locate(task['dataset_uri'], data_root)
        except DataError:
            continue
        if task['icl_task_type'] == 'generation_task_with_answers':
            task['generation_kwargs'] = {'max_new_tokens': 64}
        if task['icl_task_type'] != 'code_evaluation':
            found.append(task)
    return found


def gauntlet_over(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """The Gauntlet's categories with the benchmarks that these tasks provide, and the average over them."""
    from llmfoundry_gauntlet.config.yaml_files import read_yaml

    labels = {task['label'] for task in tasks}
    gauntlet = dict(read_yaml(GAUNTLET, [])['eval_gauntlet'], averages=None)
    for category in gauntlet['categories']:
        category['benchmarks'] = [one for one in category['benchmarks'] if one['name'] in labels]
    gauntlet['categories'] = [category for category in gauntlet['categories'] if category['benchmarks']]
    return gauntlet


if __name__ == '__main__':
    main()
