"""Evaluate two real models, and compare with lm-eval, llm-foundry and published scores.

    make real [PART=agreement] [AGAIN=1]      (or: .venv/bin/python scripts/real_weights/real.py [options])

The models are SmolLM2-135M-Instruct and Gemma 3 270M, as GGUF files in packages of the package index, converted once to
float32. Everything runs in one process with one thread at a time.

agreement   the same items by our evaluation, lm-eval and llm-foundry: predictions, log-probabilities, processor seconds
published   tasks with published scores, by `gauntlet run`, without shots or with as many as published
gauntlet    a few items of every task of the Gauntlet whose file is at hand, by `gauntlet run`

Results are in runs/real/results.json after each row, and rows that it has are not run again. `--markdown` writes the
tables of docs/validation.md and docs/validation.json from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / 'bench'))

from agreement import FOUNDRY, LM_EVAL, compare, contenders_with  # noqa: E402
from gguf_models import convert  # noqa: E402
from published_scores import evaluate_gauntlet, evaluate_published  # noqa: E402
from real_rows import AGREEMENT_ROWS, GEMMA3, SMOLLM2  # noqa: E402
from validation_tables import write_page  # noqa: E402
from wheels import WHEELS, Skipped, gguf_file  # noqa: E402

from llmfoundry_gauntlet.errors import GauntletError, MissingFileError  # noqa: E402

MODELS = Path('.cache/real_weights')
OUT = Path('runs/real')
DATA_ROOT = '../shared/data/local_data'
REFERENCE_PYTHON = '.venv-reference/bin/python'
PAGES = (Path('docs/validation.md'), Path('README.md'))
RECORD = Path('docs/validation.json')
PARTS = ('agreement', 'published', 'gauntlet')


class Record:
    """The results so far, written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {'agreement': {}, 'published': {}, 'gauntlet': {}}
        if path.exists():
            self.content = json.loads(path.read_text('utf-8'))
        self.content['skipped'] = []

    def forget(self, part: str, model: str) -> None:
        """Drop the results of a part with a model, so that it runs again."""
        kept = {name: result for name, result in self.content[part].items() if name.split('/')[0] != model}
        self.content[part] = kept

    def has(self, part: str, name: str) -> bool:
        """Return whether a result is there."""
        return name in self.content[part]

    def put(self, part: str, name: str, result: dict[str, Any]) -> None:
        """Keep a result with the day on which it was measured."""
        self.content[part][name] = {**result, 'date': date.today().isoformat()}
        self.content['machine'] = machine()
        self.write()

    def skip(self, reason: str) -> None:
        """Say in one line what is left out."""
        print(f'skipped: {reason}', flush=True)
        self.content['skipped'].append(reason)
        self.write()

    def write(self) -> None:
        """Write everything."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + '\n', 'utf-8')


def machine() -> dict[str, Any]:
    """Return the properties of the machine that seconds depend on, and the versions."""
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    processors = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    return {
        'processor': processors[0] if processors else platform.processor(),
        'cores': os.cpu_count(),
        'load_average': round(os.getloadavg()[0], 1),
        'torch': version('torch'),
        'transformers': version('transformers'),
    }


def model_folder(name: str, folder: Path) -> Path:
    """Return the folder of a model, converted where it is not there yet. Raise Skipped."""
    path = folder / name
    if not (path / 'config.json').exists():
        wheels = WHEELS[name]
        gguf = gguf_file(name, folder)
        print(f'{name}: converting {gguf} ({wheels.licence})', flush=True)
        convert(gguf, path, known_text=wheels.known_text, known_ids=wheels.known_ids)
    return path


def run_agreement(name: str, model: Path, record: Record, options: argparse.Namespace) -> None:
    """Run the rows of a model that the record lacks."""
    rows = [row for row in AGREEMENT_ROWS if row.model == name and not record.has('agreement', row.key)]
    if not rows:
        return
    if not Path(options.reference_python).exists():
        raise Skipped(f'no {options.reference_python}, which `make reference` makes')

    with contenders_with(model, options.reference_python, OUT / 'contenders') as (contenders, layouts):
        print(f'{name}: {layouts}', flush=True)
        for row in rows:
            try:
                result = compare(row, contenders, Path(options.data_root), OUT / 'rows')
            except MissingFileError as error:
                record.skip(f'{row.key}: {error}')
                continue
            record.put('agreement', row.key, {**result, 'layouts': layouts})
            print(f'{row.key}: {summary(result)}', flush=True)


def summary(result: dict[str, Any]) -> str:
    """Return a line about a row."""
    others = [other for other in (LM_EVAL, FOUNDRY) if other in result]
    parts = [f'{other} {result[other]["equal"]} of {result[other]["items"]}' for other in others]
    seconds = [f'{name} {value:.3f} s' for name, value in result['seconds'].items()]
    return ', '.join(parts + seconds)


def run_evaluation(
    evaluate: Callable[..., dict[str, Any]],
    part: str,
    name: str,
    model: Path,
    record: Record,
    options: argparse.Namespace,
) -> None:
    """Run `gauntlet run` for a part, unless the record has it."""
    if not record.has(part, name):
        record.put(part, name, evaluate(name, model, Path(options.data_root), OUT))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--part', choices=PARTS, action='append', help='default: all, one after the other')
    parser.add_argument('--model', choices=(SMOLLM2, GEMMA3), action='append', help='default: both')
    parser.add_argument('--again', action='store_true', help='run also what is in the results already')
    parser.add_argument('--models', type=Path, default=MODELS, help=f'folder of wheels and converted models: {MODELS}')
    parser.add_argument('--data-root', default=DATA_ROOT)
    parser.add_argument('--reference-python', default=REFERENCE_PYTHON, help='with llm-foundry and lm-eval')
    parser.add_argument(
        '--markdown', action='store_true', help='only write the tables of docs/validation.md and the README'
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    results = OUT / 'results.json'
    if options.markdown:
        write_page(json.loads(results.read_text('utf-8')), PAGES, RECORD)
        return

    os.environ['OMP_NUM_THREADS'] = '1'
    record = Record(results)
    started = time.perf_counter()
    if not Path(options.data_root).is_dir():
        record.skip(f'everything: no folder {options.data_root} with the data files; name it with --data-root')
        return

    runs = {
        'agreement': lambda name, model: run_agreement(name, model, record, options),
        'published': lambda name, model: run_evaluation(evaluate_published, 'published', name, model, record, options),
        'gauntlet': lambda name, model: run_evaluation(evaluate_gauntlet, 'gauntlet', name, model, record, options),
    }
    for name in options.model or (SMOLLM2, GEMMA3):
        try:
            model = model_folder(name, options.models)
        except Skipped as reason:
            record.skip(str(reason))
            continue
        for part in options.part or PARTS:
            if options.again:
                record.forget(part, name)
            try:
                runs[part](name, model)
            except (Skipped, GauntletError) as reason:
                record.skip(f'{part} of {name}: {reason}')
    print(f'{(time.perf_counter() - started) / 60:.1f} minutes; {results}')


if __name__ == '__main__':
    main()
