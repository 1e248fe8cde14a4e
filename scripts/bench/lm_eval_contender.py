"""lm-eval as a contender (see worker.py): its scoring or generation of the texts of llm-foundry's tasks, in fp32.

Runs in the environment of `requirements/reference.txt`. Timed is `HFLM.loglikelihood` or `HFLM.generate_until` on ready
texts, taken from llm-foundry's own data set, tokenisation included, with a tokenizer that has met no word yet.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from foundry_contender import NUM_WARM_UP_ROWS, WARM_UP_TOKENS, evaluator_over
from llmfoundry.utils.builders import build_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from worker import measure

TextPairs = list[list[tuple[str, str]]]  # per row, the (context, continuation) texts of its choices


class LMEval:
    """lm-eval on llm-foundry's tasks: generation tasks are generated, of the others every choice is scored."""

    def load(self, model_folder: str, device: str = 'cpu') -> None:
        """Load the model; the next measurement warms it up."""
        self.model_folder, self.device = model_folder, device
        self.model = HFLM(pretrained=model_folder, device=device, dtype='float32')
        self.warm = False

    def measure(
        self, *, task: dict[str, Any], rows_file: str, max_seq_len: int, batch_size: int, num_items: int
    ) -> dict[str, Any]:
        """Return seconds and predictions for the first `num_items` rows. A choice is chosen by its mean over tokens."""
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
    """Return the texts that llm-foundry's data set tokenises for its first `num_items` rows."""
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
    """Return predictions by row, of lm-eval's (log-probability, all argmax) per request."""
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
