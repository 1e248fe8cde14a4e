"""Output and exit status of the console script, run in this process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from command_line import commands_of
from paths import FIXTURES, ROOT

from llmfoundry_gauntlet.cli import PURPOSES, app
from llmfoundry_gauntlet.config.resources import PACKAGE, shipped
from llmfoundry_gauntlet.config.run import DEVICES, PRECISIONS
from llmfoundry_gauntlet.config.settings import CHOICES

TASKS, GAUNTLET = 'yamls/tasks/gauntlet_v0.1.yaml', 'yamls/gauntlets/eval_gauntlet_v0.1.yaml'
DATA = ROOT / 'eval_data'
ON_CPU = ('--model', FIXTURES / 'models' / 'rotary_bos', '--device', 'cpu')

ROOT_COMMAND = typer.main.get_command(app)

Gauntlet = Callable[..., tuple[int, str, str]]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_gauntlet_without_arguments_shows_how_to_get_started(gauntlet: Gauntlet):
    status, out, _ = gauntlet()

    assert status == 0
    commands = [line.split()[1] for line in out.splitlines() if line.startswith('  gauntlet ')]
    assert commands == ['ls', 'explain', 'data', 'run', 'report']


@pytest.mark.parametrize('words', [[], ['ls'], ['explain'], ['data'], ['run'], ['report']], ids=' '.join)
def test_commands_to_get_started_have_help(gauntlet: Gauntlet, words: list[str]):
    assert gauntlet(*words, '--help')[0] == 0


# Help

COMMANDS = {  # by their name, those of a group included
    f'{group} {name}'.strip(): command
    for group, commands in (('', ROOT_COMMAND), ('data', ROOT_COMMAND.commands['data']))
    for name, command in commands.commands.items()
    if not hasattr(command, 'commands')
}
EXAMPLES = [(name, words) for name, command in COMMANDS.items() for words in commands_of(command.examples)]


@pytest.mark.parametrize(('name', 'words'), EXAMPLES, ids=[' '.join(words)[:60] for _, words in EXAMPLES])
def test_an_example_is_a_command_that_can_be_parsed(name: str, words: list[str]):
    """Mutation: an option that was renamed. Files of the package that it names exist."""
    launched = ['torchrun', '--nproc-per-node', 'N', '-m', 'llmfoundry_gauntlet']
    rest = words[len(launched) :] if words[0] == 'torchrun' else words[1:]
    command = COMMANDS[name]

    assert rest[: len(name.split())] == name.split()
    command.make_context(name, rest[len(name.split()) :])
    assert [word for word in rest if word.startswith('yamls/') and not (ROOT / word).is_file()] == []


@pytest.mark.parametrize('name', COMMANDS)
def test_help_shows_examples_that_can_be_copied(gauntlet: Gauntlet, name: str):
    """Mutation: examples in the help text, which is folded to the width of the terminal."""
    status, out, _ = gauntlet(*name.split(), '--help')

    assert status == 0
    assert [words for of_command, words in EXAMPLES if of_command == name]
    assert COMMANDS[name].examples in out


@pytest.mark.parametrize('name', COMMANDS)
def test_options_have_a_heading_and_say_what_they_take(name: str):
    options = [option for option in COMMANDS[name].params if option.param_type_name == 'option']

    assert [option.name for option in options if not option.help] == []
    assert [option.name for option in options if not option.is_flag and not option.metavar] == []
    if len(options) > 6:
        assert [option.name for option in options if option.rich_help_panel is None] == []


def test_headings_of_run_are_its_purposes(gauntlet: Gauntlet):
    out = gauntlet('run', '--help')[1]

    headings = [line.strip('╭─╮ ') for line in out.splitlines() if line.startswith('╭')]
    assert headings[:3] == ['What to evaluate', 'Tasks', 'Subset and budget']
    assert {'Model', 'Output', 'Resume'} < {*headings}
    assert len(headings) == len({*headings})


def test_words_of_an_option_are_those_that_are_allowed():
    """Those in the place of a value; what they mean is in the help."""
    for option in COMMANDS['run'].params:
        if option.name in CHOICES:
            assert set(option.metavar.split('|')) == {*CHOICES[option.name]}, option.name
        elif option.name in ('device', 'precision'):
            allowed = {'device': DEVICES, 'precision': PRECISIONS}[option.name]
            assert {*option.metavar.split('|')} <= {*allowed}


@pytest.mark.parametrize('words', ['', 'data', *COMMANDS])
def test_help_shows_no_type_of_options_that_take_no_value(gauntlet: Gauntlet, words: str):
    """Mutation: the types of the flags before a command, which typer adds when it has made the group."""
    out = gauntlet(*words.split(), '--help')[1]

    assert '--help' in out
    assert '<bool>' not in out
    assert 'BOOLEAN' not in out


@pytest.mark.parametrize('words', [[], ['--help']], ids=['alone', 'help'])
def test_all_commands_are_listed_by_purpose(gauntlet: Gauntlet, words: list[str]):
    out = gauntlet(*words)[1]

    for purpose, names in PURPOSES.items():
        assert purpose in out
        assert [name for name in names if name not in out[out.index(purpose) :]] == []
    registered = {name for names in PURPOSES.values() for name in names} | {'data'}
    assert registered == {*ROOT_COMMAND.commands}


def test_shell_completion_works():
    environment = {**os.environ, '_GAUNTLET_COMPLETE': 'complete_bash', 'COMP_WORDS': 'gauntlet va', 'COMP_CWORD': '1'}
    done = subprocess.run([Path(sys.executable).with_name('gauntlet')], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ['validate']


# Files of the package.


def test_files_missing_from_the_working_directory_are_the_packages(elsewhere: Path):
    assert shipped(TASKS) == PACKAGE / TASKS
    assert shipped(TASKS).is_file()
    (elsewhere / TASKS).parent.mkdir(parents=True)
    assert shipped(TASKS) == PACKAGE / TASKS

    (elsewhere / TASKS).write_text('own')

    assert shipped(TASKS) == Path(TASKS)


@pytest.mark.parametrize(
    'name',
    [
        'yamls/none.yaml',
        'other/yamls/tasks',
        'eval_data_of_mine',
        'cli/run.py',
        '',
        '/yamls',
        '.',
    ],
)
def test_other_files_are_not_the_packages(elsewhere: Path, name: str):
    assert shipped(name) == Path(name)


def test_validate_checks_the_packages_files_in_any_folder(elsewhere: Path, gauntlet: Gauntlet):
    sources = ('--tasks', TASKS, '--gauntlet', GAUNTLET, '--score', 'yamls/score/mmlu_pro.yaml')

    status, out, err = gauntlet('validate', *sources)

    assert status == 0, err
    for words in ('57 tasks', '7 categories', 'rows of 58 tasks', 'no errors'):
        assert words in out


@pytest.mark.parametrize('words', [('--tasks', TASKS, '--no-data'), ('--gauntlet', GAUNTLET)])
def test_validate_checks_a_single_file_of_the_package_in_any_folder(elsewhere: Path, gauntlet: Gauntlet, words):
    assert gauntlet('validate', *words)[0] == 0


def test_export_works_in_any_folder(elsewhere: Path, gauntlet: Gauntlet):
    assert gauntlet('export', '--tasks', TASKS, '--subset-items', 2, '--out', 'requests.jsonl')[0] == 0

    assert (elsewhere / 'requests.jsonl').is_file()


def test_the_packages_data_do_not_replace_a_data_root_that_is_given(elsewhere: Path, gauntlet: Gauntlet):
    status, _, err = gauntlet('validate', '--tasks', TASKS, '--data-root', 'data')

    assert status == 1
    assert 'below data:' in err
    assert 'eval_data' not in err


# validate and ls


def test_validate_lists_all_errors_of_all_files_without_traceback(elsewhere: Path, gauntlet: Gauntlet):
    Path('typo.yaml').write_text('icl_tasks: [{label: a, num_fewshot: [0], icl_task_type: schema, lable: x}]')

    status, _, err = gauntlet('validate', '--tasks', 'typo.yaml', '--gauntlet', 'none.yaml')

    assert status == 1
    assert err.splitlines() == [
        "error: typo.yaml:1 (a): icl_tasks[0].lable: unknown key 'lable', did you mean 'label'?",
        "error: typo.yaml:1 (a): icl_tasks[0]: the key 'dataset_uri' is missing",
        'error: none.yaml: there is no such file',
    ]


def test_validate_lists_all_errors_of_a_data_file(elsewhere: Path, gauntlet: Gauntlet):
    Path('rows.jsonl').write_text('{"query": "a", "choices": ["a", "b"], "gold": 4}\n{\n')
    task = '{label: a, dataset_uri: rows.jsonl, num_fewshot: [0], icl_task_type: multiple_choice}'
    Path('rows.yaml').write_text(f'icl_tasks: [{task}]')

    status, _, err = gauntlet('validate', '--tasks', 'rows.yaml', '--data-root', '.')

    assert status == 1
    assert 'error: rows.jsonl:1: gold is 4 but there are 2 choices' in err
    assert 'error: rows.jsonl:2: malformed JSON' in err


def listed(gauntlet: Gauntlet, *words: Any) -> list[dict[str, Any]]:
    """Return the tasks that `gauntlet ls` lists."""
    return json.loads(gauntlet('ls', *words, '--json')[1])


def columns(tasks: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(task[name] for name in names) for task in tasks]


def test_all_tasks_are_listed_by_category(gauntlet: Gauntlet):
    categories = yaml.safe_load((ROOT / GAUNTLET).read_text())['eval_gauntlet']['categories']
    expected = []
    for category in categories:
        for benchmark in category['benchmarks']:
            shots, chance = benchmark['num_fewshot'], benchmark['random_baseline']
            expected.append((category['name'], benchmark['name'], shots, chance))

    tasks = listed(gauntlet, '--data-root', DATA)

    assert columns(tasks, 'category', 'task', 'num_shots', 'chance') == expected


def test_tasks_are_listed_with_their_rows_and_where_they_are_from(gauntlet: Gauntlet):
    for task in listed(gauntlet, '--data-root', DATA):
        lines = (DATA / task['dataset_uri']).read_text('utf-8').split('\n')
        num_rows = sum(1 for line in lines if line.strip())
        assert (task['rows'], task['data']) == (num_rows, 'sample')


def test_named_categories_and_tasks_are_listed_as_a_table(gauntlet: Gauntlet):
    status, out, _ = gauntlet('ls', 'safety', 'copa', '--data-root', DATA)

    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ['copa', '0', 'multiple_choice', '0.50', '16', 'sample'] in rows
    assert '5 tasks, 80 rows' in out.splitlines()


def test_missing_and_unknown_data_files_are_listed(gauntlet: Gauntlet, write_jsonl, tmp_path: Path):
    write_jsonl('data/commonsense_reasoning/copa.jsonl', ['{}', '', '{}'])

    tasks = listed(gauntlet, 'copa', 'piqa', '--data-root', tmp_path / 'data')

    assert columns(tasks, 'rows', 'data') == [(2, 'unofficial'), (None, 'not there')]


def test_tasks_of_the_user_are_listed(gauntlet: Gauntlet, write_jsonl, tmp_path: Path):
    write_jsonl('x.jsonl', ['{}'])
    local = {'label': 'local', 'dataset_uri': 'x.jsonl', 'num_fewshot': [0, 5], 'icl_task_type': 'language_modeling'}
    of_hub = {**local, 'label': 'hub', 'dataset_uri': 'hf://org/name', 'num_fewshot': [0]}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [local, of_hub]}))

    tasks = listed(gauntlet, '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path)

    assert columns(tasks, 'category', 'task', 'num_shots', 'rows', 'data') == [
        ('in no category', 'local', 0, 1, 'own'),
        ('in no category', 'local', 5, 1, 'own'),
        ('in no category', 'hub', 0, None, 'elsewhere'),
    ]


def test_datasets_of_score_are_listed(gauntlet: Gauntlet):
    tasks = listed(gauntlet, '--score', ROOT / 'yamls/score/base_models.yaml', '--data-root', 'eval_data')

    assert columns(tasks, 'task', 'rows', 'data') == [
        ('score_mmlu_pro', 42, 'sample'),
        ('score_agieval', 84, 'sample'),
    ]


# run


@pytest.fixture
def run_of_even(gauntlet: Gauntlet, write_jsonl, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that evaluates a task without and with 3 shots, and its variants, and returns the folder."""
    write_jsonl('rows.jsonl', [{'query': f'Is {n} even?', 'choices': ['yes', 'no'], 'gold': n % 2} for n in range(6)])
    task = {'label': 'even', 'dataset_uri': 'rows.jsonl', 'icl_task_type': 'multiple_choice', 'num_fewshot': [0, 3]}
    score = {'dataset': 'even', 'perturbations': ['option_order']}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task]}))
    (tmp_path / 'score.yaml').write_text(json.dumps({'score': score}))

    def run(name: str, *options: str) -> Path:
        words = ['--tasks', tmp_path / 'tasks.yaml', '--score', tmp_path / 'score.yaml', '--data-root', tmp_path]
        words += ['--max-seq-len', '24', '--out', tmp_path / name]
        status, out, _ = gauntlet('run', *ON_CPU, *words, *options)
        assert status == 0
        record = json.loads((tmp_path / name / 'results.json').read_text())
        accuracy = record['tasks']['even/0-shot']['metrics']['InContextLearningMultipleChoiceAccuracy']['value']
        assert 'even/0-shot' in out and f'{accuracy:.3f}' in out
        return tmp_path / name

    return run


