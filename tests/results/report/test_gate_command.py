"""`gauntlet gate` of recorded runs: verdicts and exit statuses, policies, and what cannot be compared."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from clustered_items import usual_error
from command_line import run_cli
from recorded_runs import copy_run, edited, rows_of_table, samples_of, samples_path, write_lines
from scipy.stats import t as student

NUM_ITEMS = 400
ONE, TWO = 'one/0-shot', 'two/0-shot'
CATEGORIES = {'first': 'one', 'second': 'two'}
OTHERWISE = {'averages': {'gauntlet_average': ['first', 'second'], 'first alone': ['first']}}

Changes = Mapping[str, tuple[int, int]]  # items that a run loses and gains of each task, against the baseline
Judge = Callable[..., tuple[int, dict[str, Any]]]


def record(out: Path, data: Path, changes: Changes, *, rows: int = NUM_ITEMS, **of_gauntlet: Any) -> Path:
    """Record a run of two tasks of which the baseline has the first half right."""
    answers = []
    for label in CATEGORIES.values():
        lost, gained = changes.get(label, (0, 0))
        half = NUM_ITEMS // 2
        for row in range(rows):
            is_right = lost <= row < half or half <= row < half + gained
            answers.append({'task': label, 'num_shots': 0, 'row': row, 'logprobs': [-1.0], 'is_argmax': is_right})
    folder = out.parent / f'{out.name} files'
    folder.mkdir(parents=True)
    tasks = [
        {'label': label, 'dataset_uri': f'{label}.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'}
        for label in CATEGORIES.values()
    ]
    categories = [
        {'name': name, 'benchmarks': [{'name': label, 'num_fewshot': 0}]} for name, label in CATEGORIES.items()
    ]
    of_yaml = {'categories': categories, **OTHERWISE, **of_gauntlet}
    words: list[Any] = ['run', '--data-root', data, '--out', out]
    words += ['--outputs', write_lines(folder / 'answers.jsonl', answers)]
    for option, content in (('tasks', {'icl_tasks': tasks}), ('gauntlet', {'eval_gauntlet': of_yaml})):
        path = folder / f'{option}.yaml'
        path.write_text(json.dumps(content))
        words += [f'--{option}', path]
    if rows < NUM_ITEMS:
        words += ['--allow-missing']
    assert run_cli(*words) == 0
    return out


@pytest.fixture(scope='module')
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the rows of two tasks."""
    folder = tmp_path_factory.mktemp('rows')
    for label in CATEGORIES.values():
        lines = [{'context': f'{label} {row} is', 'continuation': f'n{row}'} for row in range(NUM_ITEMS)]
        write_lines(folder / f'{label}.jsonl', lines)
    return folder


