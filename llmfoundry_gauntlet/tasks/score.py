"""SCORE's task types: lettered questions answered by generation or by likelihood, and problems with boxed answers."""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmfoundry_gauntlet.config.score import (
    AGIEVAL,
    LIKELIHOOD,
    MMLU_PRO,
    PERTURBATIONS,
    REFERENCE,
    ScoreSpec,
)
from llmfoundry_gauntlet.data.examples import TaskRows, subset
from llmfoundry_gauntlet.data.readers import RowError
from llmfoundry_gauntlet.data.score_rows import (
    FILES,
    LETTERS,
    MathQuestion,
    as_lettered,
    find_files,
    oddity_warnings,
    option_oddities,
    read_score_rows,
)
from llmfoundry_gauntlet.errors import ConfigError, DataError, describe
from llmfoundry_gauntlet.metrics.consistency import (
    PerturbationScore,
    QuestionKey,
    VariantResult,
    by_question,
    perturbation_score,
    reference_consistency_rate,
    variant_order,
)
from llmfoundry_gauntlet.metrics.metrics import Metric
from llmfoundry_gauntlet.scoring.letters import reference_letter, tolerant_letter
from llmfoundry_gauntlet.scoring.likelihood import score_choice
from llmfoundry_gauntlet.scoring.mathematics import (
    Comparer,
    answer_of,
    boxed,
    gold_of,
    reference_answer_of,
    reference_gold_of,
)
from llmfoundry_gauntlet.scoring.text import NON_FINITE_GENERATION
from llmfoundry_gauntlet.tasks.base import TRUNCATED_REASON, Task
from llmfoundry_gauntlet.tasks.multiple_choice import Choices, MultipleChoiceTask
from llmfoundry_gauntlet.tasks.templates import (
    Posed,
    Template,
    perturbation_of,
    prompts_file,
    read_json,
    read_templates,
    seed_of,
    variants,
)
from llmfoundry_gauntlet.types import Example, Generation, ItemResult, Prompt, Sampling, Score, ScoreOutput

if TYPE_CHECKING:
    from llmfoundry_gauntlet.config.settings import EvaluationSettings

REFERENCE_LABELS = {MMLU_PRO: 'ABCDEFGHIJ', AGIEVAL: 'ABCD'}  # to which the paper's reference moves the gold option

# Facts of a lettered question's item: the chosen option's text, the gold option's label in the data, and the number of
# options. Where options of a question have the same text, also the first label of each one's text, in the order of the
# data: 'ABA' if the third option repeats the first.
OPTION, OWN_GOLD, NUM_OPTIONS = 'option', 'own_gold', 'num_options'
FIRST_LABELS = 'first_labels'
LEAD = 'The best answer is'
UNKNOWN = 'unknown'  # where the rows of a task are that is not given
UNPARSED = 'no answer found in the generation'
FIX_TABLE = 'to_be_fixed_questions.json'


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """The functions that compare two answers to a question, an earlier with a later one, which may be None.

    `equal` is ours, and symmetric; `reference` is that of the reference's consistency rate.
    """

    equal: Callable[[str, str | None], bool] = operator.eq
    reference: Callable[[str, str | None], bool] = operator.eq


SAME_TEXT = Equality()


def mathematical_equality(variants: Sequence[VariantResult], comparer: Comparer, *, by_reference: bool) -> Equality:
    """Return equality by the comparer, which compares now, in batches, all answers that are compared later.

    That is faster than one by one. With `by_reference` the reference's rate takes the reference's equality too.
    """
    pairs: dict[tuple[str, str], None] = {}
    earlier_and_later: dict[tuple[str | None, str | None], None] = {}
    for group in by_question(variants).values():
        # Our equality is symmetric, so one order of each pair is enough.
        answers = sorted({result.answer for result in group if result.answer is not None})
        pairs.update(dict.fromkeys(combinations(answers, 2)))
        # The reference's is not: it compares an earlier variant with a later one.
        in_order = sorted(group, key=lambda result: variant_order(result.variant))
        reference_answers = [result.reference_answer for result in in_order]
        earlier_and_later.update(dict.fromkeys(combinations(reference_answers, 2)))
    comparer.equal_many(pairs)
    comparer.equal_many(earlier_and_later, reference=by_reference)

    def equal(one: str, other: str | None) -> bool:
        return one == other or comparer.equal(one, other)

    if not by_reference:
        return Equality(equal=equal, reference=equal)
    return Equality(equal=equal, reference=functools.partial(comparer.equal, reference=True))


