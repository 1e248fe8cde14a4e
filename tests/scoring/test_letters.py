"""Letters chosen in generations."""

import json
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import FIXTURES, ROOT

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
    ('D: 11\n\nThe best answer is indeed D: 11.', CITIES, 'D'),
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
    ('A: Pisa\nB: Lyon\nC: Nice\nD: Oslo\n\nC', CITIES, 'C'),
    ('C: Rome\n\nExplanation:\nA: Paris is in France.\nB: London is in England.', CITIES, 'C'),
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
    ('The best answer is J. P. Taylor, 1945', TEN),
    ('The best answer is A. J. P. Taylor.', TEN),
    ('The best answer is \u0412', CITIES),  # Cyrillic
    ('The best answer is [the_answer_letter].', CITIES),
    ('The best answer is a', SIGNS),  # an option's text and another's letter
    ('The best answer is indeed [A] and [B].', CITIES),
    ('The best answer is Rome', TWICE),
    ('The best answer is Rome (B)', CITIES),
    ('A man walks into a bar.', CITIES),
    ('A: The capital of Italy', CITIES),
    ('A) Paris\nB) London\nC) Rome\nD) Bonn', CITIES),
    ('A: Paris\nB: Lyon\nC: Nice\nD: Oslo', CITIES),  # a list with other texts
    ('A: Pisa\nB: Lyon\nC: Nice\nD: Bonn', CITIES),
    ('A: Paris\nB: London\nC: Rome\nD:', CITIES),  # cut off
    ('A: Pisa\nB: Lyon\nC', CITIES),
    ('If B is the correct answer, then C', CITIES),
    ('The answer is B. The answer is C or D.', CITIES),
]

# forms that name the third option, the first, and none: one for each word that a statement may have, and as real
# models answer MMLU-Pro
THIRD = (
    # other words than "the best answer is"
    'My final choice is C',
    'It has to be said that the answer has to be C',
    'Answer - C',
    'The final option \u2014 C',
    'I will pick C for that',
    'I would go for C',
    'I select C today',
    # marks around the letter
    'The best answer is __C__',
    'The best answer is <b>C</b>',
    '<strong>C</strong>',
    # words between "best answer" and "is"
    'The best answer to this question is C',
    'The best answer for a tourist is C',
    'The best answer from the list is C',
    'The best answer of these four is C',
    'The best answer choice is C',
    'The correct answer option is C',
    'The answer must be C',
    'The answer should be C',
    'The correct option is C',
    'We see that the right choice is C',
    'All told, the best option would be C',
    'I would choose C for that',
    "I'll choose C today",
    'I choose C today',
    # boxes and tags
    'It was old, hence $\\boxed{C}$ it is',
    'Is it A? <answer>C</answer> it is',
    'It is old.\n\\[ \\boxed{\\textbf{(C)}} \\]',
    # the letter before the verb
    'Rome is old. Option C is correct for that',
    'Rome is old, so C is the best choice',
    'We know that C is the right option',
    'I believe choice C is right there',
    'Thus answer C is best here',
    'Therefore C is the correct answer',
    # words before the letter
    'The best answer is thus C',
    'The best answer is most likely C',
    'The best answer is choice C',
    'The answer is answer C',
    # other letters after it
    'The best answer is (C) as (A) and (B) are wrong',
    'The best answer is (C) due to (A) and (B)',
    'The best answer is (C). Both (A) and (B) are wrong',
    'The best answer is (C), while (A) and (B) are wrong',
    'The best answer is (C)\nHere (A) and (B) are wrong',
    # texts of options, and reasons
    'The best answer is Rome. It is old',
    'The best answer is "Rome" as it is old',
    '(C), because it is old',
    'The correct answer is (C): Rome, as it is old',
    'Let us see.\n\nThe answer is (C). Rome is old.',
    'The best answer is \\[C\\]',
    'The best answer is $\\mathbf{C}$',
    'C - Rome',
    'C, since it is old',
    'Rome, since it is old',
    # more text after the answer
    'The answer is C.\n\nQuestion: what now?\nAnswer:',
    'The answer is C. The answer is [the_answer_letter]',
    'The best answer is Rome\nIt is old',
)
FIRST = (
    'The best answer is A since it is so',
    'The best answer is A (Paris)',
    'The best answer is A \u2013 Paris',
    'The best answer is a!',
    'The best answer is option a by far',
    'a) Paris',
)
NO_OPTION = (
    # no statement, or one that is taken back
    'The answer is C. No, the answer is unclear',
    'c: Bonn',
    'I know that C is correct here',
    'It is old.\nC\nIt is so.',
    'C\n\nIt is A:\nA',
    # several letters
    '(A) or (B)',
    'The best answer is B & C',
    'The best answer is B/C',
    'The best answer is (B) and C, or D',
    'The answer is "None of the above."',
    # letters that are a part of something else
    'The best answer is C#',
    'The best answer is C^2',
    'The best answer is C\\times 2',
    'The best answer is D.C.',
    'The best answer is C > D',
    'The best answer is B < D',
    # several letters in other words
    'The best answer is A & B',
    'The best answer is option B and choice C',
    'The best answer is option B and option C',
    'The best answer is "B" and "C"',
    'The best answer is (B) London or (C)',
    'The best answer is B and C.',
)
WORDS = [*((form, 'C') for form in THIRD), *((form, 'A') for form in FIRST), *((form, None) for form in NO_OPTION)]

