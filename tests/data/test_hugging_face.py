"""Rows of hf:// datasets, read by the `datasets` library from folders and a local hub, none of which runs code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import hub_server
import pandas as pd
import pytest

from llmfoundry_gauntlet.config.settings import EvaluationSettings
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data
from llmfoundry_gauntlet.evaluation.suite import load_suite

QUIZ = [
    {'query': ' Sky? ', 'choices': [' blue', 'green'], 'gold': 0},
    {'query': 'Gra\u00df\u00a0?', 'choices': ['blue', 'green'], 'gold': 1},
    {'query': 'Sea?\u2028', 'choices': ['blue', ''.join(map(chr, range(0x1F600, 0x1F604)))], 'gold': 0},
]
SUMS = [{'a': f'{n} and {n}', 'b': 'are', 'c': str(2 * n)} for n in range(6)]
MAP = {'context': ['a', 'b'], 'continuation': ['c']}
TEST = {'split': 'test'}
LINE = b'{"context": "a", "continuation": "b"}\n'

hub = hub_server.hub


@pytest.fixture(autouse=True)
def careless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set up an environment that trusts everything, with its own caches."""
    import datasets

    monkeypatch.setattr(datasets.config, 'HF_DATASETS_TRUST_REMOTE_CODE', True, raising=False)
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'prepared'))
    monkeypatch.setattr(datasets.config, 'HF_MODULES_CACHE', str(tmp_path / 'modules'), raising=False)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path / 'hub'))


def entry(kind: str, uri: str, **keys: Any) -> dict[str, Any]:
    return {'label': 't', 'dataset_uri': uri, 'num_fewshot': [0], 'icl_task_type': kind, **keys}


def read(folder: Path, kind: str, uri: str, **keys: Any) -> list[Any]:
    """Return the examples of a data set, of its split test if `hf_loading_vars` says nothing else."""
    task = load_suite([entry(kind, uri, **{'hf_loading_vars': TEST, **keys})]).tasks[0]
    return task.read(folder).examples


def problems(folder: Path, kind: str, uri: str, **keys: Any) -> list[str]:
    with pytest.raises(DataError) as raised:
        read(folder, kind, uri, **keys)
    return list(raised.value.problems)


def test_a_folder_gives_the_examples_and_digests_of_the_same_rows_in_a_file(write_jsonl, tmp_path):
    rows = [{**row, 'query': f'{row["query"]} {n}'} for n, row in enumerate(QUIZ * 4)]
    write_jsonl('quiz.jsonl', rows)
    write_jsonl('quiz/test.jsonl', rows)
    pd.DataFrame(rows).to_parquet(tmp_path / 'quiz/train.parquet')

    def data_of(uri: str, **keys: Any) -> EvaluationData:
        tasks = [entry('multiple_choice', uri, num_fewshot=[3], prompt_string='Quiz:\n', **keys)]
        return load_data(EvaluationSettings(tasks=tasks, data_root=str(tmp_path)))

    by_file = data_of('quiz.jsonl')
    for file in ('test.jsonl', 'train.parquet'):
        by_hub = data_of('hf://./quiz', hf_loading_vars={'data_files': {'test': file}, 'split': 'test'})
        assert by_hub.examples == by_file.examples and by_hub.digests == by_file.digests
    assert len(by_hub.examples['t/3-shot']) == 12


def test_columns_are_joined_by_a_space_and_stripped_as_in_llm_foundry(write_jsonl, tmp_path):
    """llm-foundry 0.22: `' '.join([str(example[col]) for col in v])`, then white space goes at both ends."""
    rows = [
        {'a': ' two and', 'b': 'two  ', 'n': 4, 'x': 0.5, 'yes': True},
        {'a': '', 'b': 'b', 'n': 5, 'x': 1e9, 'yes': False},
    ]
    write_jsonl('sums/test.jsonl', rows)
    keys = {'hf_parsing_map': {'context': ['a', 'b', 'x', 'yes'], 'continuation': ['n']}}
    found = [row.content for row in read(tmp_path, 'language_modeling', 'hf://./sums', **keys)]
    assert [row.context for row in found] == ['two and two   0.5 True', 'b 1000000000.0 False']
    assert [row.continuation for row in found] == ['4', '5']
    found = read(tmp_path, 'language_modeling', 'hf://./sums', strip_dataset=False, **keys)
    assert [row.content.context for row in found] == [' two and two   0.5 True', ' b 1000000000.0 False']


