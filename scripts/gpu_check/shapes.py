"""The models that are timed, with random weights: shapes of published ones; for a CPU tiny ones of the same kinds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA_125M, LLAMA_1B, LLAMA_7B, HYBRID_1B = 'llama 125M', 'llama 1B', 'llama 7B', 'hybrid 1B'

# Granite 4.0 H 1B: four layers of attention without positions among 36 of Mamba 2. vLLM has it too.
MAMBA_BEFORE_ATTENTION = ['mamba'] * 5 + ['attention'] + ['mamba'] * 4
HYBRID = {
    'model_type': 'granitemoehybrid',
    'vocab_size': 100_352,
    'hidden_size': 1536,
    'num_hidden_layers': 40,
    'layer_types': 4 * MAMBA_BEFORE_ATTENTION,
    'num_attention_heads': 12,
    'num_key_value_heads': 4,
    'shared_intermediate_size': 4096,
    'intermediate_size': 4096,
    'num_local_experts': 0,
    'num_experts_per_tok': 0,
    'mamba_n_heads': 48,
    'mamba_d_head': 64,
    'mamba_d_state': 128,
    'mamba_n_groups': 1,
    'mamba_expand': 2,
    'position_embedding_type': 'nope',
    'attention_multiplier': 128**-0.5,
    'tie_word_embeddings': True,
}
SHAPES: dict[str, dict[str, Any]] = {
    # SmolLM2 135M.
    LLAMA_125M: {
        'model_type': 'llama',
        'vocab_size': 49_152,
        'hidden_size': 576,
        'intermediate_size': 1536,
        'num_hidden_layers': 30,
        'num_attention_heads': 9,
        'num_key_value_heads': 3,
        'tie_word_embeddings': True,
    },
    # TinyLlama 1.1B.
    LLAMA_1B: {
        'model_type': 'llama',
        'vocab_size': 32_000,
        'hidden_size': 2048,
        'intermediate_size': 5632,
        'num_hidden_layers': 22,
        'num_attention_heads': 32,
        'num_key_value_heads': 4,
    },
    # Mistral 7B.
    LLAMA_7B: {
        'model_type': 'llama',
        'vocab_size': 32_000,
        'hidden_size': 4096,
        'intermediate_size': 14_336,
        'num_hidden_layers': 32,
        'num_attention_heads': 32,
        'num_key_value_heads': 8,
    },
    HYBRID_1B: HYBRID,
}
# Two layers of width 64, for a CPU.
TINY = {
    'vocab_size': 512,
    'hidden_size': 64,
    'intermediate_size': 128,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
}
TINY_HYBRID = {
    **TINY,
    'layer_types': ['mamba', 'attention'],
    'shared_intermediate_size': 128,
    'mamba_n_heads': 4,
    'mamba_d_head': 32,
    'mamba_d_state': 16,
}
NEW_NAMES = {'mamba': 'linear_attention', 'attention': 'full_attention'}
ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'granitemoehybrid': 'GraniteMoeHybridForCausalLM'}
SPECIAL = {'bos_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 2, 'max_position_embeddings': 4096}

# Dense bf16 operations a second, by a part of the name that torch gives a card; the longest part that fits counts.
# From NVIDIA's data sheets, without sparsity.
PEAK_FLOPS = {
    'A100': 312e12,
    'B200': 2250e12,
    'H100': 989e12,
    'H100 NVL': 835e12,
    'H100 PCIe': 756e12,
    'H200': 989e12,
    'L4': 121e12,
    'L40': 181e12,
    'L40S': 362e12,
    'RTX 4090': 165e12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's settings and dtype on a device."""

    name: str
    settings: dict[str, Any]
    device: str
    dtype: torch.dtype

    def model(self) -> Any:
        """Return the model with random weights, always the same, made on the device."""
        config = AutoConfig.for_model(**self.settings)
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(before)
        return model.to(self.device).eval()  # not to the dtype, which rotary frequencies are not in

    def save(self, folder: Path) -> Path:
        """Write the settings for a program that makes random weights itself; return their folder.

        The kinds of layers have the names that vLLM 0.33 knows, which are those of transformers 5.24.
        """
        path = folder / self.name.replace(' ', '-')
        path.mkdir(parents=True, exist_ok=True)
        settings = dict(self.settings)
        if 'layer_types' in settings:
            settings['layer_types'] = [NEW_NAMES[kind] for kind in settings['layer_types']]
        config = {
            **settings,
            'architectures': [ARCHITECTURES[self.settings['model_type']]],
            'dtype': str(self.dtype).removeprefix('torch.'),
        }
        (path / 'config.json').write_text(json.dumps(config, indent=1), 'utf-8')
        return path


def shape_of(name: str, device: str) -> Shape:
    """Return a shape in bf16, or for a CPU the tiny one of its kind in float32."""
    settings = SHAPES[name]
    if device == 'cpu':
        settings = settings | (TINY_HYBRID if name == HYBRID_1B else TINY)
    # The usual 0.02 leaves narrow models almost blind to the context, so that no layout could be told from another.
    spread = settings['hidden_size'] ** -0.5
    return Shape(
        name=name,
        settings={**settings, **SPECIAL, 'initializer_range': spread},
        device=device,
        dtype=torch.float32 if device == 'cpu' else torch.bfloat16,
    )


def flops(model: Any, *, num_tokens: float, mean_length: float, num_reads: float) -> float:
    """Return the operations of a forward: twice the weights of the layers a token, attention, and logits where read.

    A token attends to half of a row of `mean_length` on average. What recurrent layers do besides their weights is left
    out, as is everything but matrix products.
    """
    config = model.config
    outer = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}  # one, if they are tied
    matrices = [weight for weight in model.parameters() if weight.dim() > 1 and weight not in outer]
    in_layers = sum(weight.numel() for weight in matrices)
    output = model.get_output_embeddings().weight.numel()

    attention = 4 * config.num_attention_heads * head_width(config) * num_attention_layers(config) * mean_length / 2
    return num_tokens * (2 * in_layers + attention) + num_reads * 2 * output


def head_width(config: Any) -> int:
    """Return the width of a head of attention."""
    given: int | None = getattr(config, 'head_dim', None)
    return given or config.hidden_size // config.num_attention_heads


def num_attention_layers(config: Any) -> int:
    """Return the number of layers with attention; transformers 5.24 has renamed the kinds of layers."""
    kinds = getattr(config, 'layer_types', None)
    if kinds is None:
        return config.num_hidden_layers
    return sum(kind in ('attention', 'full_attention') for kind in kinds)


def peak_flops(device: str) -> float | None:
    """Return the dense bf16 operations a second of the card; None if it is not in the table, or a CPU."""
    if device == 'cpu':
        return None
    name = torch.cuda.get_device_name()
    matching = [part for part in PEAK_FLOPS if part in name]
    return PEAK_FLOPS[max(matching, key=len)] if matching else None
