"""Clusters: questions on one passage share a name, and different passages have different names."""

from __future__ import annotations

import re

import pytest

from llmfoundry_gauntlet.data.examples import RULES, cluster_of


def names(stem, *rows):
    return [cluster_of(stem, row) for row in rows]


def query(text, **others):
    return {'query': text, 'choices': ['A', 'B'], 'gold': 0, **others}


def context(text, continuation='so'):
    return {'context': text, 'continuation': continuation}


def coqa(story, *asked):
    """Return the last question about a story, after the earlier ones with their answers."""
    before = ''.join(f'Question: {question}\nAnswer: yes\n' for question in asked[:-1])
    preceding = f'\nPreceding questions:\n{before}' if before else '\n'
    return context(f'Please answer.\nStory: {story}{preceding}\nFinal question:\nQuestion: {asked[-1]}\nAnswer: ')


def conlang(pairs, direction, sentence):
    return context(f'Sentences in Ono:\n\n{pairs}\n\n\nNow, translate the following from {direction}: \n{sentence}\n')


def schema(*options):
    return {'context_options': list(options), 'continuation': 'was tired.', 'gold': 1}


def winogender(sentence, *choices):
    return query(f'Sentence: "{sentence}"\nQ: Who does the pronoun refer to? A:', choices=list(choices))


def mmlu(passage, question):
    told = f'This question refers to the following information.\n{passage}\n' if passage else ''
    return query(f'Question: {told}{question}\nChoices\nA. one\nB. two', category='history')


def score(passage, question):
    return {'passage': passage, 'question': question, 'options': ['(A)one', '(B)two'], 'label': 'A', 'other': None}


def problem(number, language='HumanEval', prompt='def f():'):
    return {'task_id': f'{language}/{number}', 'prompt': prompt, 'canonical_solution': ' return 1', 'test': 'f()'}


