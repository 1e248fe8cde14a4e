"""The tokenization of lm-eval's Hugging Face backend, by its own code, with a tokenizer and no model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.tasks.lm_eval_source import LOGLIKELIHOOD, ROLLING, quiet

if TYPE_CHECKING:
    from llmfoundry_gauntlet.tasks.lm_eval_requests import EncodedPair

BACKEND = 'lm_eval.models.huggingface'


class WithoutWeights:
    """A model that the backend is made with and never runs."""

    device = 'cpu'
    config = SimpleNamespace(model_type='none', is_encoder_decoder=False)


class TokenizingLM:
    """The backend's tokenization for one tokenizer, which it leaves as it is.

    `max_length` is the number of tokens that the model can run. `template_kwargs` are those of its chat template.
    """

    def __init__(self, tokenizer: Any, *, max_length: int, template_kwargs: Mapping[str, Any] | None = None) -> None:
        # The backend gives a tokenizer without a token for padding one, so it gets a copy.
        with quiet(BACKEND):
            self._lm = recording_class()(
                pretrained=WithoutWeights(),
                backend='causal',
                tokenizer=copy.deepcopy(tokenizer),
                max_length=max_length,
                batch_size=1,
                chat_template_args=dict(template_kwargs or {}),
            )

    @property
    def end_text(self) -> str:
        """Return the text of the token that ends generations."""
        return str(self._lm.tok_decode(self._lm.eot_token_id, skip_special_tokens=False))

    def pairs(self, instances: Sequence[Any]) -> list[EncodedPair]:
        """Return the contexts and continuations in token ids of requests of one type: one, or one per window."""
        self._lm.recorded = []
        self._lm.ids_of_text = {}  # the requests of a document share their context
        request_type = instances[0].request_type
        assert request_type in (LOGLIKELIHOOD, ROLLING)
        getattr(self._lm, request_type)(list(instances), disable_tqdm=True)
        recorded: list[EncodedPair] = self._lm.recorded
        return recorded

    def context(self, text: str) -> list[int]:
        """Return the token ids of the prompt of a generation, whatever its length."""
        ids, _ = self._lm.tok_batch_encode([text])
        of_prompt: list[int] = ids[0].tolist()
        return of_prompt

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text without special tokens around it."""
        return len(self._lm.tok_encode(text, add_special_tokens=False))

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return messages in the chat template. Raise ModelError if there is none."""
        if getattr(self._lm.tokenizer, 'chat_template', None) is None:
            name = type(self._lm.tokenizer).__name__
            raise ModelError(f'the tokenizer ({name}) has no chat template; leave out apply_chat_template')
        return str(self._lm.apply_chat_template(messages, add_generation_prompt=add_generation_prompt))


@functools.cache
def recording_class() -> type:
    """Return the backend with log-likelihoods that are recorded and not computed; lm_eval is imported now."""
    from lm_eval.models.huggingface import HFLM

    class RecordingLM(HFLM):  # type: ignore[misc]  # untyped
        recorded: list[EncodedPair]
        ids_of_text: dict[tuple[str, Any], list[int]]

        def tok_encode(self, string: str, add_special_tokens: Any = None, **settings: Any) -> list[int]:
            if settings:
                return list(super().tok_encode(string, add_special_tokens, **settings))
            known = self.__dict__.setdefault('ids_of_text', {})
            if (string, add_special_tokens) not in known:
                known[string, add_special_tokens] = list(super().tok_encode(string, add_special_tokens))
            return list(known[string, add_special_tokens])

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            # lm-eval 0.4.13 (docs/compatibility.md): text or None, context, continuation
            self.recorded += [(context, continuation) for _, context, continuation in requests]
            return [(0.0, False)] * len(requests)

    return RecordingLM
