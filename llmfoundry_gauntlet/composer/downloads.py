"""Models out of object stores: one rank of a machine downloads into a folder that is removed in the end."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from composer.utils import dist

from llmfoundry_gauntlet.composer.checkpoints import CONFIG, LINK, METADATA, checkpoints_among
from llmfoundry_gauntlet.composer.stores import S3, Folder, StoreError, open_folder
from llmfoundry_gauntlet.composer.weights import first_of
from llmfoundry_gauntlet.errors import ModelError

OUTCOME = 'outcome'  # the file that ends the other ranks' waiting: a URI and a path, or what went wrong


@contextlib.contextmanager
def downloaded(uri: str) -> Iterator[tuple[Path, str]]:
    """The local copy of a model in an object store, and its own URI where the given one is of a link to it.

    Called by all ranks at once. The copy is there until the context ends, which it does on all ranks together unless
    there is an error. Raises ModelError on all ranks of a machine whose download failed.
    """
    first = dist.get_local_rank() == 0
    with tempfile.TemporaryDirectory(prefix='gauntlet-model-') if first else contextlib.nullcontext('') as made:
        folder = Path(dist.all_gather_object(made)[dist.get_global_rank() - dist.get_local_rank()])
        if first:
            write_outcome(folder, uri)
        # Not in a collective, whose timeout a download may outlast.
        with dist.local_rank_zero_download_and_wait(str(folder / OUTCOME)):
            word, *rest = (folder / OUTCOME).read_text(encoding='utf-8').split('\n', 2)
        if word != 'done':
            raise (StoreError if word == 'store' else ModelError)('\n'.join(rest))
        yield folder / rest[1], rest[0]
        dist.barrier()


def write_outcome(folder: Path, uri: str) -> None:
    """Downloads, and says how it went."""
    outcome = f'failed\n{uri}: the download broke off'  # the others wait, whatever comes
    try:
        outcome = '\n'.join(['done', *download(uri, folder)])
    except StoreError as error:
        outcome = f'store\n{error}'
    except ModelError as error:
        outcome = f'failed\n{error}'
    finally:
        (folder / f'{OUTCOME}.partial').write_text(outcome, encoding='utf-8')
        os.replace(folder / f'{OUTCOME}.partial', folder / OUTCOME)


def download(uri: str, folder: Path) -> tuple[str, str]:
    """Copies a model into a folder; its URI and the path there. Raises ModelError."""
    bucket, _, key = uri.removeprefix(S3).partition('/')
    store = open_folder(f'{S3}{bucket}')
    key, names = find_model(store, key.rstrip('/'))
    found = f'{S3}{bucket}/{key}'
    inside = names != [key]
    target = PurePosixPath('model') / PurePosixPath(key).name
    for name in names:
        path = target / PurePosixPath(name).relative_to(key) if inside else target
        store.download(name, folder / path)
    return found, str(target)


def find_model(store: Folder, key: str) -> tuple[str, list[str]]:
    """The key of a model in a bucket after following a link, and all objects that it is made of. Raises ModelError."""
    names = [file.name for file in store.files(key)]
    for link in (key, f'{key}{LINK}'):
        if link.endswith(LINK) and link in names:
            return followed(store, link)
    if key in names:
        return key, [key]
    below = [name.removeprefix(f'{key}/') for name in names if name.startswith(f'{key}/')] if key else names
    place = f'{store.uri}/{key}'
    if METADATA in below or CONFIG in below:
        return key, [f'{key}/{name}' for name in below if '/' not in name]
    if not below:
        raise ModelError(f'{place}: there is no such object, and nothing below it')
    raise ModelError(f'{place}: {what_is_in_it(below)}')


def followed(store: Folder, link: str) -> tuple[str, list[str]]:
    """The model that a link leads to: a text with its key in the bucket. Raises ModelError."""
    text = store.read(link).decode(errors='replace').strip()
    key = text.removeprefix(f'{store.uri}/').strip('/')
    if not key or key.endswith(LINK):
        raise ModelError(f'{store.uri}/{link}: leads to {text!r}; allowed: the key of a checkpoint')
    try:
        return find_model(store, key)
    except ModelError as error:
        raise ModelError(f'{store.uri}/{link}: leads to {text!r}: {error}') from error


def what_is_in_it(names: list[str]) -> str:
    """Why a folder is no model, by the relative names of what is in it."""
    found = checkpoints_among(names)
    if found:
        return f'is a folder of {len(found)} checkpoints; name one of them: {", ".join(found)}'
    return (
        f'is no model: it has no {CONFIG} and no {METADATA}; allowed: a Composer checkpoint, whole or sharded, or a '
        f'Hugging Face folder; in it are {first_of(sorted(names), ", ") or "no files"}'
    )
