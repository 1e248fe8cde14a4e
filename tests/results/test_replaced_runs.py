"""Replacing a run: at any moment a folder has the old run, the new run, or none, and never parts of both."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from failing_disk import failing_disk
from recorded_runs import LINES, RIDDLES, files_of

from llmfoundry_gauntlet.errors import RecordError
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.files import find_results, write_again, write_records
from llmfoundry_gauntlet.results.runs import Run, read_run, summarize_again

OLD, NEW = 'old', 'new'
Write = Callable[[Path, str], None]


@pytest.fixture
def earlier(make_run) -> Run:
    """Return a run of two tasks, enough to mix the files of two runs."""
    return read_run(make_run('run', [LINES, RIDDLES]))


def marked(earlier: Run, word: str) -> Evaluation:
    """Return an evaluation whose items all have this word."""
    evaluation = summarize_again(earlier, None, allow_missing=False)
    results_of_task = {}
    for key, results in evaluation.results.items():
        results_of_task[key] = tuple(replace(result, text=word) for result in results)
    return replace(evaluation, results=results_of_task)


@pytest.fixture(params=['evaluation', '--from'])
def write(request: pytest.FixtureRequest, earlier: Run) -> Write:
    """Write an evaluation that can be told from others, in both ways of writing."""
    evaluations = {word: marked(earlier, word) for word in (OLD, NEW)}

    def write(folder: Path, word: str) -> None:
        if request.param == '--from':
            write_again(folder, evaluations[word], {**earlier.record, 'model': {'name': word}})
        else:
            write_records(folder, evaluations[word], model={'name': word}, environment={}, training=None)

    return write


def what_is_read(folder: Path) -> str | None:
    """Return the word of a run, None without a run; a folder with a results.json must be a whole run."""
    if not (folder / 'results.json').exists():
        with pytest.raises(RecordError, match=r'there is no results\.json'):
            find_results(folder)
        return None
    assert len(find_results(folder)) == 1
    run = read_run(folder)
    words = {result.text for results in run.results.values() for result in results}
    assert words == {run.record['model']['name']}
    return words.pop()


def num_operations(folder: Path, write: Write) -> int:
    """Return the number of disk operations of replacing a run."""
    write(folder, OLD)
    with failing_disk() as done:
        write(folder, NEW)
    return len(done)


@pytest.mark.parametrize('killed', [False, True])
@pytest.mark.parametrize('is_replaced', [False, True])
def test_a_failed_replacement_leaves_the_old_run_the_new_run_or_none(
    tmp_path: Path, write: Write, killed: bool, is_replaced: bool
):
    words_read = []
    for at in range(num_operations(tmp_path / 'counted', write)):
        out = tmp_path / f'{at}'
        if is_replaced:
            write(out, OLD)
            (out / 'samples' / 'stale_0-shot.jsonl').write_text('{}\n')
        (out / 'journal').mkdir(parents=True)
        (out / 'journal' / 'items').touch()

        with contextlib.suppress(RecordError, OSError), failing_disk(at, killed=killed):
            write(out, NEW)

        words_read.append(what_is_read(out))
        assert (out / 'journal' / 'items').exists()
        # Writing once more gives the new run, and leaves nothing of the old one.
        write(out, NEW)
        assert what_is_read(out) == NEW
        assert files_of(out).keys() - {'journal/items'} == files_of(tmp_path / 'counted').keys()
    assert set(words_read) <= ({OLD, None, NEW} if is_replaced else {None, NEW})
    if killed and is_replaced:
        # The later the process ends, the further it came.
        assert [word for word, _ in itertools.groupby(words_read)] == [OLD, None, NEW]
        assert words_read.count(None) <= 8  # while names are changed, not while anything is written
