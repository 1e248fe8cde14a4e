"""Checkpoints are found by the names of their files."""

from __future__ import annotations

import random

from llmfoundry_gauntlet.composer.checkpoint_folders import find_checkpoints
from llmfoundry_gauntlet.data.stores import StoredFile


def test_all_formats_are_found_with_the_batch_in_their_names_and_hidden_files_are_skipped():
    names = (
        'ep0-ba2-rank0.pt',
        'deeper/ep10-ba2000-rank0.pt',
        'ep0-ba2-rank1.pt',  # of the same checkpoint
        'ep0-ba6/.metadata',
        'ep0-ba6/__0_0.distcp',
        'ep0-ba8/__0_0.distcp',  # metadata not yet written
        'huggingface/ba10/config.json',
        'huggingface/ba10/model.safetensors',
        'huggingface/ba10/optimizer.pt',
        'checkpoint-500/config.json',
        'run1/step_30/config.json',
        'llama-7b.pt',
        'latest-rank0.pt.symlink',
        'deeper/notes.txt',
        'tokenizer/tokenizer.json',
        '.gauntlet/asked/ep0-ba2-rank0.pt.json',
        '.cache/ep0-ba3-rank0.pt',
    )
    found = find_checkpoints([StoredFile(name, 1, 'v') for name in names])
    assert {checkpoint.name: checkpoint.batch for checkpoint in found} == {
        'ep0-ba2-rank0.pt': 2,
        'deeper/ep10-ba2000-rank0.pt': 2000,
        'ep0-ba6': 6,
        'ep0-ba8': 8,
        'huggingface/ba10': 10,
        'checkpoint-500': 500,
        'run1/step_30': 30,
        'llama-7b.pt': None,
    }


def test_the_version_depends_on_all_files_of_a_checkpoint():
    def version(*versions: str) -> str:
        files = [StoredFile(f'ba1/__{i}_0.distcp', 1, version) for i, version in enumerate(versions)]
        (checkpoint,) = find_checkpoints([*files, StoredFile('ba1/notes.txt', 1, str(random.random()))])
        return checkpoint.version

    assert version('a', 'b') == version('a', 'b')
    assert len({version('a', 'b'), version('a', 'c'), version('c', 'b'), version('a')}) == 4
