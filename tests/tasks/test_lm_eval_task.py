"""Tasks of lm-eval in our evaluation: its prompts, its metrics and its averages; `lm_eval.simple_evaluate` says which.

The tasks and their rows are written by the tests, as lm-eval's own need the hub.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval_sums import CHOICES, GENERATION, SUMS, entry, write_task, write_tasks

from llmfoundry_gauntlet import Gauntlet, evaluate
from llmfoundry_gauntlet.errors import GauntletError

pytest.importorskip('lm_eval')

MAX_SEQ_LEN = 128  # below which the prompts with two shots are longer

reads_the_whole_index = pytest.mark.slow  # of lm-eval's 14,000 definitions, which takes seconds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with tasks of lm-eval, one for each type of its requests."""
    write_tasks(tmp_path)
    return tmp_path


def run(model: Path, *entries: dict[str, Any], **settings: Any) -> Any:
    return evaluate(model, tasks=list(entries), device='cpu', max_seq_len=MAX_SEQ_LEN, **settings)


def values(evaluation: Any, key: str) -> dict[str, float | None]:
    return {name: measure.value for name, measure in evaluation.scores[key].metrics.items()}


def by_lm_eval(model: Path, folder: Path, *tasks: str, num_fewshot: int) -> Any:
    """Return what lm-eval's own Hugging Face backend computes."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=str(model), device='cpu', dtype='float32', batch_size=1, max_length=MAX_SEQ_LEN)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        lm, tasks=list(tasks), num_fewshot=num_fewshot, task_manager=manager, bootstrap_iters=0
    )


def numbers(results: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a task by our names, which have no filter if there is no other."""
    named = {}
    for name, value in results.items():
        if ',' in name and '_stderr,' not in name:
            named[name.removesuffix(',none')] = pytest.approx(float(value), rel=1e-5)
    return named


@pytest.mark.parametrize(
    ('task', 'num_fewshot'),
    [('sums', 0), ('sums', 2), ('written_sums', 1), ('texts', 0)],
)
def test_metrics_are_those_of_lm_eval(tiny_llamas: Path, folder: Path, task: str, num_fewshot: int):
    model = tiny_llamas / 'plain'
    key = f'{task}/{num_fewshot}-shot'

    evaluation = run(model, entry(folder, task, num_fewshot=[num_fewshot]))

    assert values(evaluation, key) == numbers(by_lm_eval(model, folder, task, num_fewshot=num_fewshot)['results'][task])


def test_a_subset_has_the_prompts_that_all_documents_have(tiny_llamas: Path, folder: Path):
    task = entry(folder, 'sums', num_fewshot=[2])
    whole = run(tiny_llamas / 'plain', task)
    part = run(tiny_llamas / 'plain', task, subset_items=3)

    digest_of_row = {result.key.row: result.prompt_sha256 for result in whole.results['sums/2-shot']}
    results = part.results['sums/2-shot']
    assert len(results) == 3
    assert all(result.prompt_sha256 == digest_of_row[result.key.row] for result in results)


def test_a_mean_has_a_standard_error_and_another_aggregate_the_reason_why_it_has_none(tiny_llamas: Path, folder: Path):
    metrics = run(tiny_llamas / 'plain', entry(folder, 'sums')).scores['sums/0-shot'].metrics

    share = metrics['acc'].value
    assert metrics['acc'].standard_error == pytest.approx(math.sqrt(share * (1 - share) / (len(SUMS) - 1)))
    assert metrics['brier_score'].standard_error is None
    assert metrics['brier_score'].no_error == 'it is no mean over items'


def test_without_num_fewshot_the_task_has_its_own(tiny_llamas: Path, folder: Path):
    write_task(folder, 'shots', CHOICES.format(data=folder / 'sums.jsonl') + 'num_fewshot: 2\n')
    task = entry(folder, 'shots')
    del task['num_fewshot']

    assert list(run(tiny_llamas / 'plain', task).scores) == ['shots/2-shot']


def test_records_give_the_same_scores_again(
    gauntlet: Callable[..., tuple[int, str, str]], tiny_llamas: Path, folder: Path
):
    out = folder / 'out'
    run(tiny_llamas / 'plain', entry(folder, 'sums'), entry(folder, 'texts'), out=out)
    before = json.loads((out / 'results.json').read_text())

    status, _, errors = gauntlet('run', '--from', out, '--out', folder / 'again')

    assert (status, errors) == (0, '')
    after = json.loads((folder / 'again' / 'results.json').read_text())
    assert after['tasks'] == before['tasks']
    spec = after['tasks']['sums/0-shot']['spec']['lm_eval']['tasks']['sums']
    assert spec['version'] == '1.5'
    assert spec['config']['doc_to_choice'] == '{{choices}}'


