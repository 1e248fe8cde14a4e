"""Networks loaded from files equal those that transformers makes of the same files, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import networks
import pytest
import tiny
import torch
import transformers
from paths import FIXTURES
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.engine.lengths import resolve_max_seq_len, rotary_lengths
from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.runtime.models import open_model

CPU = torch.device('cpu')
IDS = torch.arange(3, 40)[None]
FAMILIES = (
    'llama',
    'gemma2',
    'gpt2',
    'gpt_neox',
    'opt',
    'mpt',
    'bloom',
    'falcon',
    'gpt_bigcode',
    'qwen3_moe',
    'mixtral',
)


def loaded(model: Any, **settings: Any) -> Any:
    with open_model(str(model), **settings) as source:
        return source.load(CPU)


def check_same_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def settings_of(generation: transformers.GenerationConfig) -> dict[str, Any]:
    """Return the settings that are set; transformers 5 has None for False where a folder has none."""
    return {name: value for name, value in generation.to_dict().items() if value not in (None, False)}


def check_same(network: Any, expected: Any) -> None:
    """Check weights, buffers, logits and end tokens bit for bit."""
    check_same_tensors(dict(network.named_parameters()), dict(expected.named_parameters()))
    check_same_tensors(dict(network.named_buffers()), dict(expected.named_buffers()))
    with torch.no_grad():
        assert torch.equal(network(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    assert settings_of(network.generation_config) == settings_of(expected.generation_config)
    assert not network.training


def expected_of(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype, **settings)


@pytest.mark.parametrize(
    ('saved', 'dtype', 'is_tied'),
    [
        ('float32', 'float32', False),
        ('float32', 'float32', True),
        # Saved in half precision.
        ('bfloat16', 'float32', False),
        ('bfloat16', 'float32', True),
        # Loaded in half precision.
        ('float32', 'bfloat16', False),
        ('float32', 'float16', False),
    ],
)
@pytest.mark.parametrize('family', FAMILIES)
def test_every_format_gives_the_network_of_transformers(
    tmp_path: Path, family: str, saved: str, dtype: str, is_tied: bool
):
    """End tokens are read from a folder. Mutation: without `tie_weights`, tied outputs are uninitialized."""
    network = networks.network(family, vocab_size=259, tie_word_embeddings=is_tied).to(getattr(torch, saved))
    network.generation_config.eos_token_id = [1, 7]
    tiny.save(network, tmp_path)
    torch.save(tiny.content_of(network), tmp_path / 'whole.pt')
    tiny.save_sharded(tiny.content_of(network), tmp_path / 'sharded')
    expected = expected_of(tmp_path, getattr(torch, dtype))

    check_same(loaded(tmp_path, dtype=dtype), expected)

    # A checkpoint has no generation_config.json.
    for form in ('whole.pt', 'sharded'):
        expected.generation_config = transformers.GenerationConfig.from_model_config(expected.config)
        check_same(loaded(tmp_path / form, dtype=dtype), expected)


EXPERTS = {
    'Qwen3Moe': {'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 16, 'head_dim': 8},
    'Mixtral': {'num_local_experts': 4},
    'Olmoe': {'num_experts': 4, 'num_experts_per_tok': 2},
    'Qwen2Moe': {
        'num_experts': 4,
        'num_experts_per_tok': 2,
        'moe_intermediate_size': 16,
        'shared_expert_intermediate_size': 16,
    },
    'DeepseekV3': {
        'n_routed_experts': 4,
        'num_experts_per_tok': 2,
        'n_group': 2,
        'topk_group': 1,
        'moe_intermediate_size': 16,
        'first_k_dense_replace': 1,
        'num_key_value_heads': 4,
        'q_lora_rank': 16,
        'kv_lora_rank': 16,
        'qk_rope_head_dim': 4,
        'qk_nope_head_dim': 8,
        'v_head_dim': 8,
    },
}


@pytest.mark.parametrize('family', EXPERTS)
def test_experts_that_are_stored_one_by_one_have_the_numbers_of_the_network_that_was_saved(tmp_path: Path, family: str):
    """transformers 5 has the experts of a layer in one tensor, and the hub has a tensor of each."""
    torch.manual_seed(0)
    network = networks.family(family, **{**networks.GROUPED, 'vocab_size': 259, **EXPERTS[family]})().eval()
    tiny.save(network, tmp_path)
    stored = load_file(tmp_path / 'model.safetensors')
    experts = [name for name in stored if re.search(r'\.experts\.[0-3]\.', name)]
    assert len(experts) % (4 * 3) == 0
    assert experts

    again = loaded(tmp_path)

    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, network(input_ids=IDS).logits)


@pytest.mark.parametrize('name', ['rotary_bos', 'alibi_pad_eos'])
def test_folders_that_users_of_composer_have_are_loaded(name: str):
    folder = FIXTURES / 'models' / name

    check_same(loaded(folder), expected_of(folder))


def save_bin_files(network: Any, folder: Path, num_files: int) -> None:
    """Save weights as transformers below 5 does without safetensors."""
    weights = {name: tensor for name, tensor in network.state_dict().items() if name != 'lm_head.weight'}  # tied
    if num_files == 1:
        torch.save(weights, folder / 'pytorch_model.bin')
        return
    file_of_weight = {
        name: f'pytorch_model-{index % num_files + 1:05}-of-{num_files:05}.bin' for index, name in enumerate(weights)
    }
    for file in set(file_of_weight.values()):
        torch.save({name: weights[name] for name in weights if file_of_weight[name] == file}, folder / file)
    (folder / 'pytorch_model.bin.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': file_of_weight}))


@pytest.mark.parametrize('num_files', [1, 5])
def test_weights_in_bin_files_are_loaded(tmp_path: Path, num_files: int):
    network = networks.network('gpt2', vocab_size=259)
    tiny.save(network, tmp_path)
    (tmp_path / 'model.safetensors').unlink()
    save_bin_files(network, tmp_path, num_files)

    check_same(loaded(tmp_path), expected_of(tmp_path))


def test_weights_whose_names_lack_the_prefix_of_the_model_are_loaded(tmp_path: Path):
    network = networks.network('gpt2', vocab_size=259)
    tiny.save(network.transformer, tmp_path)

    check_same(loaded(tmp_path), expected_of(tmp_path))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub, which holds two commits of someone/tiny: main, and v1."""
    cached = tmp_path / 'models--someone--tiny'
    (cached / 'refs').mkdir(parents=True)
    for number, name in enumerate(('main', 'v1')):
        tiny.save(networks.network('llama', vocab_size=259, seed=number), cached / 'snapshots' / (str(number) * 40))
        (cached / 'refs' / name).write_text(str(number) * 40)
    for module in ('huggingface_hub.constants', 'transformers.utils.hub'):
        for name in ('HF_HUB_CACHE', 'TRANSFORMERS_CACHE'):
            monkeypatch.setattr(f'{module}.{name}', str(tmp_path), raising=False)
    return cached / 'snapshots'


