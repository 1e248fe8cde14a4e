"""Checkpoints in every form and place, evaluated alone, have the numbers of training."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import composer_training
import forks
import object_store
import pytest
import tiny
import torch
import transformers
from composer.utils import dist
from tiny import outcome, record

from llmfoundry_gauntlet import EvalGauntlet, evaluate
from llmfoundry_gauntlet.data.stores import Store
from llmfoundry_gauntlet.runtime.checkpoint_folders import download
from llmfoundry_gauntlet.runtime.models import open_model

s3_server = object_store.s3_server


@dataclass(frozen=True, slots=True)
class Training:
    """A training of six batches, evaluated and saved at the third and the last."""

    settings: dict[str, str]
    folder: Path  # of its checkpoints
    records: Path
    others: Path  # the last checkpoint in other forms


@pytest.fixture(scope='module')
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp('training')
    settings = tiny.write_tasks(folder)
    callback = EvalGauntlet(**settings, interval='3ba', save_folder=str(folder / 'records'))
    checkpoints, others = folder / 'run' / 'checkpoints', folder / 'others'
    trainer = composer_training.trainer([callback], save_folder=str(checkpoints), save_interval='3ba')
    trainer.fit()
    tiny.save_sharded(torch.load(checkpoints / 'latest-rank0.pt', weights_only=False), others / 'run' / 'ep0-ba6')
    (others / 'run' / 'latest-rank0.pt').symlink_to('ep0-ba6')
    network = trainer.state.model.model
    for name, size in {'one': '1GB', 'several': '20KB'}.items():
        tiny.save(network, others / name, max_shard_size=size)
    trainer.close()
    assert len(list((others / 'several').glob('model-*.safetensors'))) >= 3
    return Training(settings, checkpoints, folder / 'records', others)


def check_against_training(training: Training, out: Path, model: Any, checkpoint: Any) -> None:
    """Check the numbers of the sixth batch, the name of the model, and the training point, None for Hugging Face's."""
    assert outcome(out) == outcome(training.records / 'ba6')
    assert record(out)['model']['name'] == str(model)
    recorded_in_training = record(training.records / 'ba6')['training']
    assert recorded_in_training['token'] == 6 * 2 * 16
    if checkpoint is None:
        assert record(out)['training'] is None
    else:
        # A checkpoint contains no loss.
        point = {**recorded_in_training, 'checkpoint': str(checkpoint), 'loss': None, 'loss_batches': None}
        assert record(out)['training'] == point


def test_a_checkpoint_has_the_numbers_of_training_in_every_form(training: Training, tmp_path: Path):
    link = training.folder / 'latest-rank0.pt'
    of_composer = [link.resolve(), link, *(training.others / 'run').iterdir()]
    assert len(of_composer) == 4
    checkpoint_of_path = {path: path.resolve() for path in of_composer}
    checkpoint_of_path |= {training.others / 'one': None, training.others / 'several': None}

    for number, (path, checkpoint) in enumerate(checkpoint_of_path.items()):
        out = tmp_path / str(number)
        evaluate(path, **training.settings, out=out, device='cpu')
        check_against_training(training, out, path, checkpoint)


