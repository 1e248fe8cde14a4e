"""Tiny random models of every causal type of the installed transformers, the layout each has, and its differences.

`python tests/every_family.py` prints what it measures, `--record` also writes it to the table of expected layouts,
tests/fixtures/every_family.yaml, and `--markdown` prints that table as docs/models.md has it. With names of types it
measures those alone.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generations
import networks
import numpy as np
import torch
import transformers
import yaml
from generations import Letters
from networks import CPU, VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmfoundry_gauntlet.engine.decoding import CACHE, FORKED_PROMPTS, NO_CACHE, PROMPT_STREAM, GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import FORKED, PADDED_ROWS, STREAM, plan
from llmfoundry_gauntlet.engine.probe import probe, probe_generation, step_logits
from llmfoundry_gauntlet.engine.rounding import FLOAT32_ROUNDING, ROUNDING_TOLERANCE, nudged_embeddings

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
LONGEST = 60  # of the probe's rows
LONGEST_ROW = 100  # above those of the requests
UNUSED = 1  # a token in none of the rows
NOISE = 0.05  # added to all weights, so that biases and gates that start at zero matter
MAX_PARAMETERS = 12_000_000  # a larger model has a size that the table below does not know
TOLERANCE = 1e-4  # nats and logits, in float32
DEEP = 16  # layers
LARGEST_LOGIT = 140  # about that of Gemma 3 270M

OWN_DEFAULT = object()  # a setting that a family's configuration computes itself
LINEAR = {'layer_types': ['linear_attention', 'full_attention'] * 2}
SLIDING = {'layer_types': ['sliding_attention', 'full_attention'] * 2}
HYBRID = {'layer_types': OWN_DEFAULT, 'layers_block_type': ['mamba', 'hybrid'] * 2}
CONVOLUTIONS = {'layer_types': ['conv', 'full_attention'] * 2}
ROPE = {'rope_type': 'default', 'rope_theta': 10_000.0}


def named(names: str, value: Any) -> dict[str, Any]:
    """Return the same value under several names of settings."""
    return dict.fromkeys(names.split(), value)


# Settings for every configuration that has them; families call the same thing by different names.
SIZES: dict[str, Any] = {
    'vocab_size': VOCABULARY,
    'vocab_size_per_layer_input': VOCABULARY,
    'unpadded_vocab_size': VOCABULARY,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
    # Widths.
    **named('hidden_size d_model n_embd embedding_size emb_dim dim block_dim conv_dim lru_width embed_dim', 32),
    **named('embedding_dim input_embedding_size word_embed_proj_dim hidden_size_global', 32),
    **named('intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dim_ff d_inner n_inner', 64),
    **named('ffn_hidden_size intermediate_size_mlp dense_intermediate_size block_ff_dim mlp_hidden_size dff', 64),
    # Layers, of which linear attention and windows may alternate with full attention.
    **named('num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers', 4),
    **named('num_blocks depth', 4),
    **named('layer_types mlp_layer_types', None),
    **named('sliding_window attention_window_size attention_chunk_size', networks.WINDOW),
    **named('max_position_embeddings n_positions max_seq_len n_ctx seq_length max_target_positions', 256),
    'max_source_positions': 256,
    # Heads.
    **named('num_attention_heads n_head n_heads num_heads attention_heads', 4),
    **named('encoder_attention_heads decoder_attention_heads num_decoder_attention_heads', 4),
    **named('num_key_value_heads num_kv_heads kv_n_heads num_global_key_value_heads', 2),
    **named('head_dim global_head_dim d_kv dim_head attention_head_size kv_channels', 8),
    # Weights so large that every token depends on its context.
    **named('initializer_range init_std std init_method_std embed_init_std', 0.3),
    # Encoders that decode.
    'is_decoder': True,
    # Experts.
    **named('num_experts n_routed_experts num_local_experts moe_num_experts', 4),
    **named('num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts', 2),
    **named('moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size', 16),
    **named('expert_ffn_hidden_size expert_dim', 16),
    'shared_intermediate_size': 32,
    **named('n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace zero_expert_num', 1),
    # Latent attention. An indexer with fewer heads scores many keys exactly 0, and its choice of them is arbitrary.
    **named('q_lora_rank kv_lora_rank o_lora_rank', 16),
    **named('qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim index_topk', 8),
    **named('index_n_heads', 16),
    # State spaces, convolutions and linear attention.
    **named('mamba_d_state mamba_d_head mamba_n_heads mamba_num_heads mamba_head_dim mamba_chunk_size', 8),
    **named('ssm_state_size chunk_size state_size mamba_headdim', 8),
    **named('mamba_n_groups n_groups mamba_ngroups', 1),
    **named('mamba_d_conv mamba_dt_rank time_step_rank linear_conv_kernel_dim linear_num_value_heads', 4),
    **named('mamba_expand n_mamba_heads linear_num_key_heads', 2),
    'mamba_d_ssm': 64,
    **named('linear_key_head_dim linear_value_head_dim linear_head_dim', 8),
    'use_mamba_kernels': False,
    # The rest of Gemma 3n and 4, and images.
    **named('hidden_size_per_layer_input laurel_rank', 8),
    'num_kv_shared_layers': 0,
    'image_size': 32,
    'patch_size': 16,
}

# Further settings of single families, or of the configurations inside theirs. Those with a smaller `initializer_range`
# multiply rounding errors: with 0.3 a bare row is up to 1e-3 off the same row in float64, so that layouts could not be
# told apart within the tolerance.
EXTRA: dict[str, dict[str, Any]] = {
    'bailing_hybrid': LINEAR,
    'bamba': {'layer_types': OWN_DEFAULT, 'attn_layer_indices': [1, 3]},
    'blt': {'encoder_hash_byte_group_vocab': 64},
    'codegen': {'rotary_dim': 4},
    'cohere': {'logit_scale': 1.0},
    'cohere2': {'logit_scale': 1.0},
    'cohere_compass_text': {**SLIDING, 'rope_parameters': {'sliding_attention': ROPE, 'full_attention': ROPE}},
    'dbrx': {
        'attn_config': {'kv_n_heads': 2, 'rope_theta': 10_000.0, 'clip_qkv': 8.0},
        'ffn_config': {'ffn_hidden_size': 16, 'moe_num_experts': 4, 'moe_top_k': 2, 'ffn_act_fn': {'name': 'silu'}},
    },
    'dots3_note_text': {'num_key_value_heads': 4, 'per_layer_config': {}, 'head_dim': 16},
    'dots3_note_audio_encoder': {'adapter_input_size': 32, 'adapter_out_dim': 32},
    'dots3_note_vision_encoder': {'per_layer_config': {}, 'adapter_in_dim': 32, 'adapter_out_dim': 32},
    'falcon_h1': {'layer_types': OWN_DEFAULT},
    **{name: {'initializer_range': 0.2} for name in ('gemma', 'granitemoeshared', 'jetmoe')},
    'gemma3_text': {**SLIDING, 'query_pre_attn_scalar': 8},
    'gemma3n_text': {'activation_sparsity_pattern': [0.5, 0.0, 0.0, 0.0]},
    'gemma4_text': SLIDING,
    'gpt_neo': {'attention_types': [[['global', 'local'], 2]], 'window_size': networks.WINDOW},
    'gptj': {'rotary_dim': 4},
    'granitemoehybrid': {'layer_types': ['mamba', 'attention'] * 2},
    # So does its recursion: with the default number of cycles a bare row is 0.2 off that in float64.
    'hrm_text': {'H_cycles': 1, 'L_cycles': 1},
    'jamba': {'layer_types': OWN_DEFAULT, 'attn_layer_period': 2, 'attn_layer_offset': 1, 'expert_layer_period': 2},
    'lfm2': CONVOLUTIONS,
    'lfm2_moe': {**CONVOLUTIONS, 'num_dense_layers': 1},
    'llama4_text': {'num_experts_per_tok': 1, 'interleave_moe_layer_step': 2, 'no_rope_layers': [1, 1, 1, 0]},
    'mamba2': {'num_heads': 8},
    'mega': {'bidirectional': False},
    'minimax': {**LINEAR, 'block_size': 8, 'initializer_range': 0.1},
    'mllama_text_model': {'cross_attention_layers': [1], 'rope_scaling': {'rope_type': 'default'}},
    'nemotron_h': {'layer_types': OWN_DEFAULT, 'layers_block_type': ['mamba', 'attention', 'mamba', 'moe']},
    'olmo3': SLIDING,
    'qwen3_5_moe_text': LINEAR,
    'qwen3_5_text': LINEAR,
    'qwen3_next': {**LINEAR, 'initializer_range': 0.2},
    'qwen4_exp_text': {
        'indexer_budget': 8,
        'indexer_compress_ratio': 2,
        'indexer_n_heads': 4,
        'indexer_head_dim': 8,
        'indexer_kv_heads': 1,
        'initializer_range': 0.1,
    },
    'recurrent_gemma': {'layer_types': OWN_DEFAULT},
    'reformer': {'axial_pos_embds': False, 'attn_layers': ['local'] * 4, 'local_attn_chunk_length': 8},
    'roc_bert': {
        **named('pronunciation_vocab_size shape_vocab_size', 50),
        **named('pronunciation_embed_dim shape_embed_dim', 8),
    },
    'transfo-xl': {'cutoffs': [20, 40]},
    'xlm': {'causal': True, 'pad_index': UNUSED},
    'xlstm': {'qk_dim_factor': 1.0, 'v_dim_factor': 1.0},
    'xmod': {'languages': ['en_XX'], 'default_language': 'en_XX'},
    'zamba': {**HYBRID, 'attention_hidden_size': 64, 'attention_head_dim': 16, 'initializer_range': 0.1},
    'zamba2': {**HYBRID, 'n_mamba_heads': 8, 'initializer_range': 0.1},
    'zaya': {'num_experts_per_tok': 1},
}


def settings_of(config: Any, name: str) -> dict[str, Any]:
    """Return the small settings of a type, and of the configurations inside its own."""
    known = set(config.to_dict()) | set(getattr(config, 'attribute_map', {}))
    settings: dict[str, Any] = {}
    for key, value in SIZES.items():
        own = getattr(type(config), key, None)
        is_computed = isinstance(own, property) and own.fset is None
        if key in known and not is_computed:
            settings[key] = value
    if 'kv_lora_rank' in known:  # latent attention has keys for every head
        settings['num_key_value_heads'] = 4
    for key in getattr(config, 'sub_configs', {}):
        inner = getattr(config, key, None)
        if inner is None and name == 'phi4_multimodal':  # 4.53 leaves out what the model then reads
            inner = config.sub_configs[key]()
        if inner is not None and not isinstance(inner, dict):
            settings[key] = {'model_type': inner.model_type, **settings_of(inner, inner.model_type)}
    settings |= EXTRA.get(name, {})
    return {key: value for key, value in settings.items() if value is not OWN_DEFAULT}


class NotCausal(ValueError):
    """Raised for a model whose logits depend on later tokens."""


def build(name: str, attention: str | None = None, **more: Any) -> Any:
    """Return a tiny random model of a type, with eager or its default attention, and with further settings."""
    config = AutoConfig.for_model(name, **{**settings_of(AutoConfig.for_model(name), name), **more})
    with torch.device('meta'):
        empty = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f'{name} has {num_parameters} parameters; name its sizes in SIZES or EXTRA')

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.is_floating_point():
                parameter.add_(NOISE * noise)
            if not torch.isfinite(parameter).all():  # transformers left it as the memory was
                parameter.copy_(2 * NOISE * noise)
    return model


@torch.no_grad()
def build_deep(name: str) -> Any:
    """Return a model of a type with sixteen layers, and logits as large as those of real models."""
    settings: dict[str, Any] = {'num_hidden_layers': DEEP}
    layer_types = EXTRA.get(name, {}).get('layer_types')
    if isinstance(layer_types, list):
        settings['layer_types'] = layer_types * (DEEP // len(layer_types))
    model = build(name, **settings)
    logits = bare_logits(model, networks.draw(np.random.default_rng(3), LONGEST_ROW))
    model.get_output_embeddings().weight.mul_(LARGEST_LOGIT / logits.abs().max())
    return model


@torch.no_grad()
def bare_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [T, V] of one unpadded row by the bare model."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


@torch.no_grad()
def build_reference(name: str) -> Any:
    """Return the model with eager attention, which defines the scores. Raise whatever keeps it from scoring tokens."""
    model = build(name, 'eager')
    ids = networks.draw(np.random.default_rng(3), LONGEST_ROW)
    logits = bare_logits(model, ids)
    if logits.shape != (len(ids), VOCABULARY):
        raise ValueError(f'{name} has logits of shape {tuple(logits.shape)}, not one row for each token')
    for length in (25, 70):
        change = float((bare_logits(model, ids[:length]) - logits[:length]).abs().max())
        if not change <= TOLERANCE:
            raise NotCausal(f'later tokens change the logits of {name} by {change:.1g}')
    # Batches of several rows, one after another.
    for num_rows in (3, 2):
        rows = torch.tensor([ids[:8]] * num_rows)
        model(input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False)
    return model


EXPECTED = Path(__file__).parent / 'fixtures' / 'every_family.yaml'
OLDER, NEWER = STACKS = ('4.53', '5.24')  # versions of transformers, each with a column of expected layouts
STACK = OLDER if int(transformers.__version__.split('.')[0]) < 5 else NEWER

NOT_CAUSAL = 'not causal: logits depend on later tokens'
CODEBOOKS = 'generates audio codebooks, and its configuration needs those of two other models'
DRAFTS = "a draft model, which needs another model's hidden states and keys"
NEEDS_TIMM = 'its image encoder needs the package timm'
TAKES_ONLY_TEXT_CONFIG = 'its text model is built from `text_config` alone (in 5.24 the whole model is built)'
# Types without a tiny model that scores tokens, and why.
CANNOT_IN_BOTH = {
    'cpmant': 'not causal: prompts are attended to in both directions, and learned prompt rows precede the tokens',
    'gemma3n': NEEDS_TIMM,
    'musicgen': CODEBOOKS,
    'musicgen_melody': CODEBOOKS,
    'prophetnet': f'{NOT_CAUSAL} (it predicts several tokens at once, and its batches differ in shape)',
    'xlnet': f'{NOT_CAUSAL} (without a permutation mask)',
}
CANNOT = {
    OLDER: {
        **CANNOT_IN_BOTH,
        'emu3': TAKES_ONLY_TEXT_CONFIG,
        'llama4': TAKES_ONLY_TEXT_CONFIG,
        'moshi': f'{NOT_CAUSAL} without a mask (in 5.24 it is causal)',
        'zamba2': f'{NOT_CAUSAL} in rows of several chunks, of 256 tokens in real models (in 5.24 it is causal)',
        'recurrent_gemma': 'keeps the state of the last batch, so that a batch of another size fails (mended in 5.24)',
        'qdqbert': 'needs the package pytorch-quantization',
        'speech_to_text_2': 'its constructor fails (`Speech2Text2SinusoidalPositionalEmbedding` has no `weight`)',
        'transfo-xl': 'its forward takes no `attention_mask` and no `use_cache`',
        'xlm-prophetnet': f'{NOT_CAUSAL} (as prophetnet)',
    },
    NEWER: {**CANNOT_IN_BOTH, 'gemma4_assistant': DRAFTS, 'gemma4_unified_assistant': DRAFTS},
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The layouts that the probe chose for a type, and the largest differences from bare rows: of scores and of logits.

    `rounding` is the largest difference that rounding alone makes to the logits of bare rows.
    """

    scoring: str
    generation: str
    scores_off: float
    logits_off: float
    rounding: float


