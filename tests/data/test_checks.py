"""`gauntlet data check`: small files with counts by hand, and the real files against counts measured elsewhere."""

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
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.data.checks import CheckedRow, Record, TaskFile, find_overlap
from llmfoundry_gauntlet.errors import DataError

sys.path.insert(0, str(ROOT / 'scripts'))

from demo_data import training_documents

Check = Callable[..., dict[str, Any]]

TYPES = {'choices': 'multiple_choice', 'context_options': 'schema', 'continuation': 'language_modeling'}
FOX = 'the quick brown fox jumps over the lazy dog while seven old men sleep under a tree'  # 17 words


@pytest.fixture
def check(tmp_path: Path, gauntlet, write_jsonl) -> Check:
    """Check a task with these rows; return its record, with findings by kind and the overlap."""

    def call(rows: list[Any], *words: Any, **task: Any) -> dict[str, Any]:
        write_jsonl('rows.jsonl', rows)
        kind = next((name for key, name in TYPES.items() if key in rows[0]), 'generation_task_with_answers')
        entry = {'label': 'mine', 'dataset_uri': 'rows.jsonl', 'icl_task_type': kind, 'num_fewshot': 0, **task}
        (tmp_path / 'tasks.yaml').write_text(yaml.safe_dump({'icl_tasks': [entry]}))
        status, out, _ = gauntlet(
            *('data', 'check', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--json', *words)
        )
        assert status == 0
        record = json.loads(out)
        (file,) = record['files']
        file['overlap'] = record['overlap']
        file['findings'] = {finding['kind']: finding for finding in file['findings']}
        return file

    return call


def brief(file: dict[str, Any]) -> dict[str, tuple[int, list[int], bool]]:
    """Return findings by kind: number of rows, first lines, whether it is a warning."""
    return {kind: (found['count'], found['lines'], found['is_warning']) for kind, found in file['findings'].items()}


def passages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{'context': context, 'continuation': continuation} for context, continuation in pairs]


def choices(*rows: tuple[str, list[str], int]) -> list[dict[str, Any]]:
    return [{'query': query, 'choices': texts, 'gold': gold} for query, texts, gold in rows]


def test_duplicates_repeated_prompts_and_conflicting_golds_are_counted(check: Check):
    rows = passages(('a', '1'), ('b', '2'), ('a', '1'), ('a', '1'), ('b', '3'), ('c', '4'), (' b ', '2'))
    file = check(rows)
    assert (file['num_rows'], file['num_duplicates'], file['num_repeated'], file['num_conflicts']) == (7, 3, 4, 1)
    assert brief(file) == {
        'duplicate_rows': (3, [3, 4, 7], False),
        'repeated_prompts': (1, [5], False),
        'conflicting_golds': (1, [2], True),
    }


def test_a_prompt_with_other_choices_is_no_conflict(check: Check):
    file = check(
        choices(
            ('to dry a cup', ['towel', 'water'], 0),
            ('to dry a cup', ['sponge', 'wind'], 1),
            ('to wet a cup', ['towel', 'water'], 1),
            ('to wet a cup', ['water', 'towel'], 0),
        )
    )
    assert (file['num_repeated'], file['num_conflicts']) == (2, 1)
    assert brief(file) == {'repeated_prompts': (2, [2, 4], False), 'other_choices': (1, [1], False)}


def test_the_two_sentences_of_a_schema_do_not_conflict(check: Check):
    options = ['The cup fell on the plate and the cup', 'The cup fell on the plate and the plate']
    pair = [
        {'context_options': options, 'continuation': ending, 'gold': gold}
        for gold, ending in enumerate(('fell', 'lay there'))
    ]
    assert brief(check(pair)) == {'repeated_prompts': (1, [2], False), 'other_choices': (1, [1], False)}
    pair[1]['continuation'] = 'fell'
    assert brief(check(pair))['conflicting_golds'] == (1, [1], True)


def test_repeated_choices_are_found_and_a_repeated_right_choice_is_a_warning(check: Check):
    file = check(
        choices(
            ('q1', ['x', 'y', 'z'], 0),
            ('q2', ['x', 'y', 'y '], 0),
            ('q3', ['y', 'x', 'y'], 2),
            ('q4', ['x', 'x', 'y'], 2),
        )
    )
    assert brief(file) == {'identical_choices': (2, [2, 4], False), 'identical_right_choice': (1, [3], True)}


