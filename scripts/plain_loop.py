"""Train a small Llama in a plain PyTorch loop, alone or under torchrun, and evaluate it as it trains."""

import json
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llmfoundry_gauntlet import Gauntlet

DEFAULTS = {'data': 'runs/demo/data', 'out': 'runs/plain_loop', 'steps': 300, 'eval_every': 100}
EVALUATION = {'tasks': 'yamls/tasks/gauntlet_v0.1.yaml', 'gauntlet': 'yamls/gauntlets/eval_gauntlet_v0.1.yaml'}
options = OmegaConf.merge({**DEFAULTS, 'evaluation': EVALUATION}, OmegaConf.from_cli())  # steps=100 and the like

is_launched = distributed.is_torchelastic_launched()  # by torchrun
if is_launched:
    distributed.init_process_group('gloo')
rank, num_ranks = (distributed.get_rank(), distributed.get_world_size()) if is_launched else (0, 1)
gauntlet = Gauntlet(**options.evaluation, save_folder=f'{options.out}/gauntlet')  # on every rank

tokenizer = AutoTokenizer.from_pretrained(f'{options.data}/tokenizer')
lines = Path(options.data, 'train.jsonl').read_text('utf-8').splitlines()
text = tokenizer.eos_token.join(json.loads(line)['text'] for line in lines)
tokens = torch.tensor(tokenizer(text, add_special_tokens=False)['input_ids'])

torch.manual_seed(17)  # the same weights and batches on every rank
sizes = {'hidden_size': 96, 'intermediate_size': 192, 'num_hidden_layers': 3, 'num_attention_heads': 4}
network = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes))
model = DistributedDataParallel(network) if is_launched else network
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(1, options.steps + 1):
    starts = torch.randint(len(tokens) - 256, (8,))[rank::num_ranks]  # this rank's rows of the batch
    rows = torch.stack([tokens[start : start + 256] for start in starts])
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % options.eval_every == 0 or step == options.steps:
        evaluation = gauntlet.evaluate(model, tokenizer, step=step)  # on every rank; the model stays in training mode
        if rank == 0:
            print(json.dumps({'step': step, 'loss': loss.item(), **evaluation.logged}), flush=True)

if rank == 0:
    network.save_pretrained(f'{options.out}/model')  # `gauntlet run --model` evaluates it to the same scores
    tokenizer.save_pretrained(f'{options.out}/model')
if is_launched:
    distributed.destroy_process_group()
