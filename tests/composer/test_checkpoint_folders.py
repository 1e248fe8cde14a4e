"""Which checkpoints a folder has; one of which anything is missing is not taken for whole."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tiny
import torch
from composer.utils import dist
from torch.distributed import checkpoint as sharded

from llmfoundry_gauntlet.composer.checkpoint_folders import Checkpoint, find_checkpoints, missing_part
from llmfoundry_gauntlet.composer.stores import StoredFile, open_folder


def checkpoint_in(folder: Path) -> Checkpoint:
    (found,) = find_checkpoints(open_folder(str(folder)).files())
    return found


def lacking(folder: Path) -> str | None:
    return missing_part(open_folder(str(folder)), checkpoint_in(folder))


def found(*names: str) -> dict[str, tuple[str, int | None]]:
    checkpoints = find_checkpoints([StoredFile(name, 1, 'v') for name in names])
    return {checkpoint.name: (checkpoint.kind, checkpoint.batch) for checkpoint in checkpoints}


def test_every_kind_is_found_and_what_leads_to_one_is_none():
    assert found(
        'ep0-ba2-rank0.pt',
        'deeper/ep1-ba40-rank0.pt',
        'ep0-ba2-rank1.pt',  # of the same checkpoint
        'ep0-ba6/.metadata',
        'ep0-ba6/__0_0.distcp',
        'ep0-ba8/__0_0.distcp',  # whose metadata has yet to come
        'huggingface/ba10/config.json',
        'huggingface/ba10/model.safetensors',
        'huggingface/ba10/optimizer.pt',
        'mine.pt',
        'latest-rank0.pt.symlink',
        'deeper/notes.txt',
        '.gauntlet/asked/ep0-ba2-rank0.pt.1.json',
        '.cache/ep0-ba3-rank0.pt',
        '.writing-123.pt',
    ) == {
        'ep0-ba2-rank0.pt': ('file', 2),
        'deeper/ep1-ba40-rank0.pt': ('file', 40),
        'ep0-ba6': ('sharded', 6),
        'ep0-ba8': ('sharded', 8),
        'huggingface/ba10': ('hugging face', 10),
        'mine.pt': ('file', None),
    }
    link = StoredFile('latest-rank0.pt', 1, 'v', is_link=True)
    assert find_checkpoints([link]) == []


@pytest.mark.parametrize(
    ('name', 'batch'),
    [('ep10-ba2000-rank0.pt', 2000), ('checkpoint-500', 500), ('run1/step_30', 30), ('llama-7b.pt', None)],
)
def test_the_batch_is_read_from_the_name(name: str, batch: int | None):
    assert Checkpoint(name=name, kind='file', files=()).batch == batch


def test_a_version_is_of_all_files():
    def version(*versions: str) -> str:
        files = [StoredFile(f'ba1/__{i}_0.distcp', 1, version) for i, version in enumerate(versions)]
        (checkpoint,) = find_checkpoints([*files, StoredFile('ba1/notes.txt', 1, str(random.random()))])
        return checkpoint.version

    assert version('a', 'b') == version('a', 'b')
    assert len({version('a', 'b'), version('a', 'c'), version('c', 'b'), version('a')}) == 4


def test_a_single_file_is_whole_only_at_its_full_length(tmp_path: Path):
    path = tmp_path / 'ep0-ba1-rank0.pt'
    torch.save({'state': {'model': dict(tiny.model().state_dict())}}, path)
    whole = path.read_bytes()
    assert lacking(tmp_path) is None
    draw = random.Random(1)
    for length in [0, 1, 22, len(whole) - 22, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(40))]:
        path.write_bytes(whole[:length])
        assert f'its {length} bytes do not end in the directory of a zip file' in str(lacking(tmp_path))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A sharded checkpoint of two files."""
    folder = tmp_path / 'ep0-ba4'
    writer = sharded.FileSystemWriter(folder, single_file_per_rank=False)
    state = {'state': {'model': {'one': torch.arange(10), 'two': torch.zeros(3, 3)}}}
    dist.initialize_dist('cpu')
    sharded.save(state, storage_writer=writer)
    assert len(list(folder.glob('*.distcp'))) == 2
    return folder


@pytest.mark.filterwarnings('ignore:TypedStorage is deprecated')
def test_a_sharded_checkpoint_wants_its_metadata_and_every_shard_whole(shards: Path, tmp_path: Path):
    assert lacking(tmp_path) is None
    second = max(shards.glob('*.distcp'))
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    assert lacking(tmp_path) == f'{second.name} has {len(content) - 1} of {len(content)} bytes'
    second.unlink()
    assert lacking(tmp_path) == f'1 of 2 files are absent: {second.name}'
    second.write_bytes(content)
    metadata = (shards / '.metadata').read_bytes()
    (shards / '.metadata').write_bytes(metadata[: len(metadata) // 2])
    assert str(lacking(tmp_path)).startswith('its .metadata cannot be read (')
    (shards / '.metadata').unlink()
    assert lacking(tmp_path) == 'there is no .metadata beside its 2 shards'


@pytest.mark.parametrize('shard_size', ['5GB', '60KB'])
def test_a_hugging_face_folder_wants_configuration_tokenizer_and_all_weights(tmp_path: Path, shard_size: str):
    folder = tmp_path / 'huggingface/ba3'
    tiny.tokenizer().save_pretrained(folder)
    assert find_checkpoints(open_folder(str(tmp_path)).files()) == []  # a tokenizer is none
    tiny.model().save_pretrained(folder, max_shard_size=shard_size)
    assert lacking(tmp_path) is None
    weights = sorted(folder.glob('*.safetensors'))
    assert (len(weights) > 1) == (shard_size == '60KB')
    content = weights[-1].read_bytes()
    for length in (len(content) - 1, len(content) // 2, 9, 0):
        weights[-1].write_bytes(content[:length])
        assert f'{weights[-1].name} has {length} of ' in str(lacking(tmp_path))
    weights[-1].unlink()
    if shard_size == '60KB':
        assert lacking(tmp_path) == f'1 of {len(weights)} files are absent: {weights[-1].name}'
        (folder / 'model.safetensors.index.json').write_text('{"weight_map": ')
        assert 'its model.safetensors.index.json cannot be read' in str(lacking(tmp_path))
    else:
        assert str(lacking(tmp_path)).startswith('there are no weights; allowed: model.safetensors')
    weights[-1].write_bytes(content)
    (folder / 'config.json').unlink()
    assert lacking(tmp_path) == 'there is no config.json'
    (folder / 'config.json').write_text(json.dumps({}))
    for path in [*folder.glob('*token*'), *folder.glob('vocab*')]:
        path.unlink()
    assert lacking(tmp_path) == 'there are no files of a tokenizer'
