"""`apply_chat_template`: prompts of Gauntlet tasks, shots included, are a user's message."""

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

ROWS = {
    'choices': [{'query': f'Q{row}', 'choices': ['red', 'ash'], 'gold': 0} for row in range(3)],
    'schema': [{'context_options': ['He', 'She'], 'continuation': 'ran', 'gold': 0}],
    'replies': [{'context': 'Who?', 'answer': 'Al'}],
}
TASKS = [
    {
        'label': 'choices',
        'icl_task_type': 'multiple_choice',
        'num_fewshot': [2],
        'prompt_string': 'Go.',
        'pmi_context': 'A:',
    },
    {'label': 'schema', 'icl_task_type': 'schema', 'num_fewshot': [0]},
    {'label': 'replies', 'icl_task_type': 'generation_task_with_answers', 'num_fewshot': [0], 'prelimiter': 'Q: '},
]


class ChatTokenizer(CharacterTokenizer):
    """A token per character, and a template that shows its own tokens."""

    chat_template = 'one'

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return ''.join(f'[{message["role"]}]{message["content"]}' for message in messages) + '[assistant]'


@pytest.fixture
def settings(write_jsonl, tmp_path: Path) -> dict[str, Any]:
    for name, rows in ROWS.items():
        write_jsonl(f'{name}.jsonl', rows)
    tasks = [{**task, 'dataset_uri': f'{task["label"]}.jsonl', 'continuation_delimiter': '='} for task in TASKS]
    return {'tasks': tasks, 'data_root': str(tmp_path), 'apply_chat_template': True}


def texts(settings: dict[str, Any], tokenizer: Any, max_seq_len: int = 128) -> dict[str, list[str]]:
    """Return contexts and continuations by task, variant and row."""
    prepared = prepare_evaluation(load_data(decode_settings(settings)), Encoder(tokenizer), max_seq_len=max_seq_len)
    found = {}
    for key, item in prepared.items.items():
        request = item.request
        parts = [request.context] if hasattr(request, 'context') else [*request.contexts, *request.continuations]
        found[f'{key.task} {key.variant} {key.row}'] = [tokenizer.decode(ids.tolist()) for ids in parts]
    return found


def test_instruction_shots_and_question_are_one_message(settings: dict[str, Any]):
    """Mutation: shots before the template. An answer begins without the space that follows a prompt."""
    found = texts(settings, ChatTokenizer())
    rows = 'Q1=red\nQ2=red' if 'Go.\nQ1' in found['choices/2-shot None 0'][0] else 'Q2=red\nQ1=red'
    message = f'[user]Go.\n{rows}\nQ0=[assistant]'
    assert found['choices/2-shot None 0'] == [message, message, 'red', 'ash']
    assert found['choices/2-shot alone 0'] == ['[user]A:[assistant]'] * 2 + ['red', 'ash']
    assert found['schema/0-shot None 0'] == ['[user]He[assistant]', '[user]She[assistant]', 'ran', 'ran']
    assert found['replies/0-shot None 0'] == ['[user]Q: Who?=[assistant]']


@pytest.mark.parametrize(('max_seq_len', 'kept'), [(41, 2), (40, 1), (34, 1), (33, 0), (27, 0)])
def test_shots_are_dropped_inside_the_message(settings: dict[str, Any], max_seq_len: int, kept: int):
    r"""'[user]Go.' has 9 characters, a shot '\nQ1=red' 7, '\nQ0=[assistant]' 15 and a choice 3."""
    settings['tasks'] = settings['tasks'][:1]
    (context, *_) = texts(settings, ChatTokenizer(), max_seq_len)['choices/2-shot None 0']
    assert context.count('=red') == kept
    assert context.startswith('[user]Go.\nQ') and context.endswith('\nQ0=[assistant]')


def test_without_the_setting_nothing_changes(settings: dict[str, Any]):
    del settings['apply_chat_template']
    assert texts(settings, ChatTokenizer()) == texts(settings, CharacterTokenizer())


def test_a_tokenizer_without_a_template_is_an_error(settings: dict[str, Any]):
    with pytest.raises(ModelError, match=r'\(CharacterTokenizer\) has no chat template; leave out apply_chat_template'):
        texts(settings, CharacterTokenizer())


def test_messages_are_exported(settings: dict[str, Any]):
    lines = [json.loads(line) for line in request_lines(load_data(decode_settings(settings)))]
    by_task = {line['task']: line for line in lines if line['row'] == 0 and line['variant'] is None}
    (message,) = by_task['choices']['messages']
    assert message['role'] == 'user'
    assert message['content'].startswith('Go.\nQ') and message['content'].endswith('\nQ0=')
    assert [messages[0]['content'] for messages in by_task['schema']['messages']] == ['He', 'She']
    assert not any('prompt' in line for line in lines)