@pytest.mark.parametrize(
    ('change', 'facts'),
    [
        pytest.param({'lm_eval_task': 'sumz'}, ('sumz', "did you mean 'sums'"), marks=reads_the_whole_index),
        pytest.param(
            {'lm_eval_task': 'no_such_task_at_all'},
            ('no_such_task_at_all', 'lm-eval ls tasks'),
            marks=reads_the_whole_index,
        ),
        ({'include_path': '/no/such/folder'}, ('include_path', '/no/such/folder')),
        ({'metric': 'acc_nrom'}, ('acc_nrom', 'acc_norm')),
        ({'prelimiter': 'Q: '}, ('prelimiter', 'leave it out')),
        ({'dataset_uri': 'rows.jsonl'}, ('dataset_uri', 'leave it out')),
    ],
)
def test_a_wrong_key_is_named(tiny_llamas: Path, folder: Path, change: dict[str, str], facts: tuple[str, ...]):
    with pytest.raises(GauntletError) as error:
        run(tiny_llamas / 'plain', {**entry(folder, 'sums'), **change})

    assert all(fact in str(error.value) for fact in facts), error.value


@pytest.mark.parametrize(
    ('line', 'fact'),
    [
        ('unsafe_code: true', 'code_evaluation'),
        ('doc_to_image: picture', 'images'),
        ('metric_list: [{metric: code_eval, aggregation: mean}]', 'code_evaluation'),
        ('metric_list: [{metric: own_metric}]', 'own_metric'),
        ('metric_list: [{metric: acc, aggregation: median_of_means}]', 'median_of_means'),
        ('dataset_kwargs: {data_files: {test: /no/such/rows.jsonl}}', 'data_files'),
    ],
)
def test_a_task_that_cannot_be_run_is_refused_by_name(tiny_llamas: Path, folder: Path, line: str, fact: str):
    key = line.partition(':')[0]
    lines = CHOICES.format(data=folder / 'sums.jsonl').splitlines()
    if key == 'metric_list':
        lines = lines[: lines.index('metric_list:')]
    kept = '\n'.join(text for text in lines if not text.startswith(f'{key}:'))
    write_task(folder, 'refused', f'{kept}\n{line}\n')

    with pytest.raises(GauntletError) as error:
        run(tiny_llamas / 'plain', entry(folder, 'refused'))

    assert 'refused' in str(error.value)
    assert fact in str(error.value)


@reads_the_whole_index
def test_a_task_is_named_by_the_path_of_its_yaml(tiny_llamas: Path, folder: Path):
    task = entry(folder, str(folder / 'sums.yaml'), label='sums')
    del task['include_path']

    by_path, by_name = (run(tiny_llamas / 'plain', each) for each in (task, entry(folder, 'sums')))

    assert values(by_path, 'sums/0-shot') == values(by_name, 'sums/0-shot')


GROUP = """
group: all_sums
task:
- sums
- group: inner
  task: [small, smaller]
  aggregate_metric_list: [{metric: acc, weight_by_size: false}]
aggregate_metric_list:
- {metric: acc, weight_by_size: true}
- {metric: acc_norm, weight_by_size: false, filter_list: none}
"""


@pytest.fixture
def groups(folder: Path) -> Path:
    """Return the folder with groups whose tasks have 8, 3 and 2 documents."""
    for name, num_rows in (('small', 3), ('smaller', 2)):
        rows = folder / f'{name}.jsonl'
        rows.write_text(''.join(f'{json.dumps(row)}\n' for row in SUMS[-num_rows:]))
        write_task(folder, name, CHOICES.format(data=rows) + 'tag: some_sums\n')
    (folder / 'all_sums.yaml').write_text(GROUP)
    (folder / 'no_average.yaml').write_text('group: no_average\ntask: [small, smaller]\n')
    return folder


@reads_the_whole_index
def test_groups_are_averaged_as_lm_eval_does(tiny_llamas: Path, groups: Path):
    model = tiny_llamas / 'plain'

    score = run(model, entry(groups, 'all_sums', num_fewshot=[1])).scores['all_sums/1-shot']

    results = by_lm_eval(model, groups, 'all_sums', num_fewshot=1)['results']
    metrics = {name: measure.value for name, measure in score.metrics.items()}
    inner = metrics.pop('all_sums::inner/acc')
    without_average = metrics.pop('brier_score')
    assert metrics == numbers(results['all_sums'])
    assert inner == pytest.approx(results['all_sums::inner']['acc,none'])
    assert without_average is None
    assert 'does not average' in score.metrics['brier_score'].reason
    for name in ('sums', 'small', 'smaller'):
        of_task = {metric: measure.value for metric, measure in score.categories[name].metrics.items()}
        assert of_task == numbers(results[name])


