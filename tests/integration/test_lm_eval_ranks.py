"""lm-eval's tasks on two ranks have the answers of one; its own command line runs our model.

Mutations: draws that depend on the place of a request among those of its rank; an answer for another document.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval_own_tasks import TASKS, write_tasks
from paths import FIXTURES, ROOT
from torchrun import GAUNTLET, run, run_well

pytestmark = pytest.mark.slow

WORKER = ROOT / 'tests' / 'integration' / 'lm_eval_worker.py'
MODEL = FIXTURES / 'models' / 'rotary_bos'


@pytest.fixture(scope='module')
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp('lm_eval') / 'tasks')


def totals_and_texts(answers: list[Any]) -> tuple[list[float], list[Any]]:
    """Return the numbers in the answers of a document, and whatever else there is."""
    numbers: list[float] = []
    others: list[Any] = []
    for of_request in answers:
        for answer in of_request:
            for part in answer if isinstance(answer, list) else [answer]:
                (numbers if isinstance(part, float) else others).append(part)
    return numbers, others


def test_two_ranks_have_the_answers_of_one(tasks: Path, tmp_path: Path) -> None:
    outcomes = []
    for num_ranks in (1, 2):
        results = tmp_path / f'{num_ranks}.json'
        run_well(WORKER, MODEL, tasks, results, num_ranks=num_ranks)
        outcomes.append(json.loads(results.read_text()))

    alone, together = outcomes
    assert (alone['num_ranks'], together['num_ranks']) == (1, 2)
    for name in TASKS:
        assert together['answers'][name].keys() == alone['answers'][name].keys()
        for document, answers in alone['answers'][name].items():
            # Where ranks have unequally many documents, lm-eval answers a last request of one several times.
            of_requests = zip(together['answers'][name][document], answers, strict=True)
            counted = [of_request[: len(expected)] for of_request, expected in of_requests]
            totals, texts = totals_and_texts(counted)
            expected_totals, expected_texts = totals_and_texts(answers)
            assert texts == expected_texts, (name, document)
            assert totals == pytest.approx(expected_totals, abs=1e-4, rel=0), (name, document)
        of_task = {metric: value for metric, value in together['results'][name].items() if isinstance(value, float)}
        assert of_task == pytest.approx({metric: alone['results'][name][metric] for metric in of_task}, rel=1e-5)


def test_the_command_line_of_lm_eval_prints_its_table(tasks: Path) -> None:
    words = ['run', '--model_args', f'pretrained={MODEL}', '--device', 'cpu', '--tasks', 'warm_choices,warm_texts']

    printed = run_well(*GAUNTLET, 'lm-eval', *words, '--include_path', tasks, num_ranks=1)

    assert printed.splitlines()[0].startswith('gauntlet ({')
    assert '|warm_choices|' in printed and '|warm_texts ' in printed


def test_an_error_of_lm_eval_is_one_line_that_names_it(tasks: Path) -> None:
    words = ['run', '--model_args', f'pretrained={MODEL}', '--device', 'cpu', '--tasks', 'warm_nothing']

    done = run(*GAUNTLET, 'lm-eval', *words, '--include_path', tasks, num_ranks=1)

    assert done.returncode == 2
    *_, last = done.stderr.splitlines()
    assert last.startswith('error: lm-eval failed: ') and 'warm_nothing' in last
