"""The published files of the Gauntlet, each read once: rows, sources, and the options of multiple-choice questions."""

from __future__ import annotations

import re

import pytest
from paths import ROOT, SHARED_DATA

from llmfoundry_gauntlet.config.tasks import MULTIPLE_CHOICE
from llmfoundry_gauntlet.data.published import select_files
from llmfoundry_gauntlet.data.score_rows import as_lettered
from llmfoundry_gauntlet.evaluation.suite import load_suite

CLUSTERS = {  # by stem; in files without a rule they are of repeated prompts
    'squad': 2067,
    'coqa': 499,
    'boolq': 2938,
    'agi_eval_lsat_rc': 41,
    'agi_eval_sat_en': 44,
    'agi_eval_lsat_ar': 40,
    'agi_eval_sat_math': 213,
    'logi_qa': 548,
    'math_qa': 2483,
    'bigbench_logical_deduction': 300,
    'simple_arithmetic_nospaces': 998,
    'simple_arithmetic_withspaces': 998,
    'bigbench_strange_stories': 48,
    'bigbench_conlang_translation': 8,
    'hellaswag': 9477,
    'winograd_wsc': 137,
    'mmlu': 13532,
    'winogender_mc_female': 60,
    'winogender_mc_male': 60,
    'human_eval': 164,
    'human_eval-0.25': 164,
    'human_eval-0.5': 164,
    'human_eval-0.75': 164,
    'human_eval_return_simple': 37,
    'human_eval_return_complex': 127,
    'processed_human_eval_cpp': 161,
    'processed_human_eval_js': 164,
    'lambada_openai': 5151,
    'enterprise_pii_classification': 3394,
    'bigbench_qa_wikidata': 20320,
    'jeopardy_all': 2109,
}


def test_every_published_file_is_read_and_every_multiple_choice_row_gives_its_options():
    """mmlu, math_qa and logi_qa have names, formulas and empty options that were once taken for letters."""
    folder = SHARED_DATA / 'local_data'
    found = load_suite(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml').tasks
    tasks = {(folder / task.dataset_uri).stem: task for task in found if (folder / task.dataset_uri).is_file()}
    if not tasks:
        pytest.skip(f'the published files ({folder}) are not here')
    assert len(tasks) >= 49
    num_rows, counts = {file.task: file.num_rows for file in select_files([])}, {}
    for stem, task in tasks.items():
        examples = task.read(folder).examples
        assert [example.row for example in examples] == list(range(num_rows[task.label])), stem
        counts[stem] = len({example.cluster for example in examples})
        for content in (one.content for one in examples if task.icl_task_type == MULTIPLE_CHOICE):
            question = as_lettered(content.query, content.choices, content.gold, '')
            if not all(map(re.compile(r'[A-Z]').fullmatch, content.choices)):
                assert [*map(str.strip, question.options)] == [*map(str.strip, content.choices)]
            assert question.gold == content.gold and question.text and content.query.startswith(question.text)
    assert {stem: counts[stem] for stem in CLUSTERS} == CLUSTERS
