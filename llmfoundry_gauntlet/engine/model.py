"""Run planned batches on a torch model: token ids in, log-probabilities out; choose how many tokens fit in a batch."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from llmfoundry_gauntlet.engine.attention import (
    Change,
    Replacement,
    Unsupported,
    changed,
    eager_changes,
    replacement,
    to_device,
)
from llmfoundry_gauntlet.engine.continuous import CACHED_PER_TOKEN, LEAST_BATCHES, requests_per_batch
from llmfoundry_gauntlet.engine.forks import (
    CachedRows,
    JoinedReader,
    bytes_in,
    copied,
    copied_rows,
    lay_out_forks,
    rows_after,
    without_prefix,
)
from llmfoundry_gauntlet.engine.logits import (
    LogitReader,
    Tail,
    logits_of,
    output_layer,
    picking,
    reading,
    rounding_of,
    tail_of,
)
from llmfoundry_gauntlet.engine.plan import FORKED, NO_STATES, PADDED_ROWS, STREAM, Batch, RowStates
from llmfoundry_gauntlet.engine.rotary import RotaryLengths, rotary_length
from llmfoundry_gauntlet.engine.scans import Scans
from llmfoundry_gauntlet.engine.tree_attention import KeyValue, TreeLayout
from llmfoundry_gauntlet.engine.trees import (
    Stream,
    Tree,
    context_request,
    lay_out_rows,
    lay_out_stream,
    split_outputs,
)
from llmfoundry_gauntlet.errors import ModelError, as_given
from llmfoundry_gauntlet.types import Ids, Ints, ScoreOutput, ScoreRequest

log = logging.getLogger(__name__)

# Of `tokens_per_batch: auto`.
MOST_TOKENS = {'cpu': 2048, 'cuda': 32768}  # on a CPU 4096 took 5 to 12 % longer
LEAST_TOKENS = {'cpu': 1024, 'cuda': 4096}
SHARE_OF_MEMORY = 0.5  # of free memory; the rest is a margin for what the estimate leaves out
CHUNK_BYTES = 2**29  # for a chunk of logits and its copies
FLOAT32_BYTES = 4
STATE_LENGTHS = (8, 40)  # tokens of the rows whose states are measured

Outputs = Callable[[], list[ScoreOutput]]


class CausalLanguageModel:
    """A Hugging Face causal language model, possibly wrapped by FSDP; `model` is the module to call.

    `hidden_token_id` is a token that is masked at every position of padded rows, as llm-foundry masks real eos tokens
    if pad is eos; None masks only padding. `rotary` is given if rotary frequencies depend on a length. The probe
    determines `dtype`, the model's compute type, and `tail`, the function applied to the output layer's logits; if that
    is None (unknown), the model computes the logits of all positions.
    """

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        hidden_token_id: int | None = None,
        rotary: RotaryLengths | None = None,
    ) -> None:
        # Below torch.compile, as each batch has a shape of its own; `_orig_mod` of torch 2.7 in docs/compatibility.md.
        self.model = getattr(model, '_orig_mod', model)
        self.device = device
        self.hidden_token_id = hidden_token_id
        self.rotary = rotary
        self.tail: Tail | None = None
        self.dtype: torch.dtype | None = None
        self.num_forwards = 0
        self.eager: list[Change] = []  # switch the model to eager attention, if the probe found that necessary
        self.attention_compared = 0  # tokens of the longest row in which it was compared with eager attention
        self.has_fixed_attention = False  # other than eager, and the probe cannot switch it; logged
        self.row_states = NO_STATES  # what rows leave in the model's own cache, once the probe measured it
        self.shortens_scans = False  # of recurrent layers, once the probe found that it changes nothing
        self.in_step = is_sharded(self.model)  # ranks must make the same forwards, as each gathers sharded weights
        self.most_tokens: int | None = None  # per batch, once the device ran out of memory with more
        self._prefix: tuple[Ids, dict[int, KeyValue]] | None = None
        self._forked_prefix: tuple[Ids, Any] | None = None  # with the model's own cache
        self._next: tuple[Batch, Stream] | None = None  # laid out ahead

    @cached_property
    def engine_attention(self) -> Replacement:
        """Return the changes that make the model use the engine's attention. Raise Unsupported."""
        return replacement(self.model)

    @cached_property
    def takes_positions(self) -> bool:
        """Return whether the model takes position ids; models with ALiBi need none."""
        parameters = inspect.signature(unwrapped(self.model).forward).parameters
        return 'position_ids' in parameters or self.engine_attention.by_name

    @cached_property
    def scans(self) -> Scans:
        """Return the scans of the model's recurrent layers."""
        return Scans(self.model)

    def scanning(self, longest: int) -> AbstractContextManager[None]:
        """Return the context for a forward of rows of at most this length."""
        return self.scans.chunked_for(longest) if self.shortens_scans else nullcontext()

    @cached_property
    def cache_argument(self) -> str:
        """Return the name of the argument that takes a KV cache: `cache` since transformers 5.24.

        A subclass may leave it to `**kwargs` for the class that it extends.
        """
        for of_class in type(unwrapped(self.model)).__mro__:
            forward = vars(of_class).get('forward')
            parameters = () if forward is None else inspect.signature(forward).parameters
            for name in ('cache', 'past_key_values', 'cache_params'):
                if name in parameters:
                    return name
        return 'past_key_values'

    @property
    def vocabulary(self) -> int:
        """Return the size of the model's vocabulary."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    def run(self, batch: Batch) -> list[ScoreOutput]:
        """Return the outputs of a batch, in the order of its requests. Raise ModelError as `launch` does."""
        return self.launch(batch)()

    @torch.no_grad()
    def launch(self, batch: Batch) -> Outputs:
        """Start a batch on the device; return a function that waits for its outputs, in the order of its requests.

        If the device runs out of memory, the batch and all later ones of its size are run in halves.
        Raise ModelError if a single request does not fit, or if ranks run in step.
        """
        if self.most_tokens is not None and batch.num_tokens > self.most_tokens and batch.trees:
            halves = batch.halves()
            if len(halves) > 1:
                return self._launch_all(halves)
        try:
            with self.rotary_length(batch.rope_length):
                reader = self._read(batch)
        except torch.OutOfMemoryError as error:
            failure = str(error)
        else:
            # A batch that only runs a prefix has no outputs.
            return lambda: [] if reader is None else split_outputs(batch.requests, *reader.scores())
        # The exception, whose frames held tensors, has been freed here.
        self._make_room(batch, failure)
        return self._launch_all(batch.halves())

    def _launch_all(self, batches: Sequence[Batch]) -> Outputs:
        parts = [self.launch(batch) for batch in batches]
        return lambda: [output for part in parts for output in part()]

    def lay_out(self, batch: Batch) -> None:
        """Prepare a batch that is to run next, while the device is busy."""
        if batch.layout == STREAM and batch.trees:
            self._next = batch, batch_stream(batch)

    def _make_room(self, batch: Batch, failure: str) -> None:
        too_large = f'{batch.num_tokens} tokens do not fit into the memory of the device'
        if self.in_step:
            advice = 'all ranks of a sharded model must make the same forwards, so a batch cannot be split here'
            raise ModelError(
                f'{too_large}; {advice}; give {as_given("tokens_per_batch", batch.num_tokens // 2)}: {failure}'
            )
        if len(batch.halves()) == 1:
            what = f'{batch.requests[0].key}: ' if batch.trees else 'a cached prefix: '
            raise ModelError(f'{what}{too_large}: {failure}')
        if self.device.type == 'cuda':
            torch.cuda.empty_cache()
        self.most_tokens = batch.num_tokens // 2
        log.warning(
            'out of memory with %d tokens: batches of more than %d are split; %s avoids it',
            batch.num_tokens,
            self.most_tokens,
            as_given('tokens_per_batch', self.most_tokens),
        )

    def _read(self, batch: Batch) -> LogitReader | JoinedReader | None:
        """Return the reader of a batch's scored tokens; None for a batch that only runs a prefix."""
        if batch.layout == PADDED_ROWS:
            return self._padded_rows(batch)
        if batch.layout == FORKED:
            with self.attention():
                return self._forked(batch)
        if not batch.trees and self.in_step:  # rerun even a cached prefix: ranks must make equally many forwards
            self.forget()
        prefix = {} if batch.prefix is None else self._cached(batch.prefix)
        if not batch.trees:
            return None
        prepared, self._next = self._next, None
        stream = prepared[1] if prepared is not None and prepared[0] is batch else batch_stream(batch)
        return self._stream(stream, prefix)

    def _cached(self, prefix: Ids) -> dict[int, KeyValue]:
        """Return the keys and values of a prefix by layer. One prefix is cached at a time."""
        if self._prefix is None or self._prefix[0] is not prefix:
            self._prefix = None  # free its memory first
            states: dict[int, KeyValue] = {}
            tree = Tree(requests=(context_request(prefix),), num_tokens=len(prefix))
            self._stream(lay_out_stream([tree]), states, is_cached=True)
            self._prefix = (prefix, states)
        return self._prefix[1]

    @torch.no_grad()
    def learn(self, requests: Sequence[ScoreRequest]) -> tuple[float, float]:
        """Determine `dtype` and `tail` from a forward of padded rows.

        Return the largest logit and the relative rounding error of the precision, 0 for float32.
        """
        ids = to_device(lay_out_rows(requests).tokens.astype(np.int64), self.device)
        with picking(output_layer(self.model), lambda states: states, copies=True) as made:
            outputs = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        final = logits_of(outputs)
        # Only a layer that is called once makes the logits that `tail` maps to the final ones.
        self.tail = tail_of(self.model.config, made[0], final) if len(made) == 1 else None
        raw = made[0] if made else final
        self.dtype = raw.dtype
        return float(final.abs().max()), rounding_of(raw)

    def attention(self) -> AbstractContextManager[None]:
        """Return the context for the model's own attention, which is eager if the probe found that necessary."""
        return changed(self.eager)

    def rotary_length(self, length: int | None) -> AbstractContextManager[None]:
        """Return the context in which rotary frequencies are those of this length, if they depend on one."""
        return nullcontext() if self.rotary is None or length is None else rotary_length(self.model, length)

    def forget(self) -> None:
        """Free the cached prefix, which is stale once the weights change."""
        self._prefix = None
        self._forked_prefix = None

    def _forked(self, batch: Batch) -> LogitReader | JoinedReader | None:
        """Run a batch in the model's own attention and cache."""
        num_cached, cache = 0, None
        if batch.prefix is not None:
            num_cached, cache = len(batch.prefix), self._cached_by_model(batch.prefix)
        if not batch.trees:
            return None
        if not batch.forks:
            return self._rows_after(without_prefix(batch.requests, num_cached), num_cached, cache)

        layout = lay_out_forks(batch.trees, num_cached)
        contexts = rows_after(num_cached, layout.contexts, layout.context_lengths, pads_left=True)
        ends = np.cumsum([len(layout.context_reads), *(len(group.reads) for group in layout.groups)])
        first_targets, *targets_by_group = np.split(layout.targets[layout.order], ends[:-1])
        if cache is not None:
            cache = copied(cache, len(layout.contexts))
        first, cache = self._forward_rows(
            contexts, layout.context_reads, first_targets, cache=cache, keeps_cache=bool(layout.groups)
        )
        readers = [first] if len(first_targets) else []
        for group, targets in zip(layout.groups, targets_by_group, strict=True):
            indices = self._indices(group.context_of_row)
            if group is layout.groups[-1]:
                cache.reorder_cache(indices)
                of_group = cache
            else:
                of_group = copied_rows(cache, indices)
            rows = contexts.continued(group.context_of_row, group.rows, group.lengths)
            reader, _ = self._forward_rows(rows, group.reads, targets, cache=of_group, keeps_cache=True)
            readers.append(reader)
        return JoinedReader(readers, layout.order)

    def _rows_after(self, requests: Sequence[ScoreRequest], num_cached: int, cache: Any) -> LogitReader:
        """Run whole rows, padded on the right, after a cached prefix or none."""
        layout = lay_out_rows(requests)
        rows = rows_after(num_cached, layout.tokens, layout.lengths)
        if cache is not None:
            cache = copied(cache, len(layout.tokens))
        reader, _ = self._forward_rows(rows, layout.reads, layout.targets, cache=cache, keeps_cache=cache is not None)
        return reader

    def _cached_by_model(self, prefix: Ids) -> Any:
        """Return the model's own cache of a prefix, which must not be changed. One prefix is cached at a time."""
        if self._forked_prefix is None or self._forked_prefix[0] is not prefix:
            self._forked_prefix = None  # free its memory first
            row = rows_after(0, prefix[None], np.array([len(prefix)]))
            last = np.array([len(prefix) - 1])
            _, cache = self._forward_rows(row, last, prefix[-1:], keeps_cache=True)
            self._forked_prefix = (prefix, cache)
        return self._forked_prefix[1]

    @torch.no_grad()
    def measure_states(self) -> RowStates:
        """Return the memory of what a row leaves in the model's own cache, from those of a short and a longer row."""
        short, long = STATE_LENGTHS
        sizes = []
        for length in STATE_LENGTHS:
            tokens = np.zeros(length, np.int32)
            with self.attention():
                sizes.append(bytes_in(self._cached_by_model(tokens)))
        self.forget()
        per_token = (sizes[1] - sizes[0]) / (long - short)
        activations = activation_bytes(self.model.config)
        return RowStates(per_token=per_token / activations, per_row=(sizes[0] - short * per_token) / activations)

    def _indices(self, values: Ints) -> torch.Tensor:
        return to_device(values.astype(np.int64), self.device)

    def _forward_rows(
        self, rows: CachedRows, reads: Ints, targets: Ids, *, cache: Any = None, keeps_cache: bool = False
    ) -> tuple[LogitReader, Any]:
        """Run rows after what a cache holds; return the reader of their logits, and the cache with these rows.

        Raise Unsupported if the model leaves no cache.
        """
        reader, outputs = self._forward(
            rows.tokens,
            reads,
            targets,
            attention_mask=to_device(rows.mask.astype(np.int64), self.device),
            position_ids=rows.positions,
            cache=cache,
            uses_cache=keeps_cache,
        )
        if not keeps_cache:
            return reader, None
        left = getattr(outputs, self.cache_argument, None)
        if not hasattr(left, 'reorder_cache'):
            raise Unsupported('a cache that cannot be copied')
        return reader, left

    def _stream(self, stream: Stream, prefix: dict[int, KeyValue], *, is_cached: bool = False) -> LogitReader:
        """Run trees as one row."""
        engine = self.engine_attention
        layout = TreeLayout(stream, self.device, prefix, is_cached=is_cached, key_bias=engine.key_bias)
        with engine.using(layout):
            return self._forward(
                stream.tokens[None],
                stream.reads,
                stream.targets,
                position_ids=stream.depths[None],
                attention_mask=engine.mask(self.device),
            )[0]

    def _padded_rows(self, batch: Batch) -> LogitReader:
        """Run padded rows, with padding and hidden tokens masked."""
        if batch.padded_to:
            return self._rows_of_reference(batch)
        rows = lay_out_rows(batch.requests)
        columns = np.arange(rows.tokens.shape[1])
        seen = columns < rows.lengths[:, None]
        if self.hidden_token_id is not None:
            seen &= rows.tokens != self.hidden_token_id
        mask = to_device(seen.astype(np.int64), self.device)
        with self.attention():
            return self._forward(rows.tokens, rows.reads, rows.targets, attention_mask=mask)[0]

    def _rows_of_reference(self, batch: Batch) -> LogitReader:
        """Run rows as llm-foundry does: padded to `padded_to`, every padding token masked, with eager attention.

        Where all tokens up to a position are masked, eager attention takes the mean over the whole row, padding
        included, and other implementations have their own rules.
        """
        rows = lay_out_rows(batch.requests, padded_to=batch.padded_to, padding=self.hidden_token_id)
        seen = rows.tokens != self.hidden_token_id
        mask = to_device(seen.astype(np.int64), self.device)
        with changed(eager_changes(self.model)):
            return self._forward(rows.tokens, rows.reads, rows.targets, attention_mask=mask)[0]

    def _forward(
        self,
        tokens: Ids,
        reads: Ints,
        targets: Ids,
        *,
        attention_mask: torch.Tensor | None,
        position_ids: npt.NDArray[np.integer[Any]] | None = None,
        cache: Any = None,
        uses_cache: bool = False,
    ) -> tuple[LogitReader, Any]:
        """Run the model on tokens [R, L]; return the reader of logits at flat positions of [R * L], and the outputs."""
        arguments: dict[str, Any] = {
            'input_ids': to_device(tokens.astype(np.int64), self.device),
            'attention_mask': attention_mask,
            'use_cache': uses_cache,
        }
        if cache is not None:
            arguments[self.cache_argument] = cache
        if position_ids is not None and self.takes_positions:
            arguments['position_ids'] = to_device(position_ids.astype(np.int64), self.device)
        reader = LogitReader(reads, targets, self.device)
        layer = output_layer(self.model)
        with self.scanning(tokens.shape[1]):
            if layer is None or self.tail is None:
                # The model does something unknown to its logits: it makes those of all positions.
                outputs = self.model(**arguments)
                logits = logits_of(outputs)
                reader.take_all(logits.reshape(-1, logits.shape[-1]))
            else:
                with reading(layer, reader, self.tail):
                    outputs = self.model(**arguments)
        self.num_forwards += 1
        return reader, outputs


