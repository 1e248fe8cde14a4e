"""Find the weights in what a trainer stored, and give them the names that they have in the Hugging Face model.

Trainers differ in where they put the weights, and in what they add to their names. A few have models of their own:
those of torchtitan are renamed, others must be exported by the tool that their error names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from llmfoundry_gauntlet.errors import ModelError, describe, listed

OF_MODEL = ('state', 'model')  # where Composer has the weights
PREFIX = 'model.'  # of weight names in a Composer checkpoint: HuggingFaceModel.model is the network
# Where others have them in a file: nanoGPT and most loops, the tutorials of torch, Lightning, DeepSpeed.
KEYS_OF_WEIGHTS = ('model', 'model_state_dict', 'state_dict', 'module')
# Where they are in torch.distributed.checkpoint: Composer, Accelerate and most loops, the tutorial of torch. torchtitan
# has each weight at the top.
ROOTS = (OF_MODEL, ('model',), ('app', 'model'))

# Added to the names of weights by wrappers: by DataParallel in front, by torch.compile and FSDP anywhere.
OUTER_WRAPPER = 'module.'
WRAPPERS = re.compile(r'\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')
OF_ADAPTER = re.compile(r'\.(?:lora_[A-Z]\w*|base_layer|modules_to_save|original_module)\.')

OF_MEGATRON = re.compile(
    r'\blanguage_model\.(?:embedding\.word_embeddings|encoder\.layers|transformer\.layers)\.'
    r'|\bdecoder\.layers\.(?:\d+\.)?self_attention\.linear_(?:qkv|proj)\.'
)
EXPORT_OF_MEGATRON = (
    'has the weights of Megatron, which are split and named in another way; export a Hugging Face folder with '
    "Megatron-Bridge (AutoBridge's export_ckpt) and evaluate that"
)
OF_NANOGPT = re.compile(r'\btransformer\.h\.0\.attn\.c_attn\.weight$')

# The names of torchtitan 0.1 to 0.3, whose models of these types are those of transformers.
OF_TITAN = 'tok_embeddings.weight'
TYPES_OF_TITAN = ('llama', 'qwen3')
TITAN_LAYER = re.compile(r'layers\.(\d+)\.(.+)\.(weight|bias)')
NAMES_IN_LAYER = {
    'attention.wq': 'self_attn.q_proj',
    'attention.wk': 'self_attn.k_proj',
    'attention.wv': 'self_attn.v_proj',
    'attention.wo': 'self_attn.o_proj',
    'attention.q_norm': 'self_attn.q_norm',
    'attention.k_norm': 'self_attn.k_norm',
    'feed_forward.w1': 'mlp.gate_proj',
    'feed_forward.w2': 'mlp.down_proj',
    'feed_forward.w3': 'mlp.up_proj',
    'attention_norm': 'input_layernorm',
    'ffn_norm': 'post_attention_layernorm',
}
NAMES_OUTSIDE = {
    'tok_embeddings.weight': 'model.embed_tokens.weight',
    'norm.weight': 'model.norm.weight',
    'output.weight': 'lm_head.weight',
    'lm_head.weight': 'lm_head.weight',  # since 0.3
}
FREQUENCIES = 'freqs_cis'  # of rotary embeddings, which earlier versions saved


def weights_in(place: object, content: Any) -> dict[str, torch.Tensor]:
    """Return the weights in the content of a file that torch.save wrote. Raise ModelError, which begins with `place`.

    They are those of Composer, or named tensors, alone or below one of KEYS_OF_WEIGHTS.
    """
    if not isinstance(content, Mapping):
        raise ModelError(
            f'{place}: holds an object of the class {type(content).__name__}; allowed: named tensors; save the '
            "model's state_dict() instead of the model"
        )
    state = content.get('state')
    if isinstance(state, Mapping) and isinstance(state.get('model'), Mapping):
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in tensors_below(state['model'])}
        check_no_other_model(place, {name: tensor.shape for name, tensor in weights.items()})
        return weights

    weights = {}
    for key in KEYS_OF_WEIGHTS:
        if not weights and isinstance(content.get(key), Mapping):
            weights = dict(tensors_below(content[key]))
    if not weights and all(isinstance(value, torch.Tensor) for value in content.values()):
        weights = dict(content)
    if not weights:
        found = f'the keys {listed(map(str, content))}' if content else describe(content)
        raise ModelError(
            f"{place}: has no weights: it holds {found}; allowed: Composer's 'state' with a 'model', or named tensors, "
            f'alone or in {", ".join(KEYS_OF_WEIGHTS)}'
        )
    check_no_other_model(place, {name: tensor.shape for name, tensor in weights.items()})
    return weights


def tensors_below(values: Mapping[Any, Any], prefix: str = '') -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested mappings by their keys, joined by dots; other values are left out."""
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            yield f'{prefix}{key}', value
        elif isinstance(value, Mapping):
            yield from tensors_below(value, f'{prefix}{key}.')


