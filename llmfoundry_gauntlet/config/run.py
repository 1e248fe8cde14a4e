"""Settings of an evaluation without training: the keys of `gauntlet eval` and `evaluate` beside EvaluationSettings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llmfoundry_gauntlet.config.resources import path_problems
from llmfoundry_gauntlet.config.settings import EvaluationOptions, EvaluationSettings, paths_as_text
from llmfoundry_gauntlet.config.yaml import YamlProblems, decode_partly, raise_invalid_values
from llmfoundry_gauntlet.errors import ConfigError, describe, named, suggestion

DEVICES = ('cpu', 'gpu')
DTYPES = ('float32', 'bfloat16', 'float16')
PRECISIONS = ('fp32', 'amp_fp16', 'amp_bf16', 'amp_fp8')  # in Composer's words; the last computes in bfloat16
LOGGERS = ('file', 'mlflow', 'tensorboard', 'wandb')
DIST_TIMEOUT = 900.0  # seconds, for a new process group: longer than the watchdog's
TRAINING_KEYS = ('interval', 'save_folder', 'alert_on')  # settings without effect outside of training


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model to load, and how.

    * `model`: a Composer checkpoint, in one file or sharded, or a Hugging Face folder or name. Files and folders may
      also be `s3://bucket/key`, `gs://` or `az://`; Composer's symlink files are followed.
    * `tokenizer`, `model_config`: folders or names, used instead of those in the model's folder or checkpoint.
    * `config_overrides`: values that replace those in the model's configuration.
    * `revision`: the branch, tag or commit of a model on the hub.
    * `adapter`: the folder or name of a PEFT adapter, which is merged into the weights.
    * `averaged_with`: more checkpoints of the same training; evaluated is the mean of their weights and the model's.
    * `dtype`: the type of the weights in memory: float32, bfloat16 or float16.
    * `device_map`: 'auto' or a mapping of modules to devices, for a model that is larger than one GPU (accelerate).
    * `trust_remote_code`: allow Python code in the folders of the model and its tokenizer to run.
    """

    model: str
    tokenizer: str | None = None
    model_config: str | None = None
    config_overrides: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    adapter: str | None = None
    averaged_with: tuple[str, ...] = ()
    dtype: str = 'float32'
    device_map: Any = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if self.dtype not in DTYPES:
            yield f'dtype: is {self.dtype!r}{suggestion(self.dtype, DTYPES)}'
        if self.device_map is not None and self.device_map != 'auto' and not isinstance(self.device_map, Mapping):
            yield f"device_map: is {self.device_map!r}; allowed: 'auto', or a mapping of modules to devices"
        for name in ('model', 'tokenizer', 'model_config', 'adapter'):
            yield from path_problems(name, getattr(self, name))
        for path in self.averaged_with:
            yield from path_problems('averaged_with', path)
        if self.averaged_with and self.adapter is not None:
            yield 'averaged_with: is not allowed with an adapter, whose parts have another mean than what they add'


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(ModelSettings):
    """Settings of an evaluation without training: the model, and where and how to run it.

    * `out`: the folder for results.json and samples.
    * `device`: 'cpu' or 'gpu', by default a GPU if there is one; `precision`: one of PRECISIONS, by default fp32 on a
      CPU, and on a GPU amp_bf16, or amp_fp16 for weights in float16.
    * `fsdp_config`: keys of Composer's FSDPConfig, or {} for its defaults; shards the model over the ranks.
    * `loggers`: a mapping of the names of loggers to their arguments; metrics are logged at the training step of the
      checkpoint, in the run `run_name`.
    * `resume`: resume an interrupted evaluation, on any number of ranks; records of another model or other settings
      in `out` are an error. `repair_journal` drops damaged lines of its journal.
    """

    out: str | None = None
    device: str | None = None
    precision: str | None = None
    fsdp_config: Any = None
    dist_timeout: float = DIST_TIMEOUT
    loggers: Any = None
    run_name: str | None = None
    overwrite: bool = False
    resume: bool = False
    repair_journal: bool = False

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        yield from ModelSettings.problems(self)
        if self.device is not None and self.device not in DEVICES:
            # Both are named: 'gpu' is the word most similar to 'tpu', and not what was meant.
            yield f'device: is {self.device!r}; allowed: {", ".join(DEVICES)}'
        if self.precision is not None and self.precision not in PRECISIONS:
            yield f'precision: is {self.precision!r}{suggestion(self.precision, PRECISIONS)}'
        for name in self.loggers if isinstance(self.loggers, Mapping) else ():
            if name not in LOGGERS:
                yield f"loggers: unknown key '{name}'{suggestion(str(name), LOGGERS)}"
        if self.repair_journal and not self.resume:
            yield f'repair_journal: has no effect without {named("resume")}'
        if self.out is None and self.resume:
            yield f'resume: needs {named("out")}, the folder of the interrupted evaluation'
        if self.out is not None and '{run_name}' in self.out and self.run_name is None:
            yield f'out: is {self.out!r}, but there is no run_name; give one, or a folder without it'
        yield from path_problems('out', self.out)
        yield from path_problems('run_name', self.run_name)


class RunOptions(EvaluationOptions, total=False):
    """The keyword arguments of `evaluate` beside the model, which become RunSettings and EvaluationSettings."""

    tokenizer: str | Path | None
    model_config: str | Path | None
    config_overrides: Mapping[str, Any]
    revision: str | None
    adapter: str | Path | None
    averaged_with: Sequence[str | Path]
    dtype: str
    device_map: str | Mapping[str, Any] | None
    trust_remote_code: bool
    out: str | Path | None
    device: str | None
    precision: str | None
    fsdp_config: Mapping[str, Any] | None
    dist_timeout: float
    loggers: Mapping[str, Mapping[str, Any] | None]
    run_name: str | None
    overwrite: bool
    resume: bool
    repair_journal: bool


OF_RUN = tuple(item.name for item in fields(RunSettings))
SETTINGS = tuple(item.name for item in fields(EvaluationSettings) if item.name not in TRAINING_KEYS)


def decode_run(
    values: Mapping[str, Any], source: str, *, required: Sequence[str] = (), further: Iterable[str] = ()
) -> tuple[RunSettings | None, list[str]]:
    """Decode the RunSettings among the arguments of `evaluate`; return them as far as valid, and all problems.

    `further` are more keys to suggest for an unknown one.
    """
    values = {name: paths_as_text(value) for name, value in values.items()}
    problems = YamlProblems(source)
    run: RunSettings | None = decode_partly(
        RunSettings, {key: values[key] for key in values if key in OF_RUN}, '', problems
    )
    for name, value in values.items():
        if name in TRAINING_KEYS:
            problems.add(name, 'only applies in training; an evaluation alone runs once and writes to out')
        elif name not in (*OF_RUN, *SETTINGS):
            problems.add(name, f"unknown key '{name}'{suggestion(str(name), (*OF_RUN, *SETTINGS, *further))}")
        elif name in OF_RUN and isinstance(value, str) and not value.strip():
            problems.add(name, f'is {describe(value)}; allowed: text')
    for name in required:
        if name not in values:
            problems.add('', f"the key '{name}' is missing")
    return run, problems.messages


def run_settings(values: Mapping[str, Any], source: str) -> RunSettings:
    """Decode the RunSettings among the arguments of `evaluate`. Raise ConfigError with every problem found."""
    run, problems = decode_run(values, source)
    if problems or run is None:
        raise ConfigError(problems)
    return run
