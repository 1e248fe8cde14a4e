"""Models that cannot be evaluated: `gauntlet run` says in a line what is wrong with which file, with status 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import object_store
import pytest
import tiny
import torch
from paths import FIXTURES

Refused = Callable[..., str]
s3_server = object_store.s3_server
ROTARY = FIXTURES / 'models' / 'rotary_bos'


@pytest.fixture
def refused(gauntlet: Any, models: Path, tmp_path: Path) -> Callable[..., str]:
    """Return the error of `gauntlet run` for a model that it refuses."""

    def run(model: Any, *words: Any) -> str:
        tasks = ['--tasks', models / 'tasks.yaml', '--data-root', models]
        options = ['--out', tmp_path / 'out', '--device', 'cpu', *words]
        status, _, error = gauntlet('run', '--model', model, *tasks, *options)
        assert status == 2, error
        assert error.count('error: ') == 1, error
        assert not (tmp_path / 'out').exists()
        return error.partition('error: ')[2].strip()

    return run


def cut(path: Path, size: int) -> Path:
    """Truncate the file."""
    with path.open('r+b') as file:
        file.truncate(size)
    return path


def test_a_checkpoint_of_another_architecture_or_without_a_weight(models: Path, tmp_path: Path, refused: Refused):
    network = networks.network('gpt2', vocab_size=259)
    network.config.save_pretrained(tmp_path / 'gpt2')
    num_of_gpt2 = len([name for name in network.state_dict() if name != 'lm_head.weight'])  # which is tied
    num_of_llama = len(networks.network('llama').state_dict())
    if networks.IS_TRANSFORMERS_5:  # which takes Llama's lm_head for the tied weight
        num_of_gpt2, num_of_llama = num_of_gpt2 - 1, num_of_llama - 1

    error = refused(models / 'whole.pt', '--model-config', tmp_path / 'gpt2')

    assert error.startswith(f'{models / "whole.pt"}: the weights do not match the configuration, which is of gpt2: ')
    assert f'which is of gpt2: {num_of_gpt2} (transformer.h.0.attn.c_attn.bias, ' in error
    assert f' missing, {num_of_llama} (' in error
    assert 'model.embed_tokens.weight, ' in error
    # Five names of each kind, and how many more there are.
    assert error.count(' more)') == 2
    assert error.count('.weight') + error.count('.bias') == 10
    assert '--model-config' in error

    content = torch.load(models / 'whole.pt', weights_only=False)
    del content['state']['model']['model.model.norm.weight']
    torch.save(content, tmp_path / 'x.pt')

    error = refused(tmp_path / 'x.pt')

    assert 'which is of llama: 1 (model.norm.weight) missing, none unknown' in error


@pytest.mark.parametrize('family', ['mpt', 'llama'])
def test_a_weight_that_transformers_allows_to_be_missing(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, family: str
):
    """transformers 4.53 leaves MPT's output embedding out of its report, also where it is not tied."""
    network = networks.network(family, vocab_size=259, tie_word_embeddings=False)
    if family == 'llama':
        monkeypatch.setattr(type(network), '_keys_to_ignore_on_load_missing', ['lm_head'])
    stored = {name: tensor for name, tensor in network.state_dict().items() if name != 'lm_head.weight'}
    tiny.save(network, tmp_path / family)
    (tmp_path / family / 'model.safetensors').unlink()
    torch.save(stored, tmp_path / family / 'pytorch_model.bin')

    error = refused(tmp_path / family)

    assert f'which is of {family}: 1 (lm_head.weight) missing, none unknown' in error


@pytest.mark.parametrize('model', ['whole.pt', 'sharded', 'one'])
def test_shapes_that_differ(models: Path, tmp_path: Path, refused: Refused, model: str):
    config = networks.network('llama', vocab_size=259, intermediate_size=80, max_position_embeddings=128).config
    config.save_pretrained(tmp_path / 'wide')

    error = refused(models / model, '--model-config', tmp_path / 'wide')

    first_shape = 'model.layers.0.mlp.gate_proj.weight is [64, 32] in the file and [80, 32] in the model, '
    assert f'{models / model}: the weights do not match the configuration: {first_shape}' in error
    assert ' more; ' in error
    assert error.count(' in the model') == 5


