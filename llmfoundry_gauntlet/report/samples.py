"""The samples of a report page: the first items of each task, with their prompts and what each run answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from llmfoundry_gauntlet.records.runs import Run
from llmfoundry_gauntlet.report.prompts import PromptOrReason, find_prompts
from llmfoundry_gauntlet.report.wording import excerpt
from llmfoundry_gauntlet.tasks.base import CUT, CUT_SHARE
from llmfoundry_gauntlet.tasks.score import UNPARSED as NO_ANSWER
from llmfoundry_gauntlet.values import ItemKey, ItemResult, Prompt

RIGHT, WRONG, PARTLY, TRUNCATED, UNPARSED, UNSCORED = KINDS = (
    'right',
    'wrong',
    'partly right',
    'truncated',
    'unparsed',
    'unscored',
)
PROMPT, TEXT, CHOICE = (300, 1500), (900, 300), (300, 100)  # characters shown of the beginning and end
PREVIEW = 80  # characters of the end of a prompt in a list
MAX_CHOICES = 30
NOT_READ = 'data files were not read'


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the texts that are scored, `None` where it is unknown."""

    text: str | None
    is_gold: bool
    logprobs: tuple[float | None, ...]  # by run
    is_predicted: tuple[bool, ...]  # by run


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run made of an item."""

    run: int
    kinds: tuple[str, ...]
    score: float | None
    reason: str | None
    text: str | None
    answer: str | None
    is_prompt_truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An item with its prompt, or the reason why that is not shown, and what the runs made of it."""

    key: ItemKey
    prompt: str | None
    absence: str | None
    preview: str
    num_shots: int | None
    gold: str | None
    choices: tuple[Choice, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def kinds(self) -> list[str]:
        """The kinds of all outcomes."""
        return [kind for kind in KINDS if any(kind in outcome.kinds for outcome in self.outcomes)]


def make_cards(runs: Sequence[Run], per_task: int, *, data_root: str | None, with_prompts: bool) -> list[Card]:
    """Return the first items of each task, in the order of its samples file, with the outcomes of all runs.

    An item that was asked in other words is another item.
    """
    names: dict[tuple[ItemKey, str], list[tuple[int, ItemResult]]] = {}
    for key in dict.fromkeys(key for run in runs for key in run.results):
        for run in runs:
            for result in islice(run.results.get(key, ()), per_task):
                names[result.key, result.prompt_sha256] = []
    for place, run in enumerate(runs):
        for results in run.results.values():
            for result in results:
                if (name := (result.key, result.prompt_sha256)) in names:
                    names[name].append((place, result))
    prompts: dict[tuple[ItemKey, str], PromptOrReason] = {}
    for place, run in enumerate(runs if with_prompts else ()):
        wanted = [outcomes[0][1] for outcomes in names.values() if outcomes[0][0] == place]
        digests = {result.key: result.prompt_sha256 for result in wanted}
        found = find_prompts(run, wanted, data_root)
        prompts |= {(key, digests[key]): prompt for key, prompt in found.items()}
    return [card(outcomes, prompts.get(name, NOT_READ)) for name, outcomes in names.items()]


def card(outcomes: Sequence[tuple[int, ItemResult]], prompt: PromptOrReason) -> Card:
    """Return one item."""
    first = outcomes[0][1]
    text, choices = ('', ()) if isinstance(prompt, str) else prompt_and_choices(prompt)
    num_choices = max([len(choices), *(len(result.logprobs or ()) for _, result in outcomes)])
    return Card(
        key=first.key,
        prompt=None if isinstance(prompt, str) else excerpt(text, *PROMPT),
        absence=prompt if isinstance(prompt, str) else None,
        preview=' '.join(text[-10 * PREVIEW :].split())[-PREVIEW:],
        num_shots=None if isinstance(prompt, str) else prompt.num_shots,
        gold=excerpt(first.gold, *TEXT) if isinstance(first.gold, str) else None,
        choices=tuple(choice(place, choices, outcomes) for place in range(min(num_choices, MAX_CHOICES))),
        outcomes=tuple(outcome(run, result) for run, result in outcomes),
    )


def prompt_and_choices(prompt: Prompt) -> tuple[str, tuple[str, ...]]:
    """Return the prompt and the texts to choose from; where each has its own context, together with that."""
    contexts, continuations = prompt.own_texts, prompt.continuations
    if len(contexts) > 1:
        return prompt.preamble, tuple(f'{text} {end}' for text in contexts for end in continuations)
    return prompt.preamble + contexts[0], continuations


def choice(place: int, texts: Sequence[str], outcomes: Sequence[tuple[int, ItemResult]]) -> Choice:
    """Return one choice of an item with its log-probability in each run."""
    gold = outcomes[0][1].gold
    return Choice(
        text=excerpt(texts[place], *CHOICE) if place < len(texts) else None,
        is_gold=gold == place or isinstance(gold, str),
        logprobs=tuple(logprob(result, place) for _, result in outcomes),
        is_predicted=tuple(result.predicted == place for _, result in outcomes),
    )


def logprob(result: ItemResult, place: int) -> float | None:
    """Return the log-probability of a choice, `None` unless it is finite."""
    values = result.logprobs or ()
    return values[place] if place < len(values) and math.isfinite(values[place]) else None


def outcome(run: int, result: ItemResult) -> Outcome:
    """Return what a run made of an item; an answer that is the whole generation is left out."""
    is_part = result.answer and result.answer.strip() != (result.text or '').strip()
    return Outcome(
        run=run,
        kinds=kinds_of(result),
        score=result.credit,
        reason=result.reason,
        text=None if result.text is None else excerpt(result.text, *TEXT),
        answer=excerpt(result.answer or '', *CHOICE) if is_part else None,
        is_prompt_truncated=result.truncated,
    )


def kinds_of(result: ItemResult) -> tuple[str, ...]:
    """Return whether an item is right, wrong or in between, and whether its generation is truncated or unparsed."""
    if result.credit is None:
        return (UNSCORED,)
    kinds = [RIGHT if result.credit == 1 else WRONG if result.credit == 0 else PARTLY]
    if CUT in (result.reason or '') or result.marks.get(CUT_SHARE) == 1:
        kinds.append(TRUNCATED)
    has_no_letter = isinstance(result.gold, int) and result.predicted is None
    if result.text is not None and (result.answer == '' or NO_ANSWER in (result.reason or '') or has_no_letter):
        kinds.append(UNPARSED)
    return tuple(kinds)
