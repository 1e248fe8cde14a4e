"""Mutated rows of every kind are read, or are errors that name the file and the line; nothing else happens."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from llmfoundry_gauntlet.data.score_rows import read_score_rows
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.suite import load_suite

Row = dict[str, Any]
NUM_ROWS, SEED = 200, 1  # of each kind
SOUND: dict[str, Row] = {
    'language_modeling': {'context': 'Two and two are', 'continuation': 'four', 'category': 'sums'},
    'multiple_choice': {'query': 'Sky?', 'choices': ['blue', ' green', 'red'], 'gold': 1},
    'schema': {'context_options': ['The cup fell as it', 'The mat fell as it'], 'continuation': 'broke.', 'gold': 0},
    'generation_task_with_answers': {
        **{'context': 'Capital of Italy?', 'answer': 'Rome', 'aliases': ['Roma', 'rome'], 'chain_of_thought': 'Well.'},
    },
    'code_evaluation': {
        **{'task_id': 'x/1', 'prompt': 'def f(x):\n', 'entry_point': 'f', 'canonical_solution': '    return x\n'},
        **{'test': 'def check(f):\n    assert f(1) == 1\n', 'test_inputs': ['(1,)'], 'test_outputs': ['1']},
        **{'language': 'python'},
    },
    'mmlu_pro': {
        **{'question_id': 7, 'question': 'Who?', 'options': ['he', 'she', ' it'], 'answer': 'B', 'answer_index': 1},
        **{'category': 'law', 'src': 'x'},
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
OTHERS: tuple[Any, ...] = (
    *(None, True, 0, 1, 2, -1, 10, 1.0, 1e300, 10**4000, float('nan'), float('inf'), '', ' ', '0', 'A', 'x' * 20_000),
    *([], [''], ['x'], ['x', 'y'], [1, 2], [None], {}, {'a': 1}, [['x'], ['y']], '\u2028', '\0', '\ud800', '\ufeff'),
)
ODD_BYTES = (
    *(b'\r', b'\0', b'\xff', b'\xef\xbb\xbf', b'\xc2\xa0', b'\xed\xa0\x80', b'"', b'\\', b'\\ud800', b'{', b'}'),
    *(b'[', b']', b',', b':', b'1e999', b'NaN', b'null', b'[' * 3000),
)


def mutated(row: Row, chance: random.Random) -> bytes:
    """Return the line of a row with another value, key or bytes."""
    action = chance.randrange(4)
    if action < 3:
        key = chance.choice([*row])
        value = row[key] if action else chance.choice(OTHERS)
        row = {other: row[other] for other in row if other != key}
        row |= {} if action == 1 else {key if action == 0 else f'{key}s': value}
        return json.dumps(row, ensure_ascii=chance.random() < 0.5).encode('utf-8', 'surrogatepass')
    line = json.dumps(row).encode()
    start = chance.randint(0, len(line))
    return line[:start] + chance.choice(ODD_BYTES) + line[start + chance.choice([0, 1, 5, 50]) :]


@pytest.mark.parametrize('kind', SOUND)
def test_mutated_rows_are_read_or_named_with_file_and_line(tmp_path: Path, kind: str):
    path = tmp_path / SCORE_FILES.get(kind, 'rows.jsonl')
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind in SCORE_FILES:
        subsets = {'agieval': ['sat-en'], 'math': ['algebra']}.get(kind)
        prompts = str(ROOT / f'eval_data/score/prompts/{kind}.json')
        spec = load_suite(None, None, {'dataset': kind, 'prompts': prompts, 'subsets': subsets}).tasks[-1].spec
    else:
        entry = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [1], 'icl_task_type': kind}
        task = load_suite([entry]).tasks[0].at(1)

    def read() -> list[Any]:
        return list((read_score_rows(spec, tmp_path) if kind in SCORE_FILES else task.read(tmp_path)).examples)

    sound = json.dumps(SOUND[kind]).encode()
    path.write_bytes(sound)
    (expected,) = read()
    chance = random.Random(f'{kind} {SEED}')
    num_read = 0
    for _ in range(NUM_ROWS):
        line = mutated(SOUND[kind], chance)
        path.write_bytes(b'\n'.join([sound, line]))
        try:
            found = read()
        except DataError as error:
            for problem in error.problems:
                assert re.fullmatch(rf'{re.escape(str(path))}:2: .+', problem), line[:300]
                assert len(problem) < 900 and problem.isprintable()
        else:
            assert found[0] == expected and len(found) == 2, line[:300]
            assert re.fullmatch('[0-9a-f]{16}', found[1].digest)
            num_read += 1
    assert 8 < num_read < NUM_ROWS - 40
