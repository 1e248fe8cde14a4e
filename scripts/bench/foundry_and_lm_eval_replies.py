"""llm-foundry and lm-eval as contenders on a task whose replies are written; greedy, fp32.

As in `foundry_and_lm_eval.py`. The task has `early_stopping_criteria`, plain texts, and `max_new_tokens` among its
`generation_kwargs`. Predictions are texts: lm-eval's up to their stops, llm-foundry's whole, of which its metric cuts
what follows a stop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from composer import Logger, State
from foundry_and_lm_eval import (
    NUM_WARM_UP_ROWS,
    LLMFoundry,
    LMEval,
    PredictionRecorder,
    evaluator_over,
)
from lm_eval.api.instance import Instance
from timing import Timing, measure
from transformers import AutoTokenizer

WARM_UP_TOKENS = 4


class ReplyRecorder(PredictionRecorder):
    """Keeps the replies."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Take the texts that the metric was given."""
        del logger
        self.predictions.extend(state.outputs)


class FoundryReplies(LLMFoundry):
    """Composer's evaluation of llm-foundry's task. It makes room for the longest right answer, whatever the limit."""

    recorder_type: ClassVar[type[PredictionRecorder]] = ReplyRecorder
    warm_up_keys: ClassVar[dict[str, Any]] = {'generation_kwargs': {'max_new_tokens': WARM_UP_TOKENS}}
    warm_up_length: ClassVar[int] = 512

    def prompt_room(self, *, task: dict[str, Any], rows_file: str, max_seq_len: int) -> int:
        """The tokens to which it pads and cuts its prompts."""
        with evaluator_over(task, Path(rows_file), self.tokenizer(), max_seq_len, 1) as evaluator:
            return evaluator.dataloader.dataloader.dataset.padding_size


class LMEvalReplies(LMEval):
    """lm-eval's HFLM.generate_until on the prompts of llm-foundry's tasks."""

    def measure(
        self,
        *,
        task: dict[str, Any],
        rows_file: str,
        max_seq_len: int,
        batch_size: int,
        num_items: int | None = None,
    ) -> dict[str, Any]:
        """The fields of Timing for the first `num_items` rows."""
        prompts = [prompt for ((prompt, _),) in self.pairs(task, rows_file, max_seq_len, num_items)]
        limit = task['generation_kwargs']['max_new_tokens']
        self.model._max_length, self.model.batch_size_per_gpu = max_seq_len, batch_size
        if not self.warm:
            warm_up = requests_for(prompts[:NUM_WARM_UP_ROWS], task['early_stopping_criteria'], WARM_UP_TOKENS)
            self.model.generate_until(warm_up, disable_tqdm=True)
            self.warm = True
        self.model.tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        requests = requests_for(prompts, task['early_stopping_criteria'], limit)
        wall, cpu, replies = measure(lambda: self.model.generate_until(requests, disable_tqdm=True), self.device)
        return Timing(wall, cpu, replies)._asdict()


def requests_for(prompts: list[str], stops: list[str], limit: int) -> list[Instance]:
    """Greedy replies of at most `limit` tokens."""
    arguments = {'until': stops, 'max_gen_toks': limit, 'do_sample': False}
    return [
        Instance(request_type='generate_until', doc={}, arguments=(prompt, dict(arguments)), idx=index)
        for index, prompt in enumerate(prompts)
    ]
