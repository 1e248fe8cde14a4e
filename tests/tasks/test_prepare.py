"""The cache of token ids, which several processes share.

`python test_prepare.py CACHE NOTES` prepares the same tasks as other processes and prints a digest of all items.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmfoundry_gauntlet.config.tasks import SETTINGS
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks import prepare
from llmfoundry_gauntlet.tasks.encode import PROMPTS_VERSION, Encoder
from llmfoundry_gauntlet.tasks.generation import Problem
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.language_modeling import Passage
from llmfoundry_gauntlet.tasks.multiple_choice import Choices, MultipleChoiceTask
from llmfoundry_gauntlet.tasks.prepare import LEFTOVER_SECONDS, cache_name, claim, prepare_tasks, trim
from llmfoundry_gauntlet.tasks.schema import Schema
from llmfoundry_gauntlet.types import Example, GenerateRequest, Item, Request, StopRule

TASK = {
    'label': 't',
    'dataset_uri': 'x',
    'num_fewshot': [2],
    'icl_task_type': 'multiple_choice',
    'has_categories': True,
}


class Characters:
    """A cacheable slow tokenizer: code points, after `bos` if special tokens are wanted.

    Texts with the name of a task in them, such as 'task7', are noted in `notes` with the process, and take `seconds`.
    """

    eos_token_id = None
    all_special_tokens = ()

    def __init__(self, *, bos: int = 1, notes: Path | None = None, seconds: float = 0.0) -> None:
        self._bos = [bos]  # not a plain setting: it shows in the ids alone
        self._notes, self._seconds = notes, (seconds,)
        self.init_kwargs: dict[str, Any] = {}
        self.added_tokens_decoder: dict[int, Any] = {}

    def save_vocabulary(self, folder: str) -> tuple[str, ...]:
        return ()

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        tasks = sorted({name for text in texts for name in re.findall(r'task\d+', text)})
        if self._notes is not None and tasks:
            with self._notes.open('a') as notes:
                notes.write(''.join(f'{name} {os.getpid()}\n' for name in tasks))
            time.sleep(*self._seconds)
        special = self._bos if add_special_tokens else []
        return {'input_ids': [special + [ord(character) for character in text] for text in texts]}


def preparation_of(examples=None, tokenizer=None, *, max_seq_len: int = 60, **changes) -> Preparation:
    """Return a small task, with changed settings and keys."""
    settings = {name: changes.pop(name) for name in SETTINGS if name in changes}
    (task,) = load_suite([{**TASK, **changes}]).tasks
    return Preparation(
        task=replace(task, **settings),
        examples=examples_of('q') if examples is None else examples,
        encoder=Encoder(tokenizer or Characters()),
        max_seq_len=max_seq_len,
    )


def examples_of(name: str, num_rows: int = 12) -> list[Example]:
    """Multiple choice, a few rows too long for their shots."""
    return [
        Example(
            row=2 * row, category='ab'[row % 2], content=Choices(f'{name} {row}?' + '!' * row, ('yes', 'no'), row % 2)
        )
        for row in range(num_rows)
    ]


def arrays_of(request: Request) -> list[np.ndarray]:
    if isinstance(request, GenerateRequest):
        return [request.context]
    return [*request.contexts, *request.continuations]


def digest_of(items: list[Item]) -> str:
    """Return a digest of the items without generation terms, and of which contexts are one array."""
    digest = hashlib.sha256()
    for item in items:
        request = item.request
        plain = (
            item.example.content,
            item.example.category,
            item.prompt_sha256,
            request.key,
            request.truncated,
            request.unscorable,
        )
        arrays = [ids.tolist() for ids in arrays_of(request)]
        if isinstance(request, GenerateRequest):
            others = request.max_new_tokens
        else:
            others = [[a is b for b in request.contexts] for a in request.contexts]
        digest.update(repr((plain, others, arrays)).encode())
    return digest.hexdigest()


def terms_of(items: list[Item]) -> list[tuple]:
    requests = [item.request for item in items if isinstance(item.request, GenerateRequest)]
    return [(request.max_new_tokens, request.stops, request.sampling) for request in requests]


def prepared(preparation: Preparation, cache: Path | None) -> list[Item]:
    (items,) = prepare_tasks({'t': preparation}, cache).values()
    return items


def notes_of(path: Path) -> list[tuple[str, str]]:
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


KINDS = {
    'multiple_choice': examples_of('q'),
    'language_modeling': [Example(row=i, content=Passage(f'{i}+{i}=', f'{2 * i}' * 30 ** (i % 2))) for i in range(6)],
    'schema': [Example(row=i, content=Schema((f'the cup{i}', f'a bag{i}'), f'was {i}.', i % 2)) for i in range(6)],
    'generation_task_with_answers': [
        Example(row=i, content=Problem(f'{i}+{i}=' + '?' * 5 * i, (f'{2 * i}', f'{2 * i}.0'), None)) for i in range(6)
    ],
}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('truncation', ['drop_shots', 'reference'])
@pytest.mark.parametrize('max_seq_len', [8, 30, 1000])
def test_cached_items_equal_those_prepared_without_a_cache(tmp_path, kind: str, truncation: str, max_seq_len: int):
    examples = KINDS[kind]
    keys = {'icl_task_type': kind, 'has_categories': kind == 'multiple_choice', 'truncation': truncation}
    preparation = preparation_of(examples, max_seq_len=max_seq_len, **keys)
    made = preparation.items()
    first = prepared(preparation, tmp_path)
    again = prepared(preparation, tmp_path)
    assert len(made) == len(examples)
    assert digest_of(made) == digest_of(first) == digest_of(again)
    assert terms_of(made) == terms_of(first) == terms_of(again)
    arrays = [ids for item in again for ids in arrays_of(item.request)]
    assert {(type(ids), ids.dtype, ids.ndim) for ids in arrays} == {(np.ndarray, np.dtype(np.int32), 1)}


def test_a_cached_task_is_not_tokenized_again_and_its_file_counts_as_used(tmp_path):
    notes = tmp_path / 'notes'
    for expected in (True, False):
        notes.unlink(missing_ok=True)
        prepared(preparation_of(examples_of('task1'), Characters(notes=notes)), tmp_path / 'cache')
        assert bool(notes_of(notes)) == expected
        (path,) = (tmp_path / 'cache').glob('*.tokens')
        assert path.stat().st_mtime > 1
        os.utime(path, (1, 1))


@pytest.mark.parametrize(
    'changed',
    [
        {'row': 99},
        {'category': 'b'},
        {'file': 'subset'},
        {'content': Choices('q 0.', ('yes', 'no'), 0)},
        {'content': Choices('q 0?', ('yes', 'now'), 0)},
        {'content': Choices('q 0?', ('yesn', 'o'), 0)},
        {'content': Choices('q 0?', ('yes', 'no'), 1)},
        {'content': Choices('q 0?', ('yes', 'no', 'no'), 0)},
    ],
    ids=str,
)
def test_a_changed_row_is_another_cache_entry(changed: dict[str, Any]):
    first, *others = examples_of('q')
    rows = ([first, *others], [replace(first, **changed), *others], others)
    assert len({cache_name(preparation_of(examples)) for examples in rows}) == 3


@pytest.mark.parametrize('num_shots', [0, 2])
def test_a_changed_answer_or_thought_is_another_cache_entry(num_shots: int):
    """It may change how long a generation may be, even where no shot shows it."""
    kind, first = 'generation_task_with_answers', Problem('1+1=', ('2', 'two'), 'One and one.')
    golds = [('2', 'twos'), ('2', 'two', 'II'), ('two', '2')]
    contents = [first, *(replace(first, golds=one) for one in golds), replace(first, chain_of_thought=None)]
    names = set()
    for content in contents:
        examples = [Example(row=0, content=content), *KINDS[kind][1:]]
        names.add(cache_name(preparation_of(examples, icl_task_type=kind, num_fewshot=[num_shots])))
    assert len(names) == len(contents)


def test_another_tokenizer_or_encoder_or_changed_code_is_another_cache_entry(monkeypatch):
    encoder = Encoder(Characters())
    encoder.prefix_space = True
    preparations = [
        preparation_of(),
        preparation_of(tokenizer=Characters(bos=3)),
        replace(preparation_of(), encoder=encoder),
    ]
    names = {cache_name(preparation) for preparation in preparations}
    shot = MultipleChoiceTask.shot  # also of an installed type
    monkeypatch.setattr(MultipleChoiceTask, 'shot', lambda task, content, first: shot(task, content, first).upper())
    assert len({*names, cache_name(preparation_of())}) == 4


def test_items_cached_with_one_setting_are_not_read_with_another(tmp_path):
    changed = [
        {'num_fewshot': [1]},
        {'max_seq_len': 59},
        {'truncation': 'reference'},
        {'fewshot': 'fixed'},
        {'prompt_string': 'Choose.'},
        {'example_delimiter': '\n\n'},
        {'continuation_delimiter': '\nAnswer: '},
        {'prelimiter': 'Q: '},
        {'fewshot_random_seed': 7},
        {'strip_dataset': False},
        {'label': 'other'},
    ]
    for changes in ({}, *changed, {}):
        preparation = preparation_of(**changes)
        assert digest_of(prepared(preparation, tmp_path)) == digest_of(preparation.items())


@pytest.mark.parametrize('damage', ['flipped', 'cut', 'empty', 'other'])
def test_a_damaged_file_is_replaced(tmp_path, caplog, damage: str):
    preparation = preparation_of()
    expected = digest_of(prepared(preparation, tmp_path))
    (path,) = tmp_path.glob('*.tokens')
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    path.write_bytes({'flipped': bytes(flipped), 'cut': content[:-1], 'empty': b'', 'other': b'x' * 500}[damage])
    assert digest_of(prepared(preparation, tmp_path)) == expected
    assert str(path) in caplog.text
    assert path.read_bytes() == content


def test_an_unwritable_cache_folder_is_one_warning(tmp_path, caplog):
    (tmp_path / 'file').write_text('')
    preparations = {name: preparation_of(label=name) for name in 'abc'}
    items = prepare_tasks(preparations, tmp_path / 'file' / 'folder')
    assert [digest_of(items[name]) for name in 'abc'] == [
        digest_of(preparation.items()) for preparation in preparations.values()
    ]
    assert len(caplog.records) == 1 and str(tmp_path / 'file') in caplog.text


def test_nothing_is_written_without_a_cache_or_a_fingerprint(tmp_path, monkeypatch, character_tokenizer):
    monkeypatch.chdir(tmp_path)
    assert len(prepared(preparation_of(), None)) == 12
    assert Encoder(character_tokenizer).fingerprint is None
    assert len(prepared(preparation_of(tokenizer=character_tokenizer), tmp_path)) == 12
    assert not list(tmp_path.iterdir())


def test_processes_share_the_tasks_and_each_is_tokenized_once(tmp_path):
    command = [sys.executable, __file__, tmp_path / 'cache', tmp_path / 'notes']
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {worker.communicate(timeout=100)[0] for worker in workers}
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert len(printed) == 1
    notes = set(notes_of(tmp_path / 'notes'))
    assert sorted(task for task, _ in notes) == [f'task{number}' for number in range(6)]
    assert len({process for _, process in notes}) > 1


def path_of(preparation: Preparation, cache: Path) -> Path:
    return cache / f'{cache_name(preparation)}.tokens'


def test_a_task_claimed_by_another_process_is_waited_for_last(tmp_path):
    cache, notes = tmp_path / 'cache', tmp_path / 'notes'
    tokenizer = Characters(notes=notes)
    preparations = {name: preparation_of(examples_of(name), tokenizer, label=name) for name in ('task0', 'task1')}
    found: dict[str, list[Item]] = {}
    thread = threading.Thread(target=lambda: found.update(prepare_tasks(preparations, cache)))
    with claim(path_of(preparations['task0'], cache), 0) as is_mine:
        assert is_mine
        thread.start()
        while not notes_of(notes):
            thread.join(0.01)
        thread.join(0.3)
        assert thread.is_alive() and {task for task, _ in notes_of(notes)} == {'task1'}
    thread.join(20)
    assert digest_of(found['task0']) == digest_of(preparations['task0'].items())
    assert list(found) == ['task0', 'task1']


def test_a_task_finished_between_lookup_and_claim_is_read(tmp_path, monkeypatch):
    examples, notes = examples_of('task1'), tmp_path / 'notes'

    def late(path: Path, timeout: float):
        monkeypatch.undo()
        prepared(preparation_of(examples), tmp_path)
        return claim(path, timeout)

    monkeypatch.setattr(prepare, 'claim', late)
    assert len(prepared(preparation_of(examples, Characters(notes=notes)), tmp_path)) == 12
    assert not notes_of(notes)


def test_a_hanging_process_is_not_waited_for_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'PATIENCE_SECONDS', 0.2)
    preparation = preparation_of()
    with pytest.raises(KeyError), claim(path_of(preparation, tmp_path), 0) as is_mine:
        assert is_mine and len(prepared(preparation, tmp_path)) == 12
        raise KeyError
    with claim(path_of(preparation, tmp_path), 0) as is_mine:  # a claim ends with an error
        assert is_mine


def test_without_file_locks_each_process_prepares_its_own(tmp_path, monkeypatch):
    def unsupported(*_, **__):
        raise OSError(37, 'No locks available')

    monkeypatch.setattr(prepare, 'FileLock', unsupported)
    assert len(prepared(preparation_of(), tmp_path)) == 12
    assert len(list(tmp_path.glob('*.tokens'))) == 1


def aged(path: Path, seconds: float) -> Path:
    path.write_bytes(b'1234')
    now = path.stat().st_mtime
    os.utime(path, (now - seconds, now - seconds))
    return path


def test_least_recently_used_files_are_removed_first(tmp_path):
    for seconds, name in enumerate('cab'):
        aged(tmp_path / f'{name}.tokens', 100 - seconds)
    for limit_bytes, kept in ((12, 'abc'), (8, 'ab'), (7, 'b')):
        trim(tmp_path, limit_bytes)
        assert sorted(path.stem for path in tmp_path.iterdir()) == list(kept)


def test_leftovers_of_dead_processes_are_removed_after_a_day(tmp_path):
    for name in ('old.lock', 'old.unfinished', 'old.tokens', 'new.lock', 'new.unfinished', 'old.other'):
        aged(tmp_path / name, LEFTOVER_SECONDS + 60 if name.startswith('old') else 0)
    trim(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'new.lock', 'new.unfinished', 'old.other', 'old.tokens',
    ]  # fmt: skip


def test_stop_rules_are_not_cached(tmp_path):
    """The same token ids do for both rules."""
    kind = 'generation_task_with_answers'
    keys = {'icl_task_type': kind, 'has_categories': False}
    for semantics, stops in (('corrected', StopRule(answer_end='\n')), ('reference', StopRule(as_pattern=True))):
        items = prepared(preparation_of(KINDS[kind], semantics=semantics, **keys), tmp_path)
        assert {item.request.stops for item in items} == {stops}
    assert len(list(tmp_path.glob('*.tokens'))) == 1


# Of the items of choices and continuations, and of generations; each version of the prompts has its own.
ITEMS = {
    2: (
        'a66267ec603b789fa8fe843a44565d5188d3e645cfc12fa62647069928901447',
        '1222fbf5ad20fc7b12683090136d4af0d26f6d948e4e8519bba44411f389e643',
    )
}


@pytest.mark.parametrize('place', [0, 1])
def test_prompts_do_not_change_without_a_new_version(place: int):
    """If this fails, raise PROMPTS_VERSION and add the new digest here: cached token ids are then recomputed."""
    digests = [
        digest_of(preparation_of(KINDS[kind], icl_task_type=kind, has_categories=False, **keys).items())
        for kind in ([*KINDS][:3], [*KINDS][3:])[place]
        for keys in ({}, {'truncation': 'reference'}, {'fewshot': 'fixed'}, {'max_seq_len': 20})
    ]
    assert hashlib.sha256(''.join(digests).encode()).hexdigest() == ITEMS[PROMPTS_VERSION][place]


if __name__ == '__main__':
    CACHE, NOTES = map(Path, sys.argv[1:])
    TOKENIZER = Characters(notes=NOTES, seconds=0.05)
    LABELS = [f'task{number}' for number in range(6)]
    FOUND = prepare_tasks({name: preparation_of(examples_of(name), TOKENIZER, label=name) for name in LABELS}, CACHE)
    print(hashlib.sha256(repr([digest_of(FOUND[name]) for name in LABELS]).encode()).hexdigest())
