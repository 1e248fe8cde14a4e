"""lm-eval's own SCORE tasks on MMLU-Pro as a contender; greedy, fp32.

Runs in the environment of `requirements/reference.txt`. The tasks are lm-eval's, 0-shot and without a chat template,
except for three things: the rows, the file of the prompts, and the limit of a generation. Timed is `evaluate` once the
rows are in memory: variants, prompts, tokenisation, generation, scoring and metrics.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
from foundry_contender import NUM_WARM_UP_ROWS, WARM_UP_TOKENS
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager, score
from lm_eval_contender import LMEval
from transformers import AutoTokenizer
from worker import measure

SCORE_TASKS = next(iter(score.__path__))


class LMEvalScore(LMEval):
    """lm-eval's evaluation of option order or of the ten prompts."""

    def measure(
        self, *, perturbation: str, rows_file: str, prompts: str, max_new_tokens: int, max_seq_len: int, batch_size: int
    ) -> dict[str, Any]:
        """Return seconds and predictions for all rows, with digests of the prompts; predictions are texts."""
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
    datasets.disable_caching()  # else a second evaluation finds its variants ready
    splits = dict.fromkeys(('test', 'validation'), datasets.Dataset.from_list(rows))
    with mock.patch.object(datasets, 'load_dataset', lambda *_, **__: splits):
        manager = TaskManager(include_path=SCORE_TASKS, include_defaults=False)
        loaded = manager.load([f'score_{perturbation}_robustness_mmlu_pro'])
    (task,) = loaded['tasks'].values()
    task.set_config(key='num_fewshot', value=0)
    task.set_config(key='generation_kwargs', value={'max_gen_toks': max_new_tokens}, update=True)
    task.config.process_docs = partial(task.config.process_docs, template_file_path=prompts)
    return loaded
