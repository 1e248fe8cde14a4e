"""What the benchmark of SCORE times, what it is to reach, and the questions that it asks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite import VOCABULARIES, Effort

from llmfoundry_gauntlet.config.score import GENERATE, LIKELIHOOD, MMLU_PRO, OPTION_ORDER, PROMPT
from llmfoundry_gauntlet.data.score_rows import FILES
from llmfoundry_gauntlet.data.subsets import subset
from llmfoundry_gauntlet.values import Example

(ROWS_FILE,) = FILES[MMLU_PRO]
MAX_SEQ_LEN = 2048
PART = 40  # questions that each contender asks before the next one's turn: a machine is faster and slower by the minute
END_SCALE = 0.5  # of the model that writes (see `materials.lively_folder`): replies of 60 tokens on average if not cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where questions and prompts come from. `note` says what they are."""

    data_root: Path
    prompts: Path
    note: str

    @property
    def is_there(self) -> bool:
        """Whether both files are at hand."""
        return (self.data_root / ROWS_FILE).is_file() and self.prompts.is_file()


SOURCES = (
    Source(
        data_root=Path('../shared/data'),
        prompts=Path('../shared/data/score/upstream_prompts/mmlu_pro_prompt_templates.json'),
        note="questions of MMLU-Pro's test split in upstream's prompts",
    ),
    Source(
        data_root=Path('eval_data'),
        prompts=Path('eval_data/score/prompts/mmlu_pro.json'),
        note='questions and prompts of our own, as ../shared is absent: fewer and shorter, so shares and ratios differ',
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One perturbation, answered in one way. `items` are questions, in a full and in a quick run.

    The target is the most of together / alone by likelihood, the least of lm-eval / ours by generation.
    `max_new_tokens` is the limit of a reply.
    """

    answers: str
    perturbation: str
    items: tuple[int, int]
    target: float
    max_new_tokens: int = 1

    @property
    def name(self) -> str:
        """'{answers}/{perturbation}'."""
        return f'{self.answers}/{self.perturbation}'

    def entry(self, prompts: Path) -> dict[str, Any]:
        """The entry of `score` in YAML."""
        return {
            'dataset': MMLU_PRO,
            'perturbations': [self.perturbation],
            'answers': self.answers,
            'max_new_tokens': self.max_new_tokens,
            'prompts': str(prompts),
        }


ROWS = (
    ScoreRow(answers=LIKELIHOOD, perturbation=OPTION_ORDER, items=(200, 4), target=0.62),
    ScoreRow(answers=LIKELIHOOD, perturbation=PROMPT, items=(200, 4), target=0.80),
    ScoreRow(answers=GENERATE, perturbation=OPTION_ORDER, items=(6, 2), target=2, max_new_tokens=128),
    ScoreRow(answers=GENERATE, perturbation=PROMPT, items=(6, 2), target=2, max_new_tokens=128),
)
FULL = Effort(
    quick=False,
    vocabularies=VOCABULARIES[:1],
    rounds={'together': 1, 'separate': 1, 'alone': 1, 'ours': 3, 'lm_eval': 2},
)
QUICK = Effort(
    quick=True,
    vocabularies=VOCABULARIES[:1],
    rounds={'together': 3, 'separate': 3, 'alone': 3, 'ours': 1, 'lm_eval': 1},
)


def write_questions(source: Source, num_questions: int, part: int, folder: Path) -> dict[Path, int]:
    """Data roots with so many of the questions, some of each category, in parts of at least `part`, and their sizes."""
    lines = [line for line in (source.data_root / ROWS_FILE).read_text('utf-8').split('\n') if line.strip()]
    examples = [
        Example(row=row, file=None, category=json.loads(line)['category'], content=line)
        for row, line in enumerate(lines)
    ]
    chosen = [example.content for example in subset(examples, num_questions)]
    num_parts = max(1, len(chosen) // part)
    roots: dict[Path, int] = {}
    for place in range(num_parts):
        mine = chosen[place::num_parts]
        root = folder / f'mmlu_pro-{len(chosen)}-{place + 1}-of-{num_parts}'
        roots[root] = len(mine)
        (root / ROWS_FILE).parent.mkdir(parents=True, exist_ok=True)
        (root / ROWS_FILE).write_text(''.join(f'{line}\n' for line in mine), 'utf-8')
    return roots
