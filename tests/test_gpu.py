"""The checks of `make gpu`, as far as a CPU can run them."""

from __future__ import annotations

import os
import subprocess
import sys

from paths import ROOT, SHARED_DATA

sys.path.insert(0, str(ROOT / 'scripts'))

import gpu
import networks


def options(data_root: str = 'local_data') -> gpu.Options:
    return gpu.Options(device='cpu', quick=True, data_root=SHARED_DATA / data_root)


def test_without_a_gpu_all_is_skipped_with_a_reason():
    command, environment = [sys.executable, ROOT / 'scripts' / 'gpu.py'], {**os.environ, 'CUDA_VISIBLE_DEVICES': ''}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith('SKIP: torch finds no GPU')


def test_recorded_numbers_are_compared_in_both_precisions(monkeypatch, capsys, real_data):
    monkeypatch.setattr(gpu.Options, 'cases', lambda _, recorded: recorded['cases'][-1:])
    monkeypatch.setattr(gpu.recorded_cases, 'MODELS', ('rotary_bos',))
    assert gpu.run('parity', options()) == ['PASS'] * 4
    printed = capsys.readouterr().out
    assert '60 of 60 predictions equal' in printed and '(0.0001)' in printed
    monkeypatch.setattr(gpu, 'LOSS', {gpu.FP32: (0, 0), gpu.BF16: (0, 0)})
    monkeypatch.setattr(gpu, 'LEAD', {gpu.FP32: 1e-3, gpu.BF16: 0})
    assert gpu.run('parity', options()) == ['FAIL', 'PASS', 'FAIL', 'FAIL']


def test_families_are_compared_and_an_unexpected_layout_fails(monkeypatch, capsys):
    monkeypatch.setattr(networks, 'FAMILIES', {name: networks.FAMILIES[name] for name in ('llama', 'mamba')})
    assert gpu.run('layouts', options()) == ['PASS', 'PASS']
    monkeypatch.setitem(networks.LAYOUT_OF, 'mamba', 'stream')
    assert gpu.run('layouts', options()) == ['FAIL', 'PASS']  # in bf16 a family may fall back to padded rows
    assert 'mamba: padded rows' in capsys.readouterr().out


def test_checks_that_need_files_or_a_gpu_are_skipped_and_a_failing_one_stops_no_other(monkeypatch, capsys):
    assert gpu.run('parity', options('nowhere')) == gpu.run('memory', options()) == ['SKIP']
    assert 'gauntlet data fetch' in capsys.readouterr().out
    monkeypatch.setattr(gpu.fsdp_worker, 'write_tasks', lambda _: 1 / 0)
    monkeypatch.setattr(gpu.tiny, 'shard_on_cpu', lambda: None)
    monkeypatch.setattr(gpu.dist, 'initialize_dist', lambda *_, **__: None)
    assert gpu.run('fsdp', options()) == ['FAIL']
    assert 'ZeroDivisionError' in capsys.readouterr().out
