"""Networks loaded from files equal those that transformers makes of the same files, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import networks
import pytest
import tiny
import torch
import transformers
from paths import FIXTURES

from llmfoundry_gauntlet.composer.models import open_model, resolve_max_seq_len, rotary_lengths
from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.errors import ModelError

CPU = torch.device('cpu')
IDS = torch.arange(3, 40)[None]
FAMILIES = ('llama', 'gemma2', 'gpt2', 'gpt_neox', 'opt', 'mpt', 'bloom', 'falcon', 'gpt_bigcode', 'qwen3_moe')


def loaded(model: Any) -> Any:
    with open_model(str(model)) as source:
        return source.load(CPU)


def check_same(network: Any, expected: Any) -> None:
    """Check weights, buffers, logits and end tokens bit for bit."""
    for kind in ('named_parameters', 'named_buffers'):
        found, wanted = dict(getattr(network, kind)()), dict(getattr(expected, kind)())
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name
    with torch.no_grad():
        assert torch.equal(network(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    assert network.generation_config.to_dict() == expected.generation_config.to_dict()
    assert not network.training


def expected_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)


def save_checkpoints(network: Any, folder: Path) -> None:
    """Save a Composer checkpoint of only the weights, as one file and sharded."""
    torch.save(tiny.content_of(network), folder / 'whole.pt')
    tiny.save_sharded(tiny.content_of(network), folder / 'sharded')


def save_folder(network: Any, folder: Path, **arguments: Any) -> Path:
    network.save_pretrained(folder, **arguments)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize('is_tied', [False, True])
@pytest.mark.parametrize('is_half', [False, True])
@pytest.mark.parametrize('family', FAMILIES)
def test_every_format_gives_the_network_of_transformers(tmp_path: Path, family: str, is_half: bool, is_tied: bool):
    """Mutation: without `tie_weights`, tied outputs are uninitialized."""
    network = networks.network(family, vocab_size=259, tie_word_embeddings=is_tied)
    network = network.bfloat16() if is_half else network
    save_folder(network, tmp_path)
    save_checkpoints(network, tmp_path)
    expected = expected_of(tmp_path)
    check_same(loaded(tmp_path), expected)
    for form in ('whole.pt', 'sharded'):
        expected.generation_config = transformers.GenerationConfig.from_model_config(expected.config)
        check_same(loaded(tmp_path / form), expected)


@pytest.mark.parametrize('name', ['rotary_bos', 'alibi_pad_eos'])
def test_fixture_models_equal_those_of_transformers(name: str):
    folder = FIXTURES / 'models' / name
    check_same(loaded(folder), expected_of(folder))


def test_old_folders_are_loaded(tmp_path: Path):
    """With pytorch_model.bin, and names without the prefix of the model."""
    network = networks.network('gpt2', vocab_size=259)
    for name, part, size in (('bin', network, '1GB'), ('bins', network, '40KB'), ('bare', network.transformer, '1GB')):
        folder = save_folder(part, tmp_path / name, safe_serialization=name == 'bare', max_shard_size=size)
        check_same(loaded(folder), expected_of(folder))
    assert len(list((tmp_path / 'bins').glob('*.bin'))) > 1


def test_end_tokens_are_read_from_the_folder(tmp_path: Path):
    network = networks.network('llama', vocab_size=259)
    network.generation_config.eos_token_id = [1, 7]
    assert loaded(save_folder(network, tmp_path)).generation_config.eos_token_id == [1, 7]


def test_a_hub_name_is_loaded_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commit = '0' * 40
    cached = tmp_path / 'models--someone--tiny'
    save_folder(networks.network('llama', vocab_size=259), cached / 'snapshots' / commit)
    (cached / 'refs').mkdir()
    (cached / 'refs' / 'main').write_text(commit)
    for module in ('huggingface_hub.constants', 'transformers.utils.hub'):
        for name in ('HF_HUB_CACHE', 'TRANSFORMERS_CACHE'):
            monkeypatch.setattr(f'{module}.{name}', str(tmp_path), raising=False)
    check_same(loaded('someone/tiny'), expected_of(cached / 'snapshots' / commit))


def test_weights_that_are_views_are_loaded(tmp_path: Path):
    """A transposed tensor, and two of one storage."""
    network = networks.network('llama', vocab_size=259)
    expected = save_folder(network, tmp_path / 'folder')
    save_checkpoints(network, tmp_path)
    content = torch.load(tmp_path / 'whole.pt', weights_only=False)
    state = content['state']['model']
    both = torch.stack(
        [state['model.model.layers.0.mlp.up_proj.weight'], state['model.model.layers.1.mlp.up_proj.weight']]
    )
    for layer in range(2):
        state[f'model.model.layers.{layer}.mlp.up_proj.weight'] = both[layer]
        gate = f'model.model.layers.{layer}.mlp.gate_proj.weight'
        state[gate] = state[gate].T.contiguous().T
    torch.save(content, tmp_path / 'views.pt')
    network = loaded(tmp_path / 'views.pt')
    wanted = expected_of(expected).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in network.state_dict().items())


def test_files_may_be_removed_after_loading(tmp_path: Path):
    """Mutation: weights stay mapped to the file and change with it."""
    network = networks.network('llama', vocab_size=259)
    folder = save_folder(network, tmp_path / 'folder')
    found, expected = loaded(folder), expected_of(shutil.copytree(folder, tmp_path / 'copy'))
    weights = folder / 'model.safetensors'
    size = weights.stat().st_size
    with weights.open('r+b') as file:
        file.write(b'\0' * size)
    shutil.rmtree(folder)
    check_same(found, expected)


FACTORS = {'short_factor': [1.0] * 4, 'long_factor': [2.0] * 4}
LLAMA3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LONG_PHI = {'max_position_embeddings': 512, 'original_max_position_embeddings': 128}


def config_of(kind: str | None, scaling: dict[str, Any], **more: Any) -> transformers.PretrainedConfig:
    if kind is None:
        return transformers.LlamaConfig(max_position_embeddings=256)
    make = transformers.Phi3Config if kind == 'longrope' else transformers.LlamaConfig
    sizes = {'hidden_size': 32, 'num_attention_heads': 4, 'max_position_embeddings': 256, 'pad_token_id': 0}
    return make(**{**sizes, **more}, rope_scaling={'type' if kind == 'longrope' else 'rope_type': kind, **scaling})


@pytest.mark.parametrize(
    ('kind', 'scaling', 'more', 'positions'),
    [
        (None, {}, {}, 256),
        ('default', {}, {}, 256),
        ('linear', {'factor': 4.0}, {}, 1024),
        ('dynamic', {'factor': 2.5}, {}, 640),
        ('yarn', {'factor': 4.0}, {}, 1024),
        ('yarn', {'factor': 4.0, 'original_max_position_embeddings': 64}, {}, 256),
        ('yarn', {'factor': 8.0, 'original_max_position_embeddings': 64}, {}, 512),
        ('llama3', {'factor': 8.0, 'original_max_position_embeddings': 64, **LLAMA3}, {}, 512),
        ('llama3', {'factor': 2.0, 'original_max_position_embeddings': 64, **LLAMA3}, {}, 256),
        ('longrope', FACTORS, LONG_PHI, 512),
    ],
)
def test_rotary_scaling_multiplies_the_positions(kind, scaling, more, positions: int):
    """By hand, and never fewer than the configuration names, which stay the default."""
    config = config_of(kind, scaling, **more)
    assert resolve_max_seq_len(positions, config, {}) == positions
    assert resolve_max_seq_len(None, config, {}) == more.get('max_position_embeddings', 256)
    with pytest.raises(ModelError, match=f'is {positions + 1}, but .* has positions for {positions} tokens'):
        resolve_max_seq_len(positions + 1, config, {})
    with pytest.raises(ModelError, match=r't: max_seq_len is 4096'):
        resolve_max_seq_len(None, config, {'t': 4096})


def test_only_dynamic_ntk_and_longrope_depend_on_a_length():
    padded = {'t': 64}
    for kind, scaling in ((None, {}), ('linear', {'factor': 4.0}), ('yarn', {'factor': 4.0})):
        assert rotary_lengths(config_of(kind, scaling), padded) is None
    dynamic = rotary_lengths(config_of('dynamic', {'factor': 2.0}), padded)
    assert dynamic == RotaryLengths(base=256, scales_by_length=True, padded_to=padded)
    longrope = rotary_lengths(config_of('longrope', FACTORS, **LONG_PHI), padded)
    assert longrope == RotaryLengths(base=128, scales_by_length=False, padded_to=padded)
