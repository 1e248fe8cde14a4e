"""Turn requests of the LM Evaluation Harness into ours, and our outputs into its answers. Imports no torch.

All here follows `lm_eval/models/huggingface.py` of lm-eval 0.4.13 at batch size 1, its default: with larger batches its
own texts may differ, as a row goes on after its stop until the last row of its batch has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.errors import DataError, listed
from llmfoundry_gauntlet.types import GenerateRequest, Ids, ItemKey, Sampling, ScoreOutput, ScoreRequest, StopRule

if TYPE_CHECKING:
    EncodedPair = tuple[Sequence[int], Sequence[int]]  # the token ids of a context and of its continuation

MAX_GEN_TOKS = 256  # of a generation whose task says nothing (HFLM.max_gen_toks)
# The names of a generation's token limit; the first that is given counts.
TOKEN_LIMITS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
MORE_TOKENS = 2  # than its own, in which the text of a stop string is searched (MultiTokenEOSCriteria)
TOP_K = 50  # of transformers, where neither the task nor the model's generation config says otherwise

# Of transformers' `generate`: what may be given in any case, as it changes nothing in our engine, and other settings
# with the values that change nothing.
WITHOUT_EFFECT = ('use_cache', 'pad_token_id', 'return_dict_in_generate', 'output_scores', 'output_logits')
NEUTRAL: Mapping[str, Any] = {
    'num_beams': 1,
    'num_beam_groups': 1,
    'num_return_sequences': 1,
    'repetition_penalty': 1.0,
    'length_penalty': 1.0,
    'diversity_penalty': 0.0,
    'encoder_repetition_penalty': 1.0,
    'no_repeat_ngram_size': 0,
    'encoder_no_repeat_ngram_size': 0,
    'min_length': 0,
    'min_new_tokens': 0,
    'typical_p': 1.0,
    'epsilon_cutoff': 0.0,
    'eta_cutoff': 0.0,
    'min_p': 0.0,
    'top_h': 1.0,
    'penalty_alpha': 0.0,
    'guidance_scale': 1.0,
    'early_stopping': False,
    'remove_invalid_values': False,
    'renormalize_logits': False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """The settings of a generation as lm-eval understands a task's `generation_kwargs`.

    `until` are the stop strings, with the text of the tokenizer's end token last. `unsupported` says which settings our
    engine cannot follow, None if there are none.
    """

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    unsupported: str | None = None


# Log-likelihoods


def score_request(key: ItemKey, pairs: Sequence[EncodedPair], *, max_length: int) -> ScoreRequest:
    """Return the request for pairs that belong together, each cut on the left to what the model can run.

    Equal contexts are one array, so that their tokens run once. Raise DataError for a pair that lm-eval refuses.
    """
    import numpy as np

    array_of: dict[tuple[int, ...], Ids] = {}
    contexts: list[Ids] = []
    continuations: list[Ids] = []
    is_shortened = False
    for context, continuation in pairs:
        kept = kept_context(key.task, context, continuation, max_length)
        is_shortened = is_shortened or len(kept) < len(context)
        contexts.append(array_of.setdefault(tuple(kept), np.array(kept, np.int32)))
        continuations.append(np.array(continuation, np.int32))
    return ScoreRequest(
        key=key, contexts=tuple(contexts), continuations=tuple(continuations), prompt_shortened=is_shortened
    )


def kept_context(task: str, context: Sequence[int], continuation: Sequence[int], max_length: int) -> Sequence[int]:
    """Return what is left of a context before its continuation. Raise DataError for a pair that lm-eval refuses.

    The last token of a continuation is no input, so that a row has one token more than the model can run.
    """
    if not context or not continuation:
        empty = 'context' if not context else 'continuation'
        raise DataError(f'{task}: a {empty} has no tokens; lm-eval scores one token or more after one or more')
    if len(continuation) > max_length:
        raise DataError(
            f'{task}: a continuation has {len(continuation)} tokens, but the model can run {max_length} (max_length); '
            'lm-eval cuts contexts, never continuations'
        )
    num_kept = max_length + 1 - len(continuation)
    return context[-num_kept:]


def answers_of(output: ScoreOutput) -> list[tuple[float, bool]]:
    """Return lm-eval's answer for each pair of a request: the sum of its log-probabilities, whether all are argmax."""
    return [
        (float(logprobs.sum()), bool(is_argmax.all()))
        for logprobs, is_argmax in zip(output.logprobs, output.is_argmax, strict=True)
    ]


# Generations


