"""Wrong options are refused by name, all at once, before anything is written."""

from __future__ import annotations

import json
import re
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
    ('explain boolq --max-seq-len 1 --model x', '--max-seq-len: is 1; allowed: 2 or more'),
    ('explain boolq --sandbox docker --answer A', "--sandbox: is 'docker'; allowed: auto, rlimits, none"),
    ('explain boolq --num-fewshot 16', '--num-fewshot: is 16; allowed: 0 to 15, the number of other rows'),
    ('explain boolq --num-fewshot -1', '--num-fewshot: is -1; allowed: 0 or more'),
    ('explain boolq --row 99', '--row: is 99; allowed for boolq/10-shot: 0 to 15'),
    ('explain boolq --variant prompt:1', "--variant: is 'prompt:1', but boolq/10-shot has no variants"),
    ('explain boolq --file boolq', "--file: is 'boolq', but boolq/10-shot has one data file"),
    ('explain bolq', "bolq: no such task, did you mean 'boolq'?"),
    ('explain copa --fewshot none', '--fewshot: '),
    ('explain score_math --score SCORE/math.yaml', 'in several files; name one with --file'),
    (
        'explain score_math --score SCORE/math.yaml --file algebra --num-fewshot 2',
        '--num-fewshot: is 2; allowed: 0, as tasks of the type score_math have no shots',
    ),
    (
        'explain score_mmlu_pro --score SCORE/mmlu_pro.yaml --num-fewshot 2',
        '--num-fewshot: is 2; allowed: 0, as tasks of the type score_choices have no shots',
    ),
    ('explain score_mmlu_pro --score SCORE/mmlu_pro.yaml --variant option_order:Z', "--variant: is 'option_order:Z'"),
    # Files and reports
    ('validate --tasks TASKS --no-data --data-root data', '--data-root: '),
    ('validate --gauntlet GAUNTLET --data-root data', '--data-root: '),
    ('eval nowhere.yaml', 'nowhere.yaml: there is no such file'),
    ('eval nowhere.yaml resume', 'resume: has no value; allowed: KEY=VALUE'),
    ('validate', 'nothing to check'),
    ('ls saftey', "saftey: no such task or category, did you mean 'safety'?"),
    ('export', '--out'),
    ('export --out o --subset-items 0', '--subset-items: is 0; allowed: 1 or more'),
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
    ('watch c --train-yaml t.yaml --limit 3 --semantics corrected', '--semantics: ', '--limit: '),
    ('watch c --tasks TASKS --out o --subset-items 0', '--subset-items: '),
    ('watch c --tasks TASKS --out o --num-fewshot -1', '--num-fewshot: '),
    ('watch c --tasks TASKS --out o --missing never', '--missing: '),
    ('watch c --tasks TASKS --out o --only copq', '--only: copq: no such'),
    # run: what is evaluated, and where
    ('run', 'give one of --model, --outputs and --from (a model, generations, an earlier run)', '--out'),
    ('run --allow-missing --model MODEL', '--allow-missing: ', '--out'),
    ('run --out o --model MODEL --log-prompts true', "--log-prompts: takes no value, found 'true'"),
    ('run --out o --model MODEL --log-prompts=false', "--log-prompts: takes no value, found 'false'"),
    ('run --out o --outputs a --semantics upstream', '--semantics: '),
    ('run --out s3://bucket/run --model MODEL', 'is not on this machine; allowed: a local folder'),
    ('run --out FULL --model MODEL', 'is not empty'),
    ('run --out o --model /nowhere/model', f'--model: /nowhere/model: {IS_FILE}'),
    ('run --out o --model .', 'has no config.json'),
    ('run --out o --model FULL/damaged.pt', 'is not a checkpoint'),
    ('run --out o --model MODEL --tokenizer /nowhere', f'--tokenizer: /nowhere: {IS_FILE}'),
    ('run --out o --model MODEL --only copq,saftey,piqa', '--only: copq: no such', '--only: saftey: no such'),
    ('run --out o --model MODEL --data-root /nowhere', '57 of 57 data files are missing below /nowhere: '),
    # run: values
    ('run --out o --model MODEL --subset-items 0', '--subset-items: is 0; allowed: 1 or more'),
    ('run --out o --model MODEL --limit 0', '--limit: is 0; allowed: 1 or more'),
    ('run --out o --model MODEL --num-fewshot -1', '--num-fewshot: is -1; allowed: 0 or more'),
    ('run --out o --model MODEL --missing never', '--missing: '),
    ('run --out o --model MODEL --max-seq-len 99999', '--max-seq-len is 99999, but the model (llama)'),
    ('run --out o --model MODEL --tokens-per-batch many', "--tokens-per-batch: is 'many'; allowed: auto"),
    ('run --out o --model MODEL --semantics upstream', "--semantics: is 'upstream'; allowed: corrected, reference"),
    ('run --out o --model MODEL --precision fp7', "--precision: is 'fp7'; allowed:"),
    (
        'run --out o --model MODEL --precision amp_bf16 --device cpu',
        "--precision is 'amp_bf16', but on a CPU there is only fp32",
    ),
    ('run --out o --model MODEL --device tpu', "--device: is 'tpu'; allowed: cpu, gpu"),
    ('run --out o --model MODEL --loggers wandb --log losses', "--log: is 'losses'; allowed: accuracy, "),
    ('run --out o --model MODEL --loggers wandb,wanb', "--loggers: unknown key 'wanb', did you mean"),
    # run: values in JSON
    ('run --out o --model MODEL --fsdp-config full', "--fsdp-config: is 'full', which is not JSON"),
    ('run --out o --model MODEL --fsdp-config 3', '--fsdp-config: is 3; allowed: a mapping'),
    (
        'run --out o --model MODEL --chat-template-kwargs a --fsdp-config b',
        '--chat-template-kwargs: is ',
        '--fsdp-config: is ',
    ),
    # words of the command line
    ('rum', "gauntlet rum: no such command, did you mean 'run'?"),
    ('--verson', "--verson: no such option, did you mean '--version'?"),
    ('data lss', "gauntlet data lss: no such command, did you mean 'ls'?"),
    ('run --modle MODEL --out o', "--modle: no such option, did you mean '--model'?"),
    ('run --out o --model', '--model'),
    ('run --out o --model MODEL --overwrite=yes', '--overwrite'),
    ('run --out o --model MODEL further', 'further'),
    ('run --out o --model MODEL --num-fewshot few', "--num-fewshot: is 'few'; allowed: a whole number"),
    ('run --out o --model MODEL --limit=few', "--limit: is 'few'; allowed: a whole number"),
    ('run --out o --model MODEL --format xml', "--format: is 'xml'; allowed: table, markdown, csv, json"),
    ('report FULL --samples -1', "--samples: is '-1'; allowed: a whole number, 0 or more"),
    # an empty path, as of a shell's unset variable, is not the working directory
    ("run --out '' --model MODEL --overwrite", "--out: is ''"),
    ('run --tasks= --model MODEL --out o', "--tasks: is ''"),
    ("ls --data-root ''", "--data-root: is ''"),
    # run: settings that do not go together
    ('run --out o --model MODEL --system-prompt x', '--system-prompt: has no effect without --apply-chat-template'),
    (
        'run --out o --model MODEL --precision-target 5% --limit 3',
        '--precision-target: ',
    ),
    ('run --out o --model MODEL --resume --overwrite', '--resume and --overwrite'),
    ('run --out o --outputs a --model MODEL', 'found --model and --outputs'),
    ('run --out o --model MODEL --revision main', '--revision is only for a name on the Hugging Face hub'),
    (
        "run --out o --model MODEL --precision-target '5% of all'",
        "--precision-target: the gauntlet has no average 'all'",
    ),
    (
        'run --out o --from FULL',
        '--from: ',
    ),
    ('explain boolq --model /nowhere', f'--model: /nowhere: {IS_FILE}'),
    ('explain boolq --data-root /nowhere', 'set --data-root to its folder'),
    ('export --out o --tokenizer /nowhere --only copa', f'--tokenizer: /nowhere: {IS_FILE}'),
    ('export --out FULL', '--out: '),
    ('report FULL --out FULL', '--out: '),
    ('data fetch --to d --from /nowhere', '--from: /nowhere: there is no such folder'),
    ('watch c --tasks TASKS', '--out: is missing'),
    (
        'watch c --tasks TASKS --out o --tokenizer /nowhere --model-config /none',
        f'--tokenizer: /nowhere: {IS_FILE}',
        f'--model-config: /none: {IS_FILE}',
    ),
    ('watch c --train-yaml NOFOLDER', '--out: is missing'),
    (
        'watch c --tasks TASKS --out o --poll x --settle y --claim-expires z --stop-after w',
        "--poll: is 'x'",
        "--settle: is 'y'",
        "--claim-expires: is 'z'",
        "--stop-after: is 'w'",
    ),
]
if not torch.cuda.is_available():
    WRONG.append(('run --out o --model MODEL --device gpu', '--device is gpu, but torch finds no usable GPU'))


