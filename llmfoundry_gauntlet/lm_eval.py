"""The model that runs tasks of the LM Evaluation Harness on our engine; `gauntlet` in lm-eval's registry.

    lm_eval.simple_evaluate(model=GauntletLM(pretrained='gpt2'), tasks=['arc_easy'])

Tokenization, truncation, the prefix token, chat templates and all arguments of a model are those of lm-eval's Hugging
Face backend, which it extends; so is whatever the engine cannot run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from llmfoundry_gauntlet.config.settings import AUTO
from llmfoundry_gauntlet.errors import ConfigError, ModelError
from llmfoundry_gauntlet.runtime.request_runner import RequestRunner
from llmfoundry_gauntlet.runtime.trained_model import evaluated_model
from llmfoundry_gauntlet.runtime.unchanged import autocast_casts_dropped, evaluation_mode
from llmfoundry_gauntlet.tasks.lm_eval_requests import (
    GenerationSettings,
    answers_of,
    generate_request,
    generated_text,
    generation_settings,
    score_request,
)
from llmfoundry_gauntlet.types import GenerateRequest, Generation, ItemKey, ScoreOutput, ScoreRequest

log = logging.getLogger(__name__)

NAME = 'gauntlet'
CAUSAL = 'causal'  # lm-eval's name for decoders
ALL_WINDOWS = 2**31  # a batch size beyond any number of windows of texts
MOST_PAIRS = 64  # of a request: more pairs with one context may be in several batches
UNNAMED = 'lm-eval'  # the task of requests that name none

# In a model's generation config: those that HFLM gives in each call, and those that change no token.
GIVEN_IN_CALLS = ('do_sample', 'temperature', 'max_length')
OF_NO_TOKEN = (
    'bos_token_id',
    'eos_token_id',
    'pad_token_id',
    'decoder_start_token_id',
    'transformers_version',
    'use_cache',
    'cache_implementation',
    'cache_config',
    'disable_compile',
    'output_attentions',
    'output_hidden_states',
    'output_scores',
    'output_logits',
    'return_dict_in_generate',
)

EncodedRequest = tuple[tuple[str, str] | None, list[int], list[int]]  # its texts, context and continuation


@register_model(NAME)
class GauntletLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """A Hugging Face model whose log-likelihoods and generations are computed by our engine.

    `pretrained` is a name, a folder or a model, and `settings` are the further arguments of lm-eval's `hf`, of which
    `batch_size` has no effect: a batch has `tokens_per_batch` tokens, by default as many as suit the device. A model
    may be trained between evaluations; it is left in the mode in which it was.

    Raise ConfigError for `tokens_per_batch`, and DataError for a request that lm-eval cannot run either.
    """

    batch_size_per_gpu: Any  # of HFLM, a number or auto

    def __init__(self, pretrained: Any, *, tokens_per_batch: int | str = AUTO, **settings: Any) -> None:
        is_number = isinstance(tokens_per_batch, int) and not isinstance(tokens_per_batch, bool)
        if tokens_per_batch != AUTO and not (is_number and int(tokens_per_batch) >= 1):
            raise ConfigError(f'tokens_per_batch: is {tokens_per_batch!r}; allowed: auto, or 1 or more')
        super().__init__(pretrained, **settings)
        self.tokens_per_batch = tokens_per_batch
        self._runner: RequestRunner | None = None
        self._explained: set[str] = set()  # the reasons of lm-eval's own way that were logged
        self._tasks: Sequence[str] = ()  # of the requests whose log-likelihoods are computed

    # Log-likelihoods

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        with self._naming_tasks(requests):
            answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows of the model's length."""
        batch_size = self.batch_size_per_gpu
        if self._runnable() is not None:
            self.batch_size_per_gpu = ALL_WINDOWS  # the engine plans better with all windows at once
        try:
            answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.batch_size_per_gpu = batch_size
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[EncodedRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        groups = group_pairs(requests, self._tasks)
        score_requests = [group.request(self.max_length) for group in groups]
        runner = self._runnable(lambda runner: runner.probe_scoring(score_requests))
        if runner is None:
            answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return answers

        group_of_key = {group.key: group for group in groups}
        answer_of_row: dict[int, tuple[float, bool]] = {}
        bar = self._bar(len(requests), 'Running loglikelihood requests', is_hidden=disable_tqdm)

        def keep(outputs: Sequence[ScoreOutput]) -> None:
            for output in outputs:
                rows_of_pairs = group_of_key[output.key].rows
                for answer, rows in zip(answers_of(output), rows_of_pairs, strict=True):
                    self._keep_answer(answer, rows, requests)
                    answer_of_row.update(dict.fromkeys(rows, answer))
                    bar.update(len(rows))

        with bar, self._computing():
            runner.score(score_requests, keep)
        return [answer_of_row[row] for row in range(len(requests))]

    def _keep_answer(self, answer: tuple[float, bool], rows: Sequence[int], requests: Sequence[EncodedRequest]) -> None:
        """Write an answer to lm-eval's cache of answers, if there is one."""
        for row in rows:
            texts = requests[row][0]
            if texts is not None:  # a window has none: its whole text is cached in the end
                self.cache_hook.add_partial('loglikelihood', texts, answer)

    # Generations

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a generation for each request."""
        settings = self._generation_settings(requests)
        rows_for_engine = [row for row, of_row in enumerate(settings) if of_row.unsupported is None]
        for reason in dict.fromkeys(of_row.unsupported for of_row in settings):
            if reason is not None:
                self._explain(f'generation with {reason}')

        generate_requests = self._generate_requests(requests, settings, rows_for_engine)
        runner = None
        if generate_requests:
            runner = self._runnable(lambda runner: runner.probe_generation(list(generate_requests.values())))
        texts: dict[int, str] = {}
        if runner is not None:
            texts = self._generate(runner, requests, settings, generate_requests, is_hidden=disable_tqdm)

        rows_left = [row for row in range(len(requests)) if row not in texts]
        if rows_left:
            by_lm_eval = super().generate_until([requests[row] for row in rows_left], disable_tqdm=disable_tqdm)
            texts.update(zip(rows_left, by_lm_eval, strict=True))
        return [texts[row] for row in range(len(requests))]

    def _generation_settings(self, requests: Sequence[Any]) -> list[GenerationSettings]:
        """Return the settings of each request's `gen_kwargs`."""
        end_text = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        model_defaults = generation_defaults(self.model)
        seed = torch.initial_seed()
        settings_of: dict[str, GenerationSettings] = {}  # by the text of gen_kwargs, as those of a task are equal
        settings = []
        for request in requests:
            gen_kwargs = request.args[1]
            text = repr(gen_kwargs)
            if text not in settings_of:
                settings_of[text] = generation_settings(
                    gen_kwargs,
                    end_text=end_text,
                    default_max_gen_toks=self.max_gen_toks,
                    model_defaults=model_defaults,
                    seed=seed,
                )
            settings.append(settings_of[text])
        return settings

    def _generate_requests(
        self, requests: Sequence[Any], settings: Sequence[GenerationSettings], rows: Sequence[int]
    ) -> dict[int, GenerateRequest]:
        """Return the engine's requests by row. Prompts without any token are left to lm-eval."""

        @cache
        def num_tokens_of(text: str) -> int:
            return len(self.tokenizer.encode(text, add_special_tokens=False))

        @cache
        def tokens_of(text: str) -> list[int]:
            ids, _ = self.tok_batch_encode([text], truncation=self.truncation)
            of_row: list[int] = ids[0].tolist()
            return of_row

        keys = keys_of(requests)
        generate_requests: dict[int, GenerateRequest] = {}
        for row in rows:
            context = tokens_of(requests[row].args[0])
            if not context:
                self._explain('generation after an empty prompt')
                continue
            generate_requests[row] = generate_request(
                keys[row],
                context,
                settings[row],
                max_length=self.max_length,
                num_tokens_of=num_tokens_of,
                think_end_token=self._think_end_token,
            )
        return generate_requests

    def _generate(
        self,
        runner: RequestRunner,
        requests: Sequence[Any],
        settings: Sequence[GenerationSettings],
        generate_requests: Mapping[int, GenerateRequest],
        *,
        is_hidden: bool,
    ) -> dict[int, str]:
        """Return the texts that lm-eval wants, by row."""
        row_of_key = {request.key: row for row, request in generate_requests.items()}
        texts: dict[int, str] = {}
        bar = self._bar(len(row_of_key), 'Running generate_until requests', is_hidden=is_hidden)

        def keep(generations: Sequence[Generation]) -> None:
            for generation in generations:
                row = row_of_key[generation.key]
                text = generated_text(generation.text, settings[row], self._think_end_token)
                texts[row] = text
                self.cache_hook.add_partial('generate_until', requests[row].args, text)
                bar.update(1)

        with bar, self._computing():
            runner.generate(list(generate_requests.values()), keep)
        return texts

    @property
    def _think_end_token(self) -> str | int | None:
        return getattr(self, 'think_end_token', None)  # since lm-eval 0.4.9.1 (docs/compatibility.md)

    # The engine

    def _runnable(self, probe: Callable[[RequestRunner], None] | None = None) -> RequestRunner | None:
        """Return what runs the model on the engine, once it is probed; if lm-eval must run it, say why: None."""
        try:
            runner = self._current_runner()
            if probe is not None:
                with self._computing():
                    probe(runner)
        except ModelError as error:
            self._explain(str(error))
            return None
        return runner

    def _current_runner(self) -> RequestRunner:
        """Return what runs the current model. Raise ModelError for a model that the engine cannot run."""
        if self.backend != CAUSAL:
            raise ModelError('the model is an encoder-decoder')
        model = evaluated_model(self.model, self.tokenizer)
        peft_config = getattr(self.model, 'active_peft_config', None)
        if getattr(peft_config, 'is_prompt_learning', False):
            raise ModelError('the adapter learns tokens before the prompt')
        if self._runner is None or self._runner.model.model is not model.model:
            self._runner = RequestRunner(model, tokens_per_batch=self.tokens_per_batch)
        return self._runner

    def _explain(self, reason: str) -> None:
        """Log once why lm-eval's own way is used."""
        if reason not in self._explained:
            self._explained.add(reason)
            log.warning('%s: run by lm-eval in its own way, at its batch size %s', reason, self.batch_size)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute in the precision that was wanted, without gradients and dropout, until the context ends."""
        mixed = getattr(self, 'mixed_precision_dtype', None)  # since lm-eval 0.4.9.1 (docs/compatibility.md)
        autocast = torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None)
        with torch.no_grad(), autocast, autocast_casts_dropped(), evaluation_mode(self.model):
            yield

    @contextmanager
    def _naming_tasks(self, requests: Sequence[Any]) -> Iterator[None]:
        """Name the tasks of these requests in errors until the context ends."""
        self._tasks = [task_of(request) for request in requests]
        try:
            yield
        finally:
            self._tasks = ()

    def _bar(self, total: int, title: str, *, is_hidden: bool) -> Any:
        """Return a progress bar as lm-eval shows it."""
        return tqdm(total=total, disable=is_hidden or self.rank != 0, desc=title)


@dataclass(slots=True)
class PairGroup:
    """Pairs with one context; `rows` has, for each pair, the requests that ask for it."""

    key: ItemKey
    pairs: list[tuple[list[int], list[int]]]
    rows: list[list[int]]

    def request(self, max_length: int) -> ScoreRequest:
        """Return the request of these pairs. Raise DataError for one that lm-eval refuses."""
        return score_request(self.key, self.pairs, max_length=max_length)


def group_pairs(requests: Sequence[EncodedRequest], tasks: Sequence[str]) -> list[PairGroup]:
    """Group adjacent requests with one context, the choices of a document; equal pairs are run once.

    `tasks` are the names of the requests' tasks, empty if unknown.
    """
    groups: list[PairGroup] = []
    rows_of_pair: dict[tuple[bytes, bytes], list[int]] = {}
    known_contexts: dict[bytes, bytes] = {}  # one object for equal contexts
    previous = None
    for row, (_, context, continuation) in enumerate(requests):
        context_bytes = np.array(context, np.int32).tobytes()
        context_bytes = known_contexts.setdefault(context_bytes, context_bytes)
        pair = context_bytes, np.array(continuation, np.int32).tobytes()
        if pair in rows_of_pair:
            rows_of_pair[pair].append(row)
            continue
        rows_of_pair[pair] = [row]
        if context_bytes is not previous or len(groups[-1].pairs) == MOST_PAIRS:
            key = ItemKey(task=tasks[row] if tasks else UNNAMED, row=len(groups))
            groups.append(PairGroup(key=key, pairs=[], rows=[]))
        groups[-1].pairs.append((context, continuation))
        groups[-1].rows.append(rows_of_pair[pair])
        previous = context_bytes
    return groups


def keys_of(requests: Sequence[Any]) -> list[ItemKey]:
    """Return a key for each request; draws depend on it, so it has what is the same on any number of ranks.

    A repeated request, of a task with several samples for a document, has the number of its repetition.
    """
    num_repeated: Counter[ItemKey] = Counter()
    keys = []
    for number, request in enumerate(requests):
        document = number if request.doc_id is None else request.doc_id
        key = ItemKey(task=task_of(request), row=document, variant=str(request.idx))
        keys.append(replace(key, sample=num_repeated[key]))
        num_repeated[key] += 1
    return keys


def task_of(request: Any) -> str:
    """Return the name of a request's task."""
    return request.task_name or UNNAMED


def generation_defaults(model: Any) -> dict[str, Any]:
    """Return the settings in a model's generation config that count where a call says nothing."""
    config = getattr(model, 'generation_config', None)
    if config is None:
        return {}
    given: dict[str, Any] = config.to_diff_dict()
    left_out = {*GIVEN_IN_CALLS, *OF_NO_TOKEN}
    return {name: value for name, value in given.items() if name not in left_out and not name.startswith('_')}
