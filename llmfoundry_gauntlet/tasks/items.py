"""A task's examples as items: prompts with shots, encoded and fitted; and their outputs as item results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.prompts.encode import EncodedPrompt, Encoder, drop_shots, score_request
from llmfoundry_gauntlet.prompts.fewshot import with_shots
from llmfoundry_gauntlet.tasks.base import TaskType
from llmfoundry_gauntlet.values import Example, Item, ItemKey, ItemResult, Judgement, Prompt, ScoreOutput

CHUNK = 1000  # items whose text is in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A task at one number of shots, and how its prompts become requests.

    Prompts have at most `max_seq_len` tokens with the continuation. Where they would have more, `truncation` says what
    goes: 'drop_shots', or 'reference' (llm-foundry: tokens from the left, each choice by itself).
    """

    task: TaskSpec
    task_type: TaskType
    encoder: Encoder
    max_seq_len: int
    truncation: str = 'drop_shots'


def build_prompt(task: TaskSpec, task_type: TaskType, example: Example, shots: Sequence[Example]) -> Prompt:
    """The prompt of an example after these shots, in order."""
    preamble = task.prompt_string
    for shot in shots:
        preamble += task_type.shot(shot.content, task, not preamble)
    question = task_type.ask(example.content, task, not preamble)
    return Prompt(preamble=preamble, question=question, num_shots=len(shots))


def prepare_items(preparation: Preparation, examples: Sequence[Example]) -> list[Item]:
    """All items of a task, in row order."""
    task = preparation.task
    (num_shots,) = task.num_fewshot
    pairs = with_shots(examples, num_shots, seed=task.fewshot_random_seed)
    items: list[Item] = []
    while chunk := list(islice(pairs, CHUNK)):
        prompts = [build_prompt(task, preparation.task_type, example, shots) for example, shots in chunk]
        encoded_prompts = preparation.encoder.prompts(prompts)
        for (example, shots), prompt, encoded in zip(chunk, prompts, encoded_prompts, strict=True):
            items.append(make_item(preparation, example, shots, prompt, encoded))
    return sorted(items, key=lambda item: item.request.key.row)


def make_item(
    preparation: Preparation, example: Example, shots: tuple[Example, ...], prompt: Prompt, encoded: EncodedPrompt
) -> Item:
    """One item, with fewer shots or a shorter context where it would be too long."""
    task, max_seq_len = preparation.task, preparation.max_seq_len
    reference = preparation.truncation == 'reference'
    too_long = encoded.length > max_seq_len
    if too_long and shots and not reference:

        def with_last(num_shots: int) -> Prompt:
            return build_prompt(task, preparation.task_type, example, shots[len(shots) - num_shots :])

        prompt, encoded = drop_shots(prompt, with_last, preparation.encoder, max_seq_len)
    return Item(
        content=example.content,
        category=example.category,
        prompt_sha256=hashlib.sha256(prompt.text.encode()).hexdigest(),
        request=score_request(
            ItemKey(task=task.key, row=example.row, file=example.file),
            encoded,
            max_seq_len=max_seq_len,
            truncated=too_long and not reference,
            reference=reference,
        ),
    )


def item_result(item: Item, output: ScoreOutput | None, task_type: TaskType, *, reference: bool) -> ItemResult:
    """The item as marked; without an output it is unscored, for the reason its request gives."""
    request = item.request
    if output is None:
        judgement = Judgement(credit=None, reason=request.unscorable)
    else:
        judgement = task_type.judge(output, item.content, reference)
    return ItemResult(
        key=request.key,
        category=item.category,
        gold=item.content.gold,
        predicted=judgement.predicted,
        credit=judgement.credit,
        logprobs=None if output is None else tuple(float(values.sum()) for values in output.logprobs),
        num_tokens=tuple(len(ids) for ids in request.continuations),
        status='unscored' if judgement.credit is None else 'scored',
        reason=judgement.reason,
        prompt_sha256=item.prompt_sha256,
        truncated=request.truncated,
    )
