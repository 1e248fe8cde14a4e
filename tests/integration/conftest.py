"""What the integration tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny


@pytest.fixture
def tiny_settings(tmp_path: Path) -> dict[str, str]:
    """Settings that name the tiny tasks, written into the test's folder."""
    return tiny.write_tasks(tmp_path)
