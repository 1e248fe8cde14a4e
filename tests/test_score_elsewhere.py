"""SCORE of a few rows: requests answered elsewhere, errors in answers, and evaluation during training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tiny
from command_line import run_cli
from composer.loggers import InMemoryLogger
from recorded_runs import NAMES, problems_of, read_lines, write_answers
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


def test_exported_lines_hold_all_that_a_server_needs(rows: Path):
    lines = exported(rows, {'dataset': 'mmlu_pro', 'temperature': 0.5, 'seeds': [7], 'max_new_tokens': 9})
    name = {'task': 'score_mmlu_pro', 'num_shots': 0, 'file': None, 'row': 0}
    greedy = {'stop': [], 'max_new_tokens': 9, 'temperature': 0.0, 'top_p': 1.0, 'top_k': 0, 'seed': None}
    swapped = 'Who?\nA: she\nB: he\nC: it'
    whole = {**name, 'variant': 'option_order:A', 'sample': 0, 'prompt': swapped, 'choices': None, **greedy}
    assert lines[0] == whole and list(lines[0]) == list(whole)
    assert [line['variant'] for line in lines] == [
        *(f'option_order:{letter}' for letter in 'ABC'),
        *(f'prompt:{number}' for number in range(10)),
        'non_greedy:7',
    ]
    drawn, key = lines[-1], ItemKey('score_mmlu_pro/0-shot', 0, variant='non_greedy:7')
    (task,) = data_of({'dataset': 'mmlu_pro', 'temperature': 0.5, 'seeds': [7]}, data_root=rows).suite.tasks
    assert (drawn['temperature'], drawn['top_p'], drawn['top_k']) == (0.5, 1.0, 0)
    assert drawn['seed'] == draw_seed(task.sampling('non_greedy:7'), key)
    assert {line['temperature'] for line in lines[:-1]} == {0.0}


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
    line = exported(rows, entry, words=words)[0]
    text, is_likelihood = '0. Who?\nA: he\nB: she\nC: it', answers == 'likelihood'
    messages = [{'role': 'user', 'content': text}, *[{'role': 'assistant', 'content': LEAD}] * is_likelihood]
    shown = {'messages': messages} if in_chat else {'prompt': f'{text}\n{LEAD}' if is_likelihood else text}
    assert {key: line[key] for key in ('messages', 'prompt') if key in line} == shown
    assert line['choices'] == ([' A', ' B', ' C'] if is_likelihood else None)
    if is_likelihood:
        assert {line[key] for key in ('stop', 'max_new_tokens', 'temperature', 'top_p', 'top_k', 'seed')} == {None}


def answers_to(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return right answers: the right option is 'she', 'x' or 2, whose letters are found in the prompt."""
    found = []
    for line in lines:
        text = line['messages'][0]['content'] if 'messages' in line else line['prompt']
        place = {'score_mmlu_pro': ': she', 'score_agieval': ': x', 'score_math': ''}[line['task']]
        letter = text[text.index(place) - 1]
        name = {key: line[key] for key in NAMES}
        if line['choices'] is not None:
            found.append({**name, 'logprobs': [-0.5 if choice == f' {letter}' else -2.0 for choice in line['choices']]})
        elif line['task'] == 'score_math':
            found.append({**name, 'text': r'It is $\boxed{2}$'})
        else:
            found.append({**name, 'text': f'The best answer is {letter}.\n'})
    return found


ENTRIES = (
    {'dataset': 'mmlu_pro', 'chat_template': True},
    {'dataset': 'agieval', 'answers': 'likelihood'},
    {'dataset': 'math', 'seeds': [1, 2]},
)


def test_answers_generated_elsewhere_are_scored(rows: Path, tmp_path: Path, capsys):
    lines = exported(rows, *ENTRIES)
    assert len(lines) == (3 + 10 + 5) + (2 + 10) + (10 + 2)
    path = write_answers(rows, answers_to(lines)[::-1])
    common = ['--score', rows / 'score.yaml', '--data-root', rows]
    assert run_cli('validate', *common) == 0
    printed = capsys.readouterr().out
    assert '3 SCORE datasets' in printed and '42 rows of 3 tasks' in printed
    assert 'warning: score_agieval: ' in printed and 'sat-math' in printed
    assert run_cli('run', '--outputs', path, *common, '--out', tmp_path / 'out') == 0
    record = json.loads((tmp_path / 'out' / 'results.json').read_text())
    perturbations = {'mmlu_pro': (ORDER, PROMPT, DRAWN), 'agieval': (ORDER, PROMPT), 'math': (PROMPT, DRAWN)}
    for dataset, names in perturbations.items():
        for name in names:
            found = record['score'][dataset]['perturbations'][name]
            assert found['accuracy'] == found['consistency_rate'] == found['all_variants_right'] == {'value': 1.0}
            assert found['unparsed_rate'] == {'value': 0.0}
            prefix = f'icl/metrics/score/{dataset}/{name}'
            assert record['metrics'][f'{prefix}/consistency_rate_reference'] >= 0
            assert record['metrics'][f'{prefix}/accuracy'] == 1
    assert set(record['metrics']) >= {
        f'icl/metrics/score/math/non_greedy/non_greedy_{seed}/accuracy' for seed in (1, 2)
    }
    for dataset, name in (('math', ORDER), ('agieval', DRAWN)):  # likelihoods are not drawn
        assert list(record['score'][dataset]['perturbations'][name]) == ['reason']
        assert not any(key.startswith(f'icl/metrics/score/{dataset}/{name}/') for key in record['metrics'])
    absent = ['sat-math', 'lsat-lr', 'lsat-rc', 'logiqa-en', 'aqua-rat', 'lsat-ar']
    assert record['score']['agieval']['absent_files'] == absent
    samples = read_lines(tmp_path / 'out' / 'samples' / 'score_math_0-shot.jsonl')
    assert {sample['answer'] for sample in samples} == {'2'}
    path = write_answers(rows, [one for one in answers_to(lines) if one['file'] or one['variant'] != 'option_order:C'])
    words = ('--outputs', path, *common, '--out', tmp_path / 'few', '--allow-missing')
    assert run_cli('run', *words) == 0
    record = json.loads((tmp_path / 'few' / 'results.json').read_text())
    order = record['score']['mmlu_pro']['perturbations'][ORDER]
    assert (order['accuracy'], order['num_incomplete']) == ({'value': 1.0}, 1)
    assert list(order['consistency_rate']) == list(order['accuracy_by_variant']['option_order:C']) == ['reason']


