"""The parts of scripts/gpu.py that time models and fill memory, as far as a CPU can run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networks
import numpy as np
import pytest
import torch
from memory_limits import limit_tokens
from paths import ROOT
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(ROOT / 'scripts'))
sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))

from bare_forward import BareForward
from gpu_check import speed, targets
from gpu_check.fitting import in_batches_that_fit
from gpu_check.options import Options
from gpu_check.profiles import Profile, kernels_of
from gpu_check.results import Results, Row, Rows
from gpu_check.shapes import HYBRID_1B, PEAK_FLOPS, flops, peak_flops
from gpu_check.workloads import GSM8K, HELLASWAG, LAMBADA, MMLU, MMLU_FIXED, PIQA, Source

SOURCE = Source(vocabulary=1000)
NEEDS_TRANSFORMERS_5 = pytest.mark.skipif(not networks.IS_TRANSFORMERS_5, reason='the hybrid is one of transformers 5')

# The names of vLLM 0.33 that are used, and what it returns.
STAND_IN_FOR_VLLM = """
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, detokenize, prompt_logprobs=None, ignore_eos=False):
        self.max_tokens, self.prompt_logprobs = max_tokens, prompt_logprobs

class LLM:
    def __init__(self, model, *, load_format, skip_tokenizer_init, gpu_memory_utilization, max_model_len, seed):
        assert load_format == 'dummy'

    def generate(self, prompts, sampling_params, *, use_tqdm):
        return [answer(prompt['prompt_token_ids'], params) for prompt, params in zip(prompts, sampling_params)]

def answer(ids, params):
    logprobs = None if params.prompt_logprobs is None else [None, *[{token: None} for token in ids[1:]]]
    new = SimpleNamespace(token_ids=[5] * params.max_tokens)
    return SimpleNamespace(prompt_logprobs=logprobs, outputs=[new])
