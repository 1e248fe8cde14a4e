"""SCORE from end to end: tiny models, our own rows, the command line, records and the metric stream."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import test_ranks
import tiny
import torch
from composer.loggers import InMemoryLogger
from paths import ROOT

from llmfoundry_gauntlet import EvalGauntlet, ModelError, evaluate
from llmfoundry_gauntlet.cli import main
from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.config.yaml_files import read_yaml
from llmfoundry_gauntlet.engine.reply import Reply, ReplyDecoder
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation import Evaluation, PreparedEvaluation, plan_evaluation, prepare_evaluation
from llmfoundry_gauntlet.inputs import load_data
from llmfoundry_gauntlet.marking import mark_answers
from llmfoundry_gauntlet.prompts.cache import NO_CACHE, TokenCache
from llmfoundry_gauntlet.prompts.encode import Encoder
from llmfoundry_gauntlet.prompts.seeds import draw_seed
from llmfoundry_gauntlet.records.answers import read_answers
from llmfoundry_gauntlet.tasks.items import sampling_of
from llmfoundry_gauntlet.values import GenerateRequest, Item, ItemKey, ScoreRequest

DATA = ROOT / 'eval_data'
LETTERS = 'ABCDEFGHIJ'
LEAD = 'The best answer is'
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}'
)
NAMES = ('task', 'num_shots', 'file', 'row', 'variant', 'sample')
ORDER, PROMPT, DRAWN = 'option_order', 'prompt', 'non_greedy'


def tokenizer(template: str | None = None) -> Any:
    """A token per byte, a bos in front, and perhaps a chat template."""
    made = tiny.tokenizer()
    made.chat_template = template
    return made


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama without and with a chat template, in `plain` and `chat`."""
    folder = tmp_path_factory.mktemp('models')
    network = networks.network(vocab_size=259, max_position_embeddings=1024, eos_token_id=1)
    for name, template in (('plain', None), ('chat', CHAT)):
        network.save_pretrained(folder / name)
        tokenizer(template).save_pretrained(folder / name)
    return folder


def settings_of(*entries: dict[str, Any], data_root: Path = DATA, **more: Any) -> dict[str, Any]:
    return {'score': list(entries), 'data_root': str(data_root), **more}


def data_of(*entries: dict[str, Any], **more: Any) -> Any:
    return load_data(decode_settings(settings_of(*entries, **more)))


def prepared_of(
    *entries: dict[str, Any], template: str | None = None, cache: TokenCache = NO_CACHE, **more: Any
) -> PreparedEvaluation:
    return prepare_evaluation(data_of(*entries, **more), Encoder(tokenizer(template)), max_seq_len=1024, cache=cache)


