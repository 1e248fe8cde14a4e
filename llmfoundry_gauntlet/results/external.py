"""Score external answers (of a server, an API, or canonical solutions) with the same scorers as our own outputs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_gauntlet.config.tasks import task_key
from llmfoundry_gauntlet.config.yaml import describe
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, with_programs
from llmfoundry_gauntlet.evaluation.run import Evaluation, summarize
from llmfoundry_gauntlet.scoring.code.execution import workers
from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.encode import Encoder, spaced
from llmfoundry_gauntlet.tasks.fewshot import by_category, draw_seed
from llmfoundry_gauntlet.tasks.items import ALONE, item_result, num_new_tokens, result_of, untokenized_items
from llmfoundry_gauntlet.types import (
    Answer,
    Example,
    GenerateRequest,
    Generation,
    Item,
    ItemKey,
    ItemResult,
    Prompt,
    Score,
    ScoreOutput,
)

CHARACTERS_PER_TOKEN = 2  # of right generations, if there is no tokenizer: few, so that none is truncated
SAMPLING = ('temperature', 'top_p', 'top_k', 'seed')
SCORED = dict.fromkeys(('stop', 'max_new_tokens', *SAMPLING))
MISSING = 'there is no answer'


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
    """Return the request keys for generation."""
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
    """Return the prompt: `messages` if the server has a chat template to apply, else `prompt`.

    `prompt` is a list if each choice has its own (schema tasks).
    """
    if prompt.chat_template is True or (encoder is not None and encoder.in_chat(prompt)):
        (text,) = prompt.contexts
        begun = [{'role': 'assistant', 'content': prompt.lead}] if prompt.lead else []
        return {'messages': [{'role': 'user', 'content': text}, *begun]}
    texts = [prompt.preamble + text for text in prompt.own_texts]
    return {'prompt': texts[0] if len(texts) == 1 else texts}


def name_fields(key: ItemKey) -> dict[str, Any]:
    """Return the keys that identify an item in requests and answers."""
    label, _, shots = key.task.rpartition('/')
    return {
        'task': label,
        'num_shots': int(shots.removesuffix('-shot')),
        'file': key.file,
        'row': key.row,
        'variant': key.variant,
        'sample': key.sample,
    }


class LineError(ValueError):
    """Raised for a line that cannot be read as an answer."""


def read_answers(path: Path) -> Iterator[Answer]:
    """Yield the answers of a file. Raise DataError with every invalid line."""
    problems: list[str] = []
    try:
        with path.open(encoding='utf-8') as lines:
            for number, line in enumerate(lines, 1):
                place = f'{path}:{number}'
                if not line.strip():
                    continue
                try:
                    yield parse_answer(json.loads(line), place)
                except json.JSONDecodeError as error:
                    problems.append(f'{place}: malformed JSON: {error.msg} at column {error.colno}')
                except LineError as error:
                    problems.append(f'{place}: {error}')
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f'{path}: cannot be read: {error}') from error
    if problems:
        raise DataError(problems)


def parse_answer(row: Any, place: str) -> Answer:
    """Return one line as an Answer. Unknown keys are ignored."""
    if not isinstance(row, dict):
        raise LineError(f'is {describe(row)}; allowed: a JSON object')
    text = optional(row, 'text', str)
    logprobs = optional_list(row, 'logprobs', (int, float, type(None)))
    if text is None and logprobs is None:
        raise LineError('has neither text nor logprobs')
    num_tokens = optional_list(row, 'num_tokens', int)
    return Answer(
        place=place,
        key=ItemKey(
            task=task_key(required(row, 'task', str), required(row, 'num_shots', int)),
            row=required(row, 'row', int),
            file=optional(row, 'file', str),
            variant=optional(row, 'variant', str),
            sample=optional(row, 'sample', int) or 0,
        ),
        text=text,
        logprobs=None if logprobs is None else tuple(math.nan if value is None else float(value) for value in logprobs),
        num_tokens=None if num_tokens is None else tuple(num_tokens),
        is_argmax=optional(row, 'is_argmax', bool),
    )


def required(row: dict[str, Any], key: str, kind: type) -> Any:
    """Return the value at `key`."""
    if row.get(key) is None:
        raise LineError(f"the key '{key}' is missing")
    return optional(row, key, kind)


def optional(row: dict[str, Any], key: str, kind: type) -> Any:
    """Return the value at `key`, None if it is missing."""
    value = row.get(key)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise LineError(f'{key} is {describe(value)}; allowed: {KINDS[kind]}')
    return value


def optional_list(row: dict[str, Any], key: str, kinds: Any) -> list[Any] | None:
    """Return the list of numbers at `key`, None if it is missing."""
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise LineError(f'{key} is {describe(value)}; allowed: a list of numbers')
    for index, item in enumerate(value):
        if not isinstance(item, kinds) or isinstance(item, bool):
            raise LineError(f'{key}[{index}] is {describe(item)}; allowed: a number')
    return value


KINDS = {str: 'text', int: 'a whole number', bool: 'true or false'}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSolutions:
    """The canonical solutions of a code task: their number, the reasons of failures by row, and seconds."""

    task: str
    num_solutions: int
    failures: Mapping[int, str]
    seconds: float


class AnswerError(ValueError):
    """Raised for an answer that cannot be scored."""


@dataclass(slots=True)
class ScoredAnswers:
    """The scored answers so far with their places, and the problems of others."""

    sandbox: Sandbox | None
    results: dict[ItemKey, ItemResult] = field(default_factory=dict)
    programs: dict[ItemKey, Future[ItemResult]] = field(default_factory=dict)  # that are being run
    places: dict[ItemKey, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def take(self, answer: Answer, asked: Mapping[ItemKey, Item], tasks: Mapping[str, Task]) -> None:
        """Score the next answer."""
        key = answer.key
        if key not in asked:
            self.problems.append(f'{answer.place}: {name(key)} is not an item of these tasks')
        elif key in self.places:
            self.problems.append(f'{answer.place}: {name(key)} was answered already at {self.places[key]}')
        else:
            self.places[key] = answer.place
            item, task = asked[key], tasks[key.task]
            try:
                if task.runs_programs and answer.text is not None:
                    self.programs[key] = workers().submit(score_answer, item, answer, task, self.sandbox)
                else:
                    self.results[key] = score_answer(item, answer, task, self.sandbox)
            except AnswerError as error:
                self.problems.append(f'{answer.place}: {name(key)}: {error}')

    def finish(self) -> None:
        """Wait for the programs that are still running."""
        self.results.update({key: program.result() for key, program in self.programs.items()})


def score_answers(data: EvaluationData, answers: Iterable[Answer], *, allow_missing: bool = False) -> Evaluation:
    """Return the evaluation of these answers, scored as they are read.

    Raise DataError with every answer that is unknown, duplicate or of the wrong form, and unless `allow_missing` with
    every item without an answer.
    """
    started = time.perf_counter()
    data = with_programs(data)
    tasks = data.tasks
    asked = {
        item.key: item
        for key, task in tasks.items()
        for item, _ in untokenized_items(task, data.examples[key], data.asked(key))
    }
    scored = ScoredAnswers(data.sandbox)
    try:
        for answer in answers:
            scored.take(answer, asked, tasks)
    except DataError as error:  # lines that are no answers, once all were read
        scored.problems.extend(error.problems)
    missing = sorted(asked.keys() - scored.places.keys(), key=order)
    if not allow_missing:
        scored.problems += unanswered(missing)
    if scored.problems:
        for program in scored.programs.values():
            program.cancel()
        raise DataError(scored.problems)
    scored.finish()
    for key in missing:
        scored.results[key] = result_of(asked[key], None, Score.unscored(MISSING))
    by_task: dict[str, list[ItemResult]] = {key: [] for key in tasks}
    for key in in_row_order(asked, data):
        by_task[key.task].append(scored.results[key])
    seconds = time.perf_counter() - started
    shares = {key: seconds * len(task_results) / len(asked) for key, task_results in by_task.items()}
    return summarize(data, tasks, by_task, shares, allow_missing=allow_missing)


def check_solutions(data: EvaluationData) -> list[CheckedSolutions]:
    """Run the canonical solutions of every code task as if a model had generated them."""
    data = with_programs(data)
    checked = []
    for key, task in data.tasks.items():
        if not task.runs_programs or data.sandbox is None:
            continue
        started = time.perf_counter()
        running = {}
        for example in data.examples[key]:
            (text,) = task.responses(example.content)
            output = Generation(key=ItemKey(key, example.row), text=text)
            running[example.row] = workers().submit(task.score_program, output, example.content, data.sandbox)
        results = {row: program.result() for row, program in running.items()}
        failures = {row: result.reason or '' for row, result in results.items() if result.value != 1}
        seconds = time.perf_counter() - started
        checked.append(CheckedSolutions(task=key, num_solutions=len(results), failures=failures, seconds=seconds))
    return checked


def in_row_order(keys: Iterable[ItemKey], data: EvaluationData) -> list[ItemKey]:
    """Return items in the order of their data, as a model's; variants in the order in which they are asked."""
    places = {
        task.item_key(example): (number, place)
        for number, (key, task) in enumerate(data.tasks.items())
        for place, example in enumerate(data.asked(key))
    }

    def place(key: ItemKey) -> tuple[tuple[int, int], bool, int]:
        is_alone = key.variant == ALONE
        return places[replace(key, sample=0, variant=None if is_alone else key.variant)], is_alone, key.sample

    return sorted(keys, key=place)


