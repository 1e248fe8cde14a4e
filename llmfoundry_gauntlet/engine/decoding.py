"""Run the forwards of generation, prompts and decoding steps, in the layout that the model supports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed

from llmfoundry_gauntlet.engine.kv_cache import CachedAttention, KVCache
from llmfoundry_gauntlet.engine.logits import output_layer, picking, rounding_of
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import grow_trees, in_order, make_tree
from llmfoundry_gauntlet.engine.transfer import to_device
from llmfoundry_gauntlet.engine.tree_attention import KeyValue, tree_layout
from llmfoundry_gauntlet.engine.trees import Stream, context_request, lay_out_stream
from llmfoundry_gauntlet.types import Bools, Ids, Ints

PROMPT_STREAM = 'prompt_stream'  # the engine's attention: prompts in a token stream, steps from the engine's KV cache
CACHE = 'cache'  # the model's own attention with the engine's KV cache, for models that take transformers' caches
NO_CACHE = 'no_cache'  # every step runs whole sequences; works with every model
GENERATION_LAYOUTS = (PROMPT_STREAM, CACHE, NO_CACHE)  # the fastest first


@dataclass(slots=True)
class Usage:
    """Counts of decoding steps and of the tokens that generation ran."""

    steps: int = 0
    generated_tokens: int = 0  # one per slot and step
    prompt_tokens: int = 0
    padding_tokens: int = 0

    @property
    def wasted(self) -> float:
        """Return the share of all computed tokens that was padding."""
        computed = self.generated_tokens + self.prompt_tokens + self.padding_tokens
        return self.padding_tokens / computed if computed else 0.0


class DecodingModel:
    """A language model that runs prompts and decoding steps in a `layout` of `GENERATION_LAYOUTS`."""

    def __init__(self, language_model: CausalLanguageModel, layout: str = NO_CACHE) -> None:
        self.language_model = language_model
        self.layout = layout
        self.usage = Usage()
        self.rounding = 0.0  # relative rounding error of the model's precision; 0 for float32

    @property
    def caches(self) -> bool:
        """Return whether keys and values are cached between steps."""
        return self.layout != NO_CACHE

    def run_prompts(self, contexts: Sequence[Ids], cache: KVCache, *, as_stream: bool) -> torch.Tensor:
        """Run right-aligned prompts into the cache; return their last logits, float32 [prompts, V]."""
        lengths = list(map(len, contexts))
        width = max(lengths)
        tokens = np.zeros((len(contexts), width), np.int64)
        seen = np.zeros((len(contexts), width), np.bool_)
        for row, context in enumerate(contexts):
            tokens[row, width - len(context) :] = context
            seen[row, width - len(context) :] = self.is_seen(context)
        mask = to_device(seen, self.language_model.device)
        cache.enter(lengths, mask)
        if as_stream and seen.sum() == sum(lengths):  # no token is hidden
            return self._run_stream(contexts, cache)
        self.usage.prompt_tokens += sum(lengths)
        self.usage.padding_tokens += tokens.size - sum(lengths)
        return self._forward(tokens, mask, positions_of(seen), cache=cache)

    def run_step(self, tokens: Sequence[int], positions: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Run the latest token of every slot in use; return the next logits, float32 [slots, V]."""
        cache.step()
        columns = np.array(tokens)[:, None], np.array(positions)[:, None]
        return self._forward(columns[0], cache.seen(), columns[1], cache=cache)

    def run_whole(self, contexts: Sequence[Ids], generated: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run prompts and their generations so far without a cache; return the last logits, float32 [prompts, V]."""
        whole = [np.append(*parts).astype(np.int64) for parts in zip(contexts, generated, strict=True)]
        width = max(map(len, whole))
        tokens = np.zeros((len(whole), width), np.int64)
        seen = np.zeros((len(whole), width), np.bool_)
        for row, (context, ids) in enumerate(zip(contexts, whole, strict=True)):
            tokens[row, : len(ids)] = ids
            seen[row, : len(ids)] = True
            seen[row, : len(context)] = self.is_seen(context)
        positions = None if self.language_model.hidden_token_id is None else positions_of(seen)
        self.usage.padding_tokens += tokens.size - len(whole)
        ends = self._ids([len(ids) - 1 for ids in whole])
        return self._forward(tokens, to_device(seen, self.language_model.device), positions, ends)

    def is_seen(self, context: Ids) -> Bools:
        """Return which tokens of a prompt are attended to: all but those that the reference masks."""
        hidden = self.language_model.hidden_token_id
        return np.ones(len(context), np.bool_) if hidden is None else context != hidden

    def is_any(self, active: bool) -> bool:
        """Return whether this rank has work left; if ranks run in step, whether any rank has."""
        if not self.language_model.in_step or not distributed.is_initialized():
            return active
        flag = torch.tensor(int(active), device=self.language_model.device)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        return bool(flag)

    def take_part(self) -> None:
        """Run a dummy forward so that other ranks can gather sharded weights."""
        self.language_model.model(input_ids=self._ids([[0]]), use_cache=False)

    def _ids(self, tokens: Any) -> torch.Tensor:
        return to_device(np.asarray(tokens, dtype=np.int64), self.language_model.device)

    def _forward(
        self,
        tokens: Ints,
        seen: torch.Tensor,
        positions: Ints | None,
        ends: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return the logits at the last token of each row, or at `ends`: float32 [rows, V]."""
        language_model = self.language_model
        mask: torch.Tensor | None = seen.long()
        attention: AbstractContextManager[None] = language_model.attention()
        if cache is not None and self.layout == PROMPT_STREAM:
            engine = language_model.engine_attention
            mask = engine.mask(language_model.device)
            attention = engine.using(
                CachedAttention(cache, tokens.shape[1], engine.key_bias, counts_masked=engine.counts_masked)
            )

        def pick(states: torch.Tensor) -> torch.Tensor:
            return (
                states[:, -1:] if ends is None else states[torch.arange(len(ends), device=ends.device), ends][:, None]
            )

        with attention:
            return self._logits(tokens, positions, mask, pick, cache if self.layout == CACHE else None)[:, -1]

    def _logits(
        self,
        tokens: Ints | Ids,
        positions: Ints | Ids | None,
        mask: torch.Tensor | None,
        pick: Callable[[torch.Tensor], torch.Tensor],
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return the logits of the positions that `pick` selects from [rows, T, ...]: float32 [rows, picked, V]."""
        arguments: dict[str, Any] = {'input_ids': self._ids(tokens), 'attention_mask': mask}
        if self.language_model.takes_positions and positions is not None:
            arguments['position_ids'] = self._ids(positions)
        model = self.language_model.model
        with picking(output_layer(model), pick) as made:
            logits: torch.Tensor = model(**arguments, use_cache=cache is not None, past_key_values=cache).logits
        self.rounding = rounding_of(made[0] if made else logits)
        return (logits if made else pick(logits)).float()

    def _run_stream(self, contexts: Sequence[Ids], cache: KVCache) -> torch.Tensor:
        """Run prompts as a token stream into the cache; return their last logits, float32 [prompts, V]."""
        device, engine = self.language_model.device, self.language_model.engine_attention
        stream, ends = stream_of(contexts)
        self.usage.prompt_tokens += len(stream.tokens)
        found: dict[int, KeyValue] = {}
        last = self._ids(ends)
        with engine.using(tree_layout(stream, device, found, is_cached=True, key_bias=engine.key_bias)):
            logits = self._logits(
                stream.tokens[None], stream.depths[None], engine.mask(device), lambda states: states[:, last]
            )
        places = np.zeros((len(contexts), max(map(len, contexts))), np.int64)
        for row, end in zip(places, ends, strict=True):
            path = np.flatnonzero(stream.ends[: end + 1] > end)  # a token and its ancestors
            row[len(row) - len(path) :] = path
        cache.take_stream(found, self._ids(places))
        return logits[0]


def positions_of(seen: Bools) -> Ints:
    """Return the position of each token among the unmasked tokens of its row."""
    positions: Ints = np.maximum(seen.cumsum(axis=1) - 1, 0)
    return positions


def stream_of(contexts: Sequence[Ids]) -> tuple[Stream, Ints]:
    """Return distinct prompts as a stream of trees, and the index of each prompt's last token."""
    requests = [context_request(context, row) for row, context in enumerate(contexts)]
    most = sum(map(len, contexts))
    trees = [make_tree(group) for group in grow_trees(in_order(requests), most)]
    stream = lay_out_stream(trees)
    ends = np.zeros(len(contexts), np.int64)
    ends[[request.key.row for tree in trees for request in tree.requests]] = stream.reads
    return stream, ends
