"""The cache of token ids, which several processes share."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmfoundry_gauntlet.config.tasks import SETTINGS
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks import prepare
from llmfoundry_gauntlet.tasks.encode import PROMPTS_VERSION, Encoder
from llmfoundry_gauntlet.tasks.generation import GenerationTask, OpenQuestion
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.language_modeling import Passage
from llmfoundry_gauntlet.tasks.multiple_choice import Choices, MultipleChoiceTask
from llmfoundry_gauntlet.tasks.prepare import LEFTOVER_SECONDS, cache_name, prepare_tasks, trim
from llmfoundry_gauntlet.tasks.schema import Schema
from llmfoundry_gauntlet.types import Example, GenerateRequest, Item, StopRule

TASK = {
    'label': 't',
    'dataset_uri': 'x',
    'num_fewshot': [2],
    'icl_task_type': 'multiple_choice',
    'has_categories': True,
}


class Making:
    """Make a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Characters:
    """A cacheable slow tokenizer: code points, after `bos` if special tokens are wanted.

    Names of tasks in texts, such as 'task7', are added to `noted`.
    """

    eos_token_id = None
    all_special_tokens = ()

    def __init__(self, *, bos: int = 1) -> None:
        self._bos = [bos]  # not a plain setting: it shows in the ids alone
        self.noted: set[str] = set()

    def save_pretrained(self, folder: str) -> None:
        """Save nothing: the ids say all."""

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        self.noted.update(name for text in texts for name in re.findall(r'task\d+', text))
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


def described(items: list[Item]) -> list[Any]:
    """Return everything in items, and which of their contexts are one array."""
    descriptions = []
    for item in items:
        request = item.request
        is_generation = isinstance(request, GenerateRequest)
        if is_generation:
            parts = [request.context]
            terms = (request.stops, request.sampling)
            of_type = request.max_new_tokens
        else:
            parts = [*request.contexts, *request.continuations]
            terms = ()
            of_type = [[a is b for b in request.contexts] for a in request.contexts]
        assert {(type(ids), ids.dtype, ids.ndim) for ids in parts} == {(np.ndarray, np.dtype(np.int32), 1)}
        key = replace(request.key, is_gold=False)
        marks = (item.prompt_sha256, key, request.prompt_shortened, request.unscorable, of_type)
        gold = None if item.gold is None else described([item.gold])
        descriptions.append((item.example, terms, marks, [ids.tolist() for ids in parts], gold))
    return descriptions


def prepared(preparation: Preparation, cache: Path | None) -> list[Item]:
    (items,) = prepare_tasks({'t': preparation}, cache).values()
    return items


KINDS = {
    'multiple_choice': examples_of('q'),
    'language_modeling': [Example(row=i, content=Passage(f'{i}+{i}=', f'{2 * i}' * 30 ** (i % 2))) for i in range(6)],
    'schema': [Example(row=i, content=Schema((f'the cup{i}', f'a bag{i}'), f'was {i}.', i % 2)) for i in range(6)],
    'generation_task_with_answers': [
        Example(row=i, content=OpenQuestion(f'{i}+{i}=' + '?' * 5 * i, (f'{2 * i}', f'{2 * i}.0'), None))
        for i in range(6)
    ],
}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('truncation', ['drop_shots', 'reference'])
@pytest.mark.parametrize('max_seq_len', [8, 30, 1000])
def test_cached_items_equal_those_prepared_without_a_cache(tmp_path, kind: str, truncation: str, max_seq_len: int):
    examples = KINDS[kind]
    keys = {'icl_task_type': kind, 'has_categories': kind == 'multiple_choice', 'truncation': truncation}
    preparation = preparation_of(examples, max_seq_len=max_seq_len, **keys)
    without_cache = described(preparation.items())
    assert len(without_cache) == len(examples)

    assert described(prepared(preparation, tmp_path)) == without_cache  # written
    assert described(prepared(preparation, tmp_path)) == without_cache  # read


def test_a_cached_task_is_not_tokenized_again_and_its_file_counts_as_used(tmp_path):
    first, second = Characters(), Characters()

    prepared(preparation_of(examples_of('task1'), first), tmp_path)
    assert first.noted == {'task1'}
    (path,) = tmp_path.glob('*.tokens')
    os.utime(path, (1, 1))

    prepared(preparation_of(examples_of('task1'), second), tmp_path)
    assert second.noted == set()
    assert path.stat().st_mtime > 1


PROBLEM = OpenQuestion('1+1=', ('2', 'two'), 'One and one.')
# They change how long a generation may be, even where no shot shows them.
CHANGES_OF_PROBLEM = [
    {'content': replace(PROBLEM, golds=('2', 'twos'))},
    {'content': replace(PROBLEM, golds=('2', 'two', 'II'))},
    {'content': replace(PROBLEM, golds=('two', '2'))},
    {'content': replace(PROBLEM, chain_of_thought=None)},
    {'content': PROBLEM},
]
CHANGES_OF_CHOICES = [
    {'row': 99},
    {'category': 'b'},
    {'file': 'subset'},
    {'content': Choices('q 0.', ('yes', 'no'), 0)},
    {'content': Choices('q 0?', ('yes', 'now'), 0)},
    {'content': Choices('q 0?', ('yesn', 'o'), 0)},
    {'content': Choices('q 0?', ('yes', 'no', ''), 0)},
    {'content': Choices('q 0?', ('yes', 'no'), 1)},
]


