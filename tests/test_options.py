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
from llmfoundry_gauntlet.config.run import OF_RUN
from llmfoundry_gauntlet.config.run import SETTINGS as OF_EVALUATION

RUN = {option.opts[0]: option for option in typer.main.get_command(app).commands['run'].params}
EVERYTHING = RUN.keys() - {'--model', '--outputs', '--from'}  # but what is evaluated
OF_OUTPUTS = {  # with generations from elsewhere
    '--allow-missing',
    '--data-root',
    '--fewshot',
    '--format',
    '--gauntlet',
    '--log-prompts',
    '--missing',
    '--num-fewshot',
    '--only',
    '--out',
    '--overwrite',
    '--precision-target',
    '--reasoning-markers',
    '--sandbox',
    '--score',
    '--semantics',
    '--subset-items',
    '--tasks',
}
OF_RECORDS = {'--allow-missing', '--format', '--gauntlet', '--out', '--overwrite'}  # of an earlier run
SETTINGS = {*OF_RUN, *OF_EVALUATION}
NOT_OF_DRY_RUN = {'--log', '--loggers', '--repair-journal', '--resume'}


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
        pytest.param(EVERYTHING | {'--outputs'}, EVERYTHING - OF_OUTPUTS, {'--outputs'}, id='outputs'),
        pytest.param(EVERYTHING | {'--from'}, EVERYTHING - OF_RECORDS, {'--from'}, id='from'),
        pytest.param(
            EVERYTHING - {'--resume', '--dry-run'} | {'--model'},
            {'--allow-missing', '--repair-journal'},  # the second needs --resume
            {'--model', '--resume'},
            id='model',
        ),
        pytest.param(EVERYTHING - {'--allow-missing'} | {'--model'}, NOT_OF_DRY_RUN, {'--dry-run'}, id='dry run'),
    ],
)
def test_all_unused_options_of_run_are_refused_at_once(
    gauntlet, elsewhere: Path, given: set[str], refused: set[str], because_of: set[str]
):
    """Each line names the option and what it has no effect with, or without; other errors may follow."""
    status, out, err = gauntlet('run', *words_of(given))

    assert (status, out) == (2, '')
    lines = [line.removeprefix('error: ') for line in err.splitlines() if line.endswith('; leave it out')]
    reason_of_option = dict(line.split(':', 1) for line in lines)
    assert reason_of_option.keys() == refused
    for reason in reason_of_option.values():
        assert because_of & {*reason.replace(';', '').split()}
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize('command', ['run', 'export', 'watch', 'explain'])
def test_an_option_of_a_setting_has_the_name_of_the_setting(command: str):
    """Mutation: `--limit` alone, so that the message about a value names a word that the user did not type."""
    options = [option for option in typer.main.get_command(app).commands[command].params if option.name in SETTINGS]

    assert options
    assert [option.opts[0] for option in options] == [f'--{option.name.replace("_", "-")}' for option in options]


