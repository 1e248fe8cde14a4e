"""Test that options without effect are refused by name, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from paths import FIXTURES, ROOT

from llmfoundry_gauntlet.cli import app

MODEL = FIXTURES / 'models' / 'rotary_bos'
TASKS = ROOT / 'yamls/tasks/gauntlet_v0.1.yaml'
GAUNTLET = ROOT / 'yamls/gauntlets/eval_gauntlet_v0.1.yaml'
VALUES = {  # of the options of `gauntlet run`
    '--out': 'out',
    '--tasks': TASKS,
    '--score': ROOT / 'yamls/score/math.yaml',
    '--model': MODEL,
    '--outputs': 'answers.jsonl',
    '--from': 'earlier',
    '--gauntlet': GAUNTLET,
    '--data-root': 'data',
    '--only': 'copa',
    '--shots': 2,
    '--missing': 'skip',
    '--tokenizer': MODEL,
    '--model-config': MODEL,
    '--revision': 'main',
    '--adapter': 'adapter',
    '--dtype': 'bfloat16',
    '--trust-remote-code': None,
    '--apply-chat-template': None,
    '--max-seq-len': 64,
    '--tokens-per-batch': 'auto',  # given, although it is the default
    '--device': 'cpu',
    '--fsdp': None,
    '--precision': 'fp32',
    '--semantics': 'corrected',
    '--truncation': 'drop_shots',
    '--fewshot': 'reference',
    '--sandbox': 'auto',
    '--limit': 3,
    '--time-budget': '9s',
    '--precision-target': '5%',
    '--logger': 'wandb',
    '--log': 'accuracy',
    '--log-prompts': None,
    '--allow-missing': None,
    '--overwrite': None,
    '--resume': None,
    '--repair-journal': None,
    '--dry-run': None,
    '--format': 'csv',
}
SOURCES = {'--model', '--outputs', '--from'}
USED = {  # by each way of running
    '--outputs': {
        *('--out', '--tasks', '--score', '--gauntlet', '--data-root', '--semantics', '--fewshot', '--sandbox'),
        *('--limit', '--precision-target', '--only', '--shots', '--missing', '--log-prompts', '--allow-missing'),
        *('--overwrite', '--format'),
    },
    '--from': {'--out', '--gauntlet', '--allow-missing', '--overwrite', '--format'},
    '--model': VALUES.keys() - {'--allow-missing', '--repair-journal'},
    '--dry-run': VALUES.keys()
    - {'--allow-missing', '--repair-journal', '--resume', '--time-budget', '--logger', '--log'},
}


def words_of(options: list[str]) -> list[str]:
    return [str(word) for option in options for word in (option, VALUES[option]) if word is not None]


def refused(err: str) -> set[str]:
    """Return the options named in the errors, one per line."""
    return {line.removeprefix('error: ').partition(':')[0] for line in err.splitlines()}


def test_the_table_has_every_option_of_run():
    command = typer.main.get_command(app).commands['run']
    assert {parameter.opts[0] for parameter in command.params} == {*VALUES, '--help'} - {'--help'}


@pytest.mark.parametrize('way', ['--outputs', '--from', '--model'])
def test_all_unused_options_of_run_are_refused_at_once(gauntlet, tmp_path, monkeypatch, way):
    monkeypatch.chdir(tmp_path)
    options = [option for option in VALUES if option == way or option not in SOURCES]
    if way == '--model':
        options.remove('--resume')  # which --repair-journal goes with
        options.remove('--dry-run')
    status, out, err = gauntlet('run', *words_of(options))
    assert (status, out) == (2, '')
    assert refused(err) == set(options) - USED[way] - {way}
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_options_of_a_real_run(gauntlet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [option for option in VALUES if option not in ('--outputs', '--from', '--allow-missing')]
    status, _, err = gauntlet('run', *words_of(options))
    assert status == 2
    assert refused(err) == VALUES.keys() - USED['--dry-run'] - {'--allow-missing'}


@pytest.mark.parametrize(
    ('words', 'named'),
    [
        (['explain', 'boolq', '--max-seq-len', '64', '--all-tokens'], {'--max-seq-len', '--all-tokens'}),
        (['explain', 'boolq', '--sandbox', 'none', '--model', MODEL], {'--sandbox'}),
        (['validate', '--tasks', TASKS, '--no-data', '--data-root', 'data'], {'--data-root'}),
        (['validate', '--gauntlet', GAUNTLET, '--data-root', 'data'], {'--data-root'}),
        (['report', 'run', '--no-prompts', '--data-root', 'data'], {'--data-root'}),
        (['data', 'ls', '--urls', '--json', '--data-root', 'data'], {'--json', '--data-root'}),
        (['data', 'fetch', '--to', 'd', '--offline', '--retries', 1, '--overwrite'], {'--retries', '--overwrite'}),
        (['data', 'fetch', '--to', 'd', '--offline', '--retries', 2], {'--retries'}),
        (
            ['data', 'check', '--solutions', '--score', 's.yaml', '--against', 'a'],
            {'--score', '--against'},
        ),
        (['data', 'check', '--sandbox', 'auto'], {'--sandbox'}),
        (
            ['watch', 'c', '--train-yaml', 't.yaml', '--semantics', 'corrected', '--limit', 3, '--only', 'copa'],
            {'--semantics', '--limit', '--only'},
        ),
    ],
)
def test_other_commands_refuse_options_without_effect(
    gauntlet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], named: set[str]
):
    monkeypatch.chdir(tmp_path)
    status, out, err = gauntlet(*words)
    assert (status, out) == (2, '')
    assert refused(err) == named
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ('words', 'named'),
    [
        (
            ['run'],
            {'give one of --model, --outputs and --from (a model, generations, an earlier run)', '--out'},
        ),
        (['run', '--out', 'o', '--model', MODEL, '--limit', '0'], {'--limit'}),
        (['run', '--out', 'o', '--model', MODEL, '--shots', '-1'], {'--shots'}),
        (['run', '--out', 'o', '--model', MODEL, '--missing', 'never'], {'--missing'}),
        (['run', '--out', 'o', '--outputs', 'a', '--semantics', 'upstream'], {'--semantics'}),
        (['run', '--out', 'o', '--model', MODEL, '--device', 'tpu'], {'--device'}),
        (['run', '--out', 'o', '--model', MODEL, '--max-seq-len', '99999'], {'--max-seq-len'}),
        (['export', '--out', 'o', '--limit', '0'], {'--limit'}),
        (['explain', 'copa', '--fewshot', 'none'], {'--fewshot'}),
        (['run', '--allow-missing', '--model', MODEL], {'--allow-missing', '--out'}),
        (['run', '--out', 'o', '--model', MODEL, '--logger', 'wandb', '--log', 'losses'], {'--log'}),
        (['watch', 'c', '--tasks', TASKS, '--out', 'o', '--limit', '0'], {'--limit'}),
        (['watch', 'c', '--tasks', TASKS, '--out', 'o', '--fsdp', '--device', 'cpu'], {'--fsdp'}),
        (['watch', 'c', '--tasks', TASKS, '--out', 'o', '--shots', '-1'], {'--shots'}),
        (['watch', 'c', '--tasks', TASKS, '--out', 'o', '--missing', 'never'], {'--missing'}),
        (['watch', 'c', '--tasks', TASKS, '--out', 'o', '--only', 'copq'], {'copq'}),
        (['data', 'check', '--solutions', '--sandbox', 'bad', '--data-root', ROOT / 'eval_data'], {'--sandbox'}),
        (['watch', 'c'], {'nothing to evaluate', '--out'}),
        (['data', 'import'], {'FOLDER', '--to'}),
        (['data', 'fetch', 'squad'], {'--to'}),
        (['export'], {'--out'}),
        (['report'], {'RUNS'}),
    ],
)
def test_messages_name_options_and_not_settings(gauntlet, tmp_path, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    status, out, err = gauntlet(*words)
    assert (status, out, refused(err)) == (2, '', named)
