"""`gauntlet watch` on the checkpoints of a real training: all formats, damage, outages and user errors in this process;
watchers as processes next to the training, killed, terminated, and on two ranks.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import composer_training
import object_store
import pytest
import tiny
import torch
from forks import PATIENCE, command, start, start_ranks, statuses, tail_of
from object_store import S3Server
from tiny import finished_items, journal_lines, outcome, record

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.runtime.logged_values import scalars_in
from llmfoundry_gauntlet.runtime.watch import Watcher, WatchSettings, evaluate_checkpoint

s3_server = object_store.s3_server
Watch = Callable[..., tuple[int, str, str]]
ALL = (2, 4, 6, 8)
BOTH = ['ep0-ba4-rank0.pt', 'ep0-ba2-rank0.pt']
TOKENS = 120  # in a batch


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for eight batches with a checkpoint every other batch, each evaluated by the callback and by two watchers.

    The watchers start before.
    """
    folder = tmp_path_factory.mktemp('trained')
    settings = tiny.write_tasks(folder)
    tiny.write_rows(folder / 'sums.jsonl', [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(150)])
    logs = [folder / 'one.log', folder / 'two.log']
    watchers = [start(command, log, 'watch', *watch_arguments(folder, folder)) for log in logs]
    gauntlet = EvalGauntlet(
        **settings, interval='checkpoint', save_folder=str(folder / 'training'), tokens_per_batch=TOKENS
    )
    slowly = composer_training.AtBatches(dict.fromkeys(range(1, 9), lambda: time.sleep(0.2)))
    saved = {'save_folder': str(folder / 'checkpoints'), 'save_interval': '2ba'}
    composer_training.train([gauntlet, slowly], max_duration='8ba', **saved)
    until(lambda: all_done(folder), logs[0])
    for watcher, log in zip(watchers, logs, strict=True):
        watcher.terminate()
        assert statuses([watcher], log) == [143], tail_of(log)
    return folder


def copy_of(trained: Path, folder: Path, batches: Sequence[int]) -> Path:
    """Copy the checkpoints of these batches, and link the latest."""
    (folder / 'checkpoints').mkdir()
    for batch in batches:
        shutil.copy(trained / f'checkpoints/ep0-ba{batch}-rank0.pt', folder / 'checkpoints')
    (folder / 'checkpoints/latest-rank0.pt').symlink_to(f'ep0-ba{batches[-1]}-rank0.pt')
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """Return a folder with a copy of the first two checkpoints."""
    return copy_of(trained, tmp_path, (2, 4))


def options_of(trained: Path) -> list[str]:
    """Return the settings for the tasks as options of the command."""
    settings = {**tiny.settings_of(trained), 'tokens_per_batch': str(TOKENS)}
    return [word for name, value in settings.items() for word in (f'--{name.replace("_", "-")}', value)]


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
            'loss': None,  # which a checkpoint does not contain
            'loss_batches': None,
        }
    assert runs(caplog) == BOTH
    assert out.count('ep0-ba4-rank0.pt: done ') == 1 and 'latest' not in out
    written = {path: path.stat().st_mtime_ns for path in (folder / 'watched').rglob('*')}
    assert watch()[0] == 0
    assert watch(out=trained / 'training')[0] == 0  # of the callback
    assert runs(caplog) == []
    for more, differing in (
        (('--subset-items', 2), 'subset_items None (now 2)'),
        (('--max-seq-len', 64), 'max_seq_len 128'),
    ):
        status, _, err = watch(*more)
        assert status == 2 and differing in err and 'give another --out' in err
    assert written == {path: path.stat().st_mtime_ns for path in (folder / 'watched').rglob('*')}
    assert watch('--subset-items', 2, out='fewer')[0] == 0
    assert runs(caplog) == BOTH
    assert record(folder / 'fewer/ba2')['tasks']['sums/0-shot']['num_items'] == 2


