"""The journal of an evaluation on all ranks: read by one, known to all, each writing what it finishes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.utils import dist

from llmfoundry_gauntlet.errors import RecordError
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
from llmfoundry_gauntlet.types import ItemKey, ItemResult, ScoreRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """The treatment of records that an earlier attempt left in the folder.

    It is used again, if it is `wanted`. Where it is of another evaluation that is an error if it is `required`, else it
    is replaced. `repair` drops damaged lines.
    """

    wanted: bool = True
    required: bool = False
    repair: bool = False


class SharedJournal:
    """The journal of one evaluation, from `read` over `begin` to `close`.

    `identity` is what must agree for items to be used again; the plan adds to it. `done` and `suspects` are the items
    of earlier attempts, known on all ranks; `results` is what they gave, on the first rank alone.
    """

    def __init__(self, folder: Path, identity: Identity, resuming: Resuming) -> None:
        self.folder = folder
        self.identity = dict(identity)
        self.resuming = resuming
        self.results: dict[ItemKey, ItemResult] = {}
        self.done: frozenset[ItemKey] = frozenset()
        self.suspects: dict[ItemKey, ItemResult] = {}
        self.planned: Identity = {}  # what the plan of an earlier attempt was made of
        self._journal: Journal | None = None

    def read(self) -> None:
        """Finds what an earlier attempt has finished. Raises RecordError, on all ranks."""
        found: Finished | None = None
        problem: RecordError | None = RecordError(f'{self.folder}: what is there could not be read by the first rank')
        try:
            if dist.get_global_rank() == 0:
                found, problem = self._found()
        finally:  # the other ranks wait to be told, whatever comes
            shared: list[Any] = [problem, found and (found.identity, list(found.results), dict(found.suspects))]
            dist.broadcast_object_list(shared, src=0)
        if shared[0] is not None:
            raise shared[0]
        if shared[1] is not None:
            self.planned, keys, self.suspects = shared[1]
            self.done = frozenset(keys)
            self.results = {} if found is None else dict(found.results)

    def _found(self) -> tuple[Finished | None, RecordError | None]:
        """On the first rank: what there is, and why it cannot be used."""
        try:
            return self._read(), None
        except RecordError as error:
            return None, error
        except OSError as error:
            problem = RecordError(f'{self.folder}: what is there cannot be read: {error}')
            if self.resuming.required:
                return None, problem
            log.warning('%s; nothing of it is used', problem)
            return None, None

    def _read(self) -> Finished | None:
        """On the first rank: what there is, None where there is nothing that can be used."""
        if not self.resuming.wanted:
            remove_journal(self.folder)
            return None
        try:
            found = read_journal(self.folder, repair=self.resuming.repair)
            if found is None and (self.folder / RESULTS).is_file():
                found = finished_run(self.folder)
                if found is None:
                    raise RecordError(
                        f'{self.folder / RESULTS}: is of an evaluation that cannot be gone on with, as answers from '
                        'elsewhere; give another folder, or --overwrite to replace it'
                    )
            if found is not None:
                place = self.folder / (JOURNAL if (self.folder / JOURNAL).is_dir() else RESULTS)
                check_identity({name: found.identity.get(name) for name in self.identity}, self.identity, place)
        except RecordError as error:
            if self.resuming.required:
                raise
            log.info('%s; it is replaced', error)
            found = None
        if found is None:
            remove_journal(self.folder)
        return found

    def begin(self, plan: Identity) -> None:
        """Starts this rank's file, once it is known how items are computed. Raises RecordError, on all ranks."""
        self.identity.update(plan)
        if self.planned:
            try:
                check_identity(self.planned, self.identity, self.folder)
            except OtherEvaluationError:
                if self.resuming.required:
                    raise
                self.done, self.suspects, self.results = frozenset(), {}, {}
                if dist.get_global_rank() == 0:
                    remove_journal(self.folder)
        attempt = [next_attempt(self.folder) if dist.get_global_rank() == 0 else 0]
        dist.broadcast_object_list(attempt, src=0)
        self._journal = Journal(self.folder, self.identity, attempt=attempt[0], rank=dist.get_global_rank())
        if self.done:
            log.info(
                '%s: %d items were finished by an earlier attempt, and are used again', self.folder, len(self.done)
            )

    def add(self, results: Mapping[ItemKey, ItemResult], *, suspect: bool = False) -> None:
        """Keeps finished items."""
        if self._journal is not None and results:
            self._journal.add(results.values(), suspect=suspect)

    @property
    def problem(self) -> str | None:
        """Return why this rank's items are not kept, where they are not."""
        return None if self._journal is None else self._journal.problem

    def close(self) -> None:
        """Nothing comes after."""
        if self._journal is not None:
            self._journal.close()


def identity_of(prepared: PreparedEvaluation, *, items: str, model: str, precision: str) -> Identity:
    """Return what must agree with an earlier attempt: digests of items and weights, settings."""
    settings = prepared.data.settings
    return {
        'model': model,
        'precision': precision,
        'semantics': settings.semantics,
        'fewshot': settings.fewshot,
        'truncation': settings.cut,
        'max_seq_len': prepared.max_seq_len,
        'items': items,
    }


def digest_of_items(prepared: PreparedEvaluation) -> str:
    """16 hexadecimal digits of all that is asked: tasks, prompts, token ids."""
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
