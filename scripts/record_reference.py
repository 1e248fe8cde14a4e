"""Record what llm-foundry 0.22.0 computes for the fixture models, item by item, for the parity tests.

    .venv-reference/bin/python scripts/record_reference.py [--data-root ../shared/data/local_data] [--models NAME ...]

Runs in the environment of `requirements/reference.txt`. Every case of `tests/fixtures/reference_cases.yaml` goes
through llm-foundry's own task builder, dataset, collation, metrics and EvalGauntlet under Composer's Trainer; this
script only looks at the batches and outputs. One file per model, `tests/fixtures/reference/{model}.json`, holds numbers
and row numbers and no text of the data:

    model, model_sha256, versions
    pad_token_id    as llm-foundry derives it
    cases[]
        name        unique
        path        data file below the data root
        rows        0-based line numbers in it; llm-foundry got only these lines, in this order
        task        the task's YAML keys (num_fewshot is a list of one), without dataset_uri
        metrics     what Composer logged, key to value
        items[]     row; losses and num_tokens (an entry per choice); prediction, and
                    gold for multiple_choice and schema (both are indices of choices), or
                    matches for language_modeling (prediction is 1 if correct; a 0 or 1 per continuation token)
        prompts[]   for the first items: row, and choices[] of {shared, ids, start}. The sequence is the first
                    `shared` tokens of the first choice's sequence, then `ids`; the continuation is what lies at index
                    `start` and after
    gauntlet        categories, averages and runs[]: the keys a run adds or changes, and the composites it gives
"""

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import yaml
from composer import Callback, Evaluator, Logger, State, Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from llmfoundry.callbacks.eval_gauntlet_callback import EvalGauntlet
from llmfoundry.utils.builders import build_composer_model, build_icl_evaluators, build_tokenizer
from recording import DATA_ROOT, FIXTURES, Row, digest, read_lines, versions, write_fixture
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

NUM_ROWS = 60
ROWS_PER_CATEGORY = 12
NUM_CATEGORIES = 5
NUM_PROMPTS = 3
NUM_PROMPTS_PER_CATEGORY = 2
BATCH_SIZE = 8
ATTENTION = {'rotary_bos': 'sdpa', 'alibi_pad_eos': 'eager'}  # MPT of transformers has no other


def first_rows(rows: list[Row]) -> list[int]:
    return list(range(min(NUM_ROWS, len(rows))))


def rows_by_category(rows: list[Row]) -> list[int]:
    """Return the first rows of each of the first categories, in the order of the file."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        members[row['category']].append(index)
    chosen = sorted(members)[:NUM_CATEGORIES]
    return sorted(index for category in chosen for index in members[category][:ROWS_PER_CATEGORY])


def rows_with_leading_spaces(rows: list[Row]) -> list[int]:
    chosen = [index for index, row in enumerate(rows) if any(choice[0] == ' ' for choice in row['choices'])]
    return chosen[:NUM_ROWS]


def rows_with_equal_choices(rows: list[Row]) -> list[int]:
    """Return all rows with two equal choices, which tie exactly, and the file's first 12 rows."""
    twice = {index for index, row in enumerate(rows) if len(set(row['choices'])) < len(row['choices'])}
    return sorted(twice | set(range(12)))


def choose_rows(case: dict[str, Any], rows: list[Row]) -> list[int]:
    """Return row numbers by the case's `rows`: a key of ROW_CHOICES, or {first: count, also: [row numbers]}."""
    choice = case.get('rows', 'first')
    if isinstance(choice, str):
        return ROW_CHOICES[choice](rows)
    return [*range(choice['first']), *choice.get('also', [])]


ROW_CHOICES: dict[str, Callable[[list[Row]], list[int]]] = {
    'first': first_rows,
    'per_category': rows_by_category,
    'leading_spaces': rows_with_leading_spaces,
    'equal_choices': rows_with_equal_choices,
}


def read_cases(path: Path) -> dict[str, Any]:
    """Return the content of the cases file; each case with its name, label/N-shot."""
    config = yaml.safe_load(path.read_text('utf-8'))
    for case in config['cases']:
        case['name'] = f'{case["task"]["label"]}/{case["task"]["num_fewshot"][0]}-shot'
    return config


def short(value: float) -> float:
    """Return the value to 9 significant digits: more than float32 holds."""
    return float(f'{value:.9g}')


