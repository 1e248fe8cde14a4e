"""An editor and mypy know the arguments of the public calls, as a user imports them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api
from paths import ROOT

pytestmark = pytest.mark.slow

BEGINNING = """
from pathlib import Path

from composer.models import HuggingFaceModel

from llmfoundry_gauntlet import EvalGauntlet, Evaluation, Gauntlet, build_icl_evaluators, evaluate

model: HuggingFaceModel
"""

RIGHT = """
by_loop = Gauntlet(tasks='tasks.yaml', gauntlet=Path('gauntlet.yaml'), save_folder='runs', run_name='mine', only='copa')
first: Evaluation = by_loop.evaluate(model, model.tokenizer, step=3)
by_callback = EvalGauntlet(tasks=[{'label': 'copa'}], interval=['first', '500ba'], time_budget='10m', only=['copa'])
latest: Evaluation | None = by_callback.evaluation
alone: Evaluation = evaluate('model', tasks='tasks.yaml', out=Path('runs'), fsdp_config={}, loggers={'wandb': None})
evaluators = build_icl_evaluators('tasks.yaml', model, data_root=Path('data'), only='copa', log='accuracy')
number: float = first.logged['metrics/copa/0-shot/InContextLearningMultipleChoiceAccuracy']
"""

# Each line is an error, which names this.
WRONG = {
    "Gauntlet(tasks='tasks.yaml', subset_item=3)": 'subset_item',
    "Gauntlet(tasks='tasks.yaml', interval='last')": 'interval',
    "Gauntlet(tasks='tasks.yaml', subset_items='3')": 'subset_items',
    "Gauntlet(tasks='tasks.yaml').evaluate(model)": 'tokenizer',
    "EvalGauntlet(tasks='tasks.yaml', run_name='mine')": 'run_name',
    "EvalGauntlet(tasks='tasks.yaml', interval=3)": 'interval',
    "evaluate('model', tasks='tasks.yaml', save_folder='runs')": 'save_folder',
    "evaluate('model', tasks='tasks.yaml', dtyp='float32')": 'dtyp',
    "evaluate('model', tasks='tasks.yaml', resume='yes')": 'resume',
    "evaluate(tasks='tasks.yaml')": 'model',
    "build_icl_evaluators('tasks.yaml', model, time_budget='10m')": 'time_budget',
    "build_icl_evaluators('tasks.yaml', 'model')": 'HuggingFaceModel',
    "build_icl_evaluators('tasks.yaml', model, num_fewshot=[3])": 'num_fewshot',
}


def errors_in(folder: Path, text: str) -> list[str]:
    """Return the lines that mypy prints about a program."""
    path = folder / 'calls.py'
    path.write_text(text)
    out, err, status = api.run(['--config-file', str(ROOT / 'pyproject.toml'), '--no-error-summary', str(path)])
    assert not err and status == bool(out)
    return [line for line in out.splitlines() if ': note: ' not in line]


def test_right_calls_have_no_error(tmp_path: Path):
    assert errors_in(tmp_path, BEGINNING + RIGHT) == []


def test_each_wrong_call_is_an_error(tmp_path: Path):
    """Mutation: the package's names are Any for mypy, as a module's `__getattr__` makes them."""
    beginning = len(BEGINNING.splitlines())
    lines = errors_in(tmp_path, BEGINNING + ''.join(f'{call}\n' for call in WRONG))
    assert len(lines) == len(WRONG), '\n'.join(lines)
    for number, (line, named) in enumerate(zip(lines, WRONG.values(), strict=True), start=beginning + 1):
        assert f'calls.py:{number}: error: ' in line and named in line, line
