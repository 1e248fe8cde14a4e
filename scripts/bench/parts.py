"""The parts of the benchmark: rows of the tables, jobs of the contenders in them, and targets."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from lm_eval_bench_tasks import FIXED, write_task
from materials import FAMILIES, FOUNDRY_MPT, HYBRIDS, LLAMA, LLAMA_ALL_HEADS, MORE_RULES

from llmfoundry_gauntlet.config.score import GENERATE, LIKELIHOOD, MMLU_PRO, OPTION_ORDER, PROMPT
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.data.examples import subset
from llmfoundry_gauntlet.data.readers import locate
from llmfoundry_gauntlet.data.score_rows import FILES
from llmfoundry_gauntlet.types import Example

TASKS_YAML = str(Path(__file__).parents[2] / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml')
VOCABULARIES = (8_000, 50_000)
OF_FAMILIES = VOCABULARIES[1:]  # the families' own vocabularies have 32,000 (llama) to 256,000 entries (bloom, gemma2)
SHOT_ROWS = 2000  # rows to draw shots from: from a few they repeat, and prompts share prefixes
TOKENS_PER_FOUNDRY_BATCH = 4096
PROMPTS_PER_FOUNDRY_BATCH = 8
LM_EVAL_BATCH_SIZES = (8, 16, 32)
(QUESTIONS_FILE,) = FILES[MMLU_PRO]

OURS, ALONE, BARE, FOUNDRY, LM_EVAL = 'ours', 'alone', 'bare_forward', 'llm_foundry', 'lm_eval'
UNCACHED = 'no_cache'
# Of a full run; a quick one has one round of each.
ROUNDS = {OURS: 3, ALONE: 3, BARE: 3, LM_EVAL: 2, FOUNDRY: 2, UNCACHED: 1}

# The shapes of the work that ours describes, by which the bare forward knows what to run.
PLANNED, UNSHARED = 'planned', 'unshared'

Jobs = dict[str, dict[str, Any]]


class Place(NamedTuple):
    """The sources of rows, and the folder for files made of them."""

    data_root: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one kind of work, and the targets of their geometric means.

    The target of a ratio such as 'lm_eval/ours' is a minimum; that of 'ours/bare_forward' a maximum.
    """

    name: str
    targets: Mapping[str, float]

    def is_met(self, ratio: str, value: float) -> bool:
        """Return whether a ratio meets its target."""
        return value <= self.targets[ratio] if ratio.startswith(f'{OURS}/') else value >= self.targets[ratio]


