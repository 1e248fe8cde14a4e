"""Prepare the same tasks as other processes; print a digest of all items, and write notes.

python prepare_worker.py CACHE NOTES
"""

import hashlib
import sys
from pathlib import Path

from characters import Characters
from test_prepare import digest_of, examples_of, preparation_of

from llmfoundry_gauntlet.tasks.prepare import prepare_tasks

NUM_TASKS = 6

if __name__ == '__main__':
    cache, notes = map(Path, sys.argv[1:])
    tokenizer = Characters(notes=notes, seconds=0.05)
    labels = [f'task{number}' for number in range(NUM_TASKS)]
    preparations = {label: preparation_of(examples_of(label), tokenizer, label=label) for label in labels}
    items = prepare_tasks(preparations, cache)
    print(hashlib.sha256(repr([digest_of(items[label]) for label in labels]).encode()).hexdigest())
