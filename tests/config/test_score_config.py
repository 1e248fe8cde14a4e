"""The `score` block: what it may say, and what is said where it may not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from llmfoundry_gauntlet.config.score import DATASETS, PERTURBATIONS, ScoreSpec
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks.score import ScoreTask

ARC = {'label': 'arc', 'dataset_uri': 'arc.jsonl', 'num_fewshot': [0, 5], 'icl_task_type': 'multiple_choice'}
SUMS = {'label': 'sums', 'dataset_uri': 'sums.jsonl', 'num_fewshot': [0], 'icl_task_type': 'language_modeling'}
NAMES = (
    'mmlu_pro, agieval, math, score_robustness_mmlu_pro, score_robustness_agieval, score_robustness_math, '
    'score_option_order_robustness_mmlu_pro, score_prompt_robustness_mmlu_pro, score_non_greedy_robustness_mmlu_pro, '
    'score_option_order_robustness_agieval, score_prompt_robustness_agieval, score_non_greedy_robustness_agieval, '
    'score_prompt_robustness_math, score_non_greedy_robustness_math'
)

ALLOWED = f'allowed: {NAMES}, or the label of a multiple_choice task among the tasks'
EACH_ONCE = 'allowed: at least one value, without duplicates'
NOTHING = 'nothing is left to run'
LIKELIHOOD = {'answers': 'likelihood'}


def specs_of(score: Any, tasks: Any = None) -> list[ScoreSpec]:
    return [task.spec for task in load_suite(tasks, None, score).tasks if isinstance(task, ScoreTask)]


def problems_of(score: Any, tasks: Any = None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_suite(tasks, None, score)
    return list(raised.value.problems)


def test_defaults_are_those_of_the_papers_reference():
    (spec,) = specs_of([{'dataset': 'agieval'}])

    assert spec == ScoreSpec(
        dataset='agieval',
        perturbations=None,
        subsets=None,
        answers='generate',
        seeds=(1, 2, 3, 4, 5),
        temperature=0.7,
        max_new_tokens=1024,
        prompts=None,
        chat_template='auto',
        answer_extraction='tolerant',
        fix_table=None,
        subset_items=None,
    )
    assert spec.applied == ('option_order', 'prompt', 'non_greedy')


def test_all_keys_can_be_given():
    entry = {
        'dataset': 'math',
        'perturbations': ['non_greedy', 'prompt'],
        'subsets': ['algebra', 'geometry'],
        'answers': 'generate',
        'seeds': [0, 7],
        'temperature': 1,
        'max_new_tokens': 1,
        'prompts': 'mine.json',
        'chat_template': False,
        'answer_extraction': 'reference',
        'fix_table': 'fixes.json',
        'subset_items': 1,
    }
    (spec,) = specs_of([entry])

    lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
    assert spec == ScoreSpec(**{**entry, **lists})
    assert spec.applied == ('prompt', 'non_greedy')  # in the paper's order
    assert isinstance(spec.temperature, float)


def test_single_values_may_stand_for_lists():
    (spec,) = specs_of([{'dataset': 'agieval', 'perturbations': 'prompt', 'subsets': 'sat-en', 'seeds': 3}])
    assert (spec.perturbations, spec.subsets, spec.seeds) == (('prompt',), ('sat-en',), (3,))


@pytest.mark.parametrize(
    ('dataset', 'keys', 'problem'),
    [
        (None, {}, 'dataset: is empty; allowed: text'),
        ('a b', {}, "dataset: is 'a b'; allowed: mmlu_pro, agieval, math, or the label of a task"),
        ('x' * 234, {}, 'dataset: has 234 characters; allowed: 233, as a file of samples'),
        ('mmlu_pr', {}, f"dataset: is 'mmlu_pr'; {ALLOWED}"),
        ('sums', {}, 'dataset: sums is a language_modeling task; only multiple_choice has options to perturb'),
        ('math', {'seed': 1}, "seed: unknown key 'seed', did you mean 'seeds'?"),
        (
            'mmlu_pro',
            {'perturbations': ['prompt', 'prompts']},
            "perturbations: 'prompts' is unknown; allowed: option_or",
        ),
        ('mmlu_pro', {'perturbations': ['prompt'] * 2}, f"perturbations: is ['prompt', 'prompt']; {EACH_ONCE}"),
        ('mmlu_pro', {'perturbations': []}, f'perturbations: is []; {EACH_ONCE}'),
        (
            'score_prompt_robustness_math',
            {'perturbations': ['non_greedy']},
            'perturbations: score_prompt_robustness_math ',
        ),
        ('math', {'perturbations': 'option_order'}, f'perturbations: {NOTHING} (option_order: math has no options)'),
        ('mmlu_pro', {'perturbations': 'non_greedy', **LIKELIHOOD}, f'perturbations: {NOTHING} (non_greedy: answers: '),
        ('mmlu_pro', {'subsets': ['law']}, 'subsets: mmlu_pro has none; allowed with agieval and math'),
        ('mmlu_pro', {'answers': 'generation'}, "answers: is 'generation'; allowed: generate, likelihood"),
        ('math', LIKELIHOOD, 'answers: likelihood needs options to choose from, and math has none; allowed: generate'),
        ('agieval', {'subsets': ['sat-en'] * 2}, f"subsets: is ['sat-en', 'sat-en']; {EACH_ONCE}"),
        ('math', {'seeds': [1, 1]}, f'seeds: is [1, 1]; {EACH_ONCE}'),
        ('math', {'seeds': [0, -1]}, 'seeds: is [0, -1]; allowed: 0 or more'),
        ('math', {'temperature': 0}, 'temperature: is 0; allowed: a number above 0'),
        ('math', {'temperature': float('inf')}, 'temperature: is inf; allowed: a number above 0'),
        ('math', {'max_new_tokens': 0}, 'max_new_tokens: is 0; allowed: 1 or more'),
        ('math', {'subset_items': 0}, 'subset_items: is 0; allowed: 1 or more'),
        ('math', {'chat_template': 'chatml'}, "chat_template: is 'chatml'; allowed: auto, true, false"),
        ('math', {'chat_template': 1}, 'chat_template: is 1; allowed: auto, true, false'),
        ('math', {'answer_extraction': 'strict'}, "answer_extraction: is 'strict'; allowed: tolerant, reference"),
        ('agieval', {'fix_table': 'f.json'}, 'fix_table: has no meaning in agieval; it belongs to math'),
    ],
)
def test_an_invalid_entry_is_an_error_with_the_allowed_values(dataset: Any, keys: dict[str, Any], problem: str):
    (found,) = problems_of([{'dataset': dataset, **keys}], [ARC, SUMS])
    assert re.sub(r'^<score>: score\[0\](: |\.)', '', found).startswith(problem)


def test_all_invalid_entries_are_listed_with_their_places(tmp_path: Path):
    """Mutation: count places after invalid and merged entries are removed."""
    path = tmp_path / 'score.yaml'
    path.write_text(
        """
