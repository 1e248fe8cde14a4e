"""The class Gauntlet in a plain loop of torch: the items, the training around it, its records and its errors."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import forks
import numpy as np
import programs
import pytest
import tiny
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.errors import ConfigError, ModelError, RecordError
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.runtime.distributed import global_rank
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


@pytest.fixture(scope='module')
def expected(settings) -> dict[str, str]:
    """Return the items of the network that `tiny.model` makes, evaluated by a Gauntlet of its own."""
    return items_of(Gauntlet(**settings).evaluate(tiny.model(), tiny.tokenizer()))


def items_of(evaluation: Evaluation) -> dict[str, str]:
    """Return every item with its prediction, score, log-probabilities and text, as exact text."""
    return {str(result.key): repr(result) for results in evaluation.results.values() for result in results}


def metrics_of(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics for loggers without times."""
    return {key: value for key, value in evaluation.logged.items() if 'seconds' not in key}


def train(
    network: torch.nn.Module,
    at: Mapping[int, Callable[[], object]] | None = None,
    num_steps: int = 4,
    *,
    is_autocast: bool = False,
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
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=is_autocast):
            loss = network(input_ids=ids, labels=ids).loss
        loss.backward()
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
    """Return the bytes of a tensor, or of this rank's shard of one; other values are returned unchanged."""
    value = value.to_local() if hasattr(value, 'to_local') else value
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
        'weights': [(name, content(value)) for name, value in parameters.items()],
        'buffers': [(name, content(value)) for name, value in network.named_buffers()],
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
    import composer_training  # skips the test without Composer
    from composer.models import HuggingFaceModel

    from llmfoundry_gauntlet import EvalGauntlet

    network = tiny.model().train()
    train(network)
    plain = Gauntlet(**settings).evaluate(network, tokenizer)

    callback = EvalGauntlet(**settings)
    trainer = composer_training.trainer([callback], whole=HuggingFaceModel(copy.deepcopy(network), tokenizer=tokenizer))
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


def test_a_compiled_model_has_the_same_items(settings, tokenizer, expected):
    compiled = torch.compile(tiny.model(), backend='eager')
    assert items_of(Gauntlet(**settings).evaluate(compiled, tokenizer)) == expected


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
def test_an_evaluation_that_fails_leaves_training_unchanged_and_the_next_one_works(
    settings, tokenizer, expected, error, at
):
    """Mutations: `steps` is not closed after an error; `modes_kept` and `random_states_kept` without `finally`."""
    network = frozen_model()
    gauntlet = Gauntlet(**settings)
    if at == 'step':  # after an evaluation, whose probes hold
        gauntlet.evaluate(network, tokenizer)
    before = state_of(network)
    with raising(network, error, at=5), pytest.raises(type(error)):
        gauntlet.evaluate(network, tokenizer)
    assert state_of(network) == before
    assert gauntlet.evaluation is None
    assert items_of(gauntlet.evaluate(network, tokenizer)) == expected


def test_a_part_that_is_frozen_in_evaluation_mode_stays_so_in_a_trainer_of_composer(settings, tokenizer):
    """Mutation: `after_each_evaluation` without `modes_kept`: Composer puts all modules into training mode."""
    import composer_training  # skips the test without Composer
    from composer.models import HuggingFaceModel

    from llmfoundry_gauntlet import EvalGauntlet

    network, modes = tiny.model(), []

    def note() -> None:
        modes.append([part.training for part in network.modules()])

    def freeze() -> None:  # now, as `fit` puts all modules into training mode at its start
        network.transformer.h[0].eval()
        note()

    trainer = composer_training.trainer(
        [composer_training.AtBatches({1: freeze, 2: note, 3: note}), EvalGauntlet(**settings, interval='1ba')],
        max_duration='3ba',
        whole=HuggingFaceModel(network, tokenizer=tokenizer),
    )
    trainer.fit()
    trainer.close()
    assert len(modes) == 3 and True in modes[0] and False in modes[0]
    assert modes[1:] == modes[:1] * 2


# Records.


@pytest.fixture
def scored(tmp_path: Path) -> dict[str, Any]:
    """Return the settings of tasks that are scored, in several batches, with records below the test's folder."""
    return {**tiny.write_tasks(tmp_path), 'tokens_per_batch': 60, 'save_folder': tmp_path / 'runs'}