def score_of(
    task: ScoreTask, results: Sequence[ItemResult], comparer: Comparer | None, *, allow_missing: bool
) -> PerturbationScore:
    """Return the metrics of one perturbation; answers to MATH problems are compared by the comparer."""
    spec = task.spec
    variants = [variant_result(result, is_math=spec.is_math) for result in results]
    equality = SAME_TEXT
    if spec.is_math:
        assert comparer is not None
        equality = mathematical_equality(variants, comparer, by_reference=spec.answer_extraction == REFERENCE)
    own_labels: dict[QuestionKey, str] = {
        (result.key.file, result.key.row): str(result.facts[OWN_GOLD]) for result in results if OWN_GOLD in result.facts
    }
    longest = max((int(result.facts.get(NUM_OPTIONS, 0)) for result in results), default=0)
    reference = reference_consistency_rate(
        variants,
        labels=REFERENCE_LABELS.get(spec.dataset, LETTERS[:longest]),
        own_labels=own_labels,
        equal=equality.reference,
    )
    return perturbation_score(
        variants,
        macro=task.is_macro,
        equal=equality.equal,
        reference_consistency=reference,
        allow_missing=allow_missing,
    )


def variant_result(result: ItemResult, *, is_math: bool) -> VariantResult:
    """Return the part of an item result that is compared with other variants of its question."""
    shared: dict[str, Any] = {
        'question': (result.key.file, result.key.row),
        'category': result.category,
        'variant': result.key.variant,
        'score': result.score,
        'cluster': int(result.cluster, 16) if result.cluster else None,
    }
    if is_math:
        reference = None if result.text is None else reference_answer_of(result.text)
        answer = result.answer or None  # an empty box is none
        return VariantResult(**shared, gold='', answer=answer, reference_answer=reference)
    assert isinstance(result.gold, int)  # a lettered question's
    letter = None if result.predicted is None else LETTERS[result.predicted]
    chosen = result.facts.get(OPTION)
    return VariantResult(
        **shared,
        gold=LETTERS[result.gold],
        answer=None if chosen is None else str(chosen),
        reference_answer=letter if result.text is None else reference_letter(result.text),
        options=options_of_variant(result),
    )