@pytest.mark.parametrize(
    ('revision', 'commit'),
    [
        (None, '0' * 40),  # main
        ('v1', '1' * 40),
        ('1' * 40, '1' * 40),
    ],
)
def test_a_revision_of_a_hub_name_is_loaded_from_the_cache(hub: Path, revision: str | None, commit: str):
    check_same(loaded('someone/tiny', revision=revision), expected_of(hub / commit))
    with open_model('someone/tiny', revision=revision) as source:
        assert source.record['revision'] == commit


def test_a_revision_that_is_not_in_the_cache_is_an_error(hub: Path):
    with pytest.raises(ModelError, match=r'someone/tiny: .* is not in the cache'):
        loaded('someone/tiny', revision='v2')


def log_probability(network: Any, context: str, continuation: str) -> float:
    """Return that of a continuation, by one forward of transformers."""
    ids = torch.tensor(tiny.tokenizer()(context + continuation)['input_ids'])
    with torch.no_grad():
        logprobs = network(ids[None]).logits[0].float().log_softmax(-1)
    of_next_tokens = logprobs[:-1].gather(1, ids[1:, None])
    return of_next_tokens[-len(continuation) :].sum().item()


def test_an_evaluation_in_half_precision_has_the_log_probabilities_of_transformers(tmp_path: Path):
    """To the rounding of bfloat16: seven bits of logits around 1."""
    folder = tiny.save(networks.network('llama', vocab_size=259, max_position_embeddings=128), tmp_path / 'model')

    evaluate(folder, **tiny.write_tasks(tmp_path), dtype='bfloat16', device='cpu', out=tmp_path / 'out')

    assert tiny.record(tmp_path / 'out')['model']['dtype'] == 'bfloat16'
    network = expected_of(folder, torch.bfloat16)
    for line in (tmp_path / 'out/samples/sums_0-shot.jsonl').read_text().splitlines():
        sample = json.loads(line)
        row = tiny.TASKS['sums'][1][sample['row']]
        # With the space of shots; the tokenizer's tokens are characters.
        expected = log_probability(network, row['context'], ' ' + row['continuation'])
        assert sample['logprobs'] == [pytest.approx(expected, abs=0.05)]


