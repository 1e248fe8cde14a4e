"""`gauntlet ls`, `validate` and `explain`: list tasks and the state of their data, check YAML files, show one item."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmfoundry_gauntlet.cli.data import PLAIN_WIDTH, STYLES
from llmfoundry_gauntlet.cli.options import (
    CHECK_FAILED,
    GAUNTLET,
    GAUNTLET_TASKS,
    Confinement,
    DataRoot,
    Fewshot,
    Gauntlet,
    Length,
    Score,
    Semantics,
    Tasks,
    check_options,
)
from llmfoundry_gauntlet.errors import ConfigError, GauntletError, print_problems

if TYPE_CHECKING:
    from llmfoundry_gauntlet.config.settings import EvaluationSettings
    from llmfoundry_gauntlet.config.tasks import GauntletSpec
    from llmfoundry_gauntlet.evaluation.explanation import AskedItem, Token, TokenizedItem
    from llmfoundry_gauntlet.evaluation.suite import Suite
    from llmfoundry_gauntlet.tasks import Task
    from llmfoundry_gauntlet.types import Example, ItemResult, StopRule

NO_CATEGORY = 'in no category'
VISIBLE = str.maketrans({' ': '·', '\t': '⇥\t', '\n': '↵\n', '\r': '␍', '\u00a0': '⍽'})
NUM_TOKENS = 48  # tokens listed without --all-tokens, from the end of the prompt
NUM_STOPS = 6  # stop strings listed
NEEDS = {'max_seq_len': ('model',), 'all_tokens': ('model',), 'sandbox': ('answer',)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A listed task. `rows` is the number of lines of its data files; None if they are missing or remote."""

    category: str
    task: str
    num_shots: int
    type: str
    chance: float | None
    dataset_uri: str
    rows: int | None
    data: str


def ls(
    names: Annotated[
        list[str] | None, typer.Argument(metavar='[NAME]...', help='Labels or categories to list. Default: all.')
    ] = None,
    tasks: Tasks = None,
    gauntlet: Gauntlet = None,
    score: Score = None,
    data_root: DataRoot = 'eval_data',
    as_json: Annotated[bool, typer.Option('--json', help='Print JSON instead of a table.')] = False,
) -> None:
    """List tasks by category: shots, type, chance, rows and state of the data. Default: the Gauntlet v0.1.0.

    gauntlet ls

    gauntlet ls safety programming --data-root data

    gauntlet ls --tasks my_tasks.yaml
    """
    from llmfoundry_gauntlet.config.settings import SKIP
    from llmfoundry_gauntlet.evaluation.suite import keys_named, load_suite

    is_default = tasks is None and score is None
    source = GAUNTLET_TASKS if is_default else tasks
    suite = load_suite(source, gauntlet or (GAUNTLET if is_default else None), score, is_partial=True, missing=SKIP)
    if names:
        keys = keys_named(suite, names)
        suite = replace(suite, tasks=tuple(task for task in suite.tasks if task.key in keys))
    listed = list_tasks(suite, data_root)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in listed], indent=1))
    else:
        print_tasks(listed, data_root)


def list_tasks(suite: Suite, data_root: str) -> list[Listed]:
    """Return tasks in the gauntlet's category order, then those in no category; a task may be in several."""
    places = places_of(suite.gauntlet)
    order = dict.fromkeys(name for found in places.values() for name, _ in found)
    ranks = {name: rank for rank, name in enumerate(order)}
    found = [
        (ranks.get(category, len(ranks)), listed_task(task, category, chance, data_root))
        for task in suite.tasks
        for category, chance in places.get(task.key, [(NO_CATEGORY, None)])
    ]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def places_of(gauntlet: GauntletSpec | None) -> dict[str, list[tuple[str, float | None]]]:
    """Return each task's categories and random baselines, by '{label}/{n}-shot'."""
    places: dict[str, list[tuple[str, float | None]]] = {}
    for category in () if gauntlet is None else gauntlet.categories:
        for benchmark in category.benchmarks:
            places.setdefault(benchmark.key, []).append((category.name, benchmark.random_baseline))
    return places


def listed_task(task: Task, category: str, chance: float | None, data_root: str) -> Listed:
    """Return a task with the state of its data."""
    rows, data = data_of(task, data_root)
    return Listed(
        category=category,
        task=task.label,
        num_shots=task.num_fewshot[0],
        type=task.icl_task_type,
        chance=chance,
        dataset_uri=task.dataset_uri,
        rows=rows,
        data=data,
    )


def data_of(task: Task, data_root: str) -> tuple[int | None, str]:
    """Return the number of lines of a task's data files, None if missing or remote, and the files' origin."""
    from llmfoundry_gauntlet.data.manifest import origin_of
    from llmfoundry_gauntlet.errors import DataError

    try:
        paths = task.files(data_root) if task.has_rows else ()
    except DataError:
        return None, 'not there'
    if not paths:
        return None, 'elsewhere'
    rows = sum(bool(line.strip()) for path in paths for line in path.read_bytes().splitlines())
    return rows, origin_of(paths)


