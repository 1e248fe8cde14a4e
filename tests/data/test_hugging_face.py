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


def quiz_data(folder: Path, uri: str, **keys: Any) -> EvaluationData:
    """Return the data of a task with three shots and a prompt string."""
    tasks = [entry('multiple_choice', uri, num_fewshot=[3], prompt_string='Quiz:\n', **keys)]
    return load_data(EvaluationSettings(tasks=tasks, data_root=str(folder)))


@pytest.mark.parametrize('file', ['test.jsonl', 'train.parquet'])
def test_a_folder_gives_the_examples_and_digests_of_the_same_rows_in_a_file(write_jsonl, tmp_path, file: str):
    rows = [{**row, 'query': f'{row["query"]} {n}'} for n, row in enumerate(QUIZ * 4)]
    write_jsonl('quiz.jsonl', rows)
    write_jsonl('quiz/test.jsonl', rows)
    pd.DataFrame(rows).to_parquet(tmp_path / 'quiz/train.parquet')
    loading = {'data_files': {'test': file}, 'split': 'test'}

    from_file = quiz_data(tmp_path, 'quiz.jsonl')
    from_folder = quiz_data(tmp_path, 'hf://./quiz', hf_loading_vars=loading)

    assert from_folder.examples == from_file.examples
    assert from_folder.digests == from_file.digests
    assert len(from_folder.examples['t/3-shot']) == 12


SPACED_ROWS = [
    {'a': ' two and', 'b': 'two  ', 'n': 4, 'x': 0.5, 'yes': True},
    {'a': '', 'b': 'b', 'n': 5, 'x': 1e9, 'yes': False},
]
SPACED_MAP = {'context': ['a', 'b', 'x', 'yes'], 'continuation': ['n']}


def test_columns_are_joined_by_a_space_and_stripped_as_in_llm_foundry(write_jsonl, tmp_path):
    """llm-foundry 0.22: `' '.join([str(example[col]) for col in v])`, then white space goes at both ends."""
    write_jsonl('sums/test.jsonl', SPACED_ROWS)

    examples = read(tmp_path, 'language_modeling', 'hf://./sums', hf_parsing_map=SPACED_MAP)

    contents = [example.content for example in examples]
    assert [content.context for content in contents] == ['two and two   0.5 True', 'b 1000000000.0 False']
    assert [content.continuation for content in contents] == ['4', '5']


def test_joined_columns_keep_their_white_space_with_strip_dataset_false(write_jsonl, tmp_path):
    write_jsonl('sums/test.jsonl', SPACED_ROWS)

    examples = read(tmp_path, 'language_modeling', 'hf://./sums', strip_dataset=False, hf_parsing_map=SPACED_MAP)

    contexts = [example.content.context for example in examples]
    assert contexts == [' two and two   0.5 True', ' b 1000000000.0 False']


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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder for `data_root`, which is not there yet."""
    return tmp_path / 'root'


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder the working directory."""
    folder = tmp_path / 'working'
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def num_sums(folder: Path, uri: str = 'hf://./sums', **keys: Any) -> int:
    return len(read(folder, 'language_modeling', uri, hf_parsing_map=MAP, **keys))


def test_folders_are_relative_to_data_root_then_the_working_directory(write_jsonl, root: Path, working_folder: Path):
    write_jsonl('working/sums/test.jsonl', SUMS[:1])
    num_without_data_root = num_sums(root)
    write_jsonl('root/sums/test.jsonl', SUMS[:2])

    assert num_without_data_root == 1
    assert num_sums(root) == 2
    assert num_sums(root, f'hf://{working_folder}/sums') == 1


def test_a_folder_that_is_nowhere_is_an_error_with_the_places_looked_at(root: Path, working_folder: Path):
    (problem,) = problems(root, 'language_modeling', 'hf://./sums', hf_parsing_map=MAP)

    assert problem.startswith(f'hf://./sums: there is no such folder (looked for {root}/sums, sums); set data_root')


def test_a_folder_may_begin_with_the_home_folder(write_jsonl, root: Path, working_folder: Path, monkeypatch):
    write_jsonl('root/sums/test.jsonl', SUMS[:2])
    monkeypatch.setenv('HOME', str(root))

    assert num_sums(working_folder, 'hf://~/sums') == 2


