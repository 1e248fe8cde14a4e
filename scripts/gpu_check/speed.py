"""Scoring: ours against a bare flash-attention forward, lm-eval and vLLM, and where the time goes.

Models with random weights in bf16 score tasks with the lengths of the published files. Ours takes token ids, plans, and
returns log-probabilities, as in an evaluation of the whole suite. The bare forward runs as many tokens, in rows of
their mean length, and nothing else: those that ours plans, or whole rows, in which nothing is shared. lm-eval and vLLM
get a pair of ids for each choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from statistics import median
from typing import Any

import numpy as np
from bare_forward import BareForward
from ours import forwards, planned_shape, unshared_shape

from gpu_check.fitting import free_memory, in_batches_that_fit
from gpu_check.options import Options
from gpu_check.profiles import Profile, profiled, seconds_of
from gpu_check.results import Row, Rows, Skipped
from gpu_check.shapes import HYBRID_1B, LLAMA_1B, LLAMA_7B, LLAMA_125M, Shape, flops, peak_flops, shape_of
from gpu_check.targets import aim
from gpu_check.vllm_engine import NO_VLLM, is_vllm_here, running_vllm
from gpu_check.workloads import HELLASWAG, LAMBADA, MMLU, MMLU_FIXED, PIQA, Source, Workload
from llmfoundry_gauntlet.engine.model import CausalLanguageModel, automatic_budget
from llmfoundry_gauntlet.engine.plan import FORKED, Batch, plan
from llmfoundry_gauntlet.engine.probe import NAMES, probe
from llmfoundry_gauntlet.runtime.launcher import Launcher
from llmfoundry_gauntlet.types import ItemKey, ScoreOutput, ScoreRequest

# Limits and targets.
MOST_OF_BARE = 1.15  # ours / bare forward over the same tokens, of a 1B model
LEAST_OF_VLLM = {LLAMA_1B: 3.0, HYBRID_1B: 5.0}  # vLLM / ours, MMLU with 5 shots
MOST_KERNELS_PER_LAYER = 80
MOST_WAITS = 4  # of the host, in a batch

SUITE_TOKENS = 90_000_000  # of the published suite, by which `tokens_per_batch: auto` chooses
PROBE_LENGTH = 600  # tokens
ROUNDS = 3
LM_EVAL_BATCH_SIZES = (16, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A model with the tokens of the prompts of each workload in a full run on a GPU, the most important first."""

    name: str
    workloads: tuple[Workload, ...]
    num_tokens: int
    lm_eval: tuple[Workload, ...] = ()


TIMED = (
    Timed(
        name=LLAMA_1B,
        workloads=(MMLU, HELLASWAG, PIQA, LAMBADA, MMLU_FIXED),
        num_tokens=200_000,
        lm_eval=(MMLU, HELLASWAG),
    ),
    Timed(name=LLAMA_125M, workloads=(MMLU, HELLASWAG, LAMBADA), num_tokens=200_000),
    Timed(name=HYBRID_1B, workloads=(MMLU, HELLASWAG, MMLU_FIXED), num_tokens=50_000, lm_eval=(MMLU,)),
)
LARGEST = Timed(name=LLAMA_7B, workloads=(MMLU, HELLASWAG), num_tokens=40_000, lm_eval=(MMLU,))
VLLM_TIMED = ((LLAMA_1B, (MMLU, HELLASWAG)), (HYBRID_1B, (MMLU, MMLU_FIXED)))
QUICK = 4  # the part of the tokens in a quick run
ITEMS_ON_CPU = 6


Seconds = dict[tuple[str, str], float]  # of ours, by model and workload


def run(options: Options, rows: Rows) -> None:
    """Time all models with all contenders; vLLM needs the memory for itself, and its targets come before the 7B."""
    seconds_of_ours: Seconds = {}
    for timed in TIMED:
        time_model(timed, options, rows, seconds_of_ours)
        free_memory(options)
    if options.quick:
        return
    for name, workloads in VLLM_TIMED:
        time_vllm(name, workloads, options, rows, seconds_of_ours)
    time_model(LARGEST, options, rows, seconds_of_ours)


def time_model(timed: Timed, options: Options, rows: Rows, seconds_of_ours: Seconds) -> None:
    """Time one model on its workloads; keep the seconds of ours for the rows of vLLM."""
    shape = shape_of(timed.name, options.device)
    ours = None
    with rows.row(f'{timed.name}: made and probed') as row:
        ours = Ours(shape, options)
        row.note(parameters=sum(weight.numel() for weight in ours.model.parameters()))
        row.note(layout=NAMES[ours.layout], tokens_per_batch=ours.tokens_per_batch)
    if ours is None:
        return

    workloads = timed.workloads[:2] if options.quick else timed.workloads
    for workload in workloads:
        requests = requests_of(workload, timed, shape, options)
        with rows.row(f'{timed.name}, {workload.name}') as row:
            seconds_of_ours[timed.name, workload.name] = time_ours(ours, requests, row)
    with rows.row(f'{timed.name}, {MMLU.name}: one batch') as row:
        profile_batch(ours, requests_of(MMLU, timed, shape, options), row)
    for workload in timed.lm_eval[:1] if options.quick else timed.lm_eval:
        with rows.row(f'{timed.name}, {workload.name}: lm-eval') as row:
            requests = requests_of(workload, timed, shape, options)
            time_lm_eval(ours, requests, row, seconds_of_ours.get((timed.name, workload.name)))