IS_FILE = 'there is no such file or folder'
WRONG = [  # a command, and a fact of each line of its message
    # explain
    ('explain boolq --max-seq-len 64 --all-tokens', '--max-seq-len: ', '--all-tokens: '),
    ('explain boolq --sandbox none --model MODEL', '--sandbox: '),
    ('explain boolq --max-seq-len 1 --model x', 'gauntlet explain: max_seq_len: is 1; allowed: 2 or more'),
    ('explain boolq --sandbox docker --answer A', "sandbox: is 'docker'; allowed: auto, rlimits, none"),
    ('explain boolq --num-fewshot 16', 'num_fewshot is 16; allowed: 0 to 15, the number of other rows'),
    ('explain boolq --num-fewshot -1', 'num_fewshot is -1; allowed: 0 or more'),
    ('explain boolq --row 99', 'boolq/10-shot: there is no row 99; there are rows 0 to 15'),
    ('explain boolq --variant prompt:1', 'boolq/10-shot has no variants; leave --variant out'),
    ('explain boolq --file boolq', 'boolq/10-shot has one data file; leave --file out'),
    ('explain bolq', "bolq: no such task, did you mean 'boolq'?"),
    ('explain copa --fewshot none', 'gauntlet explain: fewshot: '),
    ('explain score_math --score SCORE/math.yaml', 'is in several files; name one with --file'),
    (
        'explain score_math --score SCORE/math.yaml --file algebra --num-fewshot 2',
        'num_fewshot is 2; allowed: 0, as tasks of the type score_math have no shots',
    ),
    (
        'explain score_mmlu_pro --score SCORE/mmlu_pro.yaml --num-fewshot 2',
        'num_fewshot is 2; allowed: 0, as tasks of the type score_choices have no shots',
    ),
    ('explain score_mmlu_pro --score SCORE/mmlu_pro.yaml --variant option_order:Z', 'allowed: option_order:A'),
    # Files and reports
    ('validate --tasks TASKS --no-data --data-root data', '--data-root: '),
    ('validate --gauntlet GAUNTLET --data-root data', '--data-root: '),
    ('eval nowhere.yaml', 'nowhere.yaml: there is no such file'),
    ('validate', 'nothing to check'),
    ('ls saftey', "saftey: no such task or category, did you mean 'safety'?"),
    ('export', '--out'),
    ('export --out o --subset-items 0', 'gauntlet export: subset_items: is 0; allowed: 1 or more'),
    ('report', 'FOLDER'),
    ('report run --no-prompts --data-root data', '--data-root: '),
    # data
    ('data ls --urls --json --data-root data', '--json: ', '--data-root: '),
    ('data fetch squad', '--to'),
    ('data fetch --to d --offline --retries 1 --overwrite', '--retries: ', '--overwrite: '),
    ('data fetch --from FOLDER', '--to'),
    ('data fetch --to d --from FOLDER --retries 1', '--retries: '),
    ('data fetch --to d --from FOLDER --offline', '--from: '),
    # watch
    ('watch c', 'nothing to evaluate', '--out'),
    ('watch c --train-yaml t.yaml --limit 3 --semantics corrected', '--semantics: ', '--subset-items: '),
    ('watch c --tasks TASKS --out o --subset-items 0', 'gauntlet watch: subset_items: '),
    ('watch c --tasks TASKS --out o --num-fewshot -1', 'gauntlet watch: num_fewshot: '),
    ('watch c --tasks TASKS --out o --missing never', 'gauntlet watch: missing: '),
    ('watch c --tasks TASKS --out o --only copq', 'copq'),
    # run: what is evaluated, and where
    ('run', 'give one of --model, --outputs and --from (a model, generations, an earlier run)', '--out'),
    ('run --allow-missing --model MODEL', '--allow-missing: ', '--out'),
    ('run --out o --outputs a --semantics upstream', 'gauntlet run: semantics: '),
    ('run --out s3://bucket/run --model MODEL', 'is not on this machine; allowed: a local folder'),
    ('run --out FULL --model MODEL', 'is not empty'),
    ('run --out o --model /nowhere/model', f'/nowhere/model: {IS_FILE}'),
    ('run --out o --model .', 'has no config.json'),
    ('run --out o --model FULL/damaged.pt', 'is not a Composer checkpoint'),
    ('run --out o --model MODEL --tokenizer /nowhere', f'/nowhere: {IS_FILE}'),
    ('run --out o --model MODEL --only copq,saftey,piqa', 'copq: no such', 'saftey: no such'),
    ('run --out o --model MODEL --data-root /nowhere', '57 of 57 data files are missing below /nowhere: '),
    # run: values
    ('run --out o --model MODEL --subset-items 0', 'gauntlet run: subset_items: is 0; allowed: 1 or more'),
    ('run --out o --model MODEL --limit 0', 'gauntlet run: subset_items: is 0; allowed: 1 or more'),
    ('run --out o --model MODEL --num-fewshot -1', 'gauntlet run: num_fewshot: is -1; allowed: 0 or more'),
    ('run --out o --model MODEL --missing never', 'gauntlet run: missing: '),
    ('run --out o --model MODEL --max-seq-len 99999', 'max_seq_len is 99999, but the model (llama)'),
    ('run --out o --model MODEL --tokens-per-batch many', "tokens_per_batch: is 'many'; allowed: auto"),
    ('run --out o --model MODEL --semantics upstream', "semantics: is 'upstream'; allowed: corrected, reference"),
    ('run --out o --model MODEL --precision fp7', "gauntlet run: precision: is 'fp7'; allowed:"),
    (
        'run --out o --model MODEL --precision amp_bf16 --device cpu',
        "precision is 'amp_bf16', but on a CPU there is only fp32",
    ),
    ('run --out o --model MODEL --device tpu', "gauntlet run: device: is 'tpu', did you mean 'gpu'?"),
    ('run --out o --model MODEL --loggers wandb --log losses', "log: is 'losses'; allowed: accuracy, "),
    ('run --out o --model MODEL --loggers wandb,wanb', "gauntlet run: loggers: unknown key 'wanb', did you mean"),
    # run: values in JSON
    ('run --out o --model MODEL --fsdp-config full', "fsdp_config: is 'full', which is not JSON"),
    ('run --out o --model MODEL --fsdp-config 3', 'fsdp_config: is 3; allowed: a mapping'),
    (
        'run --out o --model MODEL --chat-template-kwargs a --fsdp-config b',
        'chat_template_kwargs: is ',
        'fsdp_config: is ',
    ),
]
if not torch.cuda.is_available():
    WRONG.append(('run --out o --model MODEL --device gpu', 'device is gpu, but torch finds no usable GPU'))


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
