"""What the Gauntlet costs on 8 to 512 GPUs: a model of it, out of real rows and stated assumptions.

    make bench PART=scaling [QUICK=1]   (or: .venv/bin/python scripts/bench/scaling.py [options])

Nothing here runs on a GPU. Measured are the tokens of every task, the batches of every plan and who has them, the
seconds of planning, the bytes of results, and one evaluation on this machine's processor, against which the model is
checked. The rest follows from what is assumed of a GPU and its links (`Device`), and of models (`SHAPES`); both are
printed. Tables are in Markdown; docs/scaling.md has them with words. Results are in runs/bench/scaling.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from budget import gauntlet_over
from planning import DATA_ROOTS, OUT, tokenizer_folder
from scaling_check import check, check_lines
from scaling_model import SHAPES, Device, Shape, forward_flops, free_bytes, pool_seconds
from scaling_model import replies_seconds as replies_of
from scaling_model import scoring_seconds as scoring_of
from scaling_precision import assumed_accuracies, precision_in
from scaling_summary import (
    Evaluated,
    Fitted,
    PoolRow,
    evaluated_table,
    link_table,
    memory_table,
    pool_table,
    precision_table,
    shared_table,
    work_table,
)
from scaling_work import (
    Shared,
    TaskWork,
    gauntlet_entries,
    pool_work,
    prepare,
    share_out,
    task_works,
    with_pools,
)
from transformers import AutoTokenizer

from llmfoundry_gauntlet.config.specs import GauntletSpec
from llmfoundry_gauntlet.config.yaml_files import read_yaml
from llmfoundry_gauntlet.engine.budget import LEAST_BATCHES, LEAST_TOKENS, MOST_TOKENS, tokens_in_memory
from llmfoundry_gauntlet.evaluation import PlannedEvaluation, PreparedEvaluation, plan_evaluation
from llmfoundry_gauntlet.suite import load_suite

RANKS = (8, 64, 512)
SHARED_RANKS = (2, 8, 64, 512)
NODE = 8  # ranks that share weights under FSDP's HYBRID_SHARD
NUM_POOLS = (32, 64, 128, 256)  # the first as the engine has it
TRAINED_ON = {'125M': 8, '1B': 16, '7B': 64, '70B': 512}
TOKENS_PER_PARAMETER = 20  # of a training run
EVALUATIONS = 20  # of a training run
SHARE_OF_TRAINING = 0.01
SECONDS = (1, 10, 100, 1000)
SCORE_YAMLS = ('yamls/score/mmlu_pro.yaml', 'yamls/score/agieval.yaml', 'yamls/score/math.yaml')


@dataclass(frozen=True, slots=True)
class Work:
    """Prepared items, and what is worked out of them once for each budget and number of ranks."""

    prepared: PreparedEvaluation
    written_share: float
    plans: dict[int, PlannedEvaluation] = field(default_factory=dict)
    plan_seconds: dict[int, float] = field(default_factory=dict)
    shares: dict[tuple[int, int], Shared] = field(default_factory=dict)
    tasks: dict[int, list[TaskWork]] = field(default_factory=dict)

    def plan(self, tokens_per_batch: int) -> PlannedEvaluation:
        """The plan of this budget."""
        if tokens_per_batch not in self.plans:
            start = time.perf_counter()
            self.plans[tokens_per_batch] = plan_evaluation(self.prepared, tokens_per_batch=tokens_per_batch)
            self.plan_seconds[tokens_per_batch] = time.perf_counter() - start
        return self.plans[tokens_per_batch]

    def shared(self, tokens_per_batch: int, num_ranks: int) -> Shared:
        """It on so many ranks."""
        key = tokens_per_batch, num_ranks
        if key not in self.shares:
            planned = self.plan(tokens_per_batch)
            pools = {id(pool): pool_work(pool, self.written_share) for pool in planned.pools}
            self.shares[key] = share_out(planned, num_ranks, pools)
        return self.shares[key]

    def by_task(self, tokens_per_batch: int) -> list[TaskWork]:
        """The work of every task by itself."""
        if tokens_per_batch not in self.tasks:
            self.tasks[tokens_per_batch] = task_works(self.prepared, tokens_per_batch, self.written_share)
        return self.tasks[tokens_per_batch]


def budget_of(shape: Shape, device: Device, num_sharing: int, num_ranks: int, num_tokens: int) -> int | None:
    """`tokens_per_batch: auto` in the memory that training leaves; None where the model does not fit."""
    tokens = tokens_in_memory(config_of(shape), int(free_bytes(shape, device, num_sharing)), writes=True)
    if tokens < 2:
        return None
    most = min(MOST_TOKENS['cuda'], tokens)
    while most // 2 >= LEAST_TOKENS['cuda'] and LEAST_BATCHES * most * num_ranks > num_tokens:
        most //= 2
    return most


@cache
def config_of(shape: Shape) -> Any:
    """As transformers describes it."""
    return shape.config()


def fit(work: Work, shape: Shape, device: Device, num_ranks: int, num_sharing: int) -> Fitted | None:
    """How an evaluation of this model is batched where so many ranks share its weights, None where it does not fit."""
    budget = budget_of(shape, device, num_sharing, num_ranks, work.prepared.num_tokens)
    if budget is None:
        return None
    return Fitted(shape=shape, num_ranks=num_ranks, num_sharing=num_sharing, tokens_per_batch=budget)


def evaluate(work: Work, fitted: Fitted, device: Device) -> Evaluated:
    """The seconds of an evaluation."""
    shared = work.shared(fitted.tokens_per_batch, fitted.num_ranks)
    scoring, waiting = scoring_of(shared.forwards, fitted.shape, device, fitted.num_sharing)
    replies, idle = replies_of(shared.pools, fitted.shape, device, fitted.num_sharing)
    return Evaluated(
        fitted=fitted,
        num_forwards=shared.forwards.tokens.shape[1],
        scoring_seconds=scoring,
        scoring_waiting=waiting,
        replies_seconds=replies,
        replies_waiting=idle,
    )


def all_fits(work: Work, device: Device, ranks: Sequence[int]) -> list[Fitted]:
    """Every model on so many ranks, in every way in which it fits."""
    ways = ((shape, one, sharing) for shape in SHAPES for one in ranks for sharing in dict.fromkeys((1, NODE, one)))
    found = (fit(work, shape, device, one, sharing) for shape, one, sharing in ways)
    return [one for one in found if one is not None]


def first_fit(work: Work, shape: Shape, device: Device, num_ranks: int) -> Fitted:
    """With the weights shared by as few ranks as can be: none, those of a node, all."""
    found = (fit(work, shape, device, num_ranks, sharing) for sharing in (1, NODE, num_ranks))
    return next(one for one in found if one is not None)


def item_seconds(work: Work, fitted: Fitted, device: Device) -> dict[str, float]:
    """By how many seconds an item of each task makes the evaluation longer, if all take as many as the evaluation.

    Waiting and links are spread over scoring and over replies in proportion to their work.
    """
    evaluated = evaluate(work, fitted, device)
    tasks = work.by_task(fitted.tokens_per_batch)
    rate = device.flops * device.share_of_flops
    scored = {
        task.key: float(forward_flops(fitted.shape, task.run_tokens, task.pairs, task.reads)) / rate
        for task in tasks
        if not task.pools
    }
    written = {
        task.key: sum(pool_seconds(pool, fitted.shape, device)[0] for pool in task.pools)
        for task in tasks
        if task.pools
    }
    items = {task.key: task.items for task in tasks}
    found = {}
    for seconds, whole in ((scored, evaluated.scoring_seconds), (written, evaluated.replies_seconds)):
        factor = whole / sum(seconds.values()) if seconds else 0.0
        found.update({key: one * factor / items[key] for key, one in seconds.items()})
    return found


def interval_seconds(shape: Shape, device: Device, num_ranks: int) -> float:
    """Seconds of training between two evaluations: six operations a parameter and a token."""
    flops = 6.0 * shape.parameters * TOKENS_PER_PARAMETER * shape.parameters / EVALUATIONS
    return flops / (num_ranks * device.flops * device.share_of_flops)


def pool_rows(work: Work, shape: Shape, device: Device) -> list[PoolRow]:
    """The seconds of replies in pools that are more and smaller than the engine's."""
    planned = work.plan(MOST_TOKENS['cuda'])
    found = []
    for num_pools in NUM_POOLS:
        changed = Work(work.prepared, work.written_share, plans={MOST_TOKENS['cuda']: with_pools(planned, num_pools)})
        shared = [changed.shared(MOST_TOKENS['cuda'], ranks) for ranks in RANKS[:2]]
        found.append(
            PoolRow(
                num_pools=len(changed.plan(MOST_TOKENS['cuda']).pools),
                above_mean=tuple(one.pools_above_mean for one in shared),
                seconds=tuple(replies_of(one.pools, shape, device)[0] for one in shared),
            )
        )
    return found


