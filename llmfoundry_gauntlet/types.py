"""The types on an item's way, in the order in which it meets them; all are frozen and printable.

A row of a data file becomes an Example; an Example with its shots a Prompt; a Prompt in token ids a Request; the engine
turns Requests into Outputs; an Output is scored into an ItemResult; item results are averaged into TaskScores and
composites.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeAlias

if TYPE_CHECKING:  # numpy is not loaded to read YAML files
    import numpy as np
    import numpy.typing as npt

Ids: TypeAlias = 'npt.NDArray[np.int32]'  # token ids
Ints: TypeAlias = 'npt.NDArray[np.int64]'
Integers: TypeAlias = 'npt.NDArray[np.integer]'  # of any width
Floats: TypeAlias = 'npt.NDArray[np.float64]'
Bools: TypeAlias = 'npt.NDArray[np.bool_]'
ClusterNumbers: TypeAlias = 'npt.NDArray[np.uint64]'


@dataclass(frozen=True, slots=True, order=True)
class ItemKey:
    """Names one item of an evaluation, whatever the batch, the rank or the run it was computed in."""

    task: str  # '{label}/{n}-shot'
    row: int  # 0-based line of the data file
    file: str | None = None  # the file's stem where a task has several
    variant: str | None = None  # a perturbation, such as 'option_order:B'
    sample: int = 0  # counts generations of one prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One checked row of a data file. `content` is the row type of its task type (see `tasks/`).

    `variant` names the way in which it is asked, where there are several. `digest` is of the row, `cluster` of the
    source that it shares with other rows, such as a passage; '' where they are not known.
    """

    row: int
    content: Any
    category: str | None = None
    file: str | None = None
    variant: str | None = None
    digest: str = ''
    cluster: str = ''


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The text of an item: `preamble` (instruction and shots), then its own contexts and the continuations to score.

    `contexts` has one entry for all continuations, or one per continuation. Without continuations the model generates.
    With `chat_template` (True, or 'auto': if the tokenizer has one) the context is a user's message; `lead` is the
    beginning of the answer to it, before what is scored.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...] = ()
    preamble: str = ''
    num_shots: int = 0
    chat_template: bool | str = False
    lead: str = ''

    @property
    def own_texts(self) -> tuple[str, ...]:
        """Return the contexts with the beginning of the answer, for a model without a chat template."""
        return tuple(f'{context}\n{self.lead}' for context in self.contexts) if self.lead else self.contexts

    @property
    def text(self) -> str:
        """Return the whole prompt; several contexts are separated by NUL."""
        return '\0'.join(self.preamble + text for text in self.own_texts)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the whole prompt in UTF-8, in hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """Token ids whose log-probabilities are wanted: `continuations[i]` after `contexts[i]`, int32 arrays.

    Contexts that are equal are the same array. `unscorable` says why nothing can be scored, else None.
    """

    key: ItemKey
    contexts: tuple[Ids, ...]
    continuations: tuple[Ids, ...]
    truncated: bool = False
    unscorable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """The end of a generation: before the first of `strings`, or where its answer ends.

    The answer ends before the first `answer_end` after `answer_delimiter` (which may be empty) and something that is
    not white space; without an `answer_end` it has no end of its own. With `closes_block` a reply also ends after the
    first closing brace of code that it did not open. Nothing in a prompt counts. With `as_pattern` the strings are one
    regular expression, as llm-foundry reads them when it marks.
    """

    strings: tuple[str, ...] = ()
    answer_delimiter: str = ''
    answer_end: str = ''
    closes_block: bool = False
    as_pattern: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling of tokens: the most probable at temperature 0, else by probability.

    Of the `top_k` most probable tokens (0: all), as many count as make up `top_p` of the probability. Draws depend on
    the seed and the item alone.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """Token ids after which a reply of at most `max_new_tokens` tokens is wanted. `context` is an int32 array.

    `verbatim` wants its text as it is written, where a tokenizer would tidy up spaces. `restores_space` puts back the
    leading space that some tokenizers drop.
    """

    key: ItemKey
    context: Ids
    max_new_tokens: int
    stops: StopRule = StopRule()
    sampling: Sampling = Sampling()
    verbatim: bool = False
    restores_space: bool = True
    truncated: bool = False
    unscorable: str | None = None

    @property
    def length(self) -> int:
        """Tokens of the longest row that can come of it."""
        return len(self.context) + self.max_new_tokens


