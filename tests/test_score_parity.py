"""SCORE compared with lm-eval 0.4.13 on real questions with canned generations (`scripts/record_score.py`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import FIXTURES, SHARED_DATA
from score_generations import completion

from llmfoundry_gauntlet.config.settings import EvaluationSettings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import Evaluation
from llmfoundry_gauntlet.results.external import Answer, score_answers
from llmfoundry_gauntlet.scoring.letters import reference_letter
from llmfoundry_gauntlet.tasks.items import untokenized_items
from llmfoundry_gauntlet.tasks.templates import seed_of
from llmfoundry_gauntlet.types import ItemKey

SCORE = SHARED_DATA / 'score'
CASES = yaml.safe_load((FIXTURES / 'score_cases.yaml').read_text('utf-8'))
pytestmark = pytest.mark.skipif(not SCORE.is_dir(), reason=f'{SCORE} is absent: the real questions of SCORE')


@dataclass(frozen=True)
class Scored:
    """A recorded data set, and our evaluation of its rows and generations."""

    recorded: dict[str, Any]
    evaluation: Evaluation
    prompts: dict[ItemKey, str]

    def tasks(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        """Yield each perturbation with its recording and our score."""
        for task in self.recorded['tasks']:
            perturbation = task['name'].removeprefix('score_').partition('_robustness')[0]
            yield perturbation, task, self.evaluation.robustness[self.recorded['dataset']][perturbation]

    def key(self, item: dict[str, Any], variant: str) -> ItemKey:
        """Return our key of one of lm-eval's items."""
        (task,) = self.evaluation.results
        file = Path(item['file']).stem if 'mmlu' not in item['file'] else None
        return ItemKey(task=task, row=item['row'], file=file, variant=variant)


@pytest.fixture(scope='module', params=['mmlu_pro', 'agieval', pytest.param('math', marks=pytest.mark.slow)])
def scored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    """Evaluate all rows of a recorded data set, at their place in files of empty lines."""
    dataset = request.param
    data_root = tmp_path_factory.mktemp('data')
    for name, entry in CASES[dataset]['files'].items():
        lines = (SCORE / name).read_text(encoding='utf-8').split('\n')
        recorded_lines = [line if number in entry['rows'] else '' for number, line in enumerate(lines)]
        path = data_root / 'score' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(''.join(f'{line}\n' for line in recorded_lines), encoding='utf-8')

    prompts_file = SCORE / 'upstream_prompts' / f'{CASES[dataset]["folder"]}_prompt_templates.json'
    entry = {'dataset': dataset, 'prompts': str(prompts_file), 'answer_extraction': 'reference'}
    data = load_data(EvaluationSettings(score=[entry], data_root=str(data_root), save_folder=None))
    ((key, task),) = data.tasks.items()
    prompts = {}
    answers = []
    for item, prompt in untokenized_items(task, data.examples[key], data.asked(key)):
        prompts[item.key] = prompt.text
        content = item.example.content
        if dataset == 'math':
            gold, options = content.gold, ()
        else:
            gold, options = content.options[content.gold], content.options
        text = completion(prompt.text, gold, options, seed_of(item.key.variant) or 0)
        name = {field: getattr(item.key, field) for field in ('row', 'file', 'variant')}
        answers.append(('canned', Answer(task=task.label, num_shots=0, **name, text=text)))

    recorded = json.loads((FIXTURES / 'score' / f'{dataset}.json').read_text())
    return Scored(recorded, score_answers(data, answers), prompts)


def test_prompts_are_equal_character_by_character(scored: Scored):
    seen = set()
    for perturbation, task, _ in scored.tasks():
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
    for perturbation, task, _ in scored.tasks():
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


def test_accuracies_and_consistency_rates_are_equal(scored: Scored):
    """But for the accuracies of labels that some questions of MMLU-Pro lack, which lm-eval asks unswapped."""
    for perturbation, task, score in scored.tasks():
        if (scored.recorded['dataset'], perturbation) != ('mmlu_pro', 'option_order'):
            for variant, value in task['accuracies'].items():
                accuracy = score.accuracy_by_variant[f'{perturbation}:{variant}'].value
                assert accuracy == pytest.approx(value, abs=1e-9)
        assert score.consistency_rate_reference.value == pytest.approx(task['consistency_rate'], abs=1e-9)
        assert 0.1 < score.consistency_rate.value < 0.9
