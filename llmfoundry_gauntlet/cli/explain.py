"""`gauntlet explain`: one item as a model is asked it, and how an answer would be marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from llmfoundry_gauntlet.cli.options import (
    GAUNTLET_TASKS,
    Confinement,
    DataRoot,
    Fewshot,
    Length,
    Score,
    Semantics,
    Tasks,
    check_options,
)
from llmfoundry_gauntlet.errors import ConfigError

if TYPE_CHECKING:
    from llmfoundry_gauntlet.config.settings import EvaluationSettings
    from llmfoundry_gauntlet.evaluation.explanation import AskedItem, Token, TokenizedItem
    from llmfoundry_gauntlet.evaluation.suite import Suite
    from llmfoundry_gauntlet.tasks import Task
    from llmfoundry_gauntlet.types import Example, ItemResult, StopRule

VISIBLE = str.maketrans({' ': '·', '\t': '⇥\t', '\n': '↵\n', '\r': '␍', '\u00a0': '⍽'})
NUM_TOKENS = 48  # of a prompt's end that are listed
NUM_STOPS = 6  # that are listed
NEEDS = {'max_seq_len': ('model',), 'all_tokens': ('model',), 'sandbox': ('answer',)}


def explain(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help='Label of a task, as in `gauntlet ls`.')],
    row: Annotated[int, typer.Option(help='Row of its data, counted from 0 as in samples files.')] = 0,
    shots: Annotated[int | None, typer.Option(help="Number of shots in place of the task's.")] = None,
    model: Annotated[
        str | None, typer.Option(help='Hugging Face folder or name, or Composer checkpoint: its tokens, its length.')
    ] = None,
    answer: Annotated[str | None, typer.Option(help='A reply, to see how it is marked.')] = None,
    file: Annotated[
        str | None, typer.Option(help='Stem of the data file, where a data set of SCORE has several.')
    ] = None,
    variant: Annotated[str | None, typer.Option(help='One of SCORE, such as option_order:B.')] = None,
    all_tokens: Annotated[
        bool, typer.Option('--all-tokens', help='List every token, however long the prompt.')
    ] = False,
    tasks: Tasks = None,
    score: Score = None,
    data_root: DataRoot = 'eval_data',
    max_seq_len: Length = None,
    semantics: Semantics = 'corrected',
    fewshot: Fewshot = 'reference',
    sandbox: Confinement = 'auto',
) -> None:
    """Shows the exact prompt of an item, its tokens, where it is scored, what to beware of, and how it is marked.

    gauntlet explain boolq --row 3

    gauntlet explain gsm8k --row 0 --shots 2 --model MODEL --answer 'It is 4. #### 4'
    """
    from llmfoundry_gauntlet.config.settings import decode_settings
    from llmfoundry_gauntlet.evaluation.explanation import ask
    from llmfoundry_gauntlet.evaluation.suite import load_suite

    check_options(context, needs=NEEDS)
    source = None if score is not None and tasks is None else tasks or GAUNTLET_TASKS
    given = {'tasks': source, 'score': score, 'data_root': data_root, 'semantics': semantics, 'fewshot': fewshot}
    settings = decode_settings({**given, 'max_seq_len': max_seq_len, 'sandbox': sandbox}, 'explain')
    found = find_task(load_suite(source, None, score, is_partial=tasks is None), task, shots)
    found = found.with_settings(settings)
    examples = found.read(settings.data_root).examples
    asked = ask(found, examples, row, file=file, variant=variant)
    if shots is not None and shots > len(asked.shots):
        raise ConfigError(f'--shots is {shots}; allowed: 0 to {len(asked.shots)}, as there are no more other rows')
    show_item(found, asked, examples)
    if model is not None:
        tokenized = tokenized_by(model, found, asked, examples, settings)
        show_tokens(tokenized, all_tokens=all_tokens)
    else:
        typer.echo('\n  --model MODEL shows its tokens, where they are scored, and what to beware of')
    show_marking(found, asked, examples, answer, settings)


def find_task(suite: Suite, label: str, num_shots: int | None) -> Task:
    """The task of that label, at that number of shots or its first one. Raises ConfigError."""
    from llmfoundry_gauntlet.config.decode import suggestion

    found = next((task for task in suite.tasks if label in (task.label, task.key)), None)
    if found is None:
        raise ConfigError(f'{label}: no such task{suggestion(label, [task.label for task in suite.tasks])}')
    if num_shots is not None and num_shots < 0:
        raise ConfigError(f'--shots is {num_shots}; allowed: 0 or more')
    if num_shots and not found.has_shots:
        raise ConfigError(
            f'--shots is {num_shots}; allowed: 0, as tasks of the type {found.icl_task_type} have no shots'
        )
    return found if num_shots is None else replace(found, num_fewshot=(num_shots,))


def tokenized_by(
    model: str,
    task: Task,
    asked: AskedItem,
    examples: Sequence[Example],
    settings: EvaluationSettings,
) -> TokenizedItem:
    """The item in the tokens of a model, whose weights are not read. Raises ModelError."""
    from llmfoundry_gauntlet.composer.models import open_model, resolve_max_seq_len
    from llmfoundry_gauntlet.evaluation.explanation import tokenize
    from llmfoundry_gauntlet.tasks.encode import Encoder
    from llmfoundry_gauntlet.tasks.items import Preparation

    limits = {} if task.max_seq_len is None else {task.key: task.max_seq_len}
    with open_model(model) as source:
        preparation = Preparation(
            task=task,
            examples=examples,
            encoder=Encoder(source.tokenizer),
            max_seq_len=resolve_max_seq_len(settings.max_seq_len, source.config, limits),
        )
        return tokenize(asked, preparation)


def show_item(task: Task, asked: AskedItem, examples: Sequence[Example]) -> None:
    """Prints which item it is, and its prompt with visible white space."""
    from llmfoundry_gauntlet.evaluation.explanation import prompt_parts

    example = asked.example
    place = example.file or task.dataset_uri
    gold = example.content.gold  # a program has none
    facts = {
        'data': f'{place}, row {example.row} (line {example.row + 1}) of {len({(e.file, e.row) for e in examples})}',
        'category': example.category,
        'variant': example.variant,
        'gold': None if gold is None else one_line(str(gold)),
    }
    heading(f'{task.key}  ({task.icl_task_type})')
    for name, value in facts.items():
        if value is not None:
            typer.echo(f'{name:>12}  {value}')
    heading(f'Prompt, shots: {asked.prompt.num_shots}  (· space, ↵ end of line, ⇥ tab, ⍽ non-breaking space)')
    for part, text in prompt_parts(asked.prompt):
        for number, line in enumerate(visible(text).split('\n')):
            typer.echo(f'{part if number == 0 else "":>12} │ {line}')


def show_tokens(tokenized: TokenizedItem, *, all_tokens: bool) -> None:
    """Prints the tokens of an item, those that are scored marked, and all warnings."""
    request = tokenized.item.request
    rows = tokenized.rows
    shared = shared_length(rows)
    heading(f'Tokens, shots: {tokenized.prompt.num_shots}  (* is scored)')
    first = 0 if all_tokens else max(0, shared - NUM_TOKENS)
    if first:
        typer.echo(f'{"":>8}{first} tokens before these; --all-tokens shows them')
    show_row(rows[0][:shared], first)
    for number, row in enumerate(rows):
        if len(rows) > 1:
            typer.echo(f'  choice {number}:')
        show_row(row, shared)
    if hasattr(request, 'max_new_tokens'):
        typer.echo(f'{len(rows[0]):>8}  the reply begins here, of at most {request.max_new_tokens} tokens')
    heading('Warnings')
    for warning in tokenized.warnings or ('none',):
        typer.echo(f'  {warning}')


def shared_length(rows: Sequence[Sequence[Token]]) -> int:
    """Return the number of unscored tokens that all rows begin with."""
    shared = 0
    for tokens in zip(*rows, strict=False):
        if len({token.id for token in tokens}) > 1 or any(token.part == 'continuation' for token in tokens):
            break
        shared += 1
    return shared


def show_row(row: Sequence[Token], first: int) -> None:
    """Prints a row's tokens from the first wanted one on."""
    for place, token in enumerate(row[first:], first):
        mark = '*' if token.part == 'continuation' else ' '
        typer.echo(f'{place:>8} {mark} {token.id:>7}  {token.part:<12}  {one_line(token.text)}')


