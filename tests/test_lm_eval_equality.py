"""Tasks of lm-eval with its own HF backend, with our engine in its place, and as tasks of ours: all is equal.

The tasks are lm-eval's own: YAML, prompts, functions, filters and metrics. Their rows are ours, tests/lm_eval_tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny
import torch
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval_comparison import Figures, Outcome, compare, compare_with_evaluation, evaluated
from lm_eval_definitions import MODEL, real_rows, save_with_begin, write_definitions
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.lm_eval import GauntletLM
from llmfoundry_gauntlet.results.external import Answer, score_answers
from llmfoundry_gauntlet.runtime.runner import ModelAndTokenizer

SHORT = 32  # tokens of a model that is shorter than prompts and choices


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task or group, its settings, and those of the model."""

    task: str
    num_fewshot: int | None = None
    adds_begin: bool = False  # the tokenizer puts a beginning token before each text
    chat: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the name of the test."""
        shots = [] if self.num_fewshot is None else [f'{self.num_fewshot} shots']
        settings = [f'{key}={value}' for key, value in {**self.chat, **self.model}.items()]
        begin = ['begin'] if self.adds_begin else []
        return ', '.join([self.task, *shots, *begin, *settings])


CHAT: dict[str, Any] = {'apply_chat_template': True}
TURNS = CHAT | {'fewshot_as_multiturn': True}
ONE_TURN = CHAT | {'fewshot_as_multiturn': False}
INSTRUCTED = TURNS | {'system_instruction': 'Be brief.'}

FAST = [
    Case(task='arc_easy', num_fewshot=2),
    Case(task='winogrande'),
    Case(task='wikitext', model={'max_length': SHORT}),
    Case(task='gsm8k', num_fewshot=2),
]
CASES = [
    # Choices.
    Case(task='arc_easy'),
    Case(task='anli_r1', num_fewshot=3),
    Case(task='boolq', num_fewshot=1),
    Case(task='copa'),
    Case(task='hellaswag', num_fewshot=1),
    Case(task='mathqa'),
    Case(task='piqa'),
    Case(task='race'),
    Case(task='sciq', num_fewshot=1),
    Case(task='record'),
    Case(task='mutual'),
    # Choices in the prompt, with one continuation.
    Case(task='winogrande', num_fewshot=2),
    Case(task='wsc273'),
    # No prompt at all, and prompts with a beginning token of their own.
    Case(task='blimp_adjunct_island'),
    Case(task='blimp_adjunct_island', adds_begin=True),
    Case(task='blimp_adjunct_island', model={'prefix_token_id': 10}),
    Case(task='openbookqa_mutual_information', num_fewshot=1),
    Case(task='openbookqa_mutual_information', adds_begin=True),
    Case(task='arc_easy', num_fewshot=2, adds_begin=True),
    Case(task='arc_easy', adds_begin=True, model={'add_bos_token': False}),
    # Several right choices, delimiters, a beginning of the answer.
    Case(task='webqs'),
    Case(task='piqa_delimiters', num_fewshot=2),
    Case(task='mathqa_unspaced', num_fewshot=1),
    # Metrics that are no means of shares.
    Case(task='truthfulqa_mc2'),
    Case(task='cb', num_fewshot=1),
    Case(task='cola', num_fewshot=1),
    Case(task='mrpc', num_fewshot=1),
    # Groups of groups.
    Case(task='mmlu', num_fewshot=2),
    Case(task='mmlu_unweighted', num_fewshot=3),
    # One continuation.
    Case(task='lambada_openai'),
    Case(task='lambada_openai', adds_begin=True),
    Case(task='arithmetic_1dc'),
    Case(task='asdiv', num_fewshot=1),
    # Whole documents.
    Case(task='wikitext'),
    Case(task='wikitext', adds_begin=True, model={'max_length': SHORT}),
    # A model that is shorter than prompts, and than choices.
    Case(task='arc_easy', num_fewshot=3, model={'max_length': SHORT}),
    Case(task='piqa', num_fewshot=2, model={'max_length': 48}),  # of its longest choice
    Case(task='lambada_openai', adds_begin=True, model={'max_length': 10}),
    Case(task='openbookqa_mutual_information', model={'max_length': 13}),
    Case(task='gsm8k', num_fewshot=3, model={'max_length': 128}),
    Case(task='gsm8k', num_fewshot=3, adds_begin=True, model={'max_length': 128}),
    # Generations.
    Case(task='gsm8k'),
    Case(task='gsm8k', num_fewshot=2, adds_begin=True),
    Case(task='gsm8k_cot'),
    Case(task='gsm8k_cot_self_consistency'),
    Case(task='gsm8k_unended', num_fewshot=4),
    Case(task='minerva_math_algebra'),
    Case(task='mmlu_anatomy_generative', num_fewshot=2),
    Case(task='mmlu_flan_cot_zeroshot_anatomy'),
    Case(task='bbh_cot_zeroshot_boolean_expressions'),
    Case(task='drop', num_fewshot=1),
    Case(task='triviaqa', num_fewshot=2),
    Case(task='nq_open', num_fewshot=2),
    Case(task='coqa'),
    Case(task='babi', num_fewshot=1),
    Case(task='truthfulqa_gen'),
    Case(task='wmt14-en-fr', num_fewshot=1),
    # Requests of two types for a document, made by a class.
    Case(task='squadv2'),
    # Chats.
    Case(task='arc_easy', num_fewshot=2, chat=TURNS),
    Case(task='arc_easy', num_fewshot=2, adds_begin=True, chat=ONE_TURN),
    Case(task='winogrande', num_fewshot=1, chat=INSTRUCTED),
    Case(task='mmlu', num_fewshot=1, adds_begin=True, chat=INSTRUCTED),
    Case(task='mathqa_unspaced', num_fewshot=1, chat=TURNS),
    Case(task='arc_challenge_chat', num_fewshot=2, chat=TURNS),
    Case(task='gsm8k', num_fewshot=2, chat=ONE_TURN),
    Case(task='gsm8k', adds_begin=True, chat=INSTRUCTED),
    # A reasoning part that is cut off: after a text, and after a token.
    Case(task='gsm8k', num_fewshot=1, model={'think_end_token': ' ='}),
    Case(task='gsm8k', chat=CHAT, model={'think_end_token': 3}),
]


# Tasks whose functions in lm-eval import a module that transformers 5 no longer has.
NEED_SQUAD_METRICS = ('coqa', 'record')
HAS_SQUAD_METRICS = find_spec('transformers.data.metrics') is not None
WITH_TWO_TYPES_OF_REQUESTS = 'squadv2'  # which the task type refuses
# Arguments of lm-eval's model for which the task type has no setting.
OF_ITS_MODEL_ALONE = ('add_bos_token', 'prefix_token_id')
NUM_REAL_ROWS = 6


def cases() -> Iterator[Any]:
    """Yield all cases, of which a few run in each `make test`."""
    for case in [*FAST, *CASES]:
        marks = []
        if case not in FAST:
            marks.append(pytest.mark.slow)
        if case.task in NEED_SQUAD_METRICS and not HAS_SQUAD_METRICS:
            reason = f"lm-eval's {case.task} imports transformers.data.metrics, which this transformers lacks"
            marks.append(pytest.mark.skip(reason=reason))
        yield pytest.param(case, id=str(case), marks=marks)


def cases_of_tasks() -> Iterator[Any]:
    """Yield the cases that our YAML has keys for."""
    for parameters in cases():
        (case,) = parameters.values
        is_token = isinstance(case.model.get('think_end_token'), int)
        is_refused = case.task == WITH_TWO_TYPES_OF_REQUESTS
        if not is_token and not is_refused and not case.model.keys() & OF_ITS_MODEL_ALONE:
            yield parameters


class EngineAlone(GauntletLM):
    """Our engine, which nothing takes lm-eval's own way around."""

    _model_call = None
    _model_generate = None


