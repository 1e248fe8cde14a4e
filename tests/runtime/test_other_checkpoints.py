"""Checkpoints of other trainers are loaded bit for bit as a Hugging Face folder of the same weights.

Mutations: torchtitan's queries and keys keep their order; weights below `model` are looked for at the top alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import networks
import object_store
import pytest
import tiny
import torch
import transformers
from paths import FIXTURES
from safetensors.torch import save_file
from tiny import outcome, record

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.data.stores import StoredFile
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.runtime.checkpoint_folders import download, find_checkpoints
from llmfoundry_gauntlet.runtime.checkpoints import read_sharded
from llmfoundry_gauntlet.runtime.models import open_model

CPU = torch.device('cpu')
TITAN = FIXTURES / 'torchtitan'
TITAN_SIZES = {
    'vocab_size': 259,
    'hidden_size': 16,
    'intermediate_size': 24,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 128,
}
s3_server = object_store.s3_server

Weights = dict[str, torch.Tensor]
Save = Callable[[Weights, Path], object]


@pytest.fixture(scope='module')
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder, its tasks, and the records of its evaluation in `out`."""
    folder = tmp_path_factory.mktemp('plain')
    tiny.save(networks.network('llama', vocab_size=259, max_position_embeddings=128), folder / 'model')
    evaluate(folder / 'model', **tiny.write_tasks(folder), out=folder / 'out', device='cpu')
    return folder


@pytest.fixture
def weights() -> Weights:
    """Return the weights of the model in `plain`."""
    return networks.network('llama', vocab_size=259, max_position_embeddings=128).state_dict()


def titan_config(family: str) -> transformers.PretrainedConfig:
    """Return the configuration of transformers for a model of scripts/record_torchtitan.py."""
    if family == 'llama3':
        return transformers.LlamaConfig(**TITAN_SIZES, rope_theta=500000.0, rms_norm_eps=1e-5)
    return transformers.Qwen3Config(
        **TITAN_SIZES, head_dim=8, rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=True
    )


def loaded(model: Path, **settings: Any) -> Any:
    with open_model(str(model), **settings) as source:
        return source.load(CPU)


def save_nested(make: Callable[[Weights], Any], weights: Weights, path: Path) -> None:
    """Save what `make` returns for the weights, in a file."""
    torch.save(make(weights), path)


def save_sharded(make: Callable[[Weights], Any], weights: Weights, path: Path) -> None:
    """Save what `make` returns for the weights, in a folder of torch.distributed.checkpoint."""
    tiny.save_sharded(make(weights), path)


def named(prefix: str, weights: Weights) -> Weights:
    return {f'{prefix}{name}': tensor for name, tensor in weights.items()}


def with_optimizer(weights: Weights) -> dict[str, Any]:
    """Return the content of a loop's checkpoint."""
    moments = {name: {'exp_avg': torch.ones_like(tensor)} for name, tensor in weights.items()}
    return {'model': weights, 'optimizer': {'state': moments, 'param_groups': [{'lr': 0.1}]}, 'step': 7}


def without_config(weights: Weights, path: Path) -> None:
    """Save a folder as Hugging Face's Trainer does for a model that is no PreTrainedModel."""
    path.mkdir()
    save_file(weights, path / 'model.safetensors')
    torch.save({'step': 7}, path / 'optimizer.pt')


def of_accelerate(weights: Weights, path: Path) -> None:
    """Save a folder as Hugging Face's Trainer does under FSDP with SHARDED_STATE_DICT."""
    tiny.save_sharded({'model': weights}, path / 'pytorch_model_fsdp_0')
    tiny.save_sharded({'optimizer': {'state': {'w': torch.ones(3)}}}, path / 'optimizer_0')
    torch.save({'last_epoch': 7}, path / 'scheduler.pt')


