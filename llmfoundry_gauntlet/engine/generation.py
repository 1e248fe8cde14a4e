"""Replies: pools of requests in, texts out.

Own code and not transformers' `generate` (4.53), which runs a batch at full width until its last row is done, looks for
stop strings in prompt and reply together, and draws from the global random state. Here a row leaves as soon as it is
done and a waiting one takes its place, a prompt is run once for all replies that are wanted to it, and a draw depends
on its request alone. The model's own forward, attention and masks are used as they are.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import distributed

from llmfoundry_gauntlet.engine import plan
from llmfoundry_gauntlet.engine.language_model import CausalLanguageModel, is_sharded
from llmfoundry_gauntlet.engine.layout import Stream, lay_out_stream
from llmfoundry_gauntlet.engine.logits import output_layer, rounding_of
from llmfoundry_gauntlet.engine.plan import grow_trees, in_order, make_tree
from llmfoundry_gauntlet.engine.pool_run import PoolRun, Row, Usage, choose
from llmfoundry_gauntlet.engine.pools import Pool
from llmfoundry_gauntlet.engine.reply import ReplyDecoder
from llmfoundry_gauntlet.engine.row_cache import RowCache
from llmfoundry_gauntlet.engine.tree_attention import KeyValue, tree_attention, tree_layout
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.types import GenerateRequest, Generation, Ids, Ints, ItemKey, ScoreRequest

log = logging.getLogger(__name__)

CACHE = 'cache'  # keys and values in our buffers, through transformers' cache interface
STREAM = 'stream'  # the same, and prompts run as a token stream: no padding, shared beginnings once
TUPLES = 'tuples'  # the same for models that take and give them as tuples
NO_CACHE = 'no cache'  # every step runs whole rows: for every model
WAYS = (STREAM, CACHE, TUPLES, NO_CACHE)

NEXT = np.zeros(1, np.int32)  # stands for the first token of a reply

Choice = Callable[[Sequence[Row], torch.Tensor], list[int]]


class ReplyWriter:
    """Writes the replies to pools with a language model. `way` is what the model can do (see `WAYS`)."""

    def __init__(self, language_model: CausalLanguageModel, decoder: ReplyDecoder, way: str = NO_CACHE) -> None:
        self.language_model = language_model
        self.decoder = decoder
        self.way = way
        self.usage = Usage()
        self.rounding = 0.0  # relative, of the model's precision; 0 for float32
        self.choose: Choice = choose
        self.most_rows: int | None = None  # at a time, once the device's memory was found too small for more
        self.is_sharded = is_sharded(language_model.model)
        self.takes_positions = 'position_ids' in inspect.signature(unwrapped(language_model.model).forward).parameters

    @property
    def streams(self) -> bool:
        """Return whether prompts run as a token stream."""
        return self.way == STREAM

    @property
    def keeps(self) -> bool:
        """Return whether keys and values are kept from token to token."""
        return self.way != NO_CACHE

    @contextmanager
    def trying(self, way: str, choice: Choice) -> Iterator[None]:
        """Within it replies are written in a given way, with tokens chosen otherwise, to their full length."""
        before = self.way, self.choose, self.decoder, self.usage
        self.way, self.choose, self.usage = way, choice, Usage()
        self.decoder = ReplyDecoder(self.decoder.tokenizer)
        try:
            yield
        finally:
            self.way, self.choose, self.decoder, self.usage = before

    def write(self, pool: Pool) -> list[Generation]:
        """As `run`, but equal requests from which nothing is drawn share a reply."""
        written_as = first_of_equal(pool.requests)
        wanted = [request for request in pool.requests if written_as[request.key] == request.key]
        done = {reply.key: reply for reply in self.run(replace(pool, requests=tuple(wanted)))}
        return [replace(done[first], key=key) for key, first in written_as.items()]

    @torch.no_grad()
    def run(self, pool: Pool) -> list[Generation]:
        """The replies to a pool's requests, in their order.

        Where the device's memory is too small, fewer rows are written at a time, from then on as well. Raises
        ModelError where a single row does not fit, or where the model is sharded.
        """
        done: dict[ItemKey, Generation] = {}
        while True:
            num_rows = min(pool.num_rows, self.most_rows or pool.num_rows)
            try:
                with self.language_model.rotary_length(pool.rope_length):
                    PoolRun(self, pool, num_rows, done).run()
                return [done[request.key] for request in pool.requests]
            except torch.OutOfMemoryError as error:
                failure = str(error)
            self._make_room(num_rows, pool, failure)

    def _make_room(self, num_rows: int, pool: Pool, failure: str) -> None:
        too_large = f'{num_rows} rows of up to {pool.longest} tokens do not fit into the memory of the device'
        if self.is_sharded:
            raise ModelError(
                f'{too_large}, and ranks of a sharded model cannot try again alone; '
                f'give tokens_per_batch: {pool.tokens_per_batch // 2}: {failure}'
            )
        if num_rows == 1:
            raise ModelError(f'{too_large}: {failure}')
        if self.language_model.device.type == 'cuda':
            torch.cuda.empty_cache()
        self.most_rows = num_rows // 2
        log.warning('out of memory with %d replies at a time: %d from now on', num_rows, self.most_rows)

    def is_any(self, active: bool) -> bool:
        """Return whether this rank has work, or any rank where all must make the same forwards."""
        if not self.is_sharded or not distributed.is_initialized():
            return active
        flag = torch.tensor(int(active), device=self.language_model.device)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        return bool(flag)

    def take_part(self) -> None:
        """A forward for the sake of other ranks."""
        self.language_model.model(input_ids=self.ids([[0]]), use_cache=False)

    def ids(self, tokens: Any) -> torch.Tensor:
        """Token ids or positions as a tensor."""
        return torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=self.language_model.device)

    def forward(
        self,
        tokens: Ints,
        seen: torch.Tensor,
        positions: torch.Tensor | None,
        ends: torch.Tensor | None = None,
        cache: RowCache | None = None,
        *,
        has_past: bool = False,
    ) -> torch.Tensor:
        """Logits after the last token of each row, or after those at `ends`: float32 [rows, V]."""
        arguments: dict[str, Any] = {'input_ids': self.ids(tokens), 'attention_mask': seen.long()}
        arguments['use_cache'] = cache is not None
        if self.takes_positions and positions is not None:
            arguments['position_ids'] = positions
        if cache is not None and self.way in (STREAM, CACHE):
            arguments['past_key_values'] = cache
        elif cache is not None and has_past:
            arguments['past_key_values'] = cache.as_tuples()
            arguments['attention_mask'] = cache.seen_by_tuples().long()
        model = self.language_model.model
        layer = output_layer(model)

        def pick(states: torch.Tensor) -> torch.Tensor:
            return states[:, -1:] if ends is None else states[torch.arange(len(ends)), ends][:, None]

        with self.language_model.attention(), picking(layer, pick) as made:
            output = model(**arguments)
        if cache is not None and self.way == TUPLES:
            cache.take_tuples(output.past_key_values)
        logits: torch.Tensor = output.logits
        self.rounding = rounding_of(made[0] if made else logits)
        return (logits if made else pick(logits))[:, -1].float()

    def run_stream(self, contexts: Sequence[Ids], cache: RowCache) -> torch.Tensor:
        """Runs prompts as a token stream and keeps their keys and values. Logits after each, float32 [prompts, V]."""
        language_model = self.language_model
        stream, ends = stream_of(contexts)
        self.usage.prompt_tokens += len(stream.tokens)
        found: dict[int, KeyValue] = {}
        layout = tree_layout(stream, language_model.device, found, keep=len(stream.tokens))
        model = language_model.model
        layer = output_layer(model)
        last = self.ids(ends)
        with tree_attention(model.config, layout), picking(layer, lambda states: states[:, last]) as made:
            logits: torch.Tensor = model(
                input_ids=self.ids(stream.tokens[None]),
                position_ids=self.ids(stream.depths[None]),
                attention_mask=torch.zeros(1, 1, 1, 1, device=language_model.device),
                use_cache=False,
            ).logits
        places = [np.flatnonzero(stream.ends[: end + 1] > end) for end in ends]  # a token and those before it
        cache.take_stream(found, [self.ids(place) for place in places])
        return (logits if made else logits[:, last])[0].float()


def first_of_equal(requests: Sequence[GenerateRequest]) -> dict[ItemKey, ItemKey]:
    """By each request's name, in their order, that of the first which must have the same reply."""
    first: dict[tuple[object, ...], ItemKey] = {}
    names: dict[ItemKey, ItemKey] = {}
    for request in requests:
        limits = (request.max_new_tokens, request.stops)
        wanted = (request.context.tobytes(), *limits, request.verbatim, request.restores_space)
        is_drawn = request.sampling.temperature > 0
        names[request.key] = request.key if is_drawn else first.setdefault(wanted, request.key)
    return names