@pytest.mark.parametrize(
    ('uri', 'loading'),
    [
        # A part of a split.
        ('hf://./sums', {'split': 'test[1:]'}),
        # A builder by name, with a file relative to the working directory.
        ('hf://json', {'data_files': 'sums/first.json', 'split': 'train'}),
    ],
)
def test_loading_variables_choose_the_rows(
    write_jsonl, root: Path, working_folder: Path, uri: str, loading: dict[str, Any]
):
    write_jsonl('root/sums/test.jsonl', SUMS[:2])
    write_jsonl('working/sums/first.json', SUMS[:1])

    assert num_sums(root, uri, hf_loading_vars=loading) == 1


@pytest.mark.parametrize(
    ('uri', 'loading', 'fact'),
    [
        # The split.
        ('hf://./sums', {'split': 'tst'}, "Unknown split \"tst\". Should be one of ['train', 'test']"),
        ('hf://./sums', {'split': ['test']}, 'gives list'),
        # Files.
        ('hf://./sums', {'split': 'train', 'data_files': 'none.jsonl'}, 'Unable to find'),
        ('hf://./empty', {'split': 'test'}, "doesn't contain any data files"),
        # Keys that are refused or unknown.
        ('hf://./sums', {'split': 'test', 'trust_remote_code': True}, 'hf_loading_vars.trust_remote_code: '),
        ('hf://./sums', {'split': 'test', 'path': 'x'}, 'hf_loading_vars.path: '),
        ('hf://./sums', {'split': 'test', 'streaming': True}, 'IterableDataset'),
        ('hf://./sums', {'split': 'test', 'splt': 1}, "doesn't have a 'splt' key"),
    ],
)
def test_errors_in_loading_variables_are_named(write_jsonl, tmp_path, uri: str, loading: dict[str, Any], fact: str):
    write_jsonl('sums/test.jsonl', SUMS)
    write_jsonl('sums/train.jsonl', SUMS)
    (tmp_path / 'empty').mkdir()

    loading_problems = problems(tmp_path, 'language_modeling', uri, hf_loading_vars=loading, hf_parsing_map=MAP)

    assert fact in '\n'.join(loading_problems)


def test_a_folder_with_several_splits_needs_the_name_of_one(write_jsonl, tmp_path):
    write_jsonl('sums/test.jsonl', SUMS)
    write_jsonl('sums/train.jsonl', SUMS)

    assert problems(tmp_path, 'language_modeling', 'hf://./sums', hf_loading_vars={}, hf_parsing_map=MAP) == [
        'hf://./sums: has the splits train, test; name one in hf_loading_vars.split'
    ]


def test_errors_in_the_parsing_map_are_named_all_at_once(write_jsonl, tmp_path):
    write_jsonl('sums/test.jsonl', SUMS)
    parsing = {
        'context': ['a', 'd'],
        'continuation': 'c',
        'category': [],
        'gold': ['aa'],
    }

    assert problems(tmp_path, 'language_modeling', 'hf://./sums', hf_parsing_map=parsing) == [
        "hf://./sums: hf_parsing_map.context: there is no column 'd'; found: a, b, c",
        "hf://./sums: hf_parsing_map.continuation: is 'c'; allowed: a list of columns, such as [question]",
        'hf://./sums: hf_parsing_map.category: is an empty list; allowed: a list of columns, such as [question]',
        "hf://./sums: hf_parsing_map.gold: there is no column 'aa', did you mean 'a'?",
    ]


@pytest.mark.parametrize(
    ('parsing', 'expected'),
    [
        (
            {},
            [
                'hf://./quiz:4: gold is 2 but there are 2 choices (0..1)',
                'hf://./quiz:5: query is empty; allowed: text',
            ],
        ),
        # A text of several columns, one of which is empty.
        (
            {'hf_parsing_map': {'query': ['query', 'gold'], 'choices': ['choices'], 'gold': ['gold']}},
            ['hf://./quiz:5: query joins query, gold, but query is empty; allowed: text'],
        ),
    ],
)
def test_malformed_rows_are_named_by_number(write_jsonl, tmp_path, parsing: dict[str, Any], expected: list[str]):
    rows = [*QUIZ, {**QUIZ[0], 'gold': 2}, {**QUIZ[0], 'query': None}]
    write_jsonl('quiz/test.jsonl', rows)

    assert problems(tmp_path, 'multiple_choice', 'hf://./quiz', **parsing) == expected


