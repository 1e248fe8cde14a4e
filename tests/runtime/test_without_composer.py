"""Checkpoints that Composer wrote are opened where Composer cannot be imported, and have what Composer reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import composer_training
import forks
import tiny
import torch
from composer.core import Timestamp
from composer.models import HuggingFaceModel
from composer.utils import dist

CHAT_TEMPLATE = '{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}'

# Opens the checkpoints in the arguments, and writes what it read of each to a folder of its number below the first.
PROGRAM = """
import json, sys
from dataclasses import asdict
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'composer':
            raise ImportError(f'{name} is blocked')

sys.meta_path.insert(0, Blocked())

import torch
from llmfoundry_gauntlet.runtime.models import open_model

for number, checkpoint in enumerate(sys.argv[2:]):
    out = Path(sys.argv[1], str(number))
    out.mkdir(parents=True)
    with open_model(checkpoint) as source:
        source.tokenizer.save_pretrained(out / 'tokenizer')
        torch.save(source.load(torch.device('cpu')).state_dict(), out / 'weights.pt')
        (out / 'training.json').write_text(json.dumps(asdict(source.training)))
"""


def open_without_composer(out: Path, checkpoints: list[Path]) -> None:
    """Open checkpoints in a process in which Composer cannot be imported."""
    command = [sys.executable, '-c', PROGRAM, out, *checkpoints]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check_read(out: Path, *, checkpoint: Path, weights: dict[str, Any], time: Timestamp, tokenizer: Any) -> None:
    """Check what was read of a checkpoint, given what Composer reads of it."""
    weights_read = torch.load(out / 'weights.pt', weights_only=True)
    assert weights_read.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weights_read[name], weight), name

    training_read = json.loads((out / 'training.json').read_text())
    assert training_read == {
        'batch': time.batch.value,
        'epoch': time.epoch.value,
        'token': time.token.value,
        'checkpoint': str(checkpoint.resolve()),
        'loss': None,
        'loss_batches': None,
    }

    tokenizer.save_pretrained(out / 'expected')
    assert texts_in(out / 'tokenizer') == texts_in(out / 'expected')


def texts_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def make_model() -> HuggingFaceModel:
    """Return a model whose tokenizer has a chat template."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return HuggingFaceModel(tiny.model(), tokenizer=tokenizer)


def stored_tokenizer_of(model: HuggingFaceModel, folder: Path) -> Any:
    """Return what Composer reads of the tokenizer that it stores of a model."""
    stored = model.get_metadata()
    return HuggingFaceModel.load_huggingface_tokenizer_from_saved_state(stored, False, str(folder))


def test_checkpoints_in_one_file(tmp_path: Path):
    """Also one with the Timestamp itself. Mutation: the names of the stand-ins are those of other classes."""
    composer_training.train(
        [], whole=make_model(), max_duration='10ba', save_folder=str(tmp_path / 'run'), save_interval='10ba'
    )
    whole = tmp_path / 'run' / 'latest-rank0.pt'
    loaded = composer_training.trainer([], whole=make_model(), max_duration='20ba', load_path=str(whole))
    time = loaded.state.timestamp
    assert (time.epoch.value, time.batch.value, time.token.value) == (1, 10, 320)
    content = torch.load(whole, weights_only=False)
    content['state']['timestamp'] = time
    torch.save(content, tmp_path / 'object.pt')

    open_without_composer(tmp_path / 'out', [whole, tmp_path / 'object.pt'])

    tokenizer = stored_tokenizer_of(loaded.state.model, tmp_path / 'stored')
    assert tokenizer.chat_template == CHAT_TEMPLATE
    expected = {'weights': loaded.state.model.model.state_dict(), 'time': time, 'tokenizer': tokenizer}
    check_read(tmp_path / 'out' / '0', checkpoint=whole, **expected)
    check_read(tmp_path / 'out' / '1', checkpoint=tmp_path / 'object.pt', **expected)
    loaded.close()


def train_sharded(folder: Path) -> None:
    """Write a checkpoint of two ranks to `folder/run`, and this rank's part of each weight to `folder/RANK.pt`."""
    composer_training.shard_on_cpu()
    dist.initialize_dist('cpu', timeout=60.0)
    trainer = composer_training.train(
        [],
        whole=make_model(),
        max_duration='3ba',
        save_folder=str(folder / 'run'),
        save_interval='3ba',
        parallelism_config={'fsdp': {'sharding_strategy': 'FULL_SHARD', 'state_dict_type': 'sharded'}},
    )
    parts = {}
    for name, weight in trainer.state.get_model_state_dict().items():
        parts[name] = weight.to_local()
    counts = trainer.state.timestamp.state_dict()
    torch.save({'parts': parts, 'counts': counts}, folder / f'{dist.get_global_rank()}.pt')


def test_a_sharded_checkpoint(tmp_path: Path):
    forks.run(train_sharded, tmp_path / 'log.txt', tmp_path, num_ranks=2)
    ranks = [torch.load(tmp_path / f'{rank}.pt', weights_only=False) for rank in (0, 1)]
    weights = {}
    for name in ranks[0]['parts']:
        weights[name.removeprefix('model.')] = torch.cat([rank['parts'][name] for rank in ranks])
    time = Timestamp()
    time.load_state_dict(ranks[0]['counts'])
    assert (time.batch.value, time.token.value) == (3, 192)
    checkpoint = tmp_path / 'run' / 'latest-rank0.pt'
    assert (checkpoint / '.metadata').is_file()

    open_without_composer(tmp_path / 'out', [checkpoint])

    tokenizer = stored_tokenizer_of(make_model(), tmp_path / 'stored')
    check_read(tmp_path / 'out' / '0', checkpoint=checkpoint, weights=weights, time=time, tokenizer=tokenizer)
