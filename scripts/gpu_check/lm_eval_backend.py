"""lm-eval's Hugging Face backend on token ids, with a model that is loaded already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from llmfoundry_gauntlet.types import ScoreRequest

SPECIAL = ('<s>', '</s>', '<pad>')


class LMEvalBackend:
    """Scores every choice of requests, as lm-eval does once it has tokenized their texts."""

    def __init__(self, model: Any) -> None:
        # The backend asks a tokenizer for its special tokens, and for nothing else on ids.
        vocabulary = {token: index for index, token in enumerate(SPECIAL)}
        start, end, padding = SPECIAL
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=padding)),
            bos_token=start,
            eos_token=end,
            pad_token=padding,
        )
        longest = model.config.max_position_embeddings
        self.backend = HFLM(pretrained=model, tokenizer=tokenizer, max_length=longest)

    def score(self, requests: Sequence[ScoreRequest], batch_size: int) -> list[float]:
        """Return the summed log-probability of each choice, in the order of the requests."""
        self.backend.batch_size_per_gpu = batch_size
        pairs = []
        for request in requests:
            for context, continuation in zip(request.contexts, request.continuations, strict=True):
                # lm-eval finds choices of one token after equal contexts by the context's text.
                texts = (f'{request.key.row}', str(continuation.tolist()))
                pairs.append((texts, context.tolist(), continuation.tolist()))
        answers = self.backend._loglikelihood_tokens(pairs, disable_tqdm=True)
        return [total for total, _ in answers]
