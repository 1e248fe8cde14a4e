"""`gauntlet run`, `eval` and `watch` under torchrun on two ranks, without Composer: the items of one rank."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from forks import PATIENCE, tail_of
from paths import ROOT
from tiny import journal_lines, outcome, record
from torchrun import GAUNTLET, environment, run, run_well, words_of

pytestmark = pytest.mark.slow

TOKENS = 120  # in a batch
INTERRUPTED = re.compile(r'interrupted by SIGTERM: (\d+) finished items? (?:is|are) kept in (\S+)\n')


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a saved model, tasks that score and that generate, and their scores from one rank."""
    folder = tmp_path_factory.mktemp('torchrun')
    tiny.write_tasks(folder, tiny.write_riddles(folder))
    tiny.save(tiny.model(), folder / 'model')
    run_well(*GAUNTLET, 'run', *options_of(folder), '--out', folder / 'alone', num_ranks=1)
    return folder


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of an evaluation of the model."""
    return {**tiny.settings_of(folder), 'model': str(folder / 'model'), 'tokens_per_batch': TOKENS, 'device': 'cpu'}


def options_of(folder: Path) -> list[str]:
    """Return the settings as options of the command."""
    return [word for name, value in settings_of(folder).items() for word in (f'--{name.replace("_", "-")}', str(value))]


def test_run_has_the_items_of_one_rank_and_prints_them_once(folder: Path):
    """Mutation: every rank prints the scores."""
    printed = run_well(*GAUNTLET, 'run', *options_of(folder), '--out', folder / 'run', num_ranks=2)

    assert outcome(folder / 'run') == outcome(folder / 'alone')
    assert record(folder / 'run')['environment']['num_ranks'] == 2
    assert printed.count('colours/2-shot') == 1


@pytest.mark.parametrize('fsdp_config', [None, {}])
def test_eval_has_the_items_of_one_rank_also_sharded(folder: Path, tmp_path: Path, fsdp_config: dict[str, Any] | None):
    out = tmp_path / 'out'
    settings = {**settings_of(folder), 'out': str(out), 'fsdp_config': fsdp_config}
    (tmp_path / 'eval.yaml').write_text(json.dumps(settings))

    printed = run_well(*GAUNTLET, 'eval', tmp_path / 'eval.yaml', num_ranks=2)

    assert outcome(out) == outcome(folder / 'alone')
    assert printed.count('colours/2-shot') == 1


def test_watch_evaluates_each_checkpoint_once_and_its_status_is_that_of_the_damaged_one(folder: Path, tmp_path: Path):
    checkpoints = tmp_path / 'checkpoints'
    shutil.copytree(folder / 'model', checkpoints / 'ba2')
    settings = [word for word in options_of(folder) if word not in ('--model', str(folder / 'model'))]
    watch = [*GAUNTLET, 'watch', checkpoints, *settings, '--out', tmp_path / 'out', '--once', '--settle', '0s']

    printed = run_well(*watch, num_ranks=2)
    assert printed.count('ba2: done') == 1
    assert outcome(tmp_path / 'out/ba2') == outcome(folder / 'alone')

    (checkpoints / 'ep0-ba4-rank0.pt').write_bytes(b'damaged')
    assert run(*watch, num_ranks=2).returncode == 1


def test_a_mistake_in_the_settings_ends_all_ranks_with_one_message(folder: Path, tmp_path: Path):
    """Mutation: every rank prints it."""
    done = run(*GAUNTLET, 'run', *options_of(folder), '--out', tmp_path / 'out', '--only', 'colour', num_ranks=2)

    assert done.returncode != 0
    assert done.stderr.count('error: --only: colour: ') == 1
    # The only traceback is torchrun's own, with the exit status of the rank that failed first.
    assert re.search(r'exitcode *: 2', done.stderr) and str(ROOT / 'llmfoundry_gauntlet') not in done.stderr
    assert not (tmp_path / 'out').exists()


def test_models_of_a_file_that_cannot_be_evaluated_are_named_once(folder: Path, tmp_path: Path):
    settings = {name: value for name, value in settings_of(folder).items() if name not in ('model', 'tasks')}
    missing = {
        'model_name': 'gone',
        'model': {'name': 'hf_causal_lm', 'pretrained_model_name_or_path': '/nowhere/model'},
        'tokenizer': {'name': '/nowhere/model'},
    }
    tasks = tiny.settings_of(folder)['tasks']
    settings |= {'models': [missing], 'icl_tasks': str(tasks), 'out': str(tmp_path / 'out')}
    (tmp_path / 'eval.yaml').write_text(json.dumps(settings))

    done = run(*GAUNTLET, 'eval', tmp_path / 'eval.yaml', num_ranks=2)

    assert done.returncode != 0
    assert done.stderr.count('gone was not evaluated:') == done.stderr.count('error: /nowhere/model: ') == 1


def test_items_of_both_ranks_are_kept_at_a_sigterm_and_one_rank_goes_on_with_them(folder: Path, tmp_path: Path):
    out, log = tmp_path / 'out', tmp_path / 'log.txt'
    command = words_of(*GAUNTLET, 'run', *options_of(folder), '--out', out, num_ranks=2)
    with log.open('ab') as output:
        ranks = subprocess.Popen(command, env=environment(), stdout=output, stderr=output, start_new_session=True)
    end = time.monotonic() + PATIENCE
    while len(journal_lines(out)) < 4:
        assert time.monotonic() < end and ranks.poll() is None, tail_of(log)
        time.sleep(0.005)

    os.kill(ranks.pid, signal.SIGTERM)  # to torchrun, which passes it on

    assert ranks.wait(PATIENCE) != 0
    (found,) = INTERRUPTED.finditer(log.read_text())  # of rank 0 alone
    assert int(found[1]) > 0 and found[2] == str(out / 'journal')
    run_well(*GAUNTLET, 'run', *options_of(folder), '--out', out, '--resume', num_ranks=1)
    assert record(out)['timing']['reused_items'] >= int(found[1])
    assert outcome(out) == outcome(folder / 'alone')
