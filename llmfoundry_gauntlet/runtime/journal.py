"""The journal of an evaluation across ranks: each writes its own items, and the first of each node reads its folder.

Nodes may share the folder or have one each.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from llmfoundry_gauntlet.errors import RecordError, as_given, plural
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation
from llmfoundry_gauntlet.results.files import RESULTS
from llmfoundry_gauntlet.results.journal import (
    JOURNAL,
    Finished,
    Identity,
    Journal,
    OtherEvaluationError,
    check_identity,
    next_attempt,
    read_journal,
    remove_journal,
)
from llmfoundry_gauntlet.results.runs import finished_run
from llmfoundry_gauntlet.runtime.distributed import gather, global_rank, local_rank, raised_on_all_ranks, sum_over_ranks
from llmfoundry_gauntlet.types import ItemKey, ItemResult, ScoreRequest

CHUNK = {'cpu': 1 << 14, 'cuda': 1 << 24}  # elements per step: fits in a CPU's cache, or keeps a GPU busy
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes
log = logging.getLogger(__name__)


def model_fingerprint(model: torch.nn.Module, *, is_sharded: bool) -> str:
    """Return a digest of a model's parameters, 16 hexadecimal digits. With `is_sharded` each rank holds a shard.

    The bits of each weight are read as an integer x, and x, x^2 and x^3 are summed modulo 2^64. This is exact,
    independent of order and device, and needs no copy of the model. Padding adds 0.
    """
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device('cpu')
    sums = torch.zeros(3, dtype=torch.int64, device=device)
    for parameter in parameters:
        local = parameter.detach()
        local = local.to_local() if hasattr(local, 'to_local') else local
        bits = local.contiguous().view(-1).view(INTEGERS[local.element_size()])
        for chunk in bits.split(CHUNK.get(device.type, CHUNK['cuda'])):
            values = chunk.to(torch.int64)
            squares = values * values
            sums += torch.stack([values.sum(), squares.sum(), (squares * values).sum()])
    if is_sharded:
        sum_over_ranks(sums)
    return hashlib.sha256(repr(sums.tolist()).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """The treatment of records that an earlier attempt left in the folder.

    They are reused if `wanted`. Records of a different evaluation are an error if `required`, else they are replaced.
    `repair` drops damaged lines of the journal.
    """

    wanted: bool = True
    required: bool = False
    repair: bool = False


class SharedJournal:
    """The journal of one evaluation. Call `read`, then `begin`, `add` as items finish, and `close`.

    Items are reused only if `identity` matches; `begin` adds the plan to it. On all ranks `done` has the keys of items
    that earlier attempts finished, and `suspects` their non-finite results; one rank has each item in `results`. Only
    rank 0 has the time `started` of the first attempt, and the `earlier_seconds` that others took.
    """

    def __init__(self, folder: Path, identity: Identity, resuming: Resuming) -> None:
        self.folder = folder
        self.identity = dict(identity)
        self.resuming = resuming
        self.started = self._started = time.time()
        self.earlier_seconds = 0.0
        self.results: dict[ItemKey, ItemResult] = {}
        self.done: frozenset[ItemKey] = frozenset()
        self.suspects: dict[ItemKey, ItemResult] = {}
        self.planned: Identity = {}  # identity of the earlier attempt, including its plan
        self._journal: Journal | None = None

    def read(self) -> None:
        """Read the items that an earlier attempt finished. Raise RecordError, on all ranks."""
        read: Finished | None = None
        with raised_on_all_ranks():
            if local_rank() == 0:
                read = self._read()
        of_ranks: list[Any] = gather(read and (read.identity, list(read.results), dict(read.suspects)))
        for rank, part in enumerate(of_ranks):
            if part is None:
                continue
            is_own = rank == global_rank()
            planned, keys, suspects = part
            self.planned = self.planned or planned
            if planned == self.planned:
                # Of a folder that nodes share each reads the same items, and only the first takes the results.
                if read is not None and is_own:
                    self.results = {key: read.results[key] for key in keys if key not in self.done}
                self.done |= frozenset(keys)
                self.suspects = {**suspects, **self.suspects}
            elif is_own:
                remove_journal(self.folder)  # an attempt with another plan left it on this node
        if read is not None:
            self.started, self.earlier_seconds = read.started or self._started, read.seconds

    def _read(self) -> Finished | None:
        """Return the records of an earlier attempt, None if none can be used. Raise RecordError if they must be."""
        finished: Finished | None = None
        try:
            if self.resuming.wanted:
                finished = self._finished()
        except (RecordError, OSError) as error:
            reason = f'{self.folder}: the records cannot be read: {error}'
            problem = error if isinstance(error, RecordError) else RecordError(reason)
            if self.resuming.required:
                raise problem from error
            log.info('%s; the records are replaced', problem)
        if finished is None:
            remove_journal(self.folder)
        return finished

    def _finished(self) -> Finished | None:
        """Return the records of an earlier attempt, None if there are none. Raise RecordError or OSError."""
        path = self.folder / JOURNAL
        finished = read_journal(self.folder, repair=self.resuming.repair)
        if finished is None and (self.folder / RESULTS).is_file():
            path = self.folder / RESULTS
            finished = finished_run(self.folder)
            if finished is None:
                raise RecordError(
                    f'{path}: this evaluation cannot be resumed, as it scored external answers; give another folder, '
                    f'or {as_given("overwrite")} to replace it'
                )
        if finished is not None:
            recorded = {name: finished.identity.get(name) for name in self.identity}
            check_identity(recorded, self.identity, path)
        return finished

    def begin(self, plan: Identity) -> None:
        """Add the plan to the identity and open this rank's file. Raise RecordError, on all ranks."""
        self.identity.update(plan)
        if self.planned:
            try:
                check_identity(self.planned, self.identity, self.folder)
            except OtherEvaluationError:
                if self.resuming.required:
                    raise
                self.done, self.suspects, self.results = frozenset(), {}, {}
                self.started, self.earlier_seconds = self._started, 0.0
                if local_rank() == 0:
                    remove_journal(self.folder)
        attempt = max(gather(next_attempt(self.folder) if local_rank() == 0 else 0))
        rank, started = global_rank(), self._started
        self._journal = Journal(self.folder, self.identity, attempt=attempt, rank=rank, started=started)
        if self.done:
            log.info('%s: reusing %s of an earlier attempt', self.folder, plural(self.num_reused, 'finished item'))

    def add(self, results: Mapping[ItemKey, ItemResult], *, suspect: bool = False) -> None:
        """Write the results of finished items."""
        if self._journal is not None and results:
            self._journal.add(results.values(), suspect=suspect)

    @property
    def num_reused(self) -> int:
        """Return the number of items that earlier attempts finished, right generations not counted."""
        return sum(not key.is_gold for key in self.done)

    @property
    def problem(self) -> str | None:
        """Return why this rank's items are not written; None if they are."""
        return None if self._journal is None else self._journal.problem

    def close(self) -> None:
        """Close this rank's file."""
        if self._journal is not None:
            self._journal.close()