Request = ScoreRequest | GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Item:
    """An example with the request made of its prompt; `choices` are the texts that are scored, if any."""

    example: Example
    prompt_sha256: str
    request: Request
    choices: tuple[str, ...] = ()

    @property
    def key(self) -> ItemKey:
        """Return the key that its request has as well."""
        return self.request.key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreOutput:
    """The output for a ScoreRequest: one array per continuation, one entry per continuation token.

    `logprobs` are natural logarithms in float64. `is_argmax` is whether the token is the first of the most
    probable ones. `num_top` counts the vocabulary entries that share the highest logit, 0 where the token is
    not among them; it is over 1 only in a tie.
    """

    key: ItemKey
    logprobs: tuple[Floats, ...]
    is_argmax: tuple[Bools, ...]
    num_top: tuple[Integers, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation as decoded; text that completed a stop is still in it.

    `is_cut` says that the token limit ended it, `is_finite` that every logit a token was chosen by was a number.
    `num_tokens` and `is_cut` are None where they are not known.
    """

    key: ItemKey
    text: str
    num_tokens: int | None = None
    is_cut: bool | None = None
    is_finite: bool = True


Output = ScoreOutput | Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Another model's answer to an item, and its place (`file:line`).

    Either a reply's `text`, or sums of log-probabilities in nats, one per choice; beside these the number of tokens of
    each choice, and for language modelling whether all were the most probable ones, as far as they are known.
    """

    place: str
    key: ItemKey
    text: str | None = None
    logprobs: tuple[float, ...] | None = None
    num_tokens: tuple[int, ...] | None = None
    is_argmax: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one output. `credit` is in [0, 1], None if the item could not be scored.

    `answer` is what was taken from a reply. `marks` are further metrics of the item by name, the same names for every
    item of a task; a task's metric is their mean. `facts` are what else its metrics want to know of the item.
    """

    credit: float | None
    predicted: int | None = None
    reason: str | None = None
    answer: str | None = None
    marks: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str | int] = field(default_factory=dict)

    @classmethod
    def unscored(cls, reason: str) -> Self:
        """Return the score of an item that could not be scored."""
        return cls(credit=None, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """One line of a samples file, all that metrics are made of. An unscored item has credit None and a reason.

    `gold` is the index of the right choice, or the right answer's text. `num_characters` and `num_bytes` (UTF-8) are of
    the choices' texts, without a leading space. Items of a `cluster` have something in common, such as a passage.
    """

    key: ItemKey
    category: str | None
    gold: int | str | None
    predicted: int | None
    credit: float | None
    logprobs: tuple[float, ...] | None  # sums in nats, one per choice
    num_tokens: tuple[int, ...] | None  # one per choice, or those of the reply
    reason: str | None
    prompt_sha256: str
    truncated: bool
    text: str | None = None  # of a reply, up to its stop
    answer: str | None = None
    marks: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str | int] = field(default_factory=dict)
    num_characters: tuple[int, ...] | None = None  # one per choice
    num_bytes: tuple[int, ...] | None = None  # one per choice
    logprobs_alone: tuple[float, ...] | None = None  # after the task's pmi_context alone
    cluster: str = ''

    @property
    def status(self) -> str:
        """'scored' or 'unscored'."""
        return 'unscored' if self.credit is None else 'scored'


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPoint:
    """The point of training that was evaluated; `checkpoint` is the file of the weights, None without one."""

    batch: int
    epoch: int | None
    token: int | None
    checkpoint: str | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """The spread of an estimate over items: what each cluster of items adds to its deviation.

    Clusters are independent of each other, so the variance is the sum of the squares. `clusters` are the clusters'
    numbers, uint64 [G], ascending; `deviations` float64 [G].
    """

    clusters: ClusterNumbers
    deviations: Floats

    @property
    def standard_error(self) -> float:
        """The root of the variance."""
        return math.sqrt(math.fsum((self.deviations**2).tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number, or the reason why there is none; its spread is None where it is not known."""

    value: float | None
    reason: str | None = None
    spread: Spread | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.value is None) != (self.reason is not None):
            raise ValueError('a Measure has either a value or a reason')

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the value over the items that might have been drawn instead."""
        return None if self.spread is None else self.spread.standard_error


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """The metrics of one task at one number of shots, its accuracy first.

    `categories` holds the same per category, in sorted order.
    """

    task: str
    metrics: Mapping[str, Measure]
    num_items: int
    num_unscored: int
    num_truncated: int
    categories: Mapping[str, TaskScore] = field(default_factory=dict)

    @property
    def accuracy(self) -> Measure:
        """The metric that goes into composites."""
        return next(iter(self.metrics.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Composites:
    """Category scores and named averages of a gauntlet, in the order of its file."""

    categories: Mapping[str, Measure]
    averages: Mapping[str, Measure]

    @property
    def by_name(self) -> dict[str, Measure]:
        """All of them; no average has the name of a category."""
        return {**self.categories, **self.averages}
