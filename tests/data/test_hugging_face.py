"""Rows of hf:// data sets: real folders of them, read by the `datasets` library."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from character_tokenizer import CharacterTokenizer

from llmfoundry_gauntlet.config.settings import EvaluationSettings
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data, load_suite
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.prepare import cache_name, store

QUIZ = [
    {'query': ' Sky? ', 'choices': [' blue', 'green'], 'gold': 0},
    {'query': 'Gra\u00df\u00a0?', 'choices': ['blue', 'green'], 'gold': 1},
    {'query': 'Sea?\u2028', 'choices': ['blue', ''.join(map(chr, range(0x1F600, 0x1F604)))], 'gold': 0},
]
SUMS = [{'a': f'{n} and {n}', 'b': 'are', 'c': str(2 * n)} for n in range(6)]
MAP = {'context': ['a', 'b'], 'continuation': ['c']}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `datasets` prepares is kept in the test's own folder."""
    import datasets

    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'prepared'))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    return path


def entry(kind: str, uri: str, **keys: Any) -> dict[str, Any]:
    return {'label': 't', 'dataset_uri': uri, 'num_fewshot': [0], 'icl_task_type': kind, **keys}


def read(folder: Path, kind: str, uri: str, **keys: Any) -> list[Any]:
    task = load_suite([entry(kind, uri, **keys)]).tasks[0]
    return task.read(folder).examples


def problems(folder: Path, kind: str, uri: str, **keys: Any) -> list[str]:
    with pytest.raises(DataError) as raised:
        read(folder, kind, uri, **keys)
    return list(raised.value.problems)


def data_of(folder: Path, uri: str, **keys: Any) -> EvaluationData:
    tasks = [entry('multiple_choice', uri, **keys)]
    return load_data(EvaluationSettings(tasks=tasks, data_root=str(folder)))


@pytest.mark.parametrize('form', ['jsonl', 'parquet'])
def test_a_folder_gives_the_items_prompts_and_digests_of_the_same_rows_in_a_file(tmp_path, form: str):
    rows = [{**row, 'query': f'{row["query"]} {n}'} for n, row in enumerate(QUIZ * 4)]
    jsonl(tmp_path / 'quiz.jsonl', rows)
    folder = tmp_path / 'quiz'
    folder.mkdir()
    if form == 'jsonl':
        jsonl(folder / 'test.jsonl', rows)
    else:
        pd.DataFrame(rows).to_parquet(folder / 'test.parquet')
    keys = {'num_fewshot': [3], 'prompt_string': 'Quiz:\n'}
    by_file = data_of(tmp_path, 'quiz.jsonl', **keys)
    by_hub = data_of(tmp_path, 'hf://./quiz', hf_loading_vars={'split': 'test'}, **keys)
    assert by_hub.examples == by_file.examples and by_hub.digests == by_file.digests
    encoder = Encoder(CharacterTokenizer())
    items = [
        Preparation(
            task=data.suite.tasks[0], examples=data.examples['t/3-shot'], encoder=encoder, max_seq_len=500
        ).encoded()
        for data in (by_file, by_hub)
    ]
    assert len(items[0]) == 12
    for name, of_data in zip('ab', items, strict=True):
        assert store(tmp_path / name, [item for _, item in of_data])
    assert (tmp_path / 'a').read_bytes() == (tmp_path / 'b').read_bytes()


def test_columns_are_joined_by_a_space_and_stripped_as_in_llm_foundry(tmp_path):
    """llm-foundry 0.22: `' '.join([str(example[col]) for col in v])`, then white space goes at both ends."""
    rows = [
        {'a': ' two and', 'b': 'two  ', 'n': 4, 'x': 0.5, 'yes': True},
        {'a': '', 'b': 'b', 'n': 5, 'x': 1e9, 'yes': False},
    ]
    jsonl(tmp_path / 'sums/test.jsonl', rows)
    keys = {
        'hf_loading_vars': {'split': 'test'},
        'hf_parsing_map': {'context': ['a', 'b', 'x', 'yes'], 'continuation': ['n']},
    }
    found = [
        (row.content.context, row.content.continuation)
        for row in read(tmp_path, 'language_modeling', 'hf://./sums', **keys)
    ]
    assert found == [('two and two   0.5 True', '4'), ('b 1000000000.0 False', '5')]
    keys['strip_dataset'] = False
    found = [row.content.context for row in read(tmp_path, 'language_modeling', 'hf://./sums', **keys)]
    assert found == [' two and two   0.5 True', ' b 1000000000.0 False']


