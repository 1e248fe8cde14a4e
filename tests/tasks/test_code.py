"""Code evaluation: rows, prompts, where completions end, sampling and pass@k."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from clustered_items import item
from programs import sandbox

from llmfoundry_gauntlet.config.settings import decode_settings
from llmfoundry_gauntlet.engine.decoding import GenerationDecoder, OngoingGeneration
from llmfoundry_gauntlet.errors import DataError
from llmfoundry_gauntlet.evaluation.inputs import load_data
from llmfoundry_gauntlet.evaluation.run import prepare_evaluation
from llmfoundry_gauntlet.evaluation.suite import load_suite
from llmfoundry_gauntlet.metrics.metrics import compute_metric, passes_at, task_score
from llmfoundry_gauntlet.scoring.code.programs import CPP, JAVASCRIPT, PYTHON
from llmfoundry_gauntlet.scoring.text import cut_at_stops
from llmfoundry_gauntlet.tasks.encode import Encoder
from llmfoundry_gauntlet.types import GenerateRequest, Generation, ItemKey, ItemResult, Sampling, StopRule

ROW = {
    'task_id': 'T/0',
    'prompt': '\ndef f(x):\n    """Next."""\n',
    'entry_point': 'f',
    'canonical_solution': '    return x + 1\n\n',
    'test': 'def check(candidate):\n    assert candidate(1) == 2\n',
    'test_inputs': ['(1,)'],
    'test_outputs': ['2'],
    'language': 'python',
}
ENTRY = {'label': 't', 'dataset_uri': 'rows.jsonl', 'num_fewshot': [0], 'icl_task_type': 'code_evaluation'}
ENDS = [f'\n{chr(code)}' for code in range(33, 127) if chr(code).isalnum() or chr(code) in '#`']


def task(**keys):
    return load_suite([{**ENTRY, **keys}]).tasks[0]


def read(write_jsonl, tmp_path, *rows, **keys):
    write_jsonl('rows.jsonl', rows)
    return task(**keys).read(tmp_path).examples


def test_white_space_in_rows_is_kept(write_jsonl, tmp_path):
    (example,) = read(write_jsonl, tmp_path, ROW)
    assert (example.content.prompt, example.content.solution) == (ROW['prompt'], ROW['canonical_solution'])
    assert example.content.pairs == (('(1,)', '2'),) and example.content.language == PYTHON
    assert task().prompt(example).text == ROW['prompt']


@pytest.mark.parametrize(
    ('changed', 'facts'),
    [
        ({'rule': 'io_pairs', 'test_inputs': [], 'test_outputs': []}, 'test_inputs io_pairs'),
        ({'language': 'rust'}, "language 'rust' python c++ javascript"),
        ({'test_inputs': []}, '0 test_inputs 1 test_outputs'),
        ({'test': ''}, 'test'),
        ({'entry_point': None}, 'entry_point'),
        ({'test_inputs': '(1,)'}, 'test_inputs'),
    ],
)
def test_errors_in_rows_name_line_and_key(changed, facts, write_jsonl, tmp_path):
    keys = {'rule': changed['rule']} if 'rule' in changed else {}
    with pytest.raises(DataError, match=r'rows\.jsonl:1: ') as raised:
        read(write_jsonl, tmp_path, {**ROW, **changed}, **keys)
    assert all(word in str(raised.value) for word in facts.split())


@pytest.mark.parametrize(
    ('keys', 'expected'),
    [
        ({}, Sampling(temperature=1.0, top_p=0.95, top_k=40, seed=1234)),  # Composer's
        (
            {'temperature': 0.2, 'top_p': 1.0, 'top_k': 0, 'generation_kwargs': {'seed': 7}},
            Sampling(temperature=0.2, top_p=1.0, top_k=0, seed=7),
        ),
        ({'temperature': 0}, Sampling()),  # the most probable tokens
    ],
)
def test_sampling_is_composers_unless_the_task_says_otherwise(keys: dict[str, Any], expected: Sampling):
    assert task(**keys).sampling(None) == expected


@pytest.mark.parametrize(
    ('keys', 'num_samples'),
    [
        ({'num_beams': 5}, 5),  # the former name
        ({'num_beams': 5, 'generations_per_sample': 3}, 3),
    ],
)
def test_the_number_of_programs_has_a_former_name(keys: dict[str, int], num_samples: int):
    assert task(**keys).num_samples == num_samples


def test_each_sample_is_an_item_of_its_own(write_jsonl, tmp_path, character_tokenizer):
    sandbox()
    write_jsonl('rows.jsonl', [ROW, ROW])
    tasks = [{**ENTRY, 'generations_per_sample': 3, 'pass_at_k': [1, 2]}]
    data = load_data(decode_settings({'tasks': tasks, 'data_root': str(tmp_path)}))
    prepared = prepare_evaluation(data, Encoder(character_tokenizer), max_seq_len=200)
    generated = [key for key in prepared.items if not key.is_gold]
    assert [(key.row, key.sample) for key in generated] == list(itertools.product(range(2), range(3)))
    requests = prepared.generate_requests
    assert {request.max_new_tokens for request in requests} == {100}  # half of what there is
    assert all(request.verbatim and request.stops.program is not None for request in requests)

    # Program n of row n is right.
    wrong, good = ('    return x\n', '    return x + 1\n')
    outputs = [Generation(key=key, text=good if key.sample == key.row else wrong) for key in generated]
    results = prepared.results(outputs)
    assert [result.score for result in results.values()] == [1, 0, 0, 0, 1, 0]
    assert {result.reason for result in results.values()} == {None, 'call 1: the result is not the expected one'}

    metrics = task(pass_at_k=[1, 2], num_beams=3).metrics()
    measures = task_score('t/0-shot', metrics, [*results.values()]).metrics
    assert {name: measure.value for name, measure in measures.items()} == pytest.approx(
        {
            'InContextLearningCodeEvalAccuracy': 1 / 3,
            'TruncatedShare': None,
            'PassAt1': 1 / 3,
            'PassAt2': 1 - 1 / 3,  # one of the three pairs has no right program
            'GoldBitsPerByte': None,  # of no likelihood
        }
    )


RESTATED = '\ndef f(x):\n    return g(x)\n\n\ndef g(x):\n    return x + 1\n'


@pytest.mark.parametrize(
    ('language', 'text', 'kept'),
    [
        (PYTHON, '    return 1\n\nprint(f())\n', '    return 1\n\n'),
        (PYTHON, '    return 1\n# done\nprint', '    return 1\n# done\n'),  # a comment may stand between two lines
        (PYTHON, '    return 1\n```\n', '    return 1\n'),
        (PYTHON, '    x = [\n]\n    return x\n9', '    x = [\n]\n    return x\n'),
        (PYTHON, '  x = a .b\n', '  x = a .b\n'),  # decoded verbatim
        (PYTHON, '    s = """\na\n"""\n    return s\n@g', '    s = """\na\n"""\n    return s\n'),
        (PYTHON, f'{RESTATED}\n\ndef h(x):\n    pass', RESTATED + '\n\n'),
        (PYTHON, f'Here:\n```python{RESTATED}```\nDone.', f'Here:\n```python{RESTATED}```\nDone.'),
        (CPP, '  return 1;\n}\n\nint main() {\n}\n', '  return 1;\n}'),
        (CPP, '  if (a) {\nreturn 1;\n}\nreturn f(2);\n}\nint g() {}', '  if (a) {\nreturn 1;\n}\nreturn f(2);\n}'),
        (
            CPP,
            '  // }\n  /* } */ char c = \'}\'; string s = "}\\"}";\n}\n//',
            '  // }\n  /* } */ char c = \'}\'; string s = "}\\"}";\n}',
        ),
        (CPP, 'int f(int x) {\n  return x;\n}\nint main() {\n}', 'int f(int x) {\n  return x;\n}\n'),
        (CPP, '```cpp\n  return 1;\n}\n```\nDone.', '```cpp\n  return 1;\n}\n```\nDone.'),
        (JAVASCRIPT, '  return `}${a}`\n}\n\nconst g', '  return `}${a}`\n}'),
        (JAVASCRIPT, 'function f(x) {\n  return x\n}\nf(1)\nf(2)', 'function f(x) {\n  return x\n}\n'),
    ],
)
def test_completions_end_at_stops(language, text, kept):
    prompt = {PYTHON: ROW['prompt'], CPP: 'int f(int x) {\n', JAVASCRIPT: 'const f = (x) => {\n'}[language]
    example = task().parse({**ROW, 'language': language, 'prompt': prompt})
    rule = task().own_stops(task().stops([example]), example)
    assert cut_at_stops(text, rule) == kept
    assert written(text, rule) == (kept, len(kept) < len(text))


SENTENCE = 'Rome is a city\n'
NO_PROGRAMS = {
    'sentences': SENTENCE * 40,
    'one line without an end': 'Rome is a city. ' * 100,
    'one line after white space': ' Rome is a city.' * 100,
    'sums': '1+2= 3\n4-1 = 3\n' * 20,
    'letters': 'A: x y\nB:\n\n' * 20,
    'sentences after a bracket': f' Rome (see\n{SENTENCE * 40}',
}
POSSIBLE_PROGRAMS = [
    (PYTHON, f'{SENTENCE * 15}```python\ndef f(x):\n'),
    (PYTHON, f'```\n{SENTENCE * 40}'),
    (PYTHON, f'"""\n{SENTENCE * 40}'),
    (PYTHON, 'Rome:\n\n' * 5 + 'def f(x):\n    return x\n'),
    (PYTHON, 'x = 1\ny[0] += 2\ny.sort()\nfor z in y:\n    x += z\n' * 10 + 'return x\n'),
    (PYTHON, 'names = {\n' + '1: "one",\n' * 20 + '}\nreturn names[x]\n'),
    (PYTHON, '# Rome is a city\n' * 40),
    (PYTHON, '    x += 1\n' * 200),
    (CPP, 'int y = x;\ny++;\n' * 20),
    (CPP, f'/*\n{SENTENCE * 40}'),
    (JAVASCRIPT, 'let y = x\ny++;\n' * 20),
    (JAVASCRIPT, '// Rome is a city\n' * 40),
]


