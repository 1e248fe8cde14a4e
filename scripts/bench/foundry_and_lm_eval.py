"""Time llm-foundry and lm-eval on the rows of one language_modeling, multiple_choice or schema task.

To be imported in the environment of `requirements/reference.txt`. `time_foundry` and `time_lm_eval` take the same
arguments and return a Timing:

    task            the task's YAML keys: label, icl_task_type, num_fewshot (a list of one), delimiters, ...; a
                    dataset_uri in it is ignored
    rows_file       a JSONL file; few-shot examples are drawn from these rows too
    model_folder    a Hugging Face folder of a causal model with its tokenizer
    max_seq_len     llm-foundry pads every row to it; lm-eval cuts at it
    batch_size      sequences in a batch: a question of four choices counts as four

Timed is what a user waits for once the model is loaded and a first row was scored: for llm-foundry the Trainer's
evaluation with its few-shot prompting and tokenisation, for lm-eval the tokenisation and scoring of ready (context,
continuation) texts, taken from llm-foundry's own data set. Reading the files is not timed.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from composer import Callback, Evaluator, Logger, State, Trainer
from llmfoundry.utils.builders import build_composer_model, build_icl_evaluators, build_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerBase

NUM_WARM_UP_ROWS = 2


class Timing(NamedTuple):
    """Seconds of one run, and what it predicts: the chosen index, or for language_modeling 1 where right, per row."""

    wall_seconds: float
    cpu_seconds: float
    predictions: list[int]


class PredictionRecorder(Callback):
    """Keeps what the metrics say of each item."""

    def __init__(self) -> None:
        self.predictions: list[int] = []

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Take the last metric's outputs; state.batch is the whole batch where nothing splits it."""
        del logger
        outputs = state.metric_outputs
        self.predictions.extend(int(value) for value in outputs.get('selected_choice_idx', outputs['result']))


def measure(run: Callable[[], Any], device: str) -> tuple[float, float, Any]:
    """Wall seconds, processor seconds of this process and the result of one call."""
    if device == 'cuda':
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    if device == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu, result


@contextmanager
def evaluators_over(
    task: dict[str, Any], rows_file: Path, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, batch_size: int
) -> Iterator[tuple[Evaluator, Evaluator]]:
    """llm-foundry's evaluators of the first rows, to warm up, and of all rows. Without categories."""
    datasets.disable_progress_bars()
    lines = rows_file.read_text('utf-8').removesuffix('\n').split('\n')
    with tempfile.TemporaryDirectory() as folder:
        tasks = []
        for label, chosen in (('warm_up', lines[:NUM_WARM_UP_ROWS]), (task['label'], lines)):
            path = Path(folder) / f'{label}.source.jsonl'
            path.write_text('\n'.join(chosen) + '\n', 'utf-8')
            keys = {'max_seq_len': max_seq_len, 'batch_size': batch_size, 'has_categories': False}
            tasks.append({**deepcopy(task), **keys, 'label': label, 'dataset_uri': str(path)})
        evaluators, _ = build_icl_evaluators(tasks, tokenizer, max_seq_len, batch_size, destination_dir=folder)
        warm_up, timed = evaluators
        yield warm_up, timed


def time_foundry(
    task: dict[str, Any],
    rows_file: Path,
    model_folder: Path,
    *,
    max_seq_len: int,
    batch_size: int = 8,
    device: str = 'cpu',
) -> Timing:
    """Time Composer's evaluation of llm-foundry's task. device is cpu or cuda; fp32 on either."""
    tokenizer = build_tokenizer(str(model_folder), {})
    config = {'pretrained_model_name_or_path': str(model_folder), 'pretrained': True}
    model = build_composer_model(name='hf_causal_lm', tokenizer=tokenizer, cfg=config)
    recorder = PredictionRecorder()
    trainer = Trainer(
        model=model,
        callbacks=[recorder],
        device='gpu' if device == 'cuda' else 'cpu',
        precision='fp32',
        progress_bar=False,
    )
    with evaluators_over(task, rows_file, tokenizer, max_seq_len, batch_size) as (warm_up, timed):
        trainer.eval(eval_dataloader=[warm_up])
        recorder.predictions.clear()
        wall, cpu, _ = measure(lambda: trainer.eval(eval_dataloader=[timed]), device)
    trainer.close()
    return Timing(wall, cpu, list(recorder.predictions))


def text_pairs(data_set: Any, icl_task_type: str) -> list[list[tuple[str, str]]]:
    """Per row, the (context, continuation) texts that llm-foundry's data set tokenises; one pair per choice."""
    pairs = []
    for index, row in enumerate(data_set.dataset):
        shots = data_set._generate_few_shot_prompt(
            data_set.num_fewshot, index, data_set.prompt_string, data_set.fewshot_rng
        )
        if icl_task_type == 'schema':
            contexts = data_set._construct_multiple_contexts(row, shots)
            continuations = [row['continuation']] * len(contexts)
        else:
            context = data_set.construct_context(row, shots)
            continuations = row['choices'] if icl_task_type == 'multiple_choice' else [row[data_set.answer_key]]
            contexts = [context.rstrip() if data_set.strip_data else context] * len(continuations)
        texts = [text if text.startswith(' ') or not data_set.prefix_space else f' {text}' for text in continuations]
        pairs.append([(shots + context, text) for context, text in zip(contexts, texts, strict=True)])
    return pairs


def requests_of(pairs: list[list[tuple[str, str]]]) -> list[Instance]:
    return [
        Instance(request_type='loglikelihood', doc={}, arguments=pair, idx=index)
        for choices in pairs
        for index, pair in enumerate(choices)
    ]


def time_lm_eval(
    task: dict[str, Any],
    rows_file: Path,
    model_folder: Path,
    *,
    max_seq_len: int,
    batch_size: int = 8,
    device: str = 'cpu',
) -> Timing:
    """Time lm-eval's HFLM.loglikelihood on the task's texts, fp32. A choice is chosen by its mean over tokens."""
    tokenizer = build_tokenizer(str(model_folder), {})
    with evaluators_over(task, rows_file, tokenizer, max_seq_len, batch_size) as (_, evaluator):
        pairs = text_pairs(evaluator.dataloader.dataloader.dataset, task['icl_task_type'])
    model = HFLM(
        pretrained=str(model_folder), device=device, dtype='float32', batch_size=batch_size, max_length=max_seq_len
    )
    model.loglikelihood(requests_of(pairs[:NUM_WARM_UP_ROWS]), disable_tqdm=True)
    requests = requests_of(pairs)
    wall, cpu, results = measure(lambda: model.loglikelihood(requests, disable_tqdm=True), device)
    remaining = iter(results)
    predictions = []
    for choices in pairs:
        scored = [next(remaining) for _ in choices]
        if task['icl_task_type'] == 'language_modeling':
            predictions.append(int(scored[0][1]))
        else:
            lengths = [max(len(tokenizer(text, add_special_tokens=False)['input_ids']), 1) for _, text in choices]
            means = [total / length for (total, _), length in zip(scored, lengths, strict=True)]
            predictions.append(means.index(max(means)))
    return Timing(wall, cpu, predictions)
