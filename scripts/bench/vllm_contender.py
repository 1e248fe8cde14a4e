"""vLLM as a contender (see worker.py), on token ids: log-probabilities of prompts, and generation.

Made for vLLM 0.33, in its own process, which may be another Python's. It makes random weights itself.
"""

from __future__ import annotations

import time
from typing import Any

from vllm import LLM, SamplingParams

NUM_WARM_UP = 8  # prompts, with other tokens than those that are measured


class VLLM:
    """An engine with prefix caching where vLLM has it for the model.

    It does not read cached prefixes for requests with log-probabilities of their prompts.
    """

    def load(self, model_folder: str, *, memory_share: float, max_model_len: int) -> dict[str, float]:
        """Start the engine for a folder with a configuration; return the seconds, most of which are compilation."""
        started = time.perf_counter()
        self.engine = LLM(
            model=model_folder,
            load_format='dummy',
            skip_tokenizer_init=True,
            gpu_memory_utilization=memory_share,
            max_model_len=max_model_len,
            seed=0,
        )
        return {'start_seconds': time.perf_counter() - started}

    def score(self, *, prompts: list[list[int]]) -> dict[str, float]:
        """Return the seconds of the log-probabilities of all tokens of these prompts, as lm-eval asks for them."""
        wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        seconds, outputs = self.timed(prompts, [wanted] * len(prompts))
        return {'wall_seconds': seconds, 'num_scored': sum(len(output.prompt_logprobs) - 1 for output in outputs)}

    def generate(self, *, prompts: list[list[int]], max_new_tokens: list[int]) -> dict[str, float]:
        """Return the seconds of greedy generations of exactly these lengths."""
        wanted = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in max_new_tokens
        ]
        seconds, outputs = self.timed(prompts, wanted)
        return {'wall_seconds': seconds, 'num_new': sum(len(output.outputs[0].token_ids) for output in outputs)}

    def timed(self, prompts: list[list[int]], wanted: list[SamplingParams]) -> tuple[float, list[Any]]:
        """Return the seconds of a run over all prompts, and its outputs; a run over a few others comes before."""
        others = [[token + 1 for token in reversed(prompt)] for prompt in prompts[:NUM_WARM_UP]]
        self.run(others, wanted[:NUM_WARM_UP])
        started = time.perf_counter()
        outputs = self.run(prompts, wanted)
        return time.perf_counter() - started, outputs

    def run(self, prompts: list[list[int]], wanted: list[SamplingParams]) -> list[Any]:
        """Run prompts with a request for each."""
        ids = [{'prompt_token_ids': prompt} for prompt in prompts]
        return self.engine.generate(ids, wanted, use_tqdm=False)