def run_cli(*arguments: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['gauntlet', *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


# The samples of a run are marked and averaged here a second time, from DESIGN alone.


def options_of(sample: dict[str, Any]) -> tuple[list[str], int]:
    """A row of our own MMLU-Pro as its variant shows it: options, and the place of the right one."""
    row = read_lines(DATA / 'score' / 'mmlu_pro_test.jsonl')[sample['row']]
    options, gold = list(row['options']), row['answer_index']
    perturbation, _, name = sample['variant'].partition(':')
    if perturbation == ORDER:
        place = LETTERS.index(name)
        options[gold], options[place] = options[place], options[gold]
        gold = place
    return options, gold


def check_metrics(record: dict[str, Any], samples: list[dict[str, Any]], perturbation: str) -> None:
    """Accuracy by category, consistency of the chosen texts, and what else there is."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        if sample['variant'].startswith(f'{perturbation}:'):
            groups.setdefault(sample['row'], []).append(sample)
    by_category: dict[str, list[float]] = {}
    for group in groups.values():
        by_category.setdefault(group[0]['category'], []).append(mean(sample['credit'] for sample in group))
    rates = []
    for group in groups.values():
        texts = [None if s['predicted'] is None else options_of(s)[0][s['predicted']] for s in group]
        pairs = list(combinations(texts, 2))
        rates.append(mean(one is not None and one == other for one, other in pairs))
    wanted = {
        'accuracy': mean(mean(values) for values in by_category.values()),
        'consistency_rate': mean(rates),
        'consistency_rate/standard_error': np.std(rates, ddof=1) / math.sqrt(len(rates)),
        'unparsed_rate': mean(sample['predicted'] is None for group in groups.values() for sample in group),
        'all_variants_right': mean(all(sample['credit'] == 1 for sample in group) for group in groups.values()),
    }
    for name, value in wanted.items():
        found = record['metrics'][f'icl/metrics/score/mmlu_pro/{perturbation}/{name}']
        assert found == pytest.approx(value, abs=1e-12), name


LIKELY = {'dataset': 'mmlu_pro', 'answers': 'likelihood', 'subset_items': 5}


def test_likelihood_is_what_bare_forwards_say_of_each_letter(folder: Path, tmp_path: Path):
    """Each prompt made by hand from the row and the prompt's file, each letter by a forward of its own."""
    out = tmp_path / 'out'
    evaluation = evaluate(folder / 'plain', out=out, device='cpu', **settings_of(LIKELY))
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
        assert sample['credit'] == float(sample['predicted'] == gold)
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


def test_likelihood_draws_nothing_and_says_so(folder: Path, tmp_path: Path, capsys):
    entry = {**LIKELY, 'subset_items': 2}
    (tmp_path / 'score.yaml').write_text(json.dumps({'score': [entry]}))
    common = ['--score', tmp_path / 'score.yaml', '--data-root', DATA, '--device', 'cpu']
    assert run_cli('run', '--model', folder / 'plain', *common, '--out', tmp_path / 'out') == 0
    record = json.loads((tmp_path / 'out' / 'results.json').read_text())
    entry = record['score']['mmlu_pro']
    assert entry['task'] == 'score_mmlu_pro/0-shot' and entry['absent_files'] == []
    assert list(entry['perturbations']) == [ORDER, PROMPT, DRAWN]
    assert entry['perturbations'][DRAWN] == {'reason': 'nothing is drawn with answers: likelihood'}
    assert not any(DRAWN in key for key in record['metrics'])
    printed = capsys.readouterr().out
    assert 'score mmlu_pro option_order accuracy' in printed and 'score mmlu_pro prompt consistency_rate' in printed


WRITTEN = {'dataset': 'mmlu_pro', 'subset_items': 3, 'max_new_tokens': 8, 'temperature': 3.0}


@pytest.fixture(scope='module')
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evaluation]:
    """Replies to our own MMLU-Pro, and to two questions of each subset of AGIEval."""
    out = tmp_path_factory.mktemp('written') / 'out'
    agieval = {'dataset': 'agieval', 'subset_items': 14, 'perturbations': [ORDER], 'max_new_tokens': 4}
    return out, evaluate(folder / 'plain', out=out, device='cpu', **settings_of(WRITTEN, agieval))


def test_replies_are_what_the_model_writes_and_drawn_where_a_seed_says_so(written):
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
            assert result.text.removeprefix(' ') == expected.removeprefix(' ')  # see the next test
            greedy[key.row] = result.text
    assert len(drawn) == 3
    for row, texts in drawn.items():
        assert len(set(texts)) > 3  # of five
        assert greedy[row] not in texts


def test_a_reply_is_as_it_was_written_also_where_a_tokenizer_splits_a_space_off():
    """DESIGN: SCORE's text is taken as it is. With the reference's extraction ' B' has no answer, and 'B' has one."""
    ids = tokenizer()('B', add_special_tokens=False)['input_ids']
    reply = Reply(
        GenerateRequest(
            key=ItemKey('score_mmlu_pro/0-shot', 0),
            context=np.zeros(1, np.int32),
            max_new_tokens=1,
            restores_space=False,
        ),
        ReplyDecoder(tokenizer()),
    )
    reply.add(ids[0])
    assert reply.result().text == 'B'


def test_the_metrics_of_replies_are_those_of_the_samples(written):
    out, _ = written
    record = json.loads((out / 'results.json').read_text())
    samples = read_lines(out / 'samples' / 'score_mmlu_pro_0-shot.jsonl')
    for perturbation in (ORDER, PROMPT, DRAWN):
        check_metrics(record, samples, perturbation)
    for sample in samples:
        assert sample['num_tokens'][0] <= 8 and sample['logprobs'] is None
        assert (sample['answer'] is None) == ('no answer found in the reply' in (sample['reason'] or ''))


def test_results_have_the_keys_of_the_design(written):
    out, evaluation = written
    record = json.loads((out / 'results.json').read_text())
    assert list(record['score']) == ['mmlu_pro', 'agieval']
    entry = record['score']['mmlu_pro']
    counts = {'num_items', 'num_unscored', 'num_truncated'}
    assert set(entry) == {'task', 'absent_files', 'perturbations'} | counts
    assert entry['num_items'] == len(evaluation.results['score_mmlu_pro/0-shot'])
    measures = {
        *('accuracy', 'accuracy_standard_error', 'accuracy_micro', 'accuracy_macro', 'accuracy_worst'),
        *('accuracy_mean', 'accuracy_best', 'all_variants_right', 'consistency_rate', 'unparsed_rate'),
        *('consistency_rate_standard_error', 'consistency_rate_reference'),
    }
    for perturbation, found in entry['perturbations'].items():
        others = {'accuracy_by_variant', 'accuracy_by_gold', 'num_questions', 'num_incomplete'}
        assert set(found) == measures | others
        assert (found['num_questions'], found['num_incomplete']) == (3, 0)
        for name in measures:
            assert set(found[name]) in ({'value'}, {'reason'})
        keys = {
            name.removeprefix(prefix)
            for name in record['metrics']
            if name.startswith(prefix := f'icl/metrics/score/mmlu_pro/{perturbation}/')
        }
        assert keys == {
            *('accuracy', 'consistency_rate', 'consistency_rate_reference', 'unparsed_rate'),
            *('accuracy_worst', 'accuracy_best', 'all_variants_right', 'consistency_rate/standard_error'),
            *(f'{variant.replace(":", "_")}/accuracy' for variant in found['accuracy_by_variant']),
            *(['accuracy/standard_error'] if 'value' in found['accuracy_standard_error'] else []),
        }
    variants = {name: list(found['accuracy_by_variant']) for name, found in entry['perturbations'].items()}
    assert variants[PROMPT] == [f'prompt:{number}' for number in range(10)]
    assert variants[DRAWN] == [f'non_greedy:{seed}' for seed in range(1, 6)]
    assert variants[ORDER] == [f'option_order:{letter}' for letter in LETTERS[: len(variants[ORDER])]]
    assert record['metrics'] == evaluation.metrics
    assert not any(key.startswith('metrics/score_') for key in record['metrics'])
    num_items = record['metrics']['gauntlet/items']
    assert num_items == sum(len(results) for results in evaluation.results.values())
    assert {'gauntlet/seconds/score_mmlu_pro/0-shot', 'gauntlet/seconds/score_agieval/0-shot'} <= set(record['metrics'])


def test_agieval_has_a_variant_for_each_real_option_and_names_its_files(written):
    out, evaluation = written
    samples = read_lines(out / 'samples' / 'score_agieval_0-shot.jsonl')
    sizes = {'aqua-rat': 5, 'logiqa-en': 4, 'lsat-ar': 5, 'lsat-lr': 5, 'lsat-rc': 5, 'sat-en': 4, 'sat-math': 4}
    rows: dict[tuple[str, int], list[str]] = {}
    for sample in samples:
        assert sample['category'] == sample['file']
        rows.setdefault((sample['file'], sample['row']), []).append(sample['variant'])
    assert len(rows) == 14 and {file for file, _ in rows} == set(sizes)
    for (file, _), variants in rows.items():
        assert variants == [f'option_order:{letter}' for letter in LETTERS[: sizes[file]]]
    assert evaluation.robustness['agieval'][ORDER].num_questions == 14


def test_absent_files_are_warned_of_and_recorded(folder: Path, tmp_path: Path, write_jsonl, capsys):
    rows = read_lines(DATA / 'score' / 'agieval_v1' / 'sat-en.jsonl')
    write_jsonl('data/score/agieval_v1/sat-en.jsonl', rows[:2])
    entry = {'dataset': 'agieval', 'perturbations': [ORDER], 'answers': 'likelihood'}
    entry['prompts'] = str(DATA / 'score' / 'prompts' / 'agieval.json')
    (tmp_path / 'score.yaml').write_text(json.dumps({'score': [entry]}))
    common = ['--score', tmp_path / 'score.yaml', '--data-root', tmp_path / 'data']
    assert run_cli('validate', *common) == 0
    printed = capsys.readouterr().out
    assert 'warning: score_agieval: there is no file of sat-math; it is left out' in printed
    assert '1 data sets of SCORE' in printed and '8 rows of 1 tasks' in printed
    model = ['--model', folder / 'plain', '--device', 'cpu']
    assert run_cli('run', *model, *common, '--out', tmp_path / 'out') == 0
    record = json.loads((tmp_path / 'out' / 'results.json').read_text())
    absent = ['sat-math', 'lsat-lr', 'lsat-rc', 'logiqa-en', 'aqua-rat', 'lsat-ar']
    assert record['score']['agieval']['absent_files'] == absent


# Chat templates.


@pytest.mark.parametrize('answers', ['generate', 'likelihood'])
@pytest.mark.parametrize('given', ['auto', True])
def test_a_chat_template_gives_the_ids_that_transformers_gives(answers: str, given: Any):
    """Mutations: a second bos before the template's own; the beginning of the answer in the user's message."""
    entry = {'dataset': 'mmlu_pro', 'subset_items': 4, 'answers': answers, 'chat_template': given}
    prepared = prepared_of(entry, template=CHAT)
    theirs = tokenizer(CHAT)
    lead = theirs(LEAD, add_special_tokens=False)['input_ids'] if answers == 'likelihood' else []
    for item in prepared.items.values():
        message = [{'role': 'user', 'content': item.content.text}]
        expected = theirs.apply_chat_template(message, tokenize=True, add_generation_prompt=True)
        contexts = [item.request.context] if answers == 'generate' else item.request.contexts
        for context in contexts:
            assert context.tolist() == [*expected, *lead]
            assert context.tolist().count(theirs.bos_token_id) == 1
        if answers == 'likelihood':
            assert theirs.decode(contexts[0]).endswith(f'</s><|assistant|>{LEAD}')


@pytest.mark.parametrize('answers', ['generate', 'likelihood'])
@pytest.mark.parametrize(('given', 'template'), [(False, CHAT), (False, None), ('auto', None)])
def test_without_a_chat_template_a_prompt_follows_the_bos(answers: str, given: Any, template: str | None):
    entry = {'dataset': 'mmlu_pro', 'subset_items': 4, 'answers': answers, 'chat_template': given}
    theirs = tokenizer()
    for item in prepared_of(entry, template=template).items.values():
        context = item.request.context if answers == 'generate' else item.request.contexts[0]
        text = item.content.text + (f'\n{LEAD}' if answers == 'likelihood' else '')
        assert context.tolist() == theirs(text)['input_ids']
        assert context[0] == theirs.bos_token_id


def test_a_chat_template_that_is_wanted_and_not_there_is_an_error(folder: Path, tmp_path: Path):
    entry = {'dataset': 'math', 'subset_items': 1, 'chat_template': True}
    with pytest.raises(ModelError) as raised:
        evaluate(folder / 'plain', device='cpu', **settings_of(entry))
    assert str(raised.value) == (
        'chat_template: true, but the tokenizer (PreTrainedTokenizerFast) has no chat template; allowed: false, or auto'
    )


def test_a_chat_template_that_fails_is_an_error():
    broken = "{{ raise_exception('no users here') }}"
    with pytest.raises(ModelError, match="the tokenizer's chat template cannot be applied: no users here"):
        prepared_of({'dataset': 'mmlu_pro', 'subset_items': 1}, template=broken)


def test_a_model_is_asked_in_its_chat_template(folder: Path, tmp_path: Path):
    """The same weights choose otherwise, and equal prompts have equal names in the records."""
    entry = {**LIKELY, 'perturbations': [PROMPT], 'subset_items': 3}
    found = {name: evaluate(folder / name, device='cpu', **settings_of(entry)) for name in ('plain', 'chat')}
    without = evaluate(folder / 'chat', device='cpu', **settings_of({**entry, 'chat_template': False}))
    logprobs = {
        name: [result.logprobs for result in one.results['score_mmlu_pro/0-shot']]
        for name, one in {**found, 'without': without}.items()
    }
    assert logprobs['plain'] == logprobs['without'] != logprobs['chat']


# Tokens that are kept on disk.


def as_values(item: Item) -> tuple[Any, ...]:
    request = item.request
    shared = (item.content, item.category, item.prompt_sha256, request.key, request.truncated, request.unscorable)
    if isinstance(request, ScoreRequest):
        return (*shared, *([ids.tolist() for ids in part] for part in (request.contexts, request.continuations)))
    assert isinstance(request, GenerateRequest)
    terms = (request.max_new_tokens, request.stops, request.sampling, request.verbatim)
    return (*shared, request.context.tolist(), *terms)


ALL = (
    {'dataset': 'mmlu_pro', 'subset_items': 4, 'max_new_tokens': 5},
    {'dataset': 'agieval', 'subset_items': 7, 'answers': 'likelihood'},
    {'dataset': 'math', 'subset_items': 7, 'seeds': [3]},
)


@pytest.mark.parametrize('template', [None, CHAT], ids=['plain', 'chat'])
def test_items_out_of_the_cache_are_those_that_were_made(tmp_path: Path, template: str | None):
    made = prepared_of(*ALL, template=template)
    first = prepared_of(*ALL, template=template, cache=TokenCache(tmp_path))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.stat().st_size}
    assert len([path for path in files if path.name.startswith('score_')]) == 3
    second = prepared_of(*ALL, template=template, cache=TokenCache(tmp_path))
    assert list(made.items) == list(first.items) == list(second.items)
    for key, item in made.items.items():
        assert as_values(item) == as_values(first.items[key]) == as_values(second.items[key])
    assert set(tmp_path.iterdir()) >= set(files)


