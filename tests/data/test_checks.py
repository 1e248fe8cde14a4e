"""`gauntlet data check` on small files with counts by hand, and on the sample data."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

from llmfoundry_gauntlet.data.checks import CheckedRow, TaskFile, find_overlap
from llmfoundry_gauntlet.errors import DataError

sys.path.insert(0, str(ROOT / 'scripts'))

from demo_data import training_documents

Check = Callable[..., dict[str, Any]]

TYPES = {'choices': 'multiple_choice', 'context_options': 'schema', 'continuation': 'language_modeling'}
WARNINGS = {'conflicting_golds', 'identical_right_choice', 'majority_answer', 'training_text'}
FOX = 'the quick brown fox jumps over the lazy dog while seven old men sleep under a tree'  # 17 words


@pytest.fixture
def check(tmp_path: Path, gauntlet, write_jsonl) -> Check:
    """Check a task with these rows; return its record with the overlap, and findings as counts and lines by kind."""

    def call(rows: list[Any], *words: Any) -> dict[str, Any]:
        write_jsonl('rows.jsonl', rows)
        kind = next(name for key, name in TYPES.items() if key in rows[0])
        entry = {'label': 'mine', 'dataset_uri': 'rows.jsonl', 'icl_task_type': kind, 'num_fewshot': 0}
        (tmp_path / 'tasks.yaml').write_text(yaml.safe_dump({'icl_tasks': [entry]}))
        status, out, _ = gauntlet(
            *('data', 'check', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--json', *words)
        )
        assert status == 0
        record = json.loads(out)
        (file,) = record['files']
        for finding in file['findings']:
            assert finding['is_warning'] == (finding['kind'] in WARNINGS)
        findings = {finding['kind']: (finding['count'], finding['lines']) for finding in file['findings']}
        return {**file, 'findings': findings, 'overlap': record['overlap']}

    return call


def passages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{'context': context, 'continuation': continuation} for context, continuation in pairs]


def choices(*rows: tuple[str, list[str], int]) -> list[dict[str, Any]]:
    return [{'query': query, 'choices': texts, 'gold': gold} for query, texts, gold in rows]


def cups(*endings: str) -> list[dict[str, Any]]:
    options = ['The cup fell on the plate and the cup', 'The cup fell on the plate and the plate']
    return [{'context_options': options, 'continuation': ending, 'gold': gold} for gold, ending in enumerate(endings)]


@pytest.mark.parametrize(
    ('rows', 'counts', 'findings'),
    [
        pytest.param(
            passages(('a', '1'), ('b', '2'), ('a', '1'), ('a', '1'), ('b', '3'), ('c', '4'), (' b ', '2')),
            (3, 4, 1),
            {'duplicate_rows': (3, [3, 4, 7]), 'repeated_prompts': (1, [5]), 'conflicting_golds': (1, [2])},
            id='duplicates and conflicts',
        ),
        pytest.param(
            choices(
                *(('to dry a cup', ['towel', 'water'], 0), ('to dry a cup', ['sponge', 'wind'], 1)),
                *(('to wet a cup', ['towel', 'water'], 1), ('to wet a cup', ['water', 'towel'], 0)),
            ),
            (0, 2, 1),
            {'repeated_prompts': (2, [2, 4]), 'other_choices': (1, [1])},
            id='a prompt with other choices',
        ),
        pytest.param(
            cups('fell', 'lay there'),
            (0, 1, 1),
            {'repeated_prompts': (1, [2]), 'other_choices': (1, [1])},
            id='two sentences of a schema',
        ),
        pytest.param(
            cups('fell', 'fell'), (0, 1, 1), {'repeated_prompts': (1, [2]), 'conflicting_golds': (1, [1])}, id='schema'
        ),
        pytest.param(
            choices(
                *(('q1', ['x', 'y', 'z'], 0), ('q2', ['x', 'y', 'y '], 0)),
                *(('q3', ['y', 'x', 'y'], 2), ('q4', ['x', 'x', 'y'], 2)),
            ),
            (0, 0, 0),
            {'identical_choices': (2, [2, 4]), 'identical_right_choice': (1, [3])},
            id='repeated choices',
        ),
    ],
)
def test_repetitions_are_found(check: Check, rows: list[Any], counts: tuple[int, ...], findings: dict[str, Any]):
    file = check(rows)
    assert (file['num_duplicates'], file['num_repeated'], file['num_conflicts']) == counts
    assert (file['num_rows'], file['findings']) == (len(rows), findings)


@pytest.mark.parametrize(
    ('rows', 'majority', 'warns'),
    [
        # `chance` is 50 %. 50 points more are 4.5 standard errors of 11.2; 25 points are 5 of 5; less than 5 points,
        # and 17 points, 2 standard errors of 8.3, may be chance.
        *(
            (
                choices(*((f'q{n}', [f'x{n}', f'y{n}'], int(n >= num_first)) for n in range(num_rows))),
                ('A', num_first / num_rows, 0.5),
                warns,
            )
            for num_rows, num_first, warns in ((20, 20, True), (100, 75, True), (100, 54, False), (36, 24, False))
        ),
        (choices(*((f'{n}?', ['no', 'yes'], int(n < 75)) for n in range(100))), ('yes', 0.75, 0.5), True),
        (passages(*((f'q{n}', f'a{n % 4 and n}') for n in range(12))), ('a0', 0.25, None), True),  # a fifth or more
    ],
)
def test_an_answer_that_is_right_too_often_is_a_warning(check: Check, rows: list[Any], majority: tuple, warns: bool):
    file = check(rows)
    assert file['majority'] == dict(zip(('answer', 'share', 'chance'), majority, strict=True))
    assert file['findings'] == ({'majority_answer': (1, [])} if warns else {})


def test_unreadable_rows_are_status_1_and_other_files_are_still_checked(gauntlet, tmp_path: Path, write_jsonl):
    write_jsonl('good.jsonl', passages(('a', '1'), ('a', '1')))
    write_jsonl('bad.jsonl', [*passages(('a', '1')), {'context': 'b'}])
    kinds = {'icl_task_type': 'language_modeling', 'num_fewshot': 0}
    tasks = [{'label': label, 'dataset_uri': f'{label}.jsonl', **kinds} for label in ('bad', 'good', 'absent')]
    (tmp_path / 'tasks.yaml').write_text(yaml.safe_dump({'icl_tasks': tasks}))
    words = ('--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--json')
    status, out, err = gauntlet('data', 'check', *words)
    record = json.loads(out)
    assert (status, [(file['name'], file['num_duplicates']) for file in record['files']]) == (1, [('good', 1)])
    assert "bad.jsonl:2: the key 'continuation' is missing" in err and 'absent.jsonl' in err
    assert record['problems'] == [line.removeprefix('error: ') for line in err.splitlines()]


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (('--data-root', 'EMPTY'), 'has no file of the Gauntlet or of SCORE'),
        (('--solutions', '--data-root', 'EMPTY'), 'has no file of a code task'),
        (('--solutions', '--against', 'x.txt'), '--against: has no effect with --solutions'),
        (('--against', 'EMPTY/x.txt'), 'x.txt: no such file'),
    ],
)
def test_a_wrong_option_is_status_2(gauntlet, tmp_path: Path, words: tuple[str, ...], message: str):
    status, _, err = gauntlet('data', 'check', *(word.replace('EMPTY', str(tmp_path)) for word in words))
    assert status == 2
    assert message in err


def test_warnings_are_printed_before_notes(check: Check, gauntlet, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(passages(('a', '1'), ('a', '2'), ('b', '3'), ('b', '3'), (FOX, '4')))
    Path('text.txt').write_text(FOX)
    words = ('--tasks', 'tasks.yaml', '--data-root', '.', '--against', 'text.txt')
    status, out, err = gauntlet('data', 'check', *words)
    assert (status, err) == (0, '')
    plain = ' '.join(out.split())
    assert 'mine 5 1 2 1 40% -' in plain
    assert '17 words: 1 of 1 rows' in plain
    warnings, notes = plain.split('warnings: 2')[1].split('notes: 2')
    assert 'rows.jsonl:1: ' in warnings
    assert 'rows.jsonl:5: 5 of its 5 sequences of 13 words occur in text.txt:1' in warnings
    assert 'rows.jsonl:4: ' in notes


def test_all_files_below_a_data_root_are_checked_and_solutions_run_if_asked(gauntlet, tmp_path: Path, write_jsonl):
    row = {'prompt': 'def f():\n', 'entry_point': 'f', 'canonical_solution': '    return 1\n'}
    test = 'def check(candidate):\n    assert candidate() == '
    write_jsonl('programming/human_eval.jsonl', [{**row, 'test': f'{test}1\n'}, {**row, 'test': f'{test}2\n'}])
    question = {'passage': '', 'question': 'How many?', 'options': ['(A)1', '(B)2', '(C)3', '(D)3']}
    write_jsonl('score/agieval_v1/sat-en.jsonl', [{**question, 'label': label} for label in 'AB'])
    words = ('--data-root', tmp_path)
    status, out, _ = gauntlet('data', 'check', '--json', *words)
    found = {file['name']: [finding['kind'] for finding in file['findings']] for file in json.loads(out)['files']}
    repeated = ['repeated_prompts', 'conflicting_golds', 'identical_choices']
    assert (status, found) == (0, {'human_eval': ['repeated_prompts'], 'score_agieval/sat-en': repeated})
    status, out, _ = gauntlet('data', 'check', '--solutions', '--sandbox', 'rlimits', '--json', *words)
    (task,) = json.loads(out)
    assert (status, task['num_solutions'], list(task['failures'])) == (1, 2, ['1'])
    status, out, _ = gauntlet('data', 'check', '--solutions', '--sandbox', 'rlimits', *words)
    assert status == 1 and '1 of 2 solutions pass' in out and 'row 1: ' in out


# Training text.


def file_of(*questions: str, source: str | None = None, answer: str | None = None) -> TaskFile:
    """Return a file of these questions, each with its own source unless they share one."""
    rows = [
        CheckedRow(line=line, digest=text, source=source or str(line), prompt=text, question=text, answer=answer)
        for line, text in enumerate(questions, start=1)
    ]
    return TaskFile(name='mine', source='rows.jsonl', rows=tuple(rows))


def search(folder: Path, file: TaskFile, content: str | bytes, name: str = 'text.txt') -> list[tuple[int, int, int]]:
    """Search for rows in a training text; return the line, the sequences found, and all sequences of each found row."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (task,) = find_overlap([file], [str(folder / name)])['tasks']
    return [(row['line'], row['num_found'], row['num_sequences']) for row in task['found']]


