"""Requests for whoever answers them elsewhere, a server or an API: one JSON line an item."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from llmfoundry_gauntlet.evaluation import EvaluationData, text_tasks
from llmfoundry_gauntlet.prompts.encode import Encoder, spaced
from llmfoundry_gauntlet.prompts.seeds import draw_seed
from llmfoundry_gauntlet.tasks.items import reply_limit
from llmfoundry_gauntlet.tasks.texts import TextItem, TextTask
from llmfoundry_gauntlet.values import ItemKey

CHARACTERS_PER_TOKEN = 2  # of right replies, where there is no tokenizer to ask: few, so that none is cut short


def request_lines(data: EvaluationData, encoder: Encoder | None = None) -> Iterator[str]:
    """The requests of all tasks, one after the other.

    Without an encoder `max_new_tokens` is an estimate, and continuations begin with a space, as most tokenizers want
    them.
    """
    for task in text_tasks(data).values():
        terms = reply_fields(task, encoder) if task.task_type.wants_reply else SCORED
        for item in task.items():
            yield json.dumps(request(item, terms, encoder), ensure_ascii=False)


SCORED = dict.fromkeys(('stop', 'max_new_tokens', 'temperature', 'top_p', 'top_k', 'seed'))


def reply_fields(task: TextTask, encoder: Encoder | None) -> dict[str, Any]:
    """What all requests of a task say of the reply."""
    sampling = task.sampling()

    def longest() -> int:
        if encoder is not None:
            return encoder.longest(set(task.responses()))
        return math.ceil(max(map(len, task.responses())) / CHARACTERS_PER_TOKEN)

    return {
        'stop': list(task.stops().strings),
        'max_new_tokens': reply_limit(task.task, longest),
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'top_k': sampling.top_k,
        'seed': sampling,
    }


def request(item: TextItem, terms: dict[str, Any], encoder: Encoder | None) -> dict[str, Any]:
    """One line. `prompt` is a list where each choice has a prompt of its own (schema tasks)."""
    question = item.prompt.question
    prompts = [item.prompt.preamble + context for context in question.contexts]
    choices = [spaced(text) if encoder is None else encoder.continuation_text(text) for text in question.continuations]
    fields = dict(terms)
    if fields['seed'] is not None:
        sampling = fields['seed']
        fields['seed'] = draw_seed(sampling, item.key) if sampling.temperature > 0 else None
    return {
        **name_fields(item.key),
        'prompt': prompts[0] if len(prompts) == 1 else prompts,
        'choices': choices or None,
        **fields,
    }


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