def reused_items(folder: Path) -> int:
    """Return the number of items in the records of an evaluation that an earlier attempt had finished."""
    number: int = tiny.record(folder)['timing']['reused_items']
    return number


def interrupted(settings: Mapping[str, Any], network: torch.nn.Module, tokenizer: Any) -> int:
    """Interrupt an evaluation at step 10, in its last steps; return the number of items in its journal."""
    num_forwards = count_forwards(Gauntlet(**{**settings, 'save_folder': None}), network, tokenizer)
    with raising(network, KeyboardInterrupt(), at=num_forwards - 2), pytest.raises(KeyboardInterrupt):
        Gauntlet(**settings).evaluate(network, tokenizer, step=10)
    folder = Path(settings['save_folder']) / 'ba10'
    assert not (folder / 'results.json').exists()
    return tiny.finished_items(folder)


def count_forwards(gauntlet: Gauntlet, network: torch.nn.Module, tokenizer: Any) -> int:
    """Return the number of forwards of an evaluation, including those of its probe."""
    calls: list[None] = []
    handle = network.transformer.h[1].register_forward_hook(lambda *_: calls.append(None))
    gauntlet.evaluate(network, tokenizer)
    handle.remove()
    return len(calls)


def items_without_records(settings: Mapping[str, Any], network: torch.nn.Module, tokenizer: Any) -> dict[str, str]:
    return items_of(Gauntlet(**{**settings, 'save_folder': None}).evaluate(network, tokenizer))


def test_an_interrupted_evaluation_is_resumed_by_another_job_at_the_same_weights(scored, tokenizer):
    """Mutation: the identity of the journal has no digest of the weights, so other weights get the items of these."""
    network = tiny.model()
    folder = scored['save_folder'] / 'ba10'
    num_finished = interrupted(scored, network, tokenizer)
    assert 0 < num_finished < 28

    resumed = Gauntlet(**scored).evaluate(network, tokenizer, step=10)

    assert reused_items(folder) == num_finished
    assert not (folder / 'journal').exists()
    assert items_of(resumed) == items_without_records(scored, network, tokenizer)


def test_an_interrupted_evaluation_is_not_resumed_at_another_step(scored, tokenizer):
    assert interrupted(scored, tiny.model(), tokenizer) > 0

    Gauntlet(**scored).evaluate(tiny.model(), tokenizer, step=20)

    assert reused_items(scored['save_folder'] / 'ba20') == 0


def test_an_interrupted_evaluation_is_not_resumed_with_other_weights(scored, tokenizer):
    assert interrupted(scored, tiny.model(), tokenizer) > 0
    other_network = tiny.model(seed=1)

    evaluation = Gauntlet(**scored).evaluate(other_network, tokenizer, step=10)

    folder = scored['save_folder'] / 'ba10'
    assert reused_items(folder) == 0
    assert tiny.record(folder)['training']['batch'] == 10
    assert items_of(evaluation) == items_without_records(scored, other_network, tokenizer)


@pytest.mark.parametrize(
    ('save_folder', 'run_name', 'step', 'folder'),
    [
        ('runs/{run_name}/gauntlet', 'first', 3, 'runs/first/gauntlet/ba3'),
        ('runs/{run_name}/gauntlet', 'first', None, 'runs/first/gauntlet'),
        ('runs/{run_name}/gauntlet', None, 3, None),
        ('runs', None, 0, 'runs/ba0'),
        (None, 'first', 3, None),
    ],
)
def test_records_are_in_the_folder_of_the_run_and_the_step(
    scored, tokenizer, tmp_path, monkeypatch, save_folder, run_name, step, folder
):
    monkeypatch.chdir(tmp_path)
    settings = {**scored, 'only': 'sums', 'save_folder': save_folder}
    evaluation = Gauntlet(run_name=run_name, **settings).evaluate(tiny.model(), tokenizer, step=step)
    written = [path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob('results.json')]
    assert written == ([] if folder is None else [folder])
    if folder is not None:
        record = tiny.record(tmp_path / folder)
        assert record['model']['name'] == run_name
        assert (record['training'] or {}).get('batch') == step
        assert metrics_of(evaluation).items() <= record['metrics'].items()


