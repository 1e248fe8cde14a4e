"""The variants of a question."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.config.score import ScoreSpec
from llmfoundry_gauntlet.data.score_rows import LetteredQuestion, MathQuestion
from llmfoundry_gauntlet.tasks.templates import (
    NO_TEMPLATE,
    Posed,
    PosedProblem,
    Template,
    Templates,
    perturbation_of,
    seed_of,
    variants,
)
from llmfoundry_gauntlet.types import Example

TEN = tuple(Template(f'{number}. {{question}}{{options}}') for number in range(10))
TEMPLATES = Templates(
    option_order=Template('Order: {question}{options}'),
    non_greedy=Template('Drawn: {question}{options}', ' ({letter}) {option}'),
    prompt=TEN,
)
QUESTION = LetteredQuestion('Who?', ('he', 'she', 'it'), 1, 'law')
EXAMPLE = Example(row=7, content=QUESTION, category='law', file='sat-en')

# Options may be equal, even to the gold one.
QUESTIONS = st.lists(st.sampled_from('uvwxyz'), min_size=2, max_size=26).flatmap(
    lambda options: st.integers(0, len(options) - 1).map(lambda gold: LetteredQuestion('?', tuple(options), gold))
)


def asked(question, **keys) -> list[Example]:
    spec = ScoreSpec(**{'dataset': 'mmlu_pro', **keys})
    example = Example(row=7, content=question, category='law', file='sat-en')
    return list(variants(example, spec, TEMPLATES))


@given(question=QUESTIONS)
def test_option_order_swaps_the_gold_option_into_every_place(question: LetteredQuestion):
    """Mutation: the displaced option is lost, or put anywhere but in the place of the gold one."""
    found = asked(question, perturbations=('option_order',))
    letters = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'[: len(question.options)]
    assert [example.variant for example in found] == [f'option_order:{letter}' for letter in letters]
    right = question.options[question.gold]
    for place, example in enumerate(found):
        posed: Posed = example.content
        assert (posed.gold, posed.own_gold, posed.num_choices) == (place, question.gold, len(letters))
        assert posed.question.options[place] == right
        assert sorted(posed.question.options) == sorted(question.options)
        moved = [i for i, option in enumerate(question.options) if posed.question.options[i] != option]
        assert set(moved) <= {place, question.gold}
        assert posed.question.options[question.gold] == question.options[place]
        assert (posed.question.text, posed.question.topic) == (question.text, question.topic)
    assert found[question.gold].content.question == question


@given(question=QUESTIONS)
def test_other_perturbations_do_not_move_options(question: LetteredQuestion):
    for example in asked(question, perturbations=('prompt', 'non_greedy')):
        assert example.content.question == question
        assert example.content.gold == example.content.own_gold == question.gold


def test_variants_are_named_and_keep_row_file_and_category():
    found = asked(QUESTION, seeds=(0, 12))
    assert [example.variant for example in found] == [
        *(f'option_order:{letter}' for letter in 'ABC'),
        *(f'prompt:{number}' for number in range(10)),
        *('non_greedy:0', 'non_greedy:12'),
    ]
    assert {(example.row, example.file, example.category) for example in found} == {(7, 'sat-en', 'law')}


def test_variants_use_their_prompts():
    texts = {example.variant: example.content.text for example in asked(QUESTION)}
    assert texts['option_order:A'] == 'Order: Who?\nA: she\nB: he\nC: it'
    assert texts['option_order:B'] == 'Order: Who?\nA: he\nB: she\nC: it'
    assert texts['option_order:C'] == 'Order: Who?\nA: he\nB: it\nC: she'
    assert texts['prompt:9'] == '9. Who?\nA: he\nB: she\nC: it'
    assert {texts[f'non_greedy:{seed}'] for seed in range(1, 6)} == {'Drawn: Who? (A) he (B) she (C) it'}


def test_likelihood_has_no_non_greedy_variants_and_math_no_option_order():
    found = asked(QUESTION, answers='likelihood')
    assert {perturbation_of(example.variant) for example in found} == {'option_order', 'prompt'}
    templates = Templates(
        option_order=NO_TEMPLATE, non_greedy=Template('{question}'), prompt=(Template('{question}!'),) * 10
    )
    problem = MathQuestion('1+1', r'\boxed{2}', '2')
    found = list(variants(Example(row=0, content=problem), ScoreSpec(dataset='math', seeds=(3,)), templates))
    assert [example.variant for example in found] == [*(f'prompt:{number}' for number in range(10)), 'non_greedy:3']
    assert [seed_of(example.variant) for example in found[-2:]] == [None, 3] and seed_of(None) is None
    posed: PosedProblem = found[-1].content
    assert (posed.text, posed.gold) == ('1+1', '2')
    assert found[0].content.text == '1+1!'
