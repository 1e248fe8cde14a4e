"""SCORE of a few rows: requests answered elsewhere, errors in answers, and evaluation during training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import composer_training
import pytest
from command_line import run_cli
from composer.loggers import InMemoryLogger
from recorded_runs import NAMES, problems_of, read_lines, record_of, write_answers
from score_runs import DRAWN, LAW, LEAD, ORDER, PROMPT, data_of, write_score_files

from llmfoundry_gauntlet import EvalGauntlet
from llmfoundry_gauntlet.results.external import read_answers, score_answers
from llmfoundry_gauntlet.tasks.base import draw_seed
from llmfoundry_gauntlet.types import ItemKey


@pytest.fixture
def rows(write_jsonl, tmp_path: Path) -> Path:
    write_score_files(write_jsonl, 'data/score', LAW)
    return tmp_path / 'data'


def exported(rows: Path, *entries: dict[str, Any], words: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Return the lines that `gauntlet export --score` writes."""
    path, out = rows / 'score.yaml', rows / 'requests.jsonl'
    path.write_text(json.dumps({'score': list(entries)}))
    assert run_cli('export', '--score', path, '--data-root', rows, '--out', out, '--overwrite', *words) == 0
    return read_lines(out)


DRAWN_ONCE = {'dataset': 'mmlu_pro', 'temperature': 0.5, 'seeds': [7], 'max_new_tokens': 9}


def test_exported_lines_hold_all_that_a_server_needs(rows: Path):
    expected = {
        # The name of the item.
        'task': 'score_mmlu_pro',
        'num_shots': 0,
        'file': None,
        'row': 0,
        'variant': 'option_order:A',
        'sample': 0,
        # The questions.
        'prompt': 'Who?\nA: she\nB: he\nC: it',
        'choices': None,
        # How it is generated.
        'stop': [],
        'max_new_tokens': 9,
        'temperature': 0.0,
        'top_p': 1.0,
        'top_k': 0,
        'seed': None,
    }

    line = exported(rows, DRAWN_ONCE)[0]

    assert line == expected
    assert list(line) == list(expected)


def test_every_variant_is_exported(rows: Path):
    lines = exported(rows, DRAWN_ONCE)

    assert [line['variant'] for line in lines] == [
        *(f'option_order:{letter}' for letter in 'ABC'),
        *(f'prompt:{number}' for number in range(10)),
        'non_greedy:7',
    ]


def test_only_non_greedy_variants_are_drawn(rows: Path):
    (task,) = data_of({'dataset': 'mmlu_pro', 'temperature': 0.5, 'seeds': [7]}, data_root=rows).suite.tasks
    key = ItemKey('score_mmlu_pro/0-shot', 0, variant='non_greedy:7')

    *greedy, drawn = exported(rows, DRAWN_ONCE)

    assert {line['temperature'] for line in greedy} == {0.0}
    assert (drawn['temperature'], drawn['top_p'], drawn['top_k']) == (0.5, 1.0, 0)
    assert drawn['seed'] == draw_seed(task.sampling('non_greedy:7'), key)


@pytest.mark.parametrize('answers', ['generate', 'likelihood'])
@pytest.mark.parametrize(
    ('given', 'tokenizer', 'in_chat'),
    [
        ('auto', None, False),
        (True, None, True),
        (False, None, False),
        ('auto', 'chat', True),
        (True, 'chat', True),
        (False, 'chat', False),
        ('auto', 'plain', False),
    ],
)
def test_messages_are_exported_where_a_chat_template_applies(
    rows: Path, tiny_llamas: Path, given: Any, tokenizer: str | None, in_chat: bool, answers: str
):
    words = ['--tokenizer', tiny_llamas / tokenizer] if tokenizer else []
    entry = {'dataset': 'mmlu_pro', 'chat_template': given, 'answers': answers, 'perturbations': [PROMPT]}
    prompt = '0. Who?\nA: he\nB: she\nC: it'
    messages = [{'role': 'user', 'content': prompt}]
    # For likelihoods of letters, the assistant has begun its answer.
    is_likelihood = answers == 'likelihood'
    if is_likelihood:
        messages.append({'role': 'assistant', 'content': LEAD})
        prompt = f'{prompt}\n{LEAD}'

    line = exported(rows, entry, words=words)[0]

    sent = {key: line[key] for key in ('messages', 'prompt') if key in line}
    assert sent == ({'messages': messages} if in_chat else {'prompt': prompt})
    assert line['choices'] == ([' A', ' B', ' C'] if is_likelihood else None)
    if is_likelihood:
        assert {line[key] for key in ('stop', 'max_new_tokens', 'temperature', 'top_p', 'top_k', 'seed')} == {None}


