"""`gauntlet compare` of two and three runs, checked with NumPy on samples and rows."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paired_estimates import (
    bits_per_byte,
    check_differences,
    combined,
    composites_of,
    error_over_prompts,
    paired,
    score_differences,
)
from recorded_runs import (
    AGIEVAL,
    AVERAGES,
    BASELINES,
    CATEGORIES,
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
    label_of,
    record_of,
    rows_of_table,
    samples_of,
    samples_path,
    with_shortened_prompts,
    write_lines,
)

SHORTER, LONGER = {'max_seq_len': 1024}, {'max_seq_len': 2048}
LLAMA, NEOX = ({'tokenizer': name} for name in ('LlamaTokenizerFast 900 (1a2b)', 'GPTNeoXTokenizerFast 800 (4d3c)'))


def test_differences_are_paired_with_clustered_errors(compared, runs: dict[str, Path]):
    """Tasks are paired by item and SCORE by question; composites count a passage shared by tasks once."""
    tasks = {key: paired(key, runs['a'], runs['b']) for key in ROWS}
    composites = composites_of(tasks, SIZES)
    score = score_differences(runs['a'], runs['b'])
    assert all(estimate.value != 0 for estimate in score.values())
    # The error would be another one if no passage were in two tasks.
    parts = [SIZES[key] / 35 / (1 - BASELINES[key]) * tasks[key].error for key in CATEGORIES['rest']]
    error_of_independent_tasks = math.hypot(*parts)
    assert abs(composites['rest'].error - error_of_independent_tasks) > 0.01 * error_of_independent_tasks

    (comparison,) = compared(runs['a'], runs['b'])

    check_differences(comparison['tasks'], tasks)
    check_differences(comparison['composites'], composites)
    check_differences(comparison['score'], score)
    assert (comparison['first'], comparison['second']) == (str(runs['a']), str(runs['b']))
    assert comparison['warnings'] == []


def test_differences_of_score_have_errors_over_prompts_too(compared, gauntlet, runs: dict[str, Path], tmp_path: Path):
    """Three of the prompts confuse one of the models. Mutation: prompts of both runs are taken to be independent."""
    name = 'agieval prompt accuracy'
    confused = copy_run(runs['b'], tmp_path / 'confused')
    of_confusing = {'prompt:0', 'prompt:4', 'prompt:7'}
    samples = samples_of(confused, AGIEVAL)
    write_lines(
        samples_path(confused, AGIEVAL),
        [{**sample, 'score': 0.0} if sample['variant'] in of_confusing else sample for sample in samples],
    )
    expected = error_over_prompts(runs['a'], confused)

    (comparison,) = compared(runs['a'], confused)
    _, out, _ = gauntlet('compare', runs['a'], confused)
    _, of_csv, _ = gauntlet('compare', runs['a'], confused, '--format', 'csv')

    entry = comparison['score'][name]
    over_prompts = entry['over_prompts']
    assert over_prompts['value'] == entry['difference']['value']
    assert over_prompts['standard_error'] == pytest.approx(expected, rel=1e-9)
    assert expected > entry['difference']['standard_error']
    assert 'over_prompts' not in comparison['score']['agieval option_order accuracy']
    note = f'standard errors over questions and prompts: {name} {expected:.3f} (p = {over_prompts["p_value"]:.3f})'
    assert note in ' '.join(out.split())
    rows = {row['name']: row for row in csv.DictReader(io.StringIO(of_csv))}
    assert rows[name]['standard_error_over_prompts'] == repr(over_prompts['standard_error'])
    assert rows[name]['p_value_over_prompts'] == repr(over_prompts['p_value'])
    assert rows[CHOICES]['standard_error_over_prompts'] == ''


def test_the_items_of_composites_and_the_questions_of_score_are_counted(compared, runs: dict[str, Path]):
    (comparison,) = compared(runs['a'], runs['b'])
    num_items = {name: entry['num_items'] for name, entry in comparison['composites'].items()}
    assert num_items == {
        'reading': 12 + 7,
        'rest': 14 + 9 + 12,
        'core': 12 + 7 + 14 + 9,
        'reading alone': 12 + 7,
    }
    assert {entry['num_items'] for entry in comparison['score'].values()} == {len(QUESTIONS)}


@pytest.mark.parametrize(('side', 'run'), [('first', 'a'), ('second', 'b')])
def test_scores_of_runs_with_the_same_items_are_the_recorded_ones(compared, runs: dict[str, Path], side: str, run: str):
    (comparison,) = compared(runs['a'], runs['b'])
    record = record_of(runs[run])
    composites = record['composites']['categories'] | record['composites']['averages']
    assert {name: entry[side] for name, entry in comparison['composites'].items()} == composites
    for key, task in record['tasks'].items():
        assert comparison['tasks'][key][side] == next(iter(task['metrics'].values()))
    for name, entry in comparison['score'].items():
        dataset, perturbation, metric = name.split()
        assert entry[side] == record['score'][dataset]['perturbations'][perturbation][metric]


def test_tables_and_csv_show_the_numbers_of_json_the_largest_first(
    gauntlet, compared, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv('COLUMNS', '120')  # enough for all names
    words = ('compare', runs['a'], runs['b'])
    (comparison,) = compared(runs['a'], runs['b'])
    tasks, composites, score = (comparison[kind] for kind in ('tasks', 'composites', 'score'))

    status, out, _ = gauntlet(*words)
    _, markdown, _ = gauntlet(*words, '--format', 'markdown')
    _, of_csv, _ = gauntlet(*words, '--format', 'csv')

    assert status == 0
    assert out.splitlines()[0] == 'accuracy: b \u2212 a'
    assert out.splitlines()[1].split() == ['a', 'b', 'diff', 'error', 'p', '(Holm)', 'MDE']
    table = rows_of_table(out)
    compared_names = [*by_size(tasks), *by_size(composites), *by_size(score)]
    assert [name for name in table if name in compared_names] == compared_names

    names_of_markdown = [line.split('|')[1].strip(' *') for line in markdown.splitlines() if line.startswith('|')]
    assert names_of_markdown[2:] == [*by_size(composites), *by_size(tasks), *by_size(score)]

    rows_of_csv = {row['name']: row for row in csv.DictReader(io.StringIO(of_csv))}
    assert rows_of_csv.keys() == {*compared_names}
    for name, entry in {**tasks, **composites, **score}.items():
        assert table[name] == cells_of(entry)
        row = rows_of_csv[name]
        assert (row['first_run'], row['second_run']) == (str(runs['a']), str(runs['b']))
        assert row['difference'] == repr(entry['difference']['value'])
        assert row['standard_error'] == repr(entry['difference']['standard_error'])
        assert row['p_holm'] == repr(entry['p_holm'])


def by_size(group: dict[str, Any]) -> list[str]:
    """Return the names of the entries of JSON, the largest differences first."""
    return sorted(group, key=lambda name: -abs(group[name]['difference']['value']))


def cells_of(entry: dict[str, Any]) -> list[str]:
    """Return the cells of an entry of JSON as a table on the terminal shows them."""
    p_value = f'{entry["p_holm"]:.3f}' if entry['p_holm'] >= 0.001 else '<0.001'
    star = '*' if entry['p_holm'] < 0.05 else ''
    detectable = entry['detectable']
    return [
        f'{entry["first"]["value"]:.3f}',
        f'{entry["second"]["value"]:.3f}',
        f'{entry["difference"]["value"]:+.3f}',
        f'{entry["difference"]["standard_error"]:.3f}',
        f'{p_value}{star}',
        '-' if detectable is None else f'{detectable:.3f}',
    ]


def test_the_tasks_that_contribute_most_to_the_error_of_an_average_are_named(gauntlet, compared, runs: dict[str, Path]):
    (comparison,) = compared(runs['a'], runs['b'])
    shares = comparison['composites']['core']['difference']['variance_shares']
    largest = max(shares, key=lambda key: shares[key])

    _, out, _ = gauntlet('compare', runs['a'], runs['b'])

    note = f'error of core, by share of its variance: {100 * shares[largest]:.0f} % {largest}, '
    assert note in ' '.join(out.split())
    assert 'error of rest' not in out
    assert shares.keys() == ROWS.keys()
    assert sum(shares.values()) == pytest.approx(1)


def test_a_star_marks_significant_differences(gauntlet, make_run):
    """All lines are wrong, then right: a sign test of 8 clusters has p = 2 / 256, and twice that after Holm."""
    keys = [LINES, RIDDLES]

    def run_with_lines(name: str, *, is_argmax: bool) -> Path:
        answers = answers_of(0, keys)
        for answer in answers:
            if 'is_argmax' in answer:
                answer['is_argmax'] = is_argmax
        return make_run(name, keys, answers=answers)

    wrong, right = run_with_lines('wrong', is_argmax=False), run_with_lines('right', is_argmax=True)
    _, out, _ = gauntlet('compare', wrong, right)

    first, second, difference, error, p_value, detectable = rows_of_table(out)[LINES]
    assert (first, second, difference) == ('0.000', '1.000', '+1.000')
    assert error.startswith('[')
    assert (p_value, detectable) == (f'{1 / 64:.3f}*', '-')
    assert rows_of_table(out)[RIDDLES][-2:] == ['1.000', '-']
    last = out.splitlines()[-1]
    assert last.startswith(f'{right} against {wrong}: 2 tasks compared') and last.endswith(f': {LINES}')
    again = gauntlet('compare', wrong, wrong)[1].splitlines()[-1]
    assert '2 tasks compared' in again and LINES not in again


def test_each_further_run_is_compared_with_the_first(
    gauntlet, compared, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = ['llama[old]', 'llama[/new]', 'c']  # brackets are no markup
    for name, run in zip(names, 'abc', strict=True):
        copy_run(runs[run], tmp_path / name)
    monkeypatch.chdir(tmp_path)

    with_b, with_c = compared(*names)
    status, out, err = gauntlet('compare', *names)

    assert (with_b['first'], with_b['second']) == (names[0], names[1])
    assert (with_c['first'], with_c['second']) == (names[0], names[2])
    for comparison, run in ((with_b, 'b'), (with_c, 'c')):
        for key, task in comparison['tasks'].items():
            assert task['difference']['value'] == pytest.approx(paired(key, runs['a'], runs[run]).value, abs=1e-13)
    # The correction is for all differences of tasks that are shown, and for tasks, composites and SCORE.
    tasks = [*with_b['tasks'].values(), *with_c['tasks'].values()]
    smallest = min(tasks, key=lambda task: task['p_value'])
    assert smallest['p_holm'] == pytest.approx(min(1.0, 3 * smallest['p_value'] * len(tasks)), rel=1e-12)
    assert (status, err) == (0, '')
    assert all(name in out for name in names)


def test_another_metric_is_compared_for_tasks_that_have_it(compared, gauntlet, runs: dict[str, Path]):
    words = (runs['a'], runs['b'], '--metric', 'GoldBitsPerByte')
    keys = [CHOICES, TOPICS, LINES]
    expected = {key: paired(key, runs['a'], runs['b'], bits_per_byte(key)) for key in keys}

    (comparison,) = compared(*words)
    _, out, _ = gauntlet('compare', *words)

    # Of answers from elsewhere no gold answer was scored.
    assert 'the generation is from elsewhere' in comparison['tasks'].pop(RIDDLES)['difference']['reason']
    check_differences(comparison['tasks'], expected, num_groups=2)
    assert comparison['score'] == {}
    assert out.startswith('GoldBitsPerByte: ')
    assert {*rows_of_table(out)} & {*ROWS} == {*keys}
    assert 'GoldBitsPerByte is a loss: a negative difference is an improvement' in out


def test_gold_bits_of_categories_are_compared_without_chance(compared, runs: dict[str, Path]):
    """Mutations: chance scales them as it does accuracies; the sign is turned."""
    members = CATEGORIES['rest']
    tasks = [paired(key, runs['a'], runs['b'], bits_per_byte(key)) for key in members]
    num_items = sum(SIZES[key] for key in members)
    rest = combined(tasks, [SIZES[key] / num_items for key in members])

    (comparison,) = compared(runs['a'], runs['b'], '--metric', 'GoldBitsPerByte')

    assert list(comparison['composites']) == [*CATEGORIES, *AVERAGES]
    check_differences({'rest': comparison['composites']['rest']}, {'rest': rest}, num_groups=2)
    # Riddles, which are in reading, have answers from elsewhere.
    for name in ('reading', *AVERAGES):
        assert comparison['composites'][name]['difference']['reason'].endswith((')', 'reading'))


def test_a_metric_that_no_item_has_is_absent_with_its_reason(compared, gauntlet, runs: dict[str, Path]):
    words = (runs['a'], runs['b'], '--metric', 'TruncatedShare')
    reason = 'TruncatedShare is not known of 7 of 7 items'

    (comparison,) = compared(*words)
    _, out, _ = gauntlet('compare', *words)

    assert comparison['tasks'].keys() == {RIDDLES}
    task = comparison['tasks'][RIDDLES]
    assert task['difference'] == task['first'] == {'reason': reason}
    assert task['p_value'] is None
    assert task['p_holm'] is None
    assert RIDDLES not in rows_of_table(out)
    assert f'- {reason}: {RIDDLES}' in out


def test_other_numbers_of_tokens_of_choices_are_a_warning_where_they_decide(compared, make_run):
    """Not of metrics per byte or character, nor of tasks without choices. Mutation: tasks whatever their tokens."""

    def run_with_tokens(name: str, of_topics: int) -> Path:
        answers = answers_of(0, ROWS)
        for answer in answers:
            if 'logprobs' in answer:
                # Choices and lines have the same numbers in all runs, a line another one than a choice.
                num_tokens = of_topics if answer['task'] == label_of(TOPICS) else 2
                answer['num_tokens'] = [num_tokens] * len(answer['logprobs'])
            if answer['task'] == label_of(LINES):
                answer['num_tokens'] = [of_topics]
        return make_run(name, ROWS, answers=answers)

    def warnings(*words: Any) -> list[str]:
        (comparison,) = compared(*words)
        return comparison['warnings']

    one, other = run_with_tokens('one', 1), run_with_tokens('other', 3)

    (warning,) = warnings(one, other)
    assert warning.startswith('the tokenizers differ: ')
    assert '--metric GoldBitsPerByte and --metric CharacterNormalizedMatch' in warning
    assert warning.endswith(f': {TOPICS}')
    assert warnings(one, other, '--metric', 'TokenNormalizedMatch') == [warning]
    assert warnings(one, other, '--metric', 'CharacterNormalizedMatch') == []
    assert warnings(one, one) == []


def test_a_metric_may_be_named_as_in_0_1_0(compared, runs: dict[str, Path]):
    words = (runs['a'], runs['b'], '--metric')
    assert compared(*words, 'CutShare') == compared(*words, 'TruncatedShare')


# Runs that differ in rows, prompts, tasks, gauntlets or settings.


def without_score(key: str, reason: str) -> dict[str, str]:
    return {'reason': f'benchmarks without a score: {key} ({reason})'}


def without_variants(run: Path, variants: Callable[[str], bool], *, digest: str | None = None) -> None:
    """Remove the samples of some variants of SCORE's questions, or give them another prompt."""
    lines = []
    for line in samples_of(run, AGIEVAL):
        if not variants(line['variant']):
            lines.append(line)
        elif digest is not None:
            lines.append({**line, 'prompt_sha256': digest})
    write_lines(samples_path(run, AGIEVAL), lines)


