"""`gauntlet train`: train a causal language model on text with Composer, from a YAML file.

Its keys have llm-foundry's names where it has them; the gauntlet is an entry of `callbacks`. The loss is next-token
cross-entropy.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import (
    CheckpointSaver,
    LRMonitor,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
)
from composer.core import Algorithm, Callback, State, Time, TimeUnit
from composer.loggers import LoggerDestination
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from composer.utils import FSDPConfig, reproducibility
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.composer.loggers import Builders, build_each, build_loggers
from llmfoundry_gauntlet.composer.text_data import TrainDataConfig, build_dataloader
from llmfoundry_gauntlet.composer.trainer_model import composer_model, mark_blocks_for_fsdp
from llmfoundry_gauntlet.config.llm_foundry import map_training
from llmfoundry_gauntlet.config.resources import path_problem, path_problems
from llmfoundry_gauntlet.config.run import DEVICES, PRECISIONS
from llmfoundry_gauntlet.config.yaml import YamlProblems, decode, raise_invalid_values, read_yaml
from llmfoundry_gauntlet.errors import Collected, ConfigError, describe, suggestion
from llmfoundry_gauntlet.results.report.printing import print_runs
from llmfoundry_gauntlet.runtime.distributed import global_rank, world_size
from llmfoundry_gauntlet.runtime.evaluate import check_precision, default_device
from llmfoundry_gauntlet.runtime.models import load_tokenizer

UNITS = tuple(unit.value for unit in TimeUnit)  # of Composer's times
SHARE_OF_TRAINING = TimeUnit.DURATION.value


class WarmupStableDecayScheduler(ComposerScheduler):
    """Linear warmup, then constant, then linear decay to `alpha_f` over the last `decay_share` of the training."""

    def __init__(self, *, t_warmup: str, alpha_f: float = 0.0, decay_share: float = 0.4) -> None:
        self.warmup = ConstantWithWarmupScheduler(t_warmup=t_warmup)
        self.alpha_f = alpha_f
        self.decay_share = decay_share

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the multiplier of the learning rate at this point of the training."""
        elapsed = state.get_elapsed_duration()
        left = 1.0 - (0.0 if elapsed is None else elapsed.value)
        share_left = min(1.0, left / self.decay_share)
        return self.warmup(state, ssr) * (self.alpha_f + (1.0 - self.alpha_f) * share_left)