@pytest.mark.parametrize(('command', 'facts'), [(command, facts) for command, *facts in WRONG])
def test_a_user_error_is_a_line_that_names_the_option_and_what_is_allowed(
    gauntlet, elsewhere: Path, tmp_path: Path, command: str, facts: list[str]
):
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'damaged.pt').write_bytes(b'not a checkpoint')
    (tmp_path / 'train.yaml').write_text(json.dumps({'callbacks': {'eval_gauntlet': {'tasks': 'tasks.yaml'}}}))
    names = {
        'MODEL': FIXTURES / 'models' / 'rotary_bos',
        'TASKS': ROOT / 'yamls/tasks/gauntlet_v0.1.yaml',
        'GAUNTLET': ROOT / 'yamls/gauntlets/eval_gauntlet_v0.1.yaml',
        'SCORE': ROOT / 'yamls/score',
        'DATA': ROOT / 'eval_data',
        'FULL': tmp_path / 'full',
        'NOFOLDER': tmp_path / 'train.yaml',
    }
    for name, path in names.items():
        command = command.replace(name, str(path))
    status, out, err = gauntlet(*shlex.split(command))
    assert (status, out, len(err.splitlines())) == (2, '', len(facts)), err
    assert all(line.startswith('error: ') for line in err.splitlines())
    assert [fact for fact in facts if fact not in err] == [], err
    keys = [option.name for option in RUN.values() if '_' in option.name and re.search(rf'\b{option.name}\b', err)]
    assert keys == [], 'a setting has the name of its key, not of the option that was typed'
    assert list(elsewhere.iterdir()) == []
