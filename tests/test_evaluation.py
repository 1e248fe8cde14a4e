import hashlib
import logging
from dataclasses import replace

import pytest
from paths import ROOT

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.data import published
from llmfoundry_gauntlet.data.published import read_manifest
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, STREAM
from llmfoundry_gauntlet.errors import ConfigError, DataError
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import composites_of, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.tasks.encode import Encoder


def task_of(label='mc', uri='rows.jsonl', **changes):
    task = {'label': label, 'dataset_uri': uri, 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}
    return {**task, **changes}


def data_of(root, *tasks, **settings):
    return load_data(decode_settings({'tasks': list(tasks), 'data_root': str(root), **settings}))


def rows_of(*queries, **more):
    return [{'query': query, 'choices': ['yes', 'no'], 'gold': 0, **more} for query in queries]


@pytest.fixture
def prepared(write_jsonl, tmp_path, character_tokenizer):
    """Prepare three items of about 15, 45 and 15 tokens, one per character; the last contains a 'z'."""
    queries = ('one and one?', 'one and one and one and one and one and?', 'z and one?')
    write_jsonl('rows.jsonl', rows_of(*queries))
    return prepare_evaluation(data_of(tmp_path, task_of()), Encoder(character_tokenizer), max_seq_len=64)


def test_tokens_per_batch_below_the_longest_request_is_raised_with_a_warning(prepared, caplog):
    assert plan_evaluation(prepared, tokens_per_batch=64).tokens_per_batch == 64
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        planned = plan_evaluation(prepared, tokens_per_batch=5)
    assert planned.tokens_per_batch == max(batch.num_tokens for batch in planned.batches) > 40
    (record,) = caplog.records
    assert 'tokens_per_batch is 5' in record.message and str(planned.tokens_per_batch) in record.message
    assert prepared.longest == len('^one and one and one and one and one and? ye')  # the last is never an input


def test_requests_with_a_hidden_token_run_in_padded_rows(prepared, character_tokenizer):
    """A stream has no mask to hide it."""
    (hidden,) = character_tokenizer('z', add_special_tokens=False)['input_ids']
    planned = plan_evaluation(prepared, tokens_per_batch=200, hidden_token_id=hidden)
    layouts = {request.key.row: batch.layout for batch in planned.batches for request in batch.requests}
    assert layouts == {0: STREAM, 1: STREAM, 2: PADDED_ROWS}


@pytest.mark.parametrize(('wanted', 'own', 'asked'), [(3, 200, 3), (300, 200, 200), (None, 200, 200), (3, None, 3)])
def test_the_smaller_of_two_subset_sizes_counts(wanted, own, asked):
    """Mutation: the dataset's own one, which hid --subset-items for every shipped SCORE file."""
    score = [{'dataset': 'math', 'subset_items': own}]
    data = load_data(decode_settings({'score': score, 'data_root': str(ROOT / 'eval_data'), 'subset_items': wanted}))
    (task,) = data.tasks.values()
    assert task.spec.subset_items == asked
    questions = {(example.file, example.row) for example in data.examples['score_math/0-shot']}
    assert len(questions) == min(asked, 84)  # sample problems


CATEGORIES = ['a'] * 3 + ['b'] * 12


@pytest.mark.parametrize(
    ('num_rows', 'changes', 'named'),
    [
        (4, {'num_fewshot': [0, 10]}, ['mc/10-shot: prompts have 3 of 10 shots', '4 rows']),
        (10, {'num_fewshot': [10]}, ['9 of 10 shots', '10 rows']),
        (11, {'num_fewshot': [10]}, None),
        (15, {'num_fewshot': [10], 'has_categories': True}, ['2 of 10 shots', "category 'a'", '1 of 2 categories']),
    ],
)
def test_too_few_rows_for_the_shots_are_a_warning_with_both_numbers(write_jsonl, tmp_path, num_rows, changes, named):
    rows = []
    for number, category in enumerate(CATEGORIES[:num_rows]):
        rows += rows_of(f'{number}?', category=category)
    write_jsonl('rows.jsonl', rows)

    warnings = data_of(tmp_path, task_of(**changes)).warnings

    assert len(warnings) == (named is not None)
    for text in named or ():
        assert text in warnings[0]


def test_repeated_choices_are_one_warning_with_their_number(write_jsonl, tmp_path):
    choices = [['yes', 'no', 'no'], ['yes', 'yes', 'no'], ['yes', 'no', 'perhaps']]
    rows = [{'query': f'{i}?', 'choices': choices[i % 3], 'gold': 0} for i in range(9)]
    write_jsonl('rows.jsonl', rows)

    (warning,) = data_of(tmp_path, task_of(num_fewshot=[0, 1])).warnings

    assert 'mc: 6 of 9 rows have a choice twice, 3 of them the right one' in warning
    assert 'gauntlet explain mc --row 0' in warning


def test_repeated_choices_of_a_published_file_are_no_warning_of_a_run(write_jsonl, tmp_path, monkeypatch):
    """docs/tasks.md lists them."""
    rows = [{'query': f'{number}?', 'choices': ['yes', 'no', 'no'], 'gold': 0} for number in range(9)]
    path = write_jsonl('rows.jsonl', rows)
    (first, *others) = read_manifest()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    known = replace(first, converter=None, git_blob=None, sha256=digest)
    monkeypatch.setattr(published, 'read_manifest', lambda: (known, *others))

    data = data_of(tmp_path, task_of())

    assert data.origins == {'mc/0-shot': 'published'}
    assert not data.warnings