def measure(name: str) -> Measured:
    """Return the layouts of a type with its default attention, and its differences from bare eager rows."""
    reference = build_reference(name)
    try:
        model = build(name)
    except (ValueError, ImportError):  # no sdpa for this type
        model = build(name, 'eager')
    language_model = CausalLanguageModel(model, device=CPU)

    scoring = probe(language_model, vocabulary=VOCABULARY, longest=LONGEST)
    requests = [*networks.mixed_requests(), *networks.requests_after_a_prefix(3)]
    batches = plan(requests, tokens_per_batch=networks.PREFIX_BUDGET, layout=scoring.layout)
    outputs = networks.run(language_model, batches)
    scores_off = 0.0
    for request in requests:
        for row, continuation in enumerate(request.continuations):
            context = request.contexts[row]
            logits = bare_logits(reference, [*context.tolist(), *continuation.tolist()])
            of_continuation = logits[len(context) - 1 : -1].log_softmax(-1)
            targets = torch.from_numpy(continuation).long()
            expected = of_continuation.gather(1, targets[:, None]).sum()
            scores_off = max(scores_off, abs(float(outputs[request.key].logprobs[row].sum()) - float(expected)))

    generator = TextGenerator(language_model, GenerationDecoder(Letters(), range(VOCABULARY)))
    generation = probe_generation(generator, vocabulary=VOCABULARY, longest=LONGEST)
    return Measured(
        scoring=scoring.layout,
        generation=generation.layout,
        scores_off=scores_off,
        **furthest_logits(reference, generator, generation.layout),
    )


