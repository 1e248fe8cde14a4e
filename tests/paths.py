"""Paths that the tests use."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / 'tests' / 'fixtures'
SHARED_DATA = ROOT.parent / 'shared' / 'data'
