"""`gauntlet watch --once` on checkpoints of a real training: each kind, damage, restarts, and what is refused."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable
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

from llmfoundry_gauntlet.composer.watch import StopRequest, run
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
    for more, differing in ((('--limit', 2), 'subset_items None (now 2)'), (('--max-seq-len', 64), 'max_seq_len 128')):
        status, _, err = watch(*more)
        assert status == 2 and differing in err and 'give another --out' in err
    assert states(folder) == {}
    assert watch()[0] == 0 and runs(caplog) == []
    status, _, err = watch('--limit', 2, out='fewer')
    assert status == 0, err
    assert runs(caplog) == ['ep0-ba4-rank0.pt', 'ep0-ba2-rank0.pt']
    assert record(folder / 'fewer/ba2')['tasks']['sums/0-shot']['num_items'] == 2


@pytest.mark.parametrize('damage', ['cut off', 'no model'])
def test_an_unfinished_or_damaged_checkpoint_is_skipped_until_it_changes(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    path = folder / 'checkpoints/ep0-ba4-rank0.pt'
    whole = path.read_bytes()
    if damage == 'cut off':
        path.write_bytes(whole[: len(whole) // 2])
        reason = f'is cut off after {len(whole) // 2} bytes'
    else:
        torch.save({'state': {'nothing': 1}}, path)
        reason = "is not a Composer checkpoint: it has no 'state'"
    status, out, _ = watch()
    assert status == 1 and 'damaged' in out and reason in caplog.text
    assert states(folder) == {'ep0-ba2-rank0.pt': 'done', 'ep0-ba4-rank0.pt': 'damaged'}
    assert outcome(folder / 'watched/ba2') == outcome(trained / 'training/ba2')
    assert not (folder / 'watched/ba4').exists()
    caplog.clear()
    assert watch()[0] == 1
    assert runs(caplog) == [] and reason in caplog.text
    path.write_bytes(whole)
    assert watch()[0] == 0
    assert runs(caplog) == ['ep0-ba4-rank0.pt']
    assert outcome(folder / 'watched/ba4') == outcome(trained / 'training/ba4')


def overwrite(path: Path) -> None:
    """Replace the weights in a checkpoint."""
    content = torch.load(path, weights_only=False)
    other = {f'model.{name}': value for name, value in tiny.model(seed=5).state_dict().items()}
    content['state']['model'] = {name: other[name] for name in content['state']['model']}
    torch.save(content, path)


def test_a_checkpoint_that_is_overwritten_is_evaluated_again_in_place_of_the_old(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    assert watch()[0] == 0
    overwrite(folder / 'checkpoints/ep0-ba2-rank0.pt')
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
    network.save_pretrained(checkpoints / 'huggingface/ba2', max_shard_size='60KB')
    tiny.tokenizer().save_pretrained(checkpoints / 'huggingface/ba2')
    (checkpoints / 'ep0-ba4-rank0.pt').rename(checkpoints / 'mine.pt')
    (checkpoints / 'latest-rank0.pt').unlink()
    (checkpoints / 'latest').symlink_to('ep0-ba2')
    status, out, err = watch()
    assert status == 0, out + err
    assert sorted(path.name for path in (folder / 'watched').iterdir()) == ['ba2', 'ba2-huggingface-ba2', 'mine.pt']
    table = ((2, 'ba2', 'ep0-ba2'), (2, 'ba2-huggingface-ba2', 'huggingface/ba2'), (4, 'mine.pt', 'mine.pt'))
    for batch, records, name in table:
        found, expected = outcome(folder / 'watched' / records), outcome(trained / f'training/ba{batch}')
        assert found[1] == expected[1]
        training = record(folder / 'watched' / records)['training']
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
    assert [name.rpartition('/')[2] for name in claims] == ['ep0-ba2-rank0.pt.json', 'ep0-ba4-rank0.pt.json']


def due_of(
    folder: Path, trained: Path, *, uri: str | None = None, expires: float = 600.0
) -> tuple[Watcher, Due, Callable[[Due], None]]:
    """Return a watcher, what it takes up first, and what evaluates that."""
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
        expires_seconds=expires,
    )
    watcher = Watcher(wanted, load_data(decode_settings(settings, 'watch')))
    due = watcher.next_step()
    assert isinstance(due, Due) and due.checkpoint.name == 'ep0-ba4-rank0.pt'
    return watcher, due, lambda due: run(due, wanted, watcher, 'cpu', StopRequest())


def test_a_checkpoint_that_is_deleted_during_its_evaluation_is_skipped(
    folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level('INFO', 'llmfoundry_gauntlet')
    watcher, due, evaluate = due_of(folder, trained)
    (folder / 'checkpoints/ep0-ba4-rank0.pt').unlink()
    evaluate(due)
    assert 'ep0-ba4-rank0.pt: was deleted during its evaluation' in caplog.messages
    assert not (folder / 'watched/ba4').exists()
    following = watcher.next_step()
    assert isinstance(following, Due) and following.checkpoint.name == 'ep0-ba2-rank0.pt'
    assert states(folder) == {'ep0-ba2-rank0.pt': 'running', 'ep0-ba4-rank0.pt': 'released'}


def test_an_evaluation_stops_when_another_watcher_has_taken_over(folder: Path, trained: Path):
    watcher, due, evaluate = due_of(folder, trained, expires=0.05)
    (path,) = (folder / 'checkpoints/.gauntlet').glob('*/ep0-ba4-rank0.pt.json')
    other = json.dumps({**json.loads(path.read_text()), 'owner': 'another'})
    path.write_text(other)
    evaluate(due)
    assert not (folder / 'watched/ba4/results.json').exists()
    watcher.release()
    assert path.read_text() == other


def test_a_folder_that_is_out_of_reach_for_a_while_is_listed_again(
    folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    watcher, due, _ = due_of(folder, trained)
    watcher.release()
    (folder / 'checkpoints').rename(folder / 'away')
    (folder / 'checkpoints').write_text('')
    assert watcher.next_step() == Pause(seconds=0.5)
    assert f'{folder}/checkpoints: is a file' in caplog.text
    (folder / 'checkpoints').unlink()
    (folder / 'away').rename(folder / 'checkpoints')
    again = watcher.next_step()
    assert isinstance(again, Due) and again.checkpoint == due.checkpoint


def test_a_store_that_is_out_of_reach_during_an_evaluation_says_nothing_of_the_checkpoint(
    folder: Path, trained: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
):
    path = trained / 'checkpoints/ep0-ba4-rank0.pt'
    s3_server.client.upload_file(str(path), s3_server.bucket, f'run/{path.name}')
    watcher, due, evaluate = due_of(folder, trained, uri=s3_server.uri('run'))
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:9')
    evaluate(due)
    (status,) = watcher.table()
    assert status.state == 'failed' and 'the endpoint does not answer' in status.detail
    monkeypatch.setenv('S3_ENDPOINT_URL', s3_server.endpoint)
    end = time.monotonic() + 60
    while not isinstance(again := watcher.next_step(), Due):
        assert again is not None and time.monotonic() < end
        time.sleep(again.seconds)
    evaluate(again)
    assert watcher.table()[0].state == 'done'
    assert outcome(folder / 'watched/ba4') == outcome(trained / 'training/ba4')


def test_the_oldest_comes_first_if_asked_and_models_of_earlier_evaluations_are_freed(
    watch: Watch, caplog: pytest.LogCaptureFixture
):
    def num_models() -> int:
        gc.collect()
        return sum(type(thing).__name__ == 'GPT2LMHeadModel' for thing in gc.get_objects())

    before = num_models()
    assert watch('--order', 'oldest', '--limit', 1)[0] == 0
    assert runs(caplog) == ['ep0-ba2-rank0.pt', 'ep0-ba4-rank0.pt']
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