def furthest_logits(reference: Any, generator: TextGenerator, layout: str) -> dict[str, float]:
    """Return the largest difference of the logits of generations from those of bare rows, and of these by rounding."""
    requests = generations.mixed_requests()
    steps = step_logits(generator, layout, generations.batch_of(requests), VOCABULARY)
    furthest, rounding = 0.0, 0.0
    for request in requests:
        tokens = [(31 * request.key.row + 17 * step + 7) % VOCABULARY for step in range(request.max_new_tokens)]
        row = [*request.context.tolist(), *tokens[:-1]]
        logits = bare_logits(reference, row)
        with nudged_embeddings(reference, FLOAT32_ROUNDING):
            nudged = bare_logits(reference, row)
        rounding = max(rounding, float((nudged - logits).abs().max()))
        expected = logits[len(request.context) - 1 :].numpy()
        for step in range(request.max_new_tokens):
            furthest = max(furthest, float(np.abs(steps[request.key][step] - expected[step]).max()))
    return {'logits_off': furthest, 'rounding': rounding}


def check(name: str) -> None:
    """Check that a type has its expected layouts and the scores of bare rows, or is listed as one that cannot be."""
    reason = CANNOT[STACK].get(name)
    if reason is not None:
        try:
            build_reference(name)
        except Exception:  # of any kind, as each family's code raises its own
            return
        raise AssertionError(f'{name} can be built now: take it out of CANNOT ({reason}) and record its layouts')

    layouts = expected_layouts().get(name, {}).get(STACK)
    assert layouts is not None, f'{name} has no layouts: record them, or list it in CANNOT with the reason'
    measured = measure(name)
    assert measured.scores_off <= TOLERANCE, f'{name}: scores {measured.scores_off:.1g} nats off'
    assert measured.logits_off <= max(TOLERANCE, ROUNDING_TOLERANCE * measured.rounding), (
        f'{name}: logits {measured.logits_off:.1g} off'
    )
    chosen = f'{measured.scoring} {measured.generation}'
    assert chosen == layouts, f'{name} runs in {chosen}, not in {layouts}'


