"""lm-eval as a contender (see worker.py), on ready texts of ours.

Runs in `.venv-newest`, which has our package and the newest transformers but no
llm-foundry; `lm_eval_reference.py` has those that run in llm-foundry's. lm-eval 0.4.13 needs no workaround with
transformers 5.24.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from ours import text_pairs
from transformers import AutoTokenizer
from worker import NUM_WARM_UP_ROWS, measure

from llmfoundry_gauntlet.tasks.encode import Encoder

TextPairs = list[list[tuple[str, str]]]  # per row, the (context, continuation) texts of its choices
Scored = tuple[float, bool]  # lm-eval's answer: a log-probability, and whether the continuation is the greedy one


class LMEval:
    """A model in lm-eval's Hugging Face backend, for contenders that run it on some texts."""

    def load(self, model_folder: str, device: str = 'cpu', dtype: str = 'float32') -> None:
        """Load the model; the next measurement warms it up."""
        self.model_folder, self.device = model_folder, device
        self.model = HFLM(pretrained=model_folder, device=device, dtype=dtype)
        self.warm = False

    def set_limits(self, max_seq_len: int, batch_size: int) -> None:
        """Set the length of the longest row, and the number of rows in a batch."""
        self.model._max_length, self.model.batch_size_per_gpu = max_seq_len, batch_size

    def timed(self, run: Any, requests: list[Instance], few: list[Instance]) -> tuple[dict[str, float], list[Any]]:
        """Return the seconds of `run` over requests, tokenization included, and its results; `few` warm up."""
        if not self.warm:
            run(few, disable_tqdm=True)
            self.warm = True
        self.model.tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        return measure(lambda: run(requests, disable_tqdm=True), self.device)


class LMEvalOnOurTexts(LMEval):
    """Score every choice of one of our multiple choice tasks, with the texts of our prompts."""

    def measure(self, *, settings: dict[str, Any], max_seq_len: int, num_items: int, batch_size: int) -> dict[str, Any]:
        """Return seconds, predictions and log-probabilities; choices are compared by mean per token."""
        tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        pairs = list(islice(text_pairs(settings, Encoder(tokenizer)), num_items))
        self.set_limits(max_seq_len, batch_size)
        few = scoring_requests(pairs[:NUM_WARM_UP_ROWS])
        seconds, results = self.timed(self.model.loglikelihood, scoring_requests(pairs), few)

        scored_rows = by_row(results, pairs)
        rows = zip(scored_rows, pairs, strict=True)
        return {
            **seconds,
            'predictions': [best_per_token(scored, choices, tokenizer) for scored, choices in rows],
            'logprobs': [[total for total, _ in scored] for scored in scored_rows],
        }


def scoring_requests(pairs: TextPairs) -> list[Instance]:
    """Return a request for each choice."""
    return [
        Instance(request_type='loglikelihood', doc={}, arguments=pair, idx=index)
        for choices in pairs
        for index, pair in enumerate(choices)
    ]


def by_row(results: list[Scored], pairs: TextPairs) -> list[list[Scored]]:
    """Return the results of requests, grouped as the texts are."""
    remaining = iter(results)
    return [list(islice(remaining, len(choices))) for choices in pairs]


def best_per_token(scored: list[Scored], choices: list[tuple[str, str]], tokenizer: Any) -> int:
    """Return the index of the choice with the highest mean log-probability per token."""
    lengths = [max(len(tokenizer(text, add_special_tokens=False)['input_ids']), 1) for _, text in choices]
    means = [total / length for (total, _), length in zip(scored, lengths, strict=True)]
    return means.index(max(means))
