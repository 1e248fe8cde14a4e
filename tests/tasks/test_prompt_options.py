"""The option that changes how prompts are sent: `apply_chat_template`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from character_tokenizer import CharacterTokenizer

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import prepare_evaluation
from llmfoundry_gauntlet.results.external import request_lines
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.items import item_result
from llmfoundry_gauntlet.types import Generation

ROWS = {
    'choices': [{'query': f'Q{row}', 'choices': ['red', 'ash'], 'gold': 0} for row in range(3)],
    'schema': [{'context_options': ['He', 'She'], 'continuation': 'ran', 'gold': 0}],
    'generations': [{'context': 'Who?', 'answer': 'Al'}],
}
IN_CHAT = [
    {'label': 'choices', 'icl_task_type': 'multiple_choice', 'num_fewshot': [2], 'prompt_string': 'Go.'},
    {'label': 'schema', 'icl_task_type': 'schema', 'num_fewshot': [0]},
    {'label': 'generations', 'icl_task_type': 'generation_task_with_answers', 'num_fewshot': [0], 'prelimiter': 'Q: '},
]


class ChatTokenizer(CharacterTokenizer):
    """A token per character, and a template that shows its own tokens."""

    chat_template = 'a template'  # without which a tokenizer has no chat

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


def texts(settings: dict[str, Any], tokenizer: Any, max_seq_len: int = 128) -> dict[str, list[str]]:
    """Return contexts and continuations by task and row, those of right generations apart."""
    data = load_data(decode_settings(settings))
    prepared = prepare_evaluation(data, Encoder(tokenizer), max_seq_len=max_seq_len)
    texts_of_item = {}
    for key, item in prepared.items.items():
        request = item.request
        parts = [request.context] if hasattr(request, 'context') else [*request.contexts, *request.continuations]
        name = f'{key.task} {key.row}' + (' gold' if key.is_gold else '')
        texts_of_item[name] = [tokenizer.decode(ids.tolist()) for ids in parts]
    return texts_of_item


def test_instruction_shots_and_question_are_one_message(in_chat: dict[str, Any]):
    """Mutation: shots before the template. An answer begins without the space that follows a prompt."""
    parts = texts(in_chat, ChatTokenizer())

    shots = 'Q1=red\nQ2=red' if 'Go.\nQ1' in parts['choices/2-shot 0'][0] else 'Q2=red\nQ1=red'
    message = f'[user]Go.\n{shots}\nQ0=[assistant]'
    assert parts['choices/2-shot 0'] == [message, message, 'red', 'ash']
    assert parts['schema/0-shot 0'] == ['[user]He[assistant]', '[user]She[assistant]', 'ran', 'ran']
    assert parts['generations/0-shot 0'] == ['[user]Q: Who?=[assistant]']
    assert parts['generations/0-shot 0 gold'] == ['[user]Q: Who?=[assistant]', 'Al']


def test_a_tokenizer_without_a_chat_template_is_an_error_that_says_what_to_do(in_chat: dict[str, Any]):
    with pytest.raises(ModelError, match=r'\(CharacterTokenizer\) has no chat template; leave out apply_chat_template'):
        texts(in_chat, CharacterTokenizer())


def test_without_the_option_a_chat_template_changes_nothing(in_chat: dict[str, Any]):
    del in_chat['apply_chat_template']

    assert texts(in_chat, ChatTokenizer()) == texts(in_chat, CharacterTokenizer())


@pytest.mark.parametrize(('max_seq_len', 'kept'), [(41, 2), (40, 1), (34, 1), (33, 0), (27, 0)])
def test_shots_are_dropped_inside_the_message(in_chat: dict[str, Any], max_seq_len: int, kept: int):
    r"""'[user]Go.' has 9 characters, a shot '\nQ1=red' 7, '\nQ0=[assistant]' 15 and a choice 3."""
    in_chat['tasks'] = in_chat['tasks'][:1]

    (context, *_) = texts(in_chat, ChatTokenizer(), max_seq_len)['choices/2-shot 0']

    assert context.count('=red') == kept
    assert context.startswith('[user]Go.\nQ') and context.endswith('\nQ0=[assistant]')


@pytest.mark.parametrize(
    ('end', 'is_open'),
    [
        ('', False),
        ('<think>\n', True),
        ('<think>\n\n</think>\n\n', False),
        ('<|channel|>analysis<|message|>', True),
    ],
)
def test_a_template_may_open_the_reasoning(in_chat: dict[str, Any], tmp_path: Path, end: str, is_open: bool):
    """Also where token ids come from the cache. Mutation: the end of the prompt is not cached."""

    class Thinking(ChatTokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **more: Any) -> str:
            return super().apply_chat_template(messages, **more) + end

    in_chat['tasks'] = in_chat['tasks'][2:]
    data = load_data(decode_settings(in_chat))
    for _ in range(2):  # the second time from the cache
        prepared = prepare_evaluation(data, Encoder(Thinking()), max_seq_len=128, cache=tmp_path / 'tokens')
        task = prepared.tasks['generations/0-shot']
        item, gold = prepared.items.values()
        at_once = Generation(key=item.key, text='Al?')
        after_reasoning = Generation(key=item.key, text='Bo?\n</think>\nAl')

        assert item.request.reasoning.is_open == is_open
        # No gold answer continues reasoning.
        assert (gold.request.unscorable is not None) == is_open
        assert item_result(item, at_once, task).score == (0 if is_open else 1)
        assert item_result(item, after_reasoning, task).score == 1


def test_messages_are_exported(in_chat: dict[str, Any]):
    lines = [json.loads(line) for line in request_lines(load_data(decode_settings(in_chat)))]

    by_task = {line['task']: line for line in lines if line['row'] == 0}
    (message,) = by_task['choices']['messages']
    assert message['role'] == 'user'
    assert message['content'].startswith('Go.\nQ') and message['content'].endswith('\nQ0=')
    assert [messages[0]['content'] for messages in by_task['schema']['messages']] == ['He', 'She']
    assert not any('prompt' in line for line in lines)
