"""SCORE's prompts, in the JSON schema of lm-eval 0.4.13 (the paper's reference), and the variants of a question."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.resources import shipped
from llmfoundry_gauntlet.config.score import AGIEVAL, NON_GREEDY, OPTION_ORDER, PROMPT, ScoreSpec
from llmfoundry_gauntlet.config.yaml import decode
from llmfoundry_gauntlet.data.score_rows import LETTERS, LetteredQuestion, MathQuestion
from llmfoundry_gauntlet.errors import ConfigError, Problems, describe
from llmfoundry_gauntlet.types import Example

NUM_PROMPTS = 10
OWN_FOLDER = 'eval_data/score/prompts'
FOLDER = 'score/prompts'  # below data_root
KEYS = {OPTION_ORDER: 'option_order_robustness', PROMPT: 'prompt_robustness', NON_GREEDY: 'non_greedy_robustness'}
OPTIONS_FORMAT = '\n{letter}: {option}'
NEEDED = {True: {'question'}, False: {'question', 'options'}}  # of a prompt, by whether answers are expressions
ALLOWED = {True: {'question'}, False: {'question', 'options', 'category'}}


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with placeholders for question, options and category, and the format of one option."""

    prompt: str
    options_format: str = OPTIONS_FORMAT

    def text(self, question: str, options: Sequence[str] = (), category: str = '') -> str:
        """Return the prompt of a question."""
        lines = [
            self.options_format.format(letter=letter, option=option)
            for letter, option in zip(LETTERS, options, strict=False)
        ]
        return self.prompt.format(question=question, options=''.join(lines), category=category)


NO_TEMPLATE = Template('')


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """The prompts of a dataset: a single one for option order and non-greedy sampling, ten for the prompt perturbation.

    Prompts that no perturbation in use needs may be missing; then they are NO_TEMPLATE or empty.
    """

    option_order: Template
    non_greedy: Template
    prompt: tuple[Template, ...]


def prompts_file(spec: ScoreSpec, data_root: str | Path) -> Path:
    """Return the file of a dataset's prompts: the given one, else that below the data root, else the package's."""
    if spec.prompts is not None:
        return shipped(spec.prompts)
    name = f'{spec.dataset if spec.task_label is None else AGIEVAL}.json'
    below = Path(data_root) / FOLDER / name
    return below if below.is_file() else shipped(f'{OWN_FOLDER}/{name}')


def read_templates(spec: ScoreSpec, data_root: str | Path) -> Templates:
    """Return the prompts of a dataset. Raise ConfigError with all problems."""
    path = prompts_file(spec, data_root)
    problems = Problems(f'{spec.label}: {path}')
    content = read_json(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f'{path}: is {describe(content)}; allowed: a mapping with {", ".join(KEYS.values())}')
    templates: dict[str, list[Template]] = {}
    for perturbation, key in KEYS.items():
        if key not in content:
            if perturbation in spec.applied:
                problems.add('', f"the key '{key}' is missing; found: {', '.join(map(str, content))}")
            continue
        entries = {key: content[key]}
        if perturbation == PROMPT:
            if not isinstance(content[key], list) or len(content[key]) != NUM_PROMPTS:
                size = f'has {len(content[key])} prompts' if isinstance(content[key], list) else 'is no list'
                problems.add(key, f'{size}; allowed: a list of {NUM_PROMPTS}')
                continue
            entries = {f'{key}[{index}]': entry for index, entry in enumerate(content[key])}
        templates[perturbation] = [template(entry, place, spec.is_math, problems) for place, entry in entries.items()]
    problems.raise_all()
    return Templates(
        option_order=templates.get(OPTION_ORDER, [NO_TEMPLATE])[0],
        non_greedy=templates.get(NON_GREEDY, [NO_TEMPLATE])[0],
        prompt=tuple(templates.get(PROMPT, ())),
    )


def template(value: Any, path: str, is_math: bool, problems: Problems) -> Any:
    """Return one prompt; add its problems, such as an unknown or missing placeholder."""
    decoded: Template | None = decode(Template, value, path, problems)
    if decoded is None:
        return None
    check_places(decoded.prompt, f'{path}.prompt', NEEDED[is_math], ALLOWED[is_math], problems)
    if not is_math:
        of_option = {'letter', 'option'}
        check_places(decoded.options_format, f'{path}.options_format', of_option, of_option, problems)
    return decoded


