"""Record what llm-foundry 0.22.0 generates with the fixture models, item by item, for the parity tests.

    .venv-reference/bin/python scripts/record_generation.py [--data-root ../shared/data/local_data] [--models NAME ...]

As `record_reference.py`, for the cases of `tests/fixtures/generation_cases.yaml`, all generation_task_with_answers. One
file per model, `tests/fixtures/reference/generation_{model}.json`, holds numbers, row numbers and digests, and no text
of the data:

    model, model_sha256, versions, pad_token_id
    cases[]
        name, path, rows, task, metrics     as in record_reference.py
        max_new_tokens                      as llm-foundry gives it to generate()
        items[]
            row
            mark            1 if correct, else 0
            num_tokens      generated tokens up to and including the first eos, or all of the row if there is none
            eos             1 if there is one
            margin          the least, over these tokens, of the chosen token's logit minus the next best
            output          sha256 of the text, as eval_forward returned it
            before_stop     sha256 of that text up to the first stop as re.split finds it; only in cases with stops
            cleaned         sha256 of what the metric compared with the cleaned labels
            prompt_length   tokens, left padding removed
            prompt          sha256 of these tokens as little-endian int32

The length of a row's output. generate() steps a whole batch until every row has reached eos or max_new_tokens. After
its eos a row is filled with pad tokens; the text leaves out both (skip_special_tokens). So without stops neither the
text nor num_tokens depends on the other rows.

With stops they do. Each stop string has its own criterion, which ends the batch at the step at which that string has
occurred in every row, including those that have reached eos. Until then a row continues past its own stop, maybe to
eos, and different strings in different rows do not end the batch. The string is searched in the text of the last
tokens, one more than it has itself: at the first step all but one of them belong to the prompt. So `num_tokens`, `eos`,
`margin` and `output` depend on the batch of 8 consecutive rows. `before_stop` and `cleaned` do not, unless a
stop has another meaning as a regular expression: re.split gets the stops joined by "|", not escaped.

Every text starts with a space that eval_forward puts there, unless the tokenizer makes " a" one token.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State
from record_reference import build_model, case_metrics, evaluate, model_record, record_models, write_subset
from recording import digest
from transformers import LogitsProcessor, LogitsProcessorList


class MarginProcessor(LogitsProcessor):
    """Keeps, per step, every row's best logit minus its second best. Leaves the logits unchanged."""

    def __init__(self) -> None:
        self.margins: list[list[float]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return the scores unchanged, shape [rows, vocabulary]."""
        del input_ids
        best = scores.topk(2, dim=-1).values
        self.margins.append((best[:, 0] - best[:, 1]).tolist())
        return scores


class GenerationRecorder(Callback):
    """Keeps each evaluator's items. Reads tokens from generate(), as eval_forward returns only text."""

    def __init__(self) -> None:
        self.items: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.sequences = torch.empty(0, 0)
        self.margins: list[list[float]] = []

    def init(self, state: State, logger: Logger) -> None:
        """Stand between eval_forward and the model's generate."""
        del logger
        state.model.generate = self.watch(state.model.generate)

    def watch(self, generate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a `generate` that also keeps its tokens and their margins here."""

        def generate_and_keep(input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
            processor = MarginProcessor()
            self.sequences = generate(input_ids, logits_processor=LogitsProcessorList([processor]), **arguments)
            self.margins = processor.margins
            return self.sequences

        return generate_and_keep

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Take the items of state.batch, which is still the whole batch: nothing splits it on a CPU."""
        del logger
        label = state.dataloader_label
        assert label is not None
        batch, results = state.batch, state.metric_outputs
        width = batch['input_ids'].shape[1]
        for index, text in enumerate(state.outputs):
            self.items[label].append(
                {
                    'mark': results['result'][index],
                    **self.tokens_record(index, width, batch['generation_kwargs']['eos_token_id']),
                    'output': digest(text),
                    **stop_record(text, batch['stopping_criteria']),
                    'cleaned': digest(results['cleaned_output'][index]),
                    **prompt_record(batch['input_ids'][index], batch['attention_mask'][index]),
                }
            )

    def tokens_record(self, index: int, width: int, eos_token_id: int) -> dict[str, Any]:
        """Return the tokens that a row of the last batch has after the width of the padded prompts."""
        ids = self.sequences[index, width:].tolist()
        met_eos = eos_token_id in ids
        num_tokens = ids.index(eos_token_id) + 1 if met_eos else len(ids)
        margin = min(margins[index] for margins in self.margins[:num_tokens])
        return {
            'num_tokens': num_tokens,
            'eos': int(met_eos),
            'margin': float(f'{margin:.4g}'),
        }


def stop_record(text: str, stops: list[str] | None) -> dict[str, Any]:
    """Return where the metric truncates the text, by the metric's own expression."""
    if not stops:
        return {}
    return {'before_stop': digest(re.split('|'.join(stops), text)[0])}


def prompt_record(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
    """Return length and digest of one prompt without its left padding; masked tokens after it stay."""
    start = int(attention_mask.int().argmax())
    ids = input_ids[start:].numpy().astype('<i4')
    return {'prompt_length': len(ids), 'prompt': digest(ids.tobytes())}


def record_model(config: dict[str, Any], model_folder: Path, data_root: Path, temporary: Path) -> dict[str, Any]:
    """Return the fixture of one model."""
    subsets = [write_subset(case, data_root, temporary) for case in config['cases']]
    recorder = GenerationRecorder()
    tasks = [task for task, _, _ in subsets]
    evaluation = evaluate(tasks, *build_model(model_folder), recorder=recorder, temporary=temporary)
    records = []
    for case, (_, chosen, _), evaluator in zip(config['cases'], subsets, evaluation.evaluators, strict=True):
        data_set = evaluator.dataloader.dataloader.dataset
        items = zip(chosen, recorder.items[case['name']], strict=True)
        records.append(
            {
                'name': case['name'],
                'path': case['path'],
                'rows': chosen,
                'task': case['task'],
                'metrics': case_metrics(case, evaluation.logged),
                'max_new_tokens': data_set.base_batch['generation_kwargs']['max_new_tokens'],
                'items': [{'row': row, **item} for row, item in items],
            }
        )
        print(f'{case["name"]:32} {len(chosen):2} items', flush=True)
    evaluation.trainer.close()
    return {**model_record(model_folder, evaluation), 'cases': records}


if __name__ == '__main__':
    record_models(record_model, description=__doc__, cases='generation_cases.yaml', prefix='generation_', limit=400_000)
