"""The report page: one self-contained HTML file.

Jinja escapes texts from records, and scripts get them only as JSON. A Content-Security-Policy forbids every request,
and every script and style except those of the page, which it lists by digest. Prompts of samples are rebuilt from the
data files, and shown only if they have the recorded digest.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.errors import ConfigError, DataError
from llmfoundry_gauntlet.results.report.printing import CLEAR, TITLE, origin_banner, shortened_banner
from llmfoundry_gauntlet.results.report.scores import ScoreRow
from llmfoundry_gauntlet.results.report.sections import Section, make_sections
from llmfoundry_gauntlet.results.report.tables import TableRow, ends_of, shorten_middle, typographic, visible
from llmfoundry_gauntlet.results.runs import Run, RunSeries, find_runs
from llmfoundry_gauntlet.results.samples import prompts_of, shared_key
from llmfoundry_gauntlet.results.token_limits import ended_at_limit
from llmfoundry_gauntlet.stack import VERSION
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.generation import NO_DELIMITER_REASON
from llmfoundry_gauntlet.tasks.score import UNPARSED as NO_ANSWER
from llmfoundry_gauntlet.types import Example, ItemKey, ItemResult, Measure, Prompt

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

PACKAGE = 'llmfoundry_gauntlet.results.report'
NEEDS = ('altair', 'jinja2', 'vl_convert')
EXTRA = "the report needs packages that are not installed ({}): pip install 'llmfoundry-gauntlet[report]'"
KINDS = ('right', 'wrong', 'partly right', 'truncated', 'unparsed', 'unscored')
RIGHT, WRONG, PARTLY, TRUNCATED, UNPARSED, UNSCORED = KINDS
PREVIEW = 80  # characters of an answer in a list
MAX_CHOICES = 30
MAX_TITLE = 80  # characters of a name in the title
NOT_READ = 'data files were not read'
CHANGED = 'rebuilt from the data file it differs: data, shots or settings have changed since the evaluation'
NO_ROW = 'the data file no longer has this row'

PromptOrReason = Prompt | str
AskedItem = tuple[ItemKey, str]  # with the digest of its prompt


def make_page(
    folders: Sequence[Path],
    *,
    title: str | None = None,
    samples: int = 5,
    data_root: str | None = None,
    with_prompts: bool = True,
) -> str:
    """Return the HTML of a page over the evaluations at or below these folders, with this many samples of each task.

    `data_root` is the folder of the data files, `None` for the recorded one; without `with_prompts` none are read.
    Raise GauntletError.
    """
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise ConfigError(EXTRA.format(', '.join(missing)))
    from jinja2.utils import htmlsafe_json_dumps
    from markupsafe import Markup

    runs = find_runs(folders)
    sections = make_sections(runs)
    last = [run.last for run in runs]
    banners = [origin_banner(last), *dict.fromkeys(shortened_banner([evaluation]) for evaluation in last)]
    shown = make_samples(last, samples, data_root=data_root, with_prompts=with_prompts)

    templates = resources.files(PACKAGE) / 'templates'
    style = (templates / 'page.css').read_text(encoding='utf-8')
    script = (templates / 'page.js').read_text(encoding='utf-8')
    scripts = [chart_library(), script]
    return (
        make_environment()
        .get_template('page.html')
        .render(
            title=title or default_title(runs),
            version=VERSION,
            runs=runs,
            banners=[f'{text[:1].upper()}{text[1:]}.' for text in banners if text],
            sections=sections,
            samples=shown,
            kinds=KINDS,
            per_task=samples,
            sample_tasks=list(dict.fromkeys(sample.key.task for sample in shown)),
            style=Markup(style),
            scripts=list(map(Markup, scripts)),
            digests={'style': digest(style), 'scripts': list(map(digest, scripts))},
            data=htmlsafe_json_dumps(chart_specs(sections), separators=(',', ':'), allow_nan=False),
        )
    )


def chart_specs(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return the Vega-Lite specifications of all charts in the order of the page, without what all of them share."""
    specs = []
    for section in sections:
        for group in section.charts.values():
            for chart in group.values():
                spec = chart.properties(width='container').to_dict()
                specs.append({key: value for key, value in spec.items() if key not in ('$schema', 'config')})
    return specs