def batch_stream(batch: Batch) -> Stream:
    """Return the trees of a batch as a stream, after its cached prefix."""
    return lay_out_stream(batch.trees, 0 if batch.prefix is None else len(batch.prefix))


def unwrapped(model: Any) -> Any:
    """Return the model without its FSDP and PEFT wrappers."""
    while hasattr(model, '_fsdp_wrapped_module'):
        model = model._fsdp_wrapped_module
    return model.get_base_model() if hasattr(model, 'get_base_model') else model


def is_sharded(model: Any) -> bool:
    """Return whether FSDP shards the model, so that all ranks must make the same forwards."""
    return any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in model.modules())


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The tokens per batch of scoring and of generation, and the requests per continuous batch (None: the default)."""

    scoring: int
    generation: int
    requests: int | None = None


def automatic_budget(
    config: Any,
    device: torch.device,
    *,
    cached_bytes: int,
    num_tokens: int,
    num_generations: int,
    num_ranks: int,
    gathered_bytes: int = 0,
    forks: bool = False,
) -> Budget:
    """Return what fits into free memory, halved while ranks would have too few batches.

    `cached_bytes` is the size of a token in the KV cache; `gathered_bytes` that of the weights that FSDP gathers at a
    time. `forks` if scoring is in the layout FORKED.
    """
    most = MOST_TOKENS.get(device.type, MOST_TOKENS['cpu'])
    least = LEAST_TOKENS.get(device.type, LEAST_TOKENS['cpu'])
    free = free_bytes(device)
    if free is None:
        budget = Budget(scoring=most, generation=most)
    else:
        budget = budget_in_memory(config, free - gathered_bytes, cached_bytes=cached_bytes, most=most, forks=forks)

    def halved(tokens_per_batch: int) -> int:
        while tokens_per_batch // 2 >= least and LEAST_BATCHES * tokens_per_batch * num_ranks > num_tokens:
            tokens_per_batch //= 2
        return tokens_per_batch

    return Budget(
        scoring=halved(budget.scoring),
        generation=halved(budget.generation),
        requests=requests_per_batch(num_generations, num_ranks),
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, with what torch has reserved and does not use; None on a CPU."""
    if device.type != 'cuda':
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused


def unused_bytes(device: torch.device) -> int:
    """Return the memory that nobody uses, on a CPU without that of cached files; 0 if the system does not tell."""
    free = free_bytes(device)
    if free is not None:
        return free
    num_ranks = distributed.get_world_size() if distributed.is_initialized() else 1  # they may share the machine
    try:
        return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // num_ranks
    except ValueError:
        return 0


def budget_in_memory(
    config: Any, free: int, *, cached_bytes: int, most: int = MOST_TOKENS['cuda'], forks: bool = False
) -> Budget:
    """Return the largest powers of two of tokens, at most `most`, that fit into this many bytes.

    Scoring that forks holds states of as many bytes as its activations. Generation also holds the KV cache and the keys
    and values of prompts that enter it.
    """
    per_token = activation_bytes(config)
    scoring_bytes = 2 * per_token if forks else per_token
    generation_bytes = per_token + (CACHED_PER_TOKEN + 1) * cached_bytes

    def tokens_that_fit(bytes_per_token: int) -> int:
        tokens = max(1, int((SHARE_OF_MEMORY * free - CHUNK_BYTES) / bytes_per_token))
        power_of_two = 1 << (tokens.bit_length() - 1)
        return min(most, power_of_two)

    return Budget(scoring=tokens_that_fit(scoring_bytes), generation=tokens_that_fit(generation_bytes))


def activation_bytes(config: Any) -> int:
    """Return the estimated size of a token's activations at the peak of a layer, in float32.

    These are the residual stream, its norm, query, key and value, and three times the feed-forward width.
    """
    config = config.get_text_config()
    width: int = getattr(config, 'hidden_size', None) or config.d_model
    inner_width: int = getattr(config, 'intermediate_size', None) or 4 * width
    return FLOAT32_BYTES * (6 * width + 3 * inner_width)
