"""The causal types that tests/engine/test_all_families.py leaves out."""

from __future__ import annotations

import every_family
import pytest


@pytest.mark.parametrize('name', every_family.TYPES[1::2])
def test_a_family_has_its_expected_layouts_and_the_scores_of_bare_rows(name: str):
    """Mutations: those of test_all_families.py."""
    every_family.check(name)
