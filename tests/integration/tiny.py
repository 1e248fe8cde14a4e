"""A tiny model, tokenizer, tasks and training run that the integration tests and their launched workers share."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.distributed import checkpoint

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.runtime.loop import EvaluationLoop
from llmfoundry_gauntlet.runtime.runner import EvaluatedModel, ModelAndTokenizer, prepare_for_model

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


def model_and_tokenizer(network: Any = None) -> ModelAndTokenizer:
    """Return a network and the tokenizer, by default a Llama of 128 positions."""
    import networks  # which workers do not need

    network = network or networks.network(vocab_size=259, max_position_embeddings=128)
    return ModelAndTokenizer(model=network, tokenizer=tokenizer())


def loop_of(settings: dict[str, Any], model: EvaluatedModel | None = None) -> EvaluationLoop:
    """Return the loop of an evaluation, by default of `model_and_tokenizer()`."""
    model = model or model_and_tokenizer()
    return EvaluationLoop(prepare_for_model(load_data(decode_settings(settings)), model), model)


def save(network: Any, folder: Path, **arguments: Any) -> Path:
    """Save a network and the tokenizer as a Hugging Face folder."""
    network.save_pretrained(folder, **arguments)
    tokenizer().save_pretrained(folder)
    return folder


def content_of(network: Any, tokens: Any = None) -> dict[str, Any]:
    """Return the content of Composer's checkpoint of weights alone, as its HuggingFaceModel has it."""
    tokens = tokens or tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        network.config.save_pretrained(folder)
        config = json.loads(Path(folder, 'config.json').read_text())
    with tempfile.TemporaryDirectory() as folder:
        tokens.save_pretrained(folder)
        files = {
            path.name: {'file_extension': path.suffix, 'content': json.loads(path.read_text())}
            for path in Path(folder).iterdir()
        }
    name = f'{type(network).__module__}.{type(network).__name__}'
    huggingface = {
        'model': {'config': {'file_extension': '.json', 'content': config, 'class': name}},
        'tokenizer': files,
    }
    weights = {f'model.{name}': tensor for name, tensor in network.state_dict().items()}
    return {'state': {'model': weights, 'integrations': {'huggingface': huggingface}}}


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
            'canonical_solution': ' done\n',
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


def finished_items(out: Path) -> int:
    """Return the number of items in a journal that are reused, without right generations and torn last lines."""
    items = set()
    for line in journal_lines(out):
        if line.endswith(b'\n'):
            entry = json.loads(b'{' + line.partition(b'{')[2])
            sample = entry.get('item', {'is_gold': True})  # the first line is the identity
            if not sample.get('is_gold', False):
                items.add((entry['task'], *map(sample.get, ('file', 'row', 'variant', 'sample'))))
    return len(items)