def expected_layouts() -> dict[str, dict[str, str]]:
    """Return the layouts for scoring and generation of each type, by version of transformers."""
    return yaml.safe_load(EXPECTED.read_text()) if EXPECTED.exists() else {}


def record(measured_by_name: dict[str, Measured]) -> None:
    """Write the layouts that the installed version has into the table; keep those of the other."""
    layouts = expected_layouts()
    for of_type in layouts.values():
        of_type.pop(STACK, None)
    for name, measured in measured_by_name.items():
        layouts.setdefault(name, {})[STACK] = f'{measured.scoring} {measured.generation}'
    kept = {name: dict(sorted(layouts[name].items())) for name in sorted(layouts) if layouts[name]}
    EXPECTED.write_text(yaml.safe_dump(kept, sort_keys=False))


NAMES = {
    STREAM: 'token stream',
    FORKED: 'forked prefixes',
    PADDED_ROWS: 'padded rows',
    PROMPT_STREAM: 'KV cache, prompts in a stream',
    FORKED_PROMPTS: 'KV cache, forked prompts',
    CACHE: 'KV cache',
    NO_CACHE: 'whole rows',
}


def markdown() -> str:
    """Return the tables of docs/models.md: the types of each pair of layouts, and those that cannot be built."""
    columns: dict[str, dict[str, list[str]]] = {stack: defaultdict(list) for stack in STACKS}
    for name, layout_of in expected_layouts().items():
        for stack, layouts in layout_of.items():
            columns[stack][layouts].append(name)
    rows = ['| scoring | generation | transformers | types |', '|---|---|---|---|']
    pairs = [
        f'{scoring} {generation}'
        for scoring in (STREAM, FORKED, PADDED_ROWS)
        for generation in (PROMPT_STREAM, FORKED_PROMPTS, CACHE, NO_CACHE)
    ]
    for layouts in pairs:
        scoring, generation = layouts.split()
        for stack in STACKS:
            types = columns[stack][layouts]
            if types:
                names = ', '.join(types)
                rows.append(f'| {NAMES[scoring]} | {NAMES[generation]} | {stack}: {len(types)} | {names} |')

    names_by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted({*CANNOT[OLDER], *CANNOT[NEWER]}):
        stacks = [stack for stack in STACKS if name in CANNOT[stack]]
        reason = CANNOT[stacks[0]][name]
        names_by_reason[reason, ', '.join(stacks)].append(name)
    rows += ['', '| not measured | transformers | because |', '|---|---|---|']
    for (reason, stacks_of_types), types in names_by_reason.items():
        rows.append(f'| {", ".join(types)} | {stacks_of_types} | {reason} |')
    return '\n'.join(rows)


