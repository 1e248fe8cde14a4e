r"""Canned generations for SCORE's prompts, so that no model is needed: `completion(prompt, gold, options, seed)`.

`scripts/record_score.py` gives them to lm-eval, and our tests give them to our pipeline. Each picks an answer and puts
it into one of many forms, by random numbers that are a function of its arguments. Answers to a question mostly agree,
so that rates are neither 0 nor 1. After a change here the fixtures must be recorded again.

In a form, @V is the answer (of multiple choice a letter), @v the same in lower case, @O the option's text, @W a wrong
value, and @E the prompt's last line.
"""

import random
import re
from collections.abc import Sequence

LETTERS = 'ABCDEFGHIJ'
FREQUENCY = 4  # of the forms below, as a multiple of that of others
FREQUENT_OF_LETTERS = (
    'The best answer is @V',
    'The best answer is @V.',
    'Let us think.\n\nThe best answer is @V',
)
FREQUENT_OF_MATHEMATICS = (
    'The final answer is: $\\boxed{@V}$',
    'We find @V.\nThe final answer is: $\\boxed{@V}$.',
)
# The usual forms and the odd ones, most of which have no answer.
OF_LETTERS = (
    FREQUENCY * FREQUENT_OF_LETTERS
    + (
        '@V',
        '@v',
        'the best answer is @v',
        'THE BEST ANSWER IS @V!',
        'So: The best answer is **@V**.',
        'The best answer is (@V).',
        'The best answer is [@V]',
        "The best answer is '@V'.",
        'The best answer is @V) @O',
        'The best answer is @V\nas shown above.',
        'The best answer is @V.\n\n',
        'The best answer is @V\r\n',
        'The best answer is @V because of the rest.',
        'The best answer is K? No. The best answer is @V.',
    ),
    (
        '@V\n',
        ' @V',
        '(@V)',
        '@V.',
        '@V: @O',
        '@O',
        '',
        '\n',
        '@E',
        'I do not know.',
        'My best answer is @V',
        'the  best answer is @V',
        'The best answer is  @V',
        'The best answer is: @V',
        'The best answer is:\n@V',
        'The best answer is\n@V',
        'The best answer is',
        'The best answer is ',
        'The best answer is $\\boxed{@V}$',
        'The best answer is option @V',
        'The best answer is @V)@O',
        'The best answer is @V\tfor sure',
        'The best answer is @V\u00a0now',
        'The best answer is @V or the best answer is not.',
        'The best answer is Z',
        'The best answer is 3',
        'The best answer is IV.',
        'The best answer is \u0130',  # its lower case is an i and a combining dot, so it is read as I
    ),
)
OF_MATHEMATICS = (
    FREQUENCY * FREQUENT_OF_MATHEMATICS
    + (
        '\\boxed{@V}',
        'The final answer is: $\\boxed{ @V }$\n\n',
        'The final answer is: $\\boxed{\\boxed{@V}}$',
        'Is it $\\boxed{@W}$? No. The final answer is: $\\boxed{@V}$',
        'It is $\\boxed{@V}$ (or \\fbox{3})',
        'The final answer is: $$\\boxed{@V}.$$ Check: {@W}',
    ),
    (
        'The final answer is: $\\boxed{@V}$ or $\\boxed{@W}$',
        'It is $\\boxed{@V}$\n\\boxed',
        '',
        '@E',
        'It is $\\boxed{@V',
        'It is $\\boxed @V$',
        'It is $\\boxed {@V}$',
        'It is $\\fbox{@V}$',
        'It is $\\boxed{}$',
        'The final answer is: @V',
        'x = \\boxed{x = @V}',
    ),
)
WRONG = ('0', '-1', '7', '12', '\\frac{1}{3}', '\\sqrt{2}', 'x+1', '(1,2)', '[0,1)', '\\text{none}', '2\\pi', 'None')
# Other forms of a right value.
OF_NUMBERS = (
    '@V.0',
    '@V.00',
    ' @V ',
    '@V\\%',
    '\\$@V',
    '@V\\text{ cm}',
    '@V^\\circ',
    '{@V}',
    '(@V)',
    'x=@V',
    '@V00',
    '0@V',
    '\\text{@V}',
    '\\frac{@V}{1}',
    '@V+0',
    '@V apples',
    '@V.00001',
)
OF_OTHERS = (
    ' @V ',
    '(@V)',
    '\\left(@V\\right)',
    '\\text{@V}',
    '@V\\,',
    '1\\cdot @V',
    'y=@V',
    '@V.',
    '@V\\text{ units}',
)


def completion(prompt: str, gold: str, options: Sequence[str] = (), seed: int = 0) -> str:
    """Return the generation for a prompt on a question with this gold answer. Mathematics has no options."""
    habits, draw = random.Random(f'{gold} {sorted(options)}'), random.Random(f'{seed}\n{prompt}')
    share_of_gold, roll = habits.choice((0.9, 0.9, 0.55, 0.2)), draw.random()
    favourite, other = habits.choice(sorted(options or WRONG)), draw.choice(sorted(options or WRONG))
    if roll < share_of_gold:
        answer = gold if options or roll < 0.6 * share_of_gold else draw.choice(other_forms(gold))
    else:
        answer = favourite if roll < 0.6 + 0.4 * share_of_gold else other
    values = {
        'V': letter_of(answer, prompt) if options else answer,
        'O': answer,
        'W': other,
        'E': prompt.rsplit('\n', 1)[-1],
    }
    values['v'] = values['V'].lower()
    usual, odd = OF_LETTERS if options else OF_MATHEMATICS
    form = draw.choice(usual if draw.random() < 0.8 else odd)
    return re.sub('@([A-Za-z])', lambda found: values[found[1]], form)


def letter_of(option: str, prompt: str) -> str:
    """Return the first letter of the option in the prompt. Raise StopIteration if it is not there."""
    return next(letter for letter in LETTERS if f'\n{letter}: {option}\n' in f'{prompt}\n')


def other_forms(gold: str) -> list[str]:
    """Return ways to write a value, most of them equal to it."""
    forms = [form.replace('@V', gold) for form in (OF_NUMBERS if gold.isdecimal() else OF_OTHERS)]
    if gold.isdecimal():
        return [*forms, f'{int(gold):,}', f'{int(gold) / 100}', f'\\frac{{{2 * int(gold)}}}{{2}}']
    if ',' in gold:
        forms += [','.join(gold.split(',')[::-1]), gold.replace(',', ', '), gold.replace(',', ' and ')]
    if found := re.fullmatch(r'\\d?frac\{(\d+)\}\{(\d+)\}', gold):
        above, below = map(int, found.groups())
        forms += [f'{above}/{below}', f'\\tfrac{{{above}}}{{{below}}}']
        forms += [f'\\frac {above}{below}', f'{above / below:.6f}']
        forms += [f'\\frac{{{2 * above}}}{{{2 * below}}}', f'{100 * above / below}']
    return forms