@cache
def task_entries() -> dict[str, dict[str, Any]]:
    """Return the YAML keys of all tasks by label."""
    return {entry['label']: entry for entry in read_yaml(TASKS_YAML)['icl_tasks']}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A task at one number of shots, on the first `items` rows of its file (number in a full run, in a quick run).

    llm-foundry runs the first `foundry_items`, as it pads all items to `max_seq_len` and each costs the same.
    `category` keeps the rows of one category. `stops` and `max_new_tokens` are for generation tasks; `end_scale` says
    how often the model ends a generation itself, `None` for the model of the other parts (`materials.lively_folder`).
    `family` is that of the model. With `fixed_shots` all items have the same shots.
    """

    label: str
    num_shots: int
    group: Group
    items: tuple[int, int]
    foundry_items: tuple[int, int]
    max_seq_len: int = 1024
    category: str | None = None
    stops: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    end_scale: float | None = None
    family: str = LLAMA
    fixed_shots: bool = False

    @property
    def name(self) -> str:
        """'{label}/{n}-shot', with the family unless it is Llama, and the group if it is a generation task."""
        family = '' if self.family == LLAMA else f'{self.family}/'
        shots = f'{self.num_shots}-shot' + (' fixed' if self.fixed_shots else '')
        group = f'/{self.group.name}' if self.max_new_tokens else ''
        return f'{family}{self.label}/{shots}{group}'

    @property
    def entry(self) -> dict[str, Any]:
        """The YAML keys of the task."""
        entry = {**task_entries()[self.label], 'num_fewshot': [self.num_shots], 'has_categories': False}
        if self.max_new_tokens is None:
            return entry
        return {
            **entry,
            'early_stopping_criteria': list(self.stops),
            'generation_kwargs': {'max_new_tokens': self.max_new_tokens},
        }

    def jobs(self, place: Place, *, quick: bool) -> Jobs:
        """Return the arguments of each contender's measurement."""
        num_items = self.items[quick]
        path = self.write_rows(place, num_items)
        task = self.entry | {'dataset_uri': str(path)}
        others = {'task': task, 'rows_file': str(path), 'max_seq_len': self.max_seq_len}
        settings = {'truncation': 'reference', **({'fewshot': 'fixed'} if self.fixed_shots else {})}
        batch_size = TOKENS_PER_FOUNDRY_BATCH // self.max_seq_len
        short = {**task, 'generation_kwargs': {'max_new_tokens': 4}} if 'generation_kwargs' in task else task
        jobs: Jobs = {
            OURS: {
                'settings': {'tasks': [task], **settings},
                'warm_up': {'tasks': [short], **settings},
                'max_seq_len': self.max_seq_len,
                'num_items': num_items,
            },
            BARE: {'shape': PLANNED},
            FOUNDRY: {**others, 'num_items': self.foundry_items[quick], 'batch_size': batch_size},
            LM_EVAL: {**others, 'num_items': num_items},
        }
        if not any(BARE in ratio for ratio in self.group.targets):
            del jobs[BARE]
        if self.max_new_tokens is not None:
            jobs[FOUNDRY]['batch_size'] = PROMPTS_PER_FOUNDRY_BATCH
        return jobs

    def write_rows(self, place: Place, num_items: int) -> Path:
        """Write the rows of the task, or of its category, to evaluate or to draw shots from."""
        source = locate(self.entry['dataset_uri'], place.data_root)
        lines = [line for line in source.read_text('utf-8').split('\n') if line.strip()]
        if self.category is not None:
            lines = [line for line in lines if json.loads(line)['category'] == self.category]
        num_rows = max(num_items, SHOT_ROWS) if self.num_shots else num_items
        path = place.folder / f'{self.label}-{self.num_shots}.jsonl'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('\n'.join(lines[:num_rows]) + '\n', 'utf-8')
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """A perturbation of SCORE on `items` questions of MMLU-Pro, by likelihood or generation."""

    answers: str
    perturbation: str
    group: Group
    items: tuple[int, int]
    max_new_tokens: int = 1
    end_scale: float | None = None
    family: ClassVar[str] = LLAMA
    max_seq_len: ClassVar[int] = 2048

    @property
    def name(self) -> str:
        """'{answers}/{perturbation}'."""
        return f'{self.answers}/{self.perturbation}'

    def jobs(self, place: Place, *, quick: bool) -> Jobs:
        """Return each contender's arguments, with upstream's questions and prompts or, if absent, ours."""
        source, prompts = next(files for files in SCORE_SOURCES if all(map(Path.is_file, files)))
        root = write_questions(source, self.items[quick], place.folder)
        entry = {
            'dataset': MMLU_PRO,
            'perturbations': [self.perturbation],
            'answers': self.answers,
            'max_new_tokens': self.max_new_tokens,
            'prompts': str(prompts),
        }
        short = {**entry, 'subset_items': 2, 'max_new_tokens': min(4, self.max_new_tokens)}
        ours = {
            'settings': {'score': [entry], 'data_root': str(root)},
            'warm_up': {'score': [short], 'data_root': str(root)},
            'max_seq_len': self.max_seq_len,
        }
        if self.answers == LIKELIHOOD:
            return {OURS: ours, ALONE: ours}
        lm_eval = {
            'perturbation': self.perturbation,
            'rows_file': str(root / QUESTIONS_FILE),
            'prompts': str(prompts),
            'max_new_tokens': self.max_new_tokens,
            'max_seq_len': self.max_seq_len,
        }
        return {OURS: ours, LM_EVAL: lm_eval}


SCORE_SOURCES = tuple(
    (Path(root) / QUESTIONS_FILE, Path(root) / 'score' / prompts)
    for root, prompts in (
        ('../shared/data', 'upstream_prompts/mmlu_pro_prompt_templates.json'),
        ('eval_data', 'prompts/mmlu_pro.json'),
    )
)


