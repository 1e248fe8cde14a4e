"""Records of generations that ended at their token limit."""

from __future__ import annotations

from typing import Any

import clustered_items
import pytest

from llmfoundry_gauntlet.config.score import ScoreSpec
from llmfoundry_gauntlet.errors import Problems
from llmfoundry_gauntlet.evaluation.suite import decode_task
from llmfoundry_gauntlet.results.token_limits import token_limit_record
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.score import score_task

TRUNCATED = 'no answer found in the generation; truncated at the token limit'


def task_of(kind: str, **keys: Any) -> Task:
    spec = {'label': 't', 'dataset_uri': 't.jsonl', 'num_fewshot': [0], 'icl_task_type': kind, **keys}
    task = decode_task(spec, 'tasks', Problems('tasks.yaml'))
    assert task is not None
    return task


def generated(*ends: tuple[int | None, bool]) -> list[Any]:
    """Return items by their number of generated tokens, None if unknown, and whether they ended at the limit."""
    return [
        clustered_items.item(
            row,
            0.0,
            text='So',
            num_tokens=None if count is None else (count,),
            reason=TRUNCATED if is_truncated else None,
        )
        for row, (count, is_truncated) in enumerate(ends)
    ]


GENERATION = 'generation_task_with_answers'
SCORE = score_task(ScoreSpec(dataset='math', max_new_tokens=7), ())
DEFAULT = 'generation_kwargs.max_new_tokens sets another'


@pytest.mark.parametrize(
    ('task', 'tokens', 'setting'),
    [
        (task_of(GENERATION, generation_kwargs={'max_new_tokens': 7}), 7, 'generation_kwargs.max_new_tokens'),
        (task_of(GENERATION), 9, f'the longest right answer; {DEFAULT}'),
        (task_of('code_evaluation'), 64, 'half of max_seq_len'),
        (task_of('code_evaluation'), 1024, f'the default; {DEFAULT}'),
        (SCORE, 7, 'max_new_tokens'),
        (SCORE, 6, 'half of max_seq_len'),
    ],
)
def test_the_share_at_the_limit_is_recorded_with_the_setting_to_change(task: Task, tokens: int, setting: str):
    results = generated((tokens, True), (tokens, False), (2, False), (tokens, True), (1, False))
    assert token_limit_record(task, results) == {'share': 2 / 5, 'tokens': tokens, 'setting': setting}


def test_nothing_is_recorded_where_no_generation_is_known_to_have_reached_the_limit():
    """Generations of another engine have no number of tokens, scored items no text."""
    task = task_of(GENERATION)
    assert token_limit_record(task, generated((3, False), (9, False))) is None
    assert token_limit_record(task, generated((None, False), (None, False))) is None
    assert token_limit_record(task_of('multiple_choice'), [clustered_items.item(0, 1.0, num_tokens=(1, 1))]) is None
