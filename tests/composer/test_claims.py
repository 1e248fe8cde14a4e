"""Claims on checkpoints: one of all watchers evaluates, and expired claims are taken over."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import object_store
import pytest
from object_store import S3Server

from llmfoundry_gauntlet.composer.claims import DAMAGED, DONE, RELEASED, RUNNING, Claim, Claims, Renewal
from llmfoundry_gauntlet.data.stores import Store
from llmfoundry_gauntlet.errors import StoreError

s3_server = object_store.s3_server

NAME = 'deep/ep0-ba2-rank0.pt'


@pytest.fixture(params=['disk', 's3'])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where claims lie."""
    if request.param == 'disk':
        return str(tmp_path / '.gauntlet')
    server: S3Server = request.getfixturevalue('s3_server')
    return server.uri('checkpoints/.gauntlet')


def claims_in(place: str, *, expires: float = 60.0) -> Claims:
    """Return a watcher's view of the claims."""
    claims = Claims(Store(place), expires_seconds=expires)
    claims.refresh()
    return claims


def take(claims: Claims, version: str = 'v1') -> Claim:
    claim = claims.take(NAME, version)
    assert claim is not None
    return claim


def test_a_claim_keeps_others_away_until_it_is_released_or_the_checkpoint_is_another(place: str):
    first, second = claims_in(place), claims_in(place)
    assert first.standing(NAME, 'v1') is None
    claim = take(first)
    assert second.take(NAME, 'v1') is None  # which has not looked since
    second.refresh()
    assert second.standing(NAME, 'v1') == claim and claim.state == RUNNING and second.running()
    assert second.standing(NAME, 'v2') is None  # it was overwritten meanwhile
    assert second.standing('deep/ep0-ba20-rank0.pt', 'v1') is None
    assert first.update(claim, state=RELEASED) is not None
    second.refresh()
    assert second.standing(NAME, 'v1') is None and not second.running()
    take(second)
    assert [file.name for file in Store(place).files() if file.name != '.lock'] == ['deep%2Fep0-ba2-rank0.pt.json']


@pytest.mark.parametrize('state', [DONE, DAMAGED])
def test_what_is_done_or_damaged_stays_so_for_this_version(place: str, state: str):
    first = claims_in(place, expires=0.0)
    first.update(take(first), state=state, detail='torn', sizes={'sums/0-shot': 3})
    later = claims_in(place)
    standing = later.standing(NAME, 'v1')
    assert standing is not None and (standing.state, standing.detail) == (state, 'torn')
    assert later.standing(NAME, 'v2') is None
    assert later.sizes() == {'sums/0-shot': 3}


def test_one_of_many_takes_over_an_expired_claim_and_its_owner_loses_it(place: str):
    """Mutation: an expired claim stands, or `take` that does not compare contents."""
    owner = claims_in(place, expires=-1.0)
    claim = take(owner)
    others = [claims_in(place) for _ in range(4)]
    assert [each.standing(NAME, 'v1') for each in others] == [None] * 4
    start, taken = threading.Barrier(len(others)), []

    def take_over(number: int) -> None:
        others[number].owner = f'watcher {number}'
        start.wait()
        taken.append(others[number].take(NAME, 'v1'))

    threads = [threading.Thread(target=take_over, args=(number,)) for number in range(len(others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [found for found in taken if found is not None]
    with Renewal(owner, claim) as renewal:
        end = time.monotonic() + 60.0
        while not renewal.is_lost and time.monotonic() < end:
            time.sleep(0.02)
    assert renewal.is_lost and owner.update(claim, state=DONE) is None
    assert claims_in(place).standing(NAME, 'v1') == winner


def test_a_renewed_claim_expires_later_and_later(place: str):
    owner = claims_in(place, expires=2.0)
    claim = take(owner)
    watching, expiries = claims_in(place), {claim.expires}
    with Renewal(owner, claim) as renewal:
        end = time.monotonic() + 60.0
        while len(expiries) < 4 and time.monotonic() < end:
            time.sleep(0.1)
            watching.refresh()
            found = watching.latest(NAME)
            assert found is not None and found.expires >= max(expiries)
            expiries.add(found.expires)
    assert len(expiries) == 4 and not renewal.is_lost
    assert claims_in(place).latest(NAME) == renewal.claim


def test_a_file_that_is_not_a_claim_is_replaced_with_a_warning(place: str, caplog: pytest.LogCaptureFixture):
    """As a watcher leaves it that is killed while it creates one."""
    store = Store(place)
    take(claims_in(place))
    (name,) = [file.name for file in store.files() if file.name.endswith('.json')]
    assert store.replace(name, store.read(name), b'[1, 2')
    other = claims_in(place)
    assert f'{name}: is not a claim' in caplog.text and other.standing(NAME, 'v1') is None
    take(other)
    assert json.loads(store.read(name))['owner'] == other.owner


def test_a_place_where_claims_cannot_be_written_is_said_with_what_to_do(tmp_path: Path, s3_server: S3Server):
    (tmp_path / 'file').write_text('in the way')
    for place, words in ((str(tmp_path / 'file'), 'file'), ('s3://no-bucket-here/x', 'there is no such bucket')):
        with pytest.raises(StoreError, match=f'{words}.*--claims'):
            Claims(Store(place), expires_seconds=1).check_writable()
    Claims(Store(s3_server.uri('x')), expires_seconds=1).check_writable()
    assert s3_server.names() == []
