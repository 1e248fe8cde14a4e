"""Code evaluation: the model writes the rest of a program, which is run against its problem's test.

The accuracy is pass@1: the share of programs that pass. `pass_at_k` wants further ones of the same programs. Programs
are drawn `generations_per_sample` times for each problem, as in Composer 0.17, which ended them as here in Python.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.config.decode import describe
from llmfoundry_gauntlet.config.specs import TaskSpec
from llmfoundry_gauntlet.data.fields import RowError, optional_text_field, optional_texts_field, text_field
from llmfoundry_gauntlet.judging.code.languages import LANGUAGES, PYTHON
from llmfoundry_gauntlet.judging.code.programs import Program, make_program
from llmfoundry_gauntlet.judging.code.sandbox import Sandbox
from llmfoundry_gauntlet.judging.code.verdicts import CannotJudge
from llmfoundry_gauntlet.judging.text import NON_FINITE_REPLY
from llmfoundry_gauntlet.scores.metrics import accuracy, mark, passes_at
from llmfoundry_gauntlet.tasks.base import CUT, CUT_SHARE, Programs, Replies, TaskType, part, rows_by
from llmfoundry_gauntlet.values import Generation, Judgement, Question, Sampling, StopRule

CODE = 'code_evaluation'
RULES = ('test', 'io_pairs')
MOST_TOKENS = 1024  # of a program, where the task does not say
TOP_P, TOP_K = 0.95, 40
NEW_STATEMENT = tuple(f'\n{letter}' for letter in string.ascii_letters + string.digits + '#`')


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask(TaskSpec):
    """How many programs are drawn for a problem (`generations_per_sample`, or `num_beams`, its older name), and how.

    `rule` is what runs them: the problem's test, or pairs of inputs and outputs. `pass_at_k` is a number, or several.
    """

    pass_at_k: Any = None
    num_beams: int | None = None
    generations_per_sample: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    rule: str | None = None

    def __post_init__(self) -> None:
        TaskSpec.__post_init__(self)
        for name in ('generations_per_sample', 'num_beams'):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f'{name}: is {value}; allowed: 1 or more')
        check_passes(self)
        if self.rule is not None and self.rule not in RULES:
            raise ValueError(f'rule: is {self.rule!r}; allowed: {", ".join(RULES)}')
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ValueError(f'temperature: is {self.temperature:g}; allowed: 0 (the most probable tokens) or more')
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f'top_p: is {self.top_p:g}; allowed: a number above 0, 1 at most')
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f'top_k: is {self.top_k}; allowed: 0 (all tokens) or more')
        for key in self.generation_kwargs or {}:
            if key not in ('max_new_tokens', 'seed'):
                raise ValueError(f'generation_kwargs.{key}: belongs into the task itself: {key}')

    @property
    def strips_rows(self) -> bool:
        """No: white space is a part of programs."""
        return False

    @property
    def num_samples(self) -> int:
        """Programs for each problem."""
        return self.generations_per_sample or self.num_beams or 1

    @property
    def draws_replies(self) -> bool:
        """Yes, as `temperature` has it."""
        return True

    @property
    def passes_at(self) -> tuple[int, ...]:
        """The k of every pass@k that is wanted."""
        if self.pass_at_k is None:
            return (1,)
        return tuple(self.pass_at_k) if isinstance(self.pass_at_k, (list, tuple)) else (self.pass_at_k,)


def check_passes(task: CodeTask) -> None:
    """Raises ValueError where pass@k is wanted wrongly."""
    for k in task.passes_at:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(
                f'pass_at_k: is {task.pass_at_k!r}; allowed: a whole number of 1 or more, or a list of them'
            )
        if k > task.num_samples:
            raise ValueError(
                f'pass_at_k: is {k}, but generations_per_sample is {task.num_samples}; '
                f'allowed: {task.num_samples} or less'
            )
    if len(set(task.passes_at)) < len(task.passes_at) or not task.passes_at:
        raise ValueError(f'pass_at_k: is {task.pass_at_k!r}; allowed: different numbers, one at least')


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A row: `{"prompt", "entry_point", "canonical_solution", "test", "test_inputs", "test_outputs", "language"}`."""

    prompt: str
    entry_point: str
    solution: str
    test: str
    pairs: tuple[tuple[str, str], ...]
    language: str

    @property
    def gold(self) -> None:
        """There is no one right answer."""
        return None

    def program(self, task: CodeTask, reference: bool) -> Program:
        """What a completion is run against: the test, or pairs of inputs and outputs as Composer 0.17 had it."""
        rule = task.rule or ('io_pairs' if reference else 'test')
        return make_program(
            language=self.language,
            prompt=self.prompt,
            entry_point=self.entry_point,
            test=self.test,
            pairs=self.pairs if rule == 'io_pairs' else None,
            joins_lines=not reference,
        )