def write_questions(source: Path, num_questions: int, folder: Path) -> Path:
    """Write this many questions, in proportion from each category; return their data root."""
    lines = [line for line in source.read_text('utf-8').split('\n') if line.strip()]
    examples = [
        Example(row=row, file=None, category=json.loads(line)['category'], content=line)
        for row, line in enumerate(lines)
    ]
    chosen = subset(examples, num_questions)
    root = folder / f'mmlu_pro-{len(chosen)}'
    (root / QUESTIONS_FILE).parent.mkdir(parents=True, exist_ok=True)
    (root / QUESTIONS_FILE).write_text(''.join(f'{example.content}\n' for example in chosen), 'utf-8')
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class LMEvalRow:
    """A task of lm-eval's own (`lm_eval_bench_tasks.DEFINITIONS`) on `items` documents, in its `simple_evaluate`.

    With `fixed_shots` all documents have the same shots. `max_new_tokens` replaces the limit of a generation task.
    """

    label: str
    num_shots: int
    group: Group
    items: tuple[int, int]
    fixed_shots: bool = False
    max_new_tokens: int | None = None
    end_scale: float | None = None
    family: str = LLAMA
    max_seq_len: ClassVar[int] = 2048  # of the model

    @property
    def name(self) -> str:
        """'{label}/{n}-shot', with the family unless it is Llama."""
        family = '' if self.family == LLAMA else f'{self.family}/'
        fixed = ' fixed' if self.fixed_shots else ''
        return f'{family}{self.label}/{self.num_shots}-shot{fixed}'

    def jobs(self, place: Place, *, quick: bool) -> Jobs:
        """Return the arguments of both backends, which are the same."""
        keys: dict[str, Any] = {'num_fewshot': self.num_shots}
        if self.num_shots:
            keys['fewshot_config'] = FIXED if self.fixed_shots else {'sampler': 'default'}
        if self.max_new_tokens is not None:
            keys['generation_kwargs'] = {
                'until': ['Question:'],
                'max_gen_toks': self.max_new_tokens,
                'do_sample': False,
            }
        folder = place.folder / 'lm_eval'
        task = write_task(self.label, place.data_root, folder, self.items[quick], keys)
        job = {'task': task, 'folder': str(folder / task)}
        return {OURS: job, LM_EVAL: job}


