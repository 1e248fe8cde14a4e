"""Read rows from the Hugging Face Hub or from folders that the `datasets` library can read."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.tasks import TaskSpec
from llmfoundry_gauntlet.config.yaml import describe, suggestion
from llmfoundry_gauntlet.errors import DataError

BUILDERS = ('arrow', 'csv', 'json', 'parquet', 'text')
CACHE = 'cache'  # rows that one of them prepared earlier, used if the hub is offline
PACKAGED = 'datasets.packaged_modules.'
PICKLES = ('.pkl', '.pickle')
FILES = 'jsonl, csv, tsv, parquet, arrow, txt'
CONVERT = 'save its rows as JSON lines or Parquet in another folder: hf://./folder'
TRUST = 'trust_remote_code'
EXPORT = 'or set hf_loading_vars.revision to refs/convert/parquet, if the hub has converted it'
RESOLVED_BY = ('revision', 'data_dir', 'data_files', 'cache_dir', 'download_mode', 'token', 'storage_options')
HUGGING_FACE = 'hf://'
FOLDERS = ('/', './', '../', '~')  # prefixes of local folders; other names are on the hub
HUB_SECONDS = 10
MOST_TEXT = 200  # characters kept at each end of a third-party error
KEPT = (list, tuple, Mapping, bytes)  # types that are not converted to text

Row = Mapping[str, Any]


def safe_variables(name: str, uri: str, loading: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for `datasets.load_dataset` with which no code from a dataset can run.

    Raise DataError unless one of the five builders reads it from files that hold no code, and whatever
    `datasets.load_dataset` raises if there is no such dataset. Runs nothing and reads no data.
    """
    from datasets.load import dataset_module_factory

    check_variables(uri, loading)
    if name.endswith('.py') or Path(name, f'{Path(name).name}.py').is_file():
        raise DataError(refusal(uri, name))
    check_files(name, uri, loading)
    safe = {key: value for key, value in loading.items() if key != TRUST}
    asked = {key: safe[key] for key in RESOLVED_BY if safe.get(key) is not None}
    if TRUST in inspect.signature(dataset_module_factory).parameters:  # datasets 3
        safe[TRUST] = False
        # _require_custom_configs finds a script even if the hub has converted its rows, as datasets 4 does.
        asked |= {TRUST: False, '_require_custom_configs': True}
    try:
        module: str = dataset_module_factory(name, **asked).module_path
    except (ValueError, RuntimeError) as error:
        if 'dataset script' in str(error).lower():  # "requires you to execute the dataset script", as of datasets 3
            raise DataError(f'{refusal(uri, name)}, {EXPORT}') from error
        raise
    if not module.startswith(PACKAGED):  # a script that was trusted earlier
        raise DataError(f'{refusal(uri, name)}, {EXPORT}')
    builder = module.split('.')[2]
    if builder not in (*BUILDERS, CACHE):
        raise DataError(f'{uri}: is read by the builder {builder}; allowed: {", ".join(BUILDERS)}; {CONVERT}')
    return safe


def check_variables(uri: str, loading: Mapping[str, Any]) -> None:
    """Raise DataError for `hf_loading_vars` that ask for code or for another dataset."""
    if loading.get(TRUST):
        raise DataError(
            f'{uri}: hf_loading_vars.{TRUST}: is {loading[TRUST]!r}, but datasets may not run code; allowed: false; '
            'save the rows that the code produces as JSON lines or Parquet'
        )
    if 'path' in loading:
        raise DataError(f'{uri}: hf_loading_vars.path: is not allowed; name the dataset in dataset_uri')


def refusal(uri: str, name: str) -> str:
    """Return the message about the loading script of a dataset."""
    script = name if name.endswith('.py') else f'{name}/{Path(name).name}.py'
    return f'{uri}: {script} is a script, but datasets may not run code; allowed: {FILES} files; {CONVERT}'