@pytest.mark.parametrize(
    ('kind', 'num_shots', 'changes'),
    [
        ('multiple_choice', 2, CHANGES_OF_CHOICES),
        ('generation_task_with_answers', 0, CHANGES_OF_PROBLEM),
        ('generation_task_with_answers', 2, CHANGES_OF_PROBLEM),
    ],
)
def test_a_changed_row_is_another_cache_entry(kind: str, num_shots: int, changes: list[dict[str, Any]]):
    first, *others = KINDS[kind]
    versions = [[first, *others], others]
    for changed in changes:
        versions.append([replace(first, **changed), *others])
    keys = {'icl_task_type': kind, 'has_categories': False, 'num_fewshot': [num_shots]}

    names = {cache_name(preparation_of(examples, **keys)) for examples in versions}

    assert len(names) == len(versions)


def test_another_tokenizer_is_another_cache_entry():
    assert cache_name(preparation_of(tokenizer=Characters(bos=3))) != cache_name(preparation_of())


def test_another_setting_of_the_encoder_is_another_cache_entry():
    encoder = Encoder(Characters())
    encoder.prefix_space = True

    assert cache_name(replace(preparation_of(), encoder=encoder)) != cache_name(preparation_of())


def test_changed_code_of_a_task_type_is_another_cache_entry(monkeypatch):
    """Also of a type from another package, which has no version of ours."""
    name = cache_name(preparation_of())
    shot = MultipleChoiceTask.shot
    monkeypatch.setattr(MultipleChoiceTask, 'shot', lambda task, content, first: shot(task, content, first).upper())

    assert cache_name(preparation_of()) != name


def test_another_right_generation_is_another_cache_entry(monkeypatch):
    kind = 'generation_task_with_answers'

    def name() -> str:
        return cache_name(preparation_of(KINDS[kind], icl_task_type=kind, has_categories=False))

    before = name()
    monkeypatch.setattr(GenerationTask, 'gold_text', lambda task, content: 'another')

    assert name() != before


@pytest.mark.parametrize(
    ('keys', 'num_asked'),
    [
        ({'num_fewshot': [0]}, 1),  # a question begins its prompt
        ({'num_fewshot': [0], 'prompt_string': 'Choose.'}, 1),  # or follows the instruction
        ({'num_fewshot': [2]}, 2),  # it follows shots, or begins the prompt as they are dropped
        ({'num_fewshot': [2], 'prompt_string': 'Choose.'}, 1),  # something precedes it in either case
    ],
)
def test_a_cache_entry_is_named_by_the_forms_of_a_question_that_prompts_can_hold(monkeypatch, keys, num_asked: int):
    asked: list[bool] = []
    ask = MultipleChoiceTask.ask
    monkeypatch.setattr(
        MultipleChoiceTask, 'ask', lambda task, content, first: asked.append(first) or ask(task, content, first)
    )

    cache_name(preparation_of(examples_of('q', num_rows=1), **keys))

    assert len(asked) == num_asked


def test_items_cached_with_one_setting_are_not_read_with_another(tmp_path):
    changes = [
        {},
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
        {},  # again, beside all the others
    ]
    for settings in changes:
        preparation = preparation_of(**settings)
        assert described(prepared(preparation, tmp_path)) == described(preparation.items())


def with_a_flipped_bit(content: bytes) -> bytes:
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    return bytes(flipped)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    'flipped': with_a_flipped_bit,
    'cut': lambda content: content[:-1],
    'empty': lambda content: b'',
    'other': lambda content: b'x' * 500,
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_file_is_replaced(tmp_path, caplog, damage: str):
    preparation = preparation_of()
    expected = described(prepared(preparation, tmp_path))
    (path,) = tmp_path.glob('*.tokens')
    content = path.read_bytes()

    path.write_bytes(DAMAGES[damage](content))

    assert described(prepared(preparation, tmp_path)) == expected
    assert str(path) in caplog.text
    assert path.read_bytes() == content


def test_an_object_in_a_file_is_not_unpickled(tmp_path):
    """The checksum of the file is right, as whoever can write it can compute it too."""
    preparation = preparation_of()
    prepared(preparation, tmp_path)
    (path,) = tmp_path.glob('*.tokens')
    made = tmp_path / 'made'
    archive = io.BytesIO()
    hostile = np.array([Making(made)], dtype=object)
    np.savez(archive, tokens=hostile, piece_ends=hostile, items=hostile)
    content = archive.getvalue()
    path.write_bytes(hashlib.sha256(content).digest() + content)

    with pytest.raises(ValueError, match='allow_pickle=False'):
        prepared(preparation, tmp_path)

    assert not made.exists()


