"""Letters chosen in generations; the last column was recorded from lm-eval 0.4.13 (`__postprocess_pred`)."""

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
NUMBERS = ('5', '-5', '$5.3$', '15')
BOTH = ('Rome', 'Bonn', 'A and B', 'None of the above')
POINTS = ('(1, 2)', '(2, 1)', '$\\frac{1}{2}$', 'f(x)')

# form, options, what is read, what the reference takes
READ = [
    ('The best answer is B', CITIES, 'B', 'B'),
    ('The best answer is B.', CITIES, 'B', 'B'),
    ('the best answer is b', CITIES, 'B', 'B'),
    ('THE BEST ANSWER IS B', CITIES, 'B', 'B'),
    ('The best answer is A.', CITIES, 'A', 'A'),
    ('The best answer is **B**', CITIES, 'B', 'B'),
    ('**The best answer is** B', CITIES, 'B', 'THE'),
    ('**The best answer is B.**', CITIES, 'B', 'B'),
    ('The best answer is \\boxed{B}', CITIES, 'B', 'BOXEDB'),
    ('The best answer is $\\boxed{\\text{B}}$.', CITIES, 'B', 'BOXEDTEXTB'),
    ('The best answer is: A', CITIES, 'A', 'THE'),
    ('The best answer is:\n\nA', CITIES, 'A', 'THE'),
    ('The best answer is\nA', CITIES, 'A', 'THE'),
    ('The best answer is  C', CITIES, 'C', ''),
    ('The best answer is\u00a0C', CITIES, 'C', 'THE'),
    ('The best answer is (A)', CITIES, 'A', 'A'),
    ('The best answer is [A].', CITIES, 'A', 'A'),
    ('The best answer is "A".', CITIES, 'A', 'A'),
    ('The best answer is \u2018A\u2019', CITIES, 'A', 'A'),
    ('The best answer is \uff22', CITIES, 'B', ''),
    ('The best answer is option A', CITIES, 'A', 'OPTION'),
    ('The best answer is the letter D.', CITIES, 'D', 'THE'),
    ('The best answer is therefore (D).', CITIES, 'D', 'THEREFORE'),
    ('The best answer is A) Paris', CITIES, 'A', 'A'),
    ('The best answer is B) Rome', CITIES, 'B', 'B'),  # by letter
    ('The best answer is A - Paris', CITIES, 'A', 'A'),
    ('The best answer is A because B is wrong.', CITIES, 'A', 'A'),
    ('The best answer is (B), since (A) and (C) contradict it.', CITIES, 'B', 'B'),
    ('The best answer is C, not D.', CITIES, 'C', 'C'),
    ('The best answer is B and not C', CITIES, 'B', 'B'),
    ('The best answer is D\n\n- A is wrong\n- B is wrong', CITIES, 'D', 'D'),
    ('The best answer is A. The best answer is D', CITIES, 'D', 'D'),
    ('The best answer is B.\n\nQuestion: what now?\nAnswer: C', CITIES, 'B', 'B'),
    ('The answer is A. No: the best answer is B', CITIES, 'B', 'B'),
    ('The best answer is Rome', CITIES, 'C', 'ROME'),
    ('The best answer is "Rome."', CITIES, 'C', 'ROME'),
    ('The best answer is \\boxed{\\text{Rome}}', CITIES, 'C', 'BOXEDTEXTROME'),
    ('The best answer is Rome, because it is old.', CITIES, 'C', 'ROME'),
    ('The best answer is Rome (C).', CITIES, 'C', 'ROME'),
    ('The best answer is Rome (C).', TWICE, 'C', 'ROME'),
    ('The best answer is A man walks.', WALKS, 'A', 'A'),
    ('The best answer is: I think so', WALKS, 'C', 'THE'),
    ('The best answer is None of these.', WALKS, 'D', 'NONE'),
    ('The best answer is E. coli', GENES, 'A', 'E'),
    ('The best answer is B. subtilis.', GENES, 'B', 'B'),
    ('The best answer is B cells', GENES, 'C', 'B'),
    ('The best answer is V', SIGNS, 'A', 'V'),
    ('The best answer is A', SIGNS, 'A', 'A'),  # a letter first, then a text
    ('The best answer is -5.', NUMBERS, 'B', '5'),
    ('The best answer is 5.3', NUMBERS, 'C', '53'),
    ('The best answer is (2, 1).', POINTS, 'B', '2'),
    ('The best answer is \\boxed{f(x)}', POINTS, 'D', 'BOXEDFX'),
    ('The best answer is \\(\\frac{1}{2}\\)', POINTS, 'C', 'FRAC12'),
    ('The best answer is A and B', BOTH, 'C', 'A'),
    ('The best answer is I.', TEN, 'I', 'I'),
    ('The best answer would be J', TEN, 'J', 'THE BEST ANSWER WOULD BE J'),
    ('Best answer: H', TEN, 'H', 'BEST ANSWER: H'),
    ('The best answer among the options is G', TEN, 'G', 'THE BEST ANSWER AMONG THE OPTIONS IS G'),
    ('B', CITIES, 'B', 'B'),
    ('b', CITIES, 'B', 'B'),
    ('B.', CITIES, 'B', 'B.'),
    (' (B)\n', CITIES, 'B', ' (B)\n'),
    ('$\\boxed{\\text{B}}$', CITIES, 'B', '$\\BOXED{\\TEXT{B}}$'),
    ('A) Paris', CITIES, 'A', 'A) PARIS'),
    ('A. Paris', CITIES, 'A', 'A. PARIS'),
    ('A: Paris.', CITIES, 'A', 'A: PARIS.'),
    ('Rome', CITIES, 'C', 'ROME'),
    ('Rome (C).', CITIES, 'C', 'ROME (C).'),
    ('Option C', CITIES, 'C', 'OPTION C'),
    ('C because it is old', CITIES, 'C', 'C BECAUSE IT IS OLD'),
    ('C\n\nRome is old.', CITIES, 'C', 'C\n\nROME IS OLD.'),
    ('Rome is old.\n\n**C**', CITIES, 'C', 'ROME IS OLD.\n\n**C**'),
    ('The correct answer is D', CITIES, 'D', 'THE CORRECT ANSWER IS D'),
    ('**Answer:** C', CITIES, 'C', '**ANSWER:** C'),
    ('Final answer: \\(\\boxed{D}\\)', CITIES, 'D', 'FINAL ANSWER: \\(\\BOXED{D}\\)'),
    ('The answer is A. Sorry, the answer is C.', CITIES, 'C', 'THE ANSWER IS A. SORRY, THE ANSWER IS C.'),
    ('{"answer": "B"}', CITIES, 'B', '{"ANSWER": "B"}'),
    ('<answer>B</answer>', CITIES, 'B', '<ANSWER>B</ANSWER>'),
    ('Therefore, (B) is correct.', CITIES, 'B', 'THEREFORE, (B) IS CORRECT.'),
    ('I think B is the best option.', CITIES, 'B', 'I THINK B IS THE BEST OPTION.'),
    ("I'd go with C.", CITIES, 'C', "I'D GO WITH C."),
    ('The best answer is B.\nThe best answer is [the_answer_letter]', CITIES, 'B', 'THEANSWERLETTER'),
    ('The best answer is (the_answer_letter).\nThe answer is C', CITIES, 'C', 'THEANSWERLETTER'),
]

