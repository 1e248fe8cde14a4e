"""A task's examples as items: prompts with shots, encoded and fitted; and their outputs as item results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.errors import ModelError
from llmfoundry_gauntlet.judging.code.sandbox import Sandbox
from llmfoundry_gauntlet.judging.text import cut_at_stops
from llmfoundry_gauntlet.prompts.encode import Encoder, ReplyLimit, ReplyTerms, generate_request, score_request
from llmfoundry_gauntlet.prompts.fewshot import by_category, with_shots
from llmfoundry_gauntlet.prompts.fit import FittedPrompt, Shortenable, ShotFitter
from llmfoundry_gauntlet.tasks import type_of
from llmfoundry_gauntlet.tasks.base import Replies
from llmfoundry_gauntlet.values import (
    Example,
    GenerateRequest,
    Generation,
    Item,
    ItemKey,
    ItemResult,
    Judgement,
    Output,
    Prompt,
    Question,
    Request,
    ScoreOutput,
    ScoreRequest,
)

NO_OUTPUT = 'there is no output'
ALONE = 'alone'  # the variant in which choices are scored after their task's pmi_context alone
CHUNK = 1000  # items whose text is in memory at a time

ExampleWithShots = tuple[Example, tuple[Example, ...]]
ReplyLimits = Mapping[str | None, ReplyLimit]  # by category; None is that of rows without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A task at one number of shots, and how its prompts become requests.

    Prompts have at most `max_seq_len` tokens with the continuation. Where they would have more, `truncation` says what
    goes: 'drop_shots', or 'reference' (llm-foundry: tokens from the left, each choice by itself). `fewshot` says how
    shots are drawn: 'reference' (llm-foundry: anew for each item), or 'fixed', the same for all. `reference` asks for
    llm-foundry's rule of where replies end.
    """

    task: TaskSpec
    encoder: Encoder
    max_seq_len: int
    truncation: str = 'drop_shots'
    fewshot: str = 'reference'
    reference: bool = False

    def reply_terms(self, examples: Sequence[Example]) -> ReplyTerms | None:
        """What all replies are held to, None where none is wanted."""
        replies = type_of(self.task).replies
        if replies is None:
            return None
        return ReplyTerms(
            stops=replies.stops(self.task, [example.content for example in examples], self.reference),
            sampling=partial(replies.sampling, self.task),
            verbatim=replies.is_verbatim,
            restores_space=self.task.is_in_llm_foundry,
        )

    def reply_limits(self, examples: Sequence[Example]) -> ReplyLimits:
        """Return the limits of each category, whose rows llm-foundry makes a data set of their own; {} without replies.

        Raises ModelError where no room is left for a prompt.
        """
        replies = type_of(self.task).replies
        if replies is None:
            return {}
        return {category: self.reply_limit(members, replies) for category, members in by_category(examples).items()}

    def reply_limit(self, examples: Sequence[Example], replies: Replies[Any, Any]) -> ReplyLimit:
        """Return the limit of all replies to these rows.

        With llm-foundry's truncation a prompt leaves room for the longest right reply, also where
        `generation_kwargs.max_new_tokens` asks for more (`padding_size` in llm-foundry 0.22).
        """
        is_given = 'max_new_tokens' in (self.task.generation_kwargs or {})
        most = replies.most_tokens(self.task)
        if most is not None and not is_given:
            max_new_tokens = max(1, min(most, self.max_seq_len // 2))
            return ReplyLimit(max_new_tokens=max_new_tokens, max_prompt_tokens=self.max_seq_len - max_new_tokens)
        right = {text for example in examples for text in replies.responses(example.content, self.task)}
        max_new_tokens = num_reply_tokens(self.task, replies, lambda: self.encoder.longest(right))
        reserved, source = max_new_tokens, 'the longest right reply has about as many'
        if is_given and self.truncation == 'reference' and most is None:
            reserved = self.encoder.longest(right) + replies.margin(self.task)
        elif is_given:
            source = 'generation_kwargs.max_new_tokens'
        if reserved >= self.max_seq_len:
            raise ModelError(
                f'{self.task.key}: a reply may have {reserved} tokens ({source}), but max_seq_len is '
                f'{self.max_seq_len}: no room is left for the prompt; give a smaller '
                'generation_kwargs.max_new_tokens or a larger max_seq_len, or leave the task out'
            )
        return ReplyLimit(max_new_tokens=max_new_tokens, max_prompt_tokens=self.max_seq_len - reserved)


def num_reply_tokens(task: TaskSpec, replies: Replies[Any, Any], longest: Callable[[], int]) -> int:
    """Tokens that a reply may have: what the task says, or its type, else `longest`, those of the longest right one.

    As in llm-foundry 0.22 (`_get_max_answer_length`) special tokens count.
    """
    given: int | None = (task.generation_kwargs or {}).get('max_new_tokens')
    if given is not None:
        return given
    most = replies.most_tokens(task)
    return max(longest() + replies.margin(task), 1) if most is None else most


def build_prompt(task: TaskSpec, example: Example, shots: Sequence[Example]) -> Prompt:
    """The prompt of an example after these shots, in order."""
    task_type = type_of(task)
    preamble = task.prompt_string
    for shot in shots:
        preamble += task_type.shot(shot.content, task, not preamble)
    question = task_type.ask(example.content, task, not preamble)
    return Prompt(preamble=preamble, question=question, num_shots=len(shots))


def examples_with_shots(
    task: TaskSpec, examples: Sequence[Example], fewshot: str, asked: Sequence[Example]
) -> Iterator[ExampleWithShots]:
    """Those of the examples that are asked, by category where there are any, with the shots that they have among all.

    `fewshot` is as for Preparation.
    """

    def question_of(example: Example) -> tuple[str, ...]:
        return type_of(task).ask(example.content, task, False).contexts

    (num_shots,) = task.num_fewshot
    seed = task.fewshot_random_seed
    pairs = with_shots(examples, num_shots, seed=seed, question_of=question_of if fewshot == 'fixed' else None)
    if len(asked) == len(examples):
        return pairs
    wanted = {item_key(task, example) for example in asked}
    return (pair for pair in pairs if item_key(task, pair[0]) in wanted)


def prepare_items(
    preparation: Preparation, examples: Sequence[Example], asked: Sequence[Example] | None = None
) -> list[Item]:
    """The items of the examples, in their order; with `asked` of those alone, their shots drawn from all the same."""
    pairs = examples_with_shots(preparation.task, examples, preparation.fewshot, asked or examples)
    terms, limits = preparation.reply_terms(examples), preparation.reply_limits(examples)
    fitter = ShotFitter(preparation.encoder)
    items: list[Item] = []
    while chunk := list(islice(pairs, CHUNK)):
        if preparation.truncation == 'reference':
            fitted = whole_prompts(preparation, chunk)
        else:
            fitted = fitter.fit([shortenable(preparation, *pair, limits) for pair in chunk])
        items += [
            make_item(preparation, example, prompt, terms, limits)
            for (example, _), prompt in zip(chunk, fitted, strict=True)
        ]
    places = {item_key(preparation.task, example): place for place, example in enumerate(examples)}
    return sorted(items, key=lambda item: places[item.request.key])


def prompt_alone(task: TaskSpec, example: Example) -> Prompt | None:
    """The prompt that shows how probable an item's choices are without it, None where its task does not want that."""
    context = getattr(task, 'pmi_context', None)
    if context is None:
        return None
    choices = type_of(task).ask(example.content, task, False).continuations
    return Prompt(preamble='', question=Question(contexts=(context,), continuations=choices), num_shots=0)


def alone_items(preparation: Preparation, examples: Sequence[Example]) -> list[Item]:
    """The further items of a task that wants to know how probable choices are without their prompts."""
    asked = [(example, prompt) for example in examples if (prompt := prompt_alone(preparation.task, example))]
    encoded = preparation.encoder.prompts([prompt for _, prompt in asked])
    items = [
        make_item(preparation, example, FittedPrompt(prompt=prompt, encoded=parts, too_long=False), None, {})
        for (example, prompt), parts in zip(asked, encoded, strict=True)
    ]
    return [
        replace(item, request=replace(item.request, key=replace(item.request.key, variant=ALONE))) for item in items
    ]


def with_alone(results: Sequence[ItemResult]) -> list[ItemResult]:
    """The items, those of choices alone taken into the items that they belong to."""
    alone = {replace(result.key, variant=None): result.logprobs for result in results if result.key.variant == ALONE}
    if not alone:
        return list(results)
    return [replace(result, logprobs_alone=alone.get(result.key)) for result in results if result.key.variant != ALONE]


def whole_prompts(preparation: Preparation, chunk: Sequence[ExampleWithShots]) -> list[FittedPrompt]:
    """Prompts with all their shots, however long they are."""
    prompts = [build_prompt(preparation.task, example, shots) for example, shots in chunk]
    encoded = preparation.encoder.prompts(prompts)
    return [
        FittedPrompt(prompt=prompt, encoded=parts, too_long=False)
        for prompt, parts in zip(prompts, encoded, strict=True)
    ]


def shortenable(
    preparation: Preparation, example: Example, shots: Sequence[Example], limits: ReplyLimits
) -> Shortenable:
    """The prompt of an example after the last of these shots, however many."""
    task = preparation.task
    return Shortenable(
        instruction=task.prompt_string,
        shots=tuple(type_of(task).shot(shot.content, task, False) for shot in shots),
        build=lambda num_shots: build_prompt(task, example, shots[len(shots) - num_shots :]),
        max_tokens=limits[example.category].max_prompt_tokens if limits else preparation.max_seq_len,
    )


def make_item(
    preparation: Preparation, example: Example, fitted: FittedPrompt, terms: ReplyTerms | None, limits: ReplyLimits
) -> Item:
    """One item; its context is truncated where even without shots it is too long.

    `terms` and `limits` are those of a reply, if one is wanted.
    """
    key = item_key(preparation.task, example)
    cut: dict[str, Any] = {'truncated': fitted.too_long, 'reference': preparation.truncation == 'reference'}
    if terms is None:
        request: Request = score_request(key, fitted.encoded, max_seq_len=preparation.max_seq_len, **cut)
    else:
        request = generate_request(key, fitted.encoded, terms=terms, limit=limits[example.category], **cut)
    return Item(
        content=example.content,
        category=example.category,
        cluster=example.cluster,
        prompt_sha256=prompt_digest(fitted.prompt),
        request=request,
    )


def prompt_digest(prompt: Prompt) -> str:
    """The SHA-256 of a prompt's text."""
    return hashlib.sha256(prompt.text.encode()).hexdigest()


def item_key(task: TaskSpec, example: Example, sample: int = 0) -> ItemKey:
    """The name of the item that a task makes of an example."""
    return ItemKey(task=task.key, row=example.row, file=example.file, variant=example.variant, sample=sample)


def with_samples(items: Sequence[Item], num_samples: int) -> list[Item]:
    """Each item as often as replies are wanted to it."""
    if num_samples == 1:
        return list(items)
    return [
        replace(item, request=replace(item.request, key=replace(item.request.key, sample=sample)))
        for item in items
        for sample in range(num_samples)
    ]


def item_result(
    item: Item, output: Output | None, task: TaskSpec, *, reference: bool, sandbox: Sandbox | None = None
) -> ItemResult:
    """The item as marked; without an output it is unscored, for the reason its request gives.

    Programs are run in the `sandbox`, which must be there for them.
    """
    request = item.request
    task_type = type_of(task)
    if isinstance(output, Generation) and isinstance(request, GenerateRequest):
        output = replace(output, text=cut_at_stops(output.text, request.stops))
    if output is None:
        judgement = Judgement.unscored(request.unscorable or NO_OUTPUT)
    elif task_type.judge is not None:
        judgement = task_type.judge(output, item.content, task, reference)
    else:
        assert task_type.programs is not None and sandbox is not None and isinstance(output, Generation)
        judgement = task_type.programs.judge(output, item.content, task, reference, sandbox)
    return result_of(item, output, judgement, task)


def result_of(item: Item, output: Output | None, judgement: Judgement, task: TaskSpec) -> ItemResult:
    """The item, its output and what was said of it, in one line."""
    choices = choices_of(item, task)
    return ItemResult(
        key=item.request.key,
        category=item.category,
        gold=item.content.gold,
        predicted=judgement.predicted,
        credit=judgement.credit,
        logprobs=logprob_sums(output),
        num_tokens=num_tokens(item.request, output),
        reason=judgement.reason,
        prompt_sha256=item.prompt_sha256,
        truncated=item.request.truncated,
        text=output.text if isinstance(output, Generation) else None,
        answer=judgement.answer,
        marks=judgement.marks,
        facts=judgement.facts,
        num_characters=None if choices is None else tuple(map(len, choices)),
        num_bytes=None if choices is None else tuple(len(text.encode('utf-8', 'surrogatepass')) for text in choices),
        cluster=item.cluster,
    )


def choices_of(item: Item, task: TaskSpec) -> tuple[str, ...] | None:
    """The texts that are scored, without the space before them; None where a reply is wanted."""
    if not isinstance(item.request, ScoreRequest):
        return None
    return tuple(text.removeprefix(' ') for text in type_of(task).ask(item.content, task, False).continuations)


def logprob_sums(output: Output | None) -> tuple[float, ...] | None:
    """Summed log-probabilities of the continuations, if they were scored."""
    return tuple(float(values.sum()) for values in output.logprobs) if isinstance(output, ScoreOutput) else None


def num_tokens(request: Request, output: Output | None) -> tuple[int, ...] | None:
    """Tokens of each continuation, or of the reply."""
    if isinstance(request, ScoreRequest):
        return tuple(len(ids) for ids in request.continuations)
    return (output.num_tokens,) if isinstance(output, Generation) and output.num_tokens is not None else None
