"""Tasks of lm-eval have the items of a saved checkpoint in every training loop, beside it, and in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from lm_eval_sums import entry, write_tasks
from tiny import outcome

from llmfoundry_gauntlet import Gauntlet, evaluate
from llmfoundry_gauntlet.results.runs import read_run

pytest.importorskip('lm_eval')
pytestmark = pytest.mark.slow

METRIC = 'metrics/lm_eval_sums/0-shot/acc'  # the first of the task, which loggers get


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return the settings of tasks of ours, and of a task of each type of lm-eval's requests."""
    definitions = tmp_path / 'lm_eval'
    definitions.mkdir()
    write_tasks(definitions)
    tasks = [entry(definitions, task, label=f'lm_eval_{task}') for task in ('sums', 'written_sums', 'texts')]
    return {**tiny.write_tasks(tmp_path, tasks), 'tokens_per_batch': 512}


@pytest.fixture
def words(settings: dict[str, Any]) -> list[str]:
    """Return the settings as options of a command."""
    return [word for name, value in settings.items() for word in (f'--{name.replace("_", "-")}', str(value))]


def saved_outcome(checkpoint: Path, settings: dict[str, Any], out: Path) -> Any:
    """Return the outcome of a checkpoint that is evaluated for itself."""
    evaluate(checkpoint, **settings, device='cpu', out=out)
    (metrics, _) = found = outcome(out)
    assert METRIC in metrics
    return found


def test_in_the_trainer_of_hugging_face(settings, tmp_path: Path):
    pytest.importorskip('accelerate')
    import hf_training

    from llmfoundry_gauntlet.huggingface import GauntletCallback

    training = hf_training.trainer(tmp_path / 'out', [GauntletCallback(**settings, interval='checkpoint')])
    training.train()

    expected = saved_outcome(tmp_path / 'out/checkpoint-4', settings, tmp_path / 'saved')
    assert outcome(tmp_path / 'out/gauntlet/ba4') == expected
    steps, values = zip(*hf_training.values_of(training, f'eval_{METRIC}'), strict=True)
    assert steps == (2, 4)
    assert values[-1] == expected[0][METRIC]


def test_in_the_callback_of_composer(settings, tmp_path: Path):
    import composer_training
    from composer.loggers import InMemoryLogger

    from llmfoundry_gauntlet import EvalGauntlet

    memory = InMemoryLogger()
    gauntlet = EvalGauntlet(**settings, interval='checkpoint', save_folder=str(tmp_path / 'records'))
    saved = {'save_folder': str(tmp_path / 'checkpoints'), 'save_interval': '2ba', 'max_duration': '4ba'}
    composer_training.train([gauntlet], loggers=[memory], **saved)

    expected = saved_outcome(tmp_path / 'checkpoints/ep0-ba4-rank0.pt', settings, tmp_path / 'saved')
    assert outcome(tmp_path / 'records/ba4') == expected
    assert [value for _, value in memory.data[METRIC]][-1] == expected[0][METRIC]


def test_beside_a_training_by_watch(settings, words, gauntlet, tmp_path: Path):
    for step in (2, 4):
        folder = tmp_path / f'checkpoints/checkpoint-{step}'
        tiny.model().save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)

    status, _, error = gauntlet(
        'watch', tmp_path / 'checkpoints', *words, '--out', tmp_path / 'watched', '--once', '--settle', '0s'
    )

    assert status == 0, error
    expected = saved_outcome(tmp_path / 'checkpoints/checkpoint-4', settings, tmp_path / 'saved')
    for step in (2, 4):
        assert outcome(tmp_path / f'watched/ba{step}') == expected


def test_a_subset_has_items_of_the_whole_and_their_mean(settings, tmp_path: Path):
    network, tokenizer = tiny.model(), tiny.tokenizer()
    for name, number in (('whole', None), ('part', 4)):
        Gauntlet(**settings, subset_items=number, save_folder=tmp_path / name).evaluate(network, tokenizer, step=0)

    whole, part = (read_run(tmp_path / f'{name}/ba0') for name in ('whole', 'part'))
    items = part.results['lm_eval_sums/0-shot']
    assert len(items) == 4 < len(whole.results['lm_eval_sums/0-shot'])
    for task, results in part.results.items():
        of_whole = {result.key: result for result in whole.results[task]}
        for result in results:
            expected = of_whole[result.key]
            assert (result.predicted, result.text, result.prompt_sha256) == (
                expected.predicted,
                expected.text,
                expected.prompt_sha256,
            )
            assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert part.record['metrics'][METRIC] == sum(result.metrics['acc'] for result in items) / 4