SCHEDULERS: Builders = {
    'constant_with_warmup': ConstantWithWarmupScheduler,
    'cosine_with_warmup': CosineAnnealingWithWarmupScheduler,
    'linear_decay_with_warmup': LinearWithWarmupScheduler,
    'warmup_stable_decay': WarmupStableDecayScheduler,
}
UNCHANGED = (  # keys of a training file that are passed to the Trainer
    'max_duration',
    'run_name',
    'seed',
    'device',
    'device_train_microbatch_size',
    'precision',
    'dist_timeout',
    'eval_interval',
    'save_folder',
    'save_interval',
    'save_num_checkpoints_to_keep',
    'save_overwrite',
    'load_path',
    'autoresume',
    'log_to_console',
    'console_log_interval',
)
ALGORITHMS: Builders = {'gradient_clipping': GradientClipping}
CALLBACKS: Builders = {
    'eval_gauntlet': EvalGauntlet,
    'lr_monitor': LRMonitor,
    'memory_monitor': MemoryMonitor,
    'nan_monitor': NaNMonitor,
    'optimizer_monitor': OptimizerMonitor,
    'runtime_estimator': RuntimeEstimator,
    'speed_monitor': SpeedMonitor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer's folder, or its name on the Hugging Face hub."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Either weights to start from (a folder or a name on the hub), or the values of a Hugging Face configuration.

    `config` needs `model_type`; `vocab_size` defaults to the tokenizer's size and `max_position_embeddings` to
    `max_seq_len`.
    """

    pretrained: str | None = None
    config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key if it is about one, for each value that is not allowed."""
        if (self.pretrained is None) == (self.config is None):
            yield "give one of 'pretrained' and 'config'"
        if self.config is not None and 'model_type' not in self.config:
            yield "'config' lacks the key 'model_type', such as llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW, the only optimizer supported."""

    name: str = 'adamw'
    lr: float
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if self.name != 'adamw':
            yield f'name: there is no optimizer {self.name!r}; allowed: adamw'
        if len(self.betas) != 2:
            yield f'betas: has {len(self.betas)} values; allowed: 2'


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """One of `SCHEDULERS`; times are Composer's (100ba, 0.1dur), `alpha_f` is the final factor of the learning rate."""

    name: str = 'constant_with_warmup'
    t_warmup: str = '0ba'
    alpha_f: float | None = None
    decay_share: float | None = None  # share of the training that decays, for warmup_stable_decay

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        if self.name not in SCHEDULERS:
            yield f'name: there is no scheduler {self.name!r}{suggestion(self.name, SCHEDULERS)}'


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training YAML. Keys without a comment are arguments of Composer's Trainer."""

    tokenizer: TokenizerConfig
    model: ModelConfig
    train_data: TrainDataConfig
    optimizer: OptimizerConfig
    max_duration: Any  # a Composer time, as save_interval and console_log_interval
    max_seq_len: int
    global_train_batch_size: int  # rows, summed over all ranks
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    algorithms: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name, as are callbacks and loggers
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    loggers: dict[str, dict[str, Any]] = field(default_factory=dict)
    run_name: str | None = None
    seed: int = 17
    device: str | None = None
    device_train_microbatch_size: Any = None  # a number, auto, or null for a rank's whole batch
    precision: str | None = None
    cpu_threads: int | None = None  # torch's threads in each rank; null: as the launcher sets them
    fsdp_config: dict[str, Any] | None = None
    dist_timeout: float = 900.0  # seconds; longer than the gauntlet's stall_seconds, which reports a hanging rank
    eval_interval: Any = 1  # for evaluators without their own interval; the gauntlet has its own
    save_folder: str | None = None
    save_interval: Any = '1ep'
    save_num_checkpoints_to_keep: int = -1
    save_overwrite: bool = False
    load_path: str | None = None
    autoresume: bool = False
    progress_bar: bool = False
    log_to_console: bool = True
    console_log_interval: Any = '1ba'

    def __post_init__(self) -> None:
        raise_invalid_values(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a problem, beginning with its key, for each value that is not allowed."""
        yield from path_problems('run_name', self.run_name)  # the name of folders of records, checkpoints and loggers
        yield from path_problems('save_folder', self.save_folder)
        units = [unit for unit in UNITS if unit != SHARE_OF_TRAINING]
        if self.precision is not None and self.precision not in PRECISIONS:
            yield f'precision: is {self.precision!r}{suggestion(self.precision, PRECISIONS)}'
        if self.device is not None and self.device not in DEVICES:
            yield f'device: is {self.device!r}{suggestion(self.device, DEVICES)}'
        yield from time_problems('max_duration', self.max_duration, units=units)
        yield from time_problems('save_interval', self.save_interval)
        yield from time_problems('console_log_interval', self.console_log_interval)


def time_problems(name: str, value: Any, units: Sequence[str] = UNITS) -> Iterator[str]:
    """Yield a problem unless the value is a Composer time above 0 in one of these units."""
    time = None
    if isinstance(value, str):
        with contextlib.suppress(ValueError, TypeError):  # Composer's errors for a text that is no time
            time = Time.from_timestring(value)
    if time is not None and time.value > 0 and time.unit.value in units:
        return
    number = value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 40
    examples = f'{number}ba (batches), 2ep (epochs) or 1000000tok (tokens)'
    yield (
        f'{name}: is {describe(value)}; allowed: a number above 0 with its unit, such as {examples}; '
        f'units: {", ".join(units)}'
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Components:
    """The parts of a training that are built before its model and data."""

    callbacks: Sequence[Callback]
    algorithms: Sequence[Algorithm]
    loggers: Sequence[LoggerDestination]


def read_training_config(path: str, overrides: list[str], *, num_ranks: int = 1) -> tuple[TrainConfig, tuple[str, ...]]:
    """Return the checked settings of a YAML file with overrides such as `optimizer.lr=1e-3` applied.

    llm-foundry's top-level ICL keys are moved into the callback; the returned lines report the translation of each key.
    Raise GauntletError with every problem found, those of callbacks, loggers, tokenizer and data included.
    """
    mapped = map_training(read_yaml(path, overrides), source=path, num_ranks=num_ranks)
    problems = YamlProblems(path)
    config = decode(TrainConfig, mapped.values, '', problems)
    if not problems.messages:
        return config, mapped.lines
    collected = Collected()
    collected.add(ConfigError(problems.messages))
    with collected:
        build_components(mapped.values)
    with collected:
        check_files(mapped.values)
    raise collected.error()


def build_components(values: Mapping[str, Any]) -> Components:
    """Build callbacks, algorithms and loggers from the values of a training YAML.

    Values of the wrong type are left out; decoding TrainConfig reports them. Raise GauntletError with every problem
    found.
    """
    collected = Collected()
    callbacks: Sequence[Callback] = ()
    algorithms: Sequence[Algorithm] = ()
    loggers: Sequence[LoggerDestination] = ()
    with collected:
        callbacks = build_each('callbacks', CALLBACKS, mapping_in(values, 'callbacks'))
    with collected:
        algorithms = build_each('algorithms', ALGORITHMS, mapping_in(values, 'algorithms'))
    with collected:
        loggers = build_loggers(mapping_in(values, 'loggers'))
    collected.raise_all()
    return Components(callbacks=callbacks, algorithms=algorithms, loggers=loggers)


def check_files(values: Mapping[str, Any]) -> None:
    """Raise GauntletError if the tokenizer or the data that a training YAML names cannot be read."""
    collected = Collected()
    name = mapping_in(values, 'tokenizer').get('name')
    if isinstance(name, str):
        with collected:
            load_tokenizer(name)
    paths = mapping_in(values, 'train_data').get('path')
    for path in paths if isinstance(paths, (list, tuple)) else ():
        if problem := path_problem(str(path)):
            collected.add(ConfigError(f'train_data.path: {problem}'))
        elif not Path(str(path)).is_file():
            collected.add(ConfigError(f'train_data.path: there is no file {path}'))
    collected.raise_all()


def mapping_in(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping of a key; an empty one if there is none."""
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def build_model(config: ModelConfig, *, tokenizer: PreTrainedTokenizerBase, max_seq_len: int) -> Any:
    """Return the Hugging Face model, pretrained or randomly initialized with torch's default generator."""
    if config.pretrained is not None:
        return AutoModelForCausalLM.from_pretrained(config.pretrained, trust_remote_code=False)
    defaults = {
        'vocab_size': len(tokenizer),
        'max_position_embeddings': max_seq_len,
        'bos_token_id': tokenizer.bos_token_id,
        'eos_token_id': tokenizer.eos_token_id,
        'pad_token_id': tokenizer.pad_token_id,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**defaults, **(config.config or {})}))


