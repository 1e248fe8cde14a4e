"""Boxes of generations and solutions: which ones are there, and which ones are one answer."""

from __future__ import annotations

from contextlib import closing

import pytest

from llmfoundry_gauntlet.scoring.mathematics import Comparer, answer_of, boxed, gold_of

# Text between two boxes of which the second takes the place of the first.
CONNECTIVES = (
    'Oops.',
    'Hmm, let me recompute.',
    'No,',
    'On second thought,',
    'Wait:',
    'Sorry,',
    'Correction:',
    '?',
    'but',
    'Simplifying,',
    'In decimal form,',
    'which is',
    'that is,',
    'i.e.,',
    '=',
    'or equivalently',
    'or, simplified,',
    'so',
    'and so',
    'and then',
    'and finally',
    'And then I check:',
    'or rather',
    'or wait,',
    'and not',
    'Next:',
    '.',
    '-',
    '',
    'andante',
    r'\implies',
    r'\\ \text{so}',
    r'\\ &=',
)


@pytest.mark.parametrize(
    ('text', 'contents'),
    [
        ('no box', []),
        (r'\boxed{1} and \fbox{2}', ['1', '2']),
        (r'\boxed{\frac{1}{\sqrt{2}}}', [r'\frac{1}{\sqrt{2}}']),
        (r'\boxed{\left\{1,2\right.}', [r'\left\{1,2\right.']),
        (r'\boxed {7}, \boxed 8, \boxed9, \boxed\pi.', ['7', '8', '9', r'\pi']),
        (r'\boxed{\boxed{3}+1}', [r'\boxed{3}+1']),
        (r'\boxed{5} then \boxed{6', ['5']),
        (r'\boxed{6 and \boxed{5}', ['5']),
        (r'\boxedx{3}', []),
        (r'\boxed answer', []),
    ],
)
def test_boxes_are_found_with_nested_braces(text: str, contents: list[str]):
    assert boxed(text) == contents


@pytest.mark.parametrize(
    ('generation', 'answer'),
    [
        ('The answer is 5.', None),
        (r'\boxed{}', None),
        (r'\boxed{ \, }', None),
        (r'First \boxed{4}. Then the answer is \boxed{7}.', '7'),
        (r'$\boxed{7}$, to be put into \boxed{}.', '7'),
        (r'$x = \boxed{1}$ and $x = \boxed{2}$.', '1, 2'),
        (r'$\boxed{-1}$, $\boxed{2}$ or $\boxed{3}$', '-1, 2, 3'),
        (r'The area is $\boxed{30}$. Twice that area is $\boxed{60}$.', '60'),
        (r'So $x = \boxed{1}$. Wait, that is wrong: $x = \boxed{2}$.', '2'),
        (r'$x = \boxed{1}$, hence $x + 1 = \boxed{2}$', '2'),
        (r'$\boxed{0.5} = \boxed{\frac12}$', r'\frac12'),
        (r'$\boxed{\boxed{\fbox{(1,2)}}}$', '(1,2)'),
        (r'$\boxed{x = \boxed{3}}$', 'x = {3}'),
        (r'$\boxed{\boxed{}}$', None),
        (r'$\boxed{\boxed{1} + \boxed{2}}$', '{1} + {2}'),
        (r'\boxed{' * 5000 + '7' + '}' * 5000, '7'),
        (r'We get $\boxed{x+1}$ or $\boxed{1+x}$.', '1+x'),
        (r'$\boxed{(1,0)}$ and $\boxed{(0,1)}$ (either point is correct)', '(0,1)'),
    ],
)
def test_the_answer_is_the_last_box_or_the_final_boxes(generation: str, answer: str | None):
    assert answer_of(generation) == answer


def test_a_solution_without_a_box_has_no_gold():
    with pytest.raises(ValueError, match='no \\\\boxed'):
        gold_of('1 + 1?', 'It is 2.', None)


def test_the_fix_table_overrides_the_gold():
    assert gold_of('1 + 1?', r'It is \boxed{2}.', {'1 + 1?': '3'}) == '3'
    assert gold_of('1 + 1?', r'It is \boxed{2}.', {'2 + 2?': '3'}) == '2'


@pytest.mark.parametrize('words', CONNECTIVES)
def test_the_last_box_counts_if_other_words_come_before_it(words: str):
    assert answer_of(rf'So $x = \boxed{{4}}$ {words} $x = \boxed{{5}}$.') == '5'
    assert answer_of(rf'So $\boxed{{4}}$ {words} $\boxed{{5}}$.') == '5'


@pytest.mark.parametrize(
    'generation',
    [
        r'$\boxed{5}$ and $\boxed{6}$',
        r'$\boxed{5}$, and $\boxed{6}$.',
        r'\(\boxed{5}\) or \(\boxed{6}\)',
        '$\\boxed{5}$\n\nand\n\n$\\boxed{6}$',
        '**$\\boxed{5}$** and **$\\boxed{6}$**',
        r'\[\boxed{5} \quad\text{or}\quad \boxed{6}\]',
        r'$x=\boxed{5},\ y=\boxed{6}$',
        r'$f(1)=\boxed{5}$ and $f(2) = \boxed{6}$',
        r'$\angle A=\boxed{5}^\circ$ and $\theta_{1} = \boxed{6}^{\circ}$',
        r'$\boxed{5} & \boxed{6}$',
        r'$\boxed{5} \\[1ex] \boxed{6}$',
        r'\begin{align*}x_1 &= \boxed{5} \\ x_{2} &= \boxed{6}\end{align*}',
        r'\begin{align*}b+c-a &= 8-3 = \boxed{5}, \\ a+c-b &= 9-3 = \boxed{6}.\end{align*}',
        r'First $\boxed{1}$ or $\boxed{2}$. No: $\boxed{5}$ or $\boxed{6}$.',
        r'$\boxed{5}$, $\boxed{6}$ and $\boxed{6.0}$',
    ],
)
def test_boxes_are_one_answer_if_only_a_joint_stands_between(generation: str):
    with closing(Comparer()) as comparer:
        assert comparer.equal(answer_of(generation), '5, 6')