def test_lists_of_choices_and_gold_numbers_keep_their_types(tmp_path):
    rows = [{'q': 'Sky?', 'hint': 'Look up.', 'options': ['blue', ' red'], 'label': 0, 'topic': 3}]
    jsonl(tmp_path / 'quiz/test.jsonl', rows)
    keys = {
        'hf_loading_vars': {'split': 'test'},
        'hf_parsing_map': {'query': ['hint', 'q'], 'choices': ['options'], 'gold': ['label'], 'category': ['topic']},
        'has_categories': True,
    }
    (example,) = read(tmp_path, 'multiple_choice', 'hf://./quiz', **keys)
    assert (example.content.query, example.content.choices) == ('Look up. Sky?', ('blue', ' red'))
    assert (example.content.gold, type(example.content.gold), example.category) == (0, int, '3')


def test_lists_of_aliases_stay_lists_and_nulls_are_absent(tmp_path):
    rows = [
        {'q': 'Capital?', 'a': 'Rome', 'also': ['Roma', 'rome'], 'why': None},
        {'q': 'River?', 'a': 'Po', 'also': None, 'why': None},
        {'q': 'Sum?', 'a': 'No', 'also': [], 'why': 'It is not.'},
    ]
    jsonl(tmp_path / 'facts/test.jsonl', rows)
    keys = {
        'hf_loading_vars': {'split': 'test'},
        'hf_parsing_map': {'context': ['q'], 'answer': ['a'], 'aliases': ['also'], 'chain_of_thought': ['why']},
    }
    found = [row.content for row in read(tmp_path, 'generation_task_with_answers', 'hf://./facts', **keys)]
    assert [row.golds for row in found] == [('Rome', 'Roma', 'rome'), ('Po',), ('No',)]
    assert [row.chain_of_thought for row in found] == [None, None, 'It is not.']


@pytest.mark.parametrize(
    ('loading', 'expected'),
    [
        ({'split': 'test'}, range(6)),
        ({'split': 'train'}, range(2)),
        ({'split': 'test[2:4]'}, range(2, 4)),
        ({'split': 'train+test'}, [0, 1, *range(6)]),
        ({'data_files': 'test.jsonl', 'split': 'train'}, range(6)),
        ({'data_files': {'some': 'train.jsonl'}, 'split': 'some'}, range(2)),
    ],
)
def test_splits_and_files_are_selected_as_in_datasets(tmp_path, loading: dict[str, Any], expected: Any):
    jsonl(tmp_path / 'sums/test.jsonl', SUMS)
    jsonl(tmp_path / 'sums/train.jsonl', SUMS[:2])
    found = read(tmp_path, 'language_modeling', 'hf://./sums', hf_loading_vars=loading, hf_parsing_map=MAP)
    assert [row.content.continuation for row in found] == [str(2 * n) for n in expected]
    assert [row.row for row in found] == list(range(len(found)))


def test_configurations_are_selected_by_name(tmp_path):
    jsonl(tmp_path / 'sums/small/test.jsonl', SUMS[:2])
    jsonl(tmp_path / 'sums/large/test.jsonl', SUMS)
    card = 'configs:\n- config_name: small\n  data_files: small/*\n- config_name: large\n  data_files: large/*\n'
    (tmp_path / 'sums/README.md').write_text(f'---\n{card}---\n')
    keys = {'hf_parsing_map': MAP}
    for name, count in (('small', 2), ('large', 6)):
        loading = {'name': name, 'split': 'train'}
        assert len(read(tmp_path, 'language_modeling', 'hf://./sums', hf_loading_vars=loading, **keys)) == count
    (problem,) = problems(tmp_path, 'language_modeling', 'hf://./sums', hf_loading_vars={'split': 'train'}, **keys)
    assert "Please pick one among the available configs: ['small', 'large']" in problem
    loading = {'name': 'huge', 'split': 'train'}
    (problem,) = problems(tmp_path, 'language_modeling', 'hf://./sums', hf_loading_vars=loading, **keys)
    assert (
        problem.startswith('hf://./sums: cannot be loaded: ') and "'huge' not found" in problem and 'small' in problem
    )


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # datasets 3.6 leaves the file open
def test_csv_files_are_read(tmp_path):
    (tmp_path / 'sums').mkdir()
    (tmp_path / 'sums/test.csv').write_text('a,b,c\n"two, and",two are,4\n"He said ""NA""",so,NA\n')
    loading = {'split': 'test'}
    keys = {'hf_parsing_map': MAP, 'hf_loading_vars': loading}
    assert problems(tmp_path, 'language_modeling', 'hf://./sums', **keys) == [
        'hf://./sums:2: continuation is empty; allowed: text'  # what `datasets` makes of NA
    ]
    loading['keep_default_na'] = False
    found = [
        (row.content.context, row.content.continuation)
        for row in read(tmp_path, 'language_modeling', 'hf://./sums', **keys)
    ]
    assert found == [('two, and two are', '4'), ('He said "NA" so', 'NA')]