@pytest.mark.parametrize(
    'size_of',
    [
        lambda whole: whole - 1000,
        lambda whole: whole // 2,
        lambda whole: 0,
    ],
)
def test_a_truncated_file(models: Path, tmp_path: Path, refused: Refused, size_of: Callable[[int], int]):
    path = shutil.copy(models / 'whole.pt', tmp_path / 'x.pt')
    size = size_of(path.stat().st_size)
    cut(path, size)

    assert f'x.pt: is not a checkpoint: it is truncated after {size} bytes, or ' in refused(path)


def test_a_file_of_another_kind(tmp_path: Path, refused: Refused):
    torch.save({'weights': {}}, tmp_path / 'x.pt')

    assert 'x.pt: has no weights: it holds the keys weights; allowed: ' in refused(tmp_path / 'x.pt')


def test_a_compressed_file(models: Path, tmp_path: Path, refused: Refused):
    path = shutil.copy(models / 'whole.pt', tmp_path / 'x.pt.gz')

    assert 'x.pt.gz: is compressed' in refused(path)


def test_a_link_to_a_file_that_does_not_exist(tmp_path: Path, refused: Refused):
    link = tmp_path / 'latest-rank0.pt'
    link.symlink_to('ep1-ba2-rank0.pt')

    assert 'latest-rank0.pt: is a link to ep1-ba2-rank0.pt, which does not exist' in refused(link)


def test_a_checkpoint_without_configuration_and_tokenizer(tmp_path: Path, refused: Refused):
    torch.save({'state': {'model': {}}}, tmp_path / 'x.pt')

    error = refused(tmp_path / 'x.pt')

    advice = 'give them with --model-config and --tokenizer'
    assert f'x.pt: has no Hugging Face configuration and tokenizer; {advice}' in error


@pytest.fixture
def several(models: Path, tmp_path: Path) -> Path:
    """Return a Hugging Face folder with its weights in several files."""
    return shutil.copytree(models / 'several', tmp_path / 'several')


def test_a_hugging_face_folder_with_a_truncated_file(several: Path, refused: Refused):
    second = sorted(several.glob('model-*.safetensors'))[1]
    size = second.stat().st_size - 100
    cut(second, size)

    assert f'{second}: cannot be read ({size} bytes): ' in refused(several)


def test_a_hugging_face_folder_without_one_of_its_files(several: Path, refused: Refused):
    files = sorted(several.glob('model-*.safetensors'))
    files[1].unlink()

    index = several / 'model.safetensors.index.json'
    assert f'{index}: of {len(files)} files 1 are missing: {files[1].name}' in refused(several)


def test_a_hugging_face_folder_without_an_index(several: Path, refused: Refused):
    (several / 'model.safetensors.index.json').unlink()

    assert f'{several}: has no weights; allowed: model.safetensors, ' in refused(several)


@pytest.fixture
def sharded(models: Path, tmp_path: Path) -> Path:
    """Return the folder of a checkpoint of one shard."""
    return shutil.copytree(models / 'sharded', tmp_path / 'ep0-ba2')


def test_a_shard_with_other_bytes(sharded: Path, refused: Refused):
    shard = sharded / '__0_0.distcp'
    shard.write_bytes(b'\xff' * shard.stat().st_size)

    assert f'{sharded}: cannot be read: ' in refused(sharded)


def test_a_truncated_shard(sharded: Path, refused: Refused):
    shard = sharded / '__0_0.distcp'
    size = shard.stat().st_size
    cut(shard, size - 1)

    assert f'{shard}: is truncated after {size - 1} of {size} bytes' in refused(sharded)


def test_a_missing_shard(sharded: Path, refused: Refused):
    (sharded / '__0_0.distcp').unlink()

    assert f'{sharded}: of 1 files 1 are missing: __0_0.distcp' in refused(sharded)


def test_truncated_metadata_of_shards(sharded: Path, refused: Refused):
    metadata = cut(sharded / '.metadata', 100)

    assert f'{metadata}: cannot be read: ' in refused(sharded)


def test_shards_without_metadata(sharded: Path, refused: Refused):
    (sharded / '.metadata').unlink()

    assert f'{sharded}: has shards but no .metadata' in refused(sharded)