def precisions(work: Work, gauntlet: GauntletSpec, device: Device, above_chance: float) -> list[dict[str, Any]]:
    """For each size: what 1 % of training buys, and what some times do."""
    found = []
    items = {task.key: task.items for task in work.by_task(MOST_TOKENS['cuda'])}
    accuracies = assumed_accuracies(gauntlet, above_chance)
    for shape in SHAPES:
        fitted = first_fit(work, shape, device, TRAINED_ON[shape.name])
        seconds = item_seconds(work, fitted, device)
        share = SHARE_OF_TRAINING * interval_seconds(shape, device, fitted.num_ranks)
        whole = evaluate(work, fitted, device)
        for name, budget in (('1 %', share), *((f'{one} s', one) for one in SECONDS), ('all', whole.seconds + 1)):
            fits = precision_in(budget, gauntlet, seconds, items, accuracies)
            found.append(
                {'size': shape.name, 'ranks': fitted.num_ranks, 'time': name, 'budget': budget, **asdict(fits)}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data-root', help='folder with the task files')
    parser.add_argument('--score-root', default='../shared/data', help="folder with SCORE's files below score/")
    parser.add_argument('--quick', action='store_true', help='the rows that come with the project alone')
    parser.add_argument('--share-of-flops', type=float, default=Device().share_of_flops, help='that a GPU reaches')
    parser.add_argument('--written-share', type=float, default=0.5, help='of the longest replies that is written')
    parser.add_argument('--above-chance', type=float, default=0.3, help='share of what there is that models have right')
    options = parser.parse_args()
    data_root = options.data_root or next(root for root in DATA_ROOTS[options.quick :] if Path(root).is_dir())
    device = replace(Device(), share_of_flops=options.share_of_flops)
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder(data_root)))
    entries = gauntlet_entries(data_root)
    settings = {'tasks': entries, 'data_root': data_root}
    tokens = OUT / 'planning' / 'scaling'
    prepare(settings, tokenizer, tokens)
    prepared, host = prepare(settings, tokenizer, tokens)
    work = Work(prepared, options.written_share)
    print(f'{len(entries)} tasks in {data_root}\n')
    print(*work_table(work.by_task(MOST_TOKENS['cuda'])), sep='\n')
    checked = check(data_root, tokenizer)
    print('', *check_lines(checked), sep='\n')
    record = report(work, device, load_suite(entries, gauntlet_over(entries)).gauntlet, options.above_chance)
    host = {**host, 'plan': work.plan_seconds, 'bytes_of_results': checked.bytes_per_item * len(prepared.items)}
    host['seconds_to_read_results'] = checked.unpickle_seconds_per_item * len(prepared.items)
    print('', 'of every rank:', json.dumps(host, indent=2), sep='\n')
    record = {'data_root': data_root, 'device': asdict(device), 'options': vars(options), 'host': host, **record}
    score = score_work(options.score_root, tokenizer, options.written_share)
    if score is None:
        print(f'\nno rows of SCORE in {options.score_root}')
    record = {**record, 'check': asdict(checked), 'score': None if score is None else report_score(score, device)}
    (OUT / 'scaling.json').write_text(json.dumps(record, indent=2) + '\n', 'utf-8')


