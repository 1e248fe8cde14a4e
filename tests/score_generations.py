"""Canned generations for SCORE's prompts: a fixed function of the prompt and the seed, so that no model is needed.

`scripts/record_score.py` gives them to lm-eval, and our tests give them to our pipeline. A `Question` is what the
replies know of a row: its text as it stands in prompts, the right answer and the options. `CannedReplies(questions)
.reply(prompt, seed)` finds the question that the prompt asks, picks an answer and puts it into one of many forms, all
by SHA-256. The seed is 0 where replies are greedy. Answers to a question mostly agree, so that rates are neither 0 nor
1. After a change here the fixtures must be recorded again.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LETTERS = 'ABCDEFGHIJ'

# Of multiple choice. @L is the letter, @l the same in lower case, @O the option's text, @E the prompt's last line.
READABLE = (
    *['The best answer is @L'] * 6,
    *['The best answer is @L.'] * 6,
    *['Let us think.\n\nThe best answer is @L'] * 4,
    *['The best answer is (@L).'] * 2,
    *['@L'] * 5,
    'The best answer is [@L]',
    'the best answer is @l',
    'THE BEST ANSWER IS @L!',
    'So: The best answer is **@L**.',
    'The best answer is @L) @O',
    'The best answer is @L\nas shown above.',
    'The best answer is @L.\n\n',
    "The best answer is '@L'.",
    'The best answer is @L because of the rest.',
    'The best answer is K? No. The best answer is @L.',
    'The best answer is @L\r\n',
    '@l',
)
ODD = (
    '@L\n',
    ' @L',
    '(@L)',
    '@L.',
    '@L: @O',
    '@O',
    'My best answer is @L',
    'the  best answer is @L',
    'The best answer is: @L',
    'The best answer is:\n@L',
    'The best answer is\n@L',
    'The best answer is  @L',
    'The best answer is $\\boxed{@L}$',
    'The best answer is option @L',
    'The best answer is',
    'The best answer is ',
    'The best answer is @L)@O',
    'The best answer is @L\tfor sure',
    'The best answer is @L\u00a0now',
    'The best answer is \u0130',  # its lower case is an i and a combining dot, so it is read as I
    'The best answer is @L or the best answer is not.',
    'The best answer is @L. Is the best answer is right?',
    'The best answer is Z',
    'The best answer is 3',
    'The best answer is IV.',
    'I do not know.',
    '',
    '\n',
    '@E',
)

# Of MATH. @V is the value, @W a wrong one.
BOXED = (
    *['The final answer is: $\\boxed{@V}$'] * 8,
    *['We find @V.\nThe final answer is: $\\boxed{@V}$.'] * 3,
    '\\boxed{@V}',
    'The final answer is: $\\boxed{ @V }$\n\n',
    'Is it $\\boxed{@W}$? No. The final answer is: $\\boxed{@V}$',
    'The final answer is: $\\boxed{\\boxed{@V}}$',
    'The final answer is: $\\boxed{@V}$ (or \\fbox{3})',
    'The final answer is: $$\\boxed{@V}.$$ Check: {@W}',
)
UNBOXED = (
    'The final answer is: $\\boxed{@V}$ or $\\boxed{@W}$',
    'The final answer is: $\\boxed{@V',
    'The final answer is: $\\boxed @V$',
    'The final answer is: $\\boxed {@V}$',
    'The final answer is: $\\fbox{@V}$',
    'The final answer is: $\\boxed{}$',
    'The final answer is: $\\boxed{@V}$\n\\boxed',
    'The final answer is: @V',
    'x = \\boxed{x = @V}',
    '',
    '@E',
)
WRONG = ('0', '-1', '7', '12', '\\frac{1}{3}', '\\sqrt{2}', 'x+1', '(1,2)', '[0,1)', '\\text{none}', '2\\pi', 'None')
WHOLE = (
    '@G.0',
    '@G.00',
    ' @G ',
    '@G\\%',
    '\\$@G',
    '@G\\text{ cm}',
    '@G^\\circ',
    '{@G}',
    '(@G)',
    'x=@G',
    '@G00',
    '0@G',
    '\\text{@G}',
    '\\frac{@G}{1}',
    '@G+0',
    '@G apples',
)
OTHER = (' @G ', '(@G)', '\\left(@G\\right)', '\\text{@G}', '@G\\,', '1\\cdot @G', 'y=@G', '@G.', '@G\\text{ units}')


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The question of a row. MATH has no options."""

    text: str
    gold: str
    options: tuple[str, ...] = ()


def mmlu_pro_question(row: Mapping[str, Any]) -> Question:
    """Return the question in a row of mmlu_pro_test.jsonl."""
    return Question(text=row['question'], gold=row['options'][row['answer_index']], options=tuple(row['options']))


def agieval_question(row: Mapping[str, Any]) -> Question:
    """Return the question in a row of agieval_v1, after its passage, without the labels of its options."""
    text = f'{row["passage"]}Q: {row["question"]}' if row['passage'] else row['question']
    options = tuple(option[3:] for option in row['options'])
    return Question(text=text, gold=options[LETTERS.index(row['label'])], options=options)


def math_question(row: Mapping[str, Any], fixes: Mapping[str, str]) -> Question:
    """Return the question in a row of hendrycks_math, with the gold of its solution's boxes or of the fix table."""
    boxes = dict.fromkeys(box_contents(row['solution']))
    return Question(text=row['problem'], gold=fixes.get(row['problem'], ', '.join(boxes)))


