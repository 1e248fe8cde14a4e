"""Alerts of a Gauntlet in training, also over jobs, on a network that prefers the right choices until it falls."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
import torch

from llmfoundry_gauntlet import ConfigError, Gauntlet
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.metrics.alerts import Alert
from llmfoundry_gauntlet.runtime.distributed import global_rank

NUM_ROWS = 40
NUM_WRONG = 4  # of the network before it falls
SILENT = 11
AVERAGE = 'default_average'
TASK = 'letters/0-shot'


def write_letters(folder: Path, golds: list[int]) -> dict[str, Any]:
    """Write a task of two letters to choose from, and its gauntlet; return the settings that name them."""
    rows = [{'query': f'Item {row}:', 'choices': ['a', 'b'], 'gold': gold} for row, gold in enumerate(golds)]
    tiny.write_rows(folder / 'letters.jsonl', rows)
    task = {
        'label': 'letters',
        'dataset_uri': 'letters.jsonl',
        'num_fewshot': [0],
        'icl_task_type': 'multiple_choice',
    }
    benchmarks = [{'name': 'letters', 'num_fewshot': 0, 'random_baseline': 0.5}]
    (folder / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task]}))
    categories = {'categories': [{'name': 'all', 'benchmarks': benchmarks}]}
    (folder / 'gauntlet.yaml').write_text(json.dumps({'eval_gauntlet': categories}))
    return {**tiny.settings_of(folder), 'tokens_per_batch': 400, 'save_folder': None}


@pytest.fixture(scope='module')
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings of a task in which most of the network's preferences are right."""
    folder = tmp_path_factory.mktemp('letters')
    any_golds = write_letters(folder, [0] * NUM_ROWS)
    results = Gauntlet(**any_golds).evaluate(tiny.model(), tiny.tokenizer()).results[TASK]
    preferred = [result.predicted for result in results]
    return write_letters(folder, [1 - preferred[row] if row < NUM_WRONG else preferred[row] for row in range(NUM_ROWS)])


def network(step: int, *, is_fallen: bool = False) -> torch.nn.Module:
    """Return the network at a step of training, a little different at each; fallen it prefers the other choices."""
    model = tiny.model()
    generator = torch.Generator().manual_seed(step)
    last = model.transformer.ln_f
    with torch.no_grad():
        last.weight += 0.05 * torch.randn(last.weight.shape, generator=generator)
        if is_fallen:
            last.weight.neg_()
            last.bias.neg_()
    return model


def evaluations(
    gauntlet: Gauntlet, first: int, last: int, *, falls_at: int | None = None, tokenizer: Any = None
) -> list[Evaluation]:
    """Evaluate the network at these steps, the last included."""
    tokenizer = tokenizer or tiny.tokenizer()
    return [
        gauntlet.evaluate(network(step, is_fallen=step == falls_at), tokenizer, step=step)
        for step in range(first, last + 1)
    ]


