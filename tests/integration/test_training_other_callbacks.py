"""Evaluations beside other callbacks, algorithms, evaluators and models: those that change what is evaluated."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import composer_training
import forks
import networks
import pytest
import tiny
import torch
from composer import Callback, Evaluator, Event, Logger, State, Trainer
from composer.algorithms import EMA
from composer.callbacks import EarlyStopper, ThresholdStopper
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from tiny import finished_items, outcome, record
from torch.utils.data import DataLoader

from llmfoundry_gauntlet import ConfigError, EvalGauntlet, ModelError, build_icl_evaluators
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.types import ItemResult

ORDERS = ['before', 'after']  # of the other callback, to the gauntlet
Results = Mapping[str, tuple[ItemResult, ...]]


@pytest.fixture
def make(tiny_settings: dict[str, str], tmp_path: Path) -> Callable[..., EvalGauntlet]:
    """Return a function that makes the callback; its records are written to the test's `records`."""
    return lambda **more: EvalGauntlet(**{**tiny_settings, 'save_folder': str(tmp_path / 'records'), **more})


def in_order(order: str, other: Callback, gauntlet: EvalGauntlet) -> list[Callback]:
    return [other, gauntlet] if order == 'before' else [gauntlet, other]


def evaluated_alone(settings: dict[str, Any], network: Any) -> Results:
    """Return the results of a network that nobody trains or changes."""
    gauntlet = EvalGauntlet(**settings, save_folder=None)
    trainer = Trainer(
        model=composer_training.composer_model(network), callbacks=[gauntlet], device='cpu', progress_bar=False
    )
    trainer.eval()
    trainer.close()
    return gauntlet.evaluation.results


class Swap(Callback):
    """Put the weights of a fixed network in place for evaluations, between two events, as an average would be."""

    def __init__(self, begin: Event, end: Event) -> None:
        self.begin, self.end = begin, end
        self.fixed = list(tiny.model(seed=5).parameters())
        self.others: list[torch.Tensor] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.FIT_START:
            self.others = [parameter.detach().clone() for parameter in self.fixed]
        if event in (self.begin, self.end):
            for parameter, other in zip(state.model.parameters(), self.others, strict=True):
                swapped_out = parameter.detach().clone()
                parameter.data.copy_(other)
                other.copy_(swapped_out)


class Kept(Callback):
    """Keep the results of each evaluation at its end, by batch."""

    def __init__(self, gauntlet: EvalGauntlet) -> None:
        self.gauntlet = gauntlet
        self.by_batch: dict[int, Results] = {}

    def eval_end(self, state: State, logger: Logger) -> None:
        self.by_batch[state.timestamp.batch.value] = self.gauntlet.evaluation.results


@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize(
    ('begin', 'end'),
    [
        (Event.EVAL_START, Event.EVAL_END),
        (Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL),
    ],
)
def test_the_weights_that_a_callback_swaps_in_are_evaluated(tiny_settings, make, order, begin, end):
    """Also before the first step and at the end; training goes on with its own. The first is prepared at FIT_START."""
    expected = evaluated_alone(tiny_settings, tiny.model(seed=5))
    gauntlet = make(interval=['first', '2ba', 'last'])
    kept = Kept(gauntlet)

    trained = composer_training.train([kept, *in_order(order, Swap(begin, end), gauntlet)], max_duration='3ba')
    weights = composer_training.digests(trained)['weights']

    assert list(kept.by_batch) == [0, 2, 3]
    assert all(results == expected for results in kept.by_batch.values())
    assert weights == composer_training.digests(composer_training.train([], max_duration='3ba'))['weights']


