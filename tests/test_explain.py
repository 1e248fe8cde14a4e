"""`gauntlet explain` shows the prompt and tokens of an evaluation, and warnings about them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from paths import ROOT

from llmfoundry_gauntlet.cli.explain import find_item, tokenize
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import prepare_evaluation
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.tasks.items import Preparation
from llmfoundry_gauntlet.types import ScoreRequest

TASKS = ROOT / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml'
DATA = ROOT / 'eval_data'
WITH_BOS = ROOT / 'tests' / 'fixtures' / 'models' / 'rotary_bos'
WITHOUT_SPACES = ROOT / 'tests' / 'fixtures' / 'models' / 'alibi_pad_eos'
ONE_OF_EACH = ('boolq', 'jeopardy', 'winograd', 'gsm8k', 'lambada_openai', 'winogrande')


@pytest.fixture(scope='module')
def encoder() -> Encoder:
    from transformers import AutoTokenizer

    return Encoder(AutoTokenizer.from_pretrained(WITH_BOS))


@pytest.mark.parametrize('max_seq_len', [2048, 160])
def test_tokens_are_those_of_an_evaluation(encoder: Encoder, max_seq_len: int):
    entries = [t for t in yaml.safe_load(TASKS.read_text())['icl_tasks'] if t['label'] in ONE_OF_EACH]
    data = load_data(decode_settings({'tasks': entries, 'data_root': str(DATA)}))
    prepared = prepare_evaluation(data, encoder, max_seq_len=max_seq_len)
    checked = 0
    for key, item in prepared.items.items():
        if key.row not in (0, 7) or key.is_gold:
            continue
        task = prepared.tasks[key.task]
        examples = data.examples[key.task]
        longest = min(task.max_seq_len or max_seq_len, max_seq_len)
        preparation = Preparation(task=task, examples=examples, encoder=encoder, max_seq_len=longest)

        explained = tokenize(find_item(task, examples, key.row), preparation)

        request = item.request
        assert explained.item.prompt_sha256 == item.prompt_sha256
        if isinstance(request, ScoreRequest):
            pairs = zip(request.contexts, request.continuations, strict=True)
            expected_rows = [np.concatenate(pair) for pair in pairs]
            nums_scored = [len(continuation) for continuation in request.continuations]
        else:
            expected_rows = [request.context]
            nums_scored = [0]
        assert [[token.id for token in row] for row in explained.rows] == [ids.tolist() for ids in expected_rows]
        assert [sum(token.part == 'continuation' for token in row) for row in explained.rows] == nums_scored
        assert any(warning.startswith('shortened') for warning in explained.warnings) == request.prompt_shortened

        # The shots come first, and the context begins where they end.
        if not request.prompt_shortened:
            (preamble,) = encoder.preambles([explained.prompt.preamble]).values()
            parts_of_shots = {token.part for row in explained.rows for token in row[: len(preamble)]}
            assert parts_of_shots <= {'special', 'shots'}
            first_parts = {row[len(preamble)].part for row in explained.rows if len(row) > len(preamble)}
            assert first_parts == {'context'}
        checked += 1
    assert checked == 2 * len(ONE_OF_EACH)


def test_the_prompt_is_shown_with_visible_white_space(gauntlet, write_jsonl, tmp_path: Path):
    write_jsonl('rows.jsonl', [{'context': context, 'continuation': 'd'} for context in ('a\tb\n c', 'e\tf\n g')])
    task = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [0, 1], 'icl_task_type': 'language_modeling'}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task]}))
    status, out, _ = gauntlet('explain', 't', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path)
    assert status == 0
    assert 't/0-shot  (language_modeling)' in out
    assert '     context │ a⇥\tb↵\n             │ ·c\ncontinuation │ ·d\n' in out
    _, out, _ = gauntlet(
        'explain', 't', '--num-fewshot', 1, '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path
    )
    assert 't/1-shot' in out
    assert '       shots │ e⇥\tf↵\n             │ ·g·d\n' in out


@pytest.mark.parametrize(
    ('words', 'line_break'), [((), '·↵'), (('--model', WITH_BOS), '·↵'), (('--model', WITHOUT_SPACES), '↵')]
)
def test_choices_are_shown_with_the_space_that_is_scored(
    gauntlet, write_jsonl, tmp_path: Path, words: tuple, line_break: str
):
    """With a model as its tokenizer has them, without one as most have; choices may begin with line breaks."""
    write_jsonl('rows.jsonl', [{'query': '\nHue?', 'choices': ['red', ' deep blue', '\ngrey'], 'gold': 0}])
    task = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}
    task |= {'strip_dataset': False, 'continuation_delimiter': ''}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task]}))

    status, out, _ = gauntlet('explain', 't', *words, '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path)

    assert status == 0
    assert '     context │ ↵\n             │ Hue?\n' in out
    of_last = f'continuation │ {line_break}\n             │ grey\n'
    assert f'continuation │ ·red\ncontinuation │ ·deep·blue\n{of_last}' in out
    assert "  the question begins with a line break: '\\nHue?'\n" in out
    assert "  choice 2 begins with a line break: '\\ngrey'\n" in out
    assert out.count('begins with a line break') == 2


def test_control_characters_of_a_row_do_not_reach_the_terminal(gauntlet, write_jsonl, tmp_path: Path):
    """Colours, a title, a cleared screen, and the one-byte form of an escape sequence."""
    hostile = 'a\x1b[31mb\x1b]0;title\x07c\x1b[2J\x9b31m\x7f\x00\rd'
    row = {'query': hostile, 'choices': [hostile, 'e'], 'gold': 0, 'category': hostile}
    write_jsonl('rows.jsonl', [row, {**row, 'query': 'f'}])
    task = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [1], 'icl_task_type': 'multiple_choice'}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [{**task, 'has_categories': True}]}))

    status, out, _ = gauntlet('explain', 't', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path)

    assert status == 0
    assert [character for character in out if not character.isprintable() and character != '\n'] == []
    assert out.count('a␛[31mb␛]0;title␇c␛[2J\ufffd31m␡␀␍d') == 4  # category, query, and the choice twice


def test_shots_that_were_drawn_again_are_named(gauntlet, write_jsonl, tmp_path: Path):
    """Of three rows with the same question two are drawn; the only other row takes the place of one of them."""
    rows = [{'context': context, 'continuation': 'd'} for context in ('a', 'a', 'a', 'b')]
    write_jsonl('rows.jsonl', rows)
    task = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [1], 'icl_task_type': 'language_modeling'}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task]}))
    common = ('explain', 't', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--row')

    printed = [gauntlet(*common, row)[1] for row in range(4)]
    _, by_reference, _ = gauntlet(*common, 0, '--semantics', 'reference')

    *with_same_question, of_other_row = printed
    assert all('shots  rows 3' in out for out in with_same_question)
    assert any('(instead of ' in out and 'with the same question)' in out for out in with_same_question)
    assert 'instead' not in of_other_row
    assert 'shots  rows ' in by_reference
    assert 'instead' not in by_reference


def test_every_task_of_the_gauntlet_is_explained(gauntlet):
    labels = [task['label'] for task in yaml.safe_load(TASKS.read_text())['icl_tasks']]
    assert len(labels) == 57
    for label in labels:
        status, out, err = gauntlet('explain', label, '--row', 1, '--data-root', DATA)
        assert status == 0, err
        assert 'Prompt, ' in out and '│' in out and 'rule: ' in out


@pytest.mark.parametrize(
    ('answer', 'taken', 'score'),
    [('It is 6 * 5 - 12. #### 18', '18', 1), ('#### 19', '19', 0), ('18\nQ: and now? #### 3', '18', 1)],
)
def test_an_answer_is_scored_as_in_an_evaluation(gauntlet, write_jsonl, tmp_path, answer, taken, score):
    row = {'context': 'Six times five less twelve?', 'answer': '18', 'chain_of_thought': '30 - 12 = 18'}
    write_jsonl('rows.jsonl', [row])
    keys = {'icl_task_type': 'generation_task_with_answers', 'cot_delimiter': '#### ', 'num_fewshot': [0]}
    task = {'label': 't', 'dataset_uri': 'rows.jsonl', 'early_stopping_criteria': ['\n\n', 'Q: '], **keys}
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task]}))
    words = ('explain', 't', '--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--answer', answer)
    status, out, err = gauntlet(*words)
    assert status == 0, err
    assert f'extracted answer: {taken}\n' in out
    assert f'score: {score}' in out
    _, out, _ = gauntlet(*words, '--semantics', 'reference')
    assert r"  a generation ends before a match of '\n\n', 'Q: ', or with the end of text" in out


@pytest.mark.parametrize(
    ('words', 'ends'),
    [
        (['triviaqa_sm_sub'], r"before '\n' after the answer, or with the end of text"),
        (['gsm8k'], r"before '\nQ: ', or before '\n' after the answer that follows ' #### ', or with the end of text"),
        (['human_eval_cpp'], 'where the c++ program ends, or with the end of text'),
        (['human_eval'], 'where the python program ends, or with the end of text'),
        (
            ['human_eval', '--semantics', 'reference'],
            r"before '\na', '\nb', '\nc', '\nd', '\ne', '\nf' and 58 others, or with the end of text",
        ),
        (['gsm8k', '--semantics', 'reference'], 'with the end of text'),
    ],
)
def test_the_end_of_a_generation_is_shown(gauntlet, words, ends):
    status, out, err = gauntlet('explain', *words, '--data-root', DATA)
    assert status == 0, err
    assert f'  a generation ends {ends}\n' in out


def test_a_program_is_run_to_be_scored_and_a_schema_has_no_text(gauntlet):
    words = ('explain', 'human_eval', '--data-root', DATA, '--sandbox', 'rlimits', '--answer', '    return None')
    status, out, err = gauntlet(*words)
    assert status == 0, err
    assert 'score: 0' in out
    status, _, err = gauntlet('explain', 'winograd', '--data-root', DATA, '--answer', 'x')
    assert status == 2 and 'a text cannot be scored here' in err


def test_lost_spaces_and_a_second_bos_give_warnings(gauntlet, tmp_path: Path):
    (entry,) = [t for t in yaml.safe_load(TASKS.read_text())['icl_tasks'] if t['label'] == 'copa']
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [{**entry, 'prompt_string': '<s>'}]}))
    second_bos = ('--tasks', tmp_path / 'tasks.yaml')
    for model, more, warning in (
        (WITH_BOS, (), 'none'),
        (WITH_BOS, second_bos, 'double bos: the prompt begins with two <s>'),
        (WITHOUT_SPACES, (), 'none'),
        (
            WITHOUT_SPACES,
            ('--semantics', 'reference'),
            "choice 0: lost leading space: the model reads 'the cook put in too much salt.'",
        ),
    ):
        _, out, _ = gauntlet('explain', 'copa', '--row', 3, '--data-root', DATA, '--model', model, *more)
        assert out.partition('Warnings\n')[2].lstrip().startswith(warning)


def test_variants_of_score_are_explained(gauntlet):
    score = ('--score', ROOT / 'yamls' / 'score' / 'mmlu_pro.yaml', '--data-root', DATA, '--num-fewshot', 0)
    status, out, err = gauntlet('explain', 'score_mmlu_pro', *score, '--variant', 'option_order:B')
    assert status == 0, err
    assert 'variant  option_order:B' in out
