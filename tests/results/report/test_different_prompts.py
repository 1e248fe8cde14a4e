"""`gauntlet compare` with partly different prompts compares the items with the same prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from command_line import run_cli
from compared_runs import (
    AGIEVAL,
    CHOICES,
    LINES,
    QUESTIONS,
    RIDDLES,
    ROWS,
    SIZES,
    TOPICS,
    VARIANTS,
    answers_of,
    copy_run,
    record_of,
    rows_of_table,
    samples_of,
    samples_path,
    score_yaml,
    with_truncated_prompts,
    write_lines,
)
from paired_estimates import check_differences, composites_of, paired, score_differences
from paths import FIXTURES, ROOT

LONG: dict[str, list[int]] = {CHOICES: [1, 4, 9], TOPICS: [0, 13]}  # rows that do not fit into the shorter length
SHORTER, LONGER = {'max_seq_len': 1024}, {'max_seq_len': 2048}


@pytest.fixture
def pair(runs: dict[str, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Return runs of two models, the second with a shorter context that truncates the longest prompts."""
    long = with_truncated_prompts(runs['a'], tmp_path / 'long', {}, config=LONGER)
    return long, with_truncated_prompts(runs['b'], tmp_path / 'short', LONG, config=SHORTER)


def without(pair: Sequence[Path], rows: Mapping[str, Sequence[int]], folder: Path) -> tuple[Path, Path]:
    """Return the runs without these rows."""
    first, second = (copy_run(run, folder / f'{run.name}_part', without=rows) for run in pair)
    return first, second


def test_items_with_the_same_prompt_are_compared(compared, pair, tmp_path: Path):
    (found,) = compared(*pair)
    parts = without(pair, LONG, tmp_path)
    sizes = {**SIZES, CHOICES: 12 - 3, TOPICS: 14 - 2}
    tasks = {key: paired(key, *parts) for key in ROWS}
    check_differences(found['tasks'], tasks)
    check_differences(found['composites'], composites_of(tasks, sizes))
    check_differences(found['score'], score_differences(*pair))
    assert {key: one['num_items'] for key, one in found['tasks'].items()} == sizes
    assert found['composites']['reading']['num_items'] == 9 + 7


def test_warning_counts_items_left_out_and_names_the_setting(compared, gauntlet, pair):
    (found,) = compared(*pair)
    said = f'items with different prompts are left out (max_seq_len 2048 / 1024): {CHOICES} 3 of 12, {TOPICS} 2 of 14'
    assert found['warnings'] == [said]
    assert found['left_out'] == {
        CHOICES: {
            'num_items': [12, 12],
            'num_common': 12,
            'num_same_words': 9,
            'settings': ['max_seq_len 2048 / 1024'],
        },
        TOPICS: {
            'num_items': [14, 14],
            'num_common': 14,
            'num_same_words': 12,
            'settings': ['max_seq_len 2048 / 1024'],
        },
    }
    status, out, _ = gauntlet('compare', *pair)
    assert status == 0 and f'warning: {said}' in ' '.join(out.split())
    assert f'- warning: {said}' in ' '.join(
        gauntlet('compare', *pair, '--format', 'markdown')[1].replace('\\_', '_').split()
    )
    assert said in gauntlet('compare', *pair, '--format', 'csv')[2]


TOKENIZERS = [{'tokenizer': 'LlamaTokenizerFast 900 (1a2b3c4d)'}, {'tokenizer': 'GPTNeoXTokenizerFast 800 (4d3c2b1a)'}]


@pytest.mark.parametrize(
    ('configs', 'said'),
    [
        (TOKENIZERS, 'tokenizer LlamaTokenizerFast 900 (1a2b3c4d) / GPTNeoXTokenizerFast 800 (4d3c2b1a)'),
        (({}, {'truncation': 'reference'}), 'truncation drop_shots / reference'),
        (({}, {'semantics': 'reference'}), 'semantics corrected / reference, truncation drop_shots / reference'),
        (({'tokenizer': None}, TOKENIZERS[0]), 'no recorded setting differs'),
        (({'max_seq_len': 9, **TOKENIZERS[0]}, {'max_seq_len': 9, **TOKENIZERS[0]}), 'no recorded setting differs'),
        ((LONGER, {**SHORTER, 'fewshot': 'fixed'}), 'max_seq_len 2048 / 1024, fewshot reference / fixed'),
    ],
)
def test_settings_that_may_explain_different_prompts_are_named(compared, runs, tmp_path: Path, configs, said: str):
    first = with_truncated_prompts(runs['a'], tmp_path / 'one', {}, config=configs[0])
    second = with_truncated_prompts(runs['b'], tmp_path / 'other', {LINES: [3]}, config=configs[1])
    (found,) = compared(first, second)
    assert found['warnings'][0] == f'items with different prompts are left out ({said}): {LINES} 1 of 9'


