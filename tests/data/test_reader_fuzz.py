"""Mutated rows of every kind: what a reader makes of each is known without it, from the JSON alone.

`strict` and the functions below it say which lines are rows and what is in them, in other words than the readers'. A
sound row and a mutated one must give exactly these rows, or an error that names exactly the faulty lines.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from character_tokenizer import CharacterTokenizer
from paths import ROOT

from llmfoundry_gauntlet.data.score_rows import read_score_rows
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.inputs import load_suite
from llmfoundry_gauntlet.results.samples import sample_line
from llmfoundry_gauntlet.tasks import Task
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.items import Preparation, item_result
from llmfoundry_gauntlet.tasks.prepare import cache_name
from llmfoundry_gauntlet.types import Generation, Item, ScoreRequest

Row = dict[str, Any]
NUM_ROWS, SEED = 1000, 1  # of each kind
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
        **{'passage': 'Once.', 'question': 'How many?', 'options': ['(A)1', '(B) 2', '(C)3', '(D)4'], 'label': 'C'},
        **{'answer': None, 'other': {'solution': 'three'}},
    },
    'math': {'problem': '1+1?', 'level': 'Level 1', 'type': 'Algebra', 'solution': r'It is $\boxed{2}$.'},
}
SCORE_FILES = {
    'mmlu_pro': 'score/mmlu_pro_test.jsonl',
    'agieval': 'score/agieval_v1/sat-en.jsonl',
    'math': 'score/hendrycks_math/algebra.jsonl',
}
ODD = (
    *'\u00a0\u2028\u200b\x85\0\x1f\ufffd\ufeff\U0001f642\ud800\udc00"\\\n\r\t ',
    *('e\u0301', '  ', '{}', '%s', '(A)', 'A ', 'NaN'),
)
ODD_BYTES = (
    *(b'\n', b'\r', b'\r\n', b'\0', b'\xff', b'\xef\xbb\xbf', b'\xc2\xa0', b'\xed\xa0\x80', b'\xc0\xaf', b'"', b'\\'),
    *(b'\\u', b'\\ud800', b'{', b'}', b'[', b']', b',', b':', b'1e9', b'NaN', b'null'),
)
RAW = {  # what Python's json does not write: where these stand in quotes, in the line they do not
    '@inf@': b'1e999',
    '@huge@': b'9' * 5000,
    '@deep@': b'[' * 3000 + b']' * 3000,
    '@64@': b'[' * 63 + b']' * 63,
    '@65@': b'[' * 64 + b']' * 64,
}
OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3, 10, 0.0, 1.0, 2.5, 1e300, math.nan, math.inf, -math.inf, 10**30, 10**4000),
    *('', ' ', '0', 'A', 'x' * 20_000, [], [''], ['x'], ['x', 'y'], [1, 2], [None], {}, {'a': 1}, [['x'], ['y']]),
    *RAW,
)


def mutated_value(value: Any, chance: random.Random) -> Any:
    """Another value, or the same changed a little."""
    kind = chance.randrange(6)
    if kind == 0 and isinstance(value, str):
        place = chance.randint(0, len(value))
        return value[:place] + chance.choice(ODD) + value[place:]
    if kind <= 2 and value and isinstance(value, list):
        place = chance.randrange(len(value))
        new = chance.choice(
            [
                [],
                ['new'],
                value * chance.choice([1, 30]),
                [chance.choice(OTHERS)],
                [mutated_value(value[place], chance)],
            ]
        )
        return value[:place] + new + value[place + chance.randrange(2) :]
    if kind == 3:
        return chance.choice([[value], {'text': value}, str(value)])
    return chance.choice(OTHERS)


def mutated_row(row: Row, chance: random.Random) -> bytes:
    """The line of a row with one or two changes in keys or values."""
    row = dict(row)
    doubled = ''
    for _ in range(chance.choice([1, 1, 2])):
        key = chance.choice([*row, 'further'])
        action = chance.randrange(8)
        if action <= 1:
            value = row.pop(key, None)
            row |= {chance.choice([f'{key}s', key.title(), f' {key}', '', 'k' * 300]): value} if action else {}
        elif action == 2:
            doubled = f'{json.dumps(key)}: {json.dumps(chance.choice(["x", 0, None]))}, '
        else:
            row[key] = mutated_value(row.get(key), chance)
    items = list(row.items())
    chance.shuffle(items)
    text = json.dumps(dict(items), ensure_ascii=chance.random() < 0.5)
    line = text.replace('{', '{' + doubled, 1).encode('utf-8', 'surrogatepass')
    for word, raw in RAW.items():
        line = line.replace(f'"{word}"'.encode(), raw)
    return line


def mutated_bytes(line: bytes, chance: random.Random) -> bytes:
    """The line with some bytes replaced, cut, doubled or put in."""
    for _ in range(chance.choice([1, 1, 3])):
        start = chance.randint(0, len(line))
        end = min(len(line), start + chance.choice([0, 1, 1, 5, 50]))
        new = chance.choice([b'', bytes([chance.randrange(256)]), line[start:end] * 2, chance.choice(ODD_BYTES)])
        line = line[:start] + new + line[end:]
    return line if chance.random() < 0.95 else line[: chance.randint(0, len(line))]


def mutated_lines(row: Row, chance: random.Random) -> Iterator[bytes]:
    line = json.dumps(row, ensure_ascii=False).encode()
    for _ in range(NUM_ROWS):
        yield mutated_row(row, chance) if chance.random() < 0.6 else mutated_bytes(line, chance)


class Fault(Exception):
    pass


def strict(line: bytes) -> Any:
    """The value of a line of JSON. Raises Fault."""

    def pairs(found: list[tuple[str, Any]]) -> Row:
        if len({key for key, _ in found}) < len(found):
            raise Fault
        return dict(found)

    def refuse(_: str) -> None:
        raise Fault

    def check(value: Any, depth: int) -> None:
        needs(not isinstance(value, str) or not re.search('[\ud800-\udfff]', value))
        needs(not isinstance(value, float) or math.isfinite(value))
        if isinstance(value, (list, dict)):
            if depth == 64:
                raise Fault
            for inner in [*value, *value.values()] if isinstance(value, dict) else value:
                check(inner, depth + 1)

    try:
        text = line.decode('utf-8').strip()
        value = json.loads(text.removeprefix('\ufeff').strip(), object_pairs_hook=pairs, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Fault from error
    check(value, 0)
    return value


def needs(holds: Any) -> None:
    if not holds:
        raise Fault


def text(row: Row, key: str, *, strip: bool = True, empty: bool = False) -> str:
    value = row.get(key)
    needs(isinstance(value, str))
    value = value.strip() if strip else value
    needs(value or empty)
    return value


def texts(row: Row, key: str) -> tuple[str, ...]:
    value = row.get(key)
    needs(isinstance(value, list) and len(value) >= 2 and all(isinstance(one, str) and one for one in value))
    return tuple(value)


def index(row: Row, key: str, count: int) -> int:
    needs(type(row.get(key)) is int and row[key] in range(count))
    return row[key]


def optional(row: Row, key: str, kind: type) -> Any:
    value = row.get(key)
    needs(value is None or isinstance(value, kind))
    needs(kind is str or all(isinstance(one, str) for one in value or ()))
    return value


def in_language_modeling(row: Row) -> tuple[Any, ...]:
    return text(row, 'context', empty=True), text(row, 'continuation')


def in_multiple_choice(row: Row) -> tuple[Any, ...]:
    choices = texts(row, 'choices')
    return text(row, 'query', empty=True), choices, index(row, 'gold', len(choices))


def in_schema(row: Row) -> tuple[Any, ...]:
    options = texts(row, 'context_options')
    return options, text(row, 'continuation'), index(row, 'gold', len(options))


def in_generation(row: Row) -> tuple[Any, ...]:
    golds = [text(row, 'answer'), *(optional(row, 'aliases', list) or ())]
    thought = optional(row, 'chain_of_thought', str)
    golds = [gold for place, gold in enumerate(golds) if gold not in golds[:place]]
    return text(row, 'context', empty=True), tuple(golds), thought if thought is None else thought.strip()


def in_code(row: Row) -> tuple[Any, ...]:
    pairs = [optional(row, key, list) or [] for key in ('test_inputs', 'test_outputs')]
    needs(
        len(pairs[0]) == len(pairs[1]) and ('language' not in row or row['language'] in ('python', 'c++', 'javascript'))
    )
    prompt, entry, test = (text(row, key, strip=False) for key in ('prompt', 'entry_point', 'test'))
    solution = optional(row, 'canonical_solution', str) or ''
    return prompt, entry, solution, test, tuple(zip(*pairs, strict=True)), row.get('language', 'python')


def in_mmlu_pro(row: Row) -> tuple[Any, ...]:
    options = texts(row, 'options')
    needs(len(options) <= 10)
    gold, category = index(row, 'answer_index', len(options)), text(row, 'category', strip=False)
    return text(row, 'question', strip=False, empty=True), options, gold, category


def in_agieval(row: Row) -> tuple[Any, ...]:
    options, label = texts(row, 'options'), text(row, 'label', strip=False)
    needs(len(options) <= 5 and len(label) == 1 and label in 'ABCDE'[: len(options)])
    passage, question = optional(row, 'passage', str), text(row, 'question', strip=False, empty=True)

    def bare(option: str) -> str:
        letter, rest = option[:1], option[1:]
        if letter == '(' and 'A' <= rest[:1] <= 'Z' and rest[1:2] == ')':
            return option[3:]
        if 'A' <= letter <= 'Z':
            return option[2:] if rest.startswith(' ') else option[3:] if rest.startswith('? ') else option
        return option

    return f'{passage}Q: {question}' if passage else question, tuple(map(bare, options)), 'ABCDE'.index(label), ''


def in_math(row: Row) -> tuple[Any, ...]:
    return text(row, 'problem', strip=False), text(row, 'solution', strip=False, empty=True), ''


EXPECTED: dict[str, Callable[[Row], tuple[Any, ...]]] = {
    'language_modeling': in_language_modeling,
    'multiple_choice': in_multiple_choice,
    'schema': in_schema,
    'generation_task_with_answers': in_generation,
    'code_evaluation': in_code,
    'mmlu_pro': in_mmlu_pro,
    'agieval': in_agieval,
    'math': in_math,
}


def expected(kind: str, content: bytes) -> tuple[dict[int, tuple[Any, ...]], set[int]]:
    """The values of each line that has a right row, and the lines that an error must name, both from 0."""
    values, faults = {}, set()
    for number, line in enumerate(content.split(b'\n')):
        if line.strip():
            try:
                values[number] = strict(line)
            except Fault:
                faults.add(number)
    if faults:  # rows are looked at once all lines are JSON
        return {}, faults
    rows, counts = {}, {}
    for number, value in values.items():
        try:
            needs(isinstance(value, dict))
            rows[number] = EXPECTED[kind](value)
        except Fault:
            faults.add(number)
        else:
            counts[number] = len(value.get('choices' if kind == 'multiple_choice' else 'context_options', ()) or ())
    if kind in ('multiple_choice', 'schema'):
        faults |= {number for number, count in counts.items() if count != counts[0]}
    return rows, faults


def task_of(kind: str) -> Task:
    if kind in SCORE_FILES:
        prompts = str(ROOT / f'eval_data/score/prompts/{kind}.json')
        subsets = {'agieval': ['sat-en'], 'math': ['algebra']}.get(kind)
        return load_suite(None, None, {'dataset': kind, 'prompts': prompts, 'subsets': subsets}).tasks[-1]
    entry = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [1], 'icl_task_type': kind}
    return load_suite([entry]).tasks[0].at(1)


def values_of(content: Any) -> tuple[Any, ...]:
    return tuple(getattr(content, name) for name in content.__slots__)


@pytest.mark.parametrize('kind', SOUND)
def test_mutated_rows_are_read_correctly_or_named_with_file_and_line(tmp_path, kind: str):
    task, path = task_of(kind), tmp_path / SCORE_FILES.get(kind, 'rows.jsonl')
    path.parent.mkdir(parents=True, exist_ok=True)
    sound = json.dumps(SOUND[kind]).encode()
    right = [sound]
    with path.open('wb', buffering=0) as file:
        for line in mutated_lines(SOUND[kind], random.Random(f'{kind} {SEED}')):
            content = sound + b'\n' + line + b'\n'
            file.seek(0)
            file.truncate(file.write(content))
            if read_as_expected(task, tmp_path, path, expected(kind, content), line):
                right.append(line)
    assert 100 < len(right) < NUM_ROWS - 300, 'the mutations are too strong, or too weak'
    boxed = [
        line for line in right if kind != 'math' or r'\boxed{2}' in strict(line)['solution']
    ]  # others have no gold
    path.write_bytes(b'\n'.join(boxed))
    check_later_steps(task, tmp_path)


def read_as_expected(task: Task, folder: Path, path: Path, wanted: tuple[Any, set[int]], line: bytes) -> bool:
    """Whether a second row was read, as it should be, or none, as none should be."""
    rows, faults = wanted
    try:
        read = read_score_rows(task.spec, folder) if task.icl_task_type.startswith('score') else task.read(folder)
    except DataError as error:
        named = {int(re.fullmatch(rf'{re.escape(str(path))}:(\d+): .+', problem)[1]) for problem in error.problems}
        assert named == {number + 1 for number in faults}, (line[:300], error)
        assert all(len(problem) < 900 and problem.isprintable() for problem in error.problems), error.problems
        return False
    assert not faults, line[:300]
    assert {example.row: values_of(example.content) for example in read.examples} == rows, line[:300]
    return len(rows) == 2


def check_later_steps(task: Task, folder: Path) -> None:
    """Rows that were read right become items with prompts, tokens, names and lines of a samples file."""
    examples = task.read(folder).examples
    encoder = Encoder(CharacterTokenizer())
    preparation = Preparation(task=task, examples=examples, encoder=encoder, max_seq_len=200_000)
    assert len(cache_name(preparation)) > 40
    items = preparation.items()
    assert len(items) == len(examples) and len({item.request.key for item in items}) == len(items)
    for item, example in zip(items, examples, strict=True):
        assert re.fullmatch('[0-9a-f]{16}', example.cluster) and re.fullmatch('[0-9a-f]{16}', example.digest)
        result = item_result(item, reply_of(item, task), task)
        line = sample_line(result).encode()
        assert b'\n' not in line and json.loads(line)['row'] == example.row


def reply_of(item: Item, task: Task) -> Generation | None:
    """The right answer, where it is text and is marked here."""
    gold = item.example.content.gold
    if isinstance(item.request, ScoreRequest) or task.runs_programs or not isinstance(gold, str):
        return None
    return Generation(key=item.key, text=gold)