def test_weights_that_are_no_floating_numbers(models: Path, tmp_path: Path, refused: Refused):
    content = torch.load(models / 'whole.pt', weights_only=False)
    weights = content['state']['model']
    content['state']['model'] = {name: weight.to(torch.int8) for name, weight in weights.items()}
    torch.save(content, tmp_path / 'x.pt')

    error = refused(tmp_path / 'x.pt')

    assert 'the weights cannot be read: model.embed_tokens.weight is int8, ' in error
    assert 'allowed: float32, ' in error


def test_quantised_weights(models: Path, tmp_path: Path, refused: Refused):
    folder = shutil.copytree(models / 'one', tmp_path / 'one')
    config = json.loads((folder / 'config.json').read_text())
    config['quantization_config'] = {'quant_method': 'fp8'}
    (folder / 'config.json').write_text(json.dumps(config))

    assert f'{folder}: has quantised weights; allowed: float32, ' in refused(folder)


@pytest.mark.parametrize(
    ('name', 'problem'),
    [
        # Names that the hub could have.
        ('no_such_folder', 'there is no such file or folder, HF_HUB_OFFLINE is set, and the model is not in the cache'),
        ('nobody/no-such-model', 'there is no such file or folder, HF_HUB_OFFLINE is set, and the model'),
        # Names that it cannot have.
        ('not a name', 'there is no such file or folder, and the Hugging Face hub has no such model'),
        ('./nowhere', 'there is no such file or folder'),
        ('nowhere.pt', 'there is no such file or folder'),
    ],
)
def test_a_missing_model(refused: Refused, name: str, problem: str):
    assert refused(name).startswith(f'--model: {name}: {problem}')


def test_a_hub_that_cannot_be_reached_is_asked_once(models: Path, tmp_path: Path):
    """Mutation: transformers asks for each file, and repeats itself for half a minute, twice in the log."""
    hub = {'HF_HUB_OFFLINE': '0', 'HF_ENDPOINT': 'http://127.0.0.1:9', 'HF_HOME': str(tmp_path)}
    program = [sys.executable, '-m', 'llmfoundry_gauntlet', 'run', '--model', 'nobody/nothing']
    tasks = ['--tasks', str(models / 'tasks.yaml'), '--data-root', str(models)]
    command = [*program, *tasks, '--out', str(tmp_path / 'out')]
    started = time.monotonic()

    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **hub}, timeout=60)

    assert time.monotonic() - started < 20  # on a busy machine
    assert done.returncode == 2
    assert done.stdout == ''
    assert done.stderr.count('\n') == 1
    assert 'nobody/nothing: there is no such file or folder, http://127.0.0.1:9 cannot be reached' in done.stderr


def test_a_folder_without_a_tokenizer(models: Path, tmp_path: Path, refused: Refused):
    folder = shutil.copytree(models / 'one', tmp_path / 'one', ignore=shutil.ignore_patterns('*token*'))
    assert refused(folder) == f'{folder}: has no tokenizer; give one with --tokenizer, a folder or a name on the hub'


@pytest.mark.parametrize(
    ('option', 'value', 'hint'),
    [
        # A tokenizer without a template, and one of another model.
        ('--apply-chat-template', None, 'has no chat template; leave out --apply-chat-template'),
        ('--tokenizer', ROTARY, 'do not match: the tokenizer has 900 tokens with ids up to 899, '),
        # Values that are close to one that is allowed, or far from it.
        ('--precision', 'bf16', "did you mean 'amp_bf16'?"),
        ('--precision', 'fp16', "did you mean 'amp_fp16'?"),
        ('--dtype', 'bf16', "is 'bf16', did you mean 'bfloat16'?"),
        ('--dtype', 'int4', "is 'int4'; allowed: bfloat16, float16, float32"),
        ('--loggers', 'wanb', "did you mean 'wandb'?"),
        # A model that is here, and an adapter that is not.
        ('--revision', 'v1', 'is on this machine; --revision is only for a name'),
        ('--adapter', 'nowhere', 'nowhere: there is no such file or folder'),
    ],
)
def test_a_value_that_is_not_allowed(models: Path, refused: Refused, option: str, value: Any, hint: str):
    words = [option] if value is None else [option, value]

    assert hint in refused(models / 'one', *words)


