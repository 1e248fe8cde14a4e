"""Fixtures and paths that all tests share."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from character_tokenizer import CharacterTokenizer
from paths import HAS_COMPOSER, ROOT, SHARED_DATA

hypothesis.settings.register_profile(
    'busy machines', deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile('busy machines')

# Modules that take more than about three seconds: `make test-all` runs them.
SLOW_BY_PREFIX = {
    'composer/test_': 'dry_run',
    'data/test_': 'published real_files score_rows_reading stores',
    'engine/test_': (
        'all_families all_other_families balance cuda generate generate_models logits model plan probe '
        'probe_generation rotary rounding tree_attention'
    ),
    'integration/test_': 'checkpoint_sources foundry_keys loggers resume resume_generations training_resumed watch',
    'metrics/test_': 'consistency errors_cover',
    'results/report/test_': 'browser compare gate_command page',
    'results/test_': 'replaced_runs',
    'tasks/test_': 'lm_eval',
    'runtime/test_': (
        'alert_history averages claims generation_journal generation_run metric_loggers model_errors models '
        'other_checkpoints progress time_budget without_composer'
    ),
    'scoring/code/test_': 'attacks execution servers solutions',
    'scoring/test_': 'mathematics mathematics_process mathematics_reference mathematics_wrong text',
    'test_': 'bench extending generation_parity invariance lm_eval real_weights score score_elsewhere',
}
SLOW = {prefix + name for prefix, names in SLOW_BY_PREFIX.items() for name in names.split()}

# The modules that take longest, which run first so that no worker ends with one while the others are idle.
LONGEST = [
    'scoring/code/test_attacks',
    'engine/test_cuda',
    'engine/test_generate',
    'engine/test_all_families',
    'engine/test_all_other_families',
    'test_generation_parity',
    'test_parity',
    'integration/test_demo',
    'integration/test_fsdp',
    'scoring/code/test_servers',
    'scoring/test_mathematics_reference',
    'engine/test_probe',
    'integration/test_resume',
    'test_score_parity',
]

os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')


def module_of(path: Path) -> str:
    """Return the path of a test module below tests/, without its suffix."""
    return path.relative_to(ROOT / 'tests').with_suffix('').as_posix()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip slow modules without importing them if only fast tests are selected."""
    return True if config.option.markexpr == 'not slow' and module_of(collection_path) in SLOW else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow modules, and run the longest modules first; long tests are slow too."""
    items.sort(key=lambda item: LONGEST.index(name) if (name := module_of(item.path)) in LONGEST else len(LONGEST))
    for item in items:
        if module_of(item.path) in SLOW or item.get_closest_marker('long'):
            item.add_marker('slow')


NEEDS_COMPOSER = re.compile(
    r'^(?:from|import) (?:composer|composer_training|logged|train|llmfoundry_gauntlet\.composer)\b'
    r'|^from llmfoundry_gauntlet import .*\b(?:EvalGauntlet|build_icl_evaluators)\b',
    re.MULTILINE,
)


class WithoutComposer(pytest.Module):
    """A test module that imports Composer, where that is not installed."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip('mosaicml is not installed', allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the modules that import Composer where it is not installed."""
    if HAS_COMPOSER or not NEEDS_COMPOSER.search(module_path.read_text('utf-8')):
        return None
    return WithoutComposer.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True, scope='session')
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a cache folder of the tests' own, also for processes that they start."""
    folder = tmp_path_factory.mktemp('tokens')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('LLMFOUNDRY_GAUNTLET_CACHE', str(folder))
        yield folder


@pytest.fixture(scope='session')
def tiny_llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from score_runs import save_tiny_llamas  # which loads torch

    return save_tiny_llamas(tmp_path_factory.mktemp('models'))


@pytest.fixture(scope='session')
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model of 259 tokens as one and several files, as a Composer checkpoint, whole and sharded; and tasks."""
    import networks  # which load torch
    import tiny
    import torch

    folder = tmp_path_factory.mktemp('models')
    tiny.write_tasks(folder)
    network = networks.network('llama', vocab_size=259, max_position_embeddings=128)
    tiny.save(network, folder / 'one')
    tiny.save(network, folder / 'several', max_shard_size='20KB')
    torch.save(tiny.content_of(network), folder / 'whole.pt')
    tiny.save_sharded(tiny.content_of(network), folder / 'sharded')
    return folder


@pytest.fixture
def gauntlet(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs `gauntlet` and returns status, standard output and standard error."""
    from command_line import run_cli  # after the environment is set

    def call(*words: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run_cli(*words)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def character_tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer()


@pytest.fixture
def real_data() -> Path:
    """Return the folder of real evaluation files, which are not part of the project."""
    folder = SHARED_DATA / 'local_data'
    if not folder.is_dir():
        pytest.skip('the real evaluation files (../shared/data/local_data) are not here')
    return folder


@pytest.fixture
def upstream_yamls() -> Path:
    """Return the folder of llm-foundry's YAML files."""
    folder = SHARED_DATA / 'upstream_yamls'
    if not folder.is_dir():
        pytest.skip("llm-foundry's YAML files (../shared/data/upstream_yamls) are not here")
    return folder


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes rows as JSON lines into the test's folder; strings are written unchanged."""

    def write(name: str, rows: Sequence[Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(''.join(f'{row if isinstance(row, str) else json.dumps(row)}\n' for row in rows))
        return path

    return write


@pytest.fixture(scope='module')
def browser() -> Iterator[Any]:
    path = shutil.which('chromium')
    if path is None:
        pytest.skip('there is no chromium on the path')
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=['--no-sandbox'])
        yield started
        started.close()
