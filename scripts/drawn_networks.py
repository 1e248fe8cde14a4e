"""Tiny networks with drawn weights of further architectures, and the rows that they are given.

Shared by `record_architectures.py`, which runs in the environment of llm-foundry, and
`tests/test_architecture_parity.py`: weights depend on their names alone, not on a version of torch or transformers.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from recording import FIXTURES, REPOSITORY, read_lines

SAMPLES = REPOSITORY / 'llmfoundry_gauntlet' / 'eval_data'
PADDING = '<pad>'
TOKENIZER = FIXTURES / 'models' / 'rotary_bos'
SPREAD = 0.3  # of weights: so large that every token depends on its context
SIZES = {
    'hidden_size': 32,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'vocab_size': 900,
    'bos_token_id': 0,
    'eos_token_id': 1,
    'pad_token_id': 2,
}
GROUPED = {**SIZES, 'intermediate_size': 64, 'num_key_value_heads': 2, 'tie_word_embeddings': False}
BASE = 128  # tokens beyond which rotary frequencies depend on the length

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {  # by name: the family of its classes and its settings
    'falcon_alibi': ('Falcon', {**SIZES, 'alibi': True, 'tie_word_embeddings': False}),
    'dynamic_ntk': (
        'Llama',
        {**GROUPED, 'max_position_embeddings': BASE, 'rope_scaling': {'rope_type': 'dynamic', 'factor': 8.0}},
    ),
    'longrope': (
        'Phi3',
        {
            **GROUPED,
            'original_max_position_embeddings': BASE,
            'max_position_embeddings': 8 * BASE,
            'rope_scaling': {'type': 'longrope', 'short_factor': [1.0] * 4, 'long_factor': [1.5, 2.0, 4.0, 8.0]},
        },
    ),
    'mixtral': ('Mixtral', {**GROUPED, 'num_local_experts': 4}),
    'llama': ('Llama', GROUPED),
}


def draw_network(name: str) -> Any:
    """Return a network in eval mode."""
    family, settings = NETWORKS[name]
    config = getattr(transformers, f'{family}Config')(**settings)
    network = getattr(transformers, f'{family}ForCausalLM')(config)
    with torch.no_grad():
        for key, weight in network.named_parameters():
            weight.copy_(torch.from_numpy(draw_weight(key, tuple(weight.shape))))
    return network.eval()


def draw_weight(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return normal values that depend on the name of a weight; those of norms are around 1."""
    digest = hashlib.sha256(key.encode()).digest()
    seed = int.from_bytes(digest[:4], 'big')
    generator = np.random.default_rng(seed)
    values = SPREAD * generator.standard_normal(shape)
    is_norm = len(shape) == 1 and key.endswith('weight')
    if is_norm:
        values = 1 + values / 3
    return values.astype(np.float32)


def digest_of_weights(network: Any) -> str:
    """Return the sha256 of all weights, in hex."""
    digest = hashlib.sha256()
    for key, weight in sorted(network.named_parameters()):
        digest.update(key.encode() + weight.detach().numpy().tobytes())
    return digest.hexdigest()


def save_network(name: str, folder: Path, *, pad_token: str) -> str:
    """Write a network and the tokenizer with this padding token to a folder; return the digest of its weights."""
    network = draw_network(name)
    network.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(TOKENIZER, pad_token=pad_token).save_pretrained(folder)
    return digest_of_weights(network)


def read_cases() -> dict[str, Any]:
    """Return the content of the cases file."""
    content: dict[str, Any] = yaml.safe_load((FIXTURES / 'architecture_cases.yaml').read_text('utf-8'))
    return content


def write_rows(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write a case's rows; return its task over them."""
    label = case['task']['label']
    if 'rows' in case:
        lines = [json.dumps(row) for row in case['rows']]
    else:
        lines = read_lines(SAMPLES / case['path'])[: case['num_rows']]
    path = folder / f'{label}.source.jsonl'
    path.write_text(''.join(f'{line}\n' for line in lines), 'utf-8')
    return {**case['task'], 'dataset_uri': str(path)}
