import os
from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.config.resources import cache_folder
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import ConfigError


def problem_of(key: str, value: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        decode_settings({'tasks': 't.yaml', key: value})
    (problem,) = raised.value.problems
    return problem


def test_paths_are_kept_as_text_and_a_single_interval_as_a_list():
    settings = decode_settings({'tasks': [Path('a.yaml'), 'b.yaml'], 'data_root': Path('data'), 'gauntlet': Path('g')})
    assert (settings.tasks, settings.data_root, settings.gauntlet) == (['a.yaml', 'b.yaml'], 'data', 'g')
    assert decode_settings({'tasks': 't.yaml', 'interval': '500ba'}).interval == ('500ba',)


def test_truncation_follows_the_semantics_unless_it_is_given():
    assert decode_settings({'tasks': 't.yaml'}).effective_truncation == 'drop_shots'
    assert decode_settings({'tasks': 't.yaml', 'semantics': 'reference'}).effective_truncation == 'reference'
    both = {'tasks': 't.yaml', 'semantics': 'reference', 'truncation': 'drop_shots'}
    assert decode_settings(both).effective_truncation == 'drop_shots'


BLANK_PATHS = [
    (key, text, f'{key}: is {text!r}; allowed: a path') for key in ('tasks', 'gauntlet', 'score') for text in ('', ' ')
]
WRONG_TIMES = [
    ('interval', ['last', text], f'interval: is {text!r}; allowed: first, checkpoint, last and Composer times')
    for text in (
        '0ba',
        '1.5ba',
        '5.ba',
        '-1ba',
        '1ba ',
        '1iter',
        '0dur',
        '.0dur',
        '2dur',
        '1.01dur',
        '1EP',
        '1h',
        '1',
    )
]


@pytest.mark.parametrize(
    ('key', 'value', 'problem'),
    [
        *BLANK_PATHS,
        ('tasks', None, 'nothing to evaluate: give tasks, score or both'),
        ('task', 'x', "task: unknown key 'task', did you mean 'tasks'?"),
        ('tokens_per_batch', 'many', "tokens_per_batch: is 'many'; allowed: auto, or 1 or more"),
        ('max_seq_len', 1, 'max_seq_len: is 1; allowed: 2 or more'),
        ('semantics', 'upstream', "semantics: is 'upstream'; allowed: corrected, reference"),
        ('truncation', 'left', "truncation: is 'left'; allowed: drop_shots, reference"),
        ('fewshot', 'same', "fewshot: is 'same'; allowed: reference, fixed"),
        ('reasoning_markers', ['<plan>'], "reasoning_markers: is '<plan>'; allowed: the start and the end"),
        ('reasoning_markers', '<plan>...', "reasoning_markers: is '<plan>...'; allowed: the start and the end"),
        ('log', ['accuracy', 'losses'], "log: is 'losses'; allowed: accuracy, errors, composites, score, metrics"),
        ('save_folder', ' ', "save_folder: is ' '; allowed: a folder, or null for no records"),
        ('save_folder', 's3://bucket/run', "save_folder: is 's3://bucket/run', but records are written to a local"),
        ('save_folder', f'runs/{"x" * 256}/{{run_name}}', 'save_folder: has a name of 256 bytes; allowed: 255 bytes'),
        ('save_folder', 'runs/' + 'ü' * 128, 'save_folder: has a name of 256 bytes; allowed: 255 bytes'),
        ('save_folder', 'runs/' * 820, 'save_folder: has 4100 bytes; allowed: 4095 bytes for a path'),
        ('save_folder', 'runs/\0', 'save_folder: contains a NUL character'),
        ('data_root', '', "data_root: is ''; allowed: a folder"),
        ('interval', ['sometimes'], "interval: is 'sometimes'; allowed: first, checkpoint, last and C"),
        ('interval', 500, "interval: is '500'; allowed: first, checkpoint, last and Composer times (500ba"),
        ('interval', {'every': '1ep'}, 'interval: is a mapping; allowed: a list'),
        ('interval', ['1ep', 3], 'interval[1]: is 3; allowed: text'),
        ('interval', [], 'interval: is empty; allowed: one or more of first, checkpoint, last and Composer times'),
        *WRONG_TIMES,
    ],
)
def test_an_invalid_setting_is_an_error_with_its_place_and_what_is_allowed(key: str, value: Any, problem: str):
    assert problem_of(key, value).startswith(f'eval_gauntlet: {problem}')


@pytest.mark.parametrize(
    ('own', 'xdg', 'expected'),
    [
        (None, None, 'HOME/.cache/llmfoundry_gauntlet/tokens'),
        (None, '/var/cache/me', '/var/cache/me/llmfoundry_gauntlet/tokens'),
        (None, 'relative', 'HOME/.cache/llmfoundry_gauntlet/tokens'),  # to be ignored, by its specification
        ('~/own', '/var/cache/me', 'HOME/own/tokens'),
        ('OFF', None, None),
    ],
)
def test_the_cache_folder_is_the_users_or_that_of_the_environment(monkeypatch, tmp_path, own, xdg, expected):
    monkeypatch.setenv('HOME', str(tmp_path))
    for name, value in (('LLMFOUNDRY_GAUNTLET_CACHE', own), ('XDG_CACHE_HOME', xdg)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    assert cache_folder('tokens') == (expected and Path(expected.replace('HOME', str(tmp_path))))
    if not own and not xdg:
        monkeypatch.setattr(os.path, 'expanduser', lambda path: path)  # as for an unknown user without a home
        assert cache_folder('tokens') is None