def generation_settings(
    gen_kwargs: Mapping[str, Any],
    *,
    end_text: str | None,
    default_max_gen_toks: int = MAX_GEN_TOKS,
    model_defaults: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> GenerationSettings:
    """Return the settings of a request's `gen_kwargs`, read as lm-eval's Hugging Face backend reads them.

    `end_text` is the text of the tokenizer's end token. `model_defaults` are the settings in the model's generation
    config that differ from transformers' own; they count where the task says nothing.
    """
    kwargs = normalized_kwargs(gen_kwargs, default_max_gen_toks)
    until = with_end_text(kwargs.pop('until', None), end_text)
    max_new_tokens = kwargs.pop('max_gen_toks')

    is_sampled = bool(kwargs.pop('do_sample', False))
    temperature = float(kwargs.pop('temperature', 0.0))
    merged = {**(model_defaults or {}), **kwargs}
    top_p = merged.pop('top_p', None)
    top_k = merged.pop('top_k', None)
    sampling = Sampling()
    if is_sampled:
        sampling = Sampling(
            temperature=temperature,
            top_p=1.0 if top_p is None else float(top_p),
            top_k=TOP_K if top_k is None else int(top_k),
            seed=seed,
        )
    unsupported = unsupported_settings(merged)
    if is_sampled and temperature <= 0:
        unsupported = f'do_sample: true with temperature: {temperature:g}'  # an error of transformers
    return GenerationSettings(
        until=tuple(until), max_new_tokens=max_new_tokens, sampling=sampling, unsupported=unsupported
    )


def normalized_kwargs(gen_kwargs: Mapping[str, Any], default_max_gen_toks: int) -> dict[str, Any]:
    """Return the settings with `until`, `max_gen_toks` and `do_sample`, as lm-eval makes them."""
    try:
        from lm_eval.models.utils import normalize_gen_kwargs
    except ImportError:  # before lm-eval 0.4.10 (docs/compatibility.md), where only its first name is known
        kwargs = dict(gen_kwargs)
        limits = [kwargs.pop(name, None) for name in TOKEN_LIMITS]
        given = [limit for limit in limits if limit is not None]
        kwargs['max_gen_toks'] = int(given[0]) if given else default_max_gen_toks
        if kwargs.get('do_sample') is None:
            kwargs['do_sample'] = float(kwargs.get('temperature', 0.0)) > 0
        return kwargs
    return dict(normalize_gen_kwargs(dict(gen_kwargs), default_max_gen_toks))


def with_end_text(until: str | Sequence[str] | None, end_text: str | None) -> list[str]:
    """Return stop strings as a list that has the text of the end token, as lm-eval makes it."""
    from lm_eval.models.utils import handle_stop_sequences

    return list(handle_stop_sequences(until if isinstance(until, str) or until is None else list(until), eos=end_text))


def unsupported_settings(settings: Mapping[str, Any]) -> str | None:
    """Return the settings of a generation that change it and that our engine cannot follow; None if there are none."""
    others = [
        f'{name}: {value}'
        for name, value in settings.items()
        if name not in WITHOUT_EFFECT and value is not None and value != NEUTRAL.get(name)
    ]
    return listed(others) if others else None


def generate_request(
    key: ItemKey,
    context: Sequence[int],
    settings: GenerationSettings,
    *,
    max_length: int,
    num_tokens_of: Callable[[str], int],
    think_end_token: str | int | None = None,
) -> GenerateRequest:
    """Return the request for a generation, its context cut on the left so that the generation has room.

    `num_tokens_of` returns the number of tokens of a text without special tokens around it. Raise DataError if the
    model can run no more tokens than are to be generated.
    """
    import numpy as np

    most_tokens = max_length - settings.max_new_tokens
    if most_tokens <= 0:
        raise DataError(
            f'{key.task}: {settings.max_new_tokens} tokens are to be generated (max_gen_toks), but the model can run '
            f'{max_length} (max_length), of which the prompt takes some; give a smaller max_gen_toks'
        )
    windows = tuple((string, num_tokens_of(string) + MORE_TOKENS) for string in settings.until)
    kept = context[-most_tokens:]
    return GenerateRequest(
        key=key,
        context=np.array(kept, np.int32),
        max_new_tokens=settings.max_new_tokens,
        stops=StopRule(windows=windows),
        sampling=settings.sampling,
        text_after=think_end_token if isinstance(think_end_token, int) else None,
        restores_space=False,
        prompt_shortened=len(kept) < len(context),
    )


def generated_text(text: str, settings: GenerationSettings, think_end_token: str | int | None = None) -> str:
    """Return lm-eval's answer: a generation after its reasoning, up to the first stop string."""
    if isinstance(think_end_token, int):  # the request's `text_after` has cut it
        text, think_end_token = text.lstrip(), None
    try:
        from lm_eval.models.utils import postprocess_generated_text
    except ImportError:  # before lm-eval 0.4.9.1, whose models know no reasoning (docs/compatibility.md)
        for string in settings.until:
            text = text.split(string)[0] if string else text
        return text
    return str(postprocess_generated_text(text, list(settings.until), think_end_token))