@pytest.mark.parametrize(
    ('num_rows', 'num_first', 'warns'),
    [
        (20, 20, True),  # 50 points above chance, 4.5 standard errors of 11.2
        (100, 75, True),  # 25 points, 5 standard errors of 5
        (100, 54, False),  # less than 5 points
        (36, 24, False),  # 17 points, 2 standard errors of 8.3
    ],
)
def test_an_overrepresented_gold_position_is_a_warning(check: Check, num_rows: int, num_first: int, warns: bool):
    file = check(choices(*((f'q{n}', [f'x{n}', f'y{n}'], int(n >= num_first)) for n in range(num_rows))))
    assert file['majority'] == {'answer': 'A', 'share': num_first / num_rows, 'chance': 0.5}
    assert brief(file) == ({'majority_answer': (1, [], True)} if warns else {})


def test_a_choice_shared_by_all_rows_is_named_by_its_text(check: Check):
    file = check(choices(*((f'is it {n}?', ['no', 'yes'], int(n < 75)) for n in range(100))))
    assert file['majority'] == {'answer': 'yes', 'share': 0.75, 'chance': 0.5}
    assert "'yes'" in file['findings']['majority_answer']['text']


def test_an_answer_that_is_right_in_a_fifth_of_the_rows_is_a_warning(check: Check):
    file = check(passages(*((f'q{n}', 'valid' if n % 4 == 0 else f'a{n}') for n in range(12))))
    assert file['majority'] == {'answer': 'valid', 'share': 0.25, 'chance': None}
    assert brief(file) == {'majority_answer': (1, [], True)}


def test_unreadable_rows_are_status_1_and_other_files_are_still_checked(gauntlet, tmp_path: Path, write_jsonl):
    write_jsonl('good.jsonl', passages(('a', '1'), ('a', '1')))
    write_jsonl('bad.jsonl', [*passages(('a', '1')), {'context': 'b'}])
    kinds = {'icl_task_type': 'language_modeling', 'num_fewshot': 0}
    tasks = [{'label': label, 'dataset_uri': f'{label}.jsonl', **kinds} for label in ('bad', 'good', 'absent')]
    (tmp_path / 'tasks.yaml').write_text(yaml.safe_dump({'icl_tasks': tasks}))
    words = ('--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--json')
    status, out, err = gauntlet('data', 'check', *words)
    assert status == 1
    record = json.loads(out)
    assert [(file['name'], file['num_duplicates']) for file in record['files']] == [('good', 1)]
    assert "bad.jsonl:2: the key 'continuation' is missing" in err
    assert 'absent.jsonl' in err
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


def test_canonical_solutions_run_only_with_solutions(gauntlet, tmp_path: Path, write_jsonl):
    row = {'prompt': 'def f():\n', 'entry_point': 'f', 'canonical_solution': '    return 1\n'}
    test = 'def check(candidate):\n    assert candidate() == '
    write_jsonl('programming/human_eval.jsonl', [{**row, 'test': f'{test}1\n'}, {**row, 'test': f'{test}2\n'}])
    words = ('--data-root', tmp_path)
    status, out, _ = gauntlet('data', 'check', '--json', *words)
    assert (status, [file['name'] for file in json.loads(out)['files']]) == (0, ['human_eval'])
    status, out, _ = gauntlet('data', 'check', '--solutions', '--sandbox', 'rlimits', '--json', *words)
    (task,) = json.loads(out)
    assert (status, task['num_solutions'], list(task['failures'])) == (1, 2, ['1'])
    status, out, _ = gauntlet('data', 'check', '--solutions', '--sandbox', 'rlimits', *words)
    assert status == 1
    assert '1 of 2 solutions pass' in out
    assert 'row 1: ' in out


# Training text.


def file_of(*questions: str, source: str | None = None, answer: str | None = None) -> TaskFile:
    """Write a file of these questions, each with its own source unless they share one."""
    rows = [
        CheckedRow(line=line, digest=text, source=source or str(line), prompt=text, question=text, answer=answer)
        for line, text in enumerate(questions, start=1)
    ]
    return TaskFile(name='mine', source='rows.jsonl', rows=tuple(rows))


def found_in(overlap: Record) -> list[tuple[int, int, int]]:
    """Return the line, the number of sequences found and of all sequences, for each row found."""
    (task,) = overlap['tasks']
    return [(row['line'], row['num_found'], row['num_sequences']) for row in task['found']]


