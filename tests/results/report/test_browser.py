"""Report pages in headless Chromium: charts, sorting, filters, and no requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import run_cli
from recorded_runs import AGIEVAL, BATCHES, ROWS, copy_run
from report_pages import HOSTILE, hostile_run, shown

SCORES = 'Scores after ba1000'
SIGNED = str.maketrans({'\u2212': '-'})
CONTRAST = """() => {
  const luminance = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const paper = luminance(getComputedStyle(document.body).backgroundColor);
  const found = {};
  const shown = ['h1', '.lead', '.error', '.note', 'nav a', 'thead th', '.badge.wrong', '.chart svg text'];
  for (const selector of shown) {
    const element = document.querySelector(selector);
    const style = getComputedStyle(element);
    const ink = luminance(element.ownerSVGElement ? style.fill : style.color);
    found[selector] = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }
  return { paper, found };
}"""


LINES_OF_LABELS = """() => {
  const lines = (element) => {
    const range = document.createRange();
    range.selectNodeContents(element.firstChild);
    return new Set([...range.getClientRects()].map((one) => one.top)).size;
  };
  const labels = [...document.querySelectorAll('.controls label')].map(lines);
  return { '.controls label': labels, '.shots': [...new Set([...document.querySelectorAll('td .shots')].map(lines))] };
}"""


@pytest.fixture(scope='module')
def browser() -> Iterator[Any]:
    path = shutil.which('chromium')
    if path is None:
        pytest.skip('there is no chromium on the path')
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=['--no-sandbox'])
        yield started
        started.close()


@pytest.fixture(scope='module')
def page_file(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a training run with four checkpoints and SCORE."""
    folder = tmp_path_factory.mktemp('report')
    for name, batch in BATCHES.items():
        copy_run(runs[name], folder / 'training' / f'ba{batch}', batch=batch)
    out = folder / 'report.html'
    assert run_cli('report', folder / 'training', '--out', out, '--samples', 20) == 0
    return out


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
    assert requests == []
    assert messages == []


def column(page: Any, table: str, place: int) -> list[str]:
    """Return the texts of a column's visible cells."""
    rows = page.query_selector_all(f'table:has(caption:text-is("{table}")) tbody tr')
    return [row.query_selector_all('th, td')[place].inner_text() for row in rows if row.is_visible()]


def test_charts_are_drawn_and_the_page_works(opened, page_file: Path):
    page = opened(page_file, viewport={'width': 1280, 'height': 900})
    check_charts(page)
    check_sorting(page)
    check_samples(page)


def check_charts(page: Any) -> None:
    """Check that all charts have marks, and that a curve has a point with a tooltip for each checkpoint."""
    charts = page.query_selector_all('[data-chart]')
    assert len(charts) == 4 + 4  # composites and tasks
    for chart in charts:
        assert chart.query_selector('svg') is not None
        assert len(chart.query_selector_all('svg path')) > 3
        assert chart.get_attribute('aria-label')
    points = page.locator('[data-chart="0"] .mark-symbol path')
    assert points.count() == len(BATCHES)
    points.first.hover(force=True)
    page.wait_for_selector('#tip:not([hidden])')
    assert 'batch 20' in page.inner_text('#tip') and 'value ' in page.inner_text('#tip')


def check_sorting(page: Any) -> None:
    """Check that a click or Enter on a header sorts tasks without their categories, and a third one restores both."""
    before = column(page, SCORES, 0)
    head = page.locator(f'table:has(caption:text-is("{SCORES}")) thead th').nth(1)
    assert head.get_attribute('aria-sort') == 'none'
    head.locator('button').click()
    values = [float(text.split()[0].translate(SIGNED)) for text in column(page, SCORES, 1)]
    assert head.get_attribute('aria-sort') == 'descending'
    averages, tasks = values[:2], values[2:6]
    assert averages == sorted(averages, reverse=True) and tasks == sorted(tasks, reverse=True) and len({*tasks}) > 2
    assert {*column(page, SCORES, 0)[2:6]} == {*ROWS}
    head.locator('button').press('Enter')
    assert head.get_attribute('aria-sort') == 'ascending'
    assert [float(text.split()[0]) for text in column(page, SCORES, 1)][2:6] == tasks[::-1]
    head.locator('button').click()
    assert column(page, SCORES, 0) == before and head.get_attribute('aria-sort') == 'none'


