"""Parse report pages, and make runs with hostile texts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from command_line import run_cli
from recorded_runs import write_lines

VOID = {'meta', 'input', 'br', 'wbr', 'img', 'link'}


@dataclass
class Cell:
    """A table cell with its attributes and stripped text."""

    attributes: dict[str, str | None]
    text: str = ''

    @property
    def value(self) -> float | None:
        """The number that a script would sort by."""
        value = self.attributes.get('data-value')
        return float(value) if value else None

    @property
    def error(self) -> float | None:
        value = self.attributes.get('data-error')
        return float(value) if value else None


@dataclass
class Sample:
    """A sample on a page with its kinds, its text and its `pre` elements."""

    kinds: list[str]
    text: str = ''
    passages: list[str] = field(default_factory=list)


@dataclass
class Page(HTMLParser):
    """A parsed page: tables by caption, all elements, scripts and samples."""

    tables: dict[str, list[list[Cell]]] = field(default_factory=dict)
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    text: str = ''

    def __post_init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[Cell]] = []
        self.caption = ''
        self.is_in_sample = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == 'table':
            self.rows, self.caption = [], ''
        elif tag == 'tr':
            self.rows.append([])
        elif tag in ('td', 'th'):
            self.rows[-1].append(Cell(attributes))
        elif tag == 'script':
            self.scripts.append('')
        elif tag == 'b':
            self.runs.append('')
        elif tag == 'details' and attributes.get('class') == 'sample':
            self.samples.append(Sample((attributes['data-kinds'] or '').split('|')))
            self.is_in_sample = True
        elif tag == 'pre' and self.is_in_sample:
            self.samples[-1].passages.append('')

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f'{tag} is closed out of order'
        if tag == 'details':
            self.is_in_sample = False
        elif tag == 'pre' and self.is_in_sample:  # whose first line end a browser drops
            self.samples[-1].passages[-1] = self.samples[-1].passages[-1].removeprefix('\n')
        elif tag in ('td', 'th'):
            self.rows[-1][-1].text = self.rows[-1][-1].text.strip()
        elif tag == 'table':
            self.tables.setdefault(self.caption, self.rows)

    def handle_data(self, data: str) -> None:
        if 'script' in self.open:
            self.scripts[-1] += data
            return
        if 'style' in self.open:
            return
        self.text += data
        if 'b' in self.open:
            self.runs[-1] += data
        if self.is_in_sample:
            self.samples[-1].text += data
            if 'pre' in self.open:
                self.samples[-1].passages[-1] += data
        if 'caption' in self.open:
            self.caption += data
        elif ('td' in self.open or 'th' in self.open) and self.rows and self.rows[-1]:
            self.rows[-1][-1].text += data

    def body_rows(self, table: str) -> list[list[Cell]]:
        """The rows of a table without its head."""
        return self.tables[table][1:]


def read_page(path: Path) -> Page:
    """Return a parsed page; all its elements must be closed."""
    page = Page()
    page.feed(path.read_text(encoding='utf-8'))
    page.close()
    assert page.open == []
    return page


HOSTILE = [
    '</script><script>window.broken = 1</script>',
    '<img src=x onerror="window.broken = 2">',
    '"><svg onload=window.broken=3>',
    "' onmouseover='window.broken=4",
    '<a href="javascript:window.broken=5">here</a>',
    '{{ 7 * 191 }}{% raw %}${window.broken = 6}',
    '<!-- --><style>body { display: none }</style><meta http-equiv=refresh content=0>',
    'first\u2028second\u2029third\x00\x1b[31m\x85',
    'half \ud800 a pair \udfff',
    'turned \u202egnihtyna\u2066',
    '&lt;b&gt; &amp; &#60;i&#62;',
    'datum["v"] = 1; [x].y\\u0041',
]
SHOWN = {  # where a page cannot show them as they are
    7: 'first\\u2028second\\u2029third\\x00\\x1b[31m\\x85',
    8: 'half \\ud800 a pair \\udfff',
    9: 'turned \\u202egnihtyna\\u2066',
}
LONG = 'w' * 100_000


def shown(place: int) -> str:
    """Return a hostile text as a page shows it."""
    return SHOWN.get(place, HOSTILE[place])


def hostile_run(folder: Path) -> Path:
    """Make a run with hostile prompts, answers, choices and names."""
    data = folder / 'data'
    data.mkdir(parents=True)
    texts = [HOSTILE[place] for place in range(len(HOSTILE)) if place != 8]  # prompts are UTF-8
    questions = [
        {'query': text, 'choices': [f'{text} (yes)', LONG], 'gold': row % 2, 'category': f'{text}/{row}'}
        for row, text in enumerate(texts)
    ]
    riddles = [{'context': f'{text} {LONG}', 'answer': f'{text}!'} for text in texts] + [
        {'context': f'Riddle {place}', 'answer': '1'} for place in range(len(HOSTILE))
    ]
    write_lines(data / 'choices.jsonl', questions)
    write_lines(data / 'riddles.jsonl', riddles)
    tasks = [
        {'label': 'choices', 'icl_task_type': 'multiple_choice', 'has_categories': True},
        {'label': 'riddles', 'icl_task_type': 'generation_task_with_answers', 'example_delimiter': '<img src=x>'},
    ]
    tasks = [{**task, 'dataset_uri': f'{task["label"]}.jsonl', 'num_fewshot': [0]} for task in tasks]
    benchmarks = [{'name': task['label'], 'num_fewshot': 0, 'random_baseline': 0.25} for task in tasks]
    gauntlet = {
        'categories': [
            {'name': HOSTILE[0], 'benchmarks': benchmarks[:1]},
            {'name': LONG[:3000], 'benchmarks': benchmarks[1:]},
        ],
        'averages': {HOSTILE[5]: [HOSTILE[0], LONG[:3000]]},
    }
    replies = [*HOSTILE, LONG, *(f'{text} {LONG}' for text in HOSTILE)]
    answers: list[dict[str, Any]] = [
        {'task': 'choices', 'num_shots': 0, 'row': row, 'logprobs': [-1.0, -2.0]} for row in range(len(questions))
    ]
    answers += [
        {'task': 'riddles', 'num_shots': 0, 'row': row, 'text': replies[row % len(replies)]}
        for row in range(len(riddles))
    ]
    (folder / 'tasks.yaml').write_text(json.dumps({'icl_tasks': tasks}))
    (folder / 'gauntlet.yaml').write_text(json.dumps({'eval_gauntlet': gauntlet}))
    outputs = write_lines(folder / "<img src=x onerror='window.broken=7'>.jsonl", answers)
    run = folder / '"><svg onload=window.broken=8>{{ 7 * 191 }}'
    files = ['--tasks', folder / 'tasks.yaml', '--gauntlet', folder / 'gauntlet.yaml', '--data-root', data]
    assert run_cli('run', '--outputs', outputs, *files, '--out', run) == 0
    return run