def test_rows_found_in_training_text_are_named_with_their_place(check: Check, tmp_path: Path):
    asked = 'seven brown dogs and eight white cats ran over nine green hills at ten on monday'  # 16 words
    rows = passages((asked, 'morning'), (asked.replace('brown', 'black'), 'noon'), ('too', 'short'))
    (tmp_path / 'books').mkdir()
    (tmp_path / 'books' / 'one.txt').write_text('Nothing here.\n')
    with gzip.open(tmp_path / 'books' / 'two.jsonl.gz', 'wt') as lines:
        lines.write(f'{json.dumps({"text": "nothing"})}\n{json.dumps({"meta": [asked.title()]})}\n')
    overlap = check(rows, '--against', tmp_path / 'books')['overlap']
    (task,) = overlap['tasks']
    assert overlap['num_words'] == 2 + 1 + 16
    assert (task['num_rows'], task['num_checked'], task['num_most']) == (3, 2, 1)
    place = f'{tmp_path}/books/two.jsonl.gz:2'
    assert task['found'] == [
        {'line': 1, 'num_found': 4, 'num_sequences': 4, 'place': place},
        {'line': 2, 'num_found': 2, 'num_sequences': 4, 'place': place},  # those after the second word
    ]


WORDS = FOX.split()
HALVES = [' '.join(WORDS[:9]), ' '.join(WORDS[9:])]
START, END = ' '.join(WORDS[:10]), ' '.join(WORDS[10:])
WINDOWS = f'\ufeff{{"text": "{FOX}"}}\r\n\r\n{{"text": "Two."}}\r\n'.encode()