FORMS: dict[str, Save] = {
    # Files of torch.save.
    'weights.pt': torch.save,
    'ddp.pt': lambda weights, path: torch.save(named('module.', weights), path),
    'compiled.pt': lambda weights, path: torch.save(named('_orig_mod.', weights), path),
    'compiled_in_ddp.bin': lambda weights, path: torch.save(named('module._orig_mod.', weights), path),
    'loop.pt': partial(save_nested, with_optimizer),
    'nanogpt.pt': partial(save_nested, lambda weights: {**with_optimizer(named('_orig_mod.', weights)), 'iter_num': 7}),
    'tutorial.pth': partial(save_nested, lambda weights: {'model_state_dict': weights, 'epoch': 1}),
    'lightning.ckpt': partial(save_nested, lambda weights: {'state_dict': named('net.', weights), 'epoch': 1}),
    'deepspeed.pt': partial(save_nested, lambda weights: {'module': named('module.', weights), 'dp_world_size': 2}),
    # Files and folders of safetensors.
    'weights.safetensors': save_file,
    'checkpoint-7': without_config,
    # torch.distributed.checkpoint.
    'sharded/step-7': partial(save_sharded, dict),
    'sharded/loop': partial(save_sharded, with_optimizer),
    'sharded/tutorial': partial(save_sharded, lambda weights: {'app': {'model': weights, 'optim': {'lr': 0.1}}}),
    'sharded/compiled': partial(save_sharded, lambda weights: {'model': named('_orig_mod.', weights)}),
    'accelerate/checkpoint-7': of_accelerate,
}


@pytest.mark.parametrize('form', FORMS)
def test_every_form_of_the_same_weights_has_the_results_of_a_hugging_face_folder(
    plain: Path, tmp_path: Path, weights: Weights, form: str
):
    path = tmp_path / form
    path.parent.mkdir(exist_ok=True)
    FORMS[form](weights, path)
    given = {'model_config': plain / 'model', 'tokenizer': plain / 'model'}

    evaluate(path, **tiny.settings_of(plain), **given, out=tmp_path / 'out', device='cpu')

    assert outcome(tmp_path / 'out') == outcome(plain / 'out')
    assert record(tmp_path / 'out')['model']['name'] == str(path)


@pytest.mark.parametrize('family', ['llama3', 'qwen3'])
def test_a_checkpoint_of_torchtitan_has_the_logits_of_its_own_model(tmp_path: Path, family: str):
    """The names, the layout and the logits are recorded from torchtitan 0.3.0."""
    titan_config(family).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    expected = json.loads((TITAN / family / 'expected.json').read_text())

    network = loaded(TITAN / family / 'step-4', model_config=str(tmp_path), tokenizer=str(tmp_path))

    with torch.no_grad():
        logits = network(input_ids=torch.tensor([expected['ids']])).logits[0, -1]
    assert logits.tolist() == pytest.approx(expected['logits'], abs=1e-5)


def test_torchtitan_has_the_results_of_the_hugging_face_folder_made_of_it(tmp_path: Path):
    titan_config('llama3').save_pretrained(tmp_path / 'config')
    tiny.tokenizer().save_pretrained(tmp_path / 'config')
    given = {'model_config': str(tmp_path / 'config'), 'tokenizer': str(tmp_path / 'config')}
    tiny.save(loaded(TITAN / 'llama3/step-4', **given), tmp_path / 'folder')
    settings = tiny.write_tasks(tmp_path)

    evaluate(TITAN / 'llama3/step-4', **settings, **given, out=tmp_path / 'of_titan', device='cpu')
    evaluate(tmp_path / 'folder', **settings, out=tmp_path / 'of_folder', device='cpu')

    assert outcome(tmp_path / 'of_titan') == outcome(tmp_path / 'of_folder')


def test_the_names_of_earlier_versions_of_torchtitan_are_known(tmp_path: Path):
    """Up to 0.2 the output was named `output`, and a projection had no `qkv_linear`; some saved `freqs_cis`."""
    titan_config('llama3').save_pretrained(tmp_path / 'config')
    tiny.tokenizer().save_pretrained(tmp_path / 'config')
    given = {'model_config': str(tmp_path / 'config'), 'tokenizer': str(tmp_path / 'config')}
    current = loaded(TITAN / 'llama3/step-4', **given).state_dict()
    stored = read_sharded(TITAN / 'llama3/step-4', wants_tokenizer=False).read_weights().tensors
    earlier = {
        name.replace('qkv_linear.', '').replace('lm_head.', 'output.'): tensor for name, tensor in stored.items()
    }
    tiny.save_sharded({**earlier, 'freqs_cis': torch.ones(128, 2)}, tmp_path / 'step-4')

    network = loaded(tmp_path / 'step-4', **given)

    assert all(torch.equal(tensor, current[name]) for name, tensor in network.state_dict().items())


