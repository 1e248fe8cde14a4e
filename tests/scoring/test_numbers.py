"""Equality of numbers with and without units, by hand."""

from fractions import Fraction

import pytest

from llmfoundry_gauntlet.scoring.text import is_numeric_match, number_in, quantity_of

ATTACHED = ('m', 'cm', 'mm', 'km', 'g', 'gm', 'kg', 'kgs', 'ml', 'lb', 'oz', 'ft', 'h', 'hr', 'hrs', 'mph', 'kmph')
NAMED = ('days', 'weeks', 'months', 'years', 'yards', 'litres', 'gallons', 'cups', 'kelvin', '\u00b0F')
SIGNS = '^*\u221a<>\u2264\u2265\u2260\u00b1\u00d7\u00b7\u00f7|_'
FUNCTIONS = ('sqrt', 'log', 'ln', 'sin', 'cos', 'tan')


def pairs(table: str) -> list[tuple[str, str]]:
    """Return answers with the right one from lines such as 'right | answer ; answer'; others are comments."""
    rows = [line.split(' | ') for line in table.splitlines() if ' | ' in line]
    return [(answer, gold) for gold, answers in rows for answer in answers.split(' ; ')]


SAME = [
    *pairs(
        r"""
        the number alone, and words, money and full stops around it
18 | 18 ; 18. ; 18.00 ; $18.00 ; \$18 ; $18$ ; 18 dollars ; The answer is 18. ; x = 18 ; (18) ; **18** ; \boxed{18}
18 | \boxed {18} ; \(18\) ; \[18\] ; 18\text{ apples} ; \mathbf{18} ; \tfrac{36}{2} ; 18 apples ; $18 a day
$18.00 | 18
$18 | 18 dollars
Rs.750 | Rs. 750
Rs 750 | 750 rupees
        other ways to write the same value
1234 | 1,234
1,234 | 1{,}234
1450000 | 1,450,000
1,500,000 | 1.5 million
24 | 2 dozen
1 billion | 1000000000
5000 | 5k
0.5 | .5
\frac{3}{4} | 0.75
3/4 | $\frac{3}{4}$ ; \frac { 3 } { 4 }
0.75 | \dfrac{6}{8}
        signs
-0.5 | -\frac{1}{2}
-18 | \frac{-36}{2}
-5 | -5 ; minus 5 ; x = -5
$-5 | -$5
5 | +5
        units: a right answer may have one, and none need be said
36 minutes | 36 ; 36 min
36 | 36 minutes
62 m | 62 meters
43kms/hr | 43 km/h
60 miles per hour | 60 mph
60 miles/hour | 60 mph
130° | 130 degrees
20% | 20
20 | 20%
20 percent | 20 %
20 per cent | 20\%
22cm | 22 cm
5 pounds | £5
$5 | 5 USD
        as golds of GSM8K, AQuA and MATH have them
$\$ 3.35$ | 67/20
$\frac{12}{5}$ | 2.4
$0.95 \%$ | 19/20
Rs.1680 | 1,680
18,000 mph | 18000 ; 18000 miles per hour
11 hours. | 11 hrs ; 11 Hours.
18 dollars per hour | $18
5 hrs | 5 hours
5 kilograms | 5 kg
5 km | 5 kilometers ; 5 kilometres
5 cm | 5 centimeters ; 5 centimetres
5 mm | 5 millimeters
5 m | 5 metres
5 inches | 5 inch
5 ft | 5 feet
5 oz | 5 ounces
5 gms | 5 grams
5 mg | 5 milligrams
5 ml | 5 milliliters
5 litres | 5 liters
5 seconds | 5 sec
5 kmph | 5 km/hour
5 °C | 5 celsius
5 °F | 5 fahrenheit
"""
    ),
    ('18\nBecause 20 is too many', '18'),  # the first line
    ('\n \n18', '18'),
    ('\u22125', '-5'),
    ('\u20135', '-5'),  # minus and dash
    *((f'5{unit}', '5') for unit in ATTACHED),  # no part of the number, as in 18th
    *(('5', f'5 {unit}') for unit in NAMED),
]
DIFFERENT = [
    *pairs(
        r"""
        other values, of which one is two and a half
18 | 18.5 ; 180 ; 1,8 ; 1 8 ; 1/8 ; 18 million ; 18 thousand ; 18 hundred ; 18 trillion ; 18k ; $18K
12 | 1
1 | 12 ; 1½ ; 1e5
18% | 0.18
10.5 | 2\frac{1}{2}
36 | ½ of 36
5 | 5 and a half ; £5m ; £5 m ; $5mil
1 billion | 1
        more than one number
18 | 18 or 20 ; 2 * 9 ; 10-18
7 | 3+4
1 | 1:30
        formulas
2 | 2x ; 2 x
3 | 3+4 ; x+3 ; x-3 ; 3 - x ; 3/x ; x/3 ; x^3 ; x_{3} ; 3! ; √3 ; $\sqrt{3}$ ; sqrt 3 ; log(3) ; 3π ; 3 pi ; 3² ; y>3
3 | ±3 ; 3 squared ; 3 cubed ; 3 and one half ; 3 and two thirds ; 3 and three quarters
-3 | x - 3
5 | 5 m + p
$2 c$ | 2
3000pi | 3000
        signs
5 | -5 ; negative 5 ; --5
-5 | 5
        units that contradict
36 minutes | 36 seconds ; 36 hours
5 meters | 5 centimeters
$50 | 50 cents ; £50 ; €50 ; 50%
50 cents | 50 dollars
20% | 20 minutes
        words with a number in them
1930 | 1930s
1930s | 1930
1980 | 1980's
18 | 18th
1st | 1
4 Tops | 4
8ber | 8
$5 Day | 5
Revolution 9 | 9
        nothing to compare
18 | eighteen
1 | 1/0
"""
    ),
    ('', '18'),
    ('the first\n18', '18'),
    ('\u22125', '5'),
    *((f'{sign}3', '3') for sign in SIGNS if sign not in '^\u221a>\u00b1'),
    *((f'3{sign}x', '3') for sign in SIGNS),
    *((f'{function} 3', '3') for function in FUNCTIONS[2:]),
    *((f'3 {function} x', '3') for function in FUNCTIONS),
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
    assert number_in('9' * 500).value == 10**500 - 1


OTHERS = (
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
)


@pytest.mark.parametrize('gold', OTHERS)
def test_other_answers_require_a_strict_match(gold: str):
    assert quantity_of(gold) is None
    assert is_numeric_match(gold, [gold], normalize=True) == bool(gold)
    assert not is_numeric_match('3', [gold], normalize=True)
