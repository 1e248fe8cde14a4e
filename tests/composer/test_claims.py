"""Claims on checkpoints: exactly one watcher gets each, and expired claims are taken over."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import object_store
import pytest
from object_store import S3Server

from llmfoundry_gauntlet.composer.checkpoint_folders import Checkpoint
from llmfoundry_gauntlet.composer.watch import Claim, Claims
from llmfoundry_gauntlet.data.stores import Store, StoredFile
from llmfoundry_gauntlet.errors import StoreError

s3_server = object_store.s3_server


def checkpoint(name: str = 'deep/ep0-ba2-rank0.pt', version: str = 'v1') -> Checkpoint:
    return Checkpoint(name=name, files=(StoredFile(name, 1, version),))


ONE, OVERWRITTEN, ANOTHER = checkpoint(), checkpoint(version='v2'), checkpoint('deep/ep0-ba2-rank0.pt.1')


@pytest.fixture(params=['disk', 's3'])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a folder or URI for claims."""
    if request.param == 'disk':
        return str(tmp_path / '.gauntlet')
    server: S3Server = request.getfixturevalue('s3_server')
    return server.uri('checkpoints/.gauntlet')


def claims_in(place: str, *, expires: float = 60.0) -> Claims:
    """Return the claims as one watcher sees them."""
    claims = Claims(Store(place), expires_seconds=expires)
    claims.refresh()
    return claims


def last(place: str, of: Checkpoint = ONE) -> Claim:
    return claims_in(place).on(of)[-1]


def test_a_claim_excludes_other_watchers_until_released_and_for_good_once_done(place: str):
    first, second = claims_in(place), claims_in(place)
    assert first.on(ONE) == [] and not first.is_known(ONE)
    assert first.take(ONE)
    assert not second.take(ONE)  # has not refreshed since
    second.refresh()
    assert second.on(ONE)[-1].is_running and second.is_known(OVERWRITTEN)
    assert second.on(OVERWRITTEN) == second.on(ANOTHER) == [] and not second.is_known(ANOTHER)
    first.write(0.0)
    second.refresh()
    assert not second.on(ONE)[-1].is_running and second.take(ONE) and not last(place).is_done
    second.write(None, {'sums/0-shot': 3})
    assert last(place).is_done and claims_in(place).sizes() == {'sums/0-shot': 3}
    assert second.take(OVERWRITTEN)
    assert [file.name.partition('@')[0] for file in Store(place).files()] == ['deep%2Fep0-ba2-rank0.pt'] * 3


def test_exactly_one_watcher_takes_over_an_expired_claim_and_the_owner_notices(place: str):
    """Mutation: an expired claim is valid, or a claim is not created exclusively."""
    owner = claims_in(place, expires=0.05)
    assert owner.take(ONE)
    time.sleep(0.1)
    assert not last(place).is_running
    start = threading.Barrier(4)

    def take_over(number: int) -> bool:
        watcher = claims_in(place)
        watcher.owner = f'watcher {number}'
        start.wait()
        return watcher.take(ONE)

    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(take_over, range(4)))
    assert sum(taken) == 1
    assert not owner.is_lost  # has not refreshed since
    with owner.renewed('one'):
        end = time.monotonic() + 60.0
        while not owner.is_lost and time.monotonic() < end:
            time.sleep(0.02)
    with pytest.raises(StoreError, match=r'watcher \d has taken over'):
        owner.write(None)
    assert last(place).owner == f'watcher {taken.index(True)}' and last(place).is_running


def test_a_renewed_claim_keeps_extending_its_expiry(place: str):
    owner, watching, expiries = claims_in(place, expires=2.0), claims_in(place), set()
    assert owner.take(ONE)
    with owner.renewed('one'):
        end = time.monotonic() + 60.0
        while len(expiries) < 4 and time.monotonic() < end:
            watching.refresh()
            if (found := watching.on(ONE)[-1]).owner != 'unknown':  # read while it is written
                assert found.expires >= max(expiries, default=0.0)
                expiries.add(found.expires)
            time.sleep(0.1)
    assert len(expiries) == 4 and not owner.is_lost


def test_an_unreadable_claim_counts_as_new_and_expires(place: str, caplog: pytest.LogCaptureFixture):
    """A watcher killed while creating a claim leaves such a file."""
    assert claims_in(place).take(ONE)
    (file,) = Store(place).files()
    Store(place).write(file.name, b'[1, 2')
    assert last(place).is_running and f'{file.name}: is not a claim' in caplog.text
    waiting = claims_in(place, expires=0.0)
    waiting.refresh()
    assert not waiting.on(ONE)[-1].is_running and waiting.take(ONE)
    assert last(place).owner == waiting.owner
