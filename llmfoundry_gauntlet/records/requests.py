"""Requests for whoever answers them elsewhere, a server or an API: one JSON line an item."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from llmfoundry_gauntlet.inputs import EvaluationData, text_tasks
from llmfoundry_gauntlet.prompts.encode import Encoder, spaced
from llmfoundry_gauntlet.prompts.fewshot import by_category
from llmfoundry_gauntlet.prompts.seeds import draw_seed
from llmfoundry_gauntlet.tasks.base import Replies
from llmfoundry_gauntlet.tasks.items import num_reply_tokens
from llmfoundry_gauntlet.tasks.texts import TextItem, TextTask
from llmfoundry_gauntlet.values import Example, ItemKey, Prompt, Sampling

CHARACTERS_PER_TOKEN = 2  # of right replies, where there is no tokenizer to ask: few, so that none is cut short


def request_lines(data: EvaluationData, encoder: Encoder | None = None) -> Iterator[str]:
    """The requests of all tasks, one after the other.

    Without an encoder `max_new_tokens` is an estimate, and continuations begin with a space, as most tokenizers want
    them.
    """
    for task in text_tasks(data).values():
        replies = task.replies
        terms = {} if replies is None else reply_fields(task, replies, encoder)
        for item in task.items():
            fields = SCORED if replies is None else terms[item.example.category]
            drawn = {} if replies is None else draw_fields(replies.sampling(task.task, item.key.variant), item.key)
            yield json.dumps(request(item, {**fields, **drawn}, encoder), ensure_ascii=False)


DRAWN = ('temperature', 'top_p', 'top_k', 'seed')
SCORED = dict.fromkeys(('stop', 'max_new_tokens', *DRAWN))


def reply_fields(
    task: TextTask, replies: Replies[Any, Any], encoder: Encoder | None
) -> dict[str | None, dict[str, Any]]:
    """Return what all requests of each category say of the reply."""

    def longest(examples: Sequence[Example]) -> int:
        right = {text for example in examples for text in replies.responses(example.content, task.task)}
        if encoder is not None:
            return encoder.longest(right)
        return math.ceil(max(map(len, right)) / CHARACTERS_PER_TOKEN)

    stop = list(task.stops().strings)
    return {
        category: {
            'stop': stop,
            'max_new_tokens': num_reply_tokens(task.task, replies, partial(longest, examples)),
        }
        for category, examples in by_category(task.examples).items()
    }


def draw_fields(sampling: Sampling, key: ItemKey) -> dict[str, Any]:
    """How the reply to an item is to be drawn."""
    return {
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'top_k': sampling.top_k,
        'seed': draw_seed(sampling, key) if sampling.temperature > 0 else None,
    }


def request(item: TextItem, terms: dict[str, Any], encoder: Encoder | None) -> dict[str, Any]:
    """One line."""
    question = item.prompt.question
    choices = [spaced(text) if encoder is None else encoder.continuation_text(text) for text in question.continuations]
    return {**name_fields(item.key), **asked(item.prompt, encoder), 'choices': choices or None, **terms}


def asked(prompt: Prompt, encoder: Encoder | None) -> dict[str, Any]:
    """The text: `messages` where the server has a chat template to apply, else `prompt`.

    `prompt` is a list where each choice has a prompt of its own (schema tasks).
    """
    question = prompt.question
    if question.chat_template is True or (encoder is not None and encoder.in_chat(question)):
        (text,) = question.contexts
        begun = [{'role': 'assistant', 'content': question.lead}] if question.lead else []
        return {'messages': [{'role': 'user', 'content': text}, *begun]}
    texts = [prompt.preamble + text for text in question.texts]
    return {'prompt': texts[0] if len(texts) == 1 else texts}


def name_fields(key: ItemKey) -> dict[str, Any]:
    """The keys that name an item in lines of requests and answers."""
    label, _, shots = key.task.rpartition('/')
    return {
        'task': label,
        'num_shots': int(shots.removesuffix('-shot')),
        'file': key.file,
        'row': key.row,
        'variant': key.variant,
        'sample': key.sample,
    }