class Average(Callback):
    """Evaluate the running mean of the weights."""

    def __init__(self) -> None:
        self.mean: list[torch.Tensor] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        weights = [parameter.detach().clone() for parameter in state.model.parameters()]
        self.mean = [(old + new) / 2 for old, new in zip(self.mean or weights, weights, strict=True)]

    def eval_start(self, state: State, logger: Logger) -> None:
        for parameter, mean in zip(state.model.parameters(), self.mean, strict=True):
            swapped_out = parameter.detach().clone()
            parameter.data.copy_(mean)
            mean.copy_(swapped_out)

    eval_end = eval_start

    def state_dict(self) -> dict[str, Any]:
        return {'mean': self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state['mean']


def interrupt() -> None:
    raise KeyboardInterrupt


def last_of_training(
    folder: Path, settings: dict[str, str], order: str, kind: str, trouble: list[Callback]
) -> tuple[Any, int]:
    """Train for four batches with averaged weights, evaluated at the end; return its outcome and reused items."""
    gauntlet = EvalGauntlet(**settings, interval='last', tokens_per_batch=60, save_folder=str(folder / 'records'))
    algorithms = [EMA(half_life='1ba', update_interval='1ba')] if kind == 'EMA' else []
    averaging = in_order(order, Average(), gauntlet) if kind == 'own' else [gauntlet]
    saved = {'save_folder': str(folder / 'ck'), 'save_interval': '2ba', 'autoresume': True, 'run_name': 'averaged'}
    trainer = composer_training.trainer([*averaging, *trouble], max_duration='4ba', algorithms=algorithms, **saved)
    with contextlib.closing(trainer), contextlib.suppress(KeyboardInterrupt):
        if trainer.state.timestamp < trainer.state.max_duration:
            trainer.fit()
    records = folder / 'records/ba4'
    if not (records / 'results.json').exists():
        return None, finished_items(records)
    return outcome(records), record(records)['timing']['reused_items']


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(('kind', 'order'), [('own', 'before'), ('own', 'after'), ('EMA', '')])
def test_an_interrupted_evaluation_of_averaged_weights_is_finished_with_them(tmp_path, tiny_settings, kind, order):
    """The items before and after are of the same weights: those that score, not those of training."""
    expected, _ = last_of_training(tmp_path / 'whole', tiny_settings, order, kind, [])
    not_averaged, _ = last_of_training(tmp_path / 'plain', tiny_settings, order, 'none', [])
    assert not_averaged != expected

    stop = [composer_training.AtEvaluation(4, interrupt, step=4)]
    interrupted, num_finished = last_of_training(tmp_path / 'cut', tiny_settings, order, kind, stop)
    assert interrupted is None
    assert num_finished > 0

    resumed, num_reused = last_of_training(tmp_path / 'cut', tiny_settings, order, kind, [])
    assert resumed == expected
    assert num_reused == num_finished


def averaged_on_ranks(folder: str) -> None:
    """Evaluate swapped weights before training, and averaged ones at its end: in one go, interrupted, and resumed."""
    settings = tiny.settings_of(Path(folder))
    gauntlet = EvalGauntlet(**settings, interval='first', tokens_per_batch=60, save_folder=f'{folder}/swapped')
    composer_training.train([gauntlet, Swap(Event.EVAL_START, Event.EVAL_END)], max_duration='1ba')

    whole, cut = Path(folder) / 'whole', Path(folder) / 'cut'
    last_of_training(whole, settings, 'after', 'own', [])
    last_of_training(cut, settings, 'after', 'own', [composer_training.AtEvaluation(4, interrupt, step=3)])
    last_of_training(cut, settings, 'after', 'own', [])


@pytest.mark.slow
def test_ranks_evaluate_the_weights_that_callbacks_put_in_place(tmp_path, tiny_settings):
    forks.run(averaged_on_ranks, tmp_path / 'log', str(tmp_path), num_ranks=2)
    alone = EvalGauntlet(**tiny_settings, tokens_per_batch=60, save_folder=str(tmp_path / 'alone'))
    trainer = Trainer(
        model=composer_training.composer_model(tiny.model(seed=5)), callbacks=[alone], device='cpu', progress_bar=False
    )
    trainer.eval()
    trainer.close()
    assert outcome(tmp_path / 'swapped/ba0') == outcome(tmp_path / 'alone')
    assert outcome(tmp_path / 'cut/records/ba4') == outcome(tmp_path / 'whole/records/ba4')
    assert record(tmp_path / 'cut/records/ba4')['timing']['reused_items'] > 0


def merged(model: HuggingFaceModel) -> None:
    model.model = tiny.model(seed=7)


def other_family(model: HuggingFaceModel) -> None:
    model.model = networks.network(vocab_size=259, max_position_embeddings=256)


def other_layer(model: HuggingFaceModel) -> None:
    model.model.transformer.h[1] = tiny.model(seed=7).transformer.h[0]


@pytest.mark.parametrize('replace', [merged, other_family, other_layer])
def test_the_network_that_is_there_when_an_evaluation_begins_is_evaluated(tmp_path, tiny_settings, make, replace):
    """After a training with its own network, and with generation. The record counts its parameters."""
    tasks = [*read_yaml(tiny_settings['tasks'])['icl_tasks'], *tiny.write_riddles(tmp_path, num_rows=6)]
    gauntlet = make(tasks=tasks, interval=['first', 'last'])
    trainer = composer_training.trainer([gauntlet], max_duration='2ba')
    trainer.fit()
    results_of_training = gauntlet.evaluation.results

    replace(trainer.state.model)
    trainer.eval()
    trainer.close()

    network = trainer.state.model.model
    expected = evaluated_alone({**tiny_settings, 'tasks': tasks}, copy.deepcopy(network))
    assert gauntlet.evaluation.results == expected
    assert expected != results_of_training
    assert record(tmp_path / 'records/ba2')['model']['num_parameters'] == network.num_parameters()


@pytest.mark.parametrize(
    ('sizes', 'problem'),
    [
        # Too few positions.
        ({'vocab_size': 259, 'max_position_embeddings': 8}, r'positions for 8 tokens, but an item has \d+'),
        # Too few tokens.
        ({'vocab_size': 60, 'max_position_embeddings': 256}, r'for 60 tokens, but an item has the token id \d+'),
    ],
)
def test_a_network_in_its_place_that_cannot_run_the_items_is_an_error(make, sizes: dict[str, int], problem: str):
    trainer = composer_training.trainer([make(max_seq_len=128)])
    trainer.state.model.model = networks.network(**sizes)

    with pytest.raises(ModelError, match=problem):
        trainer.eval()

    trainer.close()


def evaluator_of_own_rows() -> Evaluator:
    """Return an evaluator of the user's own data."""
    ids = torch.arange(3, 35).reshape(2, 16)
    rows = [{'input_ids': row, 'attention_mask': torch.ones_like(row), 'labels': row} for row in ids]
    return Evaluator(label='own', dataloader=DataLoader(rows, batch_size=2), metric_names=[])


def threads_of_evaluations() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(('gauntlet-watchdog', 'gauntlet-progress'))]