@pytest.fixture
def checkpoints(models: Path, tmp_path: Path) -> Path:
    """Return a folder as a training leaves it: files, a sharded one, links, and what has nothing to do with it."""
    folder = tmp_path / 'checkpoints'
    shutil.copytree(models / 'sharded', folder / 'ep0-ba4')
    shutil.copy(models / 'whole.pt', folder / 'ep0-ba2-rank0.pt')
    (folder / 'latest-rank0.pt').symlink_to('ep0-ba2-rank0.pt')
    (folder / 'notes.txt').write_text('')
    return folder


def test_a_folder_of_checkpoints_is_listed(checkpoints: Path, refused: Refused):
    names = 'ep0-ba2-rank0.pt, ep0-ba4, latest-rank0.pt'

    assert refused(checkpoints).endswith(f'is a folder of 3 checkpoints; name one of them: {names}')


def test_a_hugging_face_folder_among_checkpoints_is_listed(models: Path, checkpoints: Path, refused: Refused):
    shutil.copytree(models / 'one', checkpoints / 'hf')

    names = 'ep0-ba2-rank0.pt, ep0-ba4, hf, '
    assert f'is a folder of 4 checkpoints; name one of them: {names}' in refused(checkpoints)


def put(server: Any, key: str, content: bytes) -> None:
    server.client.put_object(Bucket=server.bucket, Key=key, Body=content)


def test_a_folder_of_checkpoints_in_s3_is_listed(models: Path, s3_server: Any, refused: Refused):
    for name in ('ep0-ba2-rank0.pt', 'ep0-ba4-rank0.pt'):
        s3_server.client.upload_file(str(models / 'whole.pt'), s3_server.bucket, f'run/{name}')

    error = refused(s3_server.uri('run'))

    assert 'is a folder of 2 checkpoints; name one of them: ep0-ba2-rank0.pt, ep0-ba4-rank0.pt' in error


def test_an_object_that_is_missing_in_s3(s3_server: Any, refused: Refused):
    absent = s3_server.uri('run/ep0-ba9-rank0.pt')

    assert refused(absent) == f'{absent}: there is no such object, and nothing below it'


def test_a_link_in_s3_to_a_missing_object(s3_server: Any, refused: Refused):
    put(s3_server, 'run/gone.symlink', b'run/ep0-ba9-rank0.pt')

    error = refused(s3_server.uri('run/gone.symlink'))

    assert error.startswith(f'{s3_server.uri("run/ep0-ba9-rank0.pt")}: there is no such object')


def test_a_link_in_s3_to_itself(s3_server: Any, refused: Refused):
    put(s3_server, 'run/round.symlink', b'run/round.symlink')

    error = refused(s3_server.uri('run/round.symlink'))

    assert "leads to 'run/round.symlink'; allowed: the key of" in error


def test_a_bucket_that_does_not_exist(s3_server: Any, refused: Refused):
    error = refused('s3://no-such-bucket/x.pt')

    assert 's3://no-such-bucket' in error
    assert 'bucket does not exist' in error


def test_an_incomplete_folder_in_s3_is_named_rather_than_its_copy(s3_server: Any, refused: Refused):
    put(s3_server, 'hf/config.json', b'{"model_type": "llama"}')

    assert refused(s3_server.uri('hf')).startswith(s3_server.uri('hf'))


@pytest.mark.parametrize(
    ('metadata', 'problem'),
    [
        (None, ': has shards but no .metadata'),
        (b'torn', '/.metadata: cannot be read'),
    ],
)
def test_shards_in_s3_without_their_metadata(
    models: Path, s3_server: Any, refused: Refused, metadata: bytes | None, problem: str
):
    s3_server.client.upload_file(str(models / 'sharded/__0_0.distcp'), s3_server.bucket, 'run/ba4/__0_0.distcp')
    if metadata is not None:
        put(s3_server, 'run/ba4/.metadata', metadata)

    folder = s3_server.uri('run/ba4')
    assert refused(folder).startswith(f'{folder}{problem}')
