import logging

import pytest

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.plan import PADDED_ROWS, STREAM
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.tasks.encode import Encoder


@pytest.fixture
def prepared(write_jsonl, tmp_path, character_tokenizer):
    """Prepare three items of about 15, 45 and 15 tokens, one per character; the last contains a 'z'."""
    queries = ['one and one?', 'one and one and one and one and one and?', 'z and one?']
    rows = [{'query': query, 'choices': ['yes', 'no'], 'gold': 0} for query in queries]
    write_jsonl('rows.jsonl', rows)
    task = {'label': 'mc', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}
    data = load_data(decode_settings({'tasks': [task], 'data_root': str(tmp_path)}))
    return prepare_evaluation(data, Encoder(character_tokenizer), max_seq_len=64)


def test_tokens_per_batch_below_the_longest_request_is_raised_with_a_warning(prepared, caplog):
    with caplog.at_level(logging.WARNING):
        planned = plan_evaluation(prepared, tokens_per_batch=5)
    assert planned.tokens_per_batch == max(batch.num_tokens for batch in planned.batches) > 40
    (record,) = caplog.records
    assert 'tokens_per_batch is 5' in record.message and str(planned.tokens_per_batch) in record.message


def test_sufficient_tokens_per_batch_is_kept(prepared, caplog):
    assert plan_evaluation(prepared, tokens_per_batch=64).tokens_per_batch == 64
    assert not caplog.records


def test_requests_with_a_hidden_token_run_in_padded_rows(prepared, character_tokenizer):
    """A stream has no mask to hide it."""
    (hidden,) = character_tokenizer('z', add_special_tokens=False)['input_ids']
    planned = plan_evaluation(prepared, tokens_per_batch=200, hidden_token_id=hidden)
    layouts = {request.key.row: batch.layout for batch in planned.batches for request in batch.requests}
    assert layouts == {0: STREAM, 1: STREAM, 2: PADDED_ROWS}


def test_longest_is_the_longest_row(prepared):
    rows = [
        len(context) + len(continuation) - 1
        for request in prepared.score_requests
        for context, continuation in zip(request.contexts, request.continuations, strict=True)
    ]
    assert prepared.longest == max(rows)
