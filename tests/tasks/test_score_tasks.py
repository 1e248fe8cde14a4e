"""SCORE's task types: requests, sampling and scoring."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from score_runs import LAW, write_score_files

from llmfoundry_gauntlet.data.score_rows import LetteredQuestion, MathQuestion
from llmfoundry_gauntlet.errors import ConfigError, DataError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.scoring.likelihood import NON_FINITE
from llmfoundry_gauntlet.scoring.mathematics import Comparer
from llmfoundry_gauntlet.scoring.text import NON_FINITE_GENERATION
from llmfoundry_gauntlet.tasks.base import draw_seed
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.items import Preparation, item_result, untokenized_items
from llmfoundry_gauntlet.tasks.score import (
    TRUNCATED_REASON,
    UNPARSED,
    ScoreTask,
)
from llmfoundry_gauntlet.tasks.templates import Posed, Template
from llmfoundry_gauntlet.types import Generation, ItemKey, Sampling, Score, ScoreOutput, StopRule

KEY = ItemKey('score_mmlu_pro/0-shot', 0, variant='prompt:0')
QUESTION = LetteredQuestion('Which?', ('red', 'deep blue', 'green'), 1)
POSED = Posed(QUESTION, Template('{question}{options}'), 1)

ASKED = {'own_gold': 'B', 'num_options': 3}
FACTS: dict[str | None, dict[str, str | int]] = {  # kept of an answer to the question, for its robustness
    None: ASKED,
    **{letter: {**ASKED, 'option': POSED.question.options['ABC'.index(letter)]} for letter in 'ABC'},
}


def task_of(dataset: str = 'mmlu_pro', **keys: Any) -> ScoreTask:
    return load_suite(None, None, {'dataset': dataset, **keys}).tasks[0]


def score_of(text: str, content: Posed = POSED, *, extraction: str = 'tolerant', **more: Any) -> Score:
    """Return the score of a generation that chooses a letter."""
    return task_of(answer_extraction=extraction).score(Generation(key=KEY, text=text, **more), content)


@pytest.fixture(scope='module')
def comparer() -> Iterator[Comparer]:
    with Comparer() as comparer:
        yield comparer


def math_score(text: str, content: Posed, comparer: Comparer, *, extraction: str = 'tolerant', **more: Any) -> Score:
    """Return the score of a generation with a boxed answer."""
    task = task_of('math', answer_extraction=extraction)
    return task.score_compared(Generation(key=KEY, text=text, **more), content, comparer)


@pytest.mark.parametrize(
    ('text', 'tolerant', 'reference'),
    [
        ('The best answer is B', 'B', 'B'),
        ('B', 'B', 'B'),
        ('B\n', 'B', None),  # generations are not stripped first
        (' B', 'B', None),
        (r'The best answer is $\boxed{B}$', 'B', None),
        ('The best answer is C', 'C', 'C'),
        ('The best answer is D', None, None),  # there are three options
        ('', None, None),
    ],
)
def test_letters_are_right_wrong_or_unparsed(text: str, tolerant: str | None, reference: str | None):
    for extraction, letter in (('tolerant', tolerant), ('reference', reference)):
        assert score_of(text, extraction=extraction) == Score(
            value=float(letter == 'B'),
            predicted=None if letter is None else 'ABC'.index(letter),
            answer=letter,
            reason=UNPARSED if letter is None else None,
            facts=FACTS[letter],
        )
    reason = '; '.join(([] if tolerant else [UNPARSED]) + [TRUNCATED_REASON])
    assert score_of(text, is_truncated=True) == replace(score_of(text), reason=reason)


def test_scoring_is_by_letter_even_if_options_have_the_same_text():
    twice = Posed(LetteredQuestion('Which?', ('red', 'blue', 'blue'), 1), Template('{question}{options}'), 1)
    assert score_of('The best answer is C', twice).value == 0
    assert score_of('The best answer is B', twice).value == 1
    assert score_of('The best answer is blue', twice).answer is None  # it may be either


def test_generations_from_non_finite_logits_are_unscored(comparer: Comparer):
    of_letters = score_of('The best answer is B', is_finite=False)
    of_boxes = math_score(r'$\boxed{0.5}$', SUM, comparer, is_finite=False)

    assert of_letters == of_boxes == Score(value=None, reason=NON_FINITE_GENERATION)


SUM = Posed(MathQuestion('1/4+1/4?', '', r'\frac{1}{2}'), Template('{question}'))


@pytest.mark.parametrize(
    ('text', 'answer', 'credit', 'reason'),
    [
        (r'So it is $\boxed{\frac{1}{2}}$.', r'\frac{1}{2}', 1.0, None),
        (r'So it is $\boxed{0.5}$.', '0.5', 1.0, None),
        (r'$\boxed{1}$, no: $\boxed{0.5}$', '0.5', 1.0, None),
        (r'$\boxed{0.25}$', '0.25', 0.0, None),
        ('It is 1/2', None, 0.0, UNPARSED),
        (r'So: $\boxed{}$', None, 0.0, UNPARSED),
    ],
)
@pytest.mark.parametrize('extraction', ['tolerant', 'reference'])
def test_boxed_answers_are_right_if_equal(comparer, extraction: str, text: str, answer: str | None, credit, reason):
    score = math_score(text, SUM, comparer, extraction=extraction)

    assert score == Score(value=credit, answer=answer, reason=reason)


@pytest.mark.parametrize(
    ('prompt', 'text', 'answer'),
    [
        (r'{question} End with $\boxed{{the sum}}$.', r'$\boxed{\text{The sum}}$', None),
        (r'{question} End with $\boxed{{X}}$.', r'$\boxed{0.5}$, as $\boxed{x}$', '0.5'),
        (r'{question} End with $\boxed{{X}}$.', r'$\boxed{-X}$', '-X'),
        (r'{question} For example, $\boxed{{0.5}}$.', r'$\boxed{0.5}$', '0.5'),
        ('{question}', r'$\boxed{X}$', 'X'),
    ],
)
def test_what_stands_in_the_box_of_the_prompt_is_no_answer(comparer, prompt: str, text: str, answer: str | None):
    score = math_score(text, replace(SUM, template=Template(prompt)), comparer)

    assert (score.answer, score.value) == (answer, float(answer == '0.5'))


def scored(*means: float) -> ScoreOutput:
    one = np.ones(1, np.int64)
    return ScoreOutput(
        key=KEY,
        logprobs=tuple(np.array([mean]) for mean in means),
        is_argmax=(one.astype(bool),) * len(means),
        num_top=(one,) * len(means),
    )


@pytest.mark.parametrize(
    ('logprobs', 'value', 'predicted', 'letter'),
    [
        ((-3, -1, -2), 1.0, 1, 'B'),
        ((-1, -3, -2), 0.0, 0, 'A'),
    ],
)
def test_the_most_probable_letter_is_predicted(logprobs, value: float, predicted: int, letter: str):
    score = task_of(answers='likelihood').score(scored(*logprobs), POSED)
    assert score == Score(value=value, predicted=predicted, answer=letter, facts=FACTS[letter])


# `semantics` changes no score: SCORE has its own `answer_extraction`.
of_either_semantics = pytest.mark.parametrize('semantics', ['corrected', 'reference'])


@of_either_semantics
def test_a_tie_with_the_gold_letter_scores_a_half(semantics: str):
    task = replace(task_of(answers='likelihood'), semantics=semantics)
    tie = task.score(scored(-3, -1, -1), POSED)
    assert (tie.value, tie.predicted, tie.answer) == (0.5, 1, 'B')
    assert 'tie' in tie.reason


@of_either_semantics
@pytest.mark.parametrize('logprob', [float('nan'), float('-inf')])
def test_a_letter_without_a_finite_probability_is_unscored(logprob: float, semantics: str):
    task = replace(task_of(answers='likelihood'), semantics=semantics)
    assert task.score(scored(logprob, -1, -2), POSED) == Score(value=None, reason=NON_FINITE)


def test_likelihood_tasks_accept_text_answers():
    score_text = task_of(answers='likelihood').score_text
    assert score_text(' B.', POSED) == Score(value=1.0, predicted=1, answer='B', facts=FACTS['B'])
    assert score_text('no idea', POSED) == Score(value=0.0, reason=UNPARSED, facts=FACTS[None])


@pytest.fixture
def data_root(write_jsonl, tmp_path) -> Path:
    write_score_files(write_jsonl, 'score', LAW, {**LAW, 'question': 'Why?', 'category': 'math'})
    return tmp_path


def items_of(task: ScoreTask, data_root: Path, tokenizer: Any, *, max_seq_len: int = 200) -> list[Any]:
    examples = task.read(data_root).examples
    return Preparation(task=task, examples=examples, encoder=Encoder(tokenizer), max_seq_len=max_seq_len).items()


def text(ids) -> str:
    return ''.join(map(chr, ids)).replace('\1', '^')


def test_letters_are_scored_after_the_lead_of_an_answer(data_root, character_tokenizer):
    items = items_of(task_of(answers='likelihood'), data_root, character_tokenizer)
    assert len(items) == 2 * (3 + 10)
    first = items[0].request
    assert text(first.contexts[0]) == '^Who?\nA: she\nB: he\nC: it\nThe best answer is'
    assert [text(ids) for ids in first.continuations] == [' A', ' B', ' C']
    assert all(context is first.contexts[0] for context in first.contexts)
    assert not any(item.request.prompt_shortened or item.request.unscorable for item in items)


def test_generations_follow_the_prompt_alone_and_keep_white_space(data_root, character_tokenizer):
    items = items_of(task_of(), data_root, character_tokenizer)
    assert text(items[0].request.context) == '^Who?\nA: she\nB: he\nC: it'
    assert all(item.request.stops == StopRule() and item.request.verbatim for item in items)
    task = task_of()
    result = item_result(items[0], Generation(key=items[0].request.key, text=' B\n\n \t'), task)
    assert result.text == ' B\n\n \t'


@pytest.mark.parametrize(
    ('max_new_tokens', 'max_seq_len', 'expected'), [(1024, 200, 100), (1024, 201, 100), (7, 200, 7), (1024, 3, 1)]
)
@pytest.mark.parametrize('dataset', ['mmlu_pro', 'math'])
def test_a_generation_has_at_most_half_of_the_length(
    data_root, character_tokenizer, dataset: str, max_new_tokens: int, max_seq_len: int, expected: int
):
    task = task_of(dataset, max_new_tokens=max_new_tokens)
    for item in items_of(task, data_root, character_tokenizer, max_seq_len=max_seq_len):
        assert item.request.max_new_tokens == expected
        assert item.request.length <= max_seq_len


def test_only_non_greedy_variants_are_sampled_each_with_its_seed(data_root, character_tokenizer):
    """Also in exported requests. Mutation: one seed for all, or prompts sampled too."""
    task = task_of(seeds=[0, 12], temperature=0.5)
    items = items_of(task, data_root, character_tokenizer)
    for item in items:
        perturbation, _, name = item.request.key.variant.partition(':')
        drawn = Sampling(temperature=0.5, top_p=1.0, top_k=0, seed=int(name)) if perturbation == 'non_greedy' else None
        assert item.request.sampling == (drawn or Sampling())
    examples = task.read(data_root).examples
    exported = {item.key: item.request.sampling for item, _ in untokenized_items(task, examples, examples)}
    assert exported == {item.key: item.request.sampling for item in items}
    drawn = [item.request for item in items if item.request.sampling.temperature > 0]
    assert len({draw_seed(request.sampling, request.key) for request in drawn}) == len(drawn) == 4


def test_subset_items_counts_questions_and_keeps_all_their_variants(data_root):
    assert len(task_of().read(data_root).examples) == 2 * 18
    examples_of_one = task_of(subset_items=1).read(data_root).examples
    assert len(examples_of_one) == 18
    assert len({example.row for example in examples_of_one}) == 1
    assert len(task_of(subset_items=99).read(data_root).examples) == 2 * 18


def test_a_solution_without_an_answer_is_an_error_with_its_line(write_jsonl, data_root):
    write_jsonl('score/hendrycks_math/algebra.jsonl', [{'problem': '1+1?', 'solution': 'two'}])
    with pytest.raises(DataError) as raised:
        task_of('math').read(data_root)
    (problem,) = raised.value.problems
    assert problem.startswith('score_math: algebra.jsonl:1: ')


def test_a_fix_table_replaces_gold_answers(write_jsonl, data_root, tmp_path):
    # with one box the reference asks no table
    two_boxes = {'problem': '1+1?', 'solution': r'$\boxed{2}$ and $\boxed{1+1}$'}
    write_jsonl('score/hendrycks_math/algebra.jsonl', [two_boxes])
    default, other = data_root / 'score' / 'prompts' / 'to_be_fixed_questions.json', tmp_path / 'fixes.json'

    def golds(**keys: Any) -> set[str]:
        return {example.content.gold for example in task_of('math', **keys).read(data_root).examples}

    assert golds() == {'2, 1+1'}
    default.write_text(json.dumps([{'problem': '1+1?', 'answer': '3'}]))
    assert golds() == golds(answer_extraction='reference') == {'3'}
    other.write_text(json.dumps([{'problem': '1+1?', 'answer': '4'}, {'problem': 'x', 'answer': '5'}]))
    assert golds(fix_table=str(other)) == {'4'}
    for content in ({'1+1?': '4'}, [{'problem': '1+1?', 'answer': 4}], ['x']):
        other.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=r"fixes\.json.*'problem' and 'answer'"):
            golds(fix_table=str(other))
    with pytest.raises(ConfigError, match=r'nowhere\.json: '):
        golds(fix_table=str(tmp_path / 'nowhere.json'))
