"""Equality of numbers with and without units, by hand."""

from fractions import Fraction

import pytest

from llmfoundry_gauntlet.scoring.text import is_numeric_match, number_in, quantity_of

ATTACHED = ('m', 'cm', 'mm', 'km', 'g', 'gm', 'kg', 'kgs', 'ml', 'lb', 'oz', 'ft', 'h', 'hr', 'hrs', 'mph', 'kmph')
NAMED = ('days', 'weeks', 'months', 'years', 'yards', 'litres', 'gallons', 'cups', 'kelvin', '\u00b0F')
SAME = [
    # the number alone, and words, money and full stops around it
    ('18', '18'),
    ('18.', '18'),
    ('18.00', '18'),
    ('$18.00', '18'),
    ('\\$18', '18'),
    ('$18$', '18'),
    ('18 dollars', '18'),
    ('The answer is 18.', '18'),
    ('x = 18', '18'),
    ('(18)', '18'),
    ('**18**', '18'),
    ('\\boxed{18}', '18'),
    ('\\(18\\)', '18'),
    ('\\[18\\]', '18'),
    ('18\\text{ apples}', '18'),
    ('\\mathbf{18}', '18'),
    ('\\tfrac{36}{2}', '18'),
    ('\\frac{-36}{2}', '-18'),
    ('18 apples', '18'),
    ('$18 a day', '18'),
    ('18\nBecause 20 is too many', '18'),  # the first line
    ('\n \n18', '18'),
    ('18', '$18.00'),
    ('18 dollars', '$18'),
    ('Rs. 750', 'Rs.750'),
    ('750 rupees', 'Rs 750'),
    # other ways to write the same value
    ('1,234', '1234'),
    ('1{,}234', '1,234'),
    ('1,450,000', '1450000'),
    ('1.5 million', '1,500,000'),
    ('2 dozen', '24'),
    ('1000000000', '1 billion'),
    ('.5', '0.5'),
    ('0.75', '\\frac{3}{4}'),
    ('$\\frac{3}{4}$', '3/4'),
    ('\\dfrac{6}{8}', '0.75'),
    ('-\\frac{1}{2}', '-0.5'),
    # signs
    ('-5', '-5'),
    ('\u22125', '-5'),
    ('\u20135', '-5'),
    ('minus 5', '-5'),
    ('-$5', '$-5'),
    ('x = -5', '-5'),
    ('+5', '5'),
    # units: a right answer may have one, and none need be said
    ('36', '36 minutes'),
    ('36 min', '36 minutes'),
    ('36 minutes', '36'),
    ('62 meters', '62 m'),
    ('43 km/h', '43kms/hr'),
    ('60 mph', '60 miles per hour'),
    ('60 mph', '60 miles/hour'),
    ('130 degrees', '130\u00b0'),
    ('20', '20%'),
    ('20%', '20'),
    ('20 %', '20 percent'),
    ('20\\%', '20 per cent'),
    ('22 cm', '22cm'),
    ('\u00a35', '5 pounds'),
    ('5k', '5000'),
    # units attached to a number, which are no part of it as in 18th
    *((f'5{unit}', '5') for unit in ATTACHED),
    # units as golds of GSM8K, AQuA and MATH have them
    *(('5', f'5 {unit}') for unit in NAMED),
    ('5 hours', '5 hrs'),
    ('5 kg', '5 kilograms'),
    ('5 centimeters', '5 cm'),
    ('5 kilometers', '5 km'),
    ('5 inch', '5 inches'),
    ('5 feet', '5 ft'),
    ('5 ounces', '5 oz'),
    ('5 metres', '5 m'),
    ('5 grams', '5 gms'),
    ('5 liters', '5 litres'),
    ('5 sec', '5 seconds'),
    ('5 km/hour', '5 kmph'),
    ('5 USD', '$5'),
    ('5 kilometres', '5 km'),
    ('5 centimetres', '5 cm'),
    ('5 millimeters', '5 mm'),
    ('\\frac { 3 } { 4 }', '3/4'),
    ('\\boxed {18}', '18'),
    ('5 milligrams', '5 mg'),
    ('5 milliliters', '5 ml'),
    ('5 celsius', '5 \u00b0C'),
    ('5 fahrenheit', '5 \u00b0F'),
]

