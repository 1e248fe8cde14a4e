"""Everything that depends on Composer: callback, evaluators, checkpoints, evaluation without training, watch."""

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.composer.evaluate import evaluate
from llmfoundry_gauntlet.composer.evaluators import build_icl_evaluators

__all__ = ['EvalGauntlet', 'build_icl_evaluators', 'evaluate']
