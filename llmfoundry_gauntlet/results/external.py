"""Score external answers, from a server or an API, with the scorers used for our own outputs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llmfoundry_gauntlet.config.tasks import task_key
from llmfoundry_gauntlet.config.yaml import decode
from llmfoundry_gauntlet.data.readers import stream_rows, unique_keys
from llmfoundry_gauntlet.errors import DataError, Problems, plural
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, with_programs
from llmfoundry_gauntlet.evaluation.run import Evaluation, summarize
from llmfoundry_gauntlet.results.samples import numbers
from llmfoundry_gauntlet.scoring.code.execution import workers
from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox
from llmfoundry_gauntlet.scoring.mathematics import Comparer
from llmfoundry_gauntlet.scoring.reasoning import read_generation
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.base import by_category, draw_seed
from llmfoundry_gauntlet.tasks.encode import Encoder, spaced
from llmfoundry_gauntlet.tasks.items import (
    item_result,
    num_new_tokens,
    result_of,
    untokenized_items,
    without_answer,
)
from llmfoundry_gauntlet.types import (
    Example,
    GenerateRequest,
    Generation,
    Item,
    ItemKey,
    ItemResult,
    Prompt,
    Score,
    ScoreOutput,
    StopRule,
)

CHARACTERS_PER_TOKEN = 2  # of correct generations, without a tokenizer; a low estimate, so that none is truncated
TOKENS_PER_BYTE = 12  # at most, with one token per byte: normalization makes up to 11 bytes of one (U+FDFA)
TOKENS_BESIDE = 32  # at most, of a choice beside those of its text
ROUNDING = 1e-3  # a sum of log-probabilities in low precision may exceed 0 by this much
ROUNDING_OF_ALL = 1e-6  # all of them exceed 0 by less, even if every choice is certain
GENERATION_KEYS = ('stop', 'max_new_tokens', 'temperature', 'top_p', 'top_k', 'seed')
MISSING = 'there is no answer'
ANSWERS = json.JSONDecoder(object_pairs_hook=unique_keys)  # Python's NaN and Infinity are numbers that are not finite


def request_lines(data: EvaluationData, encoder: Encoder | None = None) -> Iterator[str]:
    """Yield the requests of all tasks as JSON lines, one task after the other.

    Without an encoder `max_new_tokens` is an estimate, and continuations begin with a space, as most tokenizers expect.
    """
    for key, task in data.tasks.items():
        max_new_tokens = token_limits(task, data.examples[key], encoder)
        for item, prompt in untokenized_items(task, data.examples[key], data.asked(key)):
            label, _, shots = key.rpartition('/')
            choices = tuple(map(spaced, item.choices))
            if encoder is not None:
                choices = encoder.choices_outside_chat(prompt)
            fields: dict[str, Any] = {
                'task': label,
                'num_shots': int(shots.removesuffix('-shot')),
                'file': item.key.file,
                'row': item.key.row,
                'variant': item.key.variant,
                'sample': item.key.sample,
                **prompt_fields(prompt, encoder),
                'choices': choices or None,
                **dict.fromkeys(GENERATION_KEYS),
            }
            if 'messages' in fields and prompt.chat_format.template_kwargs:
                fields['chat_template_kwargs'] = prompt.chat_format.template_kwargs
            if isinstance(item.request, GenerateRequest):
                sampling = item.request.sampling
                fields |= {
                    **asdict(sampling),
                    'stop': list(item.request.stops.strings),
                    'max_new_tokens': max_new_tokens[item.example.category],
                    'seed': draw_seed(sampling, item.key) if sampling.temperature > 0 else None,
                }
            yield json.dumps(fields, ensure_ascii=False)


def token_limits(task: Task, examples: Sequence[Example], encoder: Encoder | None) -> dict[str | None, int]:
    """Return the maximum number of generated tokens by category; {} if the task does not generate."""

    def longest(members: Sequence[Example]) -> int:
        right = {text for example in members for text in task.responses(example.content)}
        if encoder is not None:
            return encoder.longest(right, as_reference=task.reference)
        return math.ceil(max(map(len, right)) / CHARACTERS_PER_TOKEN)

    if not task.generates:
        return {}
    if task.builds_requests:
        return {example.category: task.max_new_tokens_of(example.content) for example in examples}
    return {
        category: num_new_tokens(task, partial(longest, members)) for category, members in by_category(examples).items()
    }


def prompt_fields(prompt: Prompt, encoder: Encoder | None) -> dict[str, Any]:
    """Return the prompt's fields: `messages` if the server is to apply a chat template, else `prompt`.

    The value is a list if each choice has its own prompt (schema tasks).
    """
    is_chat = prompt.chat_template is True or (encoder is not None and encoder.in_chat(prompt))
    if not is_chat:
        texts = [prompt.preamble + text for text in prompt.own_texts]
        return {'prompt': texts[0] if len(texts) == 1 else texts}

    conversations = []
    for context in prompt.contexts:
        messages = [*prompt.messages(context)]
        if prompt.lead:  # the assistant's answer has begun
            messages.append({'role': 'assistant', 'content': prompt.lead})
        conversations.append(messages)
    return {'messages': conversations[0] if len(conversations) == 1 else conversations}


class AnswerError(ValueError):
    """Raised for an answer that cannot be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to an item, a line of a file of answers.

    It is either the `text` of a generation or the summed log-probabilities of the choices in nats, None if not finite,
    if known with the number of tokens of each choice and, for language modelling, whether every token was the argmax.
    """

    ignore_unknown_keys: ClassVar = True
    task: str
    num_shots: int
    row: int
    file: str | None = None
    variant: str | None = None
    sample: int | None = None
    text: str | None = None
    logprobs: tuple[float | None, ...] | None = None
    num_tokens: tuple[int, ...] | None = None
    is_argmax: bool | None = None

    def __post_init__(self) -> None:
        if self.text is None and self.logprobs is None:
            raise ValueError('has neither text nor logprobs')

    @property
    def key(self) -> ItemKey:
        """Return the key of the item that is answered."""
        task = task_key(self.task, self.num_shots)
        return ItemKey(task=task, row=self.row, file=self.file, variant=self.variant, sample=self.sample or 0)


def read_answers(path: Path) -> Iterator[tuple[str, Answer]]:
    """Yield each answer of a file after its place (`file:line`), ignoring unknown keys.

    The file is read as data files are, compressed or not. Raise DataError with every problem of every line.
    """
    problems = Problems('')
    for number, line in stream_rows(str(path), problems.messages, decoder=ANSWERS, are_answers=True):
        problems.source = f'{path}:{number + 1}'
        answer: Answer | None = decode(Answer, line, '', problems)
        if answer is not None:
            yield problems.source, answer
    if problems.messages:
        raise DataError(problems.messages)


def score_answers(
    data: EvaluationData, answers: Iterable[tuple[str, Answer]], *, allow_missing: bool = False
) -> Evaluation:
    """Return the evaluation of these answers, given with their places and scored while they are read.

    Raise DataError with every answer that is unknown, duplicate or invalid and, unless `allow_missing`, with every item
    without an answer.
    """
    with Comparer() as comparer:
        return score_all(data, answers, comparer, allow_missing=allow_missing)


def score_all(
    data: EvaluationData, answers: Iterable[tuple[str, Answer]], comparer: Comparer, *, allow_missing: bool
) -> Evaluation:
    """Return the evaluation of these answers; the comparer compares those to MATH problems. Raise DataError."""
    started = time.perf_counter()
    scoring = AnswerScoring(with_programs(data), comparer)
    try:
        for place, answer in answers:
            scoring.add(place, answer)
    except DataError as error:  # from read_answers, at the end of the file: lines that are not valid answers
        scoring.problems.extend(error.problems)
        if not scoring.places:  # such as a pointer to another file: every item would be listed as missing
            raise DataError(scoring.problems) from error

    missing = [key for key in scoring.items if key not in scoring.places]
    if not allow_missing:
        scoring.problems += unanswered(missing)
    if scoring.problems:
        scoring.cancel()
        raise DataError(scoring.problems)

    results = scoring.finished()
    tasks = scoring.data.tasks
    results_by_task: dict[str, list[ItemResult]] = {key: [] for key in tasks}
    contents: dict[str, list[Any]] = {key: [] for key in tasks}
    for key, item in scoring.items.items():
        result = results.get(key) or result_of(item, None, Score.unscored(MISSING))
        results_by_task[key.task].append(result)
        contents[key.task].append(item.example.content)
    completed = {key: tasks[key].completed(of_task, contents[key]) for key, of_task in results_by_task.items()}

    # Programs run beside other answers, so only the time of all is known; it is shared out by items.
    seconds = time.perf_counter() - started
    num_items = len(scoring.items)
    seconds_by_task = {key: seconds * len(of_task) / num_items for key, of_task in results_by_task.items()}
    return summarize(scoring.data, tasks, completed, seconds_by_task, comparer=comparer, allow_missing=allow_missing)


class AnswerScoring:
    """Scores answers to the items of an evaluation as they come, programs in threads beside the others.

    `places` are those of the answers that items have, `problems` the answers that cannot be scored.
    """

    def __init__(self, data: EvaluationData, comparer: Comparer) -> None:
        self.data = data
        self.comparer = comparer
        self.items = {item.key: item for key in data.tasks for item in items_in_row_order(data, key)}
        self.places: dict[ItemKey, str] = {}
        self.problems: list[str] = []
        self._results: dict[ItemKey, ItemResult] = {}
        self._running: dict[ItemKey, Future[ItemResult]] = {}

    def add(self, place: str, answer: Answer) -> None:
        """Score an answer, or add its problem."""
        key = answer.key
        if key not in self.items:
            self.problems.append(f'{place}: {item_name(key, key.row)} is not an item of these tasks')
            return
        if key in self.places:
            self.problems.append(f'{place}: {item_name(key, key.row)} was answered already at {self.places[key]}')
            return

        self.places[key] = place
        item, task = self.items[key], self.data.tasks[key.task]
        if task.runs_programs and answer.text is not None:
            self._running[key] = workers().submit(score_answer, item, answer, task, self.data.sandbox)
            return
        try:
            self._results[key] = score_answer(item, answer, task, self.data.sandbox, self.comparer)
        except AnswerError as error:
            self.problems.append(f'{place}: {item_name(key, key.row)}: {error}')

    def finished(self) -> dict[ItemKey, ItemResult]:
        """Return the results of all answers once the last program has ended."""
        return self._results | {key: running.result() for key, running in self._running.items()}

    def cancel(self) -> None:
        """Drop the programs that have not started."""
        for running in self._running.values():
            running.cancel()


def items_in_row_order(data: EvaluationData, key: str) -> list[Item]:
    """Return a task's items in row order, as when a model is evaluated; variants are in the order of the prompts."""
    task = data.tasks[key]
    place_of_example = {task.item_key(example): place for place, example in enumerate(data.asked(key))}
    items = [item for item, _ in untokenized_items(task, data.examples[key], data.asked(key))]
    items.sort(key=lambda item: (place_of_example[task.item_key(item.example)], item.key.sample))
    return items