def box_contents(text: str) -> list[str]:
    """Return the content of each outermost box with matching braces."""
    found, end = [], 0
    for start in (match.end() for match in re.finditer(r'\\boxed\{', text)):
        if start < end:
            continue
        depth, end = 1, start
        while depth:
            depth += {'{': 1, '}': -1}.get(text[end], 0)
            end += 1
        found.append(text[start : end - 1])
    return found


class CannedReplies:
    """Canned generations for prompts about some questions."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self.questions = sorted(questions, key=lambda question: -len(question.text))

    def reply(self, prompt: str, seed: int = 0) -> str:
        """Return the generation for a prompt. Raise ValueError if it asks none of the questions."""
        question = self.question_of(prompt)
        rolls = Rolls(f'{seed}\n{prompt}')
        habits = Rolls(question.text + question.gold)
        share_of_gold = (0.9, 0.9, 0.55, 0.2)[habits.below(4)]
        roll = rolls.share()
        if question.options:
            return choice_reply(question, prompt, roll, share_of_gold, rolls=rolls, habits=habits)
        return math_reply(question, prompt, roll, share_of_gold, rolls=rolls, habits=habits)

    def question_of(self, prompt: str) -> Question:
        """Return the question with the longest text that is in the prompt with all of its options."""
        for question in self.questions:
            if question.text in prompt and all(f': {option}' in prompt for option in question.options):
                return question
        raise ValueError(f'the prompt asks none of the {len(self.questions)} questions: {prompt[:200]!r}')


class Rolls:
    """Numbers drawn in sequence from the SHA-256 of a text."""

    def __init__(self, text: str) -> None:
        digest = hashlib.sha256(text.encode()).digest()
        self.numbers = [int.from_bytes(digest[start : start + 4], 'big') for start in range(0, 32, 4)]

    def below(self, limit: int) -> int:
        """Return a number from 0 to limit - 1."""
        return self.numbers.pop(0) % limit

    def share(self) -> float:
        """Return a number from 0 to 1."""
        return self.numbers.pop(0) / 2**32

    def choose(self, values: Sequence[str]) -> str:
        return values[self.below(len(values))]


def choice_reply(
    question: Question, prompt: str, roll: float, share_of_gold: float, *, rolls: Rolls, habits: Rolls
) -> str:
    """Return mostly the gold option or the question's favourite wrong one, mostly in a form that can be parsed."""
    favourite = habits.choose(question.options)
    if roll < share_of_gold:
        option = question.gold
    elif roll < 0.6 + 0.4 * share_of_gold:
        option = favourite
    else:
        option = rolls.choose(question.options)
    form = rolls.choose(READABLE if rolls.share() < 0.8 else ODD)
    letter = letter_of(option, prompt, len(question.options))
    return (
        form.replace('@L', letter)
        .replace('@l', letter.lower())
        .replace('@O', option)
        .replace('@E', prompt.rsplit('\n', 1)[-1])
    )


def letter_of(option: str, prompt: str, num_options: int) -> str:
    """Return the first letter of the option in the prompt."""
    for letter in LETTERS[:num_options]:
        if f'\n{letter}: {option}\n' in f'{prompt}\n':
            return letter
    raise ValueError(f'the prompt does not offer {option!r}')


def math_reply(
    question: Question, prompt: str, roll: float, share_of_gold: float, *, rolls: Rolls, habits: Rolls
) -> str:
    """Return mostly the gold value, possibly in another form, or the favourite wrong one; mostly in a box."""
    favourite, wrong = habits.choose(WRONG), rolls.choose(WRONG)
    if roll < 0.6 * share_of_gold:
        value = question.gold
    elif roll < share_of_gold:
        value = rolls.choose(other_forms(question.gold))
    elif roll < 0.6 + 0.4 * share_of_gold:
        value = favourite
    else:
        value = wrong
    form = rolls.choose(BOXED if rolls.share() < 0.8 else UNBOXED)
    return form.replace('@E', prompt.rsplit('\n', 1)[-1]).replace('@V', value).replace('@W', wrong)


def other_forms(gold: str) -> list[str]:
    """Return ways to write a value, most of them equal to it."""
    forms = [form.replace('@G', gold) for form in (WHOLE if gold.isdecimal() else OTHER)]
    if gold.isdecimal():
        forms += [f'{int(gold):,}', f'{int(gold) / 100}', f'\\frac{{{2 * int(gold)}}}{{2}}', f'{int(gold)}.00001']
    if fraction := re.fullmatch(r'\\d?frac\{(\d+)\}\{(\d+)\}', gold):
        above, below = fraction.groups()
        forms = [f'{above}/{below}', f'\\dfrac{{{above}}}{{{below}}}', f'\\tfrac{{{above}}}{{{below}}}']
        forms += [f'{int(above) / int(below):.6f}', f'\\frac {{{above}}} {{{below}}}', f'\\frac{above}{below}']
        forms += [f'{100 * int(above) / int(below)}', f'\\frac{{{2 * int(above)}}}{{{2 * int(below)}}}', f'({gold})']
    if ',' in gold:
        forms += [','.join(gold.split(',')[::-1]), gold.replace(',', ', '), gold.replace(',', ' and ')]
    return forms
