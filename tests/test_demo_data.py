import json
import random
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts'))

import demo_data

ROWS_FOLDER = ROOT / 'eval_data' / 'symbolic_problem_solving'


@pytest.fixture(scope='module')
def training_text():
    """Return the whole text that `make demo` trains on."""
    return '\n'.join(demo_data.training_documents())


@pytest.mark.parametrize('task', demo_data.TASKS)
def test_rows_in_the_repository_are_those_of_the_generator(task):
    lines = (ROWS_FOLDER / f'{task}.jsonl').read_text(encoding='utf-8').splitlines()
    assert [json.loads(line) for line in lines] == demo_data.evaluation_rows(task)


@pytest.mark.parametrize('task', demo_data.TASKS)
def test_no_evaluated_prompt_occurs_in_the_training_text(task, training_text):
    for row in demo_data.evaluation_rows(task):
        assert row['context'].strip() not in training_text
        assert problem(row) not in training_text


def problem(row):
    """Return a prompt without the instruction that all rows share."""
    return row['context'].strip().rpartition('\n\n')[2]


@pytest.mark.parametrize('task', demo_data.TASKS)
def test_no_evaluated_prompt_occurs_with_other_seeds(task):
    rng = random.Random(99)
    trained = '\n'.join(demo_data.training_document(rng, task, num_rows=24) for _ in range(200))
    for row in demo_data.evaluation_rows(task, num_rows=60, seed=5):
        assert row['context'].strip() not in trained


def test_a_problem_that_is_the_end_of_another_is_on_the_same_side_of_the_split():
    assert demo_data.arithmetic_key(13, '+', 14) == demo_data.arithmetic_key(3, '+', 14)


def test_the_same_seed_gives_the_same_text():
    first, second = (list(demo_data.training_documents(num_documents=50)) for _ in range(2))
    assert first == second
    assert first != list(demo_data.training_documents(num_documents=50, seed=8))
