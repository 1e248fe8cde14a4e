"""Prepare the items of many tasks, with a cache of token ids on disk that ranks of a machine and later runs share.

Each task has one file, named by a digest of everything its content depends on. The ranks of a machine share the
work without waiting for each other: each takes the tasks in an order of its own and reads those that others have
finished. A failure of the cache costs time but never changes a result.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np

from llmfoundry_gauntlet.data.stores import UNFINISHED, write_atomically
from llmfoundry_gauntlet.stack import VERSION
from llmfoundry_gauntlet.tasks.base import FIXED_VERSION
from llmfoundry_gauntlet.tasks.encode import PROMPTS_VERSION
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.truncate import EncodedItem
from llmfoundry_gauntlet.types import Example, Ids, Item

log = logging.getLogger(__name__)

NO_SUBSETS: Mapping[str, Sequence[Example]] = MappingProxyType({})

FORMAT_VERSION = 9
TOKENS = 'tokens'  # subfolder of the cache directory
SUFFIX = '.tokens'
MAX_LABEL = 80  # characters of a task's label in a file name
LIMIT_BYTES = 8 * 2**30
LEFTOVER_SECONDS = 24 * 3600  # older unfinished files are deleted
NUM_DIGEST_BYTES = 32
# Stored beside the token ids.
STORED = ('prompt_sha256', 'num_shots', 'prompt_shortened', 'unscorable', 'max_new_tokens', 'ending')


def prepare_tasks(
    preparations: Mapping[str, Preparation],
    folder: Path | None = None,
    subsets: Mapping[str, Sequence[Example]] = NO_SUBSETS,
) -> dict[str, list[Item]]:
    """Return all items by task, in row order, from the cache in `folder`; missing ones are computed and stored there.

    Tasks in `subsets` are limited to those examples. Nothing is cached for a tokenizer without a fingerprint.
    """
    if folder is None or any(preparation.encoder.fingerprint is None for preparation in preparations.values()):
        return {key: preparation.items(subsets.get(key)) for key, preparation in preparations.items()}
    encoded = encoded_tasks(preparations, folder, subsets)
    trim(folder)
    items: dict[str, list[Item]] = {}
    for key, preparation in preparations.items():
        examples = subsets.get(key) or preparation.examples
        pairs = zip(examples, encoded[key], strict=True)
        items[key] = [preparation.item(example, of_example) for example, of_example in pairs]
    return items


def encoded_tasks(
    preparations: Mapping[str, Preparation], folder: Path, subsets: Mapping[str, Sequence[Example]]
) -> dict[str, list[EncodedItem]]:
    """Return the token ids of all items by task, from the cache, or computed and stored there."""
    encoded: dict[str, list[EncodedItem]] = {}
    is_writable = True
    for key in order_of_rank(list(preparations)):
        subset = subsets.get(key)
        path = folder / f'{cache_name(preparations[key], subset)}{SUFFIX}'
        items = load_items(path)
        if items is None:
            items = [item for _, item in preparations[key].encoded(subset)]
            # After one failure nothing more is tried: one warning, not one for each task.
            is_writable = is_writable and store(path, items)
        encoded[key] = items
    return encoded


def order_of_rank(keys: list[str]) -> list[str]:
    """Return the tasks in this rank's order, so that the ranks of a machine begin with different ones."""
    rank = int(os.environ.get('LOCAL_RANK', '0'))
    if rank:
        random.Random(rank).shuffle(keys)
    return keys


def cache_name(preparation: Preparation, subset: Sequence[Example] | None = None) -> str:
    """Return the cache name of a task's items, for all examples or a subset.

    It contains a digest of everything the items depend on.
    """
    task = preparation.task
    (num_shots,) = task.num_fewshot
    texts, is_in_chat = digest_of_texts(preparation)
    settings = {
        # The code that makes and stores items.
        'format': FORMAT_VERSION,
        'prompts': PROMPTS_VERSION,
        'package': VERSION,
        'python': sys.version_info[:2],  # the order of a set of shots is Python's
        # The tokenizer; its chat template only if a prompt is sent in chat, so that it may change for all others.
        'tokenizer': preparation.encoder.fingerprint,
        'chat_template': (
            task.apply_chat_template,
            preparation.encoder.chat_template if is_in_chat else None,
            json.dumps(asdict(task.chat_format), sort_keys=True) if is_in_chat else None,
        ),
        # The task, its rows, and how prompts are made of them.
        'task': task.keys,
        'max_seq_len': preparation.max_seq_len,
        'truncation': task.truncation,
        'fewshot': (task.fewshot, FIXED_VERSION, task.semantics),
        'texts': texts,
        'subset': None if subset is None else [(example.file, example.row, example.variant) for example in subset],
    }
    key = hashlib.sha256(repr(settings).encode('utf-8', 'surrogatepass')).hexdigest()
    return f'{task.label[:MAX_LABEL]}_{num_shots}-shot_{key[:40]}'


