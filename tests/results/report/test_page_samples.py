"""Samples on a report page: which are shown, and their exact prompts."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import (
    CHOICES,
    RIDDLES,
    ROWS,
    answers_of,
    copy_run,
    edited,
    read_lines,
    samples_path,
    write_lines,
)
from report_pages import Sample, read_page

from llmfoundry_gauntlet.results.report.page import kinds_of
from llmfoundry_gauntlet.types import ItemKey, ItemResult


@pytest.fixture
def samples(gauntlet, tmp_path: Path):
    """Return the samples on a page whose text contains a string."""

    def call(holding: str, *words: Any) -> list[Sample]:
        out = tmp_path / 'report.html'
        status, _, err = gauntlet('report', *words, '--out', out, '--overwrite')
        assert status == 0, err
        return [sample for sample in read_page(out).samples if holding in sample.text]

    return call


@pytest.fixture
def own_data(data: Path, tmp_path: Path) -> Path:
    """Return data files that a test may change."""
    return shutil.copytree(data, tmp_path / 'own_data')


def test_prompts_are_shown_as_sent(samples, runs):
    shown = {sample.passages[0] for sample in samples(RIDDLES, runs['a'], '--samples', 50)}
    assert shown == {f'Twice {row}?' for row in range(7)}
    digests = {line['prompt_sha256'] for line in read_lines(samples_path(runs['a'], RIDDLES))}
    assert {hashlib.sha256(text.encode()).hexdigest() for text in shown} == digests


def test_a_prompt_with_dropped_shots_is_rebuilt(samples, make_run):
    key = 'riddles/2-shot'
    answers = [{**answer, 'num_shots': 2} for answer in answers_of(0, [RIDDLES])]
    run = make_run('shots', [key], answers=answers)
    whole = [sample for sample in samples(key, run, '--samples', 50) if 'Twice 0?' in sample.passages[0][-9:]]
    (text,) = {sample.passages[0] for sample in whole}
    assert text.count('Twice') == 3 and 'Prompt 2-shot' in ' '.join(whole[0].text.split())
    last_shot = text[text.index('Twice', 1) :]
    first, *rest = read_lines(samples_path(run, key))
    first.update(prompt_sha256=hashlib.sha256(last_shot.encode()).hexdigest(), truncated=True)
    write_lines(samples_path(run, key), [first, *rest])
    (shortened,) = [sample for sample in samples(key, run, '--samples', 50) if sample.passages[0] == last_shot]
    words = ' '.join(shortened.text.split())
    assert 'Prompt 1-shot' in words and "shortened to the model's length" in words


def test_a_prompt_whose_data_changed_is_not_shown(samples, runs, own_data: Path):
    rows = [{**row, 'context': row['context'] + '!'} for row in ROWS[RIDDLES][:5]]
    write_lines(own_data / 'riddles.jsonl', rows)
    shown = samples(RIDDLES, runs['a'], '--data-root', own_data, '--samples', 50)
    assert len(shown) == 7
    reasons = [
        ('rebuilt from the data file it differs' in one.text, 'no longer has this row' in one.text) for one in shown
    ]
    assert sorted(reasons) == [(False, True)] * 2 + [(True, False)] * 5
    assert not any('Twice' in passage for one in shown for passage in one.passages)


def test_without_data_only_results_are_shown(samples, runs, own_data: Path, tmp_path: Path):
    """Data that are missing, remote or not wanted are not read."""
    (own_data / 'choices.jsonl').unlink()
    remote = copy_run(runs['a'], tmp_path / 'remote')
    uri = 'https://example.invalid/riddles.jsonl'
    with edited(remote) as record:
        record['tasks'][RIDDLES]['spec']['dataset_uri'] = uri
    for key, words, fact in (
        (CHOICES, [runs['a'], '--data-root', own_data], 'choices.jsonl: there is no such data file'),
        (RIDDLES, [remote], uri),
        ('', [runs['a'], '--no-prompts'], 'data files were not read'),
    ):
        shown = samples(key, *words)
        assert shown and all(fact in sample.text for sample in shown), fact
        assert not any(row['query'] in sample.text for sample in shown for row in ROWS[CHOICES])


def test_choices_are_ordered_by_the_log_probability_per_token_that_decides(samples, runs, tmp_path: Path):
    run, counts = copy_run(runs['a'], tmp_path / 'run'), [3, 1, 2]
    lines = [{**line, 'num_tokens': counts} for line in read_lines(samples_path(run, CHOICES))]
    write_lines(samples_path(run, CHOICES), lines)
    for sample, line in zip(samples(CHOICES, run), lines, strict=False):
        row = ROWS[CHOICES][line['row']]
        means = [value / count for value, count in zip(line['logprobs'], counts, strict=True)]
        assert sample.passages == [
            row['query'],
            *(row['choices'][means.index(one)] for one in sorted(means)[::-1]),
        ]
        shown = ' '.join(sample.text.split())
        assert all(f'{mean:.3f}'.replace('-', '\u2212') in shown for mean in means)
        predicted, gold = (row['choices'][line[name]] for name in ('predicted', 'gold'))
        assert f'{row["query"]} prediction {predicted} gold {gold} Prompt' in shown  # without opening it


def test_the_first_items_of_each_task_are_shown(samples, runs):
    for wanted in (1, 3):
        shown = samples('', runs['a'], '--samples', wanted)
        for key in ROWS:
            rows = [line['row'] for line in read_lines(samples_path(runs['a'], key))]
            mine = [sample for sample in shown if key in sample.text]
            assert len(mine) == wanted
            assert all(f'row {row}' in sample.text for row, sample in zip(rows, mine, strict=False))
    assert samples('', runs['a'], '--samples', 0) == []


def test_an_item_of_several_runs_is_shown_once_with_all_results(samples, runs):
    shown = samples(RIDDLES, runs['a'], runs['b'], '--samples', 50)
    assert len(shown) == 7
    texts = [{line['row']: line['text'] for line in read_lines(samples_path(runs[name], RIDDLES))} for name in 'ab']
    for sample in shown:
        row = int(sample.passages[0].removeprefix('Twice ').removesuffix('?'))
        assert sample.passages[1:] == [str(2 * row), texts[0][row], texts[1][row]]


def test_long_prompts_are_shortened_with_a_count(samples, make_run, own_data: Path):
    write_lines(own_data / 'riddles.jsonl', [{'context': f'{"long " * 2000}{row}', 'answer': '1'} for row in range(2)])
    answers = [{'task': 'riddles', 'num_shots': 0, 'row': row, 'text': 'x' * 5000} for row in range(2)]
    run = make_run('long', [RIDDLES], '--data-root', own_data, answers=answers)
    for sample in samples(RIDDLES, run):
        prompt, _, generation = sample.passages
        assert '[8,201 of 10,001 characters left out]' in prompt
        assert '[3,800 of 5,000 characters left out]' in generation
        assert prompt.startswith('long long') and prompt[-1] in '01'


def result(**changes: Any) -> ItemResult:
    values: dict[str, Any] = {
        'key': ItemKey(task='t/0-shot', row=0),
        'category': None,
        'gold': 1,
        'predicted': 1,
        'score': 1.0,
        'logprobs': (-1.0, -0.5),
        'num_tokens': (1, 1),
        'reason': None,
        'prompt_sha256': '0',
        'truncated': False,
    }
    return ItemResult(**{**values, **changes})


GENERATION = {'logprobs': None, 'predicted': None, 'gold': '4'}
TRUNCATED = 'truncated at the token limit'


@pytest.mark.parametrize(
    ('changes', 'kinds'),
    [
        ({}, ['right']),
        ({'score': 0.0, 'predicted': 0}, ['wrong']),
        ({'score': 0.5, 'predicted': 0, 'reason': 'tie of the choices 0, 1'}, ['partly right']),
        ({'score': None, 'reason': 'not finite'}, ['unscored']),
        ({**GENERATION, 'text': '4', 'answer': '4'}, ['right']),
        ({**GENERATION, 'text': '4 and', 'answer': '4 and', 'reason': TRUNCATED}, ['right', 'truncated']),
        ({**GENERATION, 'score': 0.0, 'text': ' ', 'answer': '', 'reason': 'empty generation'}, ['wrong', 'unparsed']),
        (
            {**GENERATION, 'score': 0.0, 'text': 'x', 'reason': f'no answer found in the generation; {TRUNCATED}'},
            ['wrong', 'truncated', 'unparsed'],
        ),
        ({**GENERATION, 'gold': 2, 'score': 0.0, 'text': 'hm', 'answer': 'hm'}, ['wrong', 'unparsed']),
        ({**GENERATION, 'gold': None, 'score': 0.0, 'text': 'return 1', 'reason': 'AssertionError'}, ['wrong']),
        ({**GENERATION, 'gold': None, 'text': 'return 1', 'metrics': {'TruncatedShare': 1.0}}, ['right', 'truncated']),
    ],
)
def test_kinds_of_an_item(changes: dict[str, Any], kinds: list[str]):
    assert list(kinds_of(result(**changes))) == kinds