def check_files(name: str, uri: str, loading: Mapping[str, Any]) -> None:
    """Raise DataError for a pickle among the files of a dataset, or in an archive among them."""
    for file in files_named(name, loading):
        for inner in ('', *names_in_archive(file)):
            if any(suffix in PICKLES for suffix in Path(inner or file).suffixes):
                shown = f'{file}: {inner}' if inner else file
                raise DataError(
                    f'{uri}: {shown} is a pickle, which can run arbitrary code when read; allowed: {FILES} files; '
                    f'{CONVERT}'
                )


def files_named(name: str, loading: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the entries of `data_files`, patterns unexpanded, or else all files of a local folder."""
    from datasets.data_files import sanitize_patterns

    folder = Path(name) if Path(name).is_dir() else Path()
    inside = folder / str(loading.get('data_dir') or '')
    if loading.get('data_files') is not None:
        splits = sanitize_patterns(loading['data_files'])
        yield from (inside / str(pattern) for patterns in splits.values() for pattern in patterns)
    elif Path(name).is_dir() or loading.get('data_dir'):
        yield from sorted(path for path in inside.rglob('*') if path.is_file())


def names_in_archive(path: Path) -> Sequence[str]:
    """Return the names in a zip or tar file; none for other or damaged files."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return archive.namelist()
        if '.tar' in path.suffixes or path.suffix == '.tgz':
            with tarfile.open(path) as members:
                return members.getnames()
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError):
        pass  # the builder reports it
    return ()


def hugging_face_rows(task: TaskSpec, data_root: str | Path) -> list[dict[str, Any]]:
    """Return the rows of an `hf://` dataset in order, with columns joined as `hf_parsing_map` says.

    `hf://org/name` is on the hub; `hf://./folder` and `hf:///folder` are local, relative ones below `data_root` or else
    the working directory. `hf_loading_vars` are passed to `datasets.load_dataset`, as in llm-foundry. No code from a
    dataset runs: scripts, pickles and builders other than those for plain files are refused. Raise DataError.
    """
    uri, loading = task.dataset_uri, dict(task.hf_loading_vars or {})
    name = uri.removeprefix(HUGGING_FACE)
    if name.startswith(FOLDERS):
        name = str(find_folder(name, data_root))
    else:
        check_hub(name, uri, loading)
    data = load(name, uri, loading)
    columns = parsing_map(task, data.column_names)
    if columns is not None:
        data = data.select_columns(list(dict.fromkeys(column for named in columns.values() for column in named)))
    rows = data.with_format('arrow')[:].to_pylist()
    if columns is None:
        return [{key: plain(value) for key, value in row.items()} for row in rows]
    problems: list[str] = []
    mapped = [mapped_row(row, columns, f'{uri}:{number + 1}', problems.append) for number, row in enumerate(rows)]
    if problems:
        raise DataError(problems)
    return mapped


def find_folder(name: str, data_root: str | Path) -> Path:
    """Return the folder below `data_root`, or else the working directory. Raise DataError."""
    path = Path(name).expanduser()
    candidates = list(dict.fromkeys((Path(data_root) / path, path)))
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    looked = ', '.join(map(str, candidates))
    raise DataError(f'{HUGGING_FACE}{name}: there is no such folder (looked for {looked}); set data_root to its parent')


def check_hub(name: str, uri: str, loading: Row) -> None:
    """Raise DataError immediately if the hub does not respond, where `datasets` would keep retrying."""
    import datasets
    import requests

    is_format = '/' not in name and ('data_files' in loading or 'data_dir' in loading)  # such as hf://json
    if is_format or Path(name).is_dir() or datasets.config.HF_HUB_OFFLINE:
        return
    try:
        requests.head(datasets.config.HF_ENDPOINT, timeout=HUB_SECONDS).close()
    except (requests.RequestException, OSError) as error:
        raise DataError(
            f'{uri}: {datasets.config.HF_ENDPOINT} does not respond ({type(error).__name__}); check the network and '
            'HF_ENDPOINT; or set HF_HUB_OFFLINE=1, if the dataset has been loaded here before; or name a local '
            'folder: hf://./folder'
        ) from error


