"""Write and read the lines of samples files: item results as JSON, without loss."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.yaml import describe
from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.metrics.metrics import RENAMED
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.types import Example, ItemKey, ItemResult, Prompt

SAMPLES = 'samples'
NONE = type(None)
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # json.dumps would make a new one for every line
RENAMED_FIELDS = {'credit': 'score', 'marks': 'metrics'}  # earlier versions' names to current ones
RENAMED_REASONS = {  # earlier versions' wording to the current one
    'cut at the token limit': 'truncated at the token limit',
    'no answer found in the reply': 'no answer found in the generation',
    'empty reply': 'empty generation',
}

# The fields of a line and their allowed types; for lists and mappings, the types of their values.
FIELDS = {
    'row': (int,),
    'file': (str, NONE),
    'variant': (str, NONE),
    'sample': (int,),
    'category': (str, NONE),
    'gold': (int, str, NONE),
    'predicted': (int, NONE),
    'score': (int, float, NONE),
    'text': (str, NONE),
    'answer': (str, NONE),
    'reason': (str, NONE),
    'prompt_sha256': (str,),
    'cluster': (str,),
    'truncated': (bool,),
}
LISTS = {
    'logprobs': (int, float, NONE),
    'logprobs_alone': (int, float, NONE),
    'num_tokens': (int,),
    'num_characters': (int,),
    'num_bytes': (int,),
}
ALWAYS_THERE = ('logprobs', 'num_tokens')
MAPPINGS = {'metrics': (int, float), 'facts': (int, str)}


class FieldError(ValueError):
    """Raised for a field of a line with the wrong type."""


def samples_file(folder: Path, task: str) -> Path:
    """Return the path of a task's samples in the folder of an evaluation."""
    return folder / SAMPLES / f'{task.replace("/", "_")}.jsonl'


def sample_lines(task: Task, results: Sequence[ItemResult], examples: Sequence[Example] | None = None) -> Iterator[str]:
    """Yield the lines of a task's samples file; with all its examples, lines hold the texts of prompts and choices."""
    prompts = {} if examples is None else dict(prompts_of(task, examples, results))
    for result in results:
        yield sample_line(result, prompts.get(shared_key(result.key), {}).get(result.prompt_sha256))


def shared_key(key: ItemKey) -> ItemKey:
    """Return the key of the first generation for the same prompt."""
    return ItemKey(task=key.task, row=key.row, file=key.file, variant=key.variant)


def prompts_of(
    task: Task, examples: Sequence[Example], results: Sequence[ItemResult]
) -> Iterator[tuple[ItemKey, dict[str, Prompt]]]:
    """Yield each item whose row exists with its prompts by digest, those of results, with all shots or fewer."""
    digests: dict[ItemKey, set[str]] = {}
    for result in results:
        digests.setdefault(shared_key(result.key), set()).add(result.prompt_sha256)
    asked = [example for example in examples if task.item_key(example) in digests]
    for example, shots in task.examples_with_shots(examples, asked):
        wanted, prompts = digests[task.item_key(example)], {}
        with suppress(UnicodeEncodeError):  # half a surrogate pair, which no prompt that was sent has
            for num_dropped in range(len(shots) + 1):
                prompt = task.prompt(example, shots[num_dropped:])
                if (digest := prompt.sha256) in wanted:
                    prompts[digest] = prompt
                if len(prompts) == len(wanted):
                    break
        yield task.item_key(example), prompts


def sample_line(result: ItemResult, prompt: Prompt | None = None) -> str:
    """Return one line of a samples file; log-probabilities that are not finite become null."""
    key = result.key
    sample: dict[str, Any] = {
        'file': key.file,
        'row': key.row,
        'category': result.category,
        'variant': key.variant,
        'sample': key.sample,
        'gold': result.gold,
        'predicted': result.predicted,
        'score': result.score,
        'logprobs': finite(result.logprobs),
        'num_tokens': result.num_tokens,
        'text': result.text,
        'answer': result.answer,
        'status': result.status,
        'reason': result.reason,
        'prompt_sha256': result.prompt_sha256,
        'cluster': result.cluster,
        'truncated': result.truncated,
        'num_shots': result.num_shots,
    }
    further: dict[str, Any] = {
        'num_characters': result.num_characters,
        'num_bytes': result.num_bytes,
        'logprobs_alone': finite(result.logprobs_alone),
        'metrics': dict(result.metrics),
        'facts': dict(result.facts),
    }
    if prompt is not None:
        further.update(prompt=prompt.text, choices=prompt.continuations)
    sample.update({name: value for name, value in further.items() if value})
    return ENCODER.encode(sample)


