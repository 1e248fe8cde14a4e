"""The rows of SCORE's data that `record_score.py` records, and the form in which lm-eval's tasks take them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import score_generations
from lm_eval.tasks import score
from score_generations import Question

SCORE_TASKS = Path(next(iter(score.__path__)))

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """The rows of a data set and those that are recorded."""

    name: str
    folder: str  # of lm-eval's task files
    perturbations: tuple[str, ...]
    choose: Callable[[str, list[Row]], set[int]]
    files: dict[tuple[str, str], str]  # what lm-eval asks load_dataset for, to a file below the SCORE root


AGIEVAL_SUBSETS = ('aqua-rat', 'lsat-ar', 'lsat-lr', 'lsat-rc', 'sat-en', 'sat-math')
ABSENT_TASKS = ('logiqa_en',)
MATH_SUBJECTS = (
    'algebra',
    'counting_and_probability',
    'geometry',
    'intermediate_algebra',
    'number_theory',
    'prealgebra',
    'precalculus',
)
# Two AGIEval rows share a question in lsat-ar and sat-en. aqua-rat: options with a leading space, equal options, line
# breaks; lsat-rc 110: equal options.
AGIEVAL_ROWS = {
    'aqua-rat': {22, 34, 46, 117, 120, 231},
    'lsat-ar': {20, 22, 196, 199},
    'lsat-rc': {110, 135, 137},
    'sat-en': {100, 101},
}
# Equations, '=' in a box, a matrix, text, an interval.
MATH_ROWS = {
    'algebra': {25, 119, 128, 168, 221, 515},
    'counting_and_probability': {362},
    'geometry': {54, 110, 163, 352},
    'intermediate_algebra': {1, 18, 29, 341, 898},
    'number_theory': {44, 51},
    'prealgebra': {24, 58},
    'precalculus': {2, 5, 10, 14, 24, 243},
}
# 3859: the letter contradicts the index; 8397: an option twice; 2545, 3423: a leading space; 192, 3433: a trailing one;
# 3433, 3969: a line break in an option; 4, 55: white space around the question; 141, 3427: a line break in it.
MMLU_PRO_ROWS = {4, 55, 141, 192, 2545, 3423, 3427, 3433, 3859, 3969, 8397}


def first_of_each(rows: list[Row], key: Callable[[Row], Any], count: int) -> set[int]:
    """The first rows of each value of the key."""
    found: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(key(row), []).append(index)
    return {index for indices in found.values() for index in indices[:count]}


def choose_mmlu_pro(file: str, rows: list[Row]) -> set[int]:
    """Some of each category and of each number of options, and the odd ones."""
    del file
    by_category = first_of_each(rows, lambda row: row['category'], 2)
    by_size = first_of_each(rows, lambda row: len(row['options']), 3)
    with_braces = first_of_each(rows, lambda row: '{' in row['question'] and '}' in row['question'], 1)
    return MMLU_PRO_ROWS | by_category | by_size | with_braces


def choose_agieval(file: str, rows: list[Row]) -> set[int]:
    """Two of each label, two with and two without a passage, and the odd ones."""
    by_label = first_of_each(rows, lambda row: row['label'], 2)
    return (
        by_label | first_of_each(rows, lambda row: bool(row['passage']), 2) | AGIEVAL_ROWS.get(Path(file).stem, set())
    )


def choose_math(file: str, rows: list[Row]) -> set[int]:
    """One of each level, two with several boxes, those of the fix table, and the odd ones."""
    fixes = fix_table()
    by_level = first_of_each(rows, lambda row: row['level'], 1)
    several = [index for index, row in enumerate(rows) if row['solution'].count('\\boxed{') > 1]
    fixed = {index for index, row in enumerate(rows) if row['problem'] in fixes}
    return by_level | set(several[:2]) | fixed | MATH_ROWS[Path(file).stem]


def fix_table() -> dict[str, str]:
    fixes = json.loads((SCORE_TASKS / 'math' / 'to_be_fixed_questions.json').read_text('utf-8'))
    return {fix['problem']: fix['answer'] for fix in fixes}


DATA_SETS = (
    DataSet(
        name='mmlu_pro',
        folder='mmlu_pro',
        perturbations=('option_order', 'prompt', 'non_greedy'),
        choose=choose_mmlu_pro,
        files={('TIGER-Lab/MMLU-Pro', 'default'): 'mmlu_pro_test.jsonl'},
    ),
    DataSet(
        name='agieval',
        folder='agi_eval',
        perturbations=('option_order', 'prompt', 'non_greedy'),
        choose=choose_agieval,
        files={(f'hails/agieval-{name}', 'default'): f'agieval_v1/{name}.jsonl' for name in AGIEVAL_SUBSETS},
    ),
    DataSet(
        name='math',
        folder='math',
        perturbations=('prompt', 'non_greedy'),
        choose=choose_math,
        files={('EleutherAI/hendrycks_math', name): f'hendrycks_math/{name}.jsonl' for name in MATH_SUBJECTS},
    ),
)


def hails_row(row: Row) -> Row:
    """A row of AGIEval v1 in the form of hails/agieval-*."""
    last = 'ABCDE'[len(row['options']) - 1]
    query = f'{row["passage"] or ""}Q: {row["question"]} Answer Choices: {" ".join(row["options"])}\n'
    return {
        'query': f'{query}A: Among A through {last}, the answer is',
        'choices': row['options'],
        'gold': ['ABCDE'.index(row['label'])],
    }


def question_of(file: str, row: Row) -> Question:
    if file.startswith('mmlu_pro'):
        return score_generations.mmlu_pro_question(row)
    if file.startswith('agieval'):
        return score_generations.agieval_question(row)
    return score_generations.math_question(row, fix_table())


class Rows:
    """The chosen rows of a data set, in the place of `datasets.load_dataset`."""

    def __init__(self, data_set: DataSet, root: Path) -> None:
        self.files, self.numbers, self.rows = data_set.files, {}, {}
        for file in data_set.files.values():
            rows = [json.loads(line) for line in (root / file).read_text('utf-8').removesuffix('\n').split('\n')]
            self.numbers[file] = sorted(data_set.choose(file, rows))
            self.rows[file] = [rows[number] for number in self.numbers[file]]

    def load_dataset(self, path: str, name: str = 'default', **_: Any) -> dict[str, datasets.Dataset]:
        """The rows as lm-eval expects them."""
        file = self.files[path, name]
        rows = [hails_row(row) for row in self.rows[file]] if file.startswith('agieval') else self.rows[file]
        return dict.fromkeys(('test', 'validation'), datasets.Dataset.from_list(rows))

    def questions(self) -> Iterator[Question]:
        """Return what the canned replies know of the rows."""
        for file, rows in self.rows.items():
            yield from (question_of(file, row) for row in rows)
