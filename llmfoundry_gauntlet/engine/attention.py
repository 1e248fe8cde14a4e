"""Replace a model's attention with the engine's while a token stream or a decoding step runs.

Models that look up their attention by name (transformers' AttentionInterface) find the engine's under NAME. For other
models, individual functions are patched: torch's `scaled_dot_product_attention` and the functions that build dense
masks, `_attn` of GPT-J, CodeGen and GPT-Neo, the forward of MPT's and Bloom's attention, and `attn_fn` in llm-foundry.
The probe catches models for which this gives wrong numbers. These names are those of transformers 4.53 to 5.24 and of
llm-foundry 0.22: docs/compatibility.md says which version has which.

ALiBi (arXiv 2108.12409) biases each attention score by the distance between query and key. Softmax is invariant to
terms shared by all keys of a query, so a bias by head and key position is equivalent, and a model's own table is used.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

NAME = 'gauntlet_attention'  # the attn_implementation in a model's configuration while the engine runs it
SELECTION = '_attn_implementation'  # the key of transformers' configurations that names the attention to use
SELECTIONS = (SELECTION, 'attn_implementation')  # copies of it in modules: those of BERT in 4.53 have another name
EAGER = 'eager'
FLAGS = ('_use_sdpa', '_use_flash_attention_2')  # of attention modules
UNLIMITED = 1 << 30  # tokens of a stream
# Arguments that models of transformers 4.53 to 5.24 give to their attention and that change nothing in an evaluation.
WITHOUT_EFFECT = frozenset(
    {
        'dropout',  # 0 outside of training
        'deterministic',  # of flash attention's gradients
        'is_causal',  # whether the model built no mask; a model that attends to later tokens fails the probe
        # Positions are in the queries and keys already; flash attention finds packed rows by them.
        'position_ids',
        'cache_position',
        # Of packed rows, which the engine lays out itself.
        'cu_seq_lens_q',
        'cu_seq_lens_k',
        'max_length_q',
        'max_length_k',
        # The outputs of the model.
        'logits_to_keep',
        'output_attentions',
        'output_hidden_states',
        'output_router_logits',
        'return_dict',
        'use_cache',
    }
)

Change = tuple[Any, str, Any]  # an object, the name of an attribute, and its temporary value
KeyBias = Callable[[int, torch.Tensor], torch.Tensor]  # length and a query: biases [heads, length] by position
torch_attention = functional.scaled_dot_product_attention


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array on a device; a GPU copies it from pinned memory, so that the host need not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == 'cuda' else tensor.to(device)


class Unsupported(NotImplementedError):
    """Raised for a model setting that the engine's attention does not support; the message names the setting."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionRule:
    """The rule by which a layer scales, masks and caps its attention scores.

    Scores are multiplied by `scaling` (None: the default, by the width of the query). `window` is the number of
    positions that a token attends to, including its own; with `chunk` it attends to those of its own chunk of so many
    positions. Scores are capped by `softcap`, as in Gemma 2 (arXiv 2408.00118). `sinks` [heads] are scores of a further
    key without a value, as in gpt-oss: they only take weight.
    """

    scaling: float | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def scale(self, query: torch.Tensor) -> float:
        """Return the factor of the scores of a query [..., width]."""
        return float(query.shape[-1] ** -0.5) if self.scaling is None else self.scaling


class Attention(Protocol):
    """The attention of all layers in one forward."""

    @property
    def query_positions(self) -> torch.Tensor:
        """Return the place of each query in its row, counted from 0, int [rows, T]; masked tokens count."""
        ...

    @property
    def longest(self) -> int:
        """Return a length that no row exceeds."""
        ...

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """Return the attention output of the next layer, shape [rows, T, heads, width of the value].

        The query is [rows, heads, T, width]; key and value may have fewer heads, each shared by a group of query heads,
        and the value another width.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replacement:
    """The temporary changes that make a model use the engine's attention.

    With `by_name` the model looks up its attention by name and accepts a ready-made mask. `key_bias` is its ALiBi;
    with `counts_masked` the positions of ALiBi include masked tokens.
    """

    changes: Sequence[Change]
    by_name: bool
    key_bias: KeyBias | None = None
    counts_masked: bool = False

    def mask(self, device: torch.device) -> torch.Tensor | None:
        """Return the `attention_mask` to pass to the forward; the engine's attention ignores it."""
        return torch.zeros(1, 1, 1, 1, device=device) if self.by_name else None

    @contextmanager
    def using(self, attention: Attention) -> Iterator[None]:
        """Make the model use this attention until the context ends."""
        token = _attention.set(attention)
        try:
            with changed(self.changes):
                yield
        finally:
            _attention.reset(token)