@dataclass(frozen=True)
class Ways:
    """The three ways in which a task is evaluated, with definitions in a folder, on models by their `adds_begin`."""

    definitions: Path
    models: dict[bool, Path]

    def outcome(self, model_class: type[HFLM], case: Case) -> Outcome:
        """Return what lm-eval makes of one of its models, at the batch size at which its texts depend on no other."""
        model = model_class(
            pretrained=str(self.models[case.adds_begin]), device='cpu', dtype='float32', batch_size=1, **case.model
        )
        return evaluated(model, case.task, self.definitions, num_fewshot=case.num_fewshot, **case.chat)

    def evaluation(self, case: Case) -> Evaluation:
        """Return an evaluation of ours."""
        folder = self.models[case.adds_begin]
        network = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
        model = ModelAndTokenizer(model=network, tokenizer=AutoTokenizer.from_pretrained(folder))
        loop = tiny.loop_of(settings_of(case, self.definitions), model)
        for step in loop:
            step.run()
        return loop.finish()

    def figures_of_model(self, case: Case) -> Figures:
        """Compare lm-eval's backend with our engine in its place."""
        return compare(self.outcome(HFLM, case), self.outcome(EngineAlone, case))

    def figures_of_task(self, case: Case) -> Figures:
        """Compare lm-eval's backend with a task of ours."""
        return compare_with_evaluation(self.outcome(HFLM, case), self.evaluation(case))


