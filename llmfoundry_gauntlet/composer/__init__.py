"""Everything that depends on Composer: the callback, evaluators, and training from a YAML file.

Raise MissingPackageError where Composer is not installed.
"""

from importlib.util import find_spec

from llmfoundry_gauntlet.errors import MissingPackageError

if find_spec('composer') is None:
    raise MissingPackageError(
        'EvalGauntlet, build_icl_evaluators and gauntlet train need MosaicML Composer, which is not installed; '
        "pip install 'llmfoundry-gauntlet[composer]'. Gauntlet, evaluate and the other commands do without it"
    )

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.composer.evaluators import build_icl_evaluators

__all__ = ['EvalGauntlet', 'build_icl_evaluators']
