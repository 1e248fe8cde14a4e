"""lm-eval as a contender (see worker.py): on the texts of llm-foundry's tasks, and on its own SCORE tasks.

Runs in the environment of `requirements/reference.txt`. For llm-foundry's tasks `HFLM.loglikelihood` or
`HFLM.generate_until` is timed on ready texts from llm-foundry's own dataset, including tokenization, with a tokenizer
that has seen no text yet. lm-eval's SCORE tasks on MMLU-Pro run 0-shot and without a chat template, with other rows,
prompt file and generation limit; `evaluate` is timed once the rows are in memory: variants, prompts, tokenization,
generation, scoring and metrics.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
from foundry_contender import NUM_WARM_UP_ROWS, WARM_UP_TOKENS, evaluator_over
from llmfoundry.utils.builders import build_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager, score
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from worker import measure

SCORE_TASKS = next(iter(score.__path__))

TextPairs = list[list[tuple[str, str]]]  # per row, the (context, continuation) texts of its choices


class LMEval:
    """Generate for llm-foundry's generation tasks; score every choice of its other tasks."""

    def load(self, model_folder: str, device: str = 'cpu', dtype: str = 'float32') -> None:
        """Load the model; the next measurement warms it up."""
        self.model_folder, self.device = model_folder, device
        self.model = HFLM(pretrained=model_folder, device=device, dtype=dtype)
        self.warm = False

    def measure(
        self, *, task: dict[str, Any], rows_file: str, max_seq_len: int, batch_size: int, num_items: int
    ) -> dict[str, Any]:
        """Return seconds and predictions for the first `num_items` rows; choices are compared by mean per token."""
        tokenizer = build_tokenizer(self.model_folder, {})
        with evaluator_over(task, Path(rows_file), tokenizer, max_seq_len, 1) as evaluator:
            pairs = text_pairs(evaluator.dataloader.dataloader.dataset, task['icl_task_type'], num_items)
        self.model._max_length, self.model.batch_size_per_gpu = max_seq_len, batch_size
        if 'generation_kwargs' in task:
            limit, run = task['generation_kwargs']['max_new_tokens'], self.model.generate_until
            requests = generation_requests(pairs, task['early_stopping_criteria'], limit)
            few = generation_requests(
                pairs[:NUM_WARM_UP_ROWS], task['early_stopping_criteria'], min(limit, WARM_UP_TOKENS)
            )
        else:
            run = self.model.loglikelihood
            requests, few = scoring_requests(pairs), scoring_requests(pairs[:NUM_WARM_UP_ROWS])
        if not self.warm:
            run(few, disable_tqdm=True)
            self.warm = True
        self.model.tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        seconds, results = measure(lambda: run(requests, disable_tqdm=True), self.device)
        if 'generation_kwargs' not in task:
            results = predictions_of(results, pairs, task['icl_task_type'], tokenizer)
        return {**seconds, 'predictions': results}


def text_pairs(data_set: Any, icl_task_type: str, num_items: int) -> TextPairs:
    """Return the texts that llm-foundry's dataset tokenizes for its first `num_items` rows."""
    pairs = []
    for index, row in enumerate(islice(data_set.dataset, num_items)):
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


def scoring_requests(pairs: TextPairs) -> list[Instance]:
    """Return a request for each choice."""
    return [
        Instance(request_type='loglikelihood', doc={}, arguments=pair, idx=index)
        for choices in pairs
        for index, pair in enumerate(choices)
    ]


def generation_requests(pairs: TextPairs, stops: list[str], limit: int) -> list[Instance]:
    """Return a request for a greedy generation of at most `limit` tokens for each row."""
    arguments = {'until': stops, 'max_gen_toks': limit, 'do_sample': False}
    return [
        Instance(request_type='generate_until', doc={}, arguments=(prompt, dict(arguments)), idx=index)
        for index, ((prompt, _),) in enumerate(pairs)
    ]


def predictions_of(
    results: list[tuple[float, bool]], pairs: TextPairs, icl_task_type: str, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return a prediction per row from lm-eval's (log-probability, is greedy) per request."""
    remaining = iter(results)
    predictions = []
    for choices in pairs:
        scored = [next(remaining) for _ in choices]
        if icl_task_type == 'language_modeling':
            predictions.append(int(scored[0][1]))
        else:
            lengths = [max(len(tokenizer(text, add_special_tokens=False)['input_ids']), 1) for _, text in choices]
            means = [total / length for (total, _), length in zip(scored, lengths, strict=True)]
            predictions.append(means.index(max(means)))
    return predictions


class LMEvalScore(LMEval):
    """Evaluate option order or the ten prompts with lm-eval."""

    def measure(
        self, *, perturbation: str, rows_file: str, prompts: str, max_new_tokens: int, max_seq_len: int, batch_size: int
    ) -> dict[str, Any]:
        """Return seconds and generations for all rows, with digests of the prompts."""
        rows = [json.loads(line) for line in Path(rows_file).read_text('utf-8').removesuffix('\n').split('\n')]
        self.model._max_length, self.model.batch_size_per_gpu = max_seq_len, batch_size
        if not self.warm:
            evaluate(self.model, load_task(perturbation, rows[:NUM_WARM_UP_ROWS], prompts, WARM_UP_TOKENS))
            self.warm = True
        self.model.tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        loaded = load_task(perturbation, rows, prompts, max_new_tokens)
        seconds, results = measure(lambda: evaluate(self.model, loaded, bootstrap_iters=0), self.device)
        (samples,) = results['samples'].values()
        texts = [sample['filtered_resps'][0] for sample in samples]
        asked = [hashlib.sha256(sample['arguments'][0][0].encode()).hexdigest() for sample in samples]
        return {**seconds, 'predictions': texts, 'prompts': asked}


def load_task(perturbation: str, rows: list[dict[str, Any]], prompts: str, max_new_tokens: int) -> dict[str, Any]:
    """Return lm-eval's task over these rows, as its `evaluate` takes it."""
    datasets.disable_progress_bars()
    datasets.disable_caching()  # else a second evaluation reuses the variants
    splits = dict.fromkeys(('test', 'validation'), datasets.Dataset.from_list(rows))
    with mock.patch.object(datasets, 'load_dataset', lambda *_, **__: splits):
        manager = TaskManager(include_path=SCORE_TASKS, include_defaults=False)
        loaded = manager.load([f'score_{perturbation}_robustness_mmlu_pro'])
    (task,) = loaded['tasks'].values()
    task.set_config(key='num_fewshot', value=0)
    task.set_config(key='generation_kwargs', value={'max_gen_toks': max_new_tokens}, update=True)
    task.config.process_docs = partial(task.config.process_docs, template_file_path=prompts)
    return loaded
