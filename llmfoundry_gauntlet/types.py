"""The data types of an evaluation, in the order of its stages; all are frozen and printable.

A row of a data file is read as an Example; an Example with its shots makes a Prompt; a Prompt in token ids is a
Request; the engine turns Requests into Outputs; an Output is scored as an ItemResult; item results are aggregated into
TaskScores and Composites.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

if TYPE_CHECKING:  # numpy is not loaded to read YAML files
    import numpy as np
    import numpy.typing as npt

Ids: TypeAlias = 'npt.NDArray[np.int32]'  # token ids
Ints: TypeAlias = 'npt.NDArray[np.int64]'
Floats: TypeAlias = 'npt.NDArray[np.float64]'
Bools: TypeAlias = 'npt.NDArray[np.bool_]'
ClusterNumbers: TypeAlias = 'npt.NDArray[np.uint64]'


@dataclass(frozen=True, slots=True, order=True)
class ItemKey:
    """Identifies one item of an evaluation, independent of batch, rank and run."""

    task: str  # '{label}/{n}-shot'
    row: int  # 0-based line of the data file
    file: str | None = None  # the file's stem, if a task has several files
    variant: str | None = None  # a perturbation, such as 'option_order:B'
    sample: int = 0  # number of the generation, if a prompt has several
    is_gold: bool = False  # the right generation for the prompt, scored by likelihood beside those of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One checked row of a data file. `content` is an instance of its task type's row class (see `tasks/`).

    `variant` names the perturbation, if any. `digest` is a hash of the row, `cluster` a hash of the source that it
    shares with other rows, such as a passage; '' if unknown.
    """

    row: int
    content: Any
    category: str | None = None
    file: str | None = None
    variant: str | None = None
    digest: str = ''
    cluster: str = ''


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The form of prompts in a chat template: its arguments, a system message, and whether shots are turns."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    shots_as_turns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The text of an item: `preamble` (instruction and shots), then its own contexts and the continuations to score.

    `contexts` has one entry for all continuations, or one per continuation. Without continuations the model generates.
    With `chat_template` (True, or 'auto': if the tokenizer has one; None: as the settings say) preamble and context are
    a user message, after the `turns` of user and assistant; `lead` is the start of the assistant's answer, before the
    scored continuations. With `as_reference` continuations have a space before them only where llm-foundry's have.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...] = ()
    preamble: str = ''
    num_shots: int = 0
    chat_template: bool | str | None = None
    lead: str = ''
    as_reference: bool = False
    chat_format: ChatFormat = ChatFormat()
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def own_texts(self) -> tuple[str, ...]:
        """Return the contexts with the start of the answer, for a model without a chat template."""
        return tuple(f'{context}\n{self.lead}' for context in self.contexts) if self.lead else self.contexts

    @property
    def text(self) -> str:
        """Return the whole prompt, messages on lines of their own; several contexts are separated by NUL."""
        earlier = []
        if self.chat_template and self.chat_format.system_prompt is not None:
            earlier.append(self.chat_format.system_prompt)
        for turn in self.turns:
            earlier += turn
        whole_texts = ['\n'.join([*earlier, self.preamble + text]) for text in self.own_texts]
        return '\0'.join(whole_texts)

    def messages(self, context: str) -> list[dict[str, str]]:
        """Return the messages of a chat that end with this one of the contexts."""
        messages = []
        if self.chat_format.system_prompt is not None:
            messages.append({'role': 'system', 'content': self.chat_format.system_prompt})
        for question, answer in self.turns:
            messages.append({'role': 'user', 'content': question})
            messages.append({'role': 'assistant', 'content': answer})
        messages.append({'role': 'user', 'content': self.preamble + context})
        return messages

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the whole prompt in UTF-8, in hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """A request for the log-probabilities of token ids: `continuations[i]` after `contexts[i]`, int32 arrays.

    Equal contexts are the same array. `unscorable` is the reason if the item cannot be scored, else None.
    """

    key: ItemKey
    contexts: tuple[Ids, ...]
    continuations: tuple[Ids, ...]
    prompt_shortened: bool = False
    unscorable: str | None = None