@pytest.mark.parametrize('is_turned', [False, True])
def test_only_items_with_the_same_prompt_in_both_runs_are_compared(
    compared, gauntlet, runs: dict[str, Path], tmp_path: Path, is_turned: bool
):
    """The others, among them a variant of SCORE, are counted with the settings that may explain them."""
    whole = with_shortened_prompts(runs['a'], tmp_path / 'whole', {}, config=LONGER)
    part = copy_run(runs['b'], tmp_path / 'b', without={CHOICES: [0, 4, 7]})
    part = with_shortened_prompts(part, tmp_path / 'part', {TOPICS: [0, 13]}, config=SHORTER)
    without_variants(part, lambda variant: variant == 'prompt:4', digest='ab' * 32)
    pair = (part, whole) if is_turned else (whole, part)
    rest = [copy_run(run, tmp_path / f'{run.name}_rest', without={TOPICS: [0, 13]}) for run in pair]
    for run in rest:
        without_variants(run, lambda variant: variant == 'prompt:4')
    sizes = {**SIZES, CHOICES: 12 - 3, TOPICS: 14 - 2}
    tasks = {key: paired(key, *rest) for key in ROWS}

    (comparison,) = compared(*pair)

    check_differences(comparison['tasks'], tasks)
    check_differences(comparison['composites'], composites_of(tasks, sizes))
    check_differences(comparison['score'], score_differences(*rest))
    assert {key: entry['num_items'] for key, entry in comparison['tasks'].items()} == sizes
    assert comparison['composites']['reading']['num_items'] == 9 + 7

    lengths, counts = ('1024 / 2048', [9, 12]) if is_turned else ('2048 / 1024', [12, 9])
    settings = [f'max_seq_len {lengths}']
    num_variants = 7 * len(VARIANTS)
    assert comparison['left_out'] == {
        CHOICES: {'num_items': counts, 'num_common': 9, 'num_same_words': 9, 'settings': []},
        TOPICS: {'num_items': [14, 14], 'num_common': 14, 'num_same_words': 12, 'settings': settings},
        AGIEVAL: {
            'num_items': [num_variants, num_variants],
            'num_common': num_variants,
            'num_same_words': num_variants - 7,
            'settings': settings,
        },
    }
    prompts, rows = comparison['warnings']
    assert prompts.endswith(f'(max_seq_len {lengths}): {TOPICS} 2 of 14, {AGIEVAL} 7 of {num_variants}')
    assert rows.endswith(f': {CHOICES}')
    assert f'{counts[0]} and {counts[1]} items' in rows and '9 items' in rows

    # CSV is for another program, so its warnings go to standard error.
    _, table, _ = gauntlet('compare', *pair)
    _, markdown, _ = gauntlet('compare', *pair, '--format', 'markdown')
    _, of_csv, errors_of_csv = gauntlet('compare', *pair, '--format', 'csv')
    for shown in (table, markdown, errors_of_csv):
        assert f'warning: {prompts}' in ' '.join(shown.replace('\\_', '_').split())
    assert 'warning' not in of_csv


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
    first = with_shortened_prompts(runs['a'], tmp_path / 'one', {}, config=configs[0])
    second = with_shortened_prompts(runs['b'], tmp_path / 'other', {LINES: [3]}, config=configs[1])
    (comparison,) = compared(first, second)
    assert comparison['warnings'][0].endswith(f' ({said}): {LINES} 1 of 9')


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
        pair.append(with_shortened_prompts(runs[name], tmp_path / name, rows, same_digest=True, config=config))
    (comparison,) = compared(*pair)
    assert comparison['tasks'][LINES]['num_items'] == num_items


