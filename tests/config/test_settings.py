from pathlib import Path

import pytest

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import ConfigError


def test_one_interval_may_stand_without_a_list():
    assert decode_settings({'tasks': 't.yaml', 'interval': '500ba'}).interval == ('500ba',)


def test_paths_are_kept_as_text_so_that_records_can_hold_them():
    settings = decode_settings({'tasks': [Path('a.yaml'), 'b.yaml'], 'data_root': Path('data'), 'gauntlet': Path('g')})
    assert (settings.tasks, settings.data_root, settings.gauntlet) == (['a.yaml', 'b.yaml'], 'data', 'g')


def test_truncation_follows_the_semantics_unless_it_is_given():
    assert decode_settings({'tasks': 't.yaml'}).cut == 'drop_shots'
    assert decode_settings({'tasks': 't.yaml', 'semantics': 'reference'}).cut == 'reference'
    both = {'tasks': 't.yaml', 'semantics': 'reference', 'truncation': 'drop_shots'}
    assert decode_settings(both).cut == 'drop_shots'


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({'task': 'x'}, "unknown key 'task', did you mean 'tasks'?"),
        ({'interval': ['sometimes']}, "interval: is 'sometimes'; allowed: first, checkpoint, last and Composer times"),
        ({'tokens_per_batch': 'many'}, "tokens_per_batch: is 'many'; allowed: auto, or 1 or more"),
        ({'tokens_per_batch': 0}, 'tokens_per_batch: is 0'),
        ({'max_seq_len': 1}, 'max_seq_len: is 1; allowed: 2 or more'),
        ({'max_seq_len': 'long'}, "max_seq_len: is 'long'; allowed: a whole number"),
        ({'semantics': 'upstream'}, "semantics: is 'upstream'; allowed: corrected, reference"),
        ({'truncation': 'left'}, "truncation: is 'left'; allowed: drop_shots, reference"),
        ({'fewshot': 'same'}, "fewshot: is 'same'; allowed: reference, fixed"),
        ({'tasks': []}, 'tasks: is empty'),
    ],
)
def test_a_wrong_setting_is_refused(changes: dict, expected: str):
    with pytest.raises(ConfigError) as raised:
        decode_settings({'tasks': 't.yaml', **changes})
    assert expected in str(raised.value)
