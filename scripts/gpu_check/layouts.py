"""Scores of each layout against float64 on a CPU, as close as padded rows are; kernels per layer, and waits per batch.

On a GPU the token stream runs through torch's variable-length attention, with heads as wide as those of real models and
with prompts that fill many of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import every_family
import networks
import numpy as np
import torch
from fake_cuda import FakeCuda

from gpu_check.counts import counted
from gpu_check.exact import BF16, DTYPES, FP16, FP32, bare_scores, exactly, most_off, off, on_device, scores_in
from gpu_check.options import Options
from gpu_check.results import Row, Rows, Skipped
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import FORKED, PADDED_ROWS, STREAM, plan
from llmfoundry_gauntlet.engine.probe import probe
from llmfoundry_gauntlet.types import Floats, ScoreRequest

MOST_KERNELS = 80  # of a layer
MOST_WAITS = 4  # of the host in a batch
COUNTED = ('llama', 'mistral, windows', 'falcon, alibi', 'phi')  # each has its own way through attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The length of prompts, in tokens, and the width of models."""

    unit: int  # an eighth of the longest prompt
    hidden_size: int
    head_width: int

    @property
    def tokens_per_batch(self) -> int:
        """Return so many tokens that long prefixes are shared by several batches."""
        return 12 * self.unit

    @property
    def widths(self) -> dict[str, Any]:
        """Return settings of most families; weights are so large that every token depends on its context."""
        return {
            'hidden_size': self.hidden_size,
            'num_attention_heads': self.hidden_size // self.head_width,
            'intermediate_size': 2 * self.hidden_size,
            'initializer_range': 1.7 * self.hidden_size**-0.5,
            'max_position_embeddings': 16 * self.unit,
        }