Row = TaskRow | ScoreRow | LMEvalRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the benchmark. `contenders` are classes for `worker.py`.

    A full run has all `vocabularies`, a quick one the last. `total` has the targets of all rows together. Contenders
    `in_reference` run in the environment of llm-foundry, the others in that of the benchmark. `quick_batch_sizes` are
    those that a quick run tries with lm-eval.
    """

    rows: tuple[Row, ...]
    contenders: Mapping[str, str]
    vocabularies: tuple[int, ...]
    total: Group | None = None
    in_reference: Collection[str] = (FOUNDRY, LM_EVAL)
    quick_batch_sizes: tuple[int, ...] = LM_EVAL_BATCH_SIZES


def task_group(name: str, foundry: float, lm_eval: float, bare: float | None = None) -> Group:
    """Return a group of the likelihood part, or without a target for the bare forward of the generation part."""
    targets = {f'{FOUNDRY}/{OURS}': foundry, f'{LM_EVAL}/{OURS}': lm_eval}
    return Group(name, targets if bare is None else {**targets, f'{OURS}/{BARE}': bare})


ZERO_SHOT = task_group('0-shot multiple choice', 50, 1.5, 1.10)
FOUR_TEXTS = task_group('3 to 10 shots, 4 text choices', 15, 3.5, 1.05)
TWO_CHOICES = task_group('3 to 10 shots, 2 choices', 7, 2.2, 1.05)
LETTERS = task_group('letters as choices', 10, 1.5, 1.05)
OWN_CONTEXTS = task_group('language modelling, own contexts', 20, 1.1, 1.10)
FULL_CONTEXTS = task_group('the same, filling max_seq_len', 3, 1.1, 1.10)
SHARED_PASSAGES = task_group('shared passages', 50, 5, 1.05)
LIKELIHOOD_ROWS = (
    TaskRow(label='copa', num_shots=0, group=ZERO_SHOT, items=(100, 60), foundry_items=(4, 2)),
    TaskRow(label='piqa', num_shots=0, group=ZERO_SHOT, items=(96, 32), foundry_items=(4, 2)),
    TaskRow(label='hellaswag', num_shots=0, group=ZERO_SHOT, items=(48, 16), foundry_items=(2, 1)),
    TaskRow(label='winograd', num_shots=0, group=ZERO_SHOT, items=(273, 64), foundry_items=(4, 2)),
    TaskRow(label='arc_challenge', num_shots=3, group=FOUR_TEXTS, items=(16, 6), foundry_items=(2, 1)),
    TaskRow(label='arc_challenge', num_shots=10, group=FOUR_TEXTS, items=(10, 6), foundry_items=(2, 1)),
    TaskRow(label='piqa', num_shots=10, group=TWO_CHOICES, items=(12, 6), foundry_items=(4, 2)),
    TaskRow(label='winograd', num_shots=3, group=TWO_CHOICES, items=(96, 32), foundry_items=(4, 2)),
    TaskRow(label='mmlu', num_shots=5, group=LETTERS, items=(16, 6), foundry_items=(2, 1), category='nutrition'),
    TaskRow(label='lambada_openai', num_shots=0, group=OWN_CONTEXTS, items=(128, 32), foundry_items=(4, 4)),
    TaskRow(label='squad', num_shots=10, group=FULL_CONTEXTS, items=(8, 3), foundry_items=(2, 1), max_seq_len=2048),
    TaskRow(label='coqa', num_shots=0, group=SHARED_PASSAGES, items=(48, 24), foundry_items=(2, 2), max_seq_len=2048),
)

GSM8K = TaskRow(
    label='gsm8k',
    num_shots=3,
    group=task_group('the model ends them', 1, 1.5),
    items=(24, 12),
    foundry_items=(8, 8),
    max_new_tokens=335,  # as long as the longest correct answer
    end_scale=0.4,
)
TRIVIAQA = TaskRow(
    label='triviaqa_sm_sub',
    num_shots=3,
    group=task_group('a stop string ends them', 5, 1),
    items=(48, 16),
    foundry_items=(8, 8),
    max_new_tokens=22,
    end_scale=0.0,
    stops=('m',),
)
GENERATION_ROWS = (
    GSM8K,
    replace(GSM8K, group=task_group('all to the limit', 1, 1), items=(24, 8), max_new_tokens=64, end_scale=0.0),
    TRIVIAQA,
)


def score_row(answers: str, perturbation: str, ratio: str, target: float) -> ScoreRow:
    """Return a row of the SCORE part, a group by itself."""
    group = Group(f'{answers}, {perturbation}', {ratio: target})
    row = ScoreRow(answers=answers, perturbation=perturbation, group=group, items=(60, 4))
    return row if answers == LIKELIHOOD else replace(row, items=(6, 2), max_new_tokens=128, end_scale=0.5)


SCORE_ROWS = (
    score_row(LIKELIHOOD, OPTION_ORDER, f'{ALONE}/{OURS}', 1.61),
    score_row(LIKELIHOOD, PROMPT, f'{ALONE}/{OURS}', 1.25),
    score_row(GENERATE, OPTION_ORDER, f'{LM_EVAL}/{OURS}', 2),
    score_row(GENERATE, PROMPT, f'{LM_EVAL}/{OURS}', 2),
)


def family_rows(family: str) -> tuple[TaskRow, ...]:
    """Return the rows of a part with a model of one family: four to score, and one to generate.

    llm-foundry's own MPT is compared with llm-foundry, as lm-eval cannot load it.
    """
    if family == FOUNDRY_MPT:
        other, least_scoring, least_generating = FOUNDRY, 25, 5
        generation = TRIVIAQA
    else:
        other, least_scoring, least_generating = LM_EVAL, 1.7, 1
        generation = replace(GSM8K, max_new_tokens=32)

    scoring = Group(family, {f'{other}/{OURS}': least_scoring, f'{OURS}/{BARE}': 1.10})
    generating = Group('generation', {f'{other}/{OURS}': least_generating})
    rows = (
        TaskRow(label='piqa', num_shots=0, group=scoring, items=(96, 32), foundry_items=(4, 2)),
        TaskRow(label='arc_challenge', num_shots=3, group=scoring, items=(16, 6), foundry_items=(2, 1)),
        TaskRow(label='mmlu', num_shots=5, group=scoring, items=(16, 6), foundry_items=(2, 1), category='nutrition'),
        TaskRow(label='lambada_openai', num_shots=0, group=scoring, items=(128, 32), foundry_items=(4, 4)),
        replace(generation, group=generating, items=(12, 6), end_scale=None),
    )
    return tuple(replace(row, family=family) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestRow(TaskRow):
    """A row with a model of today, in `.venv-newest`, where lm-eval runs our texts.

    The bare forward runs whole rows, which share nothing. Generation is compared with transformers' `generate`, and
    with ours without a cache, of which UNCACHED_TOKENS stand for all.
    """

    def jobs(self, place: Place, *, quick: bool) -> Jobs:
        """Return the arguments of each contender's measurement."""
        ours = TaskRow.jobs(self, place, quick=quick)[OURS]
        if self.max_new_tokens is not None:
            return {OURS: ours, BARE: {'shape': PLANNED}, UNCACHED: {**ours, 'num_new_tokens': UNCACHED_TOKENS}}
        lm_eval = {name: ours[name] for name in ('settings', 'max_seq_len', 'num_items')}
        return {OURS: ours, BARE: {'shape': UNSHARED}, LM_EVAL: lm_eval}