class Failing(Callback):
    """Raise an error once, at this event of an evaluation."""

    def __init__(self, event: Event, error: type[BaseException]) -> None:
        self.event, self.error = event, error
        self.has_raised = False

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == self.event and not self.has_raised:
            self.has_raised = True
            raise self.error


@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize(
    ('event', 'error'),
    [
        (Event.EVAL_START, ConnectionError),
        (Event.EVAL_BATCH_START, KeyboardInterrupt),
        (Event.EVAL_BATCH_END, ConnectionError),
        (Event.EVAL_END, KeyboardInterrupt),
    ],
)
def test_nothing_of_an_evaluation_that_failed_outlives_it(tiny_settings, make, order, event, error):
    """The error is kept, as a notebook keeps the last: its traceback holds the frames of the evaluation."""
    gauntlet = make(interval=['2ba', 'last'], stall_seconds=60)
    trainer = composer_training.trainer(in_order(order, Failing(event, error), gauntlet), max_duration='4ba')
    model = trainer.state.model
    forward, train_loader = model.eval_forward, trainer.state.dataloader

    with pytest.raises(error) as kept:
        trainer.fit()

    assert model.eval_forward == forward
    assert 'eval_forward' not in vars(model)
    assert threads_of_evaluations() == []
    assert trainer.state.dataloader is train_loader
    assert trainer.state.dataloader_label == 'train'

    # The user's own evaluation and the rest of the training are as if nothing had been.
    trainer.eval(eval_dataloader=evaluator_of_own_rows())
    trainer.fit()
    trainer.close()
    assert trainer.state.timestamp.batch == 4
    assert gauntlet.evaluation.results == evaluated_alone(tiny_settings, copy.deepcopy(model.model))
    assert kept.value is not None


