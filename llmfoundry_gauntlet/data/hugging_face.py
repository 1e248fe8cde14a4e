"""Read rows from the Hugging Face Hub, or from local folders, with the `datasets` library."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.tasks import TaskSpec
from llmfoundry_gauntlet.errors import DataError, describe, named, suggestion

HUGGING_FACE = 'hf://'
FOLDERS = ('/', './', '../', '~')  # prefixes of local folders; other names are on the hub
BUILDERS = ('arrow', 'csv', 'json', 'parquet', 'text')
CACHE = 'cache'  # rows that one of these builders prepared earlier, used if the hub is offline
PACKAGED = 'datasets.packaged_modules.'
TRUST = 'trust_remote_code'
RESOLVED_BY = ('revision', 'data_dir', 'data_files', 'cache_dir', 'download_mode', 'token', 'storage_options')
KEPT = (list, tuple, Mapping, bytes)  # types that are not converted to text
MOST_TEXT = 200  # characters at each end of an error of `datasets`
LOADING_ERRORS = (  # that `load_dataset` raises beside its own
    AttributeError,
    ImportError,
    KeyError,
    OSError,
    RuntimeError,
    StopIteration,  # of datasets 4 for files without rows
    TypeError,
    ValueError,
)


def hugging_face_rows(task: TaskSpec, data_root: str | Path) -> list[dict[str, Any]]:
    """Return the rows of an `hf://` dataset in order, with columns joined as `hf_parsing_map` says.

    `hf://org/name` is on the hub; `hf://./folder` and `hf:///folder` are local, relative ones below `data_root` or else
    the working directory. `hf_loading_vars` are passed to `datasets.load_dataset`, as in llm-foundry. Raise DataError,
    also for a dataset that would run code.
    """
    uri = task.dataset_uri
    data = load_split(uri, task.hf_loading_vars or {}, data_root)
    columns_by_key = parsing_map(task, data.column_names)
    if columns_by_key is None:
        rows = data.with_format('arrow')[:].to_pylist()
        return [{column: to_json_types(value) for column, value in row.items()} for row in rows]

    # The others may be of types that JSON lacks, such as images, and large.
    used_columns = dict.fromkeys(chain.from_iterable(columns_by_key.values()))
    rows = data.select_columns(list(used_columns)).with_format('arrow')[:].to_pylist()
    problems: list[str] = []
    mapped_rows = [
        mapped_row(row, columns_by_key, f'{uri}:{number}', problems) for number, row in enumerate(rows, start=1)
    ]
    if problems:
        raise DataError(problems)
    return mapped_rows


def load_split(uri: str, loading: Mapping[str, Any], data_root: str | Path) -> Any:
    """Load one split with `datasets` without running code from the dataset. Raise DataError."""
    import datasets

    for key in (TRUST, 'path'):
        if loading.get(key):
            raise DataError(
                f'{uri}: hf_loading_vars.{key}: is {loading[key]!r}; leave it out: datasets are named by dataset_uri, '
                'and may not run code'
            )
    name = uri.removeprefix(HUGGING_FACE)
    if name.startswith(FOLDERS):
        name = find_dataset_folder(name, data_root)
    try:
        data = datasets.load_dataset(name, **safe_variables(name, uri, loading))
    except (*LOADING_ERRORS, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f'{uri}: cannot be loaded: {reason_of(error)}; set hf_loading_vars to valid arguments of '
            'datasets.load_dataset, or save the dataset to a folder: hf://./folder'
        ) from error
    if isinstance(data, Mapping):
        raise DataError(f'{uri}: has the splits {", ".join(map(str, data))}; name one in hf_loading_vars.split')
    if not isinstance(data, datasets.Dataset):
        raise DataError(f'{uri}: gives {type(data).__name__}; allowed: one split (split: test), and no streaming')
    return data


def reason_of(error: BaseException) -> str:
    """Return an error of `datasets` with its cause on one line, shortened in the middle."""
    errors = [error] if error.__cause__ is None else [error, error.__cause__]
    text = ': '.join(' '.join(str(each).split()) for each in errors)
    return text if len(text) <= 2 * MOST_TEXT else f'{text[:MOST_TEXT]} [...] {text[-MOST_TEXT:]}'


def find_dataset_folder(name: str, data_root: str | Path) -> str:
    """Return the folder below `data_root`, or else the working directory. Raise DataError."""
    path = Path(name).expanduser()
    candidates = list(dict.fromkeys((Path(data_root) / path, path)))
    for candidate in candidates:
        if candidate.is_dir():
            return str(candidate.resolve())
    looked = ', '.join(map(str, candidates))
    raise DataError(
        f'{HUGGING_FACE}{name}: there is no such folder (looked for {looked}); set {named("data_root")} to its parent'
    )


def safe_variables(name: str, uri: str, loading: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for `datasets.load_dataset` with which no code from a dataset can run.

    Raise DataError unless one of the five builders reads it, as others run scripts or unpickle; if there is no such
    dataset, the exception of `datasets` is passed on. Runs no code of the dataset and reads no data.
    """
    from datasets.load import dataset_module_factory

    safe = {key: value for key, value in loading.items() if key != TRUST}
    asked = {key: safe[key] for key in RESOLVED_BY if safe.get(key) is not None}
    if TRUST in inspect.signature(dataset_module_factory).parameters:  # datasets 3
        safe[TRUST] = False
        # _require_custom_configs finds a script even if the hub has converted its rows, as datasets 4 does
        # (docs/compatibility.md).
        asked |= {TRUST: False, '_require_custom_configs': True}
    module: str = dataset_module_factory(name, **asked).module_path
    if not module.startswith(PACKAGED) or module.split('.')[2] not in (*BUILDERS, CACHE):
        raise DataError(
            f'{uri}: is read by {module.removeprefix(PACKAGED)}, which can run code; allowed: files read by '
            f'{", ".join(BUILDERS)}; save its rows as JSON lines or Parquet, or set hf_loading_vars.revision to '
            'refs/convert/parquet, if the hub has converted it'
        )
    return safe


