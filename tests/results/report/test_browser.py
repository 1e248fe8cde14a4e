"""Report pages in headless Chromium: charts, sorting, filters and hostile texts, and no requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import run_cli
from recorded_runs import BATCHES, CHOICES, RIDDLES, ROWS, edited, record_run, write_lines

MINUS = '\u2212'


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page and waits for its charts; it allows no request and no console message."""
    contexts, messages, requests = [], [], []

    def call(path: Path, **settings: Any) -> Any:
        context = browser.new_context(**settings)
        contexts.append(context)

        def answer(route: Any) -> None:
            if route.request.url == path.as_uri():
                route.continue_()
            else:
                requests.append(route.request.url)
                route.abort()

        context.route('**/*', answer)
        page = context.new_page()
        page.on('console', lambda message: messages.append(message.text))
        page.on('pageerror', lambda error: messages.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_selector('html[data-charts]', timeout=60_000)
        return page

    yield call
    for context in contexts:
        context.close()
    assert requests == messages == []


@pytest.fixture(scope='module')
def page_file(training: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a training run with four checkpoints and SCORE."""
    out = tmp_path_factory.mktemp('report') / 'report.html'
    assert run_cli('report', training, '--out', out, '--samples', 20) == 0
    return out


def test_charts_have_a_point_with_a_tooltip_for_each_checkpoint(opened, page_file: Path):
    page = opened(page_file)
    charts = page.query_selector_all('[data-chart]')
    assert len(charts) == 5 + 4  # composites, loss and tasks
    assert all(len(chart.query_selector_all('svg path')) > 3 and chart.get_attribute('aria-label') for chart in charts)
    points = page.locator('[data-chart="0"] .mark-symbol path')
    assert points.count() == len(BATCHES)
    points.first.hover(force=True)
    page.wait_for_selector('#tip:not([hidden])')
    assert 'batch 20' in page.inner_text('#tip') and 'value ' in page.inner_text('#tip')


def test_a_click_sorts_tasks_without_their_categories_and_the_third_restores_both(opened, page_file: Path):
    page = opened(page_file)
    table = page.locator('table:has(caption:text-is("Scores after ba1000"))')
    head = table.locator('thead th').nth(1)

    def column(place: int) -> list[str]:
        cells = table.locator(f'tbody tr:visible td:nth-child({place + 1})').all_inner_texts()
        return cells[:6] if place == 0 else [text.split()[0].replace(MINUS, '-') for text in cells[:6]]

    before = column(0)
    for press, order in ((head.click, 'descending'), (lambda: head.locator('button').press('Enter'), 'ascending')):
        press()
        averages, tasks = (list(map(float, values)) for values in (column(1)[:2], column(1)[2:]))
        assert head.get_attribute('aria-sort') == order and len({*tasks}) > 2
        assert {*column(0)[2:]} == {*ROWS}
        for values in (averages, tasks):
            assert values == sorted(values, reverse=order == 'descending')
    head.click()
    assert column(0) == before and head.get_attribute('aria-sort') == 'none'


def test_samples_are_filtered_by_task_outcome_and_words(opened, page_file: Path):
    page = opened(page_file)
    form, shown = page.locator('[data-samples]'), page.locator('.sample:visible')
    assert shown.count() == 25
    page.get_by_role('button', name='Show more').click()
    assert shown.count() == 50
    form.get_by_label('Task').select_option(label=RIDDLES)
    assert shown.count() == 7
    form.get_by_label('Outcome').select_option('wrong')
    assert 0 < shown.count() < 7
    shown.first.locator('summary').press('Enter')
    assert shown.first.locator('pre').first.inner_text().startswith('Twice ')
    form.get_by_label('Find').fill('TWICE')
    assert shown.count() > 0
    form.get_by_label('Find').fill('no such words')
    assert shown.count() == 0


def test_the_policy_blocks_injected_scripts_styles_forms_and_requests(browser: Any, page_file: Path):
    """Code that a debugger evaluates directly is exempt from the policy, so the attempts run in later callbacks."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(page_file.as_uri())
        refused = page.evaluate(
            """async () => {
              const refused = [];
              const add = (tag, values) => {
                const made = Object.assign(document.createElement(tag), values);
                document.body.append(made);
                return made;
              };
              document.addEventListener('securitypolicyviolation', (event) => refused.push(event.effectiveDirective));
              const later = (work) => new Promise((resolve) => setTimeout(() => {
                try { work(); } catch (error) { refused.push(error.name); }
                setTimeout(resolve, 50);
              }, 0));
              await later(() => new Function('window.broken = 1')());
              await later(() => add('script', { textContent: 'window.broken = 2' }));
              await later(() => add('style', { textContent: 'body { display: none }' }));
              await later(() => add('img', { src: 'https://example.invalid/a.png' }));
              await later(() => add('base', { href: 'https://example.invalid/' }));
              await later(() => add('form', { action: 'https://example.invalid/' }).submit());
              await fetch('https://example.invalid/').catch((error) => refused.push(error.name));
              await later(() => {});
              return [window.broken ?? null, ...refused];
            }"""
        )
    wanted = ['script-src', 'EvalError', 'script-src-elem', 'style-src-elem', 'img-src', 'base-uri', 'form-action']
    assert [refused[0], sorted(refused[1:])] == [None, sorted([*wanted, 'connect-src', 'TypeError'])]


def test_the_page_fits_a_phone_a_dark_screen_and_paper(opened, page_file: Path):
    page = opened(page_file, viewport={'width': 360, 'height': 740}, color_scheme='dark')

    def paper() -> str:
        return page.evaluate('getComputedStyle(document.body).backgroundColor')

    for summary in page.query_selector_all('section > details > summary'):
        summary.click()
    assert page.evaluate('document.documentElement.scrollWidth') == 360
    page.wait_for_function(
        '[...document.querySelectorAll(".chart svg")].every((one) => one.getBoundingClientRect().right <= 360)'
    )
    assert paper() == 'rgb(19, 23, 27)'
    page.emulate_media(media='print')
    assert paper() == 'rgb(255, 255, 255)'
    assert not page.is_visible('nav') and not page.is_visible('.controls') and page.is_visible('caption')


def test_the_difference_of_two_runs_is_on_the_screen_of_a_phone(opened, runs: dict[str, Path], tmp_path: Path):
    out = tmp_path / 'two.html'
    assert run_cli('report', runs['a'], runs['b'], '--out', out, '--no-prompts') == 0
    page = opened(out, viewport={'width': 390, 'height': 844})
    table = page.locator('#changes table').first
    assert table.locator('thead th').all_inner_texts()[1].startswith('diff')
    ends = [cell.bounding_box() for cell in table.locator('tbody td:nth-child(2)').all()]
    assert ends and all(box['x'] + box['width'] <= 390 for box in ends)


@pytest.mark.parametrize(('scheme', 'ink'), [('light', 'rgb(27, 32, 38)'), ('dark', 'rgb(231, 234, 237)')])
def test_the_line_at_chance_has_the_colour_of_text(opened, page_file: Path, scheme: str, ink: str):
    page = opened(page_file, color_scheme=scheme)
    strokes = page.evaluate(
        """[...document.querySelectorAll('[data-chart] line[stroke-dasharray]')]
        .map((one) => getComputedStyle(one).stroke)"""
    )
    assert len(strokes) == 8 and {*strokes} == {ink}  # of every chart but that of the loss
    ticks = page.evaluate('[...document.querySelectorAll(".plot .chance")].map((one) => getComputedStyle(one).stroke)')
    assert ticks and {*ticks} == {ink}


CONTRASTS = """() => {
  // The relative luminance and the contrast ratio of WCAG 2.1.
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => channels(color).slice(0, 3)
    .map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const isOpaque = (color) => channels(color).length === 3;
  const behind = (one) => {
    const color = getComputedStyle(one).backgroundColor;
    return isOpaque(color) || !one.parentElement ? color : behind(one.parentElement);
  };
  const ratios = {};
  for (const one of document.body.querySelectorAll('*')) {
    const ownText = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!ownText || !one.checkVisibility()) continue;
    const style = getComputedStyle(one);
    const ink = luminance(one instanceof SVGElement ? style.fill : style.color);
    const paper = luminance(behind(one));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    const name = `${one.tagName}.${one.getAttribute('class') ?? ''}`;
    ratios[name] = Math.min(ratio, ratios[name] ?? 21);
  }
  return ratios;
}"""


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_all_text_has_a_contrast_of_at_least_4_5(opened, page_file: Path, scheme: str):
    page = opened(page_file, color_scheme=scheme)
    page.evaluate('document.querySelectorAll("details").forEach((one) => { one.open = true; })')

    ratio_of_text = page.evaluate(CONTRASTS)

    assert len(ratio_of_text) > 20 and 'text.' in ratio_of_text  # also of the charts
    assert {name: ratio for name, ratio in ratio_of_text.items() if ratio < 4.5} == {}


def test_learning_curves_and_the_loss_have_one_axis_below_each_other_on_a_phone(opened, training: Path, tmp_path: Path):
    # Labels of a high loss are wider than those of scores.
    with_high_loss = shutil.copytree(training, tmp_path / 'training')
    for batch in BATCHES.values():
        with edited(with_high_loss / f'ba{batch}') as record:
            if record['training']['loss'] is not None:
                record['training']['loss'] += 10.0
    out = tmp_path / 'page.html'
    assert run_cli('report', with_high_loss, '--out', out, '--no-prompts') == 0
    page = opened(out, viewport={'width': 390, 'height': 844})
    ends_of_axes = page.evaluate(
        """[...document.querySelectorAll('#curves .chart')].map((chart) => {
          const { left, right } = chart.querySelector('.role-axis .role-axis-domain line').getBoundingClientRect();
          return [left, right].map(Math.round);
        })"""
    )
    assert len(ends_of_axes) == 5
    assert len({tuple(ends) for ends in ends_of_axes}) == 1


HOSTILE = [
    '</script><script>window.broken = 1</script>',
    '<img src=x onerror="window.broken = 2">',
    '"><svg onload=window.broken=3>',
    "' onmouseover='window.broken=4",
    '<a href="javascript:window.broken=5">here</a>',
    '{{ 7 * 191 }}{% raw %}${window.broken = 6}',
    '<!-- --><style>body { display: none }</style><meta http-equiv=refresh content=0>',
    '&lt;b&gt; &amp; &#60;i&#62;',
    'datum["v"] = 1; [x].y\\u0041',
    'first\u2028second\u2029third\x00\x1b[31m\x85',
    'turned \u202egnihtyna\u2066',
    'half \ud800 a pair \udfff',  # not in prompts, which are UTF-8
]
SHOWN = [*HOSTILE[:-3], *(text.encode('unicode_escape').decode() for text in HOSTILE[-3:])]
LONG = 'w' * 100_000


def hostile_run(folder: Path) -> Path:
    """Make a run with hostile prompts, answers, choices and names."""
    folder.mkdir()
    questions = [
        {'query': text, 'choices': [f'{text} (yes)', LONG], 'gold': row % 2, 'category': f'{text}/{row}'}
        for row, text in enumerate(HOSTILE[:-1])
    ]
    riddles = [{'context': f'{text} {LONG}', 'answer': f'{text}!'} for text in HOSTILE[:-1]]
    riddles += [{'context': f'Riddle {place}', 'answer': '1'} for place in range(len(HOSTILE))]
    write_lines(folder / 'choices.jsonl', questions)
    write_lines(folder / 'riddles.jsonl', riddles)
    categories = [
        {'name': name, 'benchmarks': [{'name': label, 'num_fewshot': 0, 'random_baseline': 0.25}]}
        for name, label in ((HOSTILE[0], 'choices'), (LONG[:3000], 'riddles'))
    ]
    answers: list[dict[str, Any]] = [
        {'task': 'choices', 'num_shots': 0, 'row': row, 'logprobs': [-1.0, -2.0]} for row in range(len(questions))
    ]
    texts = [*HOSTILE, *(f'{text} {LONG}' for text in HOSTILE)]
    answers += [{'task': 'riddles', 'num_shots': 0, 'row': row, 'text': texts[row]} for row in range(len(riddles))]
    return record_run(
        folder / '"><svg onload=window.broken=8>{{ 7 * 191 }}',
        folder,
        [CHOICES, RIDDLES],
        answers=answers,
        gauntlet={'categories': categories, 'averages': {HOSTILE[5]: [HOSTILE[0], LONG[:3000]]}},
        tasks={
            'choices': {'has_categories': True, 'cluster_key': None},
            'riddles': {'example_delimiter': '<img src=x>'},
        },
    )


def test_hostile_texts_are_shown_and_run_no_script(opened, tmp_path: Path):
    out = tmp_path / 'page.html'
    run = hostile_run(tmp_path / "<img src=x onerror='window.broken=7'>")
    assert run_cli('report', run, '--out', out, '--title', HOSTILE[1], '--samples', 50) == 0
    page = opened(out, viewport={'width': 360, 'height': 740})
    assert page.title() == HOSTILE[1]
    page.evaluate('document.querySelectorAll("details").forEach((one) => { one.open = true; one.hidden = false; })')
    text = page.inner_text('body')
    assert [one for one in SHOWN if one not in text] == [] and '1337' not in text
    assert LONG not in text and f'{LONG[:300]}\n[99,600 of 100,000 characters left out]\n{LONG[:100]}' in text
    assert page.evaluate('document.documentElement.scrollWidth') == 360
    for chart in page.query_selector_all('.chart svg path'):
        chart.dispatch_event('mousemove')
    assert page.evaluate('window.broken') is None and page.locator('script').count() == 3
    own = 'img, iframe, object, link, base, main style, [src], [onload], [onerror], [onmouseover], a:not([href^="#"])'
    assert page.locator(own).count() == 0
