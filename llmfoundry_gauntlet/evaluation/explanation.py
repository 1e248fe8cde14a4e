"""Render one item as the model sees it, token by token, with warnings. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.tasks.encode import NO_IDS, Encoder, spaced
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.truncate import aligned
from llmfoundry_gauntlet.types import Example, GenerateRequest, Ids, Item, Prompt

SPECIAL, SHOTS, CONTEXT, CONTINUATION = 'special', 'shots', 'context', 'continuation'  # parts of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedItem:
    """An example with its shots and the untruncated prompt."""

    example: Example
    shots: tuple[Example, ...]
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of the model's input. `text` is its vocabulary entry, `part` its part of the prompt."""

    id: int
    text: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedItem:
    """A tokenized item: one row per choice, each starting with its context; one row for a generation.

    `prompt` contains the shots that fit.
    """

    item: Item
    prompt: Prompt
    rows: tuple[tuple[Token, ...], ...]
    warnings: tuple[str, ...]


def ask(task: Task, examples: Sequence[Example], row: int, *, file: str | None, variant: str | None) -> AskedItem:
    """Return the item of a zero-based row, in its first variant unless `variant` names another.

    Raise ConfigError if there is no such item, or if several files have this row.
    """
    found = [example for example in examples if example.row == row and file in (None, example.file)]
    if not found:
        files = sorted({example.file for example in examples if example.file is not None})
        if file is not None and not files:
            raise ConfigError(f'{task.key} has one data file; leave --file out')
        of_file = [example.row for example in examples if file in (None, example.file)]
        there = f'rows {min(of_file)} to {max(of_file)}' if of_file else f'the files {", ".join(files)}'
        raise ConfigError(f'{task.key}: there is no row {row}{f" of {file}" if file else ""}; there are {there}')
    if len(files := sorted({str(example.file) for example in found})) > 1:
        raise ConfigError(f'{task.key}: row {row} is in several files; name one with --file: {", ".join(files)}')
    asked = next((example for example in found if variant in (None, example.variant)), None)
    if asked is None:
        variants = ', '.join(example.variant for example in found if example.variant is not None)
        if not variants:
            raise ConfigError(f'{task.key} has no variants; leave --variant out')
        raise ConfigError(f'{task.key}: row {row} has no variant {variant!r}; allowed: {variants}')
    ((_, shots),) = task.examples_with_shots(examples, [asked])
    return AskedItem(example=asked, shots=shots, prompt=task.prompt(asked, shots))


def tokenize(asked: AskedItem, preparation: Preparation) -> TokenizedItem:
    """Return the item tokenized exactly as in an evaluation."""
    encoder = preparation.encoder
    (fitted,) = preparation.fitted([(asked.example, asked.shots)])
    item = preparation.item(asked.example, preparation.encoded_item(asked.example, fitted))
    request, encoded = item.request, fitted.encoded
    contexts: tuple[Ids, ...]
    continuations: tuple[Ids, ...]
    if isinstance(request, GenerateRequest):
        contexts, continuations = (request.context,), (NO_IDS,)
    else:
        contexts, continuations = request.contexts, request.continuations
    own = aligned(encoded.contexts, len(continuations))  # the example's part of each context, before truncation
    rows = tuple(map(partial(row_of, encoder.tokenizer), contexts, own, continuations))
    warnings = []
    if lost := len(asked.shots) - fitted.prompt.num_shots:
        warnings.append(f'truncated: {lost} shots dropped to fit the prompt into {preparation.max_seq_len} tokens')
    elif request.truncated:
        warnings.append(
            f'truncated: the beginning of the prompt is dropped to fit it into {preparation.max_seq_len} tokens'
        )
    if request.unscorable is not None:
        warnings.append(f'cannot be scored: {request.unscorable}')
    warnings += special_warnings(encoder.tokenizer, rows)
    for number, text in enumerate(fitted.prompt.continuations):
        found = boundary_warnings(encoder, own[number].tolist(), encoded.continuations[number].tolist(), text)
        warnings += [f'choice {number}: {warning}' for warning in found]
    return TokenizedItem(item=item, prompt=fitted.prompt, rows=rows, warnings=tuple(warnings))


def row_of(tokenizer: Any, context: Ids, own: Ids, continuation: Ids) -> tuple[Token, ...]:
    """Return the tokens of a row, each labelled with its part of the prompt."""
    special = set(tokenizer.all_special_ids)
    num_before = max(0, len(context) - len(own))  # instruction and shots; truncation keeps the end of the question
    ids = [*context.tolist(), *continuation.tolist()]
    tokens = []
    for place, (id_, text) in enumerate(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)):
        part = SHOTS if place < num_before else CONTEXT if place < len(context) else CONTINUATION
        tokens.append(Token(id=id_, text=text, part=SPECIAL if id_ in special else part))
    return tuple(tokens)


def special_warnings(tokenizer: Any, rows: Sequence[Sequence[Token]]) -> list[str]:
    """Return warnings about a double bos at the beginning and about unknown characters."""
    found = []
    bos, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    if bos is not None and [token.id for token in rows[0][:2]] == [bos, bos]:
        found.append(f'double bos: the prompt begins with two {tokenizer.bos_token}')
    num_unknown = sum(token.id == unknown for row in rows for token in row)
    if num_unknown and unknown not in (bos, tokenizer.eos_token_id):
        found.append(f'unknown characters: {num_unknown} tokens are {tokenizer.unk_token}')
    return found


def boundary_warnings(encoder: Encoder, context: list[int], ids: list[int], text: str) -> list[str]:
    """Return warnings about the token boundary between `context` and the continuation with these `ids` and `text`."""
    decode = partial(encoder.tokenizer.decode, clean_up_tokenization_spaces=False)
    before, both = str(decode(context)), str(decode([*context, *ids]))
    found = []
    wanted = text if before[-1:].isspace() else spaced(text)
    if both.startswith(before) and (read := both[len(before) :]) != wanted and read.strip() == text.strip():
        found.append(f'lost leading space: the model reads {read!r} after the prompt instead of {wanted!r}')
    if decode(ids).strip() != text.strip():
        found.append(f'the tokens read {decode(ids)!r}, the text is {text!r}')
    (whole,) = encoder.encode([both], special=False).values()
    if whole.tolist() != [*context, *ids]:
        found.append(
            'prompt and continuation have other tokens if tokenised together; they are tokenised separately, '
            'as in llm-foundry'
        )
    return found