def print_tasks(listed: Sequence[Listed], data_root: str) -> None:
    """Print a table of tasks by category."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else PLAIN_WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ('task', 'shots', 'type', 'chance', 'rows', f'data in {data_root}'):
        is_number = name in ('shots', 'chance', 'rows')
        table.add_column(escape(name), justify='right' if is_number else 'left', overflow='fold')
    category = None
    for one in listed:
        if one.category != category:
            category = one.category
            table.add_row(f'[bold]{escape(category)}[/bold]')
        table.add_row(
            f'  {escape(one.task)}',
            str(one.num_shots),
            one.type,
            '' if one.chance is None else f'{one.chance:.2f}',
            '' if one.rows is None else f'{one.rows:,}',
            f'[{STYLES.get(one.data, "yellow")}]{one.data}[/]',
        )
    console.print(table)
    num_tasks = len({(one.task, one.num_shots) for one in listed})
    console.print(
        f'{num_tasks} tasks; gauntlet explain TASK shows one; gauntlet data fetch downloads the published data'
    )


def validate(
    context: typer.Context,
    tasks: Tasks = None,
    gauntlet: Gauntlet = None,
    score: Score = None,
    data_root: DataRoot = 'eval_data',
    no_data: Annotated[bool, typer.Option('--no-data', help='Check only the YAML files.')] = False,
) -> None:
    """Check YAML files and the data of their tasks; list all errors at once. Exit status 1 if there are any.

    gauntlet validate --tasks yamls/tasks/gauntlet_v0.1.yaml --gauntlet yamls/gauntlets/eval_gauntlet_v0.1.yaml
    """
    if tasks is None and gauntlet is None and score is None:
        raise ConfigError('nothing to check: give at least one of --tasks, --gauntlet and --score')
    check_options(context, needs={'data_root': ('tasks', 'score')}, excludes={'no_data': ('data_root',)})
    try:
        check(tasks, gauntlet, score, None if no_data else data_root)
    except GauntletError as error:
        print_problems(error)
        raise typer.Exit(CHECK_FAILED) from error
    typer.echo('no errors')


def check(tasks: Path | None, gauntlet: Path | None, score: Path | None, data_root: str | None) -> None:
    """Print a summary and all warnings; read the data if `data_root` is given. Raise ConfigError or DataError."""
    from llmfoundry_gauntlet.evaluation.suite import load_suite

    suite = load_suite(tasks, gauntlet, score, is_partial=tasks is None)
    for warning in suite.warnings:
        typer.echo(f'warning: {warning}')
    num_score = sum(not task.metrics() for task in suite.tasks)
    if tasks is not None:
        typer.echo(f'{tasks}: {len(suite.tasks) - num_score} tasks')
    if score is not None:
        typer.echo(f'{score}: {num_score} SCORE datasets')
    if suite.gauntlet is not None:
        num_categories = len(suite.gauntlet.categories)
        typer.echo(f'{gauntlet}: {num_categories} categor{"y" if num_categories == 1 else "ies"}')
    complete = replace(suite, tasks=tuple(task for task in suite.tasks if task.has_rows))
    if complete.tasks and data_root is not None:
        check_data(complete, data_root)


def check_data(suite: Suite, data_root: str) -> None:
    """Print the number of rows and all warnings. Raise DataError."""
    from llmfoundry_gauntlet.evaluation.inputs import read_data

    rows = read_data(suite, data_root)
    for warning in rows.warnings:
        typer.echo(f'warning: {warning}')
    examples = rows.examples
    typer.echo(f'{data_root}: {sum(map(len, examples.values()))} rows of {len(examples)} tasks')


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
    """Return the task with this label, at this number of shots or its first number of shots. Raise ConfigError."""
    from llmfoundry_gauntlet.config.yaml import suggestion

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
    """Tokenize the item with a model's tokenizer, without loading weights. Raise ModelError."""
    from llmfoundry_gauntlet.composer.models import open_model
    from llmfoundry_gauntlet.composer.runner import resolve_max_seq_len
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
    example, prompt = asked.example, asked.prompt
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
    heading(f'Prompt, shots: {prompt.num_shots}  (· space, ↵ end of line, ⇥ tab, ⍽ non-breaking space)')
    parts = [('shots', prompt.preamble)] if prompt.preamble else []
    parts += [('context', text) for text in prompt.own_texts]
    for part, text in [*parts, *(('continuation', text) for text in prompt.continuations)]:
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
    """Return the length of the unscored prefix shared by all rows, in tokens."""
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
    if stops.closes_block:
        found.append('with the brace that closes its block')
    return [*found, 'with the end of text']


def scored(
    task: Task, asked: AskedItem, examples: Sequence[Example], answer: str, settings: EvaluationSettings
) -> ItemResult:
    """Score a generation. Raise ConfigError if it cannot be scored or its program cannot be run."""
    from llmfoundry_gauntlet.results.external import AnswerError, score_answer
    from llmfoundry_gauntlet.tasks.code import check_programs
    from llmfoundry_gauntlet.tasks.items import untokenized_items
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
