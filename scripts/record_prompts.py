"""Record the token ids and limits that llm-foundry 0.22.0 makes of prompts, for the parity tests; no model is run.

    .venv-reference/bin/python scripts/record_prompts.py [--data-root ../shared/data/local_data] [--out FILE]

Runs in the environment of `requirements/reference.txt`. Every case of `tests/fixtures/prompt_cases.yaml` goes through
llm-foundry's own task builder, dataset and collation with each tokenizer. The file,
`tests/fixtures/reference/prompts.json`, holds numbers, row numbers and digests and no text of the data:

    versions
    models      tokenizer to its cases[]
        name, path, rows, categories, task      as in prompt_cases.yaml; `rows` are the numbers of the rows
        items[]
            row
            max_new_tokens      as llm-foundry gives it to generate(); null if choices are scored
            num_tokens          of the prompt, or of the prompt and the continuation; padding removed
            start               index of the continuation's first token; null for generation tasks
            ids                 sha256 of these tokens as little-endian int32
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
from llmfoundry.utils.builders import build_icl_evaluators, build_tokenizer
from record_reference import BATCH_SIZE, choose_rows, read_cases
from recording import DATA_ROOT, FIXTURES, Row, digest, read_lines, versions, write_fixture
from transformers import PreTrainedTokenizerBase


def read_rows(case: dict[str, Any], data_root: Path) -> dict[int, Row]:
    """Return the case's rows by number, with the categories that the case gives them."""
    rows = [json.loads(line) for line in read_lines(data_root / case['path'])]
    chosen = {number: rows[number] for number in choose_rows(case, rows)}
    if names := case.get('categories'):
        return {
            number: {**row, 'category': names[place % len(names)]} for place, (number, row) in enumerate(chosen.items())
        }
    return chosen


def item_record(ids: torch.Tensor, mask: torch.Tensor, span: torch.Tensor | None) -> dict[str, Any]:
    """Return length and digest of a row's tokens: generation prompts are left-padded, others right-padded."""
    kept = ids[int(mask.int().argmax()) :] if span is None else ids[: int(span[-1]) + 1]
    ids_digest = digest(kept.numpy().astype('<i4').tobytes())
    return {'num_tokens': len(kept), 'start': None if span is None else int(span[0]), 'ids': ids_digest}


def case_record(
    case: dict[str, Any], tokenizer: PreTrainedTokenizerBase, data_root: Path, folder: Path
) -> dict[str, Any]:
    """Return the fixture's entry of one case with one tokenizer."""
    rows = read_rows(case, data_root)
    source = folder / 'source.jsonl'
    source.write_text(''.join(f'{json.dumps(row)}\n' for row in rows.values()), 'utf-8')
    evaluators, _ = build_icl_evaluators(
        [{**case['task'], 'dataset_uri': str(source)}],
        tokenizer=tokenizer,
        default_max_seq_len=2048,
        default_batch_size=BATCH_SIZE,
        destination_dir=str(folder),
    )
    items = []
    for evaluator in evaluators:
        category = evaluator.label.removeprefix(case['name']).removeprefix('/')
        numbers = iter([number for number, row in rows.items() if not category or row['category'] == category])
        for batch in evaluator.dataloader.dataloader:
            spans = batch.get('continuation_indices') or [None] * len(batch['input_ids'])
            max_new_tokens = batch.get('generation_kwargs', {}).get('max_new_tokens')
            for ids, mask, span in zip(batch['input_ids'], batch['attention_mask'], spans, strict=True):
                record = {'row': next(numbers), 'max_new_tokens': max_new_tokens}
                items.append(record | item_record(ids, mask, span))
        assert next(numbers, None) is None
    print(f'{case["name"]:36} {tokenizer.name_or_path.rpartition("/")[2]:20} {len(items)} items', flush=True)
    given = {key: case[key] for key in ('name', 'path', 'categories', 'task') if key in case}
    return {**given, 'rows': list(rows), 'items': items}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-root', type=Path, default=DATA_ROOT)
    parser.add_argument('--out', type=Path, default=FIXTURES / 'reference' / 'prompts.json')
    options = parser.parse_args()
    datasets.disable_progress_bars()
    config = read_cases(FIXTURES / 'prompt_cases.yaml')
    models = {}
    for name in config['models']:
        tokenizer = build_tokenizer(str(FIXTURES / 'models' / name), {})
        models[name] = []
        for case in config['cases']:
            with tempfile.TemporaryDirectory() as folder:
                datasets.config.HF_DATASETS_CACHE = os.path.join(folder, 'cache')
                models[name].append(case_record(case, tokenizer, options.data_root, Path(folder)))
    packages = versions('llm-foundry', 'mosaicml', 'transformers', 'tokenizers', 'datasets')
    write_fixture(options.out, {'versions': packages, 'models': models}, limit=100_000)


if __name__ == '__main__':
    main()
