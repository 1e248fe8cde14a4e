"""Train from a YAML file with FSDP on a CPU, and write what was sharded and checkpointed."""

import json
import os
from pathlib import Path

import tiny
from composer.utils import dist
from paths import ROOT
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

from llmfoundry_gauntlet.composer import train
from llmfoundry_gauntlet.config.training import read_config


def wrapped(trainer: train.Trainer, kind: type) -> list[str]:
    return sorted(type(module.module).__name__ for module in trainer.state.model.modules() if isinstance(module, kind))


def main(out: Path, path: str, overrides: list[str]) -> None:
    os.chdir(ROOT)
    tiny.shard_on_cpu()
    config, _ = read_config(path, overrides, num_ranks=dist.get_world_size())
    trainer = train.build_trainer(config)
    found = {
        'units': wrapped(trainer, FullyShardedDataParallel),
        'checkpointed': sorted(
            type(module._checkpoint_wrapped_module).__name__
            for module in trainer.state.model.modules()
            if isinstance(module, CheckpointWrapper)
        ),
    }
    trainer.fit()
    trainer.close()
    found['batches'] = trainer.state.timestamp.batch.value
    found['loss'] = float(trainer.state.loss)
    if dist.get_global_rank() == 0:
        out.write_text(json.dumps(found))