def answers_to(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return right answers: the right option is 'she', 'x' or 2, and its letter precedes it in the prompt."""
    right_option = {'score_mmlu_pro': ': she', 'score_agieval': ': x'}
    answers = []
    for line in lines:
        answer = {key: line[key] for key in NAMES}
        if line['task'] == 'score_math':
            answer['text'] = r'It is $\boxed{2}$'
        else:
            prompt = line['messages'][0]['content'] if 'messages' in line else line['prompt']
            letter = prompt[prompt.index(right_option[line['task']]) - 1]
            if line['choices'] is None:
                answer['text'] = f'The best answer is {letter}.\n'
            else:
                answer['logprobs'] = [-0.5 if choice == f' {letter}' else -2.0 for choice in line['choices']]
        answers.append(answer)
    return answers


ENTRIES = (
    {'dataset': 'mmlu_pro', 'chat_template': True},
    {'dataset': 'agieval', 'answers': 'likelihood'},
    {'dataset': 'math', 'seeds': [1, 2]},
)


@pytest.fixture
def right_answers(rows: Path) -> list[dict[str, Any]]:
    """Return right answers to all variants of three datasets, whose entries are in score.yaml."""
    lines = exported(rows, *ENTRIES)
    assert len(lines) == (3 + 10 + 5) + (2 + 10) + (10 + 2)
    return answers_to(lines)


@pytest.fixture
def scored(rows: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that scores answers by score.yaml and returns the folder of the run."""

    def score(answers: Iterable[dict[str, Any]], *options: Any) -> Path:
        words = ('--outputs', write_answers(rows, answers), '--score', rows / 'score.yaml', '--data-root', rows)
        assert run_cli('run', *words, '--out', tmp_path / 'out', *options) == 0
        return tmp_path / 'out'

    return score


def test_validate_counts_the_rows_of_score_and_warns_of_files_that_are_missing(rows: Path, right_answers, capsys):
    capsys.readouterr()

    assert run_cli('validate', '--score', rows / 'score.yaml', '--data-root', rows) == 0

    printed = capsys.readouterr().out
    assert '3 SCORE datasets' in printed and '42 rows of 3 tasks' in printed
    assert 'warning: score_agieval: ' in printed and 'sat-math' in printed


def test_answers_generated_elsewhere_are_scored(right_answers, scored: Callable[..., Path]):
    record = record_of(scored(right_answers[::-1]))

    perturbations = {
        'mmlu_pro': (ORDER, PROMPT, DRAWN),
        'agieval': (ORDER, PROMPT),
        'math': (PROMPT, DRAWN),
    }
    for dataset, names in perturbations.items():
        for name in names:
            score = record['score'][dataset]['perturbations'][name]
            assert score['accuracy'] == score['consistency_rate'] == score['all_variants_right'] == {'value': 1.0}
            assert score['unparsed_rate'] == {'value': 0.0}
            prefix = f'icl/metrics/score/{dataset}/{name}'
            assert record['metrics'][f'{prefix}/consistency_rate_reference'] >= 0
            assert record['metrics'][f'{prefix}/accuracy'] == 1
    for seed in (1, 2):
        assert f'icl/metrics/score/math/non_greedy/non_greedy_{seed}/accuracy' in record['metrics']


TWICE = {**LAW, 'options': ['he', 'she', 'he', 'they'], 'category': 'history'}


@pytest.mark.parametrize('letter', 'ABCDE')
def test_constant_letters_have_the_scores_of_answers_that_give_this_letter(
    write_jsonl, tmp_path: Path, scored: Callable[..., Path], letter: str
):
    """Two questions of two categories, one with 3 options, one with 4 of which two are alike.

    Mutation: repeated options count as two; a letter without an option counts as one.
    """
    write_score_files(write_jsonl, 'data/score', LAW, TWICE)
    lines = exported(tmp_path / 'data', {'dataset': 'mmlu_pro'}, {'dataset': 'agieval'})
    answers = [{**{name: line[name] for name in NAMES}, 'text': f'The best answer is {letter}.'} for line in lines]

    datasets = record_of(scored(answers))['score']

    compared = 0
    for dataset, perturbation in product(('mmlu_pro', 'agieval'), (ORDER, PROMPT, DRAWN)):
        scores = datasets[dataset]['perturbations'][perturbation]
        for metric in ('accuracy', 'consistency_rate'):
            by_letter = scores[f'{metric}_by_constant_letter']
            assert list(by_letter) == list('ABCD' if dataset == 'mmlu_pro' else 'AB')
            constant = by_letter.get(letter, {'value': 0.0})
            assert constant['value'] == pytest.approx(scores[metric]['value'])
            compared += 1
    assert compared == 12


def test_answers_are_in_the_samples(right_answers, scored: Callable[..., Path]):
    samples = read_lines(scored(right_answers) / 'samples' / 'score_math_0-shot.jsonl')

    assert {sample['answer'] for sample in samples} == {'2'}


def test_what_was_not_asked_is_absent_with_its_reason(right_answers, scored: Callable[..., Path]):
    record = record_of(scored(right_answers))

    # MATH has no options, and likelihoods are not drawn.
    for dataset, name in (('math', ORDER), ('agieval', DRAWN)):
        assert list(record['score'][dataset]['perturbations'][name]) == ['reason']
        assert not any(key.startswith(f'icl/metrics/score/{dataset}/{name}/') for key in record['metrics'])
    absent = ['sat-math', 'lsat-lr', 'lsat-rc', 'logiqa-en', 'aqua-rat', 'lsat-ar']
    assert record['score']['agieval']['absent_files'] == absent


def test_a_row_without_all_its_variants_counts_in_accuracy_alone(right_answers, scored: Callable[..., Path]):
    answers = [answer for answer in right_answers if answer['file'] or answer['variant'] != 'option_order:C']

    record = record_of(scored(answers, '--allow-missing'))

    order = record['score']['mmlu_pro']['perturbations'][ORDER]
    assert (order['accuracy'], order['num_incomplete']) == ({'value': 1.0}, 1)
    assert list(order['consistency_rate']) == list(order['accuracy_by_variant']['option_order:C']) == ['reason']


@pytest.mark.parametrize('dataset', ['mmlu_pro', 'agieval'])
def test_results_are_in_the_order_of_rows_and_prompts_and_only_mmlu_pro_is_macro(tmp_path: Path, dataset: str):
    """Mutation: variants and files sorted by name."""
    entry = {'dataset': dataset, 'answers': 'likelihood', 'subset_items': 20, 'perturbations': [ORDER, PROMPT]}
    data = data_of(entry)
    (examples,) = data.examples.values()
    keys, answers = [], []
    for example in examples:
        key = (example.file, example.row, example.variant)
        keys.append(key)
        # Which option is the likeliest depends on the row, so that some are right.
        logprobs = [-1.0 - (place - example.row) % 4 for place in range(len(example.content.options))]
        name = dict(zip(NAMES, (f'score_{dataset}', 0, *key, 0), strict=True))
        answers.append({**name, 'logprobs': logprobs})

    evaluation = score_answers(data, read_answers(write_answers(tmp_path, answers[::-1])))

    (results,) = evaluation.results.values()
    assert [(result.key.file, result.key.row, result.key.variant) for result in results] == keys
    if dataset == 'agieval':
        sizes = {'sat-math': 4, 'lsat-lr': 5, 'lsat-rc': 5, 'logiqa-en': 4, 'aqua-rat': 5, 'sat-en': 4, 'lsat-ar': 5}
        assert list(dict.fromkeys(file for file, *_ in keys)) == list(sizes)
        variants_of_row: dict[tuple[str, int], list[str]] = {}
        for file, row, variant in keys:
            variants_of_row.setdefault((file, row), []).append(variant)
        for (file, _), variants in variants_of_row.items():
            assert variants[:-10] == [f'option_order:{letter}' for letter in 'ABCDE'[: sizes[file]]]
        assert all(result.category == result.key.file for result in results)
    score = evaluation.robustness[dataset][PROMPT]
    assert score.accuracy == (score.accuracy_macro if dataset == 'mmlu_pro' else score.accuracy_micro)
    assert score.accuracy_micro != score.accuracy_macro


def test_missing_duplicate_and_unknown_variants_are_named(rows: Path):
    *answers, last = answers_to(exported(rows, {'dataset': 'math', 'seeds': [1, 2]}))
    lines = [*answers, answers[0], {**last, 'file': 'geometry'}, {**last, 'variant': 'prompt:10'}]
    named = ['algebra, row 0, prompt:0 was', 'geometry, row 0, non_greedy:2 is not', 'algebra, row 0, prompt:10 is not']
    facts = [f'line {place}: score_math/0-shot, {fact} ' for place, fact in enumerate(named, len(answers) + 1)]
    facts.append('score_math/0-shot, algebra, row 0, non_greedy:2: there is no answer')
    data = data_of({'dataset': 'math', 'seeds': [1, 2]}, data_root=rows)

    problems = problems_of(data, write_answers(rows, lines))

    for problem, fact in zip(problems, facts, strict=True):
        assert problem.startswith(fact)


def test_evaluations_in_training_log_score_metrics_at_their_batch(rows: Path, tmp_path: Path):
    """Use short prompts: the model has 128 positions."""
    logger = InMemoryLogger()
    entries = [
        {'dataset': 'mmlu_pro', 'answers': 'likelihood'},
        {'dataset': 'agieval', 'max_new_tokens': 4, 'perturbations': [PROMPT, DRAWN]},
        {'dataset': 'math', 'max_new_tokens': 4, 'perturbations': [DRAWN], 'seeds': [1, 2]},
    ]
    callback = EvalGauntlet(
        score=entries, data_root=str(rows), interval=['first', '2ba', 'last'], save_folder=str(tmp_path / 'records')
    )
    trainer = composer_training.trainer([callback], max_duration='3ba', loggers=[logger])

    trainer.fit()
    trainer.close()

    keys = [
        'gauntlet/seconds/score_math/0-shot',
        'icl/metrics/score/mmlu_pro/option_order/accuracy',
        'icl/metrics/score/mmlu_pro/prompt/consistency_rate_reference',
        'icl/metrics/score/mmlu_pro/option_order/option_order_C/accuracy',
        'icl/metrics/score/agieval/prompt/prompt_9/accuracy',
        'icl/metrics/score/agieval/non_greedy/non_greedy_5/accuracy',
        'icl/metrics/score/math/non_greedy/unparsed_rate',
    ]
    for key in keys:
        assert [timestamp.batch.value for timestamp, _ in logger.data[key]] == [0, 2, 3], key
    record = record_of(tmp_path / 'records' / 'ba3')
    assert record['metrics'].items() >= {key: logger.data[key][-1][1] for key in keys}.items()
    assert record['training']['batch'] == 3
    assert list(record['score']) == ['mmlu_pro', 'agieval', 'math']
