"""The manifest: every file of the Gauntlet and of SCORE, and where it is published."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llmfoundry_gauntlet.config.resources import PACKAGE
from llmfoundry_gauntlet.config.yaml import suggestion
from llmfoundry_gauntlet.errors import ConfigError

PATH = PACKAGE / 'eval_data' / 'manifest.tsv'
SAMPLE, UNOFFICIAL, OWN, PUBLISHED = 'sample', 'unofficial', 'own', 'published'  # where rows come from
HUGGING_FACE_ENDPOINT = 'HF_ENDPOINT'  # the environment variable that names a mirror of the Hugging Face hub


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A data file: its path below a data root, the task it belongs to, and the published file.

    `repository` is 'github:owner/name' or 'huggingface:owner/name', `revision` a commit, `source` the path in it. Size,
    git blob id and sha256 are those of the published file, None if unknown. `converter` names the conversion from the
    published file to the data file, None if they are the same.
    """

    path: str
    task: str
    num_rows: int
    num_bytes: int | None
    git_blob: str | None
    sha256: str | None
    repository: str
    revision: str
    source: str
    licence: str
    converter: str | None

    @property
    def category(self) -> str:
        """Return the folder below the data root."""
        return self.path.partition('/')[0]

    @property
    def url(self) -> str:
        """Return the address of the published file."""
        host, _, name = self.repository.partition(':')
        path = quote(self.source)
        if host == 'github':
            return f'https://raw.githubusercontent.com/{name}/{self.revision}/{path}'
        hub = os.environ.get(HUGGING_FACE_ENDPOINT, '').rstrip('/') or 'https://huggingface.co'
        return f'{hub}/datasets/{name}/resolve/{self.revision}/{path}'

    def difference(self, content: bytes) -> str | None:
        """Return how the content differs from the published file; None if it does not, or if no hash is known."""
        if self.sha256 is not None:
            kind, expected, found = 'sha256', self.sha256, sha256(content).hexdigest()
        elif self.git_blob is not None:
            kind, expected, found = 'git blob id', self.git_blob, git_blob_id(content)
        else:
            return None
        if found == expected:
            return None
        size = '' if self.num_bytes is None else f', {self.num_bytes:,} bytes'
        return f'{kind} is {found}, {len(content):,} bytes; expected {expected}{size}'


def git_blob_id(content: bytes) -> str:
    """Return git's id of a file with these bytes, 40 hex digits."""
    return sha1(b'blob %d\0' % len(content) + content, usedforsecurity=False).hexdigest()


@cache
def read_manifest(path: Path = PATH) -> tuple[DataFile, ...]:
    """Return all files in the order of the manifest; empty fields are unknown."""
    files = []
    with path.open(encoding='utf-8', newline='') as lines:
        for row in csv.DictReader(lines, dialect='excel-tab'):
            known: dict[str, Any] = {name: value or None for name, value in row.items()}
            num_rows, num_bytes = int(known.pop('rows')), known.pop('bytes')
            files.append(DataFile(num_rows=num_rows, num_bytes=num_bytes and int(num_bytes), **known))
    return tuple(files)


def select_files(names: Sequence[str]) -> tuple[DataFile, ...]:
    """Return the files with these names: labels of tasks, categories (folders), paths or their stems; all by default.

    Raise ConfigError with every unknown name.
    """
    files = read_manifest()
    if not names:
        return files
    known = {name for file in files for name in names_of(file)}
    problems = [f'{name}: no such task or file{suggestion(name, known)}' for name in names if name not in known]
    if problems:
        raise ConfigError(problems)
    return tuple(file for file in files if not names_of(file).isdisjoint(names))


def names_of(file: DataFile) -> set[str]:
    """Return the names by which a file can be selected."""
    stem = file.path.removesuffix('.jsonl')
    return {file.task, file.category, file.path, stem, stem.rpartition('/')[2]}


def origin_of(paths: Sequence[Path]) -> str:
    """Return where the rows of a task come from.

    SAMPLE if a file is the package's sample data, UNOFFICIAL if a file has a published file's name but is not known to
    be identical (MMLU-Pro and MATH are converted, so no hash is known), OWN for any other file or none, else PUBLISHED.
    """
    origins = {origin_of_file(path) for path in paths} or {OWN}
    return next(origin for origin in (SAMPLE, UNOFFICIAL, OWN, PUBLISHED) if origin in origins)


def origin_of_file(path: Path) -> str:
    """Return where a file comes from, by its content and by its path below a data root."""
    if path.resolve().is_relative_to(PATH.parent.resolve()):
        return SAMPLE
    content = path.read_bytes()
    hashes = {git_blob_id(content), sha256(content).hexdigest()}
    if any(file.converter is None and not hashes.isdisjoint((file.git_blob, file.sha256)) for file in read_manifest()):
        return PUBLISHED
    named = [file for file in read_manifest() if path.resolve().as_posix().endswith(f'/{file.path}')]
    if any((PATH.parent / file.path).is_file() and (PATH.parent / file.path).read_bytes() == content for file in named):
        return SAMPLE
    return UNOFFICIAL if named else OWN
