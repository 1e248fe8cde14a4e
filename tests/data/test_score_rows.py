"""The hand-written rows and prompts of SCORE: upstream's formats, and none of upstream's sentences."""

import functools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import test_sample_data
from paths import ROOT, SHARED_DATA

FOLDER = ROOT / 'eval_data' / 'score'
UPSTREAM = SHARED_DATA / 'score'
LETTERS = 'ABCDEFGHIJ'
NUM_OPTIONS = {'aqua-rat': 5, 'logiqa-en': 4, 'lsat-ar': 5, 'lsat-lr': 5, 'lsat-rc': 5, 'sat-en': 4, 'sat-math': 4}
NAMES = ('Algebra', 'Counting & Probability', 'Geometry', 'Intermediate Algebra', 'Number Theory', 'Prealgebra')
SUBJECTS = {name.lower().replace(' ', '_').replace('&', 'and'): name for name in (*NAMES, 'Precalculus')}
BEST = 'The best answer is'
ENDINGS = {'mmlu_pro': BEST, 'agieval': BEST, 'math': r'The final answer is: $\boxed{answer}$'}


def rows_of(name: str, folder: Path = FOLDER) -> list[dict]:
    return test_sample_data.rows_of(name, folder)


@functools.cache
def templates(name: str) -> dict:
    return json.loads((FOLDER / 'prompts' / f'{name}.json').read_text(encoding='utf-8'))


def test_mmlu_pro_has_three_rows_for_each_of_fourteen_categories():
    rows = rows_of('mmlu_pro_test')
    counts = Counter(row['category'] for row in rows)
    assert len(counts) == 14 and set(counts.values()) == {3}
    assert {tuple(row) for row in rows} == {
        ('question_id', 'question', 'options', 'answer', 'answer_index', 'cot_content', 'category', 'src')
    }
    assert all(row['answer'] == LETTERS[: len(row['options'])][row['answer_index']] for row in rows)
    assert {len(row['options']) for row in rows} == set(range(3, 11))


@pytest.mark.parametrize('subset', NUM_OPTIONS)
def test_agieval_subsets_have_twelve_rows_and_every_letter_is_a_label(subset: str):
    rows = rows_of(f'agieval_v1/{subset}')
    letters = LETTERS[: NUM_OPTIONS[subset]]
    assert len(rows) == 12
    assert {row['label'] for row in rows} == {*letters}
    for row in rows:
        answer = [] if subset.startswith('sat-') else ['answer']
        assert list(row) == ['passage', 'question', 'options', 'label', *answer, 'other']
        assert [option[:3] for option in row['options']] == [f'({letter})' for letter in letters]


@pytest.mark.parametrize('subject', SUBJECTS)
def test_math_subjects_have_twelve_boxed_solutions_of_all_levels(subject: str):
    rows = rows_of(f'hendrycks_math/{subject}')
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
def test_each_prompt_holds_the_question_and_asks_for_the_ending_that_is_looked_for(name: str):
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


def test_no_eight_words_in_a_row_are_upstreams():
    if not UPSTREAM.is_dir():
        pytest.skip("upstream's SCORE rows and prompts (../shared/data/score) are not here")
    ours, common = test_sample_data.common_shingles(contents_below(FOLDER), contents_below(UPSTREAM))
    assert len(ours) > 1000 and common == set()
