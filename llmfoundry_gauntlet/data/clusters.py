"""Assign rows to clusters for standard errors: rows that share a passage, story, game, schema or problem.

A rule per data file extracts the text of a row's source from that row alone; rows of any file with the same text form
one cluster. Without a rule, or if it finds nothing, the source is the whole row except its answer, so repeated prompts
and exact duplicates still share a cluster.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Rule = Callable[[Mapping[str, Any]], str]

# Keys with a row's answer or identifier: rows that differ only in these have the same prompt.
_NO_PROMPT = frozenset(
    (
        *('aliases', 'answer', 'answer_index', 'answers', 'canonical_solution', 'chain_of_thought', 'continuation'),
        *('cot_content', 'gold', 'label', 'other', 'solution', 'target', 'targets'),
        *('category', 'id', 'idx', 'question_id', 'src'),
    )
)
# Word problems with fewer words than this, such as 'what is 3 + 4 ?', are too generic to be variants of each other.
_WORDS_OF_A_PROBLEM = 8


def cluster_of(stem: str, row: Mapping[str, Any]) -> str:
    """Return the name of a row's cluster: 16 hexadecimal digits.

    `stem` is the data file's name without folder and suffix, such as 'squad' or 'human_eval-0.5'.
    """
    rule = RULES.get(stem)
    source = (rule(row) if rule else '') or _prompt(row)
    return hashlib.sha256(source.encode('utf-8', 'surrogatepass')).hexdigest()[:16]


def _prompt(row: Mapping[str, Any]) -> str:
    """Return the row without its answer as JSON, or the whole row if nothing else is left."""
    asked = {key: value for key, value in row.items() if key not in _NO_PROMPT}
    return json.dumps(asked or dict(row), sort_keys=True, ensure_ascii=False)


def _found(field: str, pattern: str) -> Rule:
    """Make a rule: the group of a pattern that a field starts with, white space normalized."""
    compiled = re.compile(pattern, re.DOTALL)

    def rule(row: Mapping[str, Any]) -> str:
        match = compiled.match(_text(row, field))
        return ' '.join(match[1].split()) if match else ''

    return rule


def _opening(field: str, head: str, num_words: int) -> Rule:
    """Make a rule: the first words after `head`, for sources reworded slightly from row to row."""
    return _found(field, rf'{head}\s*((?:\S+\s+){{0,{num_words - 1}}}\S+)')


def _wording(row: Mapping[str, Any]) -> str:
    """Return a word problem with each number replaced by '#'; variants differ only in numbers."""
    text = re.sub(r'\d+(?:[.,]\d+)*', '#', _QUESTION_BEFORE_OPTIONS(row))
    return text if len(re.findall(r'[^\W\d_]{2,}', text)) >= _WORDS_OF_A_PROBLEM else ''


def _scheme(row: Mapping[str, Any]) -> str:
    """Return the first two words of a Winograd sentence and the two candidate antecedents.

    The sentences of a pair differ in one word, which may come before or after the pronoun.
    """
    first, second = (option.split() for option in _pair(row, 'context_options'))
    pairs = enumerate(zip(first, second, strict=False))
    same = next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
    return json.dumps([first[:2], first[same:], second[same:]], ensure_ascii=False) if same >= 2 else ''


def _persons(row: Mapping[str, Any]) -> str:
    """Return the two people in a Winogender sentence; each pair occurs in only one template."""
    return ' / '.join(sorted(filter(None, _pair(row, 'choices'))))


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


_QUESTION_BEFORE_OPTIONS = _found('query', r'Question: (.*?)\nA\. ')
_BBQ_QUESTION = _found('query', r'Context: .*\nQuestion: (.*)\nAnswer:')
_PASSAGE = _found('query', r'Passage: (.*)\nQ: ')
_SCORE_PASSAGE = _found('passage', r'(.*)')
_SCORE_AGIEVAL = ('aqua-rat', 'lsat-ar', 'lsat-lr', 'lsat-rc', 'sat-en', 'sat-math')
_HISTORY = r'This question refers to the following information\..*'
_HUMAN_EVAL = (
    *('human_eval', 'human_eval-0.25', 'human_eval-0.5', 'human_eval-0.75'),
    *('human_eval_return_simple', 'human_eval_return_complex', 'processed_human_eval_cpp', 'processed_human_eval_js'),
)

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        # Several questions about one passage, story or game.
        'squad': _found('context', r'Context: (.*)\nQuestion: '),
        'coqa': _found('context', r'[^\n]*\nStory: (.*?)\n(?:Preceding questions:|\nFinal question:)\n'),
        'boolq': _found('query', r'Passage: (.*)\nQuestion: '),
        'siqa': _found('query', r'Context: (.*)\nQuestion: '),
        'agi_eval_lsat_rc': _PASSAGE,
        'agi_eval_lsat_lr': _PASSAGE,
        'agi_eval_lsat_ar': _PASSAGE,
        'agi_eval_sat_en': _PASSAGE,
        'agi_eval_sat_math': _found('context', r'Passage: (.*)\nQ: '),
        'logi_qa': _opening('query', 'Context: ', 8),
        'logiqa-en': _opening('passage', '', 8),
        'bigbench_strange_stories': _opening('query', 'Context: ', 4),
        'bigbench_conlang_translation': _found('context', r'(.*)\nNow, translate the following '),
        'mmlu': _found('query', rf'Question: ({_HISTORY})\n.*?\nChoices\n'),
        'mmlu_pro_test': _found('question', rf'({_HISTORY})\n'),
        **dict.fromkeys(_SCORE_AGIEVAL, _SCORE_PASSAGE),
        # Several sentences, puzzles or problems derived from one.
        'bigbench_logical_deduction': _found('query', r'(.*)\n+Which of the following statements '),
        'hellaswag': _found('query', r'([^:]+: \w.*?)[.?!] '),
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
