"""Settings of the chat template: its arguments, the system message, shots as turns; and what is said about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import FIXTURES
from transformers import AutoTokenizer

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import ConfigError, ModelError
from llmfoundry_gauntlet.evaluation.inputs import chat_warnings, load_data
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation, prepare_evaluation
from llmfoundry_gauntlet.tasks.encode import Encoder

MESSAGES = '{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}'
START = '{% if add_generation_prompt %}[assistant]{% endif %}'
CLOSED = '{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}'
TEMPLATES = {
    'without reasoning': MESSAGES + START,
    'reasons by default': MESSAGES + START + CLOSED,  # Qwen 3
    'opens the reasoning': MESSAGES + START + '<think>\n',  # DeepSeek R1
    'closes the reasoning by default': MESSAGES + START + '{% if not enable_thinking %}<think></think>{% endif %}',
    'opens a channel': MESSAGES + START + '<|START_THINKING|>',
    'rejects system messages': (
        '{% if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}'
        + MESSAGES
        + START
    ),
    'ignores system messages': '{% for message in messages if message.role != "system" %}{{ message.content }}'
    '{% endfor %}',
}
CHOICES = [{'query': f'Q{row}', 'choices': ['red', 'ash'], 'gold': 0} for row in range(3)]
ROWS = {
    'multiple_choice': CHOICES,
    'language_modeling': [{'context': f'Q{row}', 'continuation': 'red'} for row in range(3)],
    'schema': [{'context_options': [f'Q{row}', f'P{row}'], 'continuation': 'red', 'gold': 0} for row in range(3)],
    'generation_task_with_answers': [{'context': f'Q{row}', 'answer': 'red'} for row in range(3)],
}
WORDS = {'apply_chat_template': True}


@pytest.fixture
def settings(write_jsonl, tmp_path: Path):
    """Return the settings of a task of a type with some keys, and of its evaluation in chat."""

    def make(kind: str = 'multiple_choice', *, task: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
        write_jsonl('rows.jsonl', ROWS[kind])
        entry = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [2], 'icl_task_type': kind, **(task or {})}
        return {'tasks': [entry], 'data_root': str(tmp_path), **WORDS, **given}

    return make


def encoder(template: str) -> Encoder:
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / 'models' / 'rotary_bos')
    tokenizer.chat_template = TEMPLATES[template]
    return Encoder(tokenizer)


def texts(settings: dict[str, Any], template: str = 'reasons by default', row: int = 0) -> tuple[str, ...]:
    """Return the contexts of a row in the chat template."""
    data = load_data(decode_settings(settings))
    (task,) = data.tasks.values()
    examples = data.examples[task.key]
    ((example, shots),) = task.examples_with_shots(examples, [examples[row]])
    return encoder(template).contexts(task.prompt(example, shots))


def prepared(
    settings: dict[str, Any], template: str = 'without reasoning', *, max_seq_len: int = 200, cache: Path | None = None
) -> PreparedEvaluation:
    data = load_data(decode_settings(settings))
    return prepare_evaluation(data, encoder(template), max_seq_len=max_seq_len, cache=cache)


def test_arguments_reach_the_template_and_a_system_message_comes_first(settings):
    (plain,) = texts(settings())
    assert plain.startswith('[user]Q') and plain.endswith('\nQ0\n[assistant]')

    (with_both,) = texts(settings(chat_template_kwargs={'enable_thinking': False}, system_prompt='Be brief.'))

    assert with_both == f'[system]Be brief.\n{plain}<think>\n\n</think>\n\n'


@pytest.mark.parametrize(
    ('kind', 'task', 'expected'),
    [
        ('multiple_choice', {}, ['[user]Q{}\n[assistant]red\n[user]Q{}\n[assistant]red\n[user]Q0\n[assistant]']),
        (
            'multiple_choice',
            {'prompt_string': 'Go.\n', 'example_delimiter': '', 'continuation_delimiter': '\nA: '},
            ['[user]Go.\nQ{}\nA:\n[assistant]red\n[user]Q{}\nA:\n[assistant]red\n[user]Q0\nA:\n[assistant]'],
        ),
        ('language_modeling', {}, ['[user]Q{}\n[assistant]red\n[user]Q{}\n[assistant]red\n[user]Q0\n[assistant]']),
        (
            'schema',
            {},
            [
                '[user]Q{}\n[assistant]red\n[user]Q{}\n[assistant]red\n[user]Q0\n[assistant]',
                '[user]Q{}\n[assistant]red\n[user]Q{}\n[assistant]red\n[user]P0\n[assistant]',
            ],
        ),
        (
            'generation_task_with_answers',
            {'prelimiter': 'Ask: '},
            ['[user]Ask: Q{}\n[assistant]red\n[user]Ask: Q{}\n[assistant]red\n[user]Ask: Q0\n[assistant]'],
        ),
    ],
)
def test_shots_may_be_turns_of_the_user_and_the_assistant(settings, kind: str, task: dict, expected: list[str]):
    """The instruction is in the first message, and no message begins with the delimiter between shots."""
    contexts = texts(settings(kind, task=task, fewshot_as_turns=True), 'without reasoning')

    first_message = contexts[0].partition('[assistant]')[0]
    rows_of_shots = (1, 2) if 'Q1' in first_message else (2, 1)
    assert list(contexts) == [text.format(*rows_of_shots) for text in expected]


@pytest.mark.parametrize('max_seq_len', [200, 45, 35, 20])
def test_turns_are_dropped_as_shots_are(settings, max_seq_len: int):
    """Prompts keep the last turns that fit, and the first message the instruction."""
    given = settings(task={'prompt_string': 'Go. '}, fewshot_as_turns=True, truncation='drop_shots')
    tokenizer = encoder('without reasoning').tokenizer

    items = prepared(given, max_seq_len=max_seq_len).items.values()

    for item in items:
        (context, _) = item.request.contexts
        assert len(context) <= max_seq_len
        assert tokenizer.decode(context).count('red') == item.num_shots
        assert item.request.prompt_shortened or item.num_shots == 2


def test_truncation_from_the_left_in_chat_counts_the_shots_that_are_left(settings):
    items = prepared(settings(truncation='reference'), max_seq_len=12).items.values()

    assert all(item.request.prompt_shortened for item in items)
    assert all(0 <= item.num_shots < 2 for item in items)


@pytest.mark.parametrize(
    ('given', 'wrong'),
    [
        # Without the chat template.
        ({'system_prompt': 'Be brief.'}, 'system_prompt: has no effect without apply_chat_template: true'),
        ({'chat_template_kwargs': {'a': 1}}, 'chat_template_kwargs: has no effect without apply_chat_template: true'),
        ({'fewshot_as_turns': True}, 'fewshot_as_turns: has no effect without apply_chat_template: true'),
        # With it.
        ({'system_prompt': ' \n', **WORDS}, "system_prompt: is ' \\n'; allowed: text"),
        ({'system_prompt': 7, **WORDS}, 'system_prompt: is 7; allowed: text'),
        ({'chat_template_kwargs': [1], **WORDS}, 'chat_template_kwargs: is a list; allowed: a mapping'),
        ({'chat_template_kwargs': {'messages': []}, **WORDS}, 'chat_template_kwargs: messages is set by'),
        ({'chat_template_kwargs': {'tokenize': True}, **WORDS}, 'chat_template_kwargs: tokenize is set by'),
        ({'chat_template_kwargs': {'a b': 1}, **WORDS}, "chat_template_kwargs: 'a b' is no name"),
        ({'chat_template_kwargs': {'day': Path}, **WORDS}, 'chat_template_kwargs: day is '),
        ({'fewshot_as_turns': 'yes', **WORDS}, "fewshot_as_turns: is 'yes'; allowed: true or false"),
    ],
)
def test_settings_that_are_wrong_or_have_no_effect_are_errors(settings, given: dict[str, Any], wrong: str):
    base = settings()
    del base['apply_chat_template']

    with pytest.raises(ConfigError) as raised:
        decode_settings({**base, **given})
    assert wrong in str(raised.value)


@pytest.mark.parametrize(
    ('template', 'wrong'),
    [
        ('rejects system messages', r'rejects system messages \(System role not supported\); leave out system_prompt'),
        ('ignores system messages', 'ignores system messages; leave out system_prompt'),
    ],
)
def test_a_template_without_a_system_role_is_an_error_that_names_the_setting(settings, template: str, wrong: str):
    with pytest.raises(ModelError, match=wrong):
        texts(settings(system_prompt='Be brief.'), template)
    assert texts(settings(), template)


@pytest.mark.parametrize(
    'code',
    [
        'cycler.__init__.__globals__.os.mkdir(PATH)',
        'messages.__class__.__mro__[1].__subclasses__()',
        'messages.append(messages[0])',
        '("%s".format.__self__.__class__ | attr("__mro__"))[1]',
    ],
)
def test_a_template_of_a_tokenizer_reaches_nothing_of_python(settings, tmp_path: Path, code: str):
    """Jinja2's sandbox, in which transformers renders: its errors are the model's, and nothing is made."""
    made = tmp_path / 'made'
    hostile = encoder('without reasoning')
    hostile.tokenizer.chat_template = MESSAGES + '{{ ' + code.replace('PATH', repr(str(made))) + ' }}'
    data = load_data(decode_settings(settings()))

    with pytest.raises(ModelError):
        prepare_evaluation(data, hostile, max_seq_len=200)

    assert not made.exists()


@pytest.mark.parametrize(
    ('template', 'kwargs', 'kind', 'is_warned'),
    [
        ('without reasoning', {}, 'multiple_choice', False),
        ('reasons by default', {}, 'multiple_choice', True),
        ('reasons by default', {}, 'schema', True),
        ('reasons by default', {'enable_thinking': True}, 'language_modeling', True),
        ('reasons by default', {'enable_thinking': False}, 'multiple_choice', False),
        ('reasons by default', {}, 'generation_task_with_answers', False),
        ('opens the reasoning', {}, 'multiple_choice', True),
        ('opens a channel', {}, 'multiple_choice', True),
        ('closes the reasoning by default', {}, 'multiple_choice', False),
        ('closes the reasoning by default', {'enable_thinking': True}, 'multiple_choice', True),
    ],
)
def test_choices_scored_where_a_model_reasons_are_a_warning(settings, template, kwargs, kind, is_warned):
    data = load_data(decode_settings(settings(kind, chat_template_kwargs=kwargs)))

    warnings = list(chat_warnings(data.tasks, data.examples, encoder(template)))

    assert len(warnings) == is_warned
    for warning in warnings:
        assert 't/2-shot: ' in warning and 'first words of the reasoning' in warning
        assert 'enable_thinking: false' in warning


def test_arguments_that_a_template_does_not_know_are_a_warning(settings):
    given = settings(chat_template_kwargs={'enable_thinkng': False, 'enable_thinking': False})
    data = load_data(decode_settings(given))

    (warning,) = chat_warnings(data.tasks, data.examples, encoder('reasons by default'))

    assert 'enable_thinkng' in warning and 'no effect' in warning


@pytest.mark.parametrize(
    'given',
    [{'chat_template_kwargs': {'enable_thinking': False}}, {'system_prompt': 'Be brief.'}, {'fewshot_as_turns': True}],
)
def test_cached_token_ids_are_not_read_with_other_settings_of_the_template(settings, tmp_path: Path, given):
    def token_ids(settings: dict[str, Any]) -> list[list[int]]:
        items = prepared(settings, 'reasons by default', cache=tmp_path / 'ids').items.values()
        return [item.request.contexts[0].tolist() for item in items]

    without = token_ids(settings())

    assert token_ids(settings(**given)) != without
    assert token_ids(settings()) == without
