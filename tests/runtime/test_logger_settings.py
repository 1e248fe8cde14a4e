"""The loggers of an evaluation alone: their arguments, files, and loggers that fail."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import composer.loggers
import logged
import logged_evaluations
import pytest
from logged import warnings_of
from logged_evaluations import COMPOSITE, KEY, METRICS, log_once

from llmfoundry_gauntlet import ConfigError
from llmfoundry_gauntlet.runtime.logged_values import warn_of_library
from llmfoundry_gauntlet.runtime.loggers import (
    KINDS,
    MetricLogger,
    build_loggers,
    close_loggers,
    log_evaluation,
    logger_settings,
)

OF_COMPOSER = {
    'file': composer.loggers.FileLogger,
    'mlflow': composer.loggers.MLFlowLogger,
    'tensorboard': composer.loggers.TensorboardLogger,
    'wandb': composer.loggers.WandBLogger,
}


folder = logged_evaluations.folder


# ----------------------------------------------------------------------------------------------------------------------
# Names and arguments


def test_every_invalid_name_and_argument_is_named():
    with pytest.raises(ConfigError) as caught:
        build_loggers(
            {
                'wanb': {},
                'file': {'filname': 'x'},
                'mlflow': 3,
                'wandb': {'project': 3, 'init_kwargs': {'modde': 'offline'}},
                'tensorboard': {'log_dir': ['a']},
            },
            run_name='tiny',
        )
    problems = caught.value.problems
    facts = [
        ('wanb', "'wandb'"),
        ('file', 'filname', "'filename'"),
        ('mlflow', '3', 'a mapping'),
        ('wandb.project', '3', 'text'),
        ('wandb.init_kwargs', 'modde', "'mode'"),
        ('tensorboard.log_dir', 'text'),
    ]
    assert len(problems) == len(facts)
    for problem, words in zip(problems, facts, strict=True):
        assert all(word in problem for word in words), problem


@pytest.mark.parametrize('filename', ['{', '{run_name', '{rank:x!}', '{0}'])
def test_a_filename_that_is_no_format_is_found_before_the_evaluation(filename: str):
    with pytest.raises(ConfigError, match='filename'):
        build_loggers({'file': {'filename': filename}}, run_name=None)


@pytest.mark.parametrize('chosen', ['mlflow', ['mlflow'], 3, True])
def test_loggers_are_a_mapping(chosen: Any):
    with pytest.raises(ConfigError, match='allowed: a mapping with file, mlflow'):
        build_loggers(chosen, run_name=None)


@pytest.mark.parametrize('name', OF_COMPOSER)
def test_every_argument_of_composers_logger_is_known(name: str):
    """A training YAML has them."""
    theirs = set(inspect.signature(OF_COMPOSER[name]).parameters)
    settings: Any = KINDS[name].settings
    assert theirs == {item.name for item in fields(settings)} | set(settings.without_effect)


@pytest.mark.parametrize('name', ['mlflow', 'tensorboard', 'wandb'])
def test_a_logger_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setitem(sys.modules, str(KINDS[name].library), None)  # as Python has it where an import fails
    with pytest.raises(ConfigError, match=rf"loggers: {name}: .*pip install 'llmfoundry-gauntlet\[{name}\]'"):
        build_loggers({name: None}, run_name=None)


def test_a_folder_that_wandb_has_left_is_not_its_library(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / 'wandb').mkdir()
    for name in [name for name in sys.modules if name.partition('.')[0] == 'wandb']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'wandb', None)  # so that the folder, once imported, does not stay
    monkeypatch.delitem(sys.modules, 'wandb')
    monkeypatch.setattr(sys, 'path', [str(folder)])
    with pytest.raises(ConfigError, match='wandb: its library is not installed'):
        build_loggers({'wandb': None}, run_name=None)


@pytest.mark.parametrize(
    ('extra', 'package', 'version', 'warning'),
    [
        ('tensorboard', 'tensorboard', '2.20.0', ''),
        ('tensorboard', 'tensorboard', '3.1', 'tensorboard 3.1 is installed, tensorboard<3,>=2.9.1 is needed'),
        ('wandb', 'wandb', '99', 'wandb 99 is installed, wandb<'),
        ('mlflow', 'mlflow', '99', 'mlflow 99 is installed, mlflow<'),
    ],
)
def test_a_library_of_an_unsupported_version_is_a_line_at_the_start(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    extra: str,
    package: str,
    version: str,
    warning: str,
):
    real = metadata.version
    monkeypatch.setattr(metadata, 'version', lambda name: version if name.lower() == package else real(name))
    warn_of_library.cache_clear()
    build_loggers({extra: None}, run_name=None)
    text = '\n'.join(message for message in caplog.messages if 'is installed' in message)
    assert warning in text and text.count(f'llmfoundry-gauntlet[{extra}]') == (warning != '')


def test_nothing_is_opened_before_the_first_evaluation(folder: Path):
    loggers = build_loggers(dict.fromkeys(KINDS), run_name='tiny')
    close_loggers(loggers)
    assert len(loggers) == 4
    assert list(folder.iterdir()) == []


def test_other_ranks_have_no_loggers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('RANK', '1')
    assert build_loggers(dict.fromkeys(KINDS), run_name='tiny') == []
    assert build_loggers(None, run_name=None) == []


def test_each_checkpoint_of_a_watch_has_its_own_file_and_joins_the_runs_of_the_others():
    chosen = {'file': {'filename': 'logs/log.txt'}, 'wandb': None, 'mlflow': {'experiment_name': 'llama'}}

    settings = logger_settings(chosen, 'llama 7b', 'huggingface/ba100')

    assert settings['file']['filename'] == 'logs/huggingface-ba100-log.txt'
    assert settings['wandb'] == {'init_kwargs': {'id': 'llama-7b-watch', 'resume': 'allow'}}
    assert settings['mlflow'] == {'experiment_name': 'llama', 'resume': True}


def test_the_runs_that_a_user_names_are_kept_in_a_watch():
    chosen = {'wandb': {'init_kwargs': {'id': 'own-id'}}, 'mlflow': {'resume': False}}

    settings = logger_settings(chosen, 'llama', 'ba1')

    assert settings['wandb']['init_kwargs']['id'] == 'own-id'
    assert settings['mlflow'] == {'resume': False}


# ----------------------------------------------------------------------------------------------------------------------
# Files


def test_a_file_has_a_line_for_each_value_and_replaces_an_existing_one(folder: Path):
    for batch in (10, 20):
        log_once({'file': {'filename': '{run_name}/{rank}-{world_size}-{epoch}.txt'}}, METRICS, batch)
    text = (folder / 'tiny/0-1-{epoch}.txt').read_text()
    assert text.splitlines() == [
        f'[metric][batch=20]: {KEY}: 0.5000 ',
        f'[metric][batch=20]: {COMPOSITE}: 0.2500 ',
        '[metric][batch=20]: gauntlet/items: 100 ',
        '[metric][batch=20]: gauntlet/batch: 20 ',
    ]


@pytest.mark.parametrize(('variable', 'name'), [('COMPOSER_RUN_NAME', 'one'), ('RUN_NAME', 'two')])
def test_a_run_without_a_name_takes_that_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str
):
    monkeypatch.setenv(variable, name)
    log_once({'file': None}, METRICS, 1, run_name=None)
    assert (folder / name / 'logs-rank0.txt').is_file()


# ----------------------------------------------------------------------------------------------------------------------
# Loggers that fail


class OwnError(Exception):
    """An error of the logger's own package."""


class Failing:
    """A user's logger."""

    def log(self, metrics: Any, step: int) -> None:
        raise OwnError

    def close(self) -> None:
        raise OwnError


def test_a_failing_logger_is_a_warning_and_others_get_everything(folder: Path, caplog: pytest.LogCaptureFixture):
    (folder / 'taken').write_text('')
    chosen = {'tensorboard': {'log_dir': 'taken'}, 'file': {'filename': 'log.txt'}}
    loggers: list[MetricLogger] = [Failing(), *build_loggers(chosen, run_name='tiny')]
    log_evaluation(loggers, METRICS, 7)
    close_loggers(loggers)
    warnings = warnings_of(caplog)
    assert [warning.split()[0] for warning in warnings] == ['Failing', 'TensorboardLogger', 'Failing']
    assert all('batch 7' in warning for warning in warnings[:2])
    assert logged.file_values(folder / 'log.txt')[KEY] == [(7, 0.5)]


def test_an_interrupt_is_not_a_logger_error():
    class Interrupted(Failing):
        def log(self, metrics: Any, step: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log_evaluation([Interrupted()], METRICS, 7)