OWN_CODE = """
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = 'own'
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.filterwarnings('ignore')  # of transformers, about modules that it copies
def test_code_of_a_model_is_run_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('transformers.dynamic_module_utils.HF_MODULES_CACHE', str(tmp_path / 'modules'))
    folder = tiny.save(networks.network('llama', vocab_size=259), tmp_path / 'own')
    expected = expected_of(folder)
    config = json.loads((folder / 'config.json').read_text())
    config['model_type'] = 'own'
    config['auto_map'] = {'AutoConfig': 'own_code.OwnConfig', 'AutoModelForCausalLM': 'own_code.OwnModel'}
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'own_code.py').write_text(OWN_CODE)

    with pytest.raises(ModelError, match=r'config\.json: .*needs Python code of its own; .* --trust-remote-code'):
        loaded(folder)
    assert not (tmp_path / 'modules').exists()

    network = loaded(folder, trust_remote_code=True)
    assert type(network).__name__ == 'OwnModel'
    check_same(network, expected)


def test_an_adapter_is_merged_into_the_weights(tmp_path: Path):
    """Mutation: the adapter is loaded but not merged, so that the engine runs a PEFT model."""
    peft = pytest.importorskip('peft')
    folder = tiny.save(networks.network('llama', vocab_size=259), tmp_path / 'base')
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=['q_proj', 'up_proj'], init_lora_weights=False, task_type='CAUSAL_LM')
    adapted = peft.get_peft_model(expected_of(folder), lora).eval()
    adapted.save_pretrained(tmp_path / 'adapter')

    network = loaded(folder, adapter=str(tmp_path / 'adapter'))

    assert type(network).__name__ == 'LlamaForCausalLM'
    assert not any(parameter.requires_grad for parameter in network.parameters())
    with torch.no_grad():
        logits = network(input_ids=IDS).logits
        assert torch.allclose(logits, adapted(input_ids=IDS).logits, atol=1e-4)
        assert not torch.allclose(logits, loaded(folder)(input_ids=IDS).logits, atol=1e-2)


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.'])
def test_weights_saved_from_a_wrapper_are_loaded(tmp_path: Path, prefix: str):
    """DDP, a compiled model, and a compiled model in DDP."""
    network = networks.network('llama', vocab_size=259)
    content = tiny.content_of(network)
    weights = content['state']['model']
    content['state']['model'] = {
        f'model.{prefix}{name.removeprefix("model.")}': tensor for name, tensor in weights.items()
    }
    torch.save(content, tmp_path / 'x.pt')

    check_same_tensors(dict(loaded(tmp_path / 'x.pt').named_parameters()), dict(network.named_parameters()))


@pytest.mark.parametrize('adapter_only', [False, True])
def test_a_checkpoint_of_a_model_with_an_adapter_inside_is_an_error(tmp_path: Path, adapter_only: bool):
    peft = pytest.importorskip('peft')
    network = networks.network('llama', vocab_size=259)
    content = tiny.content_of(network)
    adapted = peft.get_peft_model(network, peft.LoraConfig(r=4, target_modules=['q_proj'], task_type='CAUSAL_LM'))
    content['state']['model'] = {
        f'model.{name}': tensor for name, tensor in adapted.state_dict().items() if 'lora_' in name or not adapter_only
    }
    torch.save(content, tmp_path / 'x.pt')

    with pytest.raises(ModelError, match=r'x\.pt: has the weights of a PEFT adapter .*--adapter'):
        loaded(tmp_path / 'x.pt')


def test_the_folder_of_an_adapter_is_not_a_model(tmp_path: Path):
    (tmp_path / 'adapter_config.json').write_text('{}')

    with pytest.raises(ModelError, match='is a PEFT adapter; give its base as --model and this as --adapter'):
        loaded(tmp_path)


@pytest.mark.parametrize('device_map', ['auto', {'': 'cpu'}, {'model': 'cpu', 'lm_head': 'cpu'}])
def test_layers_are_placed_by_a_device_map(tmp_path: Path, device_map: Any):
    pytest.importorskip('accelerate')
    folder = tiny.save(networks.network('llama', vocab_size=259), tmp_path)

    network = loaded(folder, device_map=device_map)

    with torch.no_grad():
        assert torch.equal(network(input_ids=IDS).logits, expected_of(folder)(input_ids=IDS).logits)


def write_gguf(network: Any, path: Path) -> None:
    """Write a Qwen2 as GGUF in float32."""
    gguf = pytest.importorskip('gguf')
    config = network.config
    writer = gguf.GGUFWriter(str(path), 'qwen2')
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in network.state_dict().items():
        stem, _, kind = name.rpartition('.')
        writer.add_tensor(f'{names.get_name(stem)}.{kind}', tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_loaded_with_a_tokenizer(tmp_path: Path):
    network = networks.network('qwen2', vocab_size=259)
    write_gguf(network, tmp_path / 'model.gguf')
    tiny.tokenizer().save_pretrained(tmp_path / 'tokenizer')

    loaded_network = loaded(tmp_path / 'model.gguf', tokenizer=str(tmp_path / 'tokenizer'))

    check_same_tensors(dict(loaded_network.named_parameters()), dict(network.named_parameters()))
    with pytest.raises(ModelError, match=r'model\.gguf: .*--tokenizer'):
        loaded(tmp_path / 'model.gguf')


def test_a_folder_without_an_adapter_is_an_error(tmp_path: Path):
    folder = tiny.save(networks.network('llama', vocab_size=259), tmp_path / 'base')

    with pytest.raises(ModelError, match=r'base: has no adapter_config\.json; allowed: .* PEFT adapter'):
        loaded(folder, adapter=str(folder))


def test_an_adapter_without_peft_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tiny.save(networks.network('llama', vocab_size=259), tmp_path / 'base')
    (folder / 'adapter_config.json').write_text('{"peft_type": "NOPE"}')
    monkeypatch.setitem(sys.modules, 'peft', None)  # as if it were not installed

    with pytest.raises(ModelError, match=r"pip install 'llmfoundry-gauntlet\[peft\]'"):
        loaded(folder, adapter=str(folder))


def stored_tokenizer(tokenizer: Any, tmp_path: Path) -> tuple[Any, Any]:
    """Return the tokenizer of a Composer checkpoint as we read it, and as Composer reads it."""
    huggingface = pytest.importorskip('composer.models.huggingface', reason='mosaicml is not installed')
    HuggingFaceModel = huggingface.HuggingFaceModel  # noqa: N806
    network = networks.network('llama', vocab_size=1000)
    whole = HuggingFaceModel(network, tokenizer=tokenizer)
    stored = whole.get_metadata()
    torch.save({'state': {'model': whole.state_dict(), 'integrations': {'huggingface': stored}}}, tmp_path / 'whole.pt')
    expected = HuggingFaceModel.load_huggingface_tokenizer_from_saved_state(stored, False, str(tmp_path / 'stored'))
    with open_model(str(tmp_path / 'whole.pt')) as source:
        return source.tokenizer, expected


def saved_files(tokenizer: Any, folder: Path) -> dict[str, str]:
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize('name', ['rotary_bos', 'unigram_characters'])
@pytest.mark.parametrize('chat_template', [None, '{{ messages }}'])
def test_the_tokenizer_of_a_checkpoint_is_the_one_that_composer_reads(
    tmp_path: Path, name: str, chat_template: str | None
):
    """Mutation: the name of the temporary folder stays in the tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FIXTURES / 'models' / name)
    tokenizer.chat_template = chat_template

    read_here, read_by_composer = stored_tokenizer(tokenizer, tmp_path)

    assert read_here.name_or_path == read_by_composer.name_or_path
    assert read_here.init_kwargs.keys() == read_by_composer.init_kwargs.keys()
    assert read_here.chat_template == chat_template
    assert saved_files(read_here, tmp_path / 'here') == saved_files(read_by_composer, tmp_path / 'by-composer')


