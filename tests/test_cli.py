"""Output and exit status of the console script, run in this process."""

from __future__ import annotations

import hashlib
import json
import sys

import pytest
import torch
from paths import FIXTURES, ROOT

TASKS = str(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')
GAUNTLET = str(ROOT / 'yamls/gauntlets/eval_gauntlet_v0.1.yaml')
DATA = str(ROOT / 'eval_data')
HAS_GPU = torch.cuda.is_available()


def test_validate_checks_yaml_and_data(gauntlet):
    status, out, _ = gauntlet('validate', '--tasks', TASKS, '--gauntlet', GAUNTLET, '--data-root', DATA)
    assert status == 0
    assert '57 tasks' in out and '7 categories' in out and 'rows of 57 tasks' in out and 'no errors' in out


@pytest.mark.parametrize('words', [('--tasks', TASKS, '--no-data'), ('--gauntlet', GAUNTLET)])
def test_each_option_of_validate_works_alone(gauntlet, words):
    assert gauntlet('validate', *words)[0] == 0


def test_validate_lists_all_errors_of_both_files_without_traceback(gauntlet, tmp_path):
    tasks = tmp_path / 'tasks.yaml'
    tasks.write_text('icl_tasks: [{label: a, num_fewshot: [0], icl_task_type: schema, lable: x}]')
    status, _, err = gauntlet('validate', '--tasks', str(tasks), '--gauntlet', str(tmp_path / 'none.yaml'))
    assert status == 1
    assert err.splitlines() == [
        f"error: {tasks}:1 (a): icl_tasks[0].lable: unknown key 'lable', did you mean 'label'?",
        f"error: {tasks}:1 (a): icl_tasks[0]: the key 'dataset_uri' is missing",
        f'error: {tmp_path / "none.yaml"}: there is no such file',
    ]


def test_validate_names_every_invalid_row(gauntlet, tmp_path):
    (tmp_path / 'rows.jsonl').write_text('{"query": "a", "choices": ["a", "b"], "gold": 4}\n{\n')
    tasks = tmp_path / 'tasks.yaml'
    tasks.write_text(
        'icl_tasks: [{label: a, dataset_uri: rows.jsonl, num_fewshot: [0], icl_task_type: multiple_choice}]'
    )
    status, _, err = gauntlet('validate', '--tasks', str(tasks), '--data-root', str(tmp_path))
    assert status == 1 and f'error: {tmp_path}/rows.jsonl:2: malformed JSON' in err
    assert f'error: {tmp_path}/rows.jsonl:1: gold is 4 but there are 2 choices' in err
    assert gauntlet('validate')[0] == 2


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        (('--model', '/nowhere/model'), '/nowhere/model: there is no such file or folder'),
        (
            ('--model', 'MODEL', '--max-seq-len', '99999'),
            '--max-seq-len: is 99999, but the model (llama)',
        ),
        (
            ('--model', 'MODEL', '--tokens-per-batch', 'many'),
            "--tokens-per-batch: is 'many'; allowed: auto",
        ),
        (('--model', 'MODEL', '--semantics', 'upstream'), "--semantics: is 'upstream'; allowed: corrected, reference"),
        (('--model', 'MODEL', '--precision', 'fp7'), "--precision: is 'fp7'; allowed:"),
        (('--model', 'MODEL', '--precision', 'amp_bf16', '--device', 'cpu'), 'only fp32 on a CPU'),
        (('--model', 'MODEL', '--device', 'tpu'), "--device: is 'tpu', did you mean 'gpu'?"),
        pytest.param(
            ('--model', 'MODEL', '--device', 'gpu'),
            '--device: is gpu, but torch finds no usable GPU',
            marks=pytest.mark.skipif(HAS_GPU, reason='there is a GPU here'),
        ),
        (('--model', 'MODEL', '--data-root', '/nowhere'), '57 of 57 data files are missing below /nowhere: '),
        (('--model', 'EMPTY'), 'has no config.json'),
        (('--model', 'DAMAGED'), 'is not a Composer checkpoint'),
        (('--model', 'MODEL', '--tokenizer', '/nowhere/at/all'), '/nowhere/at/all: there is no such file or folder'),
    ],
)
def test_a_user_error_is_one_line_and_status_2(gauntlet, tmp_path, words, expected):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'damaged.pt').write_bytes(b'not a checkpoint')
    names = {
        'MODEL': str(FIXTURES / 'models' / 'rotary_bos'),
        'EMPTY': str(tmp_path / 'empty'),
        'DAMAGED': str(tmp_path / 'damaged.pt'),
    }
    words = [names.get(word, word) for word in words]
    if '--data-root' not in words:
        words += ['--data-root', DATA]
    out = tmp_path / 'out'
    status, _, err = gauntlet('run', '--tasks', TASKS, '--out', str(out), *words)
    assert status == 2
    assert expected in err and 'Traceback' not in err
    assert not out.exists()


def test_a_folder_that_is_not_empty_is_not_overwritten(gauntlet, tmp_path):
    (tmp_path / 'mine.txt').write_text('keep')
    status, _, err = gauntlet('run', '--model', str(FIXTURES / 'models' / 'rotary_bos'), '--out', str(tmp_path))
    assert status == 2 and f'{tmp_path}: is not empty' in err and '--overwrite' in err
    assert (tmp_path / 'mine.txt').read_text() == 'keep'


