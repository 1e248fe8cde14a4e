"""lm-eval in llm-foundry's environment (see worker.py): on the texts of its tasks, and on lm-eval's own SCORE tasks.

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
from foundry_contender import evaluator_over
from llmfoundry.utils.builders import build_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager, score
from lm_eval_contender import LMEval, Scored, TextPairs, best_per_token, by_row, scoring_requests
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from worker import NUM_WARM_UP_ROWS, WARM_UP_TOKENS, measure

SCORE_TASKS = next(iter(score.__path__))


class LMEvalOnFoundryTexts(LMEval):
    """Generate for llm-foundry's generation tasks; score every choice of its other tasks."""

    def measure(
        self, *, task: dict[str, Any], rows_file: str, max_seq_len: int, batch_size: int, num_items: int
    ) -> dict[str, Any]:
        """Return seconds and predictions for the first `num_items` rows; choices are compared by mean per token."""
        tokenizer = build_tokenizer(self.model_folder, {})
        with evaluator_over(task, Path(rows_file), tokenizer, max_seq_len, 1) as evaluator:
            pairs = text_pairs(evaluator.dataloader.dataloader.dataset, task['icl_task_type'], num_items)
        few_pairs = pairs[:NUM_WARM_UP_ROWS]
        self.set_limits(max_seq_len, batch_size)
        if 'generation_kwargs' in task:
            stops, limit = task['early_stopping_criteria'], task['generation_kwargs']['max_new_tokens']
            few = generation_requests(few_pairs, stops, min(limit, WARM_UP_TOKENS))
            seconds, texts = self.timed(self.model.generate_until, generation_requests(pairs, stops, limit), few)
            return {**seconds, 'predictions': texts}
        seconds, results = self.timed(self.model.loglikelihood, scoring_requests(pairs), scoring_requests(few_pairs))
        return {**seconds, 'predictions': predictions_of(results, pairs, task['icl_task_type'], tokenizer)}


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


def generation_requests(pairs: TextPairs, stops: list[str], limit: int) -> list[Instance]:
    """Return a request for a greedy generation of at most `limit` tokens for each row."""
    arguments = {'until': stops, 'max_gen_toks': limit, 'do_sample': False}
    return [
        Instance(request_type='generate_until', doc={}, arguments=(prompt, dict(arguments)), idx=index)
        for index, ((prompt, _),) in enumerate(pairs)
    ]


def predictions_of(
    results: list[Scored], pairs: TextPairs, icl_task_type: str, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return a prediction per row from lm-eval's results per request."""
    scored_rows = by_row(results, pairs)
    if icl_task_type == 'language_modeling':
        return [int(is_greedy) for ((_, is_greedy),) in scored_rows]
    return [best_per_token(scored, choices, tokenizer) for scored, choices in zip(scored_rows, pairs, strict=True)]


class LMEvalScore(LMEval):
    """Evaluate option order or the ten prompts with lm-eval."""

    def measure(
        self, *, perturbation: str, rows_file: str, prompts: str, max_new_tokens: int, max_seq_len: int, batch_size: int
    ) -> dict[str, Any]:
        """Return seconds and generations for all rows, with digests of the prompts."""
        rows = [json.loads(line) for line in Path(rows_file).read_text('utf-8').removesuffix('\n').split('\n')]
        self.set_limits(max_seq_len, batch_size)
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
