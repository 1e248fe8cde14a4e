"""The report page: one self-contained HTML file.

Jinja escapes texts from records, and scripts get them only as JSON. A Content-Security-Policy forbids every request,
and every script and style except those of the page, which it lists by digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.results.report.samples import KINDS, kinds_of, logprob, make_samples
from llmfoundry_gauntlet.results.report.scores import RecordedRun, find_runs
from llmfoundry_gauntlet.results.report.sections import make_sections
from llmfoundry_gauntlet.results.report.tables import MINUS, shortened, visible
from llmfoundry_gauntlet.results.runs import read_run

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

PACKAGE = 'llmfoundry_gauntlet.results.report'
TITLE = 'Eval Gauntlet'
NEEDS = ('altair', 'jinja2', 'vl_convert')
EXTRA = "the report needs packages that are not installed ({}): pip install 'llmfoundry-gauntlet[report]'"


def make_page(
    folders: Sequence[Path],
    *,
    title: str | None = None,
    samples: int = 5,
    data_root: str | None = None,
    with_prompts: bool = True,
) -> str:
    """Return the HTML of a page over the evaluations at or below these folders, with so many samples of each task.

    `data_root` is the folder of the data files, `None` for the recorded one; without `with_prompts` none are read.
    Raises GauntletError.
    """
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise ConfigError(EXTRA.format(', '.join(missing)))
    runs = find_runs(folders)
    results = [read_run(run.last.folder) for run in runs]
    sections = make_sections(runs, results)
    shown = make_samples(results, samples, data_root=data_root, with_prompts=with_prompts)
    templates = resources.files(PACKAGE) / 'templates'
    style, script = ((templates / name).read_text(encoding='utf-8') for name in ('page.css', 'page.js'))
    scripts = [chart_library(), script]
    return (
        make_environment()
        .get_template('page.html')
        .render(
            title=title or default_title(runs),
            version=version('llmfoundry-gauntlet'),
            runs=runs,
            sections=sections,
            samples=shown,
            kinds=KINDS,
            per_task=samples,
            sample_tasks=list(dict.fromkeys(sample.key.task for sample in shown)),
            footnotes={},
            style=trusted(style),
            scripts=list(map(trusted, scripts)),
            digests={'style': digest(style), 'scripts': list(map(digest, scripts))},
            data=trusted(json_for_html([spec for section in sections for _, spec in section.charts])),
        )
    )


def default_title(runs: Sequence[RecordedRun]) -> str:
    """Return the name of a single run's model, else of the gauntlet."""
    name = (runs[0].last.record['model'] or {}).get('name')
    return f'{TITLE}: {shortened(str(name), 80)}' if len(runs) == 1 and name else TITLE


def make_environment() -> Environment:
    """Return templates that escape all they are given, and write unprintable characters as escapes."""
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
    environment.globals.update(kinds_of=kinds_of, logprob=logprob)
    return environment


def breakable(text: str) -> Markup:
    """Return a name, escaped, that a browser breaks after `_` and `/` rather than within a word."""
    from markupsafe import Markup, escape

    return Markup(re.sub('[_/]', '\\g<0><wbr>', str(escape(visible(text)))))


def typographic(number: str) -> str:
    """Return a number with a typographic minus sign, and 0 without any."""
    return re.sub(r'^-(?=[0.]+$)', '', number.strip()).replace('-', MINUS)


def excerpt(text: str, head: int, tail: int) -> str:
    """Return the text, or the beginning and end of a long one with the number of characters left out between."""
    num_left_out = len(text) - head - tail
    if num_left_out <= 0:
        return text
    return f'{text[:head]}\n[{num_left_out:,} of {len(text):,} characters left out]\n{text[len(text) - tail :]}'


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