def test_another_template_prompt_or_seed_is_another_entry_of_the_cache(tmp_path: Path):
    def contexts(template: str | None, **keys: Any) -> list[Any]:
        prepared = prepared_of(
            {'dataset': 'mmlu_pro', 'subset_items': 2, **keys}, template=template, cache=TokenCache(tmp_path)
        )
        return [(item.request.context.tolist(), item.request.sampling) for item in prepared.items.values()]

    plain, chat = contexts(None), contexts(CHAT)
    other = contexts(CHAT.replace('assistant', 'model'))
    assert plain != chat != other != plain
    assert contexts(CHAT, chat_template=False) == plain
    assert contexts(CHAT, seeds=[6, 7, 8, 9, 10]) != chat
    assert contexts(CHAT, temperature=0.8) != chat
    assert contexts(None) == plain and contexts(CHAT) == chat


# Requests for others, and their answers.


@pytest.fixture
def rows(write_jsonl, tmp_path: Path) -> Path:
    """One question of each data set, and two short prompts."""
    folder = tmp_path / 'data'
    law = {'question': 'Who?', 'options': ['he', 'she', 'it'], 'answer': 'B', 'answer_index': 1, 'category': 'law'}
    write_jsonl('data/score/mmlu_pro_test.jsonl', [law])
    sat = {'passage': None, 'question': 'How?', 'options': ['(A)x', '(B)y'], 'label': 'A'}
    write_jsonl('data/score/agieval_v1/sat-en.jsonl', [sat])
    write_jsonl('data/score/hendrycks_math/algebra.jsonl', [{'problem': '1+1?', 'solution': r'$\boxed{2}$'}])
    ask = {'prompt': '{question}{options}'}
    prompts = {'option_order_robustness': ask, 'non_greedy_robustness': ask}
    numbered = [{'prompt': f'{number}. {{question}}{{options}}'} for number in range(10)]
    (folder / 'score' / 'prompts').mkdir(parents=True)
    for name in ('mmlu_pro', 'agieval'):
        content = {**prompts, 'prompt_robustness': numbered}
        (folder / 'score' / 'prompts' / f'{name}.json').write_text(json.dumps(content))
    solve = {'prompt': '{question}'}
    content = {'non_greedy_robustness': solve, 'prompt_robustness': [solve] * 10}
    (folder / 'score' / 'prompts' / 'math.json').write_text(json.dumps(content))
    return folder