def parse_sample(task: str, sample: Mapping[str, Any]) -> ItemResult:
    """Return the item result from a line's JSON. Raise KeyError, TypeError or ValueError if it is invalid."""
    sample = {RENAMED_FIELDS.get(name, name): value for name, value in dict(sample).items()}
    check_fields(sample)
    int(sample['cluster'] or '0', 16)  # raises ValueError unless it is hexadecimal
    return ItemResult(
        key=ItemKey(
            task=task,
            row=sample['row'],
            file=sample['file'],
            variant=sample['variant'],
            sample=sample['sample'],
        ),
        category=sample['category'],
        gold=sample['gold'],
        predicted=sample['predicted'],
        score=sample['score'],
        logprobs=numbers(sample['logprobs']),
        num_tokens=whole(sample['num_tokens']),
        reason=current_reason(sample['reason']),
        prompt_sha256=sample['prompt_sha256'],
        truncated=sample['truncated'],
        text=sample['text'],
        answer=sample['answer'],
        metrics={RENAMED.get(name, name): value for name, value in sample.get('metrics', {}).items()},
        facts=sample.get('facts', {}),
        num_characters=whole(sample.get('num_characters')),
        num_bytes=whole(sample.get('num_bytes')),
        logprobs_alone=numbers(sample.get('logprobs_alone')),
        cluster=sample['cluster'],
        num_shots=sample.get('num_shots'),  # absent in earlier versions
    )


def current_reason(reason: str | None) -> str | None:
    """Return a reason in this version's wording."""
    for old, new in RENAMED_REASONS.items():
        reason = reason and reason.replace(old, new)
    return reason


def check_fields(sample: Mapping[str, Any]) -> None:
    """Raise KeyError for a missing field, FieldError for a field of the wrong type."""
    for name, kinds in FIELDS.items():
        check_type(name, sample[name], kinds)
    check_type('num_shots', sample.get('num_shots'), (int, float, NONE))
    for name, kinds in LISTS.items():
        values = sample[name] if name in ALWAYS_THERE else sample.get(name)
        check_type(name, values, (list, NONE))
        for place, value in enumerate(values or ()):
            check_type(f'{name}[{place}]', value, kinds)
    for name, kinds in MAPPINGS.items():
        found = sample.get(name, {})
        check_type(name, found, (dict,))
        for key, value in found.items():
            check_type(f'{name}.{key}', value, kinds)


def check_type(name: str, value: object, kinds: tuple[type, ...]) -> None:
    """Raise FieldError unless the value's type is exactly one of these; bool does not pass as int."""
    if type(value) not in kinds:
        raise FieldError(f'{name} is {describe(value)}')


def read_samples(folder: Path, task: str) -> tuple[ItemResult, ...]:
    """Return a task's items in file order. Raise RecordError."""
    path = samples_file(folder, task)
    results = []
    try:
        with path.open(encoding='utf-8') as lines:
            for number, line in enumerate(lines, 1):
                try:
                    results.append(parse_sample(task, json.loads(line)))
                except FieldError as error:
                    raise RecordError(f'{path}:{number}: {error}; evaluate again') from error
                except (ValueError, KeyError, TypeError) as error:
                    raise RecordError(f'{path}:{number}: is no sample of this version: {error!r}') from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f'{path}: cannot be read: {error}') from error
    return tuple(results)


def finite(values: Sequence[float] | None) -> list[float | None] | None:
    """Return the values with None for those that JSON cannot represent."""
    return None if values is None else [value if math.isfinite(value) else None for value in values]


def numbers(values: Sequence[float | None] | None) -> tuple[float, ...] | None:
    """Return the values with NaN for None."""
    return None if values is None else tuple(math.nan if value is None else value for value in values)


def whole(values: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the values as a tuple, or None."""
    return None if values is None else tuple(values)