@reads_the_whole_index
@pytest.mark.parametrize('task', ['no_average', 'some_sums'])
def test_a_group_without_an_average_and_a_tag_have_no_number_of_their_own(tiny_llamas: Path, groups: Path, task: str):
    score = run(tiny_llamas / 'plain', entry(groups, task)).scores[f'{task}/0-shot']

    assert score.accuracy.value is None
    assert 'does not average' in score.accuracy.reason
    assert sorted(score.categories) == ['small', 'smaller']
    assert all(part.accuracy.value is not None for part in score.categories.values())


@reads_the_whole_index
def test_a_group_that_has_changed_is_read_anew(tiny_llamas: Path, groups: Path):
    """Mutation: the index of a folder is kept, whatever its files say since."""
    parts = []
    for members in ('[small, smaller]', '[smaller, sums]'):
        (groups / 'no_average.yaml').write_text(f'group: no_average\ntask: {members}\n')
        evaluation = run(tiny_llamas / 'plain', entry(groups, 'no_average'))
        parts.append(sorted(evaluation.scores['no_average/0-shot'].categories))

    assert parts == [['small', 'smaller'], ['smaller', 'sums']]


def test_prompts_are_those_of_lm_eval(tiny_llamas: Path, folder: Path):
    """In a chat, with an instruction, shots as turns and the beginning of an answer."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = tiny_llamas / 'chat'
    write_task(folder, 'begun', CHOICES.format(data=folder / 'sums.jsonl') + 'gen_prefix: "It is"\n')
    chat = {'apply_chat_template': True, 'system_prompt': 'Add.', 'fewshot_as_turns': True}
    out = folder / 'out'
    evaluate(
        model,
        tasks=[entry(folder, task, num_fewshot=[2]) for task in ('sums', 'begun')],
        device='cpu',
        log_prompts=True,
        out=out,
        **chat,
    )

    lm = HFLM(pretrained=str(model), device='cpu', dtype='float32', batch_size=1)
    by_its_own = lm_eval.simple_evaluate(
        lm,
        tasks=['sums', 'begun'],
        num_fewshot=2,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        system_instruction='Add.',
    )
    for task in ('sums', 'begun'):
        lines = (out / 'samples' / f'{task}_2-shot.jsonl').read_text().splitlines()
        prompts = {sample['row']: sample['prompt'] for sample in map(json.loads, lines)}
        assert prompts == {sample['doc_id']: sample['arguments'][0][0] for sample in by_its_own['samples'][task]}


def test_repeats_are_samples_that_a_filter_reduces(tiny_llamas: Path, folder: Path):
    """The answer that most of the five repeats give is compared with the right one."""
    majority = GENERATION.replace('max_gen_toks: 8}}', 'max_gen_toks: 2, do_sample: true, temperature: 1.0}}')
    text = majority.format(data=folder / 'sums.jsonl')
    filters = text[text.index('filter_list:') : text.index('metric_list:')]
    votes = """filter_list:
- name: votes
  filter: [{function: majority_vote}, {function: take_first}]
"""
    write_task(folder, 'repeated', text.replace(filters, votes) + 'repeats: 5\n')

    evaluation = run(tiny_llamas / 'plain', entry(folder, 'repeated'))

    results = evaluation.results['repeated/0-shot']
    texts_of_row: dict[int, list[str]] = {}
    for result in results:
        texts_of_row.setdefault(result.key.row, []).append(result.answer)
    assert len(results) == 5 * len(SUMS)
    assert any(len(set(texts)) > 1 for texts in texts_of_row.values())
    golds = [SUMS[row]['choices'][SUMS[row]['gold']] for row in range(len(SUMS))]
    expected = [float(max(texts_of_row[row], key=texts_of_row[row].count) == golds[row]) for row in range(len(SUMS))]
    assert values(evaluation, 'repeated/0-shot') == {'exact_match,votes': sum(expected) / len(SUMS)}
    assert evaluation.scores['repeated/0-shot'].metrics['exact_match,votes'].value == sum(expected) / len(SUMS)


def test_random_states_and_the_tokenizer_stay_as_they_are(tiny_llamas: Path, folder: Path):
    import random

    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llamas / 'plain')
    tokenizer.pad_token = None
    network = AutoModelForCausalLM.from_pretrained(tiny_llamas / 'plain')
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    in_training = Gauntlet(tasks=[entry(folder, 'sums', num_fewshot=[2])])
    in_training.evaluate(network, tokenizer, step=1)

    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert tokenizer.pad_token is None


def test_composites_count_a_share_and_refuse_a_perplexity(tiny_llamas: Path, folder: Path):
    def gauntlet_of(task: str) -> dict[str, Any]:
        return {'categories': [{'name': 'own', 'benchmarks': [{'name': task, 'num_fewshot': 0}]}]}

    counted = run(tiny_llamas / 'plain', entry(folder, 'sums', metric='acc_norm'), gauntlet=gauntlet_of('sums'))
    assert counted.composites.categories['own'].value == values(counted, 'sums/0-shot')['acc_norm']

    with pytest.raises(GauntletError, match=r'texts/0-shot: its metric word_perplexity is no share'):
        run(tiny_llamas / 'plain', entry(folder, 'texts'), gauntlet=gauntlet_of('texts'))


def test_lm_eval_is_imported_only_for_its_tasks(tmp_path: Path):
    """In a process of its own, as this one has imported it."""
    import subprocess
    import sys

    code = """
