"""The manifest, and the sample rows and prompts, in the published format."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import shared_words
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.score import AGIEVAL, MATH, MMLU_PRO
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.data.examples import RULES
from llmfoundry_gauntlet.data.published import read_manifest
from llmfoundry_gauntlet.data.score_rows import FILES as SCORE_FILES
from llmfoundry_gauntlet.data.score_rows import read_score_rows
from llmfoundry_gauntlet.evaluation.suite import load_suite

sys.path.insert(0, str(ROOT / 'scripts'))

import demo_data

FOLDER = ROOT / 'eval_data'
TASKS = {task['label']: task for task in read_yaml(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')['icl_tasks']}
SCORE_TASKS = {'score_mmlu_pro': MMLU_PRO, 'score_agieval': AGIEVAL, 'score_math': MATH}
LEAST_ROWS = 12
ANSWER_KEYS = ('gold', 'continuation', 'answer', 'aliases', 'chain_of_thought')
FILES = [file.path.removesuffix('.jsonl') for file in read_manifest() if not file.path.startswith('score/')]
RARE_SOURCES = {'mmlu', 'agi_eval_sat_math', 'math_qa'}  # few published rows have a passage, or are long enough

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


def test_file_names_of_the_manifest_are_unique():
    """Files are found by their names, whatever folder they lie in."""
    names = [file.path.rpartition('/')[2].casefold() for file in read_manifest()]
    assert len(set(names)) == len(names) == 72


def test_the_manifest_and_the_sample_data_have_the_files_of_the_tasks_and_of_score():
    files_of_tasks = {(label, task['dataset_uri']) for label, task in TASKS.items()}
    files_of_score = {(label, path) for label, dataset in SCORE_TASKS.items() for path in SCORE_FILES[dataset]}
    expected = files_of_tasks | files_of_score
    assert (len(files_of_tasks), len(files_of_score)) == (57, 15)

    sample_paths = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob('*.jsonl')}
    assert {(file.task, file.path) for file in read_manifest()} == expected
    assert sample_paths == {path for _, path in expected}


def test_gauntlet_files_have_the_git_blob_id_of_llm_foundry():
    for file in read_manifest():
        if file.task not in SCORE_TASKS:
            assert file.git_blob is not None and file.converter is None, file.path
            assert file.source == f'scripts/eval/local_data/{file.path}'


@pytest.mark.parametrize('name', FILES)
def test_every_file_has_twelve_rows_or_more_with_the_same_keys(name: str):
    rows = rows_of(name)

    assert len(rows) >= LEAST_ROWS
    assert len({tuple(row) for row in rows}) == 1


@pytest.mark.parametrize('name', FILES)
def test_rows_have_the_keys_of_the_published_ones_in_their_order(name: str):
    assert {tuple(row) for row in rows_of(name)} == {tuple(row) for row in published(name)}


@pytest.mark.slow
def test_no_row_is_a_published_one():
    """Rows share at most the words of their form with the published files."""
    folder = SHARED_DATA / 'local_data'
    if not folder.is_dir():
        pytest.skip(f'the published files ({folder}) are not here')

    share_by_row = shared_words.shares_found(shared_words.texts_of_rows(folder.rglob('*.jsonl')))

    assert len(shared_words.sample_rows()) > 1000
    assert {row: share for row, share in share_by_row.items() if share >= 1 / 3} == {}


def test_no_row_is_in_the_demos_training_text():
    assert shared_words.shares_found(demo_data.training_documents()) == {}


@pytest.mark.parametrize('name', FILES)
def test_no_row_and_no_choice_of_a_row_is_there_twice(name: str):
    rows = rows_of(name)

    assert len({json.dumps(row) for row in rows}) == len(rows)
    for row in rows:
        choices = [choice.strip() for choice in row.get('choices', [])]
        assert len(set(choices)) == len(choices), row


@pytest.mark.parametrize('name', FILES)
def test_no_question_has_two_right_answers(name: str):
    answers_by_question: dict[str, set[str]] = defaultdict(set)
    for row in rows_of(name):
        # The sentence of a schema is its question: the gold is the context that it fits.
        answer_keys = ('gold',) if 'context_options' in row else ANSWER_KEYS
        question = {key: value for key, value in row.items() if key not in answer_keys}
        answer = [row.get(key) for key in answer_keys]
        answers_by_question[json.dumps(question)].add(json.dumps(answer))

    assert [question for question, answers in answers_by_question.items() if len(answers) > 1] == []


@pytest.mark.parametrize('name', FILES)
def test_no_choice_is_right_far_more_often_than_by_chance(name: str):
    """By 5 points and by three standard errors."""
    rows = [row for row in rows_of(name) if 'choices' in row]
    if not rows:
        return
    chance = sum(1 / len(row['choices']) for row in rows) / len(rows)
    standard_error = math.sqrt(chance * (1 - chance) / len(rows))

    ((_, num_right),) = Counter(row['gold'] for row in rows).most_common(1)

    assert num_right / len(rows) <= chance + max(0.05, 3 * standard_error)


def test_every_line_is_json_in_one_format_without_invisible_characters():
    for path in FOLDER.rglob('*.jsonl'):
        for line in path.read_bytes().decode('utf-8').splitlines(keepends=True):
            assert line == json.dumps(json.loads(line), ensure_ascii=False) + '\n', path.name
            assert not re.search(r'[\u0080-\u00a0\u200b-\u200f\ufeff\ufffd]', line), path.name


@pytest.mark.parametrize('name', [name for name in FILES if Path(name).name in RULES.keys() - RARE_SOURCES])
def test_the_rule_of_a_file_finds_the_source_of_each_row(name: str):
    for row in rows_of(name):
        assert RULES[Path(name).name](row), row


def test_the_page_about_these_rows_counts_them():
    page = (ROOT / 'docs' / 'models.md').read_text(encoding='utf-8')
    table_row = re.compile(r'^\| `(\w+)` \| \d+ \| (\d+) \|$', re.MULTILINE)
    stated = {category: int(num_rows) for category, num_rows in table_row.findall(page)}
    names = [str(path.relative_to(FOLDER)).removesuffix('.jsonl') for path in FOLDER.rglob('*.jsonl')]
    num_rows_by_category: Counter[str] = Counter()
    for name in names:
        num_rows_by_category[name.split('/')[0]] += len(rows_of(name))

    assert stated == num_rows_by_category
    assert f'{num_rows_by_category.total():,} in {len(names)} files' in page


@pytest.mark.parametrize('dataset', SCORE_TASKS.values())
def test_the_questions_of_score_are_read_without_warnings(dataset: str):
    task = load_suite(None, None, {'dataset': dataset}).tasks[-1]

    assert read_score_rows(task.spec, FOLDER).warnings == ()


def score_prompts(name: str) -> dict[str, Any]:
    """Return the prompts of a data set by perturbation."""
    return json.loads((FOLDER / 'score' / 'prompts' / f'{name}.json').read_text(encoding='utf-8'))


@pytest.mark.parametrize('name', ENDINGS)
def test_other_perturbations_of_score_use_one_of_the_ten_prompts(name: str):
    single = ['non_greedy_robustness'] if name == 'math' else ['option_order_robustness', 'non_greedy_robustness']

    prompts = score_prompts(name)

    assert list(prompts) == [*single, 'prompt_robustness']
    assert all(prompts[key] in prompts['prompt_robustness'] for key in single)


@pytest.mark.parametrize('name', ['mmlu_pro', 'agieval'])
def test_options_in_prompts_of_score_have_one_format(name: str):
    formats = {prompt.get('options_format') for prompt in score_prompts(name)['prompt_robustness']}

    assert formats == {'\n{letter}: {option}'}


@pytest.mark.parametrize('name', ENDINGS)
def test_score_has_ten_prompts_that_differ_in_their_words(name: str):
    texts = [prompt['prompt'] for prompt in score_prompts(name)['prompt_robustness']]

    texts_without_fields = [re.sub(r'\{(question|options|category)\}', ' ', text) for text in texts]
    words_of_texts = {tuple(re.findall(r'\w+', text.casefold())) for text in texts_without_fields}
    assert len(words_of_texts) == 10


@pytest.mark.parametrize(('name', 'ending'), ENDINGS.items())
def test_prompts_of_score_ask_for_the_expected_ending_before_or_after_the_question(name: str, ending: str):
    texts = [prompt['prompt'] for prompt in score_prompts(name)['prompt_robustness']]

    for text in texts:
        assert text.count('{question}' if name == 'math' else '{question}{options}') == 1
        assert ('{category}' not in text) or name == 'mmlu_pro'
        assert text.format(question='Q', options='O', category='C').count(ending) == 1
        assert len(text.split()) < 30
    assert {text.index('{question}') < text.index(ending[:15]) for text in texts} == {True, False}