def requests_of(workload: Workload, timed: Timed, shape: Shape, options: Options) -> list[ScoreRequest]:
    """Return as many items of a workload as there are tokens for, a few on a CPU."""
    source = Source.of(shape, options)
    if options.is_cpu:
        return source.score_requests(workload, ITEMS_ON_CPU)
    num_tokens = timed.num_tokens // QUICK if options.quick else timed.num_tokens
    return source.score_requests(workload, round(num_tokens / source.mean_length(workload)))


class Ours:
    """A model in our engine, probed, with the tokens per batch of an evaluation of the whole suite."""

    def __init__(self, shape: Shape, options: Options) -> None:
        self.shape = shape
        self.options = options
        self.model = shape.model()
        self.language_model = CausalLanguageModel(self.model, device=options.torch_device)
        self.layout = probe(self.language_model, vocabulary=shape.settings['vocab_size'], longest=PROBE_LENGTH).layout
        self.tokens_per_batch = automatic_budget(
            self.model.config,
            options.torch_device,
            cached_bytes=0,
            num_tokens=SUITE_TOKENS,
            num_generations=0,
            num_ranks=1,
            forks=self.layout == FORKED,
        ).scoring

        self.bare = BareForward()
        self.bare.model, self.bare.device, self.bare.warm = self.model, options.device, False
        self.bare_tokens_per_batch = self.tokens_per_batch  # fewer once the memory ran out

    def bare_seconds(self, shape: Mapping[str, float]) -> float:
        """Return the seconds of a bare forward of the same model over this shape."""

        def measure(tokens_per_batch: int) -> float:
            answer = self.bare.measure(shape={**shape, 'tokens_per_batch': tokens_per_batch})
            return float(answer['wall_seconds'])

        seconds, self.bare_tokens_per_batch = in_batches_that_fit(measure, self.bare_tokens_per_batch, self.options)
        return seconds

    def plan(self, requests: Sequence[ScoreRequest]) -> list[Batch]:
        """Return the batches of requests, in the order in which they run."""
        planned = plan(
            requests,
            tokens_per_batch=self.tokens_per_batch,
            layout=self.layout,
            row_states=self.language_model.row_states,
        )
        return forwards(planned)

    def score(self, batches: Sequence[Batch]) -> dict[ItemKey, ScoreOutput]:
        """Return the outputs of batches; each is read while the next one runs, as in an evaluation."""
        launcher = Launcher()
        self.language_model.forget()
        outputs: dict[ItemKey, ScoreOutput] = {}
        for batch, following in zip_longest(batches, batches[1:]):
            for outputs_of_batch in launcher.run(self.language_model, batch, following):
                outputs |= {output.key: output for output in outputs_of_batch}
        return outputs


def time_ours(ours: Ours, requests: Sequence[ScoreRequest], row: Row) -> float:
    """Time ours and the bare forward, in turns; return the seconds of ours."""
    options = ours.options
    batches = ours.plan(requests)
    shared = planned_shape(requests, batches, ours.tokens_per_batch)
    unshared = unshared_shape(requests, ours.tokens_per_batch)
    ours.score(batches)  # for what first calls prepare, and for smaller batches if the memory runs out
    ours.bare_seconds(unshared)

    rounds: dict[str, list[float]] = {'planning': [], 'running': [], 'shared': [], 'unshared': []}
    for _ in range(1 if options.quick or options.is_cpu else ROUNDS):
        rounds['planning'].append(seconds_of(lambda: ours.plan(requests), options))
        rounds['running'].append(seconds_of(lambda: ours.score(batches), options))
        rounds['shared'].append(ours.bare_seconds(shared))
        rounds['unshared'].append(ours.bare_seconds(unshared))
    seconds = {name: median(of_rounds) for name, of_rounds in rounds.items()}
    seconds['ours'] = seconds['planning'] + seconds['running']

    row.note(items=len(requests), tokens_of_whole_rows=unshared['num_tokens'], tokens_run=shared['num_tokens'])
    row.note(seconds=seconds['ours'], of_which_planning=seconds['planning'])
    row.note(items_per_second=len(requests) / seconds['ours'])
    row.note(tokens_per_second=shared['num_tokens'] / seconds['ours'])
    peak = peak_flops(options.device)
    if peak is not None:
        row.note(share_of_peak=flops_of(ours.model, shared) / seconds['ours'] / peak)
        row.note(**{'share of peak, bare over whole rows': flops_of(ours.model, unshared) / seconds['unshared'] / peak})
    ratio = seconds['ours'] / seconds['shared']
    if ours.shape.name == LLAMA_1B:
        aim(row, 'ours / bare', ratio, options, at_most=MOST_OF_BARE)
    else:
        row.note(**{'ours / bare': ratio})
    row.note(**{'bare over whole rows / ours': seconds['unshared'] / seconds['ours']})
    for name, size in (('ours', ours.language_model.most_tokens), ('bare', ours.bare_tokens_per_batch)):
        if size not in (None, ours.tokens_per_batch):
            row.note(**{f'tokens per batch of {name}, as memory ran out': size})
    return seconds['ours']