def test_records_that_cannot_be_written_are_a_warning_in_training_else_an_error(scored, tokenizer, caplog):
    """Mutation: an error of the disk ends a training of days."""
    network, gauntlet, folder = tiny.model(), Gauntlet(**scored), scored['save_folder']
    gauntlet.prepare(network, tokenizer)
    folder.mkdir()
    (folder / 'ba10').write_text('in the way of a folder')
    expected = Gauntlet(**{**scored, 'save_folder': None}).evaluate(network, tokenizer)
    evaluation = gauntlet.evaluate(network, tokenizer, step=10)
    assert items_of(evaluation) == items_of(expected)
    assert 'there are no records; training continues' in caplog.text
    gauntlet.evaluate(network, tokenizer, step=20)
    assert (folder / 'ba20/results.json').is_file()

    in_the_way = Gauntlet(**{**scored, 'save_folder': folder / 'ba30'})
    in_the_way.prepare(network, tokenizer)
    (folder / 'ba30').write_text('in the way of a folder')
    with pytest.raises((RecordError, OSError)):
        in_the_way.evaluate(network, tokenizer)


# Models and settings.


def test_another_tokenizer_prepares_the_items_anew(scored, tokenizer):
    """Mutation: items that another tokenizer has made are evaluated."""
    other = tiny.tokenizer()
    other._tokenizer.post_processor = None  # no bos
    network, settings = tiny.model(), {**scored, 'save_folder': None}
    gauntlet = Gauntlet(**settings)
    with_bos = gauntlet.evaluate(network, tokenizer)
    without_bos = gauntlet.evaluate(network, other)
    assert items_of(without_bos) == items_of(Gauntlet(**settings).evaluate(network, other)) != items_of(with_bos)
    assert items_of(gauntlet.evaluate(network, tokenizer)) == items_of(with_bos)


class WithoutConfig(torch.nn.Module):
    """A model that is no Hugging Face model."""


class WithoutParameters(torch.nn.Module):
    """A model with nothing to evaluate."""

    config = tiny.model().config


def test_models_without_config_parameters_or_tokenizer_are_errors(scored, tokenizer):
    gauntlet = Gauntlet(**scored)
    with pytest.raises(ModelError, match='WithoutConfig without a config'):
        gauntlet.evaluate(WithoutConfig(), tokenizer)
    with pytest.raises(ModelError, match='WithoutParameters without parameters'):
        gauntlet.evaluate(WithoutParameters(), tokenizer)
    with pytest.raises(ModelError, match='no tokenizer'):
        gauntlet.evaluate(tiny.model(), None)


@pytest.mark.parametrize(
    ('wrong', 'facts'),
    [
        ({'interval': '500ba'}, 'interval.*EvalGauntlet'),
        ({'subset_item': 3}, "subset_item'.*subset_items"),
        ({'semantics': 'correct'}, 'semantics.*corrected'),
    ],
)
def test_wrong_settings_are_errors_of_the_constructor(scored, wrong, facts):
    with pytest.raises(ConfigError, match=facts):
        Gauntlet(**scored, **wrong)


def test_the_subset_of_a_time_budget_is_the_same_at_every_evaluation_also_of_a_later_job(scored, tokenizer):
    """Mutation: each evaluation chooses a subset of its own, so that their scores cannot be compared."""
    settings = {**scored, 'save_folder': None, 'time_budget': '1h'}
    gauntlet = Gauntlet(**settings)
    assert gauntlet.sizes is None
    first = gauntlet.evaluate(tiny.model(), tokenizer)
    sizes = {f'{task}/{shots}-shot': len(rows) for task, (_, rows) in tiny.TASKS.items() for shots in (0, 2)}
    assert gauntlet.sizes == sizes  # there is time for all
    assert items_of(gauntlet.evaluate(tiny.model(), tokenizer)) == items_of(first)

    later_job, fewer = Gauntlet(**settings), {**sizes, 'sums/0-shot': 3, 'colours/2-shot': 4}
    later_job.prepare(tiny.model(), tokenizer)
    later_job.use_subset(fewer)
    of_subset, again = [items_of(later_job.evaluate(tiny.model(), tokenizer)) for _ in range(2)]
    assert of_subset == again
    assert of_subset.keys() < items_of(first).keys()
    assert len(of_subset) == sum(fewer.values())
    assert later_job.sizes == fewer


def test_a_precision_target_runs_a_part_of_the_items(scored, tokenizer):
    """Mutation: the subset is of the settings alone, and the items are all of them."""
    sums = [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(100)]
    tiny.write_rows(Path(scored['data_root']) / 'sums.jsonl', sums)
    gauntlet = Gauntlet(**{**scored, 'save_folder': None}, precision_target='20%')
    evaluation = gauntlet.evaluate(tiny.model(), tokenizer)
    assert 2 <= evaluation.scores['sums/0-shot'].num_items < 100
    assert evaluation.scores['pronouns/0-shot'].num_items == 2  # which determines the error


