"""GauntletLM beside lm-eval's Hugging Face backend: the same answers to every type of request.

Mutations: drop a window of a text; leave out the requests of an equal pair; leave out `add_partial`; leave the model in
evaluation mode; let draws depend on the place of a request; follow settings of the engine where lm-eval has others.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from command_line import loaded_by
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval_own_tasks import TASKS, write_tasks
from paths import FIXTURES, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from llmfoundry_gauntlet.cli.lm_eval import with_our_model
from llmfoundry_gauntlet.errors import ConfigError, DataError
from llmfoundry_gauntlet.lm_eval import GauntletLM

MODELS = FIXTURES / 'models'
TOLERANCE = 1e-4  # nats, in float32
NAMES = ('rotary_bos', 'alibi_pad_eos')
QUESTION = 'Question: What is warm?\nAnswer:'


def instances(kind: str, arguments: Sequence[tuple[Any, ...]], task: str = 'warm') -> list[Any]:
    return [
        Instance(request_type=kind, doc={}, arguments=of_document, idx=0, metadata=(task, number, 1))
        for number, of_document in enumerate(arguments)
    ]


def both(name: str = 'rotary_bos', **settings: Any) -> tuple[GauntletLM, HFLM]:
    arguments = {'pretrained': str(MODELS / name), 'device': 'cpu', 'dtype': 'float32', **settings}
    return GauntletLM(**arguments), HFLM(**arguments)


PAIRS = [
    (QUESTION, ' the sun'),
    (QUESTION, ' the sea'),
    (QUESTION, ' ice'),
    (QUESTION, ' a long night in the cold of winter'),
    # Choices that share the continuation.
    ('The cup was on the table because the cup', ' was full.'),
    ('The cup was on the table because the table', ' was full.'),
    # No context, twice, and a context that ends with spaces.
    ('', ' the sun'),
    ('', ' the sea'),
    (QUESTION + '  ', 'the sun'),
    (QUESTION, ' the sun'),
    # A beginning token that the text already has.
    ('<s>' + QUESTION, ' ice'),
    # A row that is longer than the model (of the tests that set max_length).
    (QUESTION * 8, ' the sun'),
]


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('settings', [{}, {'max_length': 24}, {'add_bos_token': True}, {'prefix_token_id': 5}], ids=str)
def test_log_likelihoods_are_those_of_lm_eval(name: str, settings: dict[str, Any]) -> None:
    ours, theirs = both(name, **settings)
    requests = instances('loglikelihood', PAIRS)

    answers = ours.loglikelihood(requests, disable_tqdm=True)

    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
    assert [total for total, _ in answers] == pytest.approx([total for total, _ in expected], abs=TOLERANCE, rel=0)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('max_length', [16, 2048])
def test_texts_are_scored_in_the_windows_of_lm_eval(name: str, max_length: int) -> None:
    ours, theirs = both(name, max_length=max_length)
    requests = instances('loglikelihood_rolling', [(QUESTION * 5,), ('warm',), (QUESTION * 2 + ' the end',)])

    answers = ours.loglikelihood_rolling(requests, disable_tqdm=True)

    assert answers == pytest.approx(theirs.loglikelihood_rolling(requests, disable_tqdm=True), abs=TOLERANCE, rel=0)
    assert ours.batch_size == 1


PROMPTS = (QUESTION, 'Q: ' + QUESTION * 3, 'once upon', '<s>' + QUESTION, QUESTION, 'The night was')
GENERATION_SETTINGS = {
    'no stops': {'max_gen_toks': 12},
    'strings across tokens': {'until': ['e ', '\n\n', 'th'], 'max_gen_toks': 40},
    'the end token': {'until': ['</s>'], 'max_gen_toks': 20},
    'a special token that ends nothing': {'until': ['<pad>', '<s>'], 'max_gen_toks': 40},
    'another name of the limit': {'until': '\n', 'max_new_tokens': 9},
    'greedy in many words': {'until': [], 'do_sample': False, 'temperature': 0.0, 'num_beams': 1, 'max_gen_toks': 8},
}


def common_words(lm: HFLM, num_words: int) -> list[str]:
    """Return pieces of the text that a model generates, so that stops occur in it."""
    requests = instances('generate_until', [(prompt, {'max_gen_toks': 40}) for prompt in PROMPTS])
    pieces = [text[place : place + 3] for text in lm.generate_until(requests, disable_tqdm=True) for place in (9, 30)]
    return [piece for piece in pieces if piece][:num_words]


@pytest.mark.parametrize('name', NAMES)
def test_generations_are_those_of_lm_eval(name: str) -> None:
    ours, theirs = both(name)
    settings = [*GENERATION_SETTINGS.values(), {'until': common_words(theirs, 4), 'max_gen_toks': 60}]
    requests = instances('generate_until', [(prompt, of_request) for prompt in PROMPTS for of_request in settings])

    texts = ours.generate_until(requests, disable_tqdm=True)

    assert texts == theirs.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize('of_task', [{'max_gen_toks': 20}, {'until': ['\n'], 'max_gen_toks': 30}], ids=str)
def test_prompts_are_cut_on_the_left_as_in_lm_eval(of_task: dict[str, Any]) -> None:
    ours, theirs = both(max_length=40)
    requests = instances('generate_until', [(prompt * 4, of_task) for prompt in PROMPTS])

    assert ours.generate_until(requests, disable_tqdm=True) == theirs.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize('ends_reasoning', ['word', 'token'])
def test_the_answer_follows_the_reasoning_as_in_lm_eval(ends_reasoning: str) -> None:
    _, plain = both()
    word = common_words(plain, 1)[0]
    think_end_token = word if ends_reasoning == 'word' else plain.tok_encode(word, add_special_tokens=False)[-1]
    ours, theirs = both(think_end_token=think_end_token)
    settings = [{'max_gen_toks': 60}, {'until': ['e'], 'max_gen_toks': 60}]
    requests = instances('generate_until', [(prompt, of_request) for prompt in PROMPTS for of_request in settings])

    texts = ours.generate_until(requests, disable_tqdm=True)

    assert texts == theirs.generate_until(requests, disable_tqdm=True)
    assert texts != plain.generate_until(requests, disable_tqdm=True)


# What the engine cannot run, and what a model may be


def test_a_model_that_is_trained_between_evaluations_is_scored_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / 'rotary_bos')
    tokenizer = AutoTokenizer.from_pretrained(MODELS / 'rotary_bos')
    ours = GauntletLM(pretrained=model, tokenizer=tokenizer)
    long_context = QUESTION * 40
    requests = instances('loglikelihood', [(long_context + f' {number} ', 'the sun') for number in range(60)])
    before = ours.loglikelihood(requests, disable_tqdm=True)
    model.train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)

    after = ours.loglikelihood(requests, disable_tqdm=True)

    assert model.training
    expected = HFLM(pretrained=model, tokenizer=tokenizer).loglikelihood(requests, disable_tqdm=True)
    assert [total for total, _ in after] == pytest.approx([total for total, _ in expected], abs=TOLERANCE, rel=0)
    assert before[0][0] != pytest.approx(after[0][0], abs=0.01)


@pytest.mark.parametrize(
    ('of_task', 'said'),
    [({'num_beams': 2}, 'num_beams: 2'), ({'repetition_penalty': 1.3}, 'repetition_penalty: 1.3')],
    ids=str,
)
def test_settings_that_the_engine_cannot_follow_are_run_by_lm_eval_and_one_line_says_why(
    of_task: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = both()
    settings = [{'max_gen_toks': 8}, {'max_gen_toks': 8, **of_task}]
    requests = instances('generate_until', [(prompt, of_request) for prompt in PROMPTS for of_request in settings])

    with caplog.at_level(logging.WARNING, 'llmfoundry_gauntlet'):
        texts = ours.generate_until(requests, disable_tqdm=True)
        ours.generate_until(requests, disable_tqdm=True)

    assert texts == theirs.generate_until(requests, disable_tqdm=True)
    (line,) = [record.getMessage() for record in caplog.records if record.name == 'llmfoundry_gauntlet.lm_eval']
    assert said in line


def test_a_penalty_of_the_models_generation_config_counts_as_in_lm_eval(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = both()
    for lm in (ours, theirs):
        lm.model.generation_config.repetition_penalty = 1.5
    requests = instances('generate_until', [(prompt, {'max_gen_toks': 16}) for prompt in PROMPTS])

    texts = ours.generate_until(requests, disable_tqdm=True)

    assert texts == theirs.generate_until(requests, disable_tqdm=True)
    assert 'repetition_penalty: 1.5' in caplog.text


def test_an_encoder_decoder_is_run_by_lm_eval(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = T5Config(
        vocab_size=900, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=2, eos_token_id=1
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    arguments = {'pretrained': str(tmp_path), 'tokenizer': str(MODELS / 'rotary_bos'), 'device': 'cpu'}
    ours, theirs = GauntletLM(**arguments), HFLM(**arguments)

    for kind, of_requests in {'loglikelihood': PAIRS[:4], 'generate_until': [(QUESTION, {'max_gen_toks': 4})]}.items():
        requests = instances(kind, of_requests)
        answers, expected = (getattr(lm, kind)(requests, disable_tqdm=True) for lm in (ours, theirs))
        assert answers == expected
    assert caplog.text.count('encoder-decoder') == 1


def test_sampled_repeats_differ_and_are_the_same_again() -> None:
    ours, _ = both()
    repeated = [
        Instance('generate_until', {}, (prompt, {'temperature': 1.0, 'max_gen_toks': 12}), 0, metadata=('warm', row, 3))
        for row, prompt in enumerate(PROMPTS)
    ]
    requests = [request for request in repeated for _ in range(3)]  # as lm-eval repeats them

    with torch.random.fork_rng():
        torch.manual_seed(1)
        texts = ours.generate_until(requests, disable_tqdm=True)
        again = ours.generate_until(requests[3:], disable_tqdm=True)
        torch.manual_seed(2)
        with_another_seed = ours.generate_until(requests, disable_tqdm=True)

    assert again == texts[3:]  # draws depend on the document, not on what else is generated
    assert len(set(texts)) == len(texts)
    assert with_another_seed != texts


# Errors


def test_a_continuation_longer_than_the_model_is_an_error_that_names_the_task() -> None:
    ours, _ = both(max_length=8)

    with pytest.raises(DataError, match='warm: a continuation has '):
        ours.loglikelihood(instances('loglikelihood', [('a', ' the sun' * 9)]), disable_tqdm=True)


@pytest.mark.parametrize('tokens_per_batch', [0, -1, 'many', 1.5, True])
def test_a_wrong_number_of_tokens_is_an_error(tokens_per_batch: Any) -> None:
    with pytest.raises(ConfigError, match='tokens_per_batch'):
        GauntletLM(pretrained=str(MODELS / 'rotary_bos'), device='cpu', tokens_per_batch=tokens_per_batch)


@pytest.mark.parametrize('tokens_per_batch', [64, 100_000])
def test_answers_do_not_depend_on_the_tokens_of_a_batch(tokens_per_batch: int) -> None:
    ours, theirs = both()
    small = GauntletLM(pretrained=ours.model, tokenizer=ours.tokenizer, tokens_per_batch=tokens_per_batch)
    requests = instances('loglikelihood', PAIRS)

    answers = small.loglikelihood(requests, disable_tqdm=True)

    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    assert [total for total, _ in answers] == pytest.approx([total for total, _ in expected], abs=TOLERANCE, rel=0)


# lm-eval's own programs

NOT_DRAWN = [name for name in TASKS if name != 'warm_samples']  # by other draws than ours, and never cached


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Return a folder with tasks of lm-eval, and their rows."""
    return write_tasks(tmp_path / 'tasks')


