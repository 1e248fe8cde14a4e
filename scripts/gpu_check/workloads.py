"""The tasks that are timed, as token ids: of the published files, or random ones with lengths of some of their rows.

The lengths are in lengths.json, which scripts/record_lengths.py writes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from materials import make_tokenizer
from parts import task_entries

from gpu_check.options import Options
from gpu_check.shapes import Shape
from llmfoundry_gauntlet.data.readers import locate
from llmfoundry_gauntlet.evaluation.inputs import load_inputs
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation, prepare_evaluation
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import GenerateRequest, Ids, ItemKey, ScoreRequest

LENGTHS = Path(__file__).with_name('lengths.json')
VOCABULARY = 50_000  # of the tokenizer with which lengths were recorded
OF_ALL_MODELS = 32_000  # of the tokenizer for published files: training one takes longer than a row
MAX_SEQ_LEN = 2048
FIRST_TOKEN = 10  # those before are special
SHOT_ROWS = 2000  # rows to draw shots from
SHORTER_ON_CPU = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A task at a number of shots. With `fixed_shots` all items have the same.

    `letters` if the choices of all items are the same single tokens; `generates` if it is answered in words.
    """

    label: str
    num_shots: int
    fixed_shots: bool = False
    letters: bool = False
    generates: bool = False

    @property
    def name(self) -> str:
        """'mmlu, 5 fixed shots'."""
        return f'{self.label}, {self.num_shots} {"fixed " if self.fixed_shots else ""}shots'


