"""The keys of a training YAML (`gauntlet train`), with llm-foundry's names where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmfoundry_gauntlet.config.llm_foundry import map_training
from llmfoundry_gauntlet.config.yaml import Problems, decode, read_yaml, suggestion
from llmfoundry_gauntlet.errors import ConfigError

SCHEDULERS = ('constant_with_warmup', 'cosine_with_warmup', 'linear_decay_with_warmup', 'warmup_stable_decay')


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
        if (self.pretrained is None) == (self.config is None):
            raise ValueError("give one of 'pretrained' and 'config'")
        if self.config is not None and 'model_type' not in self.config:
            raise ValueError("'config' lacks the key 'model_type', such as llama")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainDataConfig:
    """JSON Lines with the key `text`, or text files with one document each; tokenized once, then memory-mapped."""

    path: tuple[str, ...]
    cache: str | None = None  # folder for the token ids; null: beside the first file
    packed: bool = True  # split the stream of documents and eos into blocks; false: one truncated row per document
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError('path: is an empty list; give at least one file')


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW, the only optimizer supported."""

    name: str = 'adamw'
    lr: float
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.name != 'adamw':
            raise ValueError(f'there is no optimizer {self.name!r}; allowed: adamw')
        if len(self.betas) != 2:
            raise ValueError(f'betas has {len(self.betas)} values; allowed: 2')


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """One of `SCHEDULERS`; times are Composer's (100ba, 0.1dur), `alpha_f` is the final factor of the learning rate."""

    name: str = 'constant_with_warmup'
    t_warmup: str = '0ba'
    alpha_f: float | None = None
    decay_share: float | None = None  # share of the training that decays, for warmup_stable_decay

    def __post_init__(self) -> None:
        if self.name not in SCHEDULERS:
            raise ValueError(f'there is no scheduler {self.name!r}{suggestion(self.name, SCHEDULERS)}')


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training YAML. Keys without a comment are arguments of Composer's Trainer."""

    tokenizer: TokenizerConfig
    model: ModelConfig
    train_data: TrainDataConfig
    optimizer: OptimizerConfig
    max_duration: str
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
    save_interval: str = '1ep'
    save_num_checkpoints_to_keep: int = -1
    save_overwrite: bool = False
    load_path: str | None = None
    autoresume: bool = False
    progress_bar: bool = False
    log_to_console: bool = True
    console_log_interval: str = '1ba'


def read_config(path: str, overrides: list[str], *, num_ranks: int = 1) -> tuple[TrainConfig, tuple[str, ...]]:
    """Return the checked settings of a YAML file with overrides such as `optimizer.lr=1e-3` applied.

    llm-foundry's top-level ICL keys are moved into the callback; the returned lines report the translation of each key.
    """
    mapped = map_training(read_yaml(path, overrides), source=path, num_ranks=num_ranks)
    problems = Problems(path)
    config = decode(TrainConfig, mapped.values, '', problems)
    if problems.found:
        raise ConfigError(problems.found)
    return config, mapped.lines
