"""Score and train networks on two ranks, sharded and not, with and without evaluations.

The families hf_causal_lm and hf_causal_lm+lora are llm-foundry's `ComposerHFCausalLM` of a Llama, in its environment:
composer -n 2 fsdp_worker.py FOLDER FAMILY...
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import networks
import tiny
import torch
from composer import Trainer
from composer.core import DataSpec
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.engine.ranks import assign

TASKS = ('mixed', 'long', 'replies')
INSTRUCTION = 'The same long instruction stands before each one of all of these questions. '


LORA = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': 4, 'target_modules': ['q_proj', 'v_proj']}


def foundry_model(folder: Path, family: str) -> HuggingFaceModel:
    """Return llm-foundry's model of a Llama that is saved in the folder, its adapter with random weights."""
    from llmfoundry.models import ComposerHFCausalLM

    torch.manual_seed(5)
    adapter = {**LORA, 'init_lora_weights': False} if family.endswith('+lora') else None
    return ComposerHFCausalLM(tiny.tokenizer(), str(folder / 'llama'), peft_config=adapter, use_train_metrics=False)


def hugging_face_model(family: str) -> HuggingFaceModel:
    attention = {} if family in networks.EAGER_ALONE else {'attn_implementation': 'sdpa'}
    network = networks.network(family, vocab_size=259, **attention).train()
    blocks = next(part for part in network.modules() if isinstance(part, torch.nn.ModuleList))
    parts = [*blocks] if network.config.tie_word_embeddings else [*blocks, network.get_output_embeddings()]
    for part in parts:  # as llm-foundry shards Hugging Face models
        part._fsdp_wrap = True
    return HuggingFaceModel(network, tokenizer=tiny.tokenizer())


def make_trainer(folder: Path, family: str, callbacks: list, *, sharded: bool, device: str) -> Trainer:
    is_foundrys = family.startswith('hf_causal_lm')
    model = foundry_model(folder, family) if is_foundrys else hugging_face_model(family)
    model.train()
    torch.manual_seed(7)
    rows = [{'input_ids': row, 'labels': row} for row in torch.randint(3, 259, (16, 16))]
    sharding = {'fsdp': {'sharding_strategy': 'FULL_SHARD', 'state_dict_type': 'full'}}
    return Trainer(
        model=model,
        train_dataloader=DataSpec(DataLoader(rows, batch_size=2, sampler=dist.get_sampler(rows, shuffle=True))),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_duration='3ba',
        device=device,
        precision='fp32' if device == 'cpu' else 'amp_bf16',
        deterministic_mode=device != 'cpu',
        seed=3,
        callbacks=callbacks,
        progress_bar=False,
        parallelism_config=sharding if sharded else None,
    )


def make_evaluator(folder: Path, tasks: str) -> EvalGauntlet:
    return EvalGauntlet(
        tasks=str(folder / f'{tasks}.yaml'),
        data_root=str(folder),
        interval=['first', '2ba', 'last'],
        tokens_per_batch=160,
        max_seq_len=128,
        fewshot='fixed',
        save_folder=None,
    )


def scores(callback: EvalGauntlet) -> dict:
    """Return the results of the latest evaluation, and what this rank ran for it."""
    planned = callback.evaluation.planned
    mine = assign(planned.batches, num_ranks=dist.get_world_size())[dist.get_global_rank()]
    prefixes = [id(batch.prefix) for batch in mine if not batch.trees]
    return {
        'layout': planned.layout,
        'num_pools': len(planned.continuous_batches),
        'num_prefixes': len(prefixes),
        'repeats_a_prefix': len(set(prefixes)) < len(prefixes),
        'items': {
            str(result.key): [result.predicted, result.score, result.logprobs, result.text]
            for results in callback.evaluation.results.values()
            for result in results
        },
    }


def weights(trainer: Trainer) -> str:
    """Return a digest of this rank's shards; gathering whole weights on a CPU crashes in torch 2.7."""
    parts = [(name, value.detach().cpu().numpy().tobytes()) for name, value in trainer.state.model.named_parameters()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def run(folder: Path, family: str, device: str = 'cpu') -> dict:
    """Return scores and weights; of our own models those of unsharded training are tested elsewhere (test_ranks.py)."""
    found = {}
    trains = {'unsharded': family.startswith('hf_causal_lm') or device != 'cpu', 'sharded': True}
    for state, mode in itertools.product(trains, ('without', 'with')):
        if not trains[state] and mode == 'without':
            continue
        evaluators = {tasks: make_evaluator(folder, tasks) for tasks in TASKS} if mode == 'with' else {}
        trainer = make_trainer(folder, family, [*evaluators.values()], sharded=state == 'sharded', device=device)
        if state == 'sharded':
            parts = [part for part in trainer.state.model.modules() if isinstance(part, FullyShardedDataParallel)]
            assert trainer.state.model.model is parts[0] and len(parts) >= 3
        if mode == 'with':
            trainer.eval()
            found[state] = {tasks: scores(evaluator) for tasks, evaluator in evaluators.items()}
        if trains[state]:
            trainer.fit()
            found[f'{state} {mode}'] = weights(trainer)
        trainer.close()
    return found


def write_tasks(folder: Path) -> None:
    """Write the tasks that `run` evaluates."""
    mixed = Path(tiny.write_tasks(folder)['tasks'])
    mixed.rename(folder / 'mixed.yaml')
    rows = [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}!'} for i in range(55)]
    (folder / 'rows.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    task = {'label': 'long', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'}
    (folder / 'long.yaml').write_text(json.dumps({'icl_tasks': [{**task, 'prompt_string': INSTRUCTION}]}))
    (folder / 'replies.yaml').write_text(json.dumps({'icl_tasks': tiny.write_replies(folder)}))


def main(folder: Path, families: list[str]) -> None:
    """Write the results of this rank by family."""
    tiny.shard_on_cpu()
    dist.initialize_dist('cpu', timeout=60.0)  # ranks out of step would wait for each other
    found = {family: run(folder, family) for family in families}
    (folder / f'rank{dist.get_global_rank()}.json').write_text(json.dumps(found))


if __name__ == '__main__':
    main(Path(sys.argv[1]), sys.argv[2:])