def samples_in(folder: Path, task: str) -> list[dict[str, Any]]:
    """Return the lines of a task's file of samples."""
    lines = (folder / 'samples' / f'{task}.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_samples_hold_prompts_and_choices_if_asked(run_of_even: Callable[..., Path]):
    without, with_prompts = run_of_even('without'), run_of_even('with', '--log-prompts')

    for task in ('even_0-shot', 'even_3-shot', 'score_even_0-shot'):
        samples = samples_in(with_prompts, task)
        for sample in samples:
            assert hashlib.sha256(sample.pop('prompt').encode()).hexdigest() == sample['prompt_sha256']
            sample.pop('choices', None)  # which a generation has none of
        assert samples == samples_in(without, task)


def test_prompts_in_samples_are_those_that_were_asked(run_of_even: Callable[..., Path]):
    """Of three shots a prompt has as many as fit into 24 tokens."""
    folder = run_of_even('with', '--log-prompts')

    without_shots = samples_in(folder, 'even_0-shot')
    assert [sample['prompt'] for sample in without_shots] == [f'Is {n} even?' for n in range(6)]
    assert without_shots[0]['choices'] == [' yes', ' no']

    with_shots = samples_in(folder, 'even_3-shot')
    num_recorded = [sample['num_shots'] for sample in with_shots]
    assert [sample['prompt'].count('?') - 1 for sample in with_shots] == num_recorded
    assert 0 < max(num_recorded) < 3

    for sample in samples_in(folder, 'score_even_0-shot'):
        assert 'even?' in sample['prompt'] and 'A' in sample['prompt']


@pytest.fixture
def record_of(gauntlet: Gauntlet, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a part of the Gauntlet and returns the record."""

    def run(*words: str) -> dict[str, Any]:
        small = ('--max-seq-len', '64', '--subset-items', '2', '--out', tmp_path / 'out')
        assert gauntlet('run', *ON_CPU, '--data-root', DATA, *small, *words)[0] == 0
        return json.loads((tmp_path / 'out' / 'results.json').read_text())

    return run


def test_without_tasks_run_evaluates_the_named_part_of_the_gauntlet(record_of: Callable[..., dict[str, Any]]):
    """commonsense_reasoning is not whole, so that its category and the averages are left out."""
    record = record_of('--only', 'copa, world_knowledge', '--missing', 'skip')

    assert len(record['tasks']) == 8
    assert {'copa/0-shot', 'mmlu/10-shot'} < record['tasks'].keys()
    assert list(record['composites']['categories']) == ['world_knowledge']
    assert record['composites']['averages'] == {}


def test_tasks_of_the_gauntlet_run_with_another_number_of_shots(record_of: Callable[..., dict[str, Any]]):
    record = record_of('--only', 'copa/0-shot', '--num-fewshot', '3')

    assert list(record['tasks']) == ['copa/3-shot']
    assert record['composites'] is None


LONG, LONG_PATH = 'x' * 300, 'x' * 5000


@pytest.mark.parametrize(
    'words',
    [
        # Evaluation.
        ('validate', '--tasks', LONG),
        ('validate', '--tasks', LONG_PATH),
        ('validate', '--gauntlet', LONG),
        ('validate', '--gauntlet', LONG_PATH),
        ('validate', '--score', LONG),
        ('validate', '--score', LONG_PATH),
        ('validate', '--tasks', TASKS, '--data-root', LONG_PATH),
        ('run', '--model', LONG_PATH, '--out', 'out'),
        ('run', *ON_CPU, '--out', f'runs/{LONG}'),
        ('run', *ON_CPU, '--tasks', LONG_PATH, '--out', 'out'),
        ('run', '--outputs', LONG_PATH, '--out', 'out', '--only', 'copa'),
        ('run', '--outputs', 'answers.jsonl', '--out', LONG),
        ('run', '--from', LONG_PATH, '--out', 'out'),
        ('eval', LONG_PATH),
        ('watch', LONG_PATH, '--tasks', TASKS, '--out', 'out'),
        ('export', '--out', LONG_PATH),
        # Results.
        ('report', LONG_PATH),
        ('show', LONG_PATH),
        ('compare', LONG_PATH, LONG_PATH),
        # Data.
        ('explain', 'copa', '--model', LONG_PATH),
        ('data', 'fetch', '--to', LONG_PATH),
        ('data', 'fetch', '--from', LONG_PATH, '--to', 'data'),
    ],
    ids=lambda words: ' '.join(word[:20] for word in map(str, words)),
)
def test_a_name_that_no_file_can_have_is_the_users_mistake(elsewhere: Path, gauntlet: Gauntlet, words: tuple[Any, ...]):
    status, _, err = gauntlet(*words)

    assert status in (1, 2)
    assert err.startswith('error: ')
    assert 'internal error' not in err
    assert {path.name for path in elsewhere.iterdir()} == set()


class Unforeseen(Exception):
    """An error no command handles."""


@pytest.fixture
def internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Unforeseen('first line\nsecond line')

    monkeypatch.setattr('llmfoundry_gauntlet.evaluation.suite.read_suite', fail)


@pytest.mark.usefixtures('internal_error')
def test_an_internal_error_is_one_line_and_status_3(gauntlet: Gauntlet):
    status, _, err = gauntlet('validate', '--tasks', TASKS)

    (line,) = err.splitlines()
    assert status == 3
    assert line.startswith('error: ')
    assert 'Unforeseen: first line second line' in line
    assert '--traceback' in line


@pytest.mark.usefixtures('internal_error')
def test_an_internal_error_is_raised_if_a_traceback_is_asked_for(gauntlet: Gauntlet):
    with pytest.raises(Unforeseen):
        gauntlet('--traceback', 'validate', '--tasks', TASKS)


def test_an_exit_keeps_its_status(gauntlet: Gauntlet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('llmfoundry_gauntlet.evaluation.suite.read_suite', lambda *_, **__: sys.exit(7))
    assert gauntlet('validate', '--tasks', TASKS)[0] == 7
