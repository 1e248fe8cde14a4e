import json
import random
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts'))

import demo_data

ROWS_FOLDER = ROOT / 'eval_data' / 'symbolic_problem_solving'
ARITHMETIC = ['simple_arithmetic_withspaces', 'simple_arithmetic_nospaces']


@pytest.mark.parametrize('task', demo_data.TASKS)
def test_the_rows_in_the_repository_are_what_the_generator_makes(task):
    lines = (ROWS_FOLDER / f'{task}.jsonl').read_text(encoding='utf-8').splitlines()
    assert [json.loads(line) for line in lines] == demo_data.evaluation_rows(task)


@pytest.mark.parametrize('task', demo_data.TASKS)
def test_no_evaluated_prompt_occurs_in_the_training_text_of_any_seed(task):
    rng = random.Random(99)
    trained = '\n'.join(demo_data.training_documents())
    trained += ''.join(f'\n{demo_data.training_document(rng, task, num_rows=24)}' for _ in range(200))
    for row in demo_data.evaluation_rows(task) + demo_data.evaluation_rows(task, num_rows=60, seed=5):
        prompt = row['context'].strip()
        assert prompt not in trained
        assert prompt.rpartition('\n\n')[2] not in trained  # without the instruction that all rows share


@pytest.mark.parametrize('task', ARITHMETIC)
def test_arithmetic_answers_are_right(task):
    for row in demo_data.evaluation_rows(task):
        problem = row['context'].replace(' ', '').rstrip('=')
        left, right = (int(number) for number in problem.replace('-', '+').split('+'))
        assert int(row['continuation']) == (left + right if '+' in problem else left - right)


def test_bracket_answers_close_every_bracket_in_order():
    for row in demo_data.evaluation_rows('bigbench_dyck_languages'):
        word = row['context'].split('Input: ')[1].removesuffix('\nOutput:') + ' ' + row['continuation']
        word = word.replace(' ', '')
        while word:
            shorter = word.replace('()', '').replace('[]', '').replace('{}', '').replace('<>', '')
            assert shorter != word
            word = shorter


def test_the_same_seed_gives_the_same_text():
    first, second = (list(demo_data.training_documents(num_documents=50)) for _ in range(2))
    assert first == second
    assert first != list(demo_data.training_documents(num_documents=50, seed=8))
