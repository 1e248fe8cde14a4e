"""The base class of tasks (rows, prompts, scorer and metrics; each task type is a subclass) and few-shot sampling."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmfoundry_gauntlet.config.tasks import TaskSpec
from llmfoundry_gauntlet.data.examples import TaskRows, read_examples
from llmfoundry_gauntlet.data.readers import locate
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.metrics.consistency import PerturbationScore
from llmfoundry_gauntlet.metrics.metrics import Metric
from llmfoundry_gauntlet.scoring.reasoning import KNOWN_MARKERS, is_opened_by
from llmfoundry_gauntlet.types import (
    Example,
    Generation,
    ItemKey,
    ItemResult,
    Prompt,
    Reasoning,
    Request,
    Sampling,
    Score,
    StopRule,
)

if TYPE_CHECKING:
    from llmfoundry_gauntlet.config.settings import EvaluationSettings
    from llmfoundry_gauntlet.scoring.code.sandbox import Sandbox
    from llmfoundry_gauntlet.scoring.mathematics import Comparer
    from llmfoundry_gauntlet.tasks.encode import Encoder
    from llmfoundry_gauntlet.tasks.truncate import EncodedItem

TRANSFORMERS_TOP_K = 50  # its default for sampling
TRUNCATED_SHARE = 'TruncatedShare'
TRUNCATED_REASON = 'truncated at the token limit'
FIXED_VERSION = 1  # of how fixed shots are drawn; recorded in results


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(TaskSpec):
    """A task. Subclasses set the class attributes and override the methods that their type needs.

    `type_name` is the `icl_task_type` in YAML; further dataclass fields of a subclass are its own YAML keys. `content`
    is the result of `parse` for a row; its attribute `gold` is the index of the gold choice, the gold answer as text,
    or None. `older_metrics` are metric names of older llm-foundry YAML files that are accepted and ignored.
    """

    type_name: ClassVar[str]
    older_metrics: ClassVar[tuple[str, ...]] = ()
    generates: ClassVar[bool] = False  # the model generates text instead of scoring continuations
    runs_programs: ClassVar[bool] = False  # generations are programs
    compares_answers: ClassVar[bool] = False  # generations hold answers that are compared mathematically
    is_verbatim: ClassVar[bool] = False  # white space in generations is significant
    asks_variants: ClassVar[bool] = False  # each question in several ways, as SCORE does; subsets are of questions
    builds_requests: ClassVar[bool] = False  # by itself, with shots and token ids

    # The parts that a type defines: its metrics, how rows are read, how prompts look and how outputs are scored.

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics, the accuracy first; none for SCORE."""
        raise NotImplementedError

    def parse(self, row: Mapping[str, Any]) -> Any:
        """Return the content of a row. Raise RowError."""
        raise NotImplementedError

    def read(self, data_root: str) -> TaskRows:
        """Return all examples in the order of the data file. Raise DataError with every wrong row."""
        return TaskRows(examples=read_examples(self, data_root, self.parse))

    def files(self, data_root: str) -> tuple[Path, ...]:
        """Return the data files; none if the rows are not on this machine. Raise DataError for a missing file."""
        return () if '://' in self.dataset_uri else (locate(self.dataset_uri, data_root),)

    def shot(self, content: Any, first: bool) -> str:
        """Return the text of a few-shot example; `first` if nothing precedes it."""
        raise TypeError(f'{self.type_name} has no shots')

    def ask(self, content: Any, first: bool) -> Prompt:
        """Return the prompt without shots; `first` if no instruction or shot precedes it."""
        raise NotImplementedError

    def score(self, output: Any, content: Any) -> Score:
        """Score an output: log-probabilities of all continuations, or a generation up to its stop."""
        raise NotImplementedError

    def score_text(self, text: str, content: Any) -> Score | None:
        """Score text from another model that gives no log-probabilities; None if that is not possible."""
        return None

    # For types that generate.

    def responses(self, content: Any) -> tuple[str, ...]:
        """Return every correct generation in full."""
        return ()

    def gold_text(self, content: Any) -> str | None:
        """Return the right generation whose likelihood is scored, from the end of the prompt on; None if there is none.

        White space at its beginning is that which follows a prompt, where a shot has it.
        """
        return None

    def stops(self, contents: Sequence[Any]) -> StopRule:
        """Return the stop rule for the generations of all rows of the task."""
        return StopRule()

    def own_stops(self, stops: StopRule, content: Any) -> StopRule:
        """Return the stop rule for one row: that of all rows, unless the row itself tells where its generations end."""
        return stops

    def sampling(self, variant: str | None) -> Sampling:
        """Return how tokens are sampled; the defaults are those of transformers."""
        given = self.generation_kwargs or {}
        if not given.get('do_sample', False):
            return Sampling()
        return Sampling(
            temperature=float(given.get('temperature', 1.0)),
            top_p=float(given.get('top_p', 1.0)),
            top_k=given.get('top_k', TRANSFORMERS_TOP_K),
            seed=given.get('seed', self.fewshot_random_seed),
        )

    @property
    def default_max_new_tokens(self) -> int | None:
        """Return the token limit if the YAML gives none; None for the longest correct one plus `extra_tokens`."""
        return None

    @property
    def extra_tokens(self) -> int:
        """Return the number of tokens allowed beyond the longest correct generation."""
        return 0

    @property
    def uses_reference_answers(self) -> bool:
        """Return whether answers are extracted as the original software does, which knows no reasoning by default."""
        return self.reference

    def reasoning(self, prompt: str = '') -> Reasoning | None:
        """Return the reasoning that generations may have after a prompt, given by its end; None if all is answer."""
        if self.uses_reference_answers:
            return None
        markers = KNOWN_MARKERS if self.markers is None else self.markers
        return Reasoning(markers=markers, is_open=is_opened_by(prompt, markers))

    # For types that generate programs.

    def language(self, content: Any) -> str:
        """Return the programming language of a row."""
        raise NotImplementedError

    def score_program(self, output: Generation, content: Any, sandbox: Sandbox) -> Score:
        """Run a program and score it."""
        raise NotImplementedError

    # For types whose answers are compared mathematically, by the comparer of the evaluation.

    def score_compared(self, output: Generation, content: Any, comparer: Comparer) -> Score:
        """Compare the answer of a generation with the right one and score it."""
        raise NotImplementedError

    # For types that ask variants.

    def robustness(
        self, results: Sequence[ItemResult], comparer: Comparer | None, *, allow_missing: bool
    ) -> dict[str, PerturbationScore]:
        """Return the metrics of each perturbation; a type whose answers are compared requires the comparer."""
        return {}

    @property
    def perturbations_left_out(self) -> dict[str, str]:
        """Return the perturbations that were wanted but do not apply, with the reason."""
        return {}

    # For types that build their requests by themselves: what `ask` and `shot` return is of no effect.

    def texts_of_requests(self, examples: Sequence[Example], encoder: Encoder) -> Iterable[Any]:
        """Yield for each example all that its request is made of, by which cached token ids are found again."""
        raise NotImplementedError

    def encoded_items(self, examples: Sequence[Example], encoder: Encoder, *, max_seq_len: int) -> list[EncodedItem]:
        """Return the token ids of each of these examples. Raise DataError, ConfigError or ModelError."""
        raise NotImplementedError

    def request(self, example: Example, encoded: EncodedItem, encoder: Encoder, *, max_seq_len: int) -> Request:
        """Return the request of an example from its token ids."""
        raise NotImplementedError

    def max_new_tokens_of(self, content: Any) -> int:
        """Return the token limit of the generation of a row."""
        raise NotImplementedError

    # For all types.

    def choices(self, content: Any) -> tuple[str, ...]:
        """Return the texts of the choices of a row, of which records hold the lengths; none if the model generates."""
        return () if self.generates else self.ask(content, False).continuations

    def num_samples_of(self, content: Any) -> int:
        """Return the number of generations for the prompt of a row."""
        return self.num_samples

    def completed(self, results: Sequence[ItemResult], contents: Sequence[Any]) -> Sequence[ItemResult]:
        """Return the results of all items, once all are known, with what depends on several generations of a row."""
        return results

    @property
    def has_share(self) -> bool:
        """Return whether the first metric is a share, the higher the better, as composites need it."""
        return True

    @property
    def dataset_name(self) -> str:
        """Return the name of the data in records, metric keys and messages."""
        return self.dataset_uri

    @property
    def definition(self) -> dict[str, Any]:
        """Return what results.json holds of the task, from which it is read back."""
        return self.keys

    def chance(self, results: Sequence[ItemResult]) -> float | None:
        """Return the accuracy of guessing among the choices, the mean over items; None for a task without choices."""
        num_choices = [len(result.num_characters or ()) for result in results]
        shares = [1 / number for number in num_choices if number > 1]
        return fmean(shares) if shares else None

    @property
    def setting_of_default_limit(self) -> str:
        """Return which setting `default_max_new_tokens` is from, or which one replaces it."""
        return 'the default; generation_kwargs.max_new_tokens sets another'

    @property
    def has_shots(self) -> bool:
        """Return whether prompts of this type can hold shots."""
        return type(self).shot is not Task.shot

    def item_key(self, example: Example, sample: int = 0) -> ItemKey:
        """Return the key of the item made of an example."""
        return ItemKey(task=self.key, row=example.row, file=example.file, variant=example.variant, sample=sample)

    def with_settings(self, settings: EvaluationSettings) -> Self:
        """Return the task bound to an evaluation's settings; types unknown to llm-foundry drop shots by default."""
        truncation = settings.effective_truncation if self.is_in_llm_foundry else settings.truncation or 'drop_shots'
        return replace(
            self,
            semantics=settings.semantics,
            fewshot=settings.fewshot,
            truncation=truncation,
            apply_chat_template=settings.apply_chat_template,
            chat_format=settings.chat_format,
            markers=settings.markers,
        )

    # Prompts.

    def prompt(self, example: Example, shots: Sequence[Example] = ()) -> Prompt:
        """Return the prompt of an example after these shots, in order."""
        preamble = self.prompt_string
        turns = []
        for shot in shots:
            if self.apply_chat_template and self.chat_format.shots_as_turns:
                question, answer = self.turn(shot.content, not preamble)
                turns.append((preamble + question, answer))
                preamble = ''  # the instruction is in the first message
            else:
                preamble += self.shot(shot.content, not preamble)
        prompt = self.ask(example.content, not preamble)
        return replace(self.sent(prompt), preamble=preamble, num_shots=len(shots), turns=tuple(turns))

    def sent(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the settings that say how it is sent."""
        in_chat = self.apply_chat_template if prompt.chat_template is None else prompt.chat_template
        return replace(prompt, chat_template=in_chat, chat_format=self.chat_format, as_reference=self.reference)

    def turn(self, content: Any, first: bool) -> tuple[str, str]:
        """Return a few-shot example as a question and its answer. Raise ConfigError if its text has no such parts."""
        text = self.shot(content, first)
        contexts = self.ask(content, first).contexts
        context = contexts[content.gold] if len(contexts) > 1 else contexts[0]
        if not text.startswith(context):
            raise ConfigError(
                f'{self.key}: fewshot_as_turns: a shot of the type {self.type_name} does not begin with its question; '
                'leave it out'
            )
        answer = text[len(context) :]
        return context, answer if self.is_verbatim else answer.strip()

    # The choice of shots.

    def examples_with_shots(
        self, examples: Sequence[Example], asked: Sequence[Example]
    ) -> Iterator[tuple[Example, tuple[Example, ...]]]:
        """Yield the `asked` examples, category by category, each with its shots drawn from all examples."""
        # The generator of llm-foundry's shots runs through all examples, so those that are not asked are drawn too.
        pairs = with_shots(examples, self.draw_shots)
        if len(asked) == len(examples):
            return pairs
        asked_keys = {self.item_key(example) for example in asked}
        return ((example, shots) for example, shots in pairs if self.item_key(example) in asked_keys)

    def draw_shots(self, members: Sequence[Example]) -> Iterator[tuple[int, ...]]:
        """Yield the indices of the shots of each of these examples, all those of a category."""
        (num_shots,) = self.num_fewshot
        if num_shots == 0:
            return iter([()] * len(members))
        if self.fewshot == 'fixed':
            questions = [self.ask(member.content, False).contexts for member in members]
            return fixed_indices(questions, num_shots, seed=self.fewshot_random_seed)
        # llm-foundry never draws an item itself, but does draw other rows that ask the same question.
        drawn = fewshot_indices(len(members), num_shots, seed=self.fewshot_random_seed)
        if self.reference:
            return drawn
        return redrawn_indices(
            drawn,
            [self.question(member.content) for member in members],
            lambda index: self.shot(members[index].content, False),
            seed=self.fewshot_random_seed,
        )

    def question(self, content: Any) -> str:
        """Return the text by which two rows are known to ask the same, whatever their white space."""
        return '\0'.join(' '.join(context.split()) for context in self.ask(content, False).contexts)

    def own_questions(self, examples: Sequence[Example], asked: Sequence[Example]) -> list[Example]:
        """Return those of the `asked` examples whose own question is among the shots that llm-foundry draws."""
        if not self.has_shots or self.num_fewshot == (0,) or self.fewshot == 'fixed':
            return []
        (num_shots,) = self.num_fewshot
        own: list[Example] = []
        for members in by_category(examples).values():
            questions = [self.question(member.content) for member in members]
            indices = shown_own_question(questions, num_shots, seed=self.fewshot_random_seed)
            own += [members[index] for index in indices]
        asked_keys = {self.item_key(example) for example in asked}
        return [example for example in own if self.item_key(example) in asked_keys]

    # Texts of prompts, for the `shot` and `ask` of types.

    def part(self, context: str, first: bool) -> str:
        """Return a context with the task's delimiters, the start of a shot or of the question."""
        return ('' if first else self.example_delimiter) + self.prelimiter + context + self.continuation_delimiter

    def strip_end(self, text: str) -> str:
        """Return a text without trailing white space, unless the task has `strip_dataset: false`."""
        return text.rstrip() if self.strip_dataset else text


def draw_seed(sampling: Sampling, key: ItemKey) -> int:
    """Return the seed of one generation, 31 bits as servers accept, from the task's seed and the item's key."""
    words = (sampling.seed, key.task, key.file, key.row, key.variant, key.sample)
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:4], 'big') >> 1