def flops_of(model: Any, shape: Mapping[str, float]) -> float:
    """Return the operations of a forward of this shape."""
    return flops(model, num_tokens=shape['num_tokens'], mean_length=shape['mean_length'], num_reads=shape['num_reads'])


def profile_batch(ours: Ours, requests: Sequence[ScoreRequest], row: Row) -> None:
    """Count the kernels of the largest batch, and the waits of the host; record where the time goes."""
    largest = max(ours.plan(requests), key=lambda batch: batch.num_tokens)
    found = profiled(lambda: ours.score([largest]), ours.options)
    row.note(tokens_run=largest.num_tokens)
    note_profile(row, found, ours)


def note_profile(row: Row, found: Profile, ours: Ours) -> None:
    """Record a profile, with the limits of the counts."""
    row.note(milliseconds=1000 * found.wall_seconds)
    of_layer = found.num_kernels / ours.model.config.num_hidden_layers
    if ours.options.is_cpu:
        row.note(operators_per_layer=of_layer)
    else:
        row.check('kernels per layer', of_layer, at_most=MOST_KERNELS_PER_LAYER)
        row.check('waits', found.num_waits, at_most=MOST_WAITS)
        row.note(idle_share=found.idle_share)
    row.note(where_the_time_goes=found.kernels.longest)


def time_lm_eval(ours: Ours, requests: Sequence[ScoreRequest], row: Row, seconds_of_ours: float | None) -> None:
    """Time lm-eval's Hugging Face backend with the same model at its best batch size, and compare the numbers."""
    if find_spec('lm_eval') is None:
        raise Skipped('lm-eval is not installed')
    from gpu_check.lm_eval_backend import LMEvalBackend

    backend = LMEvalBackend(ours.model)
    logprobs: list[float] = []

    def score(size: int) -> float:
        def all_requests() -> None:
            logprobs[:] = backend.score(requests, size)

        return seconds_of(all_requests, ours.options)

    backend.score(requests[:2], 1)  # for what first calls prepare
    seconds_by_size: dict[int, float] = {}
    for size in LM_EVAL_BATCH_SIZES[:1] if ours.options.quick else LM_EVAL_BATCH_SIZES:
        seconds, fitting_size = in_batches_that_fit(score, size, ours.options)
        seconds_by_size[fitting_size] = seconds
    best = min(seconds_by_size, key=seconds_by_size.__getitem__)
    row.note(batch_size=best, items=len(requests), seconds=seconds_by_size[best])
    if seconds_of_ours is not None:
        row.note(**{'lm-eval / ours': seconds_by_size[best] / seconds_of_ours})

    outputs = ours.score(ours.plan(requests))
    sums = [float(of_choice.sum()) for request in requests for of_choice in outputs[request.key].logprobs]
    row.note(**{'most nats from lm-eval': float(np.abs(np.subtract(sums, logprobs)).max())})


def time_vllm(
    name: str,
    workloads: Sequence[Workload],
    options: Options,
    rows: Rows,
    seconds_of_ours: Seconds,
) -> None:
    """Time vLLM on workloads of a model, with a request for each choice."""
    timed = next(timed for timed in TIMED if timed.name == name)
    shape = shape_of(name, options.device)
    if not is_vllm_here(options):
        with rows.row(f'{name}: vLLM'):
            raise Skipped(NO_VLLM)
        return
    with running_vllm(shape, options, rows) as engine:
        if engine is None:
            return
        for workload in workloads:
            requests = requests_of(workload, timed, shape, options)
            prompts = [ids for request in requests for ids in whole_rows(request)]
            with rows.row(f'{name}, {workload.name}: vLLM') as row:
                answer = engine.ask('score', prompts=prompts)
                row.note(prompts=len(prompts), items=len(requests), seconds=answer['wall_seconds'])
                row.note(tokens_per_second=sum(map(len, prompts)) / answer['wall_seconds'])
                compare_with_vllm(row, name, workload, answer['wall_seconds'], seconds_of_ours, options)


def compare_with_vllm(
    row: Row,
    name: str,
    workload: Workload,
    seconds: float,
    seconds_of_ours: Seconds,
    options: Options,
) -> None:
    """Record vLLM's time in times of ours, with the target of this model on MMLU."""
    of_ours = seconds_of_ours.get((name, workload.name))
    if of_ours is None:  # its row has ended with an error
        return
    if workload is MMLU:
        aim(row, 'vLLM / ours', seconds / of_ours, options, at_least=LEAST_OF_VLLM[name])
    else:
        row.note(**{'vLLM / ours': seconds / of_ours})


def whole_rows(request: ScoreRequest) -> Iterator[list[int]]:
    """Yield the ids of a prompt with each of its choices."""
    for context, continuation in zip(request.contexts, request.continuations, strict=True):
        yield [*context.tolist(), *continuation.tolist()]