def measure_all(names: Iterable[str]) -> dict[str, Measured]:
    """Return what each type has; print it and its time, or why it cannot be built."""
    measured_by_name: dict[str, Measured] = {}
    for name in names:
        started = time.perf_counter()
        try:
            measured = measure(name)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(f'{name}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})', flush=True)
            continue
        measured_by_name[name] = measured
        seconds = time.perf_counter() - started
        print(
            f'{name}: {measured.scoring}, {measured.generation}, scores {measured.scores_off:.0e} off, '
            f'logits {measured.logits_off:.0e} off, {seconds:.1f} s',
            flush=True,
        )
    return measured_by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('names', nargs='*', help='types to measure; all of the installed transformers if left out')
    parser.add_argument('--record', action='store_true', help=f'write the layouts of all types to {EXPECTED.name}')
    parser.add_argument('--markdown', action='store_true', help='print the tables of docs/models.md, without measuring')
    options = parser.parse_args()
    if options.markdown:
        print(markdown())
        return
    if options.record and options.names:
        parser.error('--record writes all types: leave out the names')

    warnings.simplefilter('ignore')
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    started = time.perf_counter()
    measured_by_name = measure_all(options.names or TYPES)
    seconds = time.perf_counter() - started

    counts: dict[str, int] = defaultdict(int)
    for measured in measured_by_name.values():
        counts[f'{measured.scoring} {measured.generation}'] += 1
    worst_score = max((measured.scores_off for measured in measured_by_name.values()), default=0.0)
    worst_logit = max((measured.logits_off for measured in measured_by_name.values()), default=0.0)
    print(f'transformers {transformers.__version__}, torch {torch.__version__}: {len(TYPES)} types, {dict(counts)}')
    print(f'worst score {worst_score:.1e} nats off, worst logit {worst_logit:.1e} off, {seconds:.0f} s')
    if options.record:
        record(measured_by_name)


if __name__ == '__main__':
    main()