def parsing_map(task: TaskSpec, found: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the columns of each key; None if rows are used unchanged. Raise DataError with every problem."""
    if not task.hf_parsing_map:
        return None
    columns, problems = {}, []
    for key, columns_named in task.hf_parsing_map.items():
        place = f'{task.dataset_uri}: hf_parsing_map.{key}'
        if not isinstance(columns_named, (list, tuple)) or not columns_named:
            problems.append(f'{place}: is {describe(columns_named)}; allowed: a list of columns, such as [question]')
            continue
        problems += [
            f'{place}: there is no column {column!r}{suggestion(str(column), found).replace("allowed", "found")}'
            for column in columns_named
            if column not in found
        ]
        columns[key] = list(columns_named)
    if problems:
        raise DataError(problems)
    return columns


def mapped_row(
    row: Mapping[str, Any], columns_by_key: Mapping[str, Sequence[str]], place: str, problems: list[str]
) -> dict[str, Any]:
    """Return a row with the keys of the map. Columns are converted to text and joined by spaces, as in llm-foundry.

    A single column that holds a list, a mapping or null is kept unchanged, as is the number at `gold`.
    """
    mapped: dict[str, Any] = {}
    for key, columns in columns_by_key.items():
        values = [row[column] for column in columns]
        is_kept = key == 'gold' or to_json_types(values[0]) is None or isinstance(values[0], KEPT)
        if len(values) == 1 and is_kept:
            mapped[key] = to_json_types(values[0])
            continue
        empty_columns = [column for column in columns if to_json_types(row[column]) is None]
        if empty_columns:
            problems.append(
                f'{place}: {key} joins {", ".join(columns)}, but {empty_columns[0]} is empty; allowed: text'
            )
        mapped[key] = ' '.join(map(str, values))
    return mapped


def to_json_types(value: Any) -> Any:
    """Convert a value to JSON types; NaN and infinity become None, other types such as bytes and dates a mapping."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [to_json_types(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): to_json_types(inner) for key, inner in value.items()}
    text = hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)
    return {type(value).__name__: text}