def identity_of(prepared: PreparedEvaluation, *, items: str, model: str, precision: str) -> Identity:
    """Return what must match an earlier attempt to resume it: digests of items and weights, and settings."""
    settings = prepared.data.settings
    return {
        'model': model,
        'precision': precision,
        'semantics': settings.semantics,
        'fewshot': settings.fewshot,
        'truncation': settings.effective_truncation,
        'max_seq_len': prepared.max_seq_len,
        'items': items,
        **({} if settings.time_budget is None else {'time_budget': settings.time_budget}),
        **settings.given_chat,
        **settings.given_markers,
    }


def digest_of_items(prepared: PreparedEvaluation) -> str:
    """Return a digest of all items (tasks, prompts, token ids), 16 hexadecimal digits."""
    digest = hashlib.sha256(repr([task.keys for task in prepared.tasks.values()]).encode('utf-8', 'surrogatepass'))
    for key, item in prepared.items.items():
        digest.update(f'{key}{item.prompt_sha256}'.encode('utf-8', 'surrogatepass'))
        request = item.request
        if isinstance(request, ScoreRequest):
            contexts = {id(context): context for context in request.contexts}
            for ids in (*contexts.values(), *request.continuations):
                digest.update(ids.tobytes())
        else:
            digest.update(request.context.tobytes())
    return digest.hexdigest()[:16]
