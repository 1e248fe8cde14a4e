"""Code evaluation: the model writes the rest of a program, which is run against its problem's test.

The accuracy is pass@1: the share of programs that pass. `pass_at_k` wants further ones of the same programs. Programs
are drawn `generations_per_sample` times for each problem, as in Composer 0.17, which ended them as here in Python.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry_gauntlet.config.specs import CODE, TaskSpec
from llmfoundry_gauntlet.data.fields import RowError, optional_text_field, optional_texts_field, text_field
from llmfoundry_gauntlet.judging.code.judge import judge as run_program
from llmfoundry_gauntlet.judging.code.programs import LANGUAGES, PYTHON, Program, make_program
from llmfoundry_gauntlet.judging.code.sandbox import Sandbox
from llmfoundry_gauntlet.judging.code.verdicts import CannotJudge
from llmfoundry_gauntlet.judging.text import NON_FINITE_REPLY
from llmfoundry_gauntlet.tasks.base import TaskType, part
from llmfoundry_gauntlet.values import Generation, Judgement, Question, Sampling, StopRule

MOST_TOKENS = 1024  # of a program, where the task does not say
TOP_P, TOP_K = 0.95, 40
CUT_SHARE = 'CutShare'
NEW_STATEMENT = tuple(f'\n{letter}' for letter in string.ascii_letters + string.digits + '#`')


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

    def program(self, task: TaskSpec, reference: bool) -> Program:
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


def parse(row: Mapping[str, Any], task: TaskSpec) -> CodeProblem:
    """A checked row."""
    language = text_field(row, 'language') if 'language' in row else PYTHON
    if language not in LANGUAGES:
        raise RowError(f'language is {language!r}; allowed: {", ".join(LANGUAGES)}')
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


def shot(content: CodeProblem, task: TaskSpec, first: bool) -> str:
    """The problem and its solution."""
    return part(task, content.prompt, first).removesuffix(task.continuation_delimiter) + content.solution


def ask(content: CodeProblem, task: TaskSpec, first: bool) -> Question:
    """The problem, to its last character: what is written goes on from there."""
    text = ('' if first else task.example_delimiter) + task.prelimiter + content.prompt
    return Question(contexts=(text,), continuations=())


def responses(content: CodeProblem, task: TaskSpec) -> tuple[str, ...]:
    """The solution that the data have."""
    return (content.solution,)


def stops(task: TaskSpec, contents: Sequence[CodeProblem], reference: bool) -> StopRule:
    """In Python a line that begins with a letter, a digit, '#' or '`' ends a program, in languages with braces the
    function's own closing brace. With `reference` the first rule is every language's.
    """
    if reference or any(content.language == PYTHON for content in contents):
        return StopRule(strings=NEW_STATEMENT)
    return StopRule(closes_block=True)


def judge_program(
    output: Generation, content: CodeProblem, task: TaskSpec, reference: bool, sandbox: Sandbox
) -> Judgement:
    """Whether a program passes. Our own failure to run it leaves it unscored."""
    if not output.is_finite and not reference:
        return Judgement(credit=None, reason=NON_FINITE_REPLY)
    try:
        verdict = run_program(content.program(task, reference), output.text, sandbox)
    except (CannotJudge, OSError) as error:
        return Judgement(credit=None, reason=f'the program could not be run: {error}')
    reasons = [verdict.reason] if verdict.reason else []
    if output.is_cut:
        reasons.append('cut at the token limit')
    marks = {} if output.is_cut is None else {CUT_SHARE: float(output.is_cut)}
    return Judgement(credit=float(verdict.passed), reason='; '.join(reasons) or None, marks=marks)


def sampling(task: TaskSpec, variant: str | None) -> Sampling:
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
    metric='InContextLearningCodeEvalAccuracy',
    parse=parse,
    shot=shot,
    ask=ask,
    marks=(CUT_SHARE,),
    responses=responses,
    stops=stops,
    language=lambda content: content.language,
    judge_program=judge_program,
    sampling=sampling,
    most_tokens=lambda task: MOST_TOKENS,
    is_verbatim=True,
)
