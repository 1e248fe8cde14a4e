"""What `gauntlet watch` is told, by YAML or options; what is wrong ends it before anything is claimed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import watched
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from watched import Watch, record, states

trained, folder, watch = watched.trained, watched.folder, watched.watch


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (['--order', 'latest'], "--order is 'latest'; allowed: newest, oldest"),
        (['--poll', '30'], "--poll is '30'; allowed: a time such as '30s'"),
        (['--fewshot', 'some'], "fewshot: is 'some'; allowed: reference, fixed"),
        (['--precision', 'fp8'], "precision is 'fp8'; allowed: "),
        (['--device', 'tpu'], "device is 'tpu'; allowed: cpu, gpu"),
        (['--tasks', 'none.yaml'], 'none.yaml: there is no such file'),
        (['--data-root', 'nowhere'], 'sums.jsonl'),
        (['--claims', 'gs://bucket'], 'llmfoundry-gauntlet[gcs]'),
    ],
)
def test_what_the_user_has_wrong_ends_the_watch_before_anything_is_claimed(
    watch: Watch, folder: Path, more: list[str], message: str
):
    status, _, err = watch(*more)
    assert status == 2 and message in err
    assert states(folder) == {} and not (folder / 'watched').exists()


@pytest.fixture
def train_yaml(trained: Path, folder: Path) -> Path:
    """A training's own YAML, with loggers."""
    block = {
        'tasks': str(trained / 'tasks.yaml'),
        'gauntlet': str(trained / 'gauntlet.yaml'),
        'data_root': str(trained),
        'interval': '2ba',
        'save_folder': str(folder / '{run_name}/gauntlet'),
    }
    loggers = {
        'tensorboard': {'log_dir': str(folder / 'boards')},
        'file': {'filename': str(folder / 'logs/{run_name}.txt')},
    }
    values = {'run_name': 'tiny', 'precision': 'fp32', 'callbacks': {'eval_gauntlet': block}, 'loggers': loggers}
    (folder / 'train.yaml').write_text(json.dumps(values))
    return folder / 'train.yaml'


def test_with_a_training_yaml_metrics_reach_its_loggers_at_their_training_steps(
    gauntlet: Callable[..., tuple[int, str, str]], folder: Path, trained: Path, train_yaml: Path
):
    network = folder / 'checkpoints/huggingface/ba7'
    tiny.model().save_pretrained(network)
    tiny.tokenizer().save_pretrained(network)
    options = ['--train-yaml', train_yaml, '--once', '--settle', '0s']
    status, out, err = gauntlet('watch', folder / 'checkpoints', *options)
    assert status == 0, out + err
    assert sorted(path.name for path in (folder / 'tiny/gauntlet').iterdir()) == ['ba2', 'ba4', 'ba7']
    board = EventAccumulator(str(folder / 'boards/tiny'))
    board.Reload()
    key = 'metrics/sums/2-shot/InContextLearningLMAccuracy'
    logged = {event.step: event.value for event in board.Scalars(key)}
    expected = {batch: record(folder / f'tiny/gauntlet/ba{batch}')['metrics'][key] for batch in (2, 4, 7)}
    assert logged == pytest.approx(expected)
    logs = sorted((folder / 'logs').iterdir())
    assert [path.name for path in logs] == [
        'ep0-ba2-rank0.pt-tiny.txt',
        'ep0-ba4-rank0.pt-tiny.txt',
        'huggingface-ba7-tiny.txt',
    ]
    for path, batch in zip(logs, (2, 4, 7), strict=True):
        assert f'[batch={batch}' in path.read_text()


def test_a_training_yaml_says_all_and_says_it_right(
    gauntlet: Callable[..., tuple[int, str, str]], folder: Path, train_yaml: Path
):
    def refused(*more: Any) -> str:
        status, _, err = gauntlet('watch', folder / 'checkpoints', '--train-yaml', train_yaml, '--once', *more)
        assert status == 2 and states(folder) == {}
        return err

    err = refused('--tasks', 'x.yaml', '--limit', 3, '--semantics', 'corrected')
    for option in ('--tasks', '--limit', '--semantics'):
        assert f'{option}: has no effect with --train-yaml' in err
    values = json.loads(train_yaml.read_text())
    train_yaml.write_text(json.dumps({**values, 'run_name': None}))
    assert 'has loggers and no run_name' in refused()
    train_yaml.write_text(json.dumps({**values, 'loggers': {'wanddb': {}}}))
    assert "loggers: unknown key 'wanddb', did you mean 'wandb'?" in refused()
    train_yaml.write_text(json.dumps({**values, 'callbacks': {}}))
    assert 'callbacks.eval_gauntlet: is empty; allowed: the settings as a mapping' in refused()
    values['callbacks']['eval_gauntlet']['taks'] = 1
    train_yaml.write_text(json.dumps(values))
    assert "unknown key 'taks', did you mean 'tasks'?" in refused()


def test_a_folder_without_checkpoints_or_one_that_is_a_checkpoint_is_refused(watch: Watch, folder: Path):
    status, _, err = watch(uri=folder / 'elsewhere')
    assert status == 2 and 'elsewhere: there are no checkpoints at or below it; allowed: *.pt' in err
    assert not (folder / 'elsewhere').exists()
    (folder / 'ba3').mkdir()
    (folder / 'ba3/config.json').write_text('{}')
    status, _, err = watch(uri=folder / 'ba3')
    assert status == 2 and 'is a checkpoint itself; give the folder above it' in err
    status, _, err = watch(uri='s3://')
    assert status == 2 and 'names no bucket' in err