def test_what_has_no_item_in_common_has_a_reason_and_the_rest_is_compared(
    compared, gauntlet, runs: dict[str, Path], tmp_path: Path
):
    one = copy_run(runs['a'], tmp_path / 'one', without={LINES: range(4)})
    other = copy_run(runs['b'], tmp_path / 'b', without={LINES: range(4, 9)})
    other = with_shortened_prompts(other, tmp_path / 'other', {TOPICS: range(14)}, config=SHORTER)
    without_variants(other, lambda variant: variant.startswith('prompt:'), digest='ab' * 32)
    no_prompt = 'no item has the same prompt in all runs (max_seq_len none / 1024)'
    no_item = 'the runs have no item in common'
    tasks = {key: paired(key, one, other) for key in (CHOICES, RIDDLES)}
    # Composites of reading, to which the other two tasks add nothing.
    composites = composites_of({**tasks, **dict.fromkeys((TOPICS, LINES), tasks[CHOICES])}, SIZES)

    (comparison,) = compared(one, other)
    _, out, _ = gauntlet('compare', one, other)

    for key, reason in ((TOPICS, no_prompt), (LINES, no_item)):
        lost = comparison['tasks'].pop(key)
        assert lost['difference'] == lost['first'] == {'reason': reason}
        assert (lost['num_items'], lost['p_holm']) == (0, None)
    check_differences(comparison['tasks'], tasks)

    rest = comparison['composites'].pop('rest')['difference']
    assert rest == {'reason': f'benchmarks without a score: {TOPICS} ({no_prompt}), {LINES} ({no_item})'}
    assert 'value' not in comparison['composites'].pop('core')['difference']
    check_differences(comparison['composites'], {name: composites[name] for name in ('reading', 'reading alone')})

    with_value = {name for name, entry in comparison['score'].items() if 'value' in entry['difference']}
    assert with_value == {'agieval option_order accuracy', 'agieval option_order consistency_rate'}
    assert TOPICS not in rows_of_table(out)
    assert f'- {no_prompt}: {TOPICS}' in ' '.join(out.split())


