"""Tasks of lm-eval with rows of their own, one for each type of its requests, as lm-eval's own need the hub."""

import json
from pathlib import Path
from typing import Any

SUMS = [
    {'q': f'What is {n}+{n}?', 'choices': [str(2 * n), str(2 * n + 1), f'{n} and {n}'], 'gold': n % 3} for n in range(8)
]
CHOICES = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "Question: {{{{q}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
- {{metric: acc, aggregation: mean, higher_is_better: true}}
- {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
- {{metric: brier_score, aggregation: brier_score, higher_is_better: false}}
metadata: {{version: 1.5}}
"""
GENERATION = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "Question: {{{{q}}}}\\nAnswer:"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
filter_list:
- name: strict
  filter: [{{function: regex, regex_pattern: "(.)"}}, {{function: take_first}}]
- name: flexible
  filter: [{{function: regex, group_select: -1, regex_pattern: "(..)"}}, {{function: take_first}}]
metric_list:
- {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
ROLLING = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{q}}}} It goes on and on and on until it is longer than any window of the model. {{{{choices}}}}"
metric_list:
- {{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
- {{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}
"""


def write_tasks(folder: Path) -> None:
    """Write the tasks and their rows."""
    rows = folder / 'sums.jsonl'
    rows.write_text(''.join(f'{json.dumps(row)}\n' for row in SUMS))
    for name, text in (('sums', CHOICES), ('written_sums', GENERATION), ('texts', ROLLING)):
        write_task(folder, name, text.format(data=rows))


def write_task(folder: Path, name: str, text: str) -> None:
    (folder / f'{name}.yaml').write_text(f'task: {name}\n{text}')


def entry(folder: Path, task: str, **keys: Any) -> dict[str, Any]:
    named = {'label': task, 'icl_task_type': 'lm_eval', 'lm_eval_task': task, 'include_path': str(folder)}
    return {**named, 'num_fewshot': [0], **keys}
