"""Answers of generations and their scores by hand; the first table was also compared with llm-foundry 0.22's
`normalize_answer`.
"""

import pytest
from paths import ROOT

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.scoring.text import (
    answer_in,
    cut_at_stops,
    has_prefix_of,
    is_numeric_match,
    is_strict_match,
    normalize_answer,
    stop_position,
)
from llmfoundry_gauntlet.types import StopRule

AFTER_THOUGHT = StopRule(answer_delimiter=' #### ', answer_end='\n')
AT_ONCE = StopRule(answer_end='\n')

NORMALISED = [
    ('Paris', 'paris'),
    ('The Beatles', 'beatles'),
    ('an_apple', 'apple'),
    ("It's a dog.", 'it s dog'),
    ('A-Team', 'team'),
    ('\u2018tis \u00b4so\u00b4 `x\u2019', 'tis so x'),
    ('\u201cso\u201d', '\u201cso\u201d'),  # of curly quotes the single ones alone
    ('\u00cele-de-France', '\u00eele de france'),
    ('$1,234.50', '1 234 50'),
    ('-5', '5'),
    ('\u22125', '\u22125'),
    ('\u20ac8', '\u20ac8'),
    ('', ''),
]


@pytest.mark.parametrize(('text', 'expected'), NORMALISED)
def test_answers_are_normalized_as_in_triviaqa(text: str, expected: str):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ('strings', 'text', 'expected'),
    [
        (('\n\n', 'Question:'), 'one Question: two\n\nthree', 'one '),
        (('bc', 'abc', 'ab'), 'xabc', 'x'),  # overlapping: the first in the text
        (('stop', 'stopper'), 'stopper', ''),
        (('stop',), 'sto', 'sto'),
        ((), 'one\n\ntwo', 'one\n\ntwo'),
        (('.',), 'one two', 'one two'),
        (('(',), 'f(x)', 'f'),
        (('\\n',), 'one\ntwo', 'one\ntwo'),
    ],
)
def test_a_generation_ends_before_its_first_stop(strings: tuple[str, ...], text: str, expected: str):
    """Fix 5: the reference joins them into a regular expression."""
    assert cut_at_stops(text, StopRule(strings=strings)) == expected


@pytest.mark.parametrize(
    ('rule', 'text', 'expected'),
    [
        (AFTER_THOUGHT, 'one\ntwo #### 18\nQ: next', 'one\ntwo #### 18'),
        (AFTER_THOUGHT, 'one\ntwo', 'one\ntwo'),  # no answer yet
        (AFTER_THOUGHT, 'one #### \n \n 18 \nmore', 'one #### \n \n 18 '),
        (AFTER_THOUGHT, 'one #### 18\ntwo #### 19\n', 'one #### 18'),  # the first answer counts
        (AT_ONCE, '\n \n Paris\nQuestion', '\n \n Paris'),
        (AT_ONCE, '\n \n', '\n \n'),
        (StopRule(answer_delimiter=' #### '), 'one #### 18\ntwo', 'one #### 18\ntwo'),  # no end of its own
        (StopRule(strings=('\nQ: ',), answer_delimiter=' #### ', answer_end='\n'), 'one\nQ: two #### 18\n', 'one'),
        (StopRule(strings=('18',), answer_delimiter=' #### ', answer_end='\n'), 'one #### 18\n', 'one #### '),
        (AFTER_THOUGHT, 'one\n#### 18\nmore', 'one\n#### 18'),  # whatever the white space around the delimiter
        (AFTER_THOUGHT, 'one ####\n18\nmore', 'one ####\n18'),
        (AFTER_THOUGHT, '12.0#### 29.0\nmore', '12.0#### 29.0'),
        (AFTER_THOUGHT, 'one\n##### 18\n', 'one\n##### 18\n'),
        (StopRule(answer_delimiter='The answer is ', answer_end='.'), "The answer isn't. Is.", "The answer isn't. Is."),
    ],
)
def test_a_generation_ends_with_the_line_of_its_answer(rule: StopRule, text: str, expected: str):
    assert cut_at_stops(text, rule) == expected


