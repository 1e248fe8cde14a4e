"""Code evaluation: the model completes a program, which is run against the problem's test.

The accuracy is pass@1, the share of programs that pass; `pass_at_k` adds other k from the same programs.
`generations_per_sample` programs are sampled per problem, as in Composer 0.17, whose stop rule for Python is used.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from llmfoundry_gauntlet.data.readers import RowError, optional_text_field, optional_texts_field, text_field
from llmfoundry_gauntlet.errors import describe
from llmfoundry_gauntlet.metrics.metrics import Metric, gold_bits_of_generations, item_metric, pass_at_1, passes_at
from llmfoundry_gauntlet.metrics.statistics import SHARE
from llmfoundry_gauntlet.scoring.code.assembly import program_end, source_of
from llmfoundry_gauntlet.scoring.code.programs import (
    LANGUAGES,
    PYTHON,
    Program,
    make_program,
    whole_text,
)
from llmfoundry_gauntlet.scoring.code.sandbox import CannotRun, Sandbox, SandboxError, find_sandbox
from llmfoundry_gauntlet.scoring.text import NON_FINITE_GENERATION
from llmfoundry_gauntlet.tasks.base import TRUNCATED_REASON, TRUNCATED_SHARE, Task
from llmfoundry_gauntlet.types import Example, Generation, Prompt, Sampling, Score, StopRule

RULES = ('test', 'io_pairs')
MAX_NEW_TOKENS = 1024  # of a program, unless the task says otherwise
TOP_P, TOP_K = 0.95, 40
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

    gold = None  # there is no single right answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask(Task):
    """Generate programs and run them.

    `generations_per_sample` (formerly `num_beams`) is the number of programs per problem. `rule` chooses what they are
    run against: the problem's test, or pairs of inputs and outputs. `pass_at_k` is a number or a list of numbers.
    """

    type_name: ClassVar[str] = 'code_evaluation'
    generates: ClassVar[bool] = True
    runs_programs: ClassVar[bool] = True
    is_verbatim: ClassVar[bool] = True
    samples_by_default: ClassVar[bool] = True  # `temperature` is a key of the task

    pass_at_k: Any = None
    num_beams: int | None = None
    generations_per_sample: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    rule: str | None = None

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        yield from Task.problems(self)
        for name in ('generations_per_sample', 'num_beams'):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f'{name}: is {value}; allowed: 1 or more'
        yield from pass_problems(self)
        if self.rule is not None and self.rule not in RULES:
            yield f'rule: is {self.rule!r}; allowed: {", ".join(RULES)}'
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            yield f'temperature: is {self.temperature:g}; allowed: 0 (the most probable tokens) or more'
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f'top_p: is {self.top_p:g}; allowed: a number above 0, 1 at most'
        if self.top_k is not None and self.top_k < 0:
            yield f'top_k: is {self.top_k}; allowed: 0 (all tokens) or more'
        for key in self.generation_kwargs or {}:
            if key not in ('max_new_tokens', 'seed'):
                yield f'generation_kwargs.{key}: is a key of the task itself: {key}'

    @property
    def strips_rows(self) -> bool:
        """Return False: white space is part of programs."""
        return False

    @property
    def num_samples(self) -> int:
        """Return the number of programs per problem."""
        return self.generations_per_sample or self.num_beams or 1

    @property
    def passes_at(self) -> tuple[int, ...]:
        """Return the k of every pass@k."""
        if self.pass_at_k is None:
            return (1,)
        return tuple(self.pass_at_k) if isinstance(self.pass_at_k, (list, tuple)) else (self.pass_at_k,)

    def metrics(self) -> tuple[Metric, ...]:
        """Return the accuracy, TruncatedShare, every pass@k, and the GoldBitsPerByte of the canonical solution."""
        truncated = item_metric(TRUNCATED_SHARE, bounds=SHARE)
        passes = passes_at(self.passes_at)
        return pass_at_1('InContextLearningCodeEvalAccuracy'), truncated, *passes, gold_bits_of_generations()

    def parse(self, row: Mapping[str, Any]) -> CodeProblem:
        """Return the content of a row. Raise RowError."""
        language = text_field(row, 'language') if 'language' in row else PYTHON
        if language not in LANGUAGES:
            raise RowError(f'language is {describe(language)}; allowed: {", ".join(LANGUAGES)}')
        inputs, outputs = optional_texts_field(row, 'test_inputs'), optional_texts_field(row, 'test_outputs')
        if len(inputs) != len(outputs):
            raise RowError(
                f'there are {len(inputs)} test_inputs and {len(outputs)} test_outputs; allowed: equally many'
            )
        if self.rule == 'io_pairs' and not inputs:
            raise RowError('there are no test_inputs, which rule: io_pairs needs')
        return CodeProblem(
            prompt=text_field(row, 'prompt', allow_empty=False),
            entry_point=text_field(row, 'entry_point', allow_empty=False),
            solution=optional_text_field(row, 'canonical_solution') or '',
            test=text_field(row, 'test', allow_empty=self.rule == 'io_pairs'),
            pairs=tuple(zip(inputs, outputs, strict=True)),
            language=language,
        )

    def shot(self, content: CodeProblem, first: bool) -> str:
        """Return the problem and its solution."""
        return self.part(content.prompt, first).removesuffix(self.continuation_delimiter) + content.solution

    def ask(self, content: CodeProblem, first: bool) -> Prompt:
        """Return the problem with trailing white space, which the generation continues."""
        text = ('' if first else self.example_delimiter) + self.prelimiter + content.prompt
        return Prompt(contexts=(text,))

    def responses(self, content: CodeProblem) -> tuple[str, ...]:
        """Return the canonical solution."""
        return (content.solution,)

    def gold_text(self, content: CodeProblem) -> str | None:
        """Return the canonical solution as it completes the prompt, to its last line; None if the row has none.

        It begins a new line where the program that is run does. Line breaks at the end are not scored: how many there
        are, none to two, is a matter of the data file.
        """
        program = self.program(content)
        return whole_text(program, content.solution)[len(program.prompt) :].rstrip() or None

    def stops(self, contents: Sequence[CodeProblem]) -> StopRule:
        """Return Composer 0.17's stop strings with llm-foundry's semantics; else each row has an end of its own."""
        return StopRule(strings=NEW_STATEMENT if self.reference else ())

    def own_stops(self, stops: StopRule, content: CodeProblem) -> StopRule:
        """Return the end of the program that a row asks for."""
        if self.reference:
            return stops
        return replace(stops, program=program_end(self.program(content), in_chat=self.apply_chat_template))

    def sampling(self, variant: str | None) -> Sampling:
        """Return how tokens are sampled; the defaults are those of Composer 0.17. Temperature 0 is greedy."""
        if self.temperature == 0:
            return Sampling()
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=TOP_P if self.top_p is None else self.top_p,
            top_k=TOP_K if self.top_k is None else self.top_k,
            seed=(self.generation_kwargs or {}).get('seed', self.fewshot_random_seed),
        )

    @property
    def default_max_new_tokens(self) -> int:
        """Return the token limit of a program."""
        return MAX_NEW_TOKENS

    def language(self, content: CodeProblem) -> str:
        """Return the programming language of a row."""
        return content.language

    def program(self, content: CodeProblem) -> Program:
        """Return the program to complete, with its test or with Composer 0.17's pairs of inputs and outputs."""
        rule = self.rule or ('io_pairs' if self.reference else 'test')
        return make_program(
            language=content.language,
            prompt=content.prompt,
            entry_point=content.entry_point,
            test=content.test,
            pairs=content.pairs if rule == 'io_pairs' else None,
            joins_lines=not self.reference,
        )

    def score_program(self, output: Generation, content: CodeProblem, sandbox: Sandbox) -> Score:
        """Score 1 if the program passes; unscored if the sandbox fails to run it."""
        from llmfoundry_gauntlet.scoring.code.execution import check_source  # late: YAML needs no compiler

        if not output.is_finite and not self.reference:
            return Score.unscored(NON_FINITE_GENERATION)
        try:
            program = self.program(content)
            source = whole_text(program, output.text) if self.reference else source_of(program, output.text)
            outcome = check_source(program, source, sandbox)
        except (CannotRun, OSError) as error:
            return Score.unscored(f'the program could not be run: {error}')
        reasons = [outcome.reason] if outcome.reason else []
        if output.is_truncated:
            reasons.append(TRUNCATED_REASON)
        metrics = {} if output.is_truncated is None else {TRUNCATED_SHARE: float(output.is_truncated)}
        return Score(value=float(outcome.passed), reason='; '.join(reasons) or None, metrics=metrics)


