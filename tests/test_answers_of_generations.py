"""The answer in a generation, by every scorer: after the reasoning, if it has any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import sandbox
from score_runs import write_score_files

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.inputs import EvaluationData, load_data
from llmfoundry_gauntlet.results.external import Answer, score_answers
from llmfoundry_gauntlet.scoring import mathematics
from llmfoundry_gauntlet.scoring.reasoning import UNFINISHED_REASONING
from llmfoundry_gauntlet.types import ItemResult

LETTERS, MATH = 'score_mmlu_pro', 'score_math'
QUESTION = {
    'question_id': 1,
    'question': 'Who?',
    'options': ['she', 'he', 'it'],
    'answer': 'B',
    'answer_index': 1,
    'category': 'law',
    'src': 'own',
}
ROWS: dict[str, dict[str, Any]] = {
    'generation_task_with_answers': {'context': 'Twice 2?', 'answer': '4'},
    'multiple_choice': {'query': 'Colour?', 'choices': ['red', 'blue'], 'gold': 1},
    'language_modeling': {'context': '2+2=', 'continuation': '4'},
    'code_evaluation': {
        'prompt': 'def twice(n):\n',
        'entry_point': 'twice',
        'canonical_solution': '    return 2 * n\n',
        'test': 'def check(candidate):\n    assert candidate(2) == 4\n',
        'language': 'python',
    },
}
# A right and a wrong answer of each task.
ANSWERS = {
    'generation_task_with_answers': ('4', '5'),
    'multiple_choice': ('blue', 'red'),
    'language_modeling': ('4', '5'),
    'code_evaluation': ('    return 2 * n\n', '    return n\n'),
    LETTERS: ('The best answer is B.', 'The best answer is A.'),
    MATH: ('It is $\\boxed{2}$.', 'It is $\\boxed{3}$.'),
}
every_task = pytest.mark.parametrize('task', ANSWERS)
Score = Callable[..., ItemResult]


@pytest.fixture
def score(write_jsonl, tmp_path: Path) -> Score:
    """Return a function that scores a text as the answer to the only item of a task."""
    write_score_files(write_jsonl, 'score', QUESTION)
    for kind, row in ROWS.items():
        write_jsonl(f'{kind}.jsonl', [row])

    def score_text(task: str, text: str, *, reference: bool = False, **settings: Any) -> ItemResult:
        wanted: dict[str, Any] = {'data_root': str(tmp_path), **settings}
        if task in (LETTERS, MATH):
            variant: str | None = 'non_greedy:1'
            entry = {
                'dataset': task.removeprefix('score_'),
                'perturbations': 'non_greedy',
                'seeds': [1],
                'answer_extraction': 'reference' if reference else 'tolerant',
            }
            wanted['score'] = [entry]
        else:
            variant = None
            wanted['semantics'] = 'reference' if reference else 'corrected'
            entry = {'label': task, 'dataset_uri': f'{task}.jsonl', 'num_fewshot': [0], 'icl_task_type': task}
            wanted['tasks'] = [entry]
        if task == 'code_evaluation':
            sandbox()  # skips the test where programs cannot be run
        answer = Answer(
            task=task,
            num_shots=0,
            row=0,
            variant=variant,
            file='algebra' if task == MATH else None,
            text=text,
        )
        evaluation = score_answers(load_data(decode_settings(wanted)), [('here', answer)])
        ((result,),) = evaluation.results.values()
        return result

    return score_text


@every_task
def test_every_scorer_reads_what_follows_the_reasoning(score: Score, task: str):
    """Mutation: a scorer that gets the whole generation."""
    right, wrong = ANSWERS[task]

    assert score(task, right).score == 1
    assert score(task, wrong).score == 0
    assert score(task, f'<think>\n{wrong}\n</think>\n\n{right}').score == 1
    assert score(task, f'<think>\n{right}\n</think>\n\n{wrong}').score == 0
    assert score(task, f'{wrong}\n</think>\n{right}').score == 1


@every_task
def test_reasoning_that_does_not_end_has_no_answer(score: Score, task: str):
    right, _ = ANSWERS[task]
    text = f'<think>\n{right}\nLet me see'

    result = score(task, text)

    assert (result.score, result.predicted, result.answer, result.text) == (0, None, None, text)
    assert result.reason == UNFINISHED_REASONING
    assert set(result.metrics.values()) <= {0.0}


@every_task
def test_other_marks_of_reasoning_may_be_given(score: Score, task: str):
    """Mutation: the setting does not reach the tasks."""
    right, wrong = ANSWERS[task]
    plan = {'reasoning_markers': ['PLAN: ... DONE', '...###']}

    assert score(task, f'PLAN: {wrong} DONE\n{right}', **plan).score == 1
    assert score(task, f'{wrong} ###\n{right}', **plan).score == 1
    assert score(task, f'PLAN: {right}', **plan).reason == UNFINISHED_REASONING
    assert score(task, f'<think>{right}', **plan).reason != UNFINISHED_REASONING


@every_task
def test_no_marks_and_the_usual_marks_may_be_asked_for(score: Score, task: str):
    right, _ = ANSWERS[task]

    assert score(task, f'<think>{right}', reasoning_markers=[]).reason != UNFINISHED_REASONING
    assert score(task, f'<think>{right}', reasoning_markers=None).reason == UNFINISHED_REASONING


@every_task
@pytest.mark.parametrize('form', ['{}<|im_end|>', '{}</s>\n', '<s>{}<eos>', '{}<|eot_id|><|start_header_id|>user'])
def test_every_scorer_ignores_special_tokens_around_an_answer(score: Score, task: str, form: str):
    """Mutation: tokens dropped by the scorers of letters alone."""
    right, wrong = ANSWERS[task]

    assert score(task, form.format(right)).score == 1
    assert score(task, form.format(wrong)).score == 0


each_sign = pytest.mark.parametrize('form', ['✅ {}', '{} ✅', '{}✔️', '→ {}', '🎉{}🎉', '• {}', '{}\u200b'])


@each_sign
@pytest.mark.parametrize('digit', ['4', '\uff14'], ids=['narrow', 'of full width'])
def test_signs_around_a_number_do_not_count(score: Score, form: str, digit: str):
    result = score('generation_task_with_answers', form.format(digit))

    assert (result.score, result.metrics['StrictMatch'], result.metrics['NumericMatch']) == (1, 1, 1)


@each_sign
def test_signs_make_no_wrong_number_right(score: Score, form: str):
    assert score('generation_task_with_answers', form.format('5')).score == 0


def test_signs_count_for_the_reference(score: Score):
    assert score('generation_task_with_answers', '✅ 4', reference=True).score == 0


@pytest.mark.parametrize(
    ('task', 'expected'),
    [
        ('generation_task_with_answers', '<think>4'),
        (LETTERS, 'B'),
        (MATH, '2'),
    ],
)
def test_the_reference_knows_no_reasoning(score: Score, task: str, expected: str):
    """As lm-eval, which drops reasoning only if a model is given its `think_end_token`."""
    right, _ = ANSWERS[task]

    result = score(task, f'<think>{right}', reference=True)

    assert (result.answer, result.reason) == (expected, None)


@pytest.fixture
def math_data(write_jsonl, tmp_path: Path) -> EvaluationData:
    """Return SCORE on a single problem of MATH."""
    problem = {'problem': '1+1?', 'level': 'Level 1', 'type': 'Algebra', 'solution': r'$\boxed{2}$'}
    write_jsonl('score/hendrycks_math/algebra.jsonl', [problem])
    return load_data(decode_settings({'score': [{'dataset': 'math'}], 'data_root': str(tmp_path)}))


def test_the_processes_that_compare_answers_end_with_the_evaluation(math_data, monkeypatch):
    started: list[mathematics.Worker] = []

    class RecordedWorker(mathematics.Worker):
        def __init__(self, limits: mathematics.ComparisonLimits) -> None:
            super().__init__(limits)
            started.append(self)

    monkeypatch.setattr(mathematics, 'Worker', RecordedWorker)
    (examples,) = math_data.examples.values()
    answers = [
        Answer(task=MATH, num_shots=0, row=0, variant=example.variant, file='algebra', text=rf'$\boxed{{x+{place}}}$')
        for place, example in enumerate(examples)
    ]

    score_answers(math_data, [('here', answer) for answer in answers])
    num_started_by_complete = len(started)
    with pytest.raises(DataError):
        score_answers(math_data, [('here', answer) for answer in answers[1:]])  # the first is missing

    assert 0 < num_started_by_complete < len(started)
    assert [worker for worker in started if worker.process.poll() is None] == []


def test_a_model_that_repeats_the_prompts_of_math_has_no_answers(math_data: EvaluationData):
    """All ten prompts hold `boxed{answer}`; the answers were consistent. Mutation: no placeholders in `answer_of`."""
    ((_, examples),) = math_data.examples.items()
    instructions = {example.variant: example.content.template.text('') for example in examples}
    assert all(r'\boxed{answer}' in text for text in instructions.values())
    answers = [
        Answer(task=MATH, num_shots=0, row=0, variant=variant, file='algebra', text=text)
        for variant, text in instructions.items()
    ]

    evaluation = score_answers(math_data, [('here', answer) for answer in answers])

    (by_perturbation,) = evaluation.robustness.values()
    assert set(by_perturbation) == {'prompt', 'non_greedy'}
    for score in by_perturbation.values():
        assert score.accuracy.value == 0
        assert score.consistency_rate.value == 0
        assert score.unparsed_rate.value == 1