def rows_per_rank(config: TrainConfig) -> int:
    """Return the number of rows per rank and batch. Raise ConfigError if the batch size is no multiple of the ranks."""
    rows, rest = divmod(config.global_train_batch_size, world_size())
    if rest or not rows:
        found = f'{config.global_train_batch_size} rows for {world_size()} ranks'
        raise ConfigError(f'global_train_batch_size: {found}; allowed: a multiple of the number of ranks')
    return rows


def check_hardware(config: TrainConfig) -> None:
    """Raise ConfigError with everything that this machine cannot do."""
    collected = Collected()
    device = config.device or default_device()
    with collected:
        check_fsdp(config.fsdp_config, device)
    with collected:
        if config.precision is not None:
            check_precision(config.precision, device)
    collected.raise_all()


def check_components(config: TrainConfig) -> Components:
    """Return the components of a training. Raise GauntletError with every problem found.

    Tasks and data of the evaluation are loaded here, before any model.
    """
    collected = Collected()
    components: Components | None = None
    with collected:
        rows_per_rank(config)
    with collected:
        components = build_components(asdict(config))
    with collected:
        check_files(asdict(config))
    collected.raise_all()
    assert components is not None
    return components


def check_fsdp(fsdp_config: Mapping[str, Any] | None, device: str) -> None:
    """Raise ConfigError for keys unknown to Composer, and on a CPU, where Composer does not support FSDP."""
    if fsdp_config is None:
        return
    if not isinstance(fsdp_config, Mapping):
        raise ConfigError(f'fsdp_config: is {describe(fsdp_config)}; allowed: a mapping')
    allowed = [item.name for item in fields(FSDPConfig) if item.init]
    unknown = [key for key in fsdp_config if key not in allowed]
    if unknown:
        raise ConfigError([f"fsdp_config: unknown key '{key}'{suggestion(str(key), allowed)}" for key in unknown])
    if device == 'cpu':
        raise ConfigError('fsdp_config: Composer shards models over GPUs only; leave it out, or give device gpu')


