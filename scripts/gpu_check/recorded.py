"""The items of llm-foundry that were recorded on a CPU in float32, of two small models with trained weights.

They need the published files, as tests/fixtures/reference has row numbers and digests alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import networks
import numpy as np
import recorded_cases
import torch
from transformers import AutoModelForCausalLM

from gpu_check.exact import BF16, FP32
from gpu_check.options import Options
from gpu_check.results import Row, Rows, Skipped
from llmfoundry_gauntlet.engine.decoding import GenerationDecoder, end_ids
from llmfoundry_gauntlet.engine.generate import TextGenerator
from llmfoundry_gauntlet.engine.model import CausalLanguageModel
from llmfoundry_gauntlet.engine.probe import probe, probe_generation

LONGEST = 200  # tokens of the probe's longest row
EVERY = 8  # in a quick run every eighth case
MEAN_OFF = {FP32: 1e-5, BF16: 0.02}  # nats per token of a choice
MOST_OFF = {FP32: 1e-4, BF16: 0.2}
SAME_CHOICES = {FP32: 0.999, BF16: 0.95}
# The lead of each token's logit, of a generation, below which rounding may make it another one.
LEAD = {FP32: 1e-3, BF16: 0.1}


def run(options: Options, rows: Rows) -> None:
    """Compare scores and generations with those recorded, in float32 and in an autocast of bfloat16."""
    for model in recorded_cases.MODELS:
        for dtype in (FP32, BF16):
            for compare in (compare_scores, compare_generations):
                with rows.row(f'recorded {compare.__name__.removeprefix("compare_")} of {model}, {dtype}') as row:
                    if options.data_root is None:
                        raise Skipped('--data-root names no folder of published files')
                    with precision(options, dtype), tempfile.TemporaryDirectory() as folder:
                        compare(row, options, model, dtype, Path(folder))


def precision(options: Options, dtype: str) -> AbstractContextManager[Any]:
    """Return the context in which a model in float32 computes in a type."""
    return nullcontext() if dtype == FP32 else torch.autocast(options.device, torch.bfloat16)


def cases_of(recorded: dict[str, Any], options: Options) -> list[dict[str, Any]]:
    """Return the recorded cases to compare."""
    cases: list[dict[str, Any]] = recorded['cases']
    if options.is_cpu:
        return cases[-1:]
    return cases[::EVERY] if options.quick else cases


def model_of(name: str, options: Options, **settings: Any) -> CausalLanguageModel:
    """Return a model of the recordings on the device."""
    network = AutoModelForCausalLM.from_pretrained(recorded_cases.FIXTURES / 'models' / name)
    return CausalLanguageModel(network.eval().to(options.torch_device), device=options.torch_device, **settings)


def compare_scores(row: Row, options: Options, model: str, dtype: str, folder: Path) -> None:
    """Record the differences of losses and predictions from those recorded."""
    language_model = model_of(model, options)
    vocabulary = len(recorded_cases.encoder(model).tokenizer)
    layout = probe(language_model, vocabulary=vocabulary, longest=LONGEST).layout
    errors: list[float] = []  # of each choice, in nats per token
    is_same: list[bool] = []  # the prediction of each item
    for case in cases_of(recorded_cases.recorded(model), options):
        planned = recorded_cases.plan_case(model, case, options.data_root, folder, layout, semantics='reference')
        outputs = networks.run(language_model, planned.batches)
        results = {case['rows'][key.row]: result for key, result in planned.results(outputs.values()).items()}
        for item in case['items']:
            result = results[item['row']]
            losses = [-float(logprobs.mean()) for logprobs in outputs[result.key].logprobs]
            errors += np.abs(np.subtract(losses, item['losses'])).tolist()
            if 'matches' in item:  # a single continuation, which is predicted or not
                is_same.append(bool(item['prediction']) == (result.predicted is not None))
            else:
                is_same.append(result.predicted == item['prediction'])
    row.note(scoring=layout, items=len(is_same))
    row.check('nats per token off on average', float(np.mean(errors)), at_most=MEAN_OFF[dtype])
    row.check('nats per token off', max(errors), at_most=MOST_OFF[dtype])
    row.check('share of equal predictions', float(np.mean(is_same)), at_least=SAME_CHOICES[dtype])


def compare_generations(row: Row, options: Options, model: str, dtype: str, folder: Path) -> None:
    """Record how many texts are those recorded, and how many others rounding does not explain."""
    recorded = recorded_cases.recorded(f'generation_{model}')
    language_model = model_of(model, options, hidden_token_id=recorded['pad_token_id'])
    tokenizer = recorded_cases.encoder(model).tokenizer
    decoder = GenerationDecoder(tokenizer, end_ids(tokenizer, language_model.model, reference=True))
    generator = TextGenerator(language_model, decoder)
    generator.layout = probe_generation(generator, vocabulary=len(tokenizer), longest=LONGEST).layout
    num_same = num_items = num_wrong = 0
    for case in cases_of(recorded, options):
        planned = recorded_cases.plan_case(model, case, options.data_root, folder, semantics='reference')
        item_of_row = {item['row']: item for item in case['items']}
        text_of_key = texts_of(generator, planned.continuous_batches)
        for key, result in planned.results(text_of_key.values()).items():
            item = item_of_row[case['rows'][key.row]]
            text = result.text if 'before_stop' in item else text_of_key[key].text
            is_same = recorded_cases.digest(text) == item.get('before_stop', item.get('output'))
            num_items += 1
            num_same += is_same
            num_wrong += not is_same and item['margin'] > LEAD[dtype]
    row.note(generation=generator.layout, items=num_items, equal_texts=num_same)
    row.check('other texts in spite of a lead', num_wrong, at_most=0)


def texts_of(generator: TextGenerator, batches: Iterable[Any]) -> dict[Any, Any]:
    """Return the generations of batches by key."""
    generations = {}
    for batch in batches:
        generations.update({generation.key: generation for generation in generator.run(batch)})
    return generations
