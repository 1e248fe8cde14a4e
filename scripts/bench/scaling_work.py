"""What the Gauntlet asks of a model, counted on the rows that are at hand: by task, and by rank and step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from planning import STAND_INS
from scaling_model import Forwards, PoolWork

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml_files import read_yaml
from llmfoundry_gauntlet.engine import pools
from llmfoundry_gauntlet.engine.assign import assign
from llmfoundry_gauntlet.engine.generation import stream_of
from llmfoundry_gauntlet.engine.plan import PAIRS_PER_TOKEN, Batch
from llmfoundry_gauntlet.engine.pools import Pool, assign_pools, plan_pools
from llmfoundry_gauntlet.evaluation import (
    PlannedEvaluation,
    PreparedEvaluation,
    one_task,
    plan_evaluation,
    prepare_evaluation,
)
from llmfoundry_gauntlet.inputs import load_data
from llmfoundry_gauntlet.prompts.cache import TokenCache
from llmfoundry_gauntlet.prompts.encode import Encoder

TASKS_YAML = 'yamls/tasks/gauntlet_v0.1.yaml'
MAX_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """A task's work. `rows` are its contexts with each of their continuations, or its replies.

    `padded_tokens` are those of all rows at MAX_SEQ_LEN, as llm-foundry runs them, replies left out; `run_tokens`
    those that the engine is given for the task by itself, prompts of replies among them, and `pairs` those in
    attention. `reads` are scored tokens, `reply_tokens` those of all replies at most.
    """

    key: str
    items: int
    rows: int
    prompt_tokens: int
    padded_tokens: int
    run_tokens: int
    pairs: float
    reads: int
    reply_tokens: int
    pools: tuple[PoolWork, ...]


def gauntlet_entries(data_root: str) -> list[dict[str, Any]]:
    """The Gauntlet's tasks whose files are there, or stand-ins for them."""
    found = []
    for entry in read_yaml(TASKS_YAML)['icl_tasks']:
        names = (entry['dataset_uri'], STAND_INS.get(entry['dataset_uri'], entry['dataset_uri']))
        name = next((name for name in names if Path(data_root, name).is_file()), None)
        if name is not None:
            found.append({**entry, 'dataset_uri': name})
    return found


def prepare(
    settings: dict[str, Any], tokenizer: Any, cache: Path | None
) -> tuple[PreparedEvaluation, dict[str, float]]:
    """All items, programs included, which are not run; and the seconds of reading rows and of making token ids."""
    start = time.perf_counter()
    data = load_data(decode_settings(settings), runs_programs=False)
    read = time.perf_counter()
    prepared = prepare_evaluation(data, Encoder(tokenizer), max_seq_len=MAX_SEQ_LEN, cache=TokenCache(cache))
    return prepared, {'read': read - start, 'prepare': time.perf_counter() - read}


def task_works(prepared: PreparedEvaluation, tokens_per_batch: int, written_share: float) -> list[TaskWork]:
    """The work of every task by itself, its replies as long as this share of what they may be."""
    return [task_work(one_task(prepared, key), key, tokens_per_batch, written_share) for key in prepared.tasks]


def task_work(prepared: PreparedEvaluation, key: str, tokens_per_batch: int, written_share: float) -> TaskWork:
    """The work of an evaluation of one task."""
    planned = plan_evaluation(prepared, tokens_per_batch=tokens_per_batch)
    (forwards,) = assign(planned.batches, num_ranks=1)
    scored, asked = prepared.score_requests, prepared.generate_requests
    written = tuple(pool_work(pool, written_share) for pool in planned.pools)
    return TaskWork(
        key=key,
        items=len(prepared.items),
        rows=sum(len(request.continuations) for request in scored) + len(asked),
        prompt_tokens=sum(len(request.contexts[0]) for request in scored) + sum(len(one.context) for one in asked),
        padded_tokens=MAX_SEQ_LEN * sum(len(request.continuations) for request in scored)
        + sum(MAX_SEQ_LEN - request.max_new_tokens for request in asked),
        run_tokens=sum(batch.num_tokens for batch in forwards) + sum(pool.prompt_tokens for pool in written),
        pairs=sum(map(pairs_of, forwards)) + sum(pool.prompt_pairs for pool in written),
        reads=sum(map(reads_of, forwards)),
        reply_tokens=sum(request.max_new_tokens for request in asked),
        pools=written,
    )