def check_places(text: str, path: str, needed: set[str], allowed: set[str], problems: Problems) -> None:
    """Add missing and unknown placeholders to the problems."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        problems.add(path, f"is not a template ({error}); write literal braces twice: '{{{{'")
        return
    before = len(problems.messages)
    for name in sorted(needed - names):
        problems.add(path, f'the placeholder {{{name}}} is missing')
    for name in sorted(names - allowed):
        allowed_names = ', '.join(f'{{{placeholder}}}' for placeholder in sorted(allowed))
        problems.add(path, f'the placeholder {{{name}}} is unknown; allowed: {allowed_names}')
    if len(problems.messages) == before:
        try:
            text.format(**dict.fromkeys(allowed, ''))
        except (KeyError, IndexError, ValueError) as error:
            problems.add(path, f'cannot be filled in ({error}); write nothing but the name between the braces')


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raise ConfigError."""
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{path}: cannot be read: {error}') from error
    except json.JSONDecodeError as error:
        raise ConfigError(f'{path}:{error.lineno}: malformed JSON: {error.msg} at column {error.colno}') from error


@dataclass(frozen=True, slots=True)
class Posed:
    """A question or problem in one prompt template. `own_gold` is the index of the gold option in the data."""

    question: LetteredQuestion | MathQuestion
    template: Template
    own_gold: int = 0

    @property
    def text(self) -> str:
        """Return the whole prompt."""
        return self.template.text(self.question.text, self.options, getattr(self.question, 'topic', ''))

    @property
    def gold(self) -> Any:
        """Return the index of the gold option, or the right answer of a problem."""
        return self.question.gold

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of a question, none for a problem."""
        return () if isinstance(self.question, MathQuestion) else self.question.options


def option_order(example: Example, spec: ScoreSpec, templates: Templates) -> Iterator[Example]:
    """Yield the question with the right option at every label in turn, swapped with the option there."""
    question: LetteredQuestion = example.content
    for place in range(len(question.options)):
        options = list(question.options)
        options[question.gold], options[place] = options[place], options[question.gold]
        swapped = replace(question, options=tuple(options), gold=place)
        yield variant(example, f'{OPTION_ORDER}:{LETTERS[place]}', swapped, templates.option_order)


def prompt_templates(example: Example, spec: ScoreSpec, templates: Templates) -> Iterator[Example]:
    """Yield the question in every prompt template."""
    for number, template in enumerate(templates.prompt):
        yield variant(example, f'{PROMPT}:{number}', example.content, template)


def non_greedy(example: Example, spec: ScoreSpec, templates: Templates) -> Iterator[Example]:
    """Yield the same prompt once for each sampling seed."""
    for seed in spec.seeds:
        yield variant(example, f'{NON_GREEDY}:{seed}', example.content, templates.non_greedy)


Perturbation = Callable[[Example, ScoreSpec, Templates], Iterator[Example]]
BY_NAME: dict[str, Perturbation] = {OPTION_ORDER: option_order, PROMPT: prompt_templates, NON_GREEDY: non_greedy}


def variants(example: Example, spec: ScoreSpec, templates: Templates) -> Iterator[Example]:
    """Yield all variants of a question."""
    for name in spec.applied:
        yield from BY_NAME[name](example, spec, templates)


def variant(example: Example, name: str, question: LetteredQuestion | MathQuestion, template: Template) -> Example:
    """Return one variant of an example."""
    own_gold = 0 if isinstance(question, MathQuestion) else example.content.gold
    return replace(example, variant=name, content=Posed(question, template, own_gold))


def perturbation_of(name: str) -> str:
    """Return the perturbation of a variant."""
    return name.partition(':')[0]


def seed_of(name: str | None) -> int | None:
    """Return the sampling seed of a variant; None for greedy decoding."""
    perturbation, _, value = (name or '').partition(':')
    return int(value) if perturbation == NON_GREEDY else None
