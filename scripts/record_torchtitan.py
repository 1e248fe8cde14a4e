"""Record checkpoints that torchtitan 0.3.0 names and lays out, and the logits of its own models with these weights.

    pip install --target FOLDER --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing torchdata tyro
    PYTHONPATH=FOLDER python scripts/record_torchtitan.py

For each family `tests/fixtures/torchtitan/{family}` has `step-4`, a folder of torch.distributed.checkpoint with model
and optimizer as torchtitan's checkpointer flattens them, and `expected.json`: token ids and the logits after the last
one. The configuration of the same model in transformers is in the test, tests/runtime/test_other_checkpoints.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.qwen3 import Qwen3Model

FIXTURES = Path(__file__).parents[1] / 'tests' / 'fixtures' / 'torchtitan'
VOCAB_SIZE, DIM, HEAD_DIM = 259, 16, 8
LAYERS = {'n_layers': 2, 'dim': DIM, 'n_heads': 4, 'n_kv_heads': 2, 'hidden_dim': 24, 'attn_backend': 'flex'}
NUM_IDS = 24
NORMAL = {'weight': torch.nn.init.normal_, 'bias': torch.nn.init.zeros_}


def llama() -> Any:
    """Return a Llama 3 of torchtitan with fused queries, keys and values; its heads are DIM / 4 wide."""
    rope = ComplexRoPE.Config(dim=DIM // 4, max_seq_len=128, theta=500000)
    return Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB_SIZE,
        layers=llama3._build_llama3_layers(rope=rope, **LAYERS),
        **parts(RMSNorm.Config(normalized_shape=DIM, param_init=NORMAL)),
    ).build()


def qwen() -> Any:
    """Return a Qwen3 of torchtitan, whose embedding is tied; its heads are wider than DIM / 4."""
    rope = CosSinRoPE.Config(dim=HEAD_DIM, max_seq_len=128, theta=1000000.0)
    return Qwen3Model.Config(
        dim=DIM,
        vocab_size=VOCAB_SIZE,
        layers=qwen3._build_qwen3_layers(rope=rope, head_dim=HEAD_DIM, **LAYERS),
        enable_weight_tying=True,
        **parts(qwen3._qwen3_norm(DIM)),
    ).build()


def parts(norm: Any) -> dict[str, Any]:
    """Return the parts of a model outside of its layers."""
    embedding = Embedding.Config(num_embeddings=VOCAB_SIZE, embedding_dim=DIM, param_init=NORMAL)
    head = Linear.Config(in_features=DIM, out_features=VOCAB_SIZE, param_init=NORMAL)
    return {'norm': norm, 'tok_embeddings': embedding, 'lm_head': head}


def record(family: str, model: Any) -> None:
    """Write the checkpoint of a model with random weights, and its logits."""
    folder = FIXTURES / family
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(17)
    model.init_states()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if 'norm' in name else 0.0  # no weight is that of any other place, norms included
            parameter.normal_(mean, 0.3)

    ids = torch.randint(3, VOCAB_SIZE, (1, NUM_IDS))
    positions = torch.arange(NUM_IDS)[None]
    with torch.no_grad():
        logits = model(ids, positions, model.get_attention_masks(positions))[0, -1].float()
    (folder / 'expected.json').write_text(json.dumps({'ids': ids[0].tolist(), 'logits': logits.tolist()}) + '\n')

    # As `_flattened_model_states_sd` of torchtitan/components/checkpointer/dcp.py: weights at the top, all else below
    # a key. One moment stands for the optimizer.
    weights = model.state_dict()
    moment = {'state.norm.weight.exp_avg': torch.ones(DIM)}
    states = {**weights, 'optimizer': moment, 'train_state': {'step': torch.tensor(4)}}
    checkpoint.save(states, storage_writer=checkpoint.FileSystemWriter(folder / 'step-4'), no_dist=True)
    print(family, sorted(weights), logits.std().item())


if __name__ == '__main__':
    record('llama3', llama())
    record('qwen3', qwen())
