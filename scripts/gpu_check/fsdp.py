"""Training under torch's `fully_shard` on one device, in a plain loop: evaluations change nothing of it.

With a single rank there is nothing to send, but weights are sharded, gathered and cast as on many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tiny
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_check.exact import BF16, FP32
from gpu_check.options import Options
from gpu_check.results import Row, Rows
from llmfoundry_gauntlet import Evaluation, Gauntlet
from llmfoundry_gauntlet.runtime.sharding import blocks_of

# Likelihood and generation, on the sample data.
TASKS = ['copa', 'lambada_openai', 'svamp']
LENGTH = 256  # of a row, and of the prompts
STEPS = 6
EVALUATED_AFTER = (3, 6)
SIZES_ON_CPU = {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 4}
SIZES = {'hidden_size': 768, 'intermediate_size': 2048, 'num_hidden_layers': 12, 'num_attention_heads': 12}
MOST_OFF = {FP32: 1e-3, BF16: 0.5}  # nats of an item's log-probabilities, of the whole model in the same autocast
POLICIES = {  # of FSDP; under a policy the loss is scaled by no scaler, as bf16 needs none
    FP32: MixedPrecisionPolicy(),
    BF16: MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def run(options: Options, rows: Rows) -> None:
    """Train in float32 and in bfloat16, with evaluations and without."""
    gauntlet = Gauntlet(
        tasks='yamls/tasks/gauntlet_v0.1.yaml',
        only=TASKS,
        num_fewshot=0,
        max_seq_len=LENGTH,
        subset_items=2 if options.is_cpu else None,
        save_folder=None,
    )
    with one_rank(options) as mesh:
        for dtype in (BF16,) if options.quick else (BF16, FP32):
            with rows.row(f'fully_shard, {dtype}') as row:
                compare(row, gauntlet, mesh, dtype, options)


@contextmanager
def one_rank(options: Options) -> Iterator[DeviceMesh]:
    """Yield the mesh of a process group of this process alone, which needs no network."""
    backend = 'gloo' if options.is_cpu else 'nccl'
    distributed.init_process_group(backend, rank=0, world_size=1, store=distributed.HashStore())
    try:
        yield init_device_mesh(options.device, (1,))
    finally:
        distributed.destroy_process_group()


def compare(row: Row, gauntlet: Gauntlet, mesh: DeviceMesh, dtype: str, options: Options) -> None:
    """Record whether evaluations leave training as it is, and how far the sharded model's scores are from the whole."""
    alone = Training(mesh, dtype, options)
    alone.run(None)
    again = Training(mesh, dtype, options)
    again.run(None)
    evaluated = Training(mesh, dtype, options)
    changed_by = evaluated.run(gauntlet)
    row.note(evaluations=len(EVALUATED_AFTER))
    row.expect('states that an evaluation changed', ', '.join(changed_by) or 'none', 'none')
    # Kernels of training may add up in another order at each run; then there is nothing to compare the end with.
    repeats_itself = alone.digest() == again.digest()
    row.note(training_repeats_itself=repeats_itself)
    if repeats_itself:
        row.expect('weights as without evaluations', evaluated.digest() == alone.digest(), True)

    whole = Training(None, dtype, options)
    whole.take_weights(evaluated)
    differences = differences_of_items(evaluated.evaluate(gauntlet), whole.evaluate(gauntlet))
    row.check('nats off the whole model', float(np.median(differences)), at_most=MOST_OFF[dtype])


class Training:
    """A model, sharded if there is a mesh, its optimizer, and the rows that it is trained on."""

    def __init__(self, mesh: DeviceMesh | None, dtype: str, options: Options) -> None:
        torch.manual_seed(17)
        sizes = SIZES_ON_CPU if options.is_cpu else SIZES
        self.tokenizer = tiny.tokenizer()
        config = LlamaConfig(vocab_size=len(self.tokenizer), max_position_embeddings=LENGTH, **sizes)
        self.model: Any = LlamaForCausalLM(config).to(options.torch_device).train()
        self.device, self.dtype, self.is_sharded = options.torch_device, dtype, mesh is not None
        if mesh is not None:
            for block in blocks_of(self.model):
                fully_shard(block, mesh=mesh, mp_policy=POLICIES[dtype])
            fully_shard(self.model, mesh=mesh, mp_policy=POLICIES[dtype])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.rows = torch.randint(len(self.tokenizer), (STEPS, 4, LENGTH), generator=torch.Generator().manual_seed(3))

    def run(self, gauntlet: Gauntlet | None) -> list[str]:
        """Train, with evaluations if there is a Gauntlet; return the steps at which one changed something."""
        changed_by = []
        for step, rows in enumerate(self.rows, 1):
            ids = rows.to(self.device)
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if gauntlet is not None and step in EVALUATED_AFTER:
                before = self.digest()
                self.evaluate(gauntlet)
                if self.digest() != before:
                    changed_by.append(f'step {step}')
        return changed_by

    def evaluate(self, gauntlet: Gauntlet) -> Evaluation:
        """Return an evaluation; a whole model computes in an autocast, as the policy of a sharded one says already."""
        is_cast = self.dtype == BF16 and not self.is_sharded
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_cast):
            return gauntlet.evaluate(self.model, self.tokenizer)

    def take_weights(self, other: Training) -> None:
        """Copy the weights of another model of the same shape, which may be sharded."""
        with torch.no_grad():
            for own, weight in zip(self.model.parameters(), other.model.parameters(), strict=True):
                own.copy_(weight.full_tensor() if isinstance(weight, DTensor) else weight)

    def digest(self) -> str:
        """Return the hash of all that training goes on with: weights, states of the optimizer, modes, random state."""
        digest = hashlib.sha256(repr([module.training for module in self.model.modules()]).encode())
        tensors = [*self.model.parameters(), torch.get_rng_state()]
        if self.device.type != 'cpu':
            tensors.append(torch.cuda.get_rng_state(self.device))
        for state in self.optimizer.state.values():
            tensors += state.values()
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            digest.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def differences_of_items(found: Evaluation, expected: Evaluation) -> list[float]:
    """Return the difference of each summed log-probability of each item."""
    differences = []
    for task, results in found.results.items():
        for result, other in zip(results, expected.results[task], strict=True):
            if result.logprobs is not None:
                differences += np.abs(np.subtract(result.logprobs, other.logprobs)).tolist()
    return differences
