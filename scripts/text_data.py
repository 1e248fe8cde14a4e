"""Training text as rows of token ids, and Composer's loader of them."""

import json
from itertools import chain
from pathlib import Path

import torch
from composer.core import DataSpec
from composer.utils import dist
from torch.utils.data import DataLoader
from train_config import TrainDataConfig
from transformers import PreTrainedTokenizerBase

from llmfoundry_gauntlet.errors import ConfigError

Batch = dict[str, torch.Tensor]
NO_LABEL = -100  # a position that the loss leaves out


def read_documents(path: Path) -> list[str]:
    """The texts of a file of JSON lines, or a text file as one document."""
    try:
        text = path.read_text(encoding='utf-8')
    except OSError as error:
        raise ConfigError(f'train_data.path: {path} cannot be read: {error.strerror}') from error
    return [json.loads(line)['text'] for line in text.splitlines()] if path.suffix == '.jsonl' else [text]


def encode_documents(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each document, with an eos at its end if the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [ids + end for ids in tokenizer(documents, verbose=False)['input_ids']]


def pack(rows: list[list[int]], *, length: int) -> list[list[int]]:
    """The rows as one stream, cut into blocks of equal length; what is left over at the end is dropped."""
    stream = list(chain.from_iterable(rows))
    return [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]


def collate(rows: list[list[int]], *, pad: int) -> Batch:
    """Rows padded on the right to the longest; padding is neither attended to nor learnt."""
    length = max(map(len, rows))
    input_ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    mask = torch.arange(length) < torch.tensor([[len(row)] for row in rows])
    return {'input_ids': input_ids, 'attention_mask': mask.long(), 'labels': input_ids.masked_fill(~mask, NO_LABEL)}


def build_dataloader(
    config: TrainDataConfig, *, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, rows_per_rank: int, seed: int
) -> DataSpec:
    """This rank's share of the rows, in an order that depends on the seed and the epoch alone."""
    rows = encode_documents([text for path in config.path for text in read_documents(Path(path))], tokenizer)
    rows = pack(rows, length=max_seq_len) if config.packed else [row[:max_seq_len] for row in rows]
    if len(rows) < rows_per_rank * dist.get_world_size():
        raise ConfigError(f'train_data: {len(rows)} rows of {max_seq_len} tokens do not fill one batch')
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    loader = DataLoader(
        rows,
        batch_size=rows_per_rank,
        sampler=dist.get_sampler(rows, shuffle=config.shuffle, drop_last=True, seed=seed),
        collate_fn=lambda batch: collate(batch, pad=pad or 0),
        drop_last=True,
    )
    return DataSpec(loader, get_num_tokens_in_batch=lambda batch: int(batch['attention_mask'].sum()))