def build_trainer(config: TrainConfig) -> Trainer:
    """Build the Trainer with all its components; the weights of a new model depend only on the seed."""
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    components = check_components(config)
    reproducibility.seed_all(config.seed)
    tokenizer = load_tokenizer(config.tokenizer.name)
    model = build_model(config.model, tokenizer=tokenizer, max_seq_len=config.max_seq_len)
    if config.fsdp_config is not None:
        mark_blocks_for_fsdp(model)
        if config.fsdp_config.get('activation_checkpointing'):
            model.config.use_cache = False  # a recomputed block would append its keys to the cache twice
    names = ('t_warmup', 'alpha_f', 'decay_share')
    of_scheduler = {name: value for name in names if (value := getattr(config.scheduler, name)) is not None}
    return Trainer(
        model=composer_model(model, tokenizer),
        train_dataloader=build_dataloader(
            config.train_data,
            tokenizer=tokenizer,
            max_seq_len=config.max_seq_len,
            rows_per_rank=rows_per_rank(config),
            seed=config.seed,
        ),
        optimizers=torch.optim.AdamW(
            model.parameters(),
            lr=config.optimizer.lr,
            betas=(config.optimizer.betas[0], config.optimizer.betas[1]),
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        ),
        schedulers=build_each('scheduler', SCHEDULERS, {config.scheduler.name: of_scheduler}),
        algorithms=list(components.algorithms),
        callbacks=list(components.callbacks),
        loggers=list(components.loggers),
        parallelism_config=None if config.fsdp_config is None else {'fsdp': config.fsdp_config},
        progress_bar=config.progress_bar and sys.stderr.isatty(),  # in a log file it would be thousands of lines
        **{key: getattr(config, key) for key in UNCHANGED},
    )


def print_evaluations(trainer: Trainer) -> None:
    """Print the scores of all evaluations of the training, and the folders of records and checkpoints."""
    for callback in trainer.state.callbacks:
        if isinstance(callback, EvalGauntlet) and callback.gauntlet.records.folder is not None:
            print_runs(callback.gauntlet.records.folder)
        if isinstance(callback, CheckpointSaver):
            print(f'checkpoints: {callback.folder}')


def train_from_file(path: str, overrides: list[str]) -> None:
    """Train from a YAML file and print the scores. Raise GauntletError."""
    config, lines = read_training_config(path, overrides, num_ranks=world_size())
    if lines and global_rank() == 0:
        print('\n'.join(lines), flush=True)
    collected = Collected()
    with collected:
        check_hardware(config)
    if collected.errors:
        with collected:
            check_components(config)
    collected.raise_all()
    trainer = build_trainer(config)
    state = trainer.state
    if state.max_duration is not None and state.timestamp >= state.max_duration:  # `fit` would raise an error
        print(f'nothing is left to train: the checkpoint is of batch {state.timestamp.batch.value}')
    else:
        trainer.fit()
    trainer.close()
    if global_rank() == 0:
        print_evaluations(trainer)