@pytest.mark.parametrize('dataset', ['mmlu_pro', 'agieval'])
def test_results_are_in_the_order_of_rows_and_prompts_and_only_mmlu_pro_is_macro(tmp_path: Path, dataset: str):
    """Mutation: variants and files sorted by name."""
    entry = {'dataset': dataset, 'answers': 'likelihood', 'subset_items': 20, 'perturbations': [ORDER, PROMPT]}
    data = data_of(entry)
    (examples,) = data.examples.values()
    keys, lines = [], []
    for one in examples:
        keys.append((one.file, one.row, one.variant))
        logprobs = [-1.0 - (place - one.row) % 4 for place in range(len(one.content.options))]
        name = dict(zip(NAMES, (f'score_{dataset}', 0, *keys[-1], 0), strict=True))
        lines.append({**name, 'logprobs': logprobs})
    found = score_answers(data, read_answers(write_answers(tmp_path, lines[::-1])))
    (results,) = found.results.values()
    assert [(one.key.file, one.key.row, one.key.variant) for one in results] == keys
    if dataset == 'agieval':
        sizes = {'sat-math': 4, 'lsat-lr': 5, 'lsat-rc': 5, 'logiqa-en': 4, 'aqua-rat': 5, 'sat-en': 4, 'lsat-ar': 5}
        assert list(dict.fromkeys(file for file, *_ in keys)) == list(sizes)
        for place in {(file, row) for file, row, _ in keys}:
            variants = [variant for *name, variant in keys if tuple(name) == place]
            assert variants[:-10] == [f'option_order:{letter}' for letter in 'ABCDE'[: sizes[place[0]]]]
        assert all(one.category == one.key.file for one in results)
    score = found.robustness[dataset][PROMPT]
    assert score.accuracy == (score.accuracy_macro if dataset == 'mmlu_pro' else score.accuracy_micro)
    assert score.accuracy_micro != score.accuracy_macro


def test_missing_duplicate_and_unknown_variants_are_named(rows: Path):
    *answers, last = answers_to(exported(rows, {'dataset': 'math', 'seeds': [1, 2]}))
    lines = [*answers, answers[0], {**last, 'file': 'geometry'}, {**last, 'variant': 'prompt:10'}]
    named = ['algebra, row 0, prompt:0 was', 'geometry, row 0, non_greedy:2 is not', 'algebra, row 0, prompt:10 is not']
    facts = [f'line {place}: score_math/0-shot, {fact} ' for place, fact in enumerate(named, len(answers) + 1)]
    facts.append('score_math/0-shot, algebra, row 0, non_greedy:2: there is no answer')
    data = data_of({'dataset': 'math', 'seeds': [1, 2]}, data_root=rows)
    for problem, fact in zip(problems_of(data, write_answers(rows, lines)), facts, strict=True):
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
    trainer = tiny.trainer([callback], max_duration='3ba', loggers=[logger])
    trainer.fit()
    trainer.close()
    keys = [
        'mmlu_pro/option_order/accuracy',
        'mmlu_pro/prompt/consistency_rate_reference',
        'mmlu_pro/option_order/option_order_C/accuracy',
        'agieval/prompt/prompt_9/accuracy',
        'agieval/non_greedy/non_greedy_5/accuracy',
        'math/non_greedy/unparsed_rate',
    ]
    keys = ['gauntlet/seconds/score_math/0-shot', *(f'icl/metrics/score/{key}' for key in keys)]
    for key in keys:
        assert [timestamp.batch.value for timestamp, _ in logger.data[key]] == [0, 2, 3], key
    record = json.loads((tmp_path / 'records' / 'ba3' / 'results.json').read_text())
    assert record['metrics'].items() >= {key: logger.data[key][-1][1] for key in keys}.items()
    assert record['training']['batch'] == 3 and list(record['score']) == ['mmlu_pro', 'agieval', 'math']