def test_an_unwritable_cache_folder_is_one_warning(tmp_path, caplog):
    (tmp_path / 'file').write_text('')
    preparations = {name: preparation_of(label=name) for name in 'abc'}

    items = prepare_tasks(preparations, tmp_path / 'file' / 'folder')

    for name, preparation in preparations.items():
        assert described(items[name]) == described(preparation.items())
    assert len(caplog.records) == 1
    assert str(tmp_path / 'file') in caplog.text


def test_nothing_is_written_without_a_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert len(prepared(preparation_of(), None)) == 12
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_for_a_tokenizer_without_a_fingerprint(tmp_path, character_tokenizer):
    assert Encoder(character_tokenizer).fingerprint is None

    assert len(prepared(preparation_of(tokenizer=character_tokenizer), tmp_path)) == 12
    assert not list(tmp_path.iterdir())


def test_ranks_take_tasks_in_orders_of_their_own_and_read_what_others_finished(tmp_path, monkeypatch):
    """Rank 1 starts when rank 0 has finished its first two tasks of nine."""
    names = [f'task{number}' for number in range(9)]
    written: list[str] = []
    store = prepare.store

    def recorded_store(path: Path, items: Any) -> Any:
        written.append(path.name[: len('task0')])
        return store(path, items)

    monkeypatch.setattr(prepare, 'store', recorded_store)
    names_of_rank = {'0': names[:2], '1': names}
    for rank, names_prepared in names_of_rank.items():
        monkeypatch.setenv('LOCAL_RANK', rank)
        preparations = {name: preparation_of(examples_of(name), label=name) for name in names_prepared}

        items_by_name = prepare_tasks(preparations, tmp_path)

        assert list(items_by_name) == names_prepared
        for name, items in items_by_name.items():
            assert described(items) == described(preparations[name].items())
    # Each is written once; rank 1 does not take them in their order.
    assert sorted(written) == names
    assert written[:2] == names[:2]
    assert written[2:] != names[2:]


def aged(path: Path, seconds: float) -> Path:
    path.write_bytes(b'1234')
    now = path.stat().st_mtime
    os.utime(path, (now - seconds, now - seconds))
    return path


@pytest.mark.parametrize(
    ('limit_bytes', 'kept'),
    [
        (12, 'abc'),  # each has 4 bytes
        (8, 'ab'),
        (7, 'b'),
    ],
)
def test_least_recently_used_files_and_leftovers_of_dead_processes_are_removed(tmp_path, limit_bytes: int, kept: str):
    for seconds, name in enumerate('cab'):
        aged(tmp_path / f'{name}.tokens', LEFTOVER_SECONDS + 100 - seconds)
    others = {f'{age}.{kind}' for age in ('old', 'new') for kind in ('unfinished', 'other')}
    for name in others:
        aged(tmp_path / name, LEFTOVER_SECONDS + 60 if name.startswith('old') else 0)

    trim(tmp_path, limit_bytes)

    names = {path.name for path in tmp_path.iterdir()}
    tokens = {f'{name}.tokens' for name in kept}
    assert names == (tokens | others) - {'old.unfinished'}


def test_semantics_have_token_ids_and_stop_rules_of_their_own(tmp_path):
    kind = 'generation_task_with_answers'
    keys = {'icl_task_type': kind, 'has_categories': False}
    stops_of = {'corrected': StopRule(answer_end='\n'), 'reference': StopRule(as_pattern=True)}

    for semantics, stops in stops_of.items():
        items = prepared(preparation_of(KINDS[kind], semantics=semantics, **keys), tmp_path)
        assert {item.request.stops for item in items} == {stops}
    assert len(list(tmp_path.glob('*.tokens'))) == 2


# The digest of the items, and of their right generations, by the version of the prompts.
ITEMS = {4: '3dd956d7d76d4807656c67b942abb7bb22256b39820a53cf732f748c8baf16db'}
GOLDS = {4: '55be70f934331851b9d464618307e9cdb837222c6128f7e5994252484bfdaa3a'}


def test_prompts_do_not_change_without_a_new_version():
    """If this fails, raise PROMPTS_VERSION and add the new digest here: cached token ids are then recomputed."""
    marks_and_ids = []
    golds = []
    for kind, examples in KINDS.items():
        for keys in ({}, {'truncation': 'reference'}, {'fewshot': 'fixed'}, {'max_seq_len': 20}):
            preparation = preparation_of(examples, icl_task_type=kind, has_categories=False, **keys)
            descriptions = described(preparation.items())
            marks_and_ids += [(marks, ids) for _, _, marks, ids, _ in descriptions]
            golds += [gold[0][2:4] for *_, gold in descriptions if gold is not None]

    assert digest_of(marks_and_ids) == ITEMS[PROMPTS_VERSION]
    assert digest_of(golds) == GOLDS[PROMPTS_VERSION]


def digest_of(marks_and_ids: list[Any]) -> str:
    # Keys had no field for right generations when the first digest was made.
    text = repr(marks_and_ids).replace(', is_gold=False', '')
    return hashlib.sha256(text.encode()).hexdigest()
