"""The journal of an evaluation: finished items are read back, only by the same evaluation."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from journals import IDENTITY, item, kept, lines_of, problems_of, write

from llmfoundry_gauntlet.results.journal import JOURNAL, Journal, line_of, next_attempt, read_journal, remove_journal
from llmfoundry_gauntlet.types import ItemKey


def test_without_files_there_is_no_journal(tmp_path):
    assert read_journal(tmp_path / 'nowhere') is None
    (tmp_path / JOURNAL).write_text('something else')
    assert read_journal(tmp_path) is None
    (tmp_path / JOURNAL).unlink()
    (tmp_path / JOURNAL).mkdir()
    assert read_journal(tmp_path) is None
    (tmp_path / JOURNAL / '000-rank0.jsonl').touch()
    assert read_journal(tmp_path) is None
    assert read_journal(tmp_path, repair=True) is None


def test_closing_waits_for_a_writing_thread(tmp_path, monkeypatch):
    """Programs run beside the model, and an evaluation may end before they do."""
    journal = Journal(tmp_path, IDENTITY, attempt=0, rank=0)
    writing, may_end = threading.Event(), threading.Event()

    def slow_line(content: str) -> bytes:
        writing.set()
        assert may_end.wait(10)
        return line_of(content)

    monkeypatch.setattr('llmfoundry_gauntlet.results.journal.line_of', slow_line)
    with ThreadPoolExecutor() as threads:
        added = threads.submit(journal.add, [item(0)])
        assert writing.wait(10)
        closed = threads.submit(journal.close)
        time.sleep(0.1)
        may_end.set()
        added.result(), closed.result()
    journal.add([item(1)])
    assert journal.problem is None
    assert kept(tmp_path) == ({0}, set())


def test_items_and_suspects_of_all_ranks_and_attempts_are_found(tmp_path):
    spoilt = item(0, logprobs=(math.nan, math.nan))  # a suspect that is then run again is both
    write(tmp_path, [item(1)], suspects=[spoilt, item(2)])
    write(tmp_path, [item(3), item(1), item(3)], rank=1)  # duplicates are one item
    write(tmp_path, [item(4)], suspects=[item(5)], rank=12)
    write(tmp_path, [item(6), item(0)], attempt=1, rank=1)

    finished = read_journal(tmp_path)

    assert finished.identity == IDENTITY
    assert finished.results == {result.key: result for result in map(item, (0, 1, 3, 4, 6))}
    assert finished.suspects.keys() == {spoilt.key, item(2).key, item(5).key}


def test_the_time_of_all_attempts_is_found(tmp_path, monkeypatch):
    """The attempts end 7 s and 3 s after their start, as of the last item of any of their ranks."""
    clock = iter([1002.0, 1005.0, 1007.0, 2003.0])
    monkeypatch.setattr('llmfoundry_gauntlet.results.journal.time.time', lambda: next(clock))
    for attempt, rank, started, rows in ((0, 0, 1000.0, (0, 1)), (0, 1, 1000.0, (2,)), (1, 0, 2000.0, (3,))):
        with closing(Journal(tmp_path, IDENTITY, attempt=attempt, rank=rank, started=started)) as journal:
            for row in rows:
                journal.add([item(row)])
    found = read_journal(tmp_path)
    assert (found.started, found.seconds) == (1000.0, 10.0)


def test_items_are_readable_once_added(tmp_path):
    with closing(Journal(tmp_path, IDENTITY, attempt=0, rank=0)) as journal:
        for row in range(5):
            journal.add([item(2 * row), item(2 * row + 1)])
            assert kept(tmp_path) == ({*range(2 * row + 2)}, set())  # as after a kill
        journal.add([])
        assert len(lines_of(journal.path)) == 11


def test_concurrent_threads_write_whole_lines(tmp_path):
    with closing(Journal(tmp_path, IDENTITY, attempt=0, rank=0)) as journal, ThreadPoolExecutor(8) as threads:
        for row in range(200):
            threads.submit(journal.add, [item(row, text='long' * 5000)])
        threads.shutdown(wait=True)
    assert len(lines_of(journal.path)) == 201
    assert kept(tmp_path) == ({*range(200)}, set())


def test_any_text_is_read_back(tmp_path):
    texts = [
        'two\nlines\r\nand\rmore\n',
        'NUL \0 and \x0b \x0c \x1c \x1d \x1e \x1f',
        'next line \x85, line \u2028 and paragraph \u2029',
        'lone \ud800 and \udfff, and two that would be a pair: \ud83d\ude00',
        'a whole pair 😀, \ufeff and \uffff',
        '12 0123456789abcdef {"task": "t"}\n',
        '\\u2028 \\n "quoted" \\',
        '',
    ]
    name = '猫 "quoted"\\/1-shot'
    results = [
        replace(item(0, text=text, answer=text, facts={text: text}), key=ItemKey(name, row, file=text), gold=text)
        for row, text in enumerate(texts)
    ]
    path = write(tmp_path, results)
    assert path.read_bytes().count(b'\n') == len(path.read_bytes().splitlines()) == 1 + len(texts)
    assert read_journal(tmp_path).results == {result.key: result for result in results}


@pytest.mark.parametrize('repair', [False, True])
def test_files_of_different_evaluations_are_an_error(tmp_path, repair: bool):
    write(tmp_path, [item(0)])
    write(tmp_path, [item(1)], rank=1)
    path = write(tmp_path, [item(2)], attempt=1, identity={'model': '77', 'precision': 'fp32', 'layout': 'packed'})
    (problem,) = problems_of(tmp_path, repair=repair)
    assert problem.startswith(f'{path}: ') and 'overwrite: true' in problem
    for name in ('model 77 (now 0f3a)', 'max_seq_len None (now 2048)', 'layout packed (now None)'):
        assert name in problem
    assert 'precision' not in problem


def test_the_next_attempt_is_after_all_others(tmp_path):
    assert next_attempt(tmp_path / 'nowhere') == 0
    assert next_attempt(tmp_path) == 0
    write(tmp_path)
    assert next_attempt(tmp_path) == 1
    write(tmp_path, rank=3)
    assert next_attempt(tmp_path) == 1
    write(tmp_path, attempt=1, rank=17)  # where rank 0 wrote nothing
    assert next_attempt(tmp_path) == 2
    write(tmp_path, attempt=41)
    assert next_attempt(tmp_path) == 42
    for name in ('notes.jsonl', '050.jsonl', '060-rank0.jsonl~', 'abc-rank0.jsonl'):
        (tmp_path / JOURNAL / name).touch()
    assert next_attempt(tmp_path) == 42


def test_attempts_are_read_in_order(tmp_path):
    for attempt in (10, 2, 0):
        write(tmp_path, [item(0, text=str(attempt))], attempt=attempt)
    (read,) = read_journal(tmp_path).results.values()
    assert read.text == '10'


def test_removing_a_journal_removes_nothing_else(tmp_path):
    write(tmp_path, [item(0)])
    (tmp_path / 'results.json').write_text('{}')
    remove_journal(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['results.json']
    remove_journal(tmp_path)
    remove_journal(tmp_path / 'nowhere')
    assert read_journal(tmp_path) is None
    assert next_attempt(tmp_path) == 0