def test_llm_foundry_averages_over_missing_benchmarks_are_not_compared(compared, make_run, tmp_path: Path):
    """Its averages ignore categories without a score, so they would be over other benchmarks."""
    first = make_run('one', ROWS, '--semantics', 'reference', gauntlet={})
    second = with_shortened_prompts(first, tmp_path / 'other', {TOPICS: range(14)}, config=SHORTER)
    (comparison,) = compared(first, second)
    assert comparison['composites']['reading']['difference']['value'] == 0
    assert comparison['composites']['core']['difference'] == {'reason': f'benchmarks without a common item: {TOPICS}'}


def test_tasks_with_unscored_items_are_compared_only_with_allow_missing(compared, unscored):
    reason = '2 of 12 items unscored: there is no answer'
    expected = {key: paired(key, *unscored) for key in ROWS}  # over the items that are scored in both

    (strict,) = compared(*unscored)
    (over_scored,) = compared(*unscored, '--allow-missing')

    choices = strict['tasks'].pop(CHOICES)
    assert choices['difference'] == choices['second'] == {'reason': reason}
    assert strict['composites']['reading']['difference'] == without_score(CHOICES, reason)
    check_differences(strict['tasks'], {key: expected[key] for key in (TOPICS, LINES, RIDDLES)}, num_groups=1)
    check_differences(over_scored['tasks'], expected, num_groups=2)


