"""Score and train networks on two ranks, sharded and not, with and without evaluations, also with some that fail.

The families hf_causal_lm and hf_causal_lm+lora are llm-foundry's `ComposerHFCausalLM` of a Llama, in its environment:
composer -n 2 fsdp_worker.py FOLDER FAMILY...
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import composer_training
import networks
import tiny
import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from composer.utils import FSDP2Config, FSDPConfig, dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from llmfoundry_gauntlet import EvalGauntlet, Evaluation, evaluate
from llmfoundry_gauntlet.composer.trainer_loop import composer_model_of
from llmfoundry_gauntlet.engine.ranks import assign
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.runtime import gathered
from llmfoundry_gauntlet.runtime.distributed import global_rank

TASKS = ('mixed', 'long', 'riddles')
INSTRUCTION = 'The same long instruction precedes each one of all of these questions. '
SHARDINGS: dict[str, Callable[[], Any]] = {
    'unsharded': lambda: None,
    'sharded': partial(FSDPConfig, sharding_strategy='FULL_SHARD', state_dict_type='full'),
    'sharded by FSDP2': FSDP2Config,
}
MODES = [*SHARDINGS, 'sharded, not kept', 'sharded by FSDP2, not kept']  # weights are kept for a whole evaluation
COUNTS: Counter[str] = Counter()  # calls that gather, and forwards without gradients
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


def make_trainer(folder: Path, family: str, callbacks: list, mode: str, device: str = 'cpu') -> Trainer:
    is_foundrys = family.startswith('hf_causal_lm')
    model = foundry_model(folder, family) if is_foundrys else hugging_face_model(family)
    model.train()
    sharding = SHARDINGS[mode.split(',')[0]]()
    return composer_training.trainer(
        callbacks,
        max_duration='3ba',
        whole=model,
        device=device,
        precision='fp32' if device == 'cpu' else 'amp_bf16',
        deterministic_mode=device != 'cpu',
        parallelism_config=None if sharding is None else {'fsdp': sharding},
    )


def make_evaluator(folder: Path, tasks: str) -> EvalGauntlet:
    return EvalGauntlet(
        tasks=str(folder / f'{tasks}.yaml'),
        data_root=str(folder),
        interval='2ba',
        tokens_per_batch=160,
        max_seq_len=128,
        fewshot='fixed',
        save_folder=None,
    )


def scores(callback: EvalGauntlet) -> dict:
    """Return the results of the latest evaluation, and what this rank ran for it."""
    planned = callback.evaluation.planned
    batches_by_rank = assign(planned.batches, num_ranks=dist.get_world_size())
    batches = batches_by_rank[dist.get_global_rank()]
    prefixes = [id(batch.prefix) for batch in batches if not batch.trees]
    return {
        'layout': planned.layout,
        'num_parameters': callback.gauntlet.num_parameters,
        'num_continuous': len(planned.continuous_batches),
        'repeats_a_prefix': len(set(prefixes)) < len(prefixes),
        'items': items_of(callback.evaluation),
    }


def items_of(evaluation: Evaluation) -> dict[str, list[Any]]:
    """Return prediction, score, log-probabilities and text of each item."""
    return {
        str(result.key): [result.predicted, result.score, result.logprobs, result.text]
        for results in evaluation.results.values()
        for result in results
    }


def count_calls() -> None:
    """Count the calls by which FSDP gathers weights: FSDP1 and FSDP2 use different ones on a CPU."""
    for name in ('all_gather', 'all_gather_into_tensor'):
        setattr(torch.distributed, name, partial(counted, getattr(torch.distributed, name)))


def counted(gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    COUNTS['gathers'] += 1
    return gather(*args, **kwargs)


@contextmanager
def failing(trainer: Trainer, error: Exception, at: Callable[[int], bool]) -> Iterator[None]:
    """Raise an error in the last block of the model `at` a number of tokens."""

    def fail(_: Any, args: tuple, kwargs: dict) -> None:
        states = args[0] if args else kwargs['hidden_states']
        if at(states.shape[0] * states.shape[1]):
            raise error

    blocks = next(part for part in trainer.state.model.modules() if isinstance(part, torch.nn.ModuleList))
    block = getattr(blocks[-1], '_fsdp_wrapped_module', blocks[-1])
    handle = block.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def evaluated(trainer: Trainer, evaluators: dict[str, EvalGauntlet]) -> dict:
    """Return the results of an evaluation by its tasks."""
    trainer.eval()
    return {tasks: scores(evaluator) for tasks, evaluator in evaluators.items()}


def free_bytes(family: str, mode: str) -> int | None:
    """Return just enough memory to keep the Llama in float32, half of it free; `not kept` a byte less on one rank."""
    if family != 'llama':
        return None
    num_bytes = 4 * sum(parameter.numel() for parameter in hugging_face_model(family).parameters())
    return 2 * num_bytes - (mode.endswith('not kept') and dist.get_global_rank() == 1)


def run(folder: Path, family: str, mode: str, *, device: str = 'cpu', fails: bool = False) -> dict:
    """Evaluate and train; with `fails` some evaluations before the training fail in the middle of a forward."""
    if device == 'cpu':
        num_free = free_bytes(family, mode)  # now, as it seeds torch
        gathered.free_bytes = lambda _: num_free
    evaluators = {tasks: make_evaluator(folder, tasks) for tasks in TASKS}
    trainer = make_trainer(folder, family, [*evaluators.values()], mode, device)
    network = composer_model_of(trainer.state.model).model
    units = [part for part in network.modules() if isinstance(part, (FullyShardedDataParallel, FSDPModule))]
    assert len(units) >= 3 if mode != 'unsharded' else not units
    network.register_forward_pre_hook(lambda *_: COUNTS.update(forwards=not torch.is_grad_enabled()))
    COUNTS.clear()
    results = evaluated(trainer, evaluators) | {'counts': dict(COUNTS), 'num_units': len(units)}
    if fails:
        calls = itertools.count(1)
        with failing(trainer, ZeroDivisionError('injected'), lambda _: next(calls) == 3):  # at a step of both ranks
            results['failed'] = False
            try:
                trainer.eval()
            except ZeroDivisionError:
                results['failed'] = True
        state = trainer.state
        state.set_dataloader(state.train_dataloader, 'train')  # which Composer does not after an evaluation that failed
        is_last = dist.get_global_rank() == 1
        with failing(trainer, torch.OutOfMemoryError('injected'), lambda num_tokens: is_last and num_tokens > 100):
            results['one rank out of memory'] = evaluated(trainer, evaluators)
    trainer.fit()
    trainer.close()
    return results | composer_training.digests(trainer)


def trained(folder: Path, family: str, mode: str, device: str = 'cpu') -> dict[str, str]:
    """Return the digests after training without evaluations."""
    trainer = make_trainer(folder, family, [], mode, device)
    trainer.fit()
    trainer.close()
    return composer_training.digests(trainer)


def write_tasks(folder: Path) -> None:
    """Write the tasks that `run` evaluates."""
    mixed = Path(tiny.write_tasks(folder)['tasks'])
    mixed.rename(folder / 'mixed.yaml')
    rows = [{'context': f'{number}+{number}=', 'continuation': f'{2 * number}!'} for number in range(55)]
    (folder / 'rows.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    task = {'label': 'long', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'}
    (folder / 'long.yaml').write_text(json.dumps({'icl_tasks': [{**task, 'prompt_string': INSTRUCTION}]}))
    (folder / 'riddles.yaml').write_text(json.dumps({'icl_tasks': tiny.write_riddles(folder, num_rows=12)}))


def run_out_of_memory(folder: Path) -> None:
    """Evaluate with weights that are not kept, until the second rank runs out of memory and the first waits for it."""
    composer_training.shard_on_cpu()
    dist.initialize_dist('cpu', timeout=60.0)
    num_free = free_bytes('llama', 'not kept')
    gathered.free_bytes = lambda _: num_free
    trainer = make_trainer(folder, 'llama', [make_evaluator(folder, 'long')], 'sharded')
    is_last = dist.get_global_rank() == 1
    with failing(trainer, torch.OutOfMemoryError('injected'), lambda num_tokens: is_last and num_tokens > 100):
        trainer.eval()


def evaluate_sharded(folder: Path, models: list[str]) -> None:
    """Write this rank's items of models that it loads sharded, or its error, and the devices they are loaded on."""
    module = sys.modules[evaluate.__module__]
    shard = module.shard
    devices: set[str] = set()

    def noted(network: Any, *arguments: Any) -> None:
        devices.update(weight.device.type for weight in network.parameters())
        shard(network, *arguments)

    module.shard = noted
    settings = {**tiny.settings_of(folder), 'device': 'cpu', 'max_seq_len': 128}
    outcomes: dict[str, Any] = {}  # by model, its items or the error
    for model in models:
        try:
            outcomes[model] = items_of(evaluate(model, **settings, fsdp_config={}))
        except ModelError as error:
            outcomes[model] = str(error)
    content = {'devices': sorted(devices), 'outcomes': outcomes}
    (folder / f'rank{global_rank()}.json').write_text(json.dumps(content))


