"""Options that change what is sent: `apply_chat_template`, and `pmi_context`, which asks for choices alone as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_model
import pytest
from character_tokenizer import CharacterTokenizer

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import (
    Evaluation,
    PreparedEvaluation,
    conclude,
    plan_evaluation,
    prepare_evaluation,
)
from llmfoundry_gauntlet.results.external import Answer, request_lines, score_answers
from llmfoundry_gauntlet.results.samples import sample_line
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.items import ALONE, item_result
from llmfoundry_gauntlet.types import Generation

ROWS = {
    'choices': [{'query': f'Q{row}', 'choices': ['red', 'ash'], 'gold': 0} for row in range(3)],
    'schema': [{'context_options': ['He', 'She'], 'continuation': 'ran', 'gold': 0}],
    'generations': [{'context': 'Who?', 'answer': 'Al'}],
    'colours': [
        {'query': f'Colour {row}?', 'choices': ['red', 'pale green', 'ash'], 'gold': row % 3} for row in range(9)
    ],
}
IN_CHAT = [
    {
        'label': 'choices',
        'icl_task_type': 'multiple_choice',
        'num_fewshot': [2],
        'prompt_string': 'Go.',
        'pmi_context': 'A:',
    },
    {'label': 'schema', 'icl_task_type': 'schema', 'num_fewshot': [0]},
    {'label': 'generations', 'icl_task_type': 'generation_task_with_answers', 'num_fewshot': [0], 'prelimiter': 'Q: '},
]
COLOURS = {**IN_CHAT[0], 'dataset_uri': 'colours.jsonl', 'prompt_string': 'Go.\n', 'pmi_context': None}
PMI = 'PMINormalizedMatch'


class ChatTokenizer(CharacterTokenizer):
    """A token per character, and a template that shows its own tokens."""

    chat_template = 'one'

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return ''.join(f'[{message["role"]}]{message["content"]}' for message in messages) + '[assistant]'


@pytest.fixture
def data_root(write_jsonl, tmp_path: Path) -> str:
    for name, rows in ROWS.items():
        write_jsonl(f'{name}.jsonl', rows)
    return str(tmp_path)


@pytest.fixture
def in_chat(data_root: str) -> dict[str, Any]:
    tasks = [{**task, 'dataset_uri': f'{task["label"]}.jsonl', 'continuation_delimiter': '='} for task in IN_CHAT]
    return {'tasks': tasks, 'data_root': data_root, 'apply_chat_template': True}


@pytest.fixture
def colours(data_root: str) -> dict[str, Any]:
    """Return settings of two tasks on the same rows, with and without `pmi_context`."""
    tasks = [{**COLOURS, 'label': 'with', 'pmi_context': 'Answer:'}, {**COLOURS, 'label': 'without'}]
    return {'tasks': tasks, 'data_root': data_root}


def prepared(settings: dict[str, Any], tokenizer: Any, max_seq_len: int = 128) -> PreparedEvaluation:
    return prepare_evaluation(load_data(decode_settings(settings)), Encoder(tokenizer), max_seq_len=max_seq_len)


def texts(settings: dict[str, Any], tokenizer: Any, max_seq_len: int = 128) -> dict[str, list[str]]:
    """Return contexts and continuations by task, variant and row."""
    found = {}
    for key, item in prepared(settings, tokenizer, max_seq_len).items.items():
        request = item.request
        parts = [request.context] if hasattr(request, 'context') else [*request.contexts, *request.continuations]
        found[f'{key.task} {key.variant} {key.row}'] = [tokenizer.decode(ids.tolist()) for ids in parts]
    return found


def test_instruction_shots_and_question_are_one_message(in_chat: dict[str, Any]):
    """Mutation: shots before the template. An answer begins without the space that follows a prompt."""
    found = texts(in_chat, ChatTokenizer())
    rows = 'Q1=red\nQ2=red' if 'Go.\nQ1' in found['choices/2-shot None 0'][0] else 'Q2=red\nQ1=red'
    message = f'[user]Go.\n{rows}\nQ0=[assistant]'
    assert found['choices/2-shot None 0'] == [message, message, 'red', 'ash']
    assert found['choices/2-shot alone 0'] == ['[user]A:[assistant]'] * 2 + ['red', 'ash']
    assert found['schema/0-shot None 0'] == ['[user]He[assistant]', '[user]She[assistant]', 'ran', 'ran']
    assert found['generations/0-shot None 0'] == ['[user]Q: Who?=[assistant]']
    with pytest.raises(ModelError, match=r'\(CharacterTokenizer\) has no chat template; leave out apply_chat_template'):
        texts(in_chat, CharacterTokenizer())
    del in_chat['apply_chat_template']
    assert texts(in_chat, ChatTokenizer()) == texts(in_chat, CharacterTokenizer())


@pytest.mark.parametrize(('max_seq_len', 'kept'), [(41, 2), (40, 1), (34, 1), (33, 0), (27, 0)])
def test_shots_are_dropped_inside_the_message(in_chat: dict[str, Any], max_seq_len: int, kept: int):
    r"""'[user]Go.' has 9 characters, a shot '\nQ1=red' 7, '\nQ0=[assistant]' 15 and a choice 3."""
    in_chat['tasks'] = in_chat['tasks'][:1]
    (context, *_) = texts(in_chat, ChatTokenizer(), max_seq_len)['choices/2-shot None 0']
    assert context.count('=red') == kept
    assert context.startswith('[user]Go.\nQ') and context.endswith('\nQ0=[assistant]')


@pytest.mark.parametrize(
    ('end', 'is_open'),
    [('', False), ('<think>\n', True), ('<think>\n\n</think>\n\n', False), ('<|channel|>analysis<|message|>', True)],
)
def test_a_template_may_open_the_reasoning(in_chat: dict[str, Any], tmp_path: Path, end: str, is_open: bool):
    """Also where token ids come from the cache. Mutation: the end of the prompt is not cached."""

    class Thinking(ChatTokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **more: Any) -> str:
            return super().apply_chat_template(messages, **more) + end

    in_chat['tasks'] = in_chat['tasks'][2:]
    data = load_data(decode_settings(in_chat))
    for _ in range(2):
        found = prepare_evaluation(data, Encoder(Thinking()), max_seq_len=128, cache=tmp_path / 'tokens')
        (item,) = found.items.values()
        assert item.request.reasoning.is_open == is_open
        answer = Generation(key=item.key, text='Al?')
        assert item_result(item, answer, found.tasks['generations/0-shot']).score == (0 if is_open else 1)
        answer = Generation(key=item.key, text='Bo?\n</think>\nAl')
        assert item_result(item, answer, found.tasks['generations/0-shot']).score == 1


def test_messages_are_exported(in_chat: dict[str, Any]):
    lines = [json.loads(line) for line in request_lines(load_data(decode_settings(in_chat)))]
    by_task = {line['task']: line for line in lines if line['row'] == 0 and line['variant'] is None}
    (message,) = by_task['choices']['messages']
    assert message['role'] == 'user'
    assert message['content'].startswith('Go.\nQ') and message['content'].endswith('\nQ0=')
    assert [messages[0]['content'] for messages in by_task['schema']['messages']] == ['He', 'She']
    assert not any('prompt' in line for line in lines)


# Choices without their prompts.


def evaluated(settings: dict[str, Any], tokenizer: Any) -> Evaluation:
    planned = plan_evaluation(prepared(settings, tokenizer), tokens_per_batch=200)
    outputs = [output for batch in planned.batches for output in fake_model.run(batch)]
    return conclude(planned, planned.results(outputs), {})


def test_the_choice_that_gains_most_is_the_prediction(colours, character_tokenizer):
    evaluation = evaluated(colours, character_tokenizer)
    results = evaluation.results['with/2-shot']
    alone = {key: item for key, item in evaluation.planned.items.items() if key.variant == ALONE}
    assert {(key.task, key.row) for key in alone} == {('with/2-shot', row) for row in range(9)}
    for item in alone.values():
        assert {bytes(context.tolist()) for context in item.request.contexts} == {b'\x01Answer:'}
        assert [bytes(ids.tolist()) for ids in item.request.continuations] == [b' red', b' pale green', b' ash']
    rights = []
    for result in results:
        gains = [one - other for one, other in zip(result.logprobs, result.logprobs_alone, strict=True)]
        rights.append(float(gains.index(max(gains)) == result.gold))
    score = evaluation.scores['with/2-shot']
    assert 0 < sum(rights) < 9 and score.metrics[PMI].value == pytest.approx(sum(rights) / 9)
    assert score.metrics[PMI].standard_error is not None
    assert len(results) == score.num_items == 9 and evaluation.metrics['gauntlet/items'] == 18
    assert all('logprobs_alone' in json.loads(sample_line(result)) for result in results)
    without = evaluation.scores['without/2-shot']
    assert PMI not in without.metrics
    for name, measure in without.metrics.items():
        assert score.metrics[name].value == pytest.approx(measure.value, abs=1e-9), name


def test_requests_are_exported_and_their_answers_scored(colours):
    data = load_data(decode_settings(colours))
    lines = [json.loads(line) for line in request_lines(data)]
    alone = [line for line in lines if line['variant'] == ALONE]
    assert [(line['task'], line['row']) for line in alone] == [('with', row) for row in range(9)]
    choices = (' red', ' pale green', ' ash')
    assert {(line['prompt'], tuple(line['choices'])) for line in alone} == {('Answer:', choices)}
    answers = [
        Answer(
            **{name: line[name] for name in ('task', 'num_shots', 'row', 'variant')},
            logprobs=(-1.0, -2.0, -9.0) if line['variant'] == ALONE else (-2.0, -1.5, -9.5),
        )
        for line in lines
    ]
    evaluation = score_answers(data, (('here', answer) for answer in answers))
    assert evaluation.scores['with/2-shot'].metrics[PMI].value == pytest.approx(1 / 3)  # the second gains, 0.5
    assert len(evaluation.results['with/2-shot']) == 9
