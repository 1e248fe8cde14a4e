"""Models as Composer trains and shards them."""

from __future__ import annotations

import warnings
from typing import Any

from composer.models import HuggingFaceModel

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.runtime.checkpoints import reason_of
from llmfoundry_gauntlet.runtime.models import check_vocabulary


def composer_model(model: Any, tokenizer: Any) -> HuggingFaceModel:
    """Wrap a Hugging Face model for Composer. Raise ModelError if the tokenizer does not match."""
    check_vocabulary(tokenizer, model.config)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # embeddings larger than the vocabulary are common and harmless
        try:
            return HuggingFaceModel(model, tokenizer=tokenizer, shift_labels=True)
        except ValueError as error:
            raise ModelError(f'tokenizer and model do not match: {reason_of(error)}') from error


def mark_blocks_for_fsdp(model: Any) -> None:
    """Mark each transformer block as a unit for Composer's FSDP and activation checkpointing, as llm-foundry does."""
    # Private names of transformers 4.53 and mosaicml 0.32.1: `_no_split_modules` and `_fsdp_wrap` in
    # docs/compatibility.md.
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module._fsdp_wrap = True
            module._activation_checkpointing = True
