"""The class Gauntlet in a plain loop of torch: the items, the training around it, its records and its errors."""

from __future__ import annotations

import copy
import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from composer.models import HuggingFaceModel

from llmfoundry_gauntlet import EvalGauntlet, evaluate
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.runtime.gauntlet import Gauntlet

THREADS = ('gauntlet-watchdog', 'gauntlet-progress')  # of an evaluation that is running
HOOKS = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')


@pytest.fixture(scope='module')
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings of tasks that are scored, and of tasks that are generated, in several batches; no records."""
    folder = tmp_path_factory.mktemp('tasks')
    paths = tiny.write_tasks(folder, tiny.write_riddles(folder, num_rows=4))
    return {**paths, 'tokens_per_batch': 200, 'save_folder': None}


@pytest.fixture
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return tiny.tokenizer()


def items_of(evaluation: Evaluation) -> dict[str, str]:
    """Return every item with its prediction, score, log-probabilities and text, as exact text."""
    return {str(result.key): repr(result) for results in evaluation.results.values() for result in results}


def metrics_of(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics for loggers without times."""
    return {key: value for key, value in evaluation.logged.items() if 'seconds' not in key}


def train(
    network: torch.nn.Module, at: Mapping[int, Callable[[], object]] | None = None, num_steps: int = 4
) -> torch.optim.Optimizer:
    """Train a network in a plain loop, with dropout; call functions before some of its steps. Return the optimizer."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in range(num_steps):
        if at is not None and step in at:
            at[step]()
        ids = torch.randint(3, 259, (2, 16))
        network(input_ids=ids, labels=ids).loss.backward()
        if step % 2:  # gradients are accumulated over two steps, and an evaluation may be between them
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def frozen_model() -> transformers.GPT2LMHeadModel:
    """Return a network in training mode, of which a part is frozen, in evaluation mode, and a part has a hook."""
    network = tiny.model().train()
    network.transformer.h[0].requires_grad_(False).eval()
    network.transformer.h[1].register_forward_hook(lambda *_: None)
    return network


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def content(value: Any) -> Any:
    """Return the bytes of a tensor; other values are returned unchanged."""
    return value.detach().numpy().tobytes() if torch.is_tensor(value) else value


def state_of(network: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, str]:
    """Return digests of all that an evaluation must leave as it was."""
    parameters = dict(network.named_parameters())
    moments = {} if optimizer is None else optimizer.state_dict()['state']
    kind, numbers, *position = np.random.get_state()
    hooks = [
        (name, hook.__qualname__)
        for name, part in network.named_modules()
        for kind in HOOKS
        for hook in getattr(part, kind).values()
    ]
    state = {
        'weights': [(name, content(value)) for name, value in network.state_dict().items()],
        'gradients': [(name, content(value.grad)) for name, value in parameters.items()],
        'optimizer': [(number, key, content(value)) for number, of in moments.items() for key, value in of.items()],
        'random state of Python': random.getstate(),
        'random state of NumPy': (kind, numbers.tobytes(), position),
        'random state of torch': content(torch.get_rng_state()),
        'modes': [(name, part.training) for name, part in network.named_modules()],
        'requires_grad': [(name, value.requires_grad) for name, value in parameters.items()],
        'hooks': hooks,
        'forwards': [name for name, part in network.named_modules() if 'forward' in vars(part)],
        'gradient mode': torch.is_grad_enabled(),
        'threads': sorted(thread.name for thread in threading.enumerate() if thread.name in THREADS),
    }
    return {name: digest(value) for name, value in state.items()}


# The same items, whatever runs them.


def test_a_plain_loop_the_callback_and_a_saved_folder_have_the_same_items_and_metrics(settings, tokenizer, tmp_path):
    """Mutations: the callback runs the model in training mode; `evaluate` loads other weights."""
    network = tiny.model().train()
    train(network)
    plain = Gauntlet(**settings).evaluate(network, tokenizer)

    callback = EvalGauntlet(**settings)
    trainer = tiny.trainer([callback], whole=HuggingFaceModel(copy.deepcopy(network), tokenizer=tokenizer))
    trainer.eval()
    trainer.close()

    of_folder = {key: value for key, value in settings.items() if key != 'save_folder'}
    saved = evaluate(tiny.save(network, tmp_path / 'model'), **of_folder, device='cpu')

    assert len(items_of(plain)) == 36
    for other in (callback.evaluation, saved):
        assert items_of(other) == items_of(plain)
        assert metrics_of(other) == metrics_of(plain)


def test_evaluations_compute_in_the_autocast_around_them_and_leave_none_of_its_casts_behind(settings, tokenizer):
    """Mutation: autocast keeps weights that the evaluation has cast without gradients, and training gets none."""
    network, gauntlet = tiny.model().train(), Gauntlet(**settings)
    in_float32 = gauntlet.evaluate(network, tokenizer)
    ids = torch.arange(3, 19)[None]
    with torch.autocast('cpu', dtype=torch.bfloat16):
        in_bfloat16 = gauntlet.evaluate(network, tokenizer)
        network(input_ids=ids, labels=ids).loss.backward()
    assert items_of(in_bfloat16).keys() == items_of(in_float32).keys()
    assert items_of(in_bfloat16) != items_of(in_float32)
    assert [name for name, value in network.named_parameters() if value.grad is None] == []


def test_wrappers_of_torch_compile_and_others_do_not_change_the_items(settings, tokenizer):
    network, gauntlet = tiny.model(), Gauntlet(**settings)
    expected = items_of(gauntlet.evaluate(network, tokenizer))
    compiled = torch.compile(network, backend='eager')
    assert items_of(gauntlet.evaluate(compiled, tokenizer)) == expected


# Training is as without evaluations.


def test_training_with_evaluations_is_bitwise_training_without(settings, tokenizer):
    """Mutations: `evaluation_mode` calls `train` at its end; one of the random states is not restored."""
    without = frozen_model()
    expected = state_of(without, train(without))

    network, gauntlet = frozen_model(), Gauntlet(**settings)
    changed: dict[int, dict[str, str]] = {}

    def evaluate_here(step: int) -> None:
        before = state_of(network)
        gauntlet.evaluate(network, tokenizer, step=step)
        after = state_of(network)
        changed[step] = {name: after[name] for name in after if after[name] != before[name]}

    optimizer = train(network, {step: lambda step=step: evaluate_here(step) for step in (0, 1, 3)})
    assert changed == {0: {}, 1: {}, 3: {}}
    assert state_of(network, optimizer) == expected


@contextmanager
def raising(network: torch.nn.Module, error: BaseException, at: int) -> Iterator[None]:
    """Raise an error at a number of forwards of the last block; draw random numbers before, as a model may."""
    block, num_forwards = network.transformer.h[1], 0
    forward = block.forward

    def fail(*arguments: Any, **keys: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == at:
            random.random(), np.random.rand(), torch.rand(1)
            raise error
        return forward(*arguments, **keys)

    block.forward = fail
    try:
        yield
    finally:
        del block.forward


@pytest.mark.parametrize('error', [ZeroDivisionError('injected'), KeyboardInterrupt()], ids=['error', 'interrupt'])
@pytest.mark.parametrize('at', ['probe', 'step'])
def test_an_evaluation_that_fails_leaves_training_unchanged_and_the_next_one_works(settings, tokenizer, error, at):
    """Mutations: `steps` is not closed after an error; `modes_kept` and `random_states_kept` without `finally`."""
    network = frozen_model()
    gauntlet = Gauntlet(**settings)
    if at == 'step':  # the probe's forwards are over
        expected = items_of(gauntlet.evaluate(network, tokenizer))
    else:
        expected = items_of(Gauntlet(**settings).evaluate(network, tokenizer))
    before = state_of(network)
    with raising(network, error, at=5), pytest.raises(type(error)):
        gauntlet.evaluate(network, tokenizer)
    assert state_of(network) == before
    assert gauntlet.evaluation is None
    assert items_of(gauntlet.evaluate(network, tokenizer)) == expected


def test_a_part_that_is_frozen_in_evaluation_mode_stays_so_in_a_trainer_of_composer(settings, tokenizer):
    """Mutation: `after_each_evaluation` without `modes_kept`: Composer puts all modules into training mode."""
    network, modes = tiny.model(), []

    def note() -> None:
        modes.append([part.training for part in network.modules()])

    def freeze() -> None:  # now, as `fit` puts all modules into training mode at its start
        network.transformer.h[0].eval()
        note()

    trainer = tiny.trainer(
        [tiny.AtBatches({1: freeze, 2: note, 3: note}), EvalGauntlet(**settings, interval='1ba')],
        max_duration='3ba',
        whole=HuggingFaceModel(network, tokenizer=tokenizer),
    )
    trainer.fit()
    trainer.close()
    assert len(modes) == 3 and True in modes[0] and False in modes[0]
    assert modes[1:] == modes[:1] * 2
