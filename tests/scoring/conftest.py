"""Fixtures for tests of mathematics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest
from paths import SHARED_DATA

from llmfoundry_gauntlet.scoring.mathematics import Comparer


@pytest.fixture(scope='module')
def comparer() -> Iterator[Comparer]:
    with closing(Comparer()) as comparer:
        yield comparer


@pytest.fixture(scope='module')
def rows() -> list[dict[str, str]]:
    folder = SHARED_DATA / 'score' / 'hendrycks_math'
    if not folder.is_dir():
        pytest.skip('MATH (../shared/data/score/hendrycks_math) is not here')
    return [json.loads(line) for path in sorted(folder.glob('*.jsonl')) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope='module')
def fixes() -> dict[str, str]:
    path = SHARED_DATA / 'score' / 'upstream_prompts' / 'to_be_fixed_questions.json'
    if not path.is_file():
        pytest.skip("the reference's fix table (../shared/data/score/upstream_prompts) is not here")
    return {row['problem']: row['answer'] for row in json.loads(path.read_text())}
