"""Every real data file is read, row by row as many as were counted in the files themselves."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Any

import pytest

from llmfoundry_gauntlet.data.readers import read_rows
from llmfoundry_gauntlet.evaluation.inputs import load_suite

KINDS = {  # rows of the real files, by task type and folder
    'language_modeling': {
        'reading_comprehension': {'pubmed_qa_labeled': 1000, 'squad': 10570, 'coqa': 7983},
        'world_knowledge': {'jeopardy_all': 2117, 'jeopardy_small': 16, 'bigbench_qa_wikidata': 20321},
        'symbolic_problem_solving': {
            **{'bigbench_dyck_languages': 1000, 'bigbench_cs_algorithms': 1320, 'bigbench_operators': 210},
            **{'bigbench_repeat_copy_logic': 32, 'bigbench_simple_arithmetic': 60},
            **{'simple_arithmetic_withspaces': 1000, 'simple_arithmetic_nospaces': 1000},
        },
        'language_understanding': {
            **{'lambada_openai': 5153, 'lambada_openai_small': 8, 'bigbench_conlang_translation': 164},
        },
    },
    'multiple_choice': {
        'reading_comprehension': {
            **{'bigbench_understanding_fables': 189, 'boolq': 3270, 'agi_eval_lsat_rc': 268},
            **{'agi_eval_lsat_lr': 510, 'agi_eval_sat_en': 206},
        },
        'commonsense_reasoning': {
            **{'bigbench_strategy_qa': 2289, 'bigbench_strange_stories': 174, 'bigbench_novel_concepts': 32},
            **{'copa': 100, 'piqa': 1838, 'openbook_qa': 500, 'siqa': 1954, 'commonsense_qa': 1221},
        },
        'world_knowledge': {
            **{'mmlu': 14042, 'arc_easy': 2376, 'arc_challenge': 1172, 'bigbench_misconceptions': 219},
            **{'bigbench_movie_recommendation': 500},
        },
        'symbolic_problem_solving': {
            **{'bigbench_elementary_math_qa': 38160, 'bigbench_logical_deduction': 1500, 'math_qa': 2983},
            **{'logi_qa': 651, 'agi_eval_lsat_ar': 230},
        },
        'language_understanding': {
            **{'hellaswag': 10042, 'bigbench_language_identification': 10000, 'bigbench_conceptual_combinations': 103},
        },
        'safety': {
            **{'bbq_standin': 17628, 'enterprise_pii_classification': 3395},
            **{'winogender_mc_male': 60, 'winogender_mc_female': 60},
        },
    },
    'schema': {'language_understanding': {'winograd_wsc': 273, 'winogrande': 1267}},
    'generation_task_with_answers': {
        'world_knowledge': {'triviaqa_sm_sub': 3000, 'triviaqa_small': 32},
        'symbolic_problem_solving': {
            **{'agi_eval_sat_math': 220, 'aqua': 245, 'gsm8k': 1319, 'gsm8k_prepended_8shot': 1319, 'svamp': 300},
        },
    },
    'code_evaluation': {
        'programming': {
            **{'human_eval': 164, 'human_eval-0.25': 164, 'human_eval-0.5': 164, 'human_eval-0.75': 164},
            **{'human_eval_return_simple': 37, 'human_eval_return_complex': 127},
            **{'processed_human_eval_cpp': 161, 'processed_human_eval_js': 164},
        }
    },
}


@pytest.mark.parametrize('kind', KINDS)
def test_every_real_file_is_read_without_an_error(real_data, kind: str):
    known = {f'{folder}/{stem}.jsonl': count for folder, stems in KINDS[kind].items() for stem, count in stems.items()}
    there = {uri: count for uri, count in known.items() if (real_data / uri).is_file()}
    assert there
    for uri, count in there.items():
        entry = {'label': 't', 'dataset_uri': uri, 'num_fewshot': [0], 'icl_task_type': kind}
        task = load_suite([entry]).tasks[0]
        examples = task.read(real_data).examples
        assert [row.row for row in examples] == list(range(count)), uri


def test_every_real_file_is_listed(real_data):
    known = {f'{folder}/{stem}' for folders in KINDS.values() for folder, stems in folders.items() for stem in stems}
    assert {str(path.relative_to(real_data))[: -len('.jsonl')] for path in real_data.rglob('*.jsonl')} <= known


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


def test_a_real_file_reencoded_gives_the_same_rows(real_data, tmp_path):
    path = real_data / 'reading_comprehension/boolq.jsonl'
    content, expected = path.read_bytes(), read_rows(str(path))
    for changed in (
        gzip.compress(content, mtime=0),
        b'\xef\xbb\xbf' + content,
        content.replace(b'\n', b'\r\n'),
        content.rstrip(b'\n'),
        content.replace(b'\n', b' \t\n'),
    ):
        (tmp_path / 'boolq.jsonl').write_bytes(changed)
        assert read_rows(str(tmp_path / 'boolq.jsonl')) == expected
