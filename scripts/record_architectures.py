"""Record what llm-foundry 0.22.0 computes for drawn networks of further architectures, for the parity test.

    .venv-reference/bin/python scripts/record_architectures.py

As `record_reference.py`, for the networks of `drawn_networks.py` and the cases of
`tests/fixtures/architecture_cases.yaml`, over sample rows of eval_data. Every case runs alone, with a network that has
seen nothing else, in batches of 1 and of 8. `tests/fixtures/reference/architectures.json` holds:

    versions
    networks    by name: weights_sha256, and results by case and batch size, of each row
                losses      of a scored task: the mean loss of each choice
                outputs     of a generation task: the first 16 digits of the sha256 of the text
    after       losses of `case` of the network `network` that ran `first` before, in batches of 8
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
from drawn_networks import PADDING, read_cases, save_network, write_rows
from record_generation import GenerationRecorder
from record_reference import BatchRecorder, build_model, evaluate, short
from recording import FIXTURES, versions, write_fixture

OUTPUT_DIGITS = 16
AFTER = {'network': 'dynamic_ntk', 'first': 'hellaswag', 'case': 'arc_easy'}


def run(cases: list[dict[str, Any]], model_folder: Path, batch_size: int) -> dict[str, Any]:
    """Return the results of the last of these cases, which a new model runs one after the other."""
    *_, last = cases
    name = f'{last["task"]["label"]}/{last["task"]["num_fewshot"][0]}-shot'
    generates = last['task']['icl_task_type'] == 'generation_task_with_answers'
    recorder = GenerationRecorder() if generates else BatchRecorder()
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = os.path.join(folder, 'cache')
        tasks = [write_rows(case, Path(folder)) for case in cases]
        evaluation = evaluate(
            tasks, *build_model(model_folder), recorder=recorder, temporary=Path(folder), batch_size=batch_size
        )
        evaluation.trainer.close()
    items = recorder.items[name]
    if generates:
        return {'outputs': [item['output'][:OUTPUT_DIGITS] for item in items]}
    return {'losses': [[short(loss) for loss in item['losses']] for item in items]}


def record_network(name: str, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the results of a network, by case and batch size."""
    found: dict[str, dict[str, Any]] = {}
    digest = ''
    for case in config['cases']:
        if name not in case.get('networks', config['networks']):
            continue
        label, padding = case['task']['label'], case.get('pad_token', PADDING)
        model_folder = folder / f'{name}-{padding.strip("<>")}'
        digest = save_network(name, model_folder, pad_token=padding)
        found[label] = {str(size): run([case], model_folder, size) for size in config['batch_sizes']}
        print(f'{name:14} {label}', flush=True)
    return {'weights_sha256': digest, 'cases': found}


def record_after(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the losses of a case whose network has run a task that is padded to more tokens."""
    cases = {case['task']['label']: case for case in config['cases']}
    save_network(AFTER['network'], folder, pad_token=PADDING)
    return {**AFTER, **run([cases[AFTER['first']], cases[AFTER['case']]], folder, 8)}


if __name__ == '__main__':
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    config = read_cases()
    with tempfile.TemporaryDirectory() as folder:
        networks = {name: record_network(name, config, Path(folder)) for name in config['networks']}
        after = record_after(config, Path(folder) / 'after')
    fixture = {
        'versions': versions('llm-foundry', 'mosaicml', 'torch', 'transformers', 'tokenizers'),
        'networks': networks,
        'after': after,
    }
    write_fixture(FIXTURES / 'reference' / 'architectures.json', fixture, limit=150_000)
