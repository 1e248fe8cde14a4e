"""Two models of GGUF files as folders that transformers loads: weights in float32, configuration, tokenizer."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_tokenizers import check_round_trips, tokenizer_of
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float32]

# Digits, runs of spaces, line ends, what is not ASCII, and tags, at which wrong tokenizers differ.
ROUND_TRIPS = (
    'Hello world',
    'It cost 1234 dollars,  twice.\n\nYes!\tÄ 😀 [tag] <b>x</b> 中文',
    ' Leading and trailing ',
    'def f(x):\n    if x:\n        return "a  b"\n',
    'Q: What is 7 + 5?\nA: 12\n#### 12',
)
NAMES_OF_BLOCKS = {
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'attn_q_norm': 'self_attn.q_norm',
    'attn_k_norm': 'self_attn.k_norm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}
# The norm before the second half of a block has one name in GGUF and two in transformers.
NAMES_OF_NORMS = {
    'llama': {'ffn_norm': 'post_attention_layernorm'},
    'gemma3': {
        'ffn_norm': 'pre_feedforward_layernorm',
        'post_attention_norm': 'post_attention_layernorm',
        'post_ffw_norm': 'post_feedforward_layernorm',
    },
}


def convert(gguf: Path, folder: Path, *, known_text: str, known_ids: Sequence[int]) -> None:
    """Write a GGUF file as a folder that transformers loads.

    Raise ValueError where the tokenizer is not the model's: where it loses text, or has other ids of the known one.
    """
    reader = GGUFReader(str(gguf))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = config_of(fields)

    tokenizer = tokenizer_of(fields, config['max_position_embeddings'])
    check_round_trips(tokenizer, ROUND_TRIPS)
    ids = tokenizer(known_text).input_ids
    if ids != list(known_ids):
        raise ValueError(f'{gguf}: its tokenizer makes {ids} of {known_text!r}, expected {list(known_ids)}')

    weights: dict[str, Array] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weights[transformers_name(tensor.name, fields)] = transformers_weight(tensor.name, values, fields)

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    save_file(weights, str(folder / 'model.safetensors'), metadata={'format': 'pt'})
    special_ids = {key: config[key] for key in ('bos_token_id', 'eos_token_id', 'pad_token_id')}
    (folder / 'generation_config.json').write_text(json.dumps(special_ids, indent=1))
    # Written last: a folder with a configuration is a whole one.
    (folder / 'config.json').write_text(json.dumps(config, indent=1))


def config_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that transformers needs for the model in the fields of a GGUF file."""
    architecture = fields['general.architecture']
    if architecture not in NAMES_OF_NORMS:
        raise ValueError(f'general.architecture is {architecture!r}; known here: {", ".join(NAMES_OF_NORMS)}')

    def field(name: str) -> Any:
        return fields[f'{architecture}.{name}']

    config = {
        'hidden_size': field('embedding_length'),
        'intermediate_size': field('feed_forward_length'),
        'num_hidden_layers': field('block_count'),
        'num_attention_heads': field('attention.head_count'),
        'num_key_value_heads': field('attention.head_count_kv'),
        'max_position_embeddings': field('context_length'),
        'rms_norm_eps': float(f'{field("attention.layer_norm_rms_epsilon"):.6g}'),  # stored in float32
        'rope_theta': field('rope.freq_base'),
        'vocab_size': len(fields['tokenizer.ggml.tokens']),
        'bos_token_id': fields['tokenizer.ggml.bos_token_id'],
        'eos_token_id': fields['tokenizer.ggml.eos_token_id'],
        'pad_token_id': fields['tokenizer.ggml.padding_token_id'],
        'tie_word_embeddings': True,  # neither file has a matrix for the output
        'torch_dtype': 'float32',
    }
    if architecture == 'llama':
        own = {'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_act': 'silu'}
    else:
        own = gemma3_config(field('block_count'), field('attention.key_length'), field('attention.sliding_window'))
    return {**own, **config}


def gemma3_config(num_layers: int, head_dim: int, sliding_window: int) -> dict[str, Any]:
    """Return the part of Gemma 3's configuration that others do not have, of which the file tells only half."""
    # Five layers with a window, then one without, as in all models of the family.
    layer_types = ['full_attention' if layer % 6 == 5 else 'sliding_attention' for layer in range(num_layers)]
    return {
        'architectures': ['Gemma3ForCausalLM'],
        'model_type': 'gemma3_text',
        'hidden_activation': 'gelu_pytorch_tanh',
        'head_dim': head_dim,
        'query_pre_attn_scalar': head_dim,
        'layer_types': layer_types,
        'sliding_window': sliding_window,
        'sliding_window_pattern': 6,
        'rope_local_base_freq': 10000.0,
    }


def transformers_name(name: str, fields: dict[str, Any]) -> str:
    """Return transformers' name of a tensor in a GGUF file."""
    whole = {'token_embd.weight': 'model.embed_tokens.weight', 'output_norm.weight': 'model.norm.weight'}
    if name in whole:
        return whole[name]

    block = re.fullmatch(r'blk\.(\d+)\.(\w+)\.weight', name)
    names = {**NAMES_OF_BLOCKS, **NAMES_OF_NORMS[fields['general.architecture']]}
    if block is None or block[2] not in names:
        raise ValueError(f'{name}: a tensor that is unknown here')
    return f'model.layers.{block[1]}.{names[block[2]]}.weight'


def transformers_weight(name: str, values: Array, fields: dict[str, Any]) -> Array:
    """Return a tensor of a GGUF file as transformers has it."""
    architecture = fields['general.architecture']
    if architecture == 'gemma3' and name.endswith('norm.weight'):
        return values - 1  # llama.cpp multiplies by the weight, transformers by one more

    if architecture == 'llama' and name.endswith(('attn_q.weight', 'attn_k.weight')):
        key = 'attention.head_count' if name.endswith('attn_q.weight') else 'attention.head_count_kv'
        return halves_of_heads(values, fields[f'llama.{key}'])
    return np.ascontiguousarray(values)


def halves_of_heads(rows: Array, num_heads: int) -> Array:
    """Return the rows of each head with the even ones first, then the odd ones.

    llama.cpp rotates neighbours (0 with 1, 2 with 3), transformers the two halves of a head (0 with d/2).
    """
    # [heads * d, width] -> [heads, d/2, 2, width] -> [heads, 2, d/2, width] -> [heads * d, width]
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))
