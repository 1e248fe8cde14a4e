"""Prompts and their shots, written by hand from the rules of llm-foundry's `construct_context`."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks.base import fewshot_indices, fixed_indices, redrawn_indices, with_shots
from llmfoundry_gauntlet.tasks.code import CodeProblem
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.generation import OpenQuestion
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.language_modeling import Passage
from llmfoundry_gauntlet.tasks.multiple_choice import Choices
from llmfoundry_gauntlet.tasks.schema import Schema
from llmfoundry_gauntlet.types import Example

PASSAGES = [Passage('1+1=', '2'), Passage('2+2=', '4'), Passage('3+3=', '6')]
CHOICES = [Choices('Sky?', ('blue', 'green'), 0), Choices('Grass?', ('blue', 'green'), 1)]
SCHEMAS = [Schema(('the cup', 'the bag'), 'was full.', 1), Schema(('he', 'she'), 'sang.', 0)]

# llm-foundry 0.22.0's get_fewshot_sample_idxs with one Random(1234), 12 rows, 3 shots; the order is the set's.
RECORDED = [
    (1, 9, 7), (0, 10, 5), (0, 10, 3), (0, 9, 5), (9, 11, 7), (1, 2, 11),
    (0, 1, 11), (8, 1, 3), (1, 10, 7), (8, 10, 1), (0, 9, 4), (8, 1, 4),
]  # fmt: skip


def task(kind: str, num_shots: int = 0, **keys):
    entry = {'label': 't', 'dataset_uri': 'x', 'num_fewshot': [num_shots], 'icl_task_type': kind, **keys}
    return load_suite([entry]).tasks[0]


def examples_of(contents) -> list[Example]:
    return [Example(row=row, content=content) for row, content in enumerate(contents)]


@pytest.mark.parametrize(
    ('kind', 'num_shots', 'keys', 'preamble', 'contexts'),
    [
        # Language modeling.
        ('language_modeling', 0, {}, '', ('1+1=',)),
        ('language_modeling', 2, {}, '2+2= 4\n3+3= 6', ('\n1+1=',)),
        ('language_modeling', 0, {'continuation_delimiter': '\nAnswer: '}, '', ('1+1=\nAnswer:',)),
        ('language_modeling', 1, {'continuation_delimiter': '\nAnswer: '}, '2+2=\nAnswer: 4', ('\n1+1=\nAnswer:',)),
        ('language_modeling', 1, {'prelimiter': 'Q: '}, 'Q: 2+2= 4', ('\nQ: 1+1=',)),
        ('language_modeling', 0, {'prompt_string': 'Add.'}, 'Add.', ('\n1+1=',)),
        ('language_modeling', 2, {'prompt_string': 'Add.'}, 'Add.\n2+2= 4\n3+3= 6', ('\n1+1=',)),
        ('language_modeling', 2, {'example_delimiter': '###'}, '2+2= 4###3+3= 6', ('###1+1=',)),
        ('language_modeling', 0, {'strip_dataset': False}, '', ('1+1= ',)),
        # Multiple choice, and schemas.
        ('multiple_choice', 1, {}, 'Grass? green', ('\nSky?',)),
        ('schema', 0, {}, '', ('the cup', 'the bag')),  # nothing precedes: no continuation delimiter
        ('schema', 0, {'prelimiter': 'P: '}, '', ('P: the cup', 'P: the bag')),
        ('schema', 1, {}, 'he sang.', ('\nthe cup', '\nthe bag')),
        # upstream puts the prelimiter before the example delimiter
        ('schema', 1, {'prelimiter': 'P: '}, 'P: he sang.', ('P: \nthe cup', 'P: \nthe bag')),
        ('schema', 1, {'strip_dataset': False}, 'he sang.', ('\nthe cup ', '\nthe bag ')),
        ('schema', 0, {'prompt_string': 'Go.', 'continuation_delimiter': ' - '}, 'Go.', ('\nthe cup -', '\nthe bag -')),
    ],
)
def test_prompts_by_hand(kind: str, num_shots: int, keys: dict, preamble: str, contexts: tuple[str, ...]):
    contents, continuations = {
        'language_modeling': (PASSAGES, ('2',)),
        'multiple_choice': (CHOICES, ('blue', 'green')),
        'schema': (SCHEMAS, ('was full.', 'was full.')),
    }[kind]
    first, *shots = examples_of(contents)

    prompt = task(kind, **keys).prompt(first, shots[:num_shots])

    assert (prompt.preamble, prompt.contexts, prompt.continuations) == (preamble, contexts, continuations)


def items(tokenizer, contents=PASSAGES, *, max_seq_len: int = 100, **settings):
    preparation = Preparation(
        task=replace(task('language_modeling', 2), **settings),
        examples=examples_of(contents),
        encoder=Encoder(tokenizer),
        max_seq_len=max_seq_len,
    )
    return preparation.items()


def text(item) -> str:
    return ''.join(map(chr, item.request.contexts[0])).replace('\1', '^')


def test_fixed_shots_are_the_same_unless_they_contain_the_item(character_tokenizer):
    """Rows 1 and 4 are duplicates. Of the distinct rows, 3 and 0 are drawn, and 5 as the spare."""
    assert random.Random(1234).sample([0, 1, 2, 3, 5], 3) == [3, 0, 5]
    contents = [Passage(f'{number}+{number}=', f'{2 * number}') for number in (1, 2, 3, 4, 2, 6)]

    texts = [text(item) for item in items(character_tokenizer, contents, fewshot='fixed')]

    assert texts == [
        '^4+4= 8\n6+6= 12\n1+1=',
        '^4+4= 8\n1+1= 2\n2+2=',
        '^4+4= 8\n1+1= 2\n3+3=',
        '^6+6= 12\n1+1= 2\n4+4=',
        '^4+4= 8\n1+1= 2\n2+2=',
        '^4+4= 8\n1+1= 2\n6+6=',
    ]


# Draws.


def test_shots_are_those_of_the_reference_in_its_order():
    assert list(fewshot_indices(12, 3, seed=1234)) == RECORDED


@pytest.mark.parametrize(
    ('num_examples', 'num_shots', 'expected'),
    [
        (3, 10, [(1, 2), (0, 2), (0, 1)]),  # all others
        (3, 0, [(), (), ()]),
        (1, 10, [()]),  # no others
    ],
)
def test_there_are_no_more_shots_than_other_examples(num_examples: int, num_shots: int, expected):
    assert list(fewshot_indices(num_examples, num_shots, seed=1234)) == expected


@pytest.mark.parametrize('num_shots', [1, 3, 10, 100])
def test_an_example_is_never_its_own_shot_and_shots_are_distinct(num_shots: int):
    for index, shots in enumerate(fewshot_indices(12, num_shots, seed=5)):
        assert index not in shots
        assert len(set(shots)) == len(shots) == min(num_shots, 11)


def fixed(questions: str, num_shots: int, seed: int = 5) -> list[str]:
    """Return the shots of each question as text; a letter is a question."""
    return [''.join(questions[i] for i in shots) for shots in fixed_indices(questions, num_shots, seed=seed)]


@given(questions=st.text('abcdef', min_size=1, max_size=20), num_shots=st.integers(0, 8), seed=st.integers(0, 50))
def test_fixed_shots_are_the_same_for_all_items_they_do_not_contain(questions: str, num_shots: int, seed: int):
    rows = fixed(questions, num_shots, seed)
    for question, shots in zip(questions, rows, strict=True):
        assert question not in shots
        assert len(shots) == len(set(shots)) == min(num_shots, len(set(questions)) - 1)
    common = {shots for question, shots in zip(questions, rows, strict=True) if question not in ''.join(rows)}
    assert len(common) <= 1


@pytest.mark.parametrize('fewshot', ['reference', 'fixed'])
def test_shots_are_from_the_category_and_every_category_restarts_the_seed(fewshot):
    # The categories alternate, so index n of a category is row 2n or 2n + 1.
    examples = [Example(row=row, content=Passage(f'{row}', ''), category='ab'[row % 2]) for row in range(20)]
    draw_shots = replace(task('language_modeling', 4), fewshot=fewshot).draw_shots

    pairs = list(with_shots(examples, draw_shots))

    assert [example.category for example, _ in pairs] == ['a'] * 10 + ['b'] * 10
    assert all(shot.category == example.category for example, shots in pairs for shot in shots)
    indices_in_category = [tuple(shot.row // 2 for shot in shots) for _, shots in pairs]
    assert indices_in_category[:10] == indices_in_category[10:]
    if fewshot == 'fixed':
        assert len(set(indices_in_category)) == 5  # the common ones, and one for each shot


def redrawn(questions: str, shots: str | None = None, *, num_shots: int = 3, seed: int = 1234) -> list[tuple[int, ...]]:
    """Return the shots of each question; a letter is a question, and in `shots` its answer."""
    drawn = fewshot_indices(len(questions), num_shots, seed=seed)
    return list(redrawn_indices(drawn, questions, (shots or questions).__getitem__, seed=seed))


def test_only_shots_that_ask_the_same_question_are_drawn_again():
    """Rows 0 and 9 are equal: of the recorded draws, only (1, 9, 7) is that of an item with a row of its question."""
    shots = redrawn('abcdefghiakl')

    changed = [row for row in range(12) if shots[row] != RECORDED[row]]
    assert changed == [0]
    assert shots[0][::2] == RECORDED[0][::2]  # the first and the last of the three, 1 and 7


@given(questions=st.text('abcde', min_size=1, max_size=20), num_shots=st.integers(0, 8), seed=st.integers(0, 50))
def test_no_shot_has_the_question_of_its_item(questions: str, num_shots: int, seed: int):
    """There are as many shots as were drawn if there are so many rows with other questions."""
    as_drawn = list(fewshot_indices(len(questions), num_shots, seed=seed))

    as_redrawn = redrawn(questions, num_shots=num_shots, seed=seed)

    for item, (before, shots) in enumerate(zip(as_drawn, as_redrawn, strict=True)):
        num_others = sum(question != questions[item] for question in questions)
        assert len(set(shots)) == len(shots) == min(len(before), num_others)
        assert all(questions[shot] != questions[item] for shot in shots)
        assert shots == before or any(questions[shot] == questions[item] for shot in before)


@pytest.mark.parametrize(
    ('questions', 'shots', 'expected'),
    [
        ('aa', 'xx', [(), ()]),  # nothing but the answer
        ('aa', 'xy', [(1,), (0,)]),  # an instruction that all rows share
        # The only other question is the third, which may get either of the first two.
        ('aab', 'xxy', [(2,), (2,), None]),
        ('aab', 'xzy', [(2,), (2,), None]),
    ],
)
def test_without_enough_other_questions_shots_with_another_answer_stay(questions, shots, expected):
    as_redrawn = redrawn(questions, shots, num_shots=1)

    for shots_of_item, shots_expected in zip(as_redrawn, expected, strict=True):
        assert shots_expected is None or shots_of_item == shots_expected


DUPLICATES = {
    'language_modeling': [Passage(f'{i % 6}+1=', f'{i % 6 + 1}') for i in range(12)],
    'multiple_choice': [Choices(f'{i % 6}?', ('yes', 'no')[:: (-1) ** (i > 5)], i > 5) for i in range(12)],  # turned
    'schema': [Schema((f'the cup {i % 6}', f'the bag {i % 6}'), 'was full.', 1) for i in range(12)],
    'generation_task_with_answers': [OpenQuestion(f'Q{i % 6} ' + ' ' * (i > 5) + '?', ('4',), None) for i in range(12)],
    'code_evaluation': [
        CodeProblem(f'def f{i % 6}():\n', 'f', '    pass\n', 'assert 1', (), 'python') for i in range(12)
    ],
}


@pytest.mark.parametrize('kind', DUPLICATES)
def test_an_item_is_shown_no_duplicate_of_itself_whatever_the_type(kind: str):
    corrected, examples = task(kind, 5), examples_of(DUPLICATES[kind])
    reference = replace(corrected, semantics='reference')

    def num_shown_a_duplicate(spec) -> int:
        pairs = spec.examples_with_shots(examples, examples)
        return sum(any(shot.row % 6 == example.row % 6 for shot in shots) for example, shots in pairs)

    assert num_shown_a_duplicate(corrected) == 0
    assert num_shown_a_duplicate(reference) == len(corrected.own_questions(examples, examples)) > 0
