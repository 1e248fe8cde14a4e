"""The whole Gauntlet with a random model: on the sample data, and on the published files where they are."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from paths import FIXTURES
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gpu_check.options import Options
from gpu_check.results import Row, Rows, Skipped
from llmfoundry_gauntlet import Evaluation, Gauntlet
from llmfoundry_gauntlet.engine.ranks import assign

TOKENIZER = FIXTURES / 'models' / 'rotary_bos'  # small, so that prompts are rather longer than those of real models
SIZES = {'hidden_size': 768, 'intermediate_size': 2048, 'num_hidden_layers': 12, 'num_attention_heads': 12}
SIZES_ON_CPU = {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 4}
LONGEST = 2048  # tokens of a prompt and its answer
LONGEST_ON_CPU = 128
ITEMS_OF_QUICK = 8  # of a task


def run(options: Options, rows: Rows) -> None:
    """Evaluate on each kind of data."""
    subset_items = ITEMS_OF_QUICK if options.quick else None
    if options.is_cpu:
        subset_items = 1
    with rows.row('sample data') as row:
        evaluate(row, options, None, subset_items)
    with rows.row('published files') as row:
        if options.data_root is None:
            raise Skipped('--data-root names no folder of published files')
        evaluate(row, options, options.data_root, subset_items)


def evaluate(row: Row, options: Options, data_root: Path | None, subset_items: int | None) -> None:
    """Record what an evaluation took, from the files to the records, and whether every score is finite."""
    # The published files have answers of a thousand tokens, which must fit.
    length = LONGEST
    if options.is_cpu and data_root is None:
        length = LONGEST_ON_CPU
    started = time.perf_counter()
    gauntlet = Gauntlet(
        tasks='yamls/tasks/gauntlet_v0.1.yaml',
        gauntlet='yamls/gauntlets/eval_gauntlet_v0.1.yaml',
        max_seq_len=length,
        subset_items=subset_items,
        save_folder=None,
        **({} if data_root is None else {'data_root': str(data_root), 'missing': 'skip'}),
    )
    model, tokenizer = random_model(options, length)
    gauntlet.prepare(model, tokenizer)
    prepared = time.perf_counter()
    evaluation = gauntlet.evaluate(model, tokenizer)
    seconds = time.perf_counter() - prepared

    num_items = sum(map(len, evaluation.results.values()))
    tokens = tokens_of(evaluation)
    row.note(
        parameters=sum(weight.numel() for weight in model.parameters()),
        tasks=len(evaluation.scores),
        items=num_items,
        layout=evaluation.planned.layout,
        seconds_to_prepare=prepared - started,
        seconds_to_evaluate=seconds,
        items_per_second=num_items / seconds,
        **{f'{name}_per_second': count / seconds for name, count in tokens.items()},
    )
    unscored = [name for name, value in evaluation.metrics.items() if not math.isfinite(value)]
    row.expect('metrics that are not finite', ', '.join(unscored) or 'none', 'none')


def random_model(options: Options, length: int) -> tuple[Any, Any]:
    """Return a model with random weights on the device, in bfloat16 on a GPU, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    sizes = SIZES_ON_CPU if options.is_cpu else SIZES
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=length, **sizes)
    model = LlamaForCausalLM(config).eval().to(options.torch_device)
    return model if options.is_cpu else model.to(torch.bfloat16), tokenizer


def tokens_of(evaluation: Evaluation) -> dict[str, int]:
    """Return the tokens of prompts with their continuations, those that were run to score them, and the new ones."""
    planned = evaluation.planned
    in_rows = 0
    for request in planned.score_requests:
        for context, continuation in zip(request.contexts, request.continuations, strict=True):
            in_rows += len(context) + len(continuation)
    batches = assign(planned.batches, num_ranks=1)[0] if planned.batches else []
    generated = 0
    for results in evaluation.results.values():
        for result in results:
            if result.text is not None:
                generated += sum(result.num_tokens)
    return {
        'tokens_scored': in_rows,
        'tokens_run': sum(batch.num_tokens for batch in batches),
        'tokens_generated': generated,
    }