def test_a_damaged_checkpoint_is_skipped_until_it_changes_and_an_overwritten_one_is_evaluated_again(
    watch: Watch, folder: Path, trained: Path, caplog: pytest.LogCaptureFixture
):
    older, newer = (folder / f'checkpoints/{name}' for name in reversed(BOTH))
    whole = newer.read_bytes()
    newer.write_bytes(whole[: len(whole) // 2])
    status, out, _ = watch()
    assert status == 1 and 'ep0-ba4-rank0.pt: damaged' in out
    assert '1 damaged' in out.splitlines()[-1]
    assert f'is truncated after {len(whole) // 2} bytes' in caplog.text and runs(caplog) == BOTH
    assert outcome(folder / 'watched/ba2') == outcome(trained / 'training/ba2')

    torch.save({'state': {'nothing': 1}}, newer)
    content = torch.load(older, weights_only=False)
    other = {f'model.{name}': value for name, value in tiny.model(seed=5).state_dict().items()}
    content['state']['model'] = {name: other[name] for name in content['state']['model']}
    torch.save(content, older)
    assert watch()[0] == 1
    assert 'has no weights: it holds the keys state; ' in caplog.text and runs(caplog) == BOTH
    assert not (folder / 'watched/ba4').exists()
    assert outcome(folder / 'watched/ba2') != outcome(trained / 'training/ba2')
    assert not (folder / 'watched/ba2/journal').exists()

    newer.write_bytes(whole)
    assert watch()[0] == 0
    assert runs(caplog) == ['ep0-ba4-rank0.pt']
    assert outcome(folder / 'watched/ba4') == outcome(trained / 'training/ba4')


def test_results_are_the_same_in_an_object_store_and_an_outage_only_delays_them(
    watch: Watch, folder: Path, trained: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
):
    for path in (folder / 'checkpoints').glob('ep*.pt'):
        s3_server.client.upload_file(str(path), s3_server.bucket, f'run/checkpoints/{path.name}')
    s3_server.client.put_object(
        Bucket=s3_server.bucket, Key='run/checkpoints/latest-rank0.pt.symlink', Body=b'run/checkpoints/ep0-ba4-rank0.pt'
    )
    uri, settings = s3_server.uri('run/checkpoints'), tiny.settings_of(trained)
    options = WatchSettings(folder=uri, out=folder / 'watched', settings=settings, settle_seconds=0)
    watcher = Watcher(options, load_data(decode_settings(settings, 'watch')))
    newest = watcher.next_step()
    monkeypatch.setenv('AWS_MAX_ATTEMPTS', '1')
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:9')
    evaluate_checkpoint(newest, watcher)
    monkeypatch.setenv('S3_ENDPOINT_URL', s3_server.endpoint)
    assert watcher.next_step().name == 'ep0-ba2-rank0.pt' and watcher.states[newest][0] == 'waiting'
    status, out, err = watch(uri=uri)
    assert status == 0, out + err
    for batch in (2, 4):
        assert outcome(folder / f'watched/ba{batch}') == outcome(trained / f'training/ba{batch}')
        assert record(folder / f'watched/ba{batch}')['training']['checkpoint'] == f'{uri}/ep0-ba{batch}-rank0.pt'
    claims = {name.rpartition('/')[2].partition('@')[0] for name in s3_server.names('run/checkpoints/.gauntlet/')}
    assert claims == {*BOTH, 'settings.json'}


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
        ('checkpoints', ['--settle', 'soon'], "--settle: is 'soon'; allowed: a time such as '30s'"),
        ('checkpoints', ['--stop-after', '1h'], '--stop-after: has no effect with --once'),
        ('checkpoints', ['--poll', '30'], "--poll: is '30'; allowed: a time such as '30s'"),
        ('checkpoints', ['--fewshot', 'some'], "--fewshot: is 'some'; allowed: reference, fixed"),
        ('checkpoints', ['--precision', 'fp8'], "--precision: is 'fp8'"),
        ('checkpoints', ['--device', 'tpu'], "--device: is 'tpu'"),
        ('checkpoints', ['--tasks', 'none.yaml'], 'none.yaml: there is no such file'),
        ('checkpoints', ['--data-root', 'nowhere'], 'sums.jsonl'),
        ('checkpoints', ['--claims', 'gs://bucket'], 'llmfoundry-gauntlet[gcs]'),
        ('checkpoints', ['--claims', '/proc/claims'], 'give another folder or URI for claims with --claims'),
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
    assert not any(
        path.exists() for path in (folder / 'checkpoints/.gauntlet', folder / 'watched', folder / 'elsewhere')
    )


@pytest.fixture
def training(trained: Path, folder: Path) -> dict[str, Any]:
    """Return the content of a training YAML with loggers."""
    block = {**tiny.settings_of(trained), 'interval': '2ba', 'save_folder': str(folder / '{run_name}/gauntlet')}
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
    key = 'metrics/sums/2-shot/InContextLearningLMAccuracy'
    logged = {step: value for (name, step), value in scalars_in(folder / 'boards/tiny').items() if name == key}
    records = {2: 'ba2', 4: 'ba4', 7: 'huggingface/ba7'}
    metrics = {batch: record(folder / 'tiny/gauntlet' / name)['metrics'] for batch, name in records.items()}
    assert logged == pytest.approx({batch: values[key] for batch, values in metrics.items()})
    for name, batch in (('ep0-ba2-rank0.pt', 2), ('ep0-ba4-rank0.pt', 4), ('huggingface-ba7', 7)):
        assert f'[batch={batch}' in (folder / f'logs/{name}-tiny.txt').read_text()


@pytest.mark.parametrize(
    ('changes', 'messages'),
    [
        # of the run
        ({'run_name': None}, ['loggers', 'no run_name']),
        ({'run_name': None, 'loggers': None}, ['--out: is missing']),
        ({'loggers': {'wanddb': {}}}, ["loggers: unknown key 'wanddb', did you mean 'wandb'?"]),
        # of the callback
        ({'callbacks': ['x']}, ['callbacks: is a list; allowed: a mapping']),
        ({'callbacks': {}}, ['callbacks.eval_gauntlet: is empty; allowed: a mapping']),
        ({'callbacks': {'eval_gauntlet': {'save_folder': 3}}}, ['save_folder: is 3; allowed: text']),
        ({'callbacks': {'eval_gauntlet': {'taks': 1}}}, ["unknown key 'taks', did you mean 'tasks'?"]),
    ],
)
def test_errors_in_a_training_yaml_end_the_watch(
    gauntlet: Watch, folder: Path, training: dict[str, Any], changes: dict[str, Any], messages: list[str]
):
    (folder / 'train.yaml').write_text(json.dumps({**training, **changes}))

    status, _, err = gauntlet('watch', folder / 'checkpoints', '--once', '--train-yaml', folder / 'train.yaml')

    assert status == 2
    assert [message for message in messages if message not in err] == []
    assert not (folder / 'checkpoints/.gauntlet').exists()


@pytest.mark.parametrize(
    ('words', 'messages'),
    [
        (
            ['--tasks', 'x', '--limit', 3],
            ['--tasks: has no effect with --train-yaml', '--limit: has no effect with --train-yaml'],
        ),
        # The precision replaces that of the file.
        (['--precision', 'fp7'], ["--precision: is 'fp7'"]),
    ],
)
def test_options_beside_a_training_yaml_are_checked(
    gauntlet: Watch, folder: Path, training: dict[str, Any], words: list[Any], messages: list[str]
):
    (folder / 'train.yaml').write_text(json.dumps(training))

    status, _, err = gauntlet('watch', folder / 'checkpoints', '--once', '--train-yaml', folder / 'train.yaml', *words)

    assert status == 2
    assert [message for message in messages if message not in err] == []
    assert not (folder / 'checkpoints/.gauntlet').exists()


def until(condition: Callable[[], bool], log: Path) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, tail_of(log)
        time.sleep(0.02)


def watch_arguments(trained: Path, folder: Path, *more: Any) -> list[str]:
    """Return the arguments of a watch of a folder."""
    small = ['--device', 'cpu', '--poll', '0.2s', '--settle', '0.3s', '--out', folder / 'watched']
    return [str(word) for word in (folder / 'checkpoints', *options_of(trained), *small, *more)]


def claims(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return all claims; those that are being written are empty."""
    paths = (folder / 'checkpoints/.gauntlet').glob('*/*@*.json')
    return {path: json.loads(path.read_text() or '{"owner": "", "expires": 1e12}') for path in paths}


def all_done(folder: Path) -> bool:
    is_done = all((folder / f'watched/ba{batch}/results.json').exists() for batch in ALL)
    # A claim that was taken over stays as it was; the last one of a checkpoint is valid.
    last_claims = {path.name.partition('@')[0]: claim for path, claim in sorted(claims(folder).items())}
    return is_done and not any(claim['expires'] > time.time() for claim in last_claims.values())


def assert_same_as_training(watched: Path, training: Path) -> None:
    """Check that metrics and samples are equal and that there are no other records."""
    assert sorted(path.name for path in watched.iterdir()) == [f'ba{batch}' for batch in ALL]
    for batch in ALL:
        assert outcome(watched / f'ba{batch}') == outcome(training / f'ba{batch}')
        point = record(watched / f'ba{batch}')['training']
        assert point['batch'] == batch and Path(point['checkpoint']).name == f'ep0-ba{batch}-rank0.pt'


def test_two_watchers_next_to_a_training_give_the_results_of_the_callback_each_checkpoint_once(trained: Path):
    assert_same_as_training(trained / 'watched', trained / 'training')
    logs = [(trained / name).read_text() for name in ('one.log', 'two.log')]
    assert 'damaged' not in ''.join(logs)
    evaluations = [[line for line in log.splitlines() if ': 314 items in ' in line] for log in logs]
    assert sum(map(len, evaluations)) == 4 and all(evaluations)
    owners = {claim['owner'] for claim in claims(trained).values()}
    assert len(claims(trained)) == 4 and len(owners) == 2


@pytest.mark.parametrize(('number', 'status'), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_another_watcher_resumes_the_evaluation_of_one_that_ended(
    trained: Path, tmp_path: Path, number: int, status: int
):
    """It resumes at once, also after SIGKILL, which leaves a claim of ten minutes."""
    folder = copy_of(trained, tmp_path, ALL)
    log, out = folder / 'first.log', folder / 'watched/ba8'
    watcher = start(command, log, 'watch', *watch_arguments(trained, folder))
    until(lambda: len(journal_lines(out)) >= 50, log)
    os.kill(watcher.pid, number)
    assert statuses([watcher], log) == [status], tail_of(log)
    is_killed = number == signal.SIGKILL
    (claim,) = claims(folder).values()
    assert bool(claim['expires']) == is_killed
    num_finished = finished_items(out)
    log = folder / 'second.log'
    assert statuses([start(command, log, 'watch', *watch_arguments(trained, folder, '--once'))], log) == [0], tail_of(
        log
    )
    assert (f':{watcher.pid}' in log.read_text().partition('taken over from ')[2]) == is_killed
    assert record(out)['timing']['reused_items'] == num_finished > 0
    assert all_done(folder)
    assert_same_as_training(folder / 'watched', trained / 'training')
    order = [line.split()[2] for line in log.read_text().splitlines() if ' running by ' in line]
    assert [name for name in order if 'ba8' not in name] == [f'ep0-ba{batch}-rank0.pt:' for batch in (6, 4, 2)]


def test_two_ranks_exit_on_sigterm_and_then_give_the_same_results_while_only_rank_0_logs(trained: Path, tmp_path: Path):
    folder = copy_of(trained, tmp_path, ALL)
    (folder / 'checkpoints/ep0-ba1-rank0.pt').write_bytes(b'torn')
    logs = [folder / f'rank{rank}.txt' for rank in (0, 1)]
    ranks = start_ranks(command, logs, 'watch', *watch_arguments(trained, folder))
    until(lambda: len(journal_lines(folder / 'watched/ba8')) >= 50, logs[0])
    for rank in ranks:
        rank.terminate()
    assert statuses(ranks, logs[0]) == [143, 143]
    assert [claim['expires'] for claim in claims(folder).values()] == [0]
    ranks = start_ranks(command, logs, 'watch', *watch_arguments(trained, folder, '--once'))
    assert statuses(ranks, logs[0]) == [1, 0]
    assert record(folder / 'watched/ba8')['timing']['reused_items'] >= 45
    assert_same_as_training(folder / 'watched', trained / 'training')
    assert logs[0].read_text().count('\nep0-ba1-rank0.pt: damaged') == 1
    assert 'ep0-ba2-rank0.pt: done ' in logs[0].read_text() and 'ep0-' not in logs[1].read_text()