"""


def options(**changes: Any) -> Options:
    settings = {'device': 'cpu', 'quick': False, 'data_root': None, 'folder': Path(), 'vllm_python': sys.executable}
    return Options(**{**settings, **changes})


def run_parts(folder: Path, *arguments: str, **environment: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Run parts of scripts/gpu.py on the CPU; return their rows by name."""
    path = folder / 'results.json'
    script = [sys.executable, ROOT / 'tests' / 'integration' / 'without_composer.py', ROOT / 'scripts' / 'gpu.py']
    done = subprocess.run(
        [*script, '--device', 'cpu', '--out', path, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'HF_HUB_OFFLINE': '1', **environment},
        timeout=450,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    content = json.loads(path.read_text())
    return {part: {row['name']: row for row in content[part]['rows']} for part in content}


@pytest.mark.slow
@NEEDS_TRANSFORMERS_5
def test_scoring_is_timed_against_all_contenders_with_the_same_numbers(tmp_path):
    """Mutation: lm-eval gets the contexts of another item."""
    rows = run_parts(tmp_path, '--part', 'speed', '--quick')['speed']

    assert {row['status'] for row in rows.values()} == {'passed'}
    layouts = {name.split(':')[0]: row['figures']['layout'] for name, row in rows.items() if name.endswith('probed')}
    assert layouts == {
        'llama 1B': 'token stream',
        'llama 125M': 'token stream',
        'hybrid 1B': 'forked prefixes',
    }
    for name in layouts:
        figures = rows[f'{name}, mmlu, 5 shots']['figures']
        assert figures['ours / bare'] > 0
        assert figures['tokens per second'] == pytest.approx(figures['tokens run'] / figures['seconds'])
        profile = rows[f'{name}, mmlu, 5 shots: one batch']['figures']
        assert 'aten::mm' in profile['where the time goes']
    choices = rows['llama 1B, hellaswag, 10 shots']['figures']
    assert choices['tokens run'] < choices['tokens of whole rows'] / 2
    assert rows['llama 1B, mmlu, 5 shots']['limits'] == {'ours / bare': 'at most 1.15 in a full run on an H100'}
    for name in ('llama 1B', 'hybrid 1B'):
        assert rows[f'{name}, mmlu, 5 shots: lm-eval']['figures']['most nats from lm-eval'] < 1e-4


@pytest.mark.slow
def test_vllm_scores_a_prompt_for_each_choice_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Mutations: one prompt for each item; the target of another model."""
    (tmp_path / 'vllm.py').write_text(STAND_IN_FOR_VLLM)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    results = Results(tmp_path / 'results.json')
    here = options(folder=tmp_path)

    def part(rows: Rows) -> None:
        speed.time_vllm(HYBRID_1B, (MMLU,), here, rows, {(HYBRID_1B, MMLU.name): 0.5})

    status = results.run_part('speed', part, about={'quick': False, 'machine': {}}, most_seconds=None)

    assert status == 'passed'
    started, scored = results.parts['speed']['rows']
    assert started['figures']['start seconds'] >= 0
    assert (scored['figures']['items'], scored['figures']['prompts']) == (6, 24)
    assert scored['figures']['vLLM / ours'] == pytest.approx(scored['figures']['seconds'] / 0.5)
    assert scored['limits'] == {'vLLM / ours': 'at least 5 in a full run on an H100'}


@pytest.mark.slow
@NEEDS_TRANSFORMERS_5
def test_batches_fit_into_the_memory_or_are_halved_with_the_same_numbers(tmp_path):
    """Mutations: the rows compare outputs with themselves; a limit that no forward exceeds."""
    rows = run_parts(tmp_path, '--part', 'memory', '--quick')['memory']

    statuses = {name: row['status'] for name, row in rows.items()}
    assert statuses.pop('llama 125M: out of memory of the card itself') == 'skipped'
    assert set(statuses.values()) == {'passed'}
    filled = rows['llama 1B, a stand-in of 1.25 GiB, auto: scoring']['figures']
    assert filled['tokens per batch'] == 32_768
    assert 0.9 * 32_768 < filled['tokens run'] <= 32_768
    assert 0 < filled['share of the memory'] < 0.5
    for layout in ('llama 125M, stream', 'llama 125M, padded_rows', 'hybrid 1B, forked'):
        assert rows[f'{layout}: out of memory in scoring']['figures']['halved'] is True
    assert rows['llama 125M: out of memory in generation']['figures']['slots once it ran out'] == 12


@pytest.mark.slow
@NEEDS_TRANSFORMERS_5
def test_generation_is_timed_and_a_step_of_several_tokens_gives_the_logits_of_single_ones(tmp_path):
    """Mutations: positions of a wide step one off; its tokens do not see each other; one slot of `auto`."""
    (tmp_path / 'vllm.py').write_text(STAND_IN_FOR_VLLM)

    rows = run_parts(tmp_path, '--part', 'generation', PYTHONPATH=str(tmp_path))['generation']

    assert {row['status'] for row in rows.values()} == {'passed'}
    name = 'llama 1B, gsm8k, 8 fixed shots'
    ours = rows[f'{name}: ours, auto']['figures']
    assert ours['slots'] == ours['items'] == 6
    static = rows[f'{name}: generate, 64 rows, one batch, static cache']['figures']
    for figures in (ours, static, rows[f'{name}: generate, 64 rows']['figures'], rows[f'{name}: vLLM']['figures']):
        # All have generated as many tokens: the lengths of the answers.
        assert figures['tokens generated'] == ours['tokens generated']
        assert figures['tokens per second'] == pytest.approx(figures['tokens generated'] / figures['seconds'])
    wide = rows[f'{name}: a step of several tokens a slot']
    assert wide['figures']['most logits apart'] < 1e-4
    of_five = wide['figures']['milliseconds with 5'] / wide['figures']['milliseconds with 1']
    assert wide['figures']['five / one'] == pytest.approx(of_five)


# Workloads.


@pytest.mark.parametrize('workload', [MMLU, HELLASWAG, PIQA, LAMBADA, MMLU_FIXED], ids=lambda workload: workload.name)
def test_random_tasks_have_the_recorded_lengths(workload):
    """Mutation: the first items are the shortest ones."""
    requests = SOURCE.score_requests(workload, 100)

    lengths = [len(request.contexts[0]) for request in requests]
    assert np.mean(lengths) == pytest.approx(SOURCE.mean_length(workload), rel=0.15)
    assert {len(request.continuations) for request in requests} == {len(requests[0].continuations)}


def test_letters_are_the_same_for_all_items_and_fixed_shots_too():
    own, fixed = SOURCE.score_requests(MMLU, 10), SOURCE.score_requests(MMLU_FIXED, 10)

    assert {tuple(map(int, np.concatenate(request.continuations))) for request in own} == {
        tuple(map(int, np.concatenate(own[0].continuations)))
    }
    assert len({request.contexts[0][:100].tobytes() for request in own}) == 10
    assert len({request.contexts[0][:100].tobytes() for request in fixed}) == 1


def test_generations_are_as_long_as_recorded_answers():
    requests = SOURCE.generate_requests(GSM8K, 64)

    recorded = json.loads((ROOT / 'scripts' / 'gpu_check' / 'lengths.json').read_text())['gsm8k']
    assert {request.max_new_tokens for request in requests} <= {answer for _, answer in recorded}
    assert len({request.context[:500].tobytes() for request in requests}) == 1


@pytest.mark.slow
def test_published_files_are_read(real_data):
    source = Source(vocabulary=512, data_root=real_data)

    requests = source.score_requests(LAMBADA, 3)

    assert [request.key.row for request in requests] == [0, 1, 2]
    assert all(ids.max() < 512 for request in requests for ids in request.contexts)


# Figures.


def test_operations_are_those_that_torch_counts():
    """Every token attends to all others in torch's count, to half of them in ours. Mutation: leave out attention."""
    model = networks.network(attn_implementation='eager')
    ids = torch.zeros(3, 40, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)

    ours = flops(model, num_tokens=120, mean_length=2 * 40, num_reads=120)

    assert counter.get_total_flops() == pytest.approx(ours, rel=1e-3)  # rotary frequencies may be a product too


@pytest.mark.parametrize(
    ('card', 'peak'),
    [
        ('NVIDIA H100 80GB HBM3', PEAK_FLOPS['H100']),
        ('NVIDIA H100 PCIe', PEAK_FLOPS['H100 PCIe']),
        ('NVIDIA L40S', PEAK_FLOPS['L40S']),
        ('Another card', None),
    ],
)
def test_the_peak_of_a_card_is_found_by_its_name(monkeypatch, card, peak):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: card)

    assert peak_flops('cuda') == peak
    assert peak_flops('cpu') is None