DIFFERENT = [
    # other values
    ('12', '1'),
    ('1', '12'),
    ('18.5', '18'),
    ('180', '18'),
    ('1,8', '18'),
    ('1 8', '18'),
    ('1/8', '18'),
    ('0.18', '18%'),
    ('2\\frac{1}{2}', '10.5'),  # two and a half
    ('1\u00bd', '1'),
    ('\u00bd of 36', '36'),
    ('5 and a half', '5'),
    ('18 million', '18'),
    ('18 thousand', '18'),
    ('18 hundred', '18'),
    ('18 trillion', '18'),
    ('18k', '18'),
    ('$18K', '18'),
    ('\u00a35m', '5'),
    ('\u00a35 m', '5'),
    ('$5mil', '5'),
    ('1', '1 billion'),
    ('1e5', '1'),
    # more than one number
    ('18 or 20', '18'),
    ('3+4', '7'),
    ('3+4', '3'),
    ('2 * 9', '18'),
    ('10-18', '18'),
    ('1:30', '1'),
    # formulas
    ('2x', '2'),
    ('2 x', '2'),
    ('x+3', '3'),
    ('x-3', '3'),
    ('x - 3', '-3'),
    ('3 - x', '3'),
    ('3/x', '3'),
    ('5 m + p', '5'),
    ('x/3', '3'),
    ('x^3', '3'),
    ('x_{3}', '3'),
    ('3!', '3'),
    ('\u221a3', '3'),
    ('$\\sqrt{3}$', '3'),
    ('sqrt 3', '3'),
    ('log(3)', '3'),
    ('3\u03c0', '3'),
    ('3 pi', '3'),
    ('3\u00b2', '3'),
    ('y>3', '3'),
    ('\u00b13', '3'),
    *((f'{sign}3', '3') for sign in '*<\u2264\u2265\u2260\u00d7\u00b7\u00f7|_'),
    *((f'3{sign}x', '3') for sign in '^*\u221a<>\u2264\u2265\u2260\u00b1\u00d7\u00b7\u00f7|_'),
    *((f'{function} 3', '3') for function in ('ln', 'sin', 'cos', 'tan')),
    *((f'3 {function} x', '3') for function in ('sqrt', 'log', 'ln', 'sin', 'cos', 'tan')),
    ('3 squared', '3'),
    ('3 cubed', '3'),
    ('3 and one half', '3'),
    ('3 and two thirds', '3'),
    ('3 and three quarters', '3'),
    ('2', '$2 c$'),
    ('3000', '3000pi'),
    # signs
    ('-5', '5'),
    ('5', '-5'),
    ('\u22125', '5'),
    ('negative 5', '5'),
    ('--5', '5'),
    # units that contradict
    ('36 seconds', '36 minutes'),
    ('36 hours', '36 minutes'),
    ('5 centimeters', '5 meters'),
    ('50 cents', '$50'),
    ('50 dollars', '50 cents'),
    ('\u00a350', '$50'),
    ('\u20ac50', '$50'),
    ('50%', '$50'),
    ('20 minutes', '20%'),
    # words with a number in them
    ('1930s', '1930'),
    ("1980's", '1980'),
    ('18th', '18'),
    ('1930', '1930s'),
    ('1', '1st'),
    ('4', '4 Tops'),
    ('8', '8ber'),
    ('5', '$5 Day'),
    ('9', 'Revolution 9'),
    # nothing to compare
    ('', '18'),
    ('eighteen', '18'),
    ('1/0', '1'),
    ('the first\n18', '18'),
]


@pytest.mark.parametrize(('answer', 'gold'), SAME)
def test_equal_numbers_in_other_notation_are_equal(answer: str, gold: str):
    assert is_numeric_match(answer, [gold], normalize=True)


@pytest.mark.parametrize(('answer', 'gold'), DIFFERENT)
def test_other_or_several_numbers_are_unequal(answer: str, gold: str):
    assert not is_numeric_match(answer, [gold], normalize=True)


def test_the_value_of_a_number_is_exact():
    assert number_in('0.1').value == Fraction(1, 10)
    assert number_in('1/3').value == Fraction(1, 3)
    assert number_in('-1,234.50 and so on').value == Fraction(-2469, 2)
    assert number_in('about 3 billion').value == 3_000_000_000


def test_very_long_digits_are_no_number():
    """Python refuses to parse more than 4,300 digits, which a model may generate."""
    for text in ('9' * 5000, f'0.{"3" * 5000}', f'1/{"7" * 5000}'):
        assert number_in(text) is None
        assert not is_numeric_match(text, ['9'], normalize=True)
    assert number_in('9' * 500).value == 10**500 - 1


@pytest.mark.parametrize(
    ('text', 'unit'),
    [
        ('18', ''),
        ('18 Minutes.', 'minute'),
        ('18 hrs', 'hour'),
        ('$18', '$'),
        ('18 euros', '\u20ac'),
        ('18 dollars per hour', '$'),
        ('18 miles per hour', 'mile/hour'),
        ('18 kms/hr', 'km/hour'),
        ('18 percent', '%'),
        ('-273 \u00b0C', 'C'),
        ('18 feet', 'foot'),
        ('18 Boxes', 'boxes'),  # none of ours
    ],
)
def test_units_have_one_canonical_name(text: str, unit: str):
    assert number_in(text).unit == unit


@pytest.mark.parametrize(
    ('gold', 'value'),
    [
        ('18', 18),
        (' $18. ', 18),
        ('1,234', 1234),
        ('$\\$ 3.35$', Fraction(67, 20)),
        ('$\\frac{12}{5}$', Fraction(12, 5)),
        ('Rs.1680', 1680),
        ('$0.95 \\%$', Fraction(19, 20)),
        ('11 hours.', 11),
        ('18,000 mph', 18000),
    ],
)
def test_numeric_answers_are_compared_by_value(gold: str, value: Fraction):
    assert quantity_of(gold).value == value


@pytest.mark.parametrize(
    'gold',
    [
        'Paris',
        '108 phones to fix',
        'There is exactly 1 solution.',
        '4 Tops',
        '96 men',
        '1st',
        '7!',
        '$3 x$',
        '$2 c$',
        '(3,-8)',
        '31 and 41',
        '10!/6',
        '4 1/3 km/h',
        '3% Profit',
        'A)59',
        '',
    ],
)
def test_other_answers_require_a_strict_match(gold: str):
    assert quantity_of(gold) is None
    assert is_numeric_match(gold, [gold], normalize=True) == bool(gold)
    assert not is_numeric_match('3', [gold], normalize=True)


def test_any_right_answer_suffices():
    assert is_numeric_match('9 of them', ['Nine', '9', 'nine'], normalize=True)
    assert is_numeric_match('nine', ['Nine', '9', 'nine'], normalize=True)
    assert not is_numeric_match('nine of them', ['Nine', '9', 'nine'], normalize=True)
