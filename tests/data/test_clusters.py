"""Clusters: questions on one passage share a name, and different passages have different names."""

from __future__ import annotations

import re

import pytest

from llmfoundry_gauntlet.data.examples import RULES, row_cluster

HISTORY = 'This question refers to the following information.\n"We"\n'

# The field that a rule reads, its form with a source and a question, and two sources.
FORMS = {
    'squad': ('context', 'Context: {}\nQuestion: {}?\nAnswer: ', 'A mill.', 'An inn.'),
    'boolq': ('query', 'Passage: {}\nQuestion: {}?', 'A book on\nQuestion: marks.', 'A book on\nQuestion: words.'),
    'siqa': ('query', 'Context: {}\nQuestion: {}?\nA. so\nB. no\nAnswer:', 'Ann sat.', 'Ann ran.'),
    **dict.fromkeys(
        ('agi_eval_lsat_rc', 'agi_eval_lsat_lr', 'agi_eval_lsat_ar', 'agi_eval_sat_en'),
        ('query', 'Passage: {}\nQ: {}?\nChoices:\nA.) so\nAnswer:', 'Salt is cheap.', 'Tin is cheap.'),
    ),
    'agi_eval_sat_math': ('context', 'Passage: {}\nQ: {}?', '$y=2x$.', '$y=3x$.'),
    'bigbench_conlang_translation': ('context', 'ONO: {}\n\n\nNow, translate the following from {}', 'Mo.', 'Ki.'),
    'mmlu': ('query', f'Question: {HISTORY}{{}}\n{{}}?\nChoices\nA. one\nB. two', 'A king', 'A queen'),
    'mmlu_pro_test': ('question', f'{HISTORY}{{}}\n{{}}?', 'A king', 'A queen'),
    **dict.fromkeys(
        ('aqua-rat', 'lsat-ar', 'lsat-lr', 'lsat-rc', 'sat-en', 'sat-math'),
        ('passage', '{}', ' Salt is cheap.', 'Tin is cheap.'),
    ),
    'bigbench_logical_deduction': (
        'query',
        '{}\nWhich of the following statements is so?\n\nA. {}',
        'Red\n\nis first.',
        'One.',
    ),
    **dict.fromkeys(
        ('bbq', 'bbq_standin'), ('query', 'Context: {1}.\nQuestion: {0}\nAnswer:', 'Who sang?', 'Who slept?')
    ),
}
# The field that a rule reads, two of its values from one source, and one from another.
VALUES = {
    'coqa': (
        'context',
        'Answer.\nStory: Ben ran.\n\nHe fell.\n\nFinal question:\nQuestion: Who?\nAnswer: ',
        'Answer.\nStory: Ben ran.\n\nHe fell.\nPreceding questions:\nQuestion: Who?\n\nFinal question:\nQuestion: Why?',
        'Answer.\nStory: Ada ran.\n\nFinal question:\nQuestion: Who?\nAnswer: ',
    ),
    'logi_qa': (
        'query',
        'Context: Six cooks F, G, H, I, J, and K work.\nQuestion: Who?\nChoices: A. F',
        'Context: Six cooks F, G, H, I, J, and L work.\nQuestion: When?\nChoices: A. K',
        'Context: Six cooks A, B, C, D, E and F work.\nQuestion: Who?\nChoices: A. F',
    ),
    'logiqa-en': (
        'passage',
        'Six cooks F, G, H, I, J, and K work.',
        'Six cooks F, G, H, I, J, and L work.',
        'Six cooks A work.',
    ),
    'bigbench_strange_stories': (
        'query',
        'Context: Mia gives Ben a scarf.\nQ: Why?\nAnswer: ',
        'Context: Mia gives Ben a new scarf. Q: Is it green?\nAnswer: ',
        'Context: Mia gives Tom a scarf.\nQ: Why?\nAnswer: ',
    ),
    'hellaswag': (
        'query',
        'Baking: A cook mixes eggs. He',
        'Baking: A cook mixes eggs. He stirs. He',
        'Baking: A girl mixes eggs. He',
    ),
    'math_qa': (
        'query',
        'Question: a train of 100 m goes past a pole in 5.5 seconds . how fast ?\nA. 1\nB. 2\nAnswer: ',
        'Question: a train of 1,250 m goes past a pole in 20 seconds . how fast ?\nA. 3\nB. 4\nAnswer: ',
        'Question: a truck of 100 m goes past a pole in 5.5 seconds . how fast ?\nA. 1\nB. 2\nAnswer: ',
    ),
    **{f'simple_arithmetic_{name}': ('context', '2 + 3 =', '2+3=', '2+4=') for name in ('nospaces', 'withspaces')},
    **dict.fromkeys(
        ('human_eval', 'human_eval-0.25', 'human_eval-0.5', 'human_eval-0.75', 'human_eval_return_simple'),
        ('task_id', 'HumanEval/12', 'CPP/12', 'HumanEval/1'),
    ),
    'human_eval_return_complex': ('task_id', 'HumanEval/2', 'HumanEval/2', 'Hand/2'),
    'processed_human_eval_cpp': ('task_id', 'CPP/12', 'HumanEval/12', 'CPP/2'),
    'processed_human_eval_js': ('task_id', 'JavaScript/12', 'CPP/12', 'JavaScript/2'),
    'winograd_wsc': (
        'context_options',
        ['The cup fell on the plate but the cup', 'The cup fell on the plate but the plate'],
        ['The cup fell off the plate, so the cup', 'The cup fell off the plate, so the plate'],
        ['The cup fell on the rug but the cup', 'The cup fell on the rug but the rug'],
    ),
    **dict.fromkeys(
        ('winogender_mc_female', 'winogender_mc_male'),
        ('choices', ['the pilot', 'the cook'], ['the cook', 'the pilot'], ['the pilot', 'the boy']),
    ),
    **{
        stem: (field, form.format(source, 'Who'), form.format(source, 'When'), form.format(other, 'Who'))
        for stem, (field, form, source, other) in FORMS.items()
    },
}
ROWS = {
    stem: [{field: value, 'n': number} for number, value in enumerate(values)]
    for stem, (field, *values) in VALUES.items()
}