# For each rule two rows of one source, and one of another.
ROWS = {
    'squad': (
        context('Context: A mill.\nQuestion: Where?\nAnswer: ', 'here'),
        context('Context: A mill. \nQuestion: When?\nAnswer: ', 'now'),
        context('Context: An inn.\nQuestion: Where?\nAnswer: ', 'here'),
    ),
    'coqa': (
        coqa('Ben ran.\n\nHe fell.', 'Who?'),
        coqa('Ben ran.\n\nHe fell.', 'Who?', 'Why?'),
        coqa('Ada ran.', 'Who?'),
    ),
    'boolq': (
        query('Passage: A book on\nQuestion: marks.\nQuestion: is it old?'),
        query('Passage: A book on\nQuestion: marks.\nQuestion: is it new?'),
        query('Passage: A book on\nQuestion: words.\nQuestion: is it old?'),
    ),
    'siqa': (
        query('Context: Ann sat.\nQuestion: Why?\nA. so\nB. no\nAnswer:'),
        query('Context: Ann sat.\nQuestion: Where?\nA. so\nB. no\nAnswer:'),
        query('Context: Ann ran.\nQuestion: Why?\nA. so\nB. no\nAnswer:'),
    ),
    **{
        f'agi_eval_{name}': (
            query('Passage: Salt is cheap.\nQ: Why?\nChoices:\nA.) so\nAnswer:'),
            query('Passage: Salt is cheap.\nQ: Where?\nChoices:\nA.) no\nAnswer:'),
            query('Passage: Tin is cheap.\nQ: Why?\nChoices:\nA.) so\nAnswer:'),
        )
        for name in ('lsat_rc', 'lsat_lr', 'lsat_ar', 'sat_en')
    },
    'agi_eval_sat_math': (
        {'context': 'Passage: $y=2x$.\nQ: What is $y$?', 'answer': '4', 'chain_of_thought': ''},
        {'context': 'Passage: $y=2x$.\nQ: What is $x$?', 'answer': '2', 'chain_of_thought': ''},
        {'context': 'Passage: $y=3x$.\nQ: What is $y$?', 'answer': '6', 'chain_of_thought': ''},
    ),
    'logi_qa': (
        query('Context: Six cooks F, G, H, I, J, and K work.\nQuestion: Who?\nChoices: A. F'),
        query('Context: Six cooks F, G, H, I, J, and L work.\nQuestion: When?\nChoices: A. K'),
        query('Context: Six cooks A, B, C, D, E and F work.\nQuestion: Who?\nChoices: A. F'),
    ),
    'bigbench_strange_stories': (
        query('Context: Mia gives Ben a scarf.\nQ: Why?\nAnswer: '),
        query('Context: Mia gives Ben a new scarf. Q: Is it green?\nAnswer: '),
        query('Context: Mia gives Tom a scarf.\nQ: Why?\nAnswer: '),
    ),
    'bigbench_conlang_translation': (
        conlang('ONO: Su mo.\nENGLISH: A dog.', 'Ono to English', 'ONO: Mo su.'),
        conlang('ONO: Su mo.\nENGLISH: A dog.', 'English to Ono', 'ENGLISH: Two dogs.'),
        conlang('ONO: Su ki.\nENGLISH: A cat.', 'Ono to English', 'ONO: Mo su.'),
    ),
    'mmlu': (mmlu('"We"\nA king', 'Who?'), mmlu('"We"\nA king', 'When?'), mmlu('"We"\nA queen', 'Who?')),
    'mmlu_pro_test': (
        {'question': 'This question refers to the following information.\n"We"\nA king\nWho?', 'options': ['a', 'b']},
        {'question': 'This question refers to the following information.\n"We"\nA king\nWhen?', 'options': ['c', 'd']},
        {'question': 'This question refers to the following information.\n"We"\nA queen\nWho?', 'options': ['a', 'b']},
    ),
    **{
        name: (score('Salt is cheap.', 'Why?'), score(' Salt is cheap.', 'Where?'), score('Tin is cheap.', 'Why?'))
        for name in ('aqua-rat', 'lsat-ar', 'lsat-lr', 'lsat-rc', 'sat-en', 'sat-math')
    },
    'logiqa-en': (
        score('Six cooks F, G, H, I, J, and K work.', 'Who?'),
        score('Six cooks F, G, H, I, J, and L work.', 'When?'),
        score('Six cooks A, B, C, D, E, and F work.', 'Who?'),
    ),
    'bigbench_logical_deduction': (
        query('Three cups stand.\n\nThe red is first.\nWhich of the following statements is right?\n\nA. one\nB. two'),
        query('Three cups stand.\n\nThe red is first.\nWhich of the following statements is right?\n\nA. two\nB. one'),
        query('Three cups stand.\n\nThe red is last.\nWhich of the following statements is right?\n\nA. one\nB. two'),
    ),
    'hellaswag': (
        query('Baking: A cook mixes eggs. He', choices=['stirs.', 'sings.']),
        query('Baking: A cook mixes eggs. He stirs. Then he', choices=['fries them.', 'rides them.']),
        query('Baking: A girl mixes eggs. He', choices=['stirs.', 'sings.']),
    ),
    'winograd_wsc': (
        schema('The cup fell on the plate but the cup', 'The cup fell on the plate but the plate'),
        schema('The cup fell off the plate, so the cup', 'The cup fell off the plate, so the plate'),
        schema('The cup fell on the rug but the cup', 'The cup fell on the rug but the rug'),
    ),
    **{
        f'winogender_mc_{name}': (
            winogender('The pilot met the cook before she flew.', 'the pilot', 'the cook'),
            winogender('The pilot met the cook to taste his soup.', 'the cook', 'the pilot'),
            winogender('The pilot met the boy before she flew.', 'the pilot', 'the boy'),
        )
        for name in ('female', 'male')
    },
    **{
        name: (
            query('Context: Ann and Bob sang.\nQuestion: Who sang well?\nAnswer:', category='Sex'),
            query('Context: Eva and Tom sang. Eva sang well.\nQuestion: Who sang well?\nAnswer:', category='Sex'),
            query('Context: Ann and Bob sang.\nQuestion: Who sang badly?\nAnswer:', category='Sex'),
        )
        for name in ('bbq', 'bbq_standin')
    },
    'math_qa': (
        query('Question: a train of 100 m goes past a pole in 5.5 seconds . how fast ?\nA. 1\nB. 2\nAnswer: '),
        query('Question: a train of 1,250 m goes past a pole in 20 seconds . how fast ?\nA. 3\nB. 4\nAnswer: '),
        query('Question: a truck of 100 m goes past a pole in 5.5 seconds . how fast ?\nA. 1\nB. 2\nAnswer: '),
    ),
    **{
        f'simple_arithmetic_{name}': (context('2 + 3 =', ' 5'), context('2+3=', '5'), context('2+4=', '6'))
        for name in ('nospaces', 'withspaces')
    },
    **{
        name: (problem(12), problem(12, 'CPP', 'int f() {'), problem(1))
        for name in ('human_eval', 'human_eval-0.25', 'human_eval-0.5', 'human_eval-0.75')
    },
    **{
        f'human_eval_return_{name}': (problem(2), problem(2, prompt='def g():'), problem(12))
        for name in ('simple', 'complex')
    },
    'processed_human_eval_cpp': (problem(12, 'CPP'), problem(12, 'HumanEval'), problem(2, 'CPP')),
    'processed_human_eval_js': (problem(12, 'JavaScript'), problem(12, 'CPP'), problem(2, 'JavaScript')),
}

