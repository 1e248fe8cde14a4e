"""Score the right generation by likelihood, for the items of tasks that generate.

What is scored is the text that a shot has where the model generates: the white space after the question, the chain of
thought and the preferred answer, or the canonical solution (`Task.gold_text`). It follows the very tokens of the prompt
that the model generates from, so that both are about one question. Its end is not scored, as that of a choice is not.

A right generation is an item of its own (`ItemKey.is_gold`) as long as the evaluation runs: it has its own request,
batch and line in the journal. At the end its bits per byte are joined to the results of the model's generations.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from llmfoundry_gauntlet.metrics.metrics import GOLD_BITS_PER_BYTE, GOLD_TOKENS, NO_GOLD_BITS
from llmfoundry_gauntlet.scoring.likelihood import NON_FINITE
from llmfoundry_gauntlet.tasks.base import Task
from llmfoundry_gauntlet.types import (
    GenerateRequest,
    Ids,
    Item,
    ItemKey,
    ItemResult,
    Output,
    Score,
    ScoreOutput,
    ScoreRequest,
)


def gold_key(key: ItemKey) -> ItemKey:
    """Return the key under which the right generation for an item's prompt is scored, once for all of its samples."""
    return replace(key, sample=0, is_gold=True)


def gold_request(request: GenerateRequest, gold: Ids, *, max_seq_len: int) -> ScoreRequest:
    """Return the request to score the right generation after the prompt of a request to generate.

    A right generation that does not fit is not truncated: the bits of its beginning would be those of another text.
    """
    num_of_prompt, num_of_gold = len(request.context), len(gold)
    unscorable = request.unscorable
    if unscorable is None:
        if num_of_gold == 0:
            unscorable = 'the tokenizer gives no tokens for the gold answer'
        elif request.reasoning is not None and request.reasoning.is_open:
            unscorable = 'the prompt ends inside the reasoning, which a gold answer does not continue'
        elif num_of_prompt + num_of_gold > max_seq_len:
            unscorable = (
                f'prompt and gold answer have {num_of_prompt} and {num_of_gold} tokens, together more than max_seq_len '
                f'{max_seq_len}'
            )
    return ScoreRequest(
        key=gold_key(request.key),
        contexts=(request.context,),
        continuations=(gold,),
        prompt_shortened=request.prompt_shortened,
        unscorable=unscorable,
    )


def gold_score(item: Item, output: Output | None, task: Task) -> Score:
    """Return the bits per byte of an item's right generation as a metric, or the fact why they are not known.

    There is no score besides: that of the item is its generation's.
    """
    assert isinstance(item.request, ScoreRequest)
    if not isinstance(output, ScoreOutput):
        reason = item.request.unscorable or 'there is no output'
        return Score(value=None, facts={NO_GOLD_BITS: reason})
    (logprobs,) = output.logprobs
    if not np.isfinite(logprobs).all():
        return Score(value=None, facts={NO_GOLD_BITS: NON_FINITE})
    bits = -float(logprobs.sum()) / math.log(2)
    bits_per_byte = bits / num_gold_bytes(task, item.example.content)
    return Score(value=None, metrics={GOLD_BITS_PER_BYTE: bits_per_byte}, facts={GOLD_TOKENS: len(logprobs)})


def num_gold_bytes(task: Task, content: object) -> int:
    """Return the number of UTF-8 bytes of a right generation.

    White space that joins it to the prompt does not count, as that of a choice does not; that of a program does.
    """
    text = task.gold_text(content) or ''
    counted = text if task.is_verbatim else text.strip()
    return len(counted.encode('utf-8', 'surrogatepass'))


def with_gold(result: ItemResult, gold: ItemResult | None) -> ItemResult:
    """Return the result of a generation with what is known of the right one, if anything is."""
    if gold is None:
        return result
    return replace(result, metrics={**result.metrics, **gold.metrics}, facts={**result.facts, **gold.facts})


def gold_of(result: ItemResult) -> ItemResult | None:
    """Return what `with_gold` has added to a result as the result that it was before, None if nothing."""
    facts = {name: value for name, value in result.facts.items() if name in (GOLD_TOKENS, NO_GOLD_BITS)}
    if not facts:
        return None
    metrics = {name: value for name, value in result.metrics.items() if name == GOLD_BITS_PER_BYTE}
    return replace(
        result,
        key=gold_key(result.key),
        # Those of the generation.
        predicted=None,
        score=None,
        num_tokens=None,
        reason=None,
        text=None,
        answer=None,
        # Those of the right one.
        metrics=metrics,
        facts=facts,
    )
