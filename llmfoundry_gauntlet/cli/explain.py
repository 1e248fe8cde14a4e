"""`gauntlet explain`: show one item as the model sees it, token by token, with warnings and its score."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmfoundry_gauntlet.cli.options import CHAT, GAUNTLET_TASKS, check_options, settings_of, takes
from llmfoundry_gauntlet.errors import ConfigError

if TYPE_CHECKING:  # these load numpy
    from llmfoundry_gauntlet.config.settings import EvaluationSettings
    from llmfoundry_gauntlet.evaluation.suite import Suite
    from llmfoundry_gauntlet.tasks import Task
    from llmfoundry_gauntlet.tasks.encode import Encoder
    from llmfoundry_gauntlet.tasks.items import ExampleWithShots, Preparation
    from llmfoundry_gauntlet.types import Example, Ids, Item, ItemResult, Prompt, StopRule

SPECIAL, SHOTS, CONTEXT, CONTINUATION = 'special', 'shots', 'context', 'continuation'  # parts of a prompt
VISIBLE = str.maketrans({' ': '·', '\t': '⇥\t', '\n': '↵\n', '\r': '␍', '\u00a0': '⍽'})
NUM_TOKENS = 48  # tokens listed without --all-tokens, from the end of the prompt
NUM_STOPS = 6  # stop strings listed
NEEDS = {'max_seq_len': ('model',), 'all_tokens': ('model',), 'sandbox': ('answer',)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of the model's input. `text` is its vocabulary entry, `part` its part of the prompt."""

    id: int
    text: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedItem:
    """A tokenized item: one row per choice, each starting with its context; one row for a generation.

    `prompt` contains the shots that fit, `in_template` are its contexts in the chat template, if it is sent in one.
    """

    item: Item
    prompt: Prompt
    rows: tuple[tuple[Token, ...], ...]
    warnings: tuple[str, ...]
    in_template: tuple[str, ...] = ()


@takes('max_seq_len', 'semantics', 'fewshot', *CHAT, 'sandbox', 'data_root')
def explain(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help='Label of a task, as in `gauntlet ls`.')],
    row: Annotated[int, typer.Option(help='Row of its data, from 0 as in samples files.')] = 0,
    num_fewshot: Annotated[int | None, typer.Option(help="Number of shots. Default: the task's.")] = None,
    model: Annotated[
        str | None, typer.Option(help='Hugging Face folder or name, or Composer checkpoint; shows the tokens.')
    ] = None,
    answer: Annotated[str | None, typer.Option(help='A generation, to show its score.')] = None,
    file: Annotated[str | None, typer.Option(help='Stem of the data file, for SCORE datasets with several.')] = None,
    variant: Annotated[str | None, typer.Option(help='Variant of a SCORE item, such as option_order:B.')] = None,
    all_tokens: Annotated[bool, typer.Option('--all-tokens', help='List all tokens, even of long prompts.')] = False,
    *,
    tasks: Path | None,
    score: Path | None,
    **given: Any,
) -> None:
    """Show the exact prompt of an item, its tokens, which of them are scored, warnings, and the scoring rule.

    gauntlet explain boolq --row 3

    gauntlet explain gsm8k --row 0 --num-fewshot 2 --model MODEL --answer 'It is 4. #### 4'
    """
    from llmfoundry_gauntlet.config.settings import decode_settings
    from llmfoundry_gauntlet.evaluation.suite import load_suite

    check_options(context, needs=NEEDS)
    source = None if score is not None and tasks is None else tasks or GAUNTLET_TASKS
    settings = decode_settings(
        {'tasks': source, 'score': score, **given, **settings_of(given, CHAT)}, 'gauntlet explain'
    )
    found = find_task(load_suite(source, None, score, is_partial=tasks is None), task, num_fewshot)
    found = found.with_settings(settings)
    examples = found.read(settings.data_root).examples
    asked = find_item(found, examples, row, file=file, variant=variant)
    num_shots = len(asked[1])
    if num_fewshot is not None and num_fewshot > num_shots:
        raise ConfigError(f'num_fewshot is {num_fewshot}; allowed: 0 to {num_shots}, the number of other rows')
    show_item(found, asked, examples)
    if model is not None:
        show_tokens(tokenized_by(model, found, asked, examples, settings), all_tokens=all_tokens)
    else:
        typer.echo('\n  --model MODEL shows its tokens, which of them are scored, and warnings')
    show_scoring(found, asked[0], examples, answer, settings)


