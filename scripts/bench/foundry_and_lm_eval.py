"""llm-foundry and lm-eval as contenders (see worker.py) on a language_modeling, multiple_choice or schema task.

To be imported in the environment of `requirements/reference.txt`. `measure` of both takes

    task            the task's YAML keys: label, icl_task_type, num_fewshot (a list of one), delimiters, ...; a
                    dataset_uri in it is ignored
    rows_file       a JSONL file; few-shot examples are drawn from these rows too
    model_folder    a Hugging Face folder of a causal model with its tokenizer
    max_seq_len     llm-foundry pads every row to it; lm-eval cuts at it
    batch_size      sequences in a batch: a question of four choices counts as four

Timed is what a user waits for once the model is loaded and a first row was scored: for llm-foundry the Trainer's
evaluation with its few-shot prompting and tokenisation, for lm-eval the tokenisation and scoring of ready (context,
continuation) texts, taken from llm-foundry's own data set. Reading the files is not timed. Each measurement has a
tokenizer that has met no word yet, and finds nothing that an earlier one has left on disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import datasets
from composer import Callback, Evaluator, Logger, State, Trainer
from llmfoundry.utils.builders import build_composer_model, build_icl_evaluators, build_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from timing import Timing, measure
from transformers import AutoTokenizer, PreTrainedTokenizerBase

NUM_WARM_UP_ROWS = 2
WARM_UP_LENGTH = 256  # tokens that llm-foundry pads them to
TextPairs = list[list[tuple[str, str]]]  # per row, the (context, continuation) texts of its choices


class PredictionRecorder(Callback):
    """Keeps what the metrics say of each item."""

    def __init__(self) -> None:
        self.predictions: list[Any] = []

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Take the last metric's outputs; state.batch is the whole batch where nothing splits it."""
        del logger
        outputs = state.metric_outputs
        self.predictions.extend(int(value) for value in outputs.get('selected_choice_idx', outputs['result']))


@contextmanager
def evaluator_over(
    task: dict[str, Any], rows_file: Path, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, batch_size: int
) -> Iterator[Evaluator]:
    """llm-foundry's evaluator of these rows, without categories."""
    datasets.disable_progress_bars()
    datasets.disable_caching()  # else a second evaluation finds its tokens ready
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / 'rows.source.jsonl'
        source.write_bytes(rows_file.read_bytes())
        keys = {'max_seq_len': max_seq_len, 'batch_size': batch_size, 'has_categories': False}
        tasks = [{**deepcopy(task), **keys, 'dataset_uri': str(source)}]
        (evaluator,), _ = build_icl_evaluators(tasks, tokenizer, max_seq_len, batch_size, destination_dir=folder)
        yield evaluator


class FirstRows:
    """The first rows of a data set, with the length of the whole: Composer drops items where the two lengths differ."""

    def __init__(self, first: Any, num_rows: int) -> None:
        self.first, self.num_rows = first, num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Any:
        return self.first[index]


def prepare_first(data_set: Any, num_items: int) -> None:
    """What the data set does to all its rows when the first is asked for, to the first ones alone.

    Their shots still come from all rows.
    """
    first = data_set.dataset.select(range(num_items))
    arguments = {name: getattr(data_set, name) for name in ('num_fewshot', 'prompt_string', 'fewshot_rng')}
    prepared = first.map(data_set._prep_example, with_indices=True, fn_kwargs=arguments)
    data_set.dataset = FirstRows(prepared, len(data_set.dataset))
    data_set._prepared = True


