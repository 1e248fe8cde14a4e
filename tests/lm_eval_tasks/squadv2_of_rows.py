"""lm-eval's SQuAD 2 of rows beside this file, as its class names its data set itself and cannot be given another."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

from lm_eval.api.metrics import mean
from lm_eval.tasks.squadv2.task import SQuAD2 as Original


class SQuAD2(Original):
    """The documents, prompts and requests of lm-eval; its own metric is a script of the hub."""

    DATASET_PATH = 'json'

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)

    def download(self, *_: Any, **__: Any) -> None:
        """Load the rows of the splits."""
        folder = Path(__file__).parent / 'squadv2'
        super().download({'data_files': {path.stem: str(path) for path in folder.glob('*.jsonl')}})

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
        """Return the match with any answer, and the probability of `unanswerable`."""
        text, (logprob, _) = results
        return {'exact': float(text.strip() in doc['answers']['text']), 'no_answer_probability': exp(logprob)}

    def aggregation(self) -> dict[str, Any]:
        return {'exact': mean, 'no_answer_probability': mean}

    def higher_is_better(self) -> dict[str, bool]:
        return {'exact': True, 'no_answer_probability': False}
