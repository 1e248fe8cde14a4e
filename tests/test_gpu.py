"""The frame of scripts/gpu.py, and its parts as far as a CPU can run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, SHARED_DATA

sys.path.insert(0, str(ROOT / 'scripts'))

from gpu_check import wheels
from gpu_check.results import Results, Rows, Skipped
from gpu_check.tables import markdown

ABOUT = {'quick': True, 'machine': {'card': 'A card', 'torch': '2.11.0'}}


def run_part(folder: Path, part: Any, most_seconds: float | None = None) -> dict[str, Any]:
    """Return what the file has of a part after it has run."""
    Results(folder / 'results.json').run_part('numbers', part, about=ABOUT, most_seconds=most_seconds)
    return json.loads((folder / 'results.json').read_text())['numbers']


def test_a_row_beyond_a_limit_fails_its_part_and_names_the_figure(tmp_path):
    """Mutation: a NaN is within every limit."""

    def part(rows: Rows) -> None:
        with rows.row('near') as row:
            row.check('nats off', 0.1, at_most=0.2)
        with rows.row('far') as row:
            row.check('nats off', 0.3, at_most=0.2)
            row.check('tokens per second', 10, at_least=11)
            row.expect('layout', 'rows', 'stream')
        with rows.row('not a number') as row:
            row.check('nats off', float('nan'), at_most=0.2)

    content = run_part(tmp_path, part)

    assert content['status'] == 'failed'
    assert [row['status'] for row in content['rows']] == ['passed', 'failed', 'failed']
    assert content['rows'][1]['missed'] == ['nats off', 'tokens per second', 'layout']
    assert content['rows'][1]['limits']['tokens per second'] == 'at least 11'
    assert content['rows'][2]['figures'] == {'nats off': 'nan'}


def test_an_error_in_a_row_is_recorded_and_the_next_row_runs(tmp_path):
    def part(rows: Rows) -> None:
        with rows.row('broken') as row:
            row.note(layers=3)
            raise ZeroDivisionError('of a kernel\nwith a second line')
        with rows.row('left out'):
            raise Skipped('vllm is not installed')
        with rows.row('whole') as row:
            row.note(layers=4)

    content = run_part(tmp_path, part)

    broken, left_out, whole = content['rows']
    assert content['status'] == 'error'
    assert (broken['status'], broken['reason']) == ('error', 'ZeroDivisionError: of a kernel')
    assert 'test_gpu.py' in broken['traceback']
    assert broken['figures'] == {'layers': 3}
    assert (left_out['status'], left_out['reason']) == ('skipped', 'vllm is not installed')
    assert whole['status'] == 'passed'


def test_an_error_outside_of_rows_ends_its_part_alone(tmp_path):
    results = Results(tmp_path / 'results.json')

    def broken(rows: Rows) -> None:
        raise ImportError('no module')

    def whole(rows: Rows) -> None:
        with rows.row('one'):
            pass

    first = results.run_part('numbers', broken, about=ABOUT, most_seconds=None)
    second = results.run_part('layouts', whole, about=ABOUT, most_seconds=None)

    assert (first, second) == ('error', 'passed')
    assert results.parts['numbers']['reason'] == 'ImportError: no module'


def test_every_row_is_in_the_file_before_the_next_one_runs(tmp_path):
    """So that a run that is killed has not been in vain. Mutation: the file is written after each part alone."""
    path = tmp_path / 'results.json'

    def part(rows: Rows) -> None:
        with rows.row('first'):
            pass
        content = json.loads(path.read_text())['numbers']
        assert [row['name'] for row in content['rows']] == ['first']
        assert content['status'] == 'running'

    assert run_part(tmp_path, part)['status'] == 'passed'


def test_parts_of_an_earlier_run_stay_until_they_run_again(tmp_path):
    def part(rows: Rows) -> None:
        with rows.row('one'):
            pass

    path = tmp_path / 'results.json'
    Results(path).run_part('numbers', part, about=ABOUT, most_seconds=None)
    Results(path).run_part('layouts', part, about=ABOUT, most_seconds=None)
    Results(path).run_part('numbers', part, about={**ABOUT, 'quick': False}, most_seconds=None)

    content = json.loads(path.read_text())
    assert list(content) == ['layouts', 'numbers']
    assert content['numbers']['quick'] is False


def test_a_part_whose_time_is_over_keeps_its_rows(tmp_path):
    """The alarm is sent by hand, so that nothing depends on seconds. Mutation: TimeIsUp is an Exception."""

    def part(rows: Rows) -> None:
        with rows.row('first') as row:
            row.note(layers=1)
        with rows.row('endless'):
            # As code that is measured may do.
            with suppress(Exception):
                signal.raise_signal(signal.SIGALRM)
            raise AssertionError('the alarm stops the part')

    content = run_part(tmp_path, part, most_seconds=1000)

    assert content['status'] == 'stopped'
    assert content['reason'] == 'stopped after 1000 seconds: rows are missing'
    assert [(row['name'], row['status']) for row in content['rows']] == [('first', 'passed'), ('endless', 'stopped')]
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_alarm_stops_a_part_that_takes_too_long(tmp_path):
    def part(rows: Rows) -> None:
        with rows.row('endless'):
            while True:
                time.sleep(0.01)

    assert run_part(tmp_path, part, most_seconds=0.05)['status'] == 'stopped'


@pytest.fixture
def absent(monkeypatch) -> str:
    """Need a module that is not installed."""
    monkeypatch.setattr(wheels, 'NEEDED', {'module_of_a_wheel': 'omegaconf'})
    monkeypatch.setattr(sys, 'path', [*sys.path])
    return 'module_of_a_wheel'


def test_missing_packages_are_named_with_the_command_that_gets_them(absent):
    with pytest.raises(wheels.MissingWheelsError) as raised:
        wheels.use_wheels(None)

    assert 'omegaconf: are not installed' in str(raised.value)
    assert 'pip download --no-deps --dest wheels omegaconf==2.4.0' in str(raised.value)


def test_a_folder_of_wheels_has_what_is_missing(absent, tmp_path):
    with zipfile.ZipFile(tmp_path / 'omegaconf-2.4.0-py3-none-any.whl', 'w') as wheel:
        wheel.writestr(f'{absent}/__init__.py', 'VALUE = 3')

    wheels.use_wheels(tmp_path)

    assert __import__(absent).VALUE == 3


def test_a_folder_without_wheels_is_a_mistake(absent, tmp_path):
    with pytest.raises(wheels.MissingWheelsError, match='has no files'):
        wheels.use_wheels(tmp_path)


def test_tables_have_a_line_for_a_group_and_one_for_each_row_that_did_not_pass(tmp_path):
    """Mutations: the smallest figure of a group is shown; rows that failed are hidden in their group; rows of another
    kind are in the same table.
    """

    def part(rows: Rows) -> None:
        for name, error in (('llama', 0.01), ('gemma', 0.04), ('mamba', 0.3)):
            with rows.row(f'{name}, bf16', group='bf16') as row:
                row.check('nats off', error, at_most=0.1)
        with rows.row('all') as row:
            row.note(tokens_per_second=123456.7)

    run_part(tmp_path, part)
    tables = markdown(json.loads((tmp_path / 'results.json').read_text()))

    assert 'On A card (torch 2.11.0):' in tables
    assert '| numbers, quick | 3 passed, 1 failed | failed | 0 |' in tables
    assert '| bf16: 2 rows | 0.04 (at most 0.1), gemma, bf16 | passed |' in tables
    assert '| mamba, bf16 | 0.3 (at most 0.1) | failed |' in tables
    assert '| all | 123,457 | passed |' in tables


def run_script(*arguments: str | Path, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/gpu.py in a process in which neither Composer nor the installed package can be imported."""
    command = [sys.executable, ROOT / 'tests' / 'integration' / 'without_composer.py', ROOT / 'scripts' / 'gpu.py']
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'HF_HUB_OFFLINE': '1', **environment},
        timeout=450,
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_waits_are_counted_by_line_but_not_those_inside_of_models(monkeypatch):
    """With warnings as torch gives them on a GPU, of which there is none here. Mutation: every warning counts."""
    import torch
    from gpu_check import counts

    modes = []
    monkeypatch.setattr(torch.cuda, 'get_sync_debug_mode', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', modes.append)

    def run() -> None:
        for place in ('engine/model.py', 'engine/model.py', 'site-packages/transformers/cache_utils.py'):
            warnings.warn_explicit(f'called a synchronizing CUDA operation ({place})', UserWarning, place, 7)
        warnings.warn('something else', stacklevel=2)

    assert counts.waits_of(run) == {'model.py:7': 2}
    assert modes == ['warn', 0]


@pytest.mark.slow
def test_without_a_gpu_all_is_skipped_with_a_reason():
    assert run_script().stdout.startswith('SKIP: torch finds no GPU')


@pytest.mark.slow
def test_parts_run_on_a_cpu_without_composer(tmp_path):
    """Tiny shapes of every part; what needs a GPU is as close to it here as the stand-in."""
    path = tmp_path / 'results.json'
    parts = ['numbers', 'layouts', 'fsdp', 'gauntlet']

    run_script('--device', 'cpu', '--quick', '--part', *parts, '--out', path)

    content = json.loads(path.read_text())
    assert {name: part['status'] for name, part in content.items()} == dict.fromkeys(parts, 'passed')
    rows = {row['name']: row for part in content.values() for row in part['rows']}
    assert {row['status'] for row in rows.values()} == {'passed', 'skipped'}
    for name in ('llama, bf16', 'llama, fp32', 'llama, fp16'):
        assert rows[name]['figures']['scoring'] == 'stream'
        assert rows[name]['figures']['generation'] == 'prompt_stream'
    assert rows['fully_shard, bf16']['figures']['weights as without evaluations'] is True
    assert rows['sample data']['figures']['tasks'] == 57
    assert 0 < rows['kernels of llama, bf16']['figures']['kernels per layer'] <= 80

    tables = run_script('--out', path, '--markdown').stdout
    for name in parts:
        assert f'| {name}, quick |' in tables


@pytest.fixture
def rows_of(tmp_path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a part, or some of it, on a CPU, and returns its rows by name."""
    from gpu_check.options import Options

    def run_on_cpu(part: Callable[..., None], *, data_root: Path | None = None, **more: Any) -> dict[str, Any]:
        options = Options(device='cpu', quick=True, data_root=data_root, folder=tmp_path, vllm_python=sys.executable)
        content = run_part(tmp_path, lambda rows: part(options=options, rows=rows, **more))
        return {row['name']: row for row in content['rows']}

    return run_on_cpu


@pytest.mark.slow
def test_a_device_that_rounds_more_than_its_type_is_noticed(rows_of, monkeypatch):
    """As one that multiplies float32 with the digits of bfloat16."""
    from gpu_check import numbers

    on_device = numbers.on_device

    def rounded(model: Any, dtype: str, device: Any) -> Any:
        return on_device(model.bfloat16(), dtype, device)

    monkeypatch.setattr(numbers, 'on_device', rounded)

    rows = rows_of(numbers.compare_family, name='llama')

    assert rows['llama, fp32']['missed'] == ['model alone off']
    assert rows['llama, bf16']['status'] == 'passed'


@pytest.mark.slow
def test_a_type_in_which_the_model_itself_does_not_run_is_skipped_with_its_error(rows_of, monkeypatch):
    """As DeepSeek V4 of transformers 5.17, which multiplies float32 by bfloat16."""
    from gpu_check import numbers

    on_device = numbers.on_device

    def with_a_layer_in_float32(model: Any, dtype: str, device: Any) -> Any:
        language_model = on_device(model, dtype, device)
        language_model.model.lm_head.float()
        return language_model

    monkeypatch.setattr(numbers, 'on_device', with_a_layer_in_float32)

    rows = rows_of(numbers.compare_family, name='llama')

    assert rows['llama, fp32']['status'] == 'passed'
    for dtype in ('bf16', 'fp16'):
        assert rows[f'llama, {dtype}']['status'] == 'skipped'
        assert rows[f'llama, {dtype}']['reason'].startswith(f'the model alone does not run in {dtype}: RuntimeError: ')


@pytest.mark.slow
def test_weights_that_transformers_leaves_in_float32_stay_there():
    """Mutation: the model is cast as a whole, with which Inkling's routers do not run."""
    import every_family
    import torch
    from gpu_check.exact import on_device

    model = every_family.build_reference('rwkv')

    weights = dict(on_device(model, 'fp16', torch.device('cpu')).model.named_parameters())

    in_float32 = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert in_float32 == {name for name in weights if name.endswith(('time_decay', 'time_first'))}
    assert len(in_float32) == 2 * model.config.num_hidden_layers
    for name, weight in model.named_parameters():
        assert weights[name].equal(weight.to(weights[name].dtype))


@pytest.mark.slow
def test_a_window_of_another_length_is_noticed(rows_of, monkeypatch):
    from gpu_check import layouts

    from llmfoundry_gauntlet.engine import attention

    rule_of = attention.rule_of

    def longer(mask: Any) -> tuple[int | None, int | None]:
        window, chunk = rule_of(mask)
        return (None if window is None else window + 1), chunk

    monkeypatch.setattr(attention, 'rule_of', longer)

    rows = rows_of(layouts.compare_stream, kind='windows', size=layouts.TINY)

    assert rows['windows, fp32']['missed'] == ['nats off']
    assert rows['windows, bf16']['missed'] == ['nats off']


@pytest.fixture
def recorded_rows(real_data, rows_of):
    """Return a function that compares the recorded items on a CPU, and returns the rows by name."""
    from gpu_check import recorded

    return partial(rows_of, recorded.run, data_root=SHARED_DATA / 'local_data')


@pytest.mark.slow
def test_recorded_items_are_compared_in_both_precisions(recorded_rows):
    rows = recorded_rows()

    assert len(rows) == 8
    assert {row['status'] for row in rows.values()} == {'passed'}
    assert rows['recorded scores of rotary_bos, fp32']['figures']['items'] == 60


@pytest.mark.slow
def test_recorded_items_beyond_a_limit_fail(recorded_rows, monkeypatch):
    from gpu_check import recorded

    monkeypatch.setattr(recorded, 'MOST_OFF', {'fp32': 0, 'bf16': 0})
    monkeypatch.setattr(recorded, 'LEAD', {'fp32': 1e-3, 'bf16': 0})

    rows = recorded_rows()

    assert rows['recorded scores of rotary_bos, fp32']['missed'] == ['nats per token off']
    assert rows['recorded generations of rotary_bos, fp32']['status'] == 'passed'
    assert rows['recorded generations of rotary_bos, bf16']['missed'] == ['other texts in spite of a lead']