def nanogpt(weights: Weights) -> dict[str, Any]:
    """Return the content of a checkpoint of nanoGPT's own GPT, in parts."""
    shapes = {'wte.weight': (65, 32), 'h.0.attn.c_attn.weight': (96, 32), 'h.0.attn.c_proj.weight': (32, 32)}
    tensors = {f'_orig_mod.transformer.{name}': torch.ones(shape) for name, shape in shapes.items()}
    return {'model': tensors, 'model_args': {'n_layer': 1, 'n_head': 4}, 'iter_num': 7}


def megatron(weights: Weights) -> dict[str, Any]:
    """Return the content of a rank's file of Megatron-Core, in parts."""
    names = ('embedding.word_embeddings.weight', 'decoder.layers.0.self_attention.linear_qkv.weight')
    return {'model': {name: torch.ones(4, 4) for name in names}, 'checkpoint_version': 3.0, 'iteration': 7}


def earlier_megatron(weights: Weights) -> dict[str, Any]:
    """Return the content of a rank's file of Megatron-LM before Megatron-Core, in parts."""
    layers = {'layers.0.attention.query_key_value.weight': torch.ones(4, 4)}
    embedding = {'word_embeddings': {'weight': torch.ones(4, 4)}}
    return {'model': {'language_model': {'encoder': layers, 'embedding': embedding}}, 'iteration': 7}


@pytest.mark.parametrize(
    ('make', 'facts'),
    [
        (
            nanogpt,
            ["nanoGPT's GPT", 'transformer.h.0.attn.c_attn.weight is [96, 32]', 'would be [32, 96]', 'transpose'],
        ),
        (megatron, ['Megatron', 'Megatron-Bridge', 'export_ckpt']),
        (earlier_megatron, ['Megatron', 'Megatron-Bridge', 'export_ckpt']),
        (lambda weights: {'net': weights, 'step': 3}, ['has no weights', 'the keys net, step', 'model_state_dict']),
        (lambda weights: {}, ['has no weights', 'an empty mapping']),
        (lambda weights: list(weights.values()), ['an object of the class list', 'state_dict()']),
        (lambda weights: networks.network('llama'), ['an object of the class', 'state_dict()']),
        (lambda weights: weights, ['no Hugging Face configuration', '--model-config', '--tokenizer', 'architecture']),
    ],
)
def test_a_file_that_is_no_model_says_what_it_is_and_what_to_do(
    tmp_path: Path, weights: Weights, make: Callable[[Weights], Any], facts: list[str]
):
    torch.save(make(weights), tmp_path / 'x.pt')

    with pytest.raises(ModelError) as raised, open_model(str(tmp_path / 'x.pt')):
        pass

    (problem,) = raised.value.problems
    assert problem.startswith(f'{tmp_path / "x.pt"}: ')
    assert [fact for fact in facts if fact not in problem] == []


def test_a_sharded_checkpoint_of_megatron_names_the_converter(tmp_path: Path):
    stacked = {'decoder.layers.self_attention.linear_qkv.weight': torch.ones(2, 4, 4)}
    tiny.save_sharded(stacked, tmp_path / 'iter_0000007')
    refusal = r'iter_0000007: has the weights of Megatron, .* Megatron-Bridge '
    with pytest.raises(ModelError, match=refusal), open_model(str(tmp_path / 'iter_0000007')):
        pass

    # Its metadata may name classes of Megatron, which are not loaded.
    (tmp_path / 'iter_0000007/common.pt').touch()
    (tmp_path / 'iter_0000007/.metadata').write_bytes(b'torn')
    with pytest.raises(ModelError, match=refusal), open_model(str(tmp_path / 'iter_0000007')):
        pass


def test_a_sharded_checkpoint_without_weights_is_an_error(tmp_path: Path):
    tiny.save_sharded({'optimizer': {'state': {'w': torch.ones(3)}}}, tmp_path / 'step-7')

    with pytest.raises(ModelError, match=r'step-7: has no weights: its entries are optimizer\.state\.w; allowed: '):
        loaded(tmp_path / 'step-7')