class BatchRecorder(Callback):
    """Keeps the results of each evaluator's items. Reads batches as llm-foundry's own metrics do."""

    def __init__(self) -> None:
        self.items: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.sequences: dict[str, list[list[tuple[list[int], int]]]] = defaultdict(list)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Take the items of state.batch, which is still the whole batch: nothing splits it on a CPU."""
        del logger
        label = state.dataloader_label
        assert label is not None
        batch, results = state.batch, state.metric_outputs
        scores = [
            score_sequence(state.outputs[index], state.model.labels[index], span)
            for index, span in enumerate(batch['continuation_indices'])
        ]
        is_choice = 'choice_groupings' in batch
        groups = batch['choice_groupings'] if is_choice else [(index, index + 1) for index in range(len(scores))]
        for index, (start, end) in enumerate(groups):
            item: dict[str, Any] = {}
            if is_choice:
                item['gold'] = int(batch['gold_indices'][index])
                item['prediction'] = int(results['selected_choice_idx'][index])
            else:
                item['prediction'] = int(results['result'][index])
                item['matches'] = scores[start]['matches']
            item['losses'] = [score['loss'] for score in scores[start:end]]
            item['num_tokens'] = [len(score['matches']) for score in scores[start:end]]
            self.items[label].append(item)
            spans = batch['continuation_indices'][start:end]
            self.sequences[label].append(
                [
                    (ids[: int(span[-1]) + 1].tolist(), int(span[0]))
                    for ids, span in zip(batch['input_ids'][start:end], spans, strict=True)
                ]
            )


def score_sequence(logits: torch.Tensor, labels: torch.Tensor, span: torch.Tensor) -> dict[str, Any]:
    """Return loss and argmax matches of a continuation; labels are shifted left by one, as by Composer."""
    logits = logits[span - 1]
    targets = labels[span - 1]
    loss = functional.cross_entropy(logits, targets)
    matches = logits.argmax(dim=-1) == targets
    return {'loss': short(loss.item()), 'matches': matches.int().tolist()}


def shared_length(first: list[int], second: list[int]) -> int:
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))


def prompt_record(sequences: list[tuple[list[int], int]]) -> list[dict[str, Any]]:
    """Return the choices' sequences, each but the first without the tokens it shares with the first."""
    (first, start_of_first), *others = sequences
    records = [{'shared': 0, 'ids': first, 'start': start_of_first}]
    for ids, start in others:
        shared = shared_length(first, ids)
        records.append({'shared': shared, 'ids': ids[shared:], 'start': start})
    return records


def write_subset(case: dict[str, Any], data_root: Path, folder: Path) -> tuple[dict[str, Any], list[int], list[Row]]:
    """Return the task as llm-foundry takes it, over a file of only the case's rows; the row numbers; and the rows."""
    lines = read_lines(data_root / case['path'])
    rows = [json.loads(line) for line in lines]
    chosen = choose_rows(case, rows)
    chosen_rows = [rows[index] for index in chosen]

    file_name = case['name'].replace('/', '-')
    subset = folder / f'{file_name}.source.jsonl'
    subset.write_text(''.join(lines[index] + '\n' for index in chosen), 'utf-8')

    # A copy, so that llm-foundry cannot change the case.
    task = {**deepcopy(case['task']), 'dataset_uri': str(subset)}
    return task, chosen, chosen_rows


def case_record(case: dict[str, Any], chosen: list[int], rows: list[Row], recorder: BatchRecorder) -> dict[str, Any]:
    """Return the fixture's entry of one case, without its metrics."""
    has_categories = case['task'].get('has_categories', False)
    items, prompts = [], []
    groups: dict[str | None, list[int]] = defaultdict(list)
    for index, row in zip(chosen, rows, strict=True):
        groups[row['category'] if has_categories else None].append(index)
    for category in sorted(groups, key=str):
        label = case['name'] if category is None else f'{case["name"]}/{category}'
        num_prompts = NUM_PROMPTS if category is None else NUM_PROMPTS_PER_CATEGORY
        recorded = zip(groups[category], recorder.items[label], recorder.sequences[label], strict=True)
        for position, (index, item, sequences) in enumerate(recorded):
            items.append({'row': index, **item})
            if position < num_prompts:
                prompts.append({'row': index, 'choices': prompt_record(sequences)})
    return {
        'name': case['name'],
        'path': case['path'],
        'rows': chosen,
        'task': case['task'],
        'items': items,
        'prompts': prompts,
    }


def run_gauntlets(
    config: dict[str, Any], trainer: Trainer, logger_keys: list[str], benchmark_sizes: dict[str, int]
) -> list[dict[str, Any]]:
    """Return the composites of each run of the gauntlet over the metrics that the trainer has just computed."""
    runs = []
    for keys in config['gauntlet_runs']:
        arguments = {**deepcopy(config['gauntlet']), **keys}
        gauntlet = EvalGauntlet(logger_keys=logger_keys, benchmark_sizes=benchmark_sizes, **arguments)
        composites = gauntlet.eval_after_all(trainer.state, trainer.logger)
        runs.append({**keys, 'composites': {key: short(value) for key, value in composites.items()}})
    return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A finished evaluation of a model by llm-foundry; `logged` are Composer's metrics by key."""

    trainer: Trainer
    evaluators: list[Evaluator]
    logged: dict[str, float]


