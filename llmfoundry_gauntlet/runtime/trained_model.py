"""The model of a training loop, in whatever wraps it: its module, device and size, and what it must be able to do."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from llmfoundry_gauntlet.engine.model import is_sharded
from llmfoundry_gauntlet.errors import Caught, ModelError
from llmfoundry_gauntlet.runtime.runner import EvaluatedModel, ModelAndTokenizer
from llmfoundry_gauntlet.runtime.unchanged import autocast_casts_dropped, evaluation_mode, random_states_kept

CAUSAL = 'a Hugging Face causal language model, or a torch module with its config and forward'


def evaluated_model(model: Any, tokenizer: Any) -> EvaluatedModel:
    """Return the model below torch.compile and DistributedDataParallel, in either order. Raise ModelError."""
    model = uncompiled(model)
    if isinstance(model, DistributedDataParallel):
        model = uncompiled(model.module)
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f'the model is a {type(model).__name__}; allowed: {CAUSAL}')
    if not hasattr(model, 'config'):
        raise ModelError(f'the model is a {type(model).__name__} without a config; allowed: {CAUSAL}')
    if next(model.parameters(), None) is None:
        raise ModelError(f'the model is a {type(model).__name__} without parameters')
    check_sharding(model)
    if tokenizer is None:
        raise ModelError('the model has no tokenizer; give the one that it is trained with')
    return ModelAndTokenizer(model=model, tokenizer=tokenizer)


def uncompiled(model: Any) -> Any:
    """Return the module that torch.compile wraps, as each batch of an evaluation has a shape of its own."""
    # `_orig_mod` of torch 2.7 in docs/compatibility.md.
    return getattr(model, '_orig_mod', model)


def check_sharding(model: torch.nn.Module) -> None:
    """Raise ModelError if ranks hold parts of the weights in a way in which they cannot run batches of their own."""
    for parameter in model.parameters():
        # Of ZeRO stage 3: `ds_id` in docs/compatibility.md.
        if hasattr(parameter, 'ds_id'):
            raise ModelError(
                "the model's weights are divided by DeepSpeed's ZeRO stage 3, with which ranks cannot run different "
                'items; shard it with FSDP, use a lower stage, or evaluate its checkpoints with `gauntlet watch`'
            )
        if isinstance(parameter, DTensor) and not is_sharded(model):
            raise ModelError(
                'the model is in tensor parallelism, in which ranks cannot run different items; shard it with '
                'fully_shard, or evaluate its checkpoints with `gauntlet watch`'
            )


@torch.no_grad()
def check_logits(model: Any) -> None:
    """Run two tokens, on all ranks. Raise ModelError unless the model gives logits for each of them."""
    name = type(model).__name__
    ids = torch.tensor([[0, 1]], device=device_of(model))
    with random_states_kept(), evaluation_mode(model), autocast_casts_dropped(), Caught() as caught:
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    if caught.error is not None:
        raise ModelError(
            f'the model is a {name}, which cannot be called with input_ids and attention_mask '
            f'({type(caught.error).__name__}: {caught.error}); allowed: {CAUSAL}'
        ) from caught.error

    logits = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, 'logits', None)
    if not torch.is_tensor(logits):
        raise ModelError(
            f'the model is a {name}, whose outputs ({type(outputs).__name__}) have no logits; allowed: {CAUSAL}; '
            'AutoModelForCausalLM loads one'
        )
    vocabulary = model.config.get_text_config().vocab_size
    if logits.ndim != 3 or logits.shape[:2] != ids.shape or logits.shape[2] < vocabulary:
        raise ModelError(
            f'the model is a {name}, whose logits for [1, 2] tokens have the shape {list(logits.shape)}; allowed: '
            f'[1, 2, {vocabulary}], a logit for each token of the vocabulary at each position'
        )


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's parameters."""
    return next(model.parameters()).device


def num_parameters_of(model: torch.nn.Module) -> int:
    """Return the number of parameters, of the whole model if this rank holds a shard of it."""
    handles: list[Any] = []
    for module in model.modules():
        # Of FSDP1, which has no public name for it: `_handle` of torch 2.7 in docs/compatibility.md.
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            handles.append(module._handle)
    if not handles:
        return sum(parameter.numel() for parameter in model.parameters())
    shapes = [shape for handle in handles for shape in handle.flat_param._shapes]
    return sum(shape.numel() for shape in shapes)