TINY = Size(unit=16, hidden_size=32, head_width=8)
WIDE = Size(unit=128, hidden_size=512, head_width=64)
WIDE_AND_LONG = Size(unit=256, hidden_size=1024, head_width=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of attention: a family of tests/networks.py, and the settings in units that it has besides the widths."""

    family: str
    in_units: dict[str, float] = field(default_factory=dict)
    in_head_widths: dict[str, int] = field(default_factory=dict)

    def settings(self, size: Size) -> dict[str, Any]:
        """Return the settings of a size."""
        lengths = {name: int(units * size.unit) for name, units in self.in_units.items()}
        widths = {name: heads * size.head_width for name, heads in self.in_head_widths.items()}
        return size.widths | lengths | widths


WINDOW = {'sliding_window': 0.75}
HEAD = {'head_dim': 1}
KINDS = {
    'groups of heads': Kind(family='llama'),
    'windows': Kind(family='mistral, windows', in_units=WINDOW),
    'windows on some layers': Kind(family='gemma3', in_units=WINDOW, in_head_widths=HEAD),
    'caps and windows': Kind(family='gemma2', in_units=WINDOW, in_head_widths=HEAD),
    'sinks and windows': Kind(family='gpt_oss', in_units=WINDOW, in_head_widths=HEAD),
    'latent attention': Kind(
        family='deepseek_v3',
        in_head_widths={
            **dict.fromkeys(('q_lora_rank', 'kv_lora_rank'), 2),
            **dict.fromkeys(('qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim'), 1),
        },
    ),
    'chunks': Kind(family='llama4', in_units={'attention_chunk_size': 1.5}, in_head_widths=HEAD),
    'ALiBi': Kind(family='falcon, alibi'),
}
# Types of transformers whose state after a prefix is copied for each prompt after it, of tests/every_family.py.
HYBRIDS = ('lfm2', 'qwen3_5_text', 'falcon_h1')


def run(options: Options, rows: Rows) -> None:
    """Compare layouts, then count."""
    size = WIDE if options.quick else WIDE_AND_LONG
    if options.is_cpu:
        size = TINY
    for kind in KINDS:
        compare_stream(kind, size, options, rows)
    for name in HYBRIDS[: 1 if options.quick else None]:
        compare_forks(name, options, rows)
    for name in COUNTED:
        with rows.row(f'kernels of {name}, bf16') as row:
            of_two_layers, _ = counts_of_a_batch(name, 2, options)
            of_three_layers, waits = counts_of_a_batch(name, 3, options)
            row.check('kernels per layer', of_three_layers - of_two_layers, at_most=MOST_KERNELS)
            row.check('waits per batch', waits, at_most=MOST_WAITS)


def requests_of(size: Size) -> list[ScoreRequest]:
    """Return prompts that share beginnings of several lengths, with few and many tokens of their own."""
    unit = size.unit
    rng = np.random.default_rng(4)
    shots, passage = networks.draw(rng, 5 * unit), networks.draw(rng, 2 * unit)
    contexts = [
        # Questions after the same shots, longer than a batch, and after the same passage.
        *[[*shots, *networks.draw(rng, unit + 3 * row)] for row in range(4)],
        passage,
        *[[*passage, *networks.draw(rng, unit // 2 + row)] for row in range(3)],
        # A row that shares nothing, and a single token.
        networks.draw(rng, 8 * unit),
        networks.draw(rng, 1),
    ]
    requests = []
    for row, context in enumerate(contexts):
        choices = [networks.draw(rng, length) for length in (1, 9)]
        requests.append(networks.request(row, context, choices))
    return requests


def compare_stream(kind: str, size: Size, options: Options, rows: Rows) -> None:
    """Compare the token stream of a kind of attention with padded rows, by float64."""
    settings = KINDS[kind].settings(size)
    exact = None
    for dtype in (FP32, BF16) if options.quick else (FP32, BF16, FP16):
        with rows.row(f'{kind}, {dtype}') as row:
            family = KINDS[kind].family
            if family not in networks.FAMILIES:
                raise Skipped(f'this transformers has no {family}')
            if exact is None:
                exact = Exact.of(networks.network(family, **settings), size)
            language_model = on_device(networks.network(family, **settings), dtype, options.torch_device)
            compare(row, language_model, exact, STREAM, dtype)


def compare_forks(name: str, options: Options, rows: Rows) -> None:
    """Compare forked prefixes of a hybrid with padded rows, by float64, and show that its probe chooses them."""
    exact = None
    for dtype in (FP32, BF16):
        with rows.row(f'forked prefixes of {name}, {dtype}') as row:
            if name not in every_family.TYPES:
                raise Skipped(f'this transformers has no {name}')
            if exact is None:
                exact = Exact.of(every_family.build(name), TINY)
            language_model = on_device(every_family.build(name), dtype, options.torch_device)
            compare(row, language_model, exact, FORKED, dtype)
            if dtype == FP32:
                probed = probe(language_model, vocabulary=networks.VOCABULARY, longest=every_family.LONGEST)
                row.expect('layout', probed.layout, FORKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Requests, and their scores in float64."""

    requests: Sequence[ScoreRequest]
    scores: Floats
    tokens_per_batch: int

    @classmethod
    def of(cls, model: Any, size: Size) -> Exact:
        """Compute the scores of a model on a CPU, for requests of a size."""
        requests = requests_of(size)
        with exactly(model):
            return cls(requests=requests, scores=bare_scores(model, requests), tokens_per_batch=size.tokens_per_batch)


def compare(row: Row, language_model: CausalLanguageModel, exact: Exact, layout: str, dtype: str) -> None:
    """Record how far a layout is from the exact scores, which may be as far as rounding takes padded rows."""
    largest_logit, rounding = language_model.learn(exact.requests[:1])

    def off_in(layout: str) -> float:
        found = scores_in(language_model, exact.requests, layout, tokens_per_batch=exact.tokens_per_batch)
        return off(found, exact.scores, dtype)

    of_padded = off_in(PADDED_ROWS)
    allowed = most_off(of_padded, largest_logit=largest_logit, rounding=rounding)
    row.note(padded_rows_off=of_padded)
    row.check('nats off', off_in(layout), at_most=allowed)


def counts_of_a_batch(name: str, num_layers: int, options: Options) -> tuple[int, int]:
    """Return the kernels and waits of a batch of many trees and branches; on a CPU those of the stand-in for a GPU."""
    (batch,) = plan(networks.mixed_requests(), tokens_per_batch=1000, layout=STREAM)
    network = networks.network(name, num_hidden_layers=num_layers).to(DTYPES[BF16])
    with FakeCuda() if options.is_cpu else nullcontext() as stand_in, torch.no_grad():
        if stand_in is None:
            language_model = on_device(network, BF16, options.torch_device)
        else:
            language_model = CausalLanguageModel(stand_in.put(network), device=stand_in.device)
        language_model.learn(batch.requests[:1])
        if stand_in is None:
            counts = counted(lambda: language_model.run(batch))
            return counts.kernels.total(), counts.waits.total()
        stand_in.clear()
        language_model.run(batch)
        return stand_in.kernels.total(), len(stand_in.own_waits())
