"""The benchmark: its table, its jobs, and our contenders on a tiny model."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT

sys.path.insert(0, str(ROOT / 'scripts' / 'bench'))

import ours
import parts
from bare_forward import BareForward, bare_batches
from lm_eval_backends import GauntletBackend, HFBackend
from lm_eval_bench_tasks import DEFINITIONS
from materials import HYBRIDS, MORE_RULES, RECIPES
from parts import LIKELIHOOD_ROWS, PARTS, SCORE_ROWS, ZERO_SHOT, Place
from table import RowResult, group_means, groups_table, rows_table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import ItemKey, ScoreRequest

MODEL = ROOT / 'tests' / 'fixtures' / 'models' / 'rotary_bos'
LIKELIHOOD = PARTS['likelihood']
HYBRIDS_PART = PARTS['hybrids']


def measured(num_items: int, *cpu_seconds: float, **answer: Any) -> list[dict[str, Any]]:
    answer = {'predictions': [], 'notes': {}, 'num_items': num_items, **answer}
    return [{**answer, 'wall_seconds': 2 * seconds, 'cpu_seconds': seconds} for seconds in cpu_seconds]


def result(row: parts.TaskRow, *, lm_eval: float) -> RowResult:
    rounds = {
        'ours': measured(10, 1.0, 9.0, 1.0, predictions=[1, 0, 1]),
        'bare_forward': measured(10, 0.5),
        'llm_foundry': measured(2, 20.0, predictions=[1, 1]),
        'lm_eval': measured(10, lm_eval, predictions=[1, 0, 1], batch_size=8),
    }
    return RowResult(row=row, vocabulary=8000, rounds=rounds)


ZERO_SHOT_ROWS = [row for row in LIKELIHOOD_ROWS if row.group is ZERO_SHOT]


@pytest.fixture
def results() -> list[RowResult]:
    """Return those of two rows, which differ in the seconds of lm_eval."""
    return [result(ZERO_SHOT_ROWS[0], lm_eval=2.0), result(ZERO_SHOT_ROWS[1], lm_eval=8.0)]


def test_a_row_has_medians_per_item_their_ratios_and_equal_predictions(results: list[RowResult]):
    record = results[0].as_json()

    assert record['seconds'] == {'ours': 0.1, 'bare_forward': 0.05, 'llm_foundry': 10.0, 'lm_eval': 0.2}
    assert record['ratios'] == {'llm_foundry/ours': 100, 'lm_eval/ours': 2, 'ours/bare_forward': 2}
    # Equal predictions, and those that both have.
    assert tuple(record['same']['llm_foundry']) == (1, 2)
    assert tuple(record['same']['lm_eval']) == (3, 3)
    assert record['same'].keys() == {'llm_foundry', 'lm_eval'}


def test_a_row_of_the_table_has_items_and_seconds_of_each_contender(results: list[RowResult]):
    first_row = rows_table(results).splitlines()[2].split()

    assert first_row[:7] == [ZERO_SHOT_ROWS[0].name, '8000', '10/2', '0.1', '0.05', '10', '0.2']


def test_a_group_has_geometric_means_of_ratios(results: list[RowResult]):
    (_, means), _ = group_means(LIKELIHOOD, results)

    assert list(means.values()) == pytest.approx([100.0, 4.0, 2.0])


def test_the_table_has_the_largest_difference_of_a_log_probability_and_all_notes():
    rounds = {
        'ours': measured(2, 1.0, logprobs=[[-1.0, -2.0], [-3.0]], notes={'tokens run': '0.5'}),
        'bare_forward': measured(2, 1.0),
        'lm_eval': measured(2, 1.0, logprobs=[[-1.0, -1.75], [-3.125]], batch_size=8),
        'no_cache': measured(2, 1.0, logprobs=None, notes={'no_cache': 'from 2 tokens'}),
    }
    of_row = RowResult(row=ZERO_SHOT_ROWS[0], vocabulary=8000, rounds=rounds)

    assert of_row.as_json()['largest_difference'] == 0.25
    first_row = rows_table([of_row]).splitlines()[2].rstrip()
    assert ' 0.2 ' in first_row  # 0.25 with one digit
    assert first_row.endswith('tokens run 0.5; no_cache from 2 tokens')


def test_the_table_has_the_largest_relative_difference_of_a_metric():
    rounds = {
        'ours': measured(2, 1.0, metrics={'acc': 0.5, 'perplexity': 8.0}),
        'lm_eval': measured(2, 1.0, metrics={'acc': 0.5, 'perplexity': 10.0}, batch_size=8),
    }
    of_row = RowResult(row=ZERO_SHOT_ROWS[0], vocabulary=8000, rounds=rounds)

    assert of_row.as_json()['largest_metric_difference'] == 0.25
    assert rows_table([of_row]).splitlines()[2].split()[-1] == '0.2'  # 0.25 with one digit


def test_a_missed_target_is_shown_beside_the_mean(results: list[RowResult]):
    assert '2.00 (<= 1.1) MISSED' in groups_table(LIKELIHOOD, results)


@pytest.mark.parametrize('part', PARTS)
def test_a_quick_run_has_all_rows_and_contenders(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)

    contenders_with_jobs = set()
    for row in PARTS[part].rows:
        jobs = row.jobs(Place(ROOT / 'eval_data', tmp_path), quick=True)
        contenders_with_jobs |= jobs.keys()
        contenders_of_targets = {name for ratio in row.group.targets for name in ratio.split('/')}
        assert contenders_of_targets <= jobs.keys()

    assert contenders_with_jobs >= PARTS[part].contenders.keys()


@pytest.mark.parametrize(
    ('num_tokens', 'mean_length', 'num_reads'),
    [
        (3066, 15.33, 1125),  # many short rows
        (24564, 2047.0, 43),  # two rows fill a batch
        (3500, 600.0, 172),
    ],
)
def test_the_bare_forward_runs_the_planned_tokens_and_reads(num_tokens: int, mean_length: float, num_reads: int):
    batches = bare_batches(num_tokens=num_tokens, mean_length=mean_length, num_reads=num_reads, tokens_per_batch=4096)

    assert sum(batch.num_rows * batch.length for batch in batches) == num_tokens
    assert sum(batch.num_rows * batch.num_reads for batch in batches) == num_reads
    assert all(batch.num_rows * batch.length <= 4096 for batch in batches)


def test_variants_run_one_by_one_give_the_same_choices_for_more_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(parts, 'SCORE_SOURCES', parts.SCORE_SOURCES[1:])
    jobs = SCORE_ROWS[0].jobs(Place(ROOT / 'eval_data', tmp_path), quick=True)

    def answer_of(contender: ours.Ours, name: str) -> dict[str, Any]:
        contender.load(str(MODEL))
        return contender.measure(**{**jobs[name], 'max_seq_len': 512})

    together = answer_of(ours.Ours(), 'ours')
    alone = answer_of(ours.Alone(), 'alone')

    assert together['predictions'] == alone['predictions']
    assert together['num_items'] == alone['num_items'] == 4
    share_of_tokens_run = float(together['notes']['tokens run'].split()[0])
    assert share_of_tokens_run < 1


def scored_request(row: int, context: list[int], *continuations: list[int]) -> ScoreRequest:
    contexts = (np.array(context),) * len(continuations)
    ids = tuple(map(np.array, continuations))
    return ScoreRequest(key=ItemKey('task', row), contexts=contexts, continuations=ids)


def test_whole_rows_share_nothing_but_letters_of_an_item_are_one_row():
    requests = [
        # Rows of 3 + 1 and 3 + 2 tokens, as the last token of a choice is never an input.
        scored_request(0, [1, 2, 3], [4, 5], [6, 7, 8]),
        # One row of 2 tokens, read once for both letters.
        scored_request(1, [1, 2], [4], [5]),
    ]
    shape = ours.unshared_shape(requests, tokens_per_batch=64)

    assert shape == {'num_tokens': 11, 'mean_length': pytest.approx(11 / 3), 'num_reads': 6, 'tokens_per_batch': 64}


def test_without_a_cache_every_token_runs_its_whole_row():
    # The first new token runs 3 and 5 tokens, the second 4 and 6.
    assert ours.tokens_in_rows([3, 5], 2) == 18


def jobs_of(label: str, folder: Path, **changes: Any) -> parts.Jobs:
    """Return the jobs of the first row of the part `hybrids` with this task, on the sample rows."""
    row = next(row for row in HYBRIDS_PART.rows if row.label == label)
    return replace(row, **changes).jobs(Place(ROOT / 'eval_data', folder), quick=True)


def test_the_texts_for_lm_eval_have_the_tokens_of_our_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Mutations: leave out the preamble; give the first context to all choices."""
    monkeypatch.chdir(ROOT)
    for label in ('hellaswag', 'arc_challenge', 'mmlu'):
        job = jobs_of(label, tmp_path)['lm_eval']
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        encoder = Encoder(tokenizer)
        prepared = ours.prepare_evaluation(ours.read(job['settings']), encoder, max_seq_len=4096)

        texts_of_rows = list(ours.text_pairs(job['settings'], encoder))

        assert len(texts_of_rows) == len(prepared.score_requests) > 1
        for texts, request in zip(texts_of_rows, prepared.score_requests, strict=True):
            for (context, continuation), *ids in zip(texts, request.contexts, request.continuations, strict=True):
                assert tokenizer(context)['input_ids'] == ids[0].tolist()
                assert tokenizer(continuation, add_special_tokens=False)['input_ids'] == ids[1].tolist()