score:
- {dataset: mmlu_pro, seeds: []}
- {dataset: score_prompt_robustness_agieval}
- {dataset: agieval, perturbations: option_order}
- math
- {dataset: agieval, perturbations: non_greedy, temperature: 1.0}
- {dataset: agieva}
"""
    )
    assert [problem.removeprefix(f'{path}:') for problem in problems_of(path)] == [
        f'3 (mmlu_pro): score[0]: seeds: is []; {EACH_ONCE}',
        "6: score[3]: is 'math'; allowed: a mapping",
        '7 (agieval): score[4]: duplicate dataset agieval with different settings',
        f"8 (agieva): score[5].dataset: is 'agieva'; {ALLOWED}",
    ]


APPLIED = [(dataset, PERTURBATIONS[1:] if dataset == 'math' else PERTURBATIONS) for dataset in DATASETS]


@pytest.mark.parametrize(
    ('dataset', 'perturbation'), [(dataset, perturbation) for dataset, names in APPLIED for perturbation in names]
)
def test_a_task_of_lm_eval_is_one_perturbation(dataset: str, perturbation: str):
    entry = {'dataset': f'score_{perturbation}_robustness_{dataset}'}

    expected = [ScoreSpec(dataset=dataset, perturbations=(perturbation,))]
    assert specs_of([entry]) == expected
    assert specs_of([{**entry, 'perturbations': [perturbation]}]) == expected


@pytest.mark.parametrize(('dataset', 'applied'), APPLIED)
def test_a_group_of_lm_eval_is_all_perturbations_that_apply(dataset: str, applied: tuple[str, ...]):
    (spec,) = specs_of([{'dataset': f'score_robustness_{dataset}'}])

    assert (spec, spec.applied) == (ScoreSpec(dataset=dataset), applied)
    assert spec.does_not_apply == ({'option_order': 'math has no options'} if dataset == 'math' else {})


@pytest.mark.parametrize('dataset', DATASETS)
def test_a_group_of_lm_eval_may_have_fewer_perturbations(dataset: str):
    (spec,) = specs_of([{'dataset': f'score_robustness_{dataset}', 'perturbations': ['non_greedy']}])

    assert (spec.dataset, spec.applied) == (dataset, ('non_greedy',))


@pytest.mark.parametrize('dataset', [dataset for dataset in DATASETS if dataset != 'math'])
def test_likelihoods_do_not_sample(dataset: str):
    (spec,) = specs_of([{'dataset': dataset, 'answers': 'likelihood'}])

    assert spec.does_not_apply == {'non_greedy': 'answers: likelihood does not sample'}
    assert spec.applied == ('option_order', 'prompt')


def test_entries_of_one_dataset_are_merged():
    names = ('non_greedy_robustness_agieval', 'prompt_robustness_math', 'option_order_robustness_agieval')
    specs = specs_of([{'dataset': f'score_{name}', 'subset_items': 9} for name in names])
    assert [(spec.dataset, spec.perturbations) for spec in specs] == [
        ('agieval', ('option_order', 'non_greedy')),
        ('math', ('prompt',)),
    ]
    (spec,) = specs_of([{'dataset': 'score_prompt_robustness_mmlu_pro'}, {'dataset': 'mmlu_pro'}])
    assert spec.applied == PERTURBATIONS


def test_a_list_a_mapping_a_path_and_a_path_to_a_path_are_equivalent(tmp_path: Path):
    entry = {'dataset': 'agieval', 'seeds': [3]}
    expected = specs_of([entry])
    (tmp_path / 'list.yaml').write_text(json.dumps({'score': [entry]}))
    (tmp_path / 'mapping.yaml').write_text(json.dumps({'score': entry}))
    (tmp_path / 'path.yaml').write_text('score: list.yaml')
    for source in (entry, *(tmp_path / name for name in ('list.yaml', 'mapping.yaml', 'path.yaml'))):
        assert specs_of(source) == expected
    assert specs_of(str(tmp_path / 'list.yaml')) == expected


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        ('score:\n', 'score: is empty'),
        ('score: 7\n', 'score: is 7; allowed: a list with a mapping for each dataset'),
        ('score: mmlu_pro\n', "score: there is no file 'mmlu_pro' (looked in the working directory and beside s.yaml)"),
    ],
)
def test_a_file_without_datasets_is_an_error_with_and_without_tasks(tmp_path: Path, content: str, expected: str):
    path = tmp_path / 's.yaml'
    path.write_text(content)
    for tasks in (None, [ARC]):
        (problem,) = problems_of(path, tasks)
        assert re.match(rf'{re.escape(str(path))}(:1)?: {re.escape(expected)}', problem)


def test_errors_of_tasks_and_score_are_listed_together():
    # That copa is no task is not said: labels are not checked against invalid tasks.
    problems = problems_of([{'dataset': 'math', 'seeds': []}, {'dataset': 'copa'}], [{**SUMS, 'num_fewshot': [-1]}])

    of_tasks, of_score = problems
    assert 'num_fewshot' in of_tasks
    assert 'seeds' in of_score


def test_a_file_that_is_missing_is_an_error(tmp_path: Path):
    assert problems_of(tmp_path / 'no.yaml') == [f'{tmp_path / "no.yaml"}: there is no such file']


def test_a_dataset_becomes_a_0_shot_task_after_all_others():
    suite = load_suite([ARC, SUMS], None, [{'dataset': 'arc'}, {'dataset': 'math'}, {'dataset': 'mmlu_pro'}])

    assert [task.key for task in suite.tasks] == [
        'arc/0-shot',
        'arc/5-shot',
        'sums/0-shot',
        'score_arc/0-shot',
        'score_math/0-shot',
        'score_mmlu_pro/0-shot',
    ]
    arc, math, mmlu_pro = suite.tasks[3:]
    assert [task.icl_task_type for task in (arc, math, mmlu_pro)] == ['score_choices', 'score_math', 'score_choices']
    assert (arc.source.label, math.source, mmlu_pro.source) == ('arc', None, None)


def test_a_dataset_of_likelihoods_has_a_type_of_its_own():
    (task,) = load_suite(None, None, {'dataset': 'mmlu_pro', 'answers': 'likelihood'}).tasks

    assert task.icl_task_type == 'score_likelihood'


def test_a_dataset_whose_task_name_is_taken_is_refused():
    """Mutation: store both under one key, which silently drops one."""
    (problem,) = problems_of([{'dataset': 'arc'}], [ARC, {**ARC, 'label': 'score_arc'}])
    assert problem.startswith(
        '<score>: score[0].dataset: arc becomes the task score_arc/0-shot, which is also in tasks'
    )
    tasks = [ARC, {**ARC, 'label': 'score_arc', 'num_fewshot': [5]}]
    assert len(load_suite(tasks, None, [{'dataset': 'arc'}]).tasks) == 4


OUR_FILES = [  # the name, the number of datasets, and how they are answered
    ('agieval', 1, {'generate'}),
    ('base_models', 2, {'likelihood'}),
    ('demo', 3, None),
    ('math', 1, {'generate'}),
    ('mmlu_pro', 1, {'generate'}),
]


@pytest.mark.parametrize(('name', 'num_datasets', 'answers'), OUR_FILES)
def test_our_own_files_load(name: str, num_datasets: int, answers: set[str] | None):
    tasks = load_suite(None, None, ROOT / 'yamls' / 'score' / f'{name}.yaml').tasks

    assert len(tasks) == num_datasets
    assert answers is None or {task.spec.answers for task in tasks} == answers


def test_each_of_our_own_files_is_tested():
    assert {path.stem for path in (ROOT / 'yamls' / 'score').iterdir()} == {name for name, *_ in OUR_FILES}
