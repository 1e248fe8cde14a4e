"""`gauntlet compare` with partly different prompts compares the items with the same prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command_line import run_cli
from paired_estimates import check_differences, composites_of, paired, score_differences
from paths import FIXTURES, ROOT
from recorded_runs import (
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

LONG: dict[str, list[int]] = {CHOICES: [1, 4, 9], TOPICS: [0, 13]}  # rows that do not fit into the shorter length
SHORTER, LONGER = {'max_seq_len': 1024}, {'max_seq_len': 2048}
LLAMA, NEOX = ({'tokenizer': name} for name in ('LlamaTokenizerFast 900 (1a2b)', 'GPTNeoXTokenizerFast 800 (4d3c)'))


def test_items_with_the_same_prompt_are_compared_and_the_others_counted(compared, gauntlet, runs, tmp_path: Path):
    pair = (
        with_truncated_prompts(runs['a'], tmp_path / 'long', {}, config=LONGER),
        with_truncated_prompts(runs['b'], tmp_path / 'short', LONG, config=SHORTER),
    )
    (found,) = compared(*pair)
    first, second = (copy_run(run, tmp_path / f'{run.name}_part', without=LONG) for run in pair)
    sizes = {**SIZES, CHOICES: 12 - 3, TOPICS: 14 - 2}
    tasks = {key: paired(key, first, second) for key in ROWS}
    check_differences(found['tasks'], tasks)
    check_differences(found['composites'], composites_of(tasks, sizes))
    check_differences(found['score'], score_differences(*pair))
    assert {key: one['num_items'] for key, one in found['tasks'].items()} == sizes
    assert found['composites']['reading']['num_items'] == 9 + 7
    counts = {'num_items': [12, 12], 'num_common': 12, 'num_same_words': 9, 'settings': ['max_seq_len 2048 / 1024']}
    topics = {**counts, 'num_items': [14, 14], 'num_common': 14, 'num_same_words': 12}
    assert found['left_out'] == {CHOICES: counts, TOPICS: topics}
    (said,) = found['warnings']
    assert said.endswith(f'(max_seq_len 2048 / 1024): {CHOICES} 3 of 12, {TOPICS} 2 of 14')
    for form, place in (('table', 1), ('markdown', 1), ('csv', 2)):
        shown = gauntlet('compare', *pair, '--format', form)[place]
        assert f'warning: {said}' in ' '.join(shown.replace('\\_', '_').split()), form
    assert 'warning' not in gauntlet('compare', *pair, '--format', 'csv')[1]


@pytest.mark.parametrize(
    ('configs', 'said'),
    [
        ((LLAMA, NEOX), f'tokenizer {LLAMA["tokenizer"]} / {NEOX["tokenizer"]}'),
        (({}, {'truncation': 'reference'}), 'truncation drop_shots / reference'),
        (({}, {'semantics': 'reference'}), 'semantics corrected / reference, truncation drop_shots / reference'),
        (({'tokenizer': None}, LLAMA), 'no recorded setting differs'),
        (({'max_seq_len': 9, **LLAMA}, {'max_seq_len': 9, **LLAMA}), 'no recorded setting differs'),
        ((LONGER, {**SHORTER, 'fewshot': 'fixed'}), 'max_seq_len 2048 / 1024, fewshot reference / fixed'),
    ],
)
def test_settings_that_may_explain_different_prompts_are_named(compared, runs, tmp_path: Path, configs, said: str):
    first = with_truncated_prompts(runs['a'], tmp_path / 'one', {}, config=configs[0])
    second = with_truncated_prompts(runs['b'], tmp_path / 'other', {LINES: [3]}, config=configs[1])
    (found,) = compared(first, second)
    assert found['warnings'][0].endswith(f' ({said}): {LINES} 1 of 9')


@pytest.mark.parametrize(
    ('configs', 'num_items'),
    [
        ((SHORTER, SHORTER), 9),
        ((LONGER, SHORTER), 7),
        ((LLAMA, NEOX), 7),
        ((None, SHORTER), 7),  # truncated in one run alone
    ],
)
def test_truncated_prompts_count_as_equal_only_with_equal_limits(
    compared, runs, tmp_path: Path, configs, num_items: int
):
    """The digest is of the text before tokens are removed from its beginning."""
    pair = []
    for name, config in zip('ab', configs, strict=True):
        rows = {LINES: [2, 5]} if config else {}
        pair.append(with_truncated_prompts(runs[name], tmp_path / name, rows, same_digest=True, config=config))
    (found,) = compared(*pair)
    assert found['tasks'][LINES]['num_items'] == num_items


def test_a_task_without_equal_prompts_has_a_reason_and_composites_over_others_are_compared(
    compared, gauntlet, runs, tmp_path: Path
):
    other = with_truncated_prompts(runs['b'], tmp_path / 'other', {TOPICS: range(14)}, config=SHORTER)
    (found,) = compared(runs['a'], other)
    reason = 'no item has the same prompt in all runs (max_seq_len none / 1024)'
    lost = found['tasks'].pop(TOPICS)
    assert lost['difference'] == lost['first'] == {'reason': reason}
    assert (lost['num_items'], lost['p_holm']) == (0, None)
    tasks = {key: paired(key, runs['a'], other) for key in ROWS}
    composites = composites_of(tasks, SIZES)
    check_differences(found['tasks'], {key: tasks[key] for key in found['tasks']})
    assert found['composites'].pop('rest')['difference'] == {
        'reason': f'benchmarks without a score: {TOPICS} ({reason})'
    }
    assert 'value' not in found['composites'].pop('core')['difference']
    check_differences(found['composites'], {name: composites[name] for name in ('reading', 'reading alone')})
    out = gauntlet('compare', runs['a'], other)[1]
    assert TOPICS not in rows_of_table(out) and f'- {reason}: {TOPICS}' in ' '.join(out.split())


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


@pytest.mark.parametrize('numbers', [[4], range(10)])
def test_score_variants_with_different_prompts_are_left_out(compared, runs, data: Path, tmp_path: Path, numbers):
    """Without any, a perturbation has no difference."""
    prompts = json.loads((data / 'score' / 'prompts' / 'agieval.json').read_text())
    for number in numbers:
        prompts['prompt_robustness'][number]['prompt'] += ' Please.'
    (tmp_path / 'prompts.json').write_text(json.dumps(prompts))
    answers = write_lines(tmp_path / 'answers.jsonl', answers_of(2, [AGIEVAL]))
    score, other = score_yaml(tmp_path, prompts=str(tmp_path / 'prompts.json')), tmp_path / 'other'
    assert run_cli('run', '--outputs', answers, '--score', score, '--data-root', data, '--out', other) == 0
    (found,) = compared(runs['a'], other)
    num_different = len(QUESTIONS) * len(numbers)
    assert f'{AGIEVAL} {num_different} of {len(QUESTIONS) * len(VARIANTS)}' in found['warnings'][0]
    if len(numbers) == 10:
        assert {name for name, one in found['score'].items() if 'value' not in one['difference']} == {
            'agieval prompt accuracy',
            'agieval prompt consistency_rate',
        }
        return
    parts = [copy_run(run, tmp_path / f'{run.name}_part') for run in (runs['a'], other)]
    for part in parts:
        write_lines(
            samples_path(part, AGIEVAL), [one for one in samples_of(part, AGIEVAL) if one['variant'] != 'prompt:4']
        )
    check_differences(found['score'], score_differences(*parts))


def test_trends_are_over_items_with_equal_prompts_at_all_checkpoints(compared, gauntlet, runs, tmp_path: Path):
    folder, part = tmp_path / 'training', tmp_path / 'part'
    for name, batch in (('a', 10), ('b', 20)):
        with_truncated_prompts(runs[name], folder / f'ba{batch}', {}, config=LONGER, batch=batch)
    with_truncated_prompts(runs['c'], folder / 'ba40', {**LONG, RIDDLES: range(7)}, config=SHORTER, batch=40)
    for run in folder.iterdir():
        copy_run(run, part / run.name, without=LONG)
    found, expected = compared(folder), compared(part)
    for key in (CHOICES, TOPICS, LINES, 'rest'):
        assert found[key]['slope'] == expected[key]['slope'], key
    reason = 'no item has the same prompt in all runs (max_seq_len 2048 / 1024)'
    assert found[RIDDLES]['slope'] == {'reason': reason}
    assert found['reading']['slope'] == {'reason': f'benchmarks without a score: {RIDDLES} ({reason})'}
    for form, place in (('table', 1), ('csv', 2), ('json', 2)):
        shown = ' '.join(gauntlet('compare', folder, '--format', form)[place].split())
        assert f'{CHOICES} 3 of 12, {TOPICS} 2 of 14, {RIDDLES} 7 of 7' in shown, form


@pytest.mark.slow
def test_two_models_with_different_tokenizers_are_compared(gauntlet, compared, tmp_path: Path):
    """One needs more tokens: 4 of 20 short questions and all long ones lose shots."""
    tasks = tmp_path / 'tasks.yaml'
    entries = yaml.safe_load((ROOT / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml').read_text())['icl_tasks']
    entries = [{**entry, 'num_fewshot': [4]} for entry in entries if entry['label'] in ('jeopardy', 'mmlu')]
    tasks.write_text(json.dumps({'icl_tasks': entries}))
    pair = tmp_path / 'rotary_bos', tmp_path / 'alibi_pad_eos'
    for out in pair:
        words = ['--model', FIXTURES / 'models' / out.name, '--data-root', ROOT / 'eval_data', '--tasks', tasks]
        status, _, err = gauntlet('run', *words, '--device', 'cpu', '--max-seq-len', 256, '--out', out)
        assert status == 0, err
    truncated = [sum(sample['truncated'] for sample in samples_of(run, 'jeopardy/4-shot')) for run in pair]
    (found,) = compared(*pair)
    one, other = (record_of(run)['config']['tokenizer'] for run in pair)
    assert (one.split()[1], other.split()[1], truncated) == ('900', '800', [0, 4])
    (said,) = found['warnings']
    assert said.endswith(f'(tokenizer {one} / {other}): jeopardy/4-shot 4 of 20, mmlu/4-shot 16 of 16')
    assert found['tasks']['jeopardy/4-shot']['num_items'] == 16
    assert f'(tokenizer {one} / {other})' in found['tasks']['mmlu/4-shot']['difference']['reason']