UNREAD = [
    ('', CITIES, ''),
    (' \n', CITIES, ' \n'),
    ('The best answer is', CITIES, 'THE'),
    ('The best answer is .', CITIES, ''),
    ('The best answer is A or B', CITIES, 'A'),
    ('The best answer is A, or possibly B.', CITIES, 'A'),
    ('The best answer is A/B', CITIES, 'AB'),
    ('The best answer is B, D', CITIES, 'B'),
    ('The best answer is A and B', CITIES, 'A'),
    ('The best answer is (A) Paris and (B) London', CITIES, 'A'),
    ('The best answer is both A and B', CITIES, 'BOTH'),
    ('The best answer is A-C', CITIES, 'AC'),
    ('The best answer is AB', CITIES, 'AB'),
    ('The best answer is B. Or C.', CITIES, 'B'),
    ('The best answer is one of A, B, C or D', CITIES, 'ONE'),
    ('The best answer is none of the above', CITIES, 'NONE'),
    ('The best answer is not A', CITIES, 'NOT'),
    ("The best answer isn't A", CITIES, 'THE'),
    ('The best answer is F', CITIES, 'F'),
    ('The best answer is E. coli', CITIES, 'E'),
    ('The best answer is I', CITIES, 'I'),
    ('The best answer is I think B', TEN, 'I'),
    ("The best answer is I'm not sure", TEN, 'IM'),
    ('The best answer is A man', CITIES, 'A'),
    ('The best answer is a man', CITIES, 'A'),
    ('The best answer is "A man"', CITIES, 'A'),
    ('The best answer is e.g. B', CITIES, 'EG'),
    ('The best answer is B12', CITIES, 'B12'),
    ('The best answer is C++', CITIES, 'C'),
    ('The best answer is C = 5', CITIES, 'C'),
    ('The best answer is b - 1', CITIES, 'B'),
    ('\\boxed{(-a,0)}', CITIES, '\\BOXED{(-A,0)}'),
    ("The best answer is B's", CITIES, 'BS'),
    ('The best answer is D-glucose', CITIES, 'DGLUCOSE'),
    ('The best answer is \u0412', CITIES, ''),  # Cyrillic
    ('The best answer is (the_answer_letter)', CITIES, 'THEANSWERLETTER'),
    ('The best answer is [the_answer_letter].', CITIES, 'THEANSWERLETTER'),
    ('The best answer is answer_letter', CITIES, 'ANSWERLETTER'),
    ("The best answer is (answer_letter) where it is one of 'A', 'B'", CITIES, 'ANSWERLETTER'),
    ('The best answer is a', SIGNS, 'A'),  # an option's text and another's letter
    ('The best answer is Rome', TWICE, 'ROME'),
    ('The best answer is Rome (B)', CITIES, 'ROME'),
    ('The best answer is Rome and Paris', CITIES, 'ROME'),
    ('The best answer is the second', CITIES, 'THE'),
    ('The best answer is B. No, the best answer is unclear', CITIES, 'UNCLEAR'),
    ('The answer is B. Still, the best answer is unclear', CITIES, 'UNCLEAR'),
    ('I cannot say what the best answer is. B would be a guess', CITIES, 'I'),
    ('A man walks into a bar.', CITIES, 'A MAN WALKS INTO A BAR.'),
    ('I think the question is unclear.', TEN, 'I THINK THE QUESTION IS UNCLEAR.'),
    ('A: The capital of Italy', CITIES, 'A: THE CAPITAL OF ITALY'),
    ('A or B', CITIES, 'A OR B'),
    ('A, B, C, D', CITIES, 'A, B, C, D'),
    ('ABCD', CITIES, 'ABCD'),
    ('A) Paris\nB) London\nC) Rome\nD) Bonn', CITIES, 'A) PARIS\nB) LONDON\nC) ROME\nD) BONN'),
    ('E', CITIES, 'E'),
    ('5', CITIES, '5'),
    ('Vitamin C is the best option', CITIES, 'VITAMIN C IS THE BEST OPTION'),
    ('If B is the correct answer, then C', CITIES, 'IF B IS THE CORRECT ANSWER, THEN C'),
    ('Option A is wrong.', CITIES, 'OPTION A IS WRONG.'),
    ('The answer is not A', CITIES, 'THE ANSWER IS NOT A'),
    ('The answer is B. The answer is C or D.', CITIES, 'THE ANSWER IS B. THE ANSWER IS C OR D.'),
    ("I'm sorry, but I cannot answer that.", TEN, "I'M SORRY, BUT I CANNOT ANSWER THAT."),
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

OPTIONS = [  # a generation, options, what is read
    ('The best answer is 5', ('6', '5', '.5'), 'B'),
    ('The best answer is .5', ('6', '5', '.5'), 'C'),
    ('The best answer is 5.3', ('6', '5', '.5'), None),
    ('The best answer is no.', ('Yes', 'No'), 'B'),
    ('The best answer is', ('Yes', ''), None),
    ('The best answer is 5. It is so', ('5', '5. It is so'), 'B'),
    ('The best answer is one\n and two', ('one or two', 'one and two'), 'B'),
    ('The best answer is e.g. B', TEN, None),
]

STATEMENTS = (
    *('The best answer is {}', 'The best answer is {}.', 'The best answer is ({})', 'the best answer is: **{}**'),
    *('The best answer is\n{}', 'The best answer is option {}', 'The best answer is $\\boxed{{{}}}$', '{}', '({})'),
    *('The best answer is {}, because of it', 'The best answer is {}\n\nA man walks. I think.', 'Answer: {}'),
    *('First A man, then I. The best answer is {}', 'The best answer is {}: so it is', 'The answer is {}!', '{}) so'),
)


@pytest.mark.parametrize(('form', 'options', 'expected', 'reference'), READ)
def test_a_chosen_letter_is_extracted(form, options, expected, reference):
    assert tolerant_letter(form, options) == expected
    assert reference_letter(form) == reference


@pytest.mark.parametrize(('form', 'options', 'reference'), UNREAD)
def test_no_letter_is_extracted_from_none_or_several_choices(form, options, reference):
    assert tolerant_letter(form, options) is None
    assert reference_letter(form) == reference


@pytest.mark.parametrize(('form', 'expected'), WORDS)
def test_usual_words_are_understood(form, expected):
    assert tolerant_letter(form, CITIES) == expected


@pytest.mark.parametrize(('form', 'options', 'expected'), OPTIONS)
def test_unusual_options_are_recognized(form, options, expected):
    assert tolerant_letter(form, options) == expected


@pytest.mark.parametrize('form', STATEMENTS)
def test_letters_that_are_words_are_extracted_too(form):
    assert [tolerant_letter(form.format(letter), TEN) for letter in 'ABCDEFGHIJ'] == list('ABCDEFGHIJ')


@pytest.mark.parametrize('form', STATEMENTS)
def test_letters_beyond_the_options_are_ignored(form):
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