def load(name: str, uri: str, loading: dict[str, Any]) -> Any:
    """Load one split. Raise DataError."""
    import datasets

    try:
        with without_bars():
            data = datasets.load_dataset(name, **safe_variables(name, uri, loading))
    except (
        *(OSError, ValueError, ImportError, TypeError, KeyError, AttributeError, RuntimeError),
        StopIteration,  # raised by datasets 4 for files without rows
        datasets.exceptions.DatasetsError,
    ) as error:
        advice = 'set hf_loading_vars to valid arguments of datasets.load_dataset, or save the dataset to a folder: '
        raise DataError(f'{uri}: cannot be loaded: {why(error)}; {advice}hf://./folder') from error
    if isinstance(data, Mapping):
        raise DataError(f'{uri}: has the splits {", ".join(map(str, data))}; name one in hf_loading_vars.split')
    if not isinstance(data, datasets.Dataset):
        raise DataError(
            f'{uri}: gives {type(data).__name__} with these hf_loading_vars; allowed: one split (split: test), and no '
            'streaming'
        )
    return data


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bars of `datasets` and `huggingface_hub`, unless environment variables set them."""
    import datasets
    from huggingface_hub import utils

    with contextlib.ExitStack() as stack:
        for library in (datasets, utils):
            if not library.are_progress_bars_disabled():
                library.disable_progress_bars()
                stack.callback(library.enable_progress_bars)
        yield


def why(error: BaseException) -> str:
    """Return a third-party error and its causes on one line."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        text = ' '.join(str(cause).split()).rstrip('.') or type(cause).__name__
        texts.append(text if len(text) <= 2 * MOST_TEXT else f'{text[:MOST_TEXT]} [...] {text[-MOST_TEXT:]}')
        cause = cause.__cause__
    return ': '.join(dict.fromkeys(texts))


def parsing_map(task: TaskSpec, found: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the columns of each key; None if rows are used unchanged. Raise DataError with every problem."""
    if not task.hf_parsing_map:
        return None
    columns, problems = {}, []
    for key, named in task.hf_parsing_map.items():
        place = f'{task.dataset_uri}: hf_parsing_map.{key}'
        if not isinstance(named, (list, tuple)) or not named:
            problems.append(f'{place}: is {describe(named)}; allowed: a list of columns, such as [question]')
            continue
        for column in named:
            if column not in found:
                known = suggestion(str(column), found).replace('; allowed:', '; found:')
                problems.append(f'{place}: there is no column {column!r}{known}')
        columns[key] = list(named)
    if problems:
        raise DataError(problems)
    return columns


def mapped_row(
    row: Row, columns: Mapping[str, Sequence[str]], place: str, add_problem: Callable[[str], None]
) -> dict[str, Any]:
    """Return a row with the keys of the map. Columns are converted to text and joined by spaces, as in llm-foundry.

    A single column that holds a list, a mapping or null is kept as it is, as is the number at `gold`.
    """
    found: dict[str, Any] = {}
    for key, named in columns.items():
        values = [row[column] for column in named]
        first = values[0]
        if len(values) == 1 and (key == 'gold' or plain(first) is None or isinstance(first, KEPT)):
            found[key] = plain(first)
            continue
        empty = [column for column in named if plain(row[column]) is None]
        if empty:
            add_problem(f'{place}: {key} joins {", ".join(named)}, but {empty[0]} is empty; allowed: text')
        found[key] = ' '.join(map(str, values))
    return found


def plain(value: Any) -> Any:
    """Convert a value to what JSON can hold. Other types, such as bytes and dates, become a mapping."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    return {type(value).__name__: hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)}
