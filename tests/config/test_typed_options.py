"""The keyword arguments that editors and mypy know are the fields of the settings that they become."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

from llmfoundry_gauntlet.config.run import TRAINING_KEYS, ModelSettings, RunOptions, RunSettings
from llmfoundry_gauntlet.config.settings import EvaluationOptions, EvaluationSettings, GauntletOptions, TrainingOptions

OF_SETTINGS = {item.name for item in fields(EvaluationSettings)}
OF_RUN = {item.name for item in fields(RunSettings)}


def test_options_of_an_evaluation_alone_are_all_but_those_of_training():
    assert set(get_type_hints(EvaluationOptions)) == OF_SETTINGS - {*TRAINING_KEYS}


def test_options_of_a_gauntlet_are_all_but_the_interval():
    assert set(get_type_hints(GauntletOptions)) == OF_SETTINGS - {'interval'}


def test_options_of_the_callback_are_all_settings():
    assert set(get_type_hints(TrainingOptions)) == OF_SETTINGS


def test_options_of_evaluate_are_those_of_an_evaluation_and_of_its_run():
    """The model is an argument of its own. No name is both: each goes to one of the two settings."""
    expected = (OF_SETTINGS - {*TRAINING_KEYS}) | (OF_RUN - {'model'})
    assert set(get_type_hints(RunOptions)) == expected
    assert not OF_SETTINGS & OF_RUN
    assert {item.name for item in fields(ModelSettings)} <= OF_RUN