def names_of_entries(keys_of_entry: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return the weight of each entry of a torch.distributed.checkpoint that holds one, given the entries of tensors.

    `keys_of_entry` are the keys that led to each entry when it was saved.
    """
    for root in ROOTS:
        names = {}
        for entry, keys in keys_of_entry.items():
            if tuple(keys[: len(root)]) == root and len(keys) > len(root):
                names[entry] = '.'.join(map(str, keys[len(root) :]))
        if root == OF_MODEL:
            names = {entry: name.removeprefix(PREFIX) for entry, name in names.items()}
        if names:
            return names
    return {entry: str(keys[0]) for entry, keys in keys_of_entry.items() if len(keys) == 1}


def check_no_other_model(place: object, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ModelError for weights of a model that transformers does not have, given their names and shapes."""
    if any(OF_MEGATRON.search(name) for name in shapes):
        raise ModelError(f'{place}: {EXPORT_OF_MEGATRON}')
    for name, shape in shapes.items():
        # [outputs, inputs], as in torch's Linear; GPT-2 of transformers has [inputs, outputs].
        if OF_NANOGPT.search(name) and len(shape) == 2 and shape[0] == 3 * shape[1]:
            raise ModelError(
                f"{place}: has the weights of nanoGPT's GPT, an architecture that transformers does not have: {name} "
                f'is {list(shape)}, in GPT-2 it would be {list(shape)[::-1]}; save it as GPT-2 of transformers: '
                'transpose c_attn, c_fc and both c_proj of each layer, add biases of 0 where it has none, and give '
                'the activation that it was trained with in config.json'
            )


def huggingface_weights(
    name: str, config: PretrainedConfig, own: Collection[str], stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return stored weights by the names that they have in the model, which has the names `own`. Raise ModelError."""
    weights = without_wrappers(stored)
    check_no_adapter(name, weights)
    if OF_TITAN in weights:
        return from_torchtitan(name, config, weights)
    return without_attribute(own, weights)


def without_wrappers(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by the names that they have in the model alone, not in DDP, FSDP or a compiled model."""
    is_wrapped = all(name.startswith(OUTER_WRAPPER) for name in weights)
    outer = OUTER_WRAPPER if is_wrapped else ''
    return {WRAPPERS.sub('', name.removeprefix(outer)): tensor for name, tensor in weights.items()}


def without_attribute(own: Collection[str], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights without the name of the attribute that held the model, such as that of a LightningModule."""
    own_names = set(own)
    attributes = {name.partition('.')[0] for name in weights}
    inside = {name.partition('.')[2]: tensor for name, tensor in weights.items()}
    is_held = len(attributes) == 1 and len(own_names & inside.keys()) > len(own_names & weights.keys())
    return inside if is_held else dict(weights)


def check_no_adapter(name: str, weights: Collection[str]) -> None:
    """Raise ModelError if weights are those of a PEFT adapter, or of a model with one inside."""
    of_adapter = [weight for weight in weights if OF_ADAPTER.search(weight)]
    if of_adapter:
        raise ModelError(
            f'{name}: has the weights of a PEFT adapter ({listed(of_adapter)}); merge it into the model before it is '
            'saved (merge_and_unload), or save the adapter with save_pretrained and give its base as --model and its '
            'folder as --adapter'
        )


def from_torchtitan(
    name: str, config: PretrainedConfig, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights of a model of torchtitan as those of the same model in transformers. Raise ModelError."""
    renamed = {}
    unknown = []
    for titan_name, tensor in weights.items():
        if titan_name.endswith(FREQUENCIES):
            continue
        own_name = name_of_torchtitan(titan_name)
        if own_name is None:
            unknown.append(titan_name)
        else:
            renamed[own_name] = tensor
    if unknown or config.model_type not in TYPES_OF_TITAN:
        found = f'among them {listed(unknown)}' if unknown else f'and a configuration of {config.model_type}'
        raise ModelError(
            f'{name}: has weights of torchtitan, {found}; allowed: dense models of the types '
            f'{", ".join(TYPES_OF_TITAN)}; export others with scripts/checkpoint_conversion/convert_to_hf.py of '
            'torchtitan'
        )
    if config.model_type == 'llama':
        num_heads = {'q_proj': config.num_attention_heads, 'k_proj': config.num_key_value_heads}
        for own_name, tensor in renamed.items():
            projection = own_name.split('.')[-2]
            if projection in num_heads:
                renamed[own_name] = halves_of_heads(tensor, num_heads[projection])
    return renamed


def name_of_torchtitan(name: str) -> str | None:
    """Return the name in transformers of a weight of torchtitan, None if it is not known."""
    in_layer = TITAN_LAYER.fullmatch(name)
    if in_layer is None:
        return NAMES_OUTSIDE.get(name)
    layer, inner, kind = in_layer.groups()
    own = NAMES_IN_LAYER.get(inner.replace('.qkv_linear.', '.'))  # so since 0.3
    return None if own is None else f'model.layers.{layer}.{own}.{kind}'


def halves_of_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows of a projection in the order that transformers rotates, from that of torchtitan.

    Rotary embeddings turn pairs of rows of a head: neighbours in Llama of torchtitan, as in Meta's own code, and a row
    of the first half with one of the second in transformers (as Llama3StateDictAdapter of torchtitan 0.3.0).
    """
    if tensor.shape[0] % (2 * num_heads):  # of another configuration, which the report on the shapes will say
        return tensor
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])  # head, pair, row of the pair, inputs
    return pairs.transpose(1, 2).reshape(tensor.shape)
