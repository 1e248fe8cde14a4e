"""Run the forwards of generation in the layout that the model supports; decode generations and find their ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import distributed

from llmfoundry_gauntlet.engine.attention import changed, eager_changes, to_device
from llmfoundry_gauntlet.engine.kv_cache import CachedAttention, KeptPrompt, KVCache
from llmfoundry_gauntlet.engine.logits import logits_of, output_layer, picking, rounding_of
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.plan import grow_trees, make_tree, sort_requests
from llmfoundry_gauntlet.engine.tree_attention import KeyValue, TreeLayout
from llmfoundry_gauntlet.engine.trees import Stream, context_request, lay_out_stream
from llmfoundry_gauntlet.errors import ModelError, tokenizer_errors
from llmfoundry_gauntlet.scoring.reasoning import GrowingAnswer, answer_stop
from llmfoundry_gauntlet.scoring.text import stop_position
from llmfoundry_gauntlet.types import Bools, GenerateRequest, Generation, Ids, Ints, Reasoning

PROMPT_STREAM = 'prompt_stream'  # the engine's attention: prompts in a token stream, steps from the engine's KV cache
FORKED_PROMPTS = 'forked_prompts'  # as CACHE; what prompts share runs once, and its states are copied
CACHE = 'cache'  # the model's own attention with the engine's KV cache, for models that take transformers' caches
NO_CACHE = 'no_cache'  # every step runs whole sequences; works with every model
GENERATION_LAYOUTS = (PROMPT_STREAM, FORKED_PROMPTS, CACHE, NO_CACHE)  # the fastest first

UNFINISHED = '\ufffd'  # decoded from an incomplete UTF-8 character
LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens at most
MAX_SHOWN = 20  # token ids in an error
NO_MARKS: Mapping[int, str] = MappingProxyType({})


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
        lengths = [len(context) for context in contexts]
        num_tokens, width = sum(lengths), max(lengths)
        tokens = np.full((len(contexts), width), self.padding, np.int64)
        seen = np.zeros((len(contexts), width), np.bool_)
        for row, context in enumerate(contexts):
            tokens[row, width - len(context) :] = context
            seen[row, width - len(context) :] = self.is_seen(context)
        mask = to_device(seen, self.language_model.device)
        cache.enter(lengths, mask)

        hides_tokens = seen.sum() < num_tokens  # a stream has no mask for them
        if as_stream and not hides_tokens:
            return self._run_stream(contexts, cache)
        self.usage.prompt_tokens += num_tokens
        self.usage.padding_tokens += tokens.size - num_tokens
        return self._forward(tokens, mask, positions_of(seen), cache=cache, is_hidden=hides_a_row(seen))[:, -1]

    def run_shared(self, ids: Ids, cache: KVCache) -> KeptPrompt:
        """Run the first tokens of several prompts; return what they leave in the cache. A slot must be free."""
        self.run_prompts([ids], cache, as_stream=False)
        return cache.keep_prompt(ids)

    def run_after(self, kept: KeptPrompt, rests: Sequence[Ids], cache: KVCache) -> torch.Tensor:
        """Run the rests of prompts, of equal length, after what they share; return their last logits [prompts, V]."""
        tokens = np.stack(rests).astype(np.int64)
        cache.enter_after(kept, *tokens.shape)
        self.usage.prompt_tokens += tokens.size
        positions = np.tile(len(kept.ids) + np.arange(tokens.shape[1]), (len(tokens), 1))
        return self._forward(tokens, cache.seen(), positions, cache=cache)[:, -1]

    def run_step(
        self, tokens: Sequence[int], positions: Sequence[int], cache: KVCache, num_shared: int = 0
    ) -> torch.Tensor:
        """Run the latest token of every slot in use; return the next logits, float32 [slots, V].

        The first `num_shared` tokens of all slots are the same.
        """
        cache.step()
        latest = np.array(tokens)[:, None]
        positions_of_latest = np.array(positions)[:, None]
        return self._forward(latest, cache.seen(), positions_of_latest, cache=cache, num_shared=num_shared)[:, -1]

    def run_whole(self, contexts: Sequence[Ids], generated: Sequence[Sequence[int]], num_last: int = 1) -> torch.Tensor:
        """Run prompts and their generations so far without a cache.

        Return the logits after each of the last `num_last` tokens, float32 [prompts, num_last, V].
        """
        rows = [
            np.concatenate([context, np.array(ids, np.int64)]) for context, ids in zip(contexts, generated, strict=True)
        ]
        lengths = np.array([len(row) for row in rows])
        shape = (len(rows), lengths.max())
        tokens = np.full(shape, self.padding, np.int64)
        seen = np.arange(shape[1]) < lengths[:, None]
        for number, (context, row) in enumerate(zip(contexts, rows, strict=True)):
            tokens[number, : len(row)] = row
            # Hidden tokens are masked in prompts only; a generated token is always seen.
            seen[number, : len(context)] = self.is_seen(context)
        # Without hidden tokens, positions are those that every model counts by itself.
        positions = None if self.language_model.hidden_token_id is None else positions_of(seen)
        self.usage.padding_tokens += tokens.size - len(rows)
        mask = to_device(seen, self.language_model.device)
        ends = lengths[:, None] - num_last + np.arange(num_last)
        return self._forward(tokens, mask, positions, self._ids(ends), is_hidden=hides_a_row(seen))

    @property
    def padding(self) -> int:
        """Return the token that fills rows. Where a prompt is hidden as a whole, its token's values may be read."""
        hidden = self.language_model.hidden_token_id
        return 0 if hidden is None else hidden

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
        *,
        num_shared: int = 0,
        is_hidden: bool = False,
    ) -> torch.Tensor:
        """Return the logits at the last token of each row, or at `ends` [rows, n]: float32 [rows, n, V].

        `is_hidden` if a prompt is hidden as a whole: eager attention then takes the mean over its row, as in scoring,
        and other implementations have their own rules. The first `num_shared` tokens of all slots are the same.
        """
        language_model = self.language_model
        mask: torch.Tensor | None = seen.long()
        attention: AbstractContextManager[None]
        if cache is not None and self.layout == PROMPT_STREAM:
            engine = language_model.engine_attention
            mask = engine.mask(language_model.device)
            attention = engine.using(
                CachedAttention(
                    cache,
                    tokens.shape[1],
                    engine.key_bias,
                    counts_masked=engine.counts_masked,
                    num_shared=num_shared,
                )
            )
        elif is_hidden:
            attention = changed(eager_changes(language_model.model))
        else:
            attention = language_model.attention()

        def pick(states: torch.Tensor) -> torch.Tensor:
            if ends is None:
                return states[:, -1:]
            rows = torch.arange(len(ends), device=ends.device)
            return states[rows[:, None], ends]

        # The engine's attention writes to the cache itself; in other layouts the model does.
        models_cache = None if self.layout == PROMPT_STREAM else cache
        with attention, language_model.scanning(tokens.shape[1]):
            return self._logits(tokens, positions, mask, pick, models_cache)

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
        if cache is not None:
            arguments[self.language_model.cache_argument] = cache
        model = self.language_model.model
        with picking(output_layer(model), pick) as made:
            logits = logits_of(model(**arguments, use_cache=cache is not None))
        self.rounding = rounding_of(made[0] if made else logits)
        return (logits if made else pick(logits)).float()

    def _run_stream(self, contexts: Sequence[Ids], cache: KVCache) -> torch.Tensor:
        """Run prompts as a token stream into the cache; return their last logits, float32 [prompts, V]."""
        device, engine = self.language_model.device, self.language_model.engine_attention
        stream, ends = lay_out_prompts(contexts)
        self.usage.prompt_tokens += len(stream.tokens)
        states: dict[int, KeyValue] = {}
        last = self._ids(ends)
        with engine.using(TreeLayout(stream, device, states, is_cached=True, key_bias=engine.key_bias)):
            logits = self._logits(
                stream.tokens[None], stream.depths[None], engine.mask(device), lambda hidden: hidden[:, last]
            )
        cache.take_stream(states, self._ids(places_of_prompts(stream, ends)))
        return logits[0]


