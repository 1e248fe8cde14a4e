"""A tiny model, tokenizer, tasks and training run that the integration tests and their launched workers share."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from composer import Callback, Logger, State, Trainer
from composer.core import DataSpec
from composer.models import HuggingFaceModel
from composer.utils import dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.distributed import checkpoint
from torch.utils.data import DataLoader

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.runtime.loop import EvaluationLoop
from llmfoundry_gauntlet.runtime.runner import prepare_for_model

# 7, 5 and 2 items: no number of ranks divides them, and 3 ranks are more than the last has.
TASKS = {
    'sums': ('language_modeling', [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(7)]),
    'colours': (
        'multiple_choice',
        [{'query': f'Colour {i}?', 'choices': ['red', 'deep blue', 'green'], 'gold': i % 3} for i in range(5)],
    ),
    'pronouns': (
        'schema',
        [{'context_options': ['the cup', 'the jug'], 'continuation': f'held {i}.', 'gold': i} for i in range(2)],
    ),
}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte and a bos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(['<s>', '</s>', '<pad>', *alphabet])}
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token='<s>', eos_token='</s>', pad_token='<pad>'
    )


def model(seed: int = 0) -> transformers.GPT2LMHeadModel:
    """Return a model of two layers with dropout, so that training draws random numbers."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=259,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
        attn_pdrop=0.2,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def composer_model(network: Any = None) -> HuggingFaceModel:
    """Return a network with the tokenizer as Composer trains it, by default a Llama of 128 positions."""
    import networks  # which workers do not need

    network = network or networks.network(vocab_size=259, max_position_embeddings=128)
    return HuggingFaceModel(network, tokenizer=tokenizer())


def loop_of(settings: dict[str, Any], model: HuggingFaceModel | None = None) -> EvaluationLoop:
    """Return the loop of an evaluation, by default of `composer_model()`."""
    model = model or composer_model()
    return EvaluationLoop(prepare_for_model(load_data(decode_settings(settings)), model), model)


def save(network: Any, folder: Path, **arguments: Any) -> Path:
    """Save a network and the tokenizer as a Hugging Face folder."""
    network.save_pretrained(folder, **arguments)
    tokenizer().save_pretrained(folder)
    return folder


def shard_on_cpu() -> None:
    """Let Composer 0.32 shard in this process: it asks for the current GPU, whatever the device."""
    torch.cuda.current_device = lambda: torch.device('cpu')
    torch.cuda.synchronize = lambda *_: None


def content_of(network: Any) -> dict[str, Any]:
    """Return the content of Composer's checkpoint of weights alone."""
    whole = HuggingFaceModel(network, tokenizer=tokenizer())
    return {'state': {'model': whole.state_dict(), 'integrations': {'huggingface': whole.get_metadata()}}}