def upload(server: Any, training: Training) -> dict[str, str | None]:
    """Upload all forms as Composer and users do; return by key that of the checkpoint, None for Hugging Face's."""
    last = (training.folder / 'latest-rank0.pt').resolve()
    server.client.upload_file(str(last), server.bucket, f'run/{last.name}')
    folders = {'hf/one': 'one', 'hf/several': 'several', 'sharded/ep0-ba6': 'run/ep0-ba6'}
    for key, folder in folders.items():
        for path in (training.others / folder).iterdir():
            server.client.upload_file(str(path), server.bucket, f'{key}/{path.name}')
    targets = {'run/latest-rank0.pt': f'run/{last.name}', 'sharded/latest-rank0.pt': 'sharded/ep0-ba6'}
    for link, target in targets.items():
        server.client.put_object(Bucket=server.bucket, Key=f'{link}.symlink', Body=target.encode())
    server.client.put_object(Bucket=server.bucket, Key='sharded/ep0-ba60/.metadata', Body=b'of another')
    return {
        'run/latest-rank0.pt': f'run/{last.name}',
        'sharded/ep0-ba6/': 'sharded/ep0-ba6',
        'hf/several': None,
        f'run/{last.name}': f'run/{last.name}',
        'run/latest-rank0.pt.symlink': f'run/{last.name}',
        'sharded/latest-rank0.pt.symlink': 'sharded/ep0-ba6',
        'hf/one': None,
    }


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that temporary folders are made in."""
    folder = tmp_path / 'temporary'
    folder.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(folder))
    return folder


def test_a_checkpoint_in_s3_has_the_numbers_of_training_and_leaves_nothing_here(
    training: Training, tmp_path: Path, s3_server: Any, downloads: Path
):
    """Mutation: the link's text taken as relative to the link's own folder."""
    for number, (name, own) in enumerate(upload(s3_server, training).items()):
        out, uri = tmp_path / str(number), s3_server.uri(name)
        evaluate(uri, **training.settings, out=out, device='cpu')
        check_against_training(training, out, uri, own and s3_server.uri(own))
        assert list(downloads.iterdir()) == []


def test_the_optimizer_of_a_sharded_checkpoint_is_not_downloaded(tmp_path: Path, s3_server: Any):
    """The local copy has holes in its place; every weight is there."""
    network = tiny.model()
    content = tiny.content_of(network)
    moments = {f'model.{name}': {'exp_avg': torch.rand(2**18)} for name, _ in network.named_parameters()}
    content['state']['optimizers'] = {'AdamW': {'state': moments}}
    for path in tiny.save_sharded(content, tmp_path / 'saved').iterdir():
        s3_server.client.upload_file(str(path), s3_server.bucket, f'run/ba3/{path.name}')
    (tmp_path / 'here').mkdir()

    copy, _ = download(s3_server.uri('run/ba3'), tmp_path / 'here')

    stats = [path.stat() for path in copy.glob('*.distcp')]
    assert sum(stat.st_size for stat in stats) > len(moments) * 2**20
    assert sum(stat.st_blocks * 512 for stat in stats) < 3 * 2**20  # what is stored of it
    with open_model(str(copy)) as source:
        weights = source.load(torch.device('cpu')).state_dict()
    for name, weight in network.state_dict().items():
        assert torch.equal(weights[name], weight)


def test_missing_parts_of_a_checkpoint_can_be_given(training: Training, tmp_path: Path):
    """A checkpoint of a model that is no HuggingFaceModel has no `integrations`, one of weights alone no time."""
    content = torch.load(training.folder / 'latest-rank0.pt', weights_only=False)
    bare = {'state': {'model': content['state']['model']}}
    torch.save(bare, tmp_path / 'bare.pt')
    tiny.save_sharded(bare, tmp_path / 'bare')
    given = {'tokenizer': str(training.others / 'one'), 'model_config': str(training.others / 'one')}
    for name in ('bare.pt', 'bare'):
        out = tmp_path / f'{name}.out'
        evaluate(tmp_path / name, **training.settings, **given, out=out, device='cpu')
        check_against_training(training, out, tmp_path / name, None)


def train_sharded(folder: Path, settings: dict[str, str]) -> None:
    """Write two checkpoints to `folder/checkpoints`, and records of the evaluations before them to `folder/records`."""
    composer_training.shard_on_cpu()
    dist.initialize_dist('cpu', timeout=60.0)
    composer_training.train(
        [EvalGauntlet(**settings, interval='2ba', save_folder=str(folder / 'records'))],
        max_duration='4ba',
        save_folder=str(folder / 'checkpoints'),
        save_interval='2ba',
        parallelism_config={'fsdp': {'sharding_strategy': 'FULL_SHARD', 'state_dict_type': 'sharded'}},
    )


def test_checkpoints_sharded_by_composer_have_the_numbers_of_training(tmp_path: Path):
    """Two ranks train under FSDP and write a file each; one rank reads both. Each file holds a part of each weight."""
    forks.run(train_sharded, tmp_path / 'log.txt', tmp_path, tiny.write_tasks(tmp_path), num_ranks=2)

    for name, batch in {'ep0-ba2': 2, 'latest-rank0.pt': 4}.items():
        path = tmp_path / 'checkpoints' / name
        out = tmp_path / 'out' / name
        of_training = tmp_path / f'records/ba{batch}'
        assert {file.name for file in path.iterdir()} == {'.metadata', '__0_0.distcp', '__1_0.distcp'}

        evaluate(path, **tiny.settings_of(tmp_path), out=out, device='cpu')

        assert outcome(out) == outcome(of_training)
        assert record(of_training)['training']['checkpoint'] == str(tmp_path / f'checkpoints/ep0-ba{batch}')
        assert record(out)['training'] == {
            'batch': batch,
            'epoch': 0,
            'token': 64 * batch,
            'checkpoint': str(path.resolve()),
            'loss': None,
            'loss_batches': None,
        }


def evaluate_on_ranks(out: Path, models: list[str], settings: dict[str, str]) -> None:
    """Evaluate models into `out/0` and so on, and write to `out/downloads` which rank loads what."""
    download = Store.download

    def noted(self: Store, names: list[str], folder: Path) -> None:
        with (out / 'downloads').open('a') as file:
            file.writelines(f'{dist.get_global_rank()} {self.uri} {name}\n' for name in names)
        download(self, names, folder)

    Store.download = noted
    for number, model in enumerate(models):
        evaluate(model, **settings, out=out / str(number), device='cpu')


def test_one_rank_of_a_machine_downloads_for_all(training: Training, tmp_path: Path, s3_server: Any, downloads: Path):
    """Mutation: every rank downloads for itself."""
    # A file, a sharded one, and a folder of Hugging Face.
    models = [*upload(s3_server, training).items()][:3]
    uris = [s3_server.uri(name) for name, _ in models]
    log = tmp_path / 'log.txt'

    forks.run(evaluate_on_ranks, log, tmp_path, uris, training.settings, num_ranks=2, TMPDIR=str(downloads))

    for number, (name, own) in enumerate(models):
        check_against_training(training, tmp_path / str(number), s3_server.uri(name), own and s3_server.uri(own))
    lines = (tmp_path / 'downloads').read_text().splitlines()
    assert {line.split()[0] for line in lines} == {'0'}
    assert len(lines) >= 6
    assert len(set(lines)) == len(lines), 'an object was downloaded twice'
    assert not list(downloads.glob('gauntlet-model-*'))


def save_forms(folder: Path) -> list[Path]:
    """A model of 155 MB with random weights in every form; the largest weight is a twentieth of it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=768, intermediate_size=2048, num_hidden_layers=5, num_attention_heads=8
    )
    network = transformers.LlamaForCausalLM(config)
    tiny.save(network, folder / 'one')
    tiny.save(network, folder / 'several', max_shard_size='50MB')
    torch.save(tiny.content_of(network), folder / 'whole.pt')
    tiny.save_sharded(tiny.content_of(network), folder / 'sharded')
    tiny.save(network.bfloat16(), folder / 'half')
    torch.save(tiny.content_of(network), folder / 'half.pt')
    return [folder / name for name in ('whole.pt', 'half.pt', 'sharded', 'one', 'several', 'half')]