def find_task(suite: Suite, label: str, num_shots: int | None) -> Task:
    """Return the task with this label, at this number of shots or its first number of shots. Raise ConfigError."""
    from llmfoundry_gauntlet.errors import suggestion

    found = next((task for task in suite.tasks if label in (task.label, task.key)), None)
    if found is None:
        raise ConfigError(f'{label}: no such task{suggestion(label, [task.label for task in suite.tasks])}')
    if num_shots is not None and num_shots < 0:
        raise ConfigError(f'num_fewshot is {num_shots}; allowed: 0 or more')
    if num_shots and not found.has_shots:
        raise ConfigError(
            f'num_fewshot is {num_shots}; allowed: 0, as tasks of the type {found.icl_task_type} have no shots'
        )
    return found if num_shots is None else replace(found, num_fewshot=(num_shots,))


def find_item(
    task: Task, examples: Sequence[Example], row: int, *, file: str | None = None, variant: str | None = None
) -> ExampleWithShots:
    """Return the example of a zero-based row, in its first variant unless `variant` names another, and its shots.

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
    return next(iter(task.examples_with_shots(examples, [asked])))


def show_item(task: Task, asked: ExampleWithShots, examples: Sequence[Example]) -> None:
    """Print the item and its prompt with visible white space."""
    example, prompt = asked[0], task.prompt(*asked)
    place = example.file or task.dataset_name
    gold = example.content.gold  # None for programs
    facts = {
        'data': f'{place}, row {example.row} (line {example.row + 1}) of {len({(e.file, e.row) for e in examples})}',
        'category': example.category,
        'variant': example.variant,
        'gold': None if gold is None else one_line(str(gold)),
        'shots': rows_of_shots(task, asked, examples),
    }
    heading(f'{task.key}  ({task.icl_task_type})')
    for name, value in facts.items():
        if value is not None:
            typer.echo(f'{name:>12}  {value}')
    heading(f'Prompt, shots: {prompt.num_shots}  (· space, ↵ end of line, ⇥ tab, ⍽ non-breaking space)')
    if prompt.chat_template is True:
        for number, context in enumerate(prompt.contexts):
            if number:
                typer.echo('   or, as the context of the next choice:')
            show_texts([(message['role'], message['content']) for message in prompt.messages(context)])
        if prompt.lead:
            show_texts([('assistant', prompt.lead)])
        show_texts([(CONTINUATION, text) for text in prompt.continuations])
        return
    parts = [(SHOTS, prompt.preamble)] if prompt.preamble else []
    parts += [(CONTEXT, text) for text in prompt.own_texts]
    show_texts([*parts, *((CONTINUATION, text) for text in prompt.continuations)])


def show_texts(parts: Iterable[tuple[str, str]]) -> None:
    """Print texts with visible white space, each after its part of the prompt."""
    for part, text in parts:
        for number, line in enumerate(text.translate(VISIBLE).split('\n')):
            typer.echo(f'{part if number == 0 else "":>12} │ {line}')


def rows_of_shots(task: Task, asked: ExampleWithShots, examples: Sequence[Example]) -> str | None:
    """Return the rows of an item's shots, and those that others replace as they ask the item's own question."""
    example, shots = asked
    if not task.has_shots or task.num_fewshot == (0,):
        return None
    rows = [shot.row for shot in shots]
    named = f'rows {", ".join(map(str, rows))}' if rows else 'none'
    if task.reference or not task.own_questions(examples, [example]):
        return named
    _, as_drawn = next(iter(replace(task, semantics='reference').examples_with_shots(examples, [example])))
    own = [shot.row for shot in as_drawn if shot.row not in rows]
    return f'{named} (instead of {", ".join(map(str, own))}, with the same question)'


def tokenized_by(
    model: str, task: Task, asked: ExampleWithShots, examples: Sequence[Example], settings: EvaluationSettings
) -> TokenizedItem:
    """Tokenize an item with a model's tokenizer, without loading weights. Raise ModelError."""
    from llmfoundry_gauntlet.engine.lengths import resolve_max_seq_len
    from llmfoundry_gauntlet.runtime.models import open_model
    from llmfoundry_gauntlet.tasks.encode import Encoder
    from llmfoundry_gauntlet.tasks.items import Preparation

    limits = {} if task.max_seq_len is None else {task.key: task.max_seq_len}
    with open_model(model) as source:
        max_seq_len = resolve_max_seq_len(settings.max_seq_len, source.config, limits)
        encoder = Encoder(source.tokenizer)
        return tokenize(asked, Preparation(task=task, examples=examples, encoder=encoder, max_seq_len=max_seq_len))


