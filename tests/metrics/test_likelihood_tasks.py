"""Likelihood metrics of each task type."""

from typing import Any

import pytest

from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.tasks import metrics_of

OF_CHOICES = (
    'GoldBitsPerByte',
    'GoldProbability',
    'CharacterNormalizedMatch',
    'ByteNormalizedMatch',
    'TokenNormalizedMatch',
    'CalibrationError',
    'CalibrationBias',
    'BrierScore',
    'MajorityClass',
)
TASK = {'label': 'copa', 'dataset_uri': 'copa.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}


def names_of(**keys: Any) -> list[str]:
    (task,) = load_suite([{**TASK, **keys}]).tasks
    return [metric.name for metric in metrics_of(task)]


@pytest.mark.parametrize('name', ['multiple_choice', 'schema'])
def test_tasks_with_choices_have_all_likelihood_metrics(name: str):
    assert names_of(icl_task_type=name) == ['InContextLearningMultipleChoiceAccuracy', *OF_CHOICES]


def test_language_modeling_has_only_bits_per_byte():
    assert names_of(icl_task_type='language_modeling') == ['InContextLearningLMAccuracy', 'GoldBitsPerByte']


def test_generation_tasks_have_no_likelihood_metrics():
    assert not {*OF_CHOICES, 'PMINormalizedMatch'} & {*names_of(icl_task_type='generation_task_with_answers')}


def test_a_pmi_context_adds_pmi():
    assert names_of(pmi_context='Answer:')[1:] == [*OF_CHOICES, 'PMINormalizedMatch']


@pytest.mark.parametrize('name', ['multiple_choice', 'schema'])
def test_upstream_calibration_error_is_left_out_with_a_warning(name: str):
    upstream = 'InContextLearningMCExpectedCalibrationError'
    suite = load_suite([{**TASK, 'icl_task_type': name, 'metric_names': [upstream]}])
    assert suite.warnings == (f'copa: metric_names: {upstream} is not supported by this version; it is left out',)
    assert [metric.name for metric in metrics_of(suite.tasks[0])][1:] == [*OF_CHOICES]
