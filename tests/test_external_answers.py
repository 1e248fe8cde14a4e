"""Requests for other engines, and their answers, scored by the code that scores our own."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import loaded_by, run_cli
from recorded_runs import NAMES, accuracy_of, problems_of, record_of, write_answers

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import prepare_evaluation
from llmfoundry_gauntlet.results.external import read_answers, request_lines, score_answers
from llmfoundry_gauntlet.tasks.encode import Encoder

ROWS = {
    'sums': ('language_modeling', [{'context': f'{i}+{i}=', 'continuation': f'{2 * i}'} for i in range(4)]),
    'colours': (
        'multiple_choice',
        [{'query': f'Colour {i}?', 'choices': ['red', 'deep blue'], 'gold': i % 2} for i in range(4)],
    ),
    'pronouns': (
        'schema',
        [{'context_options': ['the cup', 'the jug'], 'continuation': f'held {i}.', 'gold': i % 2} for i in range(2)],
    ),
    'riddles': (
        'generation_task_with_answers',
        [{'context': f'Twice {i}?', 'answer': str(2 * i), 'chain_of_thought': f'{i} and {i}'} for i in range(4)],
    ),
}


@pytest.fixture
def settings(write_jsonl, tmp_path: Path) -> dict[str, Any]:
    """Return settings with a task of each type with one shot, and a gauntlet over them."""
    tasks = []
    for label, (kind, rows) in ROWS.items():
        write_jsonl(f'{label}.jsonl', rows)
        task = {'label': label, 'dataset_uri': f'{label}.jsonl', 'num_fewshot': [1], 'icl_task_type': kind}
        if label == 'riddles':
            task['cot_delimiter'] = ' # '
        tasks.append(task)
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': tasks}))
    benchmarks = [{'name': label, 'num_fewshot': 1} for label in ROWS]
    gauntlet = {'categories': [{'name': 'all', 'benchmarks': benchmarks}]}
    return {'tasks': str(tmp_path / 'tasks.yaml'), 'gauntlet': gauntlet, 'data_root': str(tmp_path)}


def data_of(settings: dict[str, Any]) -> Any:
    return load_data(decode_settings(settings))


def requests_of(settings: dict[str, Any], encoder: Encoder | None = None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in request_lines(data_of(settings), encoder)]


def right_answers(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a right answer to each request: text if required, else log-probabilities that favour the gold choice."""
    answers = []
    for request in requests_of(settings):
        name = {key: request[key] for key in NAMES}
        row = ROWS[request['task']][1][request['row']]
        if request['choices'] is None:
            answers.append(name | {'text': f'some thought # {row["answer"]} apples\nTwice 9? # 18'})
        elif len(request['choices']) == 1:
            answers.append(name | {'logprobs': [-0.5], 'is_argmax': True})
        else:
            logprobs = [-9.0, -9.0]
            logprobs[row['gold']] = -1.0
            answers.append(name | {'logprobs': logprobs})
    return answers


def scored(settings: dict[str, Any], path: Path, **options: Any) -> Any:
    return score_answers(data_of(settings), read_answers(path), **options)


