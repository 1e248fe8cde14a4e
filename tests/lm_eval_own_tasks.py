"""Tasks of lm-eval with rows of our own, of each type of request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROWS = [
    {'question': f'What is {what}?', 'choices': ['the sun', 'the sea', 'ice'], 'answer': number % 3}
    for number, what in enumerate(['warm', 'cold', 'deep', 'bright', 'wet'])
]
TASKS: dict[str, dict[str, Any]] = {
    'warm_choices': {
        'output_type': 'multiple_choice',
        'doc_to_choice': 'choices',
        'doc_to_target': 'answer',
        'num_fewshot': 2,
        'fewshot_config': {'sampler': 'first_n'},
        'metric_list': [{'metric': 'acc'}, {'metric': 'acc_norm'}, {'metric': 'acc_mutual_info'}],
    },
    'warm_texts': {
        'output_type': 'generate_until',
        'doc_to_target': '{{choices[answer]}}',
        'generation_kwargs': {'until': ['\n'], 'max_gen_toks': 12},
        'metric_list': [{'metric': 'exact_match'}],
    },
    'warm_samples': {
        'output_type': 'generate_until',
        'doc_to_target': '{{choices[answer]}}',
        'generation_kwargs': {'until': ['\n'], 'max_gen_toks': 12, 'do_sample': True, 'temperature': 1.0},
        'repeats': 2,
        'metric_list': [{'metric': 'exact_match'}],
    },
    'warm_windows': {
        'output_type': 'loglikelihood_rolling',
        'doc_to_text': '',
        'doc_to_target': '{{question}} {{choices[answer]}}',
        'metric_list': [{'metric': 'word_perplexity'}, {'metric': 'bits_per_byte'}],
    },
}


def write_tasks(folder: Path) -> Path:
    """Write the rows and a YAML file for each task; return their folder."""
    folder.mkdir()
    rows = folder / 'rows.json'
    rows.write_text(''.join(json.dumps(row) + '\n' for row in ROWS))
    for name, of_task in TASKS.items():
        written = {
            'task': name,
            'dataset_path': 'json',
            'dataset_kwargs': {'data_files': {'test': str(rows)}},
            'test_split': 'test',
            'fewshot_split': 'test',
            'doc_to_text': 'Question: {{question}}\nAnswer:',
            **of_task,
        }
        (folder / f'{name}.yaml').write_text(yaml.safe_dump(written))
    return folder
