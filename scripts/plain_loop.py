"""Train a small Llama in a plain PyTorch loop, evaluated by the Gauntlet every few steps; Composer is not needed.

    python scripts/make_demo_data.py
    python scripts/plain_loop.py
    torchrun --nproc-per-node 2 scripts/plain_loop.py

The data and the model are those of yamls/train/demo.yaml. The records of each evaluation are in OUT/gauntlet, the
trained model in OUT/model, which `gauntlet run --model` evaluates to the same scores.
"""

import argparse
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from llmfoundry_gauntlet import Gauntlet

MAX_SEQ_LEN = 256
GLOBAL_BATCH_SIZE = 8
WARMUP_STEPS = 50
SEED = 17


def token_rows(path: Path, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return all documents as one stream of tokens, cut into rows, shape [num_rows, MAX_SEQ_LEN]."""
    with path.open(encoding='utf-8') as lines:
        documents = [json.loads(line)['text'] + tokenizer.eos_token for line in lines]
    encoded = tokenizer(documents, add_special_tokens=False)['input_ids']
    stream = torch.tensor([token for document in encoded for token in document])
    num_rows = len(stream) // MAX_SEQ_LEN
    return stream[: num_rows * MAX_SEQ_LEN].view(num_rows, MAX_SEQ_LEN)


def batches(rows: torch.Tensor, rank: int, num_ranks: int) -> Iterator[torch.Tensor]:
    """Yield this rank's share of each batch, epoch after epoch, each in another order."""
    sampler = DistributedSampler(rows, num_ranks, rank, seed=SEED, drop_last=True)
    loader = DataLoader(rows, GLOBAL_BATCH_SIZE // num_ranks, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def build_model(vocab_size: int) -> LlamaForCausalLM:
    """Return the demo's model, with the same weights on every rank."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=MAX_SEQ_LEN,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        initializer_range=0.07,  # about hidden_size ** -0.5: a small model learns much faster than from the usual 0.02
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def train(arguments: argparse.Namespace, rank: int, num_ranks: int, device: torch.device) -> None:
    # First, so that a mistake in the settings or the data ends the job before anything is computed.
    gauntlet = Gauntlet(
        tasks=arguments.tasks,
        gauntlet=arguments.gauntlet,
        data_root=arguments.data_root,
        save_folder=arguments.out / 'gauntlet',
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.data / 'tokenizer')
    rows = token_rows(arguments.data / 'train.jsonl', tokenizer)
    model = build_model(len(tokenizer)).to(device)
    trained = DistributedDataParallel(model) if num_ranks > 1 else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))

    trained.train()
    for step, batch in enumerate(batches(rows, rank, num_ranks), start=1):
        inputs = batch.to(device)
        loss = trained(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        if step % arguments.eval_every == 0 or step == arguments.steps:
            # On all ranks, which share the items. The model is as before afterwards: no eval(), no train() here.
            evaluation = gauntlet.evaluate(trained, tokenizer, step=step)
            if rank == 0:
                print(json.dumps({'step': step, 'loss': loss.item(), **evaluation.logged}), flush=True)
        if step == arguments.steps:
            break

    if rank == 0:
        model.save_pretrained(arguments.out / 'model')
        tokenizer.save_pretrained(arguments.out / 'model')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data', type=Path, default=Path('runs/demo/data'), help='of make_demo_data.py')
    parser.add_argument('--out', type=Path, default=Path('runs/plain_loop'))
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--eval-every', type=int, default=100)
    parser.add_argument('--tasks', type=Path, default=Path('yamls/tasks/gauntlet_v0.1.yaml'))
    parser.add_argument('--gauntlet', type=Path, default=Path('yamls/gauntlets/eval_gauntlet_v0.1.yaml'))
    parser.add_argument('--data-root', type=Path, default=Path('eval_data'))
    arguments = parser.parse_args()

    # torchrun sets these; without it there is one rank, and no process group.
    rank, num_ranks = int(os.environ.get('RANK', '0')), int(os.environ.get('WORLD_SIZE', '1'))
    has_gpu = torch.cuda.is_available()
    device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', '0'))) if has_gpu else torch.device('cpu')
    if has_gpu:
        torch.cuda.set_device(device)
    if num_ranks > 1:
        dist.init_process_group('nccl' if has_gpu else 'gloo')
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format='%(message)s')
    train(arguments, rank, num_ranks, device)
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == '__main__':
    main()