_attention: ContextVar[Attention | None] = ContextVar('_attention', default=None)


@contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """Set attributes until the context ends, then restore them or remove those that the instance did not have."""
    before = [(owner, name, getattr(owner, name), is_own(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value, own in before:
            if own:
                setattr(owner, name, value)
            else:
                owner.__dict__.pop(name, None)


def is_own(owner: Any, name: str) -> bool:
    """Return whether an attribute belongs to the instance: stored in it, or set through a descriptor."""
    return name in vars(owner) or any(hasattr(vars(base).get(name), '__set__') for base in type(owner).__mro__)


def replacement(model: Any) -> Replacement:
    """Return the changes that make a model use the engine's attention, also under FSDP or PEFT. Raise Unsupported."""
    modules = list(model.modules())
    if any(map(looks_up_attention, modules)):
        configs = {id(config): config for config in (model.config, model.config.get_text_config())}
        of_configs: list[Change] = [(config, SELECTION, NAME) for config in configs.values()]
        return Replacement(changes=[*of_configs, *rule_changes(modules)], by_name=True)
    changes: list[Change] = [(functional, 'scaled_dot_product_attention', attend_for_torch)]
    key_bias, counts_masked = None, False
    for module in modules:
        changes += attention_changes(module)
        changes += mask_changes(module)
        family = type(module).__name__
        if family in KEY_BIASES and getattr(module, 'use_alibi', getattr(module, 'alibi', True)):
            key_bias, counts_masked = partial(KEY_BIASES[family], module), family in COUNT_MASKED
    return Replacement(changes=changes, by_name=False, key_bias=key_bias, counts_masked=counts_masked)


def rule_changes(modules: Sequence[torch.nn.Module]) -> list[Change]:
    """Return the changes by which `attend_by_name` learns what stands neither in its arguments nor in a ready mask."""
    changes: list[Change] = []
    for module in modules:
        if type(module).__name__ in QUERY_SCALES:
            changes.append((module, 'attn_temperature_tuning', False))  # by its order in the stream; done here instead
        if not isinstance(module, PreTrainedModel):
            continue
        owner = sys.modules[type(module).__module__]
        for name, make_mask in MASKS_OF_A_RULE.items():
            original = vars(owner).get(name)
            if original is not None:
                changes.append((owner, name, partial(make_mask, original)))
    return changes


def looks_up_attention(module: torch.nn.Module) -> bool:
    """Return whether a module looks up its attention by name, in the interface of transformers.

    Whole models say so by a flag, but in transformers 5 StableLM does not: its layers read the table of the interface.
    Methods that all models inherit read it too.
    """
    if isinstance(module, PreTrainedModel):
        return bool(getattr(module, '_supports_attention_backend', False))
    return reads(module, 'ALL_ATTENTION_FUNCTIONS')


def reads(module: torch.nn.Module, name: str) -> bool:
    """Return whether a method of a module's class, other than its constructor, names this attribute or global."""
    methods = [
        inspect.unwrap(value)
        for base in type(module).__mro__
        for method_name, value in vars(base).items()
        if inspect.isfunction(value) and method_name != '__init__'
    ]
    return any(name in method.__code__.co_names for method in methods)


def attention_changes(module: Any) -> list[Change]:
    """Return the changes that make an attention module call the engine's attention, or torch's patched function.

    Empty for other modules, and if it calls torch's function already. Raise Unsupported.
    """
    changes: list[Change] = []
    family = type(module).__name__
    if hasattr(module, 'attn_fn'):
        tuning = getattr(module, 'attn_temperature_tuning', None)
        if tuning is not None and tuning['attn_scale'] != 0:  # depends on a token's place in its row
            raise Unsupported('attn_temperature_tuning')
        changes.append((module, 'attn_fn', partial(attend_for_foundry, module.attn_impl)))
    elif family in FUNCTIONS:
        name, function = FUNCTIONS[family]
        changes.append((module, name, partial(function, module)))
    elif (sdpa := other_class(module, 'sdpa')) is not None:
        changes.append((module, '__class__', sdpa))
    elif selects_at_each_call(module):
        changes.append((module.config, SELECTION, 'sdpa'))
    if '_use_sdpa' in vars(module):
        changes.append((module, '_use_sdpa', True))
    return changes


def mask_changes(module: Any) -> list[Change]:
    """Return the changes that keep a model from building dense masks [T, T], which the engine's attention ignores.

    Empty for other modules. Raise Unsupported.
    """
    family = type(module).__name__
    changes: list[Change] = []
    if hasattr(module, '_update_causal_mask'):
        in_its_place: Callable[..., Any] = no_mask
        if family == 'PhimoeModel':
            if module.config.rope_scaling is not None:
                raise Unsupported('rope_scaling, which this version of phimoe chooses by the length of the stream,')
            changes.append((module.rotary_emb, 'forward', partial(rotary_table_of_phimoe, module.rotary_emb)))
            in_its_place = partial(mask_of_phimoe, module.config)
        changes.append((module, '_update_causal_mask', in_its_place))
    # Functions that the module of the family imports; MPT converts what they return.
    owner = sys.modules[type(module).__module__]
    if family == 'MptModel' and hasattr(owner, '_prepare_4d_causal_attention_mask'):
        changes.append((owner, '_prepare_4d_causal_attention_mask', smallest_mask))
    if isinstance(module, PreTrainedModel) and reads(module, 'create_causal_mask'):
        without = smallest_causal_mask if family == 'MptModel' else no_mask
        changes.append((owner, 'create_causal_mask', without))
    if family == 'MPTModel':
        if module.rope_impl == 'dail':
            raise Unsupported('rope_impl: dail')
        changes.append((module, '_attn_bias', no_bias_and_mask))
        changes.append((module.config, 'max_seq_len', UNLIMITED))
    return changes


def no_mask(*_: Any, **__: Any) -> None:
    """Return None, in place of a mask."""
    return None


def smallest_mask(mask: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return a mask of one element, in place of a dense one."""
    return mask.new_zeros(1, 1, 1, 1)


def smallest_causal_mask(*_: Any, inputs_embeds: torch.Tensor, **__: Any) -> torch.Tensor:
    """Return a mask of one element, in place of that of `create_causal_mask`."""
    return inputs_embeds.new_zeros(1, 1, 1, 1)


# A family may say its window or chunk in its masks alone, and each layer gets the mask of its kind. In their place goes
# one number, on the CPU so that reading it never waits for a GPU: a window, or a chunk as a negative number. Layers may
# slice it like any mask.


def mask_of(*, window: int = 0, chunk: int = 0) -> torch.Tensor:
    """Return the mask that stands for a window or for chunks, int32 [1, 1, 1, 1]."""
    return torch.full((1, 1, 1, 1), window or -chunk, dtype=torch.int32, device='cpu')


def rule_of(mask: torch.Tensor | None) -> tuple[int | None, int | None]:
    """Return the window and the chunk that a mask stands for."""
    if mask is None or mask.dtype != torch.int32 or mask.dim() != 4 or mask.numel() != 1:
        return None, None
    number = int(mask)
    return (number if number > 0 else None), (-number if number < 0 else None)


def window_mask(make_mask: Callable[..., Any], config: Any, *arguments: Any, **more: Any) -> Any:
    """Replace `create_sliding_window_causal_mask`; in threads other than the one that runs the forward call it."""
    if _attention.get() is None or config.sliding_window is None:
        return make_mask(config, *arguments, **more)
    return mask_of(window=config.sliding_window)


def mask_of_phimoe(config: Any, *_: Any, **__: Any) -> torch.Tensor | None:
    """Replace `_update_causal_mask` of PhimoeModel in transformers 4.53."""
    return None if config.sliding_window is None else mask_of(window=config.sliding_window)


def chunk_mask(make_mask: Callable[..., Any], config: Any, *arguments: Any, **more: Any) -> Any:
    """Replace `create_chunked_causal_mask`; in threads other than the one that runs the forward call it."""
    if _attention.get() is None or config.attention_chunk_size is None:
        return make_mask(config, *arguments, **more)
    return mask_of(chunk=config.attention_chunk_size)


def no_bias_and_mask(*_: Any, **__: Any) -> tuple[None, None]:
    """Return None, in place of a bias, and None in place of a mask."""
    return None, None


def other_class(module: torch.nn.Module, implementation: str) -> type[torch.nn.Module] | None:
    """Return another variant of an attention module's class, from transformers' `*_ATTENTION_CLASSES` table."""
    own = type(module)
    for name, table in vars(sys.modules[own.__module__]).items():
        if name.endswith('ATTENTION_CLASSES') and implementation in table and own in table.values():
            wanted: type[torch.nn.Module] = table[implementation]
            return None if wanted is own else wanted
    return None


def selects_at_each_call(module: torch.nn.Module) -> bool:
    """Return whether a layer reads the attention implementation from its configuration at every call.

    Falcon does since transformers 4.54 (docs/compatibility.md: `co_names`). Whole models read it too, but only to build
    masks.
    """
    if isinstance(module, PreTrainedModel) or implementation_of(vars(module).get('config')) is None:
        return False
    return reads(module, SELECTION)


def eager_changes(model: torch.nn.Module) -> list[Change]:
    """Return the changes that switch a model to eager attention; empty if it uses it already or cannot be switched.

    transformers selects the implementation in three ways: by the configuration at every call, by flags that attention
    modules copy from the configuration when constructed, and by the class of these modules. All three change together,
    as a family's masks are built for one implementation.
    """
    configs: dict[int, Any] = {}  # by identity, as modules share them
    by_class: list[Change] = []
    by_flag: list[Change] = []
    for module in model.modules():
        config = vars(module).get('config')
        if implementation_of(config) not in (None, EAGER):
            configs[id(config)] = config
        eager = other_class(module, EAGER)
        if eager is not None:
            by_class.append((module, '__class__', eager))
        by_flag += [(module, flag, False) for flag in FLAGS if vars(module).get(flag) is True]
        for selection in SELECTIONS:
            if vars(module).get(selection, EAGER) != EAGER:
                by_flag.append((module, selection, EAGER))
    by_config: list[Change] = [(config, SELECTION, EAGER) for config in configs.values()]
    # A changed configuration has an effect only if the model still reads it, or with the changes of modules.
    can_switch = (
        bool(by_class or by_flag)
        or getattr(model, '_supports_attention_backend', False)
        or any(map(selects_at_each_call, model.modules()))
    )
    return [*by_config, *by_flag, *by_class] if by_config and can_switch else []


def implementation_of(config: Any) -> str | None:
    """Return the attention implementation that a configuration names, `None` if it names none."""
    try:
        return getattr(config, SELECTION, None)
    except KeyError:  # of llm-foundry 0.22's configuration of rotary embeddings (docs/compatibility.md)
        return None


def attend_by_name(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' AttentionInterface. Raise Unsupported for an argument that may change attention."""
    for name, argument in more.items():
        if argument is not None and name not in WITHOUT_EFFECT:
            raise Unsupported(name)
    # Eager attention, which defines the model, sees a window in the mask alone.
    window, chunk = rule_of(attention_mask)
    if window is None:
        window = sliding_window
    if type(module).__name__ in QUERY_SCALES:
        query = QUERY_SCALES[type(module).__name__](module, query)
    rule = AttentionRule(scaling=scaling, window=window, chunk=chunk, softcap=softcap, sinks=s_aux)
    return attend(query, key, value, rule), None


def attend_for_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any) -> Any:
    """Replace torch's function; call torch's own in threads other than the one that runs the forward."""
    if _attention.get() is None:
        return torch_attention(query, key, value, *args, **more)
    window, chunk = rule_of(more.get('attn_mask'))
    rule = AttentionRule(scaling=more.get('scale'), window=window, chunk=chunk)
    return attend(query, key, value, rule).transpose(1, 2)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Call the current forward's attention; return [rows, T, heads, width of the value]."""
    attention = running_attention()
    # Under autocast rotary embeddings return query and key in float32.
    return attention.attend(query.to(value.dtype), key.to(value.dtype), value, rule)


def running_attention() -> Attention:
    """Return the current forward's attention."""
    attention = _attention.get()
    if attention is None:
        raise RuntimeError(f'{NAME} is called outside of an evaluation')
    return attention


def scale_queries_of_llama4(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Return the queries [rows, heads, T, width] of Llama4TextAttention, scaled by their positions.

    Layers without rotary embeddings do that (arXiv 2501.19399). The model counts tokens in the order in which it gets
    them, which is not their position in a tree.
    """
    if module.use_rope or not module.config.attn_temperature_tuning:
        return query
    floors = torch.floor((running_attention().query_positions.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(floors) * module.attn_scale + 1.0
    scaled: torch.Tensor = (query * scales[:, None, :, None]).to(query.dtype)
    return scaled


def rotary_table_of_phimoe(embedding: Any, states: torch.Tensor, seq_len: int | None = None) -> Any:
    """Replace the forward of PhimoeRotaryEmbedding in transformers 4.53, whose table ends at the last of the tokens.

    Positions of a stream after a cached prefix, and of decoding steps, may lie beyond.
    """
    attention = _attention.get()
    length = seq_len if attention is None else attention.longest
    return type(embedding).forward(embedding, states, seq_len=length)


def attend_for_gptj(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Replace `_attn` of GPT-J and CodeGen."""
    output = attend(query, key, value, AttentionRule(scaling=query.shape[-1] ** -0.5))
    return output.transpose(1, 2), None


def attend_for_gpt_neo(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Replace `_attn` of GPT-Neo, which does not scale scores and has sliding windows in some layers."""
    is_local = module.config.attention_layers[module.layer_id] == 'local'
    window = module.config.window_size if is_local else None
    output = attend(query, key, value, AttentionRule(scaling=1.0, window=window))
    return output.transpose(1, 2), None


def attend_for_mpt(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor | None, ...]:
    """Replace the forward of transformers' MptAttention, which below 4.54 also returns its keys and values."""
    projected = module.Wqkv(hidden_states)
    if module.clip_qkv:
        projected = projected.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (heads_of(states, module.n_heads) for states in projected.chunk(3, dim=2))
    output = attend(query, key, value, AttentionRule(scaling=module.softmax_scale))
    projected_output = module.out_proj(output.flatten(2))
    returns_states = 'past_key_value' in inspect.signature(type(module).forward).parameters
    return (projected_output, None, None) if returns_states else (projected_output, None)


def attend_for_bloom(
    module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Replace the forward of transformers' BloomAttention."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    output = attend(query, key, value, AttentionRule(scaling=module.inv_norm_factor))
    return residual + module.dense(output.flatten(2)), None


def attend_for_foundry(
    attn_impl: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    n_heads: int,
    kv_n_heads: int,
    softmax_scale: float,
    attn_logit_softcapping: float | None = None,
    sliding_window_size: int = -1,
    **_: Any,
) -> tuple[torch.Tensor, None, tuple[torch.Tensor, torch.Tensor]]:
    """Replace an attention implementation of llm-foundry; query, key and value are [rows, T, heads * width].

    A token attends to `sliding_window_size` tokens before itself. Keys and values are returned for layers that reuse
    them, with the order of dimensions that `attn_impl` uses.
    """
    keys, values = heads_of(key, kv_n_heads), heads_of(value, kv_n_heads)
    rule = AttentionRule(
        scaling=softmax_scale,
        window=None if sliding_window_size == -1 else sliding_window_size + 1,
        softcap=attn_logit_softcapping,
    )
    output = attend(heads_of(query, n_heads), keys, values, rule)
    to_reuse = (keys.transpose(2, 3), values) if attn_impl == 'torch' else (key, value)
    return output.flatten(2), None, to_reuse


def heads_of(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return [rows, T, heads * width] as [rows, heads, T, width]."""
    by_head: torch.Tensor = states.unflatten(-1, (num_heads, -1))
    return by_head.transpose(1, 2)


def bias_of_mpt(module: Any, length: int, query: torch.Tensor) -> torch.Tensor:
    """Return the ALiBi biases of transformers' MptModel."""
    table: torch.Tensor = module.build_mpt_alibi_tensor(module.num_heads, length, device=query.device)
    return table[:, 0]  # of [heads, 1, length]


def bias_of_bloom(module: Any, length: int, query: torch.Tensor) -> torch.Tensor:
    """Return the ALiBi biases of BloomModel, rounded as the model rounds them."""
    mask = torch.ones(1, length, device=query.device)
    table: torch.Tensor = module.build_alibi_tensor(mask, module.num_heads, query.dtype)[:, 0]
    return table.float()


def bias_of_falcon(module: Any, length: int, query: torch.Tensor) -> torch.Tensor:
    """Return the ALiBi biases of FalconModel, which rounds them to bfloat16 and scales them with the scores.

    In transformers 4.53 eager attention adds them twice: to the scores, and to the mask
    (docs/compatibility.md: `FalconModel`).
    """
    build_alibi_tensor: Any = vars(sys.modules[type(module).__module__])['build_alibi_tensor']
    mask = torch.ones(1, length, device=query.device, dtype=torch.long)
    table: torch.Tensor = build_alibi_tensor(mask, module.num_heads, torch.float32)
    scale: float = module.h[0].self_attention.inv_norm_factor
    return 2 * scale * table[:, 0]  # of [heads, 1, length]


def bias_of_foundry(module: Any, length: int, query: torch.Tensor) -> torch.Tensor:
    """Return the ALiBi biases of llm-foundry's MPTModel."""
    from llmfoundry.models.layers.attention import build_alibi_bias

    config = module.config
    table: torch.Tensor = build_alibi_bias(
        config.n_heads,
        length,
        alibi_bias_max=module.alibi_bias_max,
        device=query.device,
        dtype=torch.float32,
    )
    return table[0, :, 0]


# Tables by the name of a module's class.

# The patched methods of attention modules.
FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    'GPTJAttention': ('_attn', attend_for_gptj),
    'CodeGenAttention': ('_attn', attend_for_gptj),
    'GPTNeoSelfAttention': ('_attn', attend_for_gpt_neo),
    'MptAttention': ('forward', attend_for_mpt),
    'BloomAttention': ('forward', attend_for_bloom),
}
# Attention modules whose queries are scaled by their positions.
QUERY_SCALES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {'Llama4TextAttention': scale_queries_of_llama4}
# The functions of transformers that make a mask with a rule, and what replaces them.
MASKS_OF_A_RULE: dict[str, Callable[..., Any]] = {
    'create_sliding_window_causal_mask': window_mask,
    'create_chunked_causal_mask': chunk_mask,
}
# Models with ALiBi.
KEY_BIASES: dict[str, Callable[[Any, int, torch.Tensor], torch.Tensor]] = {
    'MptModel': bias_of_mpt,
    'BloomModel': bias_of_bloom,
    'FalconModel': bias_of_falcon,
    'MPTModel': bias_of_foundry,
}
# Models whose positions of ALiBi include masked tokens.
COUNT_MASKED = ('MptModel', 'MPTModel')

AttentionInterface.register(NAME, attend_by_name)