def test_stops_are_searched_from_a_start_and_answers_from_the_beginning():
    """As a generation grows, only new text is searched, plus the length of a stop string."""
    assert stop_position('x#y#', StopRule(strings=('#',))) == 1
    assert stop_position('x#y#', StopRule(strings=('#',)), start=2) == 3
    assert stop_position('x#yz', StopRule(strings=('#',)), start=2) is None
    assert stop_position('one #### 18\nmore', AFTER_THOUGHT, start=14) == 11
    assert stop_position('Paris\n', StopRule()) is None


@pytest.mark.parametrize(
    ('strings', 'text', 'expected'),
    [
        (('e.', 'Answer:?'), 'The end. Answer', 'Th'),  # 'e ' is an e and any character
        (('Answer:?',), 'so Answer it', 'so '),
        (('.',), '\none', '\n'),  # a full stop matches no newline
        (('\n\n', 'Question:'), 'one Question: two', 'one '),
        ((), 'one', 'one'),
    ],
)
def test_as_a_pattern_stops_are_one_regular_expression(strings: tuple[str, ...], text: str, expected: str):
    """llm-foundry 0.22: `re.split('|'.join(stopping_criteria), text)[0]`."""
    assert cut_at_stops(text, StopRule(strings=strings, as_pattern=True)) == expected


@pytest.mark.parametrize('reference', [False, True])
@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('so #### 18 #### 19', '19'),
        ('so #### ', ''),
        ('so', None),
        ('so # 18', None),
        ('', None),
    ],
)
def test_the_answer_follows_the_last_delimiter(text: str, expected: str | None, reference: bool):
    assert answer_in(text, ' #### ', reference=reference) == expected


@pytest.mark.parametrize(
    ('text', 'delimiter', 'expected'),
    [
        ('so\n#### 294', ' #### ', '294'),  # as GSM8K itself has it
        ('#### 294', ' #### ', '294'),
        ('+ 12.0#### 29.0', ' #### ', '29.0'),
        ('so ####294', ' #### ', '294'),
        ('so ####\n\n294\n', ' #### ', '294\n'),
        ('so\t####\u00a0294', ' #### ', '294'),
        ('so\n#### 18\n#### 19', ' #### ', '19'),
        ('so ####', ' #### ', ''),
        ('So the\nanswer  is\n5.', 'The answer is ', None),  # in lower case
        ('So the\nanswer  is\n5.', ' the answer is ', '5.'),
        ('The answer is: 5', 'The answer is ', ': 5'),
        ('one\n\ntwo', '\n\n', 'two'),
        ('one\ntwo three', '\n\n', None),  # white space alone stands for itself
    ],
)
def test_white_space_around_a_delimiter_is_any_except_in_the_reference(text: str, delimiter: str, expected: str | None):
    """Mutations: the delimiter as it is written; white space that the text must have."""
    assert answer_in(text, delimiter, reference=False) == expected

    after_exact_delimiter = text.rpartition(delimiter)[2] if delimiter in text else None
    assert answer_in(text, delimiter, reference=True) == after_exact_delimiter


@pytest.mark.parametrize(
    ('text', 'delimiter'),
    [
        ('so ##### 294', ' #### '),
        ('so\n####', ' ##### '),
        ('The answer isolates 5', 'The answer is '),
        ('Xanswer: 5', ' answer: '),
    ],
)
def test_a_delimiter_is_no_part_of_a_longer_word_or_sign(text: str, delimiter: str):
    """Mutation: no look at the neighbors of a delimiter that has white space there."""
    assert answer_in(text, delimiter, reference=False) is None


def test_a_delimiter_without_white_space_may_be_part_of_a_word():
    assert answer_in('so #####18', '####', reference=False) == '#18'
    assert answer_in('XAnswer:5', 'Answer:', reference=False) == '5'


