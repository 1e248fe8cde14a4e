"""Samples are read back as they were written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfoundry_gauntlet.metrics.metrics import RENAMED
from llmfoundry_gauntlet.results.files import read_results, write_lines
from llmfoundry_gauntlet.results.samples import read_samples, sample_line, samples_file
from llmfoundry_gauntlet.types import ItemKey, ItemResult

TEXTS = st.text(max_size=8) | st.sampled_from(['\n', '\r\n', '\x85', '\u2028', '\0', '"\\', 'é\U0001f600'])
NUMBERS = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1 / 3])
LOGPROBS = st.none() | st.lists(NUMBERS, min_size=1, max_size=4).map(tuple)
COUNTS = st.none() | st.lists(st.integers(0, 10**6), min_size=1, max_size=4).map(tuple)
TEXT = st.none() | TEXTS
FINITE = st.floats(allow_nan=False, allow_infinity=False)
RESULTS = st.builds(
    ItemResult,
    key=st.builds(
        ItemKey,
        task=st.just('t/0-shot'),
        row=st.integers(0, 2**40),
        file=TEXT,
        variant=TEXT,
        sample=st.integers(0, 200),
    ),
    gold=TEXT | st.integers(0, 25),
    predicted=st.none() | st.integers(0, 25),
    score=st.none() | st.floats(0, 1),
    prompt_sha256=TEXTS,
    prompt_shortened=st.booleans(),
    metrics=st.dictionaries(TEXTS.filter(lambda name: name not in RENAMED), FINITE, max_size=3),
    facts=st.dictionaries(TEXTS, TEXTS | st.integers(), max_size=3),
    num_shots=st.none() | st.integers(0, 10) | st.floats(0, 10),
    cluster=st.just('') | st.integers(0, 2**64 - 1).map('{:016x}'.format),
    **dict.fromkeys(('category', 'reason', 'text', 'answer'), TEXT),
    **dict.fromkeys(('num_tokens', 'num_characters', 'num_bytes'), COUNTS),
    logprobs=LOGPROBS,
)


def comparable(result: ItemResult) -> list[Any]:
    """Return all fields in comparable form: non-finite values are equal, and -0.0 differs from 0.0."""
    fields = {name: getattr(result, name) for name in ItemResult.__dataclass_fields__}
    if result.logprobs is not None:
        fields['logprobs'] = [repr(value) if math.isfinite(value) else 'no number' for value in result.logprobs]
    fields['score'] = repr(fields['score'])
    return [(name, type(value).__name__, value) for name, value in fields.items()]


@given(st.lists(RESULTS, max_size=4))
def test_samples_are_read_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, results):
    folder = tmp_path_factory.getbasetemp() / 'round_trip'
    write_lines(samples_file(folder, 't/0-shot'), map(sample_line, results))
    read_back = read_samples(folder, 't/0-shot')
    assert list(map(comparable, read_back)) == list(map(comparable, results))
    assert list(map(sample_line, read_back)) == list(map(sample_line, results))


# A line of a samples file as 0.1.0 wrote it; its metrics and its reason are those of a longer generation.
LINE_OF_0_1_0 = (
    '{"file": null, "row": 3, "category": null, "variant": null, "sample": 0, "gold": "0", "predicted": null, '
    '"credit": 1.0, "logprobs": null, "num_tokens": null, "text": "0", "answer": "0", "status": "scored", '
    '"reason": "no answer found in the reply; cut at the token limit", "prompt_sha256": "760435ae", '
    '"cluster": "7ae194f66383e142", "truncated": true, "marks": {"StrictMatch": 0.0, "CutShare": 1.0}}'
)


def test_samples_of_0_1_0_are_read(tmp_path: Path):
    write_lines(samples_file(tmp_path, 't/0-shot'), [LINE_OF_0_1_0])

    (result,) = read_samples(tmp_path, 't/0-shot')

    assert result == ItemResult(
        key=ItemKey('t/0-shot', 3),
        category=None,
        gold='0',
        predicted=None,
        score=1.0,
        logprobs=None,
        num_tokens=None,
        text='0',
        answer='0',
        reason='no answer found in the generation; truncated at the token limit',
        prompt_sha256='760435ae',
        prompt_shortened=True,
        cluster='7ae194f66383e142',
        metrics={'StrictMatch': 0.0, 'TruncatedShare': 1.0},
        num_shots=None,
    )


def test_names_in_records_of_0_1_0_are_read(tmp_path: Path):
    metrics = {'StrictMatch': {'value': 0.5}, 'CutShare': {'value': 1.0}}
    record = {
        'format_version': 1,
        'training': None,
        'tasks': {'t/0-shot': {'metrics': metrics, 'num_truncated': 3}},
        'metrics': {'gauntlet/truncated_items': 3},
    }
    (tmp_path / 'results.json').write_text(json.dumps(record))

    current = read_results(tmp_path)

    task = current['tasks']['t/0-shot']
    assert list(task['metrics']) == ['StrictMatch', 'TruncatedShare']
    assert task['num_shortened'] == 3
    assert current['metrics'] == {'gauntlet/shortened_items': 3}