@pytest.mark.parametrize(
    ('config', 'names', 'found'),
    [
        (titan_config('llama3'), ['layers.0.moe.router.gate.weight'], 'among them layers.0.moe.router.gate.weight'),
        (networks.network('gpt2').config, [], 'and a configuration of gpt2'),
    ],
)
def test_a_model_of_torchtitan_that_transformers_has_in_another_form_is_an_error(
    tmp_path: Path, config: Any, names: list[str], found: str
):
    config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    weights = {name: torch.ones(3, 3) for name in ['tok_embeddings.weight', *names]}
    tiny.save_sharded(weights, tmp_path / 'step-7')

    with pytest.raises(ModelError, match=rf'step-7: has weights of torchtitan, {found}; allowed: .*convert_to_hf\.py'):
        loaded(tmp_path / 'step-7', model_config=str(tmp_path), tokenizer=str(tmp_path))


def test_a_folder_of_weights_without_a_configuration_asks_for_one(tmp_path: Path, weights: Weights):
    without_config(weights, tmp_path / 'checkpoint-7')

    with pytest.raises(ModelError, match=r'checkpoint-7: has weights and no config\.json, .* --model-config'):
        loaded(tmp_path / 'checkpoint-7')


def test_torchtitan_with_other_sizes_in_its_configuration_is_an_error(tmp_path: Path):
    config = titan_config('llama3')
    config.num_attention_heads, config.hidden_size = 32, 64
    config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=r'embed_tokens\.weight is .* in the file and .* in the model'):
        loaded(TITAN / 'llama3/step-4', model_config=str(tmp_path), tokenizer=str(tmp_path))


def test_the_checkpoints_of_every_trainer_are_found_and_their_parts_are_not():
    """As Hugging Face's Trainer, PEFT, Accelerate, DeepSpeed, torchtitan and Composer lay them out."""
    names_by_folder = {
        'trainer/checkpoint-5': ('config.json', 'model.safetensors', 'optimizer.pt'),
        'peft/checkpoint-6': ('adapter_config.json', 'adapter_model.bin', 'scheduler.pt'),
        'fsdp/checkpoint-7': ('scheduler.pt',),
        'fsdp/checkpoint-7/pytorch_model_fsdp_0': ('.metadata', '__0_0.distcp'),
        'fsdp/checkpoint-7/optimizer_0': ('.metadata', '__0_0.distcp'),
        'zero/checkpoint-8': ('config.json', 'global_step8/mp_rank_00_model_states.pt'),
        'titan/step-9': ('.metadata', '__0_0.distcp'),
        'composer': ('ep0-ba1-rank0.pt', 'ep0-ba1-rank1.pt', 'huggingface/ba1/config.json'),
        'final': ('config.json', 'model.safetensors', 'steps/step_3.pt'),
    }
    names = [f'{folder}/{name}' for folder, names_in_folder in names_by_folder.items() for name in names_in_folder]

    found = find_checkpoints([StoredFile(name, 1, '') for name in names])

    assert {checkpoint.name: checkpoint.batch for checkpoint in found} == {
        'trainer/checkpoint-5': 5,
        'peft/checkpoint-6': 6,
        'fsdp/checkpoint-7': 7,
        'zero/checkpoint-8': 8,
        'titan/step-9': 9,
        'composer/ep0-ba1-rank0.pt': 1,
        'composer/huggingface/ba1': 1,
        'final': None,
        'final/steps/step_3.pt': 3,
    }


def test_sharded_weights_in_an_object_store_are_downloaded_without_the_optimizer(
    plain: Path, tmp_path: Path, weights: Weights, s3_server: Any
):
    """The local copy of torchtitan's layout has holes in the optimizer's place; Accelerate's is a folder of its own."""
    moments = {name: torch.rand(2**18) for name in weights}
    tiny.save_sharded({**weights, 'optimizer': moments}, tmp_path / 'step-7')
    of_accelerate(weights, tmp_path / 'checkpoint-7')
    for path in tmp_path.rglob('*'):
        if path.is_file():
            key = path.relative_to(tmp_path).as_posix()
            s3_server.client.upload_file(str(path), s3_server.bucket, f'run/{key}')
    given = {'model_config': str(plain / 'model'), 'tokenizer': str(plain / 'model')}

    for name in ('step-7', 'checkpoint-7'):
        copy, uri = download(s3_server.uri(f'run/{name}'), tmp_path / f'copy of {name}')
        stored = loaded(copy, **given).state_dict()

        assert uri == s3_server.uri(f'run/{name}')
        assert all(torch.equal(stored[name], weight) for name, weight in weights.items())
        assert sum(path.stat().st_blocks * 512 for path in copy.rglob('*')) < 2**20