@pytest.mark.parametrize(
    ('card', 'quick', 'misses'),
    [('NVIDIA H100 80GB HBM3', False, ['ours / bare']), ('NVIDIA H100 80GB HBM3', True, []), ('NVIDIA L4', False, [])],
)
def test_targets_hold_for_a_full_run_on_their_card(monkeypatch, card, quick, misses):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: card)
    row = Row('scoring')

    targets.aim(row, 'ours / bare', 1.2, options(device='cuda', quick=quick), at_most=1.15)

    assert row.misses == misses
    assert row.limits['ours / bare'].startswith('at most 1.15')


def test_kernels_are_counted_without_copies_and_annotations():
    """Mutations: count copies as kernels; count annotations; idle time in which copies run."""

    def event(name: str, microseconds: float, is_annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            device_type=DeviceType.CUDA,
            is_user_annotation=is_annotation,
            self_device_time_total=microseconds,
        )

    on_host = SimpleNamespace(name='aten::mm', device_type=DeviceType.CPU, self_device_time_total=0)
    copy = event('Memcpy HtoD (Pinned -> Device)', 100)
    events = [event('gemm', 400), event('gemm', 200), event('norm', 100), copy, event('a step', 800, True), on_host]

    profile = Profile(wall_seconds=0.001, kernels=kernels_of(events, is_cpu=False), num_waits=1)

    assert profile.num_kernels == 3
    assert profile.idle_share == pytest.approx(0.2)
    assert profile.kernels.longest.startswith('75.0% gemm (2); 12.5% ')


# Memory.


def test_batches_of_a_contender_are_halved_until_they_fit():
    tried: list[int] = []

    def run(size: int) -> str:
        tried.append(size)
        if size > 20:
            raise torch.OutOfMemoryError('too large')
        return 'done'

    assert in_batches_that_fit(run, 64, options()) == ('done', 16)
    assert tried == [64, 32, 16]


def test_a_contender_that_never_fits_is_an_error():
    def run(size: int) -> None:
        raise torch.OutOfMemoryError(f'{size}')

    with pytest.raises(torch.OutOfMemoryError, match=r'^1$'):
        in_batches_that_fit(run, 8, options())


@pytest.mark.slow
def test_a_bare_forward_that_runs_out_of_memory_keeps_its_smaller_batches():
    """And the model is as before. Mutations: start with large batches again; leave the hook of logits where it is."""
    model = networks.network()
    sizes = limit_tokens(model, 100)
    ours = object.__new__(speed.Ours)
    ours.options, ours.bare, ours.bare_tokens_per_batch = options(), BareForward(), 320
    ours.bare.model, ours.bare.device, ours.bare.warm = model, 'cpu', True
    shape = {'num_tokens': 640, 'mean_length': 20.0, 'num_reads': 32}

    ours.bare_seconds(shape)
    num_before = len(sizes)
    ours.bare_seconds(shape)

    assert ours.bare_tokens_per_batch == 80
    assert set(sizes[num_before:]) == {80}
    assert model(input_ids=torch.zeros(1, 30, dtype=torch.long)).logits.shape[1] == 30


def test_a_request_has_a_prompt_for_each_choice():
    (request,) = SOURCE.score_requests(PIQA, 1)

    rows = list(speed.whole_rows(request))

    assert [len(row) for row in rows] == [len(request.contexts[0]) + len(ids) for ids in request.continuations]
