"""Read and validate the rows of a data file as Examples, assign them to clusters, and select subsets of them.

A cluster is the rows that share a passage, story, game, schema or problem, for standard errors. A rule per data file
extracts the text of a row's source from that row alone; rows of any file with the same text form one cluster. Without a
rule, or if it finds nothing, the source is the whole row except its answer, so repeated prompts and exact duplicates
still share a cluster.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmfoundry_gauntlet.config.tasks import TaskSpec
from llmfoundry_gauntlet.data.readers import NumberedRow, RowError, field_value, read_task_rows, text_field
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.types import Example

SUBSET_VERSION = 2  # of the selection of subsets; stored in results
LEAST_CLUSTERS = 2  # a task needs two for a standard error
Rule = Callable[[Mapping[str, Any]], str]

# Keys with a row's answer or identifier: rows that differ only in these have the same prompt.
_NO_PROMPT = frozenset(
    {
        # Answers.
        'aliases',
        'answer',
        'answer_index',
        'answers',
        'canonical_solution',
        'chain_of_thought',
        'continuation',
        'cot_content',
        'gold',
        'label',
        'other',
        'solution',
        'target',
        'targets',
        # Identifiers.
        'category',
        'id',
        'idx',
        'question_id',
        'src',
    }
)
# Word problems with fewer words than this, such as 'what is 3 + 4 ?', are too generic to be variants of each other.
_WORDS_OF_A_PROBLEM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """A task's examples, the stems of its optional files that are absent, and warnings about its data.

    `task` is the task with what reading them told about it, for a type whose definition is elsewhere; None for others.
    """

    examples: Sequence[Example]
    absent: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    task: Any = None


def read_examples(task: TaskSpec, data_root: str | Path, parse: Callable[[Mapping[str, Any]], Any]) -> list[Example]:
    """Read all examples of a task in file order. Raise DataError with every malformed row.

    Top-level strings are stripped unless the task sets `strip_dataset: false`; strings in lists are not
    (llm-foundry 0.22, `eval/datasets/utils.py:strip_data`).
    """

    def example_of(number: int, row: Mapping[str, Any]) -> Example:
        if task.strips_rows:
            row = {key: value.strip() if isinstance(value, str) else value for key, value in row.items()}
        category = text_field(row, 'category', allow_empty=False) if task.has_categories else None
        if task.cluster_key is None:
            stem = Path(task.dataset_uri).name.partition('.jsonl')[0]
            cluster = row_cluster(stem, row)
        else:
            named = {task.cluster_key: field_value(row, task.cluster_key)}
            cluster = row_cluster('', named)
        return Example(row=number, category=category, content=parse(row), digest=row_digest(row), cluster=cluster)

    problems: list[str] = []
    source, rows = read_task_rows(task, data_root, problems)
    examples = parse_rows(source, rows, example_of, problems)
    if problems:
        raise DataError(problems)
    return examples


def parse_rows(
    source: str,
    rows: Iterable[NumberedRow],
    parse: Callable[[int, Mapping[str, Any]], Example],
    problems: list[str],
) -> list[Example]:
    """Return the rows as examples; add those for which `parse` raises RowError to `problems`, with file and line."""
    examples = []
    for number, row in rows:
        try:
            if not isinstance(row, Mapping):
                raise RowError(f'is {type(row).__name__}; allowed: a JSON object')
            examples.append(parse(number, row))
        except RowError as error:
            problems.append(error.at(f'{source}:{number + 1}'))
    return examples


def row_digest(row: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a row's content regardless of key order."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def subset(examples: Sequence[Example], num_items: int | None) -> list[Example]:
    """Return the first `num_items` examples of `in_turns`, in their original order; all if `num_items` is None."""
    if num_items is None or num_items >= len(examples):
        return list(examples)
    taken = in_turns(examples)[:num_items]
    return [examples[position] for position in sorted(taken)]


def cluster_name(example: Example) -> str:
    """Return the name of an example's cluster; without a cluster, a digest of the example's file and row."""
    return example.cluster or hashlib.sha256(repr((example.file, example.row)).encode()).hexdigest()


def in_turns(examples: Sequence[Example]) -> list[int]:
    """Return the positions of the examples in the order in which subsets take them (SUBSET_VERSION).

    Within a category every cluster, such as the questions on a passage, gives one example, then every cluster another,
    because scores are most precise with examples from many clusters. Clusters are ordered by name, a digest of the
    rows' content, and examples within a cluster by a digest of their own content. Categories alternate by the share of
    each taken so far. The order of the rows does not matter.
    """
    clusters_by_category: dict[str | None, dict[str, list[int]]] = {}
    for position, example in enumerate(examples):
        clusters = clusters_by_category.setdefault(example.category, {})
        clusters.setdefault(cluster_name(example), []).append(position)

    # The middle of an example's place in its category, as a share, so that large and small categories alternate.
    shares: list[tuple[float, str, int]] = []
    for clusters in clusters_by_category.values():
        order = in_rounds(clusters, examples)
        for number, (name, position) in enumerate(order):
            shares.append(((number + 0.5) / len(order), name, position))
    return [position for _, _, position in sorted(shares)]


def in_rounds(clusters: Mapping[str, Sequence[int]], examples: Sequence[Example]) -> list[tuple[str, int]]:
    """Return the first example of every cluster, then every second one and so on, each with its cluster's name."""

    def content_of(position: int) -> tuple[str, str, int]:
        example = examples[position]
        return example.digest, example.file or '', position

    turns: list[tuple[int, str, int]] = []
    for name, positions in clusters.items():
        ordered = sorted(positions, key=content_of)
        turns += [(turn, name, position) for turn, position in enumerate(ordered)]
    return [(name, position) for _, name, position in sorted(turns)]