def positions_of(seen: Bools) -> Ints:
    """Return the position of each token among the unmasked tokens of its row; 1 if masked, as in `generate`."""
    return np.where(seen, seen.cumsum(axis=1) - 1, 1)


def hides_a_row(seen: Bools) -> bool:
    """Return whether no token of some row is seen."""
    return not seen.any(axis=1).all()


def lay_out_prompts(contexts: Sequence[Ids]) -> tuple[Stream, Ints]:
    """Return distinct prompts as a stream of trees, and the index of each prompt's last token."""
    requests = [context_request(context, row) for row, context in enumerate(contexts)]
    num_tokens = sum(map(len, contexts))  # all prompts fit into the batch, so a tree may have any size
    trees = [make_tree(group) for group in grow_trees(sort_requests(requests), num_tokens)]
    stream = lay_out_stream(trees)
    # Requests are read at their prompt's last token, in the order of the trees.
    rows = [request.key.row for tree in trees for request in tree.requests]
    ends = np.zeros(len(contexts), np.int64)
    ends[rows] = stream.reads
    return stream, ends


def places_of_prompts(stream: Stream, ends: Ints) -> Ints:
    """Return where the tokens of prompts that end at `ends` are in a stream, right-aligned [prompts, longest]."""
    paths = [np.flatnonzero(stream.ends[: end + 1] > end) for end in ends]  # the last token and its ancestors
    places = np.zeros((len(paths), max(map(len, paths))), np.int64)
    for row, path in zip(places, paths, strict=True):
        row[len(row) - len(path) :] = path
    return places


