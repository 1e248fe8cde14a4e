"""Checkpoints are found; claims on disk and in S3 exclude other watchers and decide which a watcher takes next."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import object_store
import pytest
import tiny
from object_store import S3Server

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.data.stores import Store, StoredFile
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.runtime.checkpoint_folders import Checkpoint, find_checkpoints
from llmfoundry_gauntlet.runtime.claims import Claims, Process, this_process
from llmfoundry_gauntlet.runtime.watch import Watcher, WatchSettings

s3_server = object_store.s3_server


def checkpoint(name: str = 'deep/ep0-ba2-rank0.pt', version: str = 'v1') -> Checkpoint:
    return Checkpoint(name=name, files=(StoredFile(name, 1, version),))


CLAIMED = checkpoint()
OVERWRITTEN = checkpoint(version='v2')
OTHER_NAME = checkpoint('deep/ep0-ba2-rank0.pt.1')
STEM = f'deep%2Fep0-ba2-rank0.pt@{CLAIMED.version}'  # of the names of its claims


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


def last_of(claims: Claims) -> tuple[str, float]:
    """Return owner and expiry of the last claim on CLAIMED."""
    claim = claims.last(CLAIMED)
    assert claim is not None
    return claim.owner, claim.expires


def test_a_claim_excludes_other_watchers_until_it_is_released(place: str):
    first, second = claims_in(place), claims_in(place)

    # The second has not refreshed since the claim of the first.
    with first.held(CLAIMED) as first_has_it, second.held(CLAIMED) as second_has_it:
        assert first_has_it
        assert not second_has_it
        second.refresh()
        claim = second.last(CLAIMED)
        assert claim is not None
        assert claim.owner == first.owner
        assert claim.is_valid

    second.refresh()
    assert last_of(second) == (first.owner, 0.0)
    with second.held(CLAIMED) as second_has_it:
        assert second_has_it


def test_a_claim_is_on_one_version_of_one_name(place: str):
    first, second = claims_in(place), claims_in(place)

    with first.held(CLAIMED):
        second.refresh()

        assert not second.is_overwritten(CLAIMED)
        assert second.is_overwritten(OVERWRITTEN)
        assert not second.is_overwritten(OTHER_NAME)
        assert second.last(OVERWRITTEN) is None
        assert second.last(OTHER_NAME) is None


def test_a_claim_is_renewed_while_it_is_held(place: str):
    owner, watching = claims_in(place, expires=2.0), claims_in(place)
    expiries = set()

    with owner.held(CLAIMED):
        watching.refresh()
        end = time.monotonic() + 60.0
        while len(expiries) < 3 and time.monotonic() < end:
            expiries.add(last_of(watching)[1])
            time.sleep(0.1)
        now = time.time()

    assert len(expiries) == 3
    assert min(expiries) > now - 2.0


def test_an_unreadable_claim_has_expired(place: str):
    """Creating a claim and writing its content are two steps."""
    owner, watching = claims_in(place), claims_in(place)
    with owner.held(CLAIMED):
        watching.refresh()

    watching.store.write(f'{STEM}.0.json', b'[1, 2')

    assert last_of(watching) == ('unknown', 0.0)


def started_of(pid: int) -> int:
    """Return the 22nd field of a process's line in /proc (proc(5)); the name `sleep` has no spaces."""
    return int(Path(f'/proc/{pid}/stat').read_text().split()[21])


def process_of(sleeper: subprocess.Popen[bytes]) -> Process:
    own = this_process()
    assert own is not None
    return replace(own, pid=sleeper.pid, started=started_of(sleeper.pid))


def test_a_process_that_runs_has_not_ended():
    own = this_process()
    assert own is not None
    with subprocess.Popen(['sleep', '1000']) as sleeper:
        has_ended = process_of(sleeper).has_ended
        sleeper.kill()

    assert not own.has_ended
    assert not has_ended


def test_a_killed_process_has_ended_also_before_its_parent_notices():
    sleeper = subprocess.Popen(['sleep', '1000'])
    process = process_of(sleeper)

    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    has_ended_unnoticed = process.has_ended
    sleeper.wait()

    assert has_ended_unnoticed
    assert process.has_ended


def test_a_process_whose_id_another_has_now_has_ended():
    """Mutation: an id that another process has now counts as the process that ended."""
    own = this_process()
    assert own is not None

    assert replace(own, started=own.started - 1).has_ended


@pytest.mark.parametrize('changes', [{'host': 'other'}, {'boot': 'other'}, {'namespace': 'pid:[1]'}])
def test_whether_a_process_elsewhere_has_ended_is_not_certain(changes: dict[str, str]):
    """An id that is free in this namespace may be in use on another machine, or in another container.

    Mutation: a process of another container counts as ended.
    """
    with subprocess.Popen(['sleep', '1000']) as sleeper:
        process = process_of(sleeper)
        sleeper.kill()

    assert process.has_ended
    assert not replace(process, **changes).has_ended