@pytest.mark.parametrize(
    ('configs', 'is_compared'),
    [
        ((SHORTER, SHORTER), True),
        ((LONGER, SHORTER), False),
        (TOKENIZERS, False),
        ((None, SHORTER), False),  # cut in one run alone
    ],
)
def test_truncated_prompts_count_as_equal_only_with_equal_limits(
    compared, runs, tmp_path: Path, configs, is_compared: bool
):
    """The digest is of the text before tokens are removed from its beginning."""
    first, second = (
        with_truncated_prompts(
            runs[name], tmp_path / name, {LINES: [2, 5]} if config else {}, same_digest=True, config=config
        )
        for name, config in zip('ab', configs, strict=True)
    )
    (found,) = compared(first, second)
    assert found['tasks'][LINES]['num_items'] == (9 if is_compared else 7)


# Tasks without a common item.


def test_a_task_without_equal_prompts_has_a_reason(compared, gauntlet, make_run, runs):
    other = make_run(
        'other', ROWS, tasks={'choices': {'prompt_string': 'Please answer.\n'}}, answers=answers_of(2, ROWS)
    )
    (found,) = compared(runs['a'], other)
    reason = "no item has the same prompt in all runs (prompt_string '' / 'Please answer.\\n')"
    assert found['tasks'][CHOICES]['difference'] == found['tasks'][CHOICES]['first'] == {'reason': reason}
    assert found['tasks'][CHOICES]['num_items'] == 0 and found['tasks'][CHOICES]['p_holm'] is None
    others = [key for key in ROWS if key != CHOICES]
    check_differences(
        {key: found['tasks'][key] for key in others}, {key: paired(key, runs['a'], other) for key in others}
    )
    for name in ('reading', 'rest'):  # both have it
        assert found['composites'][name]['difference'] == {
            'reason': f'benchmarks without a score: {CHOICES} ({reason})'
        }
    assert 'value' not in found['composites']['core']['difference']
    status, out, _ = gauntlet('compare', runs['a'], other)
    assert status == 0 and rows_of_table(out)[CHOICES][2] == '-'
    assert f'- {reason}: {CHOICES}' in ' '.join(out.split())


def test_composites_over_other_tasks_are_still_compared(compared, runs, tmp_path: Path):
    other = with_truncated_prompts(runs['b'], tmp_path / 'other', {TOPICS: range(14)}, config=SHORTER)
    (found,) = compared(runs['a'], other)
    tasks = {key: paired(key, runs['a'], other) for key in ROWS}
    expected = composites_of(tasks, SIZES)
    names = ('reading', 'reading alone')
    check_differences({name: found['composites'][name] for name in names}, {name: expected[name] for name in names})
    assert 'value' not in found['composites']['rest']['difference']


def test_llm_foundry_averages_over_missing_benchmarks_are_not_compared(compared, make_run, tmp_path: Path):
    """Its averages ignore categories without a score, so they would be over other benchmarks."""
    first = make_run('one', ROWS, '--semantics', 'reference', gauntlet={})
    second = with_truncated_prompts(first, tmp_path / 'other', {TOPICS: range(14)}, config=SHORTER)
    (found,) = compared(first, second)
    assert found['composites']['reading']['difference']['value'] == 0
    assert found['composites']['core']['difference'] == {'reason': f'benchmarks without a common item: {TOPICS}'}


def test_other_shots_leave_items_whose_prompts_are_equal(compared, make_run):
    key = 'riddles/1-shot'
    answers = [answer | {'num_shots': 1} for answer in answers_of(0, [RIDDLES])]
    one = make_run('one', [key], answers=answers)
    other = make_run('other', [key], answers=answers, tasks={'riddles': {'fewshot_random_seed': 5}})
    digests = [[sample['prompt_sha256'] for sample in samples_of(run, key)] for run in (one, other)]
    num_different = sum(mine != theirs for mine, theirs in zip(*digests, strict=True))
    assert 3 < num_different < 7
    (found,) = compared(one, other)
    assert found['tasks'][key]['num_items'] == 7 - num_different
    assert f'(fewshot_random_seed 1234 / 5): {key} {num_different} of 7' in found['warnings'][0]


# SCORE.


def other_prompts(runs: dict[str, Path], data: Path, tmp_path: Path, variants: Sequence[int]) -> Path:
    """Return a SCORE run with some of the ten prompts changed."""
    prompts = json.loads((data / 'score' / 'prompts' / 'agieval.json').read_text())
    for number in variants:
        prompts['prompt_robustness'][number]['prompt'] += ' Please.'
    (tmp_path / 'prompts.json').write_text(json.dumps(prompts))
    answers = write_lines(tmp_path / 'answers.jsonl', answers_of(2, [AGIEVAL]))
    score = score_yaml(tmp_path, prompts=str(tmp_path / 'prompts.json'))
    out = tmp_path / 'other'
    assert run_cli('run', '--outputs', answers, '--score', score, '--data-root', data, '--out', out) == 0
    return out


