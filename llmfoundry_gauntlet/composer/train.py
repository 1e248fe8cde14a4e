"""`gauntlet train`: train a causal language model on text with Composer, from a YAML file.

The loss is next-token cross-entropy. The gauntlet is configured as an entry of `callbacks`.
"""

from __future__ import annotations

import sys
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
from composer.core import State
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from composer.utils import dist, reproducibility
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from llmfoundry_gauntlet.composer.callback import EvalGauntlet
from llmfoundry_gauntlet.composer.evaluate import check_fsdp, check_precision, default_device
from llmfoundry_gauntlet.composer.loggers import Builders, build_each, build_loggers
from llmfoundry_gauntlet.composer.models import composer_model, load_tokenizer, mark_blocks_for_fsdp
from llmfoundry_gauntlet.composer.text_data import build_dataloader
from llmfoundry_gauntlet.config.training import ModelConfig, TrainConfig, read_config
from llmfoundry_gauntlet.errors import ConfigError
from llmfoundry_gauntlet.results.report.printing import print_runs


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
    *('max_duration', 'run_name', 'seed', 'device', 'device_train_microbatch_size', 'precision', 'dist_timeout'),
    *('eval_interval', 'save_folder', 'save_interval', 'save_num_checkpoints_to_keep', 'save_overwrite', 'load_path'),
    *('autoresume', 'log_to_console', 'console_log_interval'),
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
    rows, rest = divmod(config.global_train_batch_size, dist.get_world_size())
    if rest or not rows:
        found = f'{config.global_train_batch_size} rows for {dist.get_world_size()} ranks'
        raise ConfigError(f'global_train_batch_size: {found}; allowed: a multiple of the number of ranks')
    return rows


def build_trainer(config: TrainConfig) -> Trainer:
    """Build the Trainer with all its components; the weights of a new model depend only on the seed."""
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    callbacks = build_each('callbacks', CALLBACKS, config.callbacks)  # first, because they validate tasks and data
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
        algorithms=build_each('algorithms', ALGORITHMS, config.algorithms),
        callbacks=callbacks,
        loggers=build_loggers(config.loggers),
        parallelism_config=None if config.fsdp_config is None else {'fsdp': config.fsdp_config},
        progress_bar=config.progress_bar and sys.stderr.isatty(),  # in a log file it would be thousands of lines
        **{key: getattr(config, key) for key in UNCHANGED},
    )


def print_evaluations(trainer: Trainer) -> None:
    """Print the scores of all evaluations of the training, and the folders of records and checkpoints."""
    for callback in trainer.state.callbacks:
        if isinstance(callback, EvalGauntlet) and callback.records.folder is not None:
            print_runs(callback.records.folder)
        if isinstance(callback, CheckpointSaver):
            print(f'checkpoints: {callback.folder}')


def train(path: str, overrides: list[str]) -> None:
    """Train from a YAML file and print the scores. Raise GauntletError."""
    config, lines = read_config(path, overrides, num_ranks=dist.get_world_size())
    if lines and dist.get_global_rank() == 0:
        print('\n'.join(lines), flush=True)
    device = config.device or default_device()
    check_fsdp(config.fsdp_config, device)
    if config.precision is not None:
        check_precision(config.precision, device)
    trainer = build_trainer(config)
    state = trainer.state
    if state.max_duration is not None and state.timestamp >= state.max_duration:  # `fit` would raise an error
        print(f'nothing is left to train: the checkpoint is of batch {state.timestamp.batch.value}')
    else:
        trainer.fit()
    trainer.close()
    if dist.get_global_rank() == 0:
        print_evaluations(trainer)
