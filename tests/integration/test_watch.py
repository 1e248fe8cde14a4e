"""`gauntlet watch` on checkpoints of a real training: all formats, damage, restarts, outages and user errors."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import object_store
import pytest
import tiny
import torch
from attempts import outcome
from composer.utils import dist
from object_store import S3Server
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed import checkpoint as sharded
from watched import options_of, record, settings_of, states, train

from llmfoundry_gauntlet.composer.watch import Claims, Due, Watcher, WatchSettings, evaluate_due
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data

s3_server = object_store.s3_server
Watch = Callable[..., tuple[int, str, str]]
BOTH = {'ep0-ba2-rank0.pt': 'done', 'ep0-ba4-rank0.pt': 'done'}


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for four batches with a checkpoint every other batch, each evaluated by the callback."""
    folder = tmp_path_factory.mktemp('trained')
    tiny.write_tasks(folder)
    train(folder, 4)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """Return a folder with a copy of the checkpoints."""
    shutil.copytree(trained / 'checkpoints', tmp_path / 'checkpoints', symlinks=True)
    return tmp_path


@pytest.fixture
def watch(trained: Path, folder: Path, gauntlet: Watch) -> Watch:
    """Run `gauntlet watch --once` on the copied checkpoints; return exit status, standard output and error."""

    def call(*more: Any, uri: Any = folder / 'checkpoints', out: str = 'watched') -> tuple[int, str, str]:
        timing = ['--once', '--settle', '0s', '--poll', '1s']
        return gauntlet('watch', uri, *options_of(trained), '--out', folder / out, *timing, *more)

    return call


def runs(log: pytest.LogCaptureFixture) -> list[str]:
    """Return the checkpoints whose evaluation started since the last call, in order."""
    found = [text.split(':')[0] for text in log.messages if ': running by ' in text]
    log.clear()
    return found