def test_other_tasks_and_settings_are_warnings(compared, make_run, runs):
    few = make_run('few', [CHOICES, RIDDLES], '--semantics', 'reference')

    (comparison,) = compared(runs['a'], few)
    (turned,) = compared(few, runs['a'])

    assert list(comparison['tasks']) == [CHOICES, RIDDLES]
    assert comparison['score'] == {}
    lacking, semantics = comparison['warnings']
    assert str(few) in lacking
    assert f'{TOPICS}, {LINES}, {AGIEVAL}' in lacking
    assert semantics == 'semantics is corrected and reference'
    assert turned['warnings'] == [lacking, 'semantics is reference and corrected']
    assert comparison['composites']['reading']['difference']['value'] == 0
    assert comparison['composites']['rest']['difference'] == without_score(f'{TOPICS}, {LINES}', 'did not run')
    assert turned['composites'] == {}  # the first has no gauntlet


def test_composites_are_made_by_the_gauntlet_of_the_first_run(compared, make_run, runs):
    other = make_run('other', ROWS, '--fewshot=fixed', answers=answers_of(2, ROWS), gauntlet={'weighting': 'EQUAL'})
    tasks = {key: paired(key, runs['a'], other) for key in ROWS}
    equal_weights = [1 / 2 / (1 - BASELINES[CHOICES]), 1 / 2]
    by_other = combined([tasks[CHOICES], tasks[RIDDLES]], equal_weights).value

    (comparison,) = compared(runs['a'], other)
    (turned,) = compared(other, runs['a'])

    lacking, gauntlets, fewshot = comparison['warnings']
    assert AGIEVAL in lacking
    assert 'gauntlets differ' in gauntlets
    assert f'by that of {runs["a"]}' in gauntlets
    assert f'by that of {other}' in turned['warnings'][1]
    assert fewshot == 'fewshot is reference and fixed'
    check_differences(comparison['composites'], composites_of(tasks, SIZES))
    assert turned['composites']['reading']['difference']['value'] == pytest.approx(-by_other, abs=1e-13)


