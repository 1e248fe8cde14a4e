"""Tasks of lm-eval have the same items and metrics on two ranks as on one, and in an evaluation that is resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lm_eval_sums import entry, write_tasks
from tiny import outcome, record
from torchrun import GAUNTLET, run_well

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.errors import GauntletError
from llmfoundry_gauntlet.results.journal import Journal
from llmfoundry_gauntlet.results.runs import read_run

pytest.importorskip('lm_eval')
pytestmark = pytest.mark.slow

TASKS = ('sums', 'written_sums', 'texts')


@pytest.fixture
def world(tmp_path: Path, tiny_llamas: Path) -> dict[str, Any]:
    """Return the settings of an evaluation with a task of each type of lm-eval's requests."""
    write_tasks(tmp_path)
    tasks = [entry(tmp_path, task, num_fewshot=[0 if task == 'texts' else 1]) for task in TASKS]
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': tasks}))
    return {
        'model': str(tiny_llamas / 'plain'),
        'tasks': str(tmp_path / 'tasks.yaml'),
        'max_seq_len': 128,
        'tokens_per_batch': 512,
        'device': 'cpu',
    }


def test_two_ranks_have_the_items_and_metrics_of_one(world: dict[str, Any], tmp_path: Path):
    options = [word for name, value in world.items() for word in (f'--{name.replace("_", "-")}', str(value))]
    for num_ranks in (1, 2):
        run_well(*GAUNTLET, 'run', *options, '--out', tmp_path / f'ranks_{num_ranks}', num_ranks=num_ranks)

    assert outcome(tmp_path / 'ranks_2') == outcome(tmp_path / 'ranks_1')
    assert record(tmp_path / 'ranks_2')['environment']['num_ranks'] == 2


def half_done(whole: Path, out: Path) -> int:
    """Write the journal of an evaluation that ended after every other item; return their number."""
    run = read_run(whole)
    finished = [result for of_task in run.results.values() for result in of_task[::2]]
    journal = Journal(out, run.record['identity'], attempt=1, rank=0)
    journal.add(finished)
    journal.close()
    return len(finished)


def test_a_resumed_evaluation_has_the_items_and_metrics_of_a_whole_one(world: dict[str, Any], tmp_path: Path):
    whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
    evaluate(**world, out=whole)
    num_finished = half_done(whole, resumed)

    evaluate(**world, out=resumed, resume=True)

    assert outcome(resumed) == outcome(whole)
    assert record(resumed)['timing']['reused_items'] == num_finished


@pytest.mark.parametrize(
    ('found', 'changed'),
    [
        ('version: 1.5', 'version: 1.6'),
        ('doc_to_target: gold', 'doc_to_target: "{{1}}"'),
        ('metric: acc_norm', 'metric: acc_bytes'),
    ],
)
def test_a_changed_task_is_not_resumed(world: dict[str, Any], tmp_path: Path, found: str, changed: str):
    """None of these changes a prompt."""
    whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
    evaluate(**world, out=whole)
    half_done(whole, resumed)
    definition = tmp_path / 'sums.yaml'
    assert found in definition.read_text()
    definition.write_text(definition.read_text().replace(found, changed))

    with pytest.raises(GauntletError, match='items'):
        evaluate(**world, out=resumed, resume=True)

    # The same task as before still is.
    definition.write_text(definition.read_text().replace(changed, found))
    again = tmp_path / 'again'
    shutil.copytree(resumed, again)
    evaluate(**world, out=again, resume=True)
    assert outcome(again) == outcome(whole)


def test_a_changed_answer_in_the_data_is_not_resumed(world: dict[str, Any], tmp_path: Path):
    """Gold answers are in no prompt without shots."""
    whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
    evaluate(**world, out=whole)
    half_done(whole, resumed)
    rows = tmp_path / 'sums.jsonl'
    rows.write_text(rows.read_text().replace('"gold": 2', '"gold": 1'))

    with pytest.raises(GauntletError, match='items'):
        evaluate(**world, out=resumed, resume=True)
