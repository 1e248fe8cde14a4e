"""Evaluation alone: a Trainer that never trains, with the same callback."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import Precision
from composer.utils import dist

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.composer.evaluators import longest_prompt
from llmfoundry_gauntlet.composer.journal import Resuming
from llmfoundry_gauntlet.composer.models import ModelSource, composer_model, open_model
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.evaluation import Evaluation
from llmfoundry_gauntlet.prompts.encode import Encoder
from llmfoundry_gauntlet.records.results import check_out

DEVICES = ('cpu', 'gpu')


def evaluate(
    model: str | Path,
    *,
    out: str | Path | None = None,
    tokenizer: str | None = None,
    model_config: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    repair_journal: bool = False,
    **settings: Any,
) -> Evaluation:
    """Evaluates a Hugging Face folder or name, or a Composer checkpoint; writes results.json and samples to `out`.

    `settings` are the fields of EvaluationSettings but `interval` and `save_folder`. `device` is 'cpu' or 'gpu', by
    default a GPU where there is one; `precision` one of Composer's, by default fp32 on a CPU and amp_bf16 on a GPU.
    `resume` goes on with an evaluation that was cut off, on any number of ranks; where one of `out` is of another model
    or other settings, that is an error. `repair_journal` drops damaged lines of its journal.
    Works on all ranks of the `composer` launcher. Raises GauntletError.
    """
    device = device or ('gpu' if torch.cuda.is_available() else 'cpu')
    precision = precision or ('fp32' if device == 'cpu' else 'amp_bf16')
    check_choice('device', device, DEVICES)
    check_choice('precision', precision, [value.value for value in Precision])
    if repair_journal and not resume:
        raise ConfigError('repair_journal has no effect without resume')
    if out is None and resume:
        raise ConfigError('resume needs out, the folder of the evaluation that was cut off')
    if out is not None:
        check_out(Path(out), overwrite=overwrite, resume=resume)
    callback = EvalGauntlet(**settings, save_folder=None if out is None else str(out))
    source = open_model(str(model), tokenizer=tokenizer, model_config=model_config)
    check_fit(callback, source)
    callback.source = source
    callback.resuming = Resuming(wanted=resume, required=True, repair=repair_journal)
    dist.initialize_dist(device, timeout=300.0)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='No optimizer was specified')
        trainer = Trainer(
            model=composer_model(source.load(), source.tokenizer),
            callbacks=[callback],
            device=device,
            precision=precision,
            progress_bar=False,
        )
    trainer.eval()
    trainer.close()
    if callback.evaluation is None:
        raise RuntimeError('the evaluation ended without a result')
    return callback.evaluation


def check_fit(callback: EvalGauntlet, source: ModelSource) -> None:
    """Raises ModelError where tokenizer or length do not fit, before any weights are loaded."""
    Encoder(source.tokenizer)
    longest_prompt(callback.data, source.config)


def check_choice(name: str, value: str, allowed: list[str] | tuple[str, ...]) -> None:
    """Raises ConfigError unless the value is allowed."""
    if value not in allowed:
        raise ConfigError(f'{name} is {value!r}; allowed: {", ".join(allowed)}')