def options_of_variant(result: ItemResult) -> str:
    """Return a letter for the text of each option, in the order of the variant; '' of an item that is unscored."""
    if OWN_GOLD not in result.facts:
        return ''
    assert isinstance(result.gold, int)  # a lettered question's
    of_data = str(result.facts.get(FIRST_LABELS, LETTERS[: int(result.facts[NUM_OPTIONS])]))
    own_gold = LETTERS.index(str(result.facts[OWN_GOLD]))
    options = list(of_data)
    options[own_gold], options[result.gold] = options[result.gold], options[own_gold]
    return ''.join(options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTask(Task):
    """One of SCORE's datasets, or a multiple_choice task; `name` is that of the dataset, or the task's label.

    `source` is the task whose rows are perturbed; None for SCORE's own datasets, and if the task is not given.
    """

    is_in_llm_foundry: ClassVar[bool] = False
    is_verbatim: ClassVar[bool] = True
    asks_variants: ClassVar[bool] = True

    name: str
    spec: ScoreSpec
    source: Task | None

    @property
    def has_rows(self) -> bool:
        """Return whether there are rows: SCORE's own dataset, or those of a `source`."""
        return self.source is not None or self.spec.task_label is None

    @property
    def dataset_name(self) -> str:
        """Return the name of the dataset."""
        return self.name

    @property
    def definition(self) -> dict[str, Any]:
        """Return the values of all YAML keys of its entry."""
        return asdict(self.spec)

    @property
    def keys(self) -> dict[str, Any]:
        """Return the values of all YAML keys, defaults included."""
        return {**self.definition, 'source': None if self.source is None else self.source.keys}

    @property
    def uses_reference_answers(self) -> bool:
        """Return whether the paper's code extracts answers."""
        return self.spec.answer_extraction == REFERENCE

    def with_settings(self, settings: EvaluationSettings) -> Self:
        """Return the task bound to an evaluation's settings, with at most as many questions as these allow."""
        task = Task.with_settings(self, settings)
        most = settings.subset_items
        if most is None:
            return task
        fewer = min(self.spec.subset_items or most, most)
        return replace(task, spec=replace(self.spec, subset_items=fewer))

    def metrics(self) -> tuple[Metric, ...]:
        """Return no metrics: accuracy and consistency are those of `robustness`."""
        return ()

    def read(self, data_root: str) -> TaskRows:
        """Return every question in all its variants. Raise ConfigError or DataError."""
        spec = self.spec
        templates = read_templates(spec, data_root)
        rows = read_score_rows(spec, data_root) if spec.task_label is None else read_source(self, data_root)
        examples = subset(rows.examples, spec.subset_items)
        if spec.is_math:
            examples = with_golds(spec, examples, data_root)
        in_all_variants = [variant for example in examples for variant in variants(example, spec, templates)]
        return replace(rows, examples=in_all_variants)

    def files(self, data_root: str) -> tuple[Path, ...]:
        """Return the data files that exist. Raise DataError if none does."""
        return tuple(find_files(self.spec, data_root)[0]) if self.source is None else self.source.files(data_root)

    def ask(self, content: Any, first: bool) -> Prompt:
        """Return the prompt of a generation."""
        return Prompt(contexts=(content.text,), chat_template=self.spec.chat_template)

    def sampling(self, variant: str | None) -> Sampling:
        """Return greedy decoding, or sampling with the seed of a variant."""
        seed = seed_of(variant)
        return Sampling() if seed is None else Sampling(temperature=self.spec.temperature, seed=seed)

    @property
    def default_max_new_tokens(self) -> int | None:
        """Return the token limit of a generation."""
        return self.spec.max_new_tokens

    @property
    def setting_of_default_limit(self) -> str:
        """Return the key of the entry that sets the token limit."""
        return 'max_new_tokens'

    @property
    def perturbations_left_out(self) -> dict[str, str]:
        """Return the perturbations that were wanted but do not apply, with the reason."""
        wanted = self.spec.perturbations or PERTURBATIONS
        return {name: reason for name, reason in self.spec.does_not_apply.items() if name in wanted}

    def chance(self, results: Sequence[ItemResult]) -> float | None:
        """Return the accuracy of guessing among the options, the mean over questions; None without options.

        For MMLU-Pro it is the mean over questions of a category, then over categories.
        """
        shares: dict[QuestionKey, float] = {}
        categories: dict[QuestionKey, str | None] = {}
        for result in results:
            num_options = int(result.facts.get(NUM_OPTIONS, 0))
            if num_options:
                question = result.key.file, result.key.row
                shares[question] = 1 / num_options
                categories[question] = result.category if self.is_macro else None
        shares_of_category: dict[str | None, list[float]] = {}
        for question, share in shares.items():
            shares_of_category.setdefault(categories[question], []).append(share)
        if not shares:
            return None
        means = [fmean(of_category) for of_category in shares_of_category.values()]
        return fmean(means)

    @property
    def is_macro(self) -> bool:
        """Return whether accuracies are means over categories."""
        return self.spec.dataset == MMLU_PRO

    def robustness(
        self, results: Sequence[ItemResult], comparer: Comparer | None, *, allow_missing: bool = False
    ) -> dict[str, PerturbationScore]:
        """Return the metrics of each perturbation from the results of all variants."""
        by_perturbation: dict[str, list[ItemResult]] = {name: [] for name in self.spec.applied}
        for result in results:
            by_perturbation[perturbation_of(result.key.variant or '')].append(result)
        scores = {}
        for name, of_perturbation in by_perturbation.items():
            scores[name] = score_of(self, of_perturbation, comparer, allow_missing=allow_missing)
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class LettersTask(ScoreTask):
    """Generate the letter of an option."""

    type_name: ClassVar[str] = 'score_choices'
    generates: ClassVar[bool] = True

    def score(self, output: Generation, content: Posed) -> Score:
        """Score 1 if the generation chooses the gold letter."""
        if not output.is_finite:
            return Score.unscored(NON_FINITE_GENERATION)
        if self.spec.answer_extraction == REFERENCE:
            extracted = reference_letter(output.text)
            is_option = len(extracted) == 1 and extracted in LETTERS[: len(content.options)]
            letter = extracted if is_option else None
        else:
            letter = tolerant_letter(output.text, content.options)
        return score_letter(letter, content, reason(output, letter))


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelihoodTask(ScoreTask):
    """Score the letters of all options after the start of an answer."""

    type_name: ClassVar[str] = 'score_likelihood'

    def ask(self, content: Posed, first: bool) -> Prompt:
        """Return the prompt and the start of its answer; every letter is scored."""
        letters = tuple(f' {letter}' for letter in LETTERS[: len(content.options)])
        return replace(ScoreTask.ask(self, content, first), continuations=letters, lead=LEAD)

    def score(self, output: ScoreOutput, content: Posed) -> Score:
        """Score 1 if the gold letter is the most probable one."""
        score = score_choice(output, content.gold, reference=False)
        if score.predicted is None:
            return score
        facts = facts_of(content, score.predicted)
        return replace(score, answer=LETTERS[score.predicted], facts=facts)

    def score_text(self, text: str, content: Posed) -> Score:
        """Score the letter that another model's generation chooses."""
        letter = tolerant_letter(text, content.options)
        return score_letter(letter, content, UNPARSED if letter is None else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathTask(ScoreTask):
    """Generate a boxed answer."""

    type_name: ClassVar[str] = 'score_math'
    generates: ClassVar[bool] = True
    compares_answers: ClassVar[bool] = True

    def score_compared(self, output: Generation, content: Posed, comparer: Comparer) -> Score:
        """Score 1 if the boxed answer is mathematically equal to the gold answer."""
        if not output.is_finite:
            return Score.unscored(NON_FINITE_GENERATION)
        reference = self.spec.answer_extraction == REFERENCE
        if reference:
            answer = reference_answer_of(output.text)
        else:
            answer = answer_of(output.text, placeholders_of(content.template))
        right = comparer.equal(answer, content.gold, reference=reference)
        answer = answer or None  # an empty box is no answer, though the reference may score it as correct
        return Score(value=float(right), answer=answer, reason=reason(output, answer))


@functools.cache
def placeholders_of(template: Template) -> tuple[str, ...]:
    """Return what a prompt writes into a box in place of the answer; a number would be an example."""
    return tuple(content for content in boxed(template.text('')) if not re.search(r'\d', content))


def score_task(spec: ScoreSpec, tasks: Sequence[Task]) -> ScoreTask:
    """Return the task of a SCORE dataset; `tasks` contains the task whose label is `spec.dataset`, if it is one."""
    kind: type[ScoreTask] = LettersTask
    if spec.is_math:
        kind = MathTask
    elif spec.answers == LIKELIHOOD:
        kind = LikelihoodTask
    source = next((task for task in tasks if task.label == spec.dataset), None)
    return kind(
        label=spec.label,
        dataset_uri=location_of(spec, source),
        icl_task_type=kind.type_name,
        num_fewshot=(0,),
        name=spec.dataset,
        spec=spec,
        source=source,
    )


def location_of(spec: ScoreSpec, source: Task | None) -> str:
    """Return where the rows are: the file or folder of SCORE's own dataset, or the file of the source."""
    if spec.task_label is None:
        return os.path.commonpath(FILES[spec.dataset])
    return UNKNOWN if source is None else source.dataset_uri


def read_source(task: ScoreTask, data_root: str) -> TaskRows:
    """Return the questions of a multiple_choice task. Raise DataError."""
    oddities, problems, examples = [], [], []
    assert isinstance(task.source, MultipleChoiceTask)  # see `check_labels`
    uri = task.source.dataset_uri
    for example in task.source.read(data_root).examples:
        content: Choices = example.content
        place = f'{uri}:{example.row + 1}'
        try:
            question = as_lettered(content.query, content.choices, content.gold, example.category or '')
        except RowError as error:
            problems.append(f'{task.label}: {place}: {error}')
            continue
        oddities += [(oddity, place) for oddity in option_oddities(question)]
        examples.append(replace(example, content=question))
    if problems:
        raise DataError(problems)
    return TaskRows(examples=examples, warnings=oddity_warnings(oddities))


def with_golds(spec: ScoreSpec, examples: list[Example], data_root: str) -> list[Example]:
    """Return problems of MATH with their gold answers. Raise DataError for a solution without one."""
    fixes = read_fixes(spec, data_root)
    extract: Callable[..., str] = reference_gold_of if spec.answer_extraction == REFERENCE else gold_of
    problems: list[str] = []
    with_gold: list[Example] = []
    for example in examples:
        question: MathQuestion = example.content
        try:
            gold = extract(question.text, question.solution, fixes)
        except ValueError as error:
            problems.append(f'{spec.label}: {example.file}.jsonl:{example.row + 1}: {error}')
            continue
        with_gold.append(replace(example, content=replace(question, gold=gold)))
    if problems:
        raise DataError(problems)
    return with_gold


def read_fixes(spec: ScoreSpec, data_root: str) -> Mapping[str, str] | None:
    """Return gold answers by problem that replace those of the solutions; None without a table. Raise ConfigError."""
    path = prompts_file(spec, data_root).parent / FIX_TABLE
    if spec.fix_table is not None:
        path = Path(spec.fix_table)
    elif not path.is_file():
        return None
    entries = read_json(path)
    is_table = isinstance(entries, list) and all(
        isinstance(entry, Mapping) and isinstance(entry.get('problem'), str) and isinstance(entry.get('answer'), str)
        for entry in entries
    )
    if not is_table:
        raise ConfigError(f"{path}: is {describe(entries)}; allowed: a list of mappings with 'problem' and 'answer'")
    return {entry['problem']: entry['answer'] for entry in entries}


def score_letter(letter: str | None, content: Posed, why: str | None) -> Score:
    """Score 1 if a letter is the gold one."""
    predicted = None if letter is None else LETTERS.index(letter)
    return Score(
        value=float(predicted == content.gold),
        predicted=predicted,
        answer=letter,
        reason=why,
        facts=facts_of(content, predicted),
    )


def facts_of(content: Posed, predicted: int | None) -> dict[str, str | int]:
    """Return the facts of an item that `robustness` needs."""
    facts: dict[str, str | int] = {OWN_GOLD: LETTERS[content.own_gold], NUM_OPTIONS: len(content.options)}
    if len(set(content.options)) < len(content.options):
        facts[FIRST_LABELS] = first_labels(content)
    if predicted is not None:
        facts[OPTION] = content.options[predicted]
    return facts


def first_labels(content: Posed) -> str:
    """Return for each option, in the order of the data, the label of the first one with the same text."""
    of_data = list(content.options)
    # A variant has the gold option in the place of another.
    of_data[content.own_gold], of_data[content.gold] = of_data[content.gold], of_data[content.own_gold]
    return ''.join(LETTERS[of_data.index(option)] for option in of_data)


def reason(output: Generation, answer: str | None) -> str | None:
    """Return the remarks on a generation, if there are any."""
    reasons = [UNPARSED] if answer is None else []
    if output.is_truncated:
        reasons.append(TRUNCATED_REASON)
    return '; '.join(reasons) or None
