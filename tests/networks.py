"""Tiny random networks of many families, mixed requests, and their scores one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers as hf
from packaging.version import Version
from torch._dynamo.testing import CompileCounter

from llmfoundry_gauntlet.engine.plan import FORKED, LAYOUTS, PADDED_ROWS, STREAM, Batch
from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.types import ItemKey, ScoreOutput, ScoreRequest

VOCABULARY = 100
WINDOW = 8
CPU = torch.device('cpu')
IS_TRANSFORMERS_5 = Version(hf.__version__).major >= 5

# Weights so large that every token depends on its context.
SIZES = {
    'hidden_size': 32,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'vocab_size': VOCABULARY,
    'initializer_range': 0.3,
}
GROUPED = {**SIZES, 'intermediate_size': 64, 'num_key_value_heads': 2}
GPT = {'n_embd': 32, 'n_layer': 2, 'n_head': 4, 'vocab_size': VOCABULARY, 'initializer_range': 0.3}
WINDOWED = {**GROUPED, 'sliding_window': WINDOW}
LATENT = {
    **SIZES,
    'intermediate_size': 64,
    'num_key_value_heads': 4,
    'q_lora_rank': 16,
    'kv_lora_rank': 16,
    'qk_nope_head_dim': 8,
    'qk_rope_head_dim': 8,
    'v_head_dim': 8,
    'n_routed_experts': 4,
    'num_experts_per_tok': 2,
    'n_shared_experts': 1,
    'moe_intermediate_size': 16,
    'first_k_dense_replace': 1,
}


def maker(model: str, config: str, **sizes: Any) -> Callable[..., Any]:
    """Return a function that makes a network from the names of its transformers classes and further settings."""

    def make(**more: Any) -> Any:
        # Here, as transformers imports a family when its class is first asked for.
        model_class, config_class = getattr(hf, model), getattr(hf, config)
        return model_class(config_class(**{**sizes, **more}))

    return make


def family(name: str, **sizes: Any) -> Callable[..., Any]:
    """Return the maker of a family whose classes follow one naming scheme."""
    return maker(f'{name}ForCausalLM', f'{name}Config', **sizes)


IN_STREAM = {
    'llama': family('Llama', **GROUPED),
    'mistral': family('Mistral', **GROUPED, sliding_window=None),
    'mistral, windows': family('Mistral', **WINDOWED),
    'qwen2': family('Qwen2', **GROUPED),
    'qwen2, windows on some layers': family('Qwen2', **WINDOWED, use_sliding_window=True, max_window_layers=1),
    'qwen3': family('Qwen3', **GROUPED, head_dim=8),
    'qwen3_moe': family(
        'Qwen3Moe', **GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    'gemma': family('Gemma', **{**GROUPED, 'initializer_range': 0.2}, head_dim=8),  # its embeddings are scaled up
    'gemma2': family(
        'Gemma2',
        **WINDOWED,
        head_dim=8,
        final_logit_softcapping=2.0,
        attn_logit_softcapping=3.0,
        attn_implementation='eager',
    ),
    'gemma3': maker('Gemma3ForCausalLM', 'Gemma3TextConfig', **WINDOWED, head_dim=8, sliding_window_pattern=2),
    'phi': family('Phi', **SIZES, intermediate_size=64),
    'phi3': family('Phi3', **GROUPED, pad_token_id=0),
    'phi3, windows': family('Phi3', **WINDOWED, pad_token_id=0),
    'olmo': family('Olmo', **GROUPED),
    'olmo2': family('Olmo2', **GROUPED),
    'cohere': family('Cohere', **GROUPED, logit_scale=0.3),
    'cohere2': family('Cohere2', **WINDOWED, logit_scale=0.3),
    'granite': family(
        'Granite',
        **GROUPED,
        logits_scaling=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        embedding_multiplier=2.0,
    ),
    'starcoder2': family('Starcoder2', **WINDOWED),
    'mixtral': family('Mixtral', **GROUPED, num_local_experts=4),
    'gpt_neox': family('GPTNeoX', **SIZES, intermediate_size=64),
    'gpt2': maker('GPT2LMHeadModel', 'GPT2Config', **GPT),
    'opt': family(
        'OPT',
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        ffn_dim=64,
        word_embed_proj_dim=32,
        init_std=0.3,
    ),
    'stablelm': family('StableLm', **GROUPED),
    'falcon': family('Falcon', **SIZES),
    'gptj': family('GPTJ', **GPT, rotary_dim=4),
    'gpt_neo': family(
        'GPTNeo',
        hidden_size=32,
        num_layers=2,
        attention_types=[[['global', 'local'], 1]],
        num_heads=4,
        vocab_size=VOCABULARY,
        window_size=WINDOW,
        initializer_range=0.3,
    ),
    'mpt': family('Mpt', d_model=32, n_layers=2, n_heads=4, vocab_size=VOCABULARY, initializer_range=0.3),
    'bloom': family('Bloom', hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, initializer_range=0.3),
    'falcon, alibi': family('Falcon', **SIZES, alibi=True, attn_implementation='eager'),
    'gpt_bigcode': family('GPTBigCode', **GPT),
    # Values of latent attention are narrower than its queries.
    'deepseek_v3': family('DeepseekV3', **LATENT, n_group=1, topk_group=1),
    # A chunk in the mask alone, and queries scaled by their positions in layers without rotary embeddings.
    'llama4': maker(
        'Llama4ForCausalLM',
        'Llama4TextConfig',
        **GROUPED,
        head_dim=8,
        intermediate_size_mlp=64,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0],
        floor_scale=4,
        attn_scale=0.5,
        pad_token_id=0,
    ),
    # A window in the mask alone.
    'phimoe': family('Phimoe', **WINDOWED, num_local_experts=4),
}
if IS_TRANSFORMERS_5:
    IN_STREAM |= {
        # Attention sinks, with and without windows.
        'gpt_oss': family('GptOss', **WINDOWED, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    }
# Whose attention has sinks, values of another width, chunks, scaled queries, or windows in the mask alone.
WITH_MORE_RULES = [name for name in ('gpt_oss', 'deepseek_v3', 'llama4', 'phimoe') if name in IN_STREAM]
IN_PADDED_ROWS = {
    'mamba': family(
        'Mamba', hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4, initializer_range=0.3
    )
}
# Families without sdpa. transformers 5 has none for Gemma 2, as it leaves out the cap on attention scores, and none
# for sinks.
EAGER_ALONE = ('gptj', 'gpt_neo', 'mpt', 'bloom', 'mamba', *(['gemma2', 'gpt_oss'] if IS_TRANSFORMERS_5 else []))
FAMILIES = {**IN_STREAM, **IN_PADDED_ROWS}
LOADED_AS = [
    *[(name, 'eager') for name in FAMILIES],
    *[(name, 'sdpa') for name in FAMILIES if name not in EAGER_ALONE],
]
OFF_AS_SDPA = ('falcon, alibi', *([] if IS_TRANSFORMERS_5 else ['gemma2']))  # other scores than with eager attention
LAYOUT_OF = {**dict.fromkeys(IN_STREAM, STREAM), **dict.fromkeys(IN_PADDED_ROWS, PADDED_ROWS)}


def network(name: str = 'llama', *, seed: int = 0, **more: Any) -> Any:
    """Return a network of a family in eval mode; a seed determines the weights, whatever the attention."""
    torch.manual_seed(seed)
    return FAMILIES[name](**more).eval()


def stretched(kind: str, base: int = 32, **more: Any) -> Any:
    """Return a network whose rotary frequencies depend on a length beyond `base` tokens."""
    if kind == 'dynamic':
        return network(max_position_embeddings=base, rope_scaling={'rope_type': 'dynamic', 'factor': 4.0}, **more)
    scaling = {'type': 'longrope', 'short_factor': [1.0] * 4, 'long_factor': [1.5, 2.0, 4.0, 8.0]}
    lengths = {'original_max_position_embeddings': base, 'max_position_embeddings': 4 * base}
    return network('phi3', rope_scaling=scaling, **lengths, **more)


def rotary(kind: str, base: int = 32, padded_to: int | None = None) -> RotaryLengths:
    """Return the rotary rule of a stretched network; with `padded_to`, for rows that count as padded."""
    padded = {} if padded_to is None else {'t/0-shot': padded_to}
    return RotaryLengths(base=base, scales_by_length=kind == 'dynamic', padded_to=padded)


STRETCHED = ('dynamic', 'longrope')


def request(
    row: int, contexts: Sequence[int] | Sequence[Sequence[int]], continuations: Iterable[Sequence[int]]
) -> ScoreRequest:
    """Return a request from plain numbers; a single context is that of all continuations."""
    choices = tuple(np.array(ids, dtype=np.int32) for ids in continuations)
    if np.ndim(contexts[0]) == 0:
        shared = (np.array(contexts, dtype=np.int32),) * len(choices)
    else:
        shared = tuple(np.array(ids, dtype=np.int32) for ids in contexts)
    return ScoreRequest(key=ItemKey('t/0-shot', row), contexts=shared, continuations=choices)


def draw(rng: np.random.Generator, count: int) -> list[int]:
    """Return random tokens."""
    return rng.integers(3, VOCABULARY, count).tolist()


def mixed_requests() -> list[ScoreRequest]:
    """Return nested contexts, shared choices, single tokens, choices with their own contexts, and rows of 1 to 40
    tokens.
    """
    rng = np.random.default_rng(1)
    passage, answer = draw(rng, 15), draw(rng, 3)
    choices = [draw(rng, 1), draw(rng, 4), draw(rng, 2)]
    # The contexts and continuations of each request.
    rows: list[tuple[Any, list[list[int]]]] = [
        (passage, [answer, draw(rng, 2)]),
        # Continues after the first one's answer.
        ([*passage, *answer, *draw(rng, 6)], choices),
        # Leaves the passage early.
        ([*passage[:4], *draw(rng, 9)], choices),
        # Single tokens.
        (draw(rng, 39), [draw(rng, 1), draw(rng, 1), draw(rng, 1), draw(rng, 1)]),
        # A context of one token.
        (draw(rng, 1), [draw(rng, 5)]),
        # Each choice has a context of its own.
        ([passage[:6], [*passage[:3], *draw(rng, 5)]], [answer, answer]),
        # Choices that continue one another.
        (draw(rng, 20), [[*choices[1], *draw(rng, 4)], choices[1], choices[1][:2]]),
        # Repeated tokens.
        ([7] * 12, [[7, 7, 7], [7]]),
    ]
    return [request(row, contexts, continuations) for row, (contexts, continuations) in enumerate(rows)]


def requests_after_a_prefix(count: int = 8) -> list[ScoreRequest]:
    """Return prompts that share 70 tokens: with 160 tokens a batch they are run after a cached prefix."""
    rng = np.random.default_rng(2)
    prefix = draw(rng, 70)
    return [
        request(100 + row, [*prefix, *draw(rng, 22)], [draw(rng, 3), draw(rng, 1), draw(rng, 2)])
        for row in range(count)
    ]


PREFIX_BUDGET = 160


@torch.no_grad()
def logits_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [T, V] of a bare forward of one sequence."""
    return model(input_ids=torch.tensor([list(ids)])).logits[0].float()


