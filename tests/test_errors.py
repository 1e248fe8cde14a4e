"""The words of messages that several modules share."""

from __future__ import annotations

import pytest

from llmfoundry_gauntlet.errors import (
    COMMAND_LINE,
    ConfigError,
    Problems,
    as_given,
    duration,
    named,
    named_as_options,
    naming,
    plural,
)


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (0.04, '0.0 s'),
        (59.94, '59.9 s'),
        (59.96, '1 min 0 s'),  # never 60.0 s
        (182.3, '3 min 2 s'),
        (3599.4, '59 min 59 s'),
        (3599.6, '1 h 0 min'),
        (7160, '1 h 59 min'),
        (7175, '2 h 0 min'),  # never 1 h 60 min
        (90_000, '25 h 0 min'),
    ],
)
def test_a_duration_is_said_in_two_units(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ('count', 'noun', 'text'),
    [
        (0, 'task', '0 tasks'),
        (1, 'category', '1 category'),
        (2, 'category', '2 categories'),
        (2294, 'row', '2,294 rows'),
    ],
)
def test_numbers_have_their_noun(count: int, noun: str, text: str):
    assert plural(count, noun) == text


def test_settings_have_the_names_of_options_on_the_command_line_only():
    with named_as_options({'time_budget': '--time-budget', 'resume': '--resume'}):
        on_command_line = [
            named('time_budget'),
            as_given('time_budget', '5m'),
            as_given('resume'),
        ]
        no_option = named('stall_seconds')
    elsewhere = [named('time_budget'), as_given('time_budget', '5m'), as_given('resume')]

    assert on_command_line == ['--time-budget', '--time-budget 5m', '--resume']
    assert no_option == 'stall_seconds'
    assert elsewhere == ['time_budget', 'time_budget: 5m', 'resume: true']


def test_problems_of_a_file_keep_the_keys_of_the_file_while_a_command_runs():
    """Mutation: every problem with the names of options, also in a YAML file that an option names."""
    of_file, of_options = Problems('tasks.txt'), Problems(COMMAND_LINE)

    with named_as_options({'only': '--only'}):
        of_file.add('only', 'is 3')
        of_options.add('only', 'is 3')
        of_options.add('', 'only[1]: is 3')
        of_options.add('', 'only one of them is allowed')

    assert of_file.messages == ['tasks.txt: only: is 3']
    assert of_options.messages == ['--only: is 3', '--only[1]: is 3', 'only one of them is allowed']


def test_an_error_keeps_its_class_when_its_setting_is_named():
    with pytest.raises(ConfigError) as raised, naming('out'):
        raise ConfigError(['is a', 'is b'])

    assert raised.value.problems == ('out: is a', 'out: is b')
