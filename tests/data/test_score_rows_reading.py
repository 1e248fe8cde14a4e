"""SCORE questions read from their own files and from the rows of any multiple_choice task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmfoundry_gauntlet.data.examples import TaskRows
from llmfoundry_gauntlet.data.readers import RowError
from llmfoundry_gauntlet.data.score_rows import LetteredQuestion, MathQuestion, as_lettered, read_score_rows
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks.score import ScoreTask, read_source

LAW = {'question': 'Who?', 'options': ['he', 'she', ' it'], 'answer': 'B', 'answer_index': 1, 'category': 'law'}
SAT = {'passage': '', 'question': 'How many?', 'options': ['(A)1', '(B) 2', '(C)3', '(D)4'], 'label': 'C'}
SUM = {'problem': '1+1?', 'level': 'Level 1', 'type': 'Algebra', 'solution': r'It is $\boxed{2}$.'}


def task_of(dataset: str, tasks: Any = None, **keys: Any) -> ScoreTask:
    return load_suite(tasks, None, {'dataset': dataset, **keys}).tasks[-1]


def problems_of(dataset: str, folder: Path, **keys: Any) -> list[str]:
    with pytest.raises(DataError) as raised:
        read_score_rows(task_of(dataset, **keys).spec, folder)
    return [problem.replace(f'{folder}/', '') for problem in raised.value.problems]


def test_mmlu_pro_rows_have_their_category_as_topic_and_the_index_as_gold(write_jsonl, tmp_path):
    write_jsonl('score/mmlu_pro_test.jsonl', [LAW, '', {**LAW, 'category': 'math', 'answer_index': 0, 'answer': 'A'}])

    rows = read_score_rows(task_of('mmlu_pro').spec, tmp_path)

    assert [(example.row, example.file, example.category, example.variant) for example in rows.examples] == [
        (0, None, 'law', None),
        (2, None, 'math', None),
    ]
    assert rows.examples[0].content == LetteredQuestion('Who?', ('he', 'she', ' it'), 1, 'law')
    assert (rows.absent, rows.warnings) == ((), ())


def test_agieval_option_letters_are_removed_as_in_the_reference(write_jsonl, tmp_path):
    """lm-eval 0.4.13 cuts 3 characters of '(A)', 2 of 'A ' and 3 of 'A? ' and keeps all else, a space too."""
    options = ['(A)one', '(C) two', 'C three', 'D? four', 'E.five']
    write_jsonl('score/agieval_v1/sat-en.jsonl', [{**SAT, 'options': options, 'label': 'E'}])

    (example,) = read_score_rows(task_of('agieval', subsets='sat-en').spec, tmp_path).examples

    assert (example.row, example.file, example.category) == (0, 'sat-en', 'sat-en')
    assert example.content == LetteredQuestion('How many?', ('one', ' two', 'three', 'four', 'E.five'), 4)


@pytest.mark.parametrize(
    ('changes', 'text'),
    [
        ({}, 'How many?'),
        ({'passage': None}, 'How many?'),
        ({'passage': 'Once.\n'}, 'Once.\nQ: How many?'),
    ],
)
def test_an_agieval_question_follows_its_passage(write_jsonl, tmp_path, changes: dict[str, Any], text: str):
    write_jsonl('score/agieval_v1/sat-en.jsonl', [{**SAT, **changes}])

    (example,) = read_score_rows(task_of('agieval', subsets='sat-en').spec, tmp_path).examples

    assert example.content == LetteredQuestion(text, ('1', ' 2', '3', '4'), 2)


def test_math_rows_have_their_subject_as_category(write_jsonl, tmp_path):
    write_jsonl('score/hendrycks_math/algebra.jsonl', [SUM])
    write_jsonl('score/hendrycks_math/geometry.jsonl', [{**SUM, 'problem': '2+2?'}])

    rows = read_score_rows(task_of('math').spec, tmp_path)

    assert [(example.row, example.file, example.category) for example in rows.examples] == [
        (0, 'algebra', 'algebra'),
        (0, 'geometry', 'geometry'),
    ]
    assert rows.examples[0].content == MathQuestion('1+1?', r'It is $\boxed{2}$.')
    assert rows.absent == (
        'counting_and_probability',
        'intermediate_algebra',
        'number_theory',
        'prealgebra',
        'precalculus',
    )


@pytest.mark.parametrize(
    ('dataset', 'change', 'problem'),
    [
        # Options, their number, and the index of the right one.
        ('mmlu_pro', {'options': ['he']}, 'options is a list; allowed: a list of two or more texts'),
        ('mmlu_pro', {'options': ['he', '']}, "options[1] is ''; allowed: a non-empty text"),
        ('mmlu_pro', {'options': list('abcdefghijk')}, 'there are 11 options; allowed: 10, one per letter from A to J'),
        ('mmlu_pro', {'answer_index': 3}, 'answer_index is 3 but there are 3 choices (0..2)'),
        ('mmlu_pro', {'category': ''}, 'category is empty; allowed: text'),
        # The label, one letter of the options'.
        ('agieval', {'label': 'E'}, "label is 'E'; allowed: one letter of ABCD"),
        ('agieval', {'label': 'AB'}, "label is 'AB'; allowed: one letter of ABCD"),
        ('agieval', {'passage': 7}, 'passage is 7; allowed: text'),
        ('agieval', {'options': ['(A)1'] * 6}, 'there are 6 options; allowed: 5, one per letter from A to E'),
        ('math', {'problem': ''}, 'problem is empty; allowed: text'),
    ],
)
def test_a_malformed_row_is_named_with_file_and_line(
    write_jsonl, tmp_path, dataset: str, change: dict[str, Any], problem: str
):
    good_row = {'mmlu_pro': LAW, 'agieval': SAT, 'math': SUM}[dataset]
    path = {
        'mmlu_pro': 'score/mmlu_pro_test.jsonl',
        'agieval': 'score/agieval_v1/sat-en.jsonl',
        'math': 'score/hendrycks_math/algebra.jsonl',
    }[dataset]
    write_jsonl(path, [good_row, {**good_row, **change}, good_row])

    assert problems_of(dataset, tmp_path) == [f'{path}:2: {problem}']


def test_malformed_rows_of_all_files_are_reported_together(write_jsonl, tmp_path):
    write_jsonl('score/agieval_v1/sat-en.jsonl', [{**SAT, 'label': 'X'}, SAT, {**SAT, 'options': []}])
    write_jsonl('score/agieval_v1/sat-math.jsonl', [])
    write_jsonl('score/agieval_v1/lsat-ar.jsonl', ['7,', {**SAT, 'label': 'x'}])
    assert problems_of('agieval', tmp_path) == [
        'score/agieval_v1/sat-math.jsonl: has no rows; allowed: one JSON object per line',
        "score/agieval_v1/sat-en.jsonl:1: label is 'X'; allowed: one letter of ABCD",
        'score/agieval_v1/sat-en.jsonl:3: options is an empty list; allowed: a list of two or more texts',
        'score/agieval_v1/lsat-ar.jsonl:1: malformed JSON: Extra data at column 2',
        "score/agieval_v1/lsat-ar.jsonl:2: label is 'x'; allowed: one letter of ABCD",
    ]


@pytest.fixture
def two_subsets(write_jsonl, tmp_path: Path) -> Path:
    """Write two of the seven subsets of AGIEval, and return the data root."""
    write_jsonl('score/agieval_v1/sat-en.jsonl', [SAT])
    write_jsonl('score/agieval_v1/lsat-ar.jsonl', [SAT])
    return tmp_path


def test_absent_subsets_are_warnings(two_subsets: Path):
    rows = read_score_rows(task_of('agieval').spec, two_subsets)

    absent = ('sat-math', 'lsat-lr', 'lsat-rc', 'logiqa-en', 'aqua-rat')
    assert rows.absent == absent
    assert rows.warnings == tuple(f'score_agieval: no file of {name}; skipped' for name in absent)
    assert [example.file for example in rows.examples] == ['sat-en', 'lsat-ar']


def test_only_the_subsets_that_are_listed_are_read(two_subsets: Path):
    rows = read_score_rows(task_of('agieval', subsets='lsat-ar').spec, two_subsets)

    assert [example.file for example in rows.examples] == ['lsat-ar']


def test_a_listed_subset_that_is_absent_or_unknown_is_an_error(two_subsets: Path):
    subsets = ['sat-en', 'aqua-rat', 'sat_en', 'logiqa-en']

    unknown, *absent = problems_of('agieval', two_subsets, subsets=subsets)

    assert unknown == "score_agieval: subsets: 'sat_en' is unknown, did you mean 'sat-en'?"
    assert [problem.partition(' (looked')[0] for problem in absent] == [
        'score/agieval_v1/logiqa-en.jsonl: there is no such data file',
        'score/agieval_v1/aqua-rat.jsonl: there is no such data file',
    ]


@pytest.mark.parametrize(('dataset', 'name'), [('agieval', 'agieval_v1/sat-math'), ('mmlu_pro', 'mmlu_pro_test')])
def test_no_file_at_all_is_an_error(tmp_path, monkeypatch, dataset: str, name: str):
    monkeypatch.chdir(tmp_path)

    (problem,) = problems_of(dataset, tmp_path)

    assert problem.startswith(f'score_{dataset}: none of its files exist: score/{name}.jsonl')
    assert problem.endswith('; set data_root to their folder')


def test_oddities_are_warnings_with_the_first_place_and_a_count(write_jsonl, tmp_path):
    rows = [
        LAW,
        {**LAW, 'answer': 'C'},
        {key: value for key, value in LAW.items() if key != 'answer'},  # says nothing, contradicts nothing
        {**LAW, 'options': ['he', 'she', 'he']},
        {**LAW, 'options': ['he', 'she', 'she']},
        {**LAW, 'options': ['he', 'he', 'she'], 'answer': None},
    ]
    path = write_jsonl('score/mmlu_pro_test.jsonl', rows)

    warnings = read_score_rows(task_of('mmlu_pro').spec, tmp_path).warnings

    assert warnings == (
        f'{path}:2: answer contradicts answer_index; answer_index is used (2 such rows)',
        f'{path}:4: an option is repeated (1 such rows)',
        f'{path}:5: the right option is repeated (2 such rows)',
    )


# Rows of other tasks.


@pytest.mark.parametrize(
    ('query', 'choices', 'text', 'options'),
    [
        # No list of options: at most a hint for the answer goes.
        ('Sky?', ('blue', 'green'), 'Sky?', ('blue', 'green')),
        ('Sky?\nAnswer:', ('blue', 'green'), 'Sky?', ('blue', 'green')),
        ('Who is she? A:', ('a', 'b'), 'Who is she?', ('a', 'b')),
        ('Say the Answer', ('blue', 'green'), 'Say the Answer', ('blue', 'green')),
        ('Type DNA:', ('blue', 'green'), 'Type DNA:', ('blue', 'green')),
        # A list in the forms of the published files.
        ('Sky?\nA. blue\nB. green\nAnswer:', ('A', 'B'), 'Sky?', ('blue', 'green')),
        ('Sky?\nChoices\nA. blue\nB. green', ('A', 'B'), 'Sky?', ('blue', 'green')),
        ('Sky?\nChoices:\nA. blue\nB. green\nAnswer:', ('(A)', '(B)'), 'Sky?', ('blue', 'green')),
        ('Sky?\nChoices: A. blue\nB. green', ('A', 'B'), 'Sky?', ('blue', 'green')),
        ('Sky?\nChoices:\nA.) blue\nB.) green\nAnswer:', ('A', 'B'), 'Sky?', ('blue', 'green')),
        ('Sky?\nChoices:\na.) blue\nb.) green\nAnswer:', ('blue', 'green'), 'Sky?', ('blue', 'green')),
        # Names, and what looks like a list before it: from mmlu and logi_qa.
        ('Who?\nA. Jung\nB. B. F. Skinner', ('A', 'B'), 'Who?', ('Jung', 'B. F. Skinner')),
        ('Is it A. or\nB. by?\nA. in A. now\nB. no', ('A', 'B'), 'Is it A. or\nB. by?', ('in A. now', 'no')),
        ('Sky?\nA. blue\nand red\nB. green', ('A', 'B'), 'Sky?', ('blue\nand red', 'green')),
        # An empty option: from math_qa.
        ('How many?\nA. \nB. 2\nAnswer:', ('A', 'B'), 'How many?', ('', '2')),
        # Lists that say something else than the choices stay: the order of the choices counts.
        ('Sky?\nA. blue\nB. green', ('green', 'blue'), 'Sky?\nA. blue\nB. green', ('green', 'blue')),
    ],
)
def test_options_listed_in_a_query_are_removed_from_it(query: str, choices: tuple, text: str, options: tuple):
    assert as_lettered(query, choices, 1, 'law') == LetteredQuestion(text, options, 1, 'law')


@pytest.mark.parametrize(
    'query',
    [
        'Which?',
        'A. one\nB. two\nC. three',  # more options than choices
        'B. two\nA. one',
        'A. one\nAnswer:',  # fewer options than choices
        'Which?\nA one\nB two',  # without points
    ],
)
def test_letter_choices_without_a_list_are_an_error(query: str):
    with pytest.raises(RowError, match='the choices are letters, but the query does not end in a list of options'):
        as_lettered(query, ('A', 'B'), 0, '')


ARC = {'label': 'arc', 'dataset_uri': 'arc.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}


def source_rows(tmp_path: Path, **keys: Any) -> TaskRows:
    return read_source(task_of('arc', [{**ARC, **keys}]), tmp_path)


@pytest.fixture
def arc_root(write_jsonl, tmp_path: Path) -> Path:
    """Write rows of a task, and return the data root."""
    rows = [
        {'query': ' Sky?', 'choices': ['blue', 'green'], 'gold': 0, 'category': 'nature'},
        {'query': 'Who?\nA. he\nB. she\nAnswer:', 'choices': ['A', 'B'], 'gold': 1, 'category': 'law'},
        {'query': 'Who?', 'choices': ['he', 'he'], 'gold': 1, 'category': 'law'},
        {'query': 'How many?\nA. 1\nB. \nAnswer:', 'choices': ['A', 'B'], 'gold': 1, 'category': 'math'},
    ]
    write_jsonl('arc.jsonl', rows)
    return tmp_path


def test_rows_of_a_task_keep_their_number_and_category(arc_root: Path):
    rows = source_rows(arc_root, has_categories=True)

    assert [(example.row, example.category, example.content) for example in rows.examples[:2]] == [
        (0, 'nature', LetteredQuestion('Sky?', ('blue', 'green'), 0, 'nature')),
        (1, 'law', LetteredQuestion('Who?', ('he', 'she'), 1, 'law')),
    ]
    assert rows.absent == ()


def test_oddities_of_rows_of_a_task_are_warnings(arc_root: Path):
    assert source_rows(arc_root, has_categories=True).warnings == (
        'arc.jsonl:3: the right option is repeated (1 such rows)',
        'arc.jsonl:4: an option is empty (1 such rows)',
    )


def test_rows_of_a_task_without_categories_have_no_topic(arc_root: Path):
    assert source_rows(arc_root).examples[0].content.topic == ''


def test_malformed_rows_of_a_task_are_named(write_jsonl, tmp_path):
    write_jsonl('arc.jsonl', [{'query': 'Who?', 'choices': ['A', 'B'], 'gold': 1}] * 2)

    with pytest.raises(DataError) as raised:
        source_rows(tmp_path)

    problem = "the choices are letters, but the query does not end in a list of options (lines 'A. ...')"
    assert list(raised.value.problems) == [f'score_arc: arc.jsonl:{line}: {problem}' for line in (1, 2)]