def test_names_of_any_length_and_script_have_claims(place: str):
    """A name of 255 bytes on disk has 765 when its letters are quoted."""
    long_name = f'{"ж" * 100}-ba2-rank0.pt'
    other_name = f'{"ж" * 100}-ba4-rank0.pt'
    claims = claims_in(place)

    with claims.held(checkpoint(long_name)) as is_held:
        assert is_held
    claims.refresh()

    assert claims.last(checkpoint(long_name)) is not None
    assert claims.last(checkpoint(other_name)) is None
    assert claims.is_overwritten(checkpoint(long_name, version='v2'))
    assert not claims.is_overwritten(checkpoint(other_name, version='v2'))


def watcher_of(folder: Path, **settings: str) -> Watcher:
    """Return a watcher of a folder whose checkpoints are files without content."""
    settings = {**tiny.write_tasks(folder), **settings}
    options = WatchSettings(
        folder=str(folder / 'checkpoints'), out=folder / 'out', settings=settings, settle_seconds=0.0, poll_seconds=9.0
    )
    return Watcher(options, load_data(decode_settings(settings, 'watch')))


def write(folder: Path, batch: int) -> None:
    (folder / 'checkpoints').mkdir(exist_ok=True)
    (folder / f'checkpoints/ep0-ba{batch}-rank0.pt').touch()


def next_batch(watcher: Watcher) -> int | None:
    """Return the batch of the checkpoint to evaluate next, or `None` if the watcher waits."""
    step = watcher.next_step()
    return step.batch if isinstance(step, Checkpoint) else None


def test_the_newest_checkpoint_without_a_valid_claim_is_next(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Mutation: an expired claim is valid."""
    caplog.set_level('INFO', 'llmfoundry_gauntlet')
    watcher, other = watcher_of(tmp_path), watcher_of(tmp_path)
    assert next_batch(watcher) is None
    write(tmp_path, 2)
    write(tmp_path, 4)
    newest = watcher.next_step()
    assert isinstance(newest, Checkpoint) and newest.batch == 4
    with ExitStack() as stack:
        assert watcher.claim(newest, stack) == (tmp_path / 'out/ba4', None)
        assert next_batch(other) == 2 and 'ep0-ba4-rank0.pt: running by ' in caplog.text
    assert next_batch(other) == 4
    (claim,) = (tmp_path / 'checkpoints/.gauntlet').glob('*/*.0.json')
    claim.write_text(json.dumps({'owner': 'dead:1', 'expires': time.time() + 1.0, 'process': None}))
    assert next_batch(other) == 2
    time.sleep(1.1)
    assert next_batch(other) == 4
    with ExitStack() as stack:
        assert other.claim(newest, stack) is not None
    assert 'taken over from dead:1' in caplog.messages[-1]
    watcher.report(newest, 'damaged', 'truncated')
    assert next_batch(other) == 4
    with ExitStack() as stack:
        assert other.claim(newest, stack) is not None
        assert next_batch(watcher) == 2
    assert next_batch(watcher) == 2, 'not again after another watcher has tried'


HOLDING = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from test_claims import watcher_of
watcher = watcher_of(Path(sys.argv[1]))
with ExitStack() as stack:
    watcher.claim(watcher.next_step(), stack)
    print('claimed', flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
def test_only_one_watcher_takes_over_from_a_killed_one_and_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The claim would expire in ten minutes. Mutation: an abandoned claim is valid."""
    caplog.set_level('INFO', 'llmfoundry_gauntlet')
    write(tmp_path, 2)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, '-c', HOLDING, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, 'PYTHONPATH': paths})
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == 'claimed\n'
        first, second = watcher_of(tmp_path), watcher_of(tmp_path)
        assert next_batch(first) is None
        (abandoned,) = first.checkpoints
        claim = first.claims.last(abandoned)
        assert claim is not None
        until = time.strftime('%H:%M:%S', time.localtime(claim.expires))
        assert f'running by {claim.owner}, claim expires at {until} unless renewed' in caplog.text
        holder.send_signal(signal.SIGKILL)

    assert next_batch(first) == next_batch(second) == 2
    with ExitStack() as stack:
        assert first.claim(abandoned, stack) is not None
        assert second.claim(abandoned, stack) is None
        assert f'taken over from {claim.owner}, which has ended' in caplog.messages[-1]
        assert next_batch(second) is None


