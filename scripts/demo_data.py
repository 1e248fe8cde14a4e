"""Rows of the demo's four tasks and its training text, both generated from a seed.

The rows have the form of the published ones and are easy: one operation on operands from 0 to 19, short bracket words,
single letters to copy. A checksum of each problem decides whether it may be evaluated or trained on (`is_held_out`), so
rows and training text never overlap, whatever the seeds.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

Row = dict[str, str]

BRACKETS = {'(': ')', '[': ']', '{': '}', '<': '>'}
INSTRUCTION = 'Complete the rest of the sequence, making sure that the parentheses are closed properly.'
LETTERS = 'abcdefghijklmnopqrstuvwxyz'
MAX_OPERAND = 19
HELD_OUT_SHARE = 10  # one problem key in ten

FACTS = (
    'The sky is blue and the grass is green.',
    'A week has seven days and a year has twelve months.',
    'Water turns to ice when it is cold.',
    'Birds have wings, and fish swim in the sea.',
    'The sun rises in the east and sets in the west.',
    'Bread is made from flour, water and salt.',
    'A spider has eight legs and a cat has four.',
    'Snow is white and coal is black.',
    'In spring the trees have new leaves; in autumn they fall.',
    'A baker bakes bread and a farmer grows wheat.',
    'We read with our eyes and hear with our ears.',
    'A triangle has three sides and a square has four.',
    'The moon shines at night.',
    'Bees make honey, hens lay eggs, and cows give milk.',
    'Winter is colder than summer.',
    'If it rains, the street gets wet.',
    'She opened the door, said hello and sat down by the fire.',
    'He lost his key, so he could not get into the house.',
    'They walked to the river because the day was warm.',
    'The boat was small, but it carried all of them home.',
)


def is_held_out(key: str) -> bool:
    """Return whether the problem with this key is held out for evaluation; all others may be trained on."""
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def arithmetic_key(left: int, operation: str, right: int) -> str:
    """Return the last digit of `left` with the rest: "13+14=" ends in "3+14=", so both share one key."""
    return f'{left % 10}{operation}{right}'


def arithmetic_row(left: int, operation: str, right: int, *, spaces: bool) -> Row:
    """Return a sum or difference, `3 + 4 =` or `3+4=`, with its result."""
    space = ' ' if spaces else ''
    answer = left + right if operation == '+' else left - right
    return {'context': f'{left}{space}{operation}{space}{right}{space}=', 'continuation': f'{space}{answer}'}


def easy_arithmetic_row(rng: random.Random, *, held_out: bool, spaces: bool) -> Row:
    """Return a random sum or difference from one side of the split."""
    while True:
        # Another order of these draws would make other data.
        left = rng.randint(0, MAX_OPERAND)
        operation = rng.choice('+-')
        right = rng.randint(0, MAX_OPERAND)
        if is_held_out(arithmetic_key(left, operation, right)) == held_out:
            return arithmetic_row(left, operation, right, spaces=spaces)


def open_bracket_word(rng: random.Random, *, max_depth: int = 4) -> list[str]:
    """Return a random bracket word of 4 to 10 symbols with at least one bracket still open."""
    while True:
        word: list[str] = []
        unclosed: list[str] = []
        for _ in range(rng.randint(4, 10)):
            if unclosed and (len(unclosed) == max_depth or rng.random() < 0.5):
                word.append(BRACKETS[unclosed.pop()])
            else:
                unclosed.append(rng.choice('([{<'))
                word.append(unclosed[-1])
        if unclosed:
            return word


def closing_brackets(word: Sequence[str]) -> list[str]:
    """Return the brackets that close those still open at the end of a word."""
    unclosed: list[str] = []
    for bracket in word:
        if bracket in BRACKETS:
            unclosed.append(bracket)
        else:
            unclosed.pop()
    return [BRACKETS[bracket] for bracket in reversed(unclosed)]


def easy_dyck_row(rng: random.Random, *, held_out: bool) -> Row:
    """Return a random bracket word to complete, from one side of the split."""
    while True:
        word = open_bracket_word(rng)
        if is_held_out(' '.join(word)) == held_out:
            context = f'{INSTRUCTION} \n\nInput: {" ".join(word)}\nOutput:'
            return {'context': context, 'continuation': ' '.join(closing_brackets(word))}


def easy_copy_row(rng: random.Random, *, held_out: bool) -> Row:
    """Return three to eight random letters to repeat, from one side of the split."""
    while True:
        letters = ' '.join(rng.choice(LETTERS) for _ in range(rng.randint(3, 8)))
        if is_held_out(letters) == held_out:
            return {'context': f'repeat with logic:\n\nQ: say {letters}\nA:', 'continuation': letters}


TASKS: dict[str, Callable[..., Row]] = {
    'simple_arithmetic_withspaces': partial(easy_arithmetic_row, spaces=True),
    'simple_arithmetic_nospaces': partial(easy_arithmetic_row, spaces=False),
    'bigbench_dyck_languages': easy_dyck_row,
    'bigbench_repeat_copy_logic': easy_copy_row,
}


def evaluation_rows(task: str, *, num_rows: int = 40, seed: int = 17) -> list[Row]:
    """Return distinct held-out rows of one of `TASKS`; `eval_data/symbolic_problem_solving` holds the defaults."""
    rng = random.Random(f'{seed}/{task}')
    rows: dict[str, Row] = {}
    while len(rows) < num_rows:
        row = TASKS[task](rng, held_out=True)
        rows.setdefault(row['context'], row)
    return list(rows.values())


def shot_text(row: Row) -> str:
    """Return a solved row as it appears among the shots of a few-shot prompt."""
    return f'{row["context"].strip()} {row["continuation"].strip()}'


def training_document(rng: random.Random, task: str, *, num_rows: int) -> str:
    """Return solved training rows of one task, one per line, as in a few-shot prompt.

    In half of the documents the opening that all rows share appears once, so that more of the text is worth learning.
    """
    rows = [shot_text(TASKS[task](rng, held_out=False)) for _ in range(num_rows)]
    opening = OPENINGS.get(task, '')
    if rng.random() < 0.5:
        return '\n'.join(rows)
    return opening + '\n'.join(row.removeprefix(opening) for row in rows)


def facts_document(rng: random.Random) -> str:
    """Return a few plain sentences in random order."""
    return ' '.join(rng.sample(FACTS, 8))


# The number of rows in a document of each kind, and its weight.
DOCUMENTS = {
    'simple_arithmetic_withspaces': (24, 3.0),
    'simple_arithmetic_nospaces': (24, 3.0),
    'bigbench_dyck_languages': (11, 3.5),
    'bigbench_repeat_copy_logic': (11, 3.5),
    'facts': (0, 0.3),
}
OPENINGS = {
    'bigbench_dyck_languages': f'{INSTRUCTION} \n\n',
    'bigbench_repeat_copy_logic': 'repeat with logic:\n\n',
}


def training_documents(*, num_documents: int = 8_000, seed: int = 7) -> Iterator[str]:
    """Yield the demo's training text: few-shot groups of the four tasks and plain sentences, in random order."""
    rng = random.Random(seed)
    weights = [weight for _, weight in DOCUMENTS.values()]
    for kind in rng.choices(list(DOCUMENTS), weights, k=num_documents):
        if kind == 'facts':
            yield facts_document(rng)
        else:
            yield training_document(rng, kind, num_rows=DOCUMENTS[kind][0])