def exported(rows: Path, *entries: dict[str, Any], words: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """The lines that `gauntlet export --score` writes."""
    path, out = rows / 'score.yaml', rows / 'requests.jsonl'
    path.write_text(json.dumps({'score': list(entries)}))
    assert run_cli('export', '--score', path, '--data-root', rows, '--out', out, '--overwrite', *words) == 0
    return read_lines(out)


def test_an_exported_line_says_all_that_a_server_needs(rows: Path):
    lines = exported(rows, {'dataset': 'mmlu_pro', 'temperature': 0.5, 'seeds': [7], 'max_new_tokens': 9})
    name = {'task': 'score_mmlu_pro', 'num_shots': 0, 'file': None, 'row': 0}
    greedy = {'stop': [], 'max_new_tokens': 9, 'temperature': 0.0, 'top_p': 1.0, 'top_k': 0, 'seed': None}
    swapped = 'Who?\nA: she\nB: he\nC: it'
    whole = {**name, 'variant': 'option_order:A', 'sample': 0, 'prompt': swapped, 'choices': None, **greedy}
    assert lines[0] == whole and list(lines[0]) == list(whole)
    assert [line['variant'] for line in lines] == [
        *(f'option_order:{letter}' for letter in 'ABC'),
        *(f'prompt:{number}' for number in range(10)),
        'non_greedy:7',
    ]
    (drawn,) = [line for line in lines if line['temperature'] > 0]
    key = ItemKey('score_mmlu_pro/0-shot', 0, variant='non_greedy:7')
    (task,) = data_of({'dataset': 'mmlu_pro', 'temperature': 0.5, 'seeds': [7]}, data_root=rows).suite.tasks
    assert drawn['variant'] == 'non_greedy:7' and drawn['temperature'] == 0.5
    assert drawn['seed'] == draw_seed(sampling_of(task, 'non_greedy:7'), key)
    assert (drawn['top_p'], drawn['top_k']) == (1.0, 0)


def test_five_seeds_are_five_seeds(rows: Path):
    lines = exported(rows, {'dataset': 'math', 'perturbations': [DRAWN]})
    assert len({line['seed'] for line in lines}) == len(lines) == 5
    assert {line['prompt'] for line in lines} == {'1+1?'} and {line['file'] for line in lines} == {'algebra'}


@pytest.mark.parametrize(
    ('given', 'words', 'in_chat'),
    [
        ('auto', (), False),
        (True, (), True),
        (False, (), False),
        ('auto', ('--tokenizer', 'chat'), True),
        (True, ('--tokenizer', 'chat'), True),
        (False, ('--tokenizer', 'chat'), False),
        ('auto', ('--tokenizer', 'plain'), False),
    ],
)
def test_messages_are_for_servers_that_apply_a_chat_template(
    rows: Path, folder: Path, given: Any, words: tuple[str, ...], in_chat: bool
):
    words = [folder / word if word in ('plain', 'chat') else word for word in words]
    lines = exported(rows, {'dataset': 'mmlu_pro', 'chat_template': given, 'perturbations': [PROMPT]}, words=words)
    text = '0. Who?\nA: he\nB: she\nC: it'
    if in_chat:
        assert 'prompt' not in lines[0] and lines[0]['messages'] == [{'role': 'user', 'content': text}]
    else:
        assert 'messages' not in lines[0] and lines[0]['prompt'] == text


def test_letters_to_be_scored_are_exported_as_choices(rows: Path, folder: Path):
    entry = {'dataset': 'mmlu_pro', 'answers': 'likelihood', 'perturbations': [PROMPT]}
    nothing = dict.fromkeys(('stop', 'max_new_tokens', 'temperature', 'top_p', 'top_k', 'seed'))
    line = exported(rows, entry)[0]
    assert line['prompt'] == f'0. Who?\nA: he\nB: she\nC: it\n{LEAD}'
    assert line['choices'] == [' A', ' B', ' C'] and line.items() >= nothing.items()
    line = exported(rows, entry, words=['--tokenizer', folder / 'chat'])[0]
    assert line['messages'] == [
        {'role': 'user', 'content': '0. Who?\nA: he\nB: she\nC: it'},
        {'role': 'assistant', 'content': LEAD},
    ]
    assert line['choices'] == [' A', ' B', ' C']


def answers_to(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Right ones: the right option is 'she', 'x' or 2; letters are found in the text that was asked."""
    found = []
    for line in lines:
        text = line['messages'][0]['content'] if 'messages' in line else line['prompt']
        place = {'score_mmlu_pro': ': she', 'score_agieval': ': x', 'score_math': ''}[line['task']]
        letter = text[text.index(place) - 1]
        name = {key: line[key] for key in NAMES}
        if line['choices'] is not None:
            found.append({**name, 'logprobs': [-0.5 if choice == f' {letter}' else -2.0 for choice in line['choices']]})
        elif line['task'] == 'score_math':
            found.append({**name, 'text': r'It is $\boxed{2}$'})
        else:
            found.append({**name, 'text': f'The best answer is {letter}.\n'})
    return found


ENTRIES = (
    {'dataset': 'mmlu_pro', 'chat_template': True},
    {'dataset': 'agieval', 'answers': 'likelihood'},
    {'dataset': 'math', 'seeds': [1, 2]},
)


def write_answers(rows: Path, answers: list[Any]) -> Path:
    path = rows / 'answers.jsonl'
    path.write_text(''.join(f'{json.dumps(answer)}\n' for answer in answers))
    return path


def test_requests_answered_elsewhere_come_back_through_the_command_line(rows: Path, tmp_path: Path, capsys):
    lines = exported(rows, *ENTRIES)
    assert len(lines) == (3 + 10 + 5) + (2 + 10) + (10 + 2)
    path = write_answers(rows, answers_to(lines)[::-1])
    common = ['--score', rows / 'score.yaml', '--data-root', rows]
    assert run_cli('run', '--outputs', path, *common, '--out', tmp_path / 'out') == 0
    record = json.loads((tmp_path / 'out' / 'results.json').read_text())
    perturbations = {'mmlu_pro': (ORDER, PROMPT, DRAWN), 'agieval': (ORDER, PROMPT), 'math': (PROMPT, DRAWN)}
    for dataset, names in perturbations.items():
        for name in names:
            found = record['score'][dataset]['perturbations'][name]
            assert found['accuracy'] == found['consistency_rate'] == found['all_variants_right'] == {'value': 1.0}
            assert found['unparsed_rate'] == {'value': 0.0}
            prefix = f'icl/metrics/score/{dataset}/{name}'
            assert record['metrics'][f'{prefix}/consistency_rate_reference'] >= 0
            assert record['metrics'][f'{prefix}/accuracy'] == 1
    assert set(record['metrics']) >= {
        f'icl/metrics/score/math/non_greedy/non_greedy_{seed}/accuracy' for seed in (1, 2)
    }
    assert record['score']['math']['perturbations'][ORDER] == {'reason': 'math has no options'}
    samples = read_lines(tmp_path / 'out' / 'samples' / 'score_math_0-shot.jsonl')
    assert {sample['answer'] for sample in samples} == {'2'}
    assert 'score math prompt consistency_rate' in capsys.readouterr().out


def test_samples_have_their_lines_in_one_order_whoever_answers(folder: Path, tmp_path: Path):
    """DESIGN: one line per item and variant, in row order. Mutation: variants and files sorted by their names."""
    entry = {'dataset': 'agieval', 'answers': 'likelihood', 'subset_items': 7, 'perturbations': [ORDER, PROMPT]}
    ours = evaluate(folder / 'plain', device='cpu', **settings_of(entry)).results['score_agieval/0-shot']
    lines = [
        {**dict(zip(NAMES, ('score_agieval', 0, key.file, key.row, key.variant, 0), strict=True)), 'logprobs': values}
        for key, values in ((result.key, result.logprobs) for result in ours)
    ]
    theirs = mark_answers(data_of(entry), read_answers(write_answers(tmp_path, lines)))
    assert [result.key for result in theirs.results['score_agieval/0-shot']] == [result.key for result in ours]
    assert [result.credit for result in theirs.results['score_agieval/0-shot']] == [result.credit for result in ours]


@pytest.mark.parametrize('dataset', ['mmlu_pro', 'agieval'])
def test_accuracy_is_by_category_in_mmlu_pro_and_over_all_questions_elsewhere(tmp_path: Path, dataset: str):
    """20 of our questions with answers drawn at random: 14 categories of one or two, 7 files of two or three."""
    entry = {'dataset': dataset, 'subset_items': 20, 'perturbations': [ORDER], 'answers': 'likelihood'}
    data, draws = data_of(entry), np.random.default_rng(3)
    (examples,) = data.examples.values()
    lines, credits = [], {}
    for example in examples:
        values = (-draws.random(example.content.num_choices)).tolist()
        names = (f'score_{dataset}', 0, example.file, example.row, example.variant, 0)
        lines.append({**dict(zip(NAMES, names, strict=True)), 'logprobs': values})
        question = credits.setdefault(example.category, {}).setdefault((example.file, example.row), [])
        question.append(float(np.argmax(values) == example.content.gold))
    marked = mark_answers(data, read_answers(write_answers(tmp_path, lines)))
    score = marked.robustness[dataset][ORDER]
    micro = mean(mean(group) for questions in credits.values() for group in questions.values())
    macro = mean(mean(map(mean, questions.values())) for questions in credits.values())
    assert (score.accuracy_micro.value, score.accuracy_macro.value) == (pytest.approx(micro), pytest.approx(macro))
    assert abs(micro - macro) > 1e-5
    assert score.accuracy == (score.accuracy_macro if dataset == 'mmlu_pro' else score.accuracy_micro)
    assert score.consistency_rate.value < 0.6


def problems_of(rows: Path, answers: list[Any], **options: Any) -> list[str]:
    path = write_answers(rows, answers)
    with pytest.raises(DataError) as raised:
        mark_answers(data_of(*ENTRIES, data_root=rows), read_answers(path), **options)
    return [problem.replace(f'{path}:', 'line ') for problem in raised.value.problems]


def test_missing_doubled_and_unknown_variants_are_named(rows: Path, tmp_path: Path):
    answers = answers_to(exported(rows, *ENTRIES))
    names = {(one['task'], one['variant']): one for one in answers}
    kept = [
        one
        for name, one in names.items()
        if name not in (('score_mmlu_pro', 'option_order:B'), ('score_math', 'prompt:3'), ('score_math', 'prompt:4'))
    ]
    wrong = [
        names['score_agieval', 'prompt:0'],
        {**names['score_math', 'prompt:0'], 'variant': 'prompt:10'},
        {**names['score_math', 'prompt:0'], 'file': 'geometry'},
        {**names['score_mmlu_pro', 'prompt:0'], 'variant': None},
        {**names['score_mmlu_pro', 'prompt:0'], 'variant': 3},
    ]
    first = kept.index(names['score_agieval', 'prompt:0']) + 1
    place = len(kept) + 1
    assert problems_of(rows, [*kept, *wrong]) == [
        f'line {place}: score_agieval/0-shot, sat-en, row 0, prompt:0 was answered already at line {first}',
        f'line {place + 1}: score_math/0-shot, algebra, row 0, prompt:10 is not an item of these tasks',
        f'line {place + 2}: score_math/0-shot, geometry, row 0, prompt:0 is not an item of these tasks',
        f'line {place + 3}: score_mmlu_pro/0-shot, row 0 is not an item of these tasks',
        f'line {place + 4}: variant is 3; allowed: text',
        'score_math/0-shot, algebra, prompt:3: there is no answer to row 0',
        'score_math/0-shot, algebra, prompt:4: there is no answer to row 0',
        'score_mmlu_pro/0-shot, option_order:B: there is no answer to row 0',
    ]


def test_answers_of_the_wrong_kind_are_named(rows: Path):
    answers = answers_to(exported(rows, *ENTRIES))
    for answer in answers:
        if answer['variant'] == 'prompt:0':
            answer.pop('text', None)
            answer['logprobs'] = [-1.0, -1.0, -1.0]
    assert [problem.partition(': ')[2] for problem in problems_of(rows, answers)] == [
        'score_mmlu_pro/0-shot, row 0, prompt:0: has no text; a reply is wanted',
        'score_agieval/0-shot, sat-en, row 0, prompt:0: has 3 logprobs; allowed: 2, one per choice',
        'score_math/0-shot, algebra, row 0, prompt:0: has no text; a reply is wanted',
    ]


def test_allowed_missing_answers_leave_the_others_with_a_score(rows: Path, tmp_path: Path, capsys):
    answers = answers_to(exported(rows, *ENTRIES))
    few = [one for one in answers if one['variant'] not in ('option_order:C', 'non_greedy:2') or one['file']]
    path = write_answers(rows, few)
    common = ['--score', rows / 'score.yaml', '--data-root', rows, '--outputs', path]
    assert run_cli('run', *common, '--out', tmp_path / 'no') == 2
    error = capsys.readouterr().err
    assert 'score_mmlu_pro/0-shot, option_order:C: there is no answer to row 0' in error
    assert run_cli('run', *common, '--out', tmp_path / 'out', '--allow-missing') == 0
    record = json.loads((tmp_path / 'out' / 'results.json').read_text())
    order = record['score']['mmlu_pro']['perturbations'][ORDER]
    assert order['accuracy'] == {'value': 1.0}
    assert (order['num_questions'], order['num_incomplete']) == (1, 1)
    assert order['consistency_rate'] == {'reason': '1 of 3 items unscored'}
    assert order['accuracy_by_variant']['option_order:C'] == {'reason': '1 of 1 items unscored'}
    assert record['metrics']['gauntlet/unscored_items'] == 2
    assert record['score']['mmlu_pro']['perturbations'][PROMPT]['consistency_rate'] == {'value': 1.0}
    sample = read_lines(tmp_path / 'out' / 'samples' / 'score_mmlu_pro_0-shot.jsonl')
    unscored = [one['variant'] for one in sample if one['status'] == 'unscored']
    assert sorted(unscored) == ['non_greedy:2', 'option_order:C']


def test_tasks_and_score_may_be_run_together_and_neither_is_an_error(rows: Path, tmp_path: Path, capsys):
    (rows / 'arc.jsonl').write_text(json.dumps({'query': 'Sky?', 'choices': ['blue', 'green'], 'gold': 0}) + '\n')
    task = {'label': 'arc', 'dataset_uri': 'arc.jsonl', 'num_fewshot': [0], 'icl_task_type': 'multiple_choice'}
    (rows / 'tasks.yaml').write_text(json.dumps({'icl_tasks': [task]}))
    (rows / 'score.yaml').write_text(json.dumps({'score': {'dataset': 'arc', 'perturbations': [ORDER]}}))
    common = ['--data-root', rows, '--out', tmp_path / 'requests.jsonl']
    assert run_cli('export', '--tasks', rows / 'tasks.yaml', '--score', rows / 'score.yaml', *common) == 0
    lines = read_lines(tmp_path / 'requests.jsonl')
    assert [(line['task'], line['variant']) for line in lines] == [
        ('arc', None),
        ('score_arc', 'option_order:A'),
        ('score_arc', 'option_order:B'),
    ]
    assert run_cli('export', '--score', rows / 'score.yaml', *common, '--overwrite') == 2
    assert "is 'arc'; allowed: mmlu_pro, agieval, math" in capsys.readouterr().err
    assert run_cli('export', *common, '--overwrite') == 2
    assert 'nothing to export: give --tasks, --score or both' in capsys.readouterr().err
    assert run_cli('validate', '--score', rows / 'none.yaml') == 1


# Any multiple_choice task of the Gauntlet.


@cache
def gauntlet_tasks() -> list[dict[str, Any]]:
    return read_yaml(ROOT / 'yamls' / 'tasks' / 'gauntlet_v0.1.yaml')['icl_tasks']


@pytest.mark.parametrize('dataset', ['arc_challenge', 'mmlu', 'commonsense_qa', 'enterprise_pii_classification'])
@pytest.mark.parametrize('answers', ['likelihood', 'generate'])
def test_any_multiple_choice_task_may_be_perturbed(dataset: str, answers: str):
    entry = {
        'dataset': dataset,
        'answers': answers,
        'perturbations': [ORDER],
        'subset_items': 3,
        'max_new_tokens': 2,
    }
    tasks = [task for task in gauntlet_tasks() if task['label'] == dataset]
    prepared = prepared_of(entry, tasks=tasks)
    key = f'score_{dataset}/0-shot'
    items = [item for item in prepared.items.values() if item.request.key.task == key]
    posed = items[0].content
    assert len(items) == 3 * posed.num_choices
    for item in items:
        text = item.content.text
        for letter, option in zip(LETTERS, item.content.question.options, strict=False):
            assert text.count(f'\n{letter}: {option}') == 1
        assert 'Choices' not in text and not text.endswith('Answer:')


def test_a_task_and_the_same_perturbed_are_evaluated_together(folder: Path, tmp_path: Path):
    rows = read_lines(DATA / 'world_knowledge' / 'arc_challenge.jsonl')[:4]
    (tmp_path / 'arc.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    task = {'label': 'arc', 'dataset_uri': 'arc.jsonl', 'num_fewshot': [0, 1], 'icl_task_type': 'multiple_choice'}
    gauntlet = {'categories': [{'name': 'all', 'benchmarks': [{'name': 'arc', 'num_fewshot': 0}]}]}
    entry = {'dataset': 'arc', 'answers': 'likelihood', 'prompts': str(DATA / 'score' / 'prompts' / 'agieval.json')}
    common = {'tasks': [task], 'gauntlet': gauntlet, 'data_root': str(tmp_path), 'device': 'cpu'}
    evaluation = evaluate(folder / 'plain', score=[entry], out=tmp_path / 'out', **common)
    alone = evaluate(folder / 'plain', **common)
    assert {key: score.accuracy for key, score in evaluation.scores.items() if score.metrics} == {
        key: score.accuracy for key, score in alone.scores.items()
    }
    assert evaluation.composites == alone.composites
    assert 'icl/metrics/score/arc/option_order/option_order_D/accuracy' in evaluation.metrics
    record = json.loads((tmp_path / 'out' / 'results.json').read_text())
    assert record['score']['arc']['task'] == 'score_arc/0-shot'
    score = evaluation.robustness['arc'][ORDER]
    assert score.accuracy == score.accuracy_micro  # macro is MMLU-Pro's alone


# Cost and ranks.


@pytest.mark.parametrize(
    ('perturbations', 'most'), [([ORDER], 0.75), ([PROMPT], 0.95)], ids=['option order', 'prompts']
)
def test_the_variants_of_a_question_share_their_text(perturbations: list[str], most: float, capsys):
    """Planned tokens against each variant as a task of its own on the same engine."""
    entry = {'dataset': 'mmlu_pro', 'answers': 'likelihood', 'perturbations': perturbations, 'subset_items': 20}
    prepared = prepared_of(entry)
    together = plan_evaluation(prepared, tokens_per_batch=4096).num_tokens
    apart = 0
    for variant in {key.variant for key in prepared.items}:
        items = {key: item for key, item in prepared.items.items() if key.variant == variant}
        part = PreparedEvaluation(data=prepared.data, tasks=prepared.tasks, items=items, max_seq_len=1024)
        apart += plan_evaluation(part, tokens_per_batch=4096).num_tokens
    with capsys.disabled():
        print(f'\n{perturbations}: {together} tokens together, {apart} apart: {together / apart:.2f}')
    assert together < most * apart


@pytest.mark.slow
def test_one_and_two_ranks_give_identical_samples_and_metrics(folder: Path, tmp_path: Path):
    entries = [
        {'dataset': 'mmlu_pro', 'subset_items': 3, 'max_new_tokens': 3, 'perturbations': [PROMPT, DRAWN]},
        {'dataset': 'agieval', 'subset_items': 7, 'answers': 'likelihood'},
        {'dataset': 'math', 'subset_items': 3, 'max_new_tokens': 3, 'seeds': [1, 2]},
    ]
    found = []
    for num_ranks in (1, 2):
        out = tmp_path / f'out_{num_ranks}'
        config = {'model': str(folder / 'chat'), 'score': entries, 'data_root': str(DATA), 'out': str(out)}
        path = tmp_path / f'eval_{num_ranks}.yaml'
        path.write_text(json.dumps({**config, 'tokens_per_batch': 2048, 'device': 'cpu'}))
        test_ranks.launch(num_ranks, 'scripts/eval.py', str(path))
        record = json.loads((out / 'results.json').read_text())
        assert record['environment']['num_ranks'] == num_ranks
        metrics = {key: value for key, value in record['metrics'].items() if 'seconds' not in key}
        samples = {path.name: path.read_bytes() for path in sorted((out / 'samples').iterdir())}
        found.append((metrics, samples, record['score']))
    assert found[0] == found[1]
    assert len(found[0][1]) == 3


# In training.


def test_each_evaluation_in_training_logs_scores_keys_at_its_batch(rows: Path, tmp_path: Path):
    """Prompts of a few characters, as the model reads 128 tokens."""
    logger = InMemoryLogger()
    entries = [
        {'dataset': 'mmlu_pro', 'answers': 'likelihood'},
        {'dataset': 'agieval', 'max_new_tokens': 4, 'perturbations': [PROMPT, DRAWN]},
        {'dataset': 'math', 'max_new_tokens': 4, 'perturbations': [DRAWN], 'seeds': [1, 2]},
    ]
    callback = EvalGauntlet(
        score=entries, data_root=str(rows), interval=['first', '2ba', 'last'], save_folder=str(tmp_path / 'records')
    )
    trainer = tiny.trainer([callback], max_duration='3ba', loggers=[logger])
    trainer.fit()
    trainer.close()
    prefix = 'icl/metrics/score'
    keys = [
        *(f'{prefix}/mmlu_pro/option_order/{name}' for name in ('accuracy', 'consistency_rate', 'unparsed_rate')),
        *(f'{prefix}/mmlu_pro/prompt/{name}' for name in ('accuracy_worst', 'accuracy_best', 'all_variants_right')),
        f'{prefix}/mmlu_pro/prompt/consistency_rate_reference',
        f'{prefix}/mmlu_pro/option_order/option_order_C/accuracy',
        f'{prefix}/agieval/prompt/prompt_9/accuracy',
        f'{prefix}/agieval/non_greedy/non_greedy_5/accuracy',
        f'{prefix}/math/non_greedy/unparsed_rate',
        'gauntlet/seconds/score_math/0-shot',
    ]
    for key in keys:
        assert [timestamp.batch.value for timestamp, _ in logger.data[key]] == [0, 2, 3], key
    record = json.loads((tmp_path / 'records' / 'ba3' / 'results.json').read_text())
    assert record['metrics'].items() >= {key: logger.data[key][-1][1] for key in keys}.items()
    assert record['training']['batch'] == 3 and list(record['score']) == ['mmlu_pro', 'agieval', 'math']
