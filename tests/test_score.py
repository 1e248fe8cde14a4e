"""SCORE end to end: tiny models, the sample data, records and the metric stream."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch
from paths import ROOT
from score_runs import (
    CHAT,
    DATA,
    DRAWN,
    LEAD,
    LETTERS,
    ORDER,
    PROMPT,
    check_metrics,
    options_of,
    prepared_of,
    read_lines,
    settings_of,
    tokenizer,
)

from llmfoundry_gauntlet import ModelError, evaluate
from llmfoundry_gauntlet.config.yaml import read_yaml
from llmfoundry_gauntlet.evaluation.run import Evaluation, PreparedEvaluation, plan_evaluation

LIKELY = {'dataset': 'mmlu_pro', 'answers': 'likelihood', 'subset_items': 5}


def test_likelihoods_equal_plain_forwards_of_each_letter(tiny_llamas: Path, tmp_path: Path):
    """Build each prompt by hand from the row and the prompt file, and run each letter in its own forward."""
    out = tmp_path / 'out'
    evaluation = evaluate(tiny_llamas / 'plain', out=out, device='cpu', **settings_of(LIKELY))
    samples = read_lines(out / 'samples' / 'score_mmlu_pro_0-shot.jsonl')
    prompts = json.loads((DATA / 'score' / 'prompts' / 'mmlu_pro.json').read_text())
    network = networks.network(vocab_size=259, max_position_embeddings=1024)
    rows = read_lines(DATA / 'score' / 'mmlu_pro_test.jsonl')
    assert len({sample['row'] for sample in samples}) == 5
    for number, sample in enumerate(samples):
        options, gold = options_of(sample)
        perturbation, _, name = sample['variant'].partition(':')
        entry = prompts['option_order_robustness'] if perturbation == ORDER else prompts['prompt_robustness'][int(name)]
        lines = ''.join(f'\n{letter}: {option}' for letter, option in zip(LETTERS, options, strict=False))
        row = rows[sample['row']]
        text = entry['prompt'].format(question=row['question'], options=lines, category=row['category'])
        text = f'{text}\n{LEAD}'
        assert sample['prompt_sha256'] == hashlib.sha256(text.encode()).hexdigest()
        assert (sample['gold'], sample['category'], sample['file']) == (gold, row['category'], None)
        assert (sample['text'], sample['status'], sample['num_tokens']) == (None, 'scored', [2] * len(options))
        assert sample['answer'] == LETTERS[sample['predicted']]
        assert sample['predicted'] == int(np.argmax(sample['logprobs']))
        assert sample['score'] == float(sample['predicted'] == gold)
        if number % 9 == 0:
            context = np.array([0, *tokenizer()(text, add_special_tokens=False)['input_ids']])
            for letter, logprob in zip(LETTERS, sample['logprobs'], strict=False):
                ids = np.array(tokenizer()(f' {letter}', add_special_tokens=False)['input_ids'])
                values, _ = networks.alone(network, context, ids)
                assert logprob == pytest.approx(values.sum(dtype=np.float64), abs=2e-5)
    record = json.loads((out / 'results.json').read_text())
    for perturbation in (ORDER, PROMPT):
        check_metrics(record, samples, perturbation)
    assert evaluation.scores['score_mmlu_pro/0-shot'].num_unscored == 0


WRITTEN = {'dataset': 'mmlu_pro', 'subset_items': 3, 'max_new_tokens': 8, 'temperature': 3.0}


@pytest.fixture(scope='module')
def written(tiny_llamas: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evaluation]:
    """Generate for the sample rows of MMLU-Pro and of each subset of AGIEval."""
    out = tmp_path_factory.mktemp('written') / 'out'
    agieval = {'dataset': 'agieval', 'subset_items': 15, 'perturbations': [ORDER], 'max_new_tokens': 4}
    return out, evaluate(tiny_llamas / 'plain', out=out, device='cpu', **settings_of(WRITTEN, agieval))


def test_generations_equal_transformers_and_are_sampled_only_for_seeds(written):
    _, evaluation = written
    network = networks.network(vocab_size=259, max_position_embeddings=1024, eos_token_id=1)
    decode = tokenizer().decode
    drawn: dict[int, list[str]] = {}
    greedy: dict[int, str] = {}
    for result in evaluation.results['score_mmlu_pro/0-shot']:
        key = result.key
        if key.variant.startswith(DRAWN):
            drawn.setdefault(key.row, []).append(result.text)
        elif key.variant in ('prompt:4', 'option_order:A'):
            context = torch.from_numpy(evaluation.planned.items[key].request.context).long()[None]
            ids = network.generate(context, max_new_tokens=8, do_sample=False, pad_token_id=2, eos_token_id=1)[0]
            expected = decode(ids[context.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert result.text == expected  # verbatim, also of a tokenizer that splits spaces off
            greedy[key.row] = result.text
    assert len(drawn) == 3
    for row, texts in drawn.items():
        assert len(set(texts)) > 3  # of five
        assert greedy[row] not in texts


def test_metrics_are_those_computed_from_the_samples(written):
    out, _ = written
    record = json.loads((out / 'results.json').read_text())
    samples = read_lines(out / 'samples' / 'score_mmlu_pro_0-shot.jsonl')
    for perturbation in (ORDER, PROMPT, DRAWN):
        check_metrics(record, samples, perturbation)
    for sample in samples:
        assert sample['num_tokens'][0] <= 8 and sample['logprobs'] is None
        assert (sample['answer'] is None) == ('no answer' in (sample['reason'] or ''))


def test_results_have_all_keys(written):
    out, evaluation = written
    record = json.loads((out / 'results.json').read_text())
    assert list(record['score']) == ['mmlu_pro', 'agieval']
    entry = record['score']['mmlu_pro']
    counts = {'num_items', 'num_unscored', 'num_shortened', 'ended_at_limit'}
    assert (
        set(entry) == {'task', 'absent_files', 'chance', 'perturbations', 'data_sha256', 'data_origin', 'spec'} | counts
    )
    assert (entry['task'], entry['absent_files']) == ('score_mmlu_pro/0-shot', [])
    assert entry['num_items'] == len(evaluation.results['score_mmlu_pro/0-shot'])
    measures = {
        'accuracy',
        'accuracy_micro',
        'accuracy_macro',
        'accuracy_worst',
        'accuracy_mean',
        'accuracy_best',
        'all_variants_right',
        'consistency_rate',
        'consistency_rate_reference',
        'unparsed_rate',
    }
    names = {ORDER: LETTERS, PROMPT: range(10), DRAWN: range(1, 6)}
    for perturbation, found in entry['perturbations'].items():
        by_part = {'accuracy_by_variant', 'accuracy_by_gold'}
        by_constant_letter = {'accuracy_by_constant_letter', 'consistency_rate_by_constant_letter'}
        others = {*by_part, *by_constant_letter, 'num_questions', 'num_incomplete'}
        over_prompts = {'accuracy_over_prompts', 'consistency_rate_over_prompts', 'prompt_deviation'}
        assert set(found) == measures | others | (over_prompts if perturbation == PROMPT else set())
        assert (found['num_questions'], found['num_incomplete']) == (3, 0)
        variants = [f'{perturbation}:{name}' for name in names[perturbation]]
        assert list(found['accuracy_by_variant']) == variants
        prefix = f'icl/metrics/score/mmlu_pro/{perturbation}/'
        keys = {name.removeprefix(prefix) for name in record['metrics'] if name.startswith(prefix)}
        keys_over_prompts = {
            'accuracy/standard_error_over_prompts',
            'consistency_rate/standard_error_over_prompts',
            'prompt_deviation',
        }
        assert keys == {
            *(keys_over_prompts if perturbation == PROMPT else ()),
            *(measures - {'accuracy_micro', 'accuracy_macro', 'accuracy_mean'}),
            'consistency_rate/standard_error',
            'accuracy/standard_error',
            *(f'{variant.replace(":", "_")}/accuracy' for variant in variants),
        }
    assert record['metrics'] == evaluation.metrics
    assert not any(key.startswith('metrics/score_') for key in record['metrics'])
    assert record['metrics']['gauntlet/items'] == sum(len(results) for results in evaluation.results.values())
    assert {'gauntlet/seconds/score_mmlu_pro/0-shot', 'gauntlet/seconds/score_agieval/0-shot'} <= set(record['metrics'])


# Chat templates.


@pytest.mark.parametrize('answers', ['generate', 'likelihood'])
@pytest.mark.parametrize('given', ['auto', True])
def test_chat_templates_give_the_ids_of_transformers(answers: str, given: Any):
    """Mutations: a second bos before the template's own; the beginning of the answer in the user's message."""
    entry = {'dataset': 'mmlu_pro', 'subset_items': 4, 'answers': answers, 'chat_template': given}
    prepared = prepared_of(entry, template=CHAT)
    theirs = tokenizer(CHAT)
    lead = theirs(LEAD, add_special_tokens=False)['input_ids'] if answers == 'likelihood' else []
    for item in prepared.items.values():
        message = [{'role': 'user', 'content': item.example.content.text}]
        expected = theirs.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        contexts = [item.request.context] if answers == 'generate' else item.request.contexts
        for context in contexts:
            assert context.tolist() == [*expected, *lead]
            assert context.tolist().count(theirs.bos_token_id) == 1
        if answers == 'likelihood':
            assert theirs.decode(contexts[0]).endswith(f'</s><|assistant|>{LEAD}')


def test_a_missing_or_failing_chat_template_is_an_error(tiny_llamas: Path):
    entry = {'dataset': 'math', 'subset_items': 1, 'chat_template': True}
    with pytest.raises(ModelError, match='chat_template: true'):
        evaluate(tiny_llamas / 'plain', device='cpu', **settings_of(entry))
    broken = "{{ raise_exception('no users here') }}"
    with pytest.raises(ModelError, match='no users here'):
        prepared_of({'dataset': 'mmlu_pro', 'subset_items': 1}, template=broken)


def test_another_template_prompt_or_seed_is_another_cache_entry(tmp_path: Path):
    def contexts(template: str | None, **keys: Any) -> list[Any]:
        prepared = prepared_of({'dataset': 'mmlu_pro', 'subset_items': 2, **keys}, template=template, cache=tmp_path)
        return [(item.request.context.tolist(), item.request.sampling) for item in prepared.items.values()]

    plain, chat = contexts(None), contexts(CHAT)
    other = contexts(CHAT.replace('assistant', 'model'))
    assert plain != chat != other != plain
    assert contexts(CHAT, chat_template=False) == plain
    assert contexts(CHAT, seeds=[6, 7, 8, 9, 10]) != chat
    assert contexts(CHAT, temperature=0.8) != chat
    assert contexts(None) == plain and contexts(CHAT) == chat


@pytest.mark.parametrize('answers', ['likelihood', 'generate'])
def test_any_multiple_choice_task_may_be_perturbed(answers: str):
    labels = ('arc_challenge', 'mmlu', 'commonsense_qa', 'enterprise_pii_classification')
    tasks = [one for one in read_yaml(ROOT / 'yamls/tasks/gauntlet_v0.1.yaml')['icl_tasks'] if one['label'] in labels]
    common = {'answers': answers, 'perturbations': [ORDER], 'subset_items': 3, 'max_new_tokens': 2}
    prepared = prepared_of(*({'dataset': label, **common} for label in labels), tasks=tasks)
    for label in labels:
        items = [item for key, item in prepared.items.items() if key.task == f'score_{label}/0-shot']
        assert len(items) == 3 * len(items[0].example.content.options)
        for content in (item.example.content for item in items):
            for letter, option in zip(LETTERS, content.question.options, strict=False):
                assert content.text.count(f'\n{letter}: {option}') == 1
            assert 'Choices' not in content.text and not content.text.endswith('Answer:')


def test_a_task_and_the_same_perturbed_are_evaluated_together(tiny_llamas: Path, tmp_path: Path):
    rows = read_lines(DATA / 'world_knowledge' / 'arc_challenge.jsonl')[:4]
    (tmp_path / 'arc.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    task = {'label': 'arc', 'dataset_uri': 'arc.jsonl', 'num_fewshot': [0, 1], 'icl_task_type': 'multiple_choice'}
    gauntlet = {'categories': [{'name': 'all', 'benchmarks': [{'name': 'arc', 'num_fewshot': 0}]}]}
    entry = {'dataset': 'arc', 'answers': 'likelihood', 'prompts': str(DATA / 'score' / 'prompts' / 'agieval.json')}
    common = {'tasks': [task], 'gauntlet': gauntlet, 'data_root': str(tmp_path), 'device': 'cpu'}
    evaluation = evaluate(tiny_llamas / 'plain', score=[entry], out=tmp_path / 'out', **common)
    alone = evaluate(tiny_llamas / 'plain', **common)
    assert {key: score.accuracy for key, score in evaluation.scores.items() if score.metrics} == {
        key: score.accuracy for key, score in alone.scores.items()
    }
    # Bits are of log-probabilities, which other items in a batch round otherwise.
    bits, bits_alone = evaluation.composites.gold_bits, alone.composites.gold_bits
    assert replace(evaluation.composites, gold_bits=bits_alone) == alone.composites
    assert bits.keys() == bits_alone.keys()
    for name, measure in bits.items():
        assert measure.value == pytest.approx(bits_alone[name].value, abs=1e-6)
    assert 'icl/metrics/score/arc/option_order/option_order_D/accuracy' in evaluation.metrics
    record = json.loads((tmp_path / 'out' / 'results.json').read_text())
    assert record['score']['arc']['task'] == 'score_arc/0-shot'


@pytest.mark.parametrize(
    ('perturbations', 'most'), [([ORDER], 0.75), ([PROMPT], 0.95)], ids=['option order', 'prompts']
)
def test_variants_of_a_question_share_their_text(perturbations: list[str], most: float):
    """Plan all variants together, and each variant as its own task; count the tokens."""
    entry = {'dataset': 'mmlu_pro', 'answers': 'likelihood', 'perturbations': perturbations, 'subset_items': 20}
    prepared = prepared_of(entry)
    together = plan_evaluation(prepared, tokens_per_batch=4096).num_model_tokens
    apart = 0
    for variant in {key.variant for key in prepared.items}:
        items = {key: item for key, item in prepared.items.items() if key.variant == variant}
        part = PreparedEvaluation(data=prepared.data, tasks=prepared.tasks, items=items, max_seq_len=1024, tokenizer='')
        apart += plan_evaluation(part, tokens_per_batch=4096).num_model_tokens
    assert together < most * apart