def tokenize(asked: ExampleWithShots, preparation: Preparation) -> TokenizedItem:
    """Return the item tokenized exactly as in an evaluation."""
    from llmfoundry_gauntlet.evaluation.inputs import chat_warnings
    from llmfoundry_gauntlet.tasks.encode import NO_IDS
    from llmfoundry_gauntlet.tasks.truncate import aligned

    encoder = preparation.encoder
    (fitted,) = preparation.fitted([asked])
    item = preparation.item(asked[0], preparation.encoded_item(asked[0], fitted, len(asked[1])))
    request: Any = item.request
    contexts, continuations = (
        ((request.context,), (NO_IDS,)) if preparation.task.generates else (request.contexts, request.continuations)
    )
    own = aligned(fitted.contexts, len(continuations))  # the example's part of contexts, before truncation
    rows = tuple(map(partial(label_tokens, encoder.tokenizer), contexts, own, continuations))
    warnings = []
    if lost := len(asked[1]) - fitted.prompt.num_shots:
        warnings.append(f'shortened: {lost} shots dropped to fit the prompt into {preparation.max_seq_len} tokens')
    elif request.prompt_shortened:
        warnings.append(
            f'shortened: the beginning of the prompt is dropped to fit it into {preparation.max_seq_len} tokens'
        )
    if request.unscorable is not None:
        warnings.append(f'cannot be scored: {request.unscorable}')
    warnings += special_warnings(encoder.tokenizer, rows)
    in_chat = encoder.in_chat(fitted.prompt)
    task = preparation.task
    warnings += chat_warnings({task.key: task}, {task.key: preparation.examples}, encoder)
    begins_answer = in_chat and not fitted.prompt.lead
    for number, text in enumerate(fitted.prompt.continuations):
        found = boundary_warnings(
            encoder, own[number].tolist(), fitted.continuations[number].tolist(), text, begins_answer
        )
        warnings += [f'choice {number}: {warning}' for warning in found]
    return TokenizedItem(
        item=item,
        prompt=fitted.prompt,
        rows=rows,
        warnings=tuple(warnings),
        in_template=encoder.contexts(fitted.prompt) if in_chat else (),
    )


def label_tokens(tokenizer: Any, context: Ids, own: Ids, continuation: Ids) -> tuple[Token, ...]:
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


def boundary_warnings(
    encoder: Encoder, context: list[int], ids: list[int], text: str, begins_answer: bool = False
) -> list[str]:
    """Return warnings about the token boundary between `context` and the continuation with these `ids` and `text`."""
    from llmfoundry_gauntlet.tasks.encode import spaced

    decode = partial(encoder.tokenizer.decode, clean_up_tokenization_spaces=False)
    before, both = str(decode(context)), str(decode([*context, *ids]))
    found = []
    wanted = text.lstrip() if begins_answer else text if before[-1:].isspace() else spaced(text)
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


def show_tokens(tokenized: TokenizedItem, *, all_tokens: bool) -> None:
    """Print the tokens of an item, with scored ones flagged, and all warnings; a shared unscored prefix once."""
    for text in tokenized.in_template:
        heading('In the chat template')
        show_texts([('', text)])
    rows = tokenized.rows
    shared = 0
    for tokens in zip(*rows, strict=False):
        if len({token.id for token in tokens}) > 1 or any(token.part == CONTINUATION for token in tokens):
            break
        shared += 1
    heading(f'Tokens, shots: {tokenized.prompt.num_shots}  (* is scored)')
    first = 0 if all_tokens else max(0, shared - NUM_TOKENS)
    if first:
        typer.echo(f'{"":>8}{first} earlier tokens; --all-tokens shows them')
    show_row(rows[0][:shared], first)
    for number, row in enumerate(rows):
        if len(rows) > 1:
            typer.echo(f'  choice {number}:')
        show_row(row, shared)
    if limit := getattr(tokenized.item.request, 'max_new_tokens', None):
        typer.echo(f'{len(rows[0]):>8}  the generation begins here, at most {limit} tokens')
    heading('Warnings')
    for warning in tokenized.warnings or ('none',):
        typer.echo(f'  {warning}')