import sys
from llmfoundry_gauntlet.evaluation.suite import load_suite
load_suite([{'label': 'a', 'dataset_uri': 'a.jsonl', 'icl_task_type': 'multiple_choice', 'num_fewshot': [0]}])
assert 'lm_eval' not in sys.modules
"""
    subprocess.run([sys.executable, '-c', code], check=True)


@reads_the_whole_index
def test_a_group_has_an_error_though_a_task_has_one_document(tiny_llamas: Path, folder: Path):
    rows = folder / 'one.jsonl'
    rows.write_text(json.dumps({'q': 'What is 9+9?', 'choices': ['18', '19', '9 and 9'], 'gold': 0}))
    write_task(folder, 'one', CHOICES.format(data=rows))
    (folder / 'both.yaml').write_text('group: both\ntask: [sums, one]\naggregate_metric_list: [{metric: acc}]\n')

    score = run(tiny_llamas / 'plain', entry(folder, 'both')).scores['both/0-shot']

    share = score.metrics['acc'].value
    assert score.categories['one'].metrics['acc'].standard_error is None
    assert score.metrics['acc'].standard_error == pytest.approx(math.sqrt(share * (1 - share) / len(SUMS)))


@reads_the_whole_index
def test_a_reason_names_all_tasks_of_a_group_and_errors_of_all_entries_come_at_once(tiny_llamas: Path, groups: Path):
    for name in ('small', 'smaller'):
        text = (groups / f'{name}.yaml').read_text()
        (groups / f'{name}.yaml').write_text(f'{text}unsafe_code: true\n')

    with pytest.raises(GauntletError) as error:
        run(tiny_llamas / 'plain', entry(groups, 'all_sums'), entry(groups, 'no_such_sums'))

    of_group, of_unknown = error.value.problems
    assert of_group.startswith('all_sums: small, smaller of lm-eval: runs the programs that the model writes')
    assert 'no_such_sums' in of_unknown


def test_a_shortened_prompt_has_fewer_shots(tiny_llamas: Path, folder: Path):
    task = entry(folder, 'sums', num_fewshot=[4])

    results = run(tiny_llamas / 'plain', task).results['sums/4-shot']

    assert all(result.prompt_shortened for result in results)
    assert all(0 < result.num_shots < 4 for result in results)


def test_generations_from_elsewhere_are_scored_by_the_task(gauntlet: Callable[..., tuple[int, str, str]], folder: Path):
    tasks = folder / 'tasks.yaml'
    tasks.write_text(json.dumps({'icl_tasks': [entry(folder, 'written_sums')]}))
    requests, answers = folder / 'requests.jsonl', folder / 'answers.jsonl'

    assert gauntlet('export', '--tasks', tasks, '--out', requests)[0] == 0
    asked = [json.loads(line) for line in requests.read_text().splitlines()]
    assert [request['max_new_tokens'] for request in asked] == [8] * len(SUMS)
    assert [request['stop'] for request in asked] == [['\n']] * len(SUMS)
    with answers.open('w') as file:
        for request in asked:
            gold = SUMS[request['row']]['choices'][SUMS[request['row']]['gold']]
            key = {name: request[name] for name in ('task', 'num_shots', 'row')}
            file.write(json.dumps({**key, 'text': f'{gold}\nand more'}) + '\n')

    assert gauntlet('run', '--tasks', tasks, '--outputs', answers, '--out', folder / 'out')[0] == 0
    # The strict filter takes the first character, the flexible one the last two.
    metrics = json.loads((folder / 'out' / 'results.json').read_text())['tasks']['written_sums/0-shot']['metrics']
    golds = [row['choices'][row['gold']] for row in SUMS]
    assert metrics['exact_match,strict']['value'] == sum(len(gold) == 1 for gold in golds) / len(SUMS)
    assert metrics['exact_match,flexible']['value'] == sum(len(gold) == 2 for gold in golds) / len(SUMS)
