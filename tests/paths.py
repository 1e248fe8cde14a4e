"""Paths that the tests use, and whether Composer is there."""

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / 'tests' / 'fixtures'
SHARED_DATA = ROOT.parent / 'shared' / 'data'
HAS_COMPOSER = find_spec('mcli') is not None  # which mosaicml needs; the folder tests/composer hides its own name
