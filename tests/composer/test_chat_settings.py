"""Settings of the chat template through every command that evaluates: what is sent is what is recorded and shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

TEMPLATE = (
    '{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}[assistant]'
    '{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}'
)
# The settings, and the options of a command that give them.
GIVEN = {'chat_template_kwargs': {'enable_thinking': False}, 'system_prompt': 'Brief.', 'fewshot_as_turns': True}
WORDS = (
    '--apply-chat-template',
    '--chat-template-kwargs',
    '{"enable_thinking": false}',
    '--system-prompt',
    'Brief.',
    '--fewshot-as-turns',
)
# A shot and a question, as they are sent with these settings.
PROMPT = '[system]Brief.\n[user]{}\n[assistant]{}\n[user]{}\n[assistant]<think></think>'


@pytest.fixture
def model(models: Path, tmp_path: Path) -> Path:
    """Return the folder of a model with a chat template, beside a task with one shot of two rows."""
    folder = shutil.copytree(models / 'one', tmp_path / 'model')
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    rows = [{'query': query, 'choices': ['red', 'ash'], 'gold': gold} for gold, query in enumerate('QP')]
    (tmp_path / 'rows.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    task = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [1], 'icl_task_type': 'multiple_choice'}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task]}))
    return folder


def check_records(out: Path) -> None:
    """Check that results.json has the settings, and samples the prompts as they were sent."""
    config = json.loads((out / 'results.json').read_text())['config']
    assert config['apply_chat_template'] is True
    assert {name: config[name] for name in GIVEN} == GIVEN
    lines = (out / 'samples' / 't_1-shot.jsonl').read_text().splitlines()
    prompts = [json.loads(line)['prompt'] for line in lines]
    assert prompts == [PROMPT.format('P', 'ash', 'Q'), PROMPT.format('Q', 'red', 'P')]


def own_yaml(model: Path) -> dict[str, Any]:
    """Return the values of a file of `gauntlet eval` under our keys."""
    return {'model': str(model), 'tasks': str(model.parent / 'tasks.yaml'), 'precision': 'fp32'}


def foundry_yaml(model: Path) -> dict[str, Any]:
    """Return the same under llm-foundry's keys."""
    listed = {
        'model_name': 'tiny',
        'model': {'name': 'hf_causal_lm', 'pretrained_model_name_or_path': str(model)},
        'tokenizer': {'name': str(model)},
    }
    return {
        'models': [listed],
        'icl_tasks': str(model.parent / 'tasks.yaml'),
        'max_seq_len': 128,
        'device_eval_batch_size': 4,
    }


def test_run_sends_and_records_them(gauntlet, model: Path, tmp_path: Path):
    words = ('--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--device', 'cpu', '--log-prompts')
    status, _, err = gauntlet('run', '--model', model, *words, *WORDS, '--out', tmp_path / 'out')
    assert status == 0, err
    check_records(tmp_path / 'out')


@pytest.mark.parametrize('values', [own_yaml, foundry_yaml])
def test_eval_files_take_them(gauntlet, model: Path, tmp_path: Path, values):
    more = {'data_root': str(tmp_path), 'device': 'cpu', 'log_prompts': True, 'out': str(tmp_path / 'out')}
    file = tmp_path / 'eval.yaml'
    file.write_text(yaml.safe_dump({**values(model), **more, 'apply_chat_template': True, **GIVEN}))
    status, out, err = gauntlet('eval', file)
    assert status == 0, out + err
    (results,) = (tmp_path / 'out').rglob('results.json')
    check_records(results.parent)


def test_watch_takes_them(gauntlet, model: Path, tmp_path: Path):
    words = ('--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--device', 'cpu', '--log-prompts', '--once')
    (tmp_path / 'checkpoints').mkdir()
    shutil.copytree(model, tmp_path / 'checkpoints' / 'ba10')
    folder = ('watch', tmp_path / 'checkpoints', '--out', tmp_path / 'out', '--settle', '0s')
    status, out, err = gauntlet(*folder, *words, *WORDS)
    assert status == 0, out + err
    (results,) = (tmp_path / 'out').rglob('results.json')
    check_records(results.parent)


def test_another_form_of_prompts_is_another_evaluation(gauntlet, model: Path, tmp_path: Path):
    """A journal is not continued with another system message."""
    words = ('run', '--model', model, '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--device', 'cpu')
    out = ('--out', tmp_path / 'out', '--apply-chat-template')
    assert gauntlet(*words, *out)[0] == 0

    status, _, err = gauntlet(*words, *out, '--system-prompt', 'Brief.', '--resume')

    assert status == 2
    assert 'system_prompt' in err


def test_explain_shows_messages_and_tokens(gauntlet, model: Path, tmp_path: Path):
    words = ('explain', 't', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--model', model)

    _, out, _ = gauntlet(*words, *WORDS, '--all-tokens')

    messages = [
        '      system │ Brief.',
        '        user │ P',
        '   assistant │ ash',
        '        user │ Q',
        'continuation │ red',
    ]
    assert '\n'.join(messages) in out
    assert '│ [system]Brief.↵\n' in out
    assert '│ [assistant]<think></think>\n' in out
    assert out.partition('Warnings\n')[2].strip().startswith('none')


def test_explain_warns_of_choices_scored_where_a_model_reasons(gauntlet, model: Path, tmp_path: Path):
    words = ('explain', 't', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--model', model)

    _, out, _ = gauntlet(*words, '--apply-chat-template')

    assert 'first words of the reasoning' in out.partition('Warnings\n')[2]
    assert 'lost leading space' not in out


@pytest.mark.parametrize(
    ('words', 'wrong'),
    [
        (('--system-prompt', 'Brief.'), '--system-prompt: has no effect without --apply-chat-template'),
        (('--fewshot-as-turns',), '--fewshot-as-turns: has no effect without --apply-chat-template'),
        (
            ('--apply-chat-template', '--chat-template-kwargs', '{oops'),
            "--chat-template-kwargs: is '{oops', which is not JSON",
        ),
        (
            ('--apply-chat-template', '--chat-template-kwargs', '[1]'),
            '--chat-template-kwargs: is a list; allowed: a mapping',
        ),
    ],
)
@pytest.mark.parametrize('command', ['run', 'export', 'explain', 'watch'])
def test_wrong_settings_are_named_by_every_command(gauntlet, model: Path, tmp_path: Path, command, words, wrong):
    of_command = {
        'run': ('--model', model, '--out', tmp_path / 'out'),
        'export': ('--out', tmp_path / 'requests.jsonl'),
        'explain': ('t',),
        'watch': (tmp_path, '--out', tmp_path / 'out'),
    }[command]
    common = ('--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path)

    status, _, err = gauntlet(command, *of_command, *common, *words)

    (line,) = err.splitlines()
    assert status == 2
    assert line.startswith('error: ')
    assert wrong in line


def test_exported_requests_have_all_messages(gauntlet, model: Path, tmp_path: Path):
    words = ('--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--out', tmp_path / 'requests.jsonl')

    assert gauntlet('export', *words, *WORDS)[0] == 0

    first = json.loads((tmp_path / 'requests.jsonl').read_text().splitlines()[0])
    assert [message['role'] for message in first['messages']] == ['system', 'user', 'assistant', 'user']
    assert [message['content'] for message in first['messages']] == ['Brief.', 'P', 'ash', 'Q']
    assert first['chat_template_kwargs'] == {'enable_thinking': False}  # as servers take it