def default_title(runs: Sequence[RunSeries]) -> str:
    """Return the name of a single run's model, or what is compared."""
    if len(runs) == 1:
        name = (runs[0].last.record['model'] or {}).get('name')
        return f'{TITLE}: {shorten_middle(str(name), MAX_TITLE)}' if name else TITLE

    baseline = shorten_middle(runs[0].name, MAX_TITLE)
    compared = shorten_middle(runs[1].name, MAX_TITLE) if len(runs) == 2 else f'{len(runs) - 1} runs'
    return f'{compared} compared with {baseline}'


def make_environment() -> Environment:
    """Return a template environment that escapes all values and writes unprintable characters as escapes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        is_text = isinstance(value, str | Path) and not isinstance(value, Markup)
        return visible(str(value)) if is_text else value

    environment = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(breakable=breakable, exact=repr, typographic=typographic, excerpt=excerpt)
    environment.globals.update(
        kinds_of=kinds_of, deciding=deciding, bars=bars, difference_bar=difference_bar, facts_of=facts_of
    )
    return environment


def breakable(text: str) -> Markup:
    """Return a name, escaped, that a browser breaks after `_` and `/` rather than within a word or '10-shot'."""
    from markupsafe import Markup, escape

    broken = re.sub('[_/]', r'\g<0><wbr>', str(escape(visible(text))))
    return Markup(re.sub(r'(?<=<wbr>)\d+-shot$', r'<span class="shots">\g<0></span>', broken))


def facts_of(run: RunSeries) -> list[str]:
    """Return what the head of the page tells about a run besides its name."""
    record = run.last.record
    model, training = record['model'] or {}, record.get('training') or {}
    name_of_model = None if model.get('name') == run.name else model.get('name')
    facts = [' '.join(filter(None, [name_of_model, model.get('class')]))]
    if model.get('num_parameters'):
        facts.append(f'{model["num_parameters"]:,} parameters')

    first, last = run.evaluations[0], run.last
    if first is not last:
        facts.append(f'{len(run.evaluations)} evaluations, {first.name} to {last.name}')
    elif last.batch is not None:
        facts.append(last.name)
    if run.last.average is not None:
        facts.append(f'the mean of {run.last.average} checkpoints')
    if training.get('token'):
        facts.append(f'{training["token"]:,} training tokens')
    facts.append(f'{record["semantics"]} semantics')
    return list(filter(None, facts))


def bars(row: TableRow, domain: tuple[float, float]) -> tuple[str | None, list[tuple[int, list[str]]]]:
    """Return where the table draws chance, and the low end, value and high end of each run, on an axis of 100."""
    scores = [(run, cell) for run, cell in enumerate(row.cells) if isinstance(cell, ScoreRow)]
    drawn = []
    for run, score in scores:
        if score.value is not None:
            low_end, high_end = ends_of(score) or (score.value, score.value)
            drawn.append((run, [place_on(domain, end) for end in (low_end, score.value, high_end)]))
    chances = [score.chance for _, score in scores if score.chance is not None]
    return (place_on(domain, chances[0]) if chances else None), drawn


def difference_bar(row: TableRow, domain: tuple[float, float]) -> tuple[bool, str, list[str]]:
    """Return whether a difference is clear, where the table draws 0, and the low end, value and high end."""
    difference, _, _, p_value, _ = row.cells
    is_clear = isinstance(p_value, float) and p_value < CLEAR
    ends: list[str] = []
    if isinstance(difference, Measure) and difference.value is not None:
        low_end, high_end = ends_of(difference) or (difference.value, difference.value)
        ends = [place_on(domain, end) for end in (low_end, difference.value, high_end)]
    return is_clear, place_on(domain, 0.0), ends


def place_on(domain: tuple[float, float], value: float) -> str:
    """Return the place of a value on an axis of 100 that covers the domain; values beyond it are at its ends."""
    low, high = domain
    within = min(max(value, low), high)
    return f'{100 * (within - low) / (high - low):.1f}'


def excerpt(text: str, head: int, tail: int) -> str:
    """Return the text, or the beginning and end of a long one with the number of omitted characters between."""
    num_left_out = len(text) - head - tail
    if num_left_out <= 0:
        return text
    return f'{text[:head]}\n[{num_left_out:,} of {len(text):,} characters left out]\n{text[len(text) - tail :]}'


@cache
def chart_library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    script = vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')
    return script.replace('</script', '<\\/script').replace('<!--', '<\\!--').replace('\r', '')


def digest(text: str) -> str:
    """Return the name of a script or a style in a security policy."""
    return f'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An item with its results by index of the run, and its prompt or the reason why that is not shown.

    The prompt is the `shots` with any instruction, then the `question`. `choices` are the texts that are scored, `None`
    if unknown.
    """

    key: ItemKey
    shots: str = ''
    question: str = ''
    absence: str | None = None
    num_shots: int | None = None
    choices: Sequence[str | None]
    results: Sequence[tuple[int, ItemResult]]

    @property
    def gold(self) -> int | str | None:
        """Return the index of the correct choice, or the correct answer."""
        return self.results[0][1].gold

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of all results."""
        kinds_of_results = {kind for _, result in self.results for kind in kinds_of(result)}
        return [kind for kind in KINDS if kind in kinds_of_results]

    @property
    def preferred_choices(self) -> list[int]:
        """Return the indices of the choices, sorted by the preference of the first run."""
        result = self.results[0][1]
        scores = {choice: deciding(result, choice) for choice in range(len(self.choices))}
        return sorted(scores, key=lambda choice: -(scores[choice] or -math.inf))

    @property
    def preview(self) -> str:
        """Return the question in one line; the first one if each choice has its own."""
        first_choice = self.choices[0] if self.choices else None
        return in_one_line(self.question or first_choice or '', 3 * PREVIEW)

    def answer(self, given: int | str | None) -> str:
        """Return a correct or predicted answer, a text or the index of a choice, in one line; '' if there is none."""
        if isinstance(given, int):
            choice = self.choices[given] if given < len(self.choices) else None
            given = f'choice {given}' if choice is None else choice
        return in_one_line(given or '', PREVIEW)

    def prediction(self, result: ItemResult) -> str:
        """Return the choice or generation of a run in one line."""
        if result.text is None:
            return self.answer(result.predicted)
        return self.answer(result.answer or result.text)


def in_one_line(text: str, length: int) -> str:
    """Return the text in one line of at most this many characters."""
    beginning = text[: 100 * PREVIEW]  # splitting all of a long text would take long
    return shorten_middle(' '.join(beginning.split()), length)


def make_samples(runs: Sequence[Run], per_task: int, *, data_root: str | None, with_prompts: bool) -> list[Sample]:
    """Return the first items of each task, in the order of its samples file, with the results of all runs.

    Items with different prompts are different items. `data_root` replaces the recorded one.
    """
    # The first items of any run are shown, with the results that all runs have of them.
    results_by_item: dict[AskedItem, list[tuple[int, ItemResult]]] = {}
    for task in dict.fromkeys(task for run in runs for task in run.results):
        for run in runs:
            for result in run.results.get(task, ())[:per_task]:
                results_by_item[asked_item(result)] = []
    for index, run in enumerate(runs):
        for results in run.results.values():
            for result in results:
                if asked_item(result) in results_by_item:
                    results_by_item[asked_item(result)].append((index, result))

    # The first run that has an item says where its data file is.
    prompts: dict[AskedItem, PromptOrReason] = {}
    if with_prompts:
        firsts = [results[0] for results in results_by_item.values()]
        for index, run in enumerate(runs):
            of_run = [result for index_of_first, result in firsts if index_of_first == index]
            prompts.update((asked_item(result), prompt) for result, prompt in find_prompts(run, of_run, data_root))
    return [make_sample(results, prompts.get(item, NOT_READ)) for item, results in results_by_item.items()]


def asked_item(result: ItemResult) -> AskedItem:
    """Return what an item is known by on the page: with another prompt it is another item."""
    return result.key, result.prompt_sha256


def make_sample(results: Sequence[tuple[int, ItemResult]], prompt: PromptOrReason) -> Sample:
    """Return one item."""
    num_scored = max(len(result.logprobs or ()) for _, result in results)
    if isinstance(prompt, str):
        unknown = [None] * min(MAX_CHOICES, num_scored)
        return Sample(key=results[0][1].key, absence=prompt, choices=unknown, results=results)
    if len(prompt.own_texts) == 1:
        question, choices = prompt.own_texts[0], [*prompt.continuations]
    else:  # each choice has a question of its own
        question = ''
        pairs = zip(prompt.own_texts, prompt.continuations, strict=True)
        choices = [f'{text} {continuation}' for text, continuation in pairs]
    unknown = [None] * (num_scored - len(choices))
    return Sample(
        key=results[0][1].key,
        shots=prompt.preamble,
        question=question,
        num_shots=prompt.num_shots,
        choices=[*choices, *unknown][:MAX_CHOICES],
        results=results,
    )


def deciding(result: ItemResult, choice: int) -> float | None:
    """Return the log-probability of a choice per token, by which one is chosen, `None` unless it is finite."""
    logprobs = result.logprobs or ()
    if choice >= len(logprobs) or not math.isfinite(logprobs[choice]):
        return None
    num_tokens = result.num_tokens[choice] if result.num_tokens else 1
    return logprobs[choice] / max(1, num_tokens)


def kinds_of(result: ItemResult) -> list[str]:
    """Return whether an item is right, wrong or in between, and whether its generation is truncated or unparsed."""
    if result.score is None:
        return [UNSCORED]
    kinds = [{1.0: RIGHT, 0.0: WRONG}.get(result.score, PARTLY)]
    if ended_at_limit(result):
        kinds.append(TRUNCATED)
    if result.text is not None and is_unparsed(result):
        kinds.append(UNPARSED)
    return kinds


def is_unparsed(result: ItemResult) -> bool:
    """Return whether no answer was found in a generation, or not where it should be."""
    has_no_letter = isinstance(result.gold, int) and result.predicted is None
    reason = result.reason or ''
    return result.answer == '' or NO_ANSWER in reason or NO_DELIMITER_REASON in reason or has_no_letter


def find_prompts(
    run: Run, wanted: Sequence[ItemResult], data_root: str | None
) -> Iterator[tuple[ItemResult, PromptOrReason]]:
    """Yield each item with its prompt exactly as it was sent, or the reason why it is unknown.

    `data_root` replaces the recorded one. Only files on this machine are read.
    """
    wanted_by_task: dict[str, list[ItemResult]] = {}
    for result in wanted:
        wanted_by_task.setdefault(result.key.task, []).append(result)
    for key, results in wanted_by_task.items():
        task = run.tasks[key]
        examples = local_examples(task, data_root or run.data.settings.data_root)
        if isinstance(examples, str):
            for result in results:
                yield result, examples
            continue
        prompts_by_item = dict(prompts_of(task, examples, results))
        for result in results:
            prompts_by_digest = prompts_by_item.get(shared_key(result.key))
            if prompts_by_digest is None:
                yield result, NO_ROW
            else:
                yield result, prompts_by_digest.get(result.prompt_sha256, CHANGED)


def local_examples(task: Task, data_root: str) -> Sequence[Example] | str:
    """Return a task's examples from local files, or the reason why they cannot be read."""
    if '://' in task.dataset_uri:
        return f'its rows are at {task.dataset_uri}, which a report does not read'
    if not task.has_rows:
        return f'{task.dataset_name} is not among the tasks of the run'
    try:
        return task.read(data_root).examples
    except (ConfigError, DataError) as error:
        return f'its data cannot be read: {error.problems[0]}'