def test_fixed_shots_are_the_same_for_all_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)

    def num_preambles(fixed_shots: bool) -> int:
        jobs = jobs_of('arc_challenge', tmp_path, fixed_shots=fixed_shots)
        data = ours.read(jobs['ours']['settings'])
        (task,) = data.tasks.values()
        examples = data.examples[task.key]
        pairs = list(task.examples_with_shots(examples, examples))
        return len({task.prompt(example, shots).preamble for example, shots in pairs})

    # One, and for each of the three shots one with the spare in its place, for the item that asks its question.
    assert num_preambles(fixed_shots=True) == 4
    assert num_preambles(fixed_shots=False) > 4


def test_generate_has_the_texts_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Mutation: keep the texts of `generate` in the order of the prompts' lengths."""
    monkeypatch.chdir(ROOT)
    jobs = jobs_of('gsm8k', tmp_path, max_new_tokens=8)
    cached, uncached, bare = ours.Ours(), ours.Uncached(), BareForward()
    for contender in (cached, uncached, bare):
        contender.load(str(MODEL))

    answer = cached.measure(**jobs['ours'])
    of_generate = bare.measure(shape=answer['shapes']['planned'])
    of_uncached = uncached.measure(**jobs['no_cache'])

    assert of_generate['predictions'] == answer['predictions']
    assert len(set(answer['predictions'])) > 1
    assert uncached.generation_layout == 'no_cache'
    assert of_uncached['notes'] == {'no_cache': 'from 2 tokens'}