def checkpoints_of(run: Path, *batches: int | None) -> Path:
    for number, batch in enumerate(batches):
        copy_run(run, run.parent / 'training' / f'run{number}', batch=batch)
    return run.parent / 'training'


INCOMPARABLE: dict[str, tuple[Callable[[Path, Any], list[Any]], list[str]]] = {
    'no task in common': (
        lambda run, make: [make('one', [LINES, CHOICES]), make('other', [RIDDLES])],
        ['{folder}/one', '{folder}/other', f'{LINES}, {CHOICES}', RIDDLES],
    ),
    'one alone': (lambda run, make: [run], ['{folder}/run: ']),
    'an unknown metric': (
        lambda run, make: [run, run, '--metric', 'GoldBits'],
        ['--metric: ', "'GoldBits'", 'GoldBitsPerByte, GoldProbability, ', 'NumericMatch, StrictMatch, '],
    ),
    'one batch twice': (lambda run, make: [checkpoints_of(run, 20, 20)], ['{folder}/training: ', '(20, 20)']),
    'an unknown batch': (lambda run, make: [checkpoints_of(run, 20, None)], ['{folder}/training: ', '(None, 20)']),
    'other prompts': (
        lambda run, make: [run, make('other', [CHOICES], tasks={'choices': {'prompt_string': 'Please answer.\n'}})],
        [f'{CHOICES}: ', "(prompt_string '' / 'Please answer.\\n')"],
    ),
    'other data': (
        lambda run, make: [
            run,
            make(
                'other',
                [RIDDLES],
                '--data-root',
                run.parent,
                answers=[{**answer, 'row': answer['row'] % 7} for answer in answers_of(0, [RIDDLES])],
            ),
        ],
        [f'{RIDDLES}: ', '(data_sha256 '],
    ),
}


@pytest.mark.parametrize('case', INCOMPARABLE)
def test_incomparable_runs_are_an_error(gauntlet, run: Path, make_run, tmp_path: Path, case: str):
    write_lines(tmp_path / 'riddles.jsonl', [{**row, 'context': f'{row["context"]}?'} for row in ROWS[RIDDLES]])
    make, facts = INCOMPARABLE[case]
    words = make(run, make_run)
    for form in ('table', 'json'):
        status, out, err = gauntlet('compare', *words, '--format', form)
        assert (status, out) == (2, '')
        for fact in facts:
            assert fact.format(folder=tmp_path) in err