def test_a_file_that_is_no_json_is_an_error(tmp_path):
    (tmp_path / 'quiz').mkdir()
    (tmp_path / 'quiz/test.jsonl').write_text('{"query": "a"}\n{"query": \n')

    (problem,) = problems(tmp_path, 'multiple_choice', 'hf://./quiz')

    assert problem.startswith('hf://./quiz: cannot be loaded: ')
    assert 'JSON parse error' in problem


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / 'quiz').mkdir()
    (tmp_path / 'quiz/test.jsonl').write_text('')

    assert problems(tmp_path, 'multiple_choice', 'hf://./quiz')


# Columns that are not used may hold pictures, dates and missing numbers.


@pytest.fixture
def odd_columns(tmp_path: Path) -> Path:
    """Write the data set `odd`, and return its parent folder."""
    table = {
        'a': ['x', 'y'],
        'c': ['1', '2'],
        'picture': [b'\x89PNG', None],
        'size': [1.5, float('nan')],
        'day': [pd.Timestamp('2020-02-03 04:05:06')] * 2,
    }
    (tmp_path / 'odd').mkdir()
    pd.DataFrame(table).to_parquet(tmp_path / 'odd/test.parquet')
    return tmp_path


def test_non_text_columns_that_are_not_used_are_no_error(odd_columns: Path):
    examples = read(odd_columns, 'language_modeling', 'hf://./odd', context_key='a', answer_key='c')

    assert [example.content.context for example in examples] == ['x', 'y']
    assert len({example.digest for example in examples}) == 2


@pytest.mark.parametrize(
    'column',
    [
        'picture',  # null in the second row
        'size',  # nan in the second row
    ],
)
def test_missing_values_in_columns_that_are_used_are_errors(odd_columns: Path, column: str):
    parsing = {'context': [column], 'continuation': ['c']}

    column_problems = problems(odd_columns, 'language_modeling', 'hf://./odd', hf_parsing_map=parsing)

    assert 'hf://./odd:2: context is empty; allowed: text' in column_problems


def test_a_date_in_a_column_that_is_used_as_it_is_is_an_error(odd_columns: Path):
    date_problems = problems(odd_columns, 'language_modeling', 'hf://./odd', context_key='day', answer_key='c')

    assert date_problems[0] == 'hf://./odd:1: day is a mapping; allowed: text'


def test_a_date_in_the_parsing_map_is_read_as_llm_foundrys_str_of_it(odd_columns: Path):
    parsing = {'context': ['day'], 'continuation': ['c']}

    first, _ = read(odd_columns, 'language_modeling', 'hf://./odd', hf_parsing_map=parsing)

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
    is_script = name.endswith('.py')
    content = script_of(marker) if is_script else pickle.dumps(Marking(marker))
    (tmp_path / 'quiz/deep').mkdir(parents=True)
    (tmp_path / 'quiz' / name).write_bytes(content)
    if is_script:  # it lies beside rows that could be read
        (tmp_path / 'quiz/test.jsonl').write_bytes(LINE)
    monkeypatch.chdir(tmp_path)
    loading: dict[str, Any] = {'split': 'test'}
    if data_files is not None:
        loading['data_files'] = {'test': data_files}

    (problem,) = problems(tmp_path, 'language_modeling', uri, hf_loading_vars=loading)

    assert problem.startswith(f'{uri}: ')
    assert not marker.exists()


def test_rows_on_the_hub_are_read_and_scripts_and_pickles_are_not(tmp_path: Path, hub: hub_server.Hub):
    marker = tmp_path / 'code has run'
    hub['org/rows'] = {'test.jsonl': LINE, 'other.pkl': pickle.dumps(Marking(marker))}
    hub['org/quiz'] = {'quiz.py': script_of(marker), 'test.jsonl': LINE}
    hub['org/pickle'] = {'test.pkl': pickle.dumps(Marking(marker))}

    assert len(read(tmp_path, 'language_modeling', 'hf://org/rows')) == 1
    for uri in ('hf://org/quiz', 'hf://org/pickle'):
        (problem,) = problems(tmp_path, 'language_modeling', uri)
        assert problem.startswith(f'{uri}: ')
    assert not marker.exists()