def search(folder: Path, file: TaskFile, content: str | bytes, name: str = 'text.txt') -> Record:
    """Search for a file's rows in a training text with this content and name."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return find_overlap([file], [str(folder / name)])


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
    ],
)
def test_rows_are_found_by_13_consecutive_words_of_one_document(tmp_path, file, text: str, name: str, expected):
    assert found_in(search(tmp_path, file, text, name)) == expected


def test_an_instruction_shared_by_many_rows_is_not_searched_for(tmp_path):
    instruction = ' '.join(f'rule{n}' for n in range(20))
    questions = [f'{letter}1 {letter}2 {instruction} {letter}3 {letter}4' for letter in 'abcd']
    assert found_in(search(tmp_path, file_of(*questions), instruction)) == []
    assert found_in(search(tmp_path, file_of(*questions), questions[2])) == [(3, 4, 4)]
    assert len(found_in(search(tmp_path, file_of(*questions, source='one passage'), instruction))) == 4


@pytest.mark.parametrize(('suffix', 'compress'), [('gz', gzip.compress), ('bz2', bz2.compress), ('xz', lzma.compress)])
def test_compressed_text_is_read(tmp_path, suffix: str, compress):
    content = f'\ufeff{{"text": "{FOX}"}}\r\n\r\n{{"text": "Two."}}\r\n'.encode()
    overlap = search(tmp_path, file_of(FOX), compress(content), f'train.jsonl.{suffix}')
    assert (found_in(overlap), overlap['num_words']) == ([(1, 5, 5)], 18)


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


GAUNTLET_FACTS = {  # rows, duplicate rows, rows with a repeated prompt, prompts with conflicting golds
    'squad': (10570, 18, 29, 11),
    'piqa': (1838, 0, 35, 27),
    'openbook_qa': (500, 0, 2, 2),
    'jeopardy': (2117, 2, 8, 6),
    'mmlu': (14042, 27, 105, 0),
    'bigbench_qa_wikidata': (20321, 0, 1, 1),
    'arc_easy': (2376, 0, 5, 4),
    'arc_challenge': (1172, 0, 2, 2),
    'simple_arithmetic_withspaces': (1000, 2, 2, 0),
    'simple_arithmetic_nospaces': (1000, 2, 2, 0),
    'lambada_openai': (5153, 2, 2, 0),
    'hellaswag': (10042, 0, 23, 0),
    'winograd': (273, 0, 102, 102),
    'enterprise_pii_classification': (3395, 1, 1, 0),
}
FINDINGS = {  # how many rows, and the first 0-based row where it was noted
    'bigbench_logical_deduction': {'identical_choices': (300, 960)},
    'arc_easy': {'identical_choices': (7, 93), 'other_choices': (4, None)},
    'arc_challenge': {'identical_choices': (4, 121), 'other_choices': (2, None)},
    'squad': {'conflicting_golds': (11, None)},
    'jeopardy': {'conflicting_golds': (6, None)},
    'winograd': {'other_choices': (102, None)},
}


def test_the_real_files_have_the_measured_counts(gauntlet, real_data: Path):
    status, out, err = gauntlet('data', 'check', '--data-root', real_data, '--json')
    assert (status, err) == (0, '')
    record = json.loads(out)
    files = {file['name']: file for file in record['files']}
    assert len(files) == 49
    nothing = {name: (file['num_rows'], 0, 0, 0) for name, file in files.items()}
    names = ('num_rows', 'num_duplicates', 'num_repeated', 'num_conflicts')
    counts = {name: tuple(file[key] for key in names) for name, file in files.items()}
    assert counts == nothing | GAUNTLET_FACTS
    for name, expected in FINDINGS.items():
        found = {finding['kind']: finding for finding in files[name]['findings']}
        for kind, (count, row) in expected.items():
            assert found[kind]['count'] == count, (name, kind)
            assert row is None or found[kind]['lines'][0] == row + 1, (name, kind)
    always = {name for name, file in files.items() if file['majority']['share'] == 1}
    assert always == {'bigbench_strange_stories', 'bigbench_novel_concepts'}
    assert files['boolq']['majority'] == {'answer': 'yes', 'share': 2033 / 3270, 'chance': 0.5}
    assert len(record['absent']) == 8


def test_the_real_score_files_have_the_measured_counts(gauntlet):
    if not (SHARED_DATA / 'score').is_dir():
        pytest.skip("SCORE's files (../shared/data/score) are not here")
    status, out, err = gauntlet('data', 'check', '--data-root', SHARED_DATA, '--json')
    assert (status, err) == (0, '')
    files = {file['name']: file for file in json.loads(out)['files']}
    repeated_choices = {
        name: sum(found['count'] for found in file['findings'] if found['kind'].startswith('identical_'))
        for name, file in files.items()
    }
    assert {name: count for name, count in repeated_choices.items() if count} == {
        'score_agieval/aqua-rat': 7,
        'score_agieval/lsat-rc': 1,
        'score_mmlu_pro': 1,
    }
    # One question appears twice, with two different labels: it is no exact duplicate.
    sat_en = {finding['kind']: finding['count'] for finding in files['score_agieval/sat-en']['findings']}
    assert sat_en == {'repeated_prompts': 1, 'conflicting_golds': 1}