def marks(answer: str, *golds: str, normalize: bool = True) -> tuple[bool, bool, bool]:
    """Return whether an answer is right by prefix, strictly and by number."""
    return (
        has_prefix_of(answer, golds, normalize=normalize, reference=False),
        is_strict_match(answer, golds, normalize=normalize),
        is_numeric_match(answer, golds, normalize=normalize),
    )


@pytest.mark.parametrize(
    ('answer', 'golds'),
    [
        (' paris.\n', ['Paris']),
        ('PARIS', ['London', 'Paris']),
        ('Catch 22', ['Catch-22']),
        ('war, peace', ['War + Peace']),
        ('1890-1899', ['1890\u20131899']),
        ('18.', ['18']),
        ('$18', ['18']),
        ('18%', ['18']),
        ('\u22125', ['-5']),
        ('(3,-8)', ['$(3,-8)$']),
        ('7!', ['7!']),
    ],
)
def test_a_right_answer_matches_strictly_and_numerically(answer: str, golds: list[str]):
    assert marks(answer, *golds)[1:] == (True, True)


def test_only_the_prefix_accepts_longer_answers():
    """Fix 6: in the reference 12 is right if the answer is 1."""
    assert marks('12', '1') == (True, False, False)
    assert marks('The Beatles, who else', 'Beatles') == (True, False, False)
    assert marks('Beat', 'Beatles') == (False, False, False)
    assert marks('the old Beatles', 'Beatles') == (False, False, False)
    assert has_prefix_of('12', ['1'], normalize=True, reference=True)


@pytest.mark.parametrize(
    ('answer', 'gold'),
    [
        ('-5', '5'),
        ('5', '-5'),
        ('1 5', '1.5'),
        ('50%', '$50'),
        ('1 2', '12'),
        ('(3,8)', '$(3,-8)$'),
        ('$a<b$', '$a>b$'),
        ('$x+4$', '$x-4$'),
        ('(a - b)(a - b)', '(a + b)(a - b)'),
        ('7', '7!'),
        ('18 or 20', '18'),
        ('', '18'),
    ],
)
def test_strict_match_distinguishes_signs_that_normalization_removes(answer: str, gold: str):
    assert marks(answer, gold)[1:] == (False, False)


@pytest.mark.parametrize('answer', ['anything', 'the 7', '', 'a b'])
@pytest.mark.parametrize('gold', ['$a$', 'The', '...', ' '])
def test_an_answer_normalized_to_nothing_accepts_only_itself(answer: str, gold: str):
    """Fix 6: in the reference it accepts every output."""
    assert marks(answer, gold) == (False, False, False)
    assert has_prefix_of(answer, [gold], normalize=True, reference=True)


@pytest.mark.parametrize('letter', ['A', 'B', 'C'])
@pytest.mark.parametrize(
    ('answer', 'expected'),
    [
        ('{}', (True, True, True)),
        (' {}.\n', (True, True, True)),
        ('({})', (True, True, True)),
        ('**{}**', (True, True, True)),
        ('{}\n\nThe other ones are longer.', (True, False, False)),
        ('{}) 12 cm', (True, False, False)),
        ('{}: the second one', (True, False, False)),
        ('{} because the others melt', (True, False, False)),
        ('{} is right', (True, False, False)),
        ('D', (False, False, False)),
        ('', (False, False, False)),
        ('the others', (False, False, False)),
        ('a man walks', (False, False, False)),
    ],
)
def test_the_letter_a_is_no_article(letter: str, answer: str, expected: tuple[bool, bool, bool]):
    assert marks(answer.format(letter), letter) == expected