@pytest.mark.parametrize(
    ('generation', 'answer'),
    [
        (r'\begin{align*}x &= \boxed{\sqrt{12}} \\ &= \boxed{2\sqrt3}\end{align*}', r'2\sqrt3'),
        (r'$a=\boxed{3}$, $b=\boxed{4}$, so $a+b=\boxed{7}$', '7'),
        (r'$a=\boxed{3}, b=\boxed{4}, a+b=\boxed{7}$', '7'),
        ('Thus $x=\\boxed{4}$.\n\nNote that I was wrong: $x = \\boxed{5}$.', '5'),
        (r'\boxed{1}' + ' and or,' * 100_000 + r'\boxed{2}', '2'),
    ],
)
def test_a_calculation_that_goes_on_is_no_list(generation: str, answer: str):
    assert answer_of(generation) == answer


@pytest.mark.parametrize(
    ('solution', 'gold'),
    [
        (r'If $r=1$ then $b = \boxed{-3}$. If $r=-1$, then $b=\boxed{3}$.', '-3, 3'),
        (r'This angle is $\boxed{30}$. Another angle is $\boxed{60}$.', '30, 60'),
        ('Thus $d=\\boxed{-3}$.\n\nNote: $\\boxed{3}$ is accepted too.', '-3'),
        (r'So $x = \boxed{1}$. Alternatively, $x = \boxed{1}$.', '1'),
        (r'The area is $\boxed{30}$. Twice that area is $\boxed{60}$.', '60'),
    ],
)
def test_a_solution_gives_the_values_of_an_unknown_one_by_one(solution: str, gold: str):
    assert gold_of('What is it?', solution, None) == gold


# Three solutions of MATH word for word would be wrong as generations: two give values one by one, one has a note.
SOLUTIONS_WITH_ANOTHER_RULE = {'-3', '-10879, 10879', r'30^\circ, 45^\circ, 105^\circ'}


@pytest.mark.parametrize('with_table', [False, True])
def test_every_gold_solution_is_right(
    rows: list[dict[str, str]], fixes: dict[str, str], comparer: Comparer, with_table: bool
):
    pairs = [
        (answer_of(row['solution']), gold_of(row['problem'], row['solution'], fixes if with_table else None))
        for row in rows
    ]
    outcomes = comparer.equal_many(pairs)
    wrong = [gold for (_, gold), accepted in zip(pairs, outcomes, strict=True) if not accepted]
    assert len(outcomes) == 5000
    assert sorted(wrong) == sorted(SOLUTIONS_WITH_ANOTHER_RULE)


PLACEHOLDERS = (
    'answer',
    'ANSWER',
    'your answer',
    'the final answer',
    'insert your answer here',
    'numerical answer',
    'result',
    'your_answer',
    '...',
    '\u2026',
    r'\ldots',
    '?',
    '___',
    r'\_\_\_',
    r'\square',
    r'\underline{\hspace{1cm}}',
    ' ',
    r'\text{answer}',
    r'\mathrm{Your answer}',
    r'\textbf{answer}',
    r'\texttt{answer}',
    '{answer}',
    '[answer]',
    '<answer>',
    '"answer"',
    "``answer''",
    '(answer)',
    '$answer$',
    r'\langle answer \rangle',
    r'\text{[answer].}',
    r'\boxed{answer}',
    r'\,answer\,',
    '\u201canswer\u201d',
)


@pytest.mark.parametrize('words', PLACEHOLDERS)
def test_a_box_that_repeats_the_instruction_holds_no_answer(words: str):
    echo = rf'The final answer is: $\boxed{{{words}}}$'
    assert answer_of(echo) is None
    assert answer_of(rf'{echo}. It is $\boxed{{5}}$.') == '5'
    assert answer_of(rf'It is $\boxed{{5}}$. {echo}') == '5'
    assert answer_of(rf'It is $\boxed{{5}}$ or $\boxed{{6}}$. {echo}') == '5, 6'
    assert answer_of(rf'$\boxed{{4}}$ or $\boxed{{{words}}}$ or $\boxed{{5}}$') == '5'


@pytest.mark.parametrize(
    'content',
    [
        'answer = 5',
        r'\text{answer: }5',
        r'\frac{answer}{2}',
        r'\text{no solution}',
        r'\text{none}',
        '0',
        'a',
        '-x',
        r'\emptyset',
        '[0]',
        r'\text{no real solutions}',
    ],
)
def test_words_and_signs_that_are_answers_stay(content: str):
    assert answer_of(rf'The final answer is: $\boxed{{{content}}}$') == content


def test_no_gold_passes_for_a_placeholder(rows: list[dict[str, str]]):
    golds = {gold_of(row['problem'], row['solution'], None) for row in rows}
    assert [gold for gold in golds if answer_of(rf'\boxed{{{gold}}}') is None] == []
