"""Claims on checkpoints: of all watchers one evaluates, and what a dead one has claimed is taken over."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import object_store
import pytest
from object_store import S3Server

from llmfoundry_gauntlet.composer.claims import DAMAGED, DONE, RELEASED, RUNNING, ClaimBoard, Heartbeat
from llmfoundry_gauntlet.composer.stores import Folder, open_folder
from llmfoundry_gauntlet.errors import ModelError

s3_server = object_store.s3_server

NAME = 'deep/ep0-ba2-rank0.pt'


@pytest.fixture(params=['disk', 's3'])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == 'disk':
        return open_folder(str(tmp_path / '.gauntlet'))
    server: S3Server = request.getfixturevalue('s3_server')
    return open_folder(server.uri('checkpoints/.gauntlet'))


def board(folder: Folder, *, expires: float = 60.0, digest: str = 'questions') -> ClaimBoard:
    """A watcher's view of the claims, fresh."""
    made = ClaimBoard(folder, digest=digest, expires_seconds=expires)
    made.look()
    return made


def test_a_claim_keeps_others_away_until_it_is_released_or_the_checkpoint_is_another(folder: Folder):
    first, second = board(folder), board(folder)
    assert first.standing(NAME, 'v1') is None
    claim = first.take(NAME, 'v1', out='runs/ba2')
    assert claim is not None
    assert second.take(NAME, 'v1') is None  # which has not looked since
    second.look()
    standing = second.standing(NAME, 'v1')
    assert standing is not None
    assert (standing.state, standing.version, standing.by, standing.out) == (RUNNING, 'v1', claim.by, 'runs/ba2')
    assert second.standing(NAME, 'v2') is None  # it was overwritten meanwhile
    assert second.standing('deep/ep0-ba20-rank0.pt', 'v1') is None
    first.write(claim, state=RELEASED)
    second.look()
    assert second.standing(NAME, 'v1') is None
    assert second.take(NAME, 'v1') is not None
    assert len(folder.files()) == 2  # a file for each of the two that had it


@pytest.mark.parametrize('state', [DONE, DAMAGED])
def test_what_is_done_or_damaged_stays_so_for_this_version(folder: Folder, state: str):
    first = board(folder)
    claim = first.take(NAME, 'v1')
    assert claim is not None
    first.write(claim, state=state, reason='torn')
    later = board(folder, expires=0.0)
    time.sleep(0.01)
    later.look()
    standing = later.standing(NAME, 'v1')
    assert standing is not None and (standing.state, standing.reason) == (state, 'torn')
    assert later.standing(NAME, 'v2') is None


def test_watchers_that_ask_for_other_things_do_not_meet(folder: Folder):
    assert board(folder).take(NAME, 'v1') is not None
    other = board(folder, digest='other questions')
    assert other.standing(NAME, 'v1') is None and other.take(NAME, 'v1') is not None


def test_a_silent_claim_expires_by_the_clock_of_who_looks_and_one_of_many_takes_it_over(folder: Folder):
    dead = board(folder).take(NAME, 'v1')
    assert dead is not None
    boards = [board(folder, expires=0.3) for _ in range(4)]
    time.sleep(0.4)
    assert board(folder, expires=30.0).standing(NAME, 'v1') is not None  # which has seen it first just now
    for each in boards:
        each.look()
        assert each.standing(NAME, 'v1') is None
    start, taken = threading.Barrier(len(boards)), []

    def take(each: ClaimBoard) -> None:
        start.wait()
        taken.append(each.take(NAME, 'v1'))

    threads = [threading.Thread(target=take, args=(each,)) for each in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [claim for claim in taken if claim is not None]
    assert winner.generation == 2
    boards[0].look()
    standing = boards[0].standing(NAME, 'v1')
    assert standing is not None and standing.owner == winner.owner


def test_a_claim_whose_heart_beats_does_not_expire(folder: Folder):
    owner = board(folder, expires=0.5)
    claim = owner.take(NAME, 'v1')
    assert claim is not None
    watching = board(folder, expires=5.0)
    versions = set()
    with Heartbeat(owner, claim) as heartbeat:
        end = time.monotonic() + 60.0
        while len(versions) < 4 and time.monotonic() < end:
            versions |= {file.version for file in folder.files()}
            time.sleep(0.02)
        watching.look()
        assert watching.standing(NAME, 'v1') is not None
        assert not heartbeat.is_lost
    assert len(versions) == 4
    written = json.loads(folder.read(folder.files()[0].name))
    assert written['beat'] >= 3 and written['state'] == RUNNING and written['owner'] == claim.owner


def test_a_watcher_that_was_silent_for_too_long_learns_that_it_has_lost(folder: Folder):
    owner = board(folder, expires=0.2)
    claim = owner.take(NAME, 'v1')
    assert claim is not None
    other = board(folder, expires=0.0)
    time.sleep(0.01)
    taken = other.take(NAME, 'v1')
    assert taken is not None
    with Heartbeat(owner, claim) as heartbeat:
        end = time.monotonic() + 60.0
        while not heartbeat.is_lost and time.monotonic() < end:
            time.sleep(0.02)
    assert heartbeat.is_lost
    other.look()
    standing = other.standing(NAME, 'v1')
    assert standing is not None and standing.owner == other.owner  # the late one has not written over it


def test_a_file_that_is_no_claim_stands_until_it_expires(folder: Folder, caplog: pytest.LogCaptureFixture):
    first = board(folder)
    assert first.take(NAME, 'v1') is not None
    (file,) = folder.files()
    folder.write(file.name, b'[1, 2')
    other = board(folder, expires=0.2)
    assert 'is no claim' in caplog.text and file.name in caplog.text
    assert board(folder).standing(NAME, 'v1') is not None
    time.sleep(0.3)
    other.look()
    assert other.standing(NAME, 'v1') is None
    assert other.take(NAME, 'v1') is not None


def test_a_place_for_claims_that_cannot_be_written_is_said_with_what_to_do(tmp_path: Path, s3_server: S3Server):
    (tmp_path / 'questions').write_text('in the way')
    with pytest.raises(ModelError, match=r'questions.*cannot be written: .*; claims are written there.*--claims'):
        board(open_folder(str(tmp_path))).check_writable()
    with pytest.raises(ModelError, match=r'there is no such bucket.*--claims'):
        ClaimBoard(open_folder('s3://no-bucket-here/x'), digest='questions', expires_seconds=1).check_writable()
    board(open_folder(s3_server.uri('x'))).check_writable()
    assert s3_server.names() == []
