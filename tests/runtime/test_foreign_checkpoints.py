"""Untrusted checkpoints and model folders run no code, and damaged files of folders are named in a line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import networks
import pytest
import tiny
import torch

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.runtime.checkpoints import read_file, read_folder, read_sharded, warn_of_pickles
from llmfoundry_gauntlet.runtime.models import open_model


class Marking:
    """Run a command or create a file when unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


class Own:
    """An object of a class that the reader does not know, with a state."""

    def __init__(self) -> None:
        self.count = 3


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the file that untrusted code would create."""
    return tmp_path / 'code has run'


@pytest.fixture
def content() -> dict[str, Any]:
    """Return the content of a small Composer checkpoint."""
    network = networks.network('llama', vocab_size=259, max_position_embeddings=128)
    return tiny.content_of(network)


COUNTS = {'iteration': 0, 'epoch': 0, 'batch': 7, 'sample': 0, 'token': 0}  # of a Timestamp's state, among others


def stored_timestamp(form: str) -> Any:
    """Return a timestamp as Composer stores it, or as it did earlier: the object itself."""
    if form == 'counts':
        return {'Timestamp': COUNTS}
    core = pytest.importorskip('composer.core', reason='mosaicml is not installed')
    return core.Timestamp(batch=core.Time(7, core.TimeUnit.BATCH))


of_timestamps = pytest.mark.parametrize('form', ['counts', 'object'])


@of_timestamps
def test_objects_of_unknown_classes_in_a_checkpoint_are_not_created(
    tmp_path: Path, marker: Path, content: dict[str, Any], form: str
):
    content['state']['callbacks'] = {'own': {'state': Own(), 'code': Marking(open, marker, 'w')}}
    content['state']['timestamp'] = stored_timestamp(form)
    torch.save(content, tmp_path / 'x.pt')

    checkpoint = read_file(tmp_path / 'x.pt')

    assert not marker.exists()
    assert checkpoint.training is not None
    assert checkpoint.training.batch == 7
    assert len(checkpoint.read_weights().tensors) == len(content['state']['model'])


@of_timestamps
def test_a_model_is_read_beside_objects_of_unknown_classes(
    tmp_path: Path, marker: Path, content: dict[str, Any], form: str
):
    content['state']['callbacks'] = {'own': {'state': Own(), 'code': Marking(open, marker, 'w')}}
    content['state']['timestamp'] = stored_timestamp(form)
    torch.save(content, tmp_path / 'x.pt')

    with open_model(str(tmp_path / 'x.pt')) as source:
        assert source.config.model_type == 'llama'
        assert source.tokenizer('a')['input_ids'] == tiny.tokenizer()('a').input_ids
    assert not marker.exists()


@pytest.mark.parametrize(
    ('version', 'num_warnings'),
    [
        ('2.9.1+cu128', 1),
        ('2.10.0', 0),
    ],
)
def test_a_torch_whose_reader_of_pickles_has_a_fault_is_told_once(
    tmp_path: Path, content: dict[str, Any], caplog, monkeypatch: pytest.MonkeyPatch, version: str, num_warnings: int
):
    """Mutation: at every file, or at every version."""
    monkeypatch.setattr(torch, '__version__', version)
    warn_of_pickles.cache_clear()
    torch.save(content, tmp_path / 'x.pt')

    read_file(tmp_path / 'x.pt')
    read_file(tmp_path / 'x.pt')

    assert [('CVE-2026-24747' in message) for message in caplog.messages] == [True] * num_warnings
    warn_of_pickles.cache_clear()


def test_an_object_instead_of_the_weights_is_an_error(tmp_path: Path, marker: Path, content: dict[str, Any]):
    content['state']['model'] = Marking(open, marker, 'w')
    torch.save(content, tmp_path / 'x.pt')

    with pytest.raises(ModelError, match=r'x\.pt: '), open_model(str(tmp_path / 'x.pt')):
        pass

    assert not marker.exists()


def test_an_object_instead_of_the_configuration_is_an_error(tmp_path: Path, marker: Path, content: dict[str, Any]):
    code = Marking(open, marker, 'w')
    content['state']['integrations']['huggingface'] = {'model': code, 'tokenizer': code}
    torch.save(content, tmp_path / 'x.pt')

    with pytest.raises(ModelError, match=r'x\.pt: '), open_model(str(tmp_path / 'x.pt')):
        pass

    assert not marker.exists()


@pytest.mark.parametrize('key', ['model', 'model_state_dict', 'state_dict', 'module'])
def test_objects_in_a_checkpoint_of_a_loop_are_not_created(tmp_path: Path, marker: Path, key: str):
    """Beside the weights, among them and in their place."""
    code = Marking(open, marker, 'w')
    weights = {'w': torch.ones(2), 'own': Own(), 'code': code}
    torch.save({key: weights, 'config': Own(), 'code': code}, tmp_path / 'beside.pt')
    torch.save({key: code}, tmp_path / 'instead.pt')

    checkpoint = read_file(tmp_path / 'beside.pt')
    with pytest.raises(ModelError, match=r'instead\.pt: has no weights: '):
        read_file(tmp_path / 'instead.pt')

    assert checkpoint.read_weights().tensors.keys() == {'w'}
    assert not marker.exists()


@pytest.mark.parametrize('call', [os.system, Path.touch])
def test_calls_in_a_checkpoint_that_torch_refuses_are_an_error(
    tmp_path: Path, marker: Path, content: dict[str, Any], call: Any
):
    argument = f'touch {str(marker)!r}' if call is os.system else marker
    content['state']['callbacks'] = Marking(call, argument)
    torch.save(content, tmp_path / 'x.pt')
    refusal = r'x\.pt: cannot be read as a checkpoint without running code: '

    with pytest.raises(ModelError, match=refusal) as raised:
        read_file(tmp_path / 'x.pt')

    assert 'load failed' not in str(raised.value)  # as the message of torch begins, which recommends to run it
    assert not marker.exists()


def test_objects_in_a_sharded_checkpoint_are_not_created(tmp_path: Path, marker: Path, content: dict[str, Any]):
    timestamp = {**COUNTS, 'own': Marking(open, marker, 'w')}
    content['state']['timestamp'] = {'Timestamp': timestamp}
    folder = tiny.save_sharded(content, tmp_path / 'ep0-ba7')

    checkpoint = read_sharded(folder, wants_tokenizer=True)

    assert not marker.exists()
    assert checkpoint.training is not None
    assert checkpoint.training.batch == 7
    assert checkpoint.huggingface is not None
    assert 'tokenizer.json' in checkpoint.huggingface['tokenizer']


def test_an_object_instead_of_a_tensor_in_a_shard_is_an_error(tmp_path: Path, marker: Path, content: dict[str, Any]):
    """The metadata, which are as torch writes them, promise a tensor."""
    folder = tiny.save_sharded(content, tmp_path / 'ep0-ba7')
    hostile = folder / '__0_1.distcp'
    torch.save(Marking(open, marker, 'w'), hostile)
    metadata = pickle.loads((folder / '.metadata').read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.startswith('state.model.'))
    place = replace(metadata.storage_data[index], relative_path=hostile.name, offset=0, length=hostile.stat().st_size)
    metadata.storage_data[index] = place
    (folder / '.metadata').write_bytes(pickle.dumps(metadata))

    with pytest.raises(ModelError, match=f'{folder}: cannot be read: '):
        read_sharded(folder, wants_tokenizer=False).read_weights()

    assert not marker.exists()


@pytest.mark.parametrize('protocol', [2, 4])
def test_metadata_of_another_kind_are_an_error(tmp_path: Path, marker: Path, content: dict[str, Any], protocol: int):
    folder = tiny.save_sharded(content, tmp_path / 'run/ep0-ba7')
    (folder / '.metadata').write_bytes(pickle.dumps(Marking(open, marker, 'w'), protocol))

    with pytest.raises(ModelError, match=r'\.metadata: cannot be read: names '):
        read_sharded(folder, wants_tokenizer=False)

    assert not marker.exists()


@pytest.mark.parametrize(
    'enclosed_in',
    [
        lambda code: code,
        lambda code: [code],
        lambda code: {'w': code},
    ],
)
def test_a_file_of_weights_with_an_object_in_it_is_an_error(
    tmp_path: Path, marker: Path, enclosed_in: Callable[[Marking], object]
):
    code = Marking(open, marker, 'w')
    torch.save(enclosed_in(code), tmp_path / 'pytorch_model.bin')

    with pytest.raises(ModelError, match=r'pytorch_model\.bin: is not a file of weights'):
        read_folder(tmp_path)

    assert not marker.exists()


def test_an_adapter_with_an_object_in_its_weights_is_an_error(models: Path, tmp_path: Path, marker: Path):
    peft = pytest.importorskip('peft')
    folder = tmp_path / 'adapter'
    peft.LoraConfig(r=4, target_modules=['q_proj'], task_type='CAUSAL_LM').save_pretrained(folder)
    torch.save({'w': Marking(open, marker, 'w')}, folder / 'adapter_model.bin')

    with (
        pytest.raises(ModelError, match=r'adapter_model\.bin: is not a file of weights'),
        open_model(str(models / 'one'), adapter=str(folder)) as source,
    ):
        source.load(torch.device('cpu'))

    assert not marker.exists()


@pytest.mark.parametrize('name', ['../outside', '/outside', 'deeper/outside', '..\\outside'])
def test_a_tokenizer_in_a_checkpoint_writes_no_file_elsewhere(tmp_path: Path, content: dict[str, Any], name: str):
    stored = content['state']['integrations']['huggingface']['tokenizer']
    stored[name] = {'file_extension': '.json', 'content': {}}
    torch.save(content, tmp_path / 'x.pt')

    with pytest.raises(ModelError, match=r'x\.pt: .*outside'), open_model(str(tmp_path / 'x.pt')):
        pass


@pytest.mark.parametrize('file', ['config.json', 'tokenizer_config.json'])
def test_code_beside_a_model_is_not_run_and_no_prompt_is_shown(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, file: str
):
    monkeypatch.setattr('builtins.input', lambda *_: pytest.fail('nobody is there to answer'))
    folder = tmp_path / 'model'
    networks.network('llama', vocab_size=259, max_position_embeddings=128).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / 'own.py').write_text(f'import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Own: ...\n')
    settings = json.loads((folder / file).read_text())
    settings['auto_map'] = {'AutoConfig': 'own.Own', 'AutoTokenizer': ['own.Own', 'own.Own']}
    settings['tokenizer_class'] = 'Own'
    if file == 'config.json':
        settings['model_type'] = 'own'
    (folder / file).write_text(json.dumps(settings))

    with pytest.raises(ModelError, match=f'{folder}'), open_model(str(folder)):
        pass

    assert not marker.exists()


CONFIG = 'config.json'
TOKENIZER = 'tokenizer.json'
TOKENIZER_CONFIG = 'tokenizer_config.json'
GENERATION = 'generation_config.json'
SPECIAL = 'special_tokens_map.json'
WEIGHTS = 'model.safetensors'
INDEX = f'{WEIGHTS}.index.json'

Damage = Callable[[Path], object]


def holds(content: str | bytes) -> Damage:
    """Replace the content of the file."""
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


def cut(share: float) -> Damage:
    """Truncate the file."""
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def has(**keys: Any) -> Damage:
    """Keys of the file have other values, those of its model where they are given as `model__key`."""

    def damage(path: Path) -> None:
        content = json.loads(path.read_text())
        for name, value in keys.items():
            *outer, key = name.split('__')
            inner = content[outer[0]] if outer else content
            inner[key] = value
        path.write_text(json.dumps(content))

    return damage


OF_ANY_JSON: list[Damage] = [
    # Values of another kind.
    holds('[]'),
    holds('"x"'),
    holds('3'),
    holds('null'),
    # Not JSON, or too deep.
    holds(''),
    holds('{'),
    holds(b'\xff\xfe'),
    holds('[' * 100_000),
    cut(0.5),
]
# transformers 5 ignores them: the type of the weights is ours, and the fast tokenizer needs no class of its own.
OF_TRANSFORMERS_4: list[tuple[str, Damage]] = []
if not networks.IS_TRANSFORMERS_5:
    OF_TRANSFORMERS_4 = [(CONFIG, has(torch_dtype='nope')), (TOKENIZER_CONFIG, has(tokenizer_class='Nope'))]
WRONG_VALUES: dict[str, list[Any]] = {
    'model_type': ['nope', 3, ['llama']],
    'hidden_size': ['64', [64], {'a': 1}, None, 1.5, -1],
    'num_attention_heads': ['4', [4], None, 0],
    'vocab_size': ['259', [259], None],
    'rms_norm_eps': ['1e-5', [1e-5]],
    'rope_scaling': [[1], 'x', {'type': 'nope'}, {'rope_type': 'linear'}],
    'hidden_act': ['nope'],
    'pad_token_id': ['nope'],
    'num_labels': ['nope'],
}
OF_CONFIG = [has(**{key: value}) for key, values in WRONG_VALUES.items() for value in values]
CASES: list[tuple[str, Damage]] = [
    *product((CONFIG, TOKENIZER, TOKENIZER_CONFIG, GENERATION, INDEX), OF_ANY_JSON),
    *product((SPECIAL,), OF_ANY_JSON[:-1]),  # all but that which cuts it
    # The configuration.
    *product((CONFIG,), OF_CONFIG),
    # The tokenizer and its settings.
    (TOKENIZER, holds('{}')),
    (TOKENIZER, has(model__type='Nope')),
    (TOKENIZER, has(model__vocab={'a': 'b'})),
    (TOKENIZER, has(model__merges=['x y'])),
    (TOKENIZER, has(pre_tokenizer={'type': 'Nope'})),
    (TOKENIZER_CONFIG, has(tokenizer_class=3)),
    (TOKENIZER_CONFIG, has(additional_special_tokens=[3])),
    (TOKENIZER_CONFIG, has(added_tokens_decoder='x')),
    # Settings for generation.
    (GENERATION, has(cache_implementation='nope')),
    (GENERATION, has(compile_config='nope')),
    *OF_TRANSFORMERS_4,
    # The weights, and the index of their files.
    (WEIGHTS, cut(0)),
    (WEIGHTS, cut(0.001)),
    (WEIGHTS, cut(0.5)),
    (WEIGHTS, cut(0.999)),
    (WEIGHTS, holds((2).to_bytes(8, 'little') + b'[]')),
    (INDEX, has(weight_map=[])),
    (INDEX, has(weight_map='x')),
    (INDEX, has(weight_map={'w': 3})),
    (INDEX, has(weight_map={'w': ['x']})),
    (INDEX, has(weight_map={'w': None})),
    (INDEX, has(weight_map__w='model-9.safetensors')),
]


@pytest.mark.parametrize(('file', 'damage'), CASES, ids=[f'{file} {number}' for number, (file, _) in enumerate(CASES)])
def test_a_damaged_file_is_named_in_one_line(models: Path, tmp_path: Path, file: str, damage: Damage):
    folder = shutil.copytree(models / ('several' if file == INDEX else 'one'), tmp_path / 'model')
    if file == SPECIAL:
        (folder / SPECIAL).touch()  # transformers 5 does not write it, but reads it
    damage(folder / file)

    with pytest.raises(ModelError) as raised, open_model(str(folder)) as source:
        source.load(torch.device('cpu'))

    (problem,) = raised.value.problems
    assert '\n' not in problem
    assert problem.startswith(f'{folder / file}: ')