def check_samples(page: Any) -> None:
    """Check the filters, the button for more samples, and that a sample opens."""
    form = page.locator('[data-samples]')
    assert page.locator('.sample:visible').count() == 25
    page.get_by_role('button', name='Show more').click()
    assert page.locator('.sample:visible').count() == 50
    form.get_by_label('Task').select_option(label=AGIEVAL)
    texts = page.locator('.sample:visible summary').all_inner_texts()
    assert texts and all(AGIEVAL in text for text in texts)
    form.get_by_label('Task').select_option(label='riddles/0-shot')
    form.get_by_label('Outcome').select_option('wrong')
    found = page.locator('.sample:visible')
    assert 0 < found.count() < 7
    found.first.locator('summary').press('Enter')
    assert found.first.locator('pre').first.inner_text().startswith('Twice ')
    form.get_by_label('Find').fill('no such words')
    assert found.count() == 0


def test_the_policy_blocks_injected_scripts_and_requests(browser: Any, page_file: Path):
    """Code that a debugger evaluates directly is exempt from the policy, so the attempts run in later callbacks."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(page_file.as_uri())
    refused = page.evaluate(
        """async () => {
          const refused = [];
          document.addEventListener('securitypolicyviolation', (event) => refused.push(event.effectiveDirective));
          const later = (work) => new Promise((resolve) => setTimeout(() => {
            try { work(); } catch (error) { refused.push(error.name); }
            setTimeout(resolve, 50);
          }, 0));
          await later(() => new Function('window.broken = 1')());
          await later(() => {
            const script = document.createElement('script');
            script.textContent = 'window.broken = 2';
            document.body.append(script);
          });
          await later(() => document.body.insertAdjacentHTML('beforeend', '<img src="https://example.invalid/a.png">'));
          await fetch('https://example.invalid/').catch((error) => refused.push(error.name));
          await later(() => {});
          return [window.broken ?? null, ...refused];
        }"""
    )
    context.close()
    wanted = ['script-src', 'EvalError', 'script-src-elem', 'img-src', 'connect-src', 'TypeError']
    assert [refused[0], sorted(refused[1:])] == [None, sorted(wanted)]


def test_light_dark_phone_and_print(opened, page_file: Path):
    page = opened(page_file, viewport={'width': 1280, 'height': 900}, color_scheme='dark')
    dark = page.evaluate(CONTRAST)
    page.emulate_media(color_scheme='light')
    light = page.evaluate(CONTRAST)
    assert dark['paper'] < 0.05 < 0.9 < light['paper']
    for found in (dark, light):
        assert {name: value for name, value in found['found'].items() if value < 4.5} == {}
    page.emulate_media(color_scheme='dark', media='print')
    assert page.evaluate(CONTRAST)['paper'] > 0.9
    assert not page.is_visible('nav') and not page.is_visible('.controls') and page.is_visible('caption')
    page.emulate_media(media='screen')
    page.set_viewport_size({'width': 360, 'height': 740})
    for summary in page.query_selector_all('section > details > summary'):
        summary.click()
    assert page.evaluate('document.documentElement.scrollWidth') == 360
    page.evaluate('document.querySelector("select").add(new Option("a_long_name_".repeat(9)))')
    assert page.evaluate(LINES_OF_LABELS) == {'.controls label': [1, 1, 1], '.shots': [1]}
    page.wait_for_function(
        '[...document.querySelectorAll(".chart svg")].every((one) => one.getBoundingClientRect().right <= 360)'
    )


def test_hostile_texts_run_no_script(opened, tmp_path: Path):
    run = hostile_run(tmp_path / 'hostile')
    assert run_cli('report', run, '--out', tmp_path / 'page.html', '--title', HOSTILE[1], '--samples', 50) == 0
    page = opened(tmp_path / 'page.html', viewport={'width': 360, 'height': 740})
    assert page.title() == HOSTILE[1]
    page.evaluate('document.querySelectorAll("details").forEach((one) => { one.open = true; one.hidden = false; })')
    text = page.inner_text('body')
    assert [place for place in range(len(HOSTILE)) if shown(place) not in text] == []
    assert page.evaluate('document.documentElement.scrollWidth') == 360
    for chart in page.query_selector_all('.chart svg path'):
        chart.dispatch_event('mousemove')
    assert page.evaluate('window.broken') is None
    assert page.query_selector_all('main img, main iframe, main [onerror], main [onload]') == []
