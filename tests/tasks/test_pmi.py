"""PMINormalizedMatch: choices are also scored without their prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.fake import FakeLanguageModel
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import Evaluation, conclude, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.results.external import request_lines, score_answers
from llmfoundry_gauntlet.results.samples import sample_line
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.items import ALONE
from llmfoundry_gauntlet.types import Answer, ItemKey

ROWS = [{'query': f'Colour {row}?', 'choices': ['red', 'pale green', 'ash'], 'gold': row % 3} for row in range(9)]
NAME = 'PMINormalizedMatch'


@pytest.fixture
def settings(write_jsonl, tmp_path: Path) -> dict[str, Any]:
    """Return settings of two tasks on the same rows, with and without `pmi_context`."""
    write_jsonl('rows.jsonl', ROWS)
    task = {
        'dataset_uri': 'rows.jsonl',
        'num_fewshot': [2],
        'icl_task_type': 'multiple_choice',
        'prompt_string': 'Go.\n',
    }
    tasks = [{**task, 'label': 'with', 'pmi_context': 'Answer:'}, {**task, 'label': 'without'}]
    return {'tasks': tasks, 'data_root': str(tmp_path)}


def evaluated(settings: dict[str, Any], tokenizer: Any, tokens_per_batch: int = 200) -> Evaluation:
    prepared = prepare_evaluation(load_data(decode_settings(settings)), Encoder(tokenizer), max_seq_len=128)
    planned = plan_evaluation(prepared, tokens_per_batch=tokens_per_batch)
    outputs = [output for batch in planned.batches for output in FakeLanguageModel().run(batch)]
    return conclude(planned, planned.results(outputs), {})


def test_each_item_has_another_request_with_context_and_choices_alone(settings, character_tokenizer):
    prepared = prepare_evaluation(load_data(decode_settings(settings)), Encoder(character_tokenizer), max_seq_len=128)
    alone = {key: item for key, item in prepared.items.items() if key.variant == ALONE}
    assert {(key.task, key.row) for key in alone} == {('with/2-shot', row) for row in range(9)}
    assert len(prepared.items) == 3 * 9
    for item in alone.values():
        assert {bytes(context.tolist()) for context in item.request.contexts} == {b'\x01Answer:'}
        choices = [bytes(ids.tolist()).decode() for ids in item.request.continuations]
        assert choices == ['red', 'pale green', 'ash']


def test_the_choice_that_gains_most_is_the_prediction(settings, character_tokenizer):
    evaluation = evaluated(settings, character_tokenizer)
    results = evaluation.results['with/2-shot']
    rights = []
    for result in results:
        gains = [one - other for one, other in zip(result.logprobs, result.logprobs_alone, strict=True)]
        rights.append(float(gains.index(max(gains)) == result.gold))
    score = evaluation.scores['with/2-shot']
    assert 0 < sum(rights) < 9 and score.metrics[NAME].value == pytest.approx(sum(rights) / 9)
    assert score.metrics[NAME].standard_error is not None
    assert len(results) == score.num_items == 9 and evaluation.metrics['gauntlet/items'] == 18
    assert all('logprobs_alone' in json.loads(sample_line(result)) for result in results)
    without = evaluation.scores['without/2-shot']
    assert NAME not in without.metrics
    for name, measure in without.metrics.items():
        assert score.metrics[name].value == pytest.approx(measure.value, abs=1e-9), name


def test_values_do_not_depend_on_batches_or_subsets(settings, character_tokenizer):
    one = evaluated(settings, character_tokenizer)
    other = evaluated(settings, character_tokenizer, tokens_per_batch=20)
    assert one.scores['with/2-shot'].metrics[NAME] == other.scores['with/2-shot'].metrics[NAME]
    part = evaluated({**settings, 'subset_items': 4}, character_tokenizer)
    whole = {result.key: result for result in one.results['with/2-shot']}
    assert len(part.results['with/2-shot']) == 4
    for result in part.results['with/2-shot']:
        assert result.logprobs_alone == pytest.approx(whole[result.key].logprobs_alone)


def test_requests_are_exported_and_their_answers_scored(settings):
    data = load_data(decode_settings(settings))
    lines = [json.loads(line) for line in request_lines(data)]
    alone = [line for line in lines if line['variant'] == ALONE]
    assert [(line['task'], line['row']) for line in alone] == [('with', row) for row in range(9)]
    assert {(line['prompt'], tuple(line['choices'])) for line in alone} == {
        ('Answer:', (' red', ' pale green', ' ash'))
    }
    answers = [
        Answer(
            place='here',
            key=ItemKey(f'{line["task"]}/2-shot', line['row'], variant=line['variant']),
            logprobs=(-1.0, -2.0, -9.0) if line['variant'] == ALONE else (-2.0, -1.5, -9.5),
        )
        for line in lines
    ]
    evaluation = score_answers(data, answers)
    assert evaluation.scores['with/2-shot'].metrics[NAME].value == pytest.approx(1 / 3)  # the second gains, 0.5
    assert len(evaluation.results['with/2-shot']) == 9
