"""Fixtures of the integration tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny


@pytest.fixture
def tiny_settings(tmp_path: Path) -> dict[str, str]:
    """Write the tiny tasks into the test's folder; return the settings that name them."""
    return tiny.write_tasks(tmp_path)
