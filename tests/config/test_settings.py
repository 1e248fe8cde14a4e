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


WHEN = 'allowed: first, checkpoint, last and Composer times'


@pytest.mark.parametrize(
    ('key', 'value', 'problem'),
    [
        *(
            (key, text, f'{key}: is {text!r}; allowed: a path')
            for key in ('tasks', 'gauntlet', 'score')
            for text in ('', ' ')
        ),
        ('tasks', None, 'nothing to evaluate: give tasks, score or both'),
        ('task', 'x', "task: unknown key 'task', did you mean 'tasks'?"),
        ('tokens_per_batch', 'many', "tokens_per_batch: is 'many'; allowed: auto, or 1 or more"),
        ('tokens_per_batch', 0, 'tokens_per_batch: is 0'),
        ('max_seq_len', 1, 'max_seq_len: is 1; allowed: 2 or more'),
        ('max_seq_len', 'long', "max_seq_len: is 'long'; allowed: a whole number"),
        ('semantics', 'upstream', "semantics: is 'upstream'; allowed: corrected, reference"),
        ('truncation', 'left', "truncation: is 'left'; allowed: drop_shots, reference"),
        ('fewshot', 'same', "fewshot: is 'same'; allowed: reference, fixed"),
        ('log', ['accuracy', 'losses'], "log: is 'losses'; allowed: accuracy, errors, composites, score, metrics"),
        ('save_folder', ' ', "save_folder: is ' '; allowed: a folder, or null for no records"),
        ('save_folder', 's3://bucket/run', "save_folder: is 's3://bucket/run', but records are written to a local"),
        ('data_root', '', "data_root: is ''; allowed: a folder"),
        ('interval', ['sometimes'], f"interval: is 'sometimes'; {WHEN}"),
        ('interval', None, f'interval: is empty; {WHEN}'),
        ('interval', 3, f'interval: is 3; {WHEN}'),
        ('interval', True, f'interval: is True; {WHEN}'),
        ('interval', {'every': '1ep'}, f'interval: is a mapping; {WHEN}'),
        ('interval', '', f"interval: is ''; {WHEN}"),
        ('interval', ['1ep', 3], f'interval[1]: is 3; {WHEN}'),
        ('interval', [['1ep']], f'interval[0]: is a list; {WHEN}'),
    ],
)
def test_an_invalid_setting_is_an_error_with_its_place_and_what_is_allowed(key: str, value: Any, problem: str):
    assert problem_of(key, value).startswith(f'eval_gauntlet: {problem}')


def test_the_cache_folder_is_the_users_or_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv('LLMFOUNDRY_GAUNTLET_CACHE')
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setenv('HOME', str(tmp_path))
    assert cache_folder('tokens') == tmp_path / '.cache/llmfoundry_gauntlet/tokens'
    monkeypatch.setenv('XDG_CACHE_HOME', '/var/cache/me')
    assert cache_folder('tokens') == Path('/var/cache/me/llmfoundry_gauntlet/tokens')
    monkeypatch.setenv('XDG_CACHE_HOME', 'relative')  # to be ignored, by its specification
    assert cache_folder('tokens') == tmp_path / '.cache/llmfoundry_gauntlet/tokens'
    monkeypatch.setenv('LLMFOUNDRY_GAUNTLET_CACHE', '~/tokens')
    assert (
        cache_folder('tokens') == tmp_path / 'tokens/tokens' and cache_folder('headers') == tmp_path / 'tokens/headers'
    )
    for off in ('off', 'OFF'):
        monkeypatch.setenv('LLMFOUNDRY_GAUNTLET_CACHE', off)
        assert cache_folder('tokens') is None


def test_without_a_home_directory_there_is_no_cache(monkeypatch):
    for name in ('LLMFOUNDRY_GAUNTLET_CACHE', 'XDG_CACHE_HOME'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, 'expanduser', lambda path: path)  # as for an unknown user
    assert cache_folder('tokens') is None
