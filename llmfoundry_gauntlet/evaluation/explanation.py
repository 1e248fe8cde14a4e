"""Render one item as the model sees it, token by token, with warnings. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.tasks.encode import Encoder, FittedPrompt, aligned, spaced
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.types import Example, GenerateRequest, Ids, Item, Prompt

SPECIAL, SHOTS, CONTEXT, CONTINUATION = 'special', 'shots', 'context', 'continuation'  # parts of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedItem:
    """An example with its shots, and the untruncated prompt."""

    example: Example
    shots: tuple[Example, ...]
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as the model reads it. `text` is its vocabulary entry, `part` the part of the prompt it belongs to."""

    id: int
    text: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedItem:
    """An item in tokens: one row per choice, each starting with its context; one row for a generation.

    `prompt` has the shots that fit.
    """

    item: Item
    prompt: Prompt
    rows: tuple[tuple[Token, ...], ...]
    warnings: tuple[str, ...]


def ask(task: Task, examples: Sequence[Example], row: int, *, file: str | None, variant: str | None) -> AskedItem:
    """Return the item of a row, counted from 0, in its first variant unless one is named.

    Raise ConfigError if there is none, or if several files have this row.
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
    """Return the item as an evaluation gives it to the model."""
    (fitted,) = preparation.fitted([(asked.example, asked.shots)])
    item = preparation.item(asked.example, preparation.encoded_item(asked.example, fitted))
    rows = tuple(
        row_of(preparation.encoder, fitted, context, own, continuation)
        for context, own, continuation in parts_of(fitted, item)
    )
    lost = len(asked.shots) - fitted.prompt.num_shots
    return TokenizedItem(
        item=item,
        prompt=fitted.prompt,
        rows=rows,
        warnings=(
            *length_warnings(item, lost, preparation.max_seq_len),
            *token_warnings(preparation.encoder, fitted, rows),
        ),
    )


def parts_of(fitted: FittedPrompt, item: Item) -> list[tuple[Ids, Ids, Ids | None]]:
    """Return for each row the context as sent, the example's own part of it before truncation, and the continuation."""
    request, encoded = item.request, fitted.encoded
    if isinstance(request, GenerateRequest):
        return [(request.context, encoded.contexts[0], None)]
    own = aligned(encoded.contexts, len(request.continuations))
    return list(zip(request.contexts, own, request.continuations, strict=True))


def row_of(
    encoder: Encoder, fitted: FittedPrompt, context: Ids, own: Ids, continuation: Ids | None
) -> tuple[Token, ...]:
    """Return the tokens of a row, each with its part."""
    special = set(encoder.tokenizer.all_special_ids)
    num_before = max(0, len(context) - len(own))  # instruction and shots; truncation keeps the end of the question
    ids = [*context.tolist(), *(() if continuation is None else continuation.tolist())]
    texts = encoder.tokenizer.convert_ids_to_tokens(ids)
    tokens = []
    for place, (id_, text) in enumerate(zip(ids, texts, strict=True)):
        part = SHOTS if place < num_before else CONTEXT if place < len(context) else CONTINUATION
        tokens.append(Token(id=id_, text=text, part=SPECIAL if id_ in special else part))
    return tuple(tokens)


def length_warnings(item: Item, num_lost_shots: int, max_seq_len: int) -> list[str]:
    """Return warnings about truncation."""
    found = []
    if num_lost_shots:
        found.append(f'truncated: {num_lost_shots} shots dropped to fit the prompt into {max_seq_len} tokens')
    elif item.request.truncated:
        found.append(f'truncated: the beginning of the prompt is dropped to fit it into {max_seq_len} tokens')
    if item.request.unscorable is not None:
        found.append(f'cannot be scored: {item.request.unscorable}')
    return found


def token_warnings(encoder: Encoder, fitted: FittedPrompt, rows: Sequence[Sequence[Token]]) -> list[str]:
    """Return warnings about the tokenizer's handling of the text."""
    tokenizer = encoder.tokenizer
    found = []
    bos, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    first = [token.id for token in rows[0]]
    if bos is not None and first[:2] == [bos, bos]:
        found.append(f'double bos: the prompt begins with two {tokenizer.bos_token}')
    if unknown is not None and unknown not in (bos, tokenizer.eos_token_id):
        num_unknown = sum(token.id == unknown for row in rows for token in row)
        if num_unknown:
            found.append(f'unknown characters: {num_unknown} tokens are {tokenizer.unk_token}')
    for number, text in enumerate(fitted.prompt.continuations):
        found += [f'choice {number}: {warning}' for warning in boundary_warnings(encoder, fitted, number, text)]
    return found


def boundary_warnings(encoder: Encoder, fitted: FittedPrompt, number: int, text: str) -> list[str]:
    """Return warnings about the boundary between context and continuation."""
    encoded = fitted.encoded
    context = aligned(encoded.contexts, len(encoded.continuations))[number].tolist()
    ids = encoded.continuations[number].tolist()
    before, both = decode(encoder, context), decode(encoder, [*context, *ids])
    found = []
    wanted = text if before[-1:].isspace() else spaced(text)
    if both.startswith(before) and (read := both[len(before) :]) != wanted and read.strip() == text.strip():
        found.append(f'lost leading space: the model reads {read!r} after the prompt instead of {wanted!r}')
    if decode(encoder, ids).strip() != text.strip():
        found.append(f'the tokens read {decode(encoder, ids)!r}, the text is {text!r}')
    (whole,) = encoder.encode([both], special=False).values()
    if whole.tolist() != [*context, *ids]:
        found.append(
            'prompt and continuation have other tokens if tokenised together; they are tokenised separately, '
            'as in llm-foundry'
        )
    return found


def decode(encoder: Encoder, ids: list[int]) -> str:
    """Return tokens as text, keeping all spaces."""
    text: Any = encoder.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return str(text)


def prompt_parts(prompt: Prompt) -> list[tuple[str, str]]:
    """Return a prompt's texts with the names of their parts."""
    shots = [(SHOTS, prompt.preamble)] if prompt.preamble else []
    contexts = [(CONTEXT, text) for text in prompt.own_texts]
    return [*shots, *contexts, *((CONTINUATION, text) for text in prompt.continuations)]