def settings_of(case: Case, definitions: Path) -> dict[str, Any]:
    """Return a case in the keys of our YAML."""
    task = {
        'label': case.task,
        'icl_task_type': 'lm_eval',
        'lm_eval_task': case.task,
        'include_path': str(definitions),
    }
    if case.num_fewshot is not None:
        task['num_fewshot'] = [case.num_fewshot]
    settings: dict[str, Any] = {'tasks': [task], 'save_folder': None}
    if case.chat:
        settings['apply_chat_template'] = True
        settings['fewshot_as_turns'] = case.chat.get('fewshot_as_multiturn', True)
    if 'system_instruction' in case.chat:
        settings['system_prompt'] = case.chat['system_instruction']
    if 'max_length' in case.model:
        settings['max_seq_len'] = case.model['max_length']
    if 'think_end_token' in case.model:
        settings['reasoning_markers'] = [f'...{case.model["think_end_token"]}']
    return settings


@pytest.fixture(scope='module')
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return {False: MODEL, True: save_with_begin(tmp_path_factory.mktemp('models') / 'begin')}


@pytest.fixture(scope='module', autouse=True)
def cache_of_data_sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path_factory.mktemp('datasets'))
        yield


@pytest.fixture(scope='module')
def ways(models: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> Ways:
    return Ways(write_definitions(tmp_path_factory.mktemp('definitions')), models)


@pytest.mark.parametrize('case', [*cases()])
def test_our_engine_has_the_answers_and_metrics_of_the_backend_of_lm_eval(case: Case, ways: Ways):
    figures = ways.figures_of_model(case)
    assert figures.num_requests >= figures.num_documents > 1


@pytest.mark.parametrize('case', [*cases_of_tasks()])
def test_a_task_of_ours_has_the_answers_and_metrics_of_the_backend_of_lm_eval(case: Case, ways: Ways):
    figures = ways.figures_of_task(case)
    assert figures.num_requests >= figures.num_documents > 1


@pytest.mark.slow
@pytest.mark.parametrize('task', ['piqa', 'arc_easy', 'lambada_openai', 'gsm8k', 'triviaqa', 'wikitext'])
def test_real_rows_have_equal_answers_too(task: str, real_data: Path, models: dict[bool, Path], tmp_path: Path):
    rows_of_task = {task: real_rows(real_data, NUM_REAL_ROWS)[task]}
    ways = Ways(write_definitions(tmp_path, rows_of_task), models)
    case = Case(task=task, num_fewshot=None if task in ('lambada_openai', 'wikitext') else 2)
    assert ways.figures_of_model(case).num_documents == NUM_REAL_ROWS
    assert ways.figures_of_task(case).num_documents == NUM_REAL_ROWS


def test_generations_have_right_and_wrong_answers_ends_and_stop_strings(ways: Ways):
    """Otherwise their comparison says little."""
    outcome = ways.outcome(HFLM, Case(task='gsm8k', num_fewshot=2))
    for filter_name in ('strict-match', 'flexible-extract'):
        assert 0 < outcome.metrics['gsm8k', f'exact_match,{filter_name}'] < 1


# Of three repeats of each row of gsm8k, whose answers are 7, 11, 11, 8, 6 and 5: majorities, ties, and no number.
NUMBERS_OF_REPEATS = [
    ('7', '7', '8'),
    ('12', '11', '11'),
    ('11', '5', '5'),
    ('unknown', '8', '8 or 6'),
    ('9', '6', '6'),
    ('4', '5', '5'),
]


class GivenTexts(LM):
    """A model of lm-eval that answers the requests of a task, in order, with texts."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        assert len(requests) == len(self.texts)
        return self.texts

    def loglikelihood(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def loglikelihood_rolling(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def test_filters_reduce_the_same_sampled_repeats_to_the_same_answers(ways: Ways):
    """Sampled texts themselves are others than those of lm-eval, as are those of any two generators."""
    case = Case(task='gsm8k_cot_sampled')
    data = load_data(decode_settings(settings_of(case, ways.definitions)))
    ((key, _),) = data.tasks.items()
    texts = {}
    for row, numbers in enumerate(NUMBERS_OF_REPEATS):
        for sample, number in enumerate(numbers):
            texts[row, sample] = f'The answer is {number}.'

    expected = evaluated(GivenTexts([*texts.values()]), case.task, ways.definitions)
    answers = []
    for (row, sample), text in texts.items():
        answers.append(('given', Answer(task=case.task, num_shots=2, row=row, sample=sample, text=text)))
    score = score_answers(data, answers).scores[key]
    values = {metric: value for (_, metric), value in expected.metrics.items() if '_stderr' not in metric}
    assert {name: measure.value for name, measure in score.metrics.items()} == values
    assert values['exact_match,score-first'] == pytest.approx(2 / 6)
    assert values['exact_match,maj@3'] == pytest.approx(4 / 6)
