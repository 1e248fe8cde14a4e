"""Tasks of lm-eval in our evaluation: its prompts, its metrics and its averages; `lm_eval.simple_evaluate` says which.

The tasks and their rows are written by the tests, as lm-eval's own need the hub.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval_sums import CHOICES, SUMS, entry, write_task, write_tasks

from llmfoundry_gauntlet import evaluate
from llmfoundry_gauntlet.errors import GauntletError

pytest.importorskip('lm_eval')

MAX_SEQ_LEN = 128  # below which the prompts with two shots are longer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with tasks of lm-eval, one for each type of its requests."""
    write_tasks(tmp_path)
    return tmp_path


def run(model: Path, *entries: dict[str, Any], **settings: Any) -> Any:
    return evaluate(model, tasks=list(entries), device='cpu', max_seq_len=MAX_SEQ_LEN, **settings)


def values(evaluation: Any, key: str) -> dict[str, float | None]:
    return {name: measure.value for name, measure in evaluation.scores[key].metrics.items()}


def by_lm_eval(model: Path, folder: Path, *tasks: str, num_fewshot: int) -> Any:
    """Return what lm-eval's own Hugging Face backend computes."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=str(model), device='cpu', dtype='float32', batch_size=1, max_length=MAX_SEQ_LEN)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        lm, tasks=list(tasks), num_fewshot=num_fewshot, task_manager=manager, bootstrap_iters=0
    )


def numbers(results: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a task by our names, which have no filter if there is no other."""
    named = {}
    for name, value in results.items():
        if ',' in name and '_stderr,' not in name:
            named[name.removesuffix(',none')] = pytest.approx(float(value), rel=1e-5)
    return named


@pytest.mark.parametrize(
    ('task', 'num_fewshot'),
    [('sums', 0), ('sums', 2), ('written_sums', 1), ('texts', 0)],
)
def test_metrics_are_those_of_lm_eval(tiny_llamas: Path, folder: Path, task: str, num_fewshot: int):
    model = tiny_llamas / 'plain'
    key = f'{task}/{num_fewshot}-shot'

    evaluation = run(model, entry(folder, task, num_fewshot=[num_fewshot]))

    assert values(evaluation, key) == numbers(by_lm_eval(model, folder, task, num_fewshot=num_fewshot)['results'][task])


def test_a_subset_has_the_prompts_that_all_documents_have(tiny_llamas: Path, folder: Path):
    task = entry(folder, 'sums', num_fewshot=[2])
    whole = run(tiny_llamas / 'plain', task)
    part = run(tiny_llamas / 'plain', task, subset_items=3)

    digest_of_row = {result.key.row: result.prompt_sha256 for result in whole.results['sums/2-shot']}
    results = part.results['sums/2-shot']
    assert len(results) == 3
    assert all(result.prompt_sha256 == digest_of_row[result.key.row] for result in results)


def test_a_mean_has_a_standard_error_and_another_aggregate_the_reason_why_it_has_none(tiny_llamas: Path, folder: Path):
    metrics = run(tiny_llamas / 'plain', entry(folder, 'sums')).scores['sums/0-shot'].metrics

    share = metrics['acc'].value
    assert metrics['acc'].standard_error == pytest.approx(math.sqrt(share * (1 - share) / (len(SUMS) - 1)))
    assert metrics['brier_score'].standard_error is None
    assert metrics['brier_score'].no_error == 'it is no mean over items'


def test_without_num_fewshot_the_task_has_its_own(tiny_llamas: Path, folder: Path):
    write_task(folder, 'shots', CHOICES.format(data=folder / 'sums.jsonl') + 'num_fewshot: 2\n')
    task = entry(folder, 'shots')
    del task['num_fewshot']

    assert list(run(tiny_llamas / 'plain', task).scores) == ['shots/2-shot']


def test_records_give_the_same_scores_again(
    gauntlet: Callable[..., tuple[int, str, str]], tiny_llamas: Path, folder: Path
):
    out = folder / 'out'
    run(tiny_llamas / 'plain', entry(folder, 'sums'), entry(folder, 'texts'), out=out)
    before = json.loads((out / 'results.json').read_text())

    status, _, errors = gauntlet('run', '--from', out, '--out', folder / 'again')

    assert (status, errors) == (0, '')
    after = json.loads((folder / 'again' / 'results.json').read_text())
    assert after['tasks'] == before['tasks']
    spec = after['tasks']['sums/0-shot']['spec']['lm_eval']['tasks']['sums']
    assert spec['version'] == '1.5'
    assert spec['config']['doc_to_choice'] == '{{choices}}'


@pytest.mark.parametrize(
    ('change', 'facts'),
    [
        ({'lm_eval_task': 'sumz'}, ('sumz', "did you mean 'sums'")),
        ({'lm_eval_task': 'no_such_task_at_all'}, ('no_such_task_at_all', 'lm-eval ls tasks')),
        ({'include_path': '/no/such/folder'}, ('include_path', '/no/such/folder')),
        ({'metric': 'acc_nrom'}, ('acc_nrom', 'acc_norm')),
        ({'prelimiter': 'Q: '}, ('prelimiter', 'leave it out')),
        ({'dataset_uri': 'rows.jsonl'}, ('dataset_uri', 'leave it out')),
    ],
)
def test_a_wrong_key_is_named(tiny_llamas: Path, folder: Path, change: dict[str, str], facts: tuple[str, ...]):
    with pytest.raises(GauntletError) as error:
        run(tiny_llamas / 'plain', {**entry(folder, 'sums'), **change})

    assert all(fact in str(error.value) for fact in facts), error.value


@pytest.mark.parametrize(
    ('line', 'fact'),
    [
        ('unsafe_code: true', 'code_evaluation'),
        ('doc_to_image: picture', 'images'),
        ('metric_list: [{metric: code_eval, aggregation: mean}]', 'code_evaluation'),
        ('metric_list: [{metric: own_metric}]', 'own_metric'),
        ('metric_list: [{metric: acc, aggregation: median_of_means}]', 'median_of_means'),
        ('dataset_kwargs: {data_files: {test: /no/such/rows.jsonl}}', 'data_files'),
    ],
)
def test_a_task_that_cannot_be_run_is_refused_by_name(tiny_llamas: Path, folder: Path, line: str, fact: str):
    key = line.partition(':')[0]
    lines = CHOICES.format(data=folder / 'sums.jsonl').splitlines()
    if key == 'metric_list':
        lines = lines[: lines.index('metric_list:')]
    kept = '\n'.join(text for text in lines if not text.startswith(f'{key}:'))
    write_task(folder, 'refused', f'{kept}\n{line}\n')

    with pytest.raises(GauntletError) as error:
        run(tiny_llamas / 'plain', entry(folder, 'refused'))

    assert 'refused' in str(error.value)
    assert fact in str(error.value)
