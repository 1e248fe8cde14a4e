"""lm-eval's Hugging Face backend on our texts, with all that it takes to explain a difference (see bench/worker.py).

Runs in the environment of `requirements/reference.txt`, with scripts/bench among the modules.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from lm_eval_contender import LMEval, TextPairs, best_per_token, by_row, scoring_requests
from lm_eval_reference import generation_requests
from ours import read, text_pairs
from transformers import AutoTokenizer
from worker import NUM_WARM_UP_ROWS, WARM_UP_TOKENS

from llmfoundry_gauntlet.tasks.encode import Encoder


class LMEvalOnRealTexts(LMEval):
    """Score or generate for one of our tasks, with the texts of our prompts."""

    def measure(self, *, settings: dict[str, Any], max_seq_len: int, num_items: int, batch_size: int) -> dict[str, Any]:
        """Return seconds and predictions; of scored choices log-probabilities, and whether each has our tokens."""
        tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        self.set_limits(max_seq_len, batch_size)
        (task,) = settings['tasks']
        if 'generation_kwargs' in task:
            return self.generate(task, prompts_of(settings, num_items))

        pairs = list(islice(text_pairs(settings, Encoder(tokenizer)), num_items))
        few = scoring_requests(pairs[:NUM_WARM_UP_ROWS])
        seconds, results = self.timed(self.model.loglikelihood, scoring_requests(pairs), few)

        scored_rows = by_row(results, pairs)
        if len(pairs[0]) == 1:
            predictions = [int(is_greedy) for ((_, is_greedy),) in scored_rows]
        else:
            rows = zip(scored_rows, pairs, strict=True)
            predictions = [best_per_token(scored, choices, tokenizer) for scored, choices in rows]
        return {
            **seconds,
            'predictions': predictions,
            'logprobs': [[total for total, _ in scored] for scored in scored_rows],
            'tokenized_alike': self.tokenized_alike(pairs),
        }

    def generate(self, task: dict[str, Any], prompts: list[str]) -> dict[str, Any]:
        """Return seconds, and the texts of greedy generations."""
        stops, limit = task['early_stopping_criteria'], task['generation_kwargs']['max_new_tokens']
        pairs = [[(prompt, '')] for prompt in prompts]
        few = generation_requests(pairs[:NUM_WARM_UP_ROWS], stops, min(limit, WARM_UP_TOKENS))
        seconds, texts = self.timed(self.model.generate_until, generation_requests(pairs, stops, limit), few)
        return {**seconds, 'predictions': texts}

    def tokenized_alike(self, pairs: TextPairs) -> list[list[bool]]:
        """Return for each choice whether lm-eval, which tokenizes both texts as one, has the tokens of each alone."""
        alike = []
        for choices in pairs:
            of_row = []
            for context, continuation in choices:
                of_context, of_continuation = self.model._encode_pair(context, continuation)
                own_context = self.model.tok_encode(context)
                own_continuation = self.model.tok_encode(continuation, add_special_tokens=False)
                of_row.append(of_context + of_continuation == own_context + own_continuation)
            alike.append(of_row)
        return alike


def prompts_of(settings: dict[str, Any], num_items: int) -> list[str]:
    """Return the texts of the first prompts of a generation task."""
    data = read(settings)
    (task,) = data.suite.tasks
    examples = data.examples[task.key]
    first = islice(task.examples_with_shots(examples, examples), num_items)
    return [task.prompt(example, shots).text for example, shots in first]
