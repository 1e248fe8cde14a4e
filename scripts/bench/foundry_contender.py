"""llm-foundry as a contender (see worker.py): Composer's evaluation of one of its tasks, in fp32.

Runs in the environment of `requirements/reference.txt`. The Trainer's evaluation is timed, including few-shot
prompting and tokenization, after the model is loaded and warmed up; reading the file is not. Each measurement has a
tokenizer that has seen no text yet, and no cache from an earlier one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import datasets
from composer import Callback, Evaluator, Logger, State, Trainer
from llmfoundry.utils.builders import build_composer_model, build_icl_evaluators, build_tokenizer
from materials import MPT_CONFIG, load_model
from transformers import PreTrainedTokenizerBase
from worker import NUM_WARM_UP_ROWS, WARM_UP_TOKENS, measure

WARM_UP_LENGTH = 512  # tokens that llm-foundry pads them to


class PredictionRecorder(Callback):
    """Keep each item's result from the metrics, or its generation."""

    def __init__(self) -> None:
        self.predictions: list[Any] = []

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Take the generations or the last metric's outputs; state.batch is the whole batch, as nothing splits it."""
        del logger
        if isinstance(state.outputs, list) and isinstance(state.outputs[0], str):
            self.predictions.extend(state.outputs)
        else:
            outputs = state.metric_outputs
            self.predictions.extend(int(value) for value in outputs.get('selected_choice_idx', outputs['result']))


@contextmanager
def evaluator_over(
    task: dict[str, Any], rows_file: Path, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, batch_size: int
) -> Iterator[Evaluator]:
    """Yield llm-foundry's evaluator of these rows, without categories."""
    datasets.disable_progress_bars()
    datasets.disable_caching()  # else a second evaluation reuses the tokens
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / 'rows.source.jsonl'
        source.write_bytes(rows_file.read_bytes())
        keys = {'max_seq_len': max_seq_len, 'batch_size': batch_size, 'has_categories': False}
        tasks = [{**deepcopy(task), **keys, 'dataset_uri': str(source)}]
        (evaluator,), _ = build_icl_evaluators(tasks, tokenizer, max_seq_len, batch_size, destination_dir=folder)
        yield evaluator


class FirstRows:
    """The first rows of a dataset, with the length of all of it: Composer drops items if the two lengths differ."""

    def __init__(self, first: Any, num_rows: int) -> None:
        self.first, self.num_rows = first, num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Any:
        return self.first[index]


def prepare_first(data_set: Any, num_items: int) -> None:
    """Prepare only the first rows, with shots from all rows; the dataset itself would prepare all at the first use."""
    first = data_set.dataset.select(range(num_items))
    arguments = {name: getattr(data_set, name) for name in ('num_fewshot', 'prompt_string', 'fewshot_rng')}
    prepared = first.map(data_set._prep_example, with_indices=True, fn_kwargs=arguments)
    data_set.dataset = FirstRows(prepared, len(data_set.dataset))
    data_set._prepared = True


class LLMFoundry:
    """Composer's evaluation. It generates up to the length of the longest correct answer, whatever the limit."""

    def load(self, model_folder: str, device: str = 'cpu') -> None:
        """Load the model; the next measurement warms it up."""
        self.model_folder, self.device = model_folder, device
        name, config = 'hf_causal_lm', {'pretrained_model_name_or_path': model_folder, 'pretrained': True}
        own = Path(model_folder) / MPT_CONFIG
        if own.exists():
            name, config = 'mpt_causal_lm', {**json.loads(own.read_text()), 'loss_fn': 'torch_crossentropy'}
        model = build_composer_model(name=name, tokenizer=build_tokenizer(model_folder, {}), cfg=config)
        if own.exists():
            model.model.load_state_dict(load_model(model_folder).state_dict())
        self.recorder = PredictionRecorder()
        self.trainer = Trainer(
            model=model,
            callbacks=[self.recorder],
            device='gpu' if device == 'cuda' else 'cpu',
            precision='fp32',
            progress_bar=False,
        )
        self.warm = False

    def measure(
        self, *, task: dict[str, Any], rows_file: str, max_seq_len: int, batch_size: int, num_items: int
    ) -> dict[str, Any]:
        """Return seconds and predictions for the first `num_items` rows; texts end before their stops."""
        if not self.warm:
            short = {**task, 'generation_kwargs': {'max_new_tokens': WARM_UP_TOKENS}}
            length = min(max_seq_len, WARM_UP_LENGTH)
            few = short if 'generation_kwargs' in task else task
            self.evaluate(few, Path(rows_file), length, batch_size, NUM_WARM_UP_ROWS)
            self.warm = True
        seconds = self.evaluate(task, Path(rows_file), max_seq_len, batch_size, num_items)
        stops = task.get('early_stopping_criteria', [])
        cut = [up_to_stop(one, stops) if isinstance(one, str) else one for one in self.recorder.predictions]
        return {**seconds, 'predictions': cut}

    def evaluate(
        self, task: dict[str, Any], rows_file: Path, max_seq_len: int, batch_size: int, num_items: int
    ) -> dict[str, float]:
        """Return the seconds of whole batches of the first `num_items` rows; the recorder keeps the predictions."""
        tokenizer = build_tokenizer(self.model_folder, {})
        with evaluator_over(task, rows_file, tokenizer, max_seq_len, batch_size) as evaluator:
            loader = evaluator.dataloader.dataloader
            chosen = min(num_items, len(loader.dataset))
            if chosen < len(loader.dataset):
                chosen = max(chosen // loader.batch_size, 1) * loader.batch_size
            self.recorder.predictions.clear()

            def run() -> None:
                prepare_first(loader.dataset, chosen)
                self.trainer.eval(eval_dataloader=[evaluator], subset_num_batches=-(-chosen // loader.batch_size))

            seconds, _ = measure(run, self.device)
        return seconds


def up_to_stop(text: str, stops: list[str]) -> str:
    """Return a text without its first stop and what follows."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]
