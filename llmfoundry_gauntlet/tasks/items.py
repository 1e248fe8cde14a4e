"""Turn a task's examples into items with encoded prompts, and outputs into item results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from llmfoundry_gauntlet.errors import ModelError, named
from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox
from llmfoundry_gauntlet.scoring.mathematics import Comparer
from llmfoundry_gauntlet.scoring.reasoning import UNFINISHED_REASONING, read_generation
from llmfoundry_gauntlet.tasks.base import TRUNCATED_REASON, Task, by_category
from llmfoundry_gauntlet.tasks.encode import EncodedPrompt, Encoder
from llmfoundry_gauntlet.tasks.gold import gold_request, gold_score
from llmfoundry_gauntlet.tasks.truncate import EncodedItem, Shortenable, fit_shots, truncated_item
from llmfoundry_gauntlet.types import (
    Example,
    GenerateRequest,
    Generation,
    Ids,
    Item,
    ItemKey,
    ItemResult,
    Output,
    Prompt,
    Request,
    Score,
    ScoreOutput,
    ScoreRequest,
    StopRule,
)

NO_OUTPUT = 'there is no output'
CHUNK = 1000  # items whose texts are in memory at a time
NO_IDS = np.zeros(0, np.int32)

ExampleWithShots = tuple[Example, tuple[Example, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimit:
    """The largest number of tokens of a generation, and of its prompt with the continuations to score."""

    max_new_tokens: int
    max_prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Turn examples of a task into items. `examples` are all of its rows, from which shots are drawn.

    Prompts have at most `max_seq_len` tokens, the continuation included. Raise ModelError.
    """

    task: Task
    examples: Sequence[Example]
    encoder: Encoder
    max_seq_len: int

    @cached_property
    def stops(self) -> StopRule:
        """Return the stop rule of all generations."""
        return self.task.stops([example.content for example in self.examples])

    @cached_property
    def token_limits(self) -> Mapping[str | None, TokenLimit]:
        """Return the limits by category, each a dataset in llm-foundry. Raise ModelError if no prompt fits."""
        return {category: self.token_limit(members) for category, members in by_category(self.examples).items()}

    def token_limit(self, examples: Sequence[Example]) -> TokenLimit:
        """Return the limit of all generations for these rows.

        With llm-foundry's truncation the prompt reserves tokens for the longest correct generation, even if
        `generation_kwargs.max_new_tokens` is larger (`padding_size` in llm-foundry 0.22).
        """
        task = self.task
        if not task.generates:
            return TokenLimit(max_new_tokens=0, max_prompt_tokens=self.max_seq_len)
        is_given = 'max_new_tokens' in (task.generation_kwargs or {})
        default = task.default_max_new_tokens
        # Nobody asked for a type's default, so it gives way: half of the length is left for the prompt.
        if default is not None and not is_given:
            max_new_tokens = max(1, min(default, self.max_seq_len // 2))
            return TokenLimit(max_new_tokens=max_new_tokens, max_prompt_tokens=self.max_seq_len - max_new_tokens)
        correct = {text for example in examples for text in task.responses(example.content)}

        def longest() -> int:
            return self.encoder.longest(correct, as_reference=task.reference)

        max_new_tokens = num_new_tokens(task, longest)
        reserved, source = max_new_tokens, 'about as many as the longest right one'
        if is_given and task.truncation == 'reference' and default is None:
            reserved = longest() + task.extra_tokens
        elif is_given:
            source = 'generation_kwargs.max_new_tokens'
        if reserved >= self.max_seq_len:
            raise ModelError(
                f'{task.key}: a generation may have {reserved} tokens ({source}), but {named("max_seq_len")} is '
                f'{self.max_seq_len}, which leaves no tokens for the prompt; give a smaller '
                f'generation_kwargs.max_new_tokens or a larger {named("max_seq_len")}, or leave the task out'
            )
        return TokenLimit(max_new_tokens=max_new_tokens, max_prompt_tokens=self.max_seq_len - reserved)

    def items(self, asked: Sequence[Example] | None = None) -> list[Item]:
        """Return the items of these examples (default: all), in row order."""
        return [self.item(example, encoded) for example, encoded in self.encoded(asked)]

    def encoded(self, asked: Sequence[Example] | None = None) -> list[tuple[Example, EncodedItem]]:
        """Return these examples (default: all) with their token ids, in row order."""
        if self.task.builds_requests:
            examples = asked or self.examples
            items = self.task.encoded_items(examples, self.encoder, max_seq_len=self.max_seq_len)
            return list(zip(examples, items, strict=True))
        pairs = self.task.examples_with_shots(self.examples, asked or self.examples)
        encoded: list[tuple[Example, EncodedItem]] = []
        num_tokens: dict[str, int] = {}
        while chunk := list(islice(pairs, CHUNK)):
            fitted = self.fitted(chunk, num_tokens)
            golds = self.golds([example for example, _ in chunk], fitted)
            for (example, shots), prompt, gold in zip(chunk, fitted, golds, strict=True):
                item = self.encoded_item(example, prompt, len(shots))
                encoded.append((example, replace(item, gold=gold)))
        # The pairs are sorted by category.
        row_order = {self.task.item_key(example): index for index, example in enumerate(self.examples)}
        return sorted(encoded, key=lambda pair: row_order[self.task.item_key(pair[0])])

    def golds(self, examples: Sequence[Example], encoded: Sequence[EncodedPrompt]) -> list[Ids | None]:
        """Return the right generation of each example in token ids, as it follows the prompt; None if there is none."""
        task = self.task
        if not task.generates:
            return [None] * len(examples)
        texts = [task.gold_text(example.content) for example in examples]
        return self.encoder.golds([prompt.prompt for prompt in encoded], texts, is_verbatim=task.is_verbatim)

    def fitted(
        self, pairs: Sequence[ExampleWithShots], num_tokens: dict[str, int] | None = None
    ) -> list[EncodedPrompt]:
        """Return the prompts in token ids with the shots that fit, or with all shots under llm-foundry's truncation.

        `num_tokens` caches the number of tokens of each shot across calls.
        """
        # llm-foundry truncates token ids, whatever shots they are; see `truncated_item`.
        if self.task.truncation == 'reference':
            prompts = [self.task.prompt(example, shots) for example, shots in pairs]
            return self.encoder.prompts(prompts)
        shortenables = [self.shortenable(example, shots) for example, shots in pairs]
        return fit_shots(self.encoder, shortenables, num_tokens)

    def shortenable(self, example: Example, shots: Sequence[Example]) -> Shortenable:
        """Return the prompt of an example after the last n of these shots, for any n."""
        task = self.task

        def with_last(num_shots: int) -> Prompt:
            return task.prompt(example, shots[len(shots) - num_shots :])

        return Shortenable(
            shots=tuple(task.shot(shot.content, False) for shot in shots),
            build=with_last,
            max_tokens=self.token_limits[example.category].max_prompt_tokens,
        )

    def encoded_item(self, example: Example, encoded: EncodedPrompt, num_shots: int = 0) -> EncodedItem:
        """Return a prompt, which had `num_shots`, truncated to the limits, even if it is too long without shots."""
        limit = self.token_limits[example.category]
        return truncated_item(
            encoded,
            num_shots=num_shots,
            max_tokens=limit.max_prompt_tokens,
            max_new_tokens=limit.max_new_tokens,
            reference=self.task.truncation == 'reference',
        )

    def item(self, example: Example, encoded: EncodedItem) -> Item:
        """Return the item of an example."""
        task = self.task
        request: Request
        if task.builds_requests:
            request = task.request(example, encoded, self.encoder, max_seq_len=self.max_seq_len)
        elif task.generates:
            request = self.generate_request(example, encoded)
        else:
            request = self.score_request(example, encoded)
        item = Item(
            example=example,
            prompt_sha256=encoded.prompt_sha256,
            num_shots=encoded.num_shots,
            request=request,
            choices=task.choices(example.content),
        )
        if encoded.gold is None or not isinstance(request, GenerateRequest):
            return item
        scored = gold_request(request, encoded.gold, max_seq_len=self.max_seq_len)
        return replace(item, gold=replace(item, request=scored))

    def score_request(self, example: Example, encoded: EncodedItem) -> ScoreRequest:
        """Return the request to score the continuations of an example."""
        return ScoreRequest(
            key=self.task.item_key(example),
            contexts=encoded.contexts,
            continuations=encoded.continuations,
            prompt_shortened=encoded.prompt_shortened,
            unscorable=encoded.unscorable,
        )

    def generate_request(self, example: Example, encoded: EncodedItem) -> GenerateRequest:
        """Return the request to generate from the prompt of an example."""
        task = self.task
        key = task.item_key(example)
        return GenerateRequest(
            key=key,
            context=encoded.contexts[0],
            max_new_tokens=encoded.max_new_tokens,
            stops=task.own_stops(self.stops, example.content),
            sampling=task.sampling(key.variant),
            reasoning=task.reasoning(encoded.ending),
            verbatim=task.is_verbatim,
            restores_space=task.is_in_llm_foundry and (task.reference or not self.encoder.needs_space),
            prompt_shortened=encoded.prompt_shortened,
            unscorable=encoded.unscorable,
        )


def num_new_tokens(task: Task, longest: Callable[[], int]) -> int:
    """Return the token limit of a generation: the task's, its type's, or that of the longest correct one, `longest()`.

    Special tokens are counted, as in llm-foundry 0.22 (`_get_max_answer_length`).
    """
    given: int | None = (task.generation_kwargs or {}).get('max_new_tokens')
    if given is not None:
        return given
    default = task.default_max_new_tokens
    if default is not None:
        return default
    return max(longest() + task.extra_tokens, 1)


def untokenized_items(
    task: Task, examples: Sequence[Example], asked: Sequence[Example]
) -> Iterator[tuple[Item, Prompt]]:
    """Yield items without token ids and their full prompts, for external models.

    They are in row order within each category, one per sample.
    """
    stops = task.stops([example.content for example in examples])
    for example, shots in task.examples_with_shots(examples, asked):
        prompt = task.prompt(example, shots)
        for sample in range(task.num_samples_of(example.content)):
            key = task.item_key(example, sample)
            item = Item(
                example=example,
                prompt_sha256=prompt.sha256,
                num_shots=prompt.num_shots,
                request=untokenized_request(task, key, prompt, task.own_stops(stops, example.content)),
                choices=prompt.continuations,
            )
            yield item, prompt


def untokenized_request(task: Task, key: ItemKey, prompt: Prompt, stops: StopRule) -> Request:
    """Return a request without token ids, which says how another model's output is read."""
    if not task.generates:
        return ScoreRequest(key=key, contexts=(), continuations=())
    return GenerateRequest(
        key=key,
        context=NO_IDS,
        max_new_tokens=0,
        stops=stops,
        sampling=task.sampling(key.variant),
        reasoning=task.reasoning(prompt.text),
    )


def item_result(
    item: Item,
    output: Output | None,
    task: Task,
    *,
    sandbox: Sandbox | None = None,
    comparer: Comparer | None = None,
) -> ItemResult:
    """Score an output; without one the item is unscored, with its request's reason.

    Programs run in the `sandbox`, which tasks with programs require. Mathematical answers are compared by the
    `comparer`, which tasks with such answers require.
    """
    request, content = item.request, item.example.content
    if item.key.is_gold:
        return result_of(item, output, gold_score(item, output, task))
    if output is None:
        return result_of(item, None, Score.unscored(request.unscorable or NO_OUTPUT))
    if not isinstance(output, Generation):
        return result_of(item, output, task.score(output, content))
    # Only what follows the reasoning is scored. If it does not end, an empty answer is scored for its other metrics.
    assert isinstance(request, GenerateRequest)
    reading = read_generation(output.text, request.stops, request.reasoning)
    answer = replace(output, text=reading.answer or '')
    if task.runs_programs:
        assert sandbox is not None
        score = task.score_program(answer, content, sandbox)
    elif task.compares_answers:
        assert comparer is not None
        score = task.score_compared(answer, content, comparer)
    else:
        score = task.score(answer, content)
    if reading.answer is None:
        score = without_answer(score, output)
    return result_of(item, replace(output, text=reading.text), score)


def without_answer(score: Score, output: Generation) -> Score:
    """Return the score of a generation whose reasoning does not end: 0, with that reason, and no answer."""
    if score.value is None:
        return score
    reasons = [UNFINISHED_REASONING]
    if output.is_truncated:
        reasons.append(TRUNCATED_REASON)
    return replace(score, value=0.0, predicted=None, answer=None, reason='; '.join(reasons))


def result_of(item: Item, output: Output | None, score: Score) -> ItemResult:
    """Combine an item, its output and its score into an ItemResult."""
    # Lengths are those of the choices as they are in the data, without the space that joins them to the prompt.
    choices = [text.removeprefix(' ') for text in item.choices]
    num_bytes = [len(text.encode('utf-8', 'surrogatepass')) for text in choices]
    logprobs: tuple[float, ...] | None = None  # of each continuation
    if isinstance(output, ScoreOutput):
        logprobs = tuple(float(of_tokens.sum()) for of_tokens in output.logprobs)
    num_tokens: tuple[int, ...] | None = None  # of each continuation, or of the generation
    if isinstance(item.request, ScoreRequest):
        num_tokens = tuple(map(len, item.request.continuations))
    elif isinstance(output, Generation) and output.num_tokens is not None:
        num_tokens = (output.num_tokens,)
    return ItemResult(
        key=item.key,
        category=item.example.category,
        gold=item.example.content.gold,
        predicted=score.predicted,
        score=score.value,
        logprobs=logprobs,
        num_tokens=num_tokens,
        reason=score.reason,
        prompt_sha256=item.prompt_sha256,
        num_shots=item.num_shots,
        prompt_shortened=item.request.prompt_shortened,
        text=output.text if isinstance(output, Generation) else None,
        answer=score.answer,
        metrics=score.metrics,
        facts=score.facts,
        num_characters=tuple(map(len, choices)) or None,
        num_bytes=tuple(num_bytes) or None,
        cluster=item.example.cluster,
    )