def score_answer(
    item: Item, answer: Answer, task: Task, sandbox: Sandbox | None, comparer: Comparer | None = None
) -> ItemResult:
    """Score an item's answer, running programs in the sandbox. Raise AnswerError for an unusable answer.

    Tasks with mathematical answers require the `comparer`.
    """
    written = Generation(key=item.key, text=answer.text or '')
    if task.generates:
        if answer.text is None:
            raise AnswerError('has no text; a generation is required')
        return item_result(item, written, task, sandbox=sandbox, comparer=comparer)
    logprobs = numbers(answer.logprobs)
    if logprobs is None:
        reading = read_generation(written.text, StopRule(), task.reasoning())
        score = task.score_text(reading.answer or '', item.example.content)
        if score is None:
            raise AnswerError('has no logprobs; a text cannot be scored here')
        return result_of(item, written, score if reading.answer is not None else without_answer(score, written))
    result = item_result(item, score_output(item, answer, logprobs), task)
    return replace(result, logprobs=logprobs, num_tokens=answer.num_tokens)


def score_output(item: Item, answer: Answer, logprobs: tuple[float, ...]) -> ScoreOutput:
    """Return log-probabilities in the engine's form, with each sum spread evenly over its choice's tokens.

    Without token counts each choice counts as one token, so sums are compared. Raise AnswerError.
    """
    num_choices = len(item.choices)
    if len(logprobs) != num_choices:
        raise AnswerError(f'has {len(logprobs)} logprobs; allowed: {num_choices}, one per choice')
    check_logprobs(logprobs)
    counts = (1,) * num_choices if answer.num_tokens is None else answer.num_tokens
    check_counts(counts, item.choices)
    if num_choices == 1 and answer.is_argmax is None and np.isfinite(logprobs[0]):
        raise AnswerError(
            'has logprobs without is_argmax (whether every token is the most probable one); give that too, or a text '
            'written greedily'
        )
    is_argmax = bool(answer.is_argmax)
    return ScoreOutput(
        key=item.key,
        logprobs=tuple(np.full(count, total / count) for total, count in zip(logprobs, counts, strict=True)),
        is_argmax=tuple(np.full(count, is_argmax) for count in counts),
        num_top=tuple(np.full(count, int(is_argmax)) for count in counts),
    )