def least_items(examples: Sequence[Example], order: Sequence[int]) -> int:
    """Return the least number of examples, taken in this order, that cover two clusters and every category."""
    categories = {example.category for example in examples}
    num_clusters = min(LEAST_CLUSTERS, len({cluster_name(example) for example in examples}))
    covered_categories: set[str | None] = set()
    covered_clusters: set[str] = set()
    for count, position in enumerate(order, start=1):
        covered_categories.add(examples[position].category)
        covered_clusters.add(cluster_name(examples[position]))
        if len(covered_clusters) >= num_clusters and covered_categories == categories:
            return count
    return len(order)


def row_cluster(stem: str, row: Mapping[str, Any]) -> str:
    """Return the name of a row's cluster: 16 hexadecimal digits.

    `stem` is the data file's name without folder and suffix, such as 'squad' or 'human_eval-0.5'.
    """
    rule = RULES.get(stem)
    source = '' if rule is None else rule(row)
    if not source:
        source = _question_json(row)
    return hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def _question_json(row: Mapping[str, Any]) -> str:
    """Return the row without its answer as JSON, or the whole row if nothing else is left."""
    asked = {key: value for key, value in row.items() if key not in _NO_PROMPT}
    return json.dumps(asked or dict(row), sort_keys=True, ensure_ascii=False)


def _group_in(field: str, pattern: str) -> Rule:
    """Make a rule: the group of a pattern that a field starts with, white space normalized."""
    compiled = re.compile(pattern, re.DOTALL)

    def rule(row: Mapping[str, Any]) -> str:
        match = compiled.match(_text(row, field))
        return ' '.join(match[1].split()) if match else ''

    return rule


def _first_words_in(field: str, head: str, num_words: int) -> Rule:
    """Make a rule: the first words after `head`, for sources reworded slightly from row to row."""
    return _group_in(field, rf'{head}\s*((?:\S+\s+){{0,{num_words - 1}}}\S+)')


def _wording(row: Mapping[str, Any]) -> str:
    """Return a word problem with each number replaced by '#'; variants differ only in numbers."""
    text = re.sub(r'\d+(?:[.,]\d+)*', '#', _QUESTION_BEFORE_OPTIONS(row))
    return text if len(re.findall(r'[^\W\d_]{2,}', text)) >= _WORDS_OF_A_PROBLEM else ''


def _scheme(row: Mapping[str, Any]) -> str:
    """Return the first two words of a Winograd sentence and the two candidate antecedents.

    The sentences of a pair differ in one word, which may come before or after the pronoun.
    """
    first, second = (option.split() for option in _pair(row, 'context_options'))
    num_shared = 0
    for word, other_word in zip(first, second, strict=False):
        if word != other_word:
            break
        num_shared += 1
    if num_shared < 2:
        return ''
    return json.dumps([first[:2], first[num_shared:], second[num_shared:]], ensure_ascii=False)