class LLMFoundry:
    """Composer's evaluation of llm-foundry's tasks; fp32."""

    recorder_type: ClassVar[type[PredictionRecorder]] = PredictionRecorder
    warm_up_keys: ClassVar[dict[str, Any]] = {}  # of the task, while the model is warmed up
    warm_up_length: ClassVar[int] = WARM_UP_LENGTH

    def load(self, model_folder: str, device: str = 'cpu') -> None:
        """Takes the model into memory; the next measurement warms it up."""
        self.model_folder, self.device = model_folder, device
        config = {'pretrained_model_name_or_path': model_folder, 'pretrained': True}
        model = build_composer_model(name='hf_causal_lm', tokenizer=self.tokenizer(), cfg=config)
        self.recorder = self.recorder_type()
        self.trainer = Trainer(
            model=model,
            callbacks=[self.recorder],
            device='gpu' if device == 'cuda' else 'cpu',
            precision='fp32',
            progress_bar=False,
        )
        self.warm = False

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A new one."""
        return build_tokenizer(self.model_folder, {})

    def measure(
        self,
        *,
        task: dict[str, Any],
        rows_file: str,
        max_seq_len: int,
        batch_size: int,
        num_items: int | None = None,
    ) -> dict[str, Any]:
        """The fields of Timing for the first `num_items` rows, by default all."""
        if not self.warm:
            length = min(max_seq_len, self.warm_up_length)
            self.evaluate({**task, **self.warm_up_keys}, Path(rows_file), length, batch_size, NUM_WARM_UP_ROWS)
            self.warm = True
        return self.evaluate(task, Path(rows_file), max_seq_len, batch_size, num_items)._asdict()

    def evaluate(
        self, task: dict[str, Any], rows_file: Path, max_seq_len: int, batch_size: int, num_items: int | None
    ) -> Timing:
        """One evaluation. Of `num_items` whole batches are run."""
        with evaluator_over(task, rows_file, self.tokenizer(), max_seq_len, batch_size) as evaluator:
            loader = evaluator.dataloader.dataloader
            chosen = min(num_items or len(loader.dataset), len(loader.dataset))
            if chosen < len(loader.dataset):
                chosen = max(chosen // loader.batch_size, 1) * loader.batch_size
            self.recorder.predictions.clear()

            def run() -> None:
                prepare_first(loader.dataset, chosen)
                self.trainer.eval(eval_dataloader=[evaluator], subset_num_batches=-(-chosen // loader.batch_size))

            wall, cpu, _ = measure(run, self.device)
        return Timing(wall, cpu, list(self.recorder.predictions))

    def close(self) -> None:
        """Ends the trainer."""
        self.trainer.close()


def text_pairs(data_set: Any, icl_task_type: str, num_items: int | None = None) -> TextPairs:
    """The texts that llm-foundry's data set tokenises for its first `num_items` rows, by default all."""
    pairs = []
    for index, row in enumerate(islice(data_set.dataset, num_items)):
        shots = data_set._generate_few_shot_prompt(
            data_set.num_fewshot, index, data_set.prompt_string, data_set.fewshot_rng
        )
        if icl_task_type == 'schema':
            contexts = data_set._construct_multiple_contexts(row, shots)
            continuations = [row['continuation']] * len(contexts)
        else:
            context = data_set.construct_context(row, shots)
            continuations = row['choices'] if icl_task_type == 'multiple_choice' else [row[data_set.answer_key]]
            contexts = [context.rstrip() if data_set.strip_data else context] * len(continuations)
        texts = [text if text.startswith(' ') or not data_set.prefix_space else f' {text}' for text in continuations]
        pairs.append([(shots + context, text) for context, text in zip(contexts, texts, strict=True)])
    return pairs


def requests_of(pairs: TextPairs) -> list[Instance]:
    return [
        Instance(request_type='loglikelihood', doc={}, arguments=pair, idx=index)
        for choices in pairs
        for index, pair in enumerate(choices)
    ]


class LMEval:
    """lm-eval's HFLM.loglikelihood on the texts of llm-foundry's tasks; fp32."""

    def load(self, model_folder: str, device: str = 'cpu') -> None:
        """Takes the model into memory; the next measurement warms it up."""
        self.model_folder, self.device = model_folder, device
        self.model = HFLM(pretrained=model_folder, device=device, dtype='float32')
        self.warm = False

    def pairs(self, task: dict[str, Any], rows_file: str, max_seq_len: int, num_items: int | None) -> list[Any]:
        """Texts and continuations of a task's first rows, as llm-foundry asks them."""
        tokenizer = build_tokenizer(self.model_folder, {})
        with evaluator_over(task, Path(rows_file), tokenizer, max_seq_len, 1) as evaluator:
            return text_pairs(evaluator.dataloader.dataloader.dataset, task['icl_task_type'], num_items)

    def measure(
        self,
        *,
        task: dict[str, Any],
        rows_file: str,
        max_seq_len: int,
        batch_size: int,
        num_items: int | None = None,
    ) -> dict[str, Any]:
        """The fields of Timing for the first `num_items` rows. A choice is chosen by its mean over tokens."""
        pairs = self.pairs(task, rows_file, max_seq_len, num_items)
        self.model._max_length, self.model.batch_size_per_gpu = max_seq_len, batch_size
        if not self.warm:
            self.model.loglikelihood(requests_of(pairs[:NUM_WARM_UP_ROWS]), disable_tqdm=True)
            self.warm = True
        self.model.tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        requests = requests_of(pairs)
        wall, cpu, results = measure(lambda: self.model.loglikelihood(requests, disable_tqdm=True), self.device)
        predictions = predictions_of(results, pairs, task['icl_task_type'], build_tokenizer(self.model_folder, {}))
        return Timing(wall, cpu, predictions)._asdict()


def predictions_of(
    results: list[tuple[float, bool]], pairs: TextPairs, icl_task_type: str, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """As Timing has them, of lm-eval's (log-probability, all argmax) per request."""
    remaining = iter(results)
    predictions = []
    for choices in pairs:
        scored = [next(remaining) for _ in choices]
        if icl_task_type == 'language_modeling':
            predictions.append(int(scored[0][1]))
        else:
            lengths = [max(len(tokenizer(text, add_special_tokens=False)['input_ids']), 1) for _, text in choices]
            means = [total / length for (total, _), length in zip(scored, lengths, strict=True)]
            predictions.append(means.index(max(means)))
    return predictions