@pytest.mark.parametrize(
    ('file', 'text', 'name', 'expected'),
    [
        (file_of(FOX), f'"{", ".join(WORDS).upper()}!" he said', 'text.txt', [(1, 5, 5)]),  # case and punctuation
        (file_of(FOX), ' '.join(WORDS[::-1]), 'text.txt', []),
        (file_of(FOX), ' '.join(WORDS[:12]), 'text.txt', []),  # 13 consecutive words are needed
        (file_of(FOX), ' '.join(WORDS[:13]), 'text.txt', [(1, 1, 5)]),
        (file_of(FOX), '\n'.join(['x', *HALVES]), 'text.txt', [(1, 5, 5)]),  # a sequence may span lines,
        (file_of(FOX), '\n'.join(map(json.dumps, HALVES)), 'text.jsonl', []),  # but not documents
        (file_of(START, answer=END), FOX, 'text.txt', [(1, 5, 5)]),  # a short question, with its answer
        (file_of(START), FOX, 'text.txt', []),
        (file_of(FOX), gzip.compress(WINDOWS), 'train.jsonl.gz', [(1, 5, 5)]),
        (file_of(FOX), bz2.compress(WINDOWS), 'train.jsonl.bz2', [(1, 5, 5)]),
        (file_of(FOX), lzma.compress(WINDOWS), 'train.jsonl.xz', [(1, 5, 5)]),
    ],
)
def test_rows_are_found_by_13_consecutive_words_of_one_document(tmp_path, file, text: str, name: str, expected):
    assert search(tmp_path, file, text, name) == expected