# Several ranks.


def test_ranks_of_a_launcher_without_a_process_group_are_an_error_that_says_what_to_do(scored, tokenizer, monkeypatch):
    """Mutation: each of them evaluates alone, and all write to the same folder."""
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: False)  # another test may have made a group
    monkeypatch.setenv('RANK', '0')
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(RuntimeError, match=r'WORLD_SIZE=2.*init_process_group.*unset RANK'):
        Gauntlet(**scored).evaluate(tiny.model(), tokenizer)


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of the tasks in a folder, without records."""
    return {**tiny.settings_of(folder), 'tokens_per_batch': 60, 'save_folder': None}


def write_outcome(folder: Path, outcome: Any) -> None:
    """Write what this rank has found, and wait for the others: one that exits early resets their connections."""
    (folder / f'rank{global_rank()}.json').write_text(json.dumps(outcome))
    torch.distributed.barrier()


def outcomes(folder: Path, job: Callable[..., None], *arguments: Any, num_ranks: int = 2) -> list[Any]:
    """Run a job on some ranks and return what each has written."""
    forks.run(job, folder / 'log.txt', folder, *arguments, num_ranks=num_ranks)
    return [json.loads((folder / f'rank{rank}.json').read_text()) for rank in range(num_ranks)]


def wrapped_on_one_rank(folder: Path) -> None:
    """Evaluate a network alone, and in the wrapper of data parallelism, compiled and not, as the only rank of a job."""
    torch.distributed.init_process_group('gloo')
    gauntlet = Gauntlet(**settings_in(folder))
    network = tiny.model().train()
    wrapped = DistributedDataParallel(network)
    compiled = torch.compile(wrapped, backend='eager')

    items = {
        name: items_of(gauntlet.evaluate(model, tiny.tokenizer()))
        for name, model in {'alone': network, 'wrapped': wrapped, 'compiled': compiled}.items()
    }

    write_outcome(folder, {'items': items, 'is_in_training': wrapped.training})


@pytest.mark.slow
def test_the_wrapper_of_data_parallelism_does_not_change_the_items(tmp_path):
    tiny.write_tasks(tmp_path)

    (outcome,) = outcomes(tmp_path, wrapped_on_one_rank, num_ranks=1)

    items = outcome['items']
    assert len(items['alone']) == 28
    assert items['wrapped'] == items['alone']
    assert items['compiled'] == items['alone']
    assert outcome['is_in_training']


def sharded_by_fsdp1(network: Any) -> Any:
    """Shard a network and each of its blocks over all ranks, with FSDP1."""
    policy = ModuleWrapPolicy({type(network.transformer.h[0])})
    return FullyShardedDataParallel(network, auto_wrap_policy=policy, device_id=torch.device('cpu'))


def sharded(network: Any) -> Any:
    """Shard a network and each of its blocks over all ranks, with FSDP2."""
    mesh = init_device_mesh('cpu', (torch.distributed.get_world_size(),))
    for block in network.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    'no wrapper': lambda network: network,
    'DDP': DistributedDataParallel,
    'FSDP1': sharded_by_fsdp1,
    'fully_shard': sharded,
}
WAYS = {  # to train and evaluate: in the autocast of bfloat16 or not, compiled or not
    'plain': (False, False),
    'autocast': (True, False),
    'compiled, autocast': (True, True),
}


def evaluate_into(items: list[dict[str, str]], gauntlet: Gauntlet, model: Any, *, is_autocast: bool) -> None:
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=is_autocast):
        items.append(items_of(gauntlet.evaluate(model, tiny.tokenizer())))


def train_on_ranks(folder: Path, wrapper: str) -> None:
    """Train with evaluations and without; write the items of the evaluations, and both final states, by way."""
    torch.distributed.init_process_group('gloo')
    found = {}
    for way, (is_autocast, is_compiled) in WAYS.items():
        gauntlet = Gauntlet(**settings_in(folder))
        items: list[dict[str, str]] = []
        states = []
        for steps in ((1, 3), ()):
            model = WRAPPERS[wrapper](tiny.model().train())
            called = torch.compile(model, backend='eager') if is_compiled else model
            evaluate_here = partial(evaluate_into, items, gauntlet, called, is_autocast=is_autocast)
            optimizer = train(called, dict.fromkeys(steps, evaluate_here), is_autocast=is_autocast)
            states.append(state_of(model, optimizer))
        num_parameters = gauntlet.num_parameters
        found[way] = {'items': items, 'with': states[0], 'without': states[1], 'num_parameters': num_parameters}
    write_outcome(folder, found)


@pytest.mark.slow
@pytest.mark.parametrize('wrapper', WRAPPERS)
def test_two_ranks_have_the_items_of_a_saved_folder_and_train_as_without_evaluations(tmp_path, tokenizer, wrapper):
    """In a loop of torch, compiled or not, in autocast or not; bitwise those that `gauntlet run` has from one process.

    Mutations: ranks score their own items alone; weights stay gathered after an evaluation.
    """
    tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path, num_rows=4))
    first, second = outcomes(tmp_path, train_on_ranks, wrapper)
    of_folder = {name: value for name, value in settings_in(tmp_path).items() if name != 'save_folder'}
    folder = tiny.save(tiny.model(), tmp_path / 'model')
    in_float32 = items_of(evaluate(folder, **of_folder, device='cpu'))
    with torch.autocast('cpu', dtype=torch.bfloat16):  # in which no command evaluates on a CPU
        in_bfloat16 = items_of(Gauntlet(**settings_in(tmp_path)).evaluate(tiny.model(), tokenizer))

    assert len(in_float32) == 36 and in_bfloat16 != in_float32
    for way, (is_autocast, _) in WAYS.items():
        expected = in_bfloat16 if is_autocast else in_float32
        assert first[way]['items'] == second[way]['items'], way
        assert first[way]['items'][0] == expected, way
        assert first[way]['items'][1] != expected, way  # after a step of the optimizer
        for rank in (first, second):
            assert rank[way]['with'] == rank[way]['without'], way
            assert rank[way]['num_parameters'] == sum(weight.numel() for weight in tiny.model().parameters()), way


DIFFERENCES = {
    'subset_items': 'ranks 0 and 1 differ in subset_items: None and 3',
    'data': 'ranks 0 and 1 differ in rows of the data files',
    'programs': 'ranks 0 and 1 differ in tasks that can run',
    'max_seq_len': 'ranks 0 and 1 differ in max_seq_len of the model: 128 and 16',
    'tokenizer': 'the model has no tokenizer',
}


def evaluate_differently(folder: Path, difference: str) -> None:
    """Evaluate on two ranks of which the second differs; write the error and the number of forwards."""
    torch.distributed.init_process_group('gloo', timeout=timedelta(seconds=30))
    settings, network, tokenizer = settings_in(folder), tiny.model(), tiny.tokenizer()
    if global_rank() == 1:
        if difference == 'subset_items':
            settings['subset_items'] = 3
        elif difference == 'data':
            settings['data_root'] = str(folder / 'other')
        elif difference == 'programs':
            os.environ['PATH'] = ''  # without a sandbox
        elif difference == 'tokenizer':
            tokenizer = None
        else:
            network.config.n_positions = 16
    calls: list[None] = []
    network.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        Gauntlet(**settings).evaluate(network, tokenizer)
    except (ConfigError, ModelError) as error:
        write_outcome(folder, [type(error).__name__, str(error), len(calls)])


@pytest.mark.slow
@pytest.mark.parametrize('difference', DIFFERENCES)
def test_ranks_that_differ_have_the_same_error_before_any_forward(tmp_path, difference):
    """Mutations: a rank checks itself alone; the other rank waits for it until the collective times out."""
    if difference == 'programs':
        programs.sandbox()  # skips the test where there is none
    more = [tiny.write_programs(tmp_path)] if difference == 'programs' else []
    tiny.write_tasks(tmp_path, more)
    shutil.copytree(tmp_path, tmp_path / 'other')
    rows = (tmp_path / 'sums.jsonl').read_text().replace('"3+3="', '"3+4="')
    (tmp_path / 'other/sums.jsonl').write_text(rows)
    first, second = outcomes(tmp_path, evaluate_differently, difference)
    assert first == second
    kind, message, num_forwards = first
    assert kind == ('ModelError' if difference == 'tokenizer' else 'ConfigError')
    assert DIFFERENCES[difference] in message
    assert num_forwards == 0