def pass_problems(task: CodeTask) -> Iterator[str]:
    """Yield the problems of `pass_at_k`."""
    for k in task.passes_at:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            yield f'pass_at_k: is {task.pass_at_k!r}; allowed: a whole number of 1 or more, or a list of them'
            return
    for k in task.passes_at:
        if k > task.num_samples:
            yield (
                f'pass_at_k: is {k}, but generations_per_sample is {task.num_samples}; '
                f'allowed: {task.num_samples} or less'
            )
    if len(set(task.passes_at)) < len(task.passes_at) or not task.passes_at:
        yield f'pass_at_k: is {task.pass_at_k!r}; allowed: different numbers, one at least'


def sandbox_of(
    tasks: Sequence[Task], examples: Mapping[str, Sequence[Example]], asked: str
) -> tuple[Sandbox | None, dict[str, str]]:
    """Return the sandbox for these tasks, None if none runs programs, and by key why a task cannot run its programs."""
    languages = {
        task.key: sorted({task.language(example.content) for example in examples[task.key]})
        for task in tasks
        if task.runs_programs
    }
    if not languages:
        return None, {}
    try:
        sandbox = find_sandbox(asked)
    except SandboxError as error:
        return None, dict.fromkeys(languages, str(error))
    reasons = {}
    for key, names in languages.items():
        if missing := [reason for name in names if (reason := problem_of(name, sandbox))]:
            reasons[key] = '; '.join(missing)
    return sandbox, reasons


@functools.cache
def problem_of(language: str, sandbox: Sandbox) -> str | None:
    """Return why programs of a language cannot run on this machine, None if they can."""
    from llmfoundry_gauntlet.scoring.code.execution import self_test  # late: YAML needs no compiler

    return LANGUAGES[language].missing() or self_test(language, sandbox)