def test_an_object_store_does_not_become_a_local_folder(gauntlet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = gauntlet('run', '--model', str(FIXTURES / 'models' / 'rotary_bos'), '--out', 's3://bucket/run')
    assert status == 2 and 'is not on this machine; allowed: a local folder' in err
    assert not any(tmp_path.iterdir())


def test_run_writes_results_and_prints_the_scores(gauntlet, tmp_path):
    tasks = tmp_path / 'tasks.yaml'
    tasks.write_text(
        'icl_tasks: [{label: copa, dataset_uri: commonsense_reasoning/copa.jsonl, num_fewshot: [0],'
        ' icl_task_type: multiple_choice}]'
    )
    out = tmp_path / 'out'
    model = str(FIXTURES / 'models' / 'rotary_bos')
    status, printed, _ = gauntlet(
        'run', '--model', model, '--tasks', str(tasks), '--data-root', DATA, '--out', str(out), '--device', 'cpu'
    )
    assert status == 0
    record = json.loads((out / 'results.json').read_text())
    copa = record['tasks']['copa/0-shot']
    accuracy = copa['metrics']['InContextLearningMultipleChoiceAccuracy']
    assert 'copa/0-shot' in printed and f'{accuracy["value"]:.3f}' in printed
    assert len((out / 'samples' / 'copa_0-shot.jsonl').read_text().splitlines()) == copa['num_items']


def test_samples_hold_prompts_and_choices_if_asked(gauntlet, tmp_path):
    """Of the three shots, as many are in the prompt as fit into 24 tokens."""
    rows = [{'query': f'Is {n} even?', 'choices': ['yes', 'no'], 'gold': n % 2} for n in range(6)]
    (tmp_path / 'rows.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    task = {'label': 'even', 'dataset_uri': 'rows.jsonl', 'icl_task_type': 'multiple_choice', 'num_fewshot': [0, 3]}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task]}))
    (tmp_path / 'score.yaml').write_text(json.dumps({'score': {'dataset': 'even', 'perturbations': ['option_order']}}))
    words = ['--tasks', tmp_path / 'tasks.yaml', '--score', tmp_path / 'score.yaml', '--data-root', tmp_path]
    model = ['--model', FIXTURES / 'models' / 'rotary_bos', '--device', 'cpu', '--max-seq-len', '24']
    for name, more in (('with', ['--log-prompts']), ('without', [])):
        assert gauntlet('run', *words, *model, '--out', tmp_path / name, *more)[0] == 0
    found = {}
    for task in ('even_0-shot', 'even_3-shot', 'score_even_0-shot'):
        lines = (tmp_path / 'with' / 'samples' / f'{task}.jsonl').read_text().splitlines()
        found[task] = [json.loads(line) for line in lines]
        plain = [{name: one[name] for name in one if name not in ('prompt', 'choices')} for one in found[task]]
        lines = (tmp_path / 'without' / 'samples' / f'{task}.jsonl').read_text().splitlines()
        assert [json.loads(line) for line in lines] == plain
    for one in (one for results in found.values() for one in results):
        assert hashlib.sha256(one['prompt'].encode()).hexdigest() == one['prompt_sha256']
    assert [one['prompt'] for one in found['even_0-shot']] == [f'Is {n} even?' for n in range(6)]
    assert found['even_0-shot'][0]['choices'] == ['yes', 'no']
    shots = [(one['prompt'].count('?') - 1, one['num_shots']) for one in found['even_3-shot']]
    assert all(counted == recorded < 3 for counted, recorded in shots) and max(shots) > (0, 0)
    assert all('even?' in one['prompt'] and 'A' in one['prompt'] for one in found['score_even_0-shot'])


def test_without_tasks_run_evaluates_the_named_part_of_the_gauntlet(gauntlet, tmp_path):
    """commonsense_reasoning is not whole, so that its category and the averages are left out."""
    model = str(FIXTURES / 'models' / 'rotary_bos')
    words = ('--model', model, '--device', 'cpu', '--max-seq-len', '64', '--limit', '2', '--data-root', DATA)
    named = ('--only', 'copa, world_knowledge', '--missing', 'skip')
    assert gauntlet('run', *words, *named, '--out', str(tmp_path / 'named'))[0] == 0
    record = json.loads((tmp_path / 'named' / 'results.json').read_text())
    assert len(record['tasks']) == 8 and {'copa/0-shot', 'mmlu/10-shot'} < record['tasks'].keys()
    assert list(record['composites']['categories']) == ['world_knowledge'] and record['composites']['averages'] == {}
    assert gauntlet('run', *words, '--only', 'copa/0-shot', '--shots', '3', '--out', str(tmp_path / 'shots'))[0] == 0
    record = json.loads((tmp_path / 'shots' / 'results.json').read_text())
    assert list(record['tasks']) == ['copa/3-shot'] and record['composites'] is None
    status, _, err = gauntlet('run', *words, '--only', 'copq,saftey,piqa', '--out', str(tmp_path / 'unknown'))
    assert status == 2
    assert [line.partition(': no such')[0] for line in err.splitlines()] == ['error: copq', 'error: saftey']


def test_help_needs_no_model(gauntlet):
    status, out, _ = gauntlet('--help')
    assert status == 0 and 'validate' in out and 'run' in out


class Unforeseen(Exception):
    """An error no command handles."""


def test_an_internal_error_is_one_line_and_status_3(gauntlet, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise Unforeseen('first line\nsecond line')

    monkeypatch.setattr('llmfoundry_gauntlet.evaluation.suite.load_suite', fail)
    status, _, err = gauntlet('validate', '--tasks', TASKS)
    (line,) = err.splitlines()
    assert status == 3 and line.startswith('error: ')
    assert 'Unforeseen: first line second line' in line and '--traceback' in line
    with pytest.raises(Unforeseen):
        gauntlet('--traceback', 'validate', '--tasks', TASKS)
    monkeypatch.setattr('llmfoundry_gauntlet.evaluation.suite.load_suite', lambda *_, **__: sys.exit(7))
    assert gauntlet('validate', '--tasks', TASKS)[0] == 7