def show_row(row: Sequence[Token], first: int) -> None:
    """Print a row's tokens from `first` on."""
    for place, token in enumerate(row[first:], first):
        mark = '*' if token.part == CONTINUATION else ' '
        typer.echo(f'{place:>8} {mark} {token.id:>7}  {token.part:<12}  {one_line(token.text)}')


def show_scoring(
    task: Task, asked: Example, examples: Sequence[Example], answer: str | None, settings: EvaluationSettings
) -> None:
    """Print the scoring rule, and the score of `answer` if given."""
    heading('Scoring')
    typer.echo(f'  rule: {rule_of(task)}')
    if task.generates:
        stops = task.own_stops(task.stops([example.content for example in examples]), asked.content)
        typer.echo(f'  a generation ends {", or ".join(ends_of_generation(stops))}')
        for text in task.responses(asked.content)[:3]:
            typer.echo(f'  correct: {one_line(text)}')
    if answer is None:
        typer.echo('  --answer TEXT shows the score of a generation')
        return
    result = score_text_answer(task, asked, examples, answer, settings)
    shown = {
        'generation, up to its stop': result.text,
        'extracted answer': result.answer,
        'predicted': result.predicted,
    }
    for name, value in shown.items():
        if value is not None:
            typer.echo(f'  {name}: {one_line(str(value))}')
    score = 'unscored' if result.score is None else f'{result.score:g}'
    typer.echo(f'  score: {score}{f" ({result.reason})" if result.reason else ""}')


def rule_of(task: Task) -> str:
    """Return the first line of the documentation of a task's scorer; its name if it has none, as in a plug-in."""
    kind, name = type(task), 'score'
    if task.runs_programs:
        name = 'score_program'
    elif task.compares_answers:
        name = 'score_compared'
    lines = inspect.cleandoc(getattr(kind, name).__doc__ or '').splitlines()
    return lines[0] if lines else f'{kind.__module__}.{kind.__qualname__}.{name}'


def ends_of_generation(stops: StopRule) -> list[str]:
    """Return descriptions of the stop conditions, listing only the first NUM_STOPS strings."""
    found = []
    if stops.strings:
        shown = ', '.join(map(repr, stops.strings[:NUM_STOPS]))
        num_others = len(stops.strings) - NUM_STOPS
        others = f' and {num_others} others' if num_others > 0 else ''
        found.append(f'before {"a match of " if stops.as_pattern else ""}{shown}{others}')
    if stops.answer_end:
        after = f' that follows {stops.answer_delimiter!r}' if stops.answer_delimiter else ''
        found.append(f'before {stops.answer_end!r} after the answer{after}')
    if stops.program is not None:
        found.append(str(stops.program))
    return [*found, 'with the end of text']


def score_text_answer(
    task: Task, asked: Example, examples: Sequence[Example], answer: str, settings: EvaluationSettings
) -> ItemResult:
    """Score a generation. Raise ConfigError if it cannot be scored or its program cannot be run."""
    from llmfoundry_gauntlet.results.external import Answer, AnswerError, score_answer
    from llmfoundry_gauntlet.scoring.mathematics import Comparer
    from llmfoundry_gauntlet.tasks.code import sandbox_of
    from llmfoundry_gauntlet.tasks.items import untokenized_items

    sandbox, reasons = sandbox_of([task], {task.key: examples}, settings.sandbox)
    if reasons:
        raise ConfigError(f'{task.key}: its programs cannot be run here: {reasons[task.key]}')
    item, _ = next(untokenized_items(task, examples, [asked]))
    try:
        given = Answer(task=task.label, num_shots=task.num_fewshot[0], row=asked.row, text=answer)
        with Comparer() as comparer:
            return score_answer(item, given, task, sandbox, comparer)
    except AnswerError as error:
        raise ConfigError(
            f'--answer: {error}; {task.key} is scored by the probabilities of its continuations'
        ) from error


def one_line(text: str) -> str:
    """Return the text on one line, with visible white space."""
    return text.translate(VISIBLE).replace('\n', '')


def heading(text: str) -> None:
    """Print a heading after an empty line."""
    typer.secho(f'\n{text}', bold=True)