def test_a_trainer_is_freed_as_soon_as_one_without_the_callback(make):
    """Composer closes it then. Mutation: the clean-up after evaluations refers to its Trainer."""
    composer_training.train([], max_duration='1ba')  # the first of a process is held by what it imports
    gc.collect()
    gc.disable()
    try:
        trainer = composer_training.train([make(interval=['first', 'last'])], max_duration='1ba')
        freed = weakref.ref(trainer)
        del trainer
        assert freed() is None
    finally:
        gc.enable()


def only_sums(settings: dict[str, str]) -> dict[str, Any]:
    """Return the settings of a callback that evaluates one of the tasks."""
    (sums,) = [task for task in read_yaml(settings['tasks'])['icl_tasks'] if task['label'] == 'sums']
    return {'tasks': [sums], 'gauntlet': None}


@pytest.mark.parametrize(
    ('first', 'second'),
    [
        ('records', 'records'),
        ('records', './x/../records/'),
        ('{run_name}', 'my-run'),
    ],
)
def test_two_callbacks_with_one_folder_are_an_error_that_names_both(
    tmp_path, tiny_settings, make, first: str, second: str
):
    gauntlets = [
        make(**only_sums(tiny_settings), save_folder=f'{tmp_path}/{first}'),
        make(save_folder=f'{tmp_path}/{second}'),
    ]

    with pytest.raises(ConfigError) as raised:
        composer_training.trainer(gauntlets, run_name='my-run')

    (problem,) = raised.value.problems
    assert problem.startswith('save_folder: ')
    assert str(tmp_path) in problem
    assert 'EvalGauntlet 1 (sums/0-shot, sums/2-shot)' in problem
    assert 'EvalGauntlet 2 (' in problem


def test_callbacks_without_records_share_no_folder(tiny_settings, make):
    few = make(**only_sums(tiny_settings), save_folder=None)

    composer_training.trainer([few, make(save_folder=None), make()]).close()


@pytest.mark.parametrize(
    ('interval', 'batches'),
    [
        ('first', [0]),
        ('last', [2]),
        ('2ba', [2]),
        ('checkpoint', [2]),
        (['first', '2ba', 'last'], [0, 2]),
    ],
)
def test_a_training_that_begins_again_is_evaluated_again(tmp_path, tiny_settings, make, interval, batches: list[int]):
    """With `reset_time`, and in a second Trainer; its `evaluation` is of that Trainer."""
    tasks = read_yaml(tiny_settings['tasks'])['icl_tasks'][-1:]  # the smallest
    gauntlet = make(tasks=tasks, gauntlet=None, interval=interval, save_folder=None)
    results_of_trainings = []  # by batch
    for seed in (0, 1):
        kept = Kept(gauntlet)
        whole = HuggingFaceModel(tiny.model(seed), tokenizer=tiny.tokenizer())
        saved = {'save_folder': str(tmp_path / str(seed)), 'save_interval': '2ba', 'save_overwrite': True}
        trainer = composer_training.trainer([kept, gauntlet], whole=whole, max_duration='2ba', **saved)
        assert gauntlet.evaluation is None
        trainer.fit()
        results_of_trainings.append(dict(kept.by_batch))
        kept.by_batch.clear()
        trainer.fit(duration='2ba', reset_time=True)
        results_of_trainings.append(dict(kept.by_batch))
        trainer.close()

    assert [[*by_batch] for by_batch in results_of_trainings] == [batches] * 4
    last_results = [by_batch[batches[-1]] for by_batch in results_of_trainings]
    for first, second in itertools.combinations(last_results, 2):
        assert first != second


def test_a_training_that_is_continued_leaves_a_finished_evaluation_untouched(tmp_path, make):
    def train(name: str, load: str | None, duration: str, *, only_eval: bool = False) -> dict[str, tuple[int, bytes]]:
        saved = {'save_folder': str(tmp_path / name), 'save_interval': '2ba', 'load_path': load}
        trainer = composer_training.trainer([make(interval=['2ba', 'last'])], max_duration=duration, **saved)
        trainer.eval() if only_eval else trainer.fit()
        trainer.close()
        results = tmp_path.glob('records/*/results.json')
        return {path.parent.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in results}

    first = train('a', None, '4ba')
    assert sorted(first) == ['ba2', 'ba4']
    assert train('b', f'{tmp_path}/a/ep0-ba2-rank0.pt', '4ba') == first
    assert train('c', f'{tmp_path}/a/ep0-ba4-rank0.pt', '6ba', only_eval=True) == first
    assert train('d', f'{tmp_path}/a/ep0-ba4-rank0.pt', '6ba').items() > first.items()
    assert not list(tmp_path.rglob('journal'))