def fewshot_indices(num_examples: int, num_shots: int, *, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each example in order, the indices of its shots, never its own; fewer if there are too few others.

    The draws and their order, a set's iteration order included, follow llm-foundry 0.22
    (`eval/datasets/utils.py:get_fewshot_sample_idxs`): one generator runs through all examples.
    """
    rng = random.Random(seed)
    num_shots = min(num_shots, num_examples - 1)
    if num_shots == 0:
        yield from ((),) * num_examples
        return
    for index in range(num_examples):
        chosen = set(rng.sample(range(num_examples), num_shots))
        if index in chosen:
            chosen.remove(index)
            replacement = rng.choice(range(num_examples))
            while replacement in chosen or replacement == index:
                replacement = rng.choice(range(num_examples))
            chosen.add(replacement)
        yield tuple(chosen)


def fixed_indices(questions: Sequence[Hashable], num_shots: int, *, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each question in order, the same `num_shots` indices, drawn once; fewer if there are too few others.

    They are drawn from the distinct questions, with a spare that replaces a shot equal to the item's own question. So
    no item is shown the answer to its own question, even if the question is repeated.
    """
    first_index_of: dict[Hashable, int] = {}
    for index, question in enumerate(questions):
        first_index_of.setdefault(question, index)
    distinct = list(first_index_of.values())
    num_drawn = min(num_shots + 1, len(distinct))
    *shots, spare = random.Random(seed).sample(distinct, num_drawn)
    for question in questions:
        yield tuple(spare if questions[shot] == question else shot for shot in shots)


def redrawn_indices(
    drawn: Iterable[tuple[int, ...]], questions: Sequence[str], shot_of: Callable[[int], str], *, seed: int
) -> Iterator[tuple[int, ...]]:
    """Yield the drawn indices of each question's shots, with others in place of those that ask the same question.

    Each question has a generator of its own, so the shots of all others stay as they are. If all other questions are
    shots already, a shot equal to the item's own, as `shot_of` an index shows it, is left out, and one that gives
    another answer stays: its question may be no more than an instruction that all rows share.
    """
    num_rows_of = Counter(questions)
    for item, indices in enumerate(drawn):
        question = questions[item]
        own = {index for index in indices if questions[index] == question}
        if not own:
            yield indices
            continue
        rng = random.Random(f'{seed}/{item}')
        taken = set(indices)
        # The rows that may still be drawn: of another question, and no shot yet.
        num_left = len(questions) - num_rows_of[question] - len(taken - own)
        shots = []
        for index in indices:
            if index not in own:
                shots.append(index)
            elif num_left > 0:
                replacement = rng.randrange(len(questions))
                while replacement in taken or questions[replacement] == question:
                    replacement = rng.randrange(len(questions))
                shots.append(replacement)
                taken.add(replacement)
                num_left -= 1
            elif shot_of(index) != shot_of(item):
                shots.append(index)
        yield tuple(shots)


def shown_own_question(questions: Sequence[str], num_shots: int, *, seed: int) -> list[int]:
    """Return the indices of those questions that llm-foundry draws as one of their own shots, from a duplicate row."""
    num_rows_of = Counter(questions)
    # Data without duplicates, nearly all there is, needs no draw.
    if len(num_rows_of) == len(questions):
        return []
    drawn = fewshot_indices(len(questions), num_shots, seed=seed)
    own = []
    for item, (question, indices) in enumerate(zip(questions, drawn, strict=True)):
        if num_rows_of[question] > 1 and any(questions[index] == question for index in indices):
            own.append(item)
    return own


def by_category(examples: Sequence[Example]) -> dict[str | None, list[Example]]:
    """Return the examples of each category, in their order."""
    categories: dict[str | None, list[Example]] = {}
    for example in examples:
        categories.setdefault(example.category, []).append(example)
    return categories


def with_shots(
    examples: Sequence[Example], draw: Callable[[Sequence[Example]], Iterator[tuple[int, ...]]]
) -> Iterator[tuple[Example, tuple[Example, ...]]]:
    """Yield each example with its shots, drawn within its category; categories are sorted.

    `draw` yields the indices of the shots of each example of a category.
    """
    categories = by_category(examples)
    names = sorted(categories, key=lambda name: name or '')
    # Each category is a dataset of its own in llm-foundry, so it draws shots from its own rows, from the seed on.
    for name in names:
        members = categories[name]
        for example, indices in zip(members, draw(members), strict=True):
            yield example, tuple(members[index] for index in indices)
