"""Requests for external models, such as a server or an API: one JSON line per item."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from llmfoundry_gauntlet.evaluation.inputs import EvaluationData
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.encode import Encoder, spaced
from llmfoundry_gauntlet.tasks.fewshot import by_category
from llmfoundry_gauntlet.tasks.items import num_new_tokens, untokenized_items
from llmfoundry_gauntlet.tasks.seeds import draw_seed
from llmfoundry_gauntlet.types import Example, GenerateRequest, ItemKey, Prompt

CHARACTERS_PER_TOKEN = 2  # of right generations, if there is no tokenizer: few, so that none is truncated
SAMPLING = ('temperature', 'top_p', 'top_k', 'seed')
SCORED = dict.fromkeys(('stop', 'max_new_tokens', *SAMPLING))


def request_lines(data: EvaluationData, encoder: Encoder | None = None) -> Iterator[str]:
    """Yield the requests of all tasks, one task after the other.

    Without an encoder `max_new_tokens` is an estimate, and continuations begin with a space, as most tokenizers expect.
    """
    for key, task in data.tasks.items():
        max_new_tokens = token_limits(task, data.examples[key], encoder)
        for item, prompt in untokenized_items(task, data.examples[key], data.asked(key)):
            choices = [spaced(text) if encoder is None else encoder.continuation_text(text) for text in item.choices]
            fields: dict[str, Any] = {**name_fields(item.key), **asked(prompt, encoder), 'choices': choices or None}
            if isinstance(item.request, GenerateRequest):
                fields |= generation_fields(item.request, max_new_tokens[item.example.category])
            else:
                fields |= SCORED
            yield json.dumps(fields, ensure_ascii=False)


def token_limits(task: Task, examples: Sequence[Example], encoder: Encoder | None) -> dict[str | None, int]:
    """Return the token limit of generations by category; {} if the task does not generate."""

    def longest(members: Sequence[Example]) -> int:
        right = {text for example in members for text in task.responses(example.content)}
        if encoder is not None:
            return encoder.longest(right)
        return math.ceil(max(map(len, right)) / CHARACTERS_PER_TOKEN)

    if not task.generates:
        return {}
    return {
        category: num_new_tokens(task, partial(longest, members)) for category, members in by_category(examples).items()
    }


def generation_fields(request: GenerateRequest, max_new_tokens: int) -> dict[str, Any]:
    """Return the keys that say how to generate."""
    sampling = request.sampling
    return {
        'stop': list(request.stops.strings),
        'max_new_tokens': max_new_tokens,
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'top_k': sampling.top_k,
        'seed': draw_seed(sampling, request.key) if sampling.temperature > 0 else None,
    }


def asked(prompt: Prompt, encoder: Encoder | None) -> dict[str, Any]:
    """Return the text: `messages` if the server has a chat template to apply, else `prompt`.

    `prompt` is a list if each choice has a prompt of its own (schema tasks).
    """
    if prompt.chat_template is True or (encoder is not None and encoder.in_chat(prompt)):
        (text,) = prompt.contexts
        begun = [{'role': 'assistant', 'content': prompt.lead}] if prompt.lead else []
        return {'messages': [{'role': 'user', 'content': text}, *begun]}
    texts = [prompt.preamble + text for text in prompt.own_texts]
    return {'prompt': texts[0] if len(texts) == 1 else texts}


def name_fields(key: ItemKey) -> dict[str, Any]:
    """Return the keys that name an item in lines of requests and answers."""
    label, _, shots = key.task.rpartition('/')
    return {
        'task': label,
        'num_shots': int(shots.removesuffix('-shot')),
        'file': key.file,
        'row': key.row,
        'variant': key.variant,
        'sample': key.sample,
    }