@pytest.mark.parametrize(
    'process',
    [
        None,
        {'host': 'here', 'cgroup': 7},  # keys of a later version
    ],
)
@pytest.mark.parametrize(
    ('seconds_left', 'next_expected'),
    [
        (60.0, None),
        (-1.0, 2),
    ],
)
def test_a_claim_without_a_process_or_of_a_later_version_goes_by_its_expiry_time(
    tmp_path: Path, process: dict[str, Any] | None, seconds_left: float, next_expected: int | None
):
    write(tmp_path, 2)
    watcher = watcher_of(tmp_path)
    step = watcher.next_step()
    assert isinstance(step, Checkpoint)
    with ExitStack() as stack:
        watcher.claim(step, stack)
    (path,) = (tmp_path / 'checkpoints/.gauntlet').glob('*/*.0.json')

    claim = {'owner': 'someone:1', 'process': process, 'expires': time.time() + seconds_left}
    path.write_text(json.dumps(claim))

    assert next_batch(watcher) == next_expected


def test_all_formats_are_found_and_their_records_are_in_folders_named_by_batch_or_by_checkpoint(tmp_path: Path):
    """Hidden files, other files, files of other ranks and links, as Composer makes them, are no checkpoints."""
    watcher, folder = watcher_of(tmp_path), tmp_path / 'checkpoints'
    records_of_file = {
        'ep0-ba2-rank0.pt': 'ba2',
        'deep/ep10-ba2000-rank0.pt': 'deep/ba2000',
        'ep0-ba4/.metadata': 'ba4',
        'ep0-ba6/__0_0.distcp': 'ba6',  # metadata not yet written
        'huggingface/ba8/config.json': 'huggingface/ba8',
        'checkpoint-500/model.safetensors': 'ba500',
        'run1/step_30/config.json': 'run1/ba30',
        'final-7b.pt': 'final-7b.pt',
    }
    ignored = [
        # Other files of checkpoints.
        'ep0-ba2-rank1.pt',
        'ep0-ba4/__0_0.distcp',
        'huggingface/ba8/optimizer.pt',
        'latest-rank0.pt.symlink',
        # Files of no checkpoint, and hidden ones.
        'deep/notes.txt',
        'tokenizer/tokenizer.json',
        '.gauntlet/ep0-ba2-rank0.pt.json',
        '.cache/ep0-ba3-rank0.pt',
    ]
    for name in [*records_of_file, *ignored]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / 'latest').symlink_to('ep0-ba4')
    (folder / 'latest-rank0.pt').symlink_to('ep0-ba2-rank0.pt')
    (folder / 'gone.pt').symlink_to('nowhere')

    watcher.next_step()

    folder_of_checkpoint = {checkpoint.name: watcher.folder(checkpoint) for checkpoint in watcher.checkpoints}
    expected = {}
    for file, records in records_of_file.items():
        name = file if file.endswith('.pt') else file.rpartition('/')[0]  # a folder is one checkpoint
        expected[name] = tmp_path / 'out' / records
    assert folder_of_checkpoint == expected


def version_of_checkpoint(versions_of_files: str) -> str:
    """Return the version of a checkpoint of files with these versions, beside a file that is not one of its own."""
    files = [StoredFile(f'ba1/__{rank}_0.distcp', 1, version) for rank, version in enumerate(versions_of_files)]
    note = StoredFile('ba1/notes.txt', 1, str(random.random()))
    (checkpoint,) = find_checkpoints([*files, note])
    return checkpoint.version


def test_the_version_depends_on_no_other_file_than_those_of_the_checkpoint():
    assert version_of_checkpoint('ab') == version_of_checkpoint('ab')


def test_the_version_depends_on_all_files_of_a_checkpoint():
    one_file_changed = {version_of_checkpoint('ac'), version_of_checkpoint('cb')}
    one_file_missing = version_of_checkpoint('a')

    assert len({version_of_checkpoint('ab'), *one_file_changed, one_file_missing}) == 4


def test_with_a_time_budget_watchers_wait_for_the_first_evaluation_which_measures(tmp_path: Path):
    watcher, other = (watcher_of(tmp_path, time_budget='10s') for _ in range(2))
    write(tmp_path, 2)
    write(tmp_path, 4)

    step = watcher.next_step()
    assert isinstance(step, Checkpoint)

    with ExitStack() as stack:
        watcher.claim(step, stack)
        assert next_batch(other) is None
    assert next_batch(other) == 4


def test_a_folder_that_is_unreachable_is_listed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    watcher = watcher_of(tmp_path)
    (tmp_path / 'checkpoints').write_text('')
    assert watcher.next_step() == 9.0
    assert f'{tmp_path}/checkpoints: is a file' in caplog.text
    (tmp_path / 'checkpoints').unlink()
    write(tmp_path, 2)
    assert next_batch(watcher) == 2