def digest_of_texts(preparation: Preparation) -> tuple[str, bool]:
    """Return a digest of the texts that prompts are made of, and whether any of these is sent in chat.

    Texts stand for the rows and for the code of the task's type, whose version is unknown if it is a plugin's: a row or
    a type that gives the same texts gives the same items. So the digest covers every text of a row that a prompt can
    hold: as a shot and as a question, first or not.
    """
    task = preparation.task
    digest = hashlib.sha256()
    if task.builds_requests:
        for texts in task.texts_of_requests(preparation.examples, preparation.encoder):
            digest.update(repr(texts).encode('utf-8', 'surrogatepass'))
        return digest.hexdigest(), task.apply_chat_template

    has_shots = task.num_fewshot != (0,)
    # A question has shots before it or, if they are dropped, nothing but the instruction.
    first_without_shots = not task.prompt_string
    firsts = sorted({False, first_without_shots}) if has_shots else [first_without_shots]
    is_in_chat = task.apply_chat_template
    for example in preparation.examples:
        content = example.content
        prompts = [task.ask(content, first) for first in firsts]
        is_in_chat = is_in_chat or any(prompt.chat_template for prompt in prompts)
        shots = [task.shot(content, first) for first in firsts] if has_shots else []
        questions = [(prompt.own_texts, prompt.continuations) for prompt in prompts]
        responses = task.responses(content) if task.generates else ()  # the token limit depends on their lengths
        gold_text = task.gold_text(content) if task.generates else None
        texts = (shots, questions, responses, gold_text)
        described = (example.row, example.file, example.variant, example.category, texts)
        digest.update(repr(described).encode('utf-8', 'surrogatepass'))
    return digest.hexdigest(), is_in_chat


def load_items(path: Path) -> list[EncodedItem] | None:
    """Return the items stored in a file; None if it is missing or damaged."""
    try:
        content = path.read_bytes()
        os.utime(path)  # for `trim`
    except OSError:
        return None
    digest, data = content[:NUM_DIGEST_BYTES], memoryview(content)[NUM_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        log.warning('%s: is damaged and is recomputed', path)
        return None
    with np.load(io.BytesIO(data)) as arrays:
        tokens: Ids = arrays['tokens']
        pieces = iter(np.split(tokens, arrays['piece_ends']))
        rows = json.loads(arrays['items'].tobytes())
    items = []
    for num_contexts, context_of, num_continuations, has_gold, settings in rows:
        distinct_contexts = list(islice(pieces, num_contexts))
        items.append(
            EncodedItem(
                contexts=tuple(distinct_contexts[index] for index in context_of),
                continuations=tuple(islice(pieces, num_continuations)),
                gold=next(pieces) if has_gold else None,
                **settings,
            )
        )
    return items


def store(path: Path, items: Sequence[EncodedItem]) -> bool:
    """Write items to a file, a SHA-256 followed by an npz archive. Return whether that succeeded."""
    pieces: list[Ids] = []  # of each item its distinct contexts, then its continuations, then its right generation
    rows = []
    for item in items:
        # Equal contexts are the same array, see EncodedItem; `load_items` makes them one again.
        distinct_contexts = {id(context): context for context in item.contexts}
        index_of = {identity: index for index, identity in enumerate(distinct_contexts)}
        context_of = [index_of[id(context)] for context in item.contexts]
        pieces += distinct_contexts.values()
        pieces += item.continuations
        has_gold = item.gold is not None
        if item.gold is not None:
            pieces.append(item.gold)
        settings = {name: getattr(item, name) for name in STORED}
        rows.append((len(distinct_contexts), context_of, len(item.continuations), has_gold, settings))
    buffer = io.BytesIO()
    np.savez(
        buffer,
        tokens=np.concatenate([*pieces, np.zeros(0, np.int32)]),
        piece_ends=np.cumsum([len(piece) for piece in pieces], dtype=np.int64),
        items=np.frombuffer(json.dumps(rows).encode(), np.uint8),
    )
    data = buffer.getbuffer()
    try:
        write_atomically(path, [memoryview(hashlib.sha256(data).digest()), data])
    except OSError as error:
        log.warning('%s: token ids are not cached: %s', path.parent, error)
        return False
    return True


def trim(folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Delete the least recently used files beyond the limit, and old unfinished files."""
    # Other ranks and runs may delete the same files at the same time, so a missing one is no error.
    with contextlib.suppress(OSError):
        files = [(entry.stat(), entry.path) for entry in os.scandir(folder)]
        files.sort(key=lambda file: (file[0].st_mtime, file[0].st_size, file[1]))
        total_bytes = sum(stat.st_size for stat, path in files if path.endswith(SUFFIX))
        oldest_unfinished = time.time() - LEFTOVER_SECONDS
        for stat, path in files:
            is_excess = path.endswith(SUFFIX) and total_bytes > limit_bytes
            is_leftover = path.endswith(UNFINISHED) and stat.st_mtime < oldest_unfinished
            if is_excess:
                total_bytes -= stat.st_size
            if is_excess or is_leftover:
                with contextlib.suppress(OSError):
                    os.unlink(path)
