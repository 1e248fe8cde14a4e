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
from llmfoundry_gauntlet.cli.run import check_model
from llmfoundry_gauntlet.errors import COMMAND_LINE, ConfigError

if TYPE_CHECKING:  # these load numpy
    from llmfoundry_gauntlet.config.settings import EvaluationSettings
    from llmfoundry_gauntlet.evaluation.suite import Suite
    from llmfoundry_gauntlet.tasks import Task
    from llmfoundry_gauntlet.tasks.encode import Encoder
    from llmfoundry_gauntlet.tasks.items import ExampleWithShots, Preparation
    from llmfoundry_gauntlet.types import Example, Ids, Item, ItemResult, Prompt, StopRule

SPECIAL, SHOTS, CONTEXT, CONTINUATION = 'special', 'shots', 'context', 'continuation'  # parts of a prompt
# Rows of others may have control characters, which would rewrite the terminal: Unicode has a picture of each (␛).
CONTROLS = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: '␡'} | dict.fromkeys(range(0x80, 0xA0), '\ufffd')
VISIBLE = CONTROLS | str.maketrans({' ': '·', '\t': '⇥\t', '\n': '↵\n', '\u00a0': '⍽'})
NUM_TOKENS = 48  # tokens listed without --all-tokens, from the end of the prompt
NUM_STOPS = 6  # stop strings listed
LINE_BREAKS = ('\n', '\r')
SHOWN_OF_TEXT = 40  # characters of a text in a warning
NEEDS = {'max_seq_len': ('model',), 'all_tokens': ('model',), 'sandbox': ('answer',)}


of_item = partial(typer.Option, rich_help_panel='The item, its tokens and its score')


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of the model's input. `text` is its vocabulary entry, `part` its part of the prompt."""

    id: int
    text: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedItem:
    """A tokenized item: one row per choice, each starting with its context; one row for a generation.

    `prompt` contains the shots that fit, `in_template` are its contexts in the chat template, if it is sent in one,
    `choices` its continuations as they are scored after them.
    """

    item: Item
    prompt: Prompt
    rows: tuple[tuple[Token, ...], ...]
    warnings: tuple[str, ...]
    in_template: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


@takes('max_seq_len', 'semantics', 'fewshot', *CHAT, 'sandbox', 'data_root')
def explain(
    context: typer.Context,
    task: Annotated[str, typer.Argument(metavar='TASK', help='Label of a task, as in `gauntlet ls`.')],
    row: Annotated[int, of_item(metavar='INTEGER', help='Row of its data, from 0 as in samples files.')] = 0,
    file: Annotated[
        str | None, of_item(metavar='NAME', help='Stem of the data file, for SCORE datasets with several.')
    ] = None,
    variant: Annotated[
        str | None, of_item(metavar='NAME', help='Variant of a SCORE item, such as option_order:B.')
    ] = None,
    num_fewshot: Annotated[int | None, of_item(metavar='INTEGER', help="Number of shots. Default: the task's.")] = None,
    model: Annotated[
        str | None,
        of_item(metavar='MODEL', help='Hugging Face folder or name, or Composer checkpoint; shows the tokens.'),
    ] = None,
    all_tokens: Annotated[bool, of_item('--all-tokens', help='List all tokens, even of long prompts.')] = False,
    answer: Annotated[str | None, of_item(metavar='TEXT', help='A generation, to show its score.')] = None,
    *,
    tasks: Path | None,
    score: Path | None,
    **given: Any,
) -> None:
    """Show the exact prompt of an item, its tokens, which of them are scored, warnings, and the scoring rule.

    Examples:
      gauntlet explain boolq --row 3
      # with the tokens that a model gets, and the score of a generation
      gauntlet explain gsm8k --row 0 --num-fewshot 2 --model MODEL --answer 'It is 4. #### 4'
      gauntlet explain score_math --score yamls/score/math.yaml --file algebra --row 1
    """
    from llmfoundry_gauntlet.config.settings import decode_settings
    from llmfoundry_gauntlet.evaluation.suite import load_suite

    check_options(context, needs=NEEDS)
    source = None if score is not None and tasks is None else tasks or GAUNTLET_TASKS
    values = {'tasks': source, 'score': score, **given, **settings_of(given, CHAT)}
    settings = decode_settings(values, COMMAND_LINE)
    suite = load_suite(source, None, score, is_partial=tasks is None)
    explained = find_task(suite, task, num_fewshot).with_settings(settings)
    rows = explained.read(settings.data_root)
    explained, examples = rows.task or explained, rows.examples
    asked = find_item(explained, examples, row, file=file, variant=variant)
    example, shots = asked
    if model is not None:
        check_model(model, {})
    num_shots = len(shots)
    if num_fewshot is not None and num_fewshot > num_shots and not explained.builds_requests:
        raise ConfigError(f'--num-fewshot: is {num_fewshot}; allowed: 0 to {num_shots}, the number of other rows')
    if model is None:
        show_item(explained, asked, examples)
        show_warnings(text_warnings(explained, example))
        typer.echo('\n  --model MODEL shows its tokens, which of them are scored, and more warnings')
    else:
        tokenized = tokenized_by(model, explained, asked, examples, settings)
        show_item(explained, asked, examples, choices=tokenized.choices)
        show_tokens(tokenized, all_tokens=all_tokens)
    show_scoring(explained, example, examples, answer, settings)