def test_score_variants_with_different_prompts_are_left_out(compared, runs, data: Path, tmp_path: Path):
    other = other_prompts(runs, data, tmp_path, [4])
    (found,) = compared(runs['a'], other)
    assert f'{AGIEVAL} {len(QUESTIONS)} of {len(QUESTIONS) * len(VARIANTS)}' in found['warnings'][0]
    parts = []
    for run in (runs['a'], other):
        parts.append(tmp_path / f'{run.name}_part')
        copy_run(run, parts[-1])
        lines = [sample for sample in samples_of(run, AGIEVAL) if sample['variant'] != 'prompt:4']
        write_lines(samples_path(parts[-1], AGIEVAL), lines)
    check_differences(found['score'], score_differences(*parts))


def test_a_perturbation_without_equal_prompts_is_left_out(compared, runs, data: Path, tmp_path: Path):
    other = other_prompts(runs, data, tmp_path, range(10))
    (found,) = compared(runs['a'], other)
    reason = {'reason': 'no item has the same prompt in all runs'}
    for name in ('accuracy', 'consistency_rate'):
        assert found['score'][f'agieval prompt {name}']['difference'] == reason
        assert 'value' in found['score'][f'agieval option_order {name}']['difference']


# The checkpoints of a run.


@pytest.fixture
def checkpoints(runs: dict[str, Path], tmp_path: Path) -> Path:
    """Return three checkpoints of a run, the last with another max_seq_len."""
    folder = tmp_path / 'training'
    for name, batch in (('a', 10), ('b', 20)):
        with_truncated_prompts(runs[name], folder / f'ba{batch}', {}, config=LONGER, batch=batch)
    with_truncated_prompts(runs['c'], folder / 'ba40', {**LONG, RIDDLES: range(7)}, config=SHORTER, batch=40)
    return folder


def test_trends_are_over_items_with_equal_prompts_at_all_checkpoints(compared, gauntlet, checkpoints, tmp_path):
    found = compared(checkpoints)
    part = tmp_path / 'part'
    for run in checkpoints.iterdir():
        copy_run(run, part / run.name, without=LONG)
    expected = compared(part)
    for key in (CHOICES, TOPICS, LINES, 'rest'):
        assert found[key]['slope'] == expected[key]['slope'], key
    reason = 'no item has the same prompt in all runs (max_seq_len 2048 / 1024)'
    assert found[RIDDLES]['slope'] == {'reason': reason}
    assert found['reading']['slope'] == {'reason': f'benchmarks without a score: {RIDDLES} ({reason})'}
    said = (
        f'items with different prompts are left out (max_seq_len 2048 / 1024): {CHOICES} 3 of 12, {TOPICS} 2 of 14, '
        f'{RIDDLES} 7 of 7'
    )
    assert f'warning: {said}' in ' '.join(gauntlet('compare', checkpoints)[1].split())
    for form in ('csv', 'json'):
        assert f'warning: {said}' in gauntlet('compare', checkpoints, '--format', form)[2]


# Real tokenizers.


def test_two_models_with_different_tokenizers_are_compared(gauntlet, compared, tmp_path: Path):
    """One needs more tokens: 4 of 20 short questions and all long ones lose shots."""
    tasks = tmp_path / 'tasks.yaml'
    jeopardy, mmlu = 'jeopardy/4-shot', 'mmlu/4-shot'
    entries = yaml.safe_load((ROOT / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml').read_text())['icl_tasks']
    entries = [entry for entry in entries if entry['label'] in ('jeopardy', 'mmlu')]
    tasks.write_text(json.dumps({'icl_tasks': [{**entry, 'num_fewshot': [4]} for entry in entries]}))
    pair = tmp_path / 'rotary_bos', tmp_path / 'alibi_pad_eos'
    for out in pair:
        words = ['--model', FIXTURES / 'models' / out.name, '--data-root', ROOT / 'eval_data', '--tasks', tasks]
        status, _, err = gauntlet('run', *words, '--device', 'cpu', '--max-seq-len', 256, '--out', out)
        assert status == 0, err
    truncated = [[sample['row'] for sample in samples_of(run, jeopardy) if sample['truncated']] for run in pair]
    (found,) = compared(*pair)
    one, other = (record_of(run)['config']['tokenizer'] for run in pair)
    assert (one.split()[1], other.split()[1]) == ('900', '800')
    said = f'items with different prompts are left out (tokenizer {one} / {other})'
    assert found['warnings'] == [f'{said}: {jeopardy} {len(truncated[1])} of 20, {mmlu} 16 of 16']
    assert truncated[0] == [] and len(truncated[1]) == 4
    assert found['tasks'][jeopardy]['num_items'] == 16
    assert found['tasks'][mmlu]['difference'] == {
        'reason': f'no item has the same prompt in all runs (tokenizer {one} / {other})'
    }
