"""Jobs for processes of their own: sharded checkpoints, several ranks that read one, and the memory of reading.

* train FOLDER: trains under FSDP, evaluates, writes sharded checkpoints
* evaluate OUT MODEL...: writes to OUT/0 and so on; OUT/downloads says which rank loads what
* measure TINY MODEL...: prints each one's bytes in memory, as a JSON line
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import tiny
import torch
from composer.utils import dist

from llmfoundry_gauntlet import EvalGauntlet, evaluate
from llmfoundry_gauntlet.composer.models import open_model
from llmfoundry_gauntlet.data.stores import Store

CPU = torch.device('cpu')


def train(folder: Path) -> None:
    """Two checkpoints in `folder/checkpoints`, and records of the evaluations before them in `folder/records`."""
    tiny.shard_on_cpu()
    settings = tiny.write_tasks(folder) if dist.get_global_rank() == 0 else {}
    dist.initialize_dist('cpu', timeout=60.0)
    settings = dist.all_gather_object(settings)[0]
    tiny.train(
        [EvalGauntlet(**settings, interval='2ba', save_folder=str(folder / 'records'))],
        max_duration='4ba',
        save_folder=str(folder / 'checkpoints'),
        save_interval='2ba',
        parallelism_config={'fsdp': {'sharding_strategy': 'FULL_SHARD', 'state_dict_type': 'sharded'}},
    )


def evaluate_on_ranks(out: Path, models: list[str]) -> None:
    """Write the tasks to `out`."""
    download = Store.download

    def noted(self: Store, names: list[str], folder: Path) -> None:
        with (out / 'downloads').open('a') as file:
            file.writelines(f'{dist.get_global_rank()} {self.uri} {name}\n' for name in names)
        download(self, names, folder)

    Store.download = noted
    for number, model in enumerate(models):
        evaluate(model, **tiny.settings_of(out), out=out / str(number), device='cpu')


def measure(word: str) -> dict[str, int]:
    """Print the peak memory before and after the weights of `dtype:path` are read, and their size, in bytes."""
    dtype, _, model = word.partition(':')
    with open_model(model, dtype=dtype) as source:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        network = source.load(CPU)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert all(parameter.dtype == getattr(torch, dtype) for parameter in network.parameters())
    return {'before': before, 'after': after, 'weights': sum(value.nbytes for value in network.parameters())}


def main(command: str, *words: str) -> None:
    if command == 'train':
        train(Path(words[0]))
    elif command == 'evaluate':
        evaluate_on_ranks(Path(words[0]), list(words[1:]))
    else:
        small, *models = words
        for word in models:
            child = os.fork()  # so that each has a most of its own
            if not child:
                measure(small)  # maps the pages of libraries that reading uses
                print(json.dumps({'model': word, **measure(word)}), flush=True)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
