"""scripts/plain_loop.py, a training loop without Composer: alone, on two ranks, and against `gauntlet run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from paths import ROOT
from tiny import outcome, record
from torchrun import GAUNTLET, run_well

pytestmark = pytest.mark.slow

NUM_ITEMS = 2 * (7 + 5 + 2 + 40)  # both numbers of shots of three tasks, and two generation tasks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with tasks that score and that generate, a tokenizer and training text."""
    tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path))
    tiny.tokenizer().save_pretrained(tmp_path / 'data/tokenizer')
    documents = [{'text': f'{i}+{i}={2 * i}, ' * 40} for i in range(40)]
    tiny.write_rows(tmp_path / 'data/train.jsonl', documents)
    return tmp_path


@pytest.mark.parametrize('num_ranks', [1, 2])
def test_a_plain_loop_evaluates_as_it_trains_and_its_model_has_the_same_scores_elsewhere(folder: Path, num_ranks: int):
    """Mutation: the ranks train without DistributedDataParallel, so the model of rank 0 is not that of the others."""
    out, again = folder / 'out', folder / 'again'
    settings = tiny.settings_of(folder)
    options = [word for name, value in settings.items() for word in (f'--{name.replace("_", "-")}', value)]
    loop = [f'data={folder / "data"}', f'out={out}', 'steps=3', 'eval_every=2']
    loop += [f'evaluation.{name}={value}' for name, value in settings.items()]

    printed = run_well(ROOT / 'scripts/plain_loop.py', *loop, num_ranks=num_ranks)
    run_well(*GAUNTLET, 'run', '--model', out / 'model', *options, '--device', 'cpu', '--out', again, num_ranks=1)

    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line['step'] for line in lines] == [2, 3]  # one line for all ranks
    assert lines[0]['loss'] != lines[1]['loss']
    for line in lines:
        recorded = record(out / f'gauntlet/ba{line["step"]}')
        assert recorded['training']['batch'] == line['step']
        assert recorded['environment']['num_ranks'] == num_ranks
        assert sum(task['num_items'] for task in recorded['tasks'].values()) == NUM_ITEMS
        for name, value in recorded['metrics'].items():
            assert line.get(name, value) == value, name
        assert line['icl/metrics/eval_gauntlet/all'] == recorded['composites']['categories']['all']['value']
    # All values of all items: log-probabilities, predictions and generations, to the last bit.
    assert outcome(again) == outcome(out / 'gauntlet/ba3')
    assert outcome(again) != outcome(out / 'gauntlet/ba2')
