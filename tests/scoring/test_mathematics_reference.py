"""The reference's comparison of MATH answers, compared with its recorded results.

Recorded from lm-eval 0.4.13 (`lm_eval/tasks/score/math`) with sympy 1.14.0 and antlr4-python3-runtime 4.11.0. Its
results and ours were also compared on 14,681 pairs: the 5,000 gold solutions, each gold with the next, 4,618 changed
answers and 63 unusual ones. All were equal except 25 with two \\mbox, where it raises.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import pytest
from paths import FIXTURES

from llmfoundry_gauntlet.scoring.mathematics import (
    Comparer,
    reference_answer_of,
    reference_gold_of,
)

# `pairs` are an answer, a gold and whether they are equal; indices are of the files' rows in the order of their names,
# hashes of all golds or answers with line feeds between.
RECORDED = json.loads((FIXTURES / 'score' / 'math_reference.json').read_text(encoding='utf-8'))


@pytest.fixture(scope='module')
def golds(rows: list[dict[str, str]], fixes: dict[str, str]) -> list[str]:
    return [reference_gold_of(row['problem'], row['solution'], fixes) for row in rows]


def sha256(texts: Sequence[str]) -> str:
    return hashlib.sha256('\n'.join(texts).encode()).hexdigest()


def test_pairs_are_equal_as_in_the_reference(comparer: Comparer):
    pairs = [(answer, gold) for answer, gold, _ in RECORDED['pairs']]
    outcomes = comparer.equal_many(pairs, reference=True)
    assert [pair for pair, equal in zip(RECORDED['pairs'], outcomes, strict=True) if equal != pair[2]] == []


def test_errors_of_the_reference_are_unequal(comparer: Comparer):
    assert not comparer.equal('\\mbox{a}\\mbox{b}4', '4', reference=True)
    assert not comparer.equal('Point(1,2)', '', reference=True)


def test_reference_golds_and_answers(rows: list[dict[str, str]], golds: list[str]):
    assert sha256(golds) == RECORDED['golds_sha256']
    without_table = [reference_gold_of(row['problem'], row['solution'], None) for row in rows]
    assert sha256(without_table) == RECORDED['golds_without_table_sha256']
    assert sha256([reference_answer_of(row['solution']) for row in rows]) == RECORDED['answers_sha256']


def test_the_reference_accepts_4980_of_the_5000_gold_solutions(
    rows: list[dict[str, str]], golds: list[str], comparer: Comparer
):
    answers = [reference_answer_of(row['solution']) for row in rows]
    outcomes = comparer.equal_many(zip(answers, golds, strict=True), reference=True)
    assert sum(outcomes) == 4980
    assert [index for index, equal in enumerate(outcomes) if not equal] == RECORDED['not_accepted']


@pytest.mark.long
def test_the_reference_confuses_51_golds_with_the_next(
    rows: list[dict[str, str]], golds: list[str], comparer: Comparer
):
    answers = [reference_answer_of(row['solution']) for row in rows]
    outcomes = comparer.equal_many(zip(answers, [*golds[1:], golds[0]], strict=True), reference=True)
    assert [index for index, equal in enumerate(outcomes) if equal] == RECORDED['equal_to_the_next']


@pytest.mark.parametrize(
    ('generation', 'answer'),
    [
        ('5', None),
        ('\\boxed 5', None),
        ('\\boxed {5}', None),
        ('\\fbox{5}', None),
        ('\\boxed{5', None),
        ('\\boxed{}', ''),
        ('\\boxed{1} \\boxed{ 2 }', ' 2 '),
        ('\\boxed{\\boxed{3}}', '3'),
        ('\\boxed{\\frac{1}{2}} }', '\\frac{1}{2}'),
    ],
)
def test_the_reference_answer_is_the_last_box_with_braces(generation: str, answer: str | None):
    assert reference_answer_of(generation) == answer


@pytest.mark.parametrize(
    ('problem', 'solution', 'gold'),
    [
        ('What is x?', '$\\boxed{x = 4}$', '4'),
        ('Find the equation of the line.', '$\\boxed{y = 4}$', 'y=4'),
        ('What are they?', '$\\boxed{x=1,y=2}$', 'x=1,y=2'),
        ('What is it?', '$\\boxed{7}$, $\\boxed{7}$', '7'),
        ('Which?', '$\\boxed{7}$ and $\\boxed{8}$', '7, 8'),
        ('Which of both?', '$\\boxed{7}$ and $\\boxed{8}$', '9'),
        ('Which of both?', '$\\boxed{7}$', '7'),
    ],
)
def test_reference_gold(problem: str, solution: str, gold: str):
    assert reference_gold_of(problem, solution, {'Which of both?': '9'}) == gold


def test_the_reference_is_not_symmetric(comparer: Comparer):
    assert comparer.equal('Interval(1,2)', '[1,2]', reference=True)
    assert not comparer.equal('[1,2]', 'Interval(1,2)', reference=True)
