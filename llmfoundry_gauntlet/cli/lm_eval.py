"""`gauntlet lm-eval`: the command line of the LM Evaluation Harness, with its models run by our engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from llmfoundry_gauntlet.config.resources import PACKAGE
from llmfoundry_gauntlet.errors import ConfigError, MissingPackageError

LM_EVAL = 'lm_eval'
MODEL = 'gauntlet'
# Everything after the first word, or after the first option that is not ours, is lm-eval's.
ALL_TO_LM_EVAL = {'ignore_unknown_options': True, 'allow_interspersed_args': False}
WITHOUT_MODEL = ('ls', 'validate')  # its other commands; without one it runs
HELP = (['-h'], ['--help'])


def lm_eval(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar='ARGUMENTS', help="Arguments of lm-eval's own command line, such as run --tasks NAMES."),
    ] = None,
) -> None:
    """Run the command line of the LM Evaluation Harness with its models on our engine: with --model gauntlet.

    The arguments of a model are those of lm-eval's hf, and tokens_per_batch (auto, or a number), which takes the place
    of --batch_size. gauntlet lm-eval run --help lists lm-eval's options. Needs the extra lm-eval.

    Examples:
      gauntlet lm-eval run --model_args pretrained=gpt2 --tasks arc_easy,gsm8k --output_path runs/gpt2
      gauntlet lm-eval run --model_args pretrained=gpt2,tokens_per_batch=8192 --tasks mmlu --num_fewshot 5
      gauntlet lm-eval ls tasks
    """
    words = with_our_model(arguments or [])
    try:
        from lm_eval.__main__ import cli_evaluate

        if '--model' in words:
            import llmfoundry_gauntlet.lm_eval  # noqa: F401  # which registers the model
    except ImportError as error:
        needed = error.name or LM_EVAL
        raise MissingPackageError(
            f"gauntlet lm-eval needs {needed}, which is not installed; pip install 'llmfoundry-gauntlet[lm-eval]'"
        ) from error
    sys.argv = ['lm-eval', *words]
    cli_evaluate()


def with_our_model(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of lm-eval with `--model gauntlet`. Raise ConfigError if they name another model."""
    words = list(arguments)
    if not words or words in HELP or words[0] in WITHOUT_MODEL:
        return words
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument('--model', '-M', '-m')  # -m before lm-eval 0.4.10
    parser.add_argument('--config', '-C')
    try:
        options, others = parser.parse_known_args(words)
    except argparse.ArgumentError:
        return words  # an option without its value, which lm-eval will say
    named = {'--model': options.model, f'{options.config}: model': model_of_config(options.config)}
    for place, model in named.items():
        if model not in (None, MODEL):
            raise ConfigError(f'{place} is {model}; gauntlet lm-eval runs {MODEL} alone: run lm-eval itself for others')
    if options.config is not None:
        others += ['--config', options.config]
    first = others[:1] if others[:1] == ['run'] else []
    return [*first, '--model', MODEL, *others[len(first) :]]


def model_of_config(config: str | None) -> str | None:
    """Return the model that a YAML file of lm-eval's settings names, None if it names none or cannot be read."""
    if config is None or not Path(config).is_file():
        return None
    import yaml

    try:
        settings = yaml.safe_load(Path(config).read_text('utf-8'))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None  # lm-eval says what is wrong
    model = settings.get('model') if isinstance(settings, dict) else None
    return None if model is None else str(model)


def is_of_lm_eval(traceback: TracebackType | None) -> bool:
    """Return whether an error was raised by lm-eval, or below it, and not by this package that it calls."""
    innermost = ''  # of the two packages
    while traceback is not None:
        package = traceback.tb_frame.f_globals.get('__name__', '').partition('.')[0]
        if package in (LM_EVAL, PACKAGE.name):
            innermost = package
        traceback = traceback.tb_next
    return innermost == LM_EVAL
