"""`gauntlet watch --once` on checkpoints of a real training: each kind, damage, restarts, and what is refused."""

from __future__ import annotations

import gc
import json
import shutil
import time
from pathlib import Path

import object_store
import pytest
import tiny
import torch
import watched
from attempts import outcome
from composer.utils import dist
from object_store import S3Server
from torch.distributed import checkpoint as sharded
from watched import Watch, record, states

from llmfoundry_gauntlet.composer.claims import Heartbeat
from llmfoundry_gauntlet.composer.watch import Ending, Overseer
from llmfoundry_gauntlet.composer.watch import outcome as evaluated
from llmfoundry_gauntlet.composer.watcher import Due, Pause, Watcher, WatchSettings
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.inputs import load_data

s3_server = object_store.s3_server
trained, folder, watch = watched.trained, watched.folder, watched.watch


def runs(log: pytest.LogCaptureFixture) -> list[str]:
    """The checkpoints whose evaluation has begun, in their order."""
    return [text.split(':')[0] for text in log.messages if ': running by ' in text]


def test_numbers_and_samples_are_those_of_the_callback_and_a_restart_does_nothing(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    status, out, err = watch()
    assert status == 0, err
    for batch in (2, 4):
        assert outcome(folder / f'watched/ba{batch}') == outcome(trained / f'training/ba{batch}')
        training = record(folder / f'watched/ba{batch}')['training']
        assert training == {
            **record(trained / f'training/ba{batch}')['training'],
            'checkpoint': str(folder / f'checkpoints/ep0-ba{batch}-rank0.pt'),
        }
    assert runs(caplog) == ['ep0-ba4-rank0.pt', 'ep0-ba2-rank0.pt']
    assert out.count('ep0-ba4-rank0.pt') == 1 and 'latest' not in out
    written = {path: path.stat().st_mtime_ns for path in folder.rglob('*') if path.is_file()}
    caplog.clear()
    assert watch()[0] == 0
    assert runs(caplog) == []
    shutil.rmtree(folder / 'checkpoints/.gauntlet')  # then the records say that all is done
    assert watch()[0] == 0
    assert runs(caplog) == [] and states(folder) == {'ep0-ba2-rank0.pt': 'done', 'ep0-ba4-rank0.pt': 'done'}
    assert {path: at for path, at in written.items() if '.gauntlet' not in path.parts} == {
        path: path.stat().st_mtime_ns for path in folder.rglob('*') if path.is_file() and '.gauntlet' not in path.parts
    }


def test_what_the_training_has_recorded_is_done_and_other_questions_want_another_folder(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(trained / 'training', folder / 'watched')
    status, _, err = watch('--limit', 2)
    assert status == 2 and 'subset_items None (now 2)' in err and 'give another --out' in err
    assert states(folder) == {}
    assert watch()[0] == 0 and runs(caplog) == []
    status, _, err = watch('--limit', 2, out='fewer')
    assert status == 0, err
    assert runs(caplog) == ['ep0-ba4-rank0.pt', 'ep0-ba2-rank0.pt']
    assert record(folder / 'fewer/ba2')['tasks']['sums/0-shot']['num_items'] == 2


def test_the_oldest_comes_first_where_that_is_wanted(watch: Watch, caplog: pytest.LogCaptureFixture):
    assert watch('--order', 'oldest', '--limit', 1)[0] == 0
    assert runs(caplog) == ['ep0-ba2-rank0.pt', 'ep0-ba4-rank0.pt']


def test_a_file_that_is_cut_off_waits_until_the_rest_has_come(watch: Watch, folder: Path, trained: Path):
    path = folder / 'checkpoints/ep0-ba4-rank0.pt'
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    status, out, _ = watch()
    assert status == 1 and 'incomplete' in out
    assert states(folder) == {'ep0-ba2-rank0.pt': 'done'}
    assert outcome(folder / 'watched/ba2') == outcome(trained / 'training/ba2')
    path.write_bytes(whole)
    assert watch()[0] == 0
    assert outcome(folder / 'watched/ba4') == outcome(trained / 'training/ba4')


def test_a_damaged_checkpoint_is_tried_again_only_once_it_has_changed(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    path = folder / 'checkpoints/ep0-ba4-rank0.pt'
    whole = path.read_bytes()
    torch.save({'state': {'nothing': 1}}, path)
    status, out, _ = watch()
    assert status == 1 and 'damaged' in out
    assert states(folder) == {'ep0-ba2-rank0.pt': 'done', 'ep0-ba4-rank0.pt': 'damaged'}
    assert not (folder / 'watched/ba4').exists()
    caplog.clear()
    assert watch()[0] == 1
    assert runs(caplog) == [] and "is not a Composer checkpoint: it has no 'state'" in caplog.text
    path.write_bytes(whole)
    assert watch()[0] == 0
    assert runs(caplog) == ['ep0-ba4-rank0.pt']
    assert outcome(folder / 'watched/ba4') == outcome(trained / 'training/ba4')


def test_a_checkpoint_that_is_overwritten_is_evaluated_again_in_place_of_the_old(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    assert watch()[0] == 0
    content = torch.load(folder / 'checkpoints/ep0-ba2-rank0.pt', weights_only=False)
    other = {f'model.{name}': value for name, value in tiny.model(seed=5).state_dict().items()}
    content['state']['model'] = {name: other[name] for name in content['state']['model']}
    torch.save(content, folder / 'checkpoints/ep0-ba2-rank0.pt')
    caplog.clear()
    assert watch()[0] == 0
    assert runs(caplog) == ['ep0-ba2-rank0.pt']
    assert outcome(folder / 'watched/ba2') != outcome(trained / 'training/ba2')
    assert outcome(folder / 'watched/ba4') == outcome(trained / 'training/ba4')
    assert not (folder / 'watched/ba2/journal').exists()


@pytest.mark.filterwarnings('ignore:TypedStorage is deprecated', 'ignore:torch.distributed is disabled')
def test_sharded_and_hugging_face_folders_and_names_without_a_batch_are_evaluated(
    watch: Watch, folder: Path, trained: Path
):
    checkpoints = folder / 'checkpoints'
    content = torch.load(checkpoints / 'ep0-ba2-rank0.pt', weights_only=False)
    weights = {name.removeprefix('model.'): value.clone() for name, value in content['state']['model'].items()}
    dist.initialize_dist('cpu')
    sharded.save(content, storage_writer=sharded.FileSystemWriter(checkpoints / 'ep0-ba2'))
    (checkpoints / 'ep0-ba2-rank0.pt').unlink()
    network = tiny.model()
    network.load_state_dict(weights)
    network.save_pretrained(checkpoints / 'huggingface/ba3', max_shard_size='60KB')
    tiny.tokenizer().save_pretrained(checkpoints / 'huggingface/ba3')
    (checkpoints / 'ep0-ba4-rank0.pt').rename(checkpoints / 'mine.pt')
    (checkpoints / 'latest-rank0.pt').unlink()
    (checkpoints / 'latest').symlink_to('ep0-ba2')
    status, out, err = watch()
    assert status == 0, out + err
    assert sorted(path.name for path in (folder / 'watched').iterdir()) == ['ba2', 'ba3', 'ba4']
    for batch, trained_batch, name in ((2, 2, 'ep0-ba2'), (3, 2, 'huggingface/ba3'), (4, 4, 'mine.pt')):
        found, expected = outcome(folder / f'watched/ba{batch}'), outcome(trained / f'training/ba{trained_batch}')
        assert found[1] == expected[1]
        training = record(folder / f'watched/ba{batch}')['training']
        assert training['batch'] == batch and training['checkpoint'] == str(checkpoints / name)


def test_in_an_object_store_it_is_the_same(watch: Watch, folder: Path, trained: Path, s3_server: S3Server):
    for path in (trained / 'checkpoints').glob('ep*.pt'):
        s3_server.client.upload_file(str(path), s3_server.bucket, f'run/checkpoints/{path.name}')
    s3_server.client.put_object(
        Bucket=s3_server.bucket, Key='run/checkpoints/latest-rank0.pt.symlink', Body=b'run/checkpoints/ep0-ba4-rank0.pt'
    )
    uri = s3_server.uri('run/checkpoints')
    status, out, err = watch(uri=uri)
    assert status == 0, out + err
    for batch in (2, 4):
        assert outcome(folder / f'watched/ba{batch}') == outcome(trained / f'training/ba{batch}')
        assert record(folder / f'watched/ba{batch}')['training']['checkpoint'] == f'{uri}/ep0-ba{batch}-rank0.pt'
    claims = s3_server.names('run/checkpoints/.gauntlet/')
    assert [name.rpartition('/')[2] for name in claims] == ['ep0-ba2-rank0.pt.1.json', 'ep0-ba4-rank0.pt.1.json']


def due_of(folder: Path, trained: Path, uri: str | None = None) -> tuple[Watcher, Due, WatchSettings]:
    """What a watcher takes up first."""
    settings = {
        'tasks': str(trained / 'tasks.yaml'),
        'gauntlet': str(trained / 'gauntlet.yaml'),
        'data_root': str(trained),
    }
    wanted = WatchSettings(
        folder=uri or str(folder / 'checkpoints'),
        out=folder / 'watched',
        settings=settings,
        settle_seconds=0,
        poll_seconds=0.5,
    )
    watcher = Watcher(wanted, load_data(decode_settings(settings, 'watch')))
    due = watcher.next_step()
    assert isinstance(due, Due) and due.checkpoint.name == 'ep0-ba4-rank0.pt'
    return watcher, due, wanted


def evaluate_due(watcher: Watcher, due: Due, wanted: WatchSettings) -> tuple[str, str] | None:
    assert watcher.claim is not None
    heartbeat = Heartbeat(watcher.board, watcher.claim)
    heartbeat.is_lost = not watcher.board.is_newest(watcher.claim)
    found = evaluated(due, wanted, Overseer(heartbeat, due, Ending()), 'cpu')
    if found is not None:
        watcher.conclude(due, watcher.claim, *found)
    return found


def test_a_checkpoint_that_is_deleted_meanwhile_is_said_and_skipped(
    folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level('INFO', 'llmfoundry_gauntlet')
    watcher, due, wanted = due_of(folder, trained)
    (folder / 'checkpoints/ep0-ba4-rank0.pt').unlink()
    found = evaluate_due(watcher, due, wanted)
    assert found is not None and found[0] == 'damaged'  # which it is not, as the folder shows
    assert 'ep0-ba4-rank0.pt: deleted: during its evaluation' in caplog.messages
    assert not (folder / 'watched/ba4').exists()
    following = watcher.next_step()
    assert isinstance(following, Due) and following.checkpoint.name == 'ep0-ba2-rank0.pt'
    assert states(folder) == {'ep0-ba2-rank0.pt': 'running', 'ep0-ba4-rank0.pt': 'released'}


def test_an_evaluation_ends_whose_checkpoint_another_watcher_has_taken_over(
    folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    watcher, due, wanted = due_of(folder, trained)
    claim = watcher.claim
    assert claim is not None
    watcher.board.folder.create(
        f'{watcher.asked}/ep0-ba4-rank0.pt.2.json',
        json.dumps({'checkpoint': claim.checkpoint, 'version': 'x'}).encode(),
    )
    assert evaluate_due(watcher, due, wanted) is None
    assert not (folder / 'watched/ba4/results.json').exists()


def test_a_folder_that_is_out_of_reach_for_a_while_is_looked_at_again(
    folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    watcher, due, _ = due_of(folder, trained)
    watcher.release()
    (folder / 'checkpoints').rename(folder / 'away')
    (folder / 'checkpoints').write_text('')
    assert watcher.next_step() == Pause(seconds=0.5)
    assert 'this is tried again' in caplog.text
    (folder / 'checkpoints').unlink()
    (folder / 'away').rename(folder / 'checkpoints')
    again = watcher.next_step()
    assert isinstance(again, Due) and again.checkpoint == due.checkpoint


def test_a_store_that_is_out_of_reach_during_an_evaluation_says_nothing_of_the_checkpoint(
    folder: Path, trained: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
):
    path = trained / 'checkpoints/ep0-ba4-rank0.pt'
    s3_server.client.upload_file(str(path), s3_server.bucket, f'run/{path.name}')
    watcher, due, wanted = due_of(folder, trained, s3_server.uri('run'))
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:9')
    found = evaluate_due(watcher, due, wanted)
    assert found is not None and 'the endpoint does not answer' in found[1]
    assert watcher.table()[0].state == 'to be tried again'
    monkeypatch.setenv('S3_ENDPOINT_URL', s3_server.endpoint)
    end = time.monotonic() + 60
    while not isinstance(again := watcher.next_step(), Due):
        assert again is not None and time.monotonic() < end
        time.sleep(again.seconds)
    assert again.checkpoint == due.checkpoint
    assert evaluate_due(watcher, again, wanted) == ('done', '')
    assert outcome(folder / 'watched/ba4') == outcome(trained / 'training/ba4')


def test_models_of_earlier_evaluations_are_let_go_of(watch: Watch):
    def num_models() -> int:
        gc.collect()
        return sum(type(thing).__name__ == 'GPT2LMHeadModel' for thing in gc.get_objects())

    before = num_models()
    assert watch('--limit', 1)[0] == 0
    assert num_models() <= before  # those of other tests may go as well


def test_with_a_time_budget_all_checkpoints_are_asked_the_same(
    watch: Watch, folder: Path, caplog: pytest.LogCaptureFixture
):
    assert watch('--time-budget', '0.2s')[0] == 0
    found_out = [text for text in caplog.messages if text.startswith('time_budget 0.2s: ')]
    assert len(found_out) == 1  # by the first evaluation alone
    first, second = (record(folder / f'watched/ba{batch}') for batch in (4, 2))
    assert first['timing']['time_budget'] == second['timing']['time_budget']
    assert first['timing']['time_budget']
