"""The manifest and the sample rows and prompts: in the published format, without published sentences."""

from __future__ import annotations

import ast
import csv
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.score import AGIEVAL, MATH, MMLU_PRO
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.data.examples import RULES
from llmfoundry_gauntlet.data.published import PATH, read_manifest
from llmfoundry_gauntlet.data.score_rows import FILES as SCORE_FILES

FOLDER = ROOT / 'eval_data'
TASKS = {task['label']: task for task in read_yaml(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')['icl_tasks']}
SCORE_TASKS = {'score_mmlu_pro': MMLU_PRO, 'score_agieval': AGIEVAL, 'score_math': MATH}
FORMS = {  # of the manifest's columns
    'path': r'[a-z_]+(/[a-z0-9_]+)?/[A-Za-z0-9_.-]+\.jsonl',
    'task': r'[a-z0-9_]+',
    'rows': r'[1-9]\d*',
    'bytes': r'([1-9]\d*)?',
    'git_blob': r'([0-9a-f]{40})?',
    'sha256': r'([0-9a-f]{64})?',
    'repository': r'(github|huggingface):[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+',
    'revision': r'[0-9a-f]{40}',
    'source': r'[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*',
    'licence': r'unknown|[A-Za-z]+(-[A-Za-z0-9.]+)*',
    'converter': r'(mmlu_pro|math)?',
}
UPSTREAM = SHARED_DATA / 'score'
LEAST_ROWS = 12
SHINGLE_WORDS = 8
FILES = [file.path.removesuffix('.jsonl') for file in read_manifest() if not file.path.startswith('score/')]
LEAST_SHARE, GREATEST_SHARE = 0.1, 0.6  # of the rows whose right choice stands in one place

# The words of a form are the published files'; what stands around them is ours.
FRAMES = re.compile(
    r'Below is a story followed by .*? the previous questions\.|Is the following statement true or false\? Output .*?\n'
    r"|Let's do some find-the-common-.*? in common\?|Given a sentence, select the correct language among the choices"
    r'|The following paragraphs each describe .*? within each paragraph\.|What is the moral of this story\?'
    r'|Which of the following (statements is consistent with the situation above|sentences best characterizes)'
    r'|Who does the pronoun "\w+" refer to in the previous sentence\? A:|A\. yes\nB\. no\nC\. maybe'
    r'|Does the passage below contain sensitive information\?\nPassage:|Length of longest common subsequence:'
    r'|Complete the rest of the sequence, making sure that the parentheses are closed properly\.'
    r'|Given two strings, determine the length of the longest common subsequence\.|#include ?<\w+(\.h)?>'
    r'|Determine whether the given sequence of parentheses is properly matched\.|using namespace std;',
    re.DOTALL,
)
RARE_SOURCES = {'mmlu', 'agi_eval_sat_math', 'math_qa'}  # few published rows have a passage, or are long enough

SHARES = {f'programming/human_eval-{share}': share for share in (0.25, 0.5, 0.75)}
RETURNS = ['programming/human_eval_return_simple', 'programming/human_eval_return_complex']
PYTHON_PROGRAMS = ['programming/human_eval', *SHARES, *RETURNS]
LANGUAGES = {
    **dict.fromkeys(PYTHON_PROGRAMS, 'python'),
    **{'programming/processed_human_eval_cpp': 'c++', 'programming/processed_human_eval_js': 'javascript'},
}

LETTERS = 'ABCDEFGHIJ'
NUM_OPTIONS = {'aqua-rat': 5, 'logiqa-en': 4, 'lsat-ar': 5, 'lsat-lr': 5, 'lsat-rc': 5, 'sat-en': 4, 'sat-math': 4}
NAMES = ('Algebra', 'Counting & Probability', 'Geometry', 'Intermediate Algebra', 'Number Theory', 'Prealgebra')
SUBJECTS = {name.lower().replace(' ', '_').replace('&', 'and'): name for name in (*NAMES, 'Precalculus')}
BEST = 'The best answer is'
ENDINGS = {'mmlu_pro': BEST, 'agieval': BEST, 'math': r'The final answer is: $\boxed{answer}$'}


@functools.cache
def rows_of(name: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f'{name}.jsonl').read_text(encoding='utf-8').split('\n')[:-1]]


def published(name: str) -> list[dict[str, Any]]:
    folder = SHARED_DATA / 'local_data'
    if not (folder / f'{name}.jsonl').is_file():
        pytest.skip(f'the published {name}.jsonl is not here')
    return rows_of(name, folder)


def test_fields_of_the_manifest_are_well_formed_and_file_names_unique():
    """Files are found by their names, whatever folder they lie in."""
    lines = PATH.read_text(encoding='utf-8').splitlines()
    assert tuple(lines[0].split('\t')) == tuple(FORMS)
    assert {line.count('\t') for line in lines} == {len(FORMS) - 1}
    rows = list(csv.DictReader(lines, dialect='excel-tab'))
    for row in rows:
        assert {name: row[name] for name, form in FORMS.items() if re.fullmatch(form, row[name]) is None} == {}
        assert '..' not in row['path'] and '..' not in row['source']
    assert len({file.path.rpartition('/')[2].casefold() for file in read_manifest()}) == len(rows) == 72


def test_the_manifest_and_the_sample_data_have_the_files_of_the_tasks_and_of_score():
    expected = {(label, task['dataset_uri']) for label, task in TASKS.items()}
    expected |= {(label, path) for label, dataset in SCORE_TASKS.items() for path in SCORE_FILES[dataset]}
    assert {(file.task, file.path) for file in read_manifest()} == expected
    assert {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob('*.jsonl')} == {path for _, path in expected}
    assert len(expected) == len(FILES) + 15 == 57 + 15


def test_gauntlet_files_have_the_git_blob_id_of_llm_foundry():
    for file in read_manifest():
        if file.task not in SCORE_TASKS:
            assert file.git_blob is not None and file.converter is None, file.path
            assert file.source == f'scripts/eval/local_data/{file.path}'
    listed = ROOT.parent / 'shared' / 'reference' / 'upstream_blobs.tsv'
    if not listed.is_file():
        pytest.skip(f'{listed} is not here')
    with listed.open(encoding='utf-8', newline='') as lines:
        blobs = {row['path']: row for row in csv.DictReader(lines, dialect='excel-tab')}
    for file in read_manifest():
        if file.source in blobs:
            row = blobs.pop(file.source)
            assert file.git_blob == row['git_blob_sha1'], file.path
            assert row['bytes_if_known'] in ('', str(file.num_bytes)), file.path
    assert len([path for path in blobs if path.endswith('.jsonl')]) < 20  # of tasks that are not in this Gauntlet


@pytest.mark.parametrize('name', FILES)
def test_every_file_has_twelve_rows_or_more_with_the_keys_of_the_published_ones(name: str):
    assert len(rows_of(name)) >= LEAST_ROWS
    assert len({tuple(row) for row in rows_of(name)}) == 1
    assert {tuple(row) for row in rows_of(name)} == {tuple(row) for row in published(name)}


def test_every_line_is_json_in_one_format_without_invisible_characters():
    for path in FOLDER.rglob('*.jsonl'):
        for line in path.read_bytes().decode('utf-8').splitlines(keepends=True):
            assert line == json.dumps(json.loads(line), ensure_ascii=False) + '\n', path.name
            assert not re.search(r'[\u0080-\u00a0\u200b-\u200f\ufeff\ufffd]', line), path.name


@pytest.mark.parametrize('name', [name for name in FILES if 'gold' in rows_of(name)[0]])
def test_right_choices_are_spread_over_positions(name: str):
    rows = rows_of(name)
    (num_choices,) = {len(row.get('choices') or row['context_options']) for row in rows}
    golds = Counter(row['gold'] for row in rows)
    assert sorted(golds) == list(range(num_choices))
    for count in golds.values():
        assert LEAST_SHARE * len(rows) <= count <= GREATEST_SHARE * len(rows)


@pytest.mark.parametrize('name', [name for name in FILES if Path(name).name in RULES.keys() - RARE_SOURCES])
def test_the_rule_of_a_file_finds_the_source_of_each_row(name: str):
    for row in rows_of(name):
        assert RULES[Path(name).name](row), row


@pytest.mark.parametrize('task', ['world_knowledge/jeopardy_all', 'world_knowledge/mmlu', 'safety/bbq'])
def test_categories_are_published_ones_and_equally_large(task: str):
    counts = Counter(row['category'] for row in rows_of(task))
    assert len(counts) >= 4 and set(counts.values()) == {4}
    assert set(counts) <= {row['category'] for row in published(task)}


def shingles(text: str) -> Iterator[str]:
    """Return all sequences of this many words, except the words of the format, numbers and letters."""
    for part in FRAMES.split(text):
        words = re.findall(r'\w+', (part or '').casefold())
        for start in range(len(words) - SHINGLE_WORDS + 1):
            run = words[start : start + SHINGLE_WORDS]
            if sum(len(word) > 1 and word.isalpha() for word in run) > SHINGLE_WORDS / 2:
                yield ' '.join(run)


def texts_in(value: object) -> Iterator[str]:
    """Return all strings in a JSON value except keys and the tests of programs."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        parts = value if isinstance(value, list) else [value[key] for key in value if not key.startswith('test')]
        for part in parts:
            yield from texts_in(part)


def common_shingles(ours: list[Any], published: list[Any]) -> tuple[set[str], set[str]]:
    """Return all word sequences of our rows, and those that also occur in published rows."""
    runs = {run for text in texts_in(ours) for run in shingles(text)}
    beginnings, common = {tuple(run.split()[:3]) for run in runs}, set()
    for text in texts_in(published):
        words = re.findall(r'\w+', text.casefold())
        for start, beginning in enumerate(zip(words, words[1:], words[2:], strict=False)):
            if beginning in beginnings:
                common.add(' '.join(words[start : start + SHINGLE_WORDS]))
    return runs, runs & common


@pytest.mark.slow
@pytest.mark.parametrize('name', FILES)
def test_no_eight_words_in_a_row_are_those_of_the_published_file(name: str):
    assert common_shingles(rows_of(name), published(name))[1] == set()


def test_the_page_about_these_rows_counts_them():
    page = (ROOT / 'docs' / 'models.md').read_text(encoding='utf-8')
    said = {name: int(rows) for name, rows in re.findall(r'^\| `(\w+)` \| \d+ \| (\d+) \|$', page, re.MULTILINE)}
    names = [str(path.relative_to(FOLDER)).removesuffix('.jsonl') for path in FOLDER.rglob('*.jsonl')]
    rows = Counter(name.split('/')[0] for name in names for _ in rows_of(name))
    assert said == rows
    assert f'{rows.total():,} in {len(names)} files' in page


@pytest.mark.parametrize('name', LANGUAGES)
def test_programs_are_unique_and_have_five_pairs_or_more(name: str):
    rows = rows_of(name)
    assert len({row['task_id'] for row in rows}) == len(rows)
    for row in rows:
        assert row['language'] == LANGUAGES[name]
        assert row['entry_point'] in row['prompt']
        assert len(row['test_inputs']) == len(row['test_outputs']) >= 5
        assert all(isinstance(text, str) for text in row['test_inputs'] + row['test_outputs'])
        if name in PYTHON_PROGRAMS:
            assert all(repr(ast.literal_eval(text)) == text for text in row['test_outputs'])


@pytest.mark.parametrize('name', PYTHON_PROGRAMS)
def test_prompt_and_solution_are_the_original_program(name: str):
    """A derived file has some of the solution's lines in its prompt, or all except the last return."""
    whole = {row['task_id']: row for row in rows_of('programming/human_eval')}
    for row in rows_of(name):
        original = whole[row['task_id']]
        program = row['prompt'] + ('\n' if name in RETURNS else '') + row['canonical_solution']
        assert program.split() == (original['prompt'] + original['canonical_solution']).split()
        lines, rest = (text['canonical_solution'].splitlines() for text in (original, row))
        if name in SHARES:
            assert len([line for line in rest if line]) == len(lines) - math.floor(len(lines) * SHARES[name])
        elif name in RETURNS:
            assert rest == lines[-1:] and not row['prompt'].endswith('\n')
            is_name = isinstance(ast.parse(rest[0].strip().removeprefix('return ')).body[0].value, ast.Name)
            assert is_name == name.endswith('simple')


@functools.cache
def templates(name: str) -> dict:
    return json.loads((FOLDER / 'score' / 'prompts' / f'{name}.json').read_text(encoding='utf-8'))


def test_mmlu_pro_has_three_rows_for_each_of_fourteen_categories():
    rows = rows_of('score/mmlu_pro_test')
    counts = Counter(row['category'] for row in rows)
    assert len(counts) == 14 and set(counts.values()) == {3}
    assert {tuple(row) for row in rows} == {
        ('question_id', 'question', 'options', 'answer', 'answer_index', 'cot_content', 'category', 'src')
    }
    assert all(row['answer'] == LETTERS[: len(row['options'])][row['answer_index']] for row in rows)
    assert {len(row['options']) for row in rows} == set(range(3, 11))


@pytest.mark.parametrize('subset', NUM_OPTIONS)
def test_agieval_subsets_have_twelve_rows_and_every_letter_is_a_label(subset: str):
    rows = rows_of(f'score/agieval_v1/{subset}')
    letters = LETTERS[: NUM_OPTIONS[subset]]
    assert len(rows) == 12
    assert {row['label'] for row in rows} == {*letters}
    for row in rows:
        answer = [] if subset.startswith('sat-') else ['answer']
        assert list(row) == ['passage', 'question', 'options', 'label', *answer, 'other']
        assert [option[:3] for option in row['options']] == [f'({letter})' for letter in letters]


@pytest.mark.parametrize('subject', SUBJECTS)
def test_math_subjects_have_twelve_boxed_solutions_of_all_levels(subject: str):
    rows = rows_of(f'score/hendrycks_math/{subject}')
    assert len(rows) == 12
    assert {row['level'] for row in rows} == {f'Level {level}' for level in range(1, 6)}
    for row in rows:
        assert list(row) == ['problem', 'level', 'type', 'solution']
        assert row['type'] == SUBJECTS[subject]
        assert r'\boxed{' in row['solution'] and 'boxed' not in row['problem']


@pytest.mark.parametrize('name', ENDINGS)
def test_each_file_has_ten_distinct_prompts_and_the_other_perturbations_use_one_of_them(name: str):
    single = ['non_greedy_robustness'] if name == 'math' else ['option_order_robustness', 'non_greedy_robustness']
    assert list(templates(name)) == [*single, 'prompt_robustness']
    prompts = templates(name)['prompt_robustness']
    assert len({' '.join(words(prompt['prompt'])) for prompt in prompts}) == len(prompts) == 10
    assert all(templates(name)[key] in prompts for key in single)
    if name != 'math':
        assert {prompt.get('options_format') for prompt in prompts} == {'\n{letter}: {option}'}


@pytest.mark.parametrize('name', ENDINGS)
def test_each_prompt_has_the_question_and_asks_for_the_expected_ending(name: str):
    places = set()
    for prompt in templates(name)['prompt_robustness']:
        text = prompt['prompt']
        assert text.count('{question}' if name == 'math' else '{question}{options}') == 1
        assert set(re.findall(r'(?<!\{)\{(\w+)\}', text)) <= {'question', 'options', 'category'}
        assert ('{category}' not in text) or name == 'mmlu_pro'
        assert text.format(question='Q', options='O', category='C').count(ENDINGS[name]) == 1
        assert len(text.split()) < 30
        places.add(text.index('{question}') < text.index(ENDINGS[name][:15]))
    assert places == {True, False}


def words(text: str) -> list[str]:
    return re.findall(r'\w+', re.sub(r'\{(question|options|category)\}', ' ', text).casefold())


def contents_below(folder: Path) -> list[object]:
    rows = [rows_of(path.stem, path.parent) for path in folder.rglob('*.jsonl')]
    return rows + [json.loads(path.read_text(encoding='utf-8')) for path in folder.rglob('*.json')]


def test_no_eight_words_in_a_row_of_score_are_upstreams():
    if not UPSTREAM.is_dir():
        pytest.skip("upstream's SCORE rows and prompts (../shared/data/score) are not here")
    ours, common = common_shingles(contents_below(FOLDER / 'score'), contents_below(UPSTREAM))
    assert len(ours) > 1000 and common == set()
