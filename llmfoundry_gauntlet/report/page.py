"""The report page: one self-contained HTML file.

Texts from records are escaped by Jinja, and scripts get them as JSON alone. A Content-Security-Policy forbids every
request, and every script and style but those of the page, which it names by digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.records.runs import read_run
from llmfoundry_gauntlet.report import wording
from llmfoundry_gauntlet.report.runs import RecordedRun, find_runs
from llmfoundry_gauntlet.report.samples import KINDS, make_cards
from llmfoundry_gauntlet.report.sections import make_sections

if TYPE_CHECKING:
    from jinja2 import Environment

PACKAGE = 'llmfoundry_gauntlet.report'
TITLE = 'Eval Gauntlet'
SAMPLES = 5  # of each task
NEEDS = ('altair', 'jinja2', 'vl_convert')
EXTRA = "the report needs packages that are not installed ({}): pip install 'llmfoundry-gauntlet[report]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """`samples` is how many items of each task are shown.

    `data_root` is the folder of the data files, `None` for the recorded one; without `with_prompts` none are read.
    """

    title: str | None = None
    samples: int = SAMPLES
    data_root: str | None = None
    with_prompts: bool = True


@dataclass(slots=True)
class Footnotes:
    """Why numbers are absent: each reason once, with its number."""

    reasons: dict[str, int] = field(default_factory=dict)

    def number(self, reason: str) -> int:
        """Return the number of a reason, from 1."""
        return self.reasons.setdefault(reason, len(self.reasons) + 1)


def make_page(folders: Sequence[Path], options: PageOptions) -> str:
    """Return the HTML of a page over the evaluations at or below these folders. Raises GauntletError."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(EXTRA.format(', '.join(missing)))
    runs = find_runs(folders)
    results = [read_run(run.last.folder) for run in runs]
    sections = make_sections(runs, results)
    cards = make_cards(results, options.samples, data_root=options.data_root, with_prompts=options.with_prompts)
    specs = [spec for section in sections for _, spec in section.charts]
    style, script = (
        (resources.files(PACKAGE) / 'templates' / name).read_text(encoding='utf-8') for name in ('page.css', 'page.js')
    )
    return (
        make_environment()
        .get_template('page.html')
        .render(
            title=options.title or default_title(runs),
            version=version('llmfoundry-gauntlet'),
            runs=runs,
            sections=sections,
            cards=cards,
            kinds=KINDS,
            per_task=options.samples,
            sample_tasks=list(dict.fromkeys(card.key.task for card in cards)),
            style=trusted(style),
            scripts=[trusted(chart_library()), trusted(script)],
            digests={'style': digest(style), 'scripts': [digest(chart_library()), digest(script)]},
            data=trusted(json_for_html(specs)),
        )
    )


def default_title(runs: Sequence[RecordedRun]) -> str:
    """Return the name of a single run's model, else of the gauntlet."""
    name = (runs[0].last.record['model'] or {}).get('name')
    return f'{TITLE}: {wording.shortened(str(name), 80)}' if len(runs) == 1 and name else TITLE


def make_environment() -> Environment:
    """Return templates that escape all they are given, and write unprintable characters as escapes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        is_text = isinstance(value, str | Path) and not isinstance(value, Markup)
        return wording.visible(str(value)) if is_text else value

    environment = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(footnotes=Footnotes())
    environment.filters.update(plain=wording.plain_number, breakable=wording.breakable, exact=repr)
    return environment


def trusted(text: str) -> Any:
    """Return a text that templates do not escape."""
    from markupsafe import Markup

    return Markup(text)


@cache
def chart_library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    script = vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')
    return script.replace('</script', '<\\/script').replace('<!--', '<\\!--').replace('\r', '')


def digest(text: str) -> str:
    """Return the name of a script or a style in a security policy."""
    return f'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'


def json_for_html(value: Any) -> str:
    """Return ASCII JSON that cannot end the element in which it stands."""
    text = json.dumps(value, separators=(',', ':'), allow_nan=False)
    return text.replace('&', '\\u0026').replace('<', '\\u003c').replace('>', '\\u003e')