def parse(row: Mapping[str, Any], task: CodeTask) -> CodeProblem:
    """A checked row."""
    language = text_field(row, 'language') if 'language' in row else PYTHON
    if language not in LANGUAGES:
        raise RowError(f'language is {describe(language)}; allowed: {", ".join(LANGUAGES)}')
    inputs, outputs = optional_texts_field(row, 'test_inputs'), optional_texts_field(row, 'test_outputs')
    if len(inputs) != len(outputs):
        raise RowError(f'there are {len(inputs)} test_inputs and {len(outputs)} test_outputs; allowed: equally many')
    if task.rule == 'io_pairs' and not inputs:
        raise RowError('there are no test_inputs, which rule: io_pairs needs')
    return CodeProblem(
        prompt=text_field(row, 'prompt', allow_empty=False),
        entry_point=text_field(row, 'entry_point', allow_empty=False),
        solution=optional_text_field(row, 'canonical_solution') or '',
        test=text_field(row, 'test', allow_empty=task.rule == 'io_pairs'),
        pairs=tuple(zip(inputs, outputs, strict=True)),
        language=language,
    )


def shot(content: CodeProblem, task: CodeTask, first: bool) -> str:
    """The problem and its solution."""
    return part(task, content.prompt, first).removesuffix(task.continuation_delimiter) + content.solution


def ask(content: CodeProblem, task: CodeTask, first: bool) -> Question:
    """The problem, to its last character: what is written goes on from there."""
    text = ('' if first else task.example_delimiter) + task.prelimiter + content.prompt
    return Question(contexts=(text,), continuations=())


def responses(content: CodeProblem, task: CodeTask) -> tuple[str, ...]:
    """The solution that the data have."""
    return (content.solution,)


def stops(task: CodeTask, contents: Sequence[CodeProblem], reference: bool) -> StopRule:
    """In languages with braces the function's own closing brace ends a program, in others (Python) a line that begins
    with a letter, a digit, '#' or '`'. With `reference` the second rule is every language's.
    """
    if reference or not all(LANGUAGES[content.language].has_braces for content in contents):
        return StopRule(strings=NEW_STATEMENT)
    return StopRule(closes_block=True)


def judge_program(
    output: Generation, content: CodeProblem, task: CodeTask, reference: bool, sandbox: Sandbox
) -> Judgement:
    """Whether a program passes. Our own failure to run it leaves it unscored."""
    from llmfoundry_gauntlet.judging.code.judge import judge  # late, as no YAML file needs the compilers to be read

    if not output.is_finite and not reference:
        return Judgement.unscored(NON_FINITE_REPLY)
    try:
        verdict = judge(content.program(task, reference), output.text, sandbox)
    except (CannotJudge, OSError) as error:
        return Judgement.unscored(f'the program could not be run: {error}')
    reasons = [verdict.reason] if verdict.reason else []
    if output.is_cut:
        reasons.append(CUT)
    marks = {} if output.is_cut is None else {CUT_SHARE: float(output.is_cut)}
    return Judgement(credit=float(verdict.passed), reason='; '.join(reasons) or None, marks=marks)


def sampling(task: CodeTask, variant: str | None) -> Sampling:
    """How a task's programs are drawn. What it does not say is as in Composer 0.17; temperature 0 draws nothing."""
    if task.temperature == 0:
        return Sampling()
    return Sampling(
        temperature=1.0 if task.temperature is None else task.temperature,
        top_p=TOP_P if task.top_p is None else task.top_p,
        top_k=TOP_K if task.top_k is None else task.top_k,
        seed=(task.generation_kwargs or {}).get('seed', task.fewshot_random_seed),
    )


TASK_TYPE = TaskType(
    name=CODE,
    keys=CodeTask,
    metrics=lambda task: (accuracy('InContextLearningCodeEvalAccuracy'), mark(CUT_SHARE), *passes_at(task.passes_at)),
    read=rows_by(parse),
    shot=shot,
    ask=ask,
    replies=Replies(
        responses=responses, stops=stops, sampling=sampling, most_tokens=lambda task: MOST_TOKENS, is_verbatim=True
    ),
    programs=Programs(language=lambda content: content.language, judge=judge_program),
)
