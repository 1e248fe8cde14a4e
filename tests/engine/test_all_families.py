"""Every other causal type of the installed transformers has its layouts and its scores; so has docs/models.md."""

from __future__ import annotations

import every_family
import pytest
import yaml
from paths import ROOT


# Two modules, as a module's tests share a worker.
@pytest.mark.parametrize('name', every_family.TYPES[::2])
def test_a_family_has_its_expected_layouts_and_the_scores_of_bare_rows(name: str):
    """Mutations: a layout is not tried; windows are left out in `attend`; `by_flag` of eager attention stays empty."""
    every_family.check(name)


def test_no_type_is_both_measured_and_listed_as_one_that_cannot_be():
    layouts = every_family.expected_layouts()

    for stack, reasons in every_family.CANNOT.items():
        measured = {name for name, layout_of in layouts.items() if stack in layout_of}
        assert not measured & reasons.keys()


def test_the_documentation_has_the_recorded_layouts():
    """`python tests/every_family.py --markdown` prints them. Mutation: a type moves to another row of the fixture."""
    page = (ROOT / 'docs' / 'models.md').read_text()

    assert every_family.markdown() in page


def test_a_type_that_is_neither_measured_nor_listed_fails(monkeypatch):
    name = every_family.TYPES[0]
    monkeypatch.setattr(every_family, 'expected_layouts', dict)

    with pytest.raises(AssertionError, match=name):
        every_family.check(name)


def test_a_listed_type_that_can_be_built_fails(monkeypatch):
    monkeypatch.setitem(every_family.CANNOT[every_family.STACK], 'llama', 'a reason')

    with pytest.raises(AssertionError, match='llama'):
        every_family.check('llama')


def test_a_type_in_a_slower_layout_than_expected_fails(monkeypatch):
    slower = {'llama': {every_family.STACK: 'padded_rows no_cache'}}
    monkeypatch.setattr(every_family, 'expected_layouts', lambda: slower)

    with pytest.raises(AssertionError, match='prompt_stream'):
        every_family.check('llama')


def test_recording_keeps_the_layouts_of_the_other_version(monkeypatch, tmp_path):
    other = next(stack for stack in every_family.STACKS if stack != every_family.STACK)
    before = {'gone': {every_family.STACK: 'stream cache'}, 'llama': {other: 'stream cache'}}
    monkeypatch.setattr(every_family, 'EXPECTED', tmp_path / 'layouts.yaml')
    every_family.EXPECTED.write_text(yaml.safe_dump(before))
    measured = every_family.Measured(
        scoring='padded_rows', generation='no_cache', scores_off=0, logits_off=0, rounding=0
    )

    every_family.record({'llama': measured})

    assert every_family.expected_layouts() == {
        'llama': {other: 'stream cache', every_family.STACK: 'padded_rows no_cache'}
    }
