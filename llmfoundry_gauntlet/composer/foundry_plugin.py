"""The callback for llm-foundry's training files, `callbacks.eval_gauntlet_fast`, registered by an entry point."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.config.llm_foundry import map_plugin

log = logging.getLogger(__name__)


class FoundryEvalGauntlet(EvalGauntlet):
    """EvalGauntlet for llm-foundry, which passes the training YAML to the constructor as `train_config`.

    `max_seq_len` and `interval` are taken from it unless the callback's own keys set them; tokenizer and run name are
    the Trainer's. Raise ConfigError if llm-foundry would evaluate `icl_tasks` too.
    """

    def __init__(self, *, train_config: Mapping[str, Any], **settings: Any) -> None:
        mapped = map_plugin(settings, train_config)
        for line in mapped.lines:
            log.info(line)
        super().__init__(**mapped.values)
