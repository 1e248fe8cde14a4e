"""The right generation, scored by likelihood after the prompt of the generation: its text, its tokens and its bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
from character_tokenizer import CharacterTokenizer
from clustered_items import item

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation, conclude, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.metrics.metrics import compute_metric, gold_bits_of_generations
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import Generation, ItemKey, Measure, Output, ScoreOutput

OPEN_QUESTION = 'generation_task_with_answers'
PROGRAM = {
    'prompt': 'def f(x):\n',
    'entry_point': 'f',
    'canonical_solution': '    return x\n\n',
    'test': 'def check(candidate):\n    assert candidate(1) == 1\n',
}


@pytest.fixture
def prepared(write_jsonl, tmp_path: Path):
    """Return a function that prepares the rows of one task, in which a token is a character."""

    def prepare(rows: list[dict[str, Any]], *, max_seq_len: int = 500, **keys: Any) -> PreparedEvaluation:
        write_jsonl('rows.jsonl', rows)
        settings = {name: keys.pop(name) for name in ('apply_chat_template', 'semantics') if name in keys}
        task = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [0], 'icl_task_type': OPEN_QUESTION, **keys}
        data = load_data(decode_settings({'tasks': [task], 'data_root': str(tmp_path), **settings}))
        return prepare_evaluation(data, Encoder(CharacterTokenizer()), max_seq_len=max_seq_len)

    return prepare


def texts(prepared: PreparedEvaluation, row: int = 0) -> tuple[str, str]:
    """Return the prompt and the right generation of a row, without the bos."""
    (key,) = (key for key in prepared.items if key.is_gold and key.row == row)
    request = prepared.items[key].request
    decode = CharacterTokenizer().decode
    return decode(request.contexts[0][1:].tolist()), decode(request.continuations[0].tolist())


GSM8K = {'cot_delimiter': ' #### ', 'continuation_delimiter': "\nA: Let's think step by step. ", 'prelimiter': 'Q: '}
SVAMP = {'cot_delimiter': ' #### ', 'continuation_delimiter': '\nUsing the formula below:\n', 'prelimiter': 'Q: '}


@pytest.mark.parametrize(
    ('keys', 'row', 'prompt', 'gold'),
    [
        # one of several answers, the preferred one
        ({}, {'context': 'Who?', 'answer': 'Ann', 'aliases': ['Anna']}, 'Who?', ' Ann'),
        # a chain of thought
        (
            GSM8K,
            {'context': '1+1?', 'answer': '2', 'chain_of_thought': 'One\nand one.'},
            "Q: 1+1?\nA: Let's think step by step.",
            ' One\nand one. #### 2',
        ),
        # a delimiter that ends a line: the shots have the answer on the next one
        (
            SVAMP,
            {'context': '1+1?', 'answer': '2', 'chain_of_thought': '( 1 + 1 )'},
            'Q: 1+1?\nUsing the formula below:',
            '\n( 1 + 1 ) #### 2',
        ),
        # prompts that keep the space that is before the answer, or that have none
        ({'strip_dataset': False}, {'context': 'Who?', 'answer': 'Ann'}, 'Who? ', 'Ann'),
        ({'continuation_delimiter': '='}, {'context': '1+1', 'answer': '2'}, '1+1=', '2'),
    ],
)
def test_a_gold_answer_follows_the_prompt_as_it_does_in_a_shot(
    prepared, keys: dict[str, Any], row: dict[str, Any], prompt: str, gold: str
):
    """Mutations: the white space that the prompt has lost is lost, or doubled; another alias is scored."""
    evaluation = prepared([row], **keys)

    assert texts(evaluation) == (prompt, gold)
    (task,) = evaluation.tasks.values()
    (example,) = evaluation.data.examples['t/0-shot']
    assert task.shot(example.content, True) == prompt + gold


@pytest.mark.parametrize(
    ('changes', 'gold'),
    [
        ({}, '    return x'),  # without the lines that end the row
        # the first half of the solution is in the prompt, which does not end its line
        ({'prompt': 'def f(x):\n    y = x', 'canonical_solution': '\n    return y\n'}, '\n    return y'),
        # the same without a line break in either: the program that is run has one
        ({'prompt': 'def f(x):\n    y = x', 'canonical_solution': '    return y\n'}, '\n    return y'),
        (
            {'prompt': 'int f(int x){\n', 'canonical_solution': '  return x;\n}\n', 'language': 'c++'},
            '  return x;\n}',
        ),
        (
            {'prompt': 'const f = (x) => {\n', 'canonical_solution': '  return x;\n}\n\n', 'language': 'javascript'},
            '  return x;\n}',
        ),
    ],
)
def test_a_canonical_solution_completes_the_prompt(write_jsonl, tmp_path: Path, changes: dict[str, str], gold: str):
    write_jsonl('rows.jsonl', [{**PROGRAM, **changes}])
    entry = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [0], 'icl_task_type': 'code_evaluation'}
    data = load_data(decode_settings({'tasks': [entry], 'data_root': str(tmp_path)}))
    (task,), (example,) = data.tasks.values(), data.examples['t/0-shot']

    assert task.gold_text(example.content) == gold


@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
def test_the_prompt_of_a_gold_answer_is_that_of_the_generation(prepared, semantics: str):
    """Shots are dropped, or tokens from the left, for the generation alone. Mutation: to make room for both."""
    rows = [{'context': f'{"long " * 20}{i}?', 'answer': str(i), 'chain_of_thought': 'so ' * i} for i in range(6)]

    evaluation = prepared(rows, num_fewshot=[3], max_seq_len=250, semantics=semantics, **GSM8K)

    generations = {request.key: request for request in evaluation.generate_requests}
    assert len(generations) == len(evaluation.score_requests) == 6
    for request in evaluation.score_requests:
        generation = generations[replace(request.key, is_gold=False)]
        assert request.contexts == (generation.context,)
        assert request.prompt_shortened and generation.prompt_shortened


def outputs(evaluation: PreparedEvaluation, logprobs: Mapping[int, list[float]]) -> list[Output]:
    """Return a generation for every row, and the right ones of these rows with log-probabilities of their tokens."""
    generations = [Generation(key=request.key, text=' 2') for request in evaluation.generate_requests]
    scored = []
    for row, of_tokens in logprobs.items():
        values = np.array(of_tokens)
        assert len(values) == len(evaluation.items[gold_key(row)].request.continuations[0])
        is_argmax = np.ones(len(values), bool)
        key = gold_key(row)
        scored.append(ScoreOutput(key=key, logprobs=(values,), is_argmax=(is_argmax,), num_top=(is_argmax * 1,)))
    return [*scored, *generations]


def gold_key(row: int) -> ItemKey:
    return ItemKey('t/0-shot', row, is_gold=True)


def score_of(evaluation: PreparedEvaluation, logprobs: Mapping[int, list[float]]):
    """Return the results and metrics of the task."""
    planned = plan_evaluation(evaluation, tokens_per_batch=1000)
    results = evaluation.results(outputs(evaluation, logprobs))
    concluded = conclude(planned, results, {'t/0-shot': 1.0})
    return concluded.results['t/0-shot'], concluded.scores['t/0-shot'].metrics


def bits(measure: Measure) -> float:
    assert measure.value is not None, measure.reason
    return measure.value


def test_bits_are_per_byte_of_utf_8_without_the_space_before_the_answer(prepared):
    """By hand: ' é' has 2 tokens of 3 bits, and 2 bytes; ' abc' has 4 tokens of 3 bits, and 3 bytes."""
    evaluation = prepared([{'context': 'a', 'answer': 'é'}, {'context': 'b', 'answer': 'abc'}])
    of_token = -3 * math.log(2)

    results, metrics = score_of(evaluation, {0: [of_token] * 2, 1: [of_token] * 4})

    assert [result.metrics['GoldBitsPerByte'] for result in results] == pytest.approx([3.0, 4.0])
    assert [result.facts for result in results] == [{'gold_tokens': 2}, {'gold_tokens': 4}]
    assert bits(metrics['GoldBitsPerByte']) == pytest.approx(3.5)
    # of two values: their standard deviation by the root of two
    assert metrics['GoldBitsPerByte'].standard_error == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    # The facts of the generations are as before.
    assert [result.score for result in results] == [0, 0]
    assert all(result.text == ' 2' and result.answer == '2' and result.logprobs is None for result in results)


def test_a_programs_white_space_counts(prepared):
    """By hand: 12 characters, of 1 bit each."""
    evaluation = prepared([PROGRAM], icl_task_type='code_evaluation', generations_per_sample=2, pass_at_k=2)

    results, metrics = score_of(evaluation, {0: [-math.log(2)] * len('    return x')})

    # Scored once, and known of each sample.
    assert [result.metrics['GoldBitsPerByte'] for result in results] == [1.0, 1.0]
    assert bits(metrics['GoldBitsPerByte']) == 1.0


def test_a_problem_counts_once_however_many_of_its_programs_are_scored():
    """Mutation: the mean is over programs."""
    values = [(0, 0, 1.0), (0, 1, 1.0), (0, 2, 1.0), (1, 2, 3.0)]
    results = [item(row, 0.0, sample=sample, metrics={'GoldBitsPerByte': value}) for row, sample, value in values]

    measure = compute_metric(gold_bits_of_generations(), results)

    assert bits(measure) == 2.0
    assert measure.standard_error == pytest.approx(1.0)  # of 1 and 3


def test_the_bits_are_those_of_the_model_in_any_layout(prepared):
    """Mutation: the log-probability of another token than the next of the text, or after another prompt."""
    rows = [{'context': f'{i}+{i}?', 'answer': str(2 * i), 'chain_of_thought': 'so ' * i} for i in range(5)]
    evaluation = prepared(rows, num_fewshot=[2], **GSM8K)
    generations = [Generation(key=request.key, text='2') for request in evaluation.generate_requests]
    expected = []
    for request in evaluation.score_requests:
        alone = fake_model.score(request)
        text = CharacterTokenizer().decode(request.continuations[0].tolist())
        expected.append(-alone.logprobs[0].sum() / math.log(2) / len(text.strip()))

    for layout in ('stream', 'padded_rows'):
        planned = plan_evaluation(evaluation, tokens_per_batch=1000, layout=layout)
        scored = [output for batch in planned.batches for output in fake_model.run(batch)]
        concluded = conclude(planned, planned.results([*scored, *generations]), {'t/2-shot': 1.0})

        results = concluded.results['t/2-shot']
        assert [result.metrics['GoldBitsPerByte'] for result in results] == pytest.approx(expected)
        assert concluded.metrics['metrics/t/2-shot/GoldBitsPerByte'] == pytest.approx(np.mean(expected))


def test_a_gold_answer_that_does_not_fit_has_no_number_but_a_reason(prepared):
    """The prompt '?' with bos has 2 tokens, and 'sixteen tokens..' with its space 17: 19 fit, 18 do not.

    Mutation: the answer is truncated.
    """
    rows = [{'context': '?', 'answer': 'sixteen tokens..'}, {'context': '?', 'answer': 'ab'}]
    short = {'generation_kwargs': {'max_new_tokens': 5}}

    fits = prepared(rows, max_seq_len=19, **short)
    too_long = prepared(rows, max_seq_len=18, **short)

    assert fits.items[gold_key(0)].request.unscorable is None
    reason = 'prompt and gold answer have 2 and 17 tokens, together more than max_seq_len 18'
    results, metrics = score_of(too_long, {1: [-1.0] * 3})
    assert [result.facts.get('no_gold_bits_per_byte') for result in results] == [reason, None]
    assert metrics['GoldBitsPerByte'].value is None
    assert metrics['GoldBitsPerByte'].reason == f'GoldBitsPerByte is not known of 1 of 2 items: {reason}'
    assert [result.status for result in results] == ['scored', 'scored']


def test_a_log_probability_that_is_not_finite_leaves_the_score_of_the_generation(prepared):
    evaluation = prepared([{'context': '?', 'answer': '2'}])

    (result,), metrics = score_of(evaluation, {0: [-1.0, math.nan]})

    assert result.score == 1
    assert metrics['GoldBitsPerByte'].value is None and 'not a finite number' in metrics['GoldBitsPerByte'].reason


def test_a_row_without_a_solution_has_no_number(prepared):
    without = {name: text for name, text in PROGRAM.items() if name != 'canonical_solution'}
    evaluation = prepared([without], icl_task_type='code_evaluation')

    assert not evaluation.score_requests
    _, metrics = score_of(evaluation, {})
    assert 'the row has no gold answer' in metrics['GoldBitsPerByte'].reason


def test_batches_of_choices_do_not_depend_on_gold_answers(write_jsonl, tmp_path: Path):
    """Mutation: they share batches, which changes the rounding of log-probabilities."""
    write_jsonl('open.jsonl', [{'context': f'{i}?', 'answer': str(i)} for i in range(9)])
    write_jsonl('choices.jsonl', [{'query': f'{i}?', 'choices': ['yes', 'no'], 'gold': 0} for i in range(9)])
    choices = {
        'label': 'c',
        'dataset_uri': 'choices.jsonl',
        'num_fewshot': [1],
        'icl_task_type': 'multiple_choice',
    }
    answers = {**choices, 'label': 'o', 'dataset_uri': 'open.jsonl', 'icl_task_type': OPEN_QUESTION}

    def batches_of(tasks: list[dict[str, Any]]) -> list[list[ItemKey]]:
        data = load_data(decode_settings({'tasks': tasks, 'data_root': str(tmp_path)}))
        evaluation = prepare_evaluation(data, Encoder(CharacterTokenizer()), max_seq_len=100)
        batches = plan_evaluation(evaluation, tokens_per_batch=50).batches
        return [[request.key for request in batch.requests] for batch in batches]

    with_answers = batches_of([choices, answers])

    of_choices = [keys for keys in with_answers if keys[0].task == 'c/1-shot']
    assert of_choices == batches_of([choices])
    assert sum(len(keys) for keys in with_answers) == 18