@pytest.mark.parametrize('language', [PYTHON, CPP, JAVASCRIPT])
@pytest.mark.parametrize('kind', NO_PROGRAMS)
def test_a_completion_that_is_plainly_no_program_ends_early(language, kind):
    text = NO_PROGRAMS[kind]
    rule = stops_of(task(), language)
    kept, is_done = written(text, rule)
    assert is_done and 15 < len(kept) <= 1000 and text.startswith(kept)
    assert cut_at_stops(text, rule) == text  # an answer from elsewhere is scored as it is
    assert written(text, stops_of(replace(task(), apply_chat_template=True), language)) == (text, False)


def test_sentences_after_another_function_end_a_completion():
    kept, is_done = written(f'def g(x):\n    return x\n\n{SENTENCE * 40}', stops_of(task(), PYTHON))
    assert is_done and kept.count(SENTENCE) == 16


@pytest.mark.parametrize(('language', 'text'), POSSIBLE_PROGRAMS)
def test_a_completion_that_may_become_a_program_goes_on(language, text):
    assert written(text, stops_of(task(), language)) == (text, False)


def stops_of(asked, language: str) -> StopRule:
    """Return where generations end for a problem in a language."""
    example = asked.parse({**ROW, 'language': language})
    return asked.own_stops(asked.stops([example]), example)