@pytest.mark.parametrize(
    ('answer', 'gold', 'expected'),
    [
        ('Vitamin A', 'vitamin A', (True, True, True)),
        ('the vitamin A.', 'Vitamin A', (True, True, True)),
        ('Hepatitis A virus', 'the hepatitis A', (True, False, False)),
        ('vitamin C', 'vitamin A', (False, False, False)),
        ('vitamin A', 'vitamin C', (False, False, False)),
        ('vitamin', 'vitamin A', (False, False, False)),
        ('vitamin A', 'vitamin', (True, False, False)),  # the prefix accepts it
        ('A Vitamin', 'vitamin', (True, True, True)),
        ('the A', 'A', (True, True, True)),
    ],
)
def test_an_article_at_the_end_is_a_name(answer: str, gold: str, expected: tuple[bool, bool, bool]):
    assert marks(answer, gold) == expected


def test_in_the_reference_the_letter_a_accepts_every_output():
    assert has_prefix_of('B', ['A'], normalize=True, reference=True)
    assert has_prefix_of('vitamin C', ['vitamin A'], normalize=True, reference=True)


def test_aliases_of_an_answer_normalized_to_nothing_count():
    assert marks(' $A$\n', '$a$') == (True, True, True)
    assert marks('(a', 'Static library', '(a') == (True, True, True)
    assert marks('static library', 'Static library', '(a') == (True, True, True)
    assert marks('Roadrunner', 'Static library', '(a') == (False, False, False)


def test_without_normalization_only_surrounding_white_space_is_removed():
    assert marks(' The Beatles\n', 'The Beatles ', normalize=False) == (True, True, True)
    assert marks('The Beatles.', 'The Beatles', normalize=False) == (True, True, True)
    assert marks('The Beatles!', 'The Beatles', normalize=False) == (True, False, False)
    assert marks('the Beatles', 'The Beatles', normalize=False) == (False, False, False)
    assert marks('-5', '5', normalize=False) == (False, False, False)
    assert marks('18 dollars', '18', normalize=False) == (True, False, True)
    assert marks('anything', '  ', normalize=False) == (False, False, False)
    assert marks('', '  ', normalize=False) == (False, False, False)
    assert has_prefix_of('anything', ['  '], normalize=False, reference=True)


NUM_ROWS = {'gsm8k': 1319, 'aqua': 245, 'agi_eval_sat_math': 220, 'triviaqa_sm_sub': 3000}


def real_rows(label: str, folder):
    """Return a task of the gauntlet and the contents of its real rows."""
    suite = load_suite(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')
    task = next(task for task in suite.tasks if task.label == label)
    return task, [example.content for example in task.read(folder).examples]


@pytest.mark.parametrize('label', NUM_ROWS)
def test_right_generations_to_real_rows_match_by_all_rules(real_data, label: str):
    """Also if the model continues with the next problem."""
    task, contents = real_rows(label, real_data)
    assert len(contents) == NUM_ROWS[label]
    assert not any(marks('anything at all', *content.golds)[0] for content in contents)
    rule = task.stops(contents)
    for row, content in enumerate(contents):
        for completion, gold in zip(task.responses(content), content.golds, strict=True):
            for ending in ('', f'{task.example_delimiter}{task.prelimiter}{contents[0].context}'):
                generated = cut_at_stops(completion + ending, rule)
                answer = generated
                if task.cot_delimiter:
                    answer = answer_in(generated, task.cot_delimiter, reference=False)
                assert answer == gold
                assert marks(answer, *content.golds) == (True, True, True), (row, gold)


def test_numbers_of_real_rows_are_equal_if_their_values_are(real_data):
    """By Python's floats; the prefix accepts 25 of the 1,319 next rows' numbers."""
    _, contents = real_rows('gsm8k', real_data)
    golds = [content.gold for content in contents]
    num_prefixes = 0
    for answer, gold in zip(golds, [*golds[1:], golds[0]], strict=True):
        is_equal = float(answer.replace(',', '')) == float(gold.replace(',', ''))
        prefix, strict, numeric = marks(answer, gold)
        assert strict == numeric == is_equal
        num_prefixes += prefix and not is_equal
    assert num_prefixes == 25