def test_results_equal_those_of_the_callback_and_a_restart_does_nothing(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    def num_models() -> int:
        gc.collect()
        return sum(type(thing).__name__ == 'GPT2LMHeadModel' for thing in gc.get_objects())

    before = num_models()
    status, out, err = watch()
    assert status == 0, err
    assert num_models() <= before  # models of earlier tests may be freed too
    for batch in (2, 4):
        assert outcome(folder / f'watched/ba{batch}') == outcome(trained / f'training/ba{batch}')
        training = record(folder / f'watched/ba{batch}')['training']
        assert training == {
            **record(trained / f'training/ba{batch}')['training'],
            'checkpoint': str(folder / f'checkpoints/ep0-ba{batch}-rank0.pt'),
        }
    assert runs(caplog) == ['ep0-ba4-rank0.pt', 'ep0-ba2-rank0.pt']
    assert out.count('ep0-ba4-rank0.pt: done by ') == 1 and 'latest' not in out
    written = {path: path.stat().st_mtime_ns for path in (folder / 'watched').rglob('*')}
    assert watch()[0] == 0
    shutil.rmtree(folder / 'checkpoints/.gauntlet')  # the records alone show that all is done
    assert watch()[0] == 0
    assert runs(caplog) == [] and states(folder) == BOTH
    assert written == {path: path.stat().st_mtime_ns for path in (folder / 'watched').rglob('*')}


def test_records_of_the_training_count_as_done_and_other_settings_need_another_out(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(trained / 'training', folder / 'watched')
    for more, differing in ((('--limit', 2), 'subset_items None (now 2)'), (('--max-seq-len', 64), 'max_seq_len 128')):
        status, _, err = watch(*more)
        assert status == 2 and differing in err and 'give another --out' in err
    assert states(folder) == {}
    assert watch()[0] == 0 and runs(caplog) == [] and states(folder) == BOTH
    status, _, err = watch('--limit', 2, out='fewer')
    assert status == 0, err
    assert runs(caplog) == ['ep0-ba4-rank0.pt', 'ep0-ba2-rank0.pt']
    assert record(folder / 'fewer/ba2')['tasks']['sums/0-shot']['num_items'] == 2


@pytest.mark.parametrize('damage', ['truncated', 'not a checkpoint'])
def test_an_unfinished_or_damaged_checkpoint_is_skipped_until_it_changes(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture, damage: str
):
    path = folder / 'checkpoints/ep0-ba4-rank0.pt'
    whole = path.read_bytes()
    if damage == 'truncated':
        path.write_bytes(whole[: len(whole) // 2])
        reason = f'is truncated after {len(whole) // 2} bytes'
    else:
        torch.save({'state': {'nothing': 1}}, path)
        reason = "is not a Composer checkpoint: it has no 'state'"
    status, out, _ = watch()
    assert status == 1 and 'ep0-ba4-rank0.pt: damaged' in out and reason in caplog.text
    assert runs(caplog) == ['ep0-ba4-rank0.pt', 'ep0-ba2-rank0.pt']
    assert states(folder) == {'ep0-ba2-rank0.pt': 'done', 'ep0-ba4-rank0.pt': 'released'}
    assert outcome(folder / 'watched/ba2') == outcome(trained / 'training/ba2')
    assert not (folder / 'watched/ba4').exists()
    path.write_bytes(whole)
    assert watch()[0] == 0
    assert runs(caplog) == ['ep0-ba4-rank0.pt']
    assert outcome(folder / 'watched/ba4') == outcome(trained / 'training/ba4')


def test_an_overwritten_checkpoint_is_evaluated_again_and_its_records_replaced(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    assert watch()[0] == 0
    path = folder / 'checkpoints/ep0-ba2-rank0.pt'
    content = torch.load(path, weights_only=False)
    other = {f'model.{name}': value for name, value in tiny.model(seed=5).state_dict().items()}
    content['state']['model'] = {name: other[name] for name in content['state']['model']}
    torch.save(content, path)
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


def test_results_are_the_same_in_an_object_store(watch: Watch, folder: Path, trained: Path, s3_server: S3Server):
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
    names = [name.rpartition('/')[2].partition('@')[0] for name in claims]
    assert names == [*BOTH, 'settings.json']


def next_due(watcher: Watcher) -> Due:
    """Poll until a watcher claims a checkpoint, and return it."""
    while not isinstance(step := watcher.next_step(), Due):
        assert step is not None
        time.sleep(step)
    return step


def watcher_of(folder: Path, trained: Path, /, **more: Any) -> tuple[Watcher, Due, Callable[[Due], None]]:
    """Return a watcher, the checkpoint it claims first, and a function that evaluates a claimed checkpoint."""
    settings = settings_of(trained)
    more = {'folder': str(folder / 'checkpoints'), 'settle_seconds': 0, 'poll_seconds': 0.5, **more}
    wanted = WatchSettings(out=folder / 'watched', settings=settings, **more)
    watcher = Watcher(wanted, load_data(decode_settings(settings, 'watch')))
    due = next_due(watcher)
    assert due.checkpoint.name == 'ep0-ba4-rank0.pt'
    return watcher, due, lambda due: evaluate_due(due, watcher, 'cpu', lambda: None)


def test_a_checkpoint_deleted_during_its_evaluation_is_skipped(
    folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level('INFO', 'llmfoundry_gauntlet')
    watcher, due, evaluate = watcher_of(folder, trained)
    (folder / 'checkpoints/ep0-ba4-rank0.pt').unlink()
    evaluate(due)
    assert 'ep0-ba4-rank0.pt: deleted or overwritten during its evaluation' in caplog.messages
    assert not (folder / 'watched/ba4').exists()
    assert next_due(watcher).checkpoint.name == 'ep0-ba2-rank0.pt'
    assert states(folder) == {'ep0-ba2-rank0.pt': 'running', 'ep0-ba4-rank0.pt': 'released'}


def test_an_evaluation_stops_when_another_watcher_has_taken_over(folder: Path, trained: Path):
    watcher, due, evaluate = watcher_of(folder, trained, expires_seconds=0.05)
    other = Claims(watcher.claims.store, expires_seconds=60.0)
    other.refresh()
    other.owner = 'another'
    assert other.take(due.checkpoint)
    evaluate(due)
    assert not (folder / 'watched/ba4/results.json').exists()
    other.refresh()
    found = other.on(due.checkpoint)[-1]
    assert found.owner == 'another' and found.is_running
    other.write(0.0)
    assert next_due(watcher).checkpoint == due.checkpoint  # released by the other watcher


def test_a_folder_that_was_unreachable_is_listed_again(folder: Path, trained: Path, caplog: pytest.LogCaptureFixture):
    watcher, due, _ = watcher_of(folder, trained)
    watcher.claims.close(0.0)
    (folder / 'checkpoints').rename(folder / 'away')
    (folder / 'checkpoints').write_text('')
    assert watcher.next_step() == 0.5
    assert f'{folder}/checkpoints: is a file' in caplog.text
    (folder / 'checkpoints').unlink()
    (folder / 'away').rename(folder / 'checkpoints')
    assert next_due(watcher).checkpoint == due.checkpoint


def test_a_checkpoint_is_retried_if_its_store_was_unreachable_during_the_evaluation(
    folder: Path, trained: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
):
    path = trained / 'checkpoints/ep0-ba4-rank0.pt'
    s3_server.client.upload_file(str(path), s3_server.bucket, f'run/{path.name}')
    watcher, due, evaluate = watcher_of(folder, trained, folder=s3_server.uri('run'), expires_seconds=1.0)
    monkeypatch.setenv('AWS_MAX_ATTEMPTS', '1')
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:9')
    evaluate(due)
    ((_, state, reason),) = watcher.table()
    assert state == 'failed' and 'the endpoint does not answer' in reason
    monkeypatch.setenv('S3_ENDPOINT_URL', s3_server.endpoint)
    evaluate(next_due(watcher))
    assert watcher.table()[0][1] == 'done'
    assert outcome(folder / 'watched/ba4') == outcome(trained / 'training/ba4')


def test_with_a_time_budget_all_checkpoints_are_evaluated_on_the_same_items(
    watch: Watch, folder: Path, caplog: pytest.LogCaptureFixture
):
    assert watch('--time-budget', '0.2s')[0] == 0
    found_out = [text for text in caplog.messages if text.startswith('time_budget 0.2s: ')]
    assert len(found_out) == 1  # by the first evaluation alone
    first, second = (record(folder / f'watched/ba{batch}')['timing']['time_budget'] for batch in (4, 2))
    assert first and first == second


@pytest.mark.parametrize(
    ('name', 'more', 'message'),
    [
        ('checkpoints', ['--stop-after', 'soon'], "--stop-after is 'soon'; allowed: a time such as '30s'"),
        ('checkpoints', ['--poll', '30'], "--poll is '30'; allowed: a time such as '30s'"),
        ('checkpoints', ['--fewshot', 'some'], "fewshot: is 'some'; allowed: reference, fixed"),
        ('checkpoints', ['--precision', 'fp8'], "precision is 'fp8'; allowed: "),
        ('checkpoints', ['--device', 'tpu'], "device is 'tpu'; allowed: cpu, gpu"),
        ('checkpoints', ['--tasks', 'none.yaml'], 'none.yaml: there is no such file'),
        ('checkpoints', ['--data-root', 'nowhere'], 'sums.jsonl'),
        ('checkpoints', ['--claims', 'gs://bucket'], 'llmfoundry-gauntlet[gcs]'),
        ('checkpoints', ['--claims', '/dev/null'], 'give another folder or URI with --claims'),
        ('elsewhere', [], 'elsewhere: there are no checkpoints at or below it; allowed: *.pt'),
        ('ba3', [], 'is a checkpoint itself; give the folder above it'),
        ('s3://', [], 'names no bucket'),
    ],
)
def test_user_errors_end_the_watch_before_anything_is_claimed(
    watch: Watch, folder: Path, name: str, more: list[str], message: str
):
    (folder / 'ba3').mkdir()
    (folder / 'ba3/config.json').write_text('{}')
    status, _, err = watch(*more, uri=name if '://' in name else folder / name)
    assert status == 2 and message in err
    assert states(folder) == {} and not (folder / 'watched').exists() and not (folder / 'elsewhere').exists()


@pytest.fixture
def training(trained: Path, folder: Path) -> dict[str, Any]:
    """Return the content of a training YAML with loggers."""
    block = {**settings_of(trained), 'interval': '2ba', 'save_folder': str(folder / '{run_name}/gauntlet')}
    loggers = {
        'tensorboard': {'log_dir': str(folder / 'boards')},
        'file': {'filename': str(folder / 'logs/{run_name}.txt')},
    }
    return {'run_name': 'tiny', 'precision': 'fp32', 'callbacks': {'eval_gauntlet': block}, 'loggers': loggers}


def test_metrics_reach_the_loggers_of_a_training_yaml_at_their_training_steps(
    gauntlet: Watch, folder: Path, training: dict[str, Any]
):
    network = folder / 'checkpoints/huggingface/ba7'
    tiny.model().save_pretrained(network)
    tiny.tokenizer().save_pretrained(network)
    (folder / 'train.yaml').write_text(json.dumps(training))
    options = ['--train-yaml', folder / 'train.yaml', '--stop-after', '0s', '--settle', '0.5s', '--poll', '0.1s']
    status, out, err = gauntlet('watch', folder / 'checkpoints', *options)
    assert status == 0, out + err
    assert sorted(path.name for path in (folder / 'tiny/gauntlet').iterdir()) == ['ba2', 'ba4', 'ba7']
    board = EventAccumulator(str(folder / 'boards/tiny'))
    board.Reload()
    key = 'metrics/sums/2-shot/InContextLearningLMAccuracy'
    logged = {event.step: event.value for event in board.Scalars(key)}
    expected = {batch: record(folder / f'tiny/gauntlet/ba{batch}')['metrics'][key] for batch in (2, 4, 7)}
    assert logged == pytest.approx(expected)
    for name, batch in (('ep0-ba2-rank0.pt', 2), ('ep0-ba4-rank0.pt', 4), ('huggingface-ba7', 7)):
        assert f'[batch={batch}' in (folder / f'logs/{name}-tiny.txt').read_text()


def test_errors_in_a_training_yaml_and_options_that_conflict_with_it_are_reported(
    gauntlet: Watch, folder: Path, training: dict[str, Any]
):
    block = training['callbacks']['eval_gauntlet']
    refused = partial(gauntlet, 'watch', folder / 'checkpoints', '--once', '--train-yaml', folder / 'train.yaml')
    for changes, more, messages in (
        ({}, ['--tasks', 'x', '--limit', 3], ['--tasks: has no effect with --train-yaml', '--limit: has no effect']),
        ({'run_name': None}, [], ['loggers', 'no run_name']),
        ({'run_name': None, 'loggers': None}, [], ['give one with --out']),
        ({'loggers': {'wanddb': {}}}, [], ["loggers: unknown key 'wanddb', did you mean 'wandb'?"]),
        ({'callbacks': ['x']}, [], ['callbacks: is a list; allowed: a mapping']),
        ({'callbacks': {}}, [], ['callbacks.eval_gauntlet: is empty; allowed: the settings as a mapping']),
        ({'callbacks': {'eval_gauntlet': {**block, 'save_folder': 3}}}, [], ['save_folder: is 3; allowed: text']),
        ({'callbacks': {'eval_gauntlet': {**block, 'taks': 1}}}, [], ["unknown key 'taks', did you mean 'tasks'?"]),
    ):
        (folder / 'train.yaml').write_text(json.dumps({**training, **changes}))
        status, _, err = refused(*more)
        assert status == 2 and all(message in err for message in messages), err
    assert states(folder) == {}
