"""Record items as they finish in a journal, so that an interrupted evaluation can be resumed.

Every rank appends to its own file, and a resumed evaluation starts new files. A line is the number of bytes of its
payload, 16 hexadecimal digits of the payload's SHA-256, and the payload: first the identity of the evaluation, then one
item per line. The last line of a file may be incomplete; any other invalid line means that the file is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from llmfoundry_gauntlet.errors import RecordError, as_given
from llmfoundry_gauntlet.results.samples import parse_sample, sample_line
from llmfoundry_gauntlet.types import ItemKey, ItemResult

log = logging.getLogger(__name__)

JOURNAL = 'journal'
ITEM, SUSPECT = 'item', 'suspect'  # kinds of entries
HEAD = re.compile(rb'([0-9]{1,12}) ([0-9a-f]{16}) ')  # the length and checksum of a line's payload

Identity = Mapping[str, Any]  # items are reused only by an evaluation with an equal identity


class OtherEvaluationError(RecordError):
    """Raised for a journal of another model or other settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The items that an earlier attempt finished.

    `suspects` are items with non-finite numbers in a batch with other items; they are rerun alone. `started` is the
    Unix time of the first attempt, None if unknown; `seconds` is the time of all attempts.
    """

    identity: Identity
    started: float | None = None
    seconds: float = 0.0
    results: Mapping[ItemKey, ItemResult] = field(default_factory=dict)
    suspects: Mapping[ItemKey, ItemResult] = field(default_factory=dict)


class Journal:
    """One rank's journal file in `folder`. After an error `problem` is set and nothing more is written.

    `started` is the Unix time at which the attempt started, by default now.
    """

    def __init__(
        self, folder: Path, identity: Identity, *, attempt: int, rank: int, started: float | None = None
    ) -> None:
        self.path = folder / JOURNAL / f'{attempt:03d}-rank{rank}.jsonl'
        self.problem: str | None = None  # the reason why nothing more is written
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()  # other threads add results of programs while the model runs
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open('xb')
        except OSError as error:
            self._give_up(error)
        self._started = time.time() if started is None else started
        self._write([json.dumps({'identity': dict(identity), 'started': self._started})])

    def add(self, results: Iterable[ItemResult], *, suspect: bool = False) -> None:
        """Append finished items in one write."""
        kind, seconds = SUSPECT if suspect else ITEM, time.time() - self._started
        self._write(
            f'{{"task": {json.dumps(result.key.task)}, "seconds": {seconds:.3f}, "{kind}": {sample_line(result)}}}'
            for result in results
        )

    def close(self) -> None:
        """Close the file after any write in progress."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # flushing the rest may fail on a full disk
                file.close()

    def _write(self, contents: Iterable[str]) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(b''.join(map(line_of, contents)))
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._close()
        self.problem = f'{self.path}: cannot be written ({error}): this evaluation could not be resumed'


def line_of(content: str) -> bytes:
    """Return a journal line with this payload."""
    payload = content.encode('utf-8', 'surrogatepass')
    return b'%d %s %s\n' % (len(payload), hashlib.sha256(payload).hexdigest()[:16].encode(), payload)


def payloads(content: bytes) -> Iterator[bytes | None]:
    """Yield the payload of each line of a file; None for an incomplete or damaged line."""
    place = 0
    while place < len(content):
        payload = payload_at(content, place)
        if payload is None:
            yield None
            # A payload has no raw line feed, so a line may begin after the next one.
            line_feed = content.find(b'\n', place)
            place = len(content) if line_feed == -1 else line_feed + 1
        else:
            start, end = payload
            yield content[start:end] if content[end : end + 1] == b'\n' else None
            place = end + 1


def payload_at(content: bytes, place: int) -> tuple[int, int] | None:
    """Return where the payload of the line at this place starts and ends; None if length and checksum do not fit."""
    head = HEAD.match(content, place)
    if head is None:
        return None
    start = head.end()
    end = start + int(head[1])
    checksum = hashlib.sha256(content[start:end]).hexdigest()[:16].encode()
    return (start, end) if checksum == head[2] else None


