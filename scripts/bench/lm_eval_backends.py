"""lm-eval's own tasks as contenders (see worker.py): its `simple_evaluate` with its HF backend, and with ours.

Timed are prompts, tokenization, the model, filters and metrics, with the data set in lm-eval's cache. Both backends
have one tokenizer for all rows, which has seen the same texts. The probe of a new model is not timed but reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from worker import NUM_WARM_UP_ROWS, measure

from llmfoundry_gauntlet.lm_eval import GauntletLM

GENERATION = 'generate_until'
PROBED_TOKENS = 8  # generated after the longest prompt


class HFBackend:
    """lm-eval with its Hugging Face backend."""

    backend: type[HFLM] = HFLM

    def load(self, model_folder: str, device: str = 'cpu', dtype: str = 'float32') -> dict[str, str]:
        """Load the model; the first measurement of a task warms it up. Return how the model is run."""
        self.device = device
        self.warm_tasks: set[str] = set()
        self.model = self.backend(pretrained=model_folder, device=device, dtype=dtype)
        return {'layouts': self.prepare()}

    def prepare(self) -> str:
        """Do what a new model needs once; return a description."""
        return 'padded rows'

    def measure(self, *, task: str, folder: str, batch_size: int = 1) -> dict[str, Any]:
        """Return seconds, predictions, log-probabilities and metrics for a task whose YAML is in the folder."""
        self.model.batch_size_per_gpu = batch_size
        manager = TaskManager(include_path=folder, include_defaults=False)

        def evaluate(limit: int | None = None) -> Any:
            return simple_evaluate(model=self.model, tasks=[task], task_manager=manager, limit=limit, bootstrap_iters=0)

        # This also puts the data set into the cache.
        if task not in self.warm_tasks:
            evaluate(NUM_WARM_UP_ROWS)
            self.warm_tasks.add(task)
        seconds, evaluation = measure(evaluate, self.device)

        # A document has a sample for each filter, with the same responses.
        samples = {sample['doc_id']: sample for sample in evaluation['samples'][task]}
        responses = [[response for (response,) in samples[document]['resps']] for document in sorted(samples)]
        generates = evaluation['configs'][task]['output_type'] == GENERATION
        requests = [arguments for sample in samples.values() for arguments in sample['arguments']]
        return {
            **seconds,
            'predictions': [prediction(of_document) for of_document in responses],
            'logprobs': None if generates else [logprobs(of_document) for of_document in responses],
            'metrics': metrics_of(evaluation['results'][task]),
            'num_items': len(responses),
            # Generation makes logits after the last token of a row only.
            'sequences': {'count': len(requests), 'longest': 1 if generates else self.longest(requests)},
        }

    def longest(self, requests: Sequence[tuple[str, ...]]) -> int:
        """Return the tokens of the longest row that is scored."""
        lengths = [len(self.model.tok_encode(''.join(texts))) for texts in requests]
        return min(max(lengths), self.model.max_length)


class GauntletBackend(HFBackend):
    """lm-eval with the backend of this package."""

    backend = GauntletLM

    def prepare(self) -> str:
        """Let the model be probed for the longest rows; return the seconds that it takes."""
        long_text = ' word' * self.model.max_length
        seconds_of_scoring, _ = measure(
            lambda: self.model.loglikelihood([request('loglikelihood', long_text, ' end')], disable_tqdm=True)
        )
        settings = {'until': [], 'max_gen_toks': PROBED_TOKENS, 'do_sample': False}
        seconds_of_generation, _ = measure(
            lambda: self.model.generate_until([request(GENERATION, long_text, settings)], disable_tqdm=True)
        )
        seconds = [answer['cpu_seconds'] for answer in (seconds_of_scoring, seconds_of_generation)]
        return 'probes of scoring and generation, with one row: {:.1f} and {:.1f} s'.format(*seconds)


def request(kind: str, *arguments: Any) -> Instance:
    """Return a request of no task."""
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def prediction(responses: Sequence[Any]) -> Any:
    """Return the text of a generation, the index of the most probable choice, or whether the only one is greedy.

    A text's rolling log-probability predicts nothing.
    """
    first = responses[0]
    if isinstance(first, str):
        return first
    if isinstance(first, float):
        return None
    if len(responses) == 1:
        return int(first[1])
    of_choices = logprobs(responses)
    return of_choices.index(max(of_choices))


def logprobs(responses: Sequence[Any]) -> list[float]:
    """Return the log-probability of each choice, or of the whole text."""
    return [response if isinstance(response, float) else response[0] for response in responses]


def metrics_of(results: dict[str, Any]) -> dict[str, float]:
    """Return a task's metrics, without their standard errors."""
    metrics = {}
    for name, value in results.items():
        metric, _, _ = name.partition(',')
        is_error = metric.split('_')[-1] == 'stderr'
        if isinstance(value, float) and not is_error:
            metrics[name] = value
    return metrics
