"""Train the tiny model with or without evaluations; write a digest of everything training depends on."""

import hashlib
import pickle
import random
from pathlib import Path

import numpy as np
import tiny
import torch
from composer.utils import dist

from llmfoundry_gauntlet import EvalGauntlet


def digest(trainer) -> str:
    """Return a digest of weights, optimizer and the random state of Python, NumPy and torch."""
    parts = [
        [(name, value.numpy().tobytes()) for name, value in trainer.state.model.state_dict().items()],
        [
            value.numpy().tobytes() if torch.is_tensor(value) else value
            for state in trainer.state.optimizers[0].state_dict()['state'].values()
            for value in state.values()
        ],
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        [np.asarray(part).tobytes() for part in np.random.get_state()[1:]],
        trainer.state.model.training,
    ]
    return hashlib.sha256(pickle.dumps(parts)).hexdigest()


def main(folder: Path, mode: str) -> None:
    dist.initialize_dist('cpu')
    places = {'interval': ['first', '2ba', 'last'], 'save_folder': str(folder / 'records')}
    callbacks = [EvalGauntlet(**tiny.settings_of(folder), **places)] if mode == 'with' else []
    trainer = tiny.trainer(callbacks, max_duration='5ba')
    trainer.fit()
    name = f'{mode}_{dist.get_world_size()}_{dist.get_global_rank()}.txt'
    (folder / name).write_text(digest(trainer))
    trainer.close()
