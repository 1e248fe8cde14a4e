"""The page itself: sections put into templates, scripts and styles that its own security policy names by digest.

Whatever comes from records is escaped by Jinja; scripts get it as JSON alone. The policy forbids every request, and
every script and style but those of the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.records.runs import Run, read_run
from llmfoundry_gauntlet.report.html import sections, wording
from llmfoundry_gauntlet.report.html.charts import Spec
from llmfoundry_gauntlet.report.html.facts import composite_words, cost, model_facts
from llmfoundry_gauntlet.report.html.pairs import pairs
from llmfoundry_gauntlet.report.html.reproduce import recipe
from llmfoundry_gauntlet.report.html.samples import KINDS, Card, fewer_cards, make_cards
from llmfoundry_gauntlet.report.html.series import Series, find_series

if TYPE_CHECKING:
    from jinja2 import Environment

PACKAGE = 'llmfoundry_gauntlet.report'
TITLE = 'Eval Gauntlet'
SAMPLES = 3  # of each task and kind
MAX_SAMPLE_BYTES, BYTES_OF_RUN = 2_500_000, 250_000  # of a page below 5 MB: samples, less for each further run
EXTRA = "the report needs packages that are not installed ({}): pip install 'llmfoundry-gauntlet[report]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """`samples` is how many items of each task and kind are shown, as far as they fit.

    `data_root` is where the data files are, None for the recorded one; without `with_prompts` none are read.
    """

    title: str | None = None
    samples: int = SAMPLES
    data_root: str | None = None
    with_prompts: bool = True


@dataclass(slots=True)
class Notes:
    """Why numbers are absent, each reason once, by number."""

    reasons: dict[str, int] = field(default_factory=dict)

    def number(self, reason: str) -> int:
        """The number that stands for a reason, from 1."""
        return self.reasons.setdefault(reason, len(self.reasons) + 1)


@dataclass(slots=True)
class Figures:
    """The charts of a page by their numbers."""

    specs: list[Spec] = field(default_factory=list)

    def number(self, spec: Spec) -> int:
        """The number that a chart is drawn by."""
        self.specs.append(spec)
        return len(self.specs) - 1


def check_installed() -> None:
    """Raises ConfigError where the packages that pages are made with are absent."""
    from importlib.util import find_spec

    missing = [name for name in ('altair', 'jinja2', 'vl_convert') if find_spec(name) is None]
    if missing:
        raise ConfigError(EXTRA.format(', '.join(missing)))


def make_page(folders: Sequence[Path], options: PageOptions) -> str:
    """The HTML of a page over the evaluations at or below these folders. Raises GauntletError."""
    check_installed()
    series = find_series(folders)
    runs = [read_run(one.last.folder) for one in series]
    notes, figures = Notes(), Figures()
    environment = make_environment(notes, figures)
    html = environment.get_template('page.html').render(content(series, runs, options, environment))
    data = json_for_html({'charts': figures.specs, 'runs': [wording.visible(one.name) for one in series]})
    return finished_page(html, environment, data)


def content(
    series: Sequence[Series], runs: Sequence[Run], options: PageOptions, environment: Environment
) -> dict[str, Any]:
    """What the template of the page is filled with."""
    lasts, names = [one.last for one in series], [one.name for one in series]
    averages, categories = (sections.composite_lines(lasts, kind) for kind in ('averages', 'categories'))
    lines = sections.task_lines(lasts)
    words, zero = composite_words(lasts)
    curves, explorer = sections.curves(series)
    samples, per_kind, num_cards = samples_html(runs, names, options, environment)
    return {
        'title': options.title or default_title(series),
        'version': version('llmfoundry-gauntlet'),
        'series': series,
        'averages': averages,
        'categories': categories,
        'composite_words': words,
        'zero': zero,
        'composites_chart': sections.composites_chart([*averages, *categories], names, zero),
        'groups': sections.task_groups(lines, lasts, names),
        'curves': curves,
        'explorer': explorer,
        'lines': lines,
        'metric_lines': sections.metric_lines(lines),
        'panels': sections.score_panels(lasts, names),
        'pairs': pairs(series, runs),
        'samples': samples,
        'per_kind': per_kind,
        'options': options,
        'num_cards': num_cards,
        'num_items': sum(map(len, runs[0].results.values())),
        'sample_tasks': list(dict.fromkeys(key for run in runs for key in run.results)),
        'kinds': KINDS,
        'models': [model_facts(last) for last in lasts],
        'costs': [[cost(evaluation) for evaluation in one.evaluations] for one in series],
        'recipes': [recipe(last) for last in lasts],
    }


def default_title(series: Sequence[Series]) -> str:
    """The name of a single run's model, else of the gauntlet."""
    name = model_facts(series[0].last).name
    return f'{TITLE}: {wording.shortened(name, 80)}' if len(series) == 1 and name else TITLE


def samples_html(
    runs: Sequence[Run], names: Sequence[str], options: PageOptions, environment: Environment
) -> tuple[str, int, int]:
    """The cards, how many items of each task and kind there are at most, and how many in all."""
    cards = make_cards(runs, options.samples, data_root=options.data_root, with_prompts=options.with_prompts)
    template = environment.get_template('samples.html')
    places = {key: place for place, key in enumerate(dict.fromkeys(key for run in runs for key in run.results))}

    def rendered(shown: Sequence[Card]) -> str:
        return template.render(cards=shown, names=names, places=places)

    room = MAX_SAMPLE_BYTES - BYTES_OF_RUN * (len(runs) - 1)
    per_kind, html = options.samples, rendered(cards)
    while (size := len(html.encode('utf-8', 'backslashreplace'))) > room:
        per_kind = min(per_kind - 1, per_kind * room // size)
        cards = fewer_cards(cards, runs, per_kind)
        html = rendered(cards)
    return html, per_kind, len(cards)


def make_environment(notes: Notes, figures: Figures) -> Environment:
    """Templates that escape all they are given, and write unprintable characters as escapes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return (
            wording.visible(str(value)) if isinstance(value, (str, Path)) and not isinstance(value, Markup) else value
        )

    environment = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(why=notes.number, figure=figures.number, notes=notes)
    environment.filters.update(
        plain=wording.plain_number,
        signed=wording.signed_number,
        whole=wording.whole_number,
        exact=repr,
        breakable=wording.breakable,
    )
    return environment


def finished_page(html: str, environment: Environment, data: str) -> str:
    """The page around its content: policy, style, scripts."""
    from markupsafe import Markup

    style, script = (template_text(name) for name in ('page.css', 'page.js'))
    library = chart_library()
    parts = {'style': style, 'script': script, 'library': library, 'data': data, 'content': html}
    digests = {'style_digest': digest(style), 'script_digests': [digest(library), digest(script)]}
    shell = environment.get_template('shell.html')
    return shell.render({name: Markup(part) for name, part in parts.items()} | digests)


def template_text(name: str) -> str:
    """A file beside the templates, as it is."""
    return (resources.files(PACKAGE) / 'templates' / name).read_text(encoding='utf-8')


@cache
def chart_library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    script = vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')
    return script.replace('</script', '<\\/script').replace('<!--', '<\\!--').replace('\r', '')


def digest(text: str) -> str:
    """As a security policy names a script or a style."""
    return f'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'


def json_for_html(value: Mapping[str, Any]) -> str:
    """JSON of ASCII alone that cannot end the element that it stands in."""
    text = json.dumps(value, separators=(',', ':'), allow_nan=False)
    return text.replace('&', '\\u0026').replace('<', '\\u003c').replace('>', '\\u003e')
