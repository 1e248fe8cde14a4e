"""Make the documentation's pictures of reports from the records of `make demo`.

    python scripts/pictures.py runs/demo

writes docs/images/report.png, report_comparison.png and report_samples.png. It needs `chromium` on the path and the
packages of the extra `dev`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from llmfoundry_gauntlet import GauntletError
from llmfoundry_gauntlet.errors import ConfigError, print_problems
from llmfoundry_gauntlet.results.report.page import make_page

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / 'docs' / 'images'
WIDTH, WIDTH_OF_CURVES = 1100, 1280  # pixels; the latter has room for four charts side by side
MARGIN = 16

# Tasks that the model of the demo learns, and a task that stays at chance.
SHOWN_TASKS = (
    'bigbench_dyck_languages/10-shot',
    'simple_arithmetic_withspaces/10-shot',
    'simple_arithmetic_nospaces/10-shot',
    'copa/0-shot',
)
SHOWN_ROWS = 12  # of the comparison: composites and the first tasks

# The page's own policy forbids foreign styles, so sections are hidden as the page itself hides samples.
HIDE_SECTIONS = """shown => document.querySelectorAll('section')
  .forEach((one) => { one.hidden = !shown.includes(one.id); })"""
HIDE_TASKS = """shown => document.querySelectorAll('#tasks h3, #tasks figure').forEach((one) => {
  one.hidden = !shown.includes(one.querySelector('figcaption')?.textContent);
})"""
MERGE_TASKS = """() => {
  const [first, ...others] = document.querySelectorAll('#tasks .grid');
  others.forEach((grid) => { first.append(...grid.children); grid.remove(); });
}"""
HIDE_ROWS = """count => document.querySelectorAll('#changes tbody tr')
  .forEach((row, place) => { row.hidden = place >= count; })"""


def main() -> int:
    """Make the pictures; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('demo', type=Path, help='the folder of the demo, such as runs/demo')
    demo: Path = parser.parse_args().demo
    try:
        with started_browser() as browser, tempfile.TemporaryDirectory() as folder:
            training = opened(browser, Path(folder) / 'training.html', [demo], width=WIDTH_OF_CURVES)
            picture_of_curves(training)
            picture_of_samples(training)
            checkpoints = [demo / 'gauntlet' / name for name in ('ba700', 'ba1400')]
            picture_of_comparison(opened(browser, Path(folder) / 'comparison.html', checkpoints))
    except GauntletError as error:
        print_problems(error)
        return 2
    return 0


@contextmanager
def started_browser() -> Iterator[Browser]:
    """Start Chromium. Raise ConfigError if there is none."""
    path = shutil.which('chromium')
    if path is None:
        raise ConfigError('there is no chromium on the path; install it, such as with `apt-get install chromium`')
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=['--no-sandbox'])
        yield browser
        browser.close()


def opened(browser: Browser, path: Path, runs: list[Path], *, width: int = WIDTH) -> Page:
    """Return the report of the runs in a browser, with its charts drawn."""
    path.write_text(make_page(runs), encoding='utf-8')
    page = browser.new_page(viewport={'width': width, 'height': 900}, color_scheme='light')
    page.goto(path.as_uri())
    page.wait_for_selector('html[data-charts]', timeout=60_000)
    return page


def picture_of_curves(page: Page) -> None:
    """Write the head of the page, the learning curves, and those of a few tasks."""
    page.evaluate(HIDE_SECTIONS, ['curves', 'tasks'])
    page.evaluate(HIDE_TASKS, list(SHOWN_TASKS))
    page.evaluate(MERGE_TASKS)
    write_picture(page, 'report.png', end='#tasks')


def picture_of_samples(page: Page) -> None:
    """Write the samples of a task, one of them open."""
    page.set_viewport_size({'width': WIDTH, 'height': 900})
    page.evaluate(HIDE_SECTIONS, ['samples'])
    page.get_by_label('Task').select_option(label='copa/0-shot')
    page.locator('.sample:visible').nth(1).locator('summary').click()
    page.mouse.move(0, 0)  # away from the item, which would be highlighted
    write_picture(page, 'report_samples.png', begin='#samples', end='#samples')


def picture_of_comparison(page: Page) -> None:
    """Write the head of the page and the beginning of the comparison."""
    page.evaluate(HIDE_SECTIONS, ['changes'])
    page.evaluate(HIDE_ROWS, SHOWN_ROWS)
    write_picture(page, 'report_comparison.png', end='#changes table')


def write_picture(page: Page, name: str, *, begin: str = 'body', end: str) -> None:
    """Write the page from the beginning of one element to the end of another."""
    top, bottom = box_of(page, begin)['y'], box_of(page, end)['y'] + box_of(page, end)['height']
    width = box_of(page, 'html')['width']
    clip: Any = {'x': 0, 'y': top, 'width': width, 'height': bottom - top + MARGIN}
    page.screenshot(path=IMAGES / name, full_page=True, clip=clip)
    print(f'{IMAGES / name}: {(IMAGES / name).stat().st_size // 1024} KB')


def box_of(page: Page, selector: str) -> dict[str, float]:
    """Return the place of the first element on the page, which is scrolled to its beginning."""
    page.evaluate('window.scrollTo(0, 0)')
    box: Any = page.locator(selector).first.bounding_box()
    return dict(box)


if __name__ == '__main__':
    sys.exit(main())