def test_a_vocabulary_of_lines_has_the_tokens_that_were_saved(tmp_path: Path):
    """Composer 0.32.1 reads one more, which is empty: it ends the last line twice."""
    tokens = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'b', '##c']
    (tmp_path / 'vocab.txt').write_text(''.join(f'{token}\n' for token in tokens))
    tokenizer = transformers.BertTokenizer(str(tmp_path / 'vocab.txt'))

    read_here, read_by_composer = stored_tokenizer(tokenizer, tmp_path)

    assert read_here.get_vocab() == {token: number for number, token in enumerate(tokens)}
    assert set(read_by_composer.get_vocab()) == {*tokens, ''}


@pytest.mark.parametrize('form', ['whole', 'sharded'])
def test_a_tokenizer_without_special_tokens_is_read(tmp_path: Path, form: str):
    """Its empty mapping is missing in a sharded checkpoint."""
    words = Tokenizer(WordLevel({'a': 0, 'b': 1}))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    content = tiny.content_of(networks.network('llama', vocab_size=2), tokenizer)
    if form == 'whole':
        torch.save(content, tmp_path / form)
    else:
        tiny.save_sharded(content, tmp_path / form)

    with open_model(str(tmp_path / form)) as source:
        assert source.tokenizer('b')['input_ids'] == [1]