def save_sharded(content: dict[str, Any], folder: Path) -> Path:
    """Write a sharded checkpoint as Composer does, by one rank; return its folder."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # torch's own storages, and that one rank saves alone
        checkpoint.save(content, storage_writer=checkpoint.FileSystemWriter(folder), no_dist=True)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    return path


def write_riddles(folder: Path, num_rows: int = 40) -> list[dict[str, Any]]:
    """Write generation tasks, greedy and sampled, of several pools each; prompts and lengths differ."""
    rows = [
        {'context': f'{"So " * (i % 5)}what is {i}?', 'answer': str(i), 'chain_of_thought': 'hm' * (i % 3)}
        for i in range(num_rows)
    ]
    write_rows(folder / 'riddles.jsonl', rows)
    task = {
        'dataset_uri': 'riddles.jsonl',
        'num_fewshot': [1],
        'icl_task_type': 'generation_task_with_answers',
        'cot_delimiter': ' # ',
        'prelimiter': 'Q: ',
        'early_stopping_criteria': [*'aeiou', *'AEIOU', 'Q: '],
    }
    greedy = {'max_new_tokens': 9}
    return [
        {**task, 'label': 'greedy', 'generation_kwargs': greedy},
        {**task, 'label': 'drawn', 'generation_kwargs': {**greedy, 'do_sample': True, 'temperature': 1.5, 'seed': 4}},
    ]


def write_programs(folder: Path) -> dict[str, Any]:
    """Write a code task whose prompts end in a comment; most completions are right, whatever the model writes."""
    rows = [
        {
            'prompt': f'def f(x):\n    return x + {i}  #',
            'entry_point': 'f',
            'test': f'def check(candidate):\n    assert candidate(1) == {i + 1}\n',
        }
        for i in range(6)
    ]
    write_rows(folder / 'programs.jsonl', rows)
    return {
        'label': 'programs',
        'dataset_uri': 'programs.jsonl',
        'num_fewshot': [0],
        'icl_task_type': 'code_evaluation',
        'generations_per_sample': 3,
        'pass_at_k': [1, 3],
        'top_k': 0,
        'temperature': 2.0,
        'generation_kwargs': {'max_new_tokens': 40},
    }


def write_tasks(folder: Path, more: Sequence[dict[str, Any]] = ()) -> dict[str, str]:
    """Write data, task and gauntlet files below `folder`, with `more` tasks; return the settings that name them."""
    tasks, benchmarks = [], []
    for label, (kind, rows) in TASKS.items():
        write_rows(folder / f'{label}.jsonl', rows)
        tasks.append({'label': label, 'dataset_uri': f'{label}.jsonl', 'num_fewshot': [0, 2], 'icl_task_type': kind})
        benchmarks += [{'name': label, 'num_fewshot': shots, 'random_baseline': 0.0} for shots in (0, 2)]
    gauntlet = {'categories': [{'name': 'all', 'benchmarks': benchmarks}]}
    (folder / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [*tasks, *more]}))  # JSON is YAML
    (folder / 'gauntlet.yaml').write_text(json.dumps({'eval_gauntlet': gauntlet}))
    return settings_of(folder)


def settings_of(folder: Path) -> dict[str, str]:
    """Return the settings for the tasks that `write_tasks` has written to a folder."""
    return {'tasks': f'{folder}/tasks.yaml', 'gauntlet': f'{folder}/gauntlet.yaml', 'data_root': str(folder)}


def record(folder: Path) -> dict[str, Any]:
    """Return the content of results.json in a folder."""
    content: dict[str, Any] = json.loads((folder / 'results.json').read_text())
    return content


def outcome(out: Path) -> tuple[dict[str, float], dict[str, bytes]]:
    """Return what an evaluation has recorded: metrics without timings, and every samples file."""
    metrics = {key: value for key, value in record(out)['metrics'].items() if not key.startswith('gauntlet/seconds')}
    return metrics, {path.name: path.read_bytes() for path in sorted((out / 'samples').iterdir())}


def journal_lines(out: Path) -> list[bytes]:
    """Return all lines of the journal of an evaluation."""
    return [line for path in sorted((out / 'journal').glob('*')) for line in path.read_bytes().splitlines(True)]


def digests(trainer: Trainer) -> dict[str, str]:
    """Return digests of this rank's weights, and of its optimizer, random states and training mode.

    They are of shards: gathering whole weights on a CPU crashes in torch 2.7.
    """

    def content(value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        return (value.to_local() if hasattr(value, 'to_local') else value).detach().cpu().numpy().tobytes()

    moments = trainer.state.optimizers[0].state_dict()['state']
    numpy_state = np.random.get_state()
    state = [
        [content(value) for moment in moments.values() for value in moment.values()],
        [content(torch.get_rng_state()), random.getstate(), numpy_state[1].tobytes(), numpy_state[2:]],
        trainer.state.model.training,
    ]
    weights = [(name, content(value)) for name, value in trainer.state.model.named_parameters()]
    return {
        name: hashlib.sha256(repr(value).encode()).hexdigest()
        for name, value in (('weights', weights), ('state', state))
    }


class AtBatches(Callback):
    """Call functions when these batches start, counted from 1."""

    def __init__(self, functions: dict[int, Callable[[], object]]) -> None:
        self.functions = functions

    def batch_start(self, state: State, logger: Logger) -> None:
        self.functions.get(state.timestamp.batch.value + 1, lambda: None)()


class AtEvaluation(Callback):
    """Call a function in the evaluation at a batch: after this many of its steps, or at its end."""

    def __init__(self, batch: int, function: Callable[[], object], *, step: int | None = None) -> None:
        self.batch, self.function, self.step = batch, function, step
        self.num_steps = 0

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self.num_steps += state.timestamp.batch.value == self.batch
        if self.num_steps == self.step:
            self.function()

    def eval_end(self, state: State, logger: Logger) -> None:
        if self.step is None and state.timestamp.batch.value == self.batch:
            self.function()


def trainer(
    callbacks: list[Any], *, max_duration: str = '6ba', whole: HuggingFaceModel | None = None, **arguments: Any
) -> Trainer:
    """Return a training run of two rows per rank and batch, shuffled; by default of `model()`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 259, (16, 16), generator=generator)
    rows = [{'input_ids': row, 'labels': row} for row in ids]
    sampler = dist.get_sampler(rows, shuffle=True)
    whole = whole or HuggingFaceModel(model(), tokenizer=tokenizer())
    return Trainer(
        model=whole,
        train_dataloader=DataSpec(DataLoader(rows, batch_size=2, sampler=sampler)),
        optimizers=torch.optim.AdamW(whole.parameters(), lr=1e-3),
        max_duration=max_duration,
        seed=3,
        callbacks=callbacks,
        progress_bar=False,
        **{'device': 'cpu', **arguments},
    )


def train(callbacks: list[Any], **arguments: Any) -> Trainer:
    """Return a training run that has ended."""
    made = trainer(callbacks, **arguments)
    made.fit()
    made.close()
    return made