MMLU = Workload(label='mmlu', num_shots=5, letters=True)
MMLU_FIXED = Workload(label='mmlu', num_shots=5, letters=True, fixed_shots=True)
HELLASWAG = Workload(label='hellaswag', num_shots=10)
PIQA = Workload(label='piqa', num_shots=10)
LAMBADA = Workload(label='lambada_openai', num_shots=0)
SCORED = (MMLU, HELLASWAG, PIQA, LAMBADA, MMLU_FIXED)  # the most important first
GSM8K = Workload(label='gsm8k', num_shots=8, fixed_shots=True, generates=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The place that requests come from: the published files below `data_root`, or None for random ids.

    Random ids are below `vocabulary`; their lengths are those recorded divided by `shorter`.
    """

    vocabulary: int
    data_root: Path | None = None
    shorter: int = 1

    @classmethod
    def of(cls, shape: Shape, options: Options) -> Source:
        """Return the source for a model; on a CPU its prompts are shorter."""
        shorter = SHORTER_ON_CPU if options.is_cpu else 1
        return cls(vocabulary=shape.settings['vocab_size'], data_root=options.data_root, shorter=shorter)

    def score_requests(self, workload: Workload, num_items: int) -> list[ScoreRequest]:
        """Return the requests of a workload's first items."""
        if self.data_root is not None:
            return self.prepared(workload, num_items).score_requests
        return GeneratedTask(workload, self).score_requests(num_items)

    def generate_requests(self, workload: Workload, num_items: int) -> list[GenerateRequest]:
        """Return the requests of a workload's first items, each as long as an answer of the file.

        A model with random weights ends nowhere.
        """
        if self.data_root is None:
            return GeneratedTask(workload, self).generate_requests(num_items)
        requests = self.prepared(workload, num_items).generate_requests
        answers = lengths_of(workload)
        return [
            GenerateRequest(key=request.key, context=request.context, max_new_tokens=answers[row % len(answers)][1])
            for row, request in enumerate(requests)
        ]

    def prepared(self, workload: Workload, num_items: int) -> PreparedEvaluation:
        """Return the first items of a workload of the published files."""
        assert self.data_root is not None
        return prepared(workload, self.data_root, num_items, min(self.vocabulary, OF_ALL_MODELS))

    def mean_length(self, workload: Workload) -> float:
        """Return the mean number of tokens of a prompt, as recorded."""
        rows = lengths_of(workload)
        query = np.mean([row[0] for row in rows])
        example = np.mean([row[0] + row[1] for row in rows])
        return float(query + workload.num_shots * example) / self.shorter


def lengths_of(workload: Workload) -> list[list[int]]:
    """Return the recorded tokens of some rows: of the query, and of its choices or its answer, the right one first."""
    rows: list[list[int]] = json.loads(LENGTHS.read_text('utf-8'))[workload.label]
    return rows


class GeneratedTask:
    """A task of random token ids, always the same, with the recorded lengths of rows."""

    def __init__(self, workload: Workload, source: Source) -> None:
        self.workload = workload
        self.vocabulary = source.vocabulary
        self.random = np.random.default_rng(0)
        lengths = [[max(1, length // source.shorter) for length in row] for row in lengths_of(workload)]
        # Shots come from more rows than were recorded, and the first items are of all lengths.
        self.lengths = [lengths[place] for place in self.random.permutation(8 * len(lengths)) % len(lengths)]
        self.letters = [self.ids(1) for _ in range(4)]
        self.rows = [self.row(row) for row in self.lengths]

    def ids(self, length: int) -> Ids:
        """Return random token ids."""
        return self.random.integers(FIRST_TOKEN, self.vocabulary, length, dtype=np.int32)

    def row(self, lengths: Sequence[int]) -> list[Ids]:
        """Return a row's query, and its choices or its answer."""
        query, *choices = lengths
        return [self.ids(query), *(self.letters if self.workload.letters else map(self.ids, choices))]

    def contexts(self, num_items: int) -> list[Ids]:
        """Return the prompts of so many items; shots are drawn from the other rows."""
        fixed = self.random.choice(len(self.rows), self.workload.num_shots, replace=False)
        contexts = []
        for _ in range(num_items):
            shots = fixed
            if not self.workload.fixed_shots:
                shots = self.random.choice(len(self.rows), self.workload.num_shots, replace=False)
            parts: list[Ids] = []
            for shot in shots:
                query, right, *_ = self.rows[shot]
                parts += [query, right]
            query_length = self.lengths[len(contexts) % len(self.lengths)][0]
            contexts.append(np.concatenate([*parts, self.ids(query_length)]))
        return contexts

    def score_requests(self, num_items: int) -> list[ScoreRequest]:
        """Return requests, each with new choices."""
        requests = []
        for row, context in enumerate(self.contexts(num_items)):
            _, *choices = self.row(self.lengths[row % len(self.lengths)])
            key = ItemKey(self.workload.name, row)
            requests.append(ScoreRequest(key=key, contexts=(context,) * len(choices), continuations=tuple(choices)))
        return requests

    def generate_requests(self, num_items: int) -> list[GenerateRequest]:
        """Return requests for as many tokens as an answer has."""
        requests = []
        for row, context in enumerate(self.contexts(num_items)):
            _, length_of_answer = self.lengths[row % len(self.lengths)]
            key = ItemKey(self.workload.name, row)
            requests.append(GenerateRequest(key=key, context=context, max_new_tokens=length_of_answer))
        return requests


@cache  # rows with other contenders run the same items
def prepared(workload: Workload, data_root: Path, num_items: int, vocabulary: int) -> PreparedEvaluation:
    """Return the first items of a task of the published files, tokenized; shots come from SHOT_ROWS rows."""
    entry: dict[str, Any] = task_entries()[workload.label]
    lines = [line for line in locate(entry['dataset_uri'], data_root).read_text('utf-8').split('\n') if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f'{workload.label}.jsonl'
        path.write_text('\n'.join(lines[: max(num_items, SHOT_ROWS)]) + '\n', 'utf-8')
        task = {**entry, 'num_fewshot': [workload.num_shots], 'has_categories': False, 'dataset_uri': str(path)}
        settings: dict[str, Any] = {'tasks': [task]}
        if workload.fixed_shots:
            settings['fewshot'] = 'fixed'
        data = load_inputs(settings)
    (key,) = data.examples
    encoder = Encoder(make_tokenizer(str(data_root), vocabulary))
    first = prepare_evaluation(data, encoder, max_seq_len=MAX_SEQ_LEN)
    return first.only({key: data.examples[key][:num_items]})