STATEMENTS = (
    'The best answer is {}',
    'The best answer is {}.',
    'The best answer is ({})',
    'the best answer is: **{}**',
    'The best answer is\n{}',
    'The best answer is option {}',
    'The best answer is $\\boxed{{{}}}$',
    '{}',
    '({})',
    'The best answer is {}, because of it',
    'The best answer is {}\n\nA man walks. I think.',
    'Answer: {}',
    'First A man, then I. The best answer is {}',
    'The best answer is {}: so it is',
    'The answer is {}!',
    '{}) so',
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


def own_prompts() -> list[str]:
    """Return all of our prompts for lettered questions, with a question and its options."""
    lines = ''.join(f'\n{letter}: {city}' for letter, city in zip('ABCD', CITIES, strict=True))
    prompts = []
    for name in ('mmlu_pro', 'agieval'):
        content = json.loads((ROOT / f'eval_data/score/prompts/{name}.json').read_text(encoding='utf-8'))
        templates = [content['option_order_robustness'], *content['prompt_robustness']]
        values = {'question': 'Which is it?', 'options': lines, 'category': 'law'}
        prompts += [template['prompt'].format(**values) for template in templates]
    return prompts


def instructions() -> list[str]:
    """Return the lines of our prompts that say how to answer."""
    return [line for prompt in own_prompts() for line in prompt.splitlines() if 'best answer' in line]


PLACEHOLDERS = (
    'X',
    '(X)',
    '[X]',
    '"X"',
    'X (X = its letter)',
    'X, where X is its letter',
    'indeed X',
    'Y',
    'x',
    '[letter]',
    '(letter)',
    '[its letter]',
    '<letter>',
    '{letter}',
    '**[letter]**',
    '[LETTER]',
    'LETTER',
    '$LETTER',
    'YOUR_ANSWER',
    '[insert answer here]',
    '(insert letter)',
    '[Your Answer]',
    '<answer>',
    '[the_answer_letter]',
    '[option letter]',
    '\\boxed{answer}',
    '$\\boxed{answer}$',
    '\\boxed{X}',
    '\\boxed{\\text{letter}}',
    '\\boxed{}',
    '____',
    '...',
    '[...]',
    '?',
    'the letter of your choice',
    'the correct letter',
    '[A/B/C/D]',
    'A, B, C, or D',
    '',
)
LEADS = ('The best answer is {}', 'The answer is {}', 'The final answer is: {}', 'Answer: {}', 'the best answer is: {}')
CHOSEN = ('The best answer is B.', 'Answer: B', 'B', '(B)', 'B. London', 'The best answer is London.', '\\boxed{B}')
every_instruction = pytest.mark.parametrize('instruction', [*own_prompts(), *instructions()])


@every_instruction
def test_an_instruction_that_is_repeated_is_no_answer(instruction: str):
    """Mutation: X is a letter beyond the options."""
    assert tolerant_letter(instruction, CITIES) is None


@every_instruction
def test_an_answer_counts_though_the_instruction_is_repeated_after_it(instruction: str):
    for chosen in CHOSEN:
        assert tolerant_letter(f'{chosen}\n\n{instruction}', CITIES) == 'B'
    assert tolerant_letter(f'The best answer is B. {instruction}', CITIES) == 'B'


@pytest.mark.parametrize('lead', LEADS)
@pytest.mark.parametrize('placeholder', PLACEHOLDERS)
def test_a_placeholder_is_no_answer_and_loses_none(lead: str, placeholder: str):
    said = lead.format(placeholder)
    assert tolerant_letter(said, CITIES) is None
    assert tolerant_letter(f'Use this form: "{said}".', CITIES) is None
    for chosen in CHOSEN:
        assert tolerant_letter(f'{chosen}\nSay: {said}', CITIES) == 'B'
        assert tolerant_letter(f'{chosen}\n\n{said}.', CITIES) == 'B'


@pytest.mark.parametrize(
    ('form', 'options', 'expected'),
    [
        ('The best answer is X', SIGNS, 'C'),
        ('The best answer is X', [f'option {place}' for place in range(26)], 'X'),
        ('The best answer is [letter]', ('[word]', '[letter]'), 'B'),
        ('The best answer is X-ray', ('CT', 'X-ray'), 'B'),
        ('The best answer is (the letter B)', CITIES, 'B'),
        ('The best answer is [answer: B]', CITIES, 'B'),
        ('The best answer is OPTION B', CITIES, 'B'),
        ('The best answer is the letter "B"', CITIES, 'B'),
        ('The best answer is B. The best answer is E', CITIES, None),
    ],
)
def test_what_looks_like_a_placeholder_may_be_an_answer(form: str, options: Sequence[str], expected: str | None):
    assert tolerant_letter(form, options) == expected


SIGNED = (
    '✅ {}',
    '{} ✅',
    '{}✔️',
    '☑ {}',
    '✓ {}',
    '{} 🎉',
    '👉 {}',
    '⭐ {}',
    '🟢 {}',
    '▶ {}',
    '- {}',
    '* {}',
    '• {}',
    '> {}',
    '→ {}',
    '➡️ {}',
    '=> {}',
    '-> {}',
    '### {}',
    '\ufeff{}',
    '{}\u200b',
    '【{}】',
    '「{}」',
    '{}。',
    '\uff08{}\uff09',
    '{}\uff01',
    'The best answer is ✅ {}',
    'The best answer is {} ✅',
    'The best answer is: ✅ **{}**',
    'The best answer → {}',
    'The best answer is:\n- {}',
    'The best answer is → {}',
    'Answer ➜ {}',
    'The best answer = {}',
    '**Answer:** {} ✅',
)


@pytest.mark.parametrize('form', SIGNED)
def test_signs_and_bullets_lose_no_letter(form: str):
    for letter, place in (('A', 0), ('B', 1)):
        for written in (letter, f'({letter})', f'**{letter}**', f'{letter}: {CITIES[place]}'):
            assert tolerant_letter(form.format(written), CITIES) == letter


@pytest.mark.parametrize('written', ['\uff22', 'Ⓑ', '🅱️', '🅱', '🄱', '🅑', '\uff08\uff22\uff09', '\uff22\uff0e'])
def test_a_letter_may_be_of_another_form(written: str):
    assert tolerant_letter(written, CITIES) == 'B'
    assert tolerant_letter(f'The best answer is {written}', CITIES) == 'B'


def test_crosses_and_several_marks_choose_nothing():
    for form in ('❌ B', 'A ❌\nB ❌', '✅', '✅ A\n✅ B', '- B\n- C', 'The best answer is ✅'):
        assert tolerant_letter(form, CITIES) is None
    assert tolerant_letter('The best answer is ♥', ('♠', '♥')) == 'B'


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
