"""The only room that knows how torch models are run: planned batches in, log-probabilities out."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from llmfoundry_gauntlet.engine.eager import Change, changed, eager_changes
from llmfoundry_gauntlet.engine.layout import (
    Stream,
    lay_out_rows,
    lay_out_stream,
    lay_out_tokens,
    lay_out_tree_rows,
)
from llmfoundry_gauntlet.engine.logits import (
    LogitReader,
    Tail,
    TokenScores,
    output_layer,
    reading,
    rounding_of,
    tail_of,
)
from llmfoundry_gauntlet.engine.outputs import split_outputs
from llmfoundry_gauntlet.engine.plan import MASKED_ROWS, PADDED_ROWS, Batch
from llmfoundry_gauntlet.engine.rotary import rotary_length
from llmfoundry_gauntlet.engine.rotary_lengths import RotaryLengths
from llmfoundry_gauntlet.engine.tree_attention import KeyValue, tree_attention, tree_layout
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.types import Ids, Ints, ScoreOutput

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Learned:
    """Observations of a forward.

    `tail` is what it does to its output layer's logits, None where that is not known: then the model makes the logits
    of all positions. `dtype` is what it computes in.
    """

    tail: Tail | None
    dtype: torch.dtype | None


class CausalLanguageModel:
    """A Hugging Face causal language model, also wrapped by FSDP: `model` is what is called.

    `hidden_token_id` names a token that is masked wherever it stands in padded rows, as llm-foundry does with real
    eos tokens where pad is eos; None masks padding alone. `rotary` says which length decides rotary frequencies; None
    where none does. `learned` is what the probe found out of the model.
    """

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        hidden_token_id: int | None = None,
        rotary: RotaryLengths | None = None,
    ) -> None:
        self.model = getattr(model, '_orig_mod', model)  # below torch.compile: each batch has a shape of its own
        self.device = device
        self.hidden_token_id = hidden_token_id
        self.rotary = rotary
        self.learned = Learned(tail=None, dtype=None)
        self.num_forwards = 0
        self.eager: list[Change] = []  # what makes padded rows and generation use eager attention, if they must
        self.most_tokens: int | None = None  # of a batch, once the device's memory was found too small for more
        self._prefix: tuple[Ids, dict[int, KeyValue]] | None = None

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    @torch.no_grad()
    def run(self, batch: Batch) -> list[ScoreOutput]:
        """The outputs of a batch, in the order of its requests.

        Where the device's memory is too small, the batch is run in halves, and larger ones from then on as well.
        Raises ModelError where a single request does not fit, or where the model is sharded.
        """
        if self.most_tokens is not None and batch.num_tokens > self.most_tokens and batch.trees:
            halves = batch.halves()
            if len(halves) > 1:
                return [output for half in halves for output in self.run(half)]
        try:
            return self._run(batch)
        except torch.OutOfMemoryError as error:
            failure = str(error)
        # Here the exception is gone, and with it the tensors that its frames held.
        self._make_room(batch, failure)
        return [output for half in batch.halves() for output in self.run(half)]

    def _make_room(self, batch: Batch, failure: str) -> None:
        too_large = f'{batch.num_tokens} tokens do not fit into the memory of the device'
        if is_sharded(self.model):
            advice = 'all ranks of a sharded model must make the same forwards, so a batch cannot be split here'
            raise ModelError(f'{too_large}; {advice}; give tokens_per_batch: {batch.num_tokens // 2}: {failure}')
        if len(batch.halves()) == 1:
            what = f'{batch.requests[0].key}: ' if batch.trees else 'a kept prefix: '
            raise ModelError(f'{what}{too_large}: {failure}')
        if self.device.type == 'cuda':
            torch.cuda.empty_cache()
        self.most_tokens = batch.num_tokens // 2
        log.warning(
            'out of memory with %d tokens: batches of more than %d are split; tokens_per_batch: %d avoids it',
            batch.num_tokens,
            self.most_tokens,
            self.most_tokens,
        )

    def _run(self, batch: Batch) -> list[ScoreOutput]:
        with self.rotary_length(batch.rope_length):
            scores = self._scores(batch)
        if scores is None:
            return []
        return split_outputs(batch.requests, scores.logprobs, scores.is_argmax, scores.num_top)

    def _scores(self, batch: Batch) -> TokenScores | None:
        """Return the values of a batch's scored tokens; None for a batch that runs a prefix alone."""
        if batch.layout == PADDED_ROWS:
            return self._padded_rows(batch)
        if batch.layout == MASKED_ROWS:
            return self._masked_rows(lay_out_stream(batch.trees))
        if not batch.trees:  # a forward whatever is kept: sharded ranks must make equally many
            self.forget()
        prefix = None if batch.prefix is None else self._kept(batch.prefix)
        if not batch.trees:
            return None
        num_kept = 0 if batch.prefix is None else len(batch.prefix)
        return self._stream(lay_out_stream(batch.trees, num_kept), prefix)

    def _kept(self, prefix: Ids) -> dict[int, KeyValue]:
        """Keys and values of a prefix by layer. One is kept at a time."""
        if self._prefix is None or self._prefix[0] is not prefix:
            self._prefix = None  # frees its memory first
            found: dict[int, KeyValue] = {}
            self._stream(lay_out_tokens(prefix), found, keep=len(prefix))
            self._prefix = (prefix, found)
        return self._prefix[1]

    @torch.no_grad()
    def learn(self, batch: Batch) -> tuple[float, float]:
        """Learns from a batch of padded rows what the model does to its output layer's logits.

        Returns the largest of them and the relative rounding of their precision, 0 for float32.
        """
        layer = output_layer(self.model)
        raw: list[torch.Tensor] = []
        handle = None
        if layer is not None:
            handle = layer.register_forward_hook(lambda _, inputs, output: raw.append(output))
        ids = torch.from_numpy(lay_out_rows(batch.requests).tokens.astype(np.int64)).to(self.device)
        try:
            final = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        finally:
            if handle is not None:
                handle.remove()
        tail = tail_of(self.model.config, raw[0], final) if len(raw) == 1 else None
        logits = raw[0] if raw else final
        self.learned = Learned(tail=tail, dtype=logits.dtype)
        return float(final.abs().max()), rounding_of(logits)

    def use_eager_attention(self, reason: str) -> None:
        """Use eager attention in padded rows, masked rows and generation from now on; log the reason once."""
        if not self.eager:
            self.eager = eager_changes(self.model)
            log.warning('attention: %s; evaluation follows eager attention', reason)

    def attention(self) -> AbstractContextManager[None]:
        """Return the context in which the model attends as scores require, wherever the engine's own is not used."""
        return changed(self.eager)

    def rotary_length(self, length: int | None) -> AbstractContextManager[None]:
        """Return the context in which this length decides the model's rotary frequencies, where one does."""
        return nullcontext() if self.rotary is None or length is None else rotary_length(self.model, length)

    def forget(self) -> None:
        """Frees a kept prefix; the weights may change after it."""
        self._prefix = None

    def _stream(self, stream: Stream, prefix: dict[int, KeyValue] | None = None, *, keep: int = 0) -> TokenScores:
        """One row of trees. An attention mask of one element is handed through to the attention, which ignores it."""
        layout = tree_layout(stream, self.device, prefix, keep=keep)
        with tree_attention(self.model.config, layout):
            return self._forward(
                stream.tokens[None],
                stream.reads,
                stream.targets,
                position_ids=stream.depths[None],
                attention_mask=torch.zeros(1, 1, 1, 1, device=self.device),
            )

    def _masked_rows(self, stream: Stream) -> TokenScores:
        rows = lay_out_tree_rows(stream)
        shape = (rows.num_rows, rows.width)
        tokens, depths = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        ends = np.zeros(rows.num_rows * rows.width, np.int64)
        tokens.reshape(-1)[rows.places] = stream.tokens
        depths.reshape(-1)[rows.places] = stream.depths
        ends[rows.places] = rows.places + stream.ends - np.arange(len(stream.ends))
        columns = torch.arange(rows.width, device=self.device)
        closed = torch.from_numpy(ends.reshape(shape) - np.arange(rows.num_rows)[:, None] * rows.width).to(self.device)
        seen = (columns[None, :, None] >= columns[None, None]) & (closed[:, None, :] > columns[None, :, None])
        seen |= torch.eye(
            rows.width, dtype=torch.bool, device=self.device
        )  # padding sees itself: softmax of nothing is nan
        dtype = self.learned.dtype or next(self.model.parameters()).dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, torch.finfo(dtype).min)
        with self.attention():
            return self._forward(
                tokens, rows.places[stream.reads], stream.targets, position_ids=depths, attention_mask=mask[:, None]
            )

    def _padded_rows(self, batch: Batch) -> TokenScores:
        rows = lay_out_rows(batch.requests)
        mask = np.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]
        if self.hidden_token_id is not None:
            mask &= rows.tokens != self.hidden_token_id
        mask_ids = torch.from_numpy(mask.astype(np.int64)).to(self.device)
        with self.attention():
            return self._forward(rows.tokens, rows.reads, rows.targets, attention_mask=mask_ids)

    def _forward(
        self,
        tokens: Ids,
        reads: Ints,
        targets: Ids,
        *,
        attention_mask: torch.Tensor,
        position_ids: npt.NDArray[np.integer[Any]] | None = None,
    ) -> TokenScores:
        """Runs the model on tokens [R, L] and reads logits at positions of [R * L]."""
        arguments: dict[str, Any] = {
            'input_ids': torch.from_numpy(tokens.astype(np.int64)).to(self.device),
            'attention_mask': attention_mask,
            'use_cache': False,
        }
        if position_ids is not None:
            arguments['position_ids'] = torch.from_numpy(position_ids.astype(np.int64)).to(self.device)
        reader = LogitReader(reads, targets, self.device)
        tail = self.learned.tail
        layer = None if tail is None else output_layer(self.model)
        with nullcontext() if layer is None or tail is None else reading(layer, reader, tail):
            logits = self.model(**arguments).logits
        self.num_forwards += 1
        if layer is None:
            reader.take_all(logits.reshape(-1, logits.shape[-1]))
        return reader.scores()


def is_sharded(model: Any) -> bool:
    """Return whether FSDP holds the model's weights, so that all ranks must make the same forwards."""
    return any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in model.modules())