def test_folders_are_relative_to_data_root_then_the_working_directory(tmp_path, monkeypatch):
    keys = {'hf_loading_vars': {'split': 'test'}, 'hf_parsing_map': MAP}
    root, here = tmp_path / 'root', tmp_path / 'here'
    here.mkdir()
    monkeypatch.chdir(here)
    (problem,) = problems(root, 'language_modeling', 'hf://./sums', **keys)
    assert (
        problem == f'hf://./sums: there is no such folder (looked for {root}/sums, sums); set data_root to its parent'
    )
    jsonl(here / 'sums/test.jsonl', SUMS[:1])
    assert len(read(root, 'language_modeling', 'hf://./sums', **keys)) == 1
    jsonl(root / 'sums/test.jsonl', SUMS[:2])
    assert len(read(root, 'language_modeling', 'hf://./sums', **keys)) == 2
    assert len(read(root, 'language_modeling', f'hf://{here}/sums', **keys)) == 1
    monkeypatch.setenv('HOME', str(root))
    assert len(read(here, 'language_modeling', 'hf://~/sums', **keys)) == 2
    found = read(
        here,
        'language_modeling',
        'hf://json',
        hf_loading_vars={'data_files': 'sums/test.jsonl', 'split': 'train'},
        hf_parsing_map=MAP,
    )
    assert len(found) == 1


def test_errors_in_parsing_map_and_loading_variables_are_named(tmp_path):
    jsonl(tmp_path / 'sums/test.jsonl', SUMS)
    jsonl(tmp_path / 'sums/train.jsonl', SUMS)
    (tmp_path / 'empty').mkdir()

    def said(uri: str = 'hf://./sums', parsing: Any = MAP, **loading: Any) -> str:
        return '\n'.join(problems(tmp_path, 'language_modeling', uri, hf_loading_vars=loading, hf_parsing_map=parsing))

    assert said() == 'hf://./sums: has the splits train, test; name one in hf_loading_vars.split'
    assert "Unknown split \"tst\". Should be one of ['train', 'test']" in said(split='tst')
    assert "doesn't have a 'splt' key" in said(split='test', splt=1)
    assert 'IterableDataset' in said(split='test', streaming=True) and 'gives list' in said(split=['test'])
    assert 'Unable to find' in said(split='train', data_files='none.jsonl')
    assert "doesn't contain any data files" in said('hf://./empty', split='test')
    assert 'hf_loading_vars.path: ' in said(path='x', split='test')
    wrong = {'context': ['a', 'd'], 'continuation': 'c', 'category': [], 'gold': ['aa']}
    assert said(split='test', parsing=wrong).splitlines() == [
        "hf://./sums: hf_parsing_map.context: there is no column 'd'; found: a, b, c",
        "hf://./sums: hf_parsing_map.continuation: is 'c'; allowed: a list of columns, such as [question]",
        'hf://./sums: hf_parsing_map.category: is an empty list; allowed: a list of columns, such as [question]',
        "hf://./sums: hf_parsing_map.gold: there is no column 'aa', did you mean 'a'?",
    ]


def test_malformed_rows_are_named_by_number(tmp_path):
    rows = [*QUIZ, {**QUIZ[0], 'gold': 2}, {**QUIZ[0], 'query': None}]
    jsonl(tmp_path / 'quiz/test.jsonl', rows)
    keys = {'hf_loading_vars': {'split': 'test'}}
    assert problems(tmp_path, 'multiple_choice', 'hf://./quiz', **keys) == [
        'hf://./quiz:4: gold is 2 but there are 2 choices (0..1)',
        'hf://./quiz:5: query is empty; allowed: text',
    ]
    keys['hf_parsing_map'] = {'query': ['query', 'gold'], 'choices': ['choices'], 'gold': ['gold']}
    assert problems(tmp_path, 'multiple_choice', 'hf://./quiz', **keys) == [
        'hf://./quiz:5: query joins query, gold, but query is empty; allowed: text'
    ]
    (tmp_path / 'quiz/test.jsonl').write_text('{"query": "a"}\n{"query": \n')
    (problem,) = problems(tmp_path, 'multiple_choice', 'hf://./quiz', hf_loading_vars={'split': 'test'})
    assert problem.startswith('hf://./quiz: cannot be loaded: ') and 'JSON parse error' in problem
    (tmp_path / 'quiz/test.jsonl').write_text('')
    assert problems(tmp_path, 'multiple_choice', 'hf://./quiz', hf_loading_vars={'split': 'test'})