class GenerationDecoder:
    """Decode generations with a tokenizer. The tokens `end_ids` end a generation; special tokens are not in its text.

    Those that mark reasoning, such as Magistral's [THINK], are kept for requests that say so.
    If the tokenizer drops a leading space, one is prepended, as in Composer 0.32
    (`models/huggingface.py:eval_forward`): a generation may start with a delimiter that begins with a space.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        keeps_space = len(tokenizer(' a', add_special_tokens=False)['input_ids']) == 1
        self.before = '' if keeps_space else ' '
        self._is_known: dict[int, bool] = {}  # of ids in generations that could not be decoded
        self._special = {
            id_: token.content
            for id_, token in getattr(tokenizer, 'added_tokens_decoder', {}).items()
            if token.special and id_ not in self.end_ids
        }

    def marks_of(self, reasoning: Reasoning | None) -> dict[int, str]:
        """Return the texts of special tokens that mark reasoning, or are a part of such a mark, by id."""
        if reasoning is None:
            return {}
        marks = [mark for pair in reasoning.markers for mark in (pair.start, pair.end)]
        return {id_: text for id_, text in self._special.items() if any(text in mark for mark in marks)}

    def text(
        self,
        ids: list[int],
        *,
        verbatim: bool = False,
        restores_space: bool = True,
        marks: Mapping[int, str] = NO_MARKS,
    ) -> str:
        """Return the text of a whole generation, with the tokenizer's clean-up of spaces unless `verbatim`.

        `marks` are the texts of special tokens to be kept. Ids that the tokenizer lacks have no text. Raise ModelError
        if others cannot be decoded.
        """
        options = {'clean_up_tokenization_spaces': False} if verbatim else {}
        before = self.before if restores_space else ''
        return before + self._text_of_known(ids, lambda known: self._decode_with(marks, known, options))

    def text_of_window(self, ids: list[int]) -> str:
        """Return the text of some tokens by themselves, with all special tokens. Raise ModelError as `text` does."""
        return self._text_of_known(ids, lambda known: str(self.tokenizer.decode(known)))

    def _text_of_known(self, ids: list[int], decode: Callable[[list[int]], str]) -> str:
        with tokenizer_errors() as caught:
            return decode(ids)
        # A model with padded embeddings may generate ids that the tokenizer lacks. Tokenizers in Rust give no text for
        # them, others raise errors of various kinds.
        known = [id_ for id_ in ids if self.is_known(id_)]
        if len(known) == len(ids):
            name = type(self.tokenizer).__name__
            raise ModelError(
                f'the tokenizer ({name}) cannot decode {ids[:MAX_SHOWN]}: {caught.error}'
            ) from caught.error
        return decode(known)

    def is_known(self, id_: int) -> bool:
        """Return whether the tokenizer can decode a token id."""
        if id_ not in self._is_known:
            with tokenizer_errors() as caught:
                self._decode([id_], {})
            self._is_known[id_] = caught.error is None
        return self._is_known[id_]

    def _decode_with(self, marks: Mapping[int, str], ids: list[int], options: Mapping[str, bool]) -> str:
        """Return the text of some ids, with the texts of these special tokens in their places."""
        if marks.keys().isdisjoint(ids):
            return self._decode(ids, options)
        text = ''
        between: list[int] = []
        for id_ in ids:
            if id_ in marks:
                text += (self._decode(between, options) if between else '') + marks[id_]
                between = []
            else:
                between.append(id_)
        return text + (self._decode(between, options) if between else '')

    def _decode(self, ids: list[int], options: Mapping[str, bool]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, **options))


class OngoingGeneration:
    """The generation for one request, token by token.

    Text is decoded incrementally, a few tokens at a time together with the previous one, as tokenizers join tokens by
    context. A stop found this way is confirmed in the decoded text of the whole generation.
    """

    def __init__(self, request: GenerateRequest, decoder: GenerationDecoder) -> None:
        self.request = request
        self.decoder = decoder
        self.ids: list[int] = []
        self.is_done = False
        self.is_truncated = False
        self.is_finite = True
        stops = request.stops
        self._watches = bool(stops.strings or stops.answer_end or stops.program)
        self._strings_of_window: dict[int, list[str]] = {}  # by the number of tokens
        for string, num_tokens in stops.windows:
            self._strings_of_window.setdefault(num_tokens, []).append(string)
        self._lookback = max(map(len, stops.strings), default=0)
        self._marks = decoder.marks_of(request.reasoning)
        self._answer = GrowingAnswer(request.reasoning)
        self._known = decoder.before if request.restores_space else ''  # the text up to token `_read`
        self._start = self._read = 0  # tokens [_start, _read) are decoded with those that follow

    def add(self, token: int) -> None:
        """Append the next token."""
        self.ids.append(token)
        if token in self.decoder.end_ids or (self._watches and self._stops()) or self._is_stop_in_window():
            self.is_done = True
        elif len(self.ids) == self.request.max_new_tokens:
            self.is_done = self.is_truncated = True

    def fail(self) -> None:
        """End the generation because the model's logits are not finite."""
        self.is_finite = False
        self.is_done = True

    def result(self) -> Generation:
        """Return the generation."""
        return Generation(
            key=self.request.key,
            text=self._text() if self.ids else '',
            num_tokens=len(self.ids),
            is_truncated=self.is_truncated,
            is_finite=self.is_finite,
        )

    def _stops(self) -> bool:
        """Return whether the latest token completes a stop."""
        piece = self._latest_text()
        if not piece:  # a special token, or a leading space that the tokenizer drops
            self._read = len(self.ids)
            return False
        known = len(self._known)
        text = self._known + piece
        # An incomplete character is decoded again together with the next token, unless it cannot become one.
        is_complete = not piece.endswith(UNFINISHED) or len(self.ids) - self._read >= LONGEST_CHARACTER
        if is_complete:
            self._known = text
            self._start, self._read = self._read, len(self.ids)
        self._answer.read(text, known)
        begin = self._answer.begin
        if begin is None:  # still reasoning
            return False
        return self._answer_stops(text[begin:] if begin else text, max(0, known - begin))

    def _is_stop_in_window(self) -> bool:
        """Return whether the latest tokens have a stop that is searched in so many of them."""
        for num_tokens, strings in self._strings_of_window.items():
            text = self.decoder.text_of_window(self.ids[-num_tokens:])
            if any(string in text for string in strings):
                return True
        return False

    def _latest_text(self) -> str:
        """Return the text of the latest tokens, those from `_read` on, as it is after the tokens before them."""
        decoded = partial(self.decoder.text, verbatim=True, restores_space=False, marks=self._marks)
        before = decoded(self.ids[self._start : self._read]) if self._read else ''
        return decoded(self.ids[self._start :])[len(before) :]

    def _answer_stops(self, answer: str, num_known: int) -> bool:
        """Return whether an answer, of which `num_known` characters were searched before, ends in its new ones."""
        rule = self.request.stops
        # A stop may begin in what was searched.
        if stop_position(answer, rule, max(0, num_known - self._lookback)) is None:
            return rule.program is not None and rule.program.gives_up(answer, num_known)
        return answer_stop(self._text(), rule, self.request.reasoning) is not None

    def _text(self) -> str:
        request = self.request
        ids = self.ids
        if request.text_after in ids:
            last = len(ids) - 1 - ids[::-1].index(request.text_after)
            ids = ids[last + 1 :]
        return self.decoder.text(
            ids, verbatim=request.verbatim, restores_space=request.restores_space, marks=self._marks
        )


def end_ids(tokenizer: Any, model: Any, *, reference: bool) -> set[int]:
    """Return the tokens that end a generation: the tokenizer's eos and those of the model's generation config.

    With `reference` only the tokenizer's eos, which llm-foundry passes to transformers.
    """
    ends = [tokenizer.eos_token_id]
    if not reference:
        of_model = getattr(getattr(model, 'generation_config', None), 'eos_token_id', None)
        ends += of_model if isinstance(of_model, (list, tuple)) else [of_model]
    return {end for end in ends if end is not None}
