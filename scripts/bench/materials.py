"""The models of the benchmark, with random weights, and a tokenizer trained on the data files.

Both are kept in one folder, named by a hash of everything they depend on.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS_PER_FILE = 1_000_000  # of the tokenizer's training text
BOS, EOS, PAD = '<s>', '</s>', '<pad>'
LLAMA = 'llama'
FOUNDRY_MPT = 'llm_foundry_mpt'  # llm-foundry's own, with ALiBi
LAYERS = {'hidden_size': 512, 'num_hidden_layers': 8, 'num_attention_heads': 8}
GATED = {**LAYERS, 'num_key_value_heads': 2, 'intermediate_size': 1376, 'max_position_embeddings': 2048}
PLAIN = {**LAYERS, 'intermediate_size': 2048, 'max_position_embeddings': 2048}
FAMILIES: dict[str, dict[str, Any]] = {  # 25M parameters each without embeddings
    LLAMA: GATED,
    'gpt_neox': PLAIN,
    'gpt2': {'n_embd': 512, 'n_layer': 8, 'n_head': 8, 'n_positions': 2048},
    'mpt': {'d_model': 512, 'n_layers': 8, 'n_heads': 8, 'max_seq_len': 2048},
    'bloom': {'hidden_size': 512, 'n_layer': 8, 'n_head': 8},
    'falcon': LAYERS,
    'qwen2': GATED,
    'gemma2': {**GATED, 'head_dim': 64, 'attn_implementation': 'eager'},
    'olmo2': GATED,
    FOUNDRY_MPT: {
        'd_model': 512,
        'n_layers': 8,
        'n_heads': 8,
        'expansion_ratio': 4,
        'max_seq_len': 2048,
        'learned_pos_emb': False,
        'attn_config': {'attn_impl': 'torch', 'alibi': True},
    },
}
MPT_CONFIG = 'mpt.json'
# Width 512 and 8 layers as above, with tied embeddings, as small models of today have.
GROUPED = {**GATED, 'head_dim': 64, 'tie_word_embeddings': True}
THREE_LINEAR = ['linear_attention', 'linear_attention', 'linear_attention', 'full_attention']
HYBRIDS: dict[str, dict[str, Any]] = {
    'qwen3_5_text': {
        **GROUPED,
        'layer_types': 2 * THREE_LINEAR,
        'linear_num_key_heads': 4,
        'linear_num_value_heads': 8,
        'linear_key_head_dim': 64,
        'linear_value_head_dim': 64,
    },
    'olmo_hybrid': {**GROUPED, 'layer_types': 2 * THREE_LINEAR},
    'falcon_h1': {
        **GROUPED,
        'mamba_d_ssm': 512,
        'mamba_n_heads': 16,
        'mamba_d_head': 32,
        'mamba_d_state': 64,
        'mamba_n_groups': 1,
    },
    'granitemoehybrid': {
        **GROUPED,
        'layer_types': 2 * ['mamba', 'mamba', 'mamba', 'attention'],
        'num_local_experts': 0,
        'num_experts_per_tok': 0,
        'shared_intermediate_size': 1376,
        'mamba_n_heads': 16,
        'mamba_d_head': 64,
        'mamba_d_state': 64,
        'mamba_expand': 2,
    },
    'nemotron_h': {
        **GROUPED,
        'layers_block_type': 2 * ['mamba', 'mlp', 'mamba', 'attention'],
        'mamba_num_heads': 16,
        'mamba_head_dim': 64,
        'ssm_state_size': 64,
        'n_groups': 1,
    },
    'lfm2': {**GROUPED, 'layer_types': 2 * ['conv', 'conv', 'conv', 'full_attention']},
}
# With sinks and windows, with latent attention, and with chunks that the prompts of the benchmark exceed.
MORE_RULES: dict[str, dict[str, Any]] = {
    'gpt_oss': {**GROUPED, 'intermediate_size': 688, 'num_local_experts': 4, 'num_experts_per_tok': 2},
    'deepseek_v3': {
        **GROUPED,
        'num_key_value_heads': 8,
        'head_dim': 32,  # of the rotated part
        'q_lora_rank': None,
        'kv_lora_rank': 128,
        'qk_rope_head_dim': 32,
        'qk_nope_head_dim': 64,
        'v_head_dim': 64,
        'n_routed_experts': 4,
        'num_experts_per_tok': 2,
        'n_group': 1,
        'topk_group': 1,
        'first_k_dense_replace': 8,
    },
    'llama4_text': {
        **GROUPED,
        'intermediate_size_mlp': 1376,
        'moe_layers': [],
        'num_local_experts': 4,
        'attention_chunk_size': 256,
    },
}
LLAMA_ALL_HEADS = 'llama_all_heads'  # as many heads of keys and values as of queries
LLAMA_1B = 'llama_1b'  # for GPUs: 1.1 billion parameters with a vocabulary of 50,000
RECIPES = (
    FAMILIES
    | HYBRIDS
    | MORE_RULES
    | {
        LLAMA_ALL_HEADS: {'model_type': LLAMA, **GATED, 'num_key_value_heads': 8},
        LLAMA_1B: {
            'model_type': LLAMA,
            'hidden_size': 2048,
            'num_hidden_layers': 22,
            'num_attention_heads': 32,
            'intermediate_size': 5632,
            'num_key_value_heads': 4,
            'max_position_embeddings': 2048,
        },
    }
)
LIVELY = 3.0  # factor of the weights of all layers, with which generations do not repeat themselves


def texts_in(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


@cache
def training_text(data_root: str) -> tuple[str, ...]:
    """Return the strings of all data files below the root, up to CHARACTERS_PER_FILE of each."""
    chosen = []
    for path in sorted(Path(data_root).rglob('*.jsonl')):
        left = CHARACTERS_PER_FILE
        with path.open(encoding='utf-8') as lines:
            for line in lines:
                texts = list(texts_in(json.loads(line))) if line.strip() else []
                chosen.extend(texts)
                left -= sum(map(len, texts))
                if left <= 0:
                    break
    return tuple(chosen)


def model_folder(vocabulary: int, data_root: str, folder: Path, family: str = LLAMA) -> Path:
    """Return a Hugging Face folder with a model and tokenizer of this vocabulary, made if absent."""
    text = training_text(data_root)
    recipe = json.dumps([vocabulary, RECIPES[family], torch.__version__, text]).encode()
    path = folder / f'{family}-{vocabulary}-{hashlib.sha256(recipe).hexdigest()[:12]}'
    if not (path / 'complete').exists():
        make_tokenizer(data_root, vocabulary).save_pretrained(path)
        if family == FOUNDRY_MPT:  # created in the environment of llm-foundry, always with the same weights
            (path / MPT_CONFIG).write_text(json.dumps({**FAMILIES[family], 'vocab_size': vocabulary}))
        else:
            make_model(vocabulary, family).save_pretrained(path)
        (path / 'complete').touch()
    return path


def load_model(folder: str, device: str = 'cpu', dtype: str = 'float32') -> Any:
    """Return the model in a folder; llm-foundry's own on the CPU in float32."""
    config = Path(folder) / MPT_CONFIG
    if not config.exists():
        model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=getattr(torch, dtype))
        return model.eval().to(device)
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    torch.manual_seed(0)
    return MPTForCausalLM(MPTConfig(**json.loads(config.read_text()))).eval()