def test_weights_that_are_views_are_loaded(tmp_path: Path):
    """A transposed tensor, and two of one storage."""
    network = networks.network('llama', vocab_size=259)
    content = tiny.content_of(network)
    state = content['state']['model']
    layers = [f'model.model.layers.{layer}.mlp' for layer in range(2)]
    stacked = torch.stack([state[f'{layer}.up_proj.weight'] for layer in layers])
    for layer, part_of_stacked in zip(layers, stacked, strict=True):
        gate = state[f'{layer}.gate_proj.weight']
        state[f'{layer}.gate_proj.weight'] = gate.T.contiguous().T
        state[f'{layer}.up_proj.weight'] = part_of_stacked
    torch.save(content, tmp_path / 'views.pt')

    weights = loaded(tmp_path / 'views.pt').state_dict()

    expected = network.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_files_may_be_removed_after_loading(tmp_path: Path):
    """Mutation: weights stay mapped to the file and change with it."""
    network = networks.network('llama', vocab_size=259)
    weights = tiny.save(network, tmp_path) / 'model.safetensors'
    expected = expected_of(shutil.copytree(tmp_path, tmp_path / 'copy'))
    network_of_file = loaded(tmp_path)

    with weights.open('r+b') as file:
        file.write(b'\0' * weights.stat().st_size)
    weights.unlink()

    check_same(network_of_file, expected)


FACTORS = {'short_factor': [1.0] * 4, 'long_factor': [2.0] * 4}
LLAMA3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LONG_PHI = {'max_position_embeddings': 512, 'original_max_position_embeddings': 128}


def config_of(kind: str | None, scaling: dict[str, Any], **more: Any) -> transformers.PretrainedConfig:
    if kind is None:
        return transformers.LlamaConfig(max_position_embeddings=256)
    sizes = {'hidden_size': 32, 'num_attention_heads': 4, 'max_position_embeddings': 256, 'pad_token_id': 0, **more}
    if kind == 'longrope':
        return transformers.Phi3Config(**sizes, rope_scaling={'type': kind, **scaling})
    return transformers.LlamaConfig(**sizes, rope_scaling={'rope_type': kind, **scaling})


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


PADDED_TO = {'t': 64}


@pytest.mark.parametrize(
    ('kind', 'scaling'),
    [
        (None, {}),
        ('linear', {'factor': 4.0}),
        ('yarn', {'factor': 4.0}),
    ],
)
def test_other_rotary_embeddings_do_not_depend_on_a_length(kind: str | None, scaling: dict[str, Any]):
    assert rotary_lengths(config_of(kind, scaling), PADDED_TO) is None


def test_dynamic_ntk_depends_on_the_length_beyond_its_positions():
    lengths = rotary_lengths(config_of('dynamic', {'factor': 2.0}), PADDED_TO)

    assert lengths == RotaryLengths(base=256, scales_by_length=True, padded_to=PADDED_TO)


def test_longrope_depends_on_whether_a_row_is_beyond_its_original_positions():
    lengths = rotary_lengths(config_of('longrope', FACTORS, **LONG_PHI), PADDED_TO)

    assert lengths == RotaryLengths(base=128, scales_by_length=False, padded_to=PADDED_TO)
