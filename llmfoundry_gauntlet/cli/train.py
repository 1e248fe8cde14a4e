"""`gauntlet train` and `gauntlet eval`: train or evaluate from one YAML file, on any number of ranks."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

File = Annotated[
    str, typer.Argument(metavar='FILE.yaml', help='YAML file; paths in it are relative to the working directory.')
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar='KEY=VALUE', help='Values that override those in the file.')
]


def train(file: File, overrides: Overrides = None) -> None:
    """Train a causal language model on text with Composer; the callback eval_gauntlet evaluates it during training.

    composer -n 2 -m llmfoundry_gauntlet train yamls/train/demo.yaml max_duration=100ba

    The keys are in the documentation (In training).
    """
    start_logging()
    from llmfoundry_gauntlet.composer.train import train as train_from

    train_from(file, overrides or [])


def evaluate(file: File, overrides: Overrides = None) -> None:
    """Evaluate one or several models from a YAML file: the options of gauntlet run as keys, or llm-foundry's keys.

    composer -n 2 -m llmfoundry_gauntlet eval yamls/eval/demo.yaml resume=true

    Exit status: 0 done, 1 some of several models failed, 2 the file is invalid or no model could be evaluated.
    """
    start_logging()
    from llmfoundry_gauntlet.composer.evaluation_files import evaluate_file

    raise typer.Exit(evaluate_file(file, overrides or []))


def start_logging() -> None:
    """Print this package's log messages on rank 0."""
    logging.basicConfig(format='%(message)s')
    if os.environ.get('RANK', '0') == '0':
        logging.getLogger('llmfoundry_gauntlet').setLevel(logging.INFO)