def hybrid_group(name: str, lm_eval: float) -> Group:
    """Return a kind of scoring over all hybrids, which shall also be no slower than a bare forward of whole rows."""
    return Group(f'hybrids, {name}', {f'{LM_EVAL}/{OURS}': lm_eval, f'{BARE}/{OURS}': 0.9})


UNCACHED_TOKENS = 2
GENERATING = {f'{BARE}/{OURS}': 1, f'{UNCACHED}/{OURS}': 5}
MMLU_OF_NEWEST = NewestRow(
    label='mmlu',
    num_shots=5,
    group=hybrid_group('mmlu, own shots', 1.6),
    items=(12, 2),
    foundry_items=(0, 0),
    category='nutrition',
)
HYBRID_ROWS = (
    NewestRow(
        label='hellaswag',
        num_shots=0,
        group=hybrid_group('hellaswag 0-shot', 2),
        items=(32, 4),
        foundry_items=(0, 0),
    ),
    NewestRow(
        label='arc_challenge',
        num_shots=3,
        group=hybrid_group('arc, 3 own shots', 4.5),
        items=(16, 3),
        foundry_items=(0, 0),
    ),
    MMLU_OF_NEWEST,
    replace(MMLU_OF_NEWEST, group=hybrid_group('mmlu, fixed shots', 6.5), items=(64, 12), fixed_shots=True),
    NewestRow(
        label='gsm8k',
        num_shots=0,
        group=Group('generation', GENERATING),
        items=(16, 4),
        foundry_items=(0, 0),
        max_new_tokens=256,
    ),
)


def newest_rows(family: str) -> tuple[NewestRow, ...]:
    """Return the rows of a family: four to score, and one to generate."""
    rows = HYBRID_ROWS
    if family not in HYBRIDS:
        # These run in the token stream, and shall be as fast as a Llama is over the four rows of the part `families`.
        scoring = Group(family, {f'{LM_EVAL}/{OURS}': 2.6, f'{BARE}/{OURS}': 0.9})
        generating = Group('generation of others', GENERATING)
        rows = tuple(replace(row, group=generating if row.max_new_tokens else scoring) for row in HYBRID_ROWS)
    return tuple(replace(row, family=family) for row in rows)


def lm_eval_group(name: str, least: float) -> Group:
    """Return a group of lm-eval's own tasks."""
    return Group(name, {f'{LM_EVAL}/{OURS}': least})


