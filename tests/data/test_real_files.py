"""The published files, each read once: rows, oddities, sources, and the options of multiple-choice questions."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.tasks import MULTIPLE_CHOICE
from llmfoundry_gauntlet.data.published import select_files
from llmfoundry_gauntlet.data.score_rows import as_lettered, split_list
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.types import Example

CLUSTERS = {  # by stem; in files without a rule they are of repeated prompts
    **{'squad': 2067, 'coqa': 499, 'boolq': 2938, 'agi_eval_lsat_rc': 41, 'agi_eval_sat_en': 44},
    **{'agi_eval_lsat_ar': 40, 'agi_eval_sat_math': 213, 'logi_qa': 548, 'math_qa': 2483},
    **{'bigbench_logical_deduction': 300, 'simple_arithmetic_nospaces': 998, 'simple_arithmetic_withspaces': 998},
    **{'bigbench_strange_stories': 48, 'bigbench_conlang_translation': 8, 'hellaswag': 9477, 'winograd_wsc': 137},
    **{'mmlu': 13532, 'winogender_mc_female': 60, 'winogender_mc_male': 60, 'human_eval': 164, 'human_eval-0.25': 164},
    **{'human_eval-0.5': 164, 'human_eval-0.75': 164, 'human_eval_return_simple': 37, 'human_eval_return_complex': 127},
    **{'processed_human_eval_cpp': 161, 'processed_human_eval_js': 164, 'lambada_openai': 5151},
    **{'enterprise_pii_classification': 3394, 'bigbench_qa_wikidata': 20320, 'jeopardy_all': 2109},
}
LISTED = {  # rows whose query ends in a list of its options
    **{'commonsense_qa': 1221, 'bigbench_conceptual_combinations': 103, 'bigbench_language_identification': 10000},
    **{'agi_eval_lsat_rc': 268, 'agi_eval_sat_en': 206, 'bigbench_understanding_fables': 189},
    **{'enterprise_pii_classification': 3395, 'agi_eval_lsat_ar': 230, 'bigbench_logical_deduction': 1500},
    **{'logi_qa': 651, 'math_qa': 2983, 'mmlu': 14042},
}


@pytest.fixture(scope='module')
def tasks() -> dict[str, Any]:
    """Return the Gauntlet's tasks whose published files are here, by the files' stems."""
    folder = SHARED_DATA / 'local_data'
    found = load_suite(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml').tasks
    there = {(folder / task.dataset_uri).stem: task for task in found if (folder / task.dataset_uri).is_file()}
    if not there:
        pytest.skip(f'the published files ({folder}) are not here')
    return there


@pytest.fixture(scope='module')
def examples(tasks: dict[str, Any]) -> dict[str, list[Example]]:
    """Return the examples of each file by its stem."""
    return {stem: list(task.read(SHARED_DATA / 'local_data').examples) for stem, task in tasks.items()}


def test_every_published_file_is_read_without_an_error(tasks: dict[str, Any], examples: dict[str, list[Example]]):
    num_rows = {file.task: file.num_rows for file in select_files([])}
    for stem, found in examples.items():
        assert [example.row for example in found] == list(range(num_rows[tasks[stem].label])), stem
    assert len(examples) >= 49
    counts = {stem: len({example.cluster for example in examples[stem]}) for stem in CLUSTERS}
    assert counts == CLUSTERS


def test_every_row_of_every_real_multiple_choice_file_gives_its_options(
    tasks: dict[str, Any], examples: dict[str, list[Example]]
):
    """mmlu, math_qa and logi_qa have names, formulas and empty options that were once taken for letters."""
    listed: Counter[str] = Counter()
    empty: Counter[str] = Counter()
    chosen = [stem for stem, task in tasks.items() if task.icl_task_type == MULTIPLE_CHOICE]
    assert len(chosen) == 24
    for stem in chosen:
        for content in (example.content for example in examples[stem]):
            question = as_lettered(content.query, content.choices, content.gold, '')
            listed[stem] += split_list(content.query, len(content.choices))[1] is not None
            empty[stem] += '' in question.options
            if not all(map(re.compile(r'[A-Z]').fullmatch, content.choices)):
                assert [*map(str.strip, question.options)] == [*map(str.strip, content.choices)]
            assert question.gold == content.gold and question.text and content.query.startswith(question.text)
        assert listed[stem] in (0, len(examples[stem]))
    assert +listed == LISTED and +empty == {'math_qa': 62}
