"""Where Composer is not installed, what needs it says so in one line with the extra to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == 'composer' else find_spec(name, package)
"""
USES = {
    'the callback': 'from llmfoundry_gauntlet import EvalGauntlet',
    'evaluators': 'from llmfoundry_gauntlet import build_icl_evaluators',
    'the plug-in': 'import llmfoundry_gauntlet.composer.foundry_plugin',
}


@pytest.mark.slow
@pytest.mark.parametrize('use', USES)
def test_what_needs_composer_names_the_extra_in_one_line(use: str):
    done = subprocess.run([sys.executable, '-c', WITHOUT + USES[use]], capture_output=True, text=True, timeout=120)
    line = done.stderr.splitlines()[-1]
    assert "pip install 'llmfoundry-gauntlet[composer]'" in line
    assert 'MissingPackageError' in line


def test_the_error_is_an_import_error_and_one_of_ours():
    program = WITHOUT + (
        'from llmfoundry_gauntlet import GauntletError\n'
        'try:\n    from llmfoundry_gauntlet import EvalGauntlet\n'
        'except ImportError as error:\n    assert isinstance(error, GauntletError)\n'
        'else:\n    raise AssertionError\n'
        'from llmfoundry_gauntlet import Gauntlet, evaluate\n'
    )
    subprocess.run([sys.executable, '-c', program], check=True, timeout=120)


def test_a_folder_named_composer_is_not_taken_for_the_package(tmp_path):
    (tmp_path / 'composer').mkdir()
    # As on a path where nothing but that folder has the name.
    program = (
        'import importlib.util, sys\n'
        'from importlib.machinery import PathFinder\n'
        'find_spec = importlib.util.find_spec\n'
        f'folder = PathFinder.find_spec("composer", [{str(tmp_path)!r}])\n'
        'assert folder is not None\n'
        'importlib.util.find_spec = lambda name, package=None: folder if name == "composer" else find_spec(name)\n'
    ) + USES['the callback']

    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=120)

    assert 'MissingPackageError: EvalGauntlet' in done.stderr
