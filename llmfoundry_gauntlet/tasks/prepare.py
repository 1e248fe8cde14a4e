"""The items of many tasks, each task tokenised once on a machine.

Processes that prepare the same tasks at the same time share the work: each takes a task that no other is at, the
largest first, and reads what the others have made.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from types import MappingProxyType

from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.data.collection import paused_collection
from llmfoundry_gauntlet.prompts.cache import TokenCache
from llmfoundry_gauntlet.prompts.encode import PROMPTS_VERSION
from llmfoundry_gauntlet.prompts.fewshot import FIXED_VERSION
from llmfoundry_gauntlet.prompts.packed import FORMAT_VERSION, PackedItems, pack, unpack
from llmfoundry_gauntlet.tasks import type_of
from llmfoundry_gauntlet.tasks.items import Preparation, prepare_items
from llmfoundry_gauntlet.values import Example, Item, Question

log = logging.getLogger(__name__)

NO_SUBSETS: Mapping[str, Sequence[Example]] = MappingProxyType({})

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 1800  # without any progress; then what others are at is made here as well
MAX_LABEL = 80  # characters of a task's label in a file name


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A task to be prepared. `name` is its name in the cache, `cost` says how long it takes compared with others.

    `examples` are all its rows, `asked` those that become items.
    """

    preparation: Preparation
    examples: Sequence[Example]
    asked: Sequence[Example]
    name: str
    cost: int

    def make(self, cache: TokenCache) -> list[Item]:
        """The items, which are kept for others too."""
        packed = pack(prepare_items(self.preparation, self.examples, self.asked))
        cache.store(self.name, packed)
        log.debug('%s: %d items tokenised', self.preparation.task.key, len(self.asked))
        return self.load(cache) or self.unpack(packed)  # as others read it, so that all share its memory

    def load(self, cache: TokenCache) -> list[Item] | None:
        """The items that someone has made, None where there are none."""
        packed = cache.load(self.name)
        return None if packed is None else self.unpack(packed)

    def unpack(self, packed: PackedItems) -> list[Item]:
        """The items as they are used."""
        terms = self.preparation.reply_terms(self.examples)
        return list(unpack(packed, self.preparation.task.key, self.asked, terms))


@paused_collection()
def prepare_tasks(
    preparations: Mapping[str, Preparation],
    examples: Mapping[str, Sequence[Example]],
    cache: TokenCache,
    subsets: Mapping[str, Sequence[Example]] = NO_SUBSETS,
) -> dict[str, list[Item]]:
    """All items by task, each task's in row order, out of the cache or made and kept there.

    `examples` are all rows; where `subsets` has a task, only those rows become items.
    Items of a tokenizer of which it cannot be known what its ids depend on are always made.
    """
    if cache.folder is None or any(preparation.encoder.fingerprint is None for preparation in preparations.values()):
        return {
            key: prepare_items(preparation, examples[key], subsets.get(key))
            for key, preparation in preparations.items()
        }
    work = {key: describe(preparation, examples[key], subsets.get(key)) for key, preparation in preparations.items()}
    items: dict[str, list[Item]] = {}
    waiting = sorted(work, key=lambda key: -work[key].cost)
    progressed = time.monotonic()
    while waiting:
        for key in waiting:
            found = work[key].load(cache)
            if found is None:
                with cache.claim(work[key].name) as is_mine:
                    if is_mine or time.monotonic() > progressed + PATIENCE_SECONDS:
                        found = work[key].load(cache) or work[key].make(cache)  # it may have come since
            if found is not None:
                items[key] = found
                progressed = time.monotonic()
        if all(key not in items for key in waiting):
            time.sleep(POLL_SECONDS)
        waiting = [key for key in waiting if key not in items]
    cache.trim()
    return {key: items[key] for key in work}


def describe(preparation: Preparation, examples: Sequence[Example], subset: Sequence[Example] | None = None) -> Work:
    """The work of preparing these examples, or a subset of them.

    Its name in the cache is a digest of all that their items depend on. Instead of rows and of a task type's code, it
    holds every text that the type can make of a row.
    """
    task = preparation.task
    (num_shots,) = task.num_fewshot
    replies = type_of(task).replies
    digest = hashlib.sha256()
    cost = 0
    in_chat = False
    for example in examples:
        shots, ways = possible_texts(task, example)
        in_chat = in_chat or any(question.chat_template for question in ways)
        questions = [part for question in ways for part in (question.texts, question.continuations)]
        right = () if replies is None else replies.responses(example.content, task)
        texts = [*shots, *(text for question in questions for text in question), *right]
        places = (
            example.row,
            example.file,
            example.variant,
            example.category,
            list(map(len, texts)),
            list(map(len, questions)),
        )
        digest.update(repr(places).encode('utf-8', 'surrogatepass'))
        digest.update(''.join(texts).encode('utf-8', 'surrogatepass'))
        cost += sum(map(len, questions[0])) + num_shots * sum(map(len, shots[:1]))
    settings = {
        'format': FORMAT_VERSION,
        'prompts': PROMPTS_VERSION,
        'package': version('llmfoundry-gauntlet'),
        'python': sys.version_info[:2],  # the order of a set of shots is Python's
        'tokenizer': preparation.encoder.fingerprint,
        'chat_template': preparation.encoder.chat_template if in_chat else None,
        'task': asdict(task),
        'max_seq_len': preparation.max_seq_len,
        'truncation': preparation.truncation,
        'fewshot': (preparation.fewshot, FIXED_VERSION),
        'texts': digest.hexdigest(),
        'subset': None if subset is None else [(one.file, one.row, one.variant) for one in subset],
    }
    key = hashlib.sha256(repr(settings).encode('utf-8', 'surrogatepass')).hexdigest()
    name = f'{task.label[:MAX_LABEL]}_{num_shots}-shot_{key[:40]}'
    return Work(preparation=preparation, examples=examples, asked=subset or examples, name=name, cost=cost)


def possible_texts(task: TaskSpec, example: Example) -> tuple[list[str], list[Question]]:
    """All that a prompt can show of an example: as a shot, and asked, with and without anything before it."""
    task_type, content = type_of(task), example.content
    firsts = (False,) if task.prompt_string else (False, True)
    shots = []
    if task.num_fewshot != (0,):
        shots = [task_type.shot(content, task, first) for first in firsts]
    return shots, [task_type.ask(content, task, first) for first in firsts]