def find_task(suite: Suite, label: str, num_shots: int | None) -> Task:
    """Return the task with this label, at this number of shots or its first number of shots. Raise ConfigError."""
    from llmfoundry_gauntlet.errors import suggestion

    task = next((task for task in suite.tasks if label in (task.label, task.key)), None)
    if task is None:
        raise ConfigError(f'{label}: no such task{suggestion(label, [task.label for task in suite.tasks])}')
    if num_shots is not None and num_shots < 0:
        raise ConfigError(f'--num-fewshot: is {num_shots}; allowed: 0 or more')
    if num_shots and not task.has_shots:
        raise ConfigError(
            f'--num-fewshot: is {num_shots}; allowed: 0, as tasks of the type {task.icl_task_type} have no shots'
        )
    return task if num_shots is None else replace(task, num_fewshot=(num_shots,))


def find_item(
    task: Task, examples: Sequence[Example], row: int, *, file: str | None = None, variant: str | None = None
) -> ExampleWithShots:
    """Return the example of a zero-based row, in its first variant unless `variant` names another, and its shots.

    Raise ConfigError if there is no such item, or if several files have this row.
    """
    in_file = [example for example in examples if file in (None, example.file)]
    variants = [example for example in in_file if example.row == row]
    if not variants:
        raise ConfigError(no_such_row(task, examples, row, file))
    files_with_row = sorted({str(example.file) for example in variants})
    if len(files_with_row) > 1:
        names = ', '.join(files_with_row)
        raise ConfigError(f'--row: {task.key} has row {row} in several files; name one with --file: {names}')
    asked = next((example for example in variants if variant in (None, example.variant)), None)
    if asked is None:
        known = ', '.join(example.variant for example in variants if example.variant is not None)
        if not known:
            raise ConfigError(f'--variant: is {variant!r}, but {task.key} has no variants; leave it out')
        raise ConfigError(f'--variant: is {variant!r}; allowed for row {row} of {task.key}: {known}')
    return next(iter(task.examples_with_shots(examples, [asked])))


def no_such_row(task: Task, examples: Sequence[Example], row: int, file: str | None) -> str:
    """Return a message that says which rows of a file there are, or which files."""
    files = sorted({example.file for example in examples if example.file is not None})
    if file is not None and not files:
        return f'--file: is {file!r}, but {task.key} has one data file; leave it out'
    rows = [example.row for example in examples if file in (None, example.file)]
    if not rows:
        return f'--file: is {file!r}; allowed for {task.key}: {", ".join(files)}'
    of_file = f' of {file}' if file else ''
    return f'--row: is {row}; allowed for {task.key}{of_file}: {min(rows)} to {max(rows)}'