def evaluated(lm: Any, tasks: Path, **more: Any) -> dict[str, dict[str, float]]:
    """Return the metrics of each task; errors are left out, of which lm-eval has none here."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    outcome = lm_eval.simple_evaluate(model=lm, tasks=NOT_DRAWN, task_manager=manager, bootstrap_iters=0, **more)
    metrics: dict[str, dict[str, float]] = {}
    for name, of_task in outcome['results'].items():
        metrics[name] = {metric: value for metric, value in of_task.items() if isinstance(value, float)}
    return metrics


def test_simple_evaluate_has_the_metrics_of_lm_eval(tasks: Path) -> None:
    ours, theirs = both()

    results, expected = evaluated(ours, tasks), evaluated(theirs, tasks)

    assert results.keys() == {*NOT_DRAWN}
    assert {'acc,none', 'acc_norm,none', 'acc_mutual_info,none'} <= results['warm_choices'].keys()
    for name, of_task in expected.items():
        assert results[name] == pytest.approx(of_task, rel=1e-5), name


def test_answers_are_in_the_cache_of_lm_eval(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = both()
    cache = str(tmp_path / 'cache')
    results = evaluated(ours, tasks, use_cache=cache)

    for kind in ('loglikelihood', 'loglikelihood_rolling', 'generate_until'):
        monkeypatch.delattr(GauntletLM, kind)
        monkeypatch.setattr(HFLM, kind, None)  # called for nothing

    assert evaluated(ours, tasks, use_cache=cache) == results


def test_answers_are_in_the_cache_before_all_have_been_given(tmp_path: Path) -> None:
    ours, theirs = both()
    cached_by = {}
    for lm in (ours, theirs):
        caching = CachingLM(lm, str(tmp_path / type(lm).__name__))
        # Of the model itself, so that only what it has handed on by then is in the cache.
        lm.loglikelihood(instances('loglikelihood', PAIRS), disable_tqdm=True)
        lm.loglikelihood_rolling(instances('loglikelihood_rolling', [(QUESTION,)]), disable_tqdm=True)
        lm.generate_until(instances('generate_until', [(QUESTION, {'max_gen_toks': 4})]), disable_tqdm=True)
        cached_by[lm] = set(caching.dbdict.keys())

    assert cached_by[ours] == cached_by[theirs]
    assert len(cached_by[ours]) == len(set(PAIRS)) + 2


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        ([], []),
        (['--help'], ['--help']),
        (['ls', 'tasks'], ['ls', 'tasks']),
        (['run', '--tasks', 'a', 'b'], ['run', '--model', 'gauntlet', '--tasks', 'a', 'b']),
        (['--tasks', 'a'], ['--model', 'gauntlet', '--tasks', 'a']),
        (['run', '-M', 'gauntlet', '-L', '3'], ['run', '--model', 'gauntlet', '-L', '3']),
        (['run', '--config', 'none.yaml'], ['run', '--model', 'gauntlet', '--config', 'none.yaml']),
    ],
    ids=str,
)
def test_arguments_of_lm_eval_have_our_model(words: list[str], expected: list[str]) -> None:
    assert with_our_model(words) == expected


@pytest.mark.parametrize('words', [['--model', 'hf'], ['run', '--model=hf'], ['-Mhf'], ['run', '--config', '{config}']])
def test_another_model_is_an_error_in_one_line(words: list[str], tmp_path: Path, gauntlet: Any) -> None:
    config = tmp_path / 'run.yaml'
    config.write_text('model: hf\ntasks: [arc_easy]\n')

    status, _, err = gauntlet('lm-eval', *(word.format(config=config) for word in words), '--tasks', 'arc_easy')

    assert status == 2
    assert 'is hf' in err and len(err.splitlines()) == 1


def test_without_the_extra_one_line_says_what_to_install(gauntlet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'lm_eval.__main__', None)  # as Python has it where an import fails

    status, _, err = gauntlet('lm-eval', 'run', '--tasks', 'arc_easy')

    assert status == 2
    assert "pip install 'llmfoundry-gauntlet[lm-eval]'" in err and len(err.splitlines()) == 1


def test_no_other_command_loads_lm_eval() -> None:
    assert loaded_by('ls', names=('lm_eval',)) == []
    assert loaded_by('--help', names=('lm_eval',)) == []


def test_the_entry_point_is_the_registered_class() -> None:
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    ((name, place),) = project['entry-points']['lm_eval.models'].items()

    assert pkgutil.resolve_name(place) is GauntletLM is get_model(name)
