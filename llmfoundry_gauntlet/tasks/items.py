"""A task's examples as items: prompts with shots, encoded and fitted; and their outputs as item results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.prompts.encode import Encoder, score_request
from llmfoundry_gauntlet.prompts.fewshot import with_shots
from llmfoundry_gauntlet.prompts.fit import FittedPrompt, Shortenable, ShotFitter
from llmfoundry_gauntlet.tasks.base import TaskType
from llmfoundry_gauntlet.values import Example, Item, ItemKey, ItemResult, Judgement, Prompt, ScoreOutput

CHUNK = 1000  # items whose text is in memory at a time

ExampleWithShots = tuple[Example, tuple[Example, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A task at one number of shots, and how its prompts become requests.

    Prompts have at most `max_seq_len` tokens with the continuation. Where they would have more, `truncation` says what
    goes: 'drop_shots', or 'reference' (llm-foundry: tokens from the left, each choice by itself). `fewshot` says how
    shots are drawn: 'reference' (llm-foundry: anew for each item), or 'fixed', the same for all.
    """

    task: TaskSpec
    task_type: TaskType
    encoder: Encoder
    max_seq_len: int
    truncation: str = 'drop_shots'
    fewshot: str = 'reference'

    def question_of(self, example: Example) -> tuple[str, ...]:
        """What an example asks, its answer aside."""
        return self.task_type.ask(example.content, self.task, False).contexts


def build_prompt(task: TaskSpec, task_type: TaskType, example: Example, shots: Sequence[Example]) -> Prompt:
    """The prompt of an example after these shots, in order."""
    preamble = task.prompt_string
    for shot in shots:
        preamble += task_type.shot(shot.content, task, not preamble)
    question = task_type.ask(example.content, task, not preamble)
    return Prompt(preamble=preamble, question=question, num_shots=len(shots))


def prepare_items(preparation: Preparation, examples: Sequence[Example]) -> list[Item]:
    """All items of a task, in row order."""
    (num_shots,) = preparation.task.num_fewshot
    pairs = with_shots(
        examples,
        num_shots,
        seed=preparation.task.fewshot_random_seed,
        question_of=preparation.question_of if preparation.fewshot == 'fixed' else None,
    )
    fitter = ShotFitter(preparation.encoder, preparation.max_seq_len)
    items: list[Item] = []
    while chunk := list(islice(pairs, CHUNK)):
        if preparation.truncation == 'reference':
            fitted = whole_prompts(preparation, chunk)
        else:
            fitted = fitter.fit([shortenable(preparation, *pair) for pair in chunk])
        items += [make_item(preparation, example, prompt) for (example, _), prompt in zip(chunk, fitted, strict=True)]
    return sorted(items, key=lambda item: item.request.key.row)


def whole_prompts(preparation: Preparation, chunk: Sequence[ExampleWithShots]) -> list[FittedPrompt]:
    """Prompts with all their shots, however long they are."""
    prompts = [build_prompt(preparation.task, preparation.task_type, example, shots) for example, shots in chunk]
    encoded = preparation.encoder.prompts(prompts)
    return [
        FittedPrompt(prompt=prompt, encoded=parts, too_long=False)
        for prompt, parts in zip(prompts, encoded, strict=True)
    ]


def shortenable(preparation: Preparation, example: Example, shots: Sequence[Example]) -> Shortenable:
    """The prompt of an example after the last of these shots, however many."""
    task, task_type = preparation.task, preparation.task_type
    return Shortenable(
        instruction=task.prompt_string,
        shots=tuple(task_type.shot(shot.content, task, False) for shot in shots),
        build=lambda num_shots: build_prompt(task, task_type, example, shots[len(shots) - num_shots :]),
    )


def make_item(preparation: Preparation, example: Example, fitted: FittedPrompt) -> Item:
    """One item; its context is cut where even without shots it is too long."""
    return Item(
        content=example.content,
        category=example.category,
        prompt_sha256=hashlib.sha256(fitted.prompt.text.encode()).hexdigest(),
        request=score_request(
            item_key(preparation.task, example),
            fitted.encoded,
            max_seq_len=preparation.max_seq_len,
            truncated=fitted.too_long,
            reference=preparation.truncation == 'reference',
        ),
    )


def item_key(task: TaskSpec, example: Example) -> ItemKey:
    """The name of the item that a task makes of an example."""
    return ItemKey(task=task.key, row=example.row, file=example.file)


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
