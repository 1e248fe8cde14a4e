"""The two commands of `make demo` on two ranks, with two batches only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from programs import can_run_all

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
CATEGORIES = {
    'world_knowledge',
    'commonsense_reasoning',
    'language_understanding',
    'symbolic_problem_solving',
    'reading_comprehension',
    'safety',
}


def run(*words: str) -> str:
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_demo_trains_evaluates_saves_and_prints_scores(tmp_path: Path):
    run(sys.executable, 'scripts/make_demo_data.py', '--out', tmp_path / 'data')
    command = [BIN / 'composer', '-n', '2', 'scripts/train.py', 'yamls/train/demo.yaml']
    printed = run(
        *command,
        'max_duration=2ba',
        'save_interval=2ba',
        f'tokenizer={tmp_path}/data/tokenizer',
        f'train_data.data_files=[{tmp_path}/data/train.jsonl]',
        f'train_data.cache_dir={tmp_path}/cache',
        f'save_folder={tmp_path}/checkpoints',
        f'callbacks.eval_gauntlet.save_folder={tmp_path}/gauntlet',
    )
    records = {}
    for batch in (0, 2):
        records[batch] = json.loads((tmp_path / 'gauntlet' / f'ba{batch}' / 'results.json').read_text())
    assert sorted(path.name for path in (tmp_path / 'gauntlet').iterdir()) == ['ba0', 'ba2']
    for record in records.values():
        scored = [task for task, entry in record['tasks'].items() if 'metrics' in entry]
        assert len(scored) == (57 if can_run_all() else 49) and len(record['tasks']) == 57
        composites = {name for name, entry in record['composites']['categories'].items() if 'value' in entry}
        assert composites == CATEGORIES | ({'programming'} if can_run_all() else set())
        averages = {name for name, entry in record['composites']['averages'].items() if 'value' in entry}
        assert averages == {'core_average'} | ({'gauntlet_average'} if can_run_all() else set())
        assert record['metrics']['gauntlet/unscored_items'] == 0
        for name in ('mmlu_pro/option_order', 'mmlu_pro/prompt', 'agieval/prompt', 'math/prompt'):
            assert 0 <= record['metrics'][f'icl/metrics/score/{name}/consistency_rate'] <= 1
        assert record['environment']['num_ranks'] == 2
    assert [records[batch]['training']['checkpoint'] for batch in (0, 2)] == [
        None,
        f'{tmp_path}/checkpoints/ep0-ba2-rank0.pt',
    ]
    for text in ('simple_arithmetic_nospaces/10-shot', 'ba0', 'ba2', 'commonsense_reasoning', 'checkpoints: '):
        assert text in printed