class ProgramStop(Protocol):
    """The end of a generation that is a program; its string says where that is. A longer text has the same end."""

    def position(self, text: str) -> int | None:
        """Return where the program in a text ends, None if it may go on."""
        ...

    def may_end(self, text: str, start: int) -> bool:
        """Return quickly whether the characters from `start` on may show that a program has ended."""
        ...

    def gives_up(self, text: str, start: int) -> bool:
        """Return whether generating may end, as the text up to and from `start` is plainly no program."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """The end of a generation: before the first of `strings`, or where its answer ends.

    The answer ends before the first `answer_end` that follows `answer_delimiter` (which may be empty) and text other
    than white space; an empty `answer_end` never ends it. With `program` it also ends where its program does. The
    prompt is not searched. With `as_pattern` the strings are joined into one regular expression, as llm-foundry does
    when it scores.

    A window is a string and a number of tokens: once the text of so many latest tokens, special ones included, has the
    string, the generation ends, also within reasoning. So lm-eval stops, and cuts the text by itself.
    """

    strings: tuple[str, ...] = ()
    answer_delimiter: str = ''
    answer_end: str = ''
    program: ProgramStop | None = None
    as_pattern: bool = False
    windows: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts around a model's reasoning, such as <think> and </think>. `start` is '' if only its end is marked."""

    start: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The reasoning that may precede the answer in a generation. `is_open`: the prompt ends inside it."""

    markers: tuple[ReasoningMarkers, ...]
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling of tokens: greedy at temperature 0, else by probability.

    The candidates are the smallest set of the `top_k` most probable tokens (0: all) whose probability reaches `top_p`.
    Samples depend only on the seed and the item.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """A request for a generation of at most `max_new_tokens` tokens after `context`, an int32 array of token ids.

    `verbatim` keeps spaces that the tokenizer would clean up. `restores_space` restores a leading space that the
    tokenizer drops. Without `reasoning` all of a generation is its answer. With `text_after` its text begins after the
    last token with this id, if there is one. `unscorable` is the reason if nothing can be generated, else None.
    """

    key: ItemKey
    context: Ids
    max_new_tokens: int
    stops: StopRule = StopRule()
    sampling: Sampling = Sampling()
    reasoning: Reasoning | None = None
    verbatim: bool = False
    restores_space: bool = True
    text_after: int | None = None
    prompt_shortened: bool = False
    unscorable: str | None = None

    @property
    def length(self) -> int:
        """Return the number of tokens of the prompt and its longest generation."""
        return len(self.context) + self.max_new_tokens


Request = ScoreRequest | GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Item:
    """An example with the request for its prompt; `choices` are the texts to score, if any.

    `num_shots` is the number of shots left after truncation; a partly truncated shot counts as a fraction. `gold` of an
    item that generates is the item that scores the right generation, whose result is joined to its own at the end.
    """

    example: Example
    prompt_sha256: str
    num_shots: float
    request: Request
    choices: tuple[str, ...] = ()
    gold: Item | None = None

    @property
    def key(self) -> ItemKey:
        """Return the key of its request."""
        return self.request.key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreOutput:
    """The output for a ScoreRequest: one array per continuation, one entry per continuation token.

    `logprobs` are natural logarithms in float64. `is_argmax` is whether the token is the model's argmax. `num_top` is
    the number of vocabulary entries that tie for the highest logit, 0 if the token is not among them.
    """

    key: ItemKey
    logprobs: tuple[Floats, ...]
    is_argmax: tuple[Bools, ...]
    num_top: tuple[Ints, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation as decoded, not yet cut at its stop string.

    `is_truncated`: the token limit ended it. `is_finite`: no logit was NaN. `num_tokens` and `is_truncated` are None if
    unknown.
    """

    key: ItemKey
    text: str
    num_tokens: int | None = None
    is_truncated: bool | None = None
    is_finite: bool = True


