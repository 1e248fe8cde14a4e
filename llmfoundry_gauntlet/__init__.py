"""The Mosaic Eval Gauntlet in training, with MosaicML Composer or any other loop.

The names below are loaded on first use: importing the package loads none of torch, Composer, transformers and pandas.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmfoundry_gauntlet.stack import VERSION, check_stack

# Editors and type checkers know the names by these imports; to them `__getattr__` alone would make each Any.
if TYPE_CHECKING:
    from llmfoundry_gauntlet.composer import EvalGauntlet, build_icl_evaluators
    from llmfoundry_gauntlet.config.settings import EvaluationSettings
    from llmfoundry_gauntlet.errors import (
        ConfigError,
        DataError,
        GauntletError,
        MissingFileError,
        MissingPackageError,
        ModelError,
        RecordError,
        StoreError,
        UnwrittenError,
    )
    from llmfoundry_gauntlet.evaluation.run import Evaluation
    from llmfoundry_gauntlet.metrics.alerts import Alert
    from llmfoundry_gauntlet.results.runs import Run, read_run, read_runs, samples_frame, scores_frame
    from llmfoundry_gauntlet.runtime.evaluate import evaluate
    from llmfoundry_gauntlet.runtime.gauntlet import Gauntlet

__version__ = VERSION
_HOMES = {
    'Alert': 'metrics.alerts',
    'ConfigError': 'errors',
    'DataError': 'errors',
    'EvalGauntlet': 'composer',
    'Evaluation': 'evaluation.run',
    'EvaluationSettings': 'config.settings',
    'Gauntlet': 'runtime.gauntlet',
    'GauntletError': 'errors',
    'MissingFileError': 'errors',
    'MissingPackageError': 'errors',
    'ModelError': 'errors',
    'RecordError': 'errors',
    'Run': 'results.runs',
    'StoreError': 'errors',
    'UnwrittenError': 'errors',
    'build_icl_evaluators': 'composer',
    'evaluate': 'runtime.evaluate',
    'read_run': 'results.runs',
    'read_runs': 'results.runs',
    'samples_frame': 'results.runs',
    'scores_frame': 'results.runs',
}

__all__ = [
    'Alert',
    'ConfigError',
    'DataError',
    'EvalGauntlet',
    'Evaluation',
    'EvaluationSettings',
    'Gauntlet',
    'GauntletError',
    'MissingFileError',
    'MissingPackageError',
    'ModelError',
    'RecordError',
    'Run',
    'StoreError',
    'UnwrittenError',
    'build_icl_evaluators',
    'evaluate',
    'read_run',
    'read_runs',
    'samples_frame',
    'scores_frame',
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    check_stack()
    value = getattr(import_module(f'{__name__}.{_HOMES[name]}'), name)
    globals()[name] = value
    return value
