"""Public names, lazy imports, layers, and the YAML files and data of the package."""

import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from paths import ROOT

import llmfoundry_gauntlet
from llmfoundry_gauntlet import EvaluationSettings, errors
from llmfoundry_gauntlet.config import score, settings, tasks
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.evaluation.inputs import read_data
from llmfoundry_gauntlet.evaluation.suite import load_suite

SOURCES = {'tasks': 'icl_tasks', 'gauntlet': 'eval_gauntlet', 'score': 'score'}
HEAVY = ('torch', 'composer', 'transformers', 'datasets', 'pandas', 'altair')


def test_all_is_sorted_and_every_name_exists():
    names = llmfoundry_gauntlet.__all__
    assert names == sorted(names)
    assert set(names) == set(llmfoundry_gauntlet._HOMES)
    for name in names:
        assert getattr(llmfoundry_gauntlet, name).__name__ == name
    with pytest.raises(AttributeError, match='nothing'):
        _ = llmfoundry_gauntlet.nothing


@pytest.mark.parametrize(
    'statement',
    [
        'import llmfoundry_gauntlet',
        'import llmfoundry_gauntlet.cli',
        'import llmfoundry_gauntlet.evaluation.run',
        'import llmfoundry_gauntlet.results.runs, llmfoundry_gauntlet.results.report.printing',
        'from llmfoundry_gauntlet import Evaluation, Run, read_run, samples_frame, scores_frame',
    ],
)
def test_importing_loads_none_of_the_heavy_libraries(statement: str):
    code = f'{statement}; import sys; print([name for name in {HEAVY} if name in sys.modules])'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'


def test_the_package_is_typed():
    assert (Path(llmfoundry_gauntlet.__file__).parent / 'py.typed').is_file()
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
    assert 'py.typed' in project['tool']['setuptools']['package-data']['llmfoundry_gauntlet']


def test_imports_respect_the_layers():
    tool = Path(sys.executable).parent / 'lint-imports'
    done = subprocess.run([tool, '--no-cache'], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    'path', sorted((ROOT / 'yamls').rglob('*.yaml')), ids=lambda path: f'{path.parent.name}-{path.stem}'
)
def test_every_yaml_of_the_package_is_valid(path: Path, monkeypatch):
    """Files that it names are checked too, relative to the repository."""
    monkeypatch.chdir(ROOT)
    values = read_yaml(path)
    if path.parent.name == 'train':
        values = values['callbacks']['eval_gauntlet']
    if path.parent.name in ('train', 'eval'):
        known = {item.name for item in fields(EvaluationSettings)}
        found = decode_settings({key: value for key, value in values.items() if key in known})
        assert load_suite(found.tasks, found.gauntlet, found.score).warnings == ()
        return
    sources = {key: path if name in values else None for key, name in SOURCES.items()}
    suite = load_suite(**sources, is_partial='icl_tasks' not in values)
    assert suite.tasks or suite.gauntlet


def test_settings_are_frozen_and_keyword_only():
    for module in (score, settings, tasks):
        for name, value in vars(module).items():
            if is_dataclass(value) and value.__module__ == module.__name__:
                assert value.__dataclass_params__.frozen and all(item.kw_only for item in fields(value)), name
                assert '__slots__' in vars(value), name


def test_every_error_is_public():
    ours = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert ours and ours <= set(llmfoundry_gauntlet.__all__)


def test_the_gauntlet_has_the_specified_tasks_and_all_data():
    suite = load_suite(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml', ROOT / 'yamls/gauntlets/eval_gauntlet_v0.1.yaml')
    assert len(suite.tasks) == 57
    assert suite.warnings == ()
    assert {category.name: len(category.benchmarks) for category in suite.gauntlet.categories} == {
        'world_knowledge': 7,
        'commonsense_reasoning': 8,
        'language_understanding': 7,
        'symbolic_problem_solving': 15,
        'reading_comprehension': 8,
        'safety': 4,
        'programming': 8,
    }
    averages = {name: len(members) for name, members in suite.gauntlet.averages.items()}
    assert averages == {'core_average': 5, 'gauntlet_average': 7}
    examples = read_data(suite, str(ROOT / 'eval_data')).examples
    assert len(examples) == 57
    assert len([key for key in examples if key.startswith('human_eval')]) == 8
    assert min(map(len, examples.values())) >= 12


def test_shots_and_baselines_differ_from_upstream_only_where_specified(upstream_yamls: Path):
    ours = load_suite(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml', ROOT / 'yamls/gauntlets/eval_gauntlet_v0.1.yaml')
    theirs = load_suite(upstream_yamls / 'tasks_v0.1.yaml', upstream_yamls / 'eval_gauntlet_v0.1.yaml')
    shots = {task.label: task.num_fewshot for task in ours.tasks}
    different = {task.label for task in theirs.tasks if shots[task.label] != task.num_fewshot}
    assert different == {'enterprise_pii_classification', 'winogender_mc_male', 'winogender_mc_female'}
    assert len(shots) - len(theirs.tasks) == 8  # the code tasks, which upstream keeps elsewhere

    def baselines(suite):
        return {b.name: b.random_baseline for category in suite.gauntlet.categories for b in category.benchmarks}

    assert baselines(ours).items() >= baselines(theirs).items()


def test_golds_of_the_sample_data_vary():
    """Upstream has two files whose gold is always 0, which rewards a broken scorer."""
    examples = read_data(load_suite(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml'), str(ROOT / 'eval_data')).examples
    for task, rows in examples.items():
        num_choices = getattr(rows[0].content, 'num_choices', 1)
        golds = [row.content.gold for row in rows]
        assert max(golds.count(gold) for gold in range(num_choices)) <= 0.7 * len(golds) or num_choices == 1, task
