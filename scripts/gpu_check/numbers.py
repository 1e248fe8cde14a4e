"""Every causal family of the installed transformers on the device against float64 on a CPU: scores and generations.

A family's own rows, run one by one by the model alone on the same device and in the same type, say how far rounding
takes its numbers. The package's may be ROUNDING_TOLERANCE times as far, or as far as its probe allows. Those of the
model alone may be WIDEST_TOLERANCE times as far as one rounding error of its embeddings takes them in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import every_family
import generations
import networks
import numpy as np
import torch

from gpu_check import recorded
from gpu_check.exact import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    bare_logits,
    bare_scores,
    exactly,
    loaded,
    most_off,
    off,
    on_device,
    scores_in,
)
from gpu_check.options import Options
from gpu_check.results import Row, Rows, Skipped, one_line
from llmfoundry_gauntlet.engine.decoding import GenerationDecoder
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.probe import given_token, probe, probe_generation, step_logits
from llmfoundry_gauntlet.engine.rounding import WIDEST_TOLERANCE, nudged_embeddings
from llmfoundry_gauntlet.types import Floats, GenerateRequest, ScoreRequest

# The families that come first, and in a quick run alone: those of today's models, and one for each kind of attention.
FIRST = (
    'llama',
    'qwen3_5_text',
    'gemma3_text',
    'gpt_oss',
    'deepseek_v3',
    'mpt',
)
ON_A_CPU = FIRST[:1]  # in a quick run
TYPES = (BF16, FP32, FP16)
PROBED = {'vocabulary': networks.VOCABULARY, 'longest': every_family.LONGEST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The summed log-probability of each continuation, and the logits of each step of each generation."""

    scores: Floats
    logits: Floats  # [steps, vocabulary]


def run(options: Options, rows: Rows) -> None:
    """Compare each family in each type."""
    others = [name for name in every_family.TYPES if name not in FIRST]
    families = [name for name in FIRST if name in every_family.TYPES]
    if not options.quick:
        families += others
    elif options.is_cpu:
        families = [*ON_A_CPU]
    for name in families:
        compare_family(name, options, rows)
    recorded.run(options, rows)


def score_requests() -> list[ScoreRequest]:
    """Return the requests whose continuations are scored."""
    return [*networks.mixed_requests(), *networks.requests_after_a_prefix(3)]


def compare_family(name: str, options: Options, rows: Rows) -> None:
    """Record a row for float64, which says why if a family has no tiny model on this stack, and one for each type."""
    reference = exact = None
    with rows.row(f'{name}, float64 on the CPU', group='float64 on the CPU'):
        reference = loaded(reference_of(name), FP32)
        with exactly(copy.deepcopy(reference)) as in_float64:
            exact = bare_numbers(in_float64)
            nudged_scores = {dtype: scores_of_nudged(in_float64, dtype) for dtype in TYPES}
    if exact is None:
        return
    for dtype in TYPES:
        with rows.row(f'{name}, {dtype}', group=dtype) as row:
            on_its_own = on_device(reference, dtype, options.torch_device)
            try:
                rounded = bare_numbers(on_its_own.model)
            except RuntimeError as error:
                if 'same dtype' not in str(error):
                    raise
                raise Skipped(f'the model alone does not run in {dtype}: {one_line(error)}') from error
            if not (np.isfinite(rounded.scores).all() and np.isfinite(rounded.logits).all()):
                raise Skipped(f'the numbers of the model alone are not finite in {dtype}')
            nudged_off = off(nudged_scores[dtype], exact.scores, dtype)
            most = WIDEST_TOLERANCE * nudged_off
            row.check('model alone off', off(rounded.scores, exact.scores, dtype), at_most=most)
            compare(row, on_device(default_model(name), dtype, options.torch_device), exact, rounded, dtype)
            if row.misses and not options.is_cpu:
                on_cpu = Row(name)
                compare(on_cpu, on_device(default_model(name), dtype, networks.CPU), exact, rounded, dtype)
                row.note(missed_on_a_CPU_too=', '.join(on_cpu.misses) or 'none')


def reference_of(name: str) -> Any:
    """Return the model with eager attention on a CPU. Raise Skipped if it cannot be built, as the tests list it."""
    reason = every_family.CANNOT[every_family.STACK].get(name)
    if reason is not None:
        raise Skipped(reason)
    try:
        return every_family.build_reference(name)
    except Exception as error:  # of any kind, as each family's code raises its own
        raise Skipped(f'no tiny model with this transformers: {error}') from error


def default_model(name: str) -> Any:
    """Return the model with the attention that it is loaded with."""
    try:
        return every_family.build(name)
    except (ValueError, ImportError):  # no sdpa for this type
        return every_family.build(name, 'eager')


def scores_of_nudged(model: Any, dtype: str) -> Floats:
    """Return the scores of the model alone whose embeddings have rounding errors of a type."""
    with nudged_embeddings(model, torch.finfo(DTYPES[dtype]).eps):
        return bare_scores(model, score_requests())


def bare_numbers(model: Any) -> Numbers:
    """Return the numbers of the model alone, one unpadded row at a time."""
    logits: list[Any] = []
    for request in generations.mixed_requests():
        new_tokens = [given_token(request.key, step, networks.VOCABULARY) for step in range(request.max_new_tokens)]
        of_row = bare_logits(model, [*request.context.tolist(), *new_tokens[:-1]])
        logits += [*of_row[len(request.context) - 1 :].numpy()]
    return Numbers(scores=bare_scores(model, score_requests()), logits=np.array(logits))


def compare(row: Row, language_model: CausalLanguageModel, exact: Numbers, rounded: Numbers, dtype: str) -> None:
    """Record how far the package's scores and generations are from the exact ones, in the layouts that it chooses."""
    requests = score_requests()
    largest_logit, rounding = language_model.learn(requests[:1])

    layout = probe(language_model, **PROBED).layout
    scores = scores_in(language_model, requests, layout, tokens_per_batch=networks.PREFIX_BUDGET)
    rounded_off = off(rounded.scores, exact.scores, dtype)
    allowed = most_off(rounded_off, largest_logit=largest_logit, rounding=rounding)
    row.note(scoring=layout)
    row.check('nats off', off(scores, exact.scores, dtype), at_most=allowed)

    decoder = GenerationDecoder(generations.Letters(), range(networks.VOCABULARY))
    generator = TextGenerator(language_model, decoder)
    generator.layout = probe_generation(generator, **PROBED).layout
    logits = logits_of_steps(generator, generations.mixed_requests())
    rounded_off = off_by_step(rounded.logits, exact.logits, dtype)
    allowed = most_off(rounded_off, largest_logit=largest_logit, rounding=rounding)
    row.note(generation=generator.layout, logits_of_model_alone_off=rounded_off)
    row.check('logits off', off_by_step(logits, exact.logits, dtype), at_most=allowed)


def logits_of_steps(generator: TextGenerator, requests: Sequence[GenerateRequest]) -> Floats:
    """Return the logits of each step of each generation, as `bare_numbers` has them."""
    steps = step_logits(generator, generator.layout, generations.batch_of(requests), networks.VOCABULARY)
    logits = []
    for request in requests:
        for step in range(request.max_new_tokens):
            logits.append(steps[request.key][step])
    return np.array(logits)


def off_by_step(found: Floats, exact: Floats, dtype: str) -> float:
    """Return the largest difference of a step's logits, in half precision of the median step."""
    of_steps = np.abs(found - exact).max(axis=1)
    return off(of_steps, np.zeros_like(of_steps), dtype)
