"""The checks of `make gpu`, as far as a CPU can run them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT, SHARED_DATA

sys.path.insert(0, str(ROOT / 'scripts'))

import gpu
import networks


def options(data_root: str = 'local_data') -> gpu.Options:
    return gpu.Options(device='cpu', quick=True, data_root=SHARED_DATA / data_root)


def test_without_a_gpu_all_is_skipped_with_a_reason():
    command = [sys.executable, ROOT / 'scripts' / 'gpu.py']
    environment = {**os.environ, 'CUDA_VISIBLE_DEVICES': ''}

    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)

    assert done.stdout.startswith('SKIP: torch finds no GPU')


@pytest.fixture
def one_recorded_case(monkeypatch, real_data):
    """Compare one recorded case of one model."""
    monkeypatch.setattr(gpu.Options, 'cases', lambda _, recorded: recorded['cases'][-1:])
    monkeypatch.setattr(gpu.recorded_cases, 'MODELS', ('rotary_bos',))


def test_recorded_numbers_are_compared_in_both_precisions(one_recorded_case, capsys):
    assert gpu.run('parity', options()) == ['PASS'] * 4

    printed = capsys.readouterr().out
    assert '60 of 60 predictions equal' in printed
    assert '(0.0001)' in printed


def test_recorded_numbers_beyond_a_limit_fail(one_recorded_case, monkeypatch):
    monkeypatch.setattr(gpu, 'LOSS', {gpu.FP32: (0, 0), gpu.BF16: (0, 0)})
    monkeypatch.setattr(gpu, 'LEAD', {gpu.FP32: 1e-3, gpu.BF16: 0})

    assert gpu.run('parity', options()) == ['FAIL', 'PASS', 'FAIL', 'FAIL']


@pytest.fixture
def two_families(monkeypatch):
    families = {name: networks.FAMILIES[name] for name in ('llama', 'mamba')}
    monkeypatch.setattr(networks, 'FAMILIES', families)


def test_families_are_compared_in_both_precisions(two_families):
    assert gpu.run('layouts', options()) == ['PASS', 'PASS']


def test_an_unexpected_layout_fails(two_families, monkeypatch, capsys):
    monkeypatch.setitem(networks.LAYOUT_OF, 'mamba', 'stream')

    # In bf16 a family may fall back to padded rows.
    assert gpu.run('layouts', options()) == ['FAIL', 'PASS']
    assert 'mamba: padded rows' in capsys.readouterr().out


def test_a_check_without_its_files_is_skipped(capsys):
    assert gpu.run('parity', options('nowhere')) == ['SKIP']
    assert 'gauntlet data fetch' in capsys.readouterr().out


def test_a_check_without_a_gpu_is_skipped():
    assert gpu.run('memory', options()) == ['SKIP']


def test_an_error_in_a_check_fails_that_check_alone(monkeypatch, capsys):
    monkeypatch.setattr(gpu.fsdp_worker, 'write_tasks', lambda _: 1 / 0)
    monkeypatch.setattr(gpu.composer_training, 'shard_on_cpu', lambda: None)
    monkeypatch.setattr(gpu.dist, 'initialize_dist', lambda *_, **__: None)

    assert gpu.run('fsdp', options()) == ['FAIL']
    assert 'ZeroDivisionError' in capsys.readouterr().out
