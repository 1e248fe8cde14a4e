"""Wrong options are refused by name, all at once, before anything is written."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from paths import FIXTURES, ROOT

from llmfoundry_gauntlet.cli import app

RUN = {one.opts[0]: one for one in typer.main.get_command(app).commands['run'].params}
ALWAYS = RUN.keys() - {'--model', '--outputs', '--from'}
OF_REQUESTS = {
    *('--out', '--tasks', '--score', '--gauntlet', '--data-root', '--semantics', '--fewshot', '--sandbox', '--limit'),
    *('--precision-target', '--only', '--shots', '--missing', '--log-prompts', '--allow-missing', '--overwrite'),
    *('--outputs', '--format', '--reasoning-markers'),
}
OF_RECORDS = {'--out', '--gauntlet', '--allow-missing', '--overwrite', '--from', '--format'}
OF_ANSWERS = {'--allow-missing', '--repair-journal'}  # the second needs --resume
OF_REAL_RUNS = {'--repair-journal', '--resume', '--time-budget', '--logger', '--log'}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    folder = tmp_path / 'elsewhere'
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def words_of(names: Iterable[str]) -> Iterator[str]:
    """Yield the options with their default value, which counts as given, or any."""
    for name in names:
        yield name
        if not RUN[name].is_flag:
            yield str(getattr(RUN[name].default, 'value', RUN[name].default) or '2')


@pytest.mark.parametrize(
    ('given', 'refused', 'because_of'),
    [
        (ALWAYS | {'--outputs'}, ALWAYS - OF_REQUESTS, {'--outputs'}),
        (ALWAYS | {'--from'}, ALWAYS - OF_RECORDS, {'--from'}),
        (
            ALWAYS - {'--resume', '--dry-run'} | {'--model'},
            {'--allow-missing', '--repair-journal'},
            {'--model', '--resume'},
        ),
        (ALWAYS - {'--allow-missing'} | {'--model'}, OF_REAL_RUNS, {'--dry-run'}),
    ],
    ids=['outputs', 'from', 'model', 'dry run'],
)
def test_all_unused_options_of_run_are_refused_at_once(
    gauntlet, elsewhere: Path, given: set[str], refused: set[str], because_of: set[str]
):
    """Each line names the option and what it has no effect with, or without; other errors may follow."""
    status, out, err = gauntlet('run', *words_of(given))
    assert (status, out) == (2, '')
    lines = [
        line.removeprefix('error: ').partition(':') for line in err.splitlines() if line.endswith('; leave it out')
    ]
    assert {name for name, *_ in lines} == refused
    assert all(because_of & {*said.replace(';', '').split()} for *_, said in lines)
    assert list(elsewhere.iterdir()) == []


IS_FILE = 'there is no such file or folder'
WRONG = [  # a command, and a fact of each line of its message
    ('explain boolq --max-seq-len 64 --all-tokens', '--max-seq-len: ', '--all-tokens: '),
    ('explain boolq --sandbox none --model MODEL', '--sandbox: '),
    ('explain boolq --max-seq-len 1 --model x', '--max-seq-len: is 1; allowed: 2 or more'),
    ('explain boolq --sandbox docker --answer A', "--sandbox: is 'docker'; allowed: auto, rlimits, none"),
    ('explain boolq --shots 16', '--shots is 16; allowed: 0 to 15, the number of other rows'),
    ('explain boolq --shots -1', '--shots is -1; allowed: 0 or more'),
    ('explain boolq --row 99', 'boolq/10-shot: there is no row 99; there are rows 0 to 15'),
    ('explain boolq --variant prompt:1', 'boolq/10-shot has no variants; leave --variant out'),
    ('explain boolq --file boolq', 'boolq/10-shot has one data file; leave --file out'),
    ('explain bolq', "bolq: no such task, did you mean 'boolq'?"),
    ('explain copa --fewshot none', '--fewshot: '),
    ('explain score_math --score SCORE/math.yaml', 'is in several files; name one with --file'),
    ('explain score_math --score SCORE/math.yaml --file algebra --shots 2', 'the type score_math have no shots'),
    ('explain score_mmlu_pro --score SCORE/mmlu_pro.yaml --shots 2', 'the type score_choices have no shots'),
    ('explain score_mmlu_pro --score SCORE/mmlu_pro.yaml --variant option_order:Z', 'allowed: option_order:A'),
    ('validate --tasks TASKS --no-data --data-root data', '--data-root: '),
    ('validate --gauntlet GAUNTLET --data-root data', '--data-root: '),
    ('eval nowhere.yaml', 'nowhere.yaml: there is no such file'),
    ('train nowhere.yaml', 'nowhere.yaml: there is no such file'),
    ('validate', 'nothing to check'),
    ('ls saftey', "saftey: no such task or category, did you mean 'safety'?"),
    ('export', '--out'),
    ('export --out o --limit 0', '--limit: '),
    ('report', 'RUNS'),
    ('report run --no-prompts --data-root data', '--data-root: '),
    ('data ls --urls --json --data-root data', '--json: ', '--data-root: '),
    ('data fetch squad', '--to'),
    ('data fetch --to d --offline --retries 1 --overwrite', '--retries: ', '--overwrite: '),
    ('data import', 'FOLDER', '--to'),
    ('data check --solutions --score s.yaml --against a', '--score: ', '--against: '),
    ('data check --sandbox auto', '--sandbox: '),
    ('data check --solutions --sandbox bad --data-root DATA', '--sandbox: '),
    ('watch c', 'nothing to evaluate', '--out'),
    ('watch c --train-yaml t.yaml --limit 3 --semantics corrected', '--semantics: ', '--limit: '),
    ('watch c --tasks TASKS --out o --limit 0', '--limit: '),
    ('watch c --tasks TASKS --out o --shots -1', '--shots: '),
    ('watch c --tasks TASKS --out o --missing never', '--missing: '),
    ('watch c --tasks TASKS --out o --only copq', 'copq'),
    ('run', 'give one of --model, --outputs and --from (a model, generations, an earlier run)', '--out'),
    ('run --allow-missing --model MODEL', '--allow-missing: ', '--out'),
    ('run --out o --outputs a --semantics upstream', '--semantics: '),
    ('run --out s3://bucket/run --model MODEL', 'is not on this machine; allowed: a local folder'),
    ('run --out FULL --model MODEL', 'is not empty'),
    ('run --out o --model /nowhere/model', f'/nowhere/model: {IS_FILE}'),
    ('run --out o --model .', 'has no config.json'),
    ('run --out o --model FULL/damaged.pt', 'is not a Composer checkpoint'),
    ('run --out o --model MODEL --tokenizer /nowhere', f'/nowhere: {IS_FILE}'),
    ('run --out o --model MODEL --only copq,saftey,piqa', 'copq: no such', 'saftey: no such'),
    ('run --out o --model MODEL --data-root /nowhere', '57 of 57 data files are missing below /nowhere: '),
    ('run --out o --model MODEL --limit 0', '--limit: '),
    ('run --out o --model MODEL --shots -1', '--shots: '),
    ('run --out o --model MODEL --missing never', '--missing: '),
    ('run --out o --model MODEL --max-seq-len 99999', '--max-seq-len: is 99999, but the model (llama)'),
    ('run --out o --model MODEL --tokens-per-batch many', "--tokens-per-batch: is 'many'; allowed: auto"),
    ('run --out o --model MODEL --semantics upstream', "--semantics: is 'upstream'; allowed: corrected, reference"),
    ('run --out o --model MODEL --precision fp7', "--precision: is 'fp7'; allowed:"),
    ('run --out o --model MODEL --precision amp_bf16 --device cpu', 'on a CPU there is only fp32'),
    ('run --out o --model MODEL --device tpu', "--device: is 'tpu', did you mean 'gpu'?"),
    ('run --out o --model MODEL --logger wandb --log losses', '--log: '),
]
if not torch.cuda.is_available():
    WRONG.append(('run --out o --model MODEL --device gpu', '--device: is gpu, but torch finds no usable GPU'))


@pytest.mark.parametrize(('command', 'facts'), [(command, facts) for command, *facts in WRONG])
def test_a_user_error_is_a_line_that_names_the_option_and_what_is_allowed(
    gauntlet, elsewhere: Path, tmp_path: Path, command: str, facts: list[str]
):
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'damaged.pt').write_bytes(b'not a checkpoint')
    names = {
        'MODEL': FIXTURES / 'models' / 'rotary_bos',
        'TASKS': ROOT / 'yamls/tasks/gauntlet_v0.1.yaml',
        'GAUNTLET': ROOT / 'yamls/gauntlets/eval_gauntlet_v0.1.yaml',
        'SCORE': ROOT / 'yamls/score',
        'DATA': ROOT / 'eval_data',
        'FULL': tmp_path / 'full',
    }
    for name, path in names.items():
        command = command.replace(name, str(path))
    status, out, err = gauntlet(*shlex.split(command))
    assert (status, out, len(err.splitlines())) == (2, '', len(facts)), err
    assert all(line.startswith('error: ') for line in err.splitlines())
    assert [fact for fact in facts if fact not in err] == [], err
    assert list(elsewhere.iterdir()) == []
