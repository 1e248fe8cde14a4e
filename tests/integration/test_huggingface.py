"""The callback for the Trainer of transformers: when it evaluates, what it logs and records, and how it resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
import torch
import transformers
from transformers import EarlyStoppingCallback

pytest.importorskip('accelerate')
import hf_training
from hf_training import KEY, At, digests, trainer, values_of
from tiny import outcome, record

from llmfoundry_gauntlet import ConfigError, Gauntlet, ModelError, evaluate
from llmfoundry_gauntlet.huggingface import GauntletCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings('ignore:.*torch.cpu.amp.autocast.*:FutureWarning'),  # of transformers 4.53
    # Of torch 2.15, where dynamo looks at the inputs of a loss.
    pytest.mark.filterwarnings('ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning'),
    pytest.mark.filterwarnings("ignore:.*'pin_memory' argument is set as true:UserWarning"),
]


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """Remove what a training leaves in the environment for those after it, such as its precision."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return the settings of tasks that are scored and generated, in several batches."""
    return {**tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path, num_rows=4)), 'tokens_per_batch': 200}


def steps_recorded(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix('ba')) for path in folder.glob('gauntlet/ba*/results.json'))


# When, and what is logged.


@pytest.mark.parametrize(
    ('interval', 'arguments', 'steps'),
    [
        (['first', 'evaluate', 'last'], {'max_steps': 5}, [0, 2, 4, 5]),
        (3, {}, [3]),
        ('checkpoint', {'eval_strategy': 'no', 'save_steps': 3}, [3, 4]),  # the last is at the end
        (['evaluate', 2], {'eval_on_start': True}, [0, 2, 4]),
        (['checkpoint', 'last'], {'eval_strategy': 'no', 'save_strategy': 'epoch', 'max_steps': 8}, [8]),
    ],
)
def test_each_due_evaluation_is_logged_and_recorded_once(tmp_path, settings, interval, arguments, steps):
    """Mutation: an evaluation of the same step runs twice. The losses are logged as ever."""
    made = trainer(tmp_path / 'out', [GauntletCallback(**settings, interval=interval)], **arguments)
    made.train()

    logged = values_of(made)
    assert [step for step, _ in logged] == steps
    assert steps_recorded(tmp_path / 'out') == steps
    assert [step for step, _ in values_of(made, 'loss')] == list(range(1, made.state.max_steps + 1))
    for step, value in logged:
        assert value == record(tmp_path / f'out/gauntlet/ba{step}')['composites']['categories']['all']['value']


def test_a_record_names_the_checkpoint_that_has_the_same_items(tmp_path, settings):
    """Mutation: the records are written before the checkpoint, which they do not name."""
    out = tmp_path / 'out'
    trainer(out, [GauntletCallback(**settings)]).train()

    training = record(out / 'gauntlet/ba2')['training']
    assert training['checkpoint'] == str(out / 'checkpoint-2')
    assert training['epoch'] == 0
    evaluate(training['checkpoint'], **settings, device='cpu', out=tmp_path / 'again')
    assert outcome(tmp_path / 'again') == outcome(out / 'gauntlet/ba2')
    assert outcome(tmp_path / 'again') != outcome(out / 'gauntlet/ba4')
    evaluate(out / 'checkpoint-4', **settings, device='cpu', out=tmp_path / 'last')
    assert outcome(tmp_path / 'last') == outcome(out / 'gauntlet/ba4')


@pytest.mark.parametrize('arguments', [{}, {'bf16': True}, {'torch_compile': True, 'torch_compile_backend': 'eager'}])
def test_training_is_bitwise_that_without_the_callback(tmp_path, settings, arguments):
    """Mutation: the random states are not restored. In bfloat16 the evaluation is that of an autocast."""
    states = []
    for callbacks in ([], [GauntletCallback(**settings, interval=['first', 1, 'evaluate'])]):
        made = trainer(tmp_path / f'out{len(callbacks)}', callbacks, save_strategy='no', **arguments)
        made.train()
        states.append(digests(made))
    assert states[0] == states[1]

    gauntlet = Gauntlet(**settings, save_folder=tmp_path / 'plain')
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled='bf16' in arguments):
        gauntlet.evaluate(tiny.model(), tiny.tokenizer(), step=0)
    assert outcome(tmp_path / 'plain/ba0') == outcome(tmp_path / 'out1/gauntlet/ba0')
    precision = record(tmp_path / 'out1/gauntlet/ba0')['environment']['precision']
    assert precision == ('amp_bf16' if 'bf16' in arguments else 'fp32')


