"""Makes `tiny` importable and the tasks of a test module at hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def tiny_settings(tmp_path: Path) -> dict[str, str]:
    """Settings that name the tiny tasks, written into the test's folder."""
    import tiny

    return tiny.write_tasks(tmp_path)