def score_answer(item: Item, answer: Answer, task: Task, sandbox: Sandbox | None) -> ItemResult:
    """Return the item scored by an answer; programs run in the sandbox. Raise AnswerError for an unusable answer."""
    written = Generation(key=answer.key, text=answer.text or '')
    if task.generates:
        if answer.text is None:
            raise AnswerError('has no text; a generation is required')
        return item_result(item, written, task, sandbox=sandbox)
    if answer.logprobs is None:
        score = task.score_text(written.text, item.example.content)
        if score is None:
            raise AnswerError('has no logprobs; a text cannot be scored here')
        return result_of(item, written, score)
    output = score_output(item, answer, answer.logprobs)
    result = item_result(item, output, task)
    return replace(result, logprobs=answer.logprobs, num_tokens=answer.num_tokens)


def score_output(item: Item, answer: Answer, logprobs: tuple[float, ...]) -> ScoreOutput:
    """Return log-probabilities as the engine returns them, with each sum spread evenly over a choice's tokens.

    Without token counts each choice counts as one token, so sums are compared.
    """
    num_choices = len(item.choices)
    if len(logprobs) != num_choices:
        raise AnswerError(f'has {len(logprobs)} logprobs; allowed: {num_choices}, one per choice')
    counts = answer.num_tokens or (1,) * num_choices
    if len(counts) != num_choices or min(counts) < 1:
        raise AnswerError(f'num_tokens is {list(counts)}; allowed: {num_choices} numbers of 1 or more')
    if num_choices == 1 and answer.is_argmax is None and np.isfinite(logprobs[0]):
        raise AnswerError(
            'has logprobs without is_argmax (whether every token is the most probable one); give that too, or a text '
            'written greedily'
        )
    is_argmax = bool(answer.is_argmax)
    return ScoreOutput(
        key=answer.key,
        logprobs=tuple(np.full(count, total / count) for total, count in zip(logprobs, counts, strict=True)),
        is_argmax=tuple(np.full(count, is_argmax) for count in counts),
        num_top=tuple(np.full(count, int(is_argmax)) for count in counts),
    )


def order(key: ItemKey) -> tuple[str, str, int, str, int]:
    """Return the sort key of an item in messages: its name."""
    return key.task, key.file or '', key.row, key.variant or '', key.sample


def name(key: ItemKey) -> str:
    """Return the name of an item in messages."""
    parts = [key.task, *([key.file] if key.file else []), f'row {key.row}']
    parts += [key.variant] if key.variant else []
    parts += [f'sample {key.sample}'] if key.sample else []
    return ', '.join(parts)


def unanswered(keys: Sequence[ItemKey]) -> list[str]:
    """Yield lines that name items without an answer, given in order: one per task, with adjacent rows joined."""
    groups: dict[str, list[int]] = {}
    for key in keys:
        groups.setdefault(name(replace(key, row=0)).replace(', row 0', ''), []).append(key.row)
    return [f'{group}: {MISSING} to row {ranges(rows)}' for group, rows in groups.items()]


def ranges(rows: Sequence[int]) -> str:
    """Return ascending rows as text, such as '0-3, 7'."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], row]
        else:
            runs.append([row])
    return ', '.join('-'.join(map(str, run)) for run in runs)