def build_model(model_folder: Path) -> tuple[ComposerModel, PreTrainedTokenizerBase]:
    """Return a fixture model and its tokenizer as llm-foundry builds them."""
    tokenizer = build_tokenizer(str(model_folder), {})
    model_config = {
        'pretrained_model_name_or_path': str(model_folder),
        'pretrained': True,
        'attn_implementation': ATTENTION.get(model_folder.name, 'eager'),
    }
    return build_composer_model(name='hf_causal_lm', tokenizer=tokenizer, cfg=model_config), tokenizer


def evaluate(
    tasks: list[dict[str, Any]],
    model: ComposerModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    recorder: Callback,
    temporary: Path,
    batch_size: int = BATCH_SIZE,
) -> Evaluation:
    """Run every task with one model. Files are written below the temporary folder only."""
    evaluators, logger_keys = build_icl_evaluators(
        tasks,
        tokenizer=tokenizer,
        default_max_seq_len=2048,
        default_batch_size=batch_size,
        destination_dir=str(temporary),
    )
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model, callbacks=[recorder], loggers=[logger], device='cpu', precision='fp32', progress_bar=False
    )
    trainer.eval(eval_dataloader=evaluators)
    logged = {key: short(float(logger.data[key][-1][1])) for key in logger_keys}
    return Evaluation(trainer=trainer, evaluators=evaluators, logged=logged)


def case_metrics(case: dict[str, Any], logged: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in logged.items() if key.startswith(f'metrics/{case["name"]}/')}


def model_record(model_folder: Path, evaluation: Evaluation) -> dict[str, Any]:
    """Return the head of a fixture: the model, the versions and the padding token."""
    return {
        'model': model_folder.name,
        'model_sha256': digest((model_folder / 'model.safetensors').read_bytes()),
        'versions': versions('llm-foundry', 'mosaicml', 'torch', 'transformers', 'tokenizers', 'datasets'),
        'pad_token_id': evaluation.evaluators[0].dataloader.dataloader.dataset.pad_tok_id,
    }


def record_model(config: dict[str, Any], model_folder: Path, data_root: Path, temporary: Path) -> dict[str, Any]:
    """Return the fixture of one model: every case, and the gauntlets over them."""
    subsets = [write_subset(case, data_root, temporary) for case in config['cases']]
    recorder = BatchRecorder()
    tasks = [task for task, _, _ in subsets]
    evaluation = evaluate(tasks, *build_model(model_folder), recorder=recorder, temporary=temporary)
    records = []
    for case, (_, chosen, rows) in zip(config['cases'], subsets, strict=True):
        record = case_record(case, chosen, rows, recorder)
        record['metrics'] = case_metrics(case, evaluation.logged)
        print(f'{case["name"]:40} {len(record["items"]):3} items', flush=True)
        records.append(record)
    sizes = {evaluator.label: evaluator.dataloader.num_samples for evaluator in evaluation.evaluators}
    runs = run_gauntlets(config, evaluation.trainer, list(evaluation.logged), sizes)
    evaluation.trainer.close()
    return {
        **model_record(model_folder, evaluation),
        'cases': records,
        'gauntlet': {**config['gauntlet'], 'runs': runs},
    }


def record_models(
    record: Callable[..., dict[str, Any]], *, description: str | None, cases: str, prefix: str, limit: int
) -> None:
    """Run a recorder's command line: write {prefix}{model}.json, shorter than `limit`, for each model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-root', type=Path, default=DATA_ROOT)
    parser.add_argument('--out', type=Path, default=FIXTURES / 'reference')
    parser.add_argument('--models', nargs='*', default=['rotary_bos', 'alibi_pad_eos'])
    options = parser.parse_args()
    torch.set_num_threads(2)
    datasets.disable_progress_bars()
    config = read_cases(FIXTURES / cases)
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            datasets.config.HF_DATASETS_CACHE = os.path.join(folder, 'cache')
            fixture = record(config, FIXTURES / 'models' / name, options.data_root, Path(folder))
        write_fixture(options.out / f'{prefix}{name}.json', fixture, limit=limit)


if __name__ == '__main__':
    record_models(record_model, description=__doc__, cases='reference_cases.yaml', prefix='', limit=1_000_000)
