"""Our SCORE entry as a contender: all variants together, each variant apart, and the replies to all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ours import Ours, num_unique_tokens
from ours_replies import OurReplies
from timing import measure

from llmfoundry_gauntlet.config.score import PROMPT
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine import plan
from llmfoundry_gauntlet.engine.layout import count_prefixes
from llmfoundry_gauntlet.evaluation import PlannedEvaluation
from llmfoundry_gauntlet.inputs import EvaluationData, load_data
from llmfoundry_gauntlet.values import Example, ItemResult

WARM_UP_KEYS = {'subset_items': 2, 'max_new_tokens': 4}

Evaluated = Sequence[tuple[PlannedEvaluation, tuple[ItemResult, ...]]]


class ScoreMeasure:
    """`measure` times all from the files to the scores, with a fresh tokenizer; what it is mixed into evaluates."""

    def measure(self, *, entry: dict[str, Any], data_root: str, max_seq_len: int) -> dict[str, Any]:
        """Seconds and predictions of an entry of `score`."""
        if not self.warm:
            self.evaluate(entry_data({**entry, **WARM_UP_KEYS}, data_root), self.tokenizer(), max_seq_len)
            self.warm = True
        tokenizer = self.tokenizer()
        self.language_model.forget()

        def run() -> Evaluated:
            return [self.evaluate(part, tokenizer, max_seq_len) for part in self.parts(entry_data(entry, data_root))]

        wall, cpu, evaluated = measure(run)
        return {'wall_seconds': wall, 'cpu_seconds': cpu, **self.answer(evaluated)}

    def parts(self, data: EvaluationData) -> list[EvaluationData]:
        """The evaluations that are run one after the other."""
        return [data]


class Together(ScoreMeasure, Ours):
    """All variants by likelihood in one evaluation."""

    def answer(self, evaluated: Evaluated) -> dict[str, Any]:
        """The choices by variant and row, and tokens: `all` of every prompt, the fewest that do, and those run."""
        plans = [planned for planned, _ in evaluated]
        return {
            'predictions': [
                result.predicted
                for _, results in evaluated
                for result in sorted(results, key=lambda result: (result.key.variant, result.key.row))
            ],
            'tokens': {
                'all': sum(len(request.contexts[0]) for planned in plans for request in planned.score_requests),
                'unique': sum(count_prefixes(planned.score_requests) for planned in plans),
                'run': sum(map(num_unique_tokens, plans)),
            },
        }


class Separate(Together):
    """Every variant by likelihood in an evaluation of its own, where it is the only prompt."""

    def parts(self, data: EvaluationData) -> list[EvaluationData]:
        """One for each label or prompt, in their order."""
        (task,) = data.suite.tasks
        alone = replace(task, score=replace(task.score, perturbations=(PROMPT,)))
        suite = replace(data.suite, tasks=(alone,))
        return [replace(data, suite=suite, examples={task.key: same}) for same in by_variant(data.examples[task.key])]


class Alone(Separate):
    """As Separate, and no prompt shares what it begins with with another."""

    def evaluate(
        self, data: EvaluationData, tokenizer: Any, max_seq_len: int
    ) -> tuple[PlannedEvaluation, tuple[ItemResult, ...]]:
        """A tree and no kept prefix for each request."""
        with patch.dict(plan.MAX_TREE_TOKENS, {plan.STREAM: 1}), patch.object(plan, 'LEAST_PREFIX', math.inf):
            return super().evaluate(data, tokenizer, max_seq_len)


class ScoreReplies(ScoreMeasure, OurReplies):
    """The replies to all variants in one evaluation."""

    def answer(self, evaluated: Evaluated) -> dict[str, Any]:
        """As OurReplies, with digests of the prompts and what their tokens were."""
        ((planned, results),) = evaluated
        (examples,) = planned.data.examples.values()
        prompts = [example.content.text for example in examples]
        return {
            **self.found_out(planned, results),
            'prompts': [hashlib.sha256(prompt.encode()).hexdigest() for prompt in prompts],
            'prompt_tokens': self.last_writer.usage.prompt_tokens,
        }


def entry_data(entry: dict[str, Any], data_root: str) -> EvaluationData:
    """The questions of an entry in all their variants."""
    return load_data(decode_settings({'score': [entry], 'data_root': data_root}))


def by_variant(examples: Sequence[Example]) -> list[list[Example]]:
    """The examples of each variant apart, as if each were asked in the only prompt."""
    found: dict[str | None, list[Example]] = {}
    for example in examples:
        found.setdefault(example.variant, []).append(replace(example, variant=f'{PROMPT}:0'))
    return [found[variant] for variant in sorted(found)]