@pytest.fixture
def requests(settings: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the request of each task and row."""
    return {(request['task'], request['row']): request for request in requests_of(settings)}


GENERATION_KEYS = ['stop', 'max_new_tokens', 'temperature', 'top_p', 'top_k', 'seed']


def test_there_is_a_request_for_each_item_and_all_have_the_same_keys(requests):
    keys = [*NAMES, 'prompt', 'choices', *GENERATION_KEYS]

    assert len(requests) == 14
    assert all(list(request) == keys for request in requests.values())


def test_a_request_for_log_probabilities_has_the_prompt_and_the_choices(requests):
    request = requests['sums', 0]

    prompt = request['prompt']
    assert prompt in [f'{shot}+{shot}= {2 * shot}\n0+0=' for shot in (1, 2, 3)]
    assert request == {
        'task': 'sums',
        'num_shots': 1,
        'file': None,
        'row': 0,
        'variant': None,
        'sample': 0,
        'prompt': prompt,
        'choices': [' 0'],
        **dict.fromkeys(GENERATION_KEYS),
    }


def test_a_request_of_multiple_choice_has_all_choices(requests):
    assert requests['colours', 0]['choices'] == [' red', ' deep blue']


def test_a_request_of_a_schema_task_has_a_prompt_for_each_choice(requests):
    assert [prompt[-7:] for prompt in requests['pronouns', 0]['prompt']] == ['the cup', 'the jug']
    assert requests['pronouns', 1]['choices'] == [' held 1.', ' held 1.']


def test_a_request_for_a_generation_says_how_to_generate(requests):
    riddle = requests['riddles', 0]

    assert riddle['prompt'] in [f'Twice {shot}? {shot} and {shot} # {2 * shot}\nTwice 0?' for shot in (1, 2, 3)]
    assert riddle['choices'] is None
    assert riddle['stop'] == []
    assert riddle['seed'] is None
    assert riddle['temperature'] == 0.0
    assert riddle['top_p'] == 1.0
    assert riddle['top_k'] == 0
    # Half of the characters of the longest answer, one for the rest of the division, and 10.
    assert riddle['max_new_tokens'] == len('3 and 3 # 6') // 2 + 1 + 10


def test_token_limits_follow_the_longest_right_answer_of_a_category(write_jsonl, tmp_path: Path, character_tokenizer):
    """bos and the answer's characters; without a tokenizer half of the characters."""
    answers = ('aa', 'a', 'bbbbb', 'b')
    rows = [{'context': f'{answer}?', 'answer': answer, 'category': answer[0]} for answer in answers]
    write_jsonl('rows.jsonl', rows)
    task = {
        'label': 'letters',
        'dataset_uri': 'rows.jsonl',
        'num_fewshot': [0],
        'icl_task_type': 'generation_task_with_answers',
        'has_categories': True,
    }
    settings = {'tasks': [task], 'data_root': str(tmp_path)}

    def token_limits(encoder: Encoder | None) -> list[int]:
        limits = {request['row']: request['max_new_tokens'] for request in requests_of(settings, encoder)}
        return [limits[row] for row in range(4)]

    assert token_limits(Encoder(character_tokenizer)) == [3, 3, 6, 6]
    assert token_limits(None) == [1, 1, 3, 3]


@pytest.mark.parametrize('fewshot', ['reference', 'fixed'])
def test_exported_prompts_equal_those_of_an_evaluation(
    settings: dict[str, Any], tmp_path: Path, character_tokenizer, fewshot: str
):
    """By the recorded digests, for every task type."""
    settings = {**settings, 'fewshot': fewshot}
    prepared = prepare_evaluation(data_of(settings), Encoder(character_tokenizer), max_seq_len=4096)

    evaluation = scored(settings, write_answers(tmp_path, right_answers(settings)))

    digests = {result.key: result.prompt_sha256 for results in evaluation.results.values() for result in results}
    assert digests == {key: item.prompt_sha256 for key, item in prepared.items.items() if not key.is_gold}


def test_right_answers_in_any_order_are_right(settings: dict[str, Any], tmp_path: Path):
    reversed_answers = right_answers(settings)[::-1]

    evaluation = scored(settings, write_answers(tmp_path, reversed_answers))

    assert [score.accuracy.value for score in evaluation.scores.values()] == [1, 1, 1, 1]
    assert evaluation.composites.categories['all'].value == 1


def test_a_generation_is_scored_up_to_its_stop_with_all_metrics(settings: dict[str, Any], tmp_path: Path):
    evaluation = scored(settings, write_answers(tmp_path, right_answers(settings)))

    riddle = evaluation.results['riddles/1-shot'][3]
    assert riddle.text == 'some thought # 6 apples'
    assert riddle.answer == '6 apples'
    assert riddle.num_tokens is None
    metrics = evaluation.scores['riddles/1-shot'].metrics
    assert metrics['StrictMatch'].value == 0
    assert metrics['NumericMatch'].value == 1
    assert metrics['TruncatedShare'].reason == 'TruncatedShare is not known of 4 of 4 items'


def test_wrong_answers_are_wrong(settings: dict[str, Any], tmp_path: Path):
    wrong_answers = right_answers(settings)
    for answer in wrong_answers:
        answer['is_argmax'] = False
        if 'text' in answer:
            answer['text'] = 'no # idea'
        else:
            answer['logprobs'].reverse()

    evaluation = scored(settings, write_answers(tmp_path, wrong_answers))

    assert [score.accuracy.value for score in evaluation.scores.values()] == [0, 0, 0, 0]


def test_numbers_of_tokens_make_means_of_sums(settings: dict[str, Any], tmp_path: Path):
    """As an evaluation does; without them the sums decide."""
    answers = right_answers(settings)
    for answer in answers:
        if answer['task'] == 'colours':
            answer['logprobs'] = [-3.0, -4.0]
            answer['num_tokens'] = [1, 2] if answer['row'] else None

    evaluation = scored(settings, write_answers(tmp_path, answers))

    predictions = [result.predicted for result in evaluation.results['colours/1-shot']]
    assert predictions == [0, 1, 1, 1]


def answers_with_colours_changed(settings: dict[str, Any], fields: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Return right answers of which the first to `colours` (red, deep blue) has other fields, and its line."""
    answers = right_answers(settings)
    index = next(index for index, answer in enumerate(answers) if answer['task'] == 'colours')
    answers[index] |= fields
    return answers, index + 1


@pytest.mark.parametrize(
    ('fields', 'wrong'),
    [
        # Probabilities.
        ({'logprobs': [0.7, 0.3]}, 'logprobs[0] is 0.7'),
        ({'logprobs': [0.0, 1.0]}, 'logprobs[1] is 1'),
        ({'logprobs': [2e-5, 3e-4]}, 'logprobs[0] is 2e-05'),  # of long choices
        # Losses.
        ({'logprobs': [1.5, 0.25]}, 'logprobs[0] is 1.5'),
        ({'logprobs': [-2.0, 0.01]}, 'logprobs[1] is 0.01'),
        # No numbers of a model.
        ({'logprobs': [None, math.inf]}, 'logprobs[1] is inf'),
        ({'logprobs': [10**400, -1]}, 'logprobs[0]: is '),
        # More tokens than characters.
        ({'logprobs': [-1, -2], 'num_tokens': [1, 10**12]}, f'num_tokens[1] is {10**12}; allowed: '),
        ({'logprobs': [-1, -2], 'num_tokens': [10**30, 1]}, f'num_tokens[0] is {10**30}; allowed: '),
        ({'logprobs': [-1, -2], 'num_tokens': [3, 500]}, 'num_tokens[1] is 500; allowed: '),
    ],
)
def test_numbers_that_no_model_can_give_are_errors(settings: dict[str, Any], tmp_path: Path, fields, wrong: str):
    answers, line = answers_with_colours_changed(settings, fields)

    problems = problems_of(data_of(settings), write_answers(tmp_path, answers))

    (problem,) = [problem for problem in problems if 'no answer' not in problem]
    assert problem.startswith(f'line {line}: ')
    assert wrong in problem


@pytest.mark.parametrize(
    'fields',
    [
        # Certain answers, rounded.
        {'logprobs': [4e-7, 2e-7]},
        {'logprobs': [5e-4, -9.0]},
        {'logprobs': [0, 0.0]},
        # Tokens of a byte, then also the space, and one besides.
        {'logprobs': [-1, -2], 'num_tokens': [3, 9]},
        {'logprobs': [-1, -2], 'num_tokens': [4, 11]},
    ],
)
def test_numbers_at_the_limits_of_what_a_model_gives_are_scored(settings: dict[str, Any], tmp_path: Path, fields):
    answers, _ = answers_with_colours_changed(settings, fields)

    evaluation = scored(settings, write_answers(tmp_path, answers))

    assert len(evaluation.results['colours/1-shot']) == 4


def test_the_probability_of_a_continuation_is_no_log_probability(settings: dict[str, Any], tmp_path: Path):
    answers = right_answers(settings)
    answers[2]['logprobs'] = [0.25]
    (problem,) = problems_of(data_of(settings), write_answers(tmp_path, answers))
    assert problem.startswith('line 3: sums/1-shot, row 2: logprobs[0] is 0.25; ')


def test_texts_may_answer_choices_and_continuations(settings: dict[str, Any], tmp_path: Path):
    texts = {
        'colours': [' Red.', 'deep blue', 'reddish', 'I do not know'],
        'sums': [' 0 and so on', '2', '6', ''],
    }
    answers = []
    for answer in right_answers(settings):
        if answer['task'] in texts:
            name = {key: answer[key] for key in NAMES}
            answer = {**name, 'text': texts[answer['task']][answer['row']]}
        answers.append(answer)

    evaluation = scored(settings, write_answers(tmp_path, answers))

    colours = evaluation.results['colours/1-shot']
    assert [result.predicted for result in colours] == [0, 1, None, None]
    assert [result.score for result in colours] == [1.0, 1.0, 0.0, 0.0]
    assert (colours[2].text, colours[2].reason) == ('reddish', 'the generation starts with none of the choices')
    sums = evaluation.results['sums/1-shot']
    assert [result.score for result in sums] == [1.0, 1.0, 0.0, 0.0]


def test_every_wrong_line_is_named(settings: dict[str, Any], tmp_path: Path):
    right = []  # beside those of the items that the wrong lines are about
    for answer in right_answers(settings):
        if answer['row'] > (2 if answer['task'] == 'colours' else 0):
            right.append(answer)
    name = {'task': 'colours', 'num_shots': 1, 'row': 0}
    wrong = [
        ('{oops', 'malformed JSON: Expecting property name enclosed in double quotes at column 2'),
        ('[1]', 'is a list; allowed: a mapping'),
        (name, 'has neither text nor logprobs'),
        ({**name, 'text': 7}, 'text: is 7; allowed: text'),
        ({**name, 'logprobs': 'x'}, "logprobs: is 'x'; allowed: a list"),
        ({**name, 'logprobs': [True, 1]}, 'logprobs[0]: is True; allowed: a number'),
        ({'num_shots': 1, 'row': 0, 'text': ''}, "the key 'task' is missing"),
        ({**name, 'row': 1.5, 'text': ''}, 'row: is 1.5; allowed: a whole number'),
        ('{"task": "colours", "num_shots": 1, "row": 0, "row": 1, "text": ""}', "duplicate key 'row'; allowed: once"),
    ]
    unfit = [
        ({**name, 'row': 99, 'text': ''}, 'colours/1-shot, row 99 is not an item of these tasks'),
        ({**name, 'num_shots': 2, 'text': ''}, 'colours/2-shot, row 0 is not an item of these tasks'),
        (right[0], 'sums/1-shot, row 1 was answered already at line 1'),
        ({**name, 'logprobs': [-1.0]}, 'colours/1-shot, row 0: has 1 logprobs; allowed: 2, one per choice'),
        ({**name, 'row': 1, 'logprobs': [-1, -2], 'num_tokens': [1]}, 'colours/1-shot, row 1: num_tokens is [1]; '),
        (
            {**name, 'row': 2, 'logprobs': [-1, -2], 'num_tokens': [2, 0]},
            'colours/1-shot, row 2: num_tokens is [2, 0]; ',
        ),
        ({**name, 'task': 'sums', 'logprobs': [-1.0]}, 'sums/1-shot, row 0: has logprobs without is_argmax'),
        ({**name, 'task': 'pronouns', 'text': 'x'}, 'pronouns/1-shot, row 0: has no logprobs; a text cannot be scored'),
        ({**name, 'task': 'riddles', 'logprobs': [-1.0]}, 'riddles/1-shot, row 0: has no text; a generation is '),
    ]
    lines = [*right, *(line for line, _ in (*wrong, *unfit))]

    problems = problems_of(data_of(settings), write_answers(tmp_path, lines))

    first_wrong, first_unfit = len(right) + 1, len(right) + len(wrong) + 1
    facts_of_wrong = [f'line {first_wrong + index}: {fact}' for index, (_, fact) in enumerate(wrong)]
    facts_of_unfit = [f'line {first_unfit + index}: {fact}' for index, (_, fact) in enumerate(unfit)]
    # Lines that are no answers are known when all of the file is read.
    for problem, fact in zip(problems, [*facts_of_unfit, *facts_of_wrong], strict=True):
        assert problem.startswith(fact)


@pytest.mark.parametrize(
    'encoded',
    [
        gzip.compress,
        lambda content: codecs.BOM_UTF8 + content,
        lambda content: gzip.compress(codecs.BOM_UTF8 + content),
        lambda content: content.replace(b'\n', b'\r\n\r\n'),
        lambda content: content.rstrip(),
    ],
    ids=['gzip', 'byte order mark', 'both', 'CRLF and empty lines', 'no end of the last line'],
)
def test_a_file_of_answers_may_be_encoded_like_a_data_file(
    settings: dict[str, Any], tmp_path: Path, encoded: Callable[[bytes], bytes]
):
    path = write_answers(tmp_path, right_answers(settings))
    path.write_bytes(encoded(path.read_bytes()))
    evaluation = scored(settings, path)
    assert [score.accuracy.value for score in evaluation.scores.values()] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ('content', 'problem'),
    [
        (b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n', 'is a Git LFS pointer'),
        (gzip.compress(b'{"task": "sums"}\n' * 99, mtime=0)[:-9], 'is a damaged gzip file'),
        (b'PAR1....', 'begins with'),
    ],
)
def test_a_file_that_holds_no_answers_is_one_problem(
    settings: dict[str, Any], tmp_path: Path, content: bytes, problem: str
):
    """Rather than a line for every item that has no answer."""
    path = tmp_path / 'answers.jsonl'
    path.write_bytes(content)
    problems = problems_of(data_of(settings), path)
    assert problems[-1].startswith(f'line  {problem}')
    assert not any('no answer' in line for line in problems)


def test_answers_may_come_through_a_pipe(settings: dict[str, Any], tmp_path: Path):
    content = write_answers(tmp_path, right_answers(settings)).read_bytes()
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(gzip.compress(content),))
    writer.start()
    evaluation = scored(settings, pipe)
    writer.join()
    assert evaluation.scores['sums/1-shot'].accuracy.value == 1


@pytest.mark.parametrize('number', [None, math.nan, -math.inf])
def test_an_answer_that_is_not_finite_is_unscored(settings: dict[str, Any], tmp_path: Path, number: float | None):
    answers = right_answers(settings)
    of_colours = next(answer for answer in answers if answer['task'] == 'colours')
    of_colours['logprobs'][0] = number

    evaluation = scored(settings, write_answers(tmp_path, answers))

    statuses = [result.status for result in evaluation.results['colours/1-shot']]
    assert statuses.count('unscored') == 1


def test_a_generation_may_hold_half_a_surrogate_pair(settings: dict[str, Any], tmp_path: Path):
    """A server that cuts a text in the middle of a sign writes one; it is an answer all the same."""
    answers = right_answers(settings)
    with_text = next(answer for answer in answers if answer.get('text'))
    with_text['text'] += ' \ud83d'
    evaluation = scored(settings, write_answers(tmp_path, answers))
    statuses = {result.status for results in evaluation.results.values() for result in results}
    assert statuses == {'scored'}


@pytest.mark.parametrize('semantics', ['corrected', 'reference'])
def test_rows_of_one_task_may_have_different_numbers_of_choices(write_jsonl, tmp_path: Path, semantics: str):
    """As in ARC, where chance is the mean of one in four, three and five."""
    choices = {
        'query': ['red', 'blue', 'green', 'grey', 'black'],
        'context_options': ['One', 'Two', 'Three', 'No', 'So'],
    }
    tasks = []
    for kind, key in (('multiple_choice', 'query'), ('schema', 'context_options')):
        more = {'query': 'Hue?'} if kind == 'multiple_choice' else {'continuation': 'is it'}
        name = 'choices' if kind == 'multiple_choice' else key
        write_jsonl(f'{kind}.jsonl', [{**more, name: choices[key][:n], 'gold': n - 1} for n in (4, 3, 5)])
        tasks.append({'label': kind, 'dataset_uri': f'{kind}.jsonl', 'num_fewshot': [1], 'icl_task_type': kind})
    settings = {'tasks': tasks, 'data_root': str(tmp_path), 'semantics': semantics}
    requests = requests_of(settings)
    assert [len(request['choices']) for request in requests] == [4, 3, 5] * 2
    # The last choice is preferred, which is right, except in the third row.
    answers = []
    for request in requests:
        sign = 1.0 if request['row'] < 2 else -1.0
        logprobs = [sign * index - 9 for index in range(len(request['choices']))]
        answers.append({**{key: request[key] for key in NAMES}, 'logprobs': logprobs})
    (tmp_path / 'tasks.yaml').write_text(json.dumps({'icl_tasks': tasks}))
    words = ('--tasks', tmp_path / 'tasks.yaml', '--data-root', tmp_path, '--semantics', semantics)
    out = tmp_path / 'out'
    assert run_cli('run', '--outputs', write_answers(tmp_path, answers), *words, '--out', out) == 0
    record = record_of(out)
    for task in ('multiple_choice/1-shot', 'schema/1-shot'):
        assert accuracy_of(record, task)['value'] == pytest.approx(2 / 3)
        assert record['tasks'][task]['chance'] == pytest.approx((1 / 4 + 1 / 3 + 1 / 5) / 3)
    assert run_cli('report', out, '--out', tmp_path / 'page.html') == 0


def test_missing_answers_are_errors_unless_allowed(settings: dict[str, Any], tmp_path: Path):
    answers = []
    for answer in right_answers(settings):
        if answer['task'] in ('sums', 'colours') or (answer['task'], answer['row']) == ('riddles', 2):
            answers.append(answer)
    path = write_answers(tmp_path, answers)
    assert problems_of(data_of(settings), path) == [
        'pronouns/1-shot, row 0-1: there is no answer',
        'riddles/1-shot, row 0-1, 3: there is no answer',
    ]
    evaluation = scored(settings, path, allow_missing=True)
    scores = evaluation.scores
    assert scores['riddles/1-shot'].accuracy.value == 1 and scores['riddles/1-shot'].num_unscored == 3
    assert scores['pronouns/1-shot'].accuracy.reason == '2 of 2 items unscored: there is no answer'
    assert scores['sums/1-shot'].accuracy.value == 1
    reason = evaluation.composites.categories['all'].reason
    assert 'riddles/1-shot (3 of 4 items unscored)' in reason


def test_the_command_line_exports_and_scores_without_torch_or_composer(
    settings: dict[str, Any], tmp_path: Path, capsys
):
    common = ['--tasks', settings['tasks'], '--data-root', settings['data_root']]
    requests, out = tmp_path / 'requests.jsonl', tmp_path / 'out'
    assert loaded_by('export', *common, '--out', requests) == []
    assert len(requests.read_text().splitlines()) == 14
    assert run_cli('export', *common, '--out', requests) == 2
    assert '--overwrite' in capsys.readouterr().err
    answers = write_answers(tmp_path, right_answers(settings))
    assert loaded_by('run', '--outputs', answers, *common, '--out', out) == []
    record = json.loads((out / 'results.json').read_text())
    assert record['metrics']['metrics/riddles/1-shot/InContextLearningGenerationExactMatchAccuracy'] == 1
    assert record['model']['name'] == str(answers) and 'scoring' not in record['timing']
    assert len((out / 'samples' / 'riddles_1-shot.jsonl').read_text().splitlines()) == 4
    few = write_answers(tmp_path, right_answers(settings)[:3])
    assert run_cli('run', '--outputs', few, *common, '--out', tmp_path / 'few') == 2
    assert not (tmp_path / 'few').exists()
    assert run_cli('run', '--outputs', few, *common, '--out', tmp_path / 'few', '--allow-missing') == 0
