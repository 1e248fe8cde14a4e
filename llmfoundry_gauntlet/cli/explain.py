"""`gauntlet explain`: show the exact prompt of one item, and how a generation is scored."""

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
NUM_TOKENS = 48  # listed, from the end of the prompt
NUM_STOPS = 6  # listed
NEEDS = {'max_seq_len': ('model',), 'all_tokens': ('model',), 'sandbox': ('answer',)}


def explain(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help='Label of a task, as in `gauntlet ls`.')],
    row: Annotated[int, typer.Option(help='Row of its data, from 0 as in samples files.')] = 0,
    shots: Annotated[int | None, typer.Option(help="Number of shots. Default: the task's.")] = None,
    model: Annotated[
        str | None, typer.Option(help='Hugging Face folder or name, or Composer checkpoint; shows the tokens.')
    ] = None,
    answer: Annotated[str | None, typer.Option(help='A generation, to show its score.')] = None,
    file: Annotated[str | None, typer.Option(help='Stem of the data file, for SCORE datasets with several.')] = None,
    variant: Annotated[str | None, typer.Option(help='Variant of a SCORE item, such as option_order:B.')] = None,
    all_tokens: Annotated[bool, typer.Option('--all-tokens', help='List all tokens, even of long prompts.')] = False,
    tasks: Tasks = None,
    score: Score = None,
    data_root: DataRoot = 'eval_data',
    max_seq_len: Length = None,
    semantics: Semantics = 'corrected',
    fewshot: Fewshot = 'reference',
    sandbox: Confinement = 'auto',
) -> None:
    """Show the exact prompt of an item, its tokens, which of them are scored, warnings, and the scoring rule.

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
        raise ConfigError(f'--shots is {shots}; allowed: 0 to {len(asked.shots)}, the number of other rows')
    show_item(found, asked, examples)
    if model is not None:
        tokenized = tokenized_by(model, found, asked, examples, settings)
        show_tokens(tokenized, all_tokens=all_tokens)
    else:
        typer.echo('\n  --model MODEL shows its tokens, which of them are scored, and warnings')
    show_scoring(found, asked, examples, answer, settings)


def find_task(suite: Suite, label: str, num_shots: int | None) -> Task:
    """Return the task with this label, at this number of shots or its first one. Raises ConfigError."""
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
    """Return the item in a model's tokens; its weights are not loaded. Raises ModelError."""
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
    """Print the item and its prompt with visible white space."""
    from llmfoundry_gauntlet.evaluation.explanation import prompt_parts

    example = asked.example
    place = example.file or task.dataset_uri
    gold = example.content.gold  # None for programs
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
    """Print the tokens of an item, with scored ones flagged, and all warnings."""
    request = tokenized.item.request
    rows = tokenized.rows
    shared = shared_length(rows)
    heading(f'Tokens, shots: {tokenized.prompt.num_shots}  (* is scored)')
    first = 0 if all_tokens else max(0, shared - NUM_TOKENS)
    if first:
        typer.echo(f'{"":>8}{first} earlier tokens; --all-tokens shows them')
    show_row(rows[0][:shared], first)
    for number, row in enumerate(rows):
        if len(rows) > 1:
            typer.echo(f'  choice {number}:')
        show_row(row, shared)
    if hasattr(request, 'max_new_tokens'):
        typer.echo(f'{len(rows[0]):>8}  the generation begins here, at most {request.max_new_tokens} tokens')
    heading('Warnings')
    for warning in tokenized.warnings or ('none',):
        typer.echo(f'  {warning}')


def shared_length(rows: Sequence[Sequence[Token]]) -> int:
    """Return the number of unscored tokens shared by the beginnings of all rows."""
    shared = 0
    for tokens in zip(*rows, strict=False):
        if len({token.id for token in tokens}) > 1 or any(token.part == 'continuation' for token in tokens):
            break
        shared += 1
    return shared


def show_row(row: Sequence[Token], first: int) -> None:
    """Print a row's tokens from `first` on."""
    for place, token in enumerate(row[first:], first):
        mark = '*' if token.part == 'continuation' else ' '
        typer.echo(f'{place:>8} {mark} {token.id:>7}  {token.part:<12}  {one_line(token.text)}')


def show_scoring(
    task: Task, asked: AskedItem, examples: Sequence[Example], answer: str | None, settings: EvaluationSettings
) -> None:
    """Print the scoring rule, and the score of `answer` if given."""
    rule = task.score_program if task.runs_programs else task.score
    heading('Scoring')
    typer.echo(f'  rule: {(rule.__doc__ or "").splitlines()[0]}')
    if task.generates:
        stops = task.stops([example.content for example in examples])
        typer.echo(f'  a generation ends {", or ".join(ends_of_generation(stops))}')
        for text in task.responses(asked.example.content)[:3]:
            typer.echo(f'  correct: {one_line(text)}')
    if answer is None:
        typer.echo('  --answer TEXT shows the score of a generation')
        return
    result = scored(task, asked, examples, answer, settings)
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


def ends_of_generation(stops: StopRule) -> list[str]:
    """Return descriptions of where a generation ends; of many strings only the first."""
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


def scored(
    task: Task, asked: AskedItem, examples: Sequence[Example], answer: str, settings: EvaluationSettings
) -> ItemResult:
    """Return the result of a generation. Raises ConfigError if it cannot be scored, or a program cannot be run."""
    from llmfoundry_gauntlet.results.external import AnswerError, score_answer
    from llmfoundry_gauntlet.tasks.items import untokenized_items
    from llmfoundry_gauntlet.tasks.programs import check_programs
    from llmfoundry_gauntlet.types import Answer

    sandbox, reasons = check_programs([task], {task.key: examples}, settings.sandbox)
    if reasons:
        raise ConfigError(f'{task.key}: its programs cannot be run here: {reasons[task.key]}')
    item, _ = next(untokenized_items(task, examples, [asked.example]))
    try:
        return score_answer(item, Answer(place='--answer', key=item.key, text=answer), task, sandbox)
    except AnswerError as error:
        raise ConfigError(
            f'--answer: {error}; {task.key} is scored by the probabilities of its continuations'
        ) from error


def visible(text: str) -> str:
    """Return the text with a symbol for each white-space character."""
    return text.translate(VISIBLE)


def one_line(text: str) -> str:
    """Return the visible text on one line."""
    return visible(text).replace('\n', '')


def heading(text: str) -> None:
    """Print a heading after an empty line."""
    typer.secho(f'\n{text}', bold=True)
