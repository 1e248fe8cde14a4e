"""Tokenize training text into rows of token ids, and build the dataloader for Composer.

Text is tokenized once, into memory-mapped files, so that only the rows in use take memory, shared by all ranks of a
machine. The first rank to get the lock tokenizes; the others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from composer.core import DataSpec
from composer.utils import dist
from filelock import FileLock
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from llmfoundry_gauntlet.config.yaml import raise_invalid_values
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.tasks.encode import tokenizer_fingerprint

log = logging.getLogger('llmfoundry_gauntlet')

TrainingBatch = dict[str, torch.Tensor]
TokenRow = npt.NDArray[np.int64]  # token ids
NO_LABEL = -100  # label of positions that the loss ignores
DOCUMENTS_AT_ONCE = 1000  # enough for a fast tokenizer's threads
TOKENS, ENDS = 'tokens.uint32', 'ends.uint64'  # all token ids; the end offset of each document


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDataConfig:
    """JSON Lines with the key `text`, or text files with one document each; tokenized once, then memory-mapped."""

    path: tuple[str, ...]
    cache: str | None = None  # folder for the token ids; null: beside the first file
    packed: bool = True  # split the stream of documents and eos into blocks; false: one truncated row per document
    shuffle: bool = True

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if not self.path:
            yield 'path: is an empty list; give at least one file'


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows(Dataset[TokenRow]):
    """Rows of token ids from one long stream: blocks of `length`, or documents truncated at it."""

    tokens: npt.NDArray[np.uint32]  # [num_tokens]
    ends: npt.NDArray[np.uint64]  # [num_documents]
    length: int
    packed: bool

    def __len__(self) -> int:
        return len(self.tokens) // self.length if self.packed else len(self.ends)

    def __getitem__(self, index: int) -> TokenRow:
        """Return a row of at most `length` tokens; with `packed` those after the last full block are dropped."""
        if self.packed:
            start, stop = index * self.length, (index + 1) * self.length
        else:
            start = int(self.ends[index - 1]) if index else 0
            stop = min(int(self.ends[index]), start + self.length)
        return self.tokens[start:stop].astype(np.int64)


def read_documents(path: Path) -> Iterator[str]:
    """Yield the texts of a JSON Lines file, or a text file as one document. Raise ConfigError."""
    try:
        with path.open(encoding='utf-8') as file:
            if path.suffix != '.jsonl':
                yield file.read()
                return
            for number, line in enumerate(file, start=1):
                yield text_of(line, f'train_data.path: {path}:{number}')
    except OSError as error:
        raise ConfigError(f'train_data.path: {path} cannot be read: {error.strerror}') from error
    except UnicodeDecodeError as error:
        raise ConfigError(f'train_data.path: {path} is not UTF-8: {error.reason}') from error


def text_of(line: str, source: str) -> str:
    """Return the value of `text` in a JSON line. Raise ConfigError."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f'{source}: is not JSON: {error}') from error
    text = row.get('text') if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"{source}: has no text; allowed: a JSON object with the key 'text'")
    return text


def encode_documents(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each document, with an eos at its end if the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [ids + end for ids in tokenizer(documents, verbose=False)['input_ids']]


def write_tokens(paths: list[Path], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Tokenize all documents in order and write the files of `folder`."""
    num_tokens = 0
    with (folder / TOKENS).open('wb') as tokens, (folder / ENDS).open('wb') as ends:
        for path in paths:
            documents = read_documents(path)
            while texts := list(islice(documents, DOCUMENTS_AT_ONCE)):
                rows = encode_documents(texts, tokenizer)
                lengths = np.array([len(row) for row in rows], dtype=np.uint64)
                np.concatenate([np.array(row, dtype=np.uint32) for row in rows]).tofile(tokens)
                (np.cumsum(lengths) + np.uint64(num_tokens)).tofile(ends)
                num_tokens += int(lengths.sum())
            log.info('train_data: %s is tokenized, %d tokens so far', path, num_tokens)


def load_tokens(
    config: TrainDataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """Return the memory-mapped tokens and document ends, tokenizing first if they are not cached. Raise ConfigError."""
    paths = [Path(path) for path in config.path]
    base = Path(config.cache or f'{paths[0]}.tokens')
    folder = base / digest_of(paths, tokenizer)
    try:
        base.mkdir(parents=True, exist_ok=True)
        with FileLock(f'{folder}.lock'):
            if not folder.is_dir():
                unfinished = folder.with_suffix('.unfinished')  # may exist from a killed run
                unfinished.mkdir(exist_ok=True)
                write_tokens(paths, tokenizer, unfinished)
                os.replace(unfinished, folder)  # both files at once, which an atomic write of each is not
    except OSError as error:
        raise ConfigError(f'train_data.cache: {base} cannot be written: {error.strerror}; give a folder') from error
    return mapped(folder / TOKENS, np.uint32), mapped(folder / ENDS, np.uint64)


def mapped(path: Path, kind: type) -> npt.NDArray[Any]:
    """Return a file's numbers, memory-mapped, or an empty array for an empty file, which cannot be mapped."""
    return np.memmap(path, dtype=kind, mode='r') if path.stat().st_size else np.empty(0, dtype=kind)


def digest_of(paths: list[Path], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a cache key: tokenizer, and path, size and modification time of each file. Raise ConfigError."""
    parts: list[object] = [tokenizer_fingerprint(tokenizer) or tokenizer.name_or_path, tokenizer.eos_token_id]
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise ConfigError(f'train_data.path: {path} cannot be read: {error.strerror}') from error
        parts.append((str(path.resolve()), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def collate(rows: list[TokenRow], *, pad: int) -> TrainingBatch:
    """Return rows padded on the right to the longest; padding is masked in attention and loss."""
    length = max(map(len, rows))
    input_ids = torch.full((len(rows), length), pad)
    for row, ids in zip(input_ids, rows, strict=True):
        row[: len(ids)] = torch.from_numpy(ids)
    mask = torch.arange(length) < torch.tensor([[len(row)] for row in rows])
    return {'input_ids': input_ids, 'attention_mask': mask.long(), 'labels': input_ids.masked_fill(~mask, NO_LABEL)}


def build_dataloader(
    config: TrainDataConfig, *, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, rows_per_rank: int, seed: int
) -> DataSpec:
    """Return a dataloader of this rank's rows, in an order that depends only on the seed and the epoch."""
    tokens, ends = load_tokens(config, tokenizer)
    rows = TokenRows(tokens=tokens, ends=ends, length=max_seq_len, packed=config.packed)
    if len(rows) < rows_per_rank * dist.get_world_size():
        raise ConfigError(f'train_data: {len(rows)} rows of {max_seq_len} tokens do not fill one batch')
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    loader: DataLoader[Any] = DataLoader(
        rows,
        batch_size=rows_per_rank,
        sampler=dist.get_sampler(rows, shuffle=config.shuffle, drop_last=True, seed=seed),
        collate_fn=lambda batch: collate(batch, pad=pad or 0),
        drop_last=True,
    )
    return DataSpec(loader, get_num_tokens_in_batch=lambda batch: int(batch['attention_mask'].sum()))
