"""SCORE compared with lm-eval 0.4.13 on real questions with canned generations (`scripts/record_score.py`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import FIXTURES, SHARED_DATA
from score_generations import CannedReplies, agieval_question, math_question, mmlu_pro_question

from llmfoundry_gauntlet.config.settings import EvaluationSettings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.external import score_answers
from llmfoundry_gauntlet.scoring.letters import reference_letter
from llmfoundry_gauntlet.tasks.items import untokenized_items
from llmfoundry_gauntlet.tasks.templates import seed_of
from llmfoundry_gauntlet.types import Answer, ItemKey

SCORE = SHARED_DATA / 'score'
PROMPTS = {'mmlu_pro': 'mmlu_pro', 'agieval': 'agi_eval', 'math': 'math'}
RATES = {'option_order': 'options_consistency_rate', 'prompt': 'consistency_rate'}
ACCURACIES = {
    'option_order': ('per_option_macro_accuracy_{}', 'per_option_accuracy_{}'),
    'prompt': ('{}_macro_accuracy', '{}_accuracy'),
    'non_greedy': ('non_greedy_macro_accuracy', 'non_greedy_accuracy'),
}
pytestmark = pytest.mark.skipif(not SCORE.is_dir(), reason=f'{SCORE} is absent: the real questions of SCORE')


@dataclass(frozen=True)
class Scored:
    """A recorded data set, and our evaluation of its rows and generations."""

    recorded: dict[str, Any]
    evaluation: Evaluation
    prompts: dict[ItemKey, str]

    def tasks(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each perturbation with its recording."""
        for task in self.recorded['tasks']:
            yield next(name for name in ACCURACIES if name in task['name']), task

    def key(self, item: dict[str, Any], variant: str) -> ItemKey:
        """Return our key of one of lm-eval's items."""
        (task,) = self.evaluation.results
        file = Path(item['file']).stem if 'mmlu' not in item['file'] else None
        return ItemKey(task=task, row=item['row'], file=file, variant=variant)


@pytest.fixture(scope='module', params=['mmlu_pro', 'agieval', pytest.param('math', marks=pytest.mark.slow)])
def scored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    """Evaluate all rows of a recorded data set."""
    return evaluate(request.param, tmp_path_factory.mktemp('data'))


@cache
def evaluate(dataset: str, data_root: Path) -> Scored:
    recorded = json.loads((FIXTURES / 'score' / f'{dataset}.json').read_text())
    fixes = {
        entry['problem']: entry['answer']
        for entry in json.loads((SCORE / 'upstream_prompts' / 'to_be_fixed_questions.json').read_text())
    }
    questions = []
    for name, numbers in recorded['rows'].items():
        lines = (SCORE / name).read_text(encoding='utf-8').split('\n')
        kept = [line if number in numbers else '' for number, line in enumerate(lines)]
        (data_root / 'score' / name).parent.mkdir(parents=True, exist_ok=True)
        (data_root / 'score' / name).write_text('\n'.join(kept) + '\n', encoding='utf-8')
        for row in (json.loads(lines[number]) for number in numbers):
            make = {'mmlu_pro': mmlu_pro_question, 'agieval': agieval_question}.get(dataset)
            questions.append(make(row) if make else math_question(row, fixes))
    entry = {
        'dataset': dataset,
        'prompts': str(SCORE / 'upstream_prompts' / f'{PROMPTS[dataset]}_prompt_templates.json'),
        'answer_extraction': 'reference',
    }
    data = load_data(EvaluationSettings(score=[entry], data_root=str(data_root), save_folder=None))
    canned = CannedReplies(questions)
    ((key, task),) = data.tasks.items()
    items = untokenized_items(task, data.examples[key], data.asked(key))
    prompts = {item.key: prompt.text for item, prompt in items}
    answers = (
        Answer(place='canned', key=key, text=canned.reply(text, seed_of(key.variant) or 0))
        for key, text in prompts.items()
    )
    return Scored(recorded, score_answers(data, answers), prompts)


def test_prompts_are_equal_character_by_character(scored: Scored):
    seen = set()
    for perturbation, task in scored.tasks():
        for item in task['items']:
            digests = item['prompts'] * (5 if perturbation == 'non_greedy' else 1)
            for variant, wanted in zip(task['variants'], digests, strict=True):
                key = scored.key(item, f'{perturbation}:{variant}')
                if key not in scored.prompts:  # a label that the question lacks: lm-eval asks it unswapped
                    key = scored.key(item, f'{perturbation}:{item["gold"]}')
                assert hashlib.sha256(scored.prompts[key].encode()).hexdigest() == wanted
                seen.add(key)
    others = {key.variant for key in scored.prompts.keys() - seen}
    assert others <= {'option_order:E'}  # which lm-eval does not ask of AGIEval


def test_every_generation_has_the_same_answer_and_score(scored: Scored):
    (results,) = scored.evaluation.results.values()
    ours = {result.key: result for result in results}
    num_compared = 0
    for perturbation, task in scored.tasks():
        for item in task['items']:
            for variant, correct, answer in zip(task['variants'], item['correct'], item['answers'], strict=True):
                result = ours.get(scored.key(item, f'{perturbation}:{variant}'))
                if result is None:
                    continue
                assert result.score == correct
                if scored.recorded['dataset'] != 'math':
                    letter = reference_letter(result.text)
                    assert answer == letter or answer == f'sha256:{digest(letter)}'
                else:
                    assert (answer or None) == (result.answer and digest(result.answer))
                num_compared += 1
    assert num_compared >= len(ours) - sum(key.variant == 'option_order:E' for key in ours)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_accuracies_are_equal(scored: Scored):
    """Except for labels that a question of MMLU-Pro lacks: lm-eval counts it there unswapped."""
    dataset = scored.recorded['dataset']
    for perturbation, task in scored.tasks():
        if (dataset, perturbation) == ('mmlu_pro', 'option_order'):
            continue
        by_variant = scored.evaluation.robustness[dataset][perturbation].accuracy_by_variant
        for run in task['runs']:
            for variant in [run['seed']] if perturbation == 'non_greedy' else task['variants']:
                name = ACCURACIES[perturbation][dataset != 'mmlu_pro'].format(variant)
                expected = run['unrounded'][task['name']][name]
                assert by_variant[f'{perturbation}:{variant}'].value == pytest.approx(expected, abs=1e-9)


def test_consistency_rates_are_equal(scored: Scored):
    for perturbation, task in scored.tasks():
        score = scored.evaluation.robustness[scored.recorded['dataset']][perturbation]
        if perturbation == 'non_greedy':
            recorded = task['summary']['consistency_rate']
        else:
            recorded = task['runs'][0]['metrics'][task['name']][RATES[perturbation]]
        assert score.consistency_rate_reference.value == pytest.approx(recorded, abs=1e-9)
        assert 0.1 < score.consistency_rate.value < 0.9


@pytest.mark.parametrize('dataset', PROMPTS)
def test_the_recorded_rows_are_those_of_the_cases_file(dataset: str):
    files = yaml.safe_load((FIXTURES / 'score_cases.yaml').read_text('utf-8'))[dataset]['files']
    recorded = json.loads((FIXTURES / 'score' / f'{dataset}.json').read_text())
    assert recorded['rows'] == {name: entry['rows'] for name, entry in files.items()}