def test_lists_and_gold_numbers_keep_their_types(write_jsonl, tmp_path):
    rows = [{'q': 'Sky?', 'hint': 'Look up.', 'options': ['blue', ' red'], 'label': 0, 'topic': 3}]
    write_jsonl('quiz/test.jsonl', rows)
    parsing = {
        'query': ['hint', 'q'],
        'choices': ['options'],
        'gold': ['label'],
        'category': ['topic'],
    }

    (example,) = read(tmp_path, 'multiple_choice', 'hf://./quiz', has_categories=True, hf_parsing_map=parsing)

    assert example.content.query == 'Look up. Sky?'
    assert example.content.choices == ('blue', ' red')
    assert example.content.gold == 0 and type(example.content.gold) is int
    assert example.category == '3'


def test_null_columns_are_absent(write_jsonl, tmp_path):
    rows = [
        {'q': 'Capital?', 'a': 'Rome', 'also': ['Roma', 'rome'], 'why': None},
        {'q': 'River?', 'a': 'Po', 'also': None, 'why': None},
        {'q': 'Sum?', 'a': 'No', 'also': [], 'why': 'It is not.'},
    ]
    write_jsonl('facts/test.jsonl', rows)
    parsing = {'context': ['q'], 'answer': ['a'], 'aliases': ['also'], 'chain_of_thought': ['why']}

    examples = read(tmp_path, 'generation_task_with_answers', 'hf://./facts', hf_parsing_map=parsing)

    assert [example.content.golds for example in examples] == [('Rome', 'Roma', 'rome'), ('Po',), ('No',)]
    assert [example.content.chain_of_thought for example in examples] == [None, None, 'It is not.']


def test_folders_are_relative_to_data_root_then_the_working_directory(write_jsonl, tmp_path, monkeypatch):
    root, here = tmp_path / 'root', tmp_path / 'here'
    here.mkdir()
    monkeypatch.chdir(here)

    def number(folder: Path, uri: str = 'hf://./sums', **keys: Any) -> int:
        return len(read(folder, 'language_modeling', uri, hf_parsing_map=MAP, **keys))

    (problem,) = problems(root, 'language_modeling', 'hf://./sums', hf_parsing_map=MAP)
    assert problem.startswith(f'hf://./sums: there is no such folder (looked for {root}/sums, sums); set data_root')
    write_jsonl('here/sums/test.jsonl', SUMS[:1])
    assert number(root) == 1
    write_jsonl('root/sums/test.jsonl', SUMS[:2])
    assert (number(root), number(root, f'hf://{here}/sums')) == (2, 1)
    assert number(root, hf_loading_vars={'split': 'test[1:]'}) == 1
    monkeypatch.setenv('HOME', str(root))
    assert number(here, 'hf://~/sums') == 2
    assert number(here, 'hf://json', hf_loading_vars={'data_files': 'sums/test.jsonl', 'split': 'train'}) == 1


def test_errors_in_parsing_map_and_loading_variables_are_named(write_jsonl, tmp_path):
    write_jsonl('sums/test.jsonl', SUMS)
    write_jsonl('sums/train.jsonl', SUMS)
    (tmp_path / 'empty').mkdir()

    def said(uri: str = 'hf://./sums', parsing: Any = MAP, **loading: Any) -> str:
        return '\n'.join(problems(tmp_path, 'language_modeling', uri, hf_loading_vars=loading, hf_parsing_map=parsing))

    assert 'hf_loading_vars.trust_remote_code: ' in said(trust_remote_code=True, split='test')
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


def test_malformed_rows_are_named_by_number(write_jsonl, tmp_path):
    rows = [*QUIZ, {**QUIZ[0], 'gold': 2}, {**QUIZ[0], 'query': None}]
    write_jsonl('quiz/test.jsonl', rows)
    assert problems(tmp_path, 'multiple_choice', 'hf://./quiz') == [
        'hf://./quiz:4: gold is 2 but there are 2 choices (0..1)',
        'hf://./quiz:5: query is empty; allowed: text',
    ]
    parsing = {'query': ['query', 'gold'], 'choices': ['choices'], 'gold': ['gold']}
    assert problems(tmp_path, 'multiple_choice', 'hf://./quiz', hf_parsing_map=parsing) == [
        'hf://./quiz:5: query joins query, gold, but query is empty; allowed: text'
    ]
    (tmp_path / 'quiz/test.jsonl').write_text('{"query": "a"}\n{"query": \n')
    (problem,) = problems(tmp_path, 'multiple_choice', 'hf://./quiz')
    assert problem.startswith('hf://./quiz: cannot be loaded: ') and 'JSON parse error' in problem
    (tmp_path / 'quiz/test.jsonl').write_text('')
    assert problems(tmp_path, 'multiple_choice', 'hf://./quiz')