@cache  # the models of all families have one
def make_tokenizer(data_root: str, vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most `vocabulary` entries that puts a bos before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(data_root), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f'{BOS} $A', pair=f'{BOS} $A {BOS} $B', special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def make_model(vocabulary: int, family: str) -> Any:
    """Return a model of a family; its weights are random and always the same."""
    torch.manual_seed(0)
    tokens = {'bos_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 2}
    config = AutoConfig.for_model(**{'model_type': family, 'vocab_size': vocabulary, **tokens, **RECIPES[family]})
    return AutoModelForCausalLM.from_config(config)


def lively_folder(folder: Path, end_scale: float) -> Path:
    """Return a copy of a model whose generations do not repeat the same few tokens, made if absent.

    `end_scale` scales the logit of eos: its two standard deviations are about `end_scale` times the expected best
    logit. At 0 eos is never the best, and from 0.4 a generation ends now and then.
    """
    path = folder.with_name(f'{folder.name}-lively-{LIVELY:g}-{end_scale:g}')
    if not (path / 'complete').exists():
        model = LlamaForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for module in model.model.layers.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight *= LIVELY
            model.lm_head.weight[model.config.eos_token_id] *= end_scale * math.sqrt(2 * math.log(model.vocab_size))
        AutoTokenizer.from_pretrained(folder).save_pretrained(path)
        model.save_pretrained(path)
        (path / 'complete').touch()
    return path