@pytest.mark.parametrize(
    ('semantics', 'subset', 'named'),
    [
        ('corrected', None, 'mc/3-shot: 5 of 8 items had their own question among their shots, which were drawn again'),
        ('reference', None, '5 of 8 items had their own question among their shots, which stay (semantics: reference)'),
        ('corrected', 2, 'of 2 items had'),
    ],
)
def test_items_among_their_own_shots_are_one_warning_with_their_number(write_jsonl, tmp_path, semantics, subset, named):
    """Of 8 rows two and two are equal; llm-foundry draws the other one for rows 0, 1, 2, 4 and 6."""
    write_jsonl('rows.jsonl', rows_of(*(f'{i // 2}?' for i in range(8))))
    (warning,) = data_of(tmp_path, task_of(num_fewshot=[3]), semantics=semantics, subset_items=subset).warnings
    assert named in warning


@pytest.mark.parametrize(
    ('max_seq_len', 'truncation', 'kept', 'logged'),
    [
        (35, 'drop_shots', 4, None),
        (32, 'drop_shots', 3, '1 of 2 tasks: prompts shortened to fit 32 tokens; 4-shot is 3.0 on average'),
        (32, 'reference', 25 / 7, '1 of 2 tasks: prompts shortened to fit 32 tokens; 4-shot is 3.6 on average'),
        (10, 'drop_shots', 0, '2 of 2 tasks: prompts shortened to fit 10 tokens; 4-shot is 0.0 on average'),
    ],
)
def test_truncated_prompts_are_one_line_with_the_shots_that_are_left(
    write_jsonl, tmp_path, character_tokenizer, caplog, max_seq_len, truncation, kept, logged
):
    """A prompt is bos, shots of 6 tokens ('0? yes'), the question of 2, each after a line feed, and ' yes' of 4."""
    write_jsonl('rows.jsonl', rows_of(*(f'{i}?' for i in range(5))))
    write_jsonl('long.jsonl', rows_of('a long one?'))
    tasks = (task_of(num_fewshot=[4]), task_of('long', 'long.jsonl'))
    data = data_of(tmp_path, *tasks, truncation=truncation)
    with caplog.at_level(logging.WARNING):
        prepared = prepare_evaluation(data, Encoder(character_tokenizer), max_seq_len=max_seq_len)
    shots = [item.num_shots for key, item in prepared.items.items() if key.task == 'mc/4-shot']
    assert shots == pytest.approx([kept] * 5)
    assert [record.message for record in caplog.records] == [logged] * (logged is not None)


def test_sample_data_is_one_warning_line_at_the_start(write_jsonl, tmp_path):
    write_jsonl('rows.jsonl', rows_of('?'))
    tasks = (task_of('copa', 'commonsense_reasoning/copa.jsonl'), task_of('mine', str(tmp_path / 'rows.jsonl')))
    data = data_of(ROOT / 'eval_data', *tasks)
    assert data.origins == {'copa/0-shot': 'sample', 'mine/0-shot': 'own'}
    (warning,) = data.warnings
    assert warning.startswith('sample data, not the benchmark, in 1 of 2 tasks (copa/0-shot); gauntlet data fetch --to')


def test_missing_files_are_one_error_or_skipped_with_the_reason_of_their_composites(write_jsonl, tmp_path):
    write_jsonl('rows.jsonl', rows_of('?'))
    uris = {'mine': 'rows.jsonl', 'copa': 'commonsense_reasoning/copa.jsonl', 'other': 'other.jsonl'}
    tasks = [task_of(label, uri) for label, uri in uris.items()]
    categories = [{'name': name, 'benchmarks': [{'name': name, 'num_fewshot': 0}]} for name in (*uris, 'absent')]
    gauntlet = {'categories': categories}
    with pytest.raises(ConfigError, match='no task provides 1 of 4 benchmarks: absent/0-shot'):
        data_of(tmp_path, *tasks, gauntlet=gauntlet)
    with pytest.raises(DataError) as raised:
        data_of(tmp_path, *tasks)
    (problem,) = raised.value.problems
    assert problem.startswith(f'2 of 3 data files are missing below {tmp_path}: {uris["copa"]}, {uris["other"]}; ')
    assert f'`gauntlet data fetch copa --to {tmp_path}`' in problem and 'missing: skip' in problem
    data = data_of(tmp_path, *tasks, gauntlet=gauntlet, missing='skip')
    assert list(data.tasks) == ['mine/0-shot']
    assert data.unsupported == {
        'absent/0-shot': 'no task provides it',
        'copa/0-shot': 'its data file is missing',
        'other/0-shot': 'its data file is missing',
    }
    composites = composites_of(data, {})
    assert 'copa/0-shot (its data file is missing)' in composites.categories['copa'].reason
    assert 'absent/0-shot (no task provides it)' in composites.categories['absent'].reason
    with pytest.raises(DataError, match='1 of 1 data files are missing'):  # nothing is left to run
        data_of(tmp_path, tasks[1], missing='skip')
