import ast
import sys

import pytest
from paths import ROOT, SHARED_DATA

sys.path.insert(0, str(ROOT / 'scripts'))

import build_programming_variants

FOLDER = ROOT / 'eval_data' / 'programming'
REAL = SHARED_DATA / 'local_data' / 'programming'
PARTS = ['human_eval-0.25', 'human_eval-0.5', 'human_eval-0.75']
RETURNS = ['human_eval_return_simple', 'human_eval_return_complex']
LANGUAGES = {
    **dict.fromkeys(['human_eval', *PARTS, *RETURNS], 'python'),
    'processed_human_eval_cpp': 'c++',
    'processed_human_eval_js': 'javascript',
}
KEYS = ['task_id', 'prompt', 'entry_point', 'canonical_solution', 'test', 'test_inputs', 'test_outputs', 'language']
TRANSLATED_KEYS = [*KEYS[:2], *KEYS[3:5], 'entry_point', *KEYS[5:]]


def rows_of(name: str) -> list[dict]:
    return build_programming_variants.read_rows(FOLDER / f'{name}.jsonl')


def test_the_derived_files_are_what_the_script_makes_of_human_eval():
    files = build_programming_variants.derived_files(rows_of('human_eval'))
    assert sorted(files) == sorted(f'{name}.jsonl' for name in PARTS + RETURNS)
    for name, text in files.items():
        assert (FOLDER / name).read_text(encoding='utf-8') == text, name


@pytest.mark.parametrize('name', LANGUAGES)
def test_every_file_has_twelve_rows_or_more_with_the_keys_of_the_original(name: str):
    rows = rows_of(name)
    assert len(rows) >= 12
    assert len({row['task_id'] for row in rows}) == len(rows)
    for row in rows:
        assert list(row) == (KEYS if row['language'] == 'python' else TRANSLATED_KEYS)
        assert row['language'] == LANGUAGES[name]
        assert row['entry_point'] in row['prompt']
        assert len(row['test_inputs']) == len(row['test_outputs']) >= 5
        assert all(isinstance(text, str) for text in row['test_inputs'] + row['test_outputs'])


@pytest.mark.parametrize('name', ['human_eval', *PARTS])
def test_prompt_and_solution_pass_their_test(name: str):
    for row in rows_of(name):
        run_test(row, row['prompt'] + row['canonical_solution'])


@pytest.mark.parametrize('name', RETURNS)
def test_prompt_line_end_and_return_line_pass_their_test(name: str):
    for row in rows_of(name):
        assert not row['prompt'].endswith('\n')
        run_test(row, row['prompt'] + '\n' + row['canonical_solution'])


def run_test(row: dict, program: str) -> None:
    """Runs `check` and every pair of input and output on the program's function."""
    names = {}
    exec(program + '\n\n' + row['test'], names)
    function = names[row['entry_point']]
    names['check'](function)
    for given, wanted in zip(row['test_inputs'], row['test_outputs'], strict=True):
        output, expected = function(*ast.literal_eval(given)), ast.literal_eval(wanted)
        assert (output, type(output)) == (expected, type(expected)), (row['task_id'], given)
        assert repr(expected) == wanted


@pytest.mark.parametrize('share', build_programming_variants.SHARES)
def test_the_published_rows_are_cut_in_this_way(share: float):
    if not REAL.is_dir():
        pytest.skip(f'{REAL} is absent: the published programming files')
    whole = {row['task_id']: row for row in build_programming_variants.read_rows(REAL / 'human_eval.jsonl')}
    rows = build_programming_variants.read_rows(REAL / f'human_eval-{share}.jsonl')
    cut = [build_programming_variants.with_share(whole[row['task_id']], share) for row in rows]
    assert sum(row['prompt'] == own['prompt'] for row, own in zip(rows, cut, strict=True)) >= 159
    assert len(rows) == 164
