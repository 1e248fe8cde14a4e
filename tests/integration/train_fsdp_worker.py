"""Train from a YAML file with FSDP on a CPU, and write what was sharded and checkpointed.

composer -n 2 train_fsdp_worker.py OUT.json CONFIG.yaml [key=value ...]
"""

import json
import sys
from pathlib import Path

import torch
from composer.utils import dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

from llmfoundry_gauntlet.composer import train
from llmfoundry_gauntlet.config.training import read_config

# Composer 0.32 asks for the current GPU where it shards, whatever the device.
torch.cuda.current_device = lambda: torch.device('cpu')
torch.cuda.synchronize = lambda *_: None


def wrapped(trainer: train.Trainer, kind: type) -> list[str]:
    return sorted(type(module.module).__name__ for module in trainer.state.model.modules() if isinstance(module, kind))


def main(out: Path, path: str, overrides: list[str]) -> None:
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


if __name__ == '__main__':
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