def pairs_of(batch: Batch) -> float:
    """Pairs of a query and a key in attention, as the plan counts them."""
    return (batch.cost - batch.num_tokens) * PAIRS_PER_TOKEN


def reads_of(batch: Batch) -> int:
    """Scored tokens."""
    return sum(len(ids) for request in batch.requests for ids in request.continuations)


def pool_work(pool: Pool, written_share: float) -> PoolWork:
    """A pool whose replies have this share of their greatest length; prompts count as they are run in a stream."""
    prompts = {request.context.tobytes(): request.context for request in pool.requests}
    stream, _ = stream_of(list(prompts.values())) if prompts else (None, None)
    return PoolWork(
        prompt_tokens=0 if stream is None else len(stream.tokens),
        prompt_pairs=0.0 if stream is None else float(np.sum(stream.depths + 1.0)),
        prompts=tuple(len(request.context) for request in pool.requests),
        replies=tuple(max(1, round(written_share * request.max_new_tokens)) for request in pool.requests),
        num_rows=pool.num_rows,
        tokens_per_batch=pool.tokens_per_batch,
    )


def forwards_of(ranks: Sequence[Sequence[Batch]]) -> Forwards:
    """The numbers of all forwards."""
    return Forwards(
        tokens=np.array([[batch.num_tokens for batch in mine] for mine in ranks], float),
        pairs=np.array([[pairs_of(batch) for batch in mine] for mine in ranks], float),
        reads=np.array([[reads_of(batch) for batch in mine] for mine in ranks], float),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A plan on some ranks. `above_mean` is what the busiest rank's tokens are above the mean, or its pools' costs.

    `waiting` is what the dearest forwards of all steps cost together above the mean of ranks, as the plan has costs.
    """

    num_ranks: int
    tokens_per_batch: int
    forwards: Forwards
    pools: list[list[PoolWork]]
    above_mean: float
    pools_above_mean: float
    waiting: float
    assign_seconds: float


def share_out(planned: PlannedEvaluation, num_ranks: int, works: dict[int, PoolWork]) -> Shared:
    """A plan's batches and pools on so many ranks; `works` has what is known of pools by their id."""
    start = time.perf_counter()
    ranks = assign(planned.batches, num_ranks=num_ranks)
    seconds = time.perf_counter() - start
    forwards = forwards_of(ranks)
    tokens = forwards.tokens.sum(axis=1)
    costs = forwards.tokens + forwards.pairs / PAIRS_PER_TOKEN
    shares = assign_pools(planned.pools, num_ranks=num_ranks)
    pool_costs = [sum(pool.cost for pool in mine) for mine in shares]
    empty = PoolWork(prompt_tokens=0, prompt_pairs=0, prompts=(), replies=(), num_rows=1, tokens_per_batch=1)
    return Shared(
        num_ranks=num_ranks,
        tokens_per_batch=planned.tokens_per_batch,
        forwards=forwards,
        pools=[[works.get(id(pool), empty) for pool in mine] for mine in shares],
        above_mean=above_mean(tokens),
        pools_above_mean=above_mean(pool_costs),
        waiting=float(costs.max(axis=0).sum() / costs.mean(axis=0).sum() - 1) if costs.size else 0.0,
        assign_seconds=seconds,
    )


def above_mean(work: Any) -> float:
    """What the busiest rank's work is above the mean of ranks, as a share of it; 0 where there is none."""
    return float(max(work) / np.mean(work) - 1) if any(work) else 0.0


def with_pools(planned: PlannedEvaluation, num_pools: int) -> PlannedEvaluation:
    """The plan with replies in as many pools, where there are that many requests."""
    before = pools.MOST_POOLS, pools.LEAST_POOL
    pools.MOST_POOLS, pools.LEAST_POOL = num_pools, 1
    try:
        found = plan_pools(planned.generate_requests, tokens_per_batch=planned.tokens_per_batch)
    finally:
        pools.MOST_POOLS, pools.LEAST_POOL = before
    return replace(planned, pools=tuple(found))
