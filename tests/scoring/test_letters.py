"""Letters chosen in generations."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import FIXTURES

from llmfoundry_gauntlet.scoring.letters import reference_letter, tolerant_letter

CITIES = ('Paris', 'London', 'Rome', 'Bonn')
TEN = tuple(f'the {place}th one' for place in range(10))
WALKS = ('A man walks.', 'A dog runs.', 'I think so.', 'None of these')
TWICE = ('Paris', 'Rome', 'Rome', 'Bonn')
GENES = ('E. coli', 'B. subtilis', 'B cells', 'vitamin C')
SIGNS = ('V', 'W', 'X', 'A')
BOTH = ('Rome', 'Bonn', 'A and B', 'None of the above')
POINTS = ('(1, 2)', '(2, 1)', '$\\frac{1}{2}$', 'f(x)')

# form, options, what is read
READ = [
    ('The best answer is B', CITIES, 'B'),
    ('The best answer is B.', CITIES, 'B'),
    ('the best answer is b', CITIES, 'B'),
    ('**The best answer is B.**', CITIES, 'B'),
    ('The best answer is $\\boxed{\\text{B}}$.', CITIES, 'B'),
    ('The best answer is:\n\nA', CITIES, 'A'),
    ('The best answer is (A)', CITIES, 'A'),
    ('The best answer is [A].', CITIES, 'A'),
    ('The best answer is the letter D.', CITIES, 'D'),
    ('The best answer is therefore (D).', CITIES, 'D'),
    ('The best answer is A) Paris', CITIES, 'A'),
    ('The best answer is A - Paris', CITIES, 'A'),
    ('The best answer is (B), since (A) and (C) contradict it.', CITIES, 'B'),
    ('The best answer is C, not D.', CITIES, 'C'),
    ('The best answer is A. The best answer is D', CITIES, 'D'),
    ('The best answer is B.\n\nQuestion: what now?\nAnswer: C', CITIES, 'B'),
    ('The best answer is \\boxed{\\text{Rome}}', CITIES, 'C'),
    ('The best answer is Rome, because it is old.', CITIES, 'C'),
    ('The best answer is Rome (C).', CITIES, 'C'),
    ('The best answer is Rome (C).', TWICE, 'C'),
    ('The best answer is A man walks.', WALKS, 'A'),
    ('The best answer is E. coli', GENES, 'A'),
    ('The best answer is V', SIGNS, 'A'),
    ('The best answer is A', SIGNS, 'A'),  # a letter first, then a text
    ('The best answer is \\boxed{f(x)}', POINTS, 'D'),
    ('The best answer is \\(\\frac{1}{2}\\)', POINTS, 'C'),
    ('The best answer is A and B', BOTH, 'C'),
    ('The best answer is I.', TEN, 'I'),
    ('Best answer: H', TEN, 'H'),
    ('The best answer among the options is G', TEN, 'G'),
    ('B', CITIES, 'B'),
    ('B.', CITIES, 'B'),
    (' (B)\n', CITIES, 'B'),
    ('A. Paris', CITIES, 'A'),
    ('A: Paris.', CITIES, 'A'),
    ('C because it is old', CITIES, 'C'),
    ('C\n\nRome is old.', CITIES, 'C'),
    ('Rome is old.\n\n**C**', CITIES, 'C'),
    ('The answer is A. Sorry, the answer is C.', CITIES, 'C'),
    ('{"answer": "B"}', CITIES, 'B'),
    ('Therefore, (B) is correct.', CITIES, 'B'),
    ("I'd go with C.", CITIES, 'C'),
    ('The best answer is 5', ('6', '5', '.5'), 'B'),
    ('The best answer is .5', ('6', '5', '.5'), 'C'),
    ('The best answer is no.', ('Yes', 'No'), 'B'),
    ('The best answer is 5. It is so', ('5', '5. It is so'), 'B'),
    ('The best answer is one\n and two', ('one or two', 'one and two'), 'B'),
]

UNREAD = [
    ('The best answer is 5.3', ('6', '5', '.5')),
    ('The best answer is', ('Yes', '')),
    ('The best answer is e.g. B', TEN),
    ('', CITIES),
    ('The best answer is', CITIES),
    ('The best answer is A or B', CITIES),
    ('The best answer is A, or possibly B.', CITIES),
    ('The best answer is B, D', CITIES),
    ('The best answer is A and B', CITIES),
    ('The best answer is (A) Paris and (B) London', CITIES),
    ('The best answer is B. Or C.', CITIES),
    ('The best answer is none of the above', CITIES),
    ('The best answer is not A', CITIES),
    ('The best answer is F', CITIES),
    ('The best answer is E. coli', CITIES),
    ("The best answer is I'm not sure", TEN),
    ('The best answer is A man', CITIES),
    ('The best answer is "A man"', CITIES),
    ('The best answer is e.g. B', CITIES),
    ('The best answer is C++', CITIES),
    ('The best answer is C = 5', CITIES),
    ('\\boxed{(-a,0)}', CITIES),
    ('The best answer is D-glucose', CITIES),
    ('The best answer is \u0412', CITIES),  # Cyrillic
    ('The best answer is [the_answer_letter].', CITIES),
    ('The best answer is a', SIGNS),  # an option's text and another's letter
    ('The best answer is Rome', TWICE),
    ('The best answer is Rome (B)', CITIES),
    ('A man walks into a bar.', CITIES),
    ('A: The capital of Italy', CITIES),
    ('A) Paris\nB) London\nC) Rome\nD) Bonn', CITIES),
    ('If B is the correct answer, then C', CITIES),
    ('The answer is B. The answer is C or D.', CITIES),
]

# forms that name the third option, the first, and none: one for each word that a statement may have, and as real
# models answer MMLU-Pro
THIRD = (
    *(
        'My final choice is C',
        'It has to be said that the answer has to be C',
        'Answer - C',
        'The final option \u2014 C',
    ),
    *('I will pick C for that', 'I would go for C', 'I select C today', 'The best answer is __C__'),
    *('The best answer is <b>C</b>', '<strong>C</strong>', 'The best answer to this question is C'),
    *('The best answer for a tourist is C', 'The best answer from the list is C', 'The best answer of these four is C'),
    *('The best answer choice is C', 'The correct answer option is C', 'The answer must be C'),
    *('The answer should be C', 'The correct option is C', 'We see that the right choice is C'),
    *('All told, the best option would be C', 'I would choose C for that', "I'll choose C today", 'I choose C today'),
    *('It was old, hence $\\boxed{C}$ it is', 'Is it A? <answer>C</answer> it is'),
    *('It is old.\n\\[ \\boxed{\\textbf{(C)}} \\]', 'Rome is old. Option C is correct for that'),
    *('Rome is old, so C is the best choice', 'We know that C is the right option'),
    *('I believe choice C is right there', 'Thus answer C is best here', 'Therefore C is the correct answer'),
    *('The best answer is thus C', 'The best answer is most likely C', 'The best answer is choice C'),
    *('The answer is answer C', 'The best answer is (C) as (A) and (B) are wrong'),
    *('The best answer is (C) due to (A) and (B)', 'The best answer is (C). Both (A) and (B) are wrong'),
    *('The best answer is (C), while (A) and (B) are wrong', 'The best answer is (C)\nHere (A) and (B) are wrong'),
    *('The best answer is Rome. It is old', 'The best answer is "Rome" as it is old', '(C), because it is old'),
    *('The correct answer is (C): Rome, as it is old', 'Let us see.\n\nThe answer is (C). Rome is old.'),
    *('The best answer is \\[C\\]', 'The best answer is $\\mathbf{C}$', 'C - Rome', 'C, since it is old'),
    *('Rome, since it is old', 'The answer is C.\n\nQuestion: what now?\nAnswer:'),
    *('The answer is C. The answer is [the_answer_letter]', 'The best answer is Rome\nIt is old'),
)
FIRST = (
    *('The best answer is A since it is so', 'The best answer is A (Paris)', 'The best answer is A \u2013 Paris'),
    *('The best answer is a!', 'The best answer is option a by far', 'a) Paris'),
)
NO_OPTION = (
    *('The answer is C. No, the answer is unclear', 'c: Bonn', 'I know that C is correct here'),
    *('It is old.\nC\nIt is so.', 'C\n\nIt is A:\nA', '(A) or (B)', 'The best answer is B & C'),
    *('The best answer is B/C', 'The best answer is (B) and C, or D', 'The answer is "None of the above."'),
    *('The best answer is C#', 'The best answer is C^2', 'The best answer is C\\times 2', 'The best answer is D.C.'),
    *('The best answer is C > D', 'The best answer is B < D', 'The best answer is A & B'),
    *('The best answer is option B and choice C', 'The best answer is option B and option C'),
    *('The best answer is "B" and "C"', 'The best answer is (B) London or (C)', 'The best answer is B and C.'),
)
WORDS = [*((form, 'C') for form in THIRD), *((form, 'A') for form in FIRST), *((form, None) for form in NO_OPTION)]

STATEMENTS = (
    *('The best answer is {}', 'The best answer is {}.', 'The best answer is ({})', 'the best answer is: **{}**'),
    *('The best answer is\n{}', 'The best answer is option {}', 'The best answer is $\\boxed{{{}}}$', '{}', '({})'),
    *('The best answer is {}, because of it', 'The best answer is {}\n\nA man walks. I think.', 'Answer: {}'),
    *('First A man, then I. The best answer is {}', 'The best answer is {}: so it is', 'The answer is {}!', '{}) so'),
)


@pytest.mark.parametrize(('form', 'options', 'expected'), READ)
def test_a_chosen_letter_is_extracted(form, options, expected):
    assert tolerant_letter(form, options) == expected


@pytest.mark.parametrize(('form', 'options'), UNREAD)
def test_no_letter_is_extracted_from_none_or_several_choices(form, options):
    assert tolerant_letter(form, options) is None


@pytest.mark.parametrize(('form', 'expected'), WORDS)
def test_usual_words_are_understood(form, expected):
    assert tolerant_letter(form, CITIES) == expected


@pytest.mark.parametrize('form', STATEMENTS)
def test_letters_that_are_words_are_extracted_too_but_none_beyond_the_options(form):
    assert [tolerant_letter(form.format(letter), TEN) for letter in 'ABCDEFGHIJ'] == list('ABCDEFGHIJ')
    assert [tolerant_letter(form.format(letter), CITIES) for letter in 'EFGHIJXZ'] == [None] * 8


def test_reference_extraction_equals_the_recording():
    recorded = json.loads((FIXTURES / 'score' / 'functions.json').read_text(encoding='utf-8'))['letters']
    assert len(recorded) >= 500
    assert [reference_letter(generation) for generation, _ in recorded] == [taken for _, taken in recorded]


PIECES = st.sampled_from(
    ['The best answer is', ' ', '\n', ':', '(', ')', '**', '\\boxed{', '}', 'A', 'B', 'F', 'I', 'or', 'Rome', '"', '$']
)


@given(st.one_of(st.text(), st.lists(PIECES).map(''.join)), st.sampled_from([CITIES, TEN, TWICE, SIGNS]))
def test_extracted_letters_are_options(generation, options):
    assert tolerant_letter(generation, options) in {None, *'ABCDEFGHIJ'[: len(options)]}


@pytest.mark.parametrize(
    'piece', ['-', '(', '"', '{', ' ', '\n', 'A or ', 'answer ', 'therefore ', 'the best answer is ', '\\text{']
)
def test_long_generations_are_extracted_in_time(piece):
    start = time.process_time()
    tolerant_letter('The best answer is ' + piece * 5000, CITIES)  # 10 ms; hours where an expression tries all ways
    assert time.process_time() - start < 20
