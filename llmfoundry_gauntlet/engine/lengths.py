"""The lengths in a Hugging Face configuration: the tokens that a model can run, and how its positions scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.errors import ModelError, named

LENGTH_KEYS = ('max_position_embeddings', 'n_positions', 'max_seq_len', 'max_sequence_length', 'seq_length')
ALIBI_MODELS = ('bloom', 'mpt')  # run any length, regardless of the configuration
SCALED_ROPE = ('linear', 'dynamic', 'yarn', 'llama3', 'longrope')
LENGTH_DEPENDENT_ROPE = ('dynamic', 'longrope')


def length_limit(config: PretrainedConfig) -> int | None:
    """Return the sequence length in a model's configuration, None if it has none."""
    for key in LENGTH_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, int):
            return value
    return None


def resolve_max_seq_len(wanted: int | None, config: PretrainedConfig, task_limits: Mapping[str, int]) -> int:
    """Return the maximum length of prompts: `wanted`, else the model's. Raise ModelError if the model cannot run it.

    `task_limits` has the max_seq_len of tasks that set one; these are checked as well.
    """
    limits = {f'{task}: max_seq_len': limit for task, limit in task_limits.items()}
    if wanted is not None:
        limits = {named('max_seq_len'): wanted, **limits}
    num_positions = position_limit(config)
    for name, limit in limits.items():
        if num_positions is not None and limit > num_positions:
            raise ModelError(
                f'{name} is {limit}, but the model ({config.model_type}) has positions for {num_positions} tokens'
            )
    if wanted is not None:
        return wanted
    own_limit = length_limit(config)
    if own_limit is None:
        raise ModelError(
            f"the model's configuration ({config.model_type}) has no sequence length; give {named('max_seq_len')}"
        )
    return own_limit


def rope_scaling(config: PretrainedConfig) -> tuple[str | None, Mapping[str, Any]]:
    """Return the scaling type and settings of a model's rotary embedding; None and {} if it is not scaled."""
    scaling = getattr(config.get_text_config(), 'rope_scaling', None) or {}
    return scaling.get('rope_type', scaling.get('type')), scaling


def position_limit(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a model can run: its positions, or more if its rotary embedding is scaled.

    With scaling it is the original number of positions times the factor. None for ALiBi, which runs any length, and if
    the configuration has no length.
    """
    if config.model_type in ALIBI_MODELS:
        return None
    limit = length_limit(config)
    kind, scaling = rope_scaling(config)
    if limit is None or kind not in SCALED_ROPE:
        return limit
    original = scaling.get('original_max_position_embeddings')
    base = original or getattr(config.get_text_config(), 'original_max_position_embeddings', None) or limit
    return max(limit, int(base * (scaling.get('factor') or 1)))


def rotary_lengths(config: PretrainedConfig, padded_to: Mapping[str, int]) -> RotaryLengths | None:
    """Return how a model's rotary frequencies depend on length (dynamic NTK, LongRoPE); None if they do not.

    `padded_to` maps a task to the length to which its scored rows are treated as padded. The base lengths are those
    used by transformers 4.51 to 4.53.
    """
    kind, _ = rope_scaling(config)
    if kind not in LENGTH_DEPENDENT_ROPE:
        return None
    text = config.get_text_config()
    base: int = text.max_position_embeddings
    if kind == 'longrope':
        base = getattr(text, 'original_max_position_embeddings', base)
    return RotaryLengths(base=base, scales_by_length=kind == 'dynamic', padded_to=padded_to)
