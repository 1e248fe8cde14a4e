"""Score and generate with llm-foundry's own MPT, in its environment; write its layouts and errors.

python foundry_mpt_worker.py OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import generations
import networks
import torch
from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM
from networks import CPU, PREFIX_BUDGET, VOCABULARY

from llmfoundry_gauntlet.engine.decoding import GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import plan
from llmfoundry_gauntlet.engine.probe import probe, probe_generation

LONGEST = 60
TORCH = {'attn_impl': 'torch'}
ALIBI = {**TORCH, 'alibi': True}
ROPE = {**TORCH, 'rope': True, 'rope_hf_config': {'type': 'no_scaling', 'factor': 1.0}, 'rope_impl': 'hf'}
REUSED = {
    'order': [{'name': 'default'}, {'name': 'reuse'}, {'name': 'default'}, {'name': 'slide'}],
    'overrides': {
        'reuse': {'attn_config': {'reuse_kv_layer_idx': -1}},
        'slide': {'attn_config': {'sliding_window_size': 4}},
    },
}
CASES: dict[str, dict[str, Any]] = {
    'alibi': {'attn_config': ALIBI},
    'rope': {'attn_config': ROPE},
    'learned positions': {'learned_pos_emb': True, 'attn_config': TORCH},
    'grouped queries, alibi': {
        'attn_config': {**ALIBI, 'attn_type': 'grouped_query_attention', 'kv_n_heads': 2, 'alibi_bias_max': 4}
    },
    'one key, rope': {'attn_config': {**ROPE, 'attn_type': 'multiquery_attention'}},
    'windows, rope': {'attn_config': {**ROPE, 'sliding_window_size': 8}},
    'windows, alibi': {'attn_config': {**ALIBI, 'sliding_window_size': 8}},
    'clipped and normed': {'attn_config': {**ROPE, 'clip_qkv': 0.5, 'qk_ln': True, 'softmax_scale': 0.2}},
    'separate projections': {'attn_config': {**ROPE, 'qk_gn': True, 'fused_qkv': False}},
    'caps, alibi': {
        'attn_config': {**ALIBI, 'attn_logit_softcapping': 3.0},
        'final_logit_softcapping': 2.0,
        'logit_scale': 0.3,
    },
    'untied, scaled': {'attn_config': ROPE, 'logit_scale': 'inv_sqrt_d_model', 'tie_word_embeddings': False},
    'sequence ids': {'attn_config': {**ALIBI, 'attn_uses_sequence_id': True}},
    'reused keys': {'n_layers': 4, 'attn_config': ROPE, 'block_overrides': REUSED},
    'temperature': {'attn_config': {**ROPE, 'attn_temperature_tuning': {'attn_scale': 0.1, 'floor_scale': 8}}},
}


def network(**settings: Any) -> MPTForCausalLM:
    """Return a tiny MPT with random weights."""
    torch.manual_seed(0)
    sizes = {'d_model': 32, 'n_heads': 4, 'n_layers': 2, 'expansion_ratio': 2, 'vocab_size': VOCABULARY}
    start = {'name': 'baseline_', 'init_std': 0.3}
    more = {'max_seq_len': 64, 'learned_pos_emb': False, 'init_config': start, **settings}
    return MPTForCausalLM(MPTConfig(**{**sizes, **more})).eval()


def measure(model: Any) -> dict[str, Any]:
    """Return the layouts of a model, its largest error in nats, and how many of its generations are right."""
    language_model = CausalLanguageModel(model, device=CPU)
    scoring = probe(language_model, vocabulary=VOCABULARY, longest=LONGEST)
    requests = networks.mixed_requests()
    batches = plan(requests, tokens_per_batch=PREFIX_BUDGET, layout=scoring.layout)
    found = networks.sums_of(networks.run(language_model, batches), requests)
    generator = TextGenerator(language_model, GenerationDecoder(generations.Letters(), []))
    generation = probe_generation(generator, vocabulary=VOCABULARY, longest=LONGEST)
    generator.layout = generation.layout
    wanted = generations.mixed_requests()
    texts = generations.texts(generator, wanted)
    alone = [generations.by_bare_forwards(lambda ids: networks.logits_of(model, ids)[-1], one) for one in wanted]
    return {
        'layouts': [scoring.layout, generation.layout],
        'reason': scoring.reason,
        'error': float(abs(found - networks.sums_alone(model, requests)).max()),
        'wrong': [number for number, ids in enumerate(alone) if texts[number] != generations.letters(ids)],
    }


if __name__ == '__main__':
    cases = {name: measure(network(**settings)) for name, settings in CASES.items()}
    Path(sys.argv[1]).write_text(json.dumps(cases))
