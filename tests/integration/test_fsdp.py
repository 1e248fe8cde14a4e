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

from llmfoundry_gauntlet import evaluate

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
# The second has ALiBi and functions of its attention replaced. The third has no attention.
OURS = {'llama': 'stream', 'falcon, alibi': 'stream', 'mamba': 'padded_rows'}
FOUNDRYS = {'hf_causal_lm': 'stream', 'hf_causal_lm+lora': 'stream'}
FAMILIES = {**OURS, **FOUNDRYS}
SHARDED = [('llama', mode) for mode in fsdp_worker.MODES[1:]] + [(family, 'sharded') for family in [*FAMILIES][1:]]
of_sharded = pytest.mark.parametrize(('family', 'mode'), SHARDED)
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
    family = request.node.callspec.params.get('family', 'llama') if hasattr(request.node, 'callspec') else 'llama'
    if family in FOUNDRYS and not (REFERENCE / 'composer').exists():
        pytest.skip('there is no .venv-reference; `make reference` makes it')
    return ranks_of(folder / ('foundrys' if family in FOUNDRYS else 'ours'), family in FOUNDRYS)


def check_equal(items: dict[str, Any], expected: dict[str, Any]) -> None:
    assert items.keys() == expected.keys()
    for key, (predicted, score, logprobs, text) in expected.items():
        assert items[key][:2] + items[key][3:] == [predicted, score, text]
        if logprobs is not None:
            np.testing.assert_allclose(items[key][2], logprobs, rtol=0, atol=1e-5)


@of_sharded
@pytest.mark.parametrize(('tasks', 'num_items'), [('mixed', 28), ('long', 55), ('riddles', 24)])
def test_a_sharded_model_has_the_same_scores_and_generations(ranks, family: str, mode: str, tasks: str, num_items: int):
    """Ranks have continuous batches of different lengths. FSDP1 and FSDP2, with weights kept gathered and not.

    Mutation: without `take_part` the ranks wait for each other until the timeout if weights are not kept.
    """
    for results in ranks:
        whole = results[family]['unsharded'][tasks]
        sharded = results[family][mode][tasks]
        assert len(whole['items']) == num_items
        check_equal(sharded['items'], whole['items'])
        assert whole['layout'] == sharded['layout']
        assert whole['num_parameters'] == sharded['num_parameters'] > 10_000
        if tasks == 'riddles':
            assert sharded['num_continuous'] >= 3
            assert len({text for *_, text in whole['items'].values()}) > 5
        else:
            assert whole['layout'] == FAMILIES[family]


@of_sharded
def test_kept_weights_are_gathered_once_per_evaluation(ranks, family: str, mode: str):
    """Each evaluation of three callbacks gathers each unit once; not kept, each forward gathers all but the root's.

    Mutations: leave out `keep_1` or `keep_2`; each rank decides alone whether the weights fit.
    """
    for results in ranks:
        counts = results[family][mode]['counts']
        num_units = results[family][mode]['num_units']
        if mode.endswith('not kept'):
            assert counts['gathers'] >= (num_units - 1) * counts['forwards']
        else:
            assert counts['gathers'] <= 3 * num_units < counts['forwards']


def test_ranks_stay_in_step_if_one_repeats_a_cached_prefix(ranks):
    """A repeated prefix must be a forward too: all ranks gather the shards together.

    Mutation: a cached prefix does not run again, and the ranks wait for each other until the timeout.
    """
    evaluations = [results['llama']['sharded, not kept']['long'] for results in ranks]

    assert any(evaluation['repeats_a_prefix'] for evaluation in evaluations), 'choose another number of rows'


