"""Everything that depends on Composer: the callback, and evaluators of single tasks.

Raise MissingPackageError where Composer is not installed.
"""

from importlib.util import find_spec

from llmfoundry_gauntlet.errors import MissingPackageError
from llmfoundry_gauntlet.stack import check_stack

# Any folder of that name on the path, without Composer's __init__.py, is found as a package too: it has no origin.
if getattr(find_spec('composer'), 'origin', None) is None:
    raise MissingPackageError(
        'EvalGauntlet and build_icl_evaluators need MosaicML Composer, which is not installed; '
        "pip install 'llmfoundry-gauntlet[composer]'. Gauntlet, evaluate and the commands do without it"
    )

# llm-foundry finds the plug-in here, not by the package's own names.
check_stack()

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.composer.evaluators import build_icl_evaluators

__all__ = ['EvalGauntlet', 'build_icl_evaluators']
