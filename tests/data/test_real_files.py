"""Every published data file is read, with the number of rows in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paths import ROOT

from llmfoundry_gauntlet.data.manifest import select_files
from llmfoundry_gauntlet.data.readers import read_rows
from llmfoundry_gauntlet.evaluation.inputs import load_suite


def test_every_published_file_is_read_without_an_error(real_data):
    tasks = {task.label: task for task in load_suite(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml').tasks}
    num_read = 0
    for file in select_files([*tasks]):
        if (real_data / file.path).is_file():
            examples = tasks[file.task].read(real_data).examples
            assert [example.row for example in examples] == list(range(file.num_rows)), file.path
            num_read += 1
    assert num_read >= 49


def texts_in(row: Mapping[str, Any]) -> list[str]:
    return [value for value in row.values() if isinstance(value, str)]


def test_oddities_of_the_real_files_survive_reading(real_data):
    """Return the counts of the files themselves."""

    def rows(uri: str) -> list[Any]:
        return [row for _, row in read_rows(str(real_data / f'{uri}.jsonl'))]

    def hard_spaces(uri: str) -> int:
        return sum('\u00a0' in text for row in rows(uri) for text in texts_in(row))

    assert hard_spaces('reading_comprehension/pubmed_qa_labeled') == 53
    assert hard_spaces('reading_comprehension/coqa') == 205
    assert hard_spaces('world_knowledge/mmlu') == 54
    assert rows('language_understanding/lambada_openai')[4462]['continuation'] == '\n\nrecorder'
    sums = rows('symbolic_problem_solving/simple_arithmetic_withspaces')
    assert all(row['continuation'].startswith(' ') for row in sums)
    assert {row['gold'] for row in rows('commonsense_reasoning/bigbench_strange_stories')} == {0}
