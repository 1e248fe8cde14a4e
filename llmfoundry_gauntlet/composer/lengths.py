"""The lengths that a model can run, by its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from llmfoundry_gauntlet.engine.rotary import RotaryLengths
from llmfoundry_gauntlet.errors import ModelError

LENGTH_KEYS = ('max_position_embeddings', 'n_positions', 'max_seq_len', 'max_sequence_length', 'seq_length')
ALIBI_MODELS = ('bloom', 'mpt')  # they run any length, whatever the configuration says
SCALED_ROPE = ('linear', 'dynamic', 'yarn', 'llama3', 'longrope')
LENGTH_DEPENDENT_ROPE = ('dynamic', 'longrope')


def length_limit(config: PretrainedConfig) -> int | None:
    """Return the sequence length in a model's configuration, None if it has none."""
    return next((value for key in LENGTH_KEYS if isinstance(value := getattr(config, key, None), int)), None)


def resolve_max_seq_len(wanted: int | None, config: PretrainedConfig, task_limits: Mapping[str, int]) -> int:
    """Return the maximum length of prompts: `wanted`, else the model's. Raise ModelError if the model cannot run it.

    `task_limits` has the max_seq_len of tasks with one of their own.
    """
    limit = length_limit(config)
    hard = position_limit(config)
    for name, value in (('max_seq_len', wanted), *((f'{task}: max_seq_len', own) for task, own in task_limits.items())):
        if value is not None and hard is not None and value > hard:
            raise ModelError(f'{name} is {value}, but the model ({config.model_type}) has positions for {hard} tokens')
    if wanted is not None:
        return wanted
    if limit is None:
        raise ModelError(f"the model's configuration ({config.model_type}) has no sequence length; give max_seq_len")
    return limit


def rope_scaling(config: PretrainedConfig) -> tuple[str | None, Mapping[str, Any]]:
    """Return the type of a model's scaled rotary embedding and its settings; None and {} without one."""
    scaling = getattr(config.get_text_config(), 'rope_scaling', None) or {}
    return scaling.get('rope_type', scaling.get('type')), scaling


def position_limit(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a model can run: its positions, or more if its rotary embedding is scaled.

    The scaled number is the original positions times the factor. None for ALiBi, which runs any length, and if the
    configuration has no length.
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
    """Return the lengths on which a model's rotary frequencies depend (dynamic NTK, LongRoPE); None if on none.

    `padded_to` has, by task, the length to which scored rows count as padded. The lengths are those that transformers
    4.51 to 4.53 compares with.
    """
    kind, _ = rope_scaling(config)
    if kind not in LENGTH_DEPENDENT_ROPE:
        return None
    text = config.get_text_config()
    base: int = text.max_position_embeddings
    if kind == 'longrope':
        base = getattr(text, 'original_max_position_embeddings', base)
    return RotaryLengths(base=base, scales_by_length=kind == 'dynamic', padded_to=padded_to)