def mapped_bytes(model: Path) -> int:
    """Return the size of the files that are mapped while a model is read: all but those of a sharded checkpoint."""
    files = [model] if model.is_file() else model.glob('*.safetensors')
    return sum(file.stat().st_size for file in files)


def measure(word: str) -> dict[str, int]:
    """Return the peak memory before and after the weights of `dtype:path` are read, and their size, in bytes."""
    dtype, _, model = word.partition(':')
    with open_model(model, dtype=dtype) as source:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        network = source.load(torch.device('cpu'))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert all(parameter.dtype == getattr(torch, dtype) for parameter in network.parameters())
    return {'before': before, 'after': after, 'weights': sum(value.nbytes for value in network.parameters())}


def measure_each(small: str, words: list[str]) -> None:
    """Print the memory of reading each model as a JSON line."""
    for word in words:
        child = os.fork()  # so that each has a peak of its own
        if not child:
            measure(small)  # maps the pages of libraries that reading uses
            print(json.dumps({'model': word, **measure(word)}), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path):
    """Beside the pages of mapped files, which the system takes back. Mutation: stored tensors are copied at first."""
    models = save_forms(tmp_path)
    words = [f'float32:{model}' for model in models] + [f'bfloat16:{models[number]}' for number in (1, 5)]
    small = tiny.save(tiny.model(), tmp_path / 'tiny')
    log = tmp_path / 'log.txt'

    forks.run(measure_each, log, f'float32:{small}', words)

    measured = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{')]
    assert [of_model['model'] for of_model in measured] == words
    for of_model in measured:
        assert of_model['weights'] > (75e6 if of_model['model'].startswith('bfloat16') else 150e6)
        grown = of_model['after'] - of_model['before']
        mapped = mapped_bytes(Path(of_model['model'].partition(':')[2]))
        assert grown / of_model['weights'] > 0.9, of_model
        assert grown < 1.2 * of_model['weights'] + 1.05 * mapped, of_model