@pytest.fixture(scope='module')
def backends() -> list[HFBackend]:
    """Return lm-eval with our backend and with its own, each with a tiny model."""
    loaded = [GauntletBackend(), HFBackend()]
    for backend in loaded:
        backend.load(str(MODEL))
    return loaded


@pytest.mark.parametrize('label', DEFINITIONS)
def test_a_task_of_lm_eval_has_the_same_answers_in_both_backends(
    label: str, backends: list[HFBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Mutations: give the log-probability of the first choice to all; sum a text's windows but the last."""
    monkeypatch.chdir(ROOT)
    row = next(row for row in PARTS['lm-eval'].rows if row.label == label)
    if label == 'gsm8k':
        row = replace(row, num_shots=1, max_new_tokens=8)
    job = row.jobs(Place(ROOT / 'eval_data', tmp_path), quick=True)['ours']

    ours_of_row, theirs = (backend.measure(**job) for backend in backends)

    assert ours_of_row['num_items'] == len(theirs['predictions']) > 1
    assert ours_of_row['predictions'] == theirs['predictions']
    assert ours_of_row['metrics'] == pytest.approx(theirs['metrics'], rel=1e-5)
    if label != 'gsm8k':
        for of_document, same_document in zip(ours_of_row['logprobs'], theirs['logprobs'], strict=True):
            assert of_document == pytest.approx(same_document, abs=1e-4 * len(of_document), rel=1e-6)


@pytest.mark.parametrize(
    ('contexts', 'sentence', 'options'),
    [
        (['The cup fell, as the cup', 'The cup fell, as the cat'], 'The cup fell, as the _ was old', ('cup', 'cat')),
        (['It rained on Tom', 'It rained on Tom and Tim'], 'It rained on _ was old', ('Tom', 'Tom and Tim')),
    ],
)
def test_options_of_winogrande_are_the_words_in_which_contexts_differ(
    contexts: list[str], sentence: str, options: tuple[str, str]
):
    row = {'context_options': contexts, 'continuation': 'was old', 'gold': 1}

    (document,) = DEFINITIONS['winogrande'].documents_of([row])

    assert (document['sentence'], (document['option1'], document['option2'])) == (sentence, options)


@pytest.mark.parametrize('family', [family for family in (*HYBRIDS, *MORE_RULES) if family in CONFIG_MAPPING])
def test_models_of_today_run_and_are_as_wide_and_deep_as_the_llama(family: str):
    config = AutoConfig.for_model(**{'model_type': family, 'vocab_size': 1000, 'pad_token_id': 2, **RECIPES[family]})
    model = AutoModelForCausalLM.from_config(config)

    with torch.no_grad():
        logits = model(input_ids=torch.arange(4)[None]).logits
    assert logits.shape == (1, 4, 1000)
    assert logits.isfinite().all()
    embeddings = model.get_input_embeddings().weight
    assert embeddings.shape == (1000, 512)
    assert len(model.model.layers) == 8
    assert 10e6 < sum(weight.numel() for weight in model.parameters()) < 45e6
