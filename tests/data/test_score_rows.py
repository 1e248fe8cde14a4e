"""The hand-written rows and prompts of SCORE: upstream's formats, and none of upstream's sentences."""

import functools
import itertools
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
MAX_PROMPT_CHARACTERS = 512  # the demo's model reads 256 tokens of two characters or so

CATEGORIES = [
    'biology',
    'business',
    'chemistry',
    'computer science',
    'economics',
    'engineering',
    'health',
    'history',
    'law',
    'math',
    'other',
    'philosophy',
    'physics',
    'psychology',
]
MMLU_PRO_KEYS = [
    'question_id',
    'question',
    'options',
    'answer',
    'answer_index',
    'cot_content',
    'category',
    'src',
]
NUM_OPTIONS = {'aqua-rat': 5, 'logiqa-en': 4, 'lsat-ar': 5, 'lsat-lr': 5, 'lsat-rc': 5, 'sat-en': 4, 'sat-math': 4}
SUBJECTS = {
    'algebra': 'Algebra',
    'counting_and_probability': 'Counting & Probability',
    'geometry': 'Geometry',
    'intermediate_algebra': 'Intermediate Algebra',
    'number_theory': 'Number Theory',
    'prealgebra': 'Prealgebra',
    'precalculus': 'Precalculus',
}
ENDINGS = {
    'mmlu_pro': 'The best answer is',
    'agieval': 'The best answer is',
    'math': r'The final answer is: $\boxed{answer}$',
}


def rows_of(name: str, folder: Path = FOLDER) -> list[dict]:
    return test_sample_data.rows_of(name, folder)


@functools.cache
def templates(name: str) -> dict:
    return json.loads((FOLDER / 'prompts' / f'{name}.json').read_text(encoding='utf-8'))


def agieval_rows() -> list[dict]:
    return [row for subset in NUM_OPTIONS for row in rows_of(f'agieval_v1/{subset}')]


def math_rows() -> list[dict]:
    return [row for subject in SUBJECTS for row in rows_of(f'hendrycks_math/{subject}')]


def test_mmlu_pro_has_three_rows_for_each_of_fourteen_categories():
    rows = rows_of('mmlu_pro_test')
    assert all(list(row) == MMLU_PRO_KEYS for row in rows)
    assert [row['question_id'] for row in rows] == list(range(1, len(rows) + 1))
    assert Counter(row['category'] for row in rows) == dict.fromkeys(CATEGORIES, 3)
    assert all((row['cot_content'], row['src']) == ('', 'hand-written') for row in rows)


def test_mmlu_pro_letters_agree_with_positions_in_three_to_ten_options():
    rows = rows_of('mmlu_pro_test')
    for row in rows:
        assert row['answer'] == LETTERS[: len(row['options'])][row['answer_index']]
        assert isinstance(row['answer_index'], int)
    sizes = Counter(len(row['options']) for row in rows)
    assert sorted(sizes) == list(range(3, 11))
    assert sizes[10] > len(rows) / 2


@pytest.mark.parametrize('subset', NUM_OPTIONS)
def test_agieval_subsets_have_twelve_rows_with_the_keys_of_the_original(subset: str):
    rows = rows_of(f'agieval_v1/{subset}')
    with_solution = subset in ('aqua-rat', 'sat-en', 'sat-math')
    keys = ['passage', 'question', 'options', 'label', *([] if subset.startswith('sat-') else ['answer']), 'other']
    assert len(rows) == 12
    for row in rows:
        assert list(row) == keys
        assert row.get('answer') is None
        assert list(row['other'] or {}) == (['solution'] if with_solution else [])
        if subset == 'aqua-rat':
            assert row['passage'] is None
        else:
            assert bool(row['passage']) == (subset != 'sat-math')
            assert len(row['passage'].split()) < 120


@pytest.mark.parametrize('subset', NUM_OPTIONS)
def test_agieval_options_carry_their_letters_and_every_letter_is_a_label(subset: str):
    letters = LETTERS[: NUM_OPTIONS[subset]]
    labels = Counter(row['label'] for row in rows_of(f'agieval_v1/{subset}'))
    assert sorted(labels) == list(letters)
    assert set(labels.values()) <= ({3} if len(letters) == 4 else {2, 3})
    for row in rows_of(f'agieval_v1/{subset}'):
        assert [option[:3] for option in row['options']] == [f'({letter})' for letter in letters]
        assert all(option[3:].strip() == option[3:] != '' for option in row['options'])


@pytest.mark.parametrize('subject', SUBJECTS)
def test_math_subjects_have_twelve_boxed_solutions_of_all_levels(subject: str):
    rows = rows_of(f'hendrycks_math/{subject}')
    assert len(rows) == 12
    assert {row['level'] for row in rows} == {f'Level {level}' for level in range(1, 6)}
    for row in rows:
        assert list(row) == ['problem', 'level', 'type', 'solution']
        assert row['type'] == SUBJECTS[subject]
        assert row['solution'].count(r'\boxed{') >= 1
        assert row['solution'].count('{') == row['solution'].count('}')
        assert row['solution'].replace(r'\$', '').count('$') % 2 == 0
        assert 'boxed' not in row['problem']


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


def test_agieval_prompts_name_no_letters_since_questions_have_four_or_five():
    for prompt in templates('agieval')['prompt_robustness']:
        assert not re.search(r'\b[B-E]\b', prompt['prompt'])


def test_whole_prompts_are_short_enough_for_a_tiny_model():
    asked = {
        'mmlu_pro': [(row['question'], row['options'], row['category']) for row in rows_of('mmlu_pro_test')],
        'agieval': [(f'{row["passage"] or ""}\n{row["question"]}', row['options'], '') for row in agieval_rows()],
        'math': [(row['problem'], [], '') for row in math_rows()],
    }
    for name, rows in asked.items():
        for prompt, (question, options, category) in itertools.product(templates(name)['prompt_robustness'], rows):
            shown = ''.join(f'\nA: {option}' for option in options)
            text = prompt['prompt'].format(question=question, options=shown, category=category)
            assert len(text) <= MAX_PROMPT_CHARACTERS, question


def words(text: str) -> list[str]:
    return re.findall(r'\w+', re.sub(r'\{(question|options|category)\}', ' ', text).casefold())


def contents_below(folder: Path) -> list[object]:
    rows = [rows_of(path.stem, path.parent) for path in folder.rglob('*.jsonl')]
    return rows + [json.loads(path.read_text(encoding='utf-8')) for path in folder.rglob('*.json')]


def test_no_eight_words_in_a_row_are_upstreams():
    if not UPSTREAM.is_dir():
        pytest.skip("upstream's SCORE rows and prompts (../shared/data/score) are not here")
    ours = test_sample_data.all_shingles(contents_below(FOLDER))
    assert len(ours) > 1000
    assert not ours & test_sample_data.all_shingles(contents_below(UPSTREAM))