# Rows of these files in which the file's rule finds nothing.
WITHOUT = {
    'squad': context('A mill. Where?'),
    'agi_eval_sat_math': {'context': 'Q: What is $2x$?', 'answer': '4', 'chain_of_thought': ''},
    'logi_qa': query('Six cooks F, G, H, I, J and K work.\nQuestion: Who?'),
    'mmlu': mmlu('', 'Who?'),
    'aqua-rat': score(None, 'How many?'),
    'winograd_wsc': {'context_options': ['Ann sat and Ann', 'Bob sat and Bob'], 'continuation': 'slept.', 'gold': 0},
    'winogender_mc_male': query('Who?', choices=['the cook', 'the pilot', 'the boy']),
    'bbq': query('Who sang well?', category='Sex'),
    'math_qa': query('Question: what is 3 + 4 ?\nA. 7\nB. 8\nAnswer: '),
    'simple_arithmetic_nospaces': {'query': '2+3=', 'continuation': '5'},
    'human_eval': {'prompt': 'def f():', 'canonical_solution': ' return 1'},
}


def test_every_rule_is_tested():
    assert sorted(ROWS) == sorted(RULES)
    assert set(WITHOUT) <= set(RULES)


@pytest.mark.parametrize('stem', ROWS)
def test_rows_with_the_same_source_share_a_cluster(stem):
    first, second, third = names(stem, *ROWS[stem])
    assert first == second
    assert third != first
    assert re.fullmatch('[0-9a-f]{16}', first)


@pytest.mark.parametrize('stem', WITHOUT)
def test_a_row_that_its_rule_does_not_match_falls_back_to_its_prompt(stem):
    row = WITHOUT[stem]
    assert cluster_of(stem, row) == cluster_of('of_no_rule', row)
    assert len(set(names(stem, row, *ROWS[stem]))) == 3


def test_without_a_rule_repeated_prompts_share_a_cluster_whatever_file_key_order_and_answers():
    one, two = context('Paris is in', 'France'), context('Paris is in', 'Europe')
    assert cluster_of('any', one) == cluster_of('any', two) != cluster_of('any', context('Rome is in', 'Italy'))
    asked = {'context': 'How many?', 'answer': '1', 'aliases': ['one'], 'chain_of_thought': 'half of 2'}
    assert cluster_of('any', asked) == cluster_of('any', {'context': 'How many?', 'answer': '2', 'aliases': []})
    row = query('Why is it so?')
    assert cluster_of('any', row) == cluster_of('other', dict(reversed(row.items())))
    assert cluster_of('any', query('Why?', category='a', id=1)) == cluster_of('any', query('Why?', category='b', id=2))


def test_sources_are_shared_between_files():
    one, two, _ = ROWS['winogender_mc_male']
    assert cluster_of('winogender_mc_male', one) == cluster_of('winogender_mc_female', two)
    passage = query('Passage: Salt is cheap.\nQ: Why?\nChoices:\nA.) so\nAnswer:')
    assert cluster_of('agi_eval_lsat_rc', passage) == cluster_of('lsat-rc', score('Salt is cheap.', 'Where?'))
    assert cluster_of('logi_qa', ROWS['logi_qa'][0]) == cluster_of('logiqa-en', ROWS['logiqa-en'][1])
    spaced, dense, _ = ROWS['simple_arithmetic_nospaces']
    assert cluster_of('simple_arithmetic_withspaces', spaced) == cluster_of('simple_arithmetic_nospaces', dense)
    assert cluster_of('human_eval', problem(12)) == cluster_of('processed_human_eval_cpp', problem(12, 'CPP'))
    assert cluster_of('human_eval', problem(12)) != cluster_of('human_eval', problem(12, 'Hand'))
    assert cluster_of('mmlu', ROWS['mmlu'][0]) == cluster_of('mmlu_pro_test', ROWS['mmlu_pro_test'][1])


@pytest.mark.parametrize('stem', RULES)
def test_a_row_with_fields_of_other_kinds_is_named_as_in_a_file_without_a_rule(stem):
    kinds = (None, 3, ['one', 2], {})
    fields = ('query', 'context', 'passage', 'question', 'choices', 'context_options', 'task_id')
    for row in (dict.fromkeys(fields, kind) for kind in kinds):
        assert cluster_of(stem, row) == cluster_of('of_no_rule', row)
