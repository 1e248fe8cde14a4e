"""Mutated YAML files are read, or refused with an error for the user; none ends as an internal error."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import ROOT

from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.errors import GauntletError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.runtime.evaluate_file import read_config

sys.path.insert(0, str(ROOT / 'scripts'))

import train

NUM_FILES = 150  # of each kind
VALUES = [
    "'0x10'",
    '0x10',
    'null',
    '~',
    '{}',
    '[]',
    '-1',
    '1e400',
    '.inf',
    'yes',
    '2024-01-01',
    '1_000',
    '9' * 400,
    '&a x',
    '*a',
    '? x',
    '- - -',
    '[[[[',
    '%TAG',
    '<<: *a',
    '${a.b}',
    '${',
    '!!binary aa',
    '!!python/name:os.system',
    '"',
    '\t',
    '\0',
    '\u2028',
    'x' * 5000,
    f'{"a/" * 2500}b',
]
TASKS = """
icl_tasks:
- label: capitals
  dataset_uri: capitals.jsonl
  num_fewshot: [0, 2]
  icl_task_type: multiple_choice
- label: sums
  dataset_uri: sums.jsonl
  num_fewshot: [2]
  icl_task_type: generation_task_with_answers
  early_stopping_criteria: ["\\n"]
  generation_kwargs: {max_new_tokens: 4, do_sample: true, temperature: 0.5}
"""
GAUNTLET = """
eval_gauntlet:
  weighting: EQUAL
  subtract_random_baseline: true
  rescale_accuracy: true
  categories:
  - name: geography
    benchmarks:
    - {name: capitals, num_fewshot: 2, random_baseline: 0.5}
  averages:
    core: [geography]
"""
SCORE = """
score:
- dataset: mmlu_pro
  perturbations: [option_order, prompt]
  answers: likelihood
  subset_items: 20
- dataset: math
  seeds: [1, 2]
"""
EVALUATION = """
model: nowhere/model
out: runs/out
tasks: tasks.yaml
gauntlet: gauntlet.yaml
semantics: corrected
subset_items: 10
log: [accuracy, errors]
"""
TRAINING = """
run_name: fuzz
max_duration: 40ba
global_train_batch_size: 8
max_seq_len: 256
tokenizer: nowhere/tokenizer
model: {model_type: llama, hidden_size: 96}
train_data: {path: json, data_files: [nowhere.jsonl]}
optimizer: {adamw: {lr: 3e-3}}
scheduler: {cosine_with_warmup: {t_warmup: 1ba}}
save_interval: 10ba
callbacks:
  speed_monitor: {}
  eval_gauntlet: {tasks: tasks.yaml, interval: [first, 10ba], time_budget: 2m}
"""
KINDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    'tasks': (TASKS, load_suite),
    'gauntlet': (GAUNTLET, lambda path: load_suite(None, path)),
    'score': (SCORE, lambda path: load_suite(None, None, path)),
    'evaluation': (EVALUATION, lambda path: read_config(str(path), [])),
    'training': (TRAINING, lambda path: train.build_parts(read_yaml(path))),
}


def mutated(text: str, rng: random.Random) -> str:
    """Return a text with one to four changes: values, lines and indentation."""
    if rng.random() < 0.05:
        return rng.choice(VALUES)
    lines = text.split('\n')
    for _ in range(rng.randint(1, 4)):
        index = rng.randrange(len(lines))
        line = lines[index]
        place = rng.randrange(len(line) + 1)
        lines[index : index + 1] = rng.choice(
            [
                [rng.choice(VALUES)],
                [f'{line.partition(":")[0]}: {rng.choice(VALUES)}'],
                [],
                [' ' * rng.randint(1, 3) + line],
                [line, rng.choice(lines)],
                [line[:place] + rng.choice(VALUES) + line[place:]],
            ]
        )
        lines = lines or ['']
    return '\n'.join(lines)


@pytest.mark.parametrize('kind', KINDS)
def test_mutated_files_are_read_or_refused_with_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.chdir(tmp_path)
    text, read = KINDS[kind]
    rng = random.Random(kind)
    path = Path(f'{kind}.yaml')
    num_refused = 0
    for number in range(NUM_FILES):
        changed = mutated(text, rng)
        path.write_text(changed, encoding='utf-8', newline='')
        try:
            read(path)
        except GauntletError as error:
            num_refused += 1
            assert error.problems and all(error.problems), changed
        except Exception as error:
            raise AssertionError(f'file {number} of {kind}:\n{changed}') from error
    assert num_refused > NUM_FILES // 4