TWO_UNSHOT = lm_eval_group('two choices, no shots', 1.8)
FOUR_CHOICES = lm_eval_group('four choices', 3.5)
SAME_SHOTS = lm_eval_group('the same shots for all', 5)
NO_SLOWER = lm_eval_group('one choice, or one forward for all', 1)
MMLU_BY_LM_EVAL = LMEvalRow(label='mmlu_nutrition', num_shots=5, group=SAME_SHOTS, items=(24, 8), fixed_shots=True)
ARC_BY_LM_EVAL = LMEvalRow(label='arc_easy', num_shots=5, group=FOUR_CHOICES, items=(16, 6))
GSM8K_BY_LM_EVAL = LMEvalRow(
    label='gsm8k',
    num_shots=5,
    group=lm_eval_group('generation, as many heads of keys as of queries', 1.3),
    items=(16, 8),
    end_scale=0.4,
    family=LLAMA_ALL_HEADS,
)
LM_EVAL_ROWS = (
    LMEvalRow(label='piqa', num_shots=0, group=TWO_UNSHOT, items=(96, 32)),
    LMEvalRow(label='winogrande', num_shots=0, group=TWO_UNSHOT, items=(128, 48)),
    LMEvalRow(label='arc_easy', num_shots=0, group=FOUR_CHOICES, items=(64, 24)),
    LMEvalRow(label='hellaswag', num_shots=0, group=FOUR_CHOICES, items=(48, 16)),
    ARC_BY_LM_EVAL,
    replace(ARC_BY_LM_EVAL, group=SAME_SHOTS, fixed_shots=True),
    MMLU_BY_LM_EVAL,
    # lm-eval's cache of logits scores all choices of one token in one forward.
    replace(MMLU_BY_LM_EVAL, num_shots=0, group=NO_SLOWER, items=(64, 24), fixed_shots=False),
    replace(MMLU_BY_LM_EVAL, group=NO_SLOWER, items=(16, 6), fixed_shots=False),
    LMEvalRow(label='boolq', num_shots=0, group=NO_SLOWER, items=(64, 24)),
    LMEvalRow(label='lambada_openai', num_shots=0, group=NO_SLOWER, items=(96, 32)),
    LMEvalRow(label='wikitext', num_shots=0, group=NO_SLOWER, items=(8, 3)),
    GSM8K_BY_LM_EVAL,
    replace(GSM8K_BY_LM_EVAL, group=lm_eval_group('generation, grouped queries', 2), family=LLAMA),
    # The more documents, the more share what the shots cost.
    replace(
        GSM8K_BY_LM_EVAL,
        group=lm_eval_group('generation, the same shots for all', 2),
        items=(32, 8),
        fixed_shots=True,
    ),
)


PARTS = {
    'lm-eval': Part(
        rows=LM_EVAL_ROWS,
        contenders={OURS: 'lm_eval_backends:GauntletBackend', LM_EVAL: 'lm_eval_backends:HFBackend'},
        vocabularies=OF_FAMILIES,
        in_reference=(),
    ),
    'families': Part(
        rows=tuple(row for family in FAMILIES if family != FOUNDRY_MPT for row in family_rows(family)),
        contenders={
            OURS: 'ours:Ours',
            BARE: 'bare_forward:BareForward',
            LM_EVAL: 'lm_eval_reference:LMEvalOnFoundryTexts',
        },
        vocabularies=OF_FAMILIES,
        total=Group('all rows', {f'{LM_EVAL}/{OURS}': 2}),
    ),
    'mpt': Part(
        rows=family_rows(FOUNDRY_MPT),
        contenders={
            OURS: 'ours:Ours',
            BARE: 'bare_forward:BareForward',
            FOUNDRY: 'foundry_contender:LLMFoundry',
        },
        vocabularies=OF_FAMILIES,
        in_reference=(OURS, BARE, FOUNDRY),
    ),
    'hybrids': Part(
        rows=tuple(row for family in (*HYBRIDS, *MORE_RULES, LLAMA) for row in newest_rows(family)),
        contenders={
            OURS: 'ours:Ours',
            BARE: 'bare_forward:BareForward',
            LM_EVAL: 'lm_eval_contender:LMEvalOnOurTexts',
            UNCACHED: 'ours:Uncached',
        },
        vocabularies=OF_FAMILIES,
        in_reference=(),
        quick_batch_sizes=LM_EVAL_BATCH_SIZES[:1],
    ),
    'likelihood': Part(
        rows=LIKELIHOOD_ROWS,
        contenders={
            OURS: 'ours:Ours',
            BARE: 'bare_forward:BareForward',
            FOUNDRY: 'foundry_contender:LLMFoundry',
            LM_EVAL: 'lm_eval_reference:LMEvalOnFoundryTexts',
        },
        vocabularies=VOCABULARIES,
        total=task_group('all rows', 25, 2, 1.05),
    ),
    'generation': Part(
        rows=GENERATION_ROWS,
        contenders={
            OURS: 'ours:Ours',
            FOUNDRY: 'foundry_contender:LLMFoundry',
            LM_EVAL: 'lm_eval_reference:LMEvalOnFoundryTexts',
        },
        vocabularies=VOCABULARIES[:1],
    ),
    'score': Part(
        rows=SCORE_ROWS,
        contenders={OURS: 'ours:Ours', ALONE: 'ours:Alone', LM_EVAL: 'lm_eval_reference:LMEvalScore'},
        vocabularies=VOCABULARIES[:1],
    ),
}