Output = ScoreOutput | Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one output. `value` is in [0, 1], None if the item could not be scored.

    `answer` is the answer extracted from a generation. `metrics` are further metrics of the item by name, the same
    names for every item of a task, which reports their means. `facts` are other properties that its metrics need.
    """

    value: float | None
    predicted: int | None = None
    reason: str | None = None
    answer: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str | int] = field(default_factory=dict)

    @classmethod
    def unscored(cls, reason: str) -> Self:
        """Return the score of an item that could not be scored."""
        return cls(value=None, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """One line of a samples file, with everything metrics need. An unscored item has score None and a reason.

    `gold` is the index of the right choice, or the right answer's text. `num_characters` and `num_bytes` (UTF-8) are of
    the choices' texts without a leading space. `num_shots` is the number of shots left after truncation. Items of one
    `cluster` share a source, such as a passage.
    """

    key: ItemKey
    category: str | None
    gold: int | str | None
    predicted: int | None
    score: float | None
    logprobs: tuple[float, ...] | None  # sums in nats, one per choice
    num_tokens: tuple[int, ...] | None  # one per choice, or of the generation
    reason: str | None
    prompt_sha256: str
    prompt_shortened: bool
    text: str | None = None  # of a generation, up to its stop
    answer: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str | int] = field(default_factory=dict)
    num_characters: tuple[int, ...] | None = None  # one per choice
    num_bytes: tuple[int, ...] | None = None  # one per choice
    num_shots: float | None = None  # None if unknown, as in old records
    cluster: str = ''

    @property
    def status(self) -> str:
        """Return 'scored' or 'unscored'."""
        return 'unscored' if self.score is None else 'scored'


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPoint:
    """The evaluated point of training; `checkpoint` is the file or folder of the weights. None is unknown."""

    batch: int
    epoch: int | None
    token: int | None
    checkpoint: str | None
    loss: float | None = None  # the mean of the training loss since the evaluation before,
    loss_batches: int | None = None  # over this many batches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stratum:
    """The contribution of each cluster of a stratum, a task or a category of it, to an estimate's deviation.

    Clusters are independent of each other, so the variance is the sum of the squares. `clusters` are the clusters'
    numbers, uint64 [G], ascending; `deviations` float64 [G]. `freedom` are the effective degrees of freedom of the
    variance. `is_borrowed` if the stratum is a single cluster, whose deviation is taken from other strata or its items.
    """

    name: str
    clusters: ClusterNumbers
    deviations: Floats
    freedom: float
    task: str = ''
    is_borrowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """The spread of an estimate over items.

    `freedom` are the degrees of freedom of the standard error. `below` and `above` are the standard errors towards
    lower and higher values, which differ where a share without variation takes part; `bounds` are the lowest and the
    highest possible value. `num_items` is the number of independent items that a share is worth, None for others;
    `share_freedom` are the degrees of freedom of that number, None if they are `freedom`. `standard_error` is estimated
    from the variation of items alone, as tests of differences need it.
    """

    strata: tuple[Stratum, ...]
    standard_error: float
    freedom: float
    below: float
    above: float
    bounds: tuple[float, float] = (-math.inf, math.inf)
    num_items: float | None = None
    share_freedom: float | None = None

    @property
    def error_with_constant_parts(self) -> float:
        """Return the standard error, in which a task without variation beside others counts with its Wilson interval.

        Such a task, with 0 of 5 right, is not known exactly. If no task varies the error is 0, and only the interval
        says more. The categories of a task are many small samples, whose variances are right on average: a task varies
        if any of its categories does.
        """
        varies: dict[str, bool] = {}
        for stratum in self.strata:
            varies[stratum.task] = varies.get(stratum.task, False) or bool(stratum.deviations.any())
        if all(varies.values()) or not any(varies.values()):
            return self.standard_error
        return max(self.standard_error, self.below, self.above)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number, or the reason why there is none; its spread is None if unknown.

    `no_error` says why a number cannot have a standard error; None if it has one, or if too few items are the reason.
    """

    value: float | None
    reason: str | None = None
    spread: Spread | None = field(default=None, compare=False, repr=False)
    no_error: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.value is None) != (self.reason is not None):
            raise ValueError('a Measure has either a value or a reason')

    @property
    def standard_error(self) -> float | None:
        """Return the standard error over the draw of items, None if unknown."""
        return None if self.spread is None else self.spread.error_with_constant_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """The metrics of one task at one number of shots, its accuracy first.

    `categories` holds the same per category, in sorted order.
    """

    task: str
    metrics: Mapping[str, Measure]
    num_items: int
    num_unscored: int
    num_shortened: int
    categories: Mapping[str, TaskScore] = field(default_factory=dict)

    @property
    def accuracy(self) -> Measure:
        """Return the metric that composites use."""
        return next(iter(self.metrics.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Composites:
    """Category scores and named averages of a gauntlet, in the order of its YAML.

    `gold_bits` has the bits per byte of gold answers for each of both: a loss, which is better the lower it is.
    """

    categories: Mapping[str, Measure]
    averages: Mapping[str, Measure]
    gold_bits: Mapping[str, Measure] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, Measure]:
        """Return all of them; no average has the name of a category."""
        return {**self.categories, **self.averages}
