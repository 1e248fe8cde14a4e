"""The items of many tasks, each task tokenised only once per machine.

Processes that prepare the same tasks at the same time share the work: each takes tasks that no other works on, the
largest first, and reads the results of the others.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType

from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.tasks.encode import PROMPTS_VERSION
from llmfoundry_gauntlet.tasks.fewshot import FIXED_VERSION
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.tasks.token_cache import FORMAT_VERSION, TokenCache, pack, unpack
from llmfoundry_gauntlet.types import Example, Item, Prompt

log = logging.getLogger(__name__)

NO_SUBSETS: Mapping[str, Sequence[Example]] = MappingProxyType({})

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 1800  # without progress; then this process also does work claimed by others
MAX_LABEL = 80  # characters of a task's label in a file name


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A task to prepare: its rows, its name in the cache, and its cost relative to others."""

    preparation: Preparation
    asked: Sequence[Example]
    name: str
    cost: int

    def make(self, cache: TokenCache) -> list[Item]:
        """Return the items and store them for others."""
        found = self.preparation.encoded(self.asked)
        cache.store(self.name, pack([encoded for _, encoded in found]))
        log.debug('%s: %d items tokenised', self.preparation.task.key, len(self.asked))
        # Loaded, so that all processes share the memory.
        return self.load(cache) or [self.preparation.item(*pair) for pair in found]

    def load(self, cache: TokenCache) -> list[Item] | None:
        """Return the cached items; None if there are none."""
        packed = cache.load(self.name)
        if packed is None:
            return None
        return [
            self.preparation.item(example, encoded) for example, encoded in zip(self.asked, unpack(packed), strict=True)
        ]


def prepare_tasks(
    preparations: Mapping[str, Preparation],
    cache: TokenCache,
    subsets: Mapping[str, Sequence[Example]] = NO_SUBSETS,
) -> dict[str, list[Item]]:
    """Return all items by task, each task's in row order, from the cache or computed and stored there.

    For tasks in `subsets` only those rows become items. If a tokenizer's ids depend on something unknown, nothing is
    cached.
    """
    if cache.folder is None or any(preparation.encoder.fingerprint is None for preparation in preparations.values()):
        return {key: preparation.items(subsets.get(key)) for key, preparation in preparations.items()}
    work = {key: describe(preparation, subsets.get(key)) for key, preparation in preparations.items()}
    items: dict[str, list[Item]] = {}
    waiting = sorted(work, key=lambda key: -work[key].cost)
    progressed = time.monotonic()
    while waiting:
        for key in waiting:
            found = work[key].load(cache)
            if found is None:
                with cache.claim(work[key].name) as is_mine:
                    if is_mine or time.monotonic() > progressed + PATIENCE_SECONDS:
                        found = work[key].load(cache) or work[key].make(cache)  # another process may have finished it
            if found is not None:
                items[key] = found
                progressed = time.monotonic()
        if all(key not in items for key in waiting):
            time.sleep(POLL_SECONDS)
        waiting = [key for key in waiting if key not in items]
    cache.trim()
    return {key: items[key] for key in work}


def describe(preparation: Preparation, subset: Sequence[Example] | None = None) -> Work:
    """Return the work of preparing all examples of a task, or a subset.

    Its name in the cache is a digest of everything that the items depend on. Instead of rows and the code of the task
    type it covers all texts that the type can make of a row.
    """
    task, examples = preparation.task, preparation.examples
    (num_shots,) = task.num_fewshot
    digest = hashlib.sha256()
    cost = 0
    in_chat = False
    for example in examples:
        shots, prompts = possible_texts(task, example)
        in_chat = in_chat or any(prompt.chat_template for prompt in prompts)
        parts = [part for prompt in prompts for part in (prompt.own_texts, prompt.continuations)]
        right = task.responses(example.content) if task.generates else ()
        texts = [*shots, *(text for part in parts for text in part), *right]
        places = (
            example.row,
            example.file,
            example.variant,
            example.category,
            list(map(len, texts)),
            list(map(len, parts)),
        )
        digest.update(repr(places).encode('utf-8', 'surrogatepass'))
        digest.update(''.join(texts).encode('utf-8', 'surrogatepass'))
        cost += sum(map(len, parts[0])) + num_shots * sum(map(len, shots[:1]))
    settings = {
        'format': FORMAT_VERSION,
        'prompts': PROMPTS_VERSION,
        'package': version('llmfoundry-gauntlet'),
        'python': sys.version_info[:2],  # the order of a set of shots is Python's
        'tokenizer': preparation.encoder.fingerprint,
        'chat_template': preparation.encoder.chat_template if in_chat else None,
        'task': task.keys,
        'max_seq_len': preparation.max_seq_len,
        'truncation': task.truncation,
        'fewshot': (task.fewshot, FIXED_VERSION),
        'texts': digest.hexdigest(),
        'subset': None if subset is None else [(one.file, one.row, one.variant) for one in subset],
    }
    key = hashlib.sha256(repr(settings).encode('utf-8', 'surrogatepass')).hexdigest()
    name = f'{task.label[:MAX_LABEL]}_{num_shots}-shot_{key[:40]}'
    return Work(preparation=preparation, asked=subset or examples, name=name, cost=cost)


def possible_texts(task: Task, example: Example) -> tuple[list[str], list[Prompt]]:
    """Return all texts that prompts can contain of an example: as a shot and as a question, first or not."""
    content = example.content
    firsts = (False,) if task.prompt_string else (False, True)
    shots = [task.shot(content, first) for first in firsts] if task.num_fewshot != (0,) else []
    return shots, [task.ask(content, first) for first in firsts]