def test_the_best_model_and_early_stopping_go_by_a_metric_of_the_gauntlet(tmp_path, settings):
    """Mutation: the metrics are logged, but are not those of the Trainer's evaluation."""
    metric = 'metrics/sums/0-shot/InContextLearningLMAccuracy'
    made = trainer(
        tmp_path / 'out',
        [GauntletCallback(**settings), EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=2.0)],
        max_steps=8,
        metric_for_best_model=metric,
        greater_is_better=True,
        load_best_model_at_end=True,
    )
    made.train()

    of_step = dict(values_of(made, f'eval_{metric}'))
    assert made.state.best_metric == max(of_step[step] for step in of_step if step)
    assert made.state.global_step == 4  # the second evaluation is no better by 2.0
    metrics = made.evaluate()  # outside of the training, of the best model
    assert metrics[f'eval_{metric}'] == made.state.best_metric
    assert record(tmp_path / 'out/gauntlet')['training'] is None


def test_tensorboard_has_the_metrics_at_their_steps(tmp_path, settings, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv('TENSORBOARD_LOGGING_DIR', str(tmp_path / 'events'))  # in place of logging_dir since 5.2
    more = {} if int(transformers.__version__[0]) > 4 else {'logging_dir': str(tmp_path / 'events')}
    made = trainer(tmp_path / 'out', [GauntletCallback(**settings)], report_to=['tensorboard'], **more)
    made.train()

    events = EventAccumulator(str(tmp_path / 'events')).Reload()
    shown = [(event.step, event.value) for event in events.Scalars('eval/icl/metrics/eval_gauntlet/all')]
    assert shown == [(step, pytest.approx(value)) for step, value in values_of(made)]


# Resumed trainings.


def interrupt() -> None:
    raise KeyboardInterrupt


def fail_at(made: Any, step: int, after: int) -> None:
    """Interrupt an evaluation at a step after some forwards of the last block."""
    calls: list[None] = []

    def count(*_: Any) -> None:
        if made.state.global_step == step and not torch.is_grad_enabled():
            calls.append(None)
            if len(calls) > after:
                interrupt()

    made.model.transformer.h[1].register_forward_pre_hook(count)


def test_a_resumed_training_repeats_no_evaluation_and_finishes_the_interrupted_one(tmp_path, settings):
    """Mutations: `on_train_begin` evaluates whatever the step; the journal is not that of the step."""
    trainer(tmp_path / 'whole', [GauntletCallback(**settings)]).train()

    out = tmp_path / 'out'
    first = trainer(out, [GauntletCallback(**settings)])
    fail_at(first, step=4, after=40)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert [step for step, _ in values_of(first)] == [0, 2]
    num_finished = len(tiny.journal_lines(out / 'gauntlet/ba4')) - 1
    assert num_finished > 0

    second = trainer(out, [GauntletCallback(**settings)])
    second.train(resume_from_checkpoint=True)

    assert [step for step, _ in values_of(second)] == [0, 2, 4]  # the history of a checkpoint goes on
    assert 0 < record(out / 'gauntlet/ba4')['timing']['reused_items'] <= num_finished
    assert record(out / 'gauntlet/ba2')['timing']['reused_items'] == 0
    assert outcome(out / 'gauntlet/ba4') == outcome(tmp_path / 'whole/gauntlet/ba4')


def test_a_last_evaluation_that_is_missing_beside_its_checkpoint_is_made_by_the_next_job(tmp_path, settings):
    out = tmp_path / 'out'
    whole = {'max_steps': 8}  # an epoch: resumed within one, the Trainer makes another step
    trainer(out, [], **whole).train()

    jobs = [trainer(out, [GauntletCallback(**settings, interval='last')], **whole) for _ in range(2)]
    for job in jobs:
        job.train(resume_from_checkpoint=True)

    assert steps_recorded(out) == [8]
    assert record(out / 'gauntlet/ba8')['training']['checkpoint'] == str(out / 'checkpoint-8')
    assert [values_of(job) for job in jobs] == [[(8, record(out / 'gauntlet/ba8')['metrics'][KEY[5:]])], []]


def test_a_resumed_training_keeps_the_subset_of_its_time_budget(tmp_path, settings):
    """Mutation: each job chooses a subset of its own."""
    out = tmp_path / 'out'
    callback = GauntletCallback(**settings, time_budget='1h', interval='evaluate')
    wait = At({3: lambda: callback.gauntlet.records.wait(), 4: interrupt})
    made = trainer(out, [callback, wait])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    path = out / 'gauntlet/ba2/results.json'
    recorded = json.loads(path.read_text())
    fewer = {**recorded['timing']['time_budget'], 'sums/0-shot': 3}
    recorded['timing']['time_budget'] = fewer
    path.write_text(json.dumps(recorded))

    later = GauntletCallback(**settings, time_budget='1h', interval='evaluate')
    trainer(out, [later]).train(resume_from_checkpoint=True)

    assert later.gauntlet.sizes == fewer
    assert later.evaluation.scores['sums/0-shot'].num_items == 3


# Ranks.


@pytest.mark.parametrize('kind', hf_training.KINDS)
def test_two_ranks_have_the_items_of_one_and_train_as_without_the_callback(tmp_path, kind):
    """Under DDP, and sharded by Accelerate. Mutation: the ranks score their own items alone."""
    settings = {**tiny.write_tasks(tmp_path, tiny.write_riddles(tmp_path, num_rows=4)), 'tokens_per_batch': 60}
    forks.run(hf_training.train_on_ranks, tmp_path / 'log.txt', tmp_path, kind, num_ranks=2)
    ranks = [json.loads((tmp_path / f'rank{rank}.json').read_text()) for rank in range(2)]

    Gauntlet(**settings, save_folder=tmp_path / 'plain').evaluate(tiny.model(), tiny.tokenizer(), step=0)
    of_trainer = tmp_path / 'with/gauntlet/ba0'
    assert outcome(tmp_path / 'plain/ba0') == outcome(of_trainer)
    assert record(of_trainer)['environment']['num_ranks'] == 2
    assert record(of_trainer)['model']['num_parameters'] == sum(weight.numel() for weight in tiny.model().parameters())
    for rank in ranks:
        assert rank['with'] == rank['without']
        assert [step for step, _ in rank['with, logged']] == [0, 2, 4]
        assert rank['with, logged'] == ranks[0]['with, logged']


# Mistakes, before the first step.


@pytest.mark.parametrize('interval', ['often', 0, '500ba', True])
def test_an_unknown_interval_is_an_error_that_says_what_is_allowed(settings, interval):
    with pytest.raises(ConfigError, match=r'interval.*first, evaluate, checkpoint, last, and numbers of steps'):
        GauntletCallback(**settings, interval=interval)


def without_head(**_: Any) -> Any:
    return tiny.model().transformer


@pytest.mark.parametrize(
    ('arguments', 'facts'),
    [
        ({'model': without_head()}, 'GPT2Model, whose outputs .* have no logits'),
        ({'processing_class': None}, 'no tokenizer'),
    ],
)
def test_a_model_that_is_not_one_is_an_error_before_the_first_step(tmp_path, settings, arguments, facts):
    """Mutation: the first evaluation is the first to find out, at the end of the training."""
    made = trainer(tmp_path / 'out', [GauntletCallback(**settings, interval='last')], **arguments)
    with pytest.raises(ModelError, match=facts):
        made.train()
    assert made.state.global_step == 0


def test_two_callbacks_in_one_folder_are_an_error_before_the_first_step(tmp_path, settings):
    callbacks = [GauntletCallback(**settings), GauntletCallback(**settings, only='sums')]
    made = trainer(tmp_path / 'out', callbacks)
    with pytest.raises(ConfigError, match=r'another Gauntlet writes its records .*only'):
        made.train()
    assert made.state.global_step == 0