def show_marking(
    task: Task, asked: AskedItem, examples: Sequence[Example], answer: str | None, settings: EvaluationSettings
) -> None:
    """Prints by which rule an answer is marked, and what becomes of the one that is given."""
    rule = task.score_program if task.runs_programs else task.score
    heading('Marking')
    typer.echo(f'  rule: {(rule.__doc__ or "").splitlines()[0]}')
    if task.generates:
        stops = task.stops([example.content for example in examples])
        typer.echo(f'  a reply ends {", or ".join(ends_of_reply(stops))}')
        for text in task.responses(asked.example.content)[:3]:
            typer.echo(f'  right: {one_line(text)}')
    if answer is None:
        typer.echo('  --answer TEXT shows how a reply is marked')
        return
    result = marked(task, asked, examples, answer, settings)
    shown = {'reply, up to its stop': result.text, 'answer taken from it': result.answer, 'predicted': result.predicted}
    for name, value in shown.items():
        if value is not None:
            typer.echo(f'  {name}: {one_line(str(value))}')
    credit = 'unscored' if result.credit is None else f'{result.credit:g}'
    typer.echo(f'  credit: {credit}{f" ({result.reason})" if result.reason else ""}')


def ends_of_reply(stops: StopRule) -> list[str]:
    """Return where a reply ends, in words; of many strings the first ones."""
    found = []
    if stops.strings:
        shown = ', '.join(map(repr, stops.strings[:NUM_STOPS]))
        num_others = len(stops.strings) - NUM_STOPS
        others = f' and {num_others} others' if num_others > 0 else ''
        found.append(f'before {"a match of " if stops.as_pattern else ""}{shown}{others}')
    if stops.answer_end:
        after = f' that follows {stops.answer_delimiter!r}' if stops.answer_delimiter else ''
        found.append(f'before {stops.answer_end!r} after the answer{after}')
    if stops.closes_block:
        found.append('with the brace that closes its block')
    return [*found, 'with the end of text']


