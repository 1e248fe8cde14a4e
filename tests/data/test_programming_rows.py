"""The sample rows of code tasks: their solutions pass, and derived files are of the same programs."""

import ast
import json
import math

import pytest
from paths import ROOT

FOLDER = ROOT / 'eval_data' / 'programming'
SHARES = {f'human_eval-{share}': share for share in (0.25, 0.5, 0.75)}
RETURNS = ['human_eval_return_simple', 'human_eval_return_complex']
LANGUAGES = {
    **dict.fromkeys(['human_eval', *SHARES, *RETURNS], 'python'),
    'processed_human_eval_cpp': 'c++',
    'processed_human_eval_js': 'javascript',
}
KEYS = ['task_id', 'prompt', 'entry_point', 'canonical_solution', 'test', 'test_inputs', 'test_outputs', 'language']
TRANSLATED_KEYS = [*KEYS[:2], *KEYS[3:5], 'entry_point', *KEYS[5:]]


def rows_of(name: str) -> list[dict]:
    with (FOLDER / f'{name}.jsonl').open(encoding='utf-8') as lines:
        return [json.loads(line) for line in lines]


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


@pytest.mark.parametrize('name', ['human_eval', *SHARES, *RETURNS])
def test_prompt_and_solution_are_the_original_program_and_pass_its_test(name: str):
    """A derived file has a share of the solution's lines in its prompt, or all except the last return."""
    whole = {row['task_id']: row for row in rows_of('human_eval')}
    for row in rows_of(name):
        original = whole[row['task_id']]
        is_return = name in RETURNS
        program = (
            f'{row["prompt"]}\n{row["canonical_solution"]}' if is_return else row['prompt'] + row['canonical_solution']
        )
        assert program.split() == (original['prompt'] + original['canonical_solution']).split()
        lines, rest = (text['canonical_solution'].splitlines() for text in (original, row))
        if name in SHARES:
            assert len([line for line in rest if line]) == len(lines) - math.floor(len(lines) * SHARES[name])
        elif is_return:
            assert rest == lines[-1:] and not row['prompt'].endswith('\n')
            is_name = isinstance(ast.parse(rest[0].strip().removeprefix('return ')).body[0].value, ast.Name)
            assert is_name == (name == 'human_eval_return_simple')
        names = {}
        exec(program + '\n\n' + row['test'], names)
        function = names[row['entry_point']]
        names['check'](function)
        for given, wanted in zip(row['test_inputs'], row['test_outputs'], strict=True):
            output, expected = function(*ast.literal_eval(given)), ast.literal_eval(wanted)
            assert (output, type(output)) == (expected, type(expected)), (row['task_id'], given)
            assert repr(expected) == wanted
