import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version

import fake_model
import pytest

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import conclude, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.results.files import read_results, write_records
from llmfoundry_gauntlet.scoring.code.sandbox import find_sandbox
from llmfoundry_gauntlet.tasks.encode import Encoder

ROWS = [{'query': f'{i}?', 'choices': ['yes', 'no'], 'gold': i % 2} for i in range(5)]


@pytest.fixture
def evaluation(write_jsonl, tmp_path, character_tokenizer, monkeypatch):
    """Return an evaluation of five rows, and of a task that cannot be run, by the fake model."""
    write_jsonl('rows.jsonl', ROWS)
    write_jsonl('programs.jsonl', [{'prompt': 'def f():\n', 'entry_point': 'f', 'test': 'def check(f): f()'}])
    monkeypatch.setattr('shutil.which', lambda tool: None)
    find_sandbox.cache_clear()
    common = {'dataset_uri': 'rows.jsonl', 'num_fewshot': [0]}
    tasks = [
        {**common, 'label': 'mc', 'icl_task_type': 'multiple_choice'},
        {**common, 'label': 'code', 'icl_task_type': 'code_evaluation', 'dataset_uri': 'programs.jsonl'},
    ]
    benchmarks = [{'name': 'mc', 'num_fewshot': 0, 'random_baseline': 0.5}]
    gauntlet = {
        'categories': [
            {'name': 'one', 'benchmarks': benchmarks},
            {'name': 'two', 'benchmarks': [*benchmarks, {'name': 'code', 'num_fewshot': 0}]},
        ]
    }

    settings = decode_settings({'tasks': tasks, 'gauntlet': gauntlet, 'data_root': str(tmp_path)})
    prepared = prepare_evaluation(load_data(settings), Encoder(character_tokenizer), max_seq_len=64)
    planned = plan_evaluation(prepared, tokens_per_batch=50)
    outputs = [output for batch in planned.batches for output in fake_model.run(batch)]
    yield conclude(planned, planned.results(outputs), {'mc/0-shot': 2.5})
    find_sandbox.cache_clear()


def write(folder, evaluation, training=None):
    write_records(folder, evaluation, model={'name': 'fake'}, environment={}, training=training)


def test_results_hold_metrics_composites_and_reasons(evaluation, tmp_path):
    out = tmp_path / 'out'
    accuracy = evaluation.scores['mc/0-shot'].metrics['InContextLearningMultipleChoiceAccuracy'].value

    write(out, evaluation)

    record = read_results(out)
    assert record['metrics']['metrics/mc/0-shot/InContextLearningMultipleChoiceAccuracy'] == accuracy
    assert record['metrics']['icl/metrics/eval_gauntlet/one'] == pytest.approx((accuracy - 0.5) / 0.5)
    task = record['tasks']['mc/0-shot']
    assert (task['data_origin'], task['effective_shots'], task['chance']) == ('own', 0, 1 / 2)
    assert record['timing']['seconds'] == 2.5
    assert record['training'] is None
    assert record['semantics'] == 'corrected'

    # The task that cannot be run, and the category that counts it.
    assert 'prlimit is missing' in record['tasks']['code/0-shot']['reason']
    assert 'prlimit is missing' in record['composites']['categories']['two']['reason']
    assert 'icl/metrics/eval_gauntlet/two' not in record['metrics']


def test_results_say_when_and_where_they_were_computed(evaluation, tmp_path, monkeypatch):
    monkeypatch.setenv('GIT_CEILING_DIRECTORIES', str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / 'out', evaluation)

    record = read_results(tmp_path / 'out')
    environment = record['environment']
    assert environment['host'] == platform.node()
    assert environment['git_commit'] is None
    assert environment['packages']['torch'] == version('torch')
    started = datetime.fromisoformat(record['timing']['started'])
    finished = datetime.fromisoformat(record['timing']['finished'])
    assert 2 <= (finished - started).total_seconds() <= 3  # 2.5, in whole seconds
    assert abs((datetime.now(UTC) - finished).total_seconds()) < 60


def test_samples_have_one_line_per_row_in_order_with_all_keys(evaluation, tmp_path):
    out = tmp_path / 'out'
    write(out, evaluation)
    lines = [json.loads(line) for line in (out / 'samples' / 'mc_0-shot.jsonl').read_text().splitlines()]
    assert [line['row'] for line in lines] == [0, 1, 2, 3, 4]
    assert list(lines[0]) == [
        # the item
        'file',
        'row',
        'category',
        'variant',
        'sample',
        # its right answer, and what the model chose
        'gold',
        'predicted',
        'score',
        'logprobs',
        'num_tokens',
        'text',
        'answer',
        'status',
        'reason',
        # its prompt and choices
        'prompt_sha256',
        'cluster',
        'prompt_shortened',
        'num_shots',
        'num_characters',
        'num_bytes',
    ]
    assert lines[0]['num_characters'] == lines[0]['num_bytes'] == [3, 2]
    assert [line['gold'] for line in lines] == [0, 1, 0, 1, 0]
    assert lines[0]['num_tokens'] == [4, 3]  # with the space
    for line, result in zip(lines, evaluation.results['mc/0-shot'], strict=True):
        means = [total / n for total, n in zip(line['logprobs'], line['num_tokens'], strict=True)]
        assert line['predicted'] == means.index(max(means)) == result.predicted
        assert line['score'] == float(line['predicted'] == line['gold'])


def test_missing_or_unknown_items_are_errors(evaluation):
    """Composer silently ends an evaluation if a rank runs out of batches."""
    planned = evaluation.planned
    results = {result.key: result for result in evaluation.results['mc/0-shot']}
    results.pop(next(iter(results)))
    with pytest.raises(RuntimeError, match='1 items are missing and 0 unknown'):
        conclude(planned, results, {})