def score_work(root: str, tokenizer: Any, written_share: float) -> Work | None:
    """SCORE as the shipped YAML files ask for it, None where its rows are not there."""
    if not Path(root, 'score/mmlu_pro_test.jsonl').is_file():
        return None
    entries = [entry for path in SCORE_YAMLS for entry in read_yaml(path)['score']]
    prepared, _ = prepare({'score': entries, 'data_root': root}, tokenizer, None)
    return Work(prepared, written_share)


def report_score(work: Work, device: Device) -> list[dict[str, Any]]:
    """Prints what SCORE adds to an evaluation, and returns it."""
    print('', *work_table(work.by_task(MOST_TOKENS['cuda'])), sep='\n')
    evaluated = [evaluate(work, first_fit(work, shape, device, TRAINED_ON[shape.name]), device) for shape in SHAPES]
    print('', *evaluated_table(evaluated), sep='\n')
    return [one.record() for one in evaluated]


def report(work: Work, device: Device, gauntlet: GauntletSpec, above_chance: float) -> dict[str, Any]:
    """Prints all that follows from the work, and returns it."""
    shared = [work.shared(budget, ranks) for budget in (MOST_TOKENS['cuda'], 4096) for ranks in SHARED_RANKS]
    print('', *shared_table(shared), sep='\n')
    fits = all_fits(work, device, RANKS)
    evaluated = [evaluate(work, fitted, device) for fitted in fits]
    print('', 'within training:', '', *evaluated_table(evaluated), sep='\n')
    by_itself = replace(device, state_bytes=device.number_bytes)
    alone = [evaluate(work, fitted, by_itself) for fitted in all_fits(work, by_itself, RANKS[:2])]
    print('', 'by itself:', '', *evaluated_table(alone), sep='\n')
    print('', *link_table(SHAPES, device), sep='\n')
    of_pools = pool_rows(work, SHAPES[1], device)
    print('', *pool_table(of_pools, SHAPES[1], RANKS[:2]), sep='\n')
    usual = [first_fit(work, shape, device, TRAINED_ON[shape.name]) for shape in SHAPES]
    print('', *memory_table([(one, work.plan(one.tokens_per_batch).pools) for one in usual], device), sep='\n')
    rows = precisions(work, gauntlet, device, above_chance)
    print('', *precision_table(rows), sep='\n')
    records = {'evaluated': [one.record() for one in evaluated], 'by_itself': [one.record() for one in alone]}
    records['pools'] = [asdict(row) for row in of_pools]
    return {**records, 'precision': rows, 'shared': shared_records(shared)}


def shared_records(shared: Sequence[Shared]) -> list[dict[str, Any]]:
    """Plans on ranks in numbers."""
    return [
        {'ranks': one.num_ranks, 'tokens_per_batch': one.tokens_per_batch, 'above_mean': one.above_mean}
        for one in shared
    ]


if __name__ == '__main__':
    main()
