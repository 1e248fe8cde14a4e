"""A task's examples as items: prompts with shots, encoded and fitted; and their outputs as item results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.prompts.encode import EncodedPrompt, Encoder, drop_shots, score_request
from llmfoundry_gauntlet.prompts.fewshot import with_shots
from llmfoundry_gauntlet.tasks.base import TaskType
from llmfoundry_gauntlet.values import Example, Item, ItemKey, ItemResult, Judgement, Prompt, ScoreOutput

CHUNK = 1000  # items whose text is in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """How long prompts may be, in tokens with the continuation, and what goes first where they are longer.

    `truncation` is 'drop_shots' or 'reference' (llm-foundry: tokens from the left, each choice by itself).
    """

    max_seq_len: int
    truncation: str = 'drop_shots'


def build_prompt(task: TaskSpec, task_type: TaskType, example: Example, shots: Sequence[Example]) -> Prompt:
    """The prompt of an example after these shots, in order."""
    preamble = task.prompt_string
    for shot in shots:
        preamble += task_type.shot(shot.content, task, not preamble)
    question = task_type.ask(example.content, task, not preamble)
    return Prompt(preamble=preamble, question=question, num_shots=len(shots))


def prepare_items(
    task: TaskSpec, task_type: TaskType, examples: Sequence[Example], encoder: Encoder, fitting: Fitting
) -> list[Item]:
    """All items of a task at one number of shots, in row order."""
    (num_shots,) = task.num_fewshot
    pairs = with_shots(examples, num_shots, seed=task.fewshot_random_seed)
    items: list[Item] = []
    while chunk := list(islice(pairs, CHUNK)):
        prompts = [build_prompt(task, task_type, example, shots) for example, shots in chunk]
        items += [
            make_item(task, task_type, pair, prompt, encoded, encoder, fitting)
            for pair, prompt, encoded in zip(chunk, prompts, encoder.prompts(prompts), strict=True)
        ]
    return sorted(items, key=lambda item: item.request.key.row)


def make_item(
    task: TaskSpec,
    task_type: TaskType,
    pair: tuple[Example, tuple[Example, ...]],
    prompt: Prompt,
    encoded: EncodedPrompt,
    encoder: Encoder,
    fitting: Fitting,
) -> Item:
    """One item, with fewer shots or a shorter context where it would be too long."""
    example, shots = pair
    reference = fitting.truncation == 'reference'
    too_long = encoded.length > fitting.max_seq_len
    if too_long and shots and not reference:
        build = partial(last_shots, task, task_type, example, shots)
        prompt, encoded = drop_shots(prompt, build, encoder, fitting.max_seq_len)
    return Item(
        task=task.key,
        content=example.content,
        category=example.category,
        prompt_sha256=hashlib.sha256(prompt.text.encode()).hexdigest(),
        request=score_request(
            ItemKey(task=task.key, row=example.row, file=example.file),
            encoded,
            max_seq_len=fitting.max_seq_len,
            truncated=too_long and not reference,
            reference=reference,
        ),
    )


def last_shots(
    task: TaskSpec, task_type: TaskType, example: Example, shots: tuple[Example, ...], num_shots: int
) -> Prompt:
    """The prompt with its last `num_shots` shots alone."""
    return build_prompt(task, task_type, example, shots[len(shots) - num_shots :])


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
