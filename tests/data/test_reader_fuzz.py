"""Odd rows of every kind are read, or are errors that name the file and the line; nothing else happens."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from llmfoundry_gauntlet.data.score_rows import read_score_rows
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.suite import load_suite

Row = dict[str, Any]
SOUND: dict[str, Row] = {
    'language_modeling': {'context': 'Two and two are', 'continuation': 'four', 'category': 'sums'},
    'multiple_choice': {'query': 'Sky?', 'choices': ['blue', ' green', 'red'], 'gold': 1},
    'schema': {'context_options': ['The cup fell as it', 'The mat fell as it'], 'continuation': 'broke.', 'gold': 0},
    'generation_task_with_answers': {
        'context': 'Capital of Italy?',
        'answer': 'Rome',
        'aliases': ['Roma', 'rome'],
        'chain_of_thought': 'Well.',
    },
    'code_evaluation': {
        'task_id': 'x/1',
        'prompt': 'def f(x):\n',
        'entry_point': 'f',
        'canonical_solution': '    return x\n',
        'test': 'def check(f):\n    assert f(1) == 1\n',
        'test_inputs': ['(1,)'],
        'test_outputs': ['1'],
        'language': 'python',
    },
    'mmlu_pro': {
        'question_id': 7,
        'question': 'Who?',
        'options': ['he', 'she', ' it'],
        'answer': 'B',
        'answer_index': 1,
        'category': 'law',
        'src': 'x',
    },
    'agieval': {
        'passage': 'Once.',
        'question': 'How many?',
        'options': ['(A)1', '(B) 2', '(C)3', '(D)4'],
        'label': 'C',
    },
    'math': {'problem': '1+1?', 'level': 'Level 1', 'type': 'Algebra', 'solution': r'It is $\boxed{2}$.'},
}
SCORE_FILES = {
    'mmlu_pro': 'score/mmlu_pro_test.jsonl',
    'agieval': 'score/agieval_v1/sat-en.jsonl',
    'math': 'score/hendrycks_math/algebra.jsonl',
}
NUMBERS = (0, 1, 2, -1, 10, 1.0, 1e300, 10**4000, float('nan'), float('inf'))
STRINGS = ('', ' ', '0', 'A', 'x' * 20_000, '\u2028', '\0', '\ud800', '\ufeff')
LISTS = ([], [''], ['x'], ['x', 'y'], [1, 2], [None], [['x'], ['y']])
OTHERS: tuple[Any, ...] = (None, True, *NUMBERS, *STRINGS, *LISTS, {}, {'a': 1})
OF_LINES = ('JSON', 'UTF-8', 'digits', 'surrogate', ' choices')  # in errors that name no key


@pytest.mark.parametrize('kind', SOUND)
def test_rows_with_odd_values_are_read_or_named_with_file_and_line(tmp_path: Path, kind: str):
    """Each key with each value, without it, and under another name."""
    path = tmp_path / SCORE_FILES.get(kind, 'rows.jsonl')
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind in SCORE_FILES:
        subsets = {'agieval': ['sat-en'], 'math': ['algebra']}.get(kind)
        prompts = str(ROOT / f'eval_data/score/prompts/{kind}.json')
        spec = load_suite(None, None, {'dataset': kind, 'prompts': prompts, 'subsets': subsets}).tasks[-1].spec
        read = partial(read_score_rows, spec, tmp_path)
    else:
        entry = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [1], 'icl_task_type': kind}
        read = partial(load_suite([entry]).tasks[0].at(1).read, tmp_path)
    row = SOUND[kind]
    others = [{**row, key: value} for key in row for value in OTHERS]
    others += [
        {**{name: row[name] for name in row if name != key}, **new} for key in row for new in ({}, {f'{key}s': 1})
    ]
    sound = json.dumps(row).encode()
    path.write_bytes(sound)
    (expected,) = read().examples
    num_read = 0
    for other in others:
        path.write_bytes(b'\n'.join([sound, json.dumps(other, ensure_ascii=False).encode('utf-8', 'surrogatepass')]))
        try:
            found = read().examples
        except DataError as error:
            for problem in error.problems:
                assert re.fullmatch(rf'{re.escape(str(path))}:2: .+', problem), other
                assert len(problem) < 900 and problem.isprintable()
                assert any(word in problem for word in (*row, *OF_LINES)), other
        else:
            assert found[0] == expected and len(found) == 2, other
            assert re.fullmatch('[0-9a-f]{16}', found[1].digest)
            num_read += 1
    assert 5 < num_read < 0.9 * len(others)
