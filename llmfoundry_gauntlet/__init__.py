"""The Mosaic Eval Gauntlet inside MosaicML Composer training.

The names below are loaded on first use: importing the package loads none of torch, Composer and transformers.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    'ConfigError': 'errors',
    'DataError': 'errors',
    'EvalGauntlet': 'composer',
    'Evaluation': 'evaluation',
    'EvaluationSettings': 'config.settings',
    'GauntletError': 'errors',
    'ModelError': 'errors',
    'RecordError': 'errors',
    'build_icl_evaluators': 'composer',
    'evaluate': 'composer',
}

__all__ = [
    'ConfigError',
    'DataError',
    'EvalGauntlet',
    'Evaluation',
    'EvaluationSettings',
    'GauntletError',
    'ModelError',
    'RecordError',
    'build_icl_evaluators',
    'evaluate',
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(import_module(f'{__name__}.{_HOMES[name]}'), name)
    globals()[name] = value
    return value
