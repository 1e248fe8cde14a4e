"""FSDP and DDP on two CPU ranks, the first of which Composer does not support by itself: see fsdp_worker.py."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import forks
import fsdp_worker
import networks
import numpy as np
import pytest
import tiny
from paths import ROOT

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
# The second has ALiBi and functions of its attention replaced. The third has no attention.
OURS = {'llama': 'stream', 'falcon, alibi': 'stream', 'mamba': 'padded_rows'}
FOUNDRYS = {'hf_causal_lm': 'stream', 'hf_causal_lm+lora': 'stream'}
FAMILIES = {**OURS, **FOUNDRYS}
REFERENCE = ROOT / '.venv-reference/bin'


def launch_reference(folder: Path) -> None:
    """Run the worker in the environment of llm-foundry."""
    paths = os.pathsep.join(map(str, (HERE, HERE.parent, ROOT)))
    done = subprocess.run(
        [REFERENCE / 'composer', '-n', '2', HERE / 'fsdp_worker.py', folder, *FOUNDRYS],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': paths},
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@cache
def ranks_of(folder: Path, is_foundrys: bool) -> list[dict[str, Any]]:
    """Return the results of each of two ranks, by family."""
    folder.mkdir()
    fsdp_worker.write_tasks(folder)
    networks.network('llama', vocab_size=259).save_pretrained(folder / 'llama')
    tiny.tokenizer().save_pretrained(folder / 'llama')
    if is_foundrys:
        launch_reference(folder)
    else:
        forks.run(fsdp_worker.main, folder / 'log.txt', folder, [*OURS], num_ranks=2)
    return [json.loads((folder / f'rank{rank}.json').read_text()) for rank in range(2)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('fsdp')


@pytest.fixture
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """Return the results of the two ranks that ran the test's family."""
    family = request.node.callspec.params['family'] if hasattr(request.node, 'callspec') else 'llama'
    if family in FOUNDRYS and not (REFERENCE / 'composer').exists():
        pytest.skip('there is no .venv-reference; `make reference` makes it')
    return ranks_of(folder / ('foundrys' if family in FOUNDRYS else 'ours'), family in FOUNDRYS)


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize(('tasks', 'num_items'), [('mixed', 28), ('long', 55)])
def test_a_sharded_model_has_the_same_scores(ranks, family: str, tasks: str, num_items: int):
    for found in ranks:
        whole, sharded = (found[family][state][tasks] for state in ('unsharded', 'sharded'))
        assert whole['layout'] == sharded['layout'] == FAMILIES[family]
        assert whole['items'].keys() == sharded['items'].keys() and len(whole['items']) == num_items
        for key, (predicted, credit, logprobs, _) in whole['items'].items():
            assert sharded['items'][key][:2] == [predicted, credit]
            np.testing.assert_allclose(sharded['items'][key][2], logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize('family', FAMILIES)
def test_a_sharded_model_has_the_same_generations(ranks, family: str):
    """Ranks have pools of different lengths: finished ones take part in the forwards of the others.

    Mutation: without `take_part` the ranks wait for each other until the timeout.
    """
    for found in ranks:
        whole, sharded = (found[family][state]['replies'] for state in ('unsharded', 'sharded'))
        assert sharded['num_pools'] >= 3
        texts = {key: text for key, (*_, text) in whole['items'].items()}
        assert len(texts) == 80 and len(set(texts.values())) > 20
        assert {key: text for key, (*_, text) in sharded['items'].items()} == texts


def test_ranks_stay_in_step_if_one_repeats_a_cached_prefix(ranks):
    """A repeated prefix must be a forward too: all ranks gather the shards together.

    Mutation: a cached prefix does not run again, and the ranks wait for each other until the timeout.
    """
    shares = [found['llama']['sharded']['long'] for found in ranks]
    assert all(share['num_prefixes'] > 0 for share in shares)
    assert any(share['repeats_a_prefix'] for share in shares), 'choose another number of rows'


@pytest.mark.parametrize(
    ('family', 'state'),
    [*((family, 'sharded') for family in FAMILIES), *((family, 'unsharded') for family in FOUNDRYS)],
)
def test_training_with_evaluations_is_bitwise_training_without(ranks, family: str, state: str):
    """Under DDP and under FSDP."""
    for found in ranks:
        assert found[family][f'{state} with'] == found[family][f'{state} without']
    are_shards = ranks[0][family][f'{state} with'] != ranks[1][family][f'{state} with']
    assert are_shards == (state == 'sharded')