def test_non_text_columns_are_errors_only_if_used(tmp_path):
    """Pictures, dates and missing numbers may stand in columns that nobody asks for; asked for, they are errors."""
    day = pd.Timestamp('2020-02-03 04:05:06')
    table = {
        'a': ['x', 'y'],
        'c': ['1', '2'],
        'picture': [b'\x89PNG', None],
        'day': [day, day],
        'size': [1.5, float('nan')],
    }
    (tmp_path / 'odd').mkdir()
    pd.DataFrame(table).to_parquet(tmp_path / 'odd/test.parquet')
    keys = {'hf_loading_vars': {'split': 'test'}}
    plain = read(tmp_path, 'language_modeling', 'hf://./odd', context_key='a', answer_key='c', **keys)
    assert [row.content.context for row in plain] == ['x', 'y'] and len({row.digest for row in plain}) == 2
    for column in ('picture', 'size'):
        parsing = {'context': [column], 'continuation': ['c']}
        found = problems(tmp_path, 'language_modeling', 'hf://./odd', hf_parsing_map=parsing, **keys)
        assert 'hf://./odd:2: context is empty; allowed: text' in found
    assert problems(tmp_path, 'language_modeling', 'hf://./odd', context_key='day', answer_key='c', **keys)[0] == (
        'hf://./odd:1: day is a mapping; allowed: text'
    )
    parsing = {'context': ['day'], 'continuation': ['c']}  # llm-foundry's str() of it
    (first, _) = read(tmp_path, 'language_modeling', 'hf://./odd', hf_parsing_map=parsing, **keys)
    assert first.content.context == '2020-02-03 04:05:06'


def test_changed_rows_are_reloaded_and_miss_the_token_cache(tmp_path):
    def digests() -> tuple[str, str]:
        data = data_of(tmp_path, 'hf://./quiz', hf_loading_vars={'split': 'test'})
        encoder, examples = Encoder(CharacterTokenizer()), data.examples['t/0-shot']
        preparation = Preparation(task=data.suite.tasks[0], examples=examples, encoder=encoder, max_seq_len=500)
        return data.digests['t/0-shot'], cache_name(preparation)

    path = jsonl(tmp_path / 'quiz/test.jsonl', QUIZ)
    before = digests()
    assert digests() == before
    jsonl(path, [{**QUIZ[0], 'query': 'Sun?'}, *QUIZ[1:]])
    os.utime(path, (1, 1))  # older than before
    after = digests()
    assert after[0] != before[0] and after[1] != before[1]


def test_an_uncached_dataset_is_an_error_offline(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
    (problem,) = problems(
        tmp_path, 'language_modeling', 'hf://no-such-org/no-such-name', hf_loading_vars={'split': 'test'}
    )
    assert problem.startswith(
        "hf://no-such-org/no-such-name: cannot be loaded: Couldn't reach 'no-such-org/no-such-name'"
    )
    assert problem.endswith('or save the dataset to a folder: hf://./folder')


def test_an_unreachable_hub_is_an_immediate_error(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(datasets.config, 'HF_ENDPOINT', 'http://127.0.0.1:9')
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    monkeypatch.setattr(datasets, 'load_dataset', lambda *_, **__: pytest.fail('which would try for half a minute'))
    (problem,) = problems(tmp_path, 'language_modeling', 'hf://org/name', hf_loading_vars={'split': 'test'})
    assert problem.startswith('hf://org/name: http://127.0.0.1:9 does not respond (ConnectionError); check the network')


def test_loading_shows_no_progress_bars_and_leaves_random_state_unchanged(tmp_path, capfd):
    import datasets

    jsonl(tmp_path / 'sums/test.jsonl', SUMS * 1000)
    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), repr(np.random.get_state())
    shows_bars = not datasets.are_progress_bars_disabled()
    found = read(tmp_path, 'language_modeling', 'hf://./sums', hf_loading_vars={'split': 'test'}, hf_parsing_map=MAP)
    assert len(found) == 6000
    assert (random.getstate(), repr(np.random.get_state())) == before
    assert capfd.readouterr() == ('', '')
    assert shows_bars and not datasets.are_progress_bars_disabled()  # as it was
