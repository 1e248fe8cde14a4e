"""Find models and tokenizers on this machine and on the Hugging Face hub. Nothing here imports torch."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from llmfoundry_gauntlet.data.stores import is_remote
from llmfoundry_gauntlet.errors import ModelError, named

# The libraries of huggingface-hub 1 and 2; before, it uses requests, whose errors are OSErrors.
HTTP_LIBRARIES = [import_module(name) for name in ('httpx', 'httpx2') if find_spec(name) is not None]
UNREACHABLE: tuple[type[Exception], ...] = (OSError, *(library.HTTPError for library in HTTP_LIBRARIES))
ANSWER_SECONDS = 4.0  # timeout of a request to the hub
SMALL_FILES = ['*.json', '*.txt', '*.model', '*.tiktoken', '*.jinja', '*.py', 'adapter_model.*']  # all but weights
WEIGHT_FILES = ('model*.safetensors', 'pytorch_model*.bin')  # in order of preference


def find_model(name: str, *, revision: str | None = None) -> Path:
    """Return a local path, or the cached folder of a hub model, downloaded without its weights. Raise ModelError."""
    path = Path(name).expanduser()
    if path.exists():
        if revision is not None:
            raise ModelError(
                f'{name}: is on this machine; {named("revision")} is only for a name on the Hugging Face hub'
            )
        return path
    if path.is_symlink():
        raise ModelError(f'{name}: is a link to {path.readlink()}, which does not exist')
    if name.startswith(('.', '/', '~')) or name.count('/') > 1 or path.suffix == '.pt':
        raise ModelError(f'{name}: there is no such file or folder')
    absent = f'{name}: there is no such file or folder, '
    is_reachable = True
    commit = revision
    try:
        commit = HfApi().model_info(name, revision=revision, timeout=ANSWER_SECONDS).sha
    except RevisionNotFoundError as error:
        raise ModelError(f'{name}: has no revision {revision!r} on the Hugging Face hub') from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        message = 'and the Hugging Face hub has no such model, or none that you may read (huggingface-cli login)'
        raise ModelError(absent + message) from error
    except UNREACHABLE:
        is_reachable = False
    try:
        folder = snapshot_download(name, revision=commit, allow_patterns=SMALL_FILES, local_files_only=not is_reachable)
    except LocalEntryNotFoundError as error:
        reason = 'HF_HUB_OFFLINE is set' if HF_HUB_OFFLINE else f'{ENDPOINT} cannot be reached'
        raise ModelError(f'{absent}{reason}, and the model is not in the cache ({HF_HUB_CACHE})') from error
    except UNREACHABLE as error:
        raise ModelError(f'{name}: cannot be downloaded: {" ".join(str(error).split())}') from error
    return Path(folder)


def find_model_folder(name: str) -> Path:
    """Return a local folder, or the cached folder of a model on the hub. Raise ModelError."""
    path = find_model(name)
    if path.is_file():
        raise ModelError(f'{name}: is a file; allowed: a folder, or a name on the Hugging Face hub')
    return path


def is_from_hub(folder: Path, name: str) -> bool:
    """Return whether the folder found for a name is the cached folder of a model on the hub."""
    return folder != Path(name).expanduser() and not is_remote(name)


def download_weights(name: str, folder: Path) -> None:
    """Download the weights of a model on the hub into its folder in the cache. Raise ModelError."""
    for pattern in WEIGHT_FILES:
        try:
            snapshot_download(name, revision=folder.name, allow_patterns=pattern)
        except UNREACHABLE as error:
            raise ModelError(f'{name}: the weights cannot be downloaded: {" ".join(str(error).split())}') from error
        if any(folder.glob(pattern)):
            return