def run_tensor_parallel(folder: Path) -> None:
    """Construct a Trainer with a tensor-parallel group of two ranks, and write the error."""
    composer_training.shard_on_cpu()
    dist.initialize_dist('cpu', timeout=60.0)
    config = {'fsdp': FSDPConfig(), 'tp': {'tensor_parallel_degree': 2, 'layer_plan': {}}}
    try:
        composer_training.trainer([make_evaluator(folder, 'mixed')], parallelism_config=config)
    except ModelError as error:
        (folder / f'tp{dist.get_global_rank()}.txt').write_text(str(error))
        dist.barrier()  # a rank that exits at once resets connections of the mesh that the other still accepts


def main(folder: Path, families: list[str]) -> None:
    """Write the results of this rank by family and mode."""
    composer_training.shard_on_cpu()
    dist.initialize_dist('cpu', timeout=60.0)  # ranks out of step would wait for each other
    count_calls()
    results_of_family = {}
    for family in families:
        modes = MODES if family == 'llama' else MODES[:2]
        results = {}
        for mode in modes:
            # Sharded, with weights that are kept.
            fails = family == 'llama' and mode in MODES[1:3]
            results[mode] = run(folder, family, mode, fails=fails)
        # Without evaluations there are no weights to keep.
        for mode in modes[:3]:
            results[f'{mode}, without'] = trained(folder, family, mode)
        results_of_family[family] = results
    (folder / f'rank{dist.get_global_rank()}.json').write_text(json.dumps(results_of_family))


if __name__ == '__main__':
    main(Path(sys.argv[1]), sys.argv[2:])