def test_some_batches_of_an_evaluation_are_an_error_that_names_the_setting(tiny_settings, make):
    gauntlet = make()
    trainer = composer_training.trainer([gauntlet])
    model = HuggingFaceModel(tiny.model(), tokenizer=tiny.tokenizer())
    evaluators = build_icl_evaluators(tiny_settings['tasks'], model, data_root=tiny_settings['data_root'])
    single = Trainer(model=model, eval_dataloader=evaluators, device='cpu', progress_bar=False)
    for evaluated in (trainer, single):
        with pytest.raises(ConfigError, match=r'subset_num_batches: .*subset_items'):
            evaluated.eval(subset_num_batches=1)
        evaluated.eval()
        evaluated.close()
    assert gauntlet.evaluation.results == evaluated_alone(tiny_settings, tiny.model())


TASK, METRIC = 'colours/0-shot', 'InContextLearningMultipleChoiceAccuracy'


@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize('label', ['gauntlet', TASK])
def test_callbacks_that_stop_training_see_the_metrics_of_tasks(tiny_settings, make, label, order):
    """By the label of a task, as with an evaluator of it, and all by their keys in loggers."""
    monitor = METRIC if label == TASK else f'metrics/{TASK}/{METRIC}'
    gauntlet = make(interval=['first', '1ba'], save_folder=None)
    # Nothing improves by more than 1, so the patience of two batches ends with the third.
    early = EarlyStopper(monitor=monitor, dataloader_label=label, min_delta=1.0, patience='2ba')
    trainer = composer_training.train(in_order(order, early, gauntlet))

    accuracy = gauntlet.evaluation.scores[TASK].metrics[METRIC].value
    assert trainer.state.timestamp.batch == 3
    assert trainer.state.eval_metrics[label][monitor].compute().item() == pytest.approx(accuracy)

    at_threshold = ThresholdStopper(monitor, label, threshold=-1.0, comp='greater')
    trainer = composer_training.train(in_order(order, at_threshold, make(interval='2ba', save_folder=None)))
    assert trainer.state.timestamp.batch == 2


def test_metrics_in_the_state_are_those_of_the_latest_evaluation_and_logged_once(tiny_settings, make):
    """All of them: composites, categories and those without a value. Another evaluator keeps its label."""
    model = HuggingFaceModel(tiny.model(), tokenizer=tiny.tokenizer())
    (sums,) = [task for task in read_yaml(tiny_settings['tasks'])['icl_tasks'] if task['label'] == 'sums']
    evaluators = build_icl_evaluators([{**sums, 'num_fewshot': [0]}], model, data_root=tiny_settings['data_root'])
    gauntlet = make(save_folder=None)
    second = make(save_folder=None, tasks=[sums], gauntlet=None)
    logger = InMemoryLogger()
    trainer = composer_training.trainer(
        [gauntlet, second],
        whole=model,
        eval_dataloader=evaluators,
        loggers=[logger],
        max_duration='2ba',
        save_metrics=True,
    )

    trainer.eval()
    trainer.fit()
    trainer.eval()

    shown, evaluation = trainer.state.eval_metrics, gauntlet.evaluation
    values = {key: metric.compute().item() for key, metric in shown['gauntlet'].items()}
    recorded = {key: value for key, value in evaluation.metrics.items() if not key.startswith('gauntlet/')}
    assert {key: values[key] for key in recorded} == pytest.approx(recorded)
    assert set(shown['gauntlet-2']) == {key for key in values if key.startswith('metrics/sums/')}
    names = {label: set(shown[label]) for label in ('sums/0-shot', 'sums/2-shot')}  # the first has an evaluator
    assert 'GoldBitsPerByte' in names['sums/2-shot'] - names['sums/0-shot']
    assert set(shown) == {*evaluation.scores, 'gauntlet', 'gauntlet-2'}
    assert not [key for key in logger.data if key.startswith('metrics/gauntlet')]
    trainer.close()