def read_journal(folder: Path, *, repair: bool = False) -> Finished | None:
    """Return the content of an evaluation's journal, None if there is none. Raise RecordError.

    An incomplete last line of a file is dropped; other invalid lines are errors, or dropped with `repair`. Duplicate
    items are identical. Items of an attempt are ignored if none of its files has the evaluation's identity.
    """
    attempts: dict[str, Attempt] = {}  # by number, in order
    identity: Identity | None = None
    problems: list[str] = []
    for path in sorted((folder / JOURNAL).glob('*-rank*.jsonl')):
        attempt = attempts.setdefault(path.name.partition('-')[0], Attempt())
        for number, line in entries(path, problems):
            try:
                entry = json.loads(line)
                if 'identity' in entry:
                    identity = identity or entry['identity']
                    check_identity(entry['identity'], identity, path)
                    attempt.begin(entry)
                else:
                    attempt.add(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise RecordError(
                    f'{path}:{number}: is no line of this version: {error!r}; give another folder, or '
                    f'{as_given("overwrite")} to replace it'
                ) from error
    if problems and not repair:
        raise RecordError(
            [f'{problem}; {as_given("repair_journal")} drops it and keeps all else' for problem in problems]
        )
    for problem in problems:
        log.warning('%s: dropped', problem)
    if identity is None:
        return None

    starts: list[float] = []
    results: dict[ItemKey, ItemResult] = {}
    suspects: dict[ItemKey, ItemResult] = {}
    for attempt in attempts.values():
        if attempt.started is not None:  # else its items may be of any model
            starts.append(attempt.started)
            results.update(attempt.results)
            suspects.update(attempt.suspects)
    return Finished(
        identity=identity,
        started=min(starts),
        seconds=sum(attempt.seconds for attempt in attempts.values()),
        results=results,
        suspects=suspects,
    )


@dataclass(slots=True)
class Attempt:
    """The entries of one attempt, of all its ranks; `started` is None unless a file of it has the identity."""

    started: float | None = None
    seconds: float = 0.0  # from its start to its last item
    results: dict[ItemKey, ItemResult] = field(default_factory=dict)
    suspects: dict[ItemKey, ItemResult] = field(default_factory=dict)

    def begin(self, entry: Mapping[str, Any]) -> None:
        """Take the first entry of a file, with the identity. Raise KeyError, TypeError or ValueError."""
        started = float(entry['started'])
        if self.started is None:
            self.started = started

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take the entry of an item. Raise KeyError, TypeError or ValueError."""
        if ITEM in entry:
            result = parse_sample(entry['task'], entry[ITEM])
            self.results[result.key] = result
        else:
            result = parse_sample(entry['task'], entry[SUSPECT])
            self.suspects[result.key] = result
        self.seconds = max(self.seconds, float(entry['seconds']))


def entries(path: Path, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    """Yield valid lines with their numbers; add invalid ones, except an incomplete last one, to `problems`."""
    try:
        lines = list(payloads(path.read_bytes()))
    except OSError as error:
        raise RecordError(f'{path}: cannot be read: {error}') from error
    for number, line in enumerate(lines, 1):
        if line is not None:
            yield number, line
        elif number < len(lines):
            problems.append(f'{path}:{number}: is damaged: its length or checksum does not fit')
        else:
            log.info('%s:%d: the last line is torn, as by a kill; it is left out', path, number)


def check_identity(recorded: Identity, wanted: Identity, place: Path) -> None:
    """Raise OtherEvaluationError with all differences between a journal and the current evaluation."""
    names = {**wanted, **recorded}
    differing = [name for name in names if recorded.get(name) != wanted.get(name)]
    if differing:
        parts = [f'{name} {recorded.get(name)} (now {wanted.get(name)})' for name in differing]
        raise OtherEvaluationError(
            f'{place}: is the journal of another evaluation: {"; ".join(parts)}; give another folder, or '
            f'{as_given("overwrite")} to replace it'
        )


def num_finished(folder: Path) -> int:
    """Return the number of finished items in a journal that may still be written; lines that cannot be read are none.

    Unlike `read_journal` this checks and logs nothing: it is for the message of an interrupted evaluation.
    """
    attempt = Attempt()
    for path in (folder / JOURNAL).glob('*-rank*.jsonl'):
        with contextlib.suppress(OSError):
            for line in filter(None, payloads(path.read_bytes())):
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    attempt.add(json.loads(line))
    return sum(not key.is_gold for key in attempt.results)


def next_attempt(folder: Path) -> int:
    """Return the number of the next attempt; 0 if there is no earlier one or the journal cannot be listed."""
    numbers = []
    with contextlib.suppress(OSError):  # opening a new file will fail too, and Journal reports that
        numbers = [int(path.name.partition('-')[0]) for path in (folder / JOURNAL).glob('[0-9]*-rank*.jsonl')]
    return max(numbers, default=-1) + 1


def remove_journal(folder: Path) -> None:
    """Remove the journal; call it once all its items are in the records."""
    shutil.rmtree(folder / JOURNAL, ignore_errors=True)
