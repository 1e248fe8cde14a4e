"""Helpers of the SCORE tests: settings, runs, and metrics computed from samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import tiny
from paths import ROOT
from recorded_runs import read_lines

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import PreparedEvaluation, prepare_evaluation
from llmfoundry_gauntlet.tasks.encode import Encoder

DATA = ROOT / 'eval_data'
LETTERS = 'ABCDEFGHIJ'
LEAD = 'The best answer is'
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}'
)
ORDER, PROMPT, DRAWN = 'option_order', 'prompt', 'non_greedy'


LAW = {'question': 'Who?', 'options': ['he', 'she', 'it'], 'answer': 'B', 'answer_index': 1, 'category': 'law'}


def write_score_files(write_jsonl: Callable[..., Path], folder: str, *questions: dict[str, Any]) -> None:
    """Write questions of MMLU-Pro, one question of AGIEval and one of MATH, and short prompts, below a folder."""
    write_jsonl(f'{folder}/mmlu_pro_test.jsonl', questions)
    sat = {'passage': None, 'question': 'How?', 'options': ['(A)x', '(B)y'], 'label': 'A'}
    write_jsonl(f'{folder}/agieval_v1/sat-en.jsonl', [sat])
    write_jsonl(f'{folder}/hendrycks_math/algebra.jsonl', [{'problem': '1+1?', 'solution': r'$\boxed{2}$'}])

    ask = {'prompt': '{question}{options}'}
    numbered = [{'prompt': f'{number}. {{question}}{{options}}'} for number in range(10)]
    with_options = {'option_order_robustness': ask, 'non_greedy_robustness': ask, 'prompt_robustness': numbered}
    solve = {'prompt': '{question}'}
    without_options = {'non_greedy_robustness': solve, 'prompt_robustness': [solve] * 10}
    for name, prompts in (('mmlu_pro', with_options), ('agieval', with_options), ('math', without_options)):
        write_jsonl(f'{folder}/prompts/{name}.json', [prompts])


def tokenizer(template: str | None = None) -> Any:
    """Return a tokenizer with a token per byte, a bos, and optionally a chat template."""
    made = tiny.tokenizer()
    made.chat_template = template
    return made


def settings_of(*entries: dict[str, Any], data_root: Path = DATA, **more: Any) -> dict[str, Any]:
    return {'score': list(entries), 'data_root': str(data_root), **more}


def data_of(*entries: dict[str, Any], **more: Any) -> Any:
    return load_data(decode_settings(settings_of(*entries, **more)))


def prepared_of(
    *entries: dict[str, Any], template: str | None = None, cache: Path | None = None, **more: Any
) -> PreparedEvaluation:
    return prepare_evaluation(data_of(*entries, **more), Encoder(tokenizer(template)), max_seq_len=1024, cache=cache)


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def options_of(sample: dict[str, Any]) -> tuple[list[str], int]:
    """Return the options of a sample row of MMLU-Pro as its variant shows them, and the index of the gold one."""
    row = read_lines(DATA / 'score' / 'mmlu_pro_test.jsonl')[sample['row']]
    options = list(row['options'])
    gold = row['answer_index']
    perturbation, _, name = sample['variant'].partition(':')
    if perturbation == ORDER:
        index = LETTERS.index(name)
        options[gold], options[index] = options[index], options[gold]
        gold = index
    return options, gold


def check_metrics(record: dict[str, Any], samples: list[dict[str, Any]], perturbation: str) -> None:
    """Check the metrics of a perturbation against those computed from its samples."""
    variants = [sample for sample in samples if sample['variant'].startswith(f'{perturbation}:')]
    questions: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for sample in variants:
        questions[sample['row']].append(sample)

    scores_by_category: dict[str, list[float]] = defaultdict(list)
    rates = []
    for group in questions.values():
        category = group[0]['category']
        scores_by_category[category].append(mean(sample['score'] for sample in group))
        rates.append(agreement(group))

    expected = {
        'accuracy': mean(mean(scores) for scores in scores_by_category.values()),
        'consistency_rate': mean(rates),
        'consistency_rate/standard_error': np.std(rates, ddof=1) / math.sqrt(len(rates)),
        'unparsed_rate': mean(sample['predicted'] is None for sample in variants),
        'all_variants_right': mean(all(sample['score'] == 1 for sample in group) for group in questions.values()),
    }
    for name, value in expected.items():
        logged = record['metrics'][f'icl/metrics/score/mmlu_pro/{perturbation}/{name}']
        assert logged == pytest.approx(value, abs=1e-12), name


def agreement(group: Iterable[dict[str, Any]]) -> float:
    """Return the share of pairs of a question's variants with the same option; without an option none agrees."""
    texts: list[str | None] = []
    for sample in group:
        options, _ = options_of(sample)
        texts.append(None if sample['predicted'] is None else options[sample['predicted']])
    return mean(text is not None and text == other for text, other in combinations(texts, 2))


def save_tiny_llamas(folder: Path) -> Path:
    """Save a tiny Llama without and with a chat template, in `plain` and `chat`."""
    network = networks.network(vocab_size=259, max_position_embeddings=1024, eos_token_id=1)
    for name, template in (('plain', None), ('chat', CHAT)):
        network.save_pretrained(folder / name)
        tokenizer(template).save_pretrained(folder / name)
    return folder