@pytest.fixture(scope='module')
def judged(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> dict[str, Path]:
    """Return a baseline, and runs that are alike, a little worse, clearly worse on one task, and better."""
    folder = tmp_path_factory.mktemp('judged')
    changes: dict[str, Changes] = {
        'baseline': {},
        'alike': {'one': (4, 4), 'two': (5, 4)},
        'a little worse': {'one': (20, 8), 'two': (20, 8)},
        'worse on one': {'one': (40, 4), 'two': (4, 40)},
        'better': {'one': (2, 30), 'two': (2, 30)},
    }
    return {name: record(folder / name, rows, of_run) for name, of_run in changes.items()}


@pytest.fixture
def judge(gauntlet, judged: dict[str, Path]) -> Judge:
    """Return a function that judges a run by the baseline and returns the exit status and the JSON output."""

    def call(name: str | Path, *words: Any) -> tuple[int, dict[str, Any]]:
        status, out, err = gauntlet('gate', judged['baseline'], judged.get(str(name), name), *words, '--format', 'json')
        assert out, err
        return status, json.loads(out)

    return call


@pytest.fixture
def policy(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a policy file."""

    def write(text: str) -> Path:
        path = tmp_path / 'gate.yaml'
        path.write_text(text)
        return path

    return write


def problems_of(gauntlet: Any, first: Path, second: Path, *words: Any) -> list[str]:
    """Return the lines on standard error of a command that must end with status 2 and print nothing else."""
    status, out, err = gauntlet('gate', first, second, *words)
    assert (status, out) == (2, ''), err
    assert 'Traceback' not in err
    return [line.removeprefix('error: ') for line in err.splitlines()]


# Verdicts and exit statuses


@pytest.mark.parametrize(
    ('name', 'words', 'status', 'verdict'),
    [
        ('alike', (), 0, 'ok'),
        ('better', (), 0, 'ok'),
        ('baseline', (), 0, 'ok'),
        ('a little worse', (), 3, 'unclear'),
        ('a little worse', ('--margin', '0.06'), 0, 'ok'),
        ('worse on one', (), 1, 'worse'),
        ('worse on one', ('--task-margin', '0.2'), 1, 'worse'),  # its category has no margin
        ('alike', ('--margin', '0.001'), 3, 'unclear'),
        ('alike', ('--require', 'one', '--task-margin', '0.01'), 3, 'unclear'),
        ('alike', ('--require', 'one', '--task-margin', '0.05'), 0, 'ok'),
        ('alike', ('--require', 'first alone'), 0, 'ok'),
    ],
)
def test_the_exit_status_is_the_verdict(judge: Judge, name: str, words: Sequence[str], status: int, verdict: str):
    found_status, record = judge(name, *words)

    assert (found_status, record['verdict']) == (status, verdict)


def test_a_row_has_its_difference_the_interval_that_decides_and_the_power(judge: Judge, judged: dict[str, Path]):
    """Categories are one task each, whose chance is 0: the average is that of both tasks, of 800 items."""
    loss, error = (12 + 12) / 800, usual_error([-1.0] * 20 + [1.0] * 8 + [0.0] * 372) / 2**0.5

    _, record = judge('a little worse')

    row = record['rows']['averages']['gauntlet_average']
    # Satterthwaite's degrees of freedom of two equal parts
    freedom = 2 * 399
    quantile = student(freedom).ppf(0.95)
    assert (row['verdict'], row['required'], row['margin']) == ('unclear', True, 0.03)
    assert row['difference'] == pytest.approx(-loss, abs=1e-12)
    assert row['standard_error'] == pytest.approx(error, rel=1e-9)
    assert row['interval'] == pytest.approx([-loss - quantile * error, -loss + quantile * error], rel=1e-9)
    assert row['p_ok'] == pytest.approx(student(freedom).sf((0.03 - loss) / error), rel=1e-9)
    assert row['p_worse'] == pytest.approx(1 - row['p_ok'], rel=1e-9)
    assert row['power'] == pytest.approx(student(freedom).cdf(0.03 / error - quantile), rel=1e-9)
    assert row['margin_needed'] == pytest.approx((quantile + student(freedom).ppf(0.8)) * error, rel=1e-9)
    assert (record['required'], record['alpha']) == (['gauntlet_average'], 0.05)
    assert record['first']['folder'] == str(judged['baseline'])


def test_the_output_has_the_digests_of_both_runs(judge: Judge, judged: dict[str, Path], tmp_path: Path):
    """Mutation: a digest of results.json alone, which says nothing of the items."""
    copied = copy_run(judged['alike'], tmp_path / 'copied')
    _, original = judge('alike')
    _, same = judge(copied)
    write_lines(samples_path(copied, ONE), [{**line, 'score': 1.0} for line in samples_of(copied, ONE)])
    _, changed = judge(copied)

    assert original['first']['sha256'] != original['second']['sha256']
    assert same['second']['sha256'] == original['second']['sha256']
    assert changed['second']['sha256'] != original['second']['sha256']
    assert len(original['first']['sha256']) == 64


def test_the_table_shows_every_row_and_ends_with_what_is_not_covered(
    gauntlet, judged: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv('COLUMNS', '140')
    words = ('gate', judged['baseline'], judged['worse on one'])
    status, out, _ = gauntlet(*words)
    record = json.loads(gauntlet(*words, '--format', 'json')[1])

    assert status == 1
    lines = out.splitlines()
    assert lines[0] == 'gate: worse on one \u2212 baseline'
    table = rows_of_table(out)
    names = [ONE, TWO, 'first', 'second', 'first alone', 'gauntlet_average\u2020']
    assert [name for name in table if name in names] == names
    for family in record['rows'].values():
        for name, row in family.items():
            cells = table[f'{name}\u2020' if row['required'] else name]
            low, high = row['interval']
            assert cells[0] == f'{row["difference"]:+.3f}'
            assert cells[1] == f'[{low:+.3f}, {high:+.3f}]'
            assert cells[3] == row['verdict']
    assert record['reason'] in lines[-3]
    assert 'first' in lines[-3]
    assert lines[-1] == f'the error is over items; another seed of training {judged["worse on one"]} is not covered'


def test_what_is_unclear_for_want_of_items_says_so(gauntlet, judge: Judge, judged: dict[str, Path]):
    status, record = judge('alike', '--margin', '0.001')
    out = gauntlet('gate', judged['baseline'], judged['alike'], '--margin', '0.001')[1]

    row = record['rows']['averages']['gauntlet_average']
    assert status == 3
    assert row['power'] < 0.5
    assert row['hint'] == 'more items, or a larger margin'
    assert out.splitlines()[-3].endswith('gauntlet_average (margin 0.001); more items, or a larger margin')


def test_csv_and_markdown_have_every_row(gauntlet, judge: Judge, judged: dict[str, Path]):
    words = ('gate', judged['baseline'], judged['alike'])
    _, record = judge('alike')
    names = [name for family in record['rows'].values() for name in family]

    of_csv = list(csv.DictReader(io.StringIO(gauntlet(*words, '--format', 'csv')[1])))
    markdown = gauntlet(*words, '--format', 'markdown')[1]

    assert [row['name'] for row in of_csv] == names
    assert {row['family'] for row in of_csv} == {'tasks', 'categories', 'averages'}
    assert float(of_csv[0]['difference']) == record['rows']['tasks'][ONE]['difference']
    assert all(f'{name.replace("_", chr(92) + "_")}' in markdown or name in markdown for name in names)
    assert markdown.splitlines()[-1].startswith('the error is over items')


# Policies


def test_a_policy_sets_margins_of_families_and_rows_and_what_is_required(judge: Judge, policy):
    path = policy(
        'margins: {tasks: 0.04, two/0-shot: 0.02, averages: 0.05}\n'
        'relative: {first: 0.1}\n'
        'require: [first alone, one]\n'
        'ignore: [second]\n'
    )

    status, record = judge('alike', '--policy', path)

    margins = {name: row['margin'] for family in record['rows'].values() for name, row in family.items()}
    assert margins == {
        ONE: 0.04,
        TWO: 0.02,
        'first': pytest.approx(0.1 * 0.5),  # of the baseline's score
        'first alone': 0.05,
        'gauntlet_average': 0.05,
    }
    assert record['required'] == [ONE, 'first alone']
    assert status == 0
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (record['policy']['path'], record['policy']['sha256']) == (str(path), digest)


def test_a_policy_that_requires_nothing_only_blocks(judge: Judge, policy):
    path = policy('require: []\n')

    assert judge('a little worse', '--policy', path)[0] == 0
    assert judge('worse on one', '--policy', path)[0] == 1


def test_rows_that_are_ignored_cannot_block(judge: Judge, policy):
    path = policy('ignore: [one, first, first alone]\n')

    assert judge('worse on one', '--policy', path)[0] == 0


def test_the_digest_of_the_policy_is_printed(gauntlet, judged: dict[str, Path], policy):
    path = policy('margins: {averages: 0.1}\n')

    out = gauntlet('gate', judged['baseline'], judged['a little worse'], '--policy', path)[1]

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f'{path} (sha256 {digest[:16]})' in out


@pytest.mark.parametrize(
    ('text', 'line', 'parts'),
    [
        ('margin: {averages: 0.03}\n', 1, ["unknown key 'margin'", "'margins'"]),
        ('margins:\n  averages: 3\n', 2, ['margins.averages: is 3', 'less than 1']),
        ('margins:\n  averages: much\n', 2, ["margins.averages: is 'much'", 'a number']),
        ('margins:\n  tasks: 0.1\n  gauntlet_averag: 0.1\n', 3, ["'gauntlet_averag'", "'gauntlet_average'"]),
        ('margins: {}\nrequire:\n- first\n- onee\n', 4, ["require[1]: the runs have no 'onee'", "'one'"]),
        ('ignore: [xyz]\n', 1, ["ignore[0]: the runs have no 'xyz'", 'gauntlet compare']),
        ('\nrelative:\n  secnd: 0.1\n', 3, ["relative.secnd: the runs have no 'secnd'", "'second'"]),
        ('margins: {one: 0.1}\nrelative:\n  one: 0.1\n', 3, ['relative.one: has a margin too']),
        ('ignore: [gauntlet_average]\n', 1, ['gauntlet_average is required']),
        ('require: first\n', 1, ['require: is', 'a list']),
    ],
)
def test_a_mistake_in_a_policy_is_named_with_its_line(
    gauntlet, judged: dict[str, Path], policy, text: str, line: int, parts: Sequence[str]
):
    path = policy(text)

    [problem] = problems_of(gauntlet, judged['baseline'], judged['alike'], '--policy', path)

    assert problem.startswith(f'{path}:{line}: ')
    assert [part for part in parts if part not in problem] == []


def test_a_relative_margin_of_a_score_below_chance_is_a_mistake(gauntlet, rows: Path, tmp_path: Path, policy):
    """Its score would make the margin negative."""
    first, second = (record(tmp_path / name, rows, {'one': (200, 0)}) for name in 'ab')
    path = policy('relative: {one: 0.1}\n')

    [problem] = problems_of(gauntlet, first, second, '--policy', path)

    assert 'relative.one' in problem
    assert 'score is 0.000' in problem


@pytest.mark.parametrize(
    ('words', 'parts'),
    [
        (('--margin', 'x'), ['--margin', "'x'", 'a number']),
        (('--margin', '3'), ['--margin: is 3', 'less than 1']),
        (('--task-margin', '-1'), ['--task-margin: is -1']),
        (('--alpha', '0.5'), ['--alpha: is 0.5', 'below 0.5']),
        (('--require', 'gauntlet_avg'), ["--require: the runs have no 'gauntlet_avg'", "'gauntlet_average'"]),
        (('--require', 'one'), ['one/0-shot: is required', '--task-margin']),
        (('--policy', 'no such file.yaml'), ['no such file.yaml: there is no such file']),
        (('--policy', 'x.yaml', '--margin', '0.1'), ['--margin', '--policy']),
    ],
)
def test_a_mistake_in_an_option_is_named(gauntlet, judged: dict[str, Path], words: Sequence[str], parts: Sequence[str]):
    [problem] = problems_of(gauntlet, judged['baseline'], judged['alike'], *words)

    assert [part for part in parts if part not in problem] == []


# Runs that cannot be compared


def with_change(run: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a run with a change of its record."""
    with edited(copy_run(run, to)) as record_of_copy:
        change(record_of_copy)
    return to


DIFFERENT: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    'semantics': (lambda of: of['config'].update(semantics='reference'), 'semantics is corrected and reference'),
    'version': (lambda of: of['composites'].update(version='0' * 16), '0000000000000000'),
    'data': (lambda of: of['tasks'][TWO].update(data_sha256='ab' * 32), 'two/0-shot: the data files differ'),
}


@pytest.mark.parametrize('kind', DIFFERENT)
def test_runs_of_different_questions_cannot_be_compared_unless_that_is_allowed(
    gauntlet, judged: dict[str, Path], tmp_path: Path, kind: str
):
    change, part = DIFFERENT[kind]
    other = with_change(judged['alike'], tmp_path / 'other', change)

    [problem] = problems_of(gauntlet, judged['baseline'], other)
    status, out, _ = gauntlet('gate', judged['baseline'], other, '--allow-different')

    assert problem.startswith('not comparable: ')
    assert part in problem
    assert '--allow-different' in problem
    assert (status, 'warning: ' in out) == (0, True)


@pytest.mark.parametrize(('num_lost', 'is_comparable'), [(4, True), (5, False)])
def test_one_item_in_a_hundred_of_a_required_task_may_have_another_prompt(
    gauntlet, judged: dict[str, Path], tmp_path: Path, num_lost: int, is_comparable: bool
):
    other = copy_run(judged['alike'], tmp_path / 'other')
    lines = samples_of(other, TWO)
    for line in lines[:num_lost]:
        line['prompt_sha256'] = 'ab' * 32
    write_lines(samples_path(other, TWO), lines)

    status, _, err = gauntlet('gate', judged['baseline'], other)

    assert (status == 0) is is_comparable
    assert ('two/0-shot: 395 of 400 items were asked with the same prompt' in err) is not is_comparable


def test_items_of_one_run_alone_count_as_lost(gauntlet, judged: dict[str, Path], tmp_path: Path):
    other = copy_run(judged['alike'], tmp_path / 'other', without={ONE: range(100)})

    [problem] = problems_of(gauntlet, judged['baseline'], other)

    assert 'one/0-shot: 300 of 400 items' in problem


def test_a_task_that_is_not_required_may_have_other_items(gauntlet, judged: dict[str, Path], policy, tmp_path: Path):
    other = copy_run(judged['alike'], tmp_path / 'other', without={TWO: range(100)})
    path = policy('require: [first alone]\n')

    status, out, _ = gauntlet('gate', judged['baseline'], other, '--policy', path)

    assert status == 0
    assert 'warning: ' in out


def test_a_required_row_without_a_difference_cannot_be_compared(gauntlet, judged: dict[str, Path], tmp_path: Path):
    other = copy_run(judged['alike'], tmp_path / 'other')
    write_lines(samples_path(other, TWO), [{**line, 'prompt_sha256': 'ab' * 32} for line in samples_of(other, TWO)])

    [problem] = problems_of(gauntlet, judged['baseline'], other, '--allow-different')

    assert problem.startswith('gauntlet_average: is required, but cannot be compared: ')
    assert 'two/0-shot' in problem


def test_runs_without_averages_must_be_told_what_is_required(
    gauntlet, judge: Judge, judged: dict[str, Path], tmp_path: Path
):
    def without_gauntlet(of: dict[str, Any]) -> None:
        of['composites'] = None

    first, second = (with_change(judged[name], tmp_path / name, without_gauntlet) for name in ('baseline', 'alike'))

    [problem] = problems_of(gauntlet, first, second)
    words = ('--require', 'one', '--task-margin', '0.05')

    assert 'nothing is required' in problem
    assert '--require' in problem
    assert gauntlet('gate', first, second, *words)[0] == 0


def test_without_gauntlet_average_the_first_average_is_required(gauntlet, rows: Path, tmp_path: Path):
    averages = {'half': ['first'], 'both': ['first', 'second']}
    first, second = (record(tmp_path / name, rows, {}, averages=averages) for name in 'ab')

    record_of_gate = json.loads(gauntlet('gate', first, second, '--format', 'json')[1])

    assert record_of_gate['required'] == ['half']


def test_a_folder_of_several_evaluations_is_judged_by_its_last(gauntlet, judged: dict[str, Path], tmp_path: Path):
    copy_run(judged['alike'], tmp_path / 'training' / 'ba10', batch=10)
    copy_run(judged['worse on one'], tmp_path / 'training' / 'ba20', batch=20)

    assert gauntlet('gate', judged['baseline'], tmp_path / 'training')[0] == 1
    assert gauntlet('gate', judged['baseline'], tmp_path / 'training' / 'ba10')[0] == 0


def test_a_folder_without_a_run_is_named(gauntlet, judged: dict[str, Path], tmp_path: Path):
    [problem] = problems_of(gauntlet, judged['baseline'], tmp_path)

    assert problem.startswith(f'{tmp_path}: ')