def check_logprobs(logprobs: Sequence[float]) -> None:
    """Raise AnswerError for values above 0, beyond rounding, which are no log-probabilities."""
    wrong = [place for place, value in enumerate(logprobs) if value > ROUNDING]
    # Probabilities of long choices are small, but all of them are above 0.
    if not wrong and len(logprobs) > 1 and all(value > ROUNDING_OF_ALL for value in logprobs):
        wrong = [0]
    if wrong:
        place = wrong[0]
        raise AnswerError(
            f'logprobs[{place}] is {logprobs[place]:g}; allowed: natural logarithms of probabilities, which are 0 or '
            'less; of probabilities write the logarithm, of losses the negative'
        )


def check_counts(counts: Sequence[int], choices: Sequence[str]) -> None:
    """Raise AnswerError for numbers of tokens that these choices cannot have."""
    if len(counts) != len(choices) or min(counts) < 1:
        raise AnswerError(f'num_tokens is {list(counts)}; allowed: {plural(len(choices), "number")} of 1 or more')
    for place, (count, text) in enumerate(zip(counts, choices, strict=True)):
        most = TOKENS_PER_BYTE * len(text.encode('utf-8', 'surrogatepass')) + TOKENS_BESIDE
        if count > most:
            raise AnswerError(
                f'num_tokens[{place}] is {count}; allowed: the number of tokens of the choice, {most} at most'
            )


def item_name(key: ItemKey, rows: int | str) -> str:
    """Return the name, for messages, of items that differ only in their rows."""
    parts = [key.task, key.file, f'row {rows}', key.variant, f'sample {key.sample}' if key.sample else None]
    return ', '.join(part for part in parts if part)


def unanswered(keys: Iterable[ItemKey]) -> list[str]:
    """Return problems that name items without an answer, with adjacent rows as a range; keys must be in row order."""
    # First and last row of each range, by the key of the items without their row.
    ranges_by_group: dict[ItemKey, list[tuple[int, int]]] = {}
    for key in keys:
        ranges = ranges_by_group.setdefault(replace(key, row=0), [])
        if ranges and key.row == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], key.row
        else:
            ranges.append((key.row, key.row))

    problems = []
    for group, ranges in ranges_by_group.items():
        rows = [str(first) if first == last else f'{first}-{last}' for first, last in ranges]
        problems.append(f'{item_name(group, ", ".join(rows))}: {MISSING}')
    return problems