def alone(model: Any, context: np.ndarray, continuation: np.ndarray, after: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities and argmax flags of a continuation by a bare forward with `after` tokens appended."""
    row = [*context.tolist(), *continuation.tolist(), *[0] * after]
    # The logits of a token are those of the position before it.
    first = len(context) - 1
    end = first + len(continuation)
    logits = logits_of(model, row)[first:end]
    targets = torch.from_numpy(continuation).long()
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    is_argmax = logits.argmax(-1) == targets
    return logprobs.numpy(), is_argmax.numpy()


def poison(model: Any, token: int) -> None:
    """Make a token's embedding NaN."""

    def spoil(_: Any, inputs: tuple, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.masked_fill((inputs[0] == token)[..., None], torch.nan)

    model.get_input_embeddings().register_forward_hook(spoil)


def run(language_model: Any, batches: Iterable[Batch]) -> dict[ItemKey, ScoreOutput]:
    """Return the outputs of batches, by key."""
    return {output.key: output for batch in batches for output in language_model.run(batch)}


def sums_of(outputs: dict[ItemKey, ScoreOutput], requests: Sequence[ScoreRequest]) -> np.ndarray:
    """Return the summed log-probability of each continuation, in the order of the requests."""
    return np.array([logprobs.sum() for request in requests for logprobs in outputs[request.key].logprobs])


def sums_alone(model: Any, requests: Sequence[ScoreRequest], after: int = 0) -> np.ndarray:
    """Return the same by bare forwards of one sequence."""
    sums = []
    for request in requests:
        for context, continuation in zip(request.contexts, request.continuations, strict=True):
            logprobs, _ = alone(model, context, continuation, after)
            sums.append(logprobs.sum(dtype=np.float64))
    return np.array(sums)


def layouts_of(model: Any) -> list[str]:
    """Return the layouts in which a model may be run by hand: forked only if it leaves a cache that can be copied.

    Below transformers 5 some families return tuples.
    """
    with torch.no_grad():
        outputs = model(input_ids=torch.tensor([[3, 4]]), use_cache=True)
    caches = (getattr(outputs, 'past_key_values', None), getattr(outputs, 'cache', None))
    can_fork = any(hasattr(cache, 'reorder_cache') for cache in caches)
    return [layout for layout in LAYOUTS if layout != FORKED or can_fork]


def check_against_bare_forwards(
    model: Any, requests: Sequence[ScoreRequest], outputs: dict[ItemKey, ScoreOutput], tolerance: float = 1e-5
) -> None:
    """Check every log-probability and flag of every request, one sequence at a time."""
    assert outputs.keys() == {request.key for request in requests}
    for request in requests:
        output = outputs[request.key]
        for j, (context, continuation) in enumerate(zip(request.contexts, request.continuations, strict=True)):
            logprobs, is_argmax = alone(model, context, continuation)
            np.testing.assert_allclose(output.logprobs[j], logprobs, rtol=0, atol=tolerance)
            error = abs(output.logprobs[j].sum() - logprobs.sum(dtype=np.float64))
            assert error <= tolerance * len(logprobs)  # bound of the sum of the tokens' errors
            assert output.is_argmax[j].tolist() == is_argmax.tolist()
            assert (output.num_top[j] > 0).tolist() == is_argmax.tolist()


@contextmanager
def compiled_for_training(model: Any) -> Iterator[Any]:
    """Return the model compiled; check that a training step gives the same afterwards, without recompilation."""
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter)
    ids = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9]])

    def train_step() -> torch.Tensor:
        return compiled(input_ids=ids, labels=ids, use_cache=False).loss

    before = train_step()
    num_graphs = counter.frame_count
    assert num_graphs > 0
    yield compiled
    assert torch.equal(before, train_step())
    assert counter.frame_count == num_graphs
    torch._dynamo.reset()