def _persons(row: Mapping[str, Any]) -> str:
    """Return the two people in a Winogender sentence; each pair occurs in only one template."""
    persons = [choice for choice in _pair(row, 'choices') if choice]
    return ' / '.join(sorted(persons))


def _pair(row: Mapping[str, Any], field: str) -> tuple[str, str]:
    """Return a field's two strings; empty ones if it is anything else."""
    match row.get(field):
        case [str(first), str(second)]:
            return first, second
    return '', ''


def _bias_question(row: Mapping[str, Any]) -> str:
    """Return a BBQ question with its category; it is asked about many people in variants of one or two scenes."""
    question = _BBQ_QUESTION(row)
    return f'{_text(row, "category")}: {question}' if question else ''


def _code_problem(row: Mapping[str, Any]) -> str:
    """Return the problem's HumanEval name, also for a translation (CPP/12, JavaScript/12)."""
    return re.sub(r'^(?:CPP|JavaScript)/(?=\d+$)', 'HumanEval/', _text(row, 'task_id').strip())


def _sum(row: Mapping[str, Any]) -> str:
    """Return an arithmetic problem without spaces."""
    return ''.join(_text(row, 'context').split())


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    return value if isinstance(value, str) else ''


_QUESTION_BEFORE_OPTIONS = _group_in('query', r'Question: (.*?)\nA\. ')
_BBQ_QUESTION = _group_in('query', r'Context: .*\nQuestion: (.*)\nAnswer:')
_PASSAGE = _group_in('query', r'Passage: (.*)\nQ: ')
_SCORE_PASSAGE = _group_in('passage', r'(.*)')
_SCORE_AGIEVAL = ('aqua-rat', 'lsat-ar', 'lsat-lr', 'lsat-rc', 'sat-en', 'sat-math')
_HISTORY = r'This question refers to the following information\..*'
_HUMAN_EVAL = (
    'human_eval',
    'human_eval-0.25',
    'human_eval-0.5',
    'human_eval-0.75',
    'human_eval_return_simple',
    'human_eval_return_complex',
    'processed_human_eval_cpp',
    'processed_human_eval_js',
)

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        # Several questions about one passage, story or game.
        'squad': _group_in('context', r'Context: (.*)\nQuestion: '),
        'coqa': _group_in('context', r'[^\n]*\nStory: (.*?)\n(?:Preceding questions:|\nFinal question:)\n'),
        'boolq': _group_in('query', r'Passage: (.*)\nQuestion: '),
        'siqa': _group_in('query', r'Context: (.*)\nQuestion: '),
        'agi_eval_lsat_rc': _PASSAGE,
        'agi_eval_lsat_lr': _PASSAGE,
        'agi_eval_lsat_ar': _PASSAGE,
        'agi_eval_sat_en': _PASSAGE,
        'agi_eval_sat_math': _group_in('context', r'Passage: (.*)\nQ: '),
        'logi_qa': _first_words_in('query', 'Context: ', 8),
        'logiqa-en': _first_words_in('passage', '', 8),
        'bigbench_strange_stories': _first_words_in('query', 'Context: ', 4),
        'bigbench_conlang_translation': _group_in('context', r'(.*)\nNow, translate the following '),
        'mmlu': _group_in('query', rf'Question: ({_HISTORY})\n.*?\nChoices\n'),
        'mmlu_pro_test': _group_in('question', rf'({_HISTORY})\n'),
        **dict.fromkeys(_SCORE_AGIEVAL, _SCORE_PASSAGE),
        # Several sentences, puzzles or problems derived from one.
        'bigbench_logical_deduction': _group_in('query', r'(.*)\n+Which of the following statements '),
        'hellaswag': _group_in('query', r'([^:]+: \w.*?)[.?!] '),
        'winograd_wsc': _scheme,
        'winogender_mc_female': _persons,
        'winogender_mc_male': _persons,
        'bbq': _bias_question,
        'bbq_standin': _bias_question,
        'math_qa': _wording,
        'simple_arithmetic_nospaces': _sum,
        'simple_arithmetic_withspaces': _sum,
        **dict.fromkeys(_HUMAN_EVAL, _code_problem),
    }
)