def test_non_text_columns_are_errors_only_if_used(tmp_path):
    """Columns that are not used may hold pictures, dates and missing numbers; in used columns these are errors."""
    table = {'a': ['x', 'y'], 'c': ['1', '2'], 'picture': [b'\x89PNG', None], 'size': [1.5, float('nan')]}
    table['day'] = [pd.Timestamp('2020-02-03 04:05:06')] * 2
    (tmp_path / 'odd').mkdir()
    pd.DataFrame(table).to_parquet(tmp_path / 'odd/test.parquet')
    plain = read(tmp_path, 'language_modeling', 'hf://./odd', context_key='a', answer_key='c')
    assert [row.content.context for row in plain] == ['x', 'y'] and len({row.digest for row in plain}) == 2
    for column in ('picture', 'size'):
        parsing = {'context': [column], 'continuation': ['c']}
        found = problems(tmp_path, 'language_modeling', 'hf://./odd', hf_parsing_map=parsing)
        assert 'hf://./odd:2: context is empty; allowed: text' in found
    assert problems(tmp_path, 'language_modeling', 'hf://./odd', context_key='day', answer_key='c')[0] == (
        'hf://./odd:1: day is a mapping; allowed: text'
    )
    parsing = {'context': ['day'], 'continuation': ['c']}  # llm-foundry's str() of it
    (first, _) = read(tmp_path, 'language_modeling', 'hf://./odd', hf_parsing_map=parsing)
    assert first.content.context == '2020-02-03 04:05:06'


# No dataset runs code.


class Marking:
    """Create a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def script_of(marker: Path) -> bytes:
    """Return a script that datasets 3 would import."""
    return f'import pathlib\npathlib.Path({str(marker)!r}).touch()\n'.encode()


@pytest.mark.parametrize(
    ('uri', 'name', 'data_files'),
    [
        # Loading scripts.
        ('hf://./quiz', 'quiz.py', None),
        ('hf://quiz', 'quiz.py', None),
        ('hf://quiz/quiz.py', 'quiz.py', None),
        ('hf://quiz/../quiz', 'quiz.py', None),
        # Pickles, also in archives.
        ('hf://./quiz', 'test.pkl', None),
        ('hf://./quiz', 'deep/test.pickle', None),
        ('hf://./quiz', 'test.pkl.tar.gz', None),
        ('hf://./quiz', 'test.pkl', 'test.pkl'),
        # Builders by name: json reads no pickle, the others may run code.
        ('hf://json', 'test.pkl', 'quiz/test.pkl'),
        ('hf://pandas', 'test.pkl', 'quiz/test.pkl'),
        ('hf://webdataset', 'test.pkl', 'quiz/test.pkl'),
        ('hf://xml', 'test.pkl', 'quiz/test.pkl'),
        ('hf://./quiz', 'test.tar', None),
    ],
)
def test_scripts_pickles_and_other_builders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, name: str, data_files: str | None
):
    marker = tmp_path / 'code has run'
    content = script_of(marker) if name.endswith('.py') else pickle.dumps(Marking(marker))
    (tmp_path / 'quiz/deep').mkdir(parents=True)
    (tmp_path / 'quiz' / name).write_bytes(content)
    if name.endswith('.py'):
        (tmp_path / 'quiz/test.jsonl').write_bytes(LINE)
    monkeypatch.chdir(tmp_path)
    loading = {**TEST, **({'data_files': {'test': data_files}} if data_files else {})}
    (problem,) = problems(tmp_path, 'language_modeling', uri, hf_loading_vars=loading)
    assert problem.startswith(f'{uri}: ')
    assert not marker.exists()


def test_rows_on_the_hub_are_read_and_scripts_and_pickles_are_not(tmp_path: Path, hub: hub_server.Hub):
    marker = tmp_path / 'code has run'
    hub['org/rows'] = {'test.jsonl': LINE, 'other.pkl': pickle.dumps(Marking(marker))}
    assert len(read(tmp_path, 'language_modeling', 'hf://org/rows')) == 1
    hub['org/quiz'] = {'quiz.py': script_of(marker), 'test.jsonl': LINE}
    hub['org/pickle'] = {'test.pkl': pickle.dumps(Marking(marker))}
    for uri in ('hf://org/quiz', 'hf://org/pickle'):
        (problem,) = problems(tmp_path, 'language_modeling', uri)
        assert problem.startswith(f'{uri}: ')
    assert not marker.exists()
