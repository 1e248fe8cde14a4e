"""Metric keys are accepted by every logger, whatever categories are called."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_length_limit, _validate_metric_name

from llmfoundry_gauntlet import ConfigError
from llmfoundry_gauntlet.metrics.keys import check_key_names, metric_stream, valid_key, valid_keys
from llmfoundry_gauntlet.types import Composites, Measure, Spread, TaskScore

NAMES = strategies.text(max_size=300)


@given(NAMES)
@example('..')
@example('a\n')
@example('a//b/./c/')
@example('\ud800')
def test_mlflow_accepts_the_key_of_any_name(name):
    of_category = valid_key(f'metrics/t/0-shot/{name}/Accuracy')
    of_composite = valid_key(f'icl/metrics/eval_gauntlet/{name}')

    # MLflow's functions raise an error for a key that it does not accept.
    for key in (of_category, of_composite):
        _validate_metric_name(key)
        _validate_length_limit('Metric name', MAX_ENTITY_KEY_LENGTH, key)


@given(NAMES)
@example('..')
@example('a\n')
@example('a//b/./c/')
@example('\ud800')
@pytest.mark.parametrize('template', ['metrics/t/0-shot/{}/Accuracy', 'icl/metrics/eval_gauntlet/{}'])
def test_a_valid_key_is_its_own_valid_key(template, name):
    key = valid_key(template.format(name))

    assert valid_key(key) == key


NAMES_OF_LLM_FOUNDRY = strategies.from_regex(r'[A-Za-z0-9_ .-]*[A-Za-z0-9_]', fullmatch=True)


@given(NAMES_OF_LLM_FOUNDRY.filter(lambda name: len(name) < 200))
def test_valid_keys_are_those_of_llm_foundry(name):
    key = f'metrics/mmlu/5-shot/{name}/Accuracy'

    assert valid_key(key) == key


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('a:b', 'a_b'),
        ('R&D', 'R_D'),
        # Letters of any alphabet and spaces stay.
        ('Öl', 'Öl'),
        ('a b', 'a b'),
        # A part that is empty or that a path would resolve is replaced.
        ('', '_'),
        ('.', '_'),
        ('..', '__'),
        ('...', '...'),
    ],
)
def test_invalid_characters_are_replaced(name, expected):
    assert valid_key(f'metrics/{name}/x') == f'metrics/{expected}/x'


def test_long_keys_that_differ_at_their_end_stay_different():
    long_name = 'x' * 300
    keys = [f'metrics/t/0-shot/{long_name}{end}/Accuracy' for end in 'ab']

    shortened = set(valid_keys(keys).values())

    assert len(shortened) == 2
    assert all(re.fullmatch(r'metrics/t/0-shot/x{220}_[0-9a-f]{12}', key) for key in shortened)


def test_colliding_categories_and_composites_are_named():
    categories = {'t/0-shot': ['a:b', 'plain', 'a_b'], 'u/0-shot': ['a_b']}
    composites = ['world', 'my:own', 'my_own']

    with pytest.raises(ConfigError) as caught:
        check_key_names(categories, composites)

    assert caught.value.problems == (
        "'metrics/t/0-shot/a:b' and 'metrics/t/0-shot/a_b' would both be 'metrics/t/0-shot/a_b' in loggers; "
        'give one of them another name',
        "'icl/metrics/eval_gauntlet/my:own' and 'icl/metrics/eval_gauntlet/my_own' would both be "
        "'icl/metrics/eval_gauntlet/my_own' in loggers; give one of them another name",
    )


def test_categories_of_two_tasks_do_not_collide():
    check_key_names({'t/0-shot': ['a:b', 'plain'], 'u/0-shot': ['a_b']}, ['world'])


def test_colliding_tasks_are_named():
    with pytest.raises(ConfigError, match="'metrics/a:b/0-shot' and 'metrics/a_b/0-shot' would both be"):
        check_key_names({'a:b/0-shot': [], 'a_b/0-shot': []}, [])


def scored(**values: float) -> TaskScore:
    metrics = {name: Measure(value=value) for name, value in values.items()}
    return TaskScore(task='t/0-shot', metrics=metrics, num_items=1, num_unscored=0, num_shortened=0)


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_absent_numbers_are_not_in_the_stream(value):
    stream = metric_stream({'t/0-shot': scored(Accuracy=0.5, Own=value)}, None, {}, {})

    assert stream['metrics/t/0-shot/Accuracy'] == 0.5
    assert 'metrics/t/0-shot/Own' not in stream


def measure(value: float, error: float) -> Measure:
    spread = Spread(strata=(), standard_error=error, freedom=1.0, below=error, above=error)
    return Measure(value=value, spread=spread)


# Values of the score below that loggers get, by group.
GROUPS = {
    'accuracy': {'metrics/t/0-shot/Accuracy': 0.5, 'metrics/t/0-shot/a/Accuracy': 0.25},
    'metrics': {'metrics/t/0-shot/Bits': 2.0},
    'composites': {'icl/metrics/eval_gauntlet/all': 0.75},
    'errors': {},  # of the others
}
ERRORS = {
    'accuracy': {'metrics/t/0-shot/StandardError': 0.01, 'metrics/t/0-shot/a/StandardError': 0.02},
    'metrics': {'metrics/t/0-shot/BitsStandardError': 0.03},
    'composites': {'icl/metrics/eval_gauntlet/all/standard_error': 0.04},
}


# In every stream, whatever the groups.
TIMES_AND_COUNTS = [
    'gauntlet/seconds',
    'gauntlet/seconds/t/0-shot',
    'gauntlet/items',
    'gauntlet/shortened_items',
    'gauntlet/unscored_items',
]


def score_with_a_category() -> TaskScore:
    category = TaskScore(
        task='t/0-shot', metrics={'Accuracy': measure(0.25, 0.02)}, num_items=1, num_unscored=0, num_shortened=0
    )
    metrics = {
        'Accuracy': measure(0.5, 0.01),
        'Bits': measure(2.0, 0.03),
        'MajorityClass': measure(0.6, 0.05),
    }
    return replace(category, metrics=metrics, categories={'a': category})


COMPOSITE_SCORES = Composites(categories={}, averages={'all': measure(0.75, 0.04)})


@pytest.mark.parametrize(
    'groups',
    [
        ['accuracy'],
        ['accuracy', 'errors'],
        ['composites', 'errors'],
        [*GROUPS],
        [],
    ],
)
def test_loggers_get_the_groups_that_are_chosen_and_never_the_majority_class(groups: list[str]):
    expected = {}
    for group in groups:
        expected |= GROUPS[group]
        if 'errors' in groups:
            expected |= ERRORS.get(group, {})

    stream = metric_stream({'t/0-shot': score_with_a_category()}, COMPOSITE_SCORES, {}, {'t/0-shot': 1.5}, groups)

    assert list(stream)[-5:] == TIMES_AND_COUNTS
    assert {key: value for key, value in stream.items() if key not in TIMES_AND_COUNTS} == expected


def test_records_have_the_majority_class():
    stream = metric_stream({'t/0-shot': score_with_a_category()}, COMPOSITE_SCORES, {}, {})

    assert stream['metrics/t/0-shot/MajorityClass'] == 0.6


def test_any_category_has_a_valid_key():
    score = replace(scored(Accuracy=0.5), categories={'a:b': scored(Accuracy=1.0)})

    stream = metric_stream({'t/0-shot': score}, None, {}, {})

    assert stream['metrics/t/0-shot/a_b/Accuracy'] == 1.0


def test_categories_with_the_same_key_are_an_error():
    category = scored(Accuracy=1.0)
    score = replace(scored(Accuracy=0.5), categories={'a:b': category, 'a_b': category})

    with pytest.raises(ConfigError, match='would both be'):
        metric_stream({'t/0-shot': score}, None, {}, {})