# Rows of these files in which the file's rule finds nothing.
WITHOUT = {
    'squad': {'context': 'A mill. Where?'},
    'agi_eval_sat_math': {'context': 'Q: What is $2x$?'},
    'logi_qa': {'query': 'Six cooks F, G, H, I, J and K work.\nQuestion: Who?'},
    'mmlu': {'query': 'Question: Who?\nChoices\nA. one\nB. two'},
    'aqua-rat': {'passage': None, 'question': 'How many?'},
    'winograd_wsc': {'context_options': ['Ann sat and Ann', 'Bob sat and Bob']},
    'winogender_mc_male': {'choices': ['the cook', 'the pilot', 'the boy']},
    'bbq': {'query': 'Who sang well?', 'category': 'Sex'},
    'math_qa': {'query': 'Question: what is 3 + 4 ?\nA. 7\nB. 8\nAnswer: '},
    'simple_arithmetic_nospaces': {'query': '2+3=', 'continuation': '5'},
    'human_eval': {'prompt': 'def f():', 'canonical_solution': ' return 1'},
}


def test_every_rule_is_tested():
    assert sorted(ROWS) == sorted(RULES)


@pytest.mark.parametrize('stem', ROWS)
def test_rows_with_the_same_source_share_a_cluster(stem: str):
    first, second, third = (row_cluster(stem, row) for row in ROWS[stem])
    assert first == second != third
    assert re.fullmatch('[0-9a-f]{16}', first)


@pytest.mark.parametrize('stem', WITHOUT)
def test_a_row_that_its_rule_does_not_match_falls_back_to_its_prompt(stem: str):
    row = WITHOUT[stem]
    assert row_cluster(stem, row) == row_cluster('of_no_rule', row)
    assert len({row_cluster(stem, other) for other in (row, *ROWS[stem])}) == 3


@pytest.mark.parametrize('stem', RULES)
def test_a_row_with_fields_of_other_kinds_is_named_as_in_a_file_without_a_rule(stem: str):
    fields = ('query', 'context', 'passage', 'question', 'choices', 'context_options', 'task_id')
    for row in (dict.fromkeys(fields, kind) for kind in (None, 3, ['one', 2], {})):
        assert row_cluster(stem, row) == row_cluster('of_no_rule', row)


def test_without_a_rule_repeated_prompts_share_a_cluster_whatever_file_key_order_and_answers():
    one, two = (
        {'context': 'Paris is in', 'continuation': 'France'},
        {'context': 'Paris is in', 'continuation': 'Europe'},
    )
    assert row_cluster('any', one) == row_cluster('other', dict(reversed(two.items())))
    assert row_cluster('any', one) != row_cluster('any', {'context': 'Rome is in', 'continuation': 'France'})
    asked = {'context': 'How many?', 'answer': '1', 'aliases': ['one'], 'chain_of_thought': 'half of 2'}
    assert row_cluster('any', asked) == row_cluster('any', {'context': 'How many?', 'answer': '2', 'aliases': []})
    same = ({'query': 'Why?', 'category': name, 'id': number, 'gold': number} for number, name in enumerate('ab'))
    assert len({row_cluster('any', row) for row in same}) == 1


@pytest.mark.parametrize(
    ('stem', 'other'),
    [
        ('winogender_mc_male', 'winogender_mc_female'),
        ('agi_eval_lsat_rc', 'lsat-rc'),
        ('logi_qa', 'logiqa-en'),
        ('simple_arithmetic_withspaces', 'simple_arithmetic_nospaces'),
        ('human_eval', 'processed_human_eval_cpp'),
        ('mmlu', 'mmlu_pro_test'),
    ],
)
def test_sources_are_shared_between_files(stem: str, other: str):
    assert row_cluster(stem, ROWS[stem][0]) == row_cluster(other, ROWS[other][1])