@contextmanager
def picking(
    layer: torch.nn.Module | None, pick: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """Within it the output layer makes logits of the hidden states that `pick` takes of all. Gives what it made."""
    made: list[torch.Tensor] = []
    if layer is None:
        yield made
        return
    before = layer.register_forward_pre_hook(lambda _, inputs: (pick(inputs[0]),))
    after = layer.register_forward_hook(lambda _, inputs, logits: made.append(logits))
    try:
        yield made
    finally:
        before.remove()
        after.remove()


def stream_of(contexts: Sequence[Ids]) -> tuple[Stream, Ints]:
    """Different prompts as a stream of trees, and where each of them ends."""
    requests = [
        ScoreRequest(key=ItemKey('prompt', row), contexts=(context,), continuations=(NEXT,))
        for row, context in enumerate(contexts)
    ]
    most = sum(map(len, contexts))
    trees = [make_tree(group) for group in grow_trees(in_order(requests), most, plan.STREAM)]
    stream = lay_out_stream(trees)
    ends = np.zeros(len(contexts), np.int64)
    ends[[request.key.row for tree in trees for request in tree.requests]] = stream.reads
    return stream, ends


def unwrapped(model: Any) -> Any:
    """The model below FSDP."""
    while hasattr(model, '_fsdp_wrapped_module'):
        model = model._fsdp_wrapped_module
    return model