def test_an_instruction_shared_by_many_rows_is_not_searched_for(tmp_path):
    instruction = ' '.join(f'rule{n}' for n in range(20))
    questions = [f'{letter}1 {letter}2 {instruction} {letter}3 {letter}4' for letter in 'abcd']
    assert search(tmp_path, file_of(*questions), instruction) == []
    assert search(tmp_path, file_of(*questions), questions[2]) == [(3, 4, 4)]
    assert len(search(tmp_path, file_of(*questions, source='one passage'), instruction)) == 4


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('rows.jsonl', b'{"text": "a"}\n{"text": \n', r'rows.jsonl:2: malformed JSON: Expecting value at column 9'),
        ('tokens.bin', b'\x01\x00\x02\x00', r'tokens.bin:1: binary data'),
        ('cut.txt.gz', gzip.compress(b'some words ' * 100, mtime=0)[:-20], r'cut.txt.gz: cannot be read: '),
        ('no.txt.gz', b'plain text', r'no.txt.gz: cannot be read: Not a gzipped file'),
    ],
)
def test_an_unreadable_text_is_an_error_that_names_it(tmp_path, name: str, content: bytes, message: str):
    with pytest.raises(DataError, match=message):
        search(tmp_path, file_of(FOX), content, name)


def test_the_sample_data_are_sound_and_not_in_the_demos_training_text(gauntlet, tmp_path: Path, write_jsonl):
    write_jsonl('train.jsonl', [{'text': text} for text in training_documents()])
    words = ('--data-root', ROOT / 'eval_data', '--against', tmp_path / 'train.jsonl', '--json')
    status, out, err = gauntlet('data', 'check', *words)
    assert (status, err) == (0, '')
    record = json.loads(out)
    overlap = record['overlap']
    assert overlap['num_words'] > 500_000
    assert sum(task['num_checked'] for task in overlap['tasks']) > 700
    assert {task['name']: task['found'] for task in overlap['tasks'] if task['found']} == {}
    found = {file['name']: [finding['kind'] for finding in file['findings']] for file in record['files']}
    schema = ['repeated_prompts', 'other_choices']  # two sentences each
    assert {name: kinds for name, kinds in found.items() if kinds} == {
        **{'winograd': schema, 'winogrande': schema},
        **{'pubmed_qa_labeled': ['majority_answer'], 'bigbench_cs_algorithms': ['majority_answer']},  # few answers
    }