@pytest.mark.parametrize('mode', ['sharded', 'sharded by FSDP2'])
def test_a_rank_with_kept_weights_that_runs_out_of_memory_splits_its_batches_alone(ranks, mode: str):
    """The second rank cannot run more than 100 tokens. Mutation: kept weights count as `in_step`."""
    for results in ranks:
        out_of_memory = results['llama'][mode]['one rank out of memory']
        whole = results['llama']['unsharded']
        for tasks, evaluation in out_of_memory.items():
            check_equal(evaluation['items'], whole[tasks]['items'])


def test_a_rank_without_kept_weights_that_runs_out_of_memory_ends_the_job(tmp_path: Path):
    """The other rank, which waits to gather, ends as well."""
    fsdp_worker.write_tasks(tmp_path)
    logs = [tmp_path / f'log{rank}.txt' for rank in range(2)]

    job = forks.start_ranks(fsdp_worker.run_out_of_memory, logs, tmp_path)

    assert all(forks.statuses(job, logs[1], seconds=120))
    assert 'give tokens_per_batch: ' in logs[1].read_text()


def test_tensor_parallelism_is_an_error_before_training(tmp_path: Path):
    """The ranks of a group would run different batches. Mutation: leave out `init`; gloo ends the job instead."""
    fsdp_worker.write_tasks(tmp_path)

    forks.run(fsdp_worker.run_tensor_parallel, tmp_path / 'log.txt', tmp_path, num_ranks=2)

    for rank in range(2):
        message = (tmp_path / f'tp{rank}.txt').read_text()
        assert "parallelism_config['tp']" in message
        assert 'gauntlet watch' in message


@pytest.mark.parametrize(('family', 'mode'), [*SHARDED, *((family, 'unsharded') for family in FAMILIES)])
def test_training_with_evaluations_is_bitwise_training_without(ranks, family: str, mode: str):
    """Under DDP and under FSDP, also after evaluations that failed in the middle of a forward.

    Weights, optimizer and random states. Mutation: the evaluator's loader is a torch DataLoader.
    """
    mode_without = f'{mode.removesuffix(", not kept")}, without'
    for results in ranks:
        evaluated = results[family][mode]
        without = results[family][mode_without]
        assert evaluated['weights'] == without['weights']
        assert evaluated['state'] == without['state']
        assert evaluated.get('failed', True)
    are_shards = ranks[0][family][mode]['weights'] != ranks[1][family][mode]['weights']
    assert are_shards == (mode != 'unsharded')


def test_only_the_first_rank_loads_weights_and_scores_are_those_of_the_whole_model(tmp_path: Path):
    """Tied weights and a sharded checkpoint too; an error of the first rank is raised on all.

    Mutation: `received` does not broadcast, so the second rank scores with unwritten memory.
    """

    def network(**settings: Any) -> Any:
        return networks.network('llama', vocab_size=259, **settings)

    settings = {**tiny.write_tasks(tmp_path), 'device': 'cpu', 'max_seq_len': 128}
    models = [
        tiny.save(network(), tmp_path / 'plain'),
        tiny.save(network(tie_word_embeddings=True), tmp_path / 'tied'),
        tiny.save_sharded(tiny.content_of(network()), tmp_path / 'sharded'),
    ]
    broken = tiny.save(network(num_hidden_layers=1), tmp_path / 'broken')
    (broken / 'config.json').write_text((tmp_path / 'plain' / 'config.json').read_text())
    paths = [str(model) for model in (*models, broken)]

    forks.run(fsdp_worker.evaluate_sharded, tmp_path / 'log.txt', tmp_path, paths, num_ranks=2)

    first, second = (json.loads((tmp_path / f'rank{rank}.json').read_text()) for rank in (0, 1))
    assert first['devices'] == ['cpu']
    assert second['devices'] == ['meta']
    assert 'the weights do not match' in first['outcomes'][str(broken)]
    assert second['outcomes'][str(broken)] == first['outcomes'][str(broken)]
    for model in map(str, models):
        expected = fsdp_worker.items_of(evaluate(model, **settings))
        check_equal(first['outcomes'][model], expected)
        check_equal(second['outcomes'][model], expected)
