"""No hf:// data set runs code: scripts, pickles and other builders are refused before anything is read."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import hub_server
import pytest

from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.inputs import load_suite

hub = hub_server.hub
ROWS = b'{"context": "a", "continuation": "b"}\n'


class Marking:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """What foreign code would leave behind."""
    return tmp_path / 'code has run'


@pytest.fixture(autouse=True)
def careless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that trusts everything, with caches of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, 'HF_DATASETS_TRUST_REMOTE_CODE', True, raising=False)
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(tmp_path / 'prepared'))
    monkeypatch.setattr(datasets.config, 'HF_MODULES_CACHE', str(tmp_path / 'modules'), raising=False)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path / 'hub'))
    monkeypatch.chdir(tmp_path)


def script_of(marker: Path) -> str:
    """A loading script as datasets 3 runs them."""
    return f"""
import pathlib
import datasets

pathlib.Path({str(marker)!r}).touch()


class Quiz(datasets.GeneratorBasedBuilder):
    def _info(self):
        return datasets.DatasetInfo()

    def _split_generators(self, manager):
        return [datasets.SplitGenerator(name='test')]

    def _generate_examples(self):
        yield 0, {{'context': 'a', 'continuation': 'b'}}
"""


def read(root: Path, uri: str, **loading: Any) -> list[Any]:
    keys = {'num_fewshot': [0], 'icl_task_type': 'language_modeling'}
    entry = {'label': 't', 'dataset_uri': uri, 'hf_loading_vars': {'split': 'test', **loading}, **keys}
    task = load_suite([entry]).tasks[0]
    return task.read(root).examples


def problem(root: Path, uri: str, **loading: Any) -> str:
    with pytest.raises(DataError) as raised:
        read(root, uri, **loading)
    (found,) = raised.value.problems
    return found


@pytest.mark.parametrize('uri', ['hf://./quiz', 'hf://quiz', 'hf://quiz/quiz.py', 'hf://quiz/../quiz'])
def test_a_loading_script_beside_the_data_is_not_run(tmp_path: Path, marker: Path, uri: str):
    (tmp_path / 'quiz').mkdir()
    (tmp_path / 'quiz/test.jsonl').write_bytes(ROWS)
    (tmp_path / 'quiz/quiz.py').write_text(script_of(marker))
    found = problem(tmp_path, uri)
    assert not marker.exists()
    assert found.startswith(f'{uri}: ') and 'quiz.py is a script' in found
    assert 'jsonl, csv, tsv, parquet, arrow, txt' in found and 'JSON lines or Parquet' in found


def test_other_python_files_beside_the_data_are_ignored(tmp_path: Path, marker: Path):
    (tmp_path / 'quiz').mkdir()
    (tmp_path / 'quiz/test.jsonl').write_bytes(ROWS)
    (tmp_path / 'quiz/convert.py').write_text(script_of(marker))
    assert len(read(tmp_path, 'hf://./quiz')) == 1
    assert not marker.exists()


def write_zip(path: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('rows.jsonl', ROWS)
        archive.writestr(name, content)


def write_tar(path: Path, name: str, content: bytes) -> None:
    with tarfile.open(path, 'w:gz') as archive:
        for member, inside in (('rows.jsonl', ROWS), (name, content)):
            info = tarfile.TarInfo(member)
            info.size = len(inside)
            archive.addfile(info, io.BytesIO(inside))


@pytest.mark.parametrize(
    ('name', 'named'),
    [
        ('test.pkl', 'test.pkl'),
        ('deep/test.pickle', 'deep/test.pickle'),
        ('test.pkl.gz', 'test.pkl.gz'),
        ('test.zip', 'test.zip: more/rows.pkl'),
        ('test.jsonl.tar.gz', 'test.jsonl.tar.gz: more/rows.pkl'),
    ],
)
@pytest.mark.parametrize('way', ['folder', 'data_files', 'json', 'pandas'])
def test_a_pickle_is_not_read(tmp_path: Path, marker: Path, name: str, named: str, way: str):
    content = pickle.dumps(Marking(marker))
    path = tmp_path / 'quiz' / name
    path.parent.mkdir(parents=True)
    if path.suffix == '.zip':
        write_zip(path, 'more/rows.pkl', content)
    elif '.tar' in name:
        write_tar(path, 'more/rows.pkl', content)
    else:
        path.write_bytes(content)
    uri = 'hf://./quiz' if way in ('folder', 'data_files') else f'hf://{way}'
    files = {'folder': None, 'data_files': {'test': [name]}}.get(way, {'test': str(path)})
    if way == 'folder':
        (tmp_path / 'quiz/test.jsonl').write_bytes(ROWS)
    found = problem(tmp_path, uri, **({'data_files': files} if files else {}))
    assert not marker.exists()
    assert found.startswith(f'{uri}: ') and f'{named} is a pickle' in found and 'JSON lines or Parquet' in found


@pytest.mark.parametrize('builder', ['pandas', 'webdataset', 'imagefolder', 'xml'])
def test_other_builders_are_refused(tmp_path: Path, marker: Path, builder: str):
    (tmp_path / 'test.bin').write_bytes(pickle.dumps(Marking(marker)))
    found = problem(tmp_path, f'hf://{builder}', data_files={'test': str(tmp_path / 'test.bin')})
    assert not marker.exists()
    assert f'the builder {builder}' in found and 'allowed: arrow, csv, json, parquet, text' in found


def test_file_types_cannot_select_another_builder(tmp_path: Path, marker: Path):
    (tmp_path / 'quiz').mkdir()
    with tarfile.open(tmp_path / 'quiz/test.tar', 'w') as archive:
        info = tarfile.TarInfo('0.json')
        info.size = len(ROWS)
        archive.addfile(info, io.BytesIO(ROWS))
    assert 'the builder webdataset' in problem(tmp_path, 'hf://./quiz')


@pytest.mark.parametrize(
    ('key', 'value'), [('trust_remote_code', True), ('trust_remote_code', 'yes'), ('path', 'pandas')]
)
def test_loading_variables_cannot_request_code_or_another_dataset(tmp_path: Path, key: str, value: Any):
    (tmp_path / 'quiz').mkdir()
    (tmp_path / 'quiz/test.jsonl').write_bytes(ROWS)
    assert problem(tmp_path, 'hf://./quiz', **{key: value}).startswith(f'hf://./quiz: hf_loading_vars.{key}: ')
    assert len(read(tmp_path, 'hf://./quiz', trust_remote_code=False)) == 1


def test_a_script_on_the_hub_is_not_run(tmp_path: Path, marker: Path, hub: hub_server.HubServer):
    hub.put('org/quiz', {'quiz.py': script_of(marker).encode(), 'test.jsonl': ROWS})
    found = problem(tmp_path, 'hf://org/quiz')
    assert not marker.exists() and 'quiz.py is a script' in found and 'refs/convert/parquet' in found


def test_rows_on_the_hub_are_read_and_pickles_are_not(tmp_path: Path, marker: Path, hub: hub_server.HubServer):
    hub.put('org/rows', {'test.jsonl': ROWS, 'other.pkl': pickle.dumps(Marking(marker))})
    assert len(read(tmp_path, 'hf://org/rows')) == 1
    hub.put('org/pickle', {'test.pkl': pickle.dumps(Marking(marker))})
    found = problem(tmp_path, 'hf://org/pickle')
    assert found.startswith('hf://org/pickle: ') and 'data files' in found
    assert not marker.exists()