def show_item(
    task: Task, asked: ExampleWithShots, examples: Sequence[Example], choices: Sequence[str] | None = None
) -> None:
    """Print the item and its prompt with visible white space.

    `choices` are the texts that are scored; None if there is no tokenizer to say whether they begin with a space.
    """
    from llmfoundry_gauntlet.tasks.encode import texts_without_tokenizer

    example, shots = asked
    prompt = task.prompt(example, shots)
    if choices is None:
        _, choices = texts_without_tokenizer(prompt)
    source = example.file or task.dataset_name
    num_rows = len({(other.file, other.row) for other in examples})
    gold = example.content.gold  # None for programs
    facts = {
        'data': f'{source}, row {example.row} (line {example.row + 1}) of {num_rows}',
        'category': example.category and example.category.translate(CONTROLS),
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
        show_texts([(CONTINUATION, text) for text in choices])
        return
    parts = [(SHOTS, prompt.preamble)] if prompt.preamble else []
    parts += [(CONTEXT, text) for text in prompt.own_texts]
    parts += [(CONTINUATION, text) for text in choices]
    show_texts(parts)


def show_texts(parts: Iterable[tuple[str, str]]) -> None:
    """Print texts with visible white space, each after its part of the prompt."""
    for part, text in parts:
        for number, line in enumerate(text.translate(VISIBLE).split('\n')):
            typer.echo(f'{part if number == 0 else "":>12} │ {line}')


def rows_of_shots(task: Task, asked: ExampleWithShots, examples: Sequence[Example]) -> str | None:
    """Return the rows of an item's shots, and those that others replace as they ask the item's own question."""
    example, shots = asked
    if not task.has_shots or task.num_fewshot == (0,) or task.builds_requests:
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

    encoder, task = preparation.encoder, preparation.task
    example, shots = asked
    if task.builds_requests:
        return tokenize_own_request(example, preparation)
    (fitted,) = preparation.fitted([asked])
    item = preparation.item(example, preparation.encoded_item(example, fitted, len(shots)))
    request: Any = item.request
    if task.generates:
        contexts, continuations = (request.context,), (NO_IDS,)
    else:
        contexts, continuations = request.contexts, request.continuations
    own = aligned(fitted.contexts, len(continuations))  # the example's part of contexts, before truncation
    rows = tuple(map(partial(label_tokens, encoder.tokenizer), contexts, own, continuations))
    in_chat = encoder.in_chat(fitted.prompt)

    warnings = fit_warnings(request, len(shots) - fitted.prompt.num_shots, preparation.max_seq_len)
    warnings += text_warnings(task, example)
    warnings += special_warnings(encoder.tokenizer, rows)
    warnings += chat_warnings({task.key: task}, {task.key: preparation.examples}, encoder)
    begins_answer = in_chat and not fitted.prompt.lead
    for number, text in enumerate(fitted.prompt.continuations):
        context, continuation = own[number].tolist(), fitted.continuations[number].tolist()
        of_choice = boundary_warnings(encoder, context, continuation, text, begins_answer)
        warnings += [f'choice {number}: {warning}' for warning in of_choice]
    return TokenizedItem(
        item=item,
        prompt=fitted.prompt,
        rows=rows,
        warnings=tuple(warnings),
        in_template=encoder.contexts(fitted.prompt) if in_chat else (),
        choices=encoder.texts(fitted.prompt)[1],
    )


def tokenize_own_request(example: Example, preparation: Preparation) -> TokenizedItem:
    """Return an item of a type that builds its requests by itself, tokenized exactly as in an evaluation."""
    from llmfoundry_gauntlet.tasks.encode import NO_IDS

    encoder, task = preparation.encoder, preparation.task
    ((_, encoded),) = preparation.encoded([example])
    continuations = encoded.continuations or (NO_IDS,)
    rows = tuple(map(partial(label_tokens, encoder.tokenizer), encoded.contexts, encoded.contexts, continuations))
    item = preparation.item(example, encoded)
    prompt = task.prompt(example)
    warnings = [*fit_warnings(item.request, 0, preparation.max_seq_len), *special_warnings(encoder.tokenizer, rows)]
    return TokenizedItem(
        item=item, prompt=prompt, rows=rows, warnings=tuple(warnings), in_template=(), choices=prompt.continuations
    )


def fit_warnings(request: Any, num_dropped: int, max_seq_len: int) -> list[str]:
    """Return warnings about a prompt that does not fit, from which this many shots were dropped."""
    warnings = []
    if num_dropped:
        warnings.append(f'shortened: {num_dropped} shots dropped to fit the prompt into {max_seq_len} tokens')
    elif request.prompt_shortened:
        warnings.append(f'shortened: the beginning of the prompt is dropped to fit it into {max_seq_len} tokens')
    if request.unscorable is not None:
        warnings.append(f'cannot be scored: {request.unscorable}')
    return warnings


def text_warnings(task: Task, example: Example) -> list[str]:
    """Return warnings about texts of a row that begin with a line break, before which a space or another one may be."""
    prompt = task.ask(example.content, True)
    warnings = []
    named = [('the question', text.removeprefix(task.prelimiter)) for text in prompt.contexts]
    named += [(f'choice {number}', text) for number, text in enumerate(prompt.continuations)]
    for name, text in named:
        if text.lstrip(' ').startswith(LINE_BREAKS):
            warnings.append(f'{name} begins with a line break: {text[:SHOWN_OF_TEXT]!r}')
    return list(dict.fromkeys(warnings))


def label_tokens(tokenizer: Any, context: Ids, own: Ids, continuation: Ids) -> tuple[Token, ...]:
    """Return the tokens of a row, each labelled with its part of the prompt."""
    ids = [*context.tolist(), *continuation.tolist()]
    texts = tokenizer.convert_ids_to_tokens(ids)
    # Before the example are the instruction and the shots; truncation keeps the end of the example.
    num_before = max(0, len(context) - len(own))
    parts = [
        *[SHOTS] * num_before,
        *[CONTEXT] * (len(context) - num_before),
        *[CONTINUATION] * len(continuation),
    ]
    special_ids = set(tokenizer.all_special_ids)
    return tuple(
        Token(id=token_id, text=text, part=SPECIAL if token_id in special_ids else part)
        for token_id, text, part in zip(ids, texts, parts, strict=True)
    )


def special_warnings(tokenizer: Any, rows: Sequence[Sequence[Token]]) -> list[str]:
    """Return warnings about a double bos at the beginning and about unknown characters."""
    warnings = []
    bos, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    first_ids = [token.id for token in rows[0][:2]]
    if bos is not None and first_ids == [bos, bos]:
        warnings.append(f'double bos: the prompt begins with two {tokenizer.bos_token}')
    num_unknown = sum(token.id == unknown for row in rows for token in row)
    if num_unknown and unknown not in (bos, tokenizer.eos_token_id):
        warnings.append(f'unknown characters: {num_unknown} tokens are {tokenizer.unk_token}')
    return warnings


def boundary_warnings(
    encoder: Encoder, context: list[int], ids: list[int], text: str, begins_answer: bool = False
) -> list[str]:
    """Return warnings about the token boundary between `context` and the continuation with these `ids` and `text`."""
    from llmfoundry_gauntlet.tasks.encode import spaced

    decode = partial(encoder.tokenizer.decode, clean_up_tokenization_spaces=False)
    before, both = str(decode(context)), str(decode([*context, *ids]))
    after_prompt = text if before[-1:].isspace() else spaced(text)
    wanted = text.lstrip() if begins_answer else after_prompt
    warnings = []
    if both.startswith(before):
        read = both[len(before) :]
        if read != wanted and read.strip() == text.strip():
            warnings.append(f'lost leading space: the model reads {read!r} after the prompt instead of {wanted!r}')
    if decode(ids).strip() != text.strip():
        warnings.append(f'the tokens read {decode(ids)!r}, the text is {text!r}')
    (together,) = encoder.encode([both], special=False).values()
    if together.tolist() != [*context, *ids]:
        warnings.append(
            'prompt and continuation have other tokens if tokenised together; they are tokenised separately, '
            'as in llm-foundry'
        )
    return warnings


def show_tokens(tokenized: TokenizedItem, *, all_tokens: bool) -> None:
    """Print the tokens of an item, with scored ones flagged, and all warnings; a shared unscored prefix once."""
    for text in tokenized.in_template:
        heading('In the chat template')
        show_texts([('', text)])
    rows = tokenized.rows
    shared = num_shared(rows)
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
    show_warnings(tokenized.warnings or ('none',))


def show_warnings(warnings: Sequence[str]) -> None:
    """Print warnings below a heading, which is left out without any."""
    if warnings:
        heading('Warnings')
    for warning in warnings:
        typer.echo(f'  {warning}')


def num_shared(rows: Sequence[Sequence[Token]]) -> int:
    """Return the number of tokens at the beginning that all rows share and that are not scored."""
    for number, tokens in enumerate(zip(*rows, strict=False)):
        differ = len({token.id for token in tokens}) > 1
        if differ or any(token.part == CONTINUATION for token in tokens):
            return number
    return min(map(len, rows))


def show_row(row: Sequence[Token], first: int) -> None:
    """Print a row's tokens from `first` on."""
    for position, token in enumerate(row[first:], first):
        mark = '*' if token.part == CONTINUATION else ' '
        typer.echo(f'{position:>8} {mark} {token.id:>7}  {token.part:<12}  {one_line(token.text)}')


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
    ends = []
    if stops.strings:
        shown = ', '.join(map(repr, stops.strings[:NUM_STOPS]))
        num_others = len(stops.strings) - NUM_STOPS
        others = f' and {num_others} others' if num_others > 0 else ''
        match = 'a match of ' if stops.as_pattern else ''
        ends.append(f'before {match}{shown}{others}')
    if stops.answer_end:
        after = f' that follows {stops.answer_delimiter!r}' if stops.answer_delimiter else ''
        ends.append(f'before {stops.answer_end!r} after the answer{after}')
    if stops.program is not None:
        ends.append(str(stops.program))
    return [*ends, 'with the end of text']


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
