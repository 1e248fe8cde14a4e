"""Evaluates a model without training it, on any number of ranks.

    composer -n 2 scripts/eval.py yamls/eval/demo.yaml [key=value ...]

The keys are those of `gauntlet run` with underscores; `resume=true` goes on with an evaluation that was cut off. A
wrong file ends with exit status 2 and what is wrong with it.
"""

import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from composer.utils import dist

from llmfoundry_gauntlet import EvaluationSettings, evaluate
from llmfoundry_gauntlet.config.decode import suggestion
from llmfoundry_gauntlet.config.yaml_files import read_yaml
from llmfoundry_gauntlet.errors import ConfigError, GauntletError, print_problems
from llmfoundry_gauntlet.report.tables import print_runs

TRAINING_KEYS = ('interval', 'save_folder')
MODEL_KEYS = (
    'model',
    'tokenizer',
    'model_config',
    'device',
    'precision',
    'out',
    'overwrite',
    'resume',
    'repair_journal',
)
REQUIRED_KEYS = ('model', 'out')


def read_config(path: str, overrides: list[str]) -> dict[str, Any]:
    """The arguments of `evaluate`, from a YAML file and `key=value` words. Raises ConfigError."""
    values = read_yaml(path, overrides)
    settings = [item.name for item in fields(EvaluationSettings) if item.name not in TRAINING_KEYS]
    allowed = [*MODEL_KEYS, *settings]
    problems = [f"{path}: unknown key '{key}'{suggestion(str(key), allowed)}" for key in values if key not in allowed]
    problems += [f"{path}: the key '{key}' is missing" for key in REQUIRED_KEYS if key not in values]
    if problems:
        raise ConfigError(problems)
    return values


def main(arguments: list[str]) -> int:
    """Evaluates; the exit status."""
    if not arguments or '=' in arguments[0]:
        print('usage: composer -n RANKS scripts/eval.py CONFIG.yaml [key=value ...]', file=sys.stderr)
        return 2
    logging.basicConfig(format='%(message)s')
    if dist.get_global_rank() == 0:
        logging.getLogger('llmfoundry_gauntlet').setLevel(logging.INFO)
    try:
        values = read_config(arguments[0], arguments[1:])
        evaluate(values.pop('model'), **values)
    except GauntletError as error:
        print_problems(error)
        return 2
    if dist.get_global_rank() == 0:
        print_runs(Path(values['out']))
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
