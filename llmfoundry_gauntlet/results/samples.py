"""Write and read the lines of samples files: item results as JSON, without loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.errors import RecordError, describe
from llmfoundry_gauntlet.metrics.metrics import RENAMED
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.encode import PromptTexts, texts_without_tokenizer
from llmfoundry_gauntlet.types import Example, ItemKey, ItemResult, Prompt

SAMPLES = 'samples'
NONE = type(None)
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # json.dumps would make a new one for every line
# Names that 0.1.0 wrote, and those of now.
RENAMED_FIELDS = {
    'credit': 'score',
    'marks': 'metrics',
    'truncated': 'prompt_shortened',
}
RENAMED_REASONS = {
    'cut at the token limit': 'truncated at the token limit',
    'no answer found in the reply': 'no answer found in the generation',
    'empty reply': 'empty generation',
}

NUMBER = (int, float)
# The fields of a line in its order, with the types of their values, and those of the elements of lists and mappings.
FIELDS: dict[str, tuple[type, ...]] = {
    'file': (str, NONE),
    'row': (int,),
    'category': (str, NONE),
    'variant': (str, NONE),
    'sample': (int,),
    'is_gold': (bool,),
    'gold': (int, str, NONE),
    'predicted': (int, NONE),
    'score': (*NUMBER, NONE),
    'logprobs': (list, NONE),
    'num_tokens': (list, NONE),
    'text': (str, NONE),
    'answer': (str, NONE),
    'status': (str,),
    'reason': (str, NONE),
    'prompt_sha256': (str,),
    'cluster': (str,),
    'prompt_shortened': (bool,),
    'num_shots': (*NUMBER, NONE),
    'num_characters': (list, NONE),
    'num_bytes': (list, NONE),
    'metrics': (dict,),
    'facts': (dict,),
}
ELEMENTS: dict[str, tuple[type, ...]] = {
    'logprobs': (*NUMBER, NONE),
    **dict.fromkeys(('num_tokens', 'num_characters', 'num_bytes'), (int,)),
    'metrics': NUMBER,
    'facts': (int, str),
}
OF_KEY = ('file', 'row', 'variant', 'sample', 'is_gold')
ONLY_IF_ANY: dict[str, Any] = {  # fields that are left out if they are empty, and their values then
    **dict.fromkeys(('num_characters', 'num_bytes', 'prompt', 'choices')),
    'is_gold': False,  # in journals alone
    'metrics': {},
    'facts': {},
}
ABSENT = {'num_shots': None, **ONLY_IF_ANY}  # 0.1.0 did not write num_shots


class FieldError(ValueError):
    """Raised for a field of a line with the wrong type."""


def samples_file(folder: Path, task: str) -> Path:
    """Return the path of a task's samples in the folder of an evaluation."""
    return folder / SAMPLES / f'{task.replace("/", "_")}.jsonl'


def sample_lines(
    task: Task,
    results: Sequence[ItemResult],
    examples: Sequence[Example] | None = None,
    texts_of: Callable[[Prompt], PromptTexts] = texts_without_tokenizer,
) -> Iterator[str]:
    """Yield the lines of a task's samples file.

    With all examples of the task, lines hold the texts of prompts and choices, as `texts_of` returns them.
    """
    prompts = {} if examples is None else dict(prompts_of(task, examples, results))
    for result in results:
        prompt = prompts.get(shared_key(result.key), {}).get(result.prompt_sha256)
        yield sample_line(result, None if prompt is None else texts_of(prompt))


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
        key = task.item_key(example)
        prompts: dict[str, Prompt] = {}
        with suppress(UnicodeEncodeError):  # half a surrogate pair, which no prompt that was sent has
            for num_dropped in range(len(shots) + 1):
                prompt = task.prompt(example, shots[num_dropped:])
                if prompt.sha256 in digests[key]:
                    prompts[prompt.sha256] = prompt
                if len(prompts) == len(digests[key]):
                    break
        yield key, prompts


def sample_line(result: ItemResult, texts: PromptTexts | None = None) -> str:
    """Return one line of a samples file; log-probabilities that are not finite become null."""
    sample = {name: getattr(result.key if name in OF_KEY else result, name) for name in FIELDS}
    if texts is not None:
        prompt, choices = texts
        sample.update(prompt=prompt, choices=choices)
    if result.logprobs is not None:
        sample['logprobs'] = [value if math.isfinite(value) else None for value in result.logprobs]
    shown = {name: value for name, value in sample.items() if value or name not in ONLY_IF_ANY}
    return ENCODER.encode(shown)


def parse_sample(task: str, sample: Mapping[str, Any]) -> ItemResult:
    """Return the item result from a line's JSON. Raise KeyError, TypeError or ValueError if it is invalid."""
    values = dict(ABSENT)
    for name, value in dict(sample).items():
        values[RENAMED_FIELDS.get(name, name)] = value
    values = {name: values[name] for name in FIELDS}  # without the texts of prompts
    check_fields(values)
    int(values['cluster'] or '0', 16)  # raises ValueError unless it is hexadecimal

    for name, types in FIELDS.items():
        if list in types:
            values[name] = numbers(values[name])
    values['metrics'] = {RENAMED.get(name, name): value for name, value in values['metrics'].items()}
    values['reason'] = current_reason(values['reason'])
    del values['status']  # which follows from the score
    key = ItemKey(task=task, **{name: values.pop(name) for name in OF_KEY})
    return ItemResult(key=key, **values)


def current_reason(reason: str | None) -> str | None:
    """Return a reason in this version's wording."""
    if reason is None:
        return None
    for old, new in RENAMED_REASONS.items():
        reason = reason.replace(old, new)
    return reason


def check_fields(sample: Mapping[str, Any]) -> None:
    """Raise FieldError for a value, or an element of one, whose type is not exactly one of its field's."""
    for name, types in FIELDS.items():
        value = sample[name]
        if type(value) not in types:
            raise FieldError(f'{name} is {describe(value)}')
        if name in ELEMENTS and value:
            is_mapping = isinstance(value, dict)
            for place, element in value.items() if is_mapping else enumerate(value):
                if type(element) not in ELEMENTS[name]:
                    where = f'{name}.{place}' if is_mapping else f'{name}[{place}]'
                    raise FieldError(f'{where} is {describe(element)}')


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


def numbers(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return the values with NaN for None, or None."""
    return None if values is None else tuple(math.nan if value is None else value for value in values)