@pytest.fixture(scope='module')
def recorded(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> Path:
    """Return the records of thirteen evaluations of one job."""
    folder = tmp_path_factory.mktemp('recorded')
    evaluations(Gauntlet(**{**settings, 'save_folder': folder}), 1, 13)
    return folder


@pytest.fixture
def resumed(settings: dict[str, Any], recorded: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a job that goes on in a copy of these records."""
    folder = tmp_path / 'records'
    shutil.copytree(recorded, folder)
    return {**settings, 'save_folder': folder}


def test_a_fall_is_logged_recorded_and_announced_once(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Mutations: an alert before its records are written, at the eleventh evaluation, or one that is not in loggers."""
    announced = []

    def on_alert(alert: Alert) -> None:
        assert (tmp_path / f'ba{alert.batch}' / 'results.json').exists()
        announced.append(alert)

    gauntlet = Gauntlet(**{**settings, 'save_folder': tmp_path}, on_alert=on_alert)
    with caplog.at_level(logging.WARNING):
        *before, fallen = evaluations(gauntlet, 1, 14, falls_at=14)

    assert [evaluation.alerts for evaluation in before] == [None] * SILENT + [()] * 2
    assert ['gauntlet/alerts' in evaluation.logged for evaluation in before] == [False] * SILENT + [True] * 2
    [alert] = fallen.alerts
    assert (alert.name, alert.batch) == (AVERAGE, 14)
    assert alert.value == fallen.composites.averages[AVERAGE].value
    assert alert.change < -1
    assert (before[-1].logged['gauntlet/alerts'], fallen.logged['gauntlet/alerts']) == (0, 1)
    assert announced == [alert]
    [message] = [record.getMessage() for record in caplog.records if 'alert' in record.getMessage()]
    assert message.startswith('gauntlet step 14: alert: default_average fell to ')
    [entry] = tiny.record(tmp_path / 'ba14')['alerts']
    assert (entry['name'], entry['p_value']) == (AVERAGE, alert.p_value)
    assert tiny.record(tmp_path / 'ba14')['metrics']['gauntlet/alerts'] == 1
    assert tiny.record(tmp_path / 'ba3')['alerts'] is None


def test_a_resumed_job_keeps_its_past_to_the_last_bit(settings: dict[str, Any], resumed: dict[str, Any]):
    """Mutations: only evaluations of this job count, or the error over items is left out, as records hold no items."""
    in_one_job = evaluations(Gauntlet(**settings), 1, 14, falls_at=14)[-1]

    [evaluation] = evaluations(Gauntlet(**resumed), 14, 14, falls_at=14)

    assert evaluation.alerts == in_one_job.alerts
    assert len(evaluation.alerts) == 1


def test_a_job_that_goes_back_to_an_earlier_step_has_the_past_of_that_step(resumed: dict[str, Any]):
    """Mutation: records of later steps count, which the job is about to replace."""
    gauntlet = Gauntlet(**resumed)

    again = evaluations(gauntlet, 11, 12, falls_at=12)

    assert again[0].alerts is None
    assert len(again[1].alerts) == 1


def test_other_items_begin_anew(resumed: dict[str, Any]):
    """Mutation: scores of the whole task are compared with those of a subset."""
    [of_subset] = evaluations(Gauntlet(**resumed, subset_items=20), 14, 14, falls_at=14)
    [of_all] = evaluations(Gauntlet(**resumed), 15, 15, falls_at=15)

    assert of_subset.alerts is None
    assert of_all.alerts is None


def test_without_records_a_new_job_has_no_past(settings: dict[str, Any]):
    assert evaluations(Gauntlet(**settings), 14, 14, falls_at=14)[0].alerts is None


def test_an_evaluation_without_a_step_is_not_compared(resumed: dict[str, Any]):
    gauntlet, tokenizer = Gauntlet(**{**resumed, 'save_folder': None}), tiny.tokenizer()
    evaluations(gauntlet, 1, 12, tokenizer=tokenizer)

    evaluation = gauntlet.evaluate(network(14, is_fallen=True), tokenizer)

    assert (evaluation.alerts, 'gauntlet/alerts' in evaluation.logged) == (None, False)


@pytest.mark.parametrize(
    ('alert_on', 'expected'),
    [
        ('averages', [AVERAGE]),
        (['all', 'letters'], ['all', TASK]),
        ([TASK, 'averages'], [TASK, AVERAGE]),
        ([], None),
    ],
)
def test_scores_of_the_users_choice_are_watched(resumed: dict[str, Any], alert_on: Any, expected: list[str] | None):
    [evaluation] = evaluations(Gauntlet(**resumed, alert_on=alert_on), 14, 14, falls_at=14)

    names = None if evaluation.alerts is None else [alert.name for alert in evaluation.alerts]
    assert names == expected


def test_an_unknown_score_is_an_error_before_anything_is_evaluated(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"alert_on: default_averag: no such .*'default_average'"):
        Gauntlet(**settings, alert_on='default_averag')


def test_what_on_alert_raises_is_raised_after_the_records_are_written(resumed: dict[str, Any]):
    def stop(alert: Alert) -> None:
        raise KeyError(alert.name)

    with pytest.raises(KeyError, match=AVERAGE):
        evaluations(Gauntlet(**resumed, on_alert=stop), 14, 14, falls_at=14)

    assert (resumed['save_folder'] / 'ba14' / 'results.json').exists()


@pytest.mark.parametrize(
    ('file', 'expected'),
    [
        ('ba13/samples/letters_0-shot.jsonl', ()),  # of the three before: no error over items
        ('ba2/results.json', None),  # ten are left
        ('ba2/samples/letters_0-shot.jsonl', 1),  # which is not needed
    ],
)
def test_damaged_records_of_earlier_evaluations_are_a_warning_at_most(
    resumed: dict[str, Any], caplog: pytest.LogCaptureFixture, file: str, expected: Any
):
    folder = resumed['save_folder']
    for batch in (1, 3):  # eleven are left
        shutil.rmtree(folder / f'ba{batch}')
    (folder / file).write_text('{')

    with caplog.at_level(logging.WARNING):
        [evaluation] = evaluations(Gauntlet(**resumed), 14, 14, falls_at=14)

    warned = any(
        'alert_on: ' in record.getMessage() and str(folder) in record.getMessage() for record in caplog.records
    )
    assert warned is (expected != 1)
    assert (len(evaluation.alerts) if expected == 1 else evaluation.alerts) == expected


def alerts_of_ranks(folder: Path, settings: dict[str, Any]) -> None:
    """Evaluate the fall on the ranks of a job; only the first one has the records."""
    torch.distributed.init_process_group('gloo')
    announced: list[str] = []
    own = settings['save_folder'] if global_rank() == 0 else f'{folder}/elsewhere'
    gauntlet = Gauntlet(**{**settings, 'save_folder': own}, on_alert=lambda alert: announced.append(str(alert)))
    [evaluation] = evaluations(gauntlet, 14, 14, falls_at=14)
    outcome = [announced, evaluation.logged['gauntlet/alerts'], len(evaluation.alerts)]
    (folder / f'rank{global_rank()}.json').write_text(json.dumps(outcome))
    torch.distributed.barrier()


@pytest.mark.slow
def test_all_ranks_have_the_alerts_of_the_first(resumed: dict[str, Any], tmp_path: Path):
    """Mutation: each rank decides by its own folder of records."""
    forks.run(alerts_of_ranks, tmp_path / 'log.txt', tmp_path, resumed, num_ranks=2)

    first, second = [json.loads((tmp_path / f'rank{rank}.json').read_text()) for rank in range(2)]
    assert first == second
    assert (len(first[0]), first[1:]) == (1, [1, 1])


def test_the_callback_of_composer_logs_and_announces_alerts(settings: dict[str, Any], tmp_path: Path):
    """The network falls before the last batch; training goes on to its end."""
    import composer_training  # skips the test without Composer
    from composer.loggers import InMemoryLogger
    from composer.models import HuggingFaceModel

    from llmfoundry_gauntlet import EvalGauntlet

    model = network(0)
    announced: list[Alert] = []

    def fall() -> None:
        with torch.no_grad():
            model.transformer.ln_f.weight.neg_()
            model.transformer.ln_f.bias.neg_()

    logger = InMemoryLogger()
    callback = EvalGauntlet(**{**settings, 'save_folder': str(tmp_path)}, interval='1ba', on_alert=announced.append)
    trainer = composer_training.trainer(
        [composer_training.AtBatches({13: fall}), callback],
        max_duration='14ba',
        whole=HuggingFaceModel(model, tokenizer=tiny.tokenizer()),
        loggers=[logger],
    )
    for group in trainer.state.optimizers[0].param_groups:
        group['lr'] = 0.0
    trainer.fit()
    trainer.close()

    assert trainer.state.timestamp.batch.value == 14
    [alert] = [alert for alert in announced if alert.batch == 13]
    assert alert.name == AVERAGE
    logged = {int(time.batch): value for time, value in logger.data['gauntlet/alerts']}
    assert logged[12] == 0
    assert logged[13] == 1
    assert tiny.record(tmp_path / 'ba13')['alerts'][0]['name'] == AVERAGE