@pytest.mark.parametrize('language', [PYTHON, CPP, JAVASCRIPT])
def test_stops_of_the_reference_are_composers_in_all_languages(language):
    reference = replace(task(), semantics='reference')
    example = task().parse({**ROW, 'language': language})
    rule = reference.own_stops(reference.stops([example]), example)
    assert sorted(rule.strings) == sorted(ENDS) and rule.program is None


class Letters:
    """A token for each letter; decoding drops spaces before a full stop, unless told not to."""

    def __call__(self, text, **_):
        return {'input_ids': [1]}

    def decode(self, ids, clean_up_tokenization_spaces=True, **_):
        text = ''.join(map(chr, ids))
        return text.replace(' .', '.') if clean_up_tokenization_spaces else text


def written(text: str, rule: StopRule) -> tuple[str, bool]:
    """Decode a completion letter by letter; return what is kept of it, and whether it ends early."""
    request = GenerateRequest(
        key=ItemKey('t', 0), context=np.zeros(1, np.int32), max_new_tokens=3000, stops=rule, verbatim=True
    )
    ongoing = OngoingGeneration(request, GenerationDecoder(Letters()))
    for letter in text:
        ongoing.add(ord(letter))
        if ongoing.is_done:
            break
    return cut_at_stops(ongoing.result().text, rule), ongoing.is_done


def results_of(*passed: list[int]) -> list[ItemResult]:
    return [
        item(row, float(credit), sample=n) for row, credits in enumerate(passed) for n, credit in enumerate(credits)
    ]


@pytest.mark.parametrize('k', [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_all_choices_of_k_completions(k: int):
    passed = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
    shares = [
        sum(any(chosen) for chosen in itertools.combinations(credits, k))
        / len(list(itertools.combinations(credits, k)))
        for credits in passed
    ]
    (metric,) = passes_at([k])
    with_too_few_completions = results_of(*passed, [1] * (k - 1))
    assert compute_metric(metric, with_too_few_completions).value is None or k == 1
    found = compute_metric(metric, results_of(*passed))
    assert found.value == pytest.approx(sum(shares) / 4, abs=1e-12)
    centre = sum(shares) / 4
    assert found.standard_error == pytest.approx(
        (sum((share - centre) ** 2 for share in shares) / 3 / 4) ** 0.5, abs=1e-12
    )


def test_pass_at_1_is_one_number_the_mean_over_problems_also_where_programs_are_missing():
    """Of five problems 4, 4, 4, 3, 1 programs are scored; 4, 3, 0, 0, 0 pass: over programs it were 7 / 16."""
    scores_of_problems = [
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, None],
        [0.0, None, None, None],
    ]
    shares = [1.0, 0.75, 0.0, 0.0, 0.0]
    mean = 0.35
    error = (sum((share - mean) ** 2 for share in shares) / 4 / 5) ** 0.5
    results = [
        item(row, score, sample=sample)
        for row, scores in enumerate(scores_of_problems)
        for sample, score in enumerate(scores)
    ]

    metrics = task(pass_at_k=[1], num_beams=4).metrics()
    measures = task_score('t/0-shot', metrics, results, allow_missing=True).metrics

    for name in ('InContextLearningCodeEvalAccuracy', 'PassAt1'):
        assert measures[name].value == pytest.approx(mean)
        assert measures[name].standard_error == pytest.approx(error)
