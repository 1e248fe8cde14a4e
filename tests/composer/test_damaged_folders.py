"""Model folders with damaged files: one ModelError that names the file, whatever transformers makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from llmfoundry_gauntlet.composer.models import open_model
from llmfoundry_gauntlet.errors import ModelError

CONFIG, TOKENIZER, TOKENIZER_CONFIG = 'config.json', 'tokenizer.json', 'tokenizer_config.json'
GENERATION, SPECIAL, WEIGHTS = 'generation_config.json', 'special_tokens_map.json', 'model.safetensors'
INDEX = f'{WEIGHTS}.index.json'

Damage = Callable[[Path], object]


def holds(content: str | bytes) -> Damage:
    """Replace the content of the file."""
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


def cut(share: float) -> Damage:
    """Truncate the file."""
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def has(**keys: Any) -> Damage:
    """Keys of the file have other values, those of its model where they are given as `model__key`."""

    def damage(path: Path) -> None:
        content = json.loads(path.read_text())
        for name, value in keys.items():
            *outer, key = name.split('__')
            inner = content[outer[0]] if outer else content
            inner[key] = value
        path.write_text(json.dumps(content))

    return damage


OF_ANY_JSON: list[Damage] = [*map(holds, ('[]', '"x"', '3', 'null', '', '{', b'\xff\xfe', '[' * 100_000)), cut(0.5)]
CASES: list[tuple[str, Damage]] = [
    *product((CONFIG, TOKENIZER, TOKENIZER_CONFIG, GENERATION, SPECIAL, INDEX), OF_ANY_JSON),
    *((CONFIG, has(model_type=value)) for value in ('nope', 3, ['llama'])),
    *((CONFIG, has(hidden_size=value)) for value in ('64', [64], {'a': 1}, None, 1.5, -1)),
    *((CONFIG, has(num_attention_heads=value)) for value in ('4', [4], None, 0)),
    *((CONFIG, has(vocab_size=value)) for value in ('259', [259], None)),
    *((CONFIG, has(rms_norm_eps=value)) for value in ('1e-5', [1e-5])),
    *((CONFIG, has(rope_scaling=value)) for value in ([1], 'x', {'type': 'nope'}, {'rope_type': 'linear'})),
    *((CONFIG, has(**{key: 'nope'})) for key in ('torch_dtype', 'hidden_act', 'pad_token_id', 'num_labels')),
    (TOKENIZER, holds('{}')),
    (TOKENIZER, has(model__type='Nope')),
    (TOKENIZER, has(model__vocab={'a': 'b'})),
    (TOKENIZER, has(model__merges=['x y'])),
    (TOKENIZER, has(pre_tokenizer={'type': 'Nope'})),
    *((TOKENIZER_CONFIG, has(tokenizer_class=value)) for value in ('Nope', 3)),
    (TOKENIZER_CONFIG, has(additional_special_tokens=[3])),
    (TOKENIZER_CONFIG, has(added_tokens_decoder='x')),
    (GENERATION, has(cache_implementation='nope')),
    (GENERATION, has(compile_config='nope')),
    *((WEIGHTS, cut(share)) for share in (0, 0.001, 0.5, 0.999)),
    (WEIGHTS, holds((2).to_bytes(8, 'little') + b'[]')),
    *((INDEX, has(weight_map=value)) for value in ([], 'x', {'w': 3}, {'w': ['x']}, {'w': None})),
    (INDEX, has(weight_map__w='model-9.safetensors')),
]


@pytest.mark.parametrize(('file', 'damage'), CASES, ids=[f'{file} {number}' for number, (file, _) in enumerate(CASES)])
def test_a_damaged_file_is_named_in_one_line(models: Path, tmp_path: Path, file: str, damage: Damage):
    folder = shutil.copytree(models / ('several' if file == INDEX else 'one'), tmp_path / 'model')
    damage(folder / file)
    with pytest.raises(ModelError) as raised, open_model(str(folder)) as source:
        source.load(torch.device('cpu'))
    (problem,) = raised.value.problems
    assert '\n' not in problem and problem.startswith(f'{folder / file}: ')