def marked(
    task: Task, asked: AskedItem, examples: Sequence[Example], answer: str, settings: EvaluationSettings
) -> ItemResult:
    """The result that a reply makes. Raises ConfigError where a text cannot be marked, or a program not be run."""
    from llmfoundry_gauntlet.results.external import AnswerError, mark
    from llmfoundry_gauntlet.tasks.items import untokenized_items
    from llmfoundry_gauntlet.tasks.programs import check_programs
    from llmfoundry_gauntlet.types import Answer

    sandbox, reasons = check_programs([task], {task.key: examples}, settings.sandbox)
    if reasons:
        raise ConfigError(f'{task.key}: its programs cannot be run here: {reasons[task.key]}')
    item, _ = next(untokenized_items(task, examples, [asked.example]))
    try:
        return mark(item, Answer(place='--answer', key=item.key, text=answer), task, sandbox)
    except AnswerError as error:
        raise ConfigError(
            f'--answer: {error}; {task.key} is scored by the probabilities of its continuations'
        ) from error


def visible(text: str) -> str:
    """The text with a sign for each white space."""
    return text.translate(VISIBLE)


def one_line(text: str) -> str:
    """The same on one line."""
    return visible(text).replace('\n', '')


def heading(text: str) -> None:
    """Prints a heading after an empty line."""
    typer.secho(f'\n{text}', bold=True)
