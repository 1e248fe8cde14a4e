"""Refuse `hf://` datasets that could run code when they are loaded.

Only five builders of the `datasets` library are allowed, which do nothing but parse files. datasets 3 also runs a
loading script found beside the data, and reads pickles with its builder `pandas`.
"""

from __future__ import annotations

import inspect
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def safe_variables(name: str, uri: str, loading: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for `datasets.load_dataset` with which no code from a dataset can run.

    Raises DataError unless one of the five builders reads it from files that hold no code, and whatever
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
    folder = Path(name) if Path(name).is_dir() else Path()
    inside = folder / str(loading.get('data_dir') or '')
    if loading.get('data_files') is not None:
        yield from (inside / text for text in texts_in(loading['data_files']))
    elif Path(name).is_dir() or loading.get('data_dir'):
        yield from sorted(path for path in inside.rglob('*') if path.is_file())


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in nested lists and mappings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from texts_in(inner)
    else:
        yield str(value)


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
