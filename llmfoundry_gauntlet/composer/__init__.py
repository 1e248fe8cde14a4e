"""Everything that depends on Composer: the callback, evaluators, and training from a YAML file."""

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.composer.evaluators import build_icl_evaluators

__all__ = ['EvalGauntlet', 'build_icl_evaluators']
