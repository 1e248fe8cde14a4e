"""SCORE's perturbations: functions from an example to its variants.

Variants are Examples like any others. A perturbation that does not apply to an example yields none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from llmfoundry_gauntlet.config.plugins import PERTURBATIONS, load_installed
from llmfoundry_gauntlet.config.score import NON_GREEDY, OPTION_ORDER, PROMPT, ScoreSpec
from llmfoundry_gauntlet.data.score_rows import LETTERS, LetteredQuestion, MathQuestion
from llmfoundry_gauntlet.tasks.templates import Template, Templates
from llmfoundry_gauntlet.types import Example


@dataclass(frozen=True, slots=True)
class Posed:
    """A question with options in one prompt template. `own_gold` is the index of its right option in the data."""

    question: LetteredQuestion
    template: Template
    own_gold: int

    @property
    def text(self) -> str:
        """Return the whole prompt."""
        return self.template.text(self.question.text, self.question.options, self.question.topic)

    @property
    def gold(self) -> int:
        """Return the index of the right option."""
        return self.question.gold

    @property
    def num_choices(self) -> int:
        """Return the number of options."""
        return len(self.question.options)


@dataclass(frozen=True, slots=True)
class PosedProblem:
    """A problem in one prompt template."""

    question: MathQuestion
    template: Template

    @property
    def text(self) -> str:
        """Return the whole prompt."""
        return self.template.text(self.question.text)

    @property
    def gold(self) -> str:
        """Return the right answer."""
        return self.question.gold


def option_order(example: Example, spec: ScoreSpec, templates: Templates) -> Iterator[Example]:
    """Yield the question with the right option at every label in turn, swapped with the option there."""
    question: LetteredQuestion = example.content
    for place in range(len(question.options)):
        options = list(question.options)
        options[question.gold], options[place] = options[place], options[question.gold]
        swapped = replace(question, options=tuple(options), gold=place)
        yield variant(example, f'{OPTION_ORDER}:{LETTERS[place]}', swapped, templates.option_order)


def prompt(example: Example, spec: ScoreSpec, templates: Templates) -> Iterator[Example]:
    """Yield the question in every prompt template."""
    for number, template in enumerate(templates.prompt):
        yield variant(example, f'{PROMPT}:{number}', example.content, template)


def non_greedy(example: Example, spec: ScoreSpec, templates: Templates) -> Iterator[Example]:
    """Yield the same prompt once for each sampling seed."""
    for seed in spec.seeds:
        yield variant(example, f'{NON_GREEDY}:{seed}', example.content, templates.non_greedy)


Perturbation = Callable[[Example, ScoreSpec, Templates], Iterator[Example]]
OWN: dict[str, Perturbation] = {OPTION_ORDER: option_order, PROMPT: prompt, NON_GREEDY: non_greedy}


def variants(example: Example, spec: ScoreSpec, templates: Templates) -> Iterator[Example]:
    """Yield all variants of a question."""
    for name in spec.applied:
        perturb: Perturbation = OWN.get(name) or load_installed(PERTURBATIONS)[name]
        yield from perturb(example, spec, templates)


def variant(example: Example, name: str, question: LetteredQuestion | MathQuestion, template: Template) -> Example:
    """Return one variant of an example."""
    if isinstance(question, MathQuestion):
        return replace(example, variant=name, content=PosedProblem(question, template))
    return replace(example, variant=name, content=Posed(question, template, example.content.gold))


def perturbation_of(name: str) -> str:
    """Return the perturbation of a variant."""
    return name.partition(':')[0]


def seed_of(name: str | None) -> int | None:
    """Return the sampling seed of a variant; None for greedy decoding."""
    perturbation, _, value = (name or '').partition(':')
    return int(value) if perturbation == NON_GREEDY else None
