"""A tiny training by the Trainer of transformers, alone or on ranks, also sharded by Accelerate on CPUs."""

from __future__ import annotations

import hashlib
import json
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import tiny
import torch
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback, TrainingArguments

from llmfoundry_gauntlet.huggingface import GauntletCallback
from llmfoundry_gauntlet.runtime.distributed import global_rank

KEY = 'eval_icl/metrics/eval_gauntlet/all'


class ShardedTrainer(Trainer):
    """A Trainer that shards on CPUs, which Accelerate 1.15 does on accelerators alone."""

    version = 2  # of FSDP

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        for shared in (accelerate.PartialState(), state):  # the second is filled from the first again and again
            shared.distributed_type = DistributedType.FSDP
            shared.device = torch.device('cpu')  # FSDP1 takes the cpu:0 of Accelerate for another device
        state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=self.version,
            reshard_after_forward=True if self.version == 2 else 'FULL_SHARD',
            auto_wrap_policy='transformer_based_wrap',
            transformer_cls_names_to_wrap=['GPT2Block'],
            sync_module_states=False,
            cpu_ram_efficient_loading=False,
        )
        self.is_fsdp_enabled = True


class At(TrainerCallback):
    """Call functions at the end of these steps."""

    def __init__(self, functions: dict[int, Callable[[], object]]) -> None:
        self.functions = functions

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.functions.get(state.global_step, lambda: None)()


def trainer(folder: Path, callbacks: list[Any], *, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    """Return a training of four steps of `tiny.model()`, which evaluates and saves after every second."""
    generator = torch.Generator().manual_seed(1)
    rows = [{'input_ids': ids, 'labels': ids} for ids in torch.randint(3, 259, (16, 16), generator=generator)]
    values = {
        'max_steps': 4,
        'eval_strategy': 'steps',
        'eval_steps': 2,
        'save_steps': 2,
        'logging_steps': 1,
        'per_device_train_batch_size': 2,
        'seed': 3,
        'report_to': [],
        'disable_tqdm': True,
        'use_cpu': True,
        'ddp_backend': 'gloo' if 'RANK' in os.environ else None,
        **{name: value for name, value in arguments.items() if name not in ('model', 'processing_class')},
    }
    return kind(
        model=arguments.get('model') or tiny.model(),
        processing_class=arguments.get('processing_class', tiny.tokenizer()),
        args=TrainingArguments(output_dir=str(folder), **values),
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=callbacks,
    )


def values_of(made: Trainer, key: str = KEY) -> list[tuple[int, float]]:
    """Return the steps and values of a metric that the Trainer has logged."""
    return [(entry['step'], entry[key]) for entry in made.state.log_history if key in entry]


def digests(made: Trainer) -> dict[str, str]:
    """Return digests of this rank's weights, optimizer and random states."""

    def content(value: Any) -> Any:
        value = value.to_local() if hasattr(value, 'to_local') else value
        return value.detach().numpy().tobytes() if torch.is_tensor(value) else value

    for module in made.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation of the Trainer's own leaves the root gathered
    moments = made.optimizer.state_dict()['state'].values()
    kind, numbers, *position = np.random.get_state()
    state = {
        'weights': [(name, content(value)) for name, value in made.model.named_parameters()],
        'optimizer': [content(value) for moment in moments for value in moment.values()],
        'random': [content(torch.get_rng_state()), random.getstate(), kind, numbers.tobytes(), position],
    }
    return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in state.items()}


KINDS: dict[str, type[Trainer]] = {
    'DDP': Trainer,
    'FSDP1': type('FSDP1Trainer', (ShardedTrainer,), {'version': 1}),
    'FSDP2': ShardedTrainer,
}


def train_on_ranks(folder: Path, kind: str) -> None:
    """Train on all ranks with the callback and without; write what this rank has logged, and both final states."""
    warnings.simplefilter('ignore')
    settings = tiny.settings_of(folder)
    found: dict[str, Any] = {}
    for way in ('with', 'without'):
        callbacks = [GauntletCallback(**settings, tokens_per_batch=60, interval=['first', 'evaluate'])]
        made = trainer(
            folder / way, callbacks if way == 'with' else [], kind=KINDS[kind], save_strategy='no', max_steps=4
        )
        made.train()
        found[way] = digests(made)
        found[f'{way}, logged'] = values_of(made)
    (folder / f'rank{global_rank()}.json').write_text(json.dumps(found))
    torch.distributed.barrier()
